//! Core: may it pass, and if not, when. Counts keys; knows neither clients nor routes, and is handed the time.
//!
//! [`Limit`] is the rule (pure, part of a configuration), [`Store`] holds the counters (they outlive
//! configurations), [`Store::attach`] joins the two, and [`Store::admit`] decides one request against all of its
//! limits: all are charged, or none.
//!
//! An algorithm is three pure functions over one 64-bit word per key (`charge`, `refund`, `standing` in [`bucket`])
//! and a test whether a word still carries information; the table and the store know nothing else about it.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod bucket;
pub mod decision;
pub mod quota;
pub mod store;

mod registry;
mod table;

#[cfg(test)]
mod properties;

pub use decision::{Denial, Standing, Verdict};
pub use quota::{Quota, QuotaError};
pub use registry::{Attached, TooManyLimits};
pub use store::{Charge, Store};

/// The identity of one bucket: a keyed 128-bit hash of whatever shares it, so nobody can aim a collision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u128);

/// The most limits that one request may meet (checked when a configuration is compiled).
pub const MAX_LIMITS: usize = 16;

/// How a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Token bucket, kept as GCRA: one timestamp per key.
    TokenBucket,
    /// The same rule under its other name.
    Gcra,
    /// A queue that is emptied at the rate and holds a burst.
    LeakyBucket,
    /// A count per window, starting anew with each.
    FixedWindow,
    /// Two counts, of which the earlier fades.
    SlidingWindow,
    /// The time of every request within the window.
    SlidingLog,
    /// Requests in flight.
    Concurrency,
}

/// One rule: a name, and how much each tier may. Pure; the counters are in a [`Store`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Box<str>,
    buckets: bucket::Buckets,
}

impl Limit {
    /// A token bucket per key. `quotas` has one entry per tier, the first is the default.
    pub fn token_bucket(name: &str, quotas: &[Quota]) -> Result<Limit, QuotaError> {
        Ok(Limit {
            name: name.into(),
            buckets: bucket::Buckets::new(quotas)?,
        })
    }

    /// The name, under which a [`Store`] finds the counters again.
    pub fn name(&self) -> &str {
        &self.name
    }
}
