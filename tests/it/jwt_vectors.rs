//! The token vectors: each is accepted or rejected as listed, at first and from the cache.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, header::AUTHORIZATION};
use jsonwebtoken::Algorithm;
use serde_json::{Value, json};
use tidegate::identity::{
    ClaimRules, HeldToken, Identifier, IdentitySettings, KeySet, KeySource, OnInvalid, Rejected,
    TokenCache, TokenSource, TokenWorkspace, UserSource,
};

use crate::support::tokens::encode;

const VECTORS: &str = include_str!("../vectors/jwt_vectors.json");

fn vectors() -> Value {
    serde_json::from_str(VECTORS).expect("the vectors are JSON")
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().expect("a text")
}

/// The time of the vectors.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

/// The keys of the vectors as one set: the secret, and the public key by its modulus.
fn key_set(vectors: &Value) -> KeySet {
    let keys = &vectors["keys"];
    let pem: String = text(&keys["r1"], "public_pem")
        .lines()
        .filter(|line| !line.starts_with('-'))
        .collect();
    let der = STANDARD.decode(pem).expect("base64");
    let set = json!({ "keys": [
        { "kty": "oct", "kid": "h1", "alg": text(&keys["h1"], "alg"), "k": text(&keys["h1"], "k_base64url") },
        // 33 bytes of DER before a modulus of 2048 bits
        { "kty": "RSA", "kid": "r1", "alg": text(&keys["r1"], "alg"), "n": encode(&der[33..289]), "e": "AQAB" },
    ] });
    let algorithms = [Algorithm::HS256, Algorithm::RS256];
    let (set, unused) =
        KeySet::from_jwks(set.to_string().as_bytes(), &algorithms).expect("keys that can be used");
    assert!(unused.is_empty(), "{unused:?}");
    set
}

fn identifier(header: HeaderName, vectors: &Value) -> Identifier {
    let claims = ClaimRules {
        issuer: Some(text(vectors, "issuer").to_owned()),
        audience: vec![text(vectors, "audience").to_owned()],
        leeway: Duration::from_secs(vectors["leeway_s"].as_u64().expect("seconds")),
        user: "sub".to_owned(),
        ..ClaimRules::default()
    };
    let source = TokenSource {
        header,
        keys: KeySource::Fixed(Arc::new(key_set(vectors))),
        claims,
        invalid: OnInvalid::Reject,
    };
    Identifier::new(&IdentitySettings {
        users: vec![UserSource::Jwt(Box::new(source))],
        ..IdentitySettings::default()
    })
}

/// The user of a request with this field.
fn user(
    identifier: &Identifier,
    cache: &TokenCache,
    header: HeaderName,
    value: &str,
) -> Result<Option<String>, Rejected> {
    let mut headers = HeaderMap::new();
    headers.insert(header, HeaderValue::from_str(value).expect("a value"));
    let held = HeldToken::default();
    let tokens = TokenWorkspace {
        cache,
        held: &held,
        now,
    };
    let peer = "203.0.113.9".parse().expect("an address");
    let client = identifier.identify(peer, None, &headers, tokens)?;
    Ok(client.user.map(str::to_owned))
}

#[test]
fn every_vector_is_accepted_or_rejected() {
    let vectors = vectors();
    let list = vectors["vectors"].as_array().expect("a list");
    assert_eq!(list.len(), 35);
    assert_eq!(vectors["now"].as_u64(), Some(1_700_000_000));
    let bare = HeaderName::from_static("x-token");
    let behind_bearer = identifier(AUTHORIZATION, &vectors);
    let on_its_own = identifier(bare.clone(), &vectors);
    let cache = TokenCache::new([7; 32]);
    for vector in list {
        let (id, token) = (text(vector, "id"), text(vector, "token"));
        let accepted = vector["accept"].as_bool().expect("a boolean");
        // an accepted token comes from the cache the second time
        for _ in 0..2 {
            for found in [
                user(
                    &behind_bearer,
                    &cache,
                    AUTHORIZATION,
                    &format!("Bearer {token}"),
                ),
                user(&on_its_own, &TokenCache::new([8; 32]), bare.clone(), token),
            ] {
                assert_eq!(
                    found.is_ok(),
                    accepted,
                    "{id}: {}: {found:?}",
                    vector["why"]
                );
                if accepted {
                    assert_eq!(found, Ok(Some("u1".to_owned())), "{id}");
                }
            }
        }
    }
}

#[test]
fn what_is_wrong_with_a_token_is_told_apart_for_the_metric() {
    let vectors = vectors();
    let identifier = identifier(AUTHORIZATION, &vectors);
    let cache = TokenCache::new([7; 32]);
    let kind_of = |id: &str| {
        let list = vectors["vectors"].as_array().expect("a list");
        let vector = list.iter().find(|vector| vector["id"] == id);
        let token = text(vector.expect("a vector of that name"), "token");
        let found = user(
            &identifier,
            &cache,
            AUTHORIZATION,
            &format!("Bearer {token}"),
        );
        found.expect_err("it is rejected")
    };
    for (id, kind) in [
        ("none", "algorithm"),
        ("confusion", "algorithm"),
        ("hs512-key", "algorithm"),
        ("kid-unknown", "unknown_key"),
        ("kid-absent", "unknown_key"),
        ("tampered", "signature"),
        ("jwk-header", "signature"),
        ("expired", "expired"),
        ("aud-other", "claims"),
        ("exp-missing", "claims"),
        ("exp-string", "malformed"),
        ("dup-claim", "malformed"),
        ("crit", "malformed"),
        ("oversize", "malformed"),
    ] {
        let rejected = kind_of(id);
        assert_eq!(
            (rejected.kind, rejected.source.label()),
            (kind, "jwt"),
            "{id}"
        );
        assert!(rejected.source.faults().contains(&rejected.kind), "{id}");
    }
    assert_eq!(
        kind_of("expired").challenge(),
        r#"Bearer error="invalid_token", error_description="The token has expired""#
    );
    assert_eq!(
        kind_of("tampered").challenge(),
        r#"Bearer error="invalid_token""#
    );
}
