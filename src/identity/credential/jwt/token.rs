//! Parses a token before its signature is verified: three base64url parts, the first a header.
//!
//! Only compact JWS is accepted (RFC 7515 §3.1); five parts are encryption, a brace is the JSON
//! form. Two header members are read: `alg`, which must match a known key, and `kid`, which names
//! the key. Keys and URLs in a header (`jwk`, `jku`, `x5c`, `x5u`) come from the token's author and
//! are ignored. Any `crit` is rejected, because no extension is supported.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::Algorithm;

use super::{super::fault::CredentialFault, algorithms::ALGORITHMS, json};

/// Longer tokens are rejected.
pub(super) const TOKEN_MAX_BYTES: usize = 8 * 1024;

/// A parsed token. Nothing in it is verified.
#[derive(Debug)]
pub(super) struct Token<'t> {
    pub(super) algorithm: Algorithm,
    /// The ID of the key that the token claims to be signed with.
    pub(super) kid: Option<String>,
    /// Header and payload: the signed text.
    pub(super) signed: &'t str,
    payload: &'t str,
    /// The signature as base64url without padding.
    pub(super) signature: &'t str,
}

impl<'t> Token<'t> {
    pub(super) fn parse(text: &'t [u8]) -> Result<Token<'t>, CredentialFault> {
        if text.is_empty() || text.len() > TOKEN_MAX_BYTES {
            return Err(CredentialFault::Malformed);
        }
        let text = str::from_utf8(text).map_err(|_| CredentialFault::Malformed)?;
        let (signed, signature) = text.rsplit_once('.').ok_or(CredentialFault::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(CredentialFault::Malformed)?;
        if payload.contains('.') {
            return Err(CredentialFault::Malformed);
        }
        let header = decode(header)
            .and_then(|header| json::object(&header))
            .ok_or(CredentialFault::Malformed)?;
        if header.contains_key("crit") {
            return Err(CredentialFault::Malformed);
        }
        let name = header.get("alg").and_then(|name| name.as_str());
        let algorithm = ALGORITHMS.iter().find(|(known, _)| Some(*known) == name);
        let algorithm = algorithm.ok_or(CredentialFault::Algorithm)?.1;
        let kid = match header.get("kid") {
            None => None,
            Some(kid) => Some(kid.as_str().ok_or(CredentialFault::Malformed)?.to_owned()),
        };
        if signature.is_empty() || decode(signature).is_none() {
            return Err(CredentialFault::Malformed);
        }
        Ok(Token {
            algorithm,
            kid,
            signed,
            payload,
            signature,
        })
    }

    /// The decoded claims. Read them only after the signature verifies.
    pub(super) fn payload(&self) -> Result<Vec<u8>, CredentialFault> {
        decode(self.payload).ok_or(CredentialFault::Malformed)
    }
}

/// Decodes base64url without padding; rejects other spellings (RFC 7515 §2).
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(header: &str) -> String {
        format!("{}.e30.AA", URL_SAFE_NO_PAD.encode(header))
    }

    #[test]
    fn header_names_algorithm_and_key() {
        let text = token(r#"{"alg":"Ed25519","kid":"a","typ":"JWT","jku":"https://evil.example"}"#);
        let token = Token::parse(text.as_bytes()).expect("it is well-formed");
        assert_eq!(
            (token.algorithm, token.kid.as_deref()),
            (Algorithm::EdDSA, Some("a"))
        );
        assert_eq!(token.payload(), Ok(b"{}".to_vec()));
    }

    #[test]
    fn anything_else_is_no_token() {
        for (text, fault) in [
            (String::new(), CredentialFault::Malformed),
            ("abc".to_owned(), CredentialFault::Malformed),
            ("a.b".to_owned(), CredentialFault::Malformed),
            (token("{}"), CredentialFault::Algorithm),
            (token(r#"{"alg":"none"}"#), CredentialFault::Algorithm),
            (token(r#"{"alg":"rs256"}"#), CredentialFault::Algorithm),
            (token(r#"{"alg":["RS256"]}"#), CredentialFault::Algorithm),
            (
                token(r#"{"alg":"RS256","kid":1}"#),
                CredentialFault::Malformed,
            ),
            (
                token(r#"{"alg":"RS256","crit":[]}"#),
                CredentialFault::Malformed,
            ),
            (
                token(r#"{"alg":"none","alg":"RS256"}"#),
                CredentialFault::Malformed,
            ),
            (
                token(r#"{"alg":"RS256"}"#) + ".AA",
                CredentialFault::Malformed,
            ),
            (
                token(r#"{"alg":"RS256"}"#) + "==",
                CredentialFault::Malformed,
            ),
            (
                token(r#"{"alg":"RS256"}"#) + "\n",
                CredentialFault::Malformed,
            ),
            // non-zero bits after the last byte would be a second spelling of the signature
            (
                token(r#"{"alg":"RS256"}"#).replace(".AA", ".AB"),
                CredentialFault::Malformed,
            ),
        ] {
            assert_eq!(Token::parse(text.as_bytes()).err(), Some(fault), "{text}");
        }
    }

    #[test]
    fn size_is_bounded_before_anything_is_decoded() {
        let text = vec![b'a'; TOKEN_MAX_BYTES + 1];
        assert_eq!(Token::parse(&text).err(), Some(CredentialFault::Malformed));
    }
}
