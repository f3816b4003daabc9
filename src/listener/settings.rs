//! Settings of one `[[listen]]` table.

use std::time::Duration;

use super::{
    bind::BindAddress, connections_per_address::AddressLimits, proxy_protocol::ProxyProtocol,
    tls::TlsSettings,
};

/// One `[[listen]]` table.
#[derive(Clone, Debug)]
pub struct ListenerSettings {
    /// Where to listen.
    pub address: BindAddress,
    /// Whether to accept HTTP/2 besides HTTP/1.1: by ALPN over TLS, with prior knowledge in
    /// cleartext.
    pub http2: bool,
    /// Whether connections begin with a PROXY header.
    pub proxy_protocol: ProxyProtocol,
    /// Time for a complete request head.
    pub header_timeout: Duration,
    /// Longest silence while a request body arrives.
    pub body_timeout: Duration,
    /// Minimum average pace of a request body in bytes per second, after `body_timeout` of waiting.
    pub min_body_rate: u64,
    /// Longest idle time between requests.
    pub idle_timeout: Duration,
    /// Most bytes of a request head.
    pub max_header_bytes: usize,
    /// Most fields of a request head.
    pub max_header_count: usize,
    /// Most bytes of a request target.
    pub max_uri_bytes: usize,
    /// Most bytes of a request body.
    pub max_body_bytes: u64,
    /// Most concurrent HTTP/2 streams per connection.
    pub max_streams: u32,
    /// Bound on connections per address.
    pub per_address: AddressLimits,
    /// TLS; `None` for cleartext.
    pub tls: Option<TlsSettings>,
}
