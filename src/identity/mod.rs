//! Core: identifies the client that a request is counted for.
//!
//! [`Identifier::identify`] turns a peer address and its headers into a [`Client`]. That is an
//! address that cannot be spoofed ([`address`]) and, if a credential verifies, a user.
//! [`KeyParts::key`](key::KeyParts::key) maps the client to its bucket. [`ManagedFields`] lists the
//! header fields that a client must not be able to send to the upstream.

pub mod address;
pub mod body;
mod credential;
mod forwarded;
pub mod key;
pub mod managed;
mod text;
pub mod trusted;

use std::{fmt, net::IpAddr, sync::Arc};

use http::HeaderMap;
use ipnet::IpNet;

pub use address::Prefixes;
pub use body::{BodyFields, BodyFormat};
pub use credential::jwt::{
    self, ClaimRules, HeldToken, KeyRing, KeySet, KeySource, KeysUrl, TokenCache, TokenSource,
    TokenWorkspace,
};
pub use key::{KeyHasher, KeyParts, KeySubject, Keyed, Missing};
pub use managed::ManagedFields;
pub use trusted::TrustedProxies;

use address::{AddressFault, AddressStep, Chain};
pub use credential::KnownKeys;
use credential::{ApiKeys, CredentialFault, Jwt, User, UserHeader, client_cert};

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

/// Where a trusted proxy writes the client's address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressSource {
    /// `X-Forwarded-For`, read from the right.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239), read from the right.
    Forwarded,
    /// A header that holds exactly one address.
    Single(http::HeaderName),
    /// No header: the peer is the client.
    None,
}

impl AddressSource {
    /// The header's name; `None` if no header is read.
    pub fn name(&self) -> Option<String> {
        match self {
            AddressSource::XForwardedFor => Some("x-forwarded-for".to_owned()),
            AddressSource::Forwarded => Some("forwarded".to_owned()),
            AddressSource::Single(name) => Some(name.to_string()),
            AddressSource::None => None,
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

/// A client certificate field that can name the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CertificateField {
    /// The subject's common name.
    #[default]
    CommonName,
    /// The DNS name among the subject's alternative names.
    SanDns,
    /// The URI among the subject's alternative names, such as a SPIFFE ID.
    SanUri,
    /// The SHA-256 digest of the certificate, in hexadecimal.
    Fingerprint,
}

impl CertificateField {
    /// All variants.
    pub const ALL: [CertificateField; 4] = [
        CertificateField::CommonName,
        CertificateField::SanDns,
        CertificateField::SanUri,
        CertificateField::Fingerprint,
    ];

    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            CertificateField::CommonName => "common_name",
            CertificateField::SanDns => "san_dns",
            CertificateField::SanUri => "san_uri",
            CertificateField::Fingerprint => "fingerprint",
        }
    }
}

/// Names in a verified client certificate: all values of each field, in certificate order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientCertificate {
    /// Subject common names; a value that is not text becomes an empty string.
    pub common_names: Vec<String>,
    /// DNS names, in lower case.
    pub dns_names: Vec<String>,
    /// URIs.
    pub uris: Vec<String>,
    /// SHA-256 of the certificate, 64 hexadecimal digits in lower case.
    pub fingerprint: String,
}

/// One entry of a keys file.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// SHA-256 digest of the secret. The secret itself is never stored.
    pub sha256: [u8; 32],
    /// The user that the key identifies.
    pub user: String,
    /// The user's tier.
    pub tier: Option<String>,
    /// The user's tenant.
    pub tenant: Option<String>,
}

/// How to treat a credential that does not verify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnInvalid {
    /// Answer 401.
    #[default]
    Reject,
    /// Continue as if the request carried no credential.
    Anonymous,
}

/// One part of a limit's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// The client's address, aggregated to a prefix.
    Ip,
    /// The verified user.
    User,
    /// The verified user, or the address if there is none.
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
    /// Any other header field.
    Header(http::HeaderName),
    /// A query parameter.
    Query(String),
    /// A cookie of the request.
    Cookie(String),
    /// A claim of the user's token.
    Claim(String),
    /// A path parameter of the route.
    Param(String),
    /// A body field, JSON or form. `a.b` is field `b` of object `a`.
    Body(String),
}

impl KeyPart {
    /// Whether clients choose this value freely and can generate unlimited distinct values.
    pub fn is_chosen(&self) -> bool {
        match self {
            KeyPart::Path
            | KeyPart::UserAgent
            | KeyPart::Header(_)
            | KeyPart::Query(_)
            | KeyPart::Cookie(_)
            | KeyPart::Param(_)
            | KeyPart::Body(_) => true,
            KeyPart::Ip
            | KeyPart::User
            | KeyPart::UserOrIp
            | KeyPart::Tenant
            | KeyPart::Tier
            | KeyPart::Method
            | KeyPart::Host
            | KeyPart::Route
            | KeyPart::Claim(_) => false,
        }
    }

