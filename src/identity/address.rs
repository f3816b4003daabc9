//! The client's address, as far as it can be trusted.
//!
//! Only the socket's peer address is certain. A trusted proxy vouches for the rightmost address,
//! which it appended. If that address is trusted too, it vouches for the one to its left. So the
//! list is walked from the right, and the first address that is not a trusted proxy is the client.
//! An unreadable element ends the walk at the last trusted address, because anything further left
//! may be written by the client.
//!
//! ```text
//! X-Forwarded-For: 1.1.1.1, 198.51.100.7, 10.0.0.2        peer 10.0.0.1, trusted 10.0.0.0/8
//!                  forged?  ← client      ← trusted       ← trusted
//! ```
//!
//! Exactly one configured source is read: with two, an attacker would choose the weaker.
//!
//! If proxies have no stable addresses, elements can be counted instead. With N appending proxies
//! in front, the client is the Nth element from the right. If the list is shorter, the peer is the
//! client; tidegate does not guess.

mod element;

use std::{fmt, net::IpAddr};

use http::{HeaderMap, HeaderName, HeaderValue};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub use element::{AddressFault, ELEMENTS_MAX, parse};
pub(super) use element::{Element, is_port, trim};

use super::{forwarded, trusted::TrustedProxies};

/// `X-Forwarded-For`.
pub(super) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Where a trusted proxy writes the client's address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressSource {
    /// `X-Forwarded-For`, read from the right.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239), read from the right.
    Forwarded,
    /// A header that holds exactly one address.
    Single(http::HeaderName),
    /// No header: the peer is the client.
    None,
}

impl AddressSource {
    /// The header's name; `None` if no header is read.
    pub fn name(&self) -> Option<String> {
        match self {
            AddressSource::XForwardedFor => Some("x-forwarded-for".to_owned()),
            AddressSource::Forwarded => Some("forwarded".to_owned()),
            AddressSource::Single(name) => Some(name.to_string()),
            AddressSource::None => None,
        }
    }
}

/// The addresses of one request, canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestAddresses {
    /// The address that limits count.
    pub client: IpAddr,
    /// The address at the other end of the connection.
    pub peer: IpAddr,
    /// The peer is a trusted proxy.
    pub peer_trusted: bool,
    /// A trusted proxy forwarded something unreadable, so `client` may stand for several clients.
    pub doubt: Option<AddressFault>,
}

/// One step towards the client's address, for `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressStep<'a> {
    /// The peer. Headers are read only if it is a trusted proxy.
    Peer {
        /// The canonical address.
        address: IpAddr,
        /// It is a trusted proxy.
        trusted: bool,
    },
    /// One element of the configured header, visited from right to left.
    Element {
        /// The element's text, trimmed.
        text: &'a [u8],
        /// How the element was interpreted.
        verdict: ElementVerdict,
    },
    /// The header as a whole cannot be used.
    Unusable(AddressFault),
    /// Hops are counted, and the list ended too early.
    TooFew {
        /// The number of elements in the list.
        found: usize,
        /// The configured number of proxies in front.
        hops: u8,
    },
}

/// How one element was interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementVerdict {
    /// Empty between two commas: skipped.
    Empty,
    /// A trusted proxy: the walk continues to its left.
    Trusted(IpAddr),
    /// The client: the first address that is not a trusted proxy, or the Nth when hops are counted.
    Client(IpAddr),
    /// Written by one of the proxies in front, when hops are counted: the count continues to its
    /// left.
    Hop,
    /// Not an address. The walk ends, and the client is the last trusted address.
    NotAnAddress,
    /// One element beyond [`ELEMENTS_MAX`]. The walk ends as for [`ElementVerdict::NotAnAddress`].
    TooMany,
}

/// Which proxies are trusted, and which header is read from them.
#[derive(Debug)]
pub struct Chain {
    /// Where a trusted proxy writes the client's address.
    pub source: AddressSource,
    /// Trusted proxies. If empty, no peer is trusted unless hops are counted.
    pub trusted: TrustedProxies,
    /// Number of proxies in front that append to the list. If set, elements are counted, not
    /// walked.
    pub hops: Option<u8>,
}

