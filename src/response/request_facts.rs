//! What a response depends on in its request.

use http::{HeaderMap, HeaderValue, Version, header::CONTENT_TYPE};

/// Request data that a response depends on.
#[derive(Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    /// A response to HEAD has no body.
    pub is_head: bool,
    /// `Connection` exists only in HTTP/1.
    pub version: Version,
    /// Returned in `X-Request-Id` and in the body.
    pub request_id: Option<&'a HeaderValue>,
    /// The kind of gRPC call, which has its own form of refusal.
    pub grpc: Option<Grpc>,
}

/// The kind of gRPC that a request uses, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grpc {
    /// `application/grpc` with any message format.
    Native,
    /// `application/grpc-web`, used by browsers.
    Web,
}

impl Grpc {
    /// Reads the request's content type with one header lookup.
    pub fn of(headers: &HeaderMap) -> Option<Grpc> {
        let kind = headers.get(CONTENT_TYPE)?.as_bytes();
        let rest = kind
            .get(..16)
            .filter(|start| start.eq_ignore_ascii_case(b"application/grpc"))
            .map(|_| &kind[16..])?;
        let ends = |rest: &[u8]| rest.first().is_none_or(|byte| b"+; \t".contains(byte));
        match rest.get(..4) {
            _ if ends(rest) => Some(Grpc::Native),
            Some(web) if web.eq_ignore_ascii_case(b"-web") && ends(&rest[4..]) => Some(Grpc::Web),
            _ => None,
        }
    }
}
