//! The client's address, as far as it can be believed.
//!
//! The socket's peer is a fact; everything else is hearsay. A trusted proxy vouches for the address that it wrote last, which
//! is the rightmost; that one, if it is trusted too, vouches for the one to its left. So the list is walked from the
//! right and the first address that is not a trusted proxy is the client. What cannot be read ends the walk at the last one
//! who vouched: looking further left would believe what the client itself wrote.
//!
//! ```text
//! X-Forwarded-For: 1.1.1.1, 198.51.100.7, 10.0.0.2        peer 10.0.0.1, trusted 10.0.0.0/8
//!                  forged?  ← client      ← trusted       ← trusted
//! ```
//!
//! Exactly one configured source is read: with two, an attacker would choose the weaker.
//!
//! Where proxies have no stable addresses, a list can be counted instead of walked: with N proxies in front that append, the
//! client is the Nth element from the right. Where the list is shorter nothing is guessed: then the peer is the client.

use std::{fmt, net::IpAddr, net::Ipv4Addr, net::Ipv6Addr};

use http::{HeaderMap, HeaderName, HeaderValue};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{AddressSource, TrustedProxies, forwarded};

/// The most elements of a list that are looked at; an honest chain of proxies has two or three.
pub const ELEMENTS_MAX: usize = 32;

/// The longest readable element: a full IPv6 address with an embedded IPv4 tail, in brackets, with a port.
const ELEMENT_MAX_BYTES: usize = "[0000:0000:0000:0000:0000:ffff:255.255.255.255]:65535".len();

/// `X-Forwarded-For`.
pub(super) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The addresses of one request, canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Whom we count.
    pub client: IpAddr,
    /// Who is connected to us.
    pub peer: IpAddr,
    /// The peer is a trusted proxy.
    pub peer_trusted: bool,
    /// A trusted proxy handed on something that could not be read, so the client may be one of several behind it.
    pub doubt: Option<Doubt>,
}

/// Why the walk ended before it found an address outside the trusted networks, although there was more to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// Something is not an address, or the field does not follow its grammar.
    Malformed,
    /// A field that may occur once occurs again.
    Repeated,
    /// The list is longer than [`ELEMENTS_MAX`].
    TooLong,
    /// The list has fewer elements than there are proxies to write them.
    TooShort,
}

/// One step towards the client's address, for showing one's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Who is connected; headers are read only when that is a trusted proxy.
    Peer {
        /// The canonical address.
        address: IpAddr,
        /// It is a trusted proxy.
        trusted: bool,
    },
    /// One element of the configured header, in the order in which they are looked at: from the right.
    Element {
        /// As it stands in the header, trimmed.
        text: &'a [u8],
        /// What it was taken for.
        verdict: Verdict,
    },
    /// The header as a whole cannot be used.
    Unusable(Doubt),
    /// A list that is counted has ended after so many elements, too early.
    TooFew {
        /// The elements that it has.
        found: usize,
        /// The proxies in front.
        hops: u8,
    },
}

/// What one element was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing between two commas: skipped.
    Empty,
    /// A trusted proxy: the walk goes on to its left.
    Trusted(IpAddr),
    /// The first address that is not a trusted proxy, or the one that was counted to: the client.
    Client(IpAddr),
    /// What one of the proxies in front saw, where they are counted: the count goes on to its left.
    Hop,
    /// Not an address: the walk ends; the client is the last one who was vouched for.
    NotAnAddress,
    /// One more than are looked at: the walk ends as above.
    TooMany,
}

/// Whom we believe, and what we read of it.
#[derive(Debug)]
pub struct Chain {
    /// Where a trusted proxy writes the client's address.
    pub source: AddressSource,
    /// Whose word is taken. Nobody's while the set is empty, unless proxies are counted.
    pub trusted: TrustedProxies,
    /// So many proxies in front of us append to the list; then it is counted, not walked.
    pub hops: Option<u8>,
}

impl Chain {
    /// Finds the client's address, and shows each step to `visit`. Costs one search in the trusted networks for each address
    /// that is looked at; allocates nothing unless a `Forwarded` value has backslashes.
    pub fn resolve<'a>(
        &self,
        peer: IpAddr,
        headers: &'a HeaderMap,
        mut visit: impl FnMut(Step<'a>),
    ) -> Addresses {
        let peer = peer.to_canonical();
        let peer_trusted = self.believes(peer);
        visit(Step::Peer {
            address: peer,
            trusted: peer_trusted,
        });
        let (client, doubt) = match &self.source {
            _ if !peer_trusted => (peer, None),
            AddressSource::None => (peer, None),
            AddressSource::XForwardedFor => self.read(listed(headers), peer, visit),
            AddressSource::Forwarded => match forwarded::elements(headers) {
                Ok(elements) => self.read(elements, peer, visit),
                Err(doubt) => {
                    visit(Step::Unusable(doubt));
                    (peer, Some(doubt))
                }
            },
            AddressSource::Single(name) => single(headers, name, &self.trusted, peer, visit),
        };
        Addresses {
            client,
            peer,
            peer_trusted,
            doubt,
        }
    }

