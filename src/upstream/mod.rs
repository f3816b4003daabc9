//! Upstreams: servers, timeouts, and connections kept per worker.
//!
//! Read in this order: [`mod@forward`] (one request, top to bottom), [`balance`] (choice of the
//! server), [`state`] (state that all workers share), `exchange` (one exchange over one
//! connection), [`headers`] (the fields sent to the server), [`pool`] (connections), [`framing`]
//! (the end of a response), [`body`] (the response body).
//!
//! For HTTP/2 servers, [`http2`] replaces `exchange`, [`framing`] and [`body`]. [`tunnel`] relays a
//! connection that leaves HTTP, and `websocket` decides when one may. [`abandoned`] keeps exchanges
//! whose client is gone.
//!
//! The HTTP/1.1 client is our own, not hyper's. It runs inline in the request's task, without a
//! task per connection or a channel. It writes the inbound head directly into the outbound bytes.
//! It refuses every response of ambiguous length (RFC 9112 §6.3), where hyper picks one reading.

pub mod abandoned;
pub mod balance;
pub mod body;
pub mod echo;
mod endpoint;
mod exchange;
pub mod state;
pub mod forward;
pub mod forwarded_body;
pub mod framing;
mod circuit_breaker;
pub mod headers;
mod health;
pub mod http2;
pub mod pool;
mod resolve;
pub mod retry;
mod request_writer;
mod spare_header_map;
mod stream;
pub mod tunnel;
mod websocket;

use std::{fmt, io, path::PathBuf, rc::Rc, sync::Arc, time::Duration};

use tokio::time::Instant;

pub use balance::Balance;
pub use body::ResponseBody;
pub use circuit_breaker::BreakerConfig;
pub use endpoint::{TlsError, UpstreamTls};
pub use forward::{body_framing, forward};
pub use health::Health;
pub use spare_header_map::SpareHeaderMap;
pub use state::UpstreamState;
pub use tunnel::Tunnel;

/// One `[upstream.NAME]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// The name in the configuration.
    pub name: String,
    /// At least one server.
    pub servers: Vec<ServerAddress>,
    /// Load-balancing policy.
    pub balance: Balance,
    /// Longest time to open a connection.
    pub connect_timeout: Duration,
    /// Longest wait for the response head after the request was sent.
    pub response_timeout: Duration,
    /// Longest silence while a response body arrives.
    pub body_timeout: Duration,
    /// How long an abandoned exchange is kept while its request holds slots.
    pub abandoned_timeout: Duration,
    /// How long an unused connection is kept.
    pub idle_timeout: Duration,
    /// Most connections per server and worker.
    pub max_connections: usize,
    /// Most other servers on which a failed request is retried; at most [`MAX_RETRIES`].
    pub retries: usize,
    /// The `Host` field for the server.
    pub host: HostHeader,
    /// How to verify servers behind `https://`.
    pub tls: UpstreamTls,
    /// Active checks, if any.
    pub health: Option<Health>,
    /// When to eject a failing server.
    pub outlier: BreakerConfig,
    /// When to refuse a failing upstream as a whole.
    pub breaker: BreakerConfig,
}

/// Maximum of `retries`.
pub const MAX_RETRIES: usize = 5;

/// One server of an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// `http://host:port`, `https://host:port`, `h2c://host:port`.
    Http {
        /// The protocol.
        scheme: Scheme,
        /// A name or an address (IPv6 without brackets).
        host: String,
        /// By default, that of the scheme.
        port: u16,
    },
    /// `unix:/path`.
    Unix(PathBuf),
    /// `builtin:echo`: answers with the request as a server would receive it.
    Echo,
}

/// Protocol over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP/1.1.
    Http,
    /// HTTP/1.1 over TLS.
    Https,
    /// HTTP/2 in cleartext with prior knowledge (RFC 9113 §3.3).
    H2c,
}

impl Scheme {
    /// As written before `://`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::H2c => "h2c",
        }
    }

    /// The default port.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http | Self::H2c => 80,
            Self::Https => 443,
        }
    }
}

impl UpstreamSettings {
    /// Whether all its servers use HTTP/2, as gRPC servers do.
    pub fn speaks_http2(&self) -> bool {
        self.servers.iter().all(ServerAddress::speaks_http2)
    }
}

impl ServerAddress {
    /// Whether its connections carry concurrent exchanges.
    fn speaks_http2(&self) -> bool {
        matches!(
            self,
            Self::Http {
                scheme: Scheme::H2c,
                ..
            }
        )
    }

    /// Its own name for `Host`.
    fn authority(&self) -> String {
        let (scheme, host, port) = match self {
            Self::Http { scheme, host, port } => (scheme, host, port),
            Self::Unix(_) | Self::Echo => return "localhost".to_owned(),
        };
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host.clone(),
        };
        match *port == scheme.default_port() {
            true => host,
            false => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { scheme, host, port } if host.contains(':') => {
                write!(f, "{}://[{host}]:{port}", scheme.as_str())
            }
            Self::Http { scheme, host, port } => write!(f, "{}://{host}:{port}", scheme.as_str()),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Echo => f.write_str("builtin:echo"),
        }
    }
}

/// The `Host` field for the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostHeader {
    /// The client's.
    #[default]
    Preserve,
    /// The server's own name.
    Server,
    /// A fixed value.
    Literal(http::HeaderValue),
}

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
    fn is_the_servers(&self) -> bool {
        !matches!(self, Self::Busy(_) | Self::Broken(_))
    }

    /// Whether no server has processed the request.
    fn nothing_was_sent(&self) -> bool {
        matches!(
            self,
            Self::Connect(_) | Self::Tls(_) | Self::Busy(_) | Self::Broken(_) | Self::Refused(_)
        )
    }
}

/// One worker's view of an upstream: its servers, each with this worker's connections.
#[derive(Debug)]
pub struct Upstream {
    state: Arc<UpstreamState>,
    pools: Vec<Rc<pool::ServerPool>>,
    balancer: balance::Balancer,
    budget: retry::RetryBudget,
}

impl Upstream {
    /// Opens no connection before the first request. `random` must differ between workers, so that
    /// they choose differently.
    pub fn new(state: Arc<UpstreamState>, random: u64) -> Self {
        let settings = state.settings();
        let pools = (0..settings.servers.len())
            .map(|server| Rc::new(pool::ServerPool::new(Arc::clone(&state), server)))
            .collect();
        Self {
            pools,
            balancer: balance::Balancer::new(settings.balance, random),
            budget: retry::RetryBudget::new(Instant::now()),
            state,
        }
    }

    /// The state that all workers share.
    pub fn state(&self) -> &Arc<UpstreamState> {
        &self.state
    }

    /// Closes connections that have been idle for `idle_timeout`.
    pub fn sweep(&self, now: Instant) {
        for pool in &self.pools {
            pool.sweep(now);
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        for pool in &self.pools {
            pool.retire();
        }
    }
}
