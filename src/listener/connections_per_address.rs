//! Connections per address: no client address can take all connection slots.
//!
//! Counts across all listeners and workers, by the same network prefix that limits use. Cost: one
//! short lock when a connection opens and one when it closes. Trusted proxies are exempt, since
//! they carry the connections of many clients.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;

use crate::identity::{Prefixes, TrustedProxies};

/// Bound on the connections of one address.
#[derive(Clone, Debug)]
pub struct AddressLimits {
    /// Most connections open at once.
    pub most: usize,
    /// Prefix lengths that make up one address.
    pub prefixes: Prefixes,
    /// Peers that are not counted; `None` if every peer is a trusted proxy.
    pub trusted: Option<Arc<TrustedProxies>>,
}

impl AddressLimits {
    /// The network that counts for `ip`; `None` if `ip` is exempt.
    fn network(&self, ip: IpAddr) -> Option<IpNet> {
        let trusted = self.trusted.as_ref()?;
        (!trusted.contains(ip.to_canonical())).then(|| self.prefixes.aggregate(ip))
    }
}

/// Open connections by network.
#[derive(Debug, Default)]
pub struct ConnectionsPerAddress(Mutex<HashMap<IpNet, usize>>);

impl ConnectionsPerAddress {
    /// Reserves a connection until the permit is dropped; `None` if the address is at its bound.
    pub(super) fn enter(
        self: &Arc<Self>,
        ip: IpAddr,
        bound: &AddressLimits,
    ) -> Option<ConnectionPermit> {
        let Some(network) = bound.network(ip) else {
            return Some(ConnectionPermit(None));
        };
        let mut open = self.open();
        let count = open.entry(network).or_default();
        if *count >= bound.most {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit(Some((Arc::clone(self), network))))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<IpNet, usize>> {
        // no code panics with the lock held, so the map is consistent even if poisoned
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One counted connection of an address.
#[derive(Debug)]
pub(super) struct ConnectionPermit(Option<(Arc<ConnectionsPerAddress>, IpNet)>);

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some((crowd, network)) = &self.0
            && let Entry::Occupied(mut open) = crowd.open().entry(*network)
        {
            *open.get_mut() -= 1;
            if *open.get() == 0 {
                open.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(most: usize, trusted: Option<&[&str]>) -> AddressLimits {
        let networks = |texts: &[&str]| -> Vec<IpNet> {
            let parsed = texts.iter().map(|text| text.parse().expect("a network"));
            parsed.collect()
        };
        AddressLimits {
            most,
            prefixes: Prefixes::default(),
            trusted: trusted.map(|texts| Arc::new(TrustedProxies::new(&networks(texts)))),
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_address_has_so_many_places_and_gets_them_back() {
        let (crowd, bound) = (
            Arc::new(ConnectionsPerAddress::default()),
            bound(2, Some(&[])),
        );
        let one = crowd.enter(ip("192.0.2.1"), &bound);
        let two = crowd.enter(ip("::ffff:192.0.2.1"), &bound);
        assert!(one.is_some() && two.is_some());
        assert!(crowd.enter(ip("192.0.2.1"), &bound).is_none());
        assert!(crowd.enter(ip("192.0.2.2"), &bound).is_some());
        drop(one);
        assert!(crowd.enter(ip("192.0.2.1"), &bound).is_some());
        drop(two);
        assert!(
            crowd.open().is_empty(),
            "no entry is left for closed connections"
        );
    }

    #[test]
    fn a_home_has_one_share_however_many_addresses_it_has() {
        let (crowd, bound) = (
            Arc::new(ConnectionsPerAddress::default()),
            bound(1, Some(&[])),
        );
        let _held = crowd.enter(ip("2001:db8::1"), &bound);
        assert!(crowd.enter(ip("2001:db8::2"), &bound).is_none());
        assert!(crowd.enter(ip("2001:db8:0:1::1"), &bound).is_some());
    }

    #[test]
    fn proxies_are_not_counted() {
        let crowd = Arc::new(ConnectionsPerAddress::default());
        for bound in [bound(1, Some(&["10.0.0.0/8"])), bound(1, None)] {
            let places: Vec<_> = (0..3)
                .map(|_| crowd.enter(ip("10.1.2.3"), &bound))
                .collect();
            assert!(places.iter().all(Option::is_some));
        }
    }
}
