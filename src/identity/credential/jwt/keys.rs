//! Keys that verify tokens: from a JSON Web Key Set (RFC 7517), a PEM file or a shared secret.
//!
//! A key has exactly one algorithm, and a token must name the same one. So a public key is never
//! used as an HMAC secret, and `none` is never accepted (RFC 8725 §3.1). The algorithm is the key's
//! `alg`. A key without `alg` gets the one configured algorithm that fits its type. If several fit,
//! the key is not used.

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
    super::fault::CredentialFault,
    algorithms::ALGORITHMS,
    json,
    token::{Token, decode},
};

/// The most keys in one set; a larger set is rejected.
const KEYS_MAX: usize = 256;

/// The keys that verify the tokens of one source.
#[derive(Default)]
pub struct KeySet {
    keys: Vec<VerificationKey>,
    /// Unique within the process; 0 is the empty default.
    generation: u64,
}

struct VerificationKey {
    kid: Option<Box<str>>,
    algorithm: Algorithm,
    key: DecodingKey,
}

/// Why keys cannot be used. Never includes key material.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not a JSON Web Key Set.
    #[error(
        "it is not a JSON Web Key Set: it must be an object with a list `keys` and no duplicate members"
    )]
    NotASet,
    /// More than `KEYS_MAX` keys.
    #[error("it has more than {KEYS_MAX} keys")]
    TooMany,
    /// No key can be used, for these reasons.
    #[error("none of its keys can be used{}", because(.0))]
    NoneUsable(Vec<String>),
    /// The only key of a file cannot be used.
    #[error("{0}")]
    Unfit(String),
}

fn because(reasons: &[String]) -> String {
    match reasons {
        [] => String::new(),
        reasons => format!(": {}", in_short(reasons)),
    }
}

/// Why keys are not used, in one line: the first five reasons, since a set may have hundreds.
pub fn in_short(reasons: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = &reasons[..reasons.len().min(SHOWN)];
    match reasons.len() - shown.len() {
        0 => shown.join("; "),
        more => format!("{}; and {more} more", shown.join("; ")),
    }
}

impl KeySet {
    /// The usable keys of a set, and why the others are not used. A key may be for encryption, of
    /// an unsupported type, or for an algorithm that is not in `algorithms`.
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

    /// The only public key of a PEM file: `PUBLIC KEY` or `RSA PUBLIC KEY`.
    pub fn from_pem(text: &str, algorithms: &[Algorithm]) -> Result<KeySet, KeyError> {
        let unfit = |reason: &str| KeyError::Unfit(reason.to_owned());
        if text.contains("PRIVATE KEY-----") {
            return Err(unfit("it is a private key: use the public key"));
        }
        if text.contains("BEGIN CERTIFICATE-----") {
            return Err(unfit(
                "it is a certificate: extract its public key with `openssl x509 -pubkey -noout -in FILE`",
            ));
        }
        if text.matches("-----BEGIN ").count() > 1 {
            return Err(unfit("it contains more than one key: use `jwks_file`"));
        }
        let pem = text.as_bytes();
        let key = DecodingKey::from_rsa_pem(pem)
            .or_else(|_| DecodingKey::from_ec_pem(pem))
            .or_else(|_| DecodingKey::from_ed_pem(pem));
        let key = key.map_err(|_| unfit("it contains no public key in PEM form"))?;
        let algorithm = only_fit(&key, None, algorithms).map_err(KeyError::Unfit)?;
        let key = VerificationKey {
            kid: None,
            algorithm,
            key,
        };
        Ok(KeySet::new(vec![key]))
    }

    /// A shared secret for one of the HMAC algorithms; at least as long as its digest (RFC 7518
    /// §3.2).
    pub fn from_secret(secret: &[u8], algorithm: Algorithm) -> Result<KeySet, KeyError> {
        let key = DecodingKey::from_secret(secret);
        let key = VerificationKey {
            kid: None,
            algorithm: only_fit(&key, None, &[algorithm]).map_err(KeyError::Unfit)?,
            key,
        };
        Ok(KeySet::new(vec![key]))
    }

