//! Runs a connection of either HTTP version to its end, or until it is idle.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

use super::{clock::Clock, drain::ConnectionGuard};

/// Polls a connection to its end. Starts its graceful shutdown on a drain and, for HTTP/2, after
/// too long an idle time (RFC 9113 §6.8). `None` if it must be parked instead.
pub(super) async fn run<C>(
    mut connection: Pin<&mut C>,
    ticket: &ConnectionGuard,
    clock: &Clock,
    is_time: impl Fn(&ConnectionGuard) -> bool,
    graceful_shutdown: impl Fn(Pin<&mut C>),
) -> Option<C::Output>
where
    C: Future,
{
    let mut registered = false;
    let mut asked = false;
    poll_fn(move |cx| {
        if !asked && is_time(ticket) {
            asked = true;
            clock.leave();
            graceful_shutdown(connection.as_mut());
        }
        // once, and again for the second stage of the drain, as the first takes the waker
        if !registered || !asked && ticket.is_closing() {
            ticket.wake_with(cx.waker());
            registered = true;
        }
        let mut outcome = connection.as_mut().poll(cx);
        if outcome.is_pending() && !asked && clock.is_leaving() {
            asked = true;
            graceful_shutdown(connection.as_mut());
            outcome = connection.as_mut().poll(cx);
        }
        if outcome.is_pending() && !asked && clock.is_parked() {
            return Poll::Ready(None);
        }
        outcome.map(Some)
    })
    .await
}
