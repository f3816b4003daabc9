//! One element of a list of addresses, as proxies write it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Number of list elements that are read at most. A real proxy chain has two or three.
pub const ELEMENTS_MAX: usize = 32;

/// The longest readable element: a full IPv6 address with an embedded IPv4 tail, brackets and port.
const ELEMENT_MAX_BYTES: usize = "[0000:0000:0000:0000:0000:ffff:255.255.255.255]:65535".len();

/// Why the search ended before it found an address outside the trusted networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressFault {
    /// Something is not an address, or the field does not follow its grammar.
    Malformed,
    /// A field that may occur only once is repeated.
    Repeated,
    /// The list is longer than [`ELEMENTS_MAX`].
    TooLong,
    /// The list has fewer elements than the configured number of proxies.
    TooShort,
}

impl AddressFault {
    /// The metric labels of all variants.
    pub const LABELS: [&str; 4] = ["malformed", "repeated", "too_long", "too_short"];

    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            AddressFault::Malformed => "malformed",
            AddressFault::Repeated => "repeated",
            AddressFault::TooLong => "too_long",
            AddressFault::TooShort => "too_short",
        }
    }
}

/// One element of a list of addresses.
#[derive(Clone, Copy)]
pub(in crate::identity) struct Element<'a> {
    pub(in crate::identity) text: &'a [u8],
    /// `None` where the text is not an address.
    pub(in crate::identity) address: Option<IpAddr>,
}

/// Parses `1.2.3.4`, `2001:db8::1` or `[2001:db8::1]` to a canonical address. The first and the
/// last form may have a port, which is dropped. Rejects leading zeros, hexadecimal octets, zones,
/// names and quotes.
pub fn parse(text: &[u8]) -> Option<IpAddr> {
    if text.len() > ELEMENT_MAX_BYTES {
        return None;
    }
    let text = str::from_utf8(text).ok()?;
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        if !port.is_empty() && !is_port(port.strip_prefix(':')?) {
            return None;
        }
        return address.parse().ok().map(canonical_v6);
    }
    match text.split_once(':') {
        None => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
        Some((address, port)) if !port.contains(':') => address
            .parse::<Ipv4Addr>()
            .ok()
            .filter(|_| is_port(port))
            .map(IpAddr::V4),
        Some(_) => text.parse().ok().map(canonical_v6),
    }
}

fn canonical_v6(address: Ipv6Addr) -> IpAddr {
    IpAddr::V6(address).to_canonical()
}

/// 0 to 65535 in at most five digits.
pub(in crate::identity) fn is_port(text: &str) -> bool {
    (1..=5).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && text.parse::<u16>().is_ok()
}

/// Strips the optional spaces and tabs around a value (RFC 9110 §5.6.3).
pub(in crate::identity) fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}
