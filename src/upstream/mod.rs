//! The request leaves: servers, timeouts, connections kept per worker.
//!
//! Read in this order: [`mod@forward`] (one exchange, top to bottom), [`headers`] (what the server is told), [`pool`]
//! (connections), [`framing`] (where a response ends), [`body`] (the response on its way back).
//!
//! The exchange is our own HTTP/1.1 client over a socket, not hyper's: it runs inline in the request's task, with
//! neither a task per connection nor a channel; it writes the inbound head straight into the outbound bytes; and it
//! refuses every response whose end could be read in two ways (RFC 9112 §6.3), where hyper picks one.

pub mod body;
pub mod echo;
pub mod forward;
pub mod framing;
pub mod headers;
pub mod pool;

use std::{cell::Cell, fmt, io, path::PathBuf, rc::Rc, time::Duration};

use tokio::time::Instant;

pub use body::ResponseBody;
pub use forward::forward;

/// One `[upstream.NAME]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The name in the configuration.
    pub name: String,
    /// At least one server; requests take turns.
    pub servers: Vec<Server>,
    /// How long opening a connection may take.
    pub connect_timeout: Duration,
    /// How long the response head may take, from the moment the request is sent.
    pub response_timeout: Duration,
    /// The longest silence while a response body is arriving.
    pub body_timeout: Duration,
    /// How long an unused connection is kept.
    pub idle_timeout: Duration,
    /// Connections per server and worker.
    pub max_connections: usize,
    /// What the server is told as `Host`.
    pub host: HostHeader,
}

/// One server of an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// `http://host:port`.
    Http {
        /// A name or an address (IPv6 without brackets).
        host: String,
        /// The port, 80 where none was written.
        port: u16,
    },
    /// `unix:/path`.
    Unix(PathBuf),
    /// `builtin:echo`: answers with the request as an upstream would have seen it.
    Echo,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { host, port } if host.contains(':') => write!(f, "http://[{host}]:{port}"),
            Self::Http { host, port } => write!(f, "http://{host}:{port}"),
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
    /// Every connection that the configuration allows is in use, and none came free in time.
    #[error("all {0} connections are in use")]
    Busy(usize),
    /// No response head within `response_timeout`.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The connection ended before the response head was complete.
    #[error("connection lost before the response: {0}")]
    Closed(io::Error),
    /// The response cannot be passed on: its bytes or its framing are not HTTP.
    #[error("invalid response: {0}")]
    Protocol(&'static str),
}

impl UpstreamError {
    /// The label of `tidegate_upstream_errors_total{kind}`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Busy(_) => "busy",
            Self::Timeout(_) => "timeout",
            Self::Closed(_) => "closed",
            Self::Protocol(_) => "protocol",
        }
    }
}

/// One upstream as one worker sees it: its servers, each with the connections that this worker keeps.
#[derive(Debug)]
pub struct Upstream {
    settings: Settings,
    pools: Vec<Rc<pool::ServerPool>>,
    turn: Cell<usize>,
}

impl Upstream {
    /// No connection is opened before the first request.
    pub fn new(settings: Settings) -> Self {
        let pools = settings
            .servers
            .iter()
            .map(|server| Rc::new(pool::ServerPool::new(server.clone(), &settings)))
            .collect();
        Self {
            settings,
            pools,
            turn: Cell::new(0),
        }
    }

    /// The settings that it was made from.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Closes connections that have been idle for `idle_timeout`.
    pub fn sweep(&self, now: Instant) {
        for pool in &self.pools {
            pool.sweep(now);
        }
    }

    /// The server whose turn it is.
    fn next_server(&self) -> &Rc<pool::ServerPool> {
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        &self.pools[turn % self.pools.len()]
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        for pool in &self.pools {
            pool.retire();
        }
    }
}
