//! Reasons, other than a limit, why a request is not served.

use http::{HeaderValue, StatusCode};

/// Every reason for a response of tidegate that is neither 2xx nor 429.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Malformed; the text says why.
    BadRequest(&'static str),
    /// A credential did not verify.
    Unauthorized {
        /// `WWW-Authenticate` (RFC 9110 §11.6.1): the accepted credential.
        challenge: &'static str,
    },
    /// No route matches.
    NotFound,
    /// The path exists, but only with other methods.
    MethodNotAllowed {
        /// The allowed methods, as in `Allow`.
        allow: HeaderValue,
    },
    /// The head or the body stopped arriving.
    RequestTimeout,
    /// The body is longer than the route allows.
    BodyTooLarge,
    /// The request target is longer than the listener allows.
    UriTooLong,
    /// The `Host` of a request to the admin listener does not name this machine.
    Misdirected,
    /// The head is longer or has more fields than the listener allows.
    HeadersTooLarge,
    /// A method or coding that tidegate does not implement; the text says which.
    NotImplemented(&'static str),
    /// No upstream server accepted the connection.
    UpstreamUnreachable,
    /// The upstream's response was not valid HTTP, or ended within its head.
    UpstreamProtocol,
    /// Redis does not answer, and a limit admits nothing without it.
    LimitUnavailable {
        /// The limit's name, unless it is hidden from clients.
        limit: Option<String>,
    },
    /// Every connection to the upstream is in use, and none became free in time.
    UpstreamBusy,
    /// The number of requests in flight has reached its bound.
    Overloaded,
    /// The memory for bodies that are read before the decision is used up.
    BodyBufferFull,
    /// The upstream keeps failing, and its circuit breaker is open.
    UpstreamBroken {
        /// Seconds, at least 1.
        retry_after: u32,
    },
    /// The upstream did not answer in time.
    UpstreamTimeout,
    /// The request has already passed through this gateway.
    LoopDetected,
    /// The client cancelled its request or disconnected.
    ClientLeft,
    /// tidegate closed the client's connection because of the client's behaviour.
    ConnectionCut,
    /// A bug in tidegate.
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
            Refusal::ClientLeft | Refusal::ConnectionCut => client_gone(),
            Refusal::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Whether the same request may succeed later, when capacity returns.
    pub fn is_temporary(&self) -> bool {
        self.status() == StatusCode::SERVICE_UNAVAILABLE
    }

    /// A stable name for machines.
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

    /// A sentence for humans.
    pub fn sentence(&self) -> &'static str {
        match self {
            Refusal::BadRequest(why) | Refusal::NotImplemented(why) => why,
            Refusal::Unauthorized { .. } => "The credential is missing or invalid.",
            Refusal::NotFound => "No route matches this request.",
            Refusal::MethodNotAllowed { .. } => "This path does not allow this method.",
            Refusal::RequestTimeout => "The request did not arrive in time.",
            Refusal::BodyTooLarge => "The request body is too large.",
            Refusal::UriTooLong => "The request target is too long.",
            Refusal::Misdirected => {
                "On a loopback address, the admin listener accepts only the hosts 127.0.0.1, [::1] and localhost."
            }
            Refusal::HeadersTooLarge => "The request head is too large.",
            Refusal::UpstreamUnreachable => "The upstream could not be reached.",
            Refusal::UpstreamProtocol => "The upstream sent an invalid response.",
            Refusal::LimitUnavailable { .. } => "A rate limit cannot be checked at the moment.",
            Refusal::UpstreamBusy => "All connections to the upstream are in use.",
            Refusal::Overloaded => "Too many requests are in flight at the moment.",
            Refusal::BodyBufferFull => "Too many request bodies are being read at the moment.",
            Refusal::UpstreamBroken { .. } => {
                "The upstream keeps failing, so requests to it are paused."
            }
            Refusal::UpstreamTimeout => "The upstream did not answer in time.",
            Refusal::LoopDetected => "The request has already passed through this gateway.",
            Refusal::ClientLeft => "The client disconnected.",
            Refusal::ConnectionCut => "The gateway closed the connection.",
            Refusal::Internal => "The gateway failed to serve this request.",
        }
    }

    /// Whether the response closes an HTTP/1 connection: the framing is in doubt, or more data will
    /// arrive than tidegate reads.
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

/// The status that is logged if the client leaves before the response, as in nginx. Never sent.
pub fn client_gone() -> StatusCode {
    StatusCode::from_u16(499).expect("a number of three digits")
}
