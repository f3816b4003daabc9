//! What a token looks like before its signature is believed: three parts of base64url, the first a header.
//!
//! Compact JWS only (RFC 7515 §3.1): five parts are encryption, a brace is the JSON form, and neither is read. Of the header
//! just two members count: `alg`, which must be that of a known key, and `kid`, which names it. Keys and URLs in a header (`jwk`, `jku`, `x5c`,
//! `x5u`) were put there by whoever wrote the token and are never looked at. Any `crit` is refused, since no extension is known here.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::Algorithm;

use super::{super::Fault, json, keys::ALGORITHMS};

/// The longest token that is looked at.
pub(super) const TOKEN_MAX_BYTES: usize = 8 * 1024;

/// A token taken apart. Nothing in it is verified.
#[derive(Debug)]
pub(super) struct Token<'t> {
    pub(super) algorithm: Algorithm,
    /// The key that the token says it is signed with.
    pub(super) kid: Option<String>,
    /// Header and payload as they were signed.
    pub(super) signed: &'t str,
    payload: &'t str,
    /// Still encoded; it is base64url without padding.
    pub(super) signature: &'t str,
}

impl<'t> Token<'t> {
    pub(super) fn parse(text: &'t [u8]) -> Result<Token<'t>, Fault> {
        if text.is_empty() || text.len() > TOKEN_MAX_BYTES {
            return Err(Fault::Malformed);
        }
        let text = str::from_utf8(text).map_err(|_| Fault::Malformed)?;
        let (signed, signature) = text.rsplit_once('.').ok_or(Fault::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(Fault::Malformed)?;
        if payload.contains('.') {
            return Err(Fault::Malformed);
        }
        let header = decode(header)
            .and_then(|header| json::object(&header))
            .ok_or(Fault::Malformed)?;
        if header.contains_key("crit") {
            return Err(Fault::Malformed);
        }
        let name = header.get("alg").and_then(|name| name.as_str());
        let algorithm = ALGORITHMS.iter().find(|(known, _)| Some(*known) == name);
        let algorithm = algorithm.ok_or(Fault::Algorithm)?.1;
        let kid = match header.get("kid") {
            None => None,
            Some(kid) => Some(kid.as_str().ok_or(Fault::Malformed)?.to_owned()),
        };
        if signature.is_empty() || decode(signature).is_none() {
            return Err(Fault::Malformed);
        }
        Ok(Token {
            algorithm,
            kid,
            signed,
            payload,
            signature,
        })
    }

    /// The claims, decoded. To be read only when the signature is verified.
    pub(super) fn payload(&self) -> Result<Vec<u8>, Fault> {
        decode(self.payload).ok_or(Fault::Malformed)
    }
}

/// Base64url without padding, in its one spelling (RFC 7515 §2).
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
            (String::new(), Fault::Malformed),
            ("abc".to_owned(), Fault::Malformed),
            ("a.b".to_owned(), Fault::Malformed),
            (token("{}"), Fault::Algorithm),
            (token(r#"{"alg":"none"}"#), Fault::Algorithm),
            (token(r#"{"alg":"rs256"}"#), Fault::Algorithm),
            (token(r#"{"alg":["RS256"]}"#), Fault::Algorithm),
            (token(r#"{"alg":"RS256","kid":1}"#), Fault::Malformed),
            (token(r#"{"alg":"RS256","crit":[]}"#), Fault::Malformed),
            (token(r#"{"alg":"none","alg":"RS256"}"#), Fault::Malformed),
            (token(r#"{"alg":"RS256"}"#) + ".AA", Fault::Malformed),
            (token(r#"{"alg":"RS256"}"#) + "==", Fault::Malformed),
            (token(r#"{"alg":"RS256"}"#) + "\n", Fault::Malformed),
            // the bits past the last byte are not zero: a second spelling of one signature
            (
                token(r#"{"alg":"RS256"}"#).replace(".AA", ".AB"),
                Fault::Malformed,
            ),
        ] {
            assert_eq!(Token::parse(text.as_bytes()).err(), Some(fault), "{text}");
        }
    }

    #[test]
    fn size_is_bounded_before_anything_is_decoded() {
        let text = vec![b'a'; TOKEN_MAX_BYTES + 1];
        assert_eq!(Token::parse(&text).err(), Some(Fault::Malformed));
    }
}
