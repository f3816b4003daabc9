//! Whether the process lives, and whether it wants traffic.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use http::{Response, StatusCode};

use super::text;

/// What a load balancer should do with this gateway. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    state: Arc<AtomicU8>,
}

/// Where the process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Not every listener is bound yet.
    Starting = 0,
    /// Serving.
    Ready = 1,
    /// Finishing what is in flight.
    Draining = 2,
}

impl Readiness {
    /// Moves on to `state`.
    pub fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Where the process is.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Starting,
            1 => State::Ready,
            _ => State::Draining,
        }
    }
}

impl State {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Ready => "ready",
            State::Draining => "draining",
        }
    }
}

pub(super) fn live() -> Response<String> {
    text("application/json", "{\"status\":\"ok\"}\n".to_owned())
}

pub(super) fn ready(state: State) -> Response<String> {
    let mut response = text(
        "application/json",
        format!("{{\"status\":\"{}\"}}\n", state.as_str()),
    );
    if state != State::Ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}
