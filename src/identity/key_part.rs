//! The parts of which the key of a limit consists.

use std::fmt;

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
