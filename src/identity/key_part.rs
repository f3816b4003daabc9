//! The parts of which the key of a limit consists, with one record for each kind.
//!
//! To add a part, write its variant and its record here, and read its value in `key.rs`.

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

/// The properties of one kind of part.
#[derive(Clone, Copy, Debug)]
pub struct KeyPartRecord {
    /// The spelling in the configuration: `ip`, or a prefix such as `header:`.
    pub spelling: &'static str,
    /// The kind in a sentence: `client IP`, `header`.
    pub words: &'static str,
    /// Who determines the value.
    pub origin: PartOrigin,
    /// The value depends on the request's target or body, not only on the client.
    pub of_target: bool,
    /// The value may be a secret, so logs show a hash of it.
    pub is_secret: bool,
    /// The value may be an address.
    pub has_address: bool,
    /// What a request needs to have a value.
    pub needs: PartNeeds,
}

/// Who determines the value of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOrigin {
    /// tidegate verifies it, and it separates clients from each other.
    Verified,
    /// It has few values, or the configuration lists them.
    Limited,
    /// The client chooses it freely and can generate unlimited distinct values.
    Chosen,
}

/// What a request needs to have a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartNeeds {
    /// Nothing that a configuration can lack.
    Nothing,
    /// A verified user.
    User,
    /// A verified token.
    Token,
}

/// A kind of part with a name after a prefix.
#[derive(Clone, Copy, Debug)]
pub struct NamedPart {
    /// The prefix, such as `header:`.
    pub prefix: &'static str,
    /// The placeholder of the name in messages, such as `NAME`.
    pub placeholder: &'static str,
    /// Makes the part; `None` if the name is not valid.
    pub make: fn(&str) -> Option<KeyPart>,
    /// What the name must be.
    pub rule: &'static str,
    /// What to write instead of an invalid name.
    pub hint: &'static str,
}

/// The longest name of a part.
const NAME_MAX_BYTES: usize = 128;

/// The rule and the hint of most names.
const VALID_NAME: (&str, &str) = (
    "a valid name in a key part",
    "examples: \"query:page\", \"cookie:session\", \"claim:sid\", \"param:id\", \"body:username\" or \"body:user.name\"",
);

impl KeyPart {
    /// The parts without a name.
    pub const PLAIN: [KeyPart; 10] = [
        KeyPart::Ip,
        KeyPart::User,
        KeyPart::UserOrIp,
        KeyPart::Tenant,
        KeyPart::Tier,
        KeyPart::Method,
        KeyPart::Host,
        KeyPart::Route,
        KeyPart::Path,
        KeyPart::UserAgent,
    ];

