//! Bucket keys: the parts of a limit's key, hashed to 128 bits under a secret.
//!
//! The hash is SipHash-2-4 with 128 bits of output. It is keyed, so nobody can force two clients
//! into one bucket or guess the hashed value from a log line. SipHash-1-3 would prevent forced
//! collisions and is some nanoseconds faster. But shortened hashes appear in logs, where the rounds
//! of a message authentication code are needed.
//!
//! The hashed encoding is injective: the limit, then for each part its position, kind, length and
//! bytes. So `("a", "bc")` differs from `("ab", "c")`, a user named like an address differs from
//! that address, and limits never share buckets.
//!
//! Values from a query, cookie, path or body are first normalised by `text`, so a different
//! spelling does not give a second allowance.

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
    address::{Prefixes, trim},
    body::BodyFields,
    client::Client,
    key_part::KeyPart,
    text::{self, FieldValue},
};
use crate::limit::Key;

/// The longest host or path that is displayed.
const SHOWN_MAX_BYTES: usize = 128;

/// Hashes keys under a secret.
#[derive(Clone, Copy)]
pub struct KeyHasher(SipHasher24);

impl KeyHasher {
    /// A hasher with a 128-bit secret, which must be random.
    pub fn new(secret: [u8; 16]) -> KeyHasher {
        KeyHasher(SipHasher24::new_with_key(&secret))
    }
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHasher(secret)")
    }
}

/// The request data from which keys are built.
#[derive(Clone, Copy)]
pub struct KeySubject<'a> {
    /// The client of the request.
    pub client: &'a Client<'a>,
    /// The request's method.
    pub method: &'a Method,
    /// The normalised host: lower-case, without port or final dot.
    pub host: &'a str,
    /// The name of the matched route.
    pub route: &'a str,
    /// The match key of the normalised path.
    pub path: &'a str,
    /// The request's header fields as received.
    pub headers: &'a HeaderMap,
    /// The query as received: everything after the first `?`.
    pub query: Option<&'a str>,
    /// Values of the route's path parameters, taken from `path`.
    pub params: &'a dyn Fn(&str) -> Option<&'a str>,
    /// The body fields that limits need; `None` if there is no body or no limit needs one.
    pub body: Option<&'a BodyFields>,
}

/// Omits data that may be secret: headers, query and body.
impl fmt::Debug for KeySubject<'_> {
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

/// What to do if a part of the key has no value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// The limit does not apply.
    #[default]
    Skip,
    /// The part counts as absent. Clients that lack it and agree in the other parts share a bucket.
    Shared,
    /// The request is rejected with 400.
    Reject,
}

/// The bucket of a request, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyed<'p> {
    /// Count the request in this bucket.
    Bucket(Key),
    /// The limit does not apply.
    Skip,
    /// The request lacks this part: answer 400.
    Missing(&'p KeyPart),
}

/// The parts of one limit's key.
#[derive(Clone, Debug)]
pub struct KeyParts {
    /// Hash of the limit's name, so that limits never share buckets.
    limit: u64,
    parts: Box<[KeyPart]>,
    /// The names of the `body:` parts.
    body_fields: Box<[String]>,
}

