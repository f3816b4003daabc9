//! A limit as it was configured: how much, for whom, and what happens at its bounds.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use http::StatusCode;
use ipnet::IpNet;

use crate::{
    budget,
    identity::{KeyPart, Missing},
    limit::{Algorithm, Quota},
};

/// One `[limit.NAME]` table, and the `[[override]]` tables that name it.
#[derive(Clone, Debug)]
pub struct Limit {
    /// The name in the configuration; clients see it.
    pub name: String,
    /// Which requests share one bucket; empty is one bucket for all.
    pub key: Vec<KeyPart>,
    /// How it counts.
    pub algorithm: Algorithm,
    /// One quota per tier, the first is the default; behind them those of `overrides`. A window's burst is its amount, that
    /// of [`Algorithm::Concurrency`] the requests in flight ([`Quota::slots`]).
    pub quotas: Vec<Quota>,
    /// Tier name to index into `quotas`.
    pub tiers: Vec<(String, usize)>,
    /// What happens to a request that it does not admit.
    pub over: Over,
    /// Whether it acts.
    pub mode: Mode,
    /// The share of its keys on which it acts, 0 to 100; less than 100 only with [`Mode::Enforce`], the rest is in shadow.
    pub enforce_percent: u8,
    /// What happens to a request that lacks a part of the key.
    pub missing: Missing,
    /// Rejected requests are charged to it too.
    pub charge_rejected: bool,
    /// Where there are any, only responses with these statuses are charged, when they are known.
    pub count_status: Vec<StatusCode>,
    /// Who does not meet it.
    pub exempt: Exempt,
    /// From this share on, clients are warned.
    pub warn_at: Option<Share>,
    /// From some share on, requests are slowed.
    pub slow: Option<Slow>,
    /// Up to this share of it is added to `Retry-After`.
    pub retry_jitter: Share,
    /// Clients are told about it.
    pub disclose: bool,
    /// Kept together with other gateways; `None` where this process keeps it by itself.
    pub shared: Option<Shared>,
    /// In the order of the file; the first that fits a request decides.
    pub overrides: Vec<Override>,
}

/// How a limit is kept together with other gateways.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shared {
    /// How closely.
    pub sync: budget::Sync,
    /// What it does while Redis does not answer.
    pub when_down: budget::WhenDown,
    /// By which part it may be exceeded, so that keys that are new to a gateway need not be asked for; 0 to 0.1.
    pub slack: f64,
}

impl Limit {
    /// As the configuration names it: whether gateways share it.
    pub fn scope(&self) -> &'static str {
        match self.shared {
            Some(_) => "global",
            None => "local",
        }
    }

    /// A limit without any of the keys that may be left out.
    pub fn new(name: &str, key: Vec<KeyPart>, algorithm: Algorithm, quotas: Vec<Quota>) -> Limit {
        Limit {
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
            overrides: Vec::new(),
        }
    }
}

/// What happens to a request that a limit does not admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// 429.
    Reject,
    /// It is held until its turn.
    Delay {
        /// Where its turn is later than this, 429.
        max_delay: Duration,
    },
}

/// Whether a limit acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It does.
    Enforce,
    /// It counts, logs and measures only.
    Shadow,
    /// It admits, and tells the upstream.
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

/// Who does not meet a limit: whoever is in one of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exempt {
    /// Networks of clients' addresses.
    pub ips: Vec<IpNet>,
    /// Names of users.
    pub users: Vec<String>,
    /// Names of tiers.
    pub tiers: Vec<String>,
}

/// A share of a whole, 0 to 1, in steps of a millionth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    const WHOLE_PPM: u32 = 1_000_000;

    /// So many millionths; `None` where it is more than the whole.
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

/// Where a limit slows clients, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slow {
    /// From this share on …
    pub at: Share,
    /// … each request is delayed by this.
    pub by: Duration,
}

/// One `[[override]]` table: an exception to a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// For whom.
    pub whom: Whom,
    /// What holds instead.
    pub effect: Effect,
    /// Until when; `None` is for ever.
    pub until: Option<SystemTime>,
    /// Why, for people.
    pub note: Option<String>,
}

/// For whom an exception is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whom {
    /// A user, by name.
    User(String),
    /// A tenant, by name.
    Tenant(String),
    /// Clients' addresses, before they are aggregated.
    Ip(IpNet),
    /// One key, in the form that [`KeyParts::readable`](crate::identity::KeyParts::readable) gives it.
    Key(String),
}

impl fmt::Display for Whom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whom::User(name) => write!(f, "user {name}"),
            Whom::Tenant(name) => write!(f, "tenant {name}"),
            Whom::Ip(network) => write!(f, "{network}"),
            Whom::Key(key) => write!(f, "key {key}"),
        }
    }
}

/// What holds instead of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Another quota, by its index into [`Limit::quotas`].
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
