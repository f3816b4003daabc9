//! Core: may it pass, and if not, when. Counts keys; knows neither clients nor routes, and is handed the time.
//!
//! [`Limit`] is the rule (pure, part of a configuration), [`Store`] holds the counters (they outlive
//! configurations), [`Store::attach`] joins the two, and [`Store::admit`] decides one request against all of its
//! limits: all are charged, or none.
//!
//! An algorithm is a few pure functions over one 64-bit word per key (`charge`, `refund`, `standing` in [`bucket`],
//! `window` and [`in_flight`]) and a test whether a word still carries information; the table and the store know nothing
//! else about it. Only the sliding log needs more than a word, and has its own store, behind locks: [`log`].

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod bucket;
pub mod decision;
pub mod in_flight;
pub mod log;
pub mod quota;
pub mod share;
pub mod store;

mod overdraft;
mod registry;
mod succession;
mod sync;
mod table;
mod window;
mod words;

#[cfg(test)]
mod accuracy;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;

pub use decision::{Denial, Finding, Held, Standing, Standings, Verdict};
pub use overdraft::Overdraft;
pub use quota::{Quota, QuotaError};
pub use registry::{Attached, TooManyLimits};
pub use store::{Charge, Store};

use std::time::Duration;

/// The identity of one bucket: a keyed 128-bit hash of whatever shares it, so nobody can aim a collision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u128);

/// The most limits that one request may meet (checked when a configuration is compiled).
pub const MAX_LIMITS: usize = 16;

impl Key {
    /// When this key's windows begin, for a window limit of this length: so long after the moments that divide the
    /// process's time evenly (and less than a window). It is what sets the resets of different keys apart. Requests
    /// without a key have no offset.
    pub fn window_offset(self, window: Duration) -> Duration {
        let window_ns = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        let spread = table::Address::new(self, 0).spread();
        Duration::from_nanos(window::offset_ns(window_ns, spread))
    }
}

/// How a limit counts. See `docs/algorithms.md` for what a client sees of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Token bucket, kept as one timestamp per key: `amount` per `period`, at most `burst` at once.
    TokenBucket,
    /// The same by its other name.
    Gcra,
    /// Token bucket where nothing may be held; a queue of `burst` places, the job in service included, where it may.
    LeakyBucket,
    /// At most `amount` in each `period`, which begins anew all at once. The burst does not matter.
    FixedWindow,
    /// At most about `amount` in any `period`, from two counters. The burst does not matter.
    SlidingWindow,
    /// At most `amount` in any `period`, exactly, from a log of at most 10,000. The burst does not matter.
    SlidingLog,
    /// At most so many at once ([`Quota::slots`]); they are given back with [`Store::release`].
    Concurrency,
}

impl Algorithm {
    /// Whether its quota has a burst beside the rate.
    pub fn has_burst(self) -> bool {
        matches!(
            self,
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket
        )
    }
}

/// One rule: a name, and how much each tier may. Pure; the counters are in a [`Store`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Box<str>,
    rule: Rule,
}

/// What a limit counts with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// One word per key, in the table.
    Words(words::Words),
    /// A ring per key, in a store of its own.
    Logs(log::Logs),
}

impl Limit {
    /// A limit that counts by `algorithm`. `quotas` has one entry per tier, the first is the default.
    pub fn new(name: &str, algorithm: Algorithm, quotas: &[Quota]) -> Result<Limit, QuotaError> {
        let rule = match words::Words::new(algorithm, quotas, None) {
            Some(words) => Rule::Words(words?),
            None => Rule::Logs(log::Logs::new(quotas)?),
        };
        let name = name.into();
        Ok(Limit { name, rule })
    }

    /// A limit on costs that are known afterwards: charged by estimates (module `overdraft`), and
    /// settled with [`Store::overdraw`] and [`Store::release`]. Neither a sliding log nor slots in
    /// flight can be charged like this.
    pub fn of_estimates(
        name: &str,
        algorithm: Algorithm,
        quotas: &[Quota],
        overdraft: Overdraft,
    ) -> Result<Limit, QuotaError> {
        match words::Words::new(algorithm, quotas, Some(overdraft)) {
            Some(words) if algorithm != Algorithm::Concurrency => Ok(Limit {
                name: name.into(),
                rule: Rule::Words(words?),
            }),
            _ => Err(QuotaError::NoEstimates),
        }
    }

    /// The name, under which a [`Store`] finds the counters again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What this tier's counters mean.
    fn form(&self, tier: usize) -> words::Form {
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
