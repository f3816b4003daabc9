//! Core: whom we count.
//!
//! [`Identifier::identify`] turns a peer and its headers into a [`Client`]: an address that cannot be spoofed ([`address`]) and,
//! where a credential verifies, a user. [`KeyParts::key`](key::KeyParts::key) turns that into the bucket that it shares with
//! others. [`ManagedFields`] names what a client must not be able to tell the upstream.

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
    Tokens,
};
pub use key::{KeyHasher, KeyParts, Keyed, Missing, Subject};
pub use managed::ManagedFields;
pub use trusted::TrustedProxies;

use address::{Chain, Doubt, Step};
pub use credential::KnownKeys;
use credential::{ApiKeys, Fault, Jwt, User, UserHeader, client_cert};

/// How the client's address and user are found.
#[derive(Debug)]
pub struct Settings {
    /// Networks whose forwarding headers are believed.
    pub trusted_proxies: Vec<IpNet>,
    /// Where a trusted proxy writes the client's address.
    pub address_from: AddressSource,
    /// So many proxies in front append to that list; it is then counted, and every peer is believed if no network is trusted.
    pub trusted_hops: Option<u8>,
    /// IPv4 addresses are aggregated to this prefix when they key a limit.
    pub ipv4_prefix: u8,
    /// IPv6 addresses are aggregated to this prefix when they key a limit.
    pub ipv6_prefix: u8,
    /// Where users come from; tried in order, the first that finds a credential decides.
    pub users: Vec<UserSource>,
}

impl Default for Settings {
    /// Nobody is trusted, nobody has a name, and addresses count by /32 and /64.
    fn default() -> Settings {
        let Prefixes { ipv4, ipv6 } = Prefixes::default();
        Settings {
            trusted_proxies: Vec::new(),
            address_from: AddressSource::default(),
            trusted_hops: None,
            ipv4_prefix: ipv4,
            ipv6_prefix: ipv6,
            users: Vec::new(),
        }
    }
}

impl Settings {
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
    /// `X-Forwarded-For`, walked from the right.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239), walked from the right.
    Forwarded,
    /// A header that holds exactly one address.
    Single(http::HeaderName),
    /// Nowhere: the peer is the client.
    None,
}

impl AddressSource {
    /// The header's name; `None` where none is read.
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
    /// A key in a header, looked up by its SHA-256 digest.
    ApiKey {
        /// The header that carries the key.
        header: http::HeaderName,
        /// The known keys.
        keys: KnownKeys,
        /// What an unknown key means.
        invalid: OnInvalid,
    },
    /// A JSON Web Token in a header.
    Jwt(Box<TokenSource>),
    /// Written by an authenticating proxy in front; believed only from trusted proxies.
    Header {
        /// The header that names the user.
        header: http::HeaderName,
        /// The header that names the tier.
        tier_header: Option<http::HeaderName>,
    },
    /// A field of the certificate that the client has proved to hold.
    ClientCert(CertificateField),
}

/// A field of a client certificate that can name its holder.
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
    /// All of them.
    pub const ALL: [CertificateField; 4] = [
        CertificateField::CommonName,
        CertificateField::SanDns,
        CertificateField::SanUri,
        CertificateField::Fingerprint,
    ];

    /// As in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            CertificateField::CommonName => "common_name",
            CertificateField::SanDns => "san_dns",
            CertificateField::SanUri => "san_uri",
            CertificateField::Fingerprint => "fingerprint",
        }
    }
}

/// What a verified client certificate says of its holder. Every value of a field, in the certificate's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// Common names of the subject; one that is not text is empty.
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
    /// A parameter of the request's query.
    Query(String),
    /// A cookie of the request.
    Cookie(String),
    /// A claim of the user's token.
    Claim(String),
    /// A parameter of the route's path.
    Param(String),
    /// A field of the request's body, JSON or a form; `a.b` is the field `b` of the object `a`.
    Body(String),
}

impl KeyPart {
    /// Whether clients choose its value, as many values as they like.
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

