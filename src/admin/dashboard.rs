//! The page at `/`: one document, its style and its script, all from the binary. It holds nothing of this gateway: what it shows
//! it asks of the API, with a token where there has to be one, so that whoever has none sees an empty page.

use http::{HeaderValue, Response, header::CONTENT_SECURITY_POLICY};

use super::text;

/// Only what the binary brings is loaded and run, and only this gateway is asked; nobody may frame the page.
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
