//! Amount, period and burst of one limit for one tier, and the bounds of what can be represented.

use std::{fmt, num::NonZeroU64, time::Duration};

/// The shortest period: below a millisecond a rate is better written with a larger amount.
pub const MIN_PERIOD: Duration = Duration::from_millis(1);

/// The longest period.
pub const MAX_PERIOD: Duration = Duration::from_secs(31 * DAY_SECS);

/// The longest time in which an empty bucket may fill: 3 years. With the finest unit of time (1/64
/// ns, see [`bucket`](super::bucket)) a timestamp then fits 64 bits for the first 6 years of a
/// process.
pub const MAX_FILL: Duration = Duration::from_secs(1_096 * DAY_SECS);

/// The most slots of a concurrency limit.
pub const MAX_SLOTS: u64 = 1_000_000_000;

/// The most units per period of a sliding log, which keeps a timestamp for each.
pub const MAX_LOG: u64 = 10_000;

const DAY_SECS: u64 = 24 * 60 * 60;

/// `amount` units per `period`, at most `burst` at once.
///
/// Made by [`Quota::new`], or by [`Quota::slots`] for limits without a rate. The fields are public,
/// so code that accepts a quota checks it again ([`Limit::new`](super::Limit::new) does).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Units that become available per `period`.
    pub amount: NonZeroU64,
    /// The period of `amount`: 1 ms to 31 days. 0 for slots, which return on release and not with
    /// time.
    pub period: Duration,
    /// Bucket size in units.
    pub burst: NonZeroU64,
}

impl Quota {
    /// A quota within the bounds of [`QuotaError`].
    pub fn new(amount: u64, period: Duration, burst: u64) -> Result<Quota, QuotaError> {
        let amount = NonZeroU64::new(amount).ok_or(QuotaError::AmountZero)?;
        let burst = NonZeroU64::new(burst).ok_or(QuotaError::BurstZero)?;
        let quota = Quota {
            amount,
            period,
            burst,
        };
        quota.check()?;
        Ok(quota)
    }

    /// `count` slots, for [`Algorithm::Concurrency`](super::Algorithm::Concurrency): amount and
    /// burst are the count, and the period is 0.
    pub fn slots(count: u64) -> Result<Quota, QuotaError> {
        let count = NonZeroU64::new(count).ok_or(QuotaError::NoSlots)?;
        let quota = Quota {
            amount: count,
            period: Duration::ZERO,
            burst: count,
        };
        quota.check_slots()?;
        Ok(quota)
    }

    pub(super) fn check_slots(&self) -> Result<(), QuotaError> {
        if !self.period.is_zero() {
            return Err(QuotaError::SlotsHaveNoRate);
        }
        if self.amount.get() > MAX_SLOTS {
            return Err(QuotaError::TooManySlots);
        }
        Ok(())
    }

    pub(super) fn check(&self) -> Result<(), QuotaError> {
        self.check_rate()?;
        // 64 bits times 52 bits, and 57 bits times 52 bits: neither can overflow
        let demand = u128::from(self.burst.get()).saturating_mul(self.period.as_nanos());
        let bound = MAX_FILL
            .as_nanos()
            .saturating_mul(u128::from(self.amount.get()));
        if demand > bound {
            return Err(QuotaError::FillTooLong);
        }
        Ok(())
    }

    /// Checks amount and period, ignoring the burst.
    pub(super) fn check_rate(&self) -> Result<(), QuotaError> {
        if self.period < MIN_PERIOD {
            return Err(QuotaError::PeriodTooShort);
        }
        if self.period > MAX_PERIOD {
            return Err(QuotaError::PeriodTooLong);
        }
        if u128::from(self.amount.get()) > self.period.as_nanos() {
            return Err(QuotaError::RateTooHigh);
        }
        Ok(())
    }

    /// The period in nanoseconds; it fits because a period is at most [`MAX_PERIOD`].
    pub(super) fn period_ns(&self) -> u64 {
        u64::try_from(self.period.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The rate in configuration syntax: `60/min`, `5/15min`; for slots `20 in flight`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u128, &str); 5] = [
            (86_400_000, "d"),
            (3_600_000, "h"),
            (60_000, "min"),
            (1_000, "s"),
            (1, "ms"),
        ];
        if self.period.is_zero() {
            return write!(f, "{} in flight", self.amount);
        }
        let period_ms = self.period.as_millis();
        let unit = UNITS
            .iter()
            .find(|(unit_ms, _)| period_ms.checked_rem(*unit_ms) == Some(0));
        match unit.map(|(unit_ms, name)| (period_ms.checked_div(*unit_ms), name)) {
            Some((Some(1), name)) => write!(f, "{}/{name}", self.amount),
            Some((Some(count), name)) => write!(f, "{}/{count}{name}", self.amount),
            _ => write!(f, "{}/{:?}", self.amount, self.period),
        }
    }
}