impl Chain {
    /// Finds the client's address and passes each step to `visit`. Costs one search in the trusted
    /// networks for each address read. Allocates only for a `Forwarded` value with backslashes.
    pub fn resolve<'a>(
        &self,
        peer: IpAddr,
        headers: &'a HeaderMap,
        mut visit: impl FnMut(AddressStep<'a>),
    ) -> RequestAddresses {
        let peer = peer.to_canonical();
        let peer_trusted = self.is_trusted(peer);
        visit(AddressStep::Peer {
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
                    visit(AddressStep::Unusable(doubt));
                    (peer, Some(doubt))
                }
            },
            AddressSource::Single(name) => single(headers, name, &self.trusted, peer, visit),
        };
        RequestAddresses {
            client,
            peer,
            peer_trusted,
            doubt,
        }
    }

    /// List elements to the left of the `seen` rightmost ones. For `explain`.
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

    /// Whether a peer's forwarding headers are read. With counted hops and no named networks, every
    /// peer is trusted.
    fn is_trusted(&self, peer: IpAddr) -> bool {
        self.trusted.contains(peer) || (self.hops.is_some() && self.trusted.is_empty())
    }

    fn read<'a>(
        &self,
        elements: impl Iterator<Item = Element<'a>>,
        peer: IpAddr,
        visit: impl FnMut(AddressStep<'a>),
    ) -> (IpAddr, Option<AddressFault>) {
        match self.hops {
            None => walk(elements, &self.trusted, peer, visit),
            Some(hops) => count(elements, hops, peer, visit),
        }
    }
}

/// The elements of `X-Forwarded-For` from the right. All lines form one list (RFC 9110 §5.3).
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

/// Walks the list from the right until an address is not a trusted proxy.
fn walk<'a>(
    elements: impl Iterator<Item = Element<'a>>,
    trusted: &TrustedProxies,
    peer: IpAddr,
    mut visit: impl FnMut(AddressStep<'a>),
) -> (IpAddr, Option<AddressFault>) {
    let mut vouched_for = peer;
    for (count, Element { text, address }) in elements.enumerate() {
        let mut judge = |verdict| visit(AddressStep::Element { text, verdict });
        match address {
            _ if count == ELEMENTS_MAX => {
                judge(ElementVerdict::TooMany);
                return (vouched_for, Some(AddressFault::TooLong));
            }
            None if text.is_empty() => judge(ElementVerdict::Empty),
            None => {
                judge(ElementVerdict::NotAnAddress);
                return (vouched_for, Some(AddressFault::Malformed));
            }
            Some(address) if trusted.contains(address) => {
                judge(ElementVerdict::Trusted(address));
                vouched_for = address;
            }
            Some(address) => {
                judge(ElementVerdict::Client(address));
                return (address, None);
            }
        }
    }
    (vouched_for, None)
}

/// Counts one element from the right for each proxy in front.
fn count<'a>(
    elements: impl Iterator<Item = Element<'a>>,
    hops: u8,
    peer: IpAddr,
    mut visit: impl FnMut(AddressStep<'a>),
) -> (IpAddr, Option<AddressFault>) {
    let mut found = 0;
    for (looked_at, Element { text, address }) in elements.enumerate() {
        let mut judge = |verdict| visit(AddressStep::Element { text, verdict });
        if found == usize::from(hops) {
            break;
        }
        if looked_at == ELEMENTS_MAX {
            judge(ElementVerdict::TooMany);
            return (peer, Some(AddressFault::TooLong));
        }
        if text.is_empty() {
            judge(ElementVerdict::Empty);
            continue;
        }
        found += 1;
        match address {
            _ if found < usize::from(hops) => judge(ElementVerdict::Hop),
            Some(address) => {
                judge(ElementVerdict::Client(address));
                return (address, None);
            }
            None => {
                judge(ElementVerdict::NotAnAddress);
                return (peer, Some(AddressFault::Malformed));
            }
        }
    }
    if found < usize::from(hops) {
        visit(AddressStep::TooFew { found, hops });
    }
    // no list at all is a proxy's own request, such as a health check
    let doubt = (1..usize::from(hops)).contains(&found);
    (peer, doubt.then_some(AddressFault::TooShort))
}

