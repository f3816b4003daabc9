//! What a listener reports of its connections.

use std::{io, net::IpAddr};

use super::{abuse::AbuseReason, proxy_protocol};

/// Receives connection events for metrics and logs. Each call is cheap and cannot fail.
pub trait Observer {
    /// Kept while a connection is open.
    type Open: 'static;
    /// A connection was accepted.
    fn opened(&self) -> Self::Open;
    /// An accept failed; the loop continues.
    fn accept_failed(&self, error: &io::Error);
    /// A connection was closed early because of its client's behavior.
    fn cut(&self, why: AbuseReason);
    /// A connection was closed unserved: its address has too many.
    fn crowded(&self, ip: IpAddr);
    /// A connection was closed unserved: its PROXY header was rejected.
    fn proxy_protocol_failed(&self, peer: IpAddr, fault: proxy_protocol::ProxyProtocolFault);
}
