//! A socket with timeouts: for a request head, for idle connections, and for clients that do not
//! read.
//!
//! One timer per connection, re-armed only when it fires. A request moves the deadline (a store to
//! a cell) without touching the timer wheel.
//!
//! A client that closes its side after the request (`nc`, `printf … | openssl s_client`) looks like
//! one that has left. It gets its response if that comes soon. A longer wait would hold the
//! resources of clients that really left: their slots, and a connection to the origin.

use std::{
    future::Future,
    io,
    mem::MaybeUninit,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use arrayvec::ArrayVec;
use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

use super::{
    abuse::AbuseReason, clock::Clock, drain::ConnectionGuard, interim::Interim,
    stream::ClientStream,
};

/// How long a response may take for a client that has closed its side.
const HALF_CLOSED_PATIENCE: Duration = Duration::from_secs(2);

/// A socket and its [`Clock`].
#[derive(Debug)]
pub(super) struct TimedIo {
    io: ClientStream,
    /// Bytes read before the protocol was known.
    prefix: Bytes,
    clock: Rc<Clock>,
    /// Interim responses, written between two messages of the protocol above.
    interim: Rc<Interim>,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether the timer is early enough for a connection that becomes idle now.
    is_armed_for_idling: bool,
    /// Runs while the client does not read the pending bytes.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Runs while the rest of an unread request is discarded; with the bytes that may still be.
    lingering: Option<(Pin<Box<Sleep>>, usize)>,
    is_shut: bool,
    /// Runs while a client that has closed its side waits for its response.
    half_closed: Option<Pin<Box<Sleep>>>,
}

impl TimedIo {
    pub(super) fn new(io: ClientStream, clock: Rc<Clock>, interim: Rc<Interim>) -> Self {
        Self {
            io,
            prefix: Bytes::new(),
            clock,
            interim,
            timer: None,
            is_armed_for_idling: false,
            stalled: None,
            lingering: None,
            is_shut: false,
            half_closed: None,
        }
    }

    /// Removes the timeouts.
    pub(super) fn into_stream(self) -> ClientStream {
        self.io
    }

    /// Returns bytes, to be read again first.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        self.prefix = bytes;
    }

    /// Whether unread bytes are left.
    pub(super) fn has_unread(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// Reads available bytes, a few KiB at most. Returns 0 at the end of input, or if the
    /// connection must end and `is_first` says that no data would be lost.
    pub(super) fn poll_read_some(
        &mut self,
        ticket: &ConnectionGuard,
        is_first: bool,
        into: &mut BytesMut,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        ticket.wake_with(cx.waker());
        if ticket.should_end() && is_first {
            return Poll::Ready(Ok(0));
        }
        let mut some = [MaybeUninit::uninit(); 4 * 1024];
        let mut buf = ReadBuf::uninit(&mut some);
        ready!(Pin::new(self).poll_read(cx, &mut buf))?;
        into.extend_from_slice(buf.filled());
        Poll::Ready(Ok(buf.filled().len()))
    }

    /// Ready when a deadline of the client has passed. The timer stays armed while the handler has
    /// a request: no other event would run this task once the response has ended and the connection
    /// is idle.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        /// Timer interval while a request takes long.
        const NOW_AND_THEN: Duration = Duration::from_secs(8);
        loop {
            let deadline = self.clock.deadline();
            let soon = || Instant::now() + self.clock.first_idle_look();
            let timer = self.timer.get_or_insert_with(|| {
                self.is_armed_for_idling = deadline.is_none();
                Box::pin(tokio::time::sleep_until(deadline.unwrap_or_else(soon)))
            });
            // the timer may have been armed for an event later than the first check of an idle
            // connection
            let latest = match deadline {
                None if self.is_armed_for_idling => None,
                None => Some(soon()),
                deadline => deadline,
            };
            if let Some(latest) = latest {
                if timer.deadline() > latest {
                    timer.as_mut().reset(latest);
                }
                self.is_armed_for_idling = deadline.is_none();
            }
            ready!(timer.as_mut().poll(cx));
            match deadline {
                Some(deadline) if timer.deadline() >= deadline => return Poll::Ready(()),
                Some(deadline) => timer.as_mut().reset(deadline),
                None => {
                    let pause = self.clock.idle_timeout().min(NOW_AND_THEN);
                    timer.as_mut().reset(Instant::now() + pause);
                }
            }
        }
    }

    /// Ready when the client has not read for too long.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let timer = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(self.clock.idle_timeout())));
        ready!(timer.as_mut().poll(cx));
        self.clock.settle(Err(AbuseReason::Stalled));
        Poll::Ready(io::ErrorKind::TimedOut.into())
    }

    /// Discards further input, up to a time and a byte bound. Closing a socket with unread bytes
    /// resets it, and the reset may overtake the response (RFC 9112 §9.6).
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        const PATIENCE: Duration = Duration::from_secs(1);
        const MAX_BYTES: usize = 512 * 1024;
        let (timer, left) = self
            .lingering
            .get_or_insert_with(|| (Box::pin(tokio::time::sleep(PATIENCE)), MAX_BYTES));
        loop {
            let mut discarded = [0; 4096];
            let mut buf = ReadBuf::new(&mut discarded);
            match Pin::new(&mut self.io).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() && *left > buf.filled().len() => {
                    *left -= buf.filled().len();
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return timer.as_mut().poll(cx),
            }
        }
    }

    /// Closes a connection whose response broke off. It sends no close_notify, which would mark the
    /// response as complete, and no reset, which could overtake sent bytes.
    pub(super) fn poll_break_off(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.lingering.is_none() {
            // an error means that the client is gone
            let _ = ready!(Pin::new(self.io.socket_mut()).poll_shutdown(cx));
        }
        self.poll_linger(cx)
    }

    /// The client has closed its side: ready when no response is pending for it.
    fn poll_half_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.clock.answers_a_whole_request() {
            return Poll::Ready(());
        }
        let timer = self
            .half_closed
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(HALF_CLOSED_PATIENCE)));
        timer.as_mut().poll(cx)
    }

    fn poll_make_way(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.interim.poll_make_way(&mut self.io, cx)
    }

    /// Applies the stall timeout: the client must accept some bytes regularly.
    fn timed<T>(
        &mut self,
        outcome: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        match outcome {
            Poll::Ready(outcome) => {
                self.stalled = None;
                Poll::Ready(outcome)
            }
            Poll::Pending => self.poll_stalled(cx).map(Err),
        }
    }
}

