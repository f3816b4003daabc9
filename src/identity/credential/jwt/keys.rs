//! The keys that tokens are verified with, from a JSON Web Key Set (RFC 7517), a PEM file or a shared secret.
//!
//! A key has one algorithm, and a token must say the same: so no public key is ever taken for an HMAC secret, and `none` is never
//! anybody's (RFC 8725 §3.1). It is the key's `alg`; where a key has none, the one configured algorithm that fits its type,
//! and where several fit, the key is not used.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind};
use serde_json::{Map, Value};

use super::{
    super::Fault,
    json,
    token::{Token, decode},
};

/// Every algorithm by its name (RFC 7518 §3.1, RFC 8037, RFC 9864).
pub const ALGORITHMS: &[(&str, Algorithm)] = &[
    ("RS256", Algorithm::RS256),
    ("RS384", Algorithm::RS384),
    ("RS512", Algorithm::RS512),
    ("PS256", Algorithm::PS256),
    ("PS384", Algorithm::PS384),
    ("PS512", Algorithm::PS512),
    ("ES256", Algorithm::ES256),
    ("ES384", Algorithm::ES384),
    ("EdDSA", Algorithm::EdDSA),
    ("Ed25519", Algorithm::EdDSA),
    ("HS256", Algorithm::HS256),
    ("HS384", Algorithm::HS384),
    ("HS512", Algorithm::HS512),
];

/// Keys of one set; a larger one is refused whole.
const KEYS_MAX: usize = 256;

/// The keys that tokens of one source are verified with.
#[derive(Default)]
pub struct KeySet {
    keys: Vec<Key>,
    /// Tells this set from every other of the process; 0 is no set at all.
    generation: u64,
}

struct Key {
    kid: Option<Box<str>>,
    algorithm: Algorithm,
    key: DecodingKey,
}

/// Why keys cannot be used. Says nothing of what they are made of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not a JSON Web Key Set.
    #[error(
        "it is not a JSON Web Key Set: an object with a list `keys`, none of its members twice"
    )]
    NotASet,
    /// More keys than anybody has.
    #[error("it has more than {KEYS_MAX} keys")]
    TooMany,
    /// Every key was left out, for these reasons.
    #[error("none of its keys can be used{}", because(.0))]
    NoneUsable(Vec<String>),
    /// One key in a file of its own.
    #[error("{0}")]
    Unfit(String),
}

fn because(reasons: &[String]) -> String {
    match reasons {
        [] => String::new(),
        reasons => format!(": {}", in_short(reasons)),
    }
}

/// Why keys are not used, in one line: the first few reasons, since a set may have hundreds of such keys.
pub fn in_short(reasons: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = &reasons[..reasons.len().min(SHOWN)];
    match reasons.len() - shown.len() {
        0 => shown.join("; "),
        more => format!("{}; and {more} more", shown.join("; ")),
    }
}

impl KeySet {
    /// The keys of a set that can be used, and why the others cannot: a key for encryption, of a type that is not known here, or with an
    /// algorithm that is not among `algorithms`.
    pub fn from_jwks(
        text: &[u8],
        algorithms: &[Algorithm],
    ) -> Result<(KeySet, Vec<String>), KeyError> {
        let set = json::object(text).ok_or(KeyError::NotASet)?;
        let list = set.get("keys").and_then(Value::as_array);
        let list = list.ok_or(KeyError::NotASet)?;
        if list.len() > KEYS_MAX {
            return Err(KeyError::TooMany);
        }
        let (mut keys, mut unused) = (Vec::new(), Vec::new());
        for (place, jwk) in list.iter().enumerate() {
            match jwk.as_object().ok_or("it is not an object".to_owned()) {
                Ok(jwk) => match key_of(jwk, algorithms) {
                    Ok(key) => keys.push(key),
                    Err(reason) => unused.push(format!("key {}: {reason}", place + 1)),
                },
                Err(reason) => unused.push(format!("key {}: {reason}", place + 1)),
            }
        }
        match keys.is_empty() {
            true => Err(KeyError::NoneUsable(unused)),
            false => Ok((KeySet::new(keys), unused)),
        }
    }

