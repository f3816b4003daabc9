//! How long a connection may take: for a request head, between requests, and for the client to read.
//!
//! One timer for the life of a connection, re-armed only when it fires: a request moves a deadline (a store to a cell)
//! and touches no timer wheel.
//!
//! ```text
//! accept ──head──▶ request ──(handler's business)──▶ response ends ──idle──▶ first byte ──head──▶ request …
//!        header_timeout                                       idle_timeout           header_timeout
//! ```

use std::{
    cell::Cell,
    future::Future,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep};

/// What a connection waits for, and since when.
#[derive(Debug)]
pub(super) struct Clock {
    header_timeout: Duration,
    idle_timeout: Duration,
    phase: Cell<Phase>,
    /// When the phase began; `None` until somebody has to wait in it.
    since: Cell<Option<Instant>>,
    in_flight: Cell<u32>,
    frames: Cell<bool>,
    body_left_unread: Cell<bool>,
    /// What is written when a head does not arrive in time; HTTP/2 has no such answer.
    timeout_answer: Cell<&'static [u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A connection is open and nothing has arrived.
    Fresh,
    /// Some bytes of a request head have arrived.
    Head,
    /// A response ended and nothing has arrived since.
    Idle,
}

impl Clock {
    pub(super) fn new(header_timeout: Duration, idle_timeout: Duration) -> Self {
        Self {
            header_timeout,
            idle_timeout,
            phase: Cell::new(Phase::Fresh),
            since: Cell::new(None),
            in_flight: Cell::new(0),
            frames: Cell::new(false),
            body_left_unread: Cell::new(false),
            timeout_answer: Cell::new(b""),
        }
    }

    pub(super) fn answer_timeout_with(&self, answer: &'static [u8]) {
        self.timeout_answer.set(answer);
    }

    /// A request is in the handler's hands until the guard is dropped; meanwhile nothing is awaited from the client.
    pub(super) fn request(self: &Rc<Self>) -> InFlight {
        self.in_flight.set(self.in_flight.get() + 1);
        InFlight(Rc::clone(self))
    }

    /// Between HTTP/2 requests bytes may be anything, such as a PING: only a request ends the wait for one.
    pub(super) fn bytes_are_frames(&self) {
        self.frames.set(true);
    }

    /// The answer does not wait for the rest of the request, so more of it may arrive while the connection closes.
    pub(super) fn leave_body_unread(&self) {
        self.body_left_unread.set(true);
    }

    fn bytes_arrived(&self) {
        if self.phase.get() != Phase::Head && !self.frames.get() {
            self.phase.set(Phase::Head);
            self.since.set(None);
        }
    }

    /// Until when the wait that begins or goes on now may last; `None` while a request is in the handler's hands.
    fn deadline(&self) -> Option<Instant> {
        if self.in_flight.get() > 0 {
            return None;
        }
        let since = self.since.get().unwrap_or_else(Instant::now);
        self.since.set(Some(since));
        Some(since + self.patience())
    }

    fn patience(&self) -> Duration {
        match self.phase.get() {
            Phase::Idle => self.idle_timeout,
            Phase::Fresh | Phase::Head => self.header_timeout,
        }
    }
}

/// One request in the handler's hands, until its response body has ended.
#[derive(Debug)]
pub(super) struct InFlight(Rc<Clock>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let left = self.0.in_flight.get() - 1;
        self.0.in_flight.set(left);
        if left == 0 {
            self.0.phase.set(Phase::Idle);
            self.0.since.set(Some(Instant::now()));
        }
    }
}

/// A socket that ends by itself when the client lets it wait for too long.
#[derive(Debug)]
pub(super) struct TimedIo<S> {
    io: S,
    /// Bytes that were read before the protocol was known.
    prefix: Bytes,
    clock: Rc<Clock>,
    timer: Option<Pin<Box<Sleep>>>,
    /// Runs while the client takes nothing of what there is to write.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Runs while the rest of a request that nobody reads is discarded, and how many bytes may still be.
    lingering: Option<(Pin<Box<Sleep>>, usize)>,
    is_shut: bool,
}

