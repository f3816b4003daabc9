//! What shares one bucket: the parts of a limit's key, hashed to 128 bits under a secret.
//!
//! SipHash-2-4 with 128 bits of output: keyed, so that nobody can aim two clients at one bucket or guess from a log line what was
//! hashed. The faster 1-3 would do against aimed collisions alone, but shortened values stand in log lines, and there the
//! rounds of a message authentication code are wanted; the difference is some nanoseconds per key.
//!
//! What is hashed is an injective encoding: the limit, then for each part its place, its kind, its length and its bytes. So `("a", "bc")` is
//! not `("ab", "c")`, a user named like an address is not that address, and no limit shares buckets with another.
//!
//! What a client writes into a query, a cookie, a path or a body is first brought to one form (`text`), so that
//! another spelling is no second allowance.

use std::{
    fmt::{self, Write},
    hash::Hasher,
    net::IpAddr,
};

use http::{
    HeaderMap, HeaderValue, Method,
    header::{COOKIE, USER_AGENT},
};
use ipnet::IpNet;
use sha2::{Digest, Sha256};
use siphasher::sip128::{Hasher128, SipHasher24};

use super::{
    BodyFields, Client, KeyPart,
    address::{Prefixes, trim},
    text::{self, Given},
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
#[derive(Clone, Copy)]
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
    /// What stands after the first `?`, as it arrived.
    pub query: Option<&'a str>,
    /// What the parameters of the route's path stand for, taken from `path`.
    pub params: &'a dyn Fn(&str) -> Option<&'a str>,
    /// The fields of the body that limits want; `None` where there is no body, or no limit wants a field.
    pub body: Option<&'a BodyFields>,
}

/// Without what may be secret: headers, query and body.
impl fmt::Debug for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject")
            .field("client", &self.client)
            .field("method", &self.method)
            .field("host", &self.host)
            .field("route", &self.route)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// What happens where a part of the key has no value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// The limit does not apply.
    #[default]
    Skip,
    /// The part counts as absent: one bucket for all who lack it and agree in the other parts.
    Shared,
    /// The request is answered 400.
    Reject,
}

/// Where a request is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyed<'p> {
    /// In this bucket.
    Bucket(Key),
    /// Nowhere: the limit does not apply.
    Skip,
    /// Nowhere: the request lacks this part and is to be answered 400.
    Missing(&'p KeyPart),
}

/// The parts of one limit's key.
#[derive(Clone, Debug)]
pub struct KeyParts {
    /// Sets the buckets of one limit apart from those of all others.
    limit: u64,
    parts: Box<[KeyPart]>,
    /// The names of the `body:` parts.
    body_fields: Box<[String]>,
}

