//! What shares one bucket: the parts of a limit's key, hashed to 128 bits under a secret.
//!
//! SipHash-2-4 with 128 bits of output: keyed, so that nobody can aim two clients at one bucket or guess from a log line what was
//! hashed. The faster 1-3 would do against aimed collisions alone, but shortened values stand in log lines, and there the
//! rounds of a message authentication code are wanted; the difference is some nanoseconds per key.
//!
//! What is hashed is an injective encoding: the limit, then for each part its place, its kind, its length and its bytes. So `("a", "bc")` is
//! not `("ab", "c")`, a user named like an address is not that address, and no limit shares buckets with another.

use std::{
    fmt::{self, Write},
    hash::Hasher,
};

use http::{HeaderMap, HeaderValue, Method, header::USER_AGENT};
use ipnet::IpNet;
use sha2::{Digest, Sha256};
use siphasher::sip128::{Hasher128, SipHasher24};

use super::{
    Client, KeyPart,
    address::{Prefixes, trim},
};
use crate::limit::Key;

/// The longest host or path that is shown.
const SHOWN_MAX_BYTES: usize = 128;

/// Hashes keys under a secret.
#[derive(Clone, Copy)]
pub struct KeyHasher(SipHasher24);

impl KeyHasher {
    /// A hasher with a random secret of 128 bits.
    pub fn new(secret: [u8; 16]) -> KeyHasher {
        KeyHasher(SipHasher24::new_with_key(&secret))
    }
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHasher(secret)")
    }
}

/// What a key may be made of.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Who asks.
    pub client: &'a Client<'a>,
    /// As in the request.
    pub method: &'a Method,
    /// In its one spelling: lower-case, without port and final dot.
    pub host: &'a str,
    /// The name of the route that was found.
    pub route: &'a str,
    /// The match key of the normalised path.
    pub path: &'a str,
    /// As they arrived.
    pub headers: &'a HeaderMap,
}

/// The parts of one limit's key.
#[derive(Clone, Debug)]
pub struct KeyParts {
    /// Sets the buckets of one limit apart from those of all others.
    limit: u64,
    parts: Box<[KeyPart]>,
}

/// What a part stands for in one request.
enum Value<'a> {
    Address(IpNet),
    User(&'a str),
    Text(&'a str),
    /// All lines of a field, of which at least one says something.
    Field(http::header::GetAll<'a, HeaderValue>),
}

impl KeyParts {
    /// The key of the limit with this name; no parts is one bucket for all.
    pub fn new(limit: &str, parts: Vec<KeyPart>) -> KeyParts {
        let digest: [u8; 32] = Sha256::digest(limit).into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        KeyParts {
            limit: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            parts: parts.into(),
        }
    }

    /// Whether an address can tell buckets apart.
    pub fn has_address(&self) -> bool {
        self.parts
            .iter()
            .any(|part| matches!(part, KeyPart::Ip | KeyPart::UserOrIp))
    }

    /// Whether there is one bucket for all.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The bucket of a request; `None` when some part has no value, so that the limit does not apply. Allocates nothing;
    /// costs some tens of nanoseconds, and for long values the time to hash them.
    pub fn key(
        &self,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        subject: &Subject<'_>,
    ) -> Option<Key> {
        let mut hash = hasher.0;
        hash.write_u64(self.limit);
        for (place, part) in self.parts.iter().enumerate() {
            value(part, prefixes, subject)?.absorb(place, &mut hash);
        }
        Some(Key(hash.finish128().into()))
    }

    /// The key for people: `ip=203.0.113.9/32, user=alice`. Field values are shown as a short hash under the secret, since they may be
    /// secrets themselves; a part without a value is `-`; no parts is `all`.
    pub fn readable(
        &self,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        subject: &Subject<'_>,
    ) -> String {
        if self.parts.is_empty() {
            return "all".to_owned();
        }
        let mut out = String::new();
        for part in &self.parts {
            if !out.is_empty() {
                out.push_str(", ");
            }
            let value = value(part, prefixes, subject);
            let written = match value {
                None => write!(out, "{}=-", name(part)),
                Some(Value::Address(network)) => write!(out, "ip={network}"),
                Some(Value::User(user)) => write!(out, "user={user}"),
                Some(Value::Text(text)) => write!(out, "{}={}", name(part), shortened(text)),
                Some(field @ Value::Field(_)) => {
                    let mut hash = hasher.0;
                    field.absorb(0, &mut hash);
                    let short = hash.finish() >> 32;
                    match part {
                        KeyPart::Header(header) => write!(out, "header:{header}=#{short:08x}"),
                        _ => write!(out, "{}=#{short:08x}", name(part)),
                    }
                }
            };
            written.expect("a String takes any text");
        }
        out
    }
}

fn name(part: &KeyPart) -> &'static str {
    match part {
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
        KeyPart::Header(_) => "header",
    }
}

fn value<'a>(part: &KeyPart, prefixes: Prefixes, subject: &Subject<'a>) -> Option<Value<'a>> {
    let address = || Value::Address(prefixes.aggregate(subject.client.address));
    match part {
        KeyPart::Ip => Some(address()),
        KeyPart::User => subject.client.user.map(Value::User),
        KeyPart::UserOrIp => Some(subject.client.user.map_or_else(address, Value::User)),
        KeyPart::Tenant => subject.client.tenant.map(Value::Text),
        KeyPart::Tier => subject.client.tier.map(Value::Text),
        // a HEAD costs the origin what a GET does, and must not be a second allowance
        KeyPart::Method if subject.method == Method::HEAD => Some(Value::Text("GET")),
        KeyPart::Method => Some(Value::Text(subject.method.as_str())),
        KeyPart::Host => Some(Value::Text(subject.host)),
        KeyPart::Route => Some(Value::Text(subject.route)),
        KeyPart::Path => Some(Value::Text(subject.path)),
        KeyPart::UserAgent => field(subject.headers.get_all(USER_AGENT)),
        KeyPart::Header(header) => field(subject.headers.get_all(header)),
    }
}

/// A field that is absent or says nothing has no value: an empty key would be one bucket for all who send none.
fn field(lines: http::header::GetAll<'_, HeaderValue>) -> Option<Value<'_>> {
    let says_something = lines.iter().any(|line| !trim(line.as_bytes()).is_empty());
    says_something.then_some(Value::Field(lines))
}

impl Value<'_> {
    /// Writes the value so that no other sequence of values is written alike.
    fn absorb(&self, place: usize, hash: &mut SipHasher24) {
        let mut write = |kind: u64, bytes: &[u8]| {
            hash.write_u64((place as u64) << 48 | kind << 40 | bytes.len() as u64);
            hash.write(bytes);
        };
        match self {
            Value::Address(IpNet::V4(network)) => write(1, &network.network().octets()),
            Value::Address(IpNet::V6(network)) => write(2, &network.network().octets()),
            Value::User(user) => write(3, user.as_bytes()),
            Value::Text(text) => write(4, text.as_bytes()),
            Value::Field(lines) => lines
                .iter()
                .for_each(|line| write(5, trim(line.as_bytes()))),
        }
    }
}

fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN_MAX_BYTES)]
}

#[cfg(test)]
mod tests;