impl<S: Read + Write + Unpin> TimedIo<S> {
    pub(super) fn new(io: S, clock: Rc<Clock>) -> Self {
        Self {
            io,
            prefix: Bytes::new(),
            clock,
            timer: None,
            stalled: None,
            lingering: None,
            is_shut: false,
        }
    }

    /// Gives bytes back, to be read again first.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        self.prefix = bytes;
    }

    /// Ready when the client has let us wait for too long. While a request is in the handler's hands the timer only
    /// stays armed: nothing else may run this task when the response has ended and the connection falls idle.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = self.clock.deadline();
            let timer = self.timer.get_or_insert_with(|| {
                let until = deadline.unwrap_or_else(|| Instant::now() + self.clock.idle_timeout);
                Box::pin(tokio::time::sleep_until(until))
            });
            // armed for a head, it may be later than an idle connection should last
            let latest = match deadline {
                None if self.clock.header_timeout > self.clock.idle_timeout => {
                    Some(Instant::now() + self.clock.idle_timeout)
                }
                deadline => deadline,
            };
            if let Some(latest) = latest
                && timer.deadline() > latest
            {
                timer.as_mut().reset(latest);
            }
            ready!(timer.as_mut().poll(cx));
            match deadline {
                Some(deadline) if timer.deadline() >= deadline => return Poll::Ready(()),
                Some(deadline) => timer.as_mut().reset(deadline),
                None => timer
                    .as_mut()
                    .reset(Instant::now() + self.clock.idle_timeout),
            }
        }
    }

    /// The client takes nothing: end the connection when that lasts.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let timer = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(self.clock.idle_timeout)));
        timer
            .as_mut()
            .poll(cx)
            .map(|()| io::ErrorKind::TimedOut.into())
    }

    /// A socket that is closed with bytes unread is reset, and the reset may overtake the answer (RFC 9112 §9.6): take
    /// what still comes, for a moment and up to a bound.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        const PATIENCE: Duration = Duration::from_secs(1);
        const MAX_BYTES: usize = 512 * 1024;
        let (timer, left) = self
            .lingering
            .get_or_insert_with(|| (Box::pin(tokio::time::sleep(PATIENCE)), MAX_BYTES));
        loop {
            let mut discarded = [0; 4096];
            let mut buf = ReadBuf::new(&mut discarded);
            match Pin::new(&mut self.io).poll_read(cx, buf.unfilled()) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() && *left > buf.filled().len() => {
                    *left -= buf.filled().len();
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return timer.as_mut().poll(cx),
            }
        }
    }

    fn wrote(
        &mut self,
        outcome: Poll<io::Result<usize>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        match outcome {
            Poll::Ready(outcome) => {
                self.stalled = None;
                Poll::Ready(outcome)
            }
            Poll::Pending => self.poll_stalled(cx).map(Err),
        }
    }
}

impl<S: Read + Write + Unpin> Read for TimedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.prefix.is_empty() {
            let here = this.prefix.len().min(buf.remaining());
            buf.put_slice(&this.prefix[..here]);
            this.prefix.advance(here);
            return Poll::Ready(Ok(()));
        }
        if let Poll::Ready(outcome) = Pin::new(&mut this.io).poll_read(cx, buf) {
            this.clock.bytes_arrived();
            return Poll::Ready(outcome);
        }
        ready!(this.poll_overdue(cx));
        if this.clock.phase.get() == Phase::Head {
            let answer = this.clock.timeout_answer.get();
            // best effort: a few bytes to a client that may no longer be there
            let _ = Pin::new(&mut this.io).poll_write(cx, answer);
        }
        // to the protocol above it is as if the client had closed
        Poll::Ready(Ok(()))
    }
}

impl<S: Read + Write + Unpin> Write for TimedIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write(cx, buf);
        self.wrote(outcome, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.wrote(outcome, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.is_shut {
            return Poll::Ready(Ok(()));
        }
        if this.lingering.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
        }
        if this.clock.body_left_unread.get() {
            ready!(this.poll_linger(cx));
        }
        this.is_shut = true;
        Poll::Ready(Ok(()))
    }
}
