//! How many connections one address may have open, so that nobody takes the room of all others.
//!
//! Counted over all listeners and workers, by the network that an address counts for in limits: one short lock when a
//! connection begins and one when it ends. Trusted proxies are not counted, since theirs are the connections of many clients.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;

use crate::identity::{Prefixes, TrustedProxies};

/// Whose connections are counted, and how many one address may have.
#[derive(Clone, Debug)]
pub struct PerAddress {
    /// Connections that are open at once.
    pub most: usize,
    /// What counts as one address.
    pub prefixes: Prefixes,
    /// Not counted; `None` where every peer is a proxy.
    pub trusted: Option<Arc<TrustedProxies>>,
}

impl PerAddress {
    /// The network that an address counts for; `None` where it is not counted.
    fn network(&self, ip: IpAddr) -> Option<IpNet> {
        let trusted = self.trusted.as_ref()?;
        (!trusted.contains(ip.to_canonical())).then(|| self.prefixes.aggregate(ip))
    }
}

/// The connections that are open, by network.
#[derive(Debug, Default)]
pub struct Crowd(Mutex<HashMap<IpNet, usize>>);

impl Crowd {
    /// A place for one more connection, until it is dropped; `None` where its address has as many as it may.
    pub(super) fn enter(self: &Arc<Self>, ip: IpAddr, bound: &PerAddress) -> Option<Place> {
        let Some(network) = bound.network(ip) else {
            return Some(Place(None));
        };
        let mut open = self.open();
        let count = open.entry(network).or_default();
        if *count >= bound.most {
            return None;
        }
        *count += 1;
        Some(Place(Some((Arc::clone(self), network))))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<IpNet, usize>> {
        // nothing here panics half-way
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection among those of its address.
#[derive(Debug)]
pub(super) struct Place(Option<(Arc<Crowd>, IpNet)>);

impl Drop for Place {
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

    fn bound(most: usize, trusted: Option<&[&str]>) -> PerAddress {
        let networks = |texts: &[&str]| -> Vec<IpNet> {
            let parsed = texts.iter().map(|text| text.parse().expect("a network"));
            parsed.collect()
        };
        PerAddress {
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
        let (crowd, bound) = (Arc::new(Crowd::default()), bound(2, Some(&[])));
        let one = crowd.enter(ip("192.0.2.1"), &bound);
        let two = crowd.enter(ip("::ffff:192.0.2.1"), &bound);
        assert!(one.is_some() && two.is_some());
        assert!(crowd.enter(ip("192.0.2.1"), &bound).is_none());
        assert!(crowd.enter(ip("192.0.2.2"), &bound).is_some());
        drop(one);
        assert!(crowd.enter(ip("192.0.2.1"), &bound).is_some());
        drop(two);
        assert!(crowd.open().is_empty(), "nothing is kept for who is gone");
    }

    #[test]
    fn a_home_has_one_share_however_many_addresses_it_has() {
        let (crowd, bound) = (Arc::new(Crowd::default()), bound(1, Some(&[])));
        let _held = crowd.enter(ip("2001:db8::1"), &bound);
        assert!(crowd.enter(ip("2001:db8::2"), &bound).is_none());
        assert!(crowd.enter(ip("2001:db8:0:1::1"), &bound).is_some());
    }

    #[test]
    fn proxies_are_not_counted() {
        let crowd = Arc::new(Crowd::default());
        for bound in [bound(1, Some(&["10.0.0.0/8"])), bound(1, None)] {
            let places: Vec<_> = (0..3)
                .map(|_| crowd.enter(ip("10.1.2.3"), &bound))
                .collect();
            assert!(places.iter().all(Option::is_some));
        }
    }
}
