//! The head that tidegate's own responses have in common.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};

use super::settings::BodyStyle;

/// `X-Request-Id`.
pub static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `X-RateLimit-Warning`: the name of a limit that is nearly exhausted.
pub static X_RATELIMIT_WARNING: HeaderName = HeaderName::from_static("x-ratelimit-warning");

/// The head common to tidegate's responses: not cacheable, with a request ID.
pub(super) fn authored_head(style: BodyStyle, request_id: Option<HeaderValue>) -> HeaderMap {
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