    /// The one public key of a PEM file: `PUBLIC KEY` or `RSA PUBLIC KEY`.
    pub fn from_pem(text: &str, algorithms: &[Algorithm]) -> Result<KeySet, KeyError> {
        let unfit = |reason: &str| KeyError::Unfit(reason.to_owned());
        if text.contains("PRIVATE KEY-----") {
            return Err(unfit(
                "it is a private key: the gateway needs the public one only",
            ));
        }
        if text.contains("BEGIN CERTIFICATE-----") {
            return Err(unfit(
                "it is a certificate: write its public key with `openssl x509 -pubkey -noout -in FILE`",
            ));
        }
        if text.matches("-----BEGIN ").count() > 1 {
            return Err(unfit("it holds more than one key: use a jwks_file"));
        }
        let pem = text.as_bytes();
        let key = DecodingKey::from_rsa_pem(pem)
            .or_else(|_| DecodingKey::from_ec_pem(pem))
            .or_else(|_| DecodingKey::from_ed_pem(pem));
        let key = key.map_err(|_| unfit("it holds no public key in PEM form"))?;
        let algorithm = only_fit(&key, None, algorithms).map_err(KeyError::Unfit)?;
        let key = Key {
            kid: None,
            algorithm,
            key,
        };
        Ok(KeySet::new(vec![key]))
    }

    /// A shared secret for one of the HMAC algorithms: at least as long as its digest (RFC 7518 §3.2).
    pub fn from_secret(secret: &[u8], algorithm: Algorithm) -> Result<KeySet, KeyError> {
        let key = DecodingKey::from_secret(secret);
        let key = Key {
            kid: None,
            algorithm: only_fit(&key, None, &[algorithm]).map_err(KeyError::Unfit)?,
            key,
        };
        Ok(KeySet::new(vec![key]))
    }

    fn new(keys: Vec<Key>) -> KeySet {
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        KeySet {
            keys,
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is no key, so that no token can be verified.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether a key of this set signed the token.
    pub(super) fn verify(&self, token: &Token<'_>) -> Result<(), Fault> {
        if self.keys.is_empty() {
            return Err(Fault::NoKeys);
        }
        let named = |key: &&Key| key.kid.as_deref() == token.kid.as_deref();
        let mut candidates: Vec<&Key> = match (&token.kid, self.keys.as_slice()) {
            // a key without a name is meant by every token where it is the only one, a token without one means it
            (_, [only]) if only.kid.is_none() => vec![only],
            (None, [only]) => vec![only],
            (None, _) => return Err(Fault::UnknownKey),
            (Some(_), keys) => keys.iter().filter(named).collect(),
        };
        if candidates.is_empty() {
            return Err(Fault::UnknownKey);
        }
        candidates.retain(|key| key.algorithm == token.algorithm);
        if candidates.is_empty() {
            return Err(Fault::Algorithm);
        }
        let signed = token.signed.as_bytes();
        let is_of = |key: &&Key| {
            jsonwebtoken::crypto::verify(token.signature, signed, &key.key, key.algorithm)
                .is_ok_and(|verified| verified)
        };
        match candidates.iter().any(is_of) {
            true => Ok(()),
            false => Err(Fault::Signature),
        }
    }
}

/// How many keys, and for what; never what they are made of.
impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithms = self.keys.iter().map(|key| key.algorithm);
        f.debug_list().entries(algorithms).finish()
    }
}