/// Reads a header that must hold exactly one address on exactly one line.
fn single<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    trusted: &TrustedProxies,
    peer: IpAddr,
    mut visit: impl FnMut(AddressStep<'a>),
) -> (IpAddr, Option<AddressFault>) {
    let mut lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    let Some(line) = lines.next() else {
        return (peer, None);
    };
    if lines.next().is_some() {
        visit(AddressStep::Unusable(AddressFault::Repeated));
        return (peer, Some(AddressFault::Repeated));
    }
    let text = trim(line);
    match parse(text) {
        Some(address) if trusted.contains(address) => {
            visit(AddressStep::Element {
                text,
                verdict: ElementVerdict::Trusted(address),
            });
            (address, None)
        }
        Some(address) => {
            visit(AddressStep::Element {
                text,
                verdict: ElementVerdict::Client(address),
            });
            (address, None)
        }
        None => {
            visit(AddressStep::Element {
                text,
                verdict: ElementVerdict::NotAnAddress,
            });
            (peer, Some(AddressFault::Malformed))
        }
    }
}

/// Whether the internet does not route the address: private, carrier-grade NAT, link-local or
/// loopback.
pub fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            // RFC 6598: shared address space of carrier-grade NAT
            let is_shared = first == 100 && (64..128).contains(&second);
            address.is_private() || address.is_loopback() || address.is_link_local() || is_shared
        }
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local()
        }
    }
}

/// Prefix lengths to which addresses are aggregated in keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// Prefix length for IPv4; more than 32 counts as 32.
    pub ipv4: u8,
    /// Prefix length for IPv6; more than 128 counts as 128. One home or server usually controls a
    /// whole /64.
    pub ipv6: u8,
}

impl Default for Prefixes {
    fn default() -> Prefixes {
        Prefixes { ipv4: 32, ipv6: 64 }
    }
}

impl Prefixes {
    /// The network that stands for an address in a key. IPv4-mapped addresses count as IPv4.
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

impl fmt::Display for AddressStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressStep::Peer {
                address,
                trusted: true,
            } => write!(f, "peer {address} is a trusted proxy"),
            AddressStep::Peer {
                address,
                trusted: false,
            } => write!(
                f,
                "peer {address} is not a trusted proxy: it is the client, and its forwarding headers are ignored"
            ),
            AddressStep::Element { text, verdict } => {
                write!(f, "\"{}\" {verdict}", text.escape_ascii())
            }
            AddressStep::Unusable(AddressFault::Repeated) => {
                write!(f, "the header occurs more than once: it is ignored")
            }
            AddressStep::Unusable(_) => write!(f, "the header is malformed: it is ignored"),
            AddressStep::TooFew { found, hops } => write!(
                f,
                "the list has {found} of the {hops} elements that `trusted_hops` expects: the peer is the client"
            ),
        }
    }
}

impl fmt::Display for ElementVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementVerdict::Empty => write!(f, "is empty: skipped"),
            ElementVerdict::Trusted(address) => {
                write!(f, "is the trusted proxy {address}: continue to its left")
            }
            ElementVerdict::Client(address) => write!(f, "is {address}: the client"),
            ElementVerdict::Hop => write!(f, "was written by a proxy in front: counted as a hop"),
            ElementVerdict::NotAnAddress => write!(
                f,
                "is not an address: it and everything to its left are ignored"
            ),
            ElementVerdict::TooMany => write!(
                f,
                "is beyond the first {ELEMENTS_MAX} elements: it and everything to its left are ignored"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
