//! Why the body of a response ends before its end.

use std::convert::Infallible;

use crate::{listener::inbound::InboundError, upstream::body::Interrupted};

/// Why a response body ended before its end; the client's connection ends with it.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The server's side of it.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The request's side, while the built-in server was sending it back.
    #[error(transparent)]
    Inbound(#[from] InboundError),
}

impl BodyError {
    /// What is wrong with the request, where that is why the response ends.
    pub(super) fn of_request(&self) -> Option<&InboundError> {
        match self {
            Self::Inbound(error) => Some(error),
            Self::Interrupted(Interrupted::RequestBody(error)) => error.downcast_ref(),
            Self::Interrupted(Interrupted::Server(_)) => None,
        }
    }
}

impl From<Infallible> for BodyError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}
