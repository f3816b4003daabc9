//! The cost of client identification, by credential. `cargo bench --bench identify`.
//!
//! Each figure is the median of interleaved rounds (every case once per round), so that a slow
//! moment of the machine affects all cases alike. A credential is in `Authorization`, among the
//! fields that a browser sends. "first" verifies the token each time, like an uncached one; "again"
//! finds it in the cache. The clock is real, because the expiry check is part of the cost. An
//! allocation where none should be ends the run with an error.

mod counting;

use std::{
    hint::black_box,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue, header::AUTHORIZATION};
use jsonwebtoken::{Algorithm, EncodingKey};
use rcgen::{
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256,
    RsaKeySize,
};
use serde_json::json;
use sha2::{Digest, Sha256};
use tidegate::identity::{
    ApiKey, ClaimRules, HeldToken, Identifier, IdentitySettings, KeySet, KeySource, KnownKeys,
    OnInvalid, TokenCache, TokenSource, TokenWorkspace, UserSource,
};

const ROUNDS: usize = 15;
/// Maximum time of one case in a round.
const SLICE: Duration = Duration::from_millis(20);

fn main() {
    // cargo test also builds this, and starts it without that argument
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let cases = cases();
    let mut ns: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, ns) in cases.iter().zip(&mut ns) {
            ns.push(case.round());
        }
    }
    println!("{:<44} {:>12} {:>8}", "identify", "ns", "bytes");
    for (case, ns) in cases.iter().zip(&mut ns) {
        ns.sort_by(f64::total_cmp);
        let median = ns[ns.len() / 2];
        println!("{:<44} {median:>12.1} {:>8}", case.name, case.credential);
    }
    println!("allocations: 0, tokens that are seen first apart");
}

/// A request, and its authentication settings.
struct Case {
    name: String,
    /// Bytes of the credential.
    credential: usize,
    identifier: Identifier,
    headers: HeaderMap,
    cache: TokenCache,
    /// Drop the token from the cache after each request.
    forgets: bool,
}

impl Case {
    fn new(name: &str, credential: Option<String>, users: Vec<UserSource>, forgets: bool) -> Case {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "api.example.com"),
            ("user-agent", "Mozilla/5.0 (X11; Linux x86_64; rv:140.0)"),
            ("accept", "application/json"),
            ("accept-encoding", "gzip, deflate, br"),
            ("x-request-id", "9d7b7f87397fc019290220924b841294"),
        ] {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let length = credential.as_ref().map_or(0, String::len);
        if let Some(credential) = credential {
            let value = HeaderValue::from_str(&format!("Bearer {credential}"));
            headers.insert(AUTHORIZATION, value.expect("visible characters"));
        }
        Case {
            name: name.to_owned(),
            credential: length,
            identifier: Identifier::new(&IdentitySettings {
                users,
                ..IdentitySettings::default()
            }),
            headers,
            cache: TokenCache::new([7; 32]),
            forgets,
        }
    }

    /// Nanoseconds per identification.
    fn round(&self) -> f64 {
        // unmeasured warm-up: fills the caches, including the token's
        self.identify(&self.cache);
        let allocated = counting::allocations();
        let (start, mut count) = (Instant::now(), 0_u32);
        while start.elapsed() < SLICE {
            for _ in 0..BATCH {
                if self.forgets {
                    self.identify(&TokenCache::new([7; 32]));
                } else {
                    self.identify(&self.cache);
                }
            }
            count += BATCH;
        }
        let elapsed = start.elapsed();
        assert!(
            self.forgets || counting::allocations() == allocated,
            "{} allocates",
            self.name
        );
        elapsed.as_nanos() as f64 / f64::from(count)
    }

    fn identify(&self, cache: &TokenCache) {
        let held = HeldToken::default();
        let tokens = TokenWorkspace {
            cache,
            held: &held,
            now: SystemTime::now,
        };
        let peer = IpAddr::from([203, 0, 113, 9]);
        let client =
            self.identifier
                .identify(black_box(peer), None, black_box(&self.headers), tokens);
        black_box(client.expect("the credential is good").user);
    }
}

