//! Every response that tidegate itself authors. No other module picks a status code.
//!
//! [`refuse`] answers requests that cannot be served. [`too_many_requests`] answers requests that a
//! limit rejects. [`own_quotas`] shows callers their quotas. [`FieldWriter`] adds rate-limit fields
//! to these and to forwarded responses. [`Policy`] is the public description of a limit. The HTTP
//! library adds `Date` and `Content-Length`.

mod body;
mod fields;
mod grpc;
mod members;
mod policy;
mod refusal;

use std::time::SystemTime;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Version,
    header::{ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
};

pub use fields::FieldWriter;
pub use grpc::Grpc;
pub use policy::{BadPolicyName, LimitReport, Policy, StoppedRequest};
pub use refusal::Refusal;

/// `X-Request-Id`.
pub static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `X-RateLimit-Warning`: the name of a limit that is nearly exhausted.
pub static X_RATELIMIT_WARNING: HeaderName = HeaderName::from_static("x-ratelimit-warning");

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

/// The response to a request that is not served.
///
/// If the framing of an HTTP/1 connection is in doubt, the response has `Connection: close`.
pub fn refuse(refusal: &Refusal, asked: &RequestFacts<'_>, style: BodyStyle) -> Response<Bytes> {
    if let Some(grpc) = asked.grpc {
        return grpc.refuse(refusal, asked);
    }
    let body = if asked.is_head {
        Bytes::new()
    } else {
        body::of_refusal(style, refusal, asked)
    };
    let mut response = authored(refusal.status(), asked, style, body);
    let headers = response.headers_mut();
    match refusal {
        Refusal::Unauthorized { challenge } => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        Refusal::MethodNotAllowed { allow } => {
            headers.insert(ALLOW, allow.clone());
        }
        Refusal::UpstreamBusy | Refusal::Overloaded | Refusal::LimitUnavailable { .. } => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Refusal::UpstreamBroken { retry_after } => {
            headers.insert(RETRY_AFTER, HeaderValue::from(*retry_after));
        }
        _ => {}
    }
    if refusal.closes() && asked.version < Version::HTTP_2 {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The response to a request that a limit rejects, with all configured fields.
///
/// `Retry-After` is present unless waiting does not help. Values and body are slices of the
/// writer's buffer. Once earlier responses are sent, only the header table is allocated.
pub fn too_many_requests(
    denial: &StoppedRequest<'_>,
    asked: &RequestFacts<'_>,
    settings: &ResponseSettings,
    fields: &mut FieldWriter,
    now: SystemTime,
) -> Response<Bytes> {
    if let Some(grpc) = asked.grpc {
        return grpc.too_many_requests(denial, asked);
    }
    let body = if asked.is_head {
        Bytes::new()
    } else {
        fields.body(settings.body, denial, asked)
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    *response.headers_mut() = fields.rejection(denial, asked, settings, now);
    response
}

/// One limit on the page that shows a caller's quotas.
#[derive(Clone, Copy, Debug)]
pub struct OwnQuota<'a> {
    /// The limit, for the client's tier.
    pub policy: &'a Policy,
    /// The limit's current state; `None` if it depends on the request target.
    pub stands: Option<LimitReport<'a>>,
}

/// The response with a caller's own quotas: always JSON. `met` is the limit of the page itself.
pub fn own_quotas(
    quotas: &[OwnQuota<'_>],
    met: &[LimitReport<'_>],
    asked: &RequestFacts<'_>,
    settings: &ResponseSettings,
    fields: &mut FieldWriter,
    now: SystemTime,
) -> Response<Bytes> {
    let body = if asked.is_head {
        Bytes::new()
    } else {
        body::of_quotas(quotas, asked)
    };
    let mut response = authored(StatusCode::OK, asked, BodyStyle::Json, body);
    fields.write(response.headers_mut(), StatusCode::OK, met, settings, now);
    response
}

fn authored(
    status: StatusCode,
    asked: &RequestFacts<'_>,
    style: BodyStyle,
    body: Bytes,
) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = authored_head(style, asked.request_id.cloned());
    response
}

/// The head common to tidegate's responses: not cacheable, with a request ID.
fn authored_head(style: BodyStyle, request_id: Option<HeaderValue>) -> HeaderMap {
    // 3 here, Retry-After, 2 + 3 rate-limit fields; Date and Content-Length follow. The next larger
    // table has twice the size
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(CONTENT_TYPE, style.content_type());
    let no_store = const { HeaderValue::from_static("no-store") };
    headers.insert(CACHE_CONTROL, no_store);
    if let Some(id) = request_id {
        headers.insert(&X_REQUEST_ID, id);
    }
    headers
}

/// The response to an HTTP/1.1 client whose request head does not arrive in time. It is written as
/// raw bytes because there is no request yet. The connection then closes (RFC 9110 §15.5.9).
pub const HEAD_TIMEOUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// The status that is logged if the client leaves before the response, as in nginx. Never sent.
pub fn client_gone() -> StatusCode {
    StatusCode::from_u16(499).expect("a number of three digits")
}

/// Settings of rate-limit fields and response bodies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseSettings {
    /// The field families to write.
    pub fields: FieldFamilies,
    /// The responses that carry them.
    pub on: FieldsOn,
    /// The body format of tidegate's own responses.
    pub body: BodyStyle,
}

/// The families of rate-limit fields. `ratelimit` and `ratelimit_triple` exclude each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FieldFamilies {
    /// `RateLimit` and `RateLimit-Policy`, draft-11 syntax.
    pub ratelimit: bool,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`.
    pub ratelimit_triple: bool,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Reset` (epoch seconds).
    pub x_ratelimit: bool,
}

/// The responses that carry rate-limit fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldsOn {
    /// Every response.
    #[default]
    Always,
    /// Only rejections.
    Rejected,
}

impl FieldsOn {
    fn shows(self, denied: bool) -> bool {
        denied || self == FieldsOn::Always
    }
}

/// The body format of tidegate's own responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyStyle {
    /// `application/problem+json`, RFC 9457.
    #[default]
    ProblemJson,
    /// `application/json`.
    Json,
    /// `text/plain`.
    Text,
}

impl BodyStyle {
    /// The media type of the body.
    pub fn content_type(self) -> HeaderValue {
        // constants, because creating a value validates each byte
        match self {
            BodyStyle::ProblemJson => {
                const { HeaderValue::from_static("application/problem+json") }
            }
            BodyStyle::Json => const { HeaderValue::from_static("application/json") },
            BodyStyle::Text => const { HeaderValue::from_static("text/plain; charset=utf-8") },
        }
    }
}

#[cfg(test)]
mod tests;
