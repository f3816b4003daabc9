//! HTTP/2 streams: tasks of the worker that accepted the connection, and how long a client may leave one waiting.
//!
//! A client that gives a stream no window takes nothing of its answer, while the connection is alive and well. So that it does
//! not keep the origin's connection for ever, a stream whose client has not taken a whole frame of the body within
//! `idle_timeout` is reset. the body is asked for a frame only when the one before is on its way: the time since the last
//! one was given is the time for which the client has let it wait.

use std::{
    cell::Cell,
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::clock::{Clock, InFlight};

/// Since when a stream waits for its client to take the last frame that its body gave.
#[derive(Debug, Default)]
pub(super) struct Waiting(Cell<Option<Instant>>);

/// Runs a stream as a task of its own.
pub(super) fn spawn<F>(stream: F, clock: &Rc<Clock>, waiting: Rc<Waiting>)
where
    F: Future<Output = ()> + 'static,
{
    tokio::task::spawn_local(Stream {
        stream,
        clock: Rc::clone(clock),
        waiting,
        timer: None,
    });
}

pin_project_lite::pin_project! {
    struct Stream<F> {
        #[pin]
        stream: F,
        clock: Rc<Clock>,
        waiting: Rc<Waiting>,
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for Stream<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let outcome = this.stream.poll(cx);
        let Some(since) = this.waiting.0.get() else {
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
                tracing::debug!("a stream is reset: its client takes nothing of the answer");
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

pin_project_lite::pin_project! {
    /// A response body that ends the request when it ends.
    pub(super) struct Tracked<B> {
        #[pin]
        body: B,
        in_flight: InFlight,
        waiting: Option<Rc<Waiting>>,
    }
}

impl<B: Body> Tracked<B> {
    pub(super) fn new(body: B, in_flight: InFlight, waiting: Option<Rc<Waiting>>) -> Self {
        if body.is_end_stream() {
            in_flight.finished();
        }
        Self {
            body,
            in_flight,
            waiting,
        }
    }
}

impl<B: Body> Body for Tracked<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        if let Some(waiting) = this.waiting {
            waiting.0.set(None);
        }
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        let is_last = !matches!(frame, Some(Ok(_))) || this.body.is_end_stream();
        if is_last {
            this.in_flight.finished();
        }
        if let (Some(waiting), Some(Ok(frame))) = (this.waiting, &frame) {
            let length = frame.data_ref().map_or(0, Buf::remaining);
            this.in_flight.clock().answer_passed(length);
            waiting.0.set(Some(Instant::now()));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
