//! A described request, as `explain` and `/check` decide it. Nobody sends it.

use std::net::IpAddr;

use bytes::Bytes;
use http::request::Parts;

use super::{
    body_source::{BodyBounds, BodySource, MAX_READ_AHEAD_BYTES},
    refusals::BROKEN_BODY,
    request_context::RequestContext,
};
use crate::{listener::tls::PresentedChain, response::Refusal};

/// A described request.
#[derive(Debug)]
pub struct Described {
    /// The head, as the listener would parse it.
    pub head: Parts,
    /// The peer: of the socket, or from a PROXY header.
    pub peer: IpAddr,
    /// The client certificate of the TLS handshake.
    pub certificate: Option<PresentedChain>,
    /// The body.
    pub body: DescribedBody,
}

/// The body of a described request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DescribedBody {
    /// None, or unknown.
    #[default]
    Absent,
    /// The complete body.
    Whole(Vec<u8>),
    /// Longer than any body read before a decision.
    TooLong,
    /// Truncated, or framed differently from its head.
    Broken,
}

impl DescribedBody {
    /// The whole body, if known.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match self {
            DescribedBody::Whole(bytes) => Some(bytes),
            DescribedBody::Absent | DescribedBody::TooLong | DescribedBody::Broken => None,
        }
    }

    /// The least length that it can have, in bytes.
    fn min_bytes(&self) -> u64 {
        match self {
            DescribedBody::Absent => 0,
            DescribedBody::Whole(bytes) => bytes.len() as u64,
            DescribedBody::TooLong => MAX_READ_AHEAD_BYTES as u64 + 1,
            DescribedBody::Broken => 1,
        }
    }
}

/// A described body, as a [`BodySource`].
#[derive(Debug)]
pub(super) struct DescribedSource<'b> {
    body: &'b DescribedBody,
    bounds: Option<BodyBounds>,
}

impl<'b> DescribedSource<'b> {
    pub(super) fn new(body: &'b DescribedBody) -> Self {
        Self { body, bounds: None }
    }
}

impl BodySource for DescribedSource<'_> {
    fn bound(&mut self, bounds: BodyBounds) {
        self.bounds = Some(bounds);
    }

    fn fault(&self) -> Option<Refusal> {
        let bounds = self.bounds.filter(|bounds| !bounds.per_message);
        let is_too_large = bounds.is_some_and(|bounds| self.body.min_bytes() > bounds.max_bytes);
        match self.body {
            _ if is_too_large => Some(Refusal::BodyTooLarge),
            DescribedBody::Broken => Some(BROKEN_BODY),
            _ => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.body.min_bytes() == 0
    }

    async fn read_ahead(
        &mut self,
        _: &RequestContext<'_>,
        most: usize,
    ) -> Result<Option<Bytes>, Refusal> {
        let whole = self.body.bytes();
        let whole = whole.filter(|bytes| bytes.len() <= most);
        Ok(whole.map(Bytes::copy_from_slice))
    }

    /// Nobody passes it on.
    fn replace_beginning(&mut self, _: Bytes, _: usize) {}
}
