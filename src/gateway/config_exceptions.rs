//! `exempt` and `[[override]]`: clients with another quota, none, or a block.

use std::{
    collections::{HashMap, HashSet},
    time::SystemTime,
};

use ipnet::IpNet;

use crate::{
    config::{self, Effect, OverrideTarget},
    identity::Client,
};

/// The exceptions to one limit, indexed by client.
#[derive(Debug, Default)]
pub(super) struct ConfigExceptions {
    exempt_ips: Vec<IpNet>,
    exempt_users: HashSet<String>,
    exempt_tiers: HashSet<String>,
    /// In file order. Among the overrides that match and have not expired, the first wins.
    overrides: Vec<(Effect, Option<SystemTime>)>,
    users: HashMap<String, Vec<usize>>,
    tenants: HashMap<String, Vec<usize>>,
    keys: HashMap<String, Vec<usize>>,
    ips: Vec<(IpNet, usize)>,
}

/// The rule for a client that replaces the limit's own.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConfigException {
    pub(super) effect: Effect,
    pub(super) until: Option<SystemTime>,
    /// Index among the limit's overrides; `None` for `exempt`.
    pub(super) place: Option<usize>,
}

impl ConfigExceptions {
    pub(super) fn of(limit: &config::LimitSettings) -> Self {
        let mut exceptions = Self {
            exempt_ips: limit.exempt.ips.clone(),
            exempt_users: limit.exempt.users.iter().cloned().collect(),
            exempt_tiers: limit.exempt.tiers.iter().cloned().collect(),
            ..Self::default()
        };
        for (index, exception) in limit.overrides.iter().enumerate() {
            exceptions
                .overrides
                .push((exception.effect, exception.until));
            let names = match &exception.target {
                OverrideTarget::Ip(network) => {
                    exceptions.ips.push((*network, index));
                    continue;
                }
                OverrideTarget::User(name) => (&mut exceptions.users, name),
                OverrideTarget::Tenant(name) => (&mut exceptions.tenants, name),
                OverrideTarget::Key(key) => (&mut exceptions.keys, key),
            };
            names.0.entry(names.1.clone()).or_default().push(index);
        }
        exceptions
    }

    /// The exception for this client, if any. Calls `readable` only if an override names a key.
    pub(super) fn find(
        &self,
        client: &Client<'_>,
        readable: impl FnOnce() -> String,
    ) -> Option<ConfigException> {
        if self.is_exempt(client) {
            return Some(ConfigException {
                effect: Effect::Exempt,
                until: None,
                place: None,
            });
        }
        if self.overrides.is_empty() {
            return None;
        }
        let named = |names: &HashMap<String, Vec<usize>>, name: Option<&str>| {
            name.and_then(|name| names.get(name))
                .cloned()
                .unwrap_or_default()
        };
        let mut fits = named(&self.users, client.user);
        fits.extend(named(&self.tenants, client.tenant));
        fits.extend(
            self.ips
                .iter()
                .filter(|(network, _)| network.contains(&client.address))
                .map(|(_, index)| *index),
        );
        if !self.keys.is_empty() {
            fits.extend(named(&self.keys, Some(&readable())));
        }
        let now = SystemTime::now();
        let holds = |index: &usize| self.overrides[*index].1.is_none_or(|until| now < until);
        fits.into_iter().filter(holds).min().map(|place| {
            let (effect, until) = self.overrides[place];
            ConfigException {
                effect,
                until,
                place: Some(place),
            }
        })
    }

    fn is_exempt(&self, client: &Client<'_>) -> bool {
        self.exempt_ips
            .iter()
            .any(|network| network.contains(&client.address))
            || client
                .user
                .is_some_and(|user| self.exempt_users.contains(user))
            || client
                .tier
                .is_some_and(|tier| self.exempt_tiers.contains(tier))
    }
}