    /// What of a list stands to the left of the elements that were seen, from the right. For explaining.
    pub fn unseen<'a>(&self, headers: &'a HeaderMap, seen: usize) -> Vec<&'a [u8]> {
        let texts = |elements: &mut dyn Iterator<Item = Element<'a>>| {
            let unseen = elements.skip(seen).map(|element| element.text);
            unseen.filter(|text| !text.is_empty()).collect()
        };
        match self.source {
            AddressSource::XForwardedFor => texts(&mut listed(headers)),
            AddressSource::Forwarded => forwarded::elements(headers)
                .map(|mut elements| texts(&mut elements))
                .unwrap_or_default(),
            AddressSource::Single(_) | AddressSource::None => Vec::new(),
        }
    }

    /// Whether a peer's forwarding headers are believed. Who counts proxies without naming them believes every peer.
    fn believes(&self, peer: IpAddr) -> bool {
        self.trusted.contains(peer) || (self.hops.is_some() && self.trusted.is_empty())
    }

    fn read<'a>(
        &self,
        elements: impl Iterator<Item = Element<'a>>,
        peer: IpAddr,
        visit: impl FnMut(Step<'a>),
    ) -> (IpAddr, Option<Doubt>) {
        match self.hops {
            None => walk(elements, &self.trusted, peer, visit),
            Some(hops) => count(elements, hops, peer, visit),
        }
    }
}

/// One element of a list of addresses.
#[derive(Clone, Copy)]
pub(super) struct Element<'a> {
    pub(super) text: &'a [u8],
    /// `None` where the text is not an address.
    pub(super) address: Option<IpAddr>,
}

/// The elements of `X-Forwarded-For` from the right: all lines are one list (RFC 9110 §5.3).
fn listed(headers: &HeaderMap) -> impl Iterator<Item = Element<'_>> {
    let lines = headers.get_all(X_FORWARDED_FOR).into_iter().rev();
    let texts = lines.flat_map(|line| line.as_bytes().rsplit(|&byte| byte == b','));
    texts.map(|text| {
        let text = trim(text);
        Element {
            text,
            address: parse(text),
        }
    })
}

/// Walks a list from the right, as far as it can be believed.
fn walk<'a>(
    elements: impl Iterator<Item = Element<'a>>,
    trusted: &TrustedProxies,
    peer: IpAddr,
    mut visit: impl FnMut(Step<'a>),
) -> (IpAddr, Option<Doubt>) {
    let mut vouched_for = peer;
    for (count, Element { text, address }) in elements.enumerate() {
        let mut judge = |verdict| visit(Step::Element { text, verdict });
        match address {
            _ if count == ELEMENTS_MAX => {
                judge(Verdict::TooMany);
                return (vouched_for, Some(Doubt::TooLong));
            }
            None if text.is_empty() => judge(Verdict::Empty),
            None => {
                judge(Verdict::NotAnAddress);
                return (vouched_for, Some(Doubt::Malformed));
            }
            Some(address) if trusted.contains(address) => {
                judge(Verdict::Trusted(address));
                vouched_for = address;
            }
            Some(address) => {
                judge(Verdict::Client(address));
                return (address, None);
            }
        }
    }
    (vouched_for, None)
}

/// Counts a list from the right, as many elements as there are proxies in front.
fn count<'a>(
    elements: impl Iterator<Item = Element<'a>>,
    hops: u8,
    peer: IpAddr,
    mut visit: impl FnMut(Step<'a>),
) -> (IpAddr, Option<Doubt>) {
    let mut found = 0;
    for (looked_at, Element { text, address }) in elements.enumerate() {
        let mut judge = |verdict| visit(Step::Element { text, verdict });
        if found == usize::from(hops) {
            break;
        }
        if looked_at == ELEMENTS_MAX {
            judge(Verdict::TooMany);
            return (peer, Some(Doubt::TooLong));
        }
        if text.is_empty() {
            judge(Verdict::Empty);
            continue;
        }
        found += 1;
        match address {
            _ if found < usize::from(hops) => judge(Verdict::Hop),
            Some(address) => {
                judge(Verdict::Client(address));
                return (address, None);
            }
            None => {
                judge(Verdict::NotAnAddress);
                return (peer, Some(Doubt::Malformed));
            }
        }
    }
    if found < usize::from(hops) {
        visit(Step::TooFew { found, hops });
    }
    // without any list it is a proxy's own request, such as a health check
    let doubt = (1..usize::from(hops)).contains(&found);
    (peer, doubt.then_some(Doubt::TooShort))
}