/// The value of a part in one request.
enum PartValue<'a> {
    Address(IpNet),
    User(&'a str),
    Text(&'a str),
    /// All lines of a header field, at least one of them not empty.
    Field(http::header::GetAll<'a, HeaderValue>),
    /// A path parameter as received, and folded.
    Param(&'a str, String),
    /// Text in its normalised form.
    Folded(String),
    /// Several different values, or no readable text. All such values count as one.
    Unclear,
    /// Missing, and counted as absent.
    Absent,
}

impl KeyParts {
    /// The key of the limit `limit`. Without parts, all requests share one bucket.
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

    /// Whether the key includes an address.
    pub fn has_address(&self) -> bool {
        self.parts.iter().any(KeyPart::has_address)
    }

    /// Whether the key depends on the request's target or body, not only on the client.
    pub fn depends_on_target(&self) -> bool {
        self.parts.iter().any(|part| part.record().of_target)
    }

    /// Whether all requests share one bucket.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The body fields in the key, for [`BodyFormat::read`](super::BodyFormat::read). If empty, the
    /// request can be decided without reading its body.
    pub fn wanted_body_fields(&self) -> &[String] {
        &self.body_fields
    }

    /// The request's bucket, or the effect of a missing part. Takes tens of nanoseconds, plus the
    /// hashing of long values. Allocates only for query, cookie, body and path parameter values.
    pub fn key(
        &self,
        missing: Missing,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        subject: &KeySubject<'_>,
    ) -> Keyed<'_> {
        let mut hash = hasher.0;
        hash.write_u64(self.limit);
        for (place, part) in self.parts.iter().enumerate() {
            match (value(part, prefixes, subject), missing) {
                (Some(value), _) => value.absorb(place, &mut hash),
                (None, Missing::Shared) => PartValue::Absent.absorb(place, &mut hash),
                (None, Missing::Skip) => return Keyed::Skip,
                (None, Missing::Reject) => return Keyed::Missing(part),
            }
        }
        Keyed::Bucket(Key(hash.finish128().into()))
    }

    /// The bucket key shared by all gateways: SHA-256 cut to 128 bits, without a secret because the
    /// gateways have none in common. Nobody can force two clients into one bucket, but a reader of
    /// the key can test guesses. Call it only if [`KeyParts::key`] returned a bucket. Takes
    /// hundreds of nanoseconds.
    pub fn shared(&self, prefixes: Prefixes, subject: &KeySubject<'_>) -> [u8; 16] {
        let mut hash = Portable(Sha256::new());
        hash.write_u64(self.limit);
        for (place, part) in self.parts.iter().enumerate() {
            let value = value(part, prefixes, subject).unwrap_or(PartValue::Absent);
            value.absorb(place, &mut hash);
        }
        let digest: [u8; 32] = hash.0.finalize().into();
        let [half, _] = *digest.as_chunks().0 else {
            return [0; 16];
        };
        half
    }

    /// Parses the output of [`KeyParts::readable`] into its bucket and full name. A single part
    /// needs no name: `203.0.113.9`. `None` if the text is not such a name or is incomplete,
    /// because secrets are shown only as hashes and long texts are cut.
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
            let names = part.value_names();
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
                Some(next) => {
                    let names = next.value_names().into_iter();
                    let ends = names.filter_map(|name| rest.find(&format!(", {name}=")));
                    ends.min()?
                }
                None => rest.len(),
            };
            let text = &rest[..end];
            rest = rest.get(end + 2..).unwrap_or_default();
            let folded;
            let value = match part {
                _ if text.is_empty() || text.len() >= SHOWN_MAX_BYTES => return None,
                part if part.record().is_secret => return None,
                KeyPart::Ip | KeyPart::UserOrIp if name == "ip" => {
                    let network = text.parse::<IpNet>().ok();
                    let address = network.map(|network| network.addr());
                    PartValue::Address(prefixes.aggregate(address.or_else(|| text.parse().ok())?))
                }
                KeyPart::User | KeyPart::UserOrIp => PartValue::User(text),
                KeyPart::Param(_) => {
                    folded = text::folded_param(text);
                    PartValue::Param(text, folded)
                }
                _ => PartValue::Text(text),
            };
            if !full.is_empty() {
                full.push_str(", ");
            }
            match &value {
                PartValue::Address(network) => write!(full, "ip={network}").ok()?,
                _ => write!(full, "{name}={text}").ok()?,
            }
            value.absorb(place, &mut hash);
        }
        Some((full, Some(Key(hash.finish128().into()))))
    }

    /// The key for display: `ip=203.0.113.9/32, user=alice`. Header, query, cookie and body values
    /// may be secrets, so they appear as a short keyed hash. A part without a value is `-`, an
    /// unclear value is `?`, and a key without parts is `all`.
    pub fn readable(
        &self,
        hasher: &KeyHasher,
        prefixes: Prefixes,
        subject: &KeySubject<'_>,
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
                None | Some(PartValue::Absent) => write!(out, "{part}=-"),
                Some(PartValue::Unclear) => write!(out, "{part}=?"),
                Some(PartValue::Address(network)) => write!(out, "ip={network}"),
                Some(PartValue::User(user)) => write!(out, "user={user}"),
                Some(PartValue::Text(text) | PartValue::Param(text, _)) => {
                    write!(out, "{part}={}", shortened(text))
                }
                Some(secret @ (PartValue::Field(_) | PartValue::Folded(_))) => {
                    let mut hash = hasher.0;
                    secret.absorb(0, &mut hash);
                    let short = hash.finish() >> 32;
                    write!(out, "{part}=#{short:08x}")
                }
            };
            written.expect("writing to a String cannot fail");
        }
        out
    }
}

