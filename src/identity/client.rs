//! The client of a request.

use std::net::IpAddr;

use super::{address::AddressFault, credential::jwt::Verified};

/// The client of a request. Addresses are canonical: an IPv4-mapped address becomes IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client<'a> {
    /// The client's address, as far as it can be trusted.
    pub address: IpAddr,
    /// The address at the other end of the connection: the client, or the last proxy before
    /// tidegate.
    pub peer: IpAddr,
    /// The peer is a trusted proxy, so its forwarding headers are read.
    pub peer_trusted: bool,
    /// A trusted proxy forwarded an address that could not be read. Counted in a metric.
    pub doubt: Option<AddressFault>,
    /// The verified user.
    pub user: Option<&'a str>,
    /// The user's tier.
    pub tier: Option<&'a str>,
    /// The user's tenant.
    pub tenant: Option<&'a str>,
    /// The verified token that names the user.
    pub token: Option<&'a Verified>,
}

impl<'a> Client<'a> {
    /// A directly connected client without a user.
    pub fn anonymous(peer: IpAddr) -> Client<'static> {
        let address = peer.to_canonical();
        Client {
            address,
            peer: address,
            peer_trusted: false,
            doubt: None,
            user: None,
            tier: None,
            tenant: None,
            token: None,
        }
    }

    /// A claim of the user's token as text, if a limit is keyed by it.
    pub fn claim(&self, name: &str) -> Option<&'a str> {
        self.token?.claim(name)
    }
}
