//! A response with a text.

use http::{HeaderValue, Response, header::CONTENT_TYPE};

pub(super) fn text(content_type: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
