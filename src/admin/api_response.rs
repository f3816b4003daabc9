//! The response of an operation of the API.

use http::{HeaderValue, Response, StatusCode, header::ALLOW};
use serde_json::{Value, json};

use super::text_response::text;

/// The response of an operation.
#[derive(Debug)]
pub(super) struct ApiResponse {
    status: StatusCode,
    json: Value,
    allow: Option<&'static str>,
}

impl ApiResponse {
    pub(super) fn new(status: StatusCode, json: Value) -> Self {
        Self {
            status,
            json,
            allow: None,
        }
    }

    pub(super) fn ok(json: Value) -> Self {
        Self::new(StatusCode::OK, json)
    }

    pub(super) fn error(status: StatusCode, why: impl Into<String>) -> Self {
        let why: String = why.into();
        Self::new(status, json!({ "ok": false, "error": why }))
    }

    pub(super) fn nothing() -> Self {
        Self::error(StatusCode::NOT_FOUND, "no such path")
    }

    pub(super) fn busy() -> Self {
        let why = "too many requests at once; retry in a moment";
        Self::error(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    pub(super) fn failed() -> Self {
        let why = "the operation was not completed";
        Self::error(StatusCode::INTERNAL_SERVER_ERROR, why)
    }

    pub(super) fn wrong_method(allow: &'static str) -> Self {
        Self {
            allow: Some(allow),
            ..Self::error(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("this path supports {allow}"),
            )
        }
    }

    pub(super) fn into_response(self) -> Response<String> {
        let mut response = text("application/json", format!("{}\n", self.json));
        *response.status_mut() = self.status;
        if let Some(allow) = self.allow {
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}
