//! The request leaves: servers, timeouts, connections kept per worker.
//!
//! Read in this order: [`mod@forward`] (one request, top to bottom), [`balance`] (which server), [`fleet`] (what all
//! workers know of the servers), `exchange` (one exchange over one connection), [`headers`] (what the server is told),
//! [`pool`] (connections), [`framing`] (where a response ends), [`body`] (the response on its way back).
//!
//! Servers that speak HTTP/2 have [`http2`] in place of `exchange`, [`framing`] and [`body`]; [`tunnel`] is what becomes of a
//! connection that leaves HTTP, and `websocket` says when one may. [`abandoned`] keeps exchanges that nobody waits for any more.
//!
//! The exchange is our own HTTP/1.1 client over a socket, not hyper's: it runs inline in the request's task, with
//! neither a task per connection nor a channel; it writes the inbound head straight into the outbound bytes; and it
//! refuses every response whose end could be read in two ways (RFC 9112 §6.3), where hyper picks one.

pub mod abandoned;
pub mod balance;
pub mod body;
pub mod echo;
mod endpoint;
mod exchange;
pub mod fleet;
pub mod forward;
pub mod framing;
mod fuse;
pub mod headers;
mod health;
pub mod http2;
pub mod pool;
mod resolve;
pub mod retry;
mod sending;
mod spare;
mod stream;
pub mod tunnel;
mod websocket;

use std::{fmt, io, path::PathBuf, rc::Rc, sync::Arc, time::Duration};

use tokio::time::Instant;

pub use balance::Balance;
pub use body::ResponseBody;
pub use endpoint::{Tls, TlsError};
pub use fleet::Fleet;
pub use forward::{body_framing, forward};
pub use fuse::Rating;
pub use health::Health;
pub use spare::SpareTable;
pub use tunnel::Tunnel;

/// One `[upstream.NAME]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The name in the configuration.
    pub name: String,
    /// At least one server.
    pub servers: Vec<Server>,
    /// How servers are chosen.
    pub balance: Balance,
    /// How long opening a connection may take.
    pub connect_timeout: Duration,
    /// How long the response head may take, from the moment the request is sent.
    pub response_timeout: Duration,
    /// The longest silence while a response body is arriving.
    pub body_timeout: Duration,
    /// How long an exchange is kept that nobody waits for, while its request holds slots.
    pub abandoned_timeout: Duration,
    /// How long an unused connection is kept.
    pub idle_timeout: Duration,
    /// Connections per server and worker.
    pub max_connections: usize,
    /// On how many other servers a request is tried that one has failed; at most [`MAX_RETRIES`].
    pub retries: usize,
    /// What the server is told as `Host`.
    pub host: HostHeader,
    /// How servers behind `https://` prove who they are.
    pub tls: Tls,
    /// Active checks, if any.
    pub health: Option<Health>,
    /// When a server that keeps failing is passed over.
    pub outlier: Rating,
    /// When an upstream that keeps failing is refused as a whole.
    pub breaker: Rating,
}

/// The most that `retries` may be.
pub const MAX_RETRIES: usize = 5;

/// One server of an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// `http://host:port`, `https://host:port`, `h2c://host:port`.
    Http {
        /// What is spoken.
        scheme: Scheme,
        /// A name or an address (IPv6 without brackets).
        host: String,
        /// The scheme's own where none was written.
        port: u16,
    },
    /// `unix:/path`.
    Unix(PathBuf),
    /// `builtin:echo`: answers with the request as an upstream would have seen it.
    Echo,
}

/// What is spoken over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP/1.1.
    Http,
    /// HTTP/1.1 over TLS.
    Https,
    /// HTTP/2 without TLS and without asking first (RFC 9113 §3.3).
    H2c,
}

impl Scheme {
    /// As it stands before `://`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::H2c => "h2c",
        }
    }

    /// The port where none is written.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http | Self::H2c => 80,
            Self::Https => 443,
        }
    }
}

impl Settings {
    /// Whether all of its servers are spoken to in HTTP/2, as servers of gRPC are.
    pub fn speaks_http2(&self) -> bool {
        self.servers.iter().all(Server::speaks_http2)
    }
}

impl Server {
    /// Whether its connections carry many exchanges at once.
    fn speaks_http2(&self) -> bool {
        matches!(
            self,
            Self::Http {
                scheme: Scheme::H2c,
                ..
            }
        )
    }

    /// Its own name as it stands in `Host`.
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

impl fmt::Display for Server {
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

/// What the server is told as `Host`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostHeader {
    /// What the client asked for.
    #[default]
    Preserve,
    /// The server's own name.
    Server,
    /// A fixed value.
    Literal(http::HeaderValue),
}

/// Why an exchange with a server failed before there was a response to pass on.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection could be opened.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The server did not prove who it is, or does not speak TLS.
    #[error("no TLS: {0}")]
    Tls(io::Error),
    /// Every connection that the configuration allows is in use, and none came free in time.
    #[error("all {0} connections are in use")]
    Busy(usize),
    /// No response head within `response_timeout`.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The connection ended before the response head was complete.
    #[error("connection lost before the response: {0}")]
    Closed(io::Error),
    /// The server says that it has not looked at the request, and nothing of its body was taken.
    #[error("the request was refused unseen: {0}")]
    Refused(String),
    /// The response cannot be passed on: its bytes or its framing are not HTTP.
    #[error("invalid response: {0}")]
    Protocol(&'static str),
    /// The upstream has kept failing; it is tried again after so long.
    #[error("the circuit is open for another {0:?}")]
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

    /// Whether it is the server that failed, and not a bound of ours.
    fn is_the_servers(&self) -> bool {
        !matches!(self, Self::Busy(_) | Self::Broken(_))
    }

    /// Whether no server has looked at the request.
    fn nothing_was_sent(&self) -> bool {
        matches!(
            self,
            Self::Connect(_) | Self::Tls(_) | Self::Busy(_) | Self::Broken(_) | Self::Refused(_)
        )
    }
}

/// One upstream as one worker sees it: its servers, each with the connections that this worker keeps.
#[derive(Debug)]
pub struct Upstream {
    fleet: Arc<Fleet>,
    pools: Vec<Rc<pool::ServerPool>>,
    balancer: balance::Balancer,
    budget: retry::RetryBudget,
}

impl Upstream {
    /// No connection is opened before the first request. Workers give different numbers, to choose differently.
    pub fn new(fleet: Arc<Fleet>, random: u64) -> Self {
        let settings = fleet.settings();
        let pools = (0..settings.servers.len())
            .map(|server| Rc::new(pool::ServerPool::new(Arc::clone(&fleet), server)))
            .collect();
        Self {
            pools,
            balancer: balance::Balancer::new(settings.balance, random),
            budget: retry::RetryBudget::new(Instant::now()),
            fleet,
        }
    }

    /// What it shares with the other workers.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
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
