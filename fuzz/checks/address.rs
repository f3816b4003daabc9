//! Bytes as a list of addresses and as a PROXY header, with one function per target.
//!
//! - A forged element to the left of the client changes nothing.
//! - An untrusted peer is always the client.
//! - The reader takes no byte after a PROXY header.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use tidegate::{
    identity::{AddressSource, Client, Identifier, IdentitySettings},
    listener::proxy_protocol::{self, MAX_BYTES, Parsed},
};

/// A trusted proxy.
const PROXY: &str = "10.0.0.1";
/// An untrusted peer.
const STRANGER: &str = "192.0.2.1";
/// The address that the client tries to forge.
const FORGED: &str = "6.6.6.6";

/// Bytes as the lines of `X-Forwarded-For`.
pub fn x_forwarded_for(data: &[u8]) {
    list(
        data,
        AddressSource::XForwardedFor,
        "x-forwarded-for",
        FORGED,
    );
}

/// Bytes as the lines of `Forwarded`.
pub fn forwarded(data: &[u8]) {
    list(data, AddressSource::Forwarded, "forwarded", "for=6.6.6.6");
}

fn list(data: &[u8], source: AddressSource, name: &'static str, forged: &str) {
    let lines = || {
        let lines = data.split(|&byte| byte == b'\n');
        lines.filter_map(|line| HeaderValue::from_bytes(line).ok())
    };
    let name = HeaderName::from_static(name);
    let sent: HeaderMap = lines().map(|line| (name.clone(), line)).collect();
    let forged = HeaderValue::from_str(forged).expect("a value");
    let with_a_lie: HeaderMap = std::iter::once(forged)
        .chain(lines())
        .map(|line| (name.clone(), line))
        .collect();
    for trusted_hops in [None, Some(2)] {
        let identifier = Identifier::new(&IdentitySettings {
            trusted_proxies: vec!["10.0.0.0/8".parse().expect("a network")],
            address_from: source.clone(),
            trusted_hops,
            ..IdentitySettings::default()
        });
        let locate = |peer: &str, headers: &HeaderMap| -> Client<'static> {
            let peer = peer.parse().expect("an address");
            identifier.locate(peer, headers, |step| {
                // Every step can be displayed.
                assert!(!step.to_string().is_empty());
            })
        };
        let honest = locate(PROXY, &sent);
        assert_eq!(honest.address, honest.address.to_canonical());
        let ends_at_a_client = honest.doubt.is_none() && !is_ours(honest.address);
        if ends_at_a_client {
            assert_eq!(
                locate(PROXY, &with_a_lie).address,
                honest.address,
                "a forged element changed the address"
            );
        }
        let stranger: IpAddr = STRANGER.parse().expect("an address");
        assert_eq!(locate(STRANGER, &sent).address, stranger);
    }
}

/// Whether the walk may have ended because no element was left.
fn is_ours(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if address.octets()[0] == 10)
}

/// Bytes after `PROXY `.
pub fn proxy_v1(data: &[u8]) {
    header(&[b"PROXY ", data].concat());
}

/// Bytes after the signature of version 2.
pub fn proxy_v2(data: &[u8]) {
    header(&[b"\r\n\r\n\0\r\nQUIT\n", data].concat());
}

/// Reads a header as the listener does, and never a byte after it. Slow arrival must give the same
/// result as all bytes at once.
fn header(bytes: &[u8]) {
    let whole = proxy_protocol::parse(bytes);
    let mut seen = 0;
    loop {
        match proxy_protocol::parse(&bytes[..seen]) {
            Ok(Parsed::Whole { length, .. }) => {
                assert_eq!(length, seen, "read a byte after the header");
                assert_eq!(whole, proxy_protocol::parse(&bytes[..seen]));
                return;
            }
            Ok(Parsed::Longer(least)) => {
                assert!(seen < least && least <= MAX_BYTES);
                if least > bytes.len() {
                    assert!(!matches!(whole, Ok(Parsed::Whole { .. })));
                    return;
                }
                // One byte at a time, the slowest possible network.
                seen += 1;
            }
            Err(_) => {
                assert!(whole.is_err());
                return;
            }
        }
    }
}
