//! How the body of a request is framed towards the server.

use http::Method;
use http_body::Body;

/// Framing of the request body towards the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    /// No body, and the method does not suggest one.
    None,
    /// A known length in bytes.
    Length(u64),
    /// Chunked.
    Chunked,
}

impl BodyFraming {
    /// Whether there is a body to send.
    pub fn has_body(self) -> bool {
        !matches!(self, BodyFraming::None | BodyFraming::Length(0))
    }
}

/// Framing of the request body towards the server.
pub fn body_framing<B: Body>(method: &Method, body: &B) -> BodyFraming {
    match body.size_hint().exact() {
        Some(0) if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => {
            BodyFraming::Length(0)
        }
        Some(0) => BodyFraming::None,
        Some(length) => BodyFraming::Length(length),
        None => BodyFraming::Chunked,
    }
}
