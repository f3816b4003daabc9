//! Which credential decides, and how an invalid one is treated.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

use super::*;

const UNTRUSTED: &str = "203.0.113.9";
const TRUSTED: &str = "10.0.0.1";

fn api_key(header: &'static str, secret: &str, user: &str, invalid: OnInvalid) -> UserSource {
    let key = ApiKey {
        sha256: Sha256::digest(secret).into(),
        user: user.to_owned(),
        tier: Some("pro".to_owned()),
        tenant: Some("acme".to_owned()),
    };
    UserSource::ApiKey {
        header: HeaderName::from_static(header),
        keys: KnownKeys::new(vec![key]),
        invalid,
    }
}

fn user_header() -> UserSource {
    UserSource::Header {
        header: HeaderName::from_static("x-user-id"),
        tier_header: Some(HeaderName::from_static("x-user-tier")),
    }
}

fn identifier(users: Vec<UserSource>) -> Identifier {
    Identifier::new(&IdentitySettings {
        trusted_proxies: vec!["10.0.0.0/8".parse().expect("a network")],
        users,
        ..IdentitySettings::default()
    })
}

/// A worker's token cache and a request's token slot.
#[derive(Default)]
struct WorkerMemory {
    cache: Option<TokenCache>,
    held: HeldToken,
}

impl WorkerMemory {
    fn tokens(&mut self) -> TokenWorkspace<'_> {
        TokenWorkspace {
            cache: self.cache.insert(TokenCache::new([1; 32])),
            held: &self.held,
            now: std::time::SystemTime::now,
        }
    }
}

pub(super) fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    lines
        .iter()
        .map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        })
        .collect()
}

fn user(
    identifier: &Identifier,
    peer: &str,
    lines: &[(&'static str, &'static str)],
) -> Result<Option<String>, Rejected> {
    let headers = headers(lines);
    Ok(identifier
        .identify(
            peer.parse().expect("an address"),
            None,
            &headers,
            WorkerMemory::default().tokens(),
        )?
        .user
        .map(str::to_owned))
}

#[test]
fn default_settings_trust_nobody_and_keep_addresses_apart() {
    let settings = IdentitySettings::default();
    assert_eq!((settings.ipv4_prefix, settings.ipv6_prefix), (32, 64));
    let headers = headers(&[("x-forwarded-for", "198.51.100.7"), ("x-user-id", "alice")]);
    let peer: IpAddr = "127.0.0.1".parse().expect("an address");
    assert_eq!(
        Identifier::new(&settings).identify(peer, None, &headers, WorkerMemory::default().tokens()),
        Ok(Client::anonymous(peer))
    );
}

#[test]
fn api_key_brings_user_tier_and_tenant() {
    let identifier = identifier(vec![api_key(
        "x-api-key",
        "alpha",
        "alice",
        OnInvalid::Reject,
    )]);
    let headers = headers(&[("x-api-key", "alpha"), ("x-forwarded-for", "198.51.100.7")]);
    let mut memory = WorkerMemory::default();
    let client = identifier
        .identify(
            TRUSTED.parse().expect("an address"),
            None,
            &headers,
            memory.tokens(),
        )
        .expect("the key is known");
    assert_eq!(
        (client.user, client.tier, client.tenant),
        (Some("alice"), Some("pro"), Some("acme"))
    );
    assert_eq!(client.address.to_string(), "198.51.100.7");
    assert_eq!(
        (client.peer.to_string().as_str(), client.peer_trusted),
        (TRUSTED, true)
    );
}

#[test]
fn rejected_credential_still_says_whose_address_it_came_from() {
    let identifier = identifier(vec![api_key(
        "x-api-key",
        "alpha",
        "alice",
        OnInvalid::Reject,
    )]);
    let headers = headers(&[("x-api-key", "guess"), ("x-forwarded-for", "198.51.100.7")]);
    let rejected = identifier
        .identify(
            TRUSTED.parse().expect("an address"),
            None,
            &headers,
            WorkerMemory::default().tokens(),
        )
        .expect_err("the key is unknown");
    assert_eq!(
        (rejected.source.label(), rejected.kind),
        ("api_key", "unknown")
    );
    assert_eq!(
        (
            rejected.client.address.to_string().as_str(),
            rejected.client.user
        ),
        ("198.51.100.7", None)
    );
}

#[test]
fn invalid_key_may_be_as_good_as_none() {
    let identifier = identifier(vec![
        api_key("x-api-key", "alpha", "alice", OnInvalid::Anonymous),
        user_header(),
    ]);
    assert_eq!(
        user(&identifier, UNTRUSTED, &[("x-api-key", "guess")]),
        Ok(None)
    );
    assert_eq!(
        user(
            &identifier,
            UNTRUSTED,
            &[("x-api-key", "alpha"), ("x-api-key", "alpha")]
        ),
        Ok(None)
    );
    assert_eq!(
        user(
            &identifier,
            TRUSTED,
            &[("x-api-key", "guess"), ("x-user-id", "bob")]
        ),
        Ok(Some("bob".to_owned()))
    );
}

#[test]
fn first_source_that_finds_a_credential_decides() {
    let sources = || {
        (
            api_key("x-api-key", "alpha", "alice", OnInvalid::Reject),
            user_header(),
        )
    };
    let both = [("x-api-key", "alpha"), ("x-user-id", "bob")];
    let (key, header) = sources();
    assert_eq!(
        user(&identifier(vec![key, header]), TRUSTED, &both),
        Ok(Some("alice".to_owned()))
    );
    let (key, header) = sources();
    assert_eq!(
        user(&identifier(vec![header, key]), TRUSTED, &both),
        Ok(Some("bob".to_owned()))
    );
    let (key, header) = sources();
    assert_eq!(
        user(&identifier(vec![key, header]), TRUSTED, &[both[1]]),
        Ok(Some("bob".to_owned()))
    );
}

#[test]
fn user_header_of_an_untrusted_peer_is_not_read() {
    let identifier = identifier(vec![user_header()]);
    assert_eq!(
        user(&identifier, UNTRUSTED, &[("x-user-id", "admin")]),
        Ok(None)
    );
    assert_eq!(
        user(
            &identifier,
            UNTRUSTED,
            &[("x-user-id", "admin"), ("x-user-id", "root")]
        ),
        Ok(None)
    );
}

#[test]
fn ambiguous_user_header_of_a_trusted_peer_is_rejected() {
    let identifier = identifier(vec![user_header()]);
    let rejected = user(
        &identifier,
        TRUSTED,
        &[("x-user-id", "alice"), ("x-user-id", "mallory")],
    )
    .expect_err("two users");
    assert_eq!(
        (rejected.source.label(), rejected.kind),
        ("header", "repeated")
    );
}

#[test]
fn reasoning_can_be_watched() {
    let headers = headers(&[("x-forwarded-for", "198.51.100.7")]);
    let mut steps = 0;
    let client = identifier(vec![]).locate(TRUSTED.parse().expect("an address"), &headers, |_| {
        steps += 1
    });
    assert_eq!(
        (client.address.to_string().as_str(), steps),
        ("198.51.100.7", 2)
    );
}
