//! Every answer that the gateway authors; the only place with status codes.
//!
//! [`refuse`] answers what cannot be served, [`too_many_requests`] what a limit stops, [`own_quotas`] who asks how they
//! stand, and [`FieldWriter`] tells clients about their limits on these and on forwarded responses; what is said of a limit is
//! its [`Policy`]. `Date` and `Content-Length` are the server library's.

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
pub use policy::{BadPolicyName, Denial, Met, Policy};
pub use refusal::Refusal;

/// `X-Request-Id`.
pub static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `X-RateLimit-Warning`: the name of a limit of which little is left.
pub static X_RATELIMIT_WARNING: HeaderName = HeaderName::from_static("x-ratelimit-warning");

/// What an answer needs to know of its request.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The answer to HEAD has no body.
    pub is_head: bool,
    /// `Connection` exists in HTTP/1 only.
    pub version: Version,
    /// Returned as `X-Request-Id`, and in the body.
    pub request_id: Option<&'a HeaderValue>,
    /// A gRPC call is told in its own way.
    pub grpc: Option<Grpc>,
}

/// The answer to a request that is not served.
///
/// Where the connection cannot be trusted to be in step any more, an HTTP/1 answer carries `Connection: close`.
pub fn refuse(refusal: &Refusal, asked: &Asked<'_>, style: BodyStyle) -> Response<Bytes> {
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

/// The answer to a request that a limit stops, with every field that the settings ask for.
///
/// `Retry-After` is there unless no wait would help. Values and body are slices of the writer's buffer: besides the
/// header table nothing is allocated while earlier answers have left.
pub fn too_many_requests(
    denial: &Denial<'_>,
    asked: &Asked<'_>,
    settings: &Settings,
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

/// One limit on the page of a caller's own quotas.
#[derive(Clone, Copy, Debug)]
pub struct OwnQuota<'a> {
    /// The limit, for the client's tier.
    pub policy: &'a Policy,
    /// How it stands; `None` where that depends on what is asked for.
    pub stands: Option<Met<'a>>,
}

/// The answer to a caller who asks for their own quotas: JSON, whatever the style of refusals. `met` is the page's own limit.
pub fn own_quotas(
    quotas: &[OwnQuota<'_>],
    met: &[Met<'_>],
    asked: &Asked<'_>,
    settings: &Settings,
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
    asked: &Asked<'_>,
    style: BodyStyle,
    body: Bytes,
) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = authored_head(style, asked.request_id.cloned());
    response
}

/// What all our answers share: never stored by a cache, and traceable.
fn authored_head(style: BodyStyle, request_id: Option<HeaderValue>) -> HeaderMap {
    // 3 here, Retry-After, 2 + 3 rate-limit fields; Date and Content-Length follow. The next larger table is twice that
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(CONTENT_TYPE, style.content_type());
    let no_store = const { HeaderValue::from_static("no-store") };
    headers.insert(CACHE_CONTROL, no_store);
    if let Some(id) = request_id {
        headers.insert(&X_REQUEST_ID, id);
    }
    headers
}

/// What an HTTP/1.1 client is told whose request head did not arrive in time. There is no request to answer, so it is
/// written as it stands, and the connection closes (RFC 9110 §15.5.9).
pub const HEAD_TIMEOUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// What is noted of a request whose client left before there was an answer. Nobody receives it; nginx's word for it.
pub fn client_gone() -> StatusCode {
    StatusCode::from_u16(499).expect("a number of three digits")
}

/// What clients are told about their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which families of fields are written.
    pub fields: FieldFamilies,
    /// On which responses.
    pub on: FieldsOn,
    /// How the body of our own answers is written.
    pub body: BodyStyle,
}

/// The families of rate-limit fields; `RateLimit` and the old triple exclude each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FieldFamilies {
    /// `RateLimit` and `RateLimit-Policy`, draft-11 syntax.
    pub ratelimit: bool,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`.
    pub ratelimit_triple: bool,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Reset` (epoch seconds).
    pub x_ratelimit: bool,
}

/// On which responses the rate-limit fields are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldsOn {
    /// On every response.
    #[default]
    Always,
    /// On rejections only.
    Rejected,
}

impl FieldsOn {
    fn shows(self, denied: bool) -> bool {
        denied || self == FieldsOn::Always
    }
}

/// How the body of our own answers is written.
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
        // constants: otherwise each answer would have them checked letter by letter
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