fn key_of(jwk: &Map<String, Value>, algorithms: &[Algorithm]) -> Result<Key, String> {
    let text = |name: &str| match jwk.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(format!("`{name}` is not text")),
    };
    let bytes = |name: &str| {
        let text = text(name)?.ok_or(format!("it has no `{name}`"))?;
        decode(text).ok_or(format!("`{name}` is not base64url"))
    };
    if text("use")?.is_some_and(|used| used != "sig") {
        return Err("it is not for signatures".to_owned());
    }
    let operations = jwk.get("key_ops").and_then(Value::as_array);
    if operations.is_some_and(|list| !list.iter().any(|operation| operation == "verify")) {
        return Err("it is not for verifying".to_owned());
    }
    let key = match (text("kty")?, text("crv")?) {
        (Some("RSA"), _) => {
            let trimmed = |bytes: Vec<u8>| {
                let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
                bytes[zeros..].to_vec()
            };
            DecodingKey::from_rsa_raw_components(&trimmed(bytes("n")?), &trimmed(bytes("e")?))
        }
        (Some("EC"), Some(curve @ ("P-256" | "P-384"))) => {
            let length = if curve == "P-256" { 32 } else { 48 };
            let (x, y) = (bytes("x")?, bytes("y")?);
            if x.len() != length || y.len() != length {
                return Err("its coordinates do not fit its curve".to_owned());
            }
            DecodingKey::from_ec_der(&[&[4], &*x, &*y].concat())
        }
        (Some("OKP"), Some("Ed25519")) => DecodingKey::from_ed_der(&bytes("x")?),
        (Some("oct"), _) => DecodingKey::from_secret(&bytes("k")?),
        (Some("EC" | "OKP"), _) => return Err("its curve is not known here".to_owned()),
        _ => return Err("its type is not known here".to_owned()),
    };
    let algorithm = match text("alg")? {
        None => None,
        Some(name) => {
            let known = ALGORITHMS.iter().find(|(known, _)| *known == name);
            Some(known.ok_or("its algorithm is not known here")?.1)
        }
    };
    Ok(Key {
        kid: text("kid")?.map(Box::from),
        algorithm: only_fit(&key, algorithm, algorithms)?,
        key,
    })
}

/// The one algorithm of a key: its own, or the only configured one that fits its type.
fn only_fit(
    key: &DecodingKey,
    own: Option<Algorithm>,
    configured: &[Algorithm],
) -> Result<Algorithm, String> {
    let fitting = fitting(key)?;
    if own.is_some_and(|own| !fitting.contains(&own)) {
        return Err("its algorithm does not fit its type".to_owned());
    }
    let mut allowed: Vec<Algorithm> = configured.to_vec();
    allowed
        .retain(|algorithm| fitting.contains(algorithm) && own.is_none_or(|own| own == *algorithm));
    allowed.dedup();
    match *allowed {
        [only] => Ok(only),
        [] => Err(format!(
            "it is for {}, which `algorithms` does not name",
            names(own.as_ref().map_or(fitting, std::slice::from_ref))
        )),
        _ => Err(format!(
            "it has no `alg`, and several of `algorithms` fit it: {}",
            names(&allowed)
        )),
    }
}

fn names(algorithms: &[Algorithm]) -> String {
    let names: Vec<String> = algorithms
        .iter()
        .map(|algorithm| format!("{algorithm:?}"))
        .collect();
    names.join(", ")
}

/// What a key may be used for by its type and size.
fn fitting(key: &DecodingKey) -> Result<&'static [Algorithm], String> {
    use Algorithm::{
        ES256, ES384, EdDSA, HS256, HS384, HS512, PS256, PS384, PS512, RS256, RS384, RS512,
    };
    let (length, modulus) = match key.kind() {
        DecodingKeyKind::SecretOrDer(bytes) => (bytes.len(), bytes.len()),
        DecodingKeyKind::RsaModulusExponent { n, .. } => (n.len(), n.len()),
    };
    match key.family() {
        // 2048 bits, for a PEM with a few bytes around them
        AlgorithmFamily::Rsa if modulus < 256 => Err("it is shorter than 2048 bits".to_owned()),
        AlgorithmFamily::Rsa => Ok(&[RS256, RS384, RS512, PS256, PS384, PS512]),
        AlgorithmFamily::Ec if length == 65 => Ok(&[ES256]),
        AlgorithmFamily::Ec if length == 97 => Ok(&[ES384]),
        AlgorithmFamily::Ec => Err("its curve is not known here".to_owned()),
        AlgorithmFamily::Ed if length == 32 => Ok(&[EdDSA]),
        AlgorithmFamily::Ed => Err("its curve is not known here".to_owned()),
        AlgorithmFamily::Hmac => match length {
            64.. => Ok(&[HS256, HS384, HS512]),
            48.. => Ok(&[HS256, HS384]),
            32.. => Ok(&[HS256]),
            _ => Err("it is shorter than 32 bytes, and could be guessed".to_owned()),
        },
    }
}

