//! Maps request errors to answers.

use http::HeaderValue;

use crate::{
    listener::{inbound::InboundError, request::Malformed},
    response::Refusal,
    route::path::PathError,
};

/// 400: `missing = "reject"`.
pub(super) const LACKS_KEY: Refusal =
    Refusal::BadRequest("The request lacks a value that a rate limit requires.");

/// 400: the client ended the body early.
pub(super) const BROKEN_BODY: Refusal =
    Refusal::BadRequest("The request body does not match its Content-Length or Transfer-Encoding.");

/// The answer to a malformed request.
pub(super) fn malformed(malformed: Malformed) -> Refusal {
    match malformed {
        Malformed::Invalid(why) => Refusal::BadRequest(why),
        Malformed::TargetTooLong => Refusal::UriTooLong,
        Malformed::FieldsTooLarge => Refusal::HeadersTooLarge,
        Malformed::Tunnel => Refusal::NotImplemented("CONNECT is not supported."),
        Malformed::Trace => Refusal::MethodNotAllowed {
            allow: HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        },
        Malformed::CodingNotKnown => {
            Refusal::NotImplemented("The transfer coding is not supported.")
        }
    }
}

/// The answer to a path that two parsers could read differently.
pub(super) fn bad_path(error: PathError) -> Refusal {
    Refusal::BadRequest(match error {
        PathError::NotOriginForm => "The path does not begin with a slash.",
        PathError::ForbiddenCharacter => "The target has a character that must be percent-encoded.",
        PathError::MalformedEscape => "The path has a malformed percent-escape.",
        PathError::ForbiddenEscape => {
            "The path has a percent-escape that servers decode differently."
        }
        PathError::AboveRoot => "The path goes above the root with `..`.",
        PathError::DotWithParameter => "The path has a dot segment with a parameter.",
    })
}

/// The answer to a request whose body failed before the response began.
pub(super) fn bad_body(error: &InboundError) -> Refusal {
    match error {
        InboundError::TooLarge(_) => Refusal::BodyTooLarge,
        InboundError::Silent(_) | InboundError::TooSlow(_) | InboundError::Late(_) => {
            Refusal::RequestTimeout
        }
        InboundError::NoRoom => Refusal::BodyBufferFull,
        InboundError::Broken(_) => BROKEN_BODY,
        InboundError::Left(_) => Refusal::ClientLeft,
        InboundError::Cut(_) => Refusal::ConnectionCut,
    }
}
