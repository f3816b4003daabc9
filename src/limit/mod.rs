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
pub mod log;
pub mod quota;
pub mod share;
pub mod slot_counters;
pub mod store;

mod algorithm;
mod attached;
mod charge;
mod counters;
mod key;
mod migration;
mod overdraft;
mod registry;
mod rule;
mod standing;
mod sync;
mod table;
mod window;
mod word_request;

#[cfg(test)]
mod accuracy;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod test_size;

pub use algorithm::{Algorithm, AlgorithmRecord, QuotaShape, Refill, SharedMethod};
pub use attached::Attached;
pub use charge::Charge;
pub use decision::{Denial, Finding, Standings, Verdict};
pub use key::{Key, MAX_LIMITS};
pub use overdraft::Overdraft;
pub use quota::{Quota, QuotaError};
pub use registry::TooManyLimits;
pub use rule::Limit;
pub use standing::{ChargeLocation, Standing};
pub use store::Store;
pub use word_request::STEP_BACK_NS;
