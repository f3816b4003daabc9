//! Liveness and readiness.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use http::{Response, StatusCode};

use super::text_response::text;

/// Whether a load balancer should send traffic to this gateway. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    state: Arc<AtomicU8>,
}

/// Phase of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReadinessState {
    /// Not every listener is bound yet.
    Starting = 0,
    /// Serving.
    Ready = 1,
    /// Finishing requests in flight.
    Draining = 2,
}

impl Readiness {
    /// Changes to `state`.
    pub fn set(&self, state: ReadinessState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// The current state.
    pub fn state(&self) -> ReadinessState {
        match self.state.load(Ordering::Acquire) {
            0 => ReadinessState::Starting,
            1 => ReadinessState::Ready,
            _ => ReadinessState::Draining,
        }
    }
}

impl ReadinessState {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            ReadinessState::Starting => "starting",
            ReadinessState::Ready => "ready",
            ReadinessState::Draining => "draining",
        }
    }
}

pub(super) fn live() -> Response<String> {
    text("application/json", "{\"status\":\"ok\"}\n".to_owned())
}

pub(super) fn ready(state: ReadinessState) -> Response<String> {
    let mut response = text(
        "application/json",
        format!("{{\"status\":\"{}\"}}\n", state.as_str()),
    );
    if state != ReadinessState::Ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}