    /// The kinds of parts with a name.
    pub const NAMED: [NamedPart; 6] = [
        NamedPart {
            prefix: "header:",
            placeholder: "NAME",
            make: |name| {
                http::HeaderName::from_bytes(name.as_bytes())
                    .ok()
                    .map(KeyPart::Header)
            },
            rule: "an HTTP field name",
            hint: "write header:NAME, for example \"header:x-device-id\"",
        },
        named("query:", "NAME", |name| {
            Some(KeyPart::Query(valid(name, |_| true)?))
        }),
        named("cookie:", "NAME", |name| {
            let name = valid(name, |name| !name.contains(['=', ';']))?;
            Some(KeyPart::Cookie(name))
        }),
        named("claim:", "NAME", |name| {
            Some(KeyPart::Claim(valid(name, |_| true)?))
        }),
        named("param:", "NAME", |name| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            Some(KeyPart::Param(valid(name, |name| {
                name.chars().all(allowed)
            })?))
        }),
        named("body:", "FIELD", |name| {
            let has_names = |name: &str| name.split('.').all(|name| !name.is_empty());
            Some(KeyPart::Body(valid(name, has_names)?))
        }),
    ];

    /// The properties of this kind of part.
    pub const fn record(&self) -> KeyPartRecord {
        match self {
            KeyPart::Ip => record("ip", "client IP").verified().address(),
            KeyPart::User => record("user", "user").verified().needs(PartNeeds::User),
            KeyPart::UserOrIp => record("user_or_ip", "user or client IP")
                .verified()
                .address(),
            KeyPart::Tenant => record("tenant", "tenant").verified().needs(PartNeeds::User),
            KeyPart::Tier => record("tier", "tier").needs(PartNeeds::User),
            KeyPart::Method => record("method", "method").of_target(),
            KeyPart::Host => record("host", "host"),
            KeyPart::Route => record("route", "route").of_target(),
            KeyPart::Path => record("path", "path").of_target().chosen(),
            KeyPart::UserAgent => record("user_agent", "user agent").chosen().secret(),
            KeyPart::Header(_) => record("header:", "header").chosen().secret(),
            KeyPart::Query(_) => record("query:", "query parameter")
                .of_target()
                .chosen()
                .secret(),
            KeyPart::Cookie(_) => record("cookie:", "cookie").chosen().secret(),
            KeyPart::Claim(_) => record("claim:", "claim").verified().needs(PartNeeds::Token),
            KeyPart::Param(_) => record("param:", "path parameter").of_target().chosen(),
            KeyPart::Body(_) => record("body:", "body field").of_target().chosen().secret(),
        }
    }

    /// The name after the prefix.
    fn name(&self) -> Option<&str> {
        match self {
            KeyPart::Header(name) => Some(name.as_str()),
            KeyPart::Query(name)
            | KeyPart::Cookie(name)
            | KeyPart::Claim(name)
            | KeyPart::Param(name)
            | KeyPart::Body(name) => Some(name),
            KeyPart::Ip
            | KeyPart::User
            | KeyPart::UserOrIp
            | KeyPart::Tenant
            | KeyPart::Tier
            | KeyPart::Method
            | KeyPart::Host
            | KeyPart::Route
            | KeyPart::Path
            | KeyPart::UserAgent => None,
        }
    }

    /// Whether clients choose this value freely and can generate unlimited distinct values.
    pub fn is_chosen(&self) -> bool {
        self.record().origin == PartOrigin::Chosen
    }

    /// Whether this part separates clients by something that they cannot choose.
    pub fn is_verified(&self) -> bool {
        self.record().origin == PartOrigin::Verified
    }

    /// Whether the value may be an address.
    pub fn has_address(&self) -> bool {
        self.record().has_address
    }

    /// The names of the value in a readable key: `user` or `ip` for [`KeyPart::UserOrIp`],
    /// otherwise the part itself.
    pub fn value_names(&self) -> Vec<String> {
        match self {
            KeyPart::UserOrIp => vec!["user".to_owned(), "ip".to_owned()],
            part => vec![part.to_string()],
        }
    }

    /// Human-readable spelling: `client IP`, `header x-device`.
    pub fn in_words(&self) -> String {
        let words = self.record().words;
        match self.name() {
            Some(name) => format!("{words} {name}"),
            None => words.to_owned(),
        }
    }
}

/// The configuration spelling: `ip`, `header:x-device`.
impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.record().spelling)?;
        f.write_str(self.name().unwrap_or_default())
    }
}

/// A part that tells nothing about the client and has few values.
const fn record(spelling: &'static str, words: &'static str) -> KeyPartRecord {
    KeyPartRecord {
        spelling,
        words,
        origin: PartOrigin::Limited,
        of_target: false,
        is_secret: false,
        has_address: false,
        needs: PartNeeds::Nothing,
    }
}

impl KeyPartRecord {
    const fn verified(mut self) -> KeyPartRecord {
        self.origin = PartOrigin::Verified;
        self
    }

    const fn chosen(mut self) -> KeyPartRecord {
        self.origin = PartOrigin::Chosen;
        self
    }

    const fn of_target(mut self) -> KeyPartRecord {
        self.of_target = true;
        self
    }

    const fn secret(mut self) -> KeyPartRecord {
        self.is_secret = true;
        self
    }

    const fn address(mut self) -> KeyPartRecord {
        self.has_address = true;
        self
    }

    const fn needs(mut self, needs: PartNeeds) -> KeyPartRecord {
        self.needs = needs;
        self
    }
}

const fn named(
    prefix: &'static str,
    placeholder: &'static str,
    make: fn(&str) -> Option<KeyPart>,
) -> NamedPart {
    let (rule, hint) = VALID_NAME;
    NamedPart {
        prefix,
        placeholder,
        make,
        rule,
        hint,
    }
}

/// The name, if it is short, has no white space around it and no control characters.
fn valid(name: &str, is_allowed: impl Fn(&str) -> bool) -> Option<String> {
    let is_plain = !name.is_empty() && name == name.trim() && !name.contains(char::is_control);
    let is_valid = is_plain && name.len() <= NAME_MAX_BYTES && is_allowed(name);
    is_valid.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_made_from_its_spelling() {
        for part in KeyPart::PLAIN {
            assert_eq!(part.to_string(), part.record().spelling);
            assert_eq!(part.name(), None);
        }
        for named in KeyPart::NAMED {
            let part = (named.make)("x").expect("a valid name");
            assert_eq!(part.to_string(), format!("{}x", named.prefix));
            assert_eq!(part.record().spelling, named.prefix);
            assert!((named.make)("").is_none(), "{}", named.prefix);
        }
    }
}