    fn new(keys: Vec<VerificationKey>) -> KeySet {
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        KeySet {
            keys,
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether the set has no keys and cannot verify any token.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether a key of this set signed the token.
    pub(super) fn verify(&self, token: &Token<'_>) -> Result<(), CredentialFault> {
        if self.keys.is_empty() {
            return Err(CredentialFault::NoKeys);
        }
        let named = |key: &&VerificationKey| key.kid.as_deref() == token.kid.as_deref();
        let mut candidates: Vec<&VerificationKey> = match (&token.kid, self.keys.as_slice()) {
            // a single key without `kid` fits every token; a token without `kid` fits a single key
            (_, [only]) if only.kid.is_none() => vec![only],
            (None, [only]) => vec![only],
            (None, _) => return Err(CredentialFault::UnknownKey),
            (Some(_), keys) => keys.iter().filter(named).collect(),
        };
        if candidates.is_empty() {
            return Err(CredentialFault::UnknownKey);
        }
        candidates.retain(|key| key.algorithm == token.algorithm);
        if candidates.is_empty() {
            return Err(CredentialFault::Algorithm);
        }
        let signed = token.signed.as_bytes();
        let is_of = |key: &&VerificationKey| {
            jsonwebtoken::crypto::verify(token.signature, signed, &key.key, key.algorithm)
                .is_ok_and(|verified| verified)
        };
        match candidates.iter().any(is_of) {
            true => Ok(()),
            false => Err(CredentialFault::Signature),
        }
    }
}

/// Shows the algorithms only, never key material.
impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithms = self.keys.iter().map(|key| key.algorithm);
        f.debug_list().entries(algorithms).finish()
    }
}

fn key_of(jwk: &Map<String, Value>, algorithms: &[Algorithm]) -> Result<VerificationKey, String> {
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
        return Err("its `use` is not `sig`".to_owned());
    }
    let operations = jwk.get("key_ops").and_then(Value::as_array);
    if operations.is_some_and(|list| !list.iter().any(|operation| operation == "verify")) {
        return Err("its `key_ops` does not include `verify`".to_owned());
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
                return Err("its coordinates have the wrong length for its curve".to_owned());
            }
            DecodingKey::from_ec_der(&[&[4], &*x, &*y].concat())
        }
        (Some("OKP"), Some("Ed25519")) => DecodingKey::from_ed_der(&bytes("x")?),
        (Some("oct"), _) => DecodingKey::from_secret(&bytes("k")?),
        (Some("EC" | "OKP"), _) => return Err("its curve is not supported".to_owned()),
        _ => return Err("its type is not supported".to_owned()),
    };
    let algorithm = match text("alg")? {
        None => None,
        Some(name) => {
            let known = ALGORITHMS.iter().find(|(known, _)| *known == name);
            Some(known.ok_or("its algorithm is not supported")?.1)
        }
    };
    Ok(VerificationKey {
        kid: text("kid")?.map(Box::from),
        algorithm: only_fit(&key, algorithm, algorithms)?,
        key,
    })
}

/// The single algorithm of a key: its own, or the only configured one that fits its type.
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
            "it is for {}, which is not in `algorithms`",
            names(own.as_ref().map_or(fitting, std::slice::from_ref))
        )),
        _ => Err(format!(
            "it has no `alg`, and several entries of `algorithms` fit it: {}",
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

/// The algorithms that fit a key's type and size.
fn fitting(key: &DecodingKey) -> Result<&'static [Algorithm], String> {
    use Algorithm::{
        ES256, ES384, EdDSA, HS256, HS384, HS512, PS256, PS384, PS512, RS256, RS384, RS512,
    };
    let (length, modulus) = match key.kind() {
        DecodingKeyKind::SecretOrDer(bytes) => (bytes.len(), bytes.len()),
        DecodingKeyKind::RsaModulusExponent { n, .. } => (n.len(), n.len()),
    };
    match key.family() {
        // 2048 bits; a PEM adds a few bytes
        AlgorithmFamily::Rsa if modulus < 256 => Err("it is shorter than 2048 bits".to_owned()),
        AlgorithmFamily::Rsa => Ok(&[RS256, RS384, RS512, PS256, PS384, PS512]),
        AlgorithmFamily::Ec if length == 65 => Ok(&[ES256]),
        AlgorithmFamily::Ec if length == 97 => Ok(&[ES384]),
        AlgorithmFamily::Ec => Err("its curve is not supported".to_owned()),
        AlgorithmFamily::Ed if length == 32 => Ok(&[EdDSA]),
        AlgorithmFamily::Ed => Err("its curve is not supported".to_owned()),
        AlgorithmFamily::Hmac => match length {
            64.. => Ok(&[HS256, HS384, HS512]),
            48.. => Ok(&[HS256, HS384]),
            32.. => Ok(&[HS256]),
            _ => Err("it is shorter than 32 bytes and could be guessed".to_owned()),
        },
    }
}

/// Where the keys of a source come from.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// Read with the configuration.
    Fixed(Arc<KeySet>),
    /// Fetched repeatedly from a URL.
    Url(KeysUrl),
}

