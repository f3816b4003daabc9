//! Every response that tidegate itself authors. No other module picks a status code.
//!
//! [`refuse`] answers requests that cannot be served. [`too_many_requests`] answers requests that a
//! limit rejects. [`own_quotas`] shows callers their quotas. [`FieldWriter`] adds rate-limit fields
//! to these and to forwarded responses. [`Policy`] is the public description of a limit. The HTTP
//! library adds `Date` and `Content-Length`.

mod body;
mod cost_terms;
mod fields;
mod grpc;
mod head;
mod json_text;
mod members;
mod policy;
mod refusal;
mod request_facts;
mod sdk;
mod settings;

use std::time::SystemTime;

use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode, Version,
    header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
};

pub use body::OwnQuota;
pub use cost_terms::{CostTerms, CountedTokens, Sdk};
pub use fields::FieldWriter;
pub use head::{X_RATELIMIT_WARNING, X_REQUEST_ID};
pub use policy::{BadPolicyName, LimitReport, Policy, RejectedRequest};
pub use refusal::{Refusal, client_gone};
pub use request_facts::{Grpc, RequestFacts};
pub use settings::{BodyStyle, FieldFamilies, FieldsOn, ResponseSettings};

use head::authored_head;

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
    denial: &RejectedRequest<'_>,
    asked: &RequestFacts<'_>,
    settings: &ResponseSettings,
    fields: &mut FieldWriter,
    now: SystemTime,
) -> Response<Bytes> {
    if let Some(grpc) = asked.grpc {
        return grpc.too_many_requests(denial, asked);
    }
    let sdk = sdk::reader(denial, settings);
    let body = match sdk {
        _ if asked.is_head => Bytes::new(),
        Some(sdk) => fields.sdk_body(sdk, denial, asked),
        None => fields.body(settings.body, denial, asked),
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    *response.headers_mut() = fields.rejection(denial, asked, settings, now);
    let headers = response.headers_mut();
    sdk::put_retry(headers, denial, settings);
    if sdk.is_some() {
        headers.insert(CONTENT_TYPE, BodyStyle::Json.content_type());
    }
    response
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

/// The response to an HTTP/1.1 client whose request head does not arrive in time. It is written as
/// raw bytes because there is no request yet. The connection then closes (RFC 9110 §15.5.9).
pub const HEAD_TIMEOUT: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

#[cfg(test)]
mod tests;
