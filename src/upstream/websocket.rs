//! Checks that a server has accepted a WebSocket handshake (RFC 6455 §4.1).
//!
//! A 101 turns a server connection into a tunnel that carries arbitrary client bytes. If a server
//! could be tricked into an unintended 101, it would parse those bytes as requests that bypass the
//! limits. So it must prove that it read the handshake: `Sec-WebSocket-Accept` is derived from the
//! client's key.

use http::{HeaderMap, HeaderName, header::SEC_WEBSOCKET_ACCEPT};

/// Appended to the key by the server.
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Whether the fields of a 101 answer this `Sec-WebSocket-Key`.
pub(super) fn accepts(headers: &HeaderMap, key: &[u8]) -> bool {
    only(headers, &SEC_WEBSOCKET_ACCEPT) == Some(&accept(key))
}

fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut lines = headers.get_all(name).iter();
    let first = lines.next()?;
    lines.next().is_none().then_some(first.as_bytes())
}

/// The Base64 of the SHA-1 of the key and the GUID: 20 bytes, 28 characters.
fn accept(key: &[u8]) -> [u8; 28] {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut hash = sha1_smol::Sha1::new();
    hash.update(key);
    hash.update(GUID);
    let mut text = [b'='; 28];
    for (three, four) in hash.digest().bytes().chunks(3).zip(text.chunks_mut(4)) {
        let bits = three
            .iter()
            .zip([16, 8, 0])
            .fold(0, |bits, (&byte, shift)| bits | u32::from(byte) << shift);
        // n bytes make n + 1 characters
        for (place, shift) in four.iter_mut().zip([18, 12, 6, 0]).take(three.len() + 1) {
            *place = ALPHABET[(bits >> shift & 63) as usize];
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_key_is_answered_as_rfc_6455_says() {
        // RFC 6455 §1.3
        assert_eq!(
            &accept(b"dGhlIHNhbXBsZSBub25jZQ=="),
            b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
    }

    #[test]
    fn only_who_has_read_the_key_knows_the_answer() {
        let fields = |list: &[(&'static str, &'static str)]| -> HeaderMap {
            list.iter()
                .map(|&(name, value)| {
                    (
                        HeaderName::from_static(name),
                        HeaderValue::from_static(value),
                    )
                })
                .collect()
        };
        let key = b"dGhlIHNhbXBsZSBub25jZQ==";
        let right = ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(accepts(&fields(&[right]), key));
        assert!(!accepts(&fields(&[]), key));
        assert!(!accepts(
            &fields(&[("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOp=")]),
            key
        ));
    }
}
