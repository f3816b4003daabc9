//! A request that somebody describes instead of sending it: what `explain` and `/check` decide about.

use std::net::IpAddr;

use bytes::Bytes;
use http::request::Parts;

use super::{
    body_source::{BodyBounds, BodySource, MAX_READ_AHEAD_BYTES},
    refusals::BROKEN_BODY,
    request_context::RequestContext,
};
use crate::{listener::tls::Presented, response::Refusal};

/// A request that somebody describes.
#[derive(Debug)]
pub struct Described {
    /// Its head, as it would have been read.
    pub head: Parts,
    /// Who is connected: the socket's peer, or the one that a PROXY header names.
    pub peer: IpAddr,
    /// The certificate that the client shows in the handshake.
    pub certificate: Option<Presented>,
    /// Its body.
    pub body: DescribedBody,
}

/// The body of a request that somebody describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DescribedBody {
    /// There is none, or nobody says.
    #[default]
    Absent,
    /// All of it.
    Whole(Vec<u8>),
    /// It is longer than is ever read before a decision.
    TooLong,
    /// It broke off, or is not framed as its head announces.
    Broken,
}

impl DescribedBody {
    /// The whole of it, where it is known.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match self {
            DescribedBody::Whole(bytes) => Some(bytes),
            DescribedBody::Absent | DescribedBody::TooLong | DescribedBody::Broken => None,
        }
    }

    /// The least number of bytes that it has.
    fn min_bytes(&self) -> u64 {
        match self {
            DescribedBody::Absent => 0,
            DescribedBody::Whole(bytes) => bytes.len() as u64,
            DescribedBody::TooLong => MAX_READ_AHEAD_BYTES as u64 + 1,
            DescribedBody::Broken => 1,
        }
    }
}

/// A described body, as a decision reads it.
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

    async fn read_ahead(&mut self, _: &RequestContext<'_>) -> Result<Option<Bytes>, Refusal> {
        let whole = self.body.bytes();
        let whole = whole.filter(|bytes| bytes.len() <= MAX_READ_AHEAD_BYTES);
        Ok(whole.map(Bytes::copy_from_slice))
    }
}
