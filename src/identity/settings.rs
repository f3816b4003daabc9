//! How to find the client's address and user: the checked configuration of this module.

use ipnet::IpNet;

use super::{
    address::{AddressSource, Prefixes},
    credential::{CertificateField, KnownKeys, OnInvalid, jwt::TokenSource},
};

/// How to find the client's address and user.
#[derive(Debug)]
pub struct IdentitySettings {
    /// Networks whose forwarding headers are trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// Where a trusted proxy writes the client's address.
    pub address_from: AddressSource,
    /// Number of proxies in front that append to that list. If set, elements are counted from the
    /// right. Every peer is then trusted if `trusted_proxies` is empty.
    pub trusted_hops: Option<u8>,
    /// Prefix length to which IPv4 addresses are aggregated in keys.
    pub ipv4_prefix: u8,
    /// Prefix length to which IPv6 addresses are aggregated in keys.
    pub ipv6_prefix: u8,
    /// User sources, tried in order. The first one that finds a credential decides.
    pub users: Vec<UserSource>,
}

impl Default for IdentitySettings {
    /// No trusted proxies, no users, and addresses aggregated to /32 and /64.
    fn default() -> IdentitySettings {
        let Prefixes { ipv4, ipv6 } = Prefixes::default();
        IdentitySettings {
            trusted_proxies: Vec::new(),
            address_from: AddressSource::default(),
            trusted_hops: None,
            ipv4_prefix: ipv4,
            ipv6_prefix: ipv6,
            users: Vec::new(),
        }
    }
}

impl IdentitySettings {
    /// How addresses are aggregated when they key a limit.
    pub fn prefixes(&self) -> Prefixes {
        Prefixes {
            ipv4: self.ipv4_prefix,
            ipv6: self.ipv6_prefix,
        }
    }
}

/// One `[[user]]` table.
#[derive(Debug)]
pub enum UserSource {
    /// An API key in a header, looked up by its SHA-256 digest.
    ApiKey {
        /// The header that carries the key.
        header: http::HeaderName,
        /// The known keys.
        keys: KnownKeys,
        /// How to treat an unknown key.
        invalid: OnInvalid,
    },
    /// A JSON Web Token in a header.
    Jwt(Box<TokenSource>),
    /// A header set by an authenticating proxy; read only from trusted proxies.
    Header {
        /// The header that names the user.
        header: http::HeaderName,
        /// The header that names the tier.
        tier_header: Option<http::HeaderName>,
    },
    /// A field of the verified client certificate.
    ClientCert(CertificateField),
}