/// A published JSON Web Key Set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeysUrl {
    /// An `http` or `https` URL with a host and without user information.
    pub url: http::Uri,
    /// The interval between fetches.
    pub refresh: Duration,
    /// The algorithms that its keys may have.
    pub algorithms: Vec<Algorithm>,
}

/// The current key set. Requests may use it while it is replaced. Replacing it also invalidates the
/// tokens that it verified.
#[derive(Debug)]
pub struct KeyRing {
    set: ArcSwap<KeySet>,
    /// The generation of `set`, stored separately: a cached token reads nothing else.
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

    /// Takes over the key set of another ring.
    pub fn continue_from(&self, other: &KeyRing) {
        let set = other.set.load_full();
        let generation = set.generation;
        self.set.store(set);
        self.generation.store(generation, Ordering::Release);
    }

    /// Replaces the key set.
    pub fn replace(&self, set: KeySet) {
        let generation = set.generation;
        self.set.store(Arc::new(set));
        self.generation.store(generation, Ordering::Release);
    }

    /// Whether a token named an unknown key since the last call. If so, the published set may have
    /// changed.
    pub fn take_missed(&self) -> bool {
        self.missed.swap(false, Ordering::Relaxed)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Verifies the token with the current set and returns the generation of that set.
    pub(super) fn verify(&self, token: &Token<'_>) -> Result<u64, CredentialFault> {
        let set = self.set.load();
        let verified = set.verify(token);
        if verified == Err(CredentialFault::UnknownKey) && token.kid.is_some() {
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

    /// A key set of the secrets with these key IDs.
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

    /// A token that the first secret signed, with this key ID.
    fn token(kid: Option<&str>) -> String {
        let kid = kid.map_or(String::new(), |kid| format!(r#","kid":"{kid}""#));
        let header = URL_SAFE_NO_PAD.encode(format!(r#"{{"alg":"HS256"{kid}}}"#));
        let signed = format!("{header}.e30");
        let key = EncodingKey::from_secret(SECRETS[0]);
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, Algorithm::HS256);
        format!("{signed}.{}", signature.expect("a secret signs anything"))
    }

    fn verify(set: &KeySet, kid: Option<&str>) -> Result<(), CredentialFault> {
        set.verify(&Token::parse(token(kid).as_bytes()).expect("it is well-formed"))
    }

    #[test]
    fn a_token_is_verified_with_the_key_that_it_names() {
        let both = set(&[Some("a"), Some("b")]);
        assert_eq!(verify(&both, Some("a")), Ok(()));
        assert_eq!(verify(&both, Some("b")), Err(CredentialFault::Signature));
        assert_eq!(verify(&both, Some("c")), Err(CredentialFault::UnknownKey));
        assert_eq!(
            verify(&both, None),
            Err(CredentialFault::UnknownKey),
            "it could be either"
        );
    }

    #[test]
    fn where_there_is_one_key_it_need_not_be_named() {
        assert_eq!(verify(&set(&[Some("a")]), None), Ok(()));
        assert_eq!(
            verify(&set(&[Some("a")]), Some("b")),
            Err(CredentialFault::UnknownKey)
        );
        assert_eq!(verify(&set(&[None]), Some("b")), Ok(()));
        assert_eq!(
            verify(&set(&[None, Some("b")]), Some("a")),
            Err(CredentialFault::UnknownKey)
        );
        assert_eq!(
            verify(&KeySet::default(), None),
            Err(CredentialFault::NoKeys)
        );
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
        assert_eq!(verify(Some("b")), Err(CredentialFault::UnknownKey));
        assert!(ring.take_missed());
        assert!(!ring.take_missed());
        ring.replace(set(&[Some("a"), Some("b")]));
        assert_eq!(verify(None), Err(CredentialFault::UnknownKey));
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
                "wrong length for its curve",
            ),
            (
                r#"{"kty":"EC","crv":"P-521","x":"AQ","y":"AQ"}"#,
                "curve is not supported",
            ),
            (
                r#"{"kty":"OKP","crv":"Ed448","x":"AQ"}"#,
                "curve is not supported",
            ),
            (r#"{"kty":"what"}"#, "type is not supported"),
            (r#"{"kty":"RSA","use":"enc"}"#, "`use` is not `sig`"),
            (
                r#"{"kty":"RSA","key_ops":["wrapKey"]}"#,
                "does not include `verify`",
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
