//! The request leaves: servers, timeouts, connections kept per worker.

use std::{path::PathBuf, time::Duration};

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
