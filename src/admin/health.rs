//! Liveness and readiness.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use http::{Response, StatusCode};

use super::text;

/// Whether a load balancer should send traffic to this gateway. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    state: Arc<AtomicU8>,
}

/// Phase of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Not every listener is bound yet.
    Starting = 0,
    /// Serving.
    Ready = 1,
    /// Finishing requests in flight.
    Draining = 2,
}

impl Readiness {
    /// Changes to `state`.
    pub fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// The current state.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Starting,
            1 => State::Ready,
            _ => State::Draining,
        }
    }
}

impl State {
    /// Its name.
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