/// A hash that is equal on every machine.
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

fn value<'a>(
    part: &KeyPart,
    prefixes: Prefixes,
    subject: &KeySubject<'a>,
) -> Option<PartValue<'a>> {
    let address = || PartValue::Address(prefixes.aggregate(subject.client.address));
    match part {
        KeyPart::Ip => Some(address()),
        KeyPart::User => subject.client.user.map(PartValue::User),
        KeyPart::UserOrIp => Some(subject.client.user.map_or_else(address, PartValue::User)),
        KeyPart::Tenant => subject.client.tenant.map(PartValue::Text),
        KeyPart::Tier => subject.client.tier.map(PartValue::Text),
        // HEAD costs the upstream as much as GET, so both count as one method
        KeyPart::Method if subject.method == Method::HEAD => Some(PartValue::Text("GET")),
        KeyPart::Method => Some(PartValue::Text(subject.method.as_str())),
        KeyPart::Host => Some(PartValue::Text(subject.host)),
        KeyPart::Route => Some(PartValue::Text(subject.route)),
        KeyPart::Path => Some(PartValue::Text(subject.path)),
        KeyPart::UserAgent => field(subject.headers.get_all(USER_AGENT)),
        KeyPart::Header(header) => field(subject.headers.get_all(header)),
        KeyPart::Query(name) => value_of_field(text::in_query(subject.query?, name)),
        KeyPart::Cookie(name) => value_of_field(text::in_cookies(
            subject.headers.get_all(COOKIE).iter(),
            name,
        )),
        KeyPart::Claim(name) => subject.client.claim(name).map(PartValue::Text),
        KeyPart::Param(name) => {
            let raw = (subject.params)(name)?;
            let folded = text::folded_param(raw);
            (!folded.is_empty()).then_some(PartValue::Param(raw, folded))
        }
        KeyPart::Body(name) => {
            let mut found = subject
                .body
                .map_or_else(FieldValue::default, |body| body.get(name));
            // many frameworks merge the fields of the body and the query
            if let Some(query) = subject.query {
                found.add_form(query.as_bytes(), name);
            }
            value_of_field(found)
        }
    }
}

fn value_of_field(given: FieldValue) -> Option<PartValue<'static>> {
    match given {
        FieldValue::Nothing => None,
        FieldValue::Text(text) => Some(PartValue::Folded(text)),
        FieldValue::Unclear => Some(PartValue::Unclear),
    }
}

/// An absent or blank field has no value. An empty value would put all clients without the field
/// into one bucket.
fn field(lines: http::header::GetAll<'_, HeaderValue>) -> Option<PartValue<'_>> {
    let says_something = lines.iter().any(|line| !trim(line.as_bytes()).is_empty());
    says_something.then_some(PartValue::Field(lines))
}

impl PartValue<'_> {
    /// Writes an injective encoding of the value.
    fn absorb(&self, place: usize, hash: &mut impl Hasher) {
        let mut write = |kind: u64, bytes: &[u8]| {
            hash.write_u64((place as u64) << 48 | kind << 40 | bytes.len() as u64);
            hash.write(bytes);
        };
        match self {
            PartValue::Address(IpNet::V4(network)) => write(1, &network.network().octets()),
            PartValue::Address(IpNet::V6(network)) => write(2, &network.network().octets()),
            PartValue::User(user) => write(3, user.as_bytes()),
            PartValue::Text(text) => write(4, text.as_bytes()),
            PartValue::Field(lines) => lines
                .iter()
                .for_each(|line| write(5, trim(line.as_bytes()))),
            PartValue::Param(_, text) | PartValue::Folded(text) => write(6, text.as_bytes()),
            PartValue::Unclear => write(7, &[]),
            PartValue::Absent => write(8, &[]),
        }
    }
}

fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(SHOWN_MAX_BYTES)]
}

#[cfg(test)]
mod tests;
