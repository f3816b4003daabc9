//! The settings of an upstream: `[upstream.NAME]` as compiled.

use std::{fmt, path::PathBuf, time::Duration};

use rustls::pki_types::{CertificateDer, ServerName};

use super::{Balance, BreakerConfig};

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
    pub(super) fn speaks_http2(&self) -> bool {
        matches!(
            self,
            Self::Http {
                scheme: Scheme::H2c,
                ..
            }
        )
    }

    /// Its own name for `Host`.
    pub(super) fn authority(&self) -> String {
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

/// How to verify the certificates of servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// Trusted CAs; `None` for those of the system.
    pub ca: Option<Vec<CertificateDer<'static>>>,
    /// Expected name in the certificate; `None` for the server's own.
    pub server_name: Option<ServerName<'static>>,
}

/// `[upstream.NAME.health]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Path of the check, requested with `GET`.
    pub path: String,
    /// Time from the end of one check to the next.
    pub interval: Duration,
    /// Bound on a whole check.
    pub timeout: Duration,
    /// Consecutive failed checks that take a healthy server out of service.
    pub unhealthy_after: u32,
    /// Consecutive passed checks that return it to service.
    pub healthy_after: u32,
}