/// What a part stands for in one request.
enum Value<'a> {
    Address(IpNet),
    User(&'a str),
    Text(&'a str),
    /// All lines of a field, of which at least one says something.
    Field(http::header::GetAll<'a, HeaderValue>),
    /// A parameter of the path as it stands there, and folded.
    Param(&'a str, String),
    /// In the one form in which texts are compared.
    Folded(String),
    /// Given more than once and differently, or in a form that holds no text: one value, whatever it was.
    Unclear,
    /// Missing, and counted as such.
    Absent,
}

impl KeyParts {
    /// The key of the limit with this name; no parts is one bucket for all.
    pub fn new(limit: &str, parts: Vec<KeyPart>) -> KeyParts {
        let digest: [u8; 32] = Sha256::digest(limit).into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        let body_field = |part: &KeyPart| match part {
            KeyPart::Body(name) => Some(name.clone()),
            _ => None,
        };
        KeyParts {
            body_fields: parts.iter().filter_map(body_field).collect(),
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

    /// Whether what is asked for tells buckets apart, not only who asks.
    pub fn depends_on_target(&self) -> bool {
        self.parts.iter().any(|part| match part {
            KeyPart::Method
            | KeyPart::Route
            | KeyPart::Path
            | KeyPart::Query(_)
            | KeyPart::Param(_)
            | KeyPart::Body(_) => true,
            KeyPart::Ip
            | KeyPart::User
            | KeyPart::UserOrIp
            | KeyPart::Tenant
            | KeyPart::Tier
            | KeyPart::Host
            | KeyPart::UserAgent
            | KeyPart::Header(_)
            | KeyPart::Cookie(_)
            | KeyPart::Claim(_) => false,
        })
    }

    /// Whether there is one bucket for all.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The fields of a body that the key is made of: what [`BodyFormat::read`](super::BodyFormat::read) looks for. Where there are none, no
    /// body has to be read before the request is decided.
    pub fn wanted_body_fields(&self) -> &[String] {
        &self.body_fields
    }

    /// The bucket of a request, or what a missing part makes of it. Costs some tens of nanoseconds, and for long values the
    /// time to hash them; allocates only for values of a query, a cookie or a path's parameter.
    pub fn key(
        &self,
        missing: Missing,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        subject: &Subject<'_>,
    ) -> Keyed<'_> {
        let mut hash = hasher.0;
        hash.write_u64(self.limit);
        for (place, part) in self.parts.iter().enumerate() {
            match (value(part, prefixes, subject), missing) {
                (Some(value), _) => value.absorb(place, &mut hash),
                (None, Missing::Shared) => Value::Absent.absorb(place, &mut hash),
                (None, Missing::Skip) => return Keyed::Skip,
                (None, Missing::Reject) => return Keyed::Missing(part),
            }
        }
        Keyed::Bucket(Key(hash.finish128().into()))
    }

    /// The bucket of a request in words that all gateways share: SHA-256 under no secret, cut to 128 bits, for they have none in
    /// common. Nobody can aim two clients at one bucket; whoever reads it can test a guess of what was hashed. For a request
    /// of which [`KeyParts::key`] made a bucket. Costs some hundreds of nanoseconds.
    pub fn shared(&self, prefixes: Prefixes, subject: &Subject<'_>) -> [u8; 16] {
        let mut hash = Portable(Sha256::new());
        hash.write_u64(self.limit);
        for (place, part) in self.parts.iter().enumerate() {
            let value = value(part, prefixes, subject).unwrap_or(Value::Absent);
            value.absorb(place, &mut hash);
        }
        let digest: [u8; 32] = hash.0.finalize().into();
        let [half, _] = *digest.as_chunks().0 else {
            return [0; 16];
        };
        half
    }

    /// The bucket that [`KeyParts::readable`] calls so, and its name in full. A single part needs no name: `203.0.113.9`. `None`
    /// where the text is no such name, or does not say enough: of a secret only a hash is shown, and long texts are cut.
    pub fn named(
        &self,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        text: &str,
    ) -> Option<(String, Option<Key>)> {
        if self.parts.is_empty() {
            return (text == "all").then(|| (text.to_owned(), None));
        }
        let mut hash = hasher.0;
        hash.write_u64(self.limit);
        let mut full = String::new();
        let mut rest = text;
        for (place, part) in self.parts.iter().enumerate() {
            let named = |rest: &str, name: &str| -> Option<usize> {
                let after = rest.strip_prefix(name)?.strip_prefix('=')?;
                Some(rest.len() - after.len())
            };
            let names: &[String] = &match part {
                KeyPart::UserOrIp => vec!["user".to_owned(), "ip".to_owned()],
                part => vec![part.to_string()],
            };
            let found = names
                .iter()
                .find_map(|name| Some((name, named(rest, name)?)));
            let (name, skip) = match found {
                Some((name, skip)) => (name.clone(), skip),
                None if self.parts.len() == 1 => {
                    let is_address =
                        rest.parse::<IpNet>().is_ok() || rest.parse::<IpAddr>().is_ok();
                    let name = if is_address {
                        names.last()
                    } else {
                        names.first()
                    };
                    (name?.clone(), 0)
                }
                None => return None,
            };
            rest = &rest[skip..];
            let end = match self.parts.get(place + 1) {
                Some(KeyPart::UserOrIp) => {
                    let ends = [", user=", ", ip="].map(|next| rest.find(next));
                    ends.into_iter().flatten().min()?
                }
                Some(next) => rest.find(&format!(", {next}="))?,
                None => rest.len(),
            };
            let text = &rest[..end];
            rest = rest.get(end + 2..).unwrap_or_default();
            let folded;
            let value = match part {
                _ if text.is_empty() || text.len() >= SHOWN_MAX_BYTES => return None,
                KeyPart::Ip | KeyPart::UserOrIp if name == "ip" => {
                    let network = text.parse::<IpNet>().ok();
                    let address = network.map(|network| network.addr());
                    Value::Address(prefixes.aggregate(address.or_else(|| text.parse().ok())?))
                }
                KeyPart::User | KeyPart::UserOrIp => Value::User(text),
                KeyPart::Param(_) => {
                    folded = text::folded_param(text);
                    Value::Param(text, folded)
                }
                KeyPart::UserAgent
                | KeyPart::Header(_)
                | KeyPart::Query(_)
                | KeyPart::Cookie(_)
                | KeyPart::Body(_) => return None,
                _ => Value::Text(text),
            };
            if !full.is_empty() {
                full.push_str(", ");
            }
            match &value {
                Value::Address(network) => write!(full, "ip={network}").ok()?,
                _ => write!(full, "{name}={text}").ok()?,
            }
            value.absorb(place, &mut hash);
        }
        Some((full, Some(Key(hash.finish128().into()))))
    }

    /// The key for people: `ip=203.0.113.9/32, user=alice`. Values of fields, queries, cookies and bodies are shown as a short
    /// hash under the secret, since they may be secrets themselves; a part without a value is `-`, one whose value is unclear
    /// `?`; no parts is `all`.
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
            let written = match value(part, prefixes, subject) {
                None | Some(Value::Absent) => write!(out, "{part}=-"),
                Some(Value::Unclear) => write!(out, "{part}=?"),
                Some(Value::Address(network)) => write!(out, "ip={network}"),
                Some(Value::User(user)) => write!(out, "user={user}"),
                Some(Value::Text(text) | Value::Param(text, _)) => {
                    write!(out, "{part}={}", shortened(text))
                }
                Some(secret @ (Value::Field(_) | Value::Folded(_))) => {
                    let mut hash = hasher.0;
                    secret.absorb(0, &mut hash);
                    let short = hash.finish() >> 32;
                    write!(out, "{part}=#{short:08x}")
                }
            };
            written.expect("a String takes any text");
        }
        out
    }
}

/// A hash that is the same on every machine.
struct Portable(Sha256);

impl Hasher for Portable {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn write_u64(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn finish(&self) -> u64 {
        let digest: [u8; 32] = self.0.clone().finalize().into();
        digest
            .iter()
            .take(8)
            .fold(0, |hash, &byte| hash << 8 | u64::from(byte))
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
        KeyPart::Query(name) => given(text::in_query(subject.query?, name)),
        KeyPart::Cookie(name) => given(text::in_cookies(
            subject.headers.get_all(COOKIE).iter(),
            name,
        )),
        KeyPart::Claim(name) => subject.client.claim(name).map(Value::Text),
        KeyPart::Param(name) => {
            let raw = (subject.params)(name)?;
            let folded = text::folded_param(raw);
            (!folded.is_empty()).then_some(Value::Param(raw, folded))
        }
        KeyPart::Body(name) => {
            let mut found = subject
                .body
                .map_or_else(Given::default, |body| body.get(name));
            // many frameworks read fields of a body and of the query in one way
            if let Some(query) = subject.query {
                found.add_form(query.as_bytes(), name);
            }
            given(found)
        }
    }
}

fn given(given: Given) -> Option<Value<'static>> {
    match given {
        Given::Nothing => None,
        Given::Text(text) => Some(Value::Folded(text)),
        Given::Unclear => Some(Value::Unclear),
    }
}

/// A field that is absent or says nothing has no value: an empty key would be one bucket for all who send none.
fn field(lines: http::header::GetAll<'_, HeaderValue>) -> Option<Value<'_>> {
    let says_something = lines.iter().any(|line| !trim(line.as_bytes()).is_empty());
    says_something.then_some(Value::Field(lines))
}

impl Value<'_> {
    /// Writes the value so that no other sequence of values is written alike.
    fn absorb(&self, place: usize, hash: &mut impl Hasher) {
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
            Value::Param(_, text) | Value::Folded(text) => write(6, text.as_bytes()),
            Value::Unclear => write(7, &[]),
            Value::Absent => write(8, &[]),
        }
    }
}

fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN_MAX_BYTES)]
}

#[cfg(test)]
mod tests;
