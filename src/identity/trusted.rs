//! Networks whose forwarding headers are trusted, as sorted, merged ranges. A lookup is one binary
//! search, even for many or overlapping networks.

use std::net::IpAddr;

use ipnet::IpNet;

/// A set of networks. Empty by default: no peer is trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies {
    ipv4: Box<[(u32, u32)]>,
    ipv6: Box<[(u128, u128)]>,
}

impl TrustedProxies {
    /// Merges the networks. A network of IPv4-mapped addresses (`::ffff:10.0.0.0/104`) counts as
    /// the IPv4 network that it maps. A wider one contains only IPv6 addresses, so IPv4 needs its
    /// own entry beside `::/0`.
    pub fn new(networks: &[IpNet]) -> TrustedProxies {
        let (mut ipv4, mut ipv6) = (Vec::new(), Vec::new());
        for network in networks {
            match (
                network.network().to_canonical(),
                network.broadcast().to_canonical(),
            ) {
                (IpAddr::V4(first), IpAddr::V4(last)) => {
                    ipv4.push((first.to_bits(), last.to_bits()))
                }
                (first, last) => ipv6.push((v6_bits(first), v6_bits(last))),
            }
        }
        TrustedProxies {
            ipv4: merge(ipv4),
            ipv6: merge(ipv6),
        }
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_empty() && self.ipv6.is_empty()
    }

    /// Whether the set contains a canonical address. Takes a few nanoseconds; O(log n) in the
    /// number of networks.
    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => holds(&self.ipv4, address.to_bits()),
            IpAddr::V6(address) => holds(&self.ipv6, address.to_bits()),
        }
    }
}

fn v6_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Sorts ranges and merges overlapping ones.
fn merge<T: Ord + Copy>(mut ranges: Vec<(T, T)>) -> Box<[(T, T)]> {
    ranges.sort_unstable();
    let mut merged: Vec<(T, T)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(before) if first <= before.1 => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged.into()
}

fn holds<T: Ord + Copy>(ranges: &[(T, T)], value: T) -> bool {
    let after = ranges.partition_point(|&(first, _)| first <= value);
    after.checked_sub(1).is_some_and(|at| value <= ranges[at].1)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn set(networks: &[&str]) -> TrustedProxies {
        TrustedProxies::new(
            &networks
                .iter()
                .map(|text| text.parse().expect("a network"))
                .collect::<Vec<_>>(),
        )
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn nobody_is_trusted_by_default() {
        let set = TrustedProxies::default();
        assert!(!set.contains(address("127.0.0.1")) && !set.contains(address("::1")));
    }

    #[test]
    fn families_are_apart_but_for_mapped_networks() {
        let all_ipv6 = set(&["::/0"]);
        assert!(
            all_ipv6.contains(address("2001:db8::1")) && !all_ipv6.contains(address("10.0.0.1"))
        );
        let mapped = set(&["::ffff:10.0.0.0/104"]);
        assert!(mapped.contains(address("10.9.9.9")) && !mapped.contains(address("11.0.0.0")));
    }

    #[test]
    fn host_bits_of_a_network_do_not_matter() {
        assert!(set(&["10.1.2.3/8"]).contains(address("10.0.0.0")));
    }

    fn any_network() -> impl Strategy<Value = IpNet> {
        // few address bits, so that networks overlap and addresses match
        let v4 = (0u32..1 << 6, 20u8..=32).prop_map(|(bits, prefix)| {
            IpNet::new(Ipv4Addr::from_bits(bits << 6).into(), prefix).expect("a prefix")
        });
        let v6 = (0u128..1 << 6, 100u8..=128).prop_map(|(bits, prefix)| {
            IpNet::new(Ipv6Addr::from_bits(bits << 20).into(), prefix).expect("a prefix")
        });
        prop_oneof![v4, v6]
    }

    proptest! {
        #[test]
        fn set_holds_what_some_network_holds(networks in prop::collection::vec(any_network(), 0..12), v4 in 0u32..1 << 13, v6 in 0u128..1 << 27) {
            let set = TrustedProxies::new(&networks);
            for address in [IpAddr::from(Ipv4Addr::from_bits(v4)), IpAddr::from(Ipv6Addr::from_bits(v6))] {
                prop_assert_eq!(set.contains(address), networks.iter().any(|network| network.contains(&address)));
            }
        }
    }
}
