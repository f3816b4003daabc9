//! What a decision needs of a request's body, wherever the body comes from.

use bytes::Bytes;

use super::request_context::RequestContext;
use crate::response::Refusal;

/// Bytes of a body that are read before the decision, where a limit is keyed by one of its fields. The fields of a larger body
/// are unclear.
pub(super) const MAX_READ_AHEAD_BYTES: usize = 256 * 1024;

/// How long a body may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyBounds {
    pub(super) max_bytes: u64,
    /// The bound holds for each message of a gRPC call instead of the whole body.
    pub(super) per_message: bool,
}

/// The body of a request.
pub(super) trait BodySource {
    /// Holds the body to the bounds of its route. Called once, before everything below.
    fn bound(&mut self, bounds: BodyBounds);

    /// What is wrong with the body before a byte of it is read: its announced length is above the bound.
    fn fault(&self) -> Option<Refusal>;

    fn is_empty(&self) -> bool;

    /// The whole body; `None` where it is longer than [`MAX_READ_AHEAD_BYTES`]. The error is the answer to a body that cannot be
    /// read. May wait for the client.
    async fn read_ahead(&mut self, request: &RequestContext<'_>) -> Result<Option<Bytes>, Refusal>;
}
