//! Core: whom we count.

use ipnet::IpNet;

/// How the client's address and user are found.
#[derive(Debug, Default)]
pub struct Settings {
    /// Networks whose forwarding headers are believed.
    pub trusted_proxies: Vec<IpNet>,
    /// Where a trusted proxy writes the client's address.
    pub address_from: AddressSource,
    /// IPv4 addresses are aggregated to this prefix when they key a limit.
    pub ipv4_prefix: u8,
    /// IPv6 addresses are aggregated to this prefix when they key a limit.
    pub ipv6_prefix: u8,
    /// Where users come from; tried in order, the first that finds a credential decides.
    pub users: Vec<UserSource>,
}

/// Where a trusted proxy writes the client's address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressSource {
    /// `X-Forwarded-For`, walked from the right.
    #[default]
    XForwardedFor,
    /// A header that holds exactly one address.
    Single(http::HeaderName),
    /// Nowhere: the peer is the client.
    None,
}

/// One `[[user]]` table.
#[derive(Debug)]
pub enum UserSource {
    /// A key in a header, looked up by its SHA-256 digest.
    ApiKey {
        /// The header that carries the key.
        header: http::HeaderName,
        /// The known keys.
        keys: Vec<ApiKey>,
        /// What an unknown key means.
        invalid: OnInvalid,
    },
    /// Written by an authenticating proxy in front; believed only from trusted proxies.
    Header {
        /// The header that names the user.
        header: http::HeaderName,
        /// The header that names the tier.
        tier_header: Option<http::HeaderName>,
    },
}

/// One entry of a keys file.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// SHA-256 of the secret; the secret itself is never held.
    pub sha256: [u8; 32],
    /// Whom the key stands for.
    pub user: String,
    /// The user's tier.
    pub tier: Option<String>,
    /// The user's tenant.
    pub tenant: Option<String>,
}

/// What a credential that does not verify means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnInvalid {
    /// Answer 401.
    #[default]
    Reject,
    /// Go on as if there were no credential.
    Anonymous,
}

/// One part of a limit's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// The client's address, aggregated.
    Ip,
    /// The verified user.
    User,
    /// The verified user, or the address where there is none.
    UserOrIp,
    /// The user's tenant.
    Tenant,
    /// The user's tier.
    Tier,
    /// The request's method.
    Method,
    /// The request's host, lower-case, without port.
    Host,
    /// The route's name.
    Route,
    /// The request's normalised path.
    Path,
    /// The `User-Agent` field.
    UserAgent,
    /// Another field of the request.
    Header(http::HeaderName),
}

