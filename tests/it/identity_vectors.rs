//! The address and key vectors: client addresses and key networks.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use tidegate::identity::{
    AddressSource, Client, HeldToken, Identifier, IdentitySettings, KeyHasher, KeyPart, KeyParts,
    KeySubject, Missing, Prefixes, TokenCache, TokenWorkspace,
};

const VECTORS: &str = include_str!("../vectors/identity_vectors.json");

fn vectors() -> Value {
    serde_json::from_str(VECTORS).expect("the vectors are JSON")
}

fn list<'v>(value: &'v Value, name: &str) -> &'v Vec<Value> {
    value[name].as_array().expect("a list")
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().expect("a text")
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn identifier(vectors: &Value, address_from: AddressSource) -> Identifier {
    let networks = list(vectors, "trusted")
        .iter()
        .map(|network| network.as_str().expect("a text"));
    let trusted_proxies = networks
        .map(|network| network.parse().expect("a network"))
        .collect();
    Identifier::new(&IdentitySettings {
        trusted_proxies,
        address_from,
        ..IdentitySettings::default()
    })
}

fn client(identifier: &Identifier, peer: &str, field: &'static str, lines: &[&str]) -> IpAddr {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(
            HeaderName::from_static(field),
            HeaderValue::from_str(line).expect("a value"),
        );
    }
    let (cache, held) = (TokenCache::new([1; 32]), HeldToken::default());
    let tokens = TokenWorkspace {
        cache: &cache,
        held: &held,
        now: std::time::SystemTime::now,
    };
    identifier
        .identify(address(peer), None, &headers, tokens)
        .expect("there are no credentials to reject")
        .address
}

/// For a chain whose proxies are counted, not named.
fn counted(hops: u8) -> Identifier {
    Identifier::new(&IdentitySettings {
        trusted_hops: Some(hops),
        ..IdentitySettings::default()
    })
}

#[test]
fn every_x_forwarded_for_vector_finds_its_client() {
    let vectors = vectors();
    let walked = identifier(&vectors, AddressSource::XForwardedFor);
    for vector in list(&vectors, "xff") {
        let why = text(vector, "why");
        let lines: Vec<&str> = list(vector, "lines")
            .iter()
            .map(|line| line.as_str().expect("a text"))
            .collect();
        let hops = vector["trusted_hops"].as_u64();
        let counted = hops.map(|hops| counted(u8::try_from(hops).expect("a few")));
        let identifier = counted.as_ref().unwrap_or(&walked);
        let found = client(identifier, text(vector, "peer"), "x-forwarded-for", &lines);
        assert_eq!(found, address(text(vector, "client")), "{lines:?}: {why}");
    }
    assert_eq!(list(&vectors, "xff").len(), 36);
}

#[test]
fn every_forwarded_vector_finds_its_client() {
    let vectors = vectors();
    let identifier = identifier(&vectors, AddressSource::Forwarded);
    for vector in list(&vectors, "forwarded") {
        let value = text(vector, "value");
        let found = client(&identifier, text(vector, "peer"), "forwarded", &[value]);
        assert_eq!(
            found,
            address(text(vector, "client")),
            "{value}: {}",
            vector["why"]
        );
    }
    assert_eq!(list(&vectors, "forwarded").len(), 18);
}

#[test]
fn every_key_vector_counts_for_its_network() {
    let vectors = vectors();
    let hasher = KeyHasher::new([1; 16]);
    let parts = KeyParts::new("per_ip", vec![KeyPart::Ip]);
    for vector in list(&vectors, "ip_key") {
        let bits = vector["v6_prefix"]
            .as_u64()
            .and_then(|bits| bits.try_into().ok())
            .expect("a prefix");
        let prefixes = Prefixes {
            ipv4: 32,
            ipv6: bits,
        };
        let headers = HeaderMap::new();
        let subject = |client| KeySubject {
            client,
            method: &http::Method::GET,
            host: "h",
            route: "r",
            path: "/",
            headers: &headers,
            query: None,
            params: &|_| None,
            body: None,
        };
        let (network, _) = text(vector, "key").split_once('/').expect("a network");
        let (given, first) = (
            Client::anonymous(address(text(vector, "address"))),
            Client::anonymous(address(network)),
        );
        assert_eq!(
            parts.readable(&hasher, prefixes, &subject(&given)),
            format!("ip={}", text(vector, "key"))
        );
        assert_eq!(
            parts.key(Missing::Skip, &hasher, prefixes, &subject(&given)),
            parts.key(Missing::Skip, &hasher, prefixes, &subject(&first))
        );
    }
    assert_eq!(list(&vectors, "ip_key").len(), 8);
}
