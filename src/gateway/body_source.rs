//! The view of a request body that a decision needs, independent of the body's origin.

use bytes::Bytes;

use super::request_context::RequestContext;
use crate::response::Refusal;

/// Bytes read before the decision if a field of the body keys a limit. The fields of a longer body
/// are unknown.
pub(super) const MAX_READ_AHEAD_BYTES: usize = 256 * 1024;

/// The size limits of a body.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyBounds {
    pub(super) max_bytes: u64,
    /// Bounds each message of a gRPC call instead of the whole body.
    pub(super) per_message: bool,
}

/// The body of a request.
pub(super) trait BodySource {
    /// Sets the bounds of the route. Call it once, before the other methods.
    fn bound(&mut self, bounds: BodyBounds);

    /// The fault visible before the first byte: an announced length above the bound.
    fn fault(&self) -> Option<Refusal>;

    fn is_empty(&self) -> bool;

    /// Reads the whole body; `None` if it is longer than `most` bytes. An error is the answer to an
    /// unreadable body. May wait for the client.
    async fn read_ahead(
        &mut self,
        request: &RequestContext<'_>,
        most: usize,
    ) -> Result<Option<Bytes>, Refusal>;

    /// Passes on this beginning in place of the first `replaced` bytes of a body that was read
    /// whole.
    fn replace_beginning(&mut self, beginning: Bytes, replaced: usize);
}