    /// Whether it tells clients apart by something that they cannot choose.
    pub fn is_vouched(&self) -> bool {
        matches!(
            self,
            KeyPart::Ip | KeyPart::User | KeyPart::UserOrIp | KeyPart::Tenant | KeyPart::Claim(_)
        )
    }
}

/// As a configuration names it: `ip`, `header:x-device`.
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
    /// As people say it: `client IP`, `header x-device`.
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

/// Finds out who asks.
#[derive(Debug)]
pub struct Identifier {
    chain: Chain,
    users: Vec<Source>,
}

/// A [`UserSource`], ready to be looked up.
#[derive(Debug)]
enum Source {
    ApiKey(ApiKeys),
    Jwt(Box<Jwt>),
    Header(UserHeader),
    ClientCert(CertificateField),
}

/// Who asks. Addresses are canonical: an IPv4-mapped one is the IPv4 address that it maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client<'a> {
    /// Whose request it is, as far as it can be believed.
    pub address: IpAddr,
    /// Who is connected to us: the client, or the last proxy before us.
    pub peer: IpAddr,
    /// The peer is a trusted proxy, so its forwarding headers are believed.
    pub peer_trusted: bool,
    /// A trusted proxy handed on an address that could not be read; worth a count.
    pub doubt: Option<Doubt>,
    /// The verified user.
    pub user: Option<&'a str>,
    /// The user's tier.
    pub tier: Option<&'a str>,
    /// The user's tenant.
    pub tenant: Option<&'a str>,
    /// The token that says so.
    pub token: Option<&'a jwt::Verified>,
}

impl<'a> Client<'a> {
    /// Somebody without a name, who is connected to us directly.
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

    /// What the user's token says, as text, if limits are keyed by it.
    pub fn claim(&self, name: &str) -> Option<&'a str> {
        self.token?.claim(name)
    }
}

/// One step of the reasoning about who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thought<'a> {
    /// Towards the address.
    Address(Step<'a>),
    /// Towards the user.
    User {
        /// Which of the sources was tried, in the order of the configuration.
        place: usize,
        /// What came of it.
        outcome: Tried,
    },
}

/// What came of one source of users. The words say what was wrong: one of [`Credential::faults`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// The request has no such credential.
    Nothing,
    /// Such a credential is believed from trusted proxies only, and the peer is none.
    NotFromHere,
    /// A credential that does not verify is taken as none here.
    Ignored(&'static str),
    /// A credential does not verify: 401.
    Rejected(&'static str),
    /// It names the user: no further source is tried.
    Found,
}

/// A credential was there but does not verify: answer 401, with a body that does not tell an unknown key from a withdrawn
/// one. Both texts come from small closed sets, fit for a metric's labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Who asked, without a user: guesses are to be counted by address.
    pub client: Client<'static>,
    /// How the client tried to identify itself.
    pub source: Credential,
    /// One of [`Credential::faults`].
    pub kind: &'static str,
}

impl Rejected {
    /// What `WWW-Authenticate` says (RFC 9110 §11.6.1). `ApiKey` and `ClientCertificate` are no registered schemes, but the
    /// field may not be empty. Of a token
    /// it says what RFC 6750 §3.1 has a word for; that it has expired is no secret, since only a genuine one is known to have.
    pub fn challenge(&self) -> &'static str {
        match self.source {
            Credential::Bearer => "Bearer",
            Credential::ApiKey | Credential::Header => "ApiKey",
            Credential::ClientCert => "ClientCertificate",
            Credential::Token if self.kind == Fault::Expired.label() => {
                r#"Bearer error="invalid_token", error_description="The token has expired""#
            }
            Credential::Token => r#"Bearer error="invalid_token""#,
        }
    }
}

/// How a client identified itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// An API key in `Authorization`.
    Bearer,
    /// An API key in a header of its own.
    ApiKey,
    /// A JSON Web Token.
    Token,
    /// A header of a trusted proxy.
    Header,
    /// A certificate, in the handshake.
    ClientCert,
}