/// Why a quota is rejected. The message states the bound and what to write instead, so a diagnostic
/// can show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// `amount` is 0.
    #[error("a rate of 0 admits nothing; the least is 1 per period")]
    AmountZero,
    /// `burst` is 0.
    #[error("a burst of 0 admits nothing; the least is 1")]
    BurstZero,
    /// `period` is below [`MIN_PERIOD`].
    #[error("a period is at least 1ms; write a larger amount over a longer period")]
    PeriodTooShort,
    /// `period` is above [`MAX_PERIOD`].
    #[error("a period is at most 31 days; write a smaller amount over a shorter period")]
    PeriodTooLong,
    /// More than 10⁹ units per second.
    #[error("a rate is at most 1000000000 per second (one unit per nanosecond)")]
    RateTooHigh,
    /// An empty bucket would take longer than [`MAX_FILL`] to fill.
    #[error(
        "the burst would take more than 3 years to refill at this rate; lower the burst or raise the rate"
    )]
    FillTooLong,
    /// The amount exceeds the counter of such a window.
    #[error(
        "a window of this length counts to at most {most}; write at most that, or use a token bucket"
    )]
    WindowTooFull {
        /// The largest amount for this algorithm and period.
        most: u64,
    },
    /// More than [`MAX_LOG`] timestamps per key.
    #[error(
        "a sliding log keeps a timestamp per unit and so at most 10000 per period; use a sliding window for more"
    )]
    LogTooLong,
    /// No slot.
    #[error("a limit of 0 in flight admits nothing; the least is 1")]
    NoSlots,
    /// More than [`MAX_SLOTS`].
    #[error("at most 1000000000 can be in flight")]
    TooManySlots,
    /// A rate for an algorithm that has none.
    #[error("a concurrency limit counts requests in flight and has no rate")]
    SlotsHaveNoRate,
    /// An algorithm that cannot be charged by estimates.
    #[error(
        "this algorithm counts requests one by one and cannot be charged by estimates; use a token bucket"
    )]
    NoEstimates,
    /// A limit has no quota at all.
    #[error("a limit needs at least one quota")]
    NoQuota,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn bounds_are_inclusive() {
        assert!(Quota::new(1, MIN_PERIOD, 1).is_ok());
        assert!(Quota::new(1, MAX_PERIOD, 1).is_ok());
        assert!(Quota::new(1_000_000_000, SECOND, 1).is_ok());
        assert!(Quota::new(1, Duration::from_secs(DAY_SECS), 1_096).is_ok());
    }

    #[test]
    fn each_bound_has_its_own_error() {
        let just_over = MAX_PERIOD + Duration::from_nanos(1);
        let just_under = MIN_PERIOD - Duration::from_nanos(1);
        let refused = [
            (Quota::new(0, SECOND, 1), QuotaError::AmountZero),
            (Quota::new(1, SECOND, 0), QuotaError::BurstZero),
            (Quota::new(1, just_under, 1), QuotaError::PeriodTooShort),
            (Quota::new(1, Duration::ZERO, 1), QuotaError::PeriodTooShort),
            (Quota::new(1, just_over, 1), QuotaError::PeriodTooLong),
            (
                Quota::new(1, Duration::MAX, u64::MAX),
                QuotaError::PeriodTooLong,
            ),
            (
                Quota::new(1_000_000_001, SECOND, 1),
                QuotaError::RateTooHigh,
            ),
            (Quota::new(u64::MAX, MAX_PERIOD, 1), QuotaError::RateTooHigh),
            (
                Quota::new(1, Duration::from_secs(DAY_SECS), 1_097),
                QuotaError::FillTooLong,
            ),
            (Quota::new(1, MAX_PERIOD, u64::MAX), QuotaError::FillTooLong),
            (Quota::slots(0), QuotaError::NoSlots),
            (Quota::slots(MAX_SLOTS + 1), QuotaError::TooManySlots),
        ];
        for (result, error) in refused {
            assert_eq!(result, Err(error));
        }
    }
}