/// Where a source's keys come from.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// Read with the configuration.
    Fixed(Arc<KeySet>),
    /// Fetched, now and again.
    Url(KeysUrl),
}

/// A JSON Web Key Set that somebody publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeysUrl {
    /// `http` or `https`, with a host, without a user.
    pub url: http::Uri,
    /// How often it is fetched.
    pub refresh: Duration,
    /// What its keys may be used for.
    pub algorithms: Vec<Algorithm>,
}

/// The set in use. It can be replaced while requests use it; a replaced set also ends what was remembered of its tokens.
#[derive(Debug)]
pub struct KeyRing {
    set: ArcSwap<KeySet>,
    /// The set's own, beside it: reading it is all that a remembered token costs.
    generation: AtomicU64,
    /// A token named a key that is not in the set.
    missed: AtomicBool,
}

impl KeyRing {
    pub(super) fn new(set: Arc<KeySet>) -> KeyRing {
        KeyRing {
            generation: AtomicU64::new(set.generation),
            set: ArcSwap::new(set),
            missed: AtomicBool::new(false),
        }
    }

    /// Uses the set of another ring from now on.
    pub fn continue_from(&self, other: &KeyRing) {
        let set = other.set.load_full();
        let generation = set.generation;
        self.set.store(set);
        self.generation.store(generation, Ordering::Release);
    }

    /// Uses another set from now on.
    pub fn replace(&self, set: KeySet) {
        let generation = set.generation;
        self.set.store(Arc::new(set));
        self.generation.store(generation, Ordering::Release);
    }

