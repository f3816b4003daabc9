//! Amount, period and burst of one limit for one tier, and what of it is representable.

use std::{num::NonZeroU64, time::Duration};

/// `amount` units per `period`, at most `burst` at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Units that become available per `period`.
    pub amount: NonZeroU64,
    /// The period of `amount`: 1 ms to 31 days.
    pub period: Duration,
    /// Bucket size in units.
    pub burst: NonZeroU64,
}