/// Joins a head and a small body: the copy costs less than a vectored write.
fn gathered<'a>(
    bufs: &[io::IoSlice<'_>],
    room: &'a mut ArrayVec<u8, 2048>,
) -> Option<&'a ArrayVec<u8, 2048>> {
    let length: usize = bufs.iter().map(|buf| buf.len()).sum();
    if bufs.len() < 2 || length > room.capacity() {
        return None;
    }
    for buf in bufs {
        room.try_extend_from_slice(buf).ok()?;
    }
    Some(room)
}

impl AsyncRead for TimedIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.prefix.is_empty() {
            let here = this.prefix.len().min(buf.remaining());
            buf.put_slice(&this.prefix[..here]);
            this.prefix.advance(here);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        if this.half_closed.is_none()
            && let Poll::Ready(outcome) = Pin::new(&mut this.io).poll_read(cx, buf)
        {
            let count = buf.filled().len() - before;
            if count > 0 || outcome.is_err() {
                this.clock.bytes_arrived();
                let cut = this
                    .clock
                    .cut()
                    .map_or(Ok(()), |cut| Err(io::Error::other(cut)));
                return Poll::Ready(outcome.and(cut));
            }
            ready!(this.poll_half_closed(cx));
            return Poll::Ready(Ok(()));
        }
        if this.half_closed.is_some() {
            ready!(this.poll_half_closed(cx));
            return Poll::Ready(Ok(()));
        }
        ready!(this.poll_overdue(cx));
        if this.clock.park() || this.clock.leave() {
            // the connection's task acts on it; the next wait is a new one
            ready!(this.poll_overdue(cx));
        }
        let answer = this.clock.timeout_answer();
        if !answer.is_empty() {
            // best effort: the client may be gone
            let _ = Pin::new(&mut this.io).poll_write(cx, answer);
        }
        // the protocol above sees a client that closed
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TimedIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.clock.holds_back(true);
        let outcome = match self.poll_make_way(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.io).poll_write(cx, buf),
            blocked => blocked.map_ok(|()| 0),
        };
        self.timed(outcome, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.clock.holds_back(true);
        let outcome = match self.poll_make_way(cx) {
            Poll::Ready(Ok(())) => match gathered(bufs, &mut ArrayVec::new()) {
                Some(small) => Pin::new(&mut self.io).poll_write(cx, small),
                None => Pin::new(&mut self.io).poll_write_vectored(cx, bufs),
            },
            blocked => blocked.map_ok(|()| 0),
        };
        self.timed(outcome, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    /// TLS may still buffer written bytes.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let outcome = match this.interim.poll_send(&mut this.io, cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut this.io).poll_flush(cx),
            blocked => blocked,
        };
        let held_back = self.clock.holds_back(outcome.is_pending());
        if held_back && self.half_closed.is_some() && !self.clock.answers_a_whole_request() {
            // everything is written: wake the task that watches for a client that closes its side.
            // Once, since a tunnel flushes on every turn
            cx.waker().wake_by_ref();
        }
        self.timed(outcome, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.is_shut {
            return Poll::Ready(Ok(()));
        }
        if this.lingering.is_none() {
            let outcome = Pin::new(&mut this.io).poll_shutdown(cx);
            ready!(this.timed(outcome, cx))?;
        }
        if this.clock.body_is_left_unread() {
            ready!(this.poll_linger(cx));
        }
        this.is_shut = true;
        Poll::Ready(Ok(()))
    }
}
