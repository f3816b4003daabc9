//! The page at `/`: one document, its style and its script, embedded in the binary. It contains no
//! data of this gateway. It queries the API, with the token if one is required, so a visitor
//! without a token sees an empty page.

use http::{HeaderValue, Response, header::CONTENT_SECURITY_POLICY};

use super::text_response::text;

/// Loads and runs only embedded files, connects only to this gateway, and forbids framing.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) fn page() -> Response<String> {
    let html = include_str!("dashboard/page.html");
    let mut response = text("text/html; charset=utf-8", html.to_owned());
    let policy = HeaderValue::from_static(POLICY);
    response
        .headers_mut()
        .insert(CONTENT_SECURITY_POLICY, policy);
    response
}

pub(super) fn style() -> Response<String> {
    text(
        "text/css; charset=utf-8",
        include_str!("dashboard/page.css").to_owned(),
    )
}

pub(super) fn script() -> Response<String> {
    text(
        "text/javascript; charset=utf-8",
        include_str!("dashboard/page.js").to_owned(),
    )
}
