//! Why an exchange with a server gives no response.

use std::{io, time::Duration};

/// Why an exchange with a server failed before its response.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection could be opened.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The server's certificate is invalid, or it does not use TLS.
    #[error("no TLS: {0}")]
    Tls(io::Error),
    /// All allowed connections were in use, and none became free in time.
    #[error("all {0} connections are in use")]
    Busy(usize),
    /// No response head within `response_timeout`.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The connection ended before the response head was complete.
    #[error("connection lost before the response: {0}")]
    Closed(io::Error),
    /// The server did not process the request, and none of its body was taken.
    #[error("the server refused the request unprocessed: {0}")]
    Refused(String),
    /// The response is not valid HTTP.
    #[error("invalid response: {0}")]
    Protocol(&'static str),
    /// The circuit breaker of the upstream is open for this long.
    #[error("the circuit breaker is open for another {0:?}")]
    Broken(Duration),
}

impl UpstreamError {
    /// The label of `tidegate_upstream_errors_total{kind}`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Tls(_) => "tls",
            Self::Busy(_) => "busy",
            Self::Timeout(_) => "timeout",
            Self::Closed(_) => "closed",
            Self::Refused(_) => "refused",
            Self::Protocol(_) => "protocol",
            Self::Broken(_) => "breaker",
        }
    }

    /// Whether the server failed, as opposed to a bound of the gateway.
    pub(super) fn is_the_servers(&self) -> bool {
        !matches!(self, Self::Busy(_) | Self::Broken(_))
    }

    /// Whether no server has processed the request.
    pub fn nothing_was_sent(&self) -> bool {
        matches!(
            self,
            Self::Connect(_) | Self::Tls(_) | Self::Busy(_) | Self::Broken(_) | Self::Refused(_)
        )
    }
}

/// Why there is no response to forward.
#[derive(Debug)]
pub enum Failed<E> {
    /// The server's side.
    Upstream(UpstreamError),
    /// The client's side: its body failed before the response.
    RequestBody(E),
}

impl<E> From<UpstreamError> for Failed<E> {
    fn from(error: UpstreamError) -> Self {
        Self::Upstream(error)
    }
}
