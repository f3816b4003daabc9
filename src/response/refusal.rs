//! Why a request is not served, other than by a limit.

use http::{HeaderValue, StatusCode};

/// Every reason for an answer of ours that is neither 2xx nor 429.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Malformed, for this reason.
    BadRequest(&'static str),
    /// A credential did not verify.
    Unauthorized {
        /// `WWW-Authenticate` (RFC 9110 §11.6.1): how the client may identify itself.
        challenge: &'static str,
    },
    /// No route matches.
    NotFound,
    /// The path exists, with other methods.
    MethodNotAllowed {
        /// Those methods, as `Allow` lists them.
        allow: HeaderValue,
    },
    /// The head or the body stopped arriving.
    RequestTimeout,
    /// The body is longer than the route takes.
    BodyTooLarge,
    /// The request target is longer than the listener takes.
    UriTooLong,
    /// The admin listener was asked for by a name that is not this machine's.
    Misdirected,
    /// The head is longer, or has more fields, than the listener takes.
    HeadersTooLarge,
    /// A method or a coding that the gateway does not have; this one.
    NotImplemented(&'static str),
    /// No server of the upstream took the connection.
    UpstreamUnreachable,
    /// The upstream's answer was not valid HTTP, or broke off before its head was complete.
    UpstreamProtocol,
    /// Redis does not answer, and a limit admits nothing without it.
    LimitUnavailable {
        /// Its name, unless clients may not know of it.
        limit: Option<String>,
    },
    /// Every connection to the upstream is in use, and none came free in time.
    UpstreamBusy,
    /// As many requests are under way as can be served.
    Overloaded,
    /// The bodies that are read before the decision use all the memory that there is for that.
    BodyBufferFull,
    /// The upstream keeps failing, and is left alone for so many seconds.
    UpstreamBroken {
        /// At least 1.
        retry_after: u32,
    },
    /// The upstream did not answer in time.
    UpstreamTimeout,
    /// The request passed this gateway before.
    LoopDetected,
    /// The client has taken its request back, or has left.
    ClientLeft,
    /// The client's connection was cut short for what the client does.
    ConnectionCut,
    /// A bug of ours.
    Internal,
}

impl Refusal {
    /// The status code.
    pub fn status(&self) -> StatusCode {
        match self {
            Refusal::BadRequest(_) => StatusCode::BAD_REQUEST,
            Refusal::Unauthorized { .. } => StatusCode::UNAUTHORIZED,
            Refusal::NotFound => StatusCode::NOT_FOUND,
            Refusal::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Refusal::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Refusal::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::UriTooLong => StatusCode::URI_TOO_LONG,
            Refusal::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Refusal::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Refusal::NotImplemented(_) => StatusCode::NOT_IMPLEMENTED,
            Refusal::UpstreamUnreachable | Refusal::UpstreamProtocol => StatusCode::BAD_GATEWAY,
            Refusal::LimitUnavailable { .. }
            | Refusal::UpstreamBusy
            | Refusal::Overloaded
            | Refusal::BodyBufferFull
            | Refusal::UpstreamBroken { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            Refusal::LoopDetected => StatusCode::LOOP_DETECTED,
            Refusal::ClientLeft | Refusal::ConnectionCut => super::client_gone(),
            Refusal::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Whether the same request may be served in a while, when there is more to serve it with.
    pub fn is_temporary(&self) -> bool {
        self.status() == StatusCode::SERVICE_UNAVAILABLE
    }

    /// A name for machines that does not change.
    pub fn slug(&self) -> &'static str {
        match self {
            Refusal::BadRequest(_) => "bad_request",
            Refusal::Unauthorized { .. } => "unauthorized",
            Refusal::NotFound => "not_found",
            Refusal::MethodNotAllowed { .. } => "method_not_allowed",
            Refusal::RequestTimeout => "request_timeout",
            Refusal::BodyTooLarge => "body_too_large",
            Refusal::UriTooLong => "uri_too_long",
            Refusal::Misdirected => "misdirected",
            Refusal::HeadersTooLarge => "headers_too_large",
            Refusal::NotImplemented(_) => "not_implemented",
            Refusal::UpstreamUnreachable => "upstream_unreachable",
            Refusal::UpstreamProtocol => "upstream_protocol",
            Refusal::LimitUnavailable { .. } => "limit_unavailable",
            Refusal::UpstreamBusy => "upstream_busy",
            Refusal::Overloaded => "overloaded",
            Refusal::BodyBufferFull => "body_buffer_full",
            Refusal::UpstreamBroken { .. } => "upstream_broken",
            Refusal::UpstreamTimeout => "upstream_timeout",
            Refusal::LoopDetected => "loop_detected",
            Refusal::ClientLeft => "client_left",
            Refusal::ConnectionCut => "connection_cut",
            Refusal::Internal => "internal",
        }
    }

    /// A sentence for people.
    pub fn sentence(&self) -> &'static str {
        match self {
            Refusal::BadRequest(why) | Refusal::NotImplemented(why) => why,
            Refusal::Unauthorized { .. } => "The credential is missing or not known here.",
            Refusal::NotFound => "No route matches this request.",
            Refusal::MethodNotAllowed { .. } => "This path does not take this method.",
            Refusal::RequestTimeout => "The request did not arrive in time.",
            Refusal::BodyTooLarge => "The request body is too large.",
            Refusal::UriTooLong => "The request target is too long.",
            Refusal::Misdirected => {
                "The admin listener on a loopback address answers to 127.0.0.1, [::1] and localhost only."
            }
            Refusal::HeadersTooLarge => "The request head is too large.",
            Refusal::UpstreamUnreachable => "The upstream could not be reached.",
            Refusal::UpstreamProtocol => "The upstream did not give a valid answer.",
            Refusal::LimitUnavailable { .. } => {
                "A limit on these requests cannot be checked at the moment."
            }
            Refusal::UpstreamBusy => "The upstream has no connection to spare.",
            Refusal::Overloaded => "There are more requests than can be served at the moment.",
            Refusal::BodyBufferFull => {
                "There are more request bodies than can be read at the moment."
            }
            Refusal::UpstreamBroken { .. } => {
                "The upstream keeps failing and is left alone for now."
            }
            Refusal::UpstreamTimeout => "The upstream did not answer in time.",
            Refusal::LoopDetected => "The request came through this gateway before.",
            Refusal::ClientLeft => "The client has left.",
            Refusal::ConnectionCut => "The connection was cut short.",
            Refusal::Internal => "The gateway failed to serve this request.",
        }
    }

    /// Whether an HTTP/1 connection ends with the answer: its framing is in doubt, or more is coming than we will read.
    pub fn closes(&self) -> bool {
        match self {
            Refusal::BadRequest(_)
            | Refusal::RequestTimeout
            | Refusal::BodyTooLarge
            | Refusal::UriTooLong
            | Refusal::HeadersTooLarge
            | Refusal::NotImplemented(_)
            | Refusal::ClientLeft
            | Refusal::ConnectionCut
            | Refusal::BodyBufferFull
            | Refusal::Internal => true,
            Refusal::Unauthorized { .. }
            | Refusal::NotFound
            | Refusal::MethodNotAllowed { .. }
            | Refusal::Misdirected
            | Refusal::UpstreamUnreachable
            | Refusal::UpstreamProtocol
            | Refusal::LimitUnavailable { .. }
            | Refusal::UpstreamBusy
            | Refusal::Overloaded
            | Refusal::UpstreamBroken { .. }
            | Refusal::UpstreamTimeout
            | Refusal::LoopDetected => false,
        }
    }
}
