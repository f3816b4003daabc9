//! Errors that end a response body early.

use crate::{listener::inbound::InboundError, upstream::body::BodyInterruption};

/// A response body ended early; the gateway then closes the client's connection.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The server's connection failed.
    #[error(transparent)]
    Interrupted(#[from] BodyInterruption),
    /// The request body failed while the echo server was returning it.
    #[error(transparent)]
    Inbound(#[from] InboundError),
    /// A limit on costs with `cut` has nothing left, and the framing has no room for an error.
    #[error("a limit on costs is spent")]
    Spent,
}

impl BodyError {
    /// The fault of the request body, if it caused the error.
    pub(super) fn of_request(&self) -> Option<&InboundError> {
        match self {
            Self::Inbound(error) => Some(error),
            Self::Interrupted(BodyInterruption::RequestBody(error)) => error.downcast_ref(),
            Self::Interrupted(BodyInterruption::Server(_)) | Self::Spent => None,
        }
    }
}
