//! Bytes as a token, its header, its claims, and a key set. Nothing panics. No unsigned token is
//! accepted, and a cached token yields the same user as the first time.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue};
use jsonwebtoken::{Algorithm, EncodingKey};
use tidegate::identity::{
    ClaimRules, HeldToken, Identifier, IdentitySettings, KeySet, KeySource, OnInvalid, TokenCache,
    TokenSource, TokenWorkspace, UserSource,
};

const SECRET: [u8; 32] = [42; 32];
const GOOD_HEADER: &[u8] = br#"{"alg":"HS256"}"#;
const GOOD_CLAIMS: &[u8] = br#"{"sub":"alice","exp":2000000000}"#;
static HEADER: HeaderName = HeaderName::from_static("x-token");

/// The first byte selects the meaning of the rest.
pub fn check(data: &[u8]) {
    let Some((what, bytes)) = data.split_first() else {
        return;
    };
    match what % 4 {
        0 => {
            // Not signed by us: the corpus contains no valid signature.
            let user = user_of(bytes);
            assert_eq!(user, None, "an unsigned token was accepted");
        }
        1 => {
            if user_of(signed(bytes, GOOD_CLAIMS).as_bytes()).is_some() {
                let header: serde_json::Value =
                    serde_json::from_slice(bytes).expect("accepted headers are JSON");
                assert_eq!(header["alg"], "HS256");
                assert!(header.get("crit").is_none());
            }
        }
        2 => {
            if let Some(user) = user_of(signed(GOOD_HEADER, bytes).as_bytes()) {
                assert!((1..=256).contains(&user.len()) && !user.contains(char::is_control));
                let claims: serde_json::Value =
                    serde_json::from_slice(bytes).expect("accepted claims are JSON");
                assert!(claims["exp"].as_f64().is_some_and(|exp| exp > 1.0e9));
            }
        }
        _ => {
            let algorithms = [
                Algorithm::HS256,
                Algorithm::RS256,
                Algorithm::ES256,
                Algorithm::EdDSA,
            ];
            if let Ok((set, _)) = KeySet::from_jwks(bytes, &algorithms) {
                assert!(!set.is_empty());
            }
            let text = String::from_utf8_lossy(bytes);
            let _ = KeySet::from_pem(&text, &algorithms[1..]);
        }
    }
}

fn signed(header: &[u8], claims: &[u8]) -> String {
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let text = format!("{}.{}", encode(header), encode(claims));
    let key = EncodingKey::from_secret(&SECRET);
    let signature = jsonwebtoken::crypto::sign(text.as_bytes(), &key, Algorithm::HS256);
    format!("{text}.{}", signature.expect("a secret can sign any bytes"))
}

/// The user of a token; checks that the cache returns the same.
fn user_of(token: &[u8]) -> Option<String> {
    let value = HeaderValue::from_bytes(token).ok()?;
    let headers = HeaderMap::from_iter([(HEADER.clone(), value)]);
    let identifier = identifier();
    let cache = TokenCache::new([7; 32]);
    let user = || {
        let held = HeldToken::default();
        let tokens = TokenWorkspace {
            cache: &cache,
            held: &held,
            now: || SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
        };
        let client = identifier.identify(IpAddr::V4(Ipv4Addr::LOCALHOST), None, &headers, tokens);
        client.ok()?.user.map(str::to_owned)
    };
    let first = user();
    assert_eq!(user(), first, "the cached token gave another user");
    first
}

fn identifier() -> Identifier {
    let keys = KeySet::from_secret(&SECRET, Algorithm::HS256).expect("it is long enough");
    let source = TokenSource {
        header: HEADER.clone(),
        keys: KeySource::Fixed(Arc::new(keys)),
        claims: ClaimRules {
            user: "sub".to_owned(),
            tier: Some("plan".to_owned()),
            tenant: Some("org.id".to_owned()),
            others: vec!["device".to_owned()],
            ..ClaimRules::default()
        },
        invalid: OnInvalid::Reject,
    };
    Identifier::new(&IdentitySettings {
        users: vec![UserSource::Jwt(Box::new(source))],
        ..IdentitySettings::default()
    })
}