    /// Whether this part separates clients by something that they cannot choose.
    pub fn is_vouched(&self) -> bool {
        matches!(
            self,
            KeyPart::Ip | KeyPart::User | KeyPart::UserOrIp | KeyPart::Tenant | KeyPart::Claim(_)
        )
    }
}

/// The configuration spelling: `ip`, `header:x-device`.
impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyPart::Ip => "ip",
            KeyPart::User => "user",
            KeyPart::UserOrIp => "user_or_ip",
            KeyPart::Tenant => "tenant",
            KeyPart::Tier => "tier",
            KeyPart::Method => "method",
            KeyPart::Host => "host",
            KeyPart::Route => "route",
            KeyPart::Path => "path",
            KeyPart::UserAgent => "user_agent",
            KeyPart::Header(name) => return write!(f, "header:{name}"),
            KeyPart::Query(name) => return write!(f, "query:{name}"),
            KeyPart::Cookie(name) => return write!(f, "cookie:{name}"),
            KeyPart::Claim(name) => return write!(f, "claim:{name}"),
            KeyPart::Param(name) => return write!(f, "param:{name}"),
            KeyPart::Body(name) => return write!(f, "body:{name}"),
        })
    }
}

impl KeyPart {
    /// Human-readable spelling: `client IP`, `header x-device`.
    pub fn in_words(&self) -> String {
        match self {
            KeyPart::Ip => "client IP".to_owned(),
            KeyPart::UserOrIp => "user or client IP".to_owned(),
            KeyPart::UserAgent => "user agent".to_owned(),
            KeyPart::Header(name) => format!("header {name}"),
            KeyPart::Query(name) => format!("query parameter {name}"),
            KeyPart::Cookie(name) => format!("cookie {name}"),
            KeyPart::Claim(name) => format!("claim {name}"),
            KeyPart::Param(name) => format!("path parameter {name}"),
            KeyPart::Body(name) => format!("body field {name}"),
            one_word => one_word.to_string(),
        }
    }
}

/// Identifies clients: their address and their user.
#[derive(Debug)]
pub struct Identifier {
    chain: Chain,
    users: Vec<UserLookup>,
}

/// A [`UserSource`] compiled for lookup.
#[derive(Debug)]
enum UserLookup {
    ApiKey(ApiKeys),
    Jwt(Box<Jwt>),
    Header(UserHeader),
    ClientCert(CertificateField),
}

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
    pub token: Option<&'a jwt::Verified>,
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

/// One step in finding the client, for `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thought<'a> {
    /// A step towards the address.
    Address(AddressStep<'a>),
    /// A step towards the user.
    User {
        /// Index of the source in the configuration.
        place: usize,
        /// The result of that source.
        outcome: Tried,
    },
}

/// Result of one user source. The texts are from [`Credential::faults`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// The request carries no credential of this kind.
    Nothing,
    /// This kind of credential is accepted only from trusted proxies, and the peer is not one.
    NotFromHere,
    /// The credential does not verify and is ignored as configured.
    Ignored(&'static str),
    /// The credential does not verify: answer 401.
    Rejected(&'static str),
    /// The source names the user; later sources are not tried.
    Found,
}

/// A credential that does not verify. Answer 401 with a body that does not distinguish an unknown
/// key from a revoked one. `source` and `kind` are small closed sets, safe as metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The client without a user, because failed guesses are counted by address.
    pub client: Client<'static>,
    /// How the client tried to identify itself.
    pub source: Credential,
    /// One of [`Credential::faults`].
    pub kind: &'static str,
}

impl Rejected {
    /// The `WWW-Authenticate` value (RFC 9110 §11.6.1). `ApiKey` and `ClientCertificate` are not
    /// registered schemes, but the field may not be empty. For a token, the error code is one of
    /// RFC 6750 §3.1. Saying that a token has expired leaks nothing, because only genuine tokens
    /// get that far.
    pub fn challenge(&self) -> &'static str {
        match self.source {
            Credential::Bearer => "Bearer",
            Credential::ApiKey | Credential::Header => "ApiKey",
            Credential::ClientCert => "ClientCertificate",
            Credential::Token if self.kind == CredentialFault::Expired.label() => {
                r#"Bearer error="invalid_token", error_description="The token has expired""#
            }
            Credential::Token => r#"Bearer error="invalid_token""#,
        }
    }
}

/// The kind of credential that a client presented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// An API key in `Authorization`.
    Bearer,
    /// An API key in another header.
    ApiKey,
    /// A JSON Web Token.
    Token,
    /// A header set by a trusted proxy.
    Header,
    /// A client certificate from the TLS handshake.
    ClientCert,
}

impl Credential {
    /// The metric label: the `from` of the `[[user]]` table.
    pub fn label(self) -> &'static str {
        match self {
            Credential::Bearer | Credential::ApiKey => "api_key",
            Credential::Token => "jwt",
            Credential::Header => "header",
            Credential::ClientCert => "client_cert",
        }
    }

    /// All metric labels for what can be wrong with it.
    pub fn faults(self) -> &'static [&'static str] {
        match self {
            Credential::Token => &[
                "malformed",
                "repeated",
                "unknown_key",
                "algorithm",
                "signature",
                "expired",
                "claims",
                "no_keys",
            ],
            _ => &["unknown", "repeated", "malformed"],
        }
    }
}