impl Credential {
    /// A word for the metric's label: the `from` of the `[[user]]` table.
    pub fn label(self) -> &'static str {
        match self {
            Credential::Bearer | Credential::ApiKey => "api_key",
            Credential::Token => "jwt",
            Credential::Header => "header",
            Credential::ClientCert => "client_cert",
        }
    }

    /// What can be wrong with it: words for the metric's label.
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
    /// Indexes networks.
    pub fn new(settings: &Settings) -> Identifier {
        let source = |(place, source): (usize, &UserSource)| match source {
            UserSource::Jwt(source) => Source::Jwt(Box::new(Jwt::new(source, place))),
            UserSource::ApiKey {
                header,
                keys,
                invalid,
            } => Source::ApiKey(ApiKeys {
                header: header.clone(),
                keys: keys.clone(),
                invalid: *invalid,
            }),
            UserSource::Header {
                header,
                tier_header,
            } => Source::Header(UserHeader {
                user: header.clone(),
                tier: tier_header.clone(),
            }),
            UserSource::ClientCert(field) => Source::ClientCert(*field),
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

    /// Finds out who asks: the address always, the user where a credential says so. Allocates nothing unless a `Forwarded`
    /// value has backslashes, or for a token that is not remembered; costs a search in the trusted networks and, for an API
    /// key, one SHA-256 of it, for a token a keyed hash of it, or the first time a verification.
    ///
    /// `certificate` is what the peer has proved to hold; behind a proxy that is the proxy's.
    pub fn identify<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a Certificate>,
        headers: &'a HeaderMap,
        tokens: Tokens<'a>,
    ) -> Result<Client<'a>, Rejected> {
        self.reason(peer, certificate, headers, tokens, |_| ())
    }

    /// The same, and shows each step of the reasoning to `visit`.
    pub fn reason<'a>(
        &'a self,
        peer: IpAddr,
        certificate: Option<&'a Certificate>,
        headers: &'a HeaderMap,
        tokens: Tokens<'a>,
        mut visit: impl FnMut(Thought<'a>),
    ) -> Result<Client<'a>, Rejected> {
        let client = self.locate(peer, headers, |step| visit(Thought::Address(step)));
        let rejected = |source, fault: Fault| Rejected {
            client,
            source,
            kind: fault.label(),
        };
        for (place, source) in self.users.iter().enumerate() {
            let mut tried = |outcome| visit(Thought::User { place, outcome });
            let found = match source {
                Source::ApiKey(keys) => match (keys.user(headers), keys.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(Tried::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(Tried::Rejected(fault.label()));
                        rejected(keys.credential(), fault)
                    })?,
                },
                Source::Jwt(jwt) => match (jwt.user(headers, tokens), jwt.invalid) {
                    (Err(fault), OnInvalid::Anonymous) => {
                        tried(Tried::Ignored(fault.label()));
                        continue;
                    }
                    (found, _) => found.map_err(|fault| {
                        tried(Tried::Rejected(fault.label()));
                        rejected(Credential::Token, fault)
                    })?,
                },
                Source::Header(_) if !client.peer_trusted => {
                    tried(Tried::NotFromHere);
                    continue;
                }
                Source::Header(header) => header.user(headers).map_err(|fault| {
                    tried(Tried::Rejected(fault.label()));
                    rejected(Credential::Header, fault)
                })?,
                Source::ClientCert(field) => match certificate {
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

    /// The key sets that are to be fetched, and where they are put to use. Until then each is empty, and its tokens are rejected.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.users.iter().filter_map(|source| match source {
            Source::Jwt(jwt) => Some((jwt.url.as_ref()?, &jwt.keys)),
            Source::ApiKey(_) | Source::Header(_) | Source::ClientCert(_) => None,
        })
    }

    /// What of the list of addresses stands to the left of the elements that were shown. For explaining.
    pub fn unseen<'a>(&self, headers: &'a HeaderMap, seen: usize) -> Vec<&'a [u8]> {
        self.chain.unseen(headers, seen)
    }

    /// Finds the client's address only, and shows each step of the reasoning to `visit`.
    pub fn locate<'a>(
        &self,
        peer: IpAddr,
        headers: &'a HeaderMap,
        visit: impl FnMut(Step<'a>),
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
