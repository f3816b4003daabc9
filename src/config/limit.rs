//! A configured limit: its quotas, its exceptions, and what happens when it is exceeded.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::StatusCode;
use ipnet::IpNet;

use super::cost::{CostSettings, CostSource};
use crate::{
    budget,
    identity::{KeyPart, Missing},
    limit::{Algorithm, Limit, Quota, QuotaError},
};

/// One `[limit.NAME]` table, and the `[[override]]` tables that name it.
#[derive(Clone, Debug)]
pub struct LimitSettings {
    /// The name in the configuration; clients see it.
    pub name: String,
    /// Which requests share one bucket; empty is one bucket for all.
    pub key: Vec<KeyPart>,
    /// How it counts.
    pub algorithm: Algorithm,
    /// The default quota, then one per tier, then those of `overrides`. The burst of a window
    /// is its amount; that of [`Algorithm::Concurrency`] is the number of requests in flight
    /// ([`Quota::slots`]).
    pub quotas: Vec<Quota>,
    /// Tier name to index into `quotas`.
    pub tiers: Vec<(String, usize)>,
    /// What happens to a request over the limit.
    pub over: Over,
    /// Whether the limit enforces, observes, tags or is off.
    pub mode: Mode,
    /// The percentage of its keys on which it enforces; the other keys are in shadow mode.
    /// Below 100 only with [`Mode::Enforce`].
    pub enforce_percent: u8,
    /// What happens to a request that lacks a part of the key.
    pub missing: Missing,
    /// Whether rejected requests are charged, too.
    pub charge_rejected: bool,
    /// If not empty, only responses with these statuses are charged, once the status is known.
    pub count_status: Vec<StatusCode>,
    /// Clients to which the limit does not apply.
    pub exempt: Exempt,
    /// The usage from which clients are warned.
    pub warn_at: Option<Share>,
    /// The usage from which requests are slowed, and by how much.
    pub slow: Option<Slow>,
    /// `Retry-After` grows by a random amount up to this share of it.
    pub retry_jitter: Share,
    /// Whether responses disclose the limit to clients.
    pub disclose: bool,
    /// How the limit is shared with other gateways; `None` if it is local.
    pub shared: Option<SharedSettings>,
    /// How the limit charges costs; `None` if it counts requests.
    pub cost: Option<Arc<CostSettings>>,
    /// Exceptions in file order; the first that matches a request wins.
    pub overrides: Vec<ConfigOverride>,
}

/// How gateways share a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedSettings {
    /// Whether units are leased ahead, or Redis is asked for every request.
    pub sync: budget::Sync,
    /// What the limit does while Redis is down.
    pub when_down: budget::WhenDown,
    /// The allowed overdraft, 0 to 0.1 of the limit. It lets a gateway admit a new key without
    /// asking Redis first.
    pub slack: f64,
}

impl LimitSettings {
    /// `global` if gateways share the limit, otherwise `local`, as in the configuration.
    pub fn scope(&self) -> &'static str {
        match self.shared {
            Some(_) => "global",
            None => "local",
        }
    }

    /// A limit with the default value of every optional key.
    pub fn new(
        name: &str,
        key: Vec<KeyPart>,
        algorithm: Algorithm,
        quotas: Vec<Quota>,
    ) -> LimitSettings {
        LimitSettings {
            name: name.to_owned(),
            key,
            algorithm,
            quotas,
            tiers: Vec::new(),
            over: Over::Reject,
            mode: Mode::Enforce,
            enforce_percent: 100,
            missing: Missing::Skip,
            charge_rejected: false,
            count_status: Vec::new(),
            exempt: Exempt::default(),
            warn_at: None,
            slow: None,
            retry_jitter: Share::default(),
            disclose: true,
            shared: None,
            cost: None,
            overrides: Vec::new(),
        }
    }

    /// Whether requests take the `cost` of their route.
    pub fn charges_route_cost(&self) -> bool {
        let is_fixed = |cost: &Arc<CostSettings>| matches!(cost.source, CostSource::Fixed);
        self.cost.as_ref().is_none_or(is_fixed)
    }

    /// The rule that counts. The error names a quota that does not fit.
    pub fn rule(&self) -> Result<Limit, QuotaError> {
        let overdraft = self.cost.as_ref().and_then(|cost| cost.overdraft());
        match overdraft {
            Some(debt) => Limit::of_estimates(&self.name, self.algorithm, &self.quotas, debt),
            None => Limit::new(&self.name, self.algorithm, &self.quotas),
        }
    }
}

