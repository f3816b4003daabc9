//! Bytes become requests: bind, accept, bounds, serve one connection.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// One `[[listen]]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where to listen.
    pub address: Address,
    /// Whether cleartext HTTP/2 with prior knowledge is spoken beside HTTP/1.1.
    pub http2: bool,
    /// A request head must be complete within this.
    pub header_timeout: Duration,
    /// The longest silence while a request body is arriving.
    pub body_timeout: Duration,
    /// How long a connection may be idle between requests.
    pub idle_timeout: Duration,
    /// Bytes of a request head.
    pub max_header_bytes: usize,
    /// Fields of a request head.
    pub max_header_count: usize,
    /// Bytes of a request target.
    pub max_uri_bytes: usize,
    /// Bytes of a request body.
    pub max_body_bytes: u64,
    /// Concurrent HTTP/2 streams per connection.
    pub max_streams: u32,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix domain socket.
    Unix(PathBuf),
}