impl Identifier {
    /// Compiles the settings; indexes the trusted networks.
    pub fn new(settings: &IdentitySettings) -> Identifier {
        let source = |(place, source): (usize, &UserSource)| match source {
            UserSource::Jwt(source) => UserLookup::Jwt(Box::new(Jwt::new(source, place))),
            UserSource::ApiKey {
                header,
                keys,
                invalid,
            } => UserLookup::ApiKey(ApiKeys {
                header: header.clone(),
                keys: keys.clone(),
                invalid: *invalid,
            }),
            UserSource::Header {
                header,
                tier_header,
            } => UserLookup::Header(UserHeader {
                user: header.clone(),
                tier: tier_header.clone(),
            }),
            UserSource::ClientCert(field) => UserLookup::ClientCert(*field),
        };
        Identifier {
            chain: Chain {
                source: settings.address_from.clone(),
                trusted: TrustedProxies::new(&settings.trusted_proxies),
                hops: settings.trusted_hops,
            },
            users: settings.users.iter().enumerate().map(source).collect(),
        }
    }

    /// Finds the client's address, and its user if a credential names one. Allocates only for a
    /// `Forwarded` value with backslashes or a token that is not cached. Costs one search in the
    /// trusted networks. An API key adds one SHA-256; a token adds one keyed hash, and a
    /// verification the first time.
    ///
    /// `certificate` is the peer's verified certificate. Behind a proxy it is the proxy's.
    pub fn identify<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a ClientCertificate>,
        headers: &'a HeaderMap,
        tokens: TokenWorkspace<'a>,
    ) -> Result<Client<'a>, Rejected> {
        self.reason(peer, certificate, headers, tokens, |_| ())
    }

    /// Like [`Identifier::identify`], but passes each step to `visit`.
    pub fn reason<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a ClientCertificate>,
        headers: &'a HeaderMap,
        tokens: TokenWorkspace<'a>,
        mut visit: impl FnMut(Thought<'a>),
    ) -> Result<Client<'a>, Rejected> {
        let client = self.locate(peer, headers, |step| visit(Thought::Address(step)));
        let rejected = |source, fault: CredentialFault| Rejected {
            client,
            source,
            kind: fault.label(),
        };
        for (place, source) in self.users.iter().enumerate() {
            let mut tried = |outcome| visit(Thought::User { place, outcome });
            let found = match source {
                UserLookup::ApiKey(keys) => match (keys.user(headers), keys.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(Tried::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(Tried::Rejected(fault.label()));
                        rejected(keys.credential(), fault)
                    })?,
                },
                UserLookup::Jwt(jwt) => match (jwt.user(headers, tokens), jwt.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(Tried::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(Tried::Rejected(fault.label()));
                        rejected(Credential::Token, fault)
                    })?,
                },
                UserLookup::Header(_) if !client.peer_trusted => {
                    tried(Tried::NotFromHere);
                    continue;
                }
                UserLookup::Header(header) => header.user(headers).map_err(|fault| {
                    tried(Tried::Rejected(fault.label()));
                    rejected(Credential::Header, fault)
                })?,
                UserLookup::ClientCert(field) => match certificate {
                    Some(certificate) => {
                        client_cert::user(*field, certificate).map_err(|fault| {
                            tried(Tried::Rejected(fault.label()));
                            rejected(Credential::ClientCert, fault)
                        })?
                    }
                    None => None,
                },
            };
            tried(found.map_or(Tried::Nothing, |_| Tried::Found));
            if let Some(User {
                name,
                tier,
                tenant,
                token,
            }) = found
            {
                return Ok(Client {
                    user: Some(name),
                    tier,
                    tenant,
                    token,
                    ..client
                });
            }
        }
        Ok(client)
    }

    /// The key sets to fetch from a URL, and the rings that use them. A ring is empty until its
    /// first fetch, and tokens for it are rejected.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.users.iter().filter_map(|source| match source {
            UserLookup::Jwt(jwt) => Some((jwt.url.as_ref()?, &jwt.keys)),
            UserLookup::ApiKey(_) | UserLookup::Header(_) | UserLookup::ClientCert(_) => None,
        })
    }

    /// Elements of the address list to the left of the first `seen` ones. For `explain`.
    pub fn unseen<'a>(&self, headers: &'a HeaderMap, seen: usize) -> Vec<&'a [u8]> {
        self.chain.unseen(headers, seen)
    }

    /// Finds only the client's address, and passes each step to `visit`.
    pub fn locate<'a>(
        &self,
        peer: IpAddr,
        headers: &'a HeaderMap,
        visit: impl FnMut(AddressStep<'a>),
    ) -> Client<'static> {
        let found = self.chain.resolve(peer, headers, visit);
        Client {
            address: found.client,
            peer_trusted: found.peer_trusted,
            doubt: found.doubt,
            ..Client::anonymous(found.peer)
        }
    }
}

#[cfg(test)]
mod tests;