/// What happens to a request over the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// It gets a 429.
    Reject,
    /// It waits for its turn.
    Delay {
        /// A request that would wait longer gets a 429.
        max_delay: Duration,
    },
}

/// How a limit acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It rejects or delays.
    Enforce,
    /// It only counts, logs and updates metrics.
    Shadow,
    /// It admits, and marks the request for the upstream.
    Tag,
    /// It does not even count.
    Off,
}

impl Mode {
    /// As the configuration names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
            Mode::Tag => "tag",
            Mode::Off => "off",
        }
    }
}

/// Clients to which a limit does not apply: those in any of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exempt {
    /// Networks of client addresses.
    pub ips: Vec<IpNet>,
    /// User names.
    pub users: Vec<String>,
    /// Tier names.
    pub tiers: Vec<String>,
}

/// A fraction from 0 to 1, in steps of a millionth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    const WHOLE_PPM: u32 = 1_000_000;

    /// From millionths; `None` above 1,000,000.
    pub fn from_ppm(ppm: u32) -> Option<Share> {
        (ppm <= Self::WHOLE_PPM).then_some(Share(ppm))
    }

    /// In millionths.
    pub fn ppm(self) -> u32 {
        self.0
    }

    /// Whether `used` is at least this share of `whole`. Exact.
    pub fn is_reached(self, used: u64, whole: u64) -> bool {
        let share = u128::from(self.0) * u128::from(whole);
        u128::from(used) * u128::from(Self::WHOLE_PPM) >= share
    }
}

/// When a limit slows requests, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slow {
    /// The usage at which slowing starts.
    pub at: Share,
    /// The delay of each request.
    pub by: Duration,
}

/// One `[[override]]` table: an exception to a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigOverride {
    /// The user, tenant, network or key.
    pub target: OverrideTarget,
    /// What replaces the limit.
    pub effect: Effect,
    /// When it ends; `None` means never.
    pub until: Option<SystemTime>,
    /// A note for operators.
    pub note: Option<String>,
}

/// The subject of an exception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverrideTarget {
    /// A user, by name.
    User(String),
    /// A tenant, by name.
    Tenant(String),
    /// Client addresses, before they are truncated to a prefix.
    Ip(IpNet),
    /// One key, in the form of [`KeyParts::readable`](crate::identity::KeyParts::readable).
    Key(String),
}

impl fmt::Display for OverrideTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OverrideTarget::User(name) => write!(f, "user {name}"),
            OverrideTarget::Tenant(name) => write!(f, "tenant {name}"),
            OverrideTarget::Ip(network) => write!(f, "{network}"),
            OverrideTarget::Key(key) => write!(f, "key {key}"),
        }
    }
}

/// What an exception does to a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Another quota, by its index into [`LimitSettings::quotas`].
    Quota(usize),
    /// No limit.
    Exempt,
    /// Nothing is admitted.
    Block,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_reached_exactly() {
        let share = |ppm| Share::from_ppm(ppm).expect("at most the whole");
        assert!(share(800_000).is_reached(80, 100));
        assert!(!share(800_000).is_reached(79, 100));
        assert!(!share(333_334).is_reached(1, 3));
        assert!(share(333_333).is_reached(1, 3));
        assert!(share(0).is_reached(0, u64::MAX));
        assert!(share(1_000_000).is_reached(u64::MAX, u64::MAX));
        assert!(!share(1_000_000).is_reached(u64::MAX - 1, u64::MAX));
        assert_eq!(Share::from_ppm(1_000_001), None);
    }
}
