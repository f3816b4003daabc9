//! Core: decides whether a request passes, and if not, when it would. Counts keys; knows neither
//! clients nor routes, and receives the time from its caller.
//!
//! [`Limit`] is the rule (pure, part of a configuration). [`Store`] holds the counters, which
//! outlive configurations. [`Store::attach`] joins the two. [`Store::admit`] decides one request
//! against all of its limits: all are charged, or none.
//!
//! An algorithm is a few pure functions over one 64-bit word per key (`charge`, `refund`,
//! `standing` in [`bucket`], `window` and [`slot_counters`]), plus a test whether a word still
//! carries information. The table and the store know nothing else about it. Only the sliding log
//! needs more than a word; it has its own store, behind locks: [`log`].

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod bucket;
pub mod decision;
pub mod slot_counters;
pub mod log;
pub mod quota;
pub mod share;
pub mod store;

mod overdraft;
mod registry;
mod migration;
mod sync;
mod table;
mod window;
mod word_algorithm;

#[cfg(test)]
mod accuracy;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;

pub use decision::{ChargeLocation, Denial, Finding, Standing, Standings, Verdict};
pub use overdraft::Overdraft;
pub use quota::{Quota, QuotaError};
pub use registry::{Attached, TooManyLimits};
pub use store::{Charge, Store};

use std::time::Duration;

/// Identifies one bucket: a keyed 128-bit hash of its sharing attributes. The secret key prevents
/// targeted collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u128);

/// Most limits that may apply to one request (checked when a configuration is compiled).
pub const MAX_LIMITS: usize = 16;

impl Key {
    /// The offset of this key's windows from an even division of process time, for a window limit
    /// of this length. It is less than a window and spreads the resets of different keys. Requests
    /// without a key have no offset.
    pub fn window_offset(self, window: Duration) -> Duration {
        let window_ns = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        let spread = table::TableAddress::new(self, 0).spread();
        Duration::from_nanos(window::offset_ns(window_ns, spread))
    }
}

/// How a limit counts. See `docs/algorithms.md` for what a client sees of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Token bucket, kept as one timestamp per key: `amount` per `period`, at most `burst` at once.
    TokenBucket,
    /// Another name for the token bucket.
    Gcra,
    /// Token bucket without a delay; with one, a queue of `burst` places including the request in
    /// service.
    LeakyBucket,
    /// At most `amount` in each `period`; the count resets at the end of each. Ignores the burst.
    FixedWindow,
    /// About `amount` at most in any `period`, from two counters. Ignores the burst.
    SlidingWindow,
    /// At most `amount` in any `period`, exactly, from a log of at most 10,000. Ignores the burst.
    SlidingLog,
    /// At most this many in flight ([`Quota::slots`]); return them with [`Store::release`].
    Concurrency,
}

impl Algorithm {
    /// Whether the quota has a burst beside the rate.
    pub fn has_burst(self) -> bool {
        matches!(
            self,
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket
        )
    }
}

/// One rule: a name, and a quota per tier. Pure; the counters are in a [`Store`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Box<str>,
    rule: Rule,
}

/// The representation of a limit's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// One word per key, in the table.
    Words(word_algorithm::WordAlgorithm),
    /// A ring per key, in a separate store.
    Logs(log::Logs),
}

impl Limit {
    /// A limit that counts by `algorithm`. `quotas` has one entry per tier, the first is the
    /// default.
    pub fn new(name: &str, algorithm: Algorithm, quotas: &[Quota]) -> Result<Limit, QuotaError> {
        let rule = match word_algorithm::WordAlgorithm::new(algorithm, quotas, None) {
            Some(words) => Rule::Words(words?),
            None => Rule::Logs(log::Logs::new(quotas)?),
        };
        let name = name.into();
        Ok(Limit { name, rule })
    }

    /// A limit on costs that are known only afterwards. It is charged by estimates (module
    /// `overdraft`) and settled with [`Store::overdraw`] and [`Store::release`]. Sliding logs and
    /// slots in flight do not support estimates.
    pub fn of_estimates(
        name: &str,
        algorithm: Algorithm,
        quotas: &[Quota],
        overdraft: Overdraft,
    ) -> Result<Limit, QuotaError> {
        match word_algorithm::WordAlgorithm::new(algorithm, quotas, Some(overdraft)) {
            Some(words) if algorithm != Algorithm::Concurrency => Ok(Limit {
                name: name.into(),
                rule: Rule::Words(words?),
            }),
            _ => Err(QuotaError::NoEstimates),
        }
    }

    /// The name by which a [`Store`] finds the counters again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format of this tier's counters.
    fn form(&self, tier: usize) -> word_algorithm::StateFormat {
        match &self.rule {
            Rule::Words(words) => words.form(tier),
            Rule::Logs(logs) => logs.form(tier),
        }
    }

    fn tiers(&self) -> usize {
        match &self.rule {
            Rule::Words(words) => words.tiers(),
            Rule::Logs(logs) => logs.tiers(),
        }
    }
}