/// Identifications between two clock reads.
const BATCH: u32 = 16;

fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new(
        "no credential, none required",
        None,
        vec![],
        false,
    )];
    let started = Instant::now();
    let keys: Vec<ApiKey> = (0..100_000_u32)
        .map(|number| ApiKey {
            sha256: Sha256::digest(format!("key-{number}")).into(),
            user: format!("user-{number}"),
            tier: None,
            tenant: None,
        })
        .collect();
    let source = UserSource::ApiKey {
        header: AUTHORIZATION,
        keys: KnownKeys::new(keys),
        invalid: OnInvalid::Reject,
    };
    cases.push(Case::new(
        "API key, one of 100,000",
        Some("key-4711".to_owned()),
        vec![source],
        false,
    ));
    println!(
        "100,000 API keys made and indexed in {:?}",
        started.elapsed()
    );
    for algorithm in [
        Algorithm::HS256,
        Algorithm::RS256,
        Algorithm::PS256,
        Algorithm::ES256,
        Algorithm::ES384,
        Algorithm::EdDSA,
    ] {
        let (token, keys) = token(algorithm);
        let keys = Arc::new(keys);
        for (forgets, times) in [(true, "first"), (false, "again")] {
            let source = TokenSource {
                header: AUTHORIZATION,
                keys: KeySource::Fixed(Arc::clone(&keys)),
                claims: ClaimRules {
                    issuer: Some("https://issuer.example.com".to_owned()),
                    audience: vec!["api".to_owned()],
                    user: "sub".to_owned(),
                    tier: Some("plan".to_owned()),
                    tenant: Some("org".to_owned()),
                    ..ClaimRules::default()
                },
                invalid: OnInvalid::Reject,
            };
            cases.push(Case::new(
                &format!("token {algorithm:?}, {times}"),
                Some(token.clone()),
                vec![UserSource::Jwt(Box::new(source))],
                forgets,
            ));
        }
    }
    cases
}

/// A typical identity provider's token, and the key to verify it.
fn token(algorithm: Algorithm) -> (String, KeySet) {
    let pair = |kind| KeyPair::generate_for(kind).expect("a key");
    let (key, set) = match algorithm {
        Algorithm::HS256 => {
            let secret = [42; 32];
            let set = KeySet::from_secret(&secret, algorithm);
            (EncodingKey::from_secret(&secret), set)
        }
        Algorithm::ES256 | Algorithm::ES384 | Algorithm::EdDSA => {
            let pair = pair(match algorithm {
                Algorithm::ES256 => &PKCS_ECDSA_P256_SHA256,
                Algorithm::ES384 => &PKCS_ECDSA_P384_SHA384,
                _ => &PKCS_ED25519,
            });
            let key = match algorithm {
                Algorithm::EdDSA => EncodingKey::from_ed_der(pair.serialized_der()),
                _ => EncodingKey::from_ec_der(pair.serialized_der()),
            };
            (key, KeySet::from_pem(&pair.public_key_pem(), &[algorithm]))
        }
        _ => {
            let pair = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048);
            let pair = pair.expect("a key");
            let key = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes());
            let set = KeySet::from_pem(&pair.public_key_pem(), &[algorithm]);
            (key.expect("an RSA key"), set)
        }
    };
    let now = SystemTime::UNIX_EPOCH
        .elapsed()
        .expect("after 1970")
        .as_secs();
    let header = json!({ "alg": format!("{algorithm:?}"), "typ": "JWT", "kid": "2026-11" });
    let claims = json!({
        "iss": "https://issuer.example.com", "aud": ["api", "billing"], "sub": "7f1c9a52-8f0e-4a55-9d1e-0a4b5a3e7c11",
        "iat": now, "nbf": now, "exp": now + 3600, "plan": "pro", "org": "acme", "scope": "read write",
    });
    let encode = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", encode(header), encode(claims));
    let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, algorithm);
    let token = format!("{signed}.{}", signature.expect("the key is its own"));
    (token, set.expect("a key that can be used"))
}