/// A header that holds exactly one address, in exactly one line.
fn single<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    trusted: &TrustedProxies,
    peer: IpAddr,
    mut visit: impl FnMut(Step<'a>),
) -> (IpAddr, Option<Doubt>) {
    let mut lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    let Some(line) = lines.next() else {
        return (peer, None);
    };
    if lines.next().is_some() {
        visit(Step::Unusable(Doubt::Repeated));
        return (peer, Some(Doubt::Repeated));
    }
    let text = trim(line);
    match parse(text) {
        Some(address) if trusted.contains(address) => {
            visit(Step::Element {
                text,
                verdict: Verdict::Trusted(address),
            });
            (address, None)
        }
        Some(address) => {
            visit(Step::Element {
                text,
                verdict: Verdict::Client(address),
            });
            (address, None)
        }
        None => {
            visit(Step::Element {
                text,
                verdict: Verdict::NotAnAddress,
            });
            (peer, Some(Doubt::Malformed))
        }
    }
}

/// Reads `1.2.3.4`, `2001:db8::1` or `[2001:db8::1]`, the first and the last also with a port (which is dropped), as a
/// canonical address. Nothing else: no leading zeros, hexadecimal octets, zones, names or quotes.
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
pub(super) fn is_port(text: &str) -> bool {
    (1..=5).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && text.parse::<u16>().is_ok()
}

/// Without the spaces and tabs that may stand around a value (RFC 9110 §5.6.3).
pub(super) fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

/// Whether an address is of a kind that the internet does not route: a private network's, a carrier's, this machine's.
pub fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            // RFC 6598: between a carrier and its customers
            let is_shared = first == 100 && (64..128).contains(&second);
            address.is_private() || address.is_loopback() || address.is_link_local() || is_shared
        }
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local()
        }
    }
}

/// How addresses are aggregated when they key a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// Bits of an IPv4 address that count; more than 32 is 32.
    pub ipv4: u8,
    /// Bits of an IPv6 address that count; more than 128 is 128. A home or a server has a whole /64 at will.
    pub ipv6: u8,
}

impl Default for Prefixes {
    fn default() -> Prefixes {
        Prefixes { ipv4: 32, ipv6: 64 }
    }
}

impl Prefixes {
    /// The network that an address counts for; IPv4-mapped addresses count as IPv4.
    pub fn aggregate(self, address: IpAddr) -> IpNet {
        match address.to_canonical() {
            IpAddr::V4(address) => Ipv4Net::new_assert(address, self.ipv4.min(32))
                .trunc()
                .into(),
            IpAddr::V6(address) => Ipv6Net::new_assert(address, self.ipv6.min(128))
                .trunc()
                .into(),
        }
    }
}

impl Doubt {
    /// Every doubt's word for the metric's label.
    pub const LABELS: [&str; 4] = ["malformed", "repeated", "too_long", "too_short"];

    /// A word for the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Doubt::Malformed => "malformed",
            Doubt::Repeated => "repeated",
            Doubt::TooLong => "too_long",
            Doubt::TooShort => "too_short",
        }
    }
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Peer {
                address,
                trusted: true,
            } => write!(f, "peer {address} is a trusted proxy"),
            Step::Peer {
                address,
                trusted: false,
            } => write!(
                f,
                "peer {address} is not a trusted proxy: it is the client, whatever it claims"
            ),
            Step::Element { text, verdict } => write!(f, "\"{}\" {verdict}", text.escape_ascii()),
            Step::Unusable(Doubt::Repeated) => {
                write!(f, "the header occurs more than once: none is believed")
            }
            Step::Unusable(_) => write!(
                f,
                "the header does not follow its grammar: none of it is believed"
            ),
            Step::TooFew { found, hops } => write!(
                f,
                "the list has {found} of the {hops} elements that the proxies in front would write: the peer is the client"
            ),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Empty => write!(f, "is empty: skipped"),
            Verdict::Trusted(address) => write!(
                f,
                "is the trusted proxy {address}: what it vouches for stands to its left"
            ),
            Verdict::Client(address) => write!(f, "is {address}: the client"),
            Verdict::Hop => write!(f, "was written by a proxy in front: counted"),
            Verdict::NotAnAddress => write!(
                f,
                "is not an address: what stands to its left is not believed"
            ),
            Verdict::TooMany => write!(
                f,
                "is one of more than {ELEMENTS_MAX}: what stands to its left is not believed"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
