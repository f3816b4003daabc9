//! Bytes as a JSON or form body. A field keys the bucket that its value names, or the shared bucket
//! of unclear values.
//!
//! Frameworks disagree about duplicate fields: some take the first, some the last. Whichever value
//! one of them reads, the client is counted under that value or as unclear. So a second value buys
//! no second quota.

use std::{fmt, net::IpAddr};

use http::{HeaderMap, Method};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tidegate::{
    identity::{
        BodyFields, Client, KeyHasher, KeyPart, KeyParts, KeySubject, Keyed, Missing, Prefixes,
    },
    limit::Key,
};

const FIELD: &str = "user";
const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

/// The first byte selects the content type of the rest.
pub fn check(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else {
        return;
    };
    match kind % 2 {
        0 => json(body),
        _ => form(body),
    }
}

/// The bucket; `None` if the field has no value.
fn bucket(content_type: &str, body: &[u8]) -> Option<Key> {
    let parts = KeyParts::new("login", vec![KeyPart::Body(FIELD.to_owned())]);
    let fields = BodyFields::parse(Some(content_type), body, parts.wanted_body_fields());
    let subject = KeySubject {
        client: &Client::anonymous(IpAddr::from([192, 0, 2, 1])),
        method: &Method::POST,
        host: "host",
        route: "route",
        path: "/login",
        headers: &HeaderMap::new(),
        query: None,
        params: &|_| None,
        body: Some(&fields),
    };
    let hasher = KeyHasher::new([7; 16]);
    match parts.key(Missing::Skip, &hasher, Prefixes::default(), &subject) {
        Keyed::Bucket(key) => Some(key),
        Keyed::Skip => None,
        Keyed::Missing(_) => panic!("`missing` is not \"reject\" here"),
    }
}

/// The bucket of ambiguous values.
fn unclear() -> Option<Key> {
    let unclear = bucket(JSON, b"{");
    assert!(unclear.is_some());
    unclear
}

/// The bucket of a value in its plain spelling.
fn bucket_of(value: &str) -> Option<Key> {
    let plain = serde_json::json!({ FIELD: value }).to_string();
    bucket(JSON, plain.as_bytes())
}

fn json(body: &[u8]) {
    let found = bucket(JSON, body);
    assert_eq!(found, bucket(JSON, body));
    let text = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    if text.trim_ascii().is_empty() {
        assert_eq!(found, None, "an empty body has no field");
        return;
    }
    if serde_json::from_slice::<IgnoredAny>(text).is_err() {
        assert_eq!(found, unclear(), "malformed JSON is unclear");
        return;
    }
    let Ok(read) = serde_json::from_slice::<Read>(text) else {
        return;
    };
    for value in read.values {
        let readings = [bucket_of(&value), unclear()];
        assert!(
            readings.contains(&found) || value.trim().is_empty(),
            "a framework reads {value:?}, but the limit counts another value"
        );
    }
}

fn form(body: &[u8]) {
    let found = bucket(FORM, body);
    assert_eq!(found, bucket(FORM, body));
    for pair in body.split(|&byte| byte == b'&') {
        let equals = pair.iter().position(|&byte| byte == b'=');
        let (name, value) = match equals {
            Some(equals) => (&pair[..equals], &pair[equals + 1..]),
            None => (pair, &pair[pair.len()..]),
        };
        if decoded(name) != FIELD {
            continue;
        }
        let value = decoded(value);
        let readings = [bucket_of(&value), unclear()];
        assert!(
            readings.contains(&found) || value.trim().is_empty(),
            "a framework reads {value:?}, but the limit counts another value"
        );
    }
}

/// Decodes `application/x-www-form-urlencoded` as the URL standard does.
fn decoded(text: &[u8]) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        match (byte, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                out.push(u8::try_from(high * 16 + low).expect("two digits are a byte"));
                rest = &after[2..];
            }
            (b'+', ..) => out.push(b' '),
            _ => out.push(*byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// All texts under the field in the outermost object, in order. A framework reads one of them.
struct Read {
    values: Vec<String>,
}

impl<'de> Deserialize<'de> for Read {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Read, D::Error> {
        deserializer.deserialize_any(Outermost)
    }
}

struct Outermost;

/// Values other than objects have no field.
macro_rules! no_field {
    ($($visit:ident: $value:ty),*) => {
        $(fn $visit<E>(self, _: $value) -> Result<Read, E> {
            Ok(Read { values: Vec::new() })
        })*
    };
}

impl<'de> Visitor<'de> for Outermost {
    type Value = Read;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    no_field!(visit_bool: bool, visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<Read, E> {
        Ok(Read { values: Vec::new() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Read, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Read { values: Vec::new() })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Read, A::Error> {
        let mut values = Vec::new();
        while let Some(name) = entries.next_key::<String>()? {
            if name != FIELD {
                entries.next_value::<IgnoredAny>()?;
                continue;
            }
            if let Some(value) = entries.next_value::<serde_json::Value>()?.as_str() {
                values.push(value.to_owned());
            }
        }
        Ok(Read { values })
    }
}
