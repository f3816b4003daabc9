//! Refusals for gRPC clients: a Trailers-Only response (gRPC over HTTP/2, "Responses"). It is a
//! head with `:status` 200 that carries the status of the call and ends the stream.
//!
//! A plain 429 would reach the application as UNAVAILABLE without details. Here a limit answers
//! RESOURCE_EXHAUSTED and states the wait in both ways that clients support:
//! `grpc-retry-pushback-ms` (proposal A6) for retry policies, and `google.rpc.RetryInfo` in
//! `grpc-status-details-bin` for applications. RateLimit fields are omitted, because clients read
//! this head as trailers, where they are not allowed.

use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use bytes::{BufMut, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};

use prost::Message as _;

use super::{
    head::X_REQUEST_ID,
    policy::RejectedRequest,
    refusal::Refusal,
    request_facts::{Grpc, RequestFacts},
};

static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
static PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
static DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

const RESOURCE_EXHAUSTED: u8 = 8;
const EXHAUSTED: &str = "rate limit exceeded";

impl Grpc {
    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Grpc::Native => "application/grpc",
            Grpc::Web => "application/grpc-web",
        })
    }

    /// RESOURCE_EXHAUSTED with the exact wait, or without one if waiting does not help.
    pub(super) fn too_many_requests(
        self,
        denial: &RejectedRequest<'_>,
        asked: &RequestFacts<'_>,
    ) -> Response<Bytes> {
        let mut response = self.refused(RESOURCE_EXHAUSTED, EXHAUSTED, asked);
        let headers = response.headers_mut();
        let wait_ms = denial.retry_after_ns.map(|ns| ns.div_ceil(1_000_000));
        // a negative pushback forbids retries
        let pushback = wait_ms.map_or(-1, |ms| i32::try_from(ms).unwrap_or(i32::MAX));
        headers.insert(&PUSHBACK, HeaderValue::from(pushback));
        if let Some(wait_ms) = wait_ms
            && let Ok(details) = HeaderValue::try_from(details(wait_ms))
        {
            headers.insert(&DETAILS, details);
        }
        response
    }

    pub(super) fn refuse(self, refusal: &Refusal, asked: &RequestFacts<'_>) -> Response<Bytes> {
        self.refused(status_of(refusal), refusal.sentence(), asked)
    }

    /// The trailers that end a call whose response has begun. `None` if the status is part of the
    /// body.
    pub fn trailers(self, refusal: &Refusal) -> Option<HeaderMap> {
        (self == Grpc::Native).then(|| {
            let mut trailers = HeaderMap::with_capacity(2);
            let status = u16::from(status_of(refusal));
            trailers.insert(&GRPC_STATUS, HeaderValue::from(status));
            if let Ok(message) = HeaderValue::from_maybe_shared(percent_encoded(refusal.sentence()))
            {
                trailers.insert(&GRPC_MESSAGE, message);
            }
            trailers
        })
    }

    fn refused(self, status: u8, message: &str, asked: &RequestFacts<'_>) -> Response<Bytes> {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(CONTENT_TYPE, self.content_type());
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(status)));
        if let Ok(message) = HeaderValue::from_maybe_shared(percent_encoded(message)) {
            headers.insert(&GRPC_MESSAGE, message);
        }
        if let Some(id) = asked.request_id {
            headers.insert(&X_REQUEST_ID, id.clone());
        }
        let mut response = Response::new(Bytes::new());
        *response.headers_mut() = headers;
        response
    }
}

/// The gRPC status code. A refusal is UNAVAILABLE (14) only if the client may retry it unchanged.
fn status_of(refusal: &Refusal) -> u8 {
    match refusal {
        Refusal::ClientLeft | Refusal::ConnectionCut => 1,
        Refusal::BadRequest(_) => 3,
        Refusal::RequestTimeout => 4,
        Refusal::BodyTooLarge | Refusal::UriTooLong | Refusal::HeadersTooLarge => {
            RESOURCE_EXHAUSTED
        }
        Refusal::NotFound
        | Refusal::MethodNotAllowed { .. }
        | Refusal::NotImplemented(_)
        | Refusal::Misdirected => 12,
        Refusal::LoopDetected | Refusal::Internal => 13,
        Refusal::UpstreamUnreachable
        | Refusal::UpstreamProtocol
        | Refusal::UpstreamBusy
        | Refusal::Overloaded
        | Refusal::BodyBufferFull
        | Refusal::LimitUnavailable { .. }
        | Refusal::UpstreamBroken { .. }
        | Refusal::UpstreamTimeout => 14,
        Refusal::Unauthorized { .. } => 16,
    }
}

/// Encodes `grpc-message`: `%` and everything except printable ASCII become `%XX`.
fn percent_encoded(text: &str) -> Bytes {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = BytesMut::with_capacity(text.len());
    for byte in text.bytes() {
        if (0x20..=0x7e).contains(&byte) && byte != b'%' {
            out.put_u8(byte);
        } else {
            let (high, low) = (usize::from(byte >> 4), usize::from(byte & 15));
            out.put_slice(&[b'%', DIGITS[high], DIGITS[low]]);
        }
    }
    out.freeze()
}

/// The value of `grpc-status-details-bin`: a `google.rpc.Status` with one `RetryInfo`, in unpadded
/// Base64.
fn details(wait_ms: u64) -> String {
    let retry_info = RetryInfo {
        retry_delay: Some(Duration {
            seconds: i64::try_from(wait_ms / 1000).unwrap_or(i64::MAX),
            // less than 10^9
            nanos: (wait_ms % 1000 * 1_000_000) as i32,
        }),
    };
    let status = GrpcStatus {
        code: i32::from(RESOURCE_EXHAUSTED),
        message: EXHAUSTED.to_owned(),
        details: vec![Any {
            type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(),
            value: retry_info.encode_to_vec(),
        }],
    };
    BASE64_STANDARD_NO_PAD.encode(status.encode_to_vec())
}

/// `google.rpc.Status`.
#[derive(prost::Message)]
struct GrpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(prost::Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(prost::Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Duration>,
}

/// `google.protobuf.Duration`.
#[derive(prost::Message)]
struct Duration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_told_by_the_type_of_its_content() {
        let of = |kind: &'static str| {
            Grpc::of(&HeaderMap::from_iter([(
                CONTENT_TYPE,
                HeaderValue::from_static(kind),
            )]))
        };
        for native in [
            "application/grpc",
            "application/grpc+proto",
            "Application/GRPC; charset=utf-8",
        ] {
            assert_eq!(of(native), Some(Grpc::Native), "{native}");
        }
        for web in ["application/grpc-web", "application/grpc-web+proto"] {
            assert_eq!(of(web), Some(Grpc::Web), "{web}");
        }
        for other in [
            "application/grpcx",
            "application/grpc-webx",
            "application/grpc-we",
            "application/json",
            "application/gr",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(Grpc::of(&HeaderMap::new()), None);
    }

    #[test]
    fn the_wait_is_told_in_protocol_buffers() {
        // generated with protoc from google/rpc/status.proto and error_details.proto
        assert_eq!(
            details(5000),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ"
        );
        assert_eq!(
            details(500),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIICgYQgMq17gE"
        );
    }

    #[test]
    fn a_message_is_percent_encoded() {
        assert_eq!(percent_encoded("50% über"), "50%25 %C3%BCber");
        assert_eq!(percent_encoded("a\r\nb~ "), "a%0D%0Ab~ ");
    }
}
