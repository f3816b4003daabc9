//! A token issuer: keys of every kind, the key set that it publishes, and tokens with any claims.

use std::time::SystemTime;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey};
use rcgen::{
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256,
    RsaKeySize,
};
use serde_json::{Value, json};

/// One key of an issuer.
pub struct Signer {
    pub algorithm: Algorithm,
    key: EncodingKey,
    /// The published JWK; of an HMAC secret, the secret itself.
    pub jwk: Value,
    /// The public key in PEM form, or the secret as stored in a file.
    pub file: String,
}

impl Signer {
    /// Creates a key with the ID `kid`.
    pub fn new(algorithm: Algorithm, kid: &str) -> Signer {
        let name = format!("{algorithm:?}");
        let secret = || {
            // random text for a file: the private part of a fresh key
            let random = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
            let mut secret = encode(random.serialized_der());
            secret.drain(..40);
            secret.truncate(80);
            secret
        };
        let pair = |kind| KeyPair::generate_for(kind).expect("a key");
        let (key, mut jwk, file) = match &name[..2] {
            "HS" => {
                let secret = secret();
                let jwk = json!({ "kty": "oct", "k": encode(secret.as_bytes()) });
                (EncodingKey::from_secret(secret.as_bytes()), jwk, secret)
            }
            "ES" => {
                let (pair, curve) = match algorithm {
                    Algorithm::ES256 => (pair(&PKCS_ECDSA_P256_SHA256), "P-256"),
                    _ => (pair(&PKCS_ECDSA_P384_SHA384), "P-384"),
                };
                let (x, y) = pair.public_key_raw()[1..].split_at(pair.public_key_raw().len() / 2);
                let jwk = json!({ "kty": "EC", "crv": curve, "x": encode(x), "y": encode(y) });
                let key = EncodingKey::from_ec_der(pair.serialized_der());
                (key, jwk, pair.public_key_pem())
            }
            "Ed" => {
                let pair = pair(&PKCS_ED25519);
                let jwk =
                    json!({ "kty": "OKP", "crv": "Ed25519", "x": encode(pair.public_key_raw()) });
                let key = EncodingKey::from_ed_der(pair.serialized_der());
                (key, jwk, pair.public_key_pem())
            }
            _ => {
                let pair = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048);
                let pair = pair.expect("a key");
                // PKCS #1 has nine bytes of lengths and sign before the modulus
                let modulus = &pair.public_key_raw()[9..9 + 256];
                let jwk = json!({ "kty": "RSA", "n": encode(modulus), "e": "AQAB" });
                let key = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes());
                (key.expect("an RSA key"), jwk, pair.public_key_pem())
            }
        };
        jwk["alg"] = json!(name);
        jwk["kid"] = json!(kid);
        jwk["use"] = json!("sig");
        Signer {
            algorithm,
            key,
            jwk,
            file,
        }
    }

    /// A token with these claims; valid for an hour if they have no `exp`.
    pub fn token(&self, claims: &Value) -> String {
        let mut claims = claims.clone();
        if claims.get("exp").is_none() {
            claims["exp"] = json!(in_seconds(3600));
        }
        let header = json!({ "alg": self.jwk["alg"], "kid": self.jwk["kid"], "typ": "JWT" });
        self.sign(&header.to_string(), &claims.to_string())
    }

    /// Signs any header and payload.
    pub fn sign(&self, header: &str, payload: &str) -> String {
        let signed = format!("{}.{}", encode(header), encode(payload));
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &self.key, self.algorithm);
        format!("{signed}.{}", signature.expect("the key is its own"))
    }
}

/// The key set with these keys.
pub fn jwks(signers: &[&Signer]) -> String {
    let keys: Vec<_> = signers.iter().map(|signer| &signer.jwk).collect();
    json!({ "keys": keys }).to_string()
}

/// A time in the format of tokens, relative to now.
pub fn in_seconds(from_now: i64) -> i64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    i64::try_from(now.as_secs()).expect("not that late") + from_now
}

pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The SHA-256 digest that a keys file uses to name a key.
pub fn sha256_hex(text: &str) -> String {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(text);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
