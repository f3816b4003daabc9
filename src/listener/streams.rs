//! HTTP/2 streams: one task each on the worker of the connection, and a bound on stalled clients.
//!
//! A client that grants a stream no window receives nothing, while its connection stays healthy.
//! The stream would hold its origin connection forever. So it is reset if the client does not
//! accept a whole body frame within `idle_timeout`. The body is polled for a frame only once the
//! previous one has been sent. The time since the last frame is thus the time that the client has
//! stalled.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker, ready},
};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::clock::{Clock, RequestInFlight};
use crate::body::{AnswerBody, BodyPiece};

/// State of a stream, shared with its body.
#[derive(Debug, Default)]
pub(super) struct StreamState {
    /// When the wait began for the client to accept the last body frame.
    since: Cell<Option<Instant>>,
    /// Set when its [`Marker`] has been sent.
    marker_left: Cell<bool>,
    /// The task that waits for the marker.
    waker: RefCell<Option<Waker>>,
}

/// An empty frame queued after the received part of a response that broke off. The h2 crate
/// discards its queue when a stream is reset. It drops the marker once everything before it has
/// been written.
#[derive(Debug)]
pub(super) struct Marker(Rc<StreamState>);

impl Drop for Marker {
    fn drop(&mut self) {
        self.0.marker_left.set(true);
        let waker = self.0.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A piece of a response on its way to the client.
#[derive(Debug)]
pub(super) enum Portion {
    Bytes(Bytes),
    Marker(#[expect(dead_code, reason = "kept for its drop")] Marker),
}

impl Buf for Portion {
    fn remaining(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Marker(_) => 0,
        }
    }

    fn chunk(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Marker(_) => &[],
        }
    }

    fn advance(&mut self, count: usize) {
        if let Self::Bytes(bytes) = self {
            bytes.advance(count);
        }
    }
}

/// Spawns a task for a stream.
pub(super) fn spawn<F>(stream: F, clock: &Rc<Clock>, waiting: Rc<StreamState>)
where
    F: Future<Output = ()> + 'static,
{
    tokio::task::spawn_local(StreamTask {
        stream,
        clock: Rc::clone(clock),
        waiting,
        timer: None,
    });
}

pin_project_lite::pin_project! {
    struct StreamTask<F> {
        #[pin]
        stream: F,
        clock: Rc<Clock>,
        waiting: Rc<StreamState>,
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let outcome = this.stream.poll(cx);
        let Some(since) = this.waiting.since.get() else {
            return outcome;
        };
        if outcome.is_ready() {
            return outcome;
        }
        let deadline = since + this.clock.idle_timeout();
        let timer = this
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                tracing::debug!("the stream is reset: its client does not read the response");
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

/// A response body that ends the request when it ends, for the HTTP library of the connection.
///
/// If it breaks off, the bytes before the failure are sent first. hyper and the h2 crate discard
/// buffered bytes when a body fails, and a client that receives nothing assumes that its request
/// never began.
pub(super) struct Tracked<B: AnswerBody> {
    body: B,
    in_flight: RequestInFlight,
    /// HTTP/2 only.
    waiting: Option<Rc<StreamState>>,
    /// Why the body broke off.
    broken: Option<B::Error>,
}

// no field is pinned
impl<B: AnswerBody> Unpin for Tracked<B> {}

impl<B: AnswerBody> Tracked<B> {
    pub(super) fn new(
        body: B,
        in_flight: RequestInFlight,
        waiting: Option<Rc<StreamState>>,
    ) -> Self {
        // HTTP/2 calls `head_sent`: the client may have reset the stream
        if waiting.is_none() && body.has_ended() {
            in_flight.finished();
        }
        Self {
            body,
            in_flight,
            waiting,
            broken: None,
        }
    }

    /// HTTP/2: the request counts as answered, even if the client cancels the rest (a watch, a
    /// search as you type).
    pub(super) fn head_sent(&self) {
        self.in_flight.finished();
    }
}

impl<B: AnswerBody> Body for Tracked<B> {
    type Data = Portion;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Portion>, B::Error>>> {
        let this = self.get_mut();
        if this.broken.is_some() {
            let has_left = match &this.waiting {
                Some(stream) => stream.poll_marker(cx),
                // the socket writer polls this again once it has written everything
                None if this.in_flight.clock().is_holding_back() => Poll::Pending,
                None => Poll::Ready(()),
            };
            return has_left.map(|()| this.broken.take().map(Err));
        }
        if let Some(waiting) = &this.waiting {
            waiting.since.set(None);
        }
        let piece = match ready!(this.body.poll_piece(cx)).transpose() {
            Ok(piece) => piece,
            Err(error) => {
                this.in_flight.finished();
                this.broken = Some(error);
                let Some(stream) = &this.waiting else {
                    // hyper writes its buffer when this is pending
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                };
                stream.since.set(Some(Instant::now()));
                let marker = Portion::Marker(Marker(Rc::clone(stream)));
                return Poll::Ready(Some(Ok(Frame::data(marker))));
            }
        };
        if piece.is_none() || this.body.has_ended() {
            this.in_flight.finished();
        }
        if let (Some(waiting), Some(piece)) = (&this.waiting, &piece) {
            this.in_flight.clock().answer_passed(piece.data_bytes());
            waiting.since.set(Some(Instant::now()));
        }
        Poll::Ready(piece.map(|piece| match piece {
            BodyPiece::Data(data) => Ok(Frame::data(Portion::Bytes(data))),
            BodyPiece::Trailers(trailers) => Ok(Frame::trailers(trailers)),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.broken.is_none() && self.body.has_ended()
    }

    fn size_hint(&self) -> SizeHint {
        match self.body.exact_bytes() {
            Some(bytes) => SizeHint::with_exact(bytes),
            None => SizeHint::default(),
        }
    }
}

impl StreamState {
    /// Ready when the marker, and everything before it, has been sent.
    fn poll_marker(&self, cx: &Context<'_>) -> Poll<()> {
        if self.marker_left.get() {
            return Poll::Ready(());
        }
        self.waker.replace(Some(cx.waker().clone()));
        Poll::Pending
    }
}