    /// Whether a token named an unknown key since this was last asked. The set may have changed at its source.
    pub fn take_missed(&self) -> bool {
        self.missed.swap(false, Ordering::Relaxed)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether a key of the set signed the token; the generation of the set that says so.
    pub(super) fn verify(&self, token: &Token<'_>) -> Result<u64, Fault> {
        let set = self.set.load();
        let verified = set.verify(token);
        if verified == Err(Fault::UnknownKey) && token.kid.is_some() {
            self.missed.store(true, Ordering::Relaxed);
        }
        verified.map(|()| set.generation())
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
    use jsonwebtoken::EncodingKey;

    use super::*;

    const SECRETS: [&[u8]; 2] = [&[1; 32], &[2; 32]];

    /// A set of the secrets under these names.
    fn set(kids: &[Option<&str>]) -> KeySet {
        let jwk = |(kid, secret): (&Option<&str>, &[u8])| {
            let kid = kid.map_or(String::new(), |kid| format!(r#","kid":"{kid}""#));
            let secret = URL_SAFE_NO_PAD.encode(secret);
            format!(r#"{{"kty":"oct","alg":"HS256","k":"{secret}"{kid}}}"#)
        };
        let keys: Vec<_> = kids.iter().zip(SECRETS).map(jwk).collect();
        let text = format!(r#"{{"keys":[{}]}}"#, keys.join(","));
        let (set, unused) = KeySet::from_jwks(text.as_bytes(), &[Algorithm::HS256]).expect("keys");
        assert!(unused.is_empty(), "{unused:?}");
        set
    }

    /// A token that the first secret has signed and that names this key.
    fn token(kid: Option<&str>) -> String {
        let kid = kid.map_or(String::new(), |kid| format!(r#","kid":"{kid}""#));
        let header = URL_SAFE_NO_PAD.encode(format!(r#"{{"alg":"HS256"{kid}}}"#));
        let signed = format!("{header}.e30");
        let key = EncodingKey::from_secret(SECRETS[0]);
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, Algorithm::HS256);
        format!("{signed}.{}", signature.expect("a secret signs anything"))
    }

    fn verify(set: &KeySet, kid: Option<&str>) -> Result<(), Fault> {
        set.verify(&Token::parse(token(kid).as_bytes()).expect("it is well-formed"))
    }

    #[test]
    fn a_token_is_verified_with_the_key_that_it_names() {
        let both = set(&[Some("a"), Some("b")]);
        assert_eq!(verify(&both, Some("a")), Ok(()));
        assert_eq!(verify(&both, Some("b")), Err(Fault::Signature));
        assert_eq!(verify(&both, Some("c")), Err(Fault::UnknownKey));
        assert_eq!(
            verify(&both, None),
            Err(Fault::UnknownKey),
            "it could be either"
        );
    }

    #[test]
    fn where_there_is_one_key_it_need_not_be_named() {
        assert_eq!(verify(&set(&[Some("a")]), None), Ok(()));
        assert_eq!(
            verify(&set(&[Some("a")]), Some("b")),
            Err(Fault::UnknownKey)
        );
        assert_eq!(verify(&set(&[None]), Some("b")), Ok(()));
        assert_eq!(
            verify(&set(&[None, Some("b")]), Some("a")),
            Err(Fault::UnknownKey)
        );
        assert_eq!(verify(&KeySet::default(), None), Err(Fault::NoKeys));
    }

    #[test]
    fn keys_of_one_name_are_each_tried() {
        assert_eq!(verify(&set(&[Some("a"), Some("a")]), Some("a")), Ok(()));
    }

    #[test]
    fn a_token_with_an_unknown_key_asks_for_the_set_once() {
        let ring = KeyRing::new(Arc::new(set(&[Some("a")])));
        let verify = |kid| {
            let text = token(kid);
            ring.verify(&Token::parse(text.as_bytes()).expect("it is well-formed"))
        };
        assert_eq!(verify(None), Ok(ring.generation()));
        assert_eq!(verify(Some("b")), Err(Fault::UnknownKey));
        assert!(ring.take_missed());
        assert!(!ring.take_missed());
        ring.replace(set(&[Some("a"), Some("b")]));
        assert_eq!(verify(None), Err(Fault::UnknownKey));
        assert!(!ring.take_missed(), "no fetch would help");
        let before = ring.generation();
        ring.replace(set(&[Some("b")]));
        assert_ne!(ring.generation(), before);
    }

    #[test]
    fn a_key_that_cannot_be_used_says_why() {
        let algorithms = [Algorithm::RS256, Algorithm::PS256, Algorithm::ES256];
        for (jwk, reason) in [
            (r#"{"kty":"oct","k":"AQEB"}"#, "shorter than 32 bytes"),
            (
                r#"{"kty":"RSA","n":"AQEB","e":"AQAB"}"#,
                "shorter than 2048 bits",
            ),
            (r#"{"kty":"RSA","e":"AQAB"}"#, "has no `n`"),
            (
                r#"{"kty":"EC","crv":"P-256","x":"AQ","y":"AQ"}"#,
                "do not fit its curve",
            ),
            (
                r#"{"kty":"EC","crv":"P-521","x":"AQ","y":"AQ"}"#,
                "curve is not known",
            ),
            (
                r#"{"kty":"OKP","crv":"Ed448","x":"AQ"}"#,
                "curve is not known",
            ),
            (r#"{"kty":"what"}"#, "type is not known"),
            (r#"{"kty":"RSA","use":"enc"}"#, "not for signatures"),
            (
                r#"{"kty":"RSA","key_ops":["wrapKey"]}"#,
                "not for verifying",
            ),
            (r#"{"kty":"RSA","use":1}"#, "`use` is not text"),
            ("7", "not an object"),
        ] {
            let text = format!(r#"{{"keys":[{jwk}]}}"#);
            let error = KeySet::from_jwks(text.as_bytes(), &algorithms).expect_err("it is unfit");
            assert!(error.to_string().contains(reason), "{jwk}: {error}");
        }
        let many = format!(r#"{{"keys":[{}]}}"#, vec!["7"; KEYS_MAX].join(","));
        let error = KeySet::from_jwks(many.as_bytes(), &algorithms).expect_err("all are unfit");
        assert!(error.to_string().ends_with("; and 251 more"), "{error}");
        let more = format!(r#"{{"keys":[{}]}}"#, vec!["7"; KEYS_MAX + 1].join(","));
        let refused = KeySet::from_jwks(more.as_bytes(), &algorithms).err();
        assert_eq!(refused, Some(KeyError::TooMany));
    }
}
