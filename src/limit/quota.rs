//! Amount, period and burst of one limit for one tier, and what of it is representable.

use std::{fmt, num::NonZeroU64, time::Duration};

/// The shortest period: below a millisecond a rate is better written with a larger amount.
pub const MIN_PERIOD: Duration = Duration::from_millis(1);

/// The longest period.
pub const MAX_PERIOD: Duration = Duration::from_secs(31 * DAY_SECS);

/// The longest time that an empty bucket may take to fill: 3 years. With it and the finest unit of time
/// (1/64 ns, see [`bucket`](super::bucket)) a timestamp fits 64 bits for the first 6 years of a process.
pub const MAX_FILL: Duration = Duration::from_secs(1_096 * DAY_SECS);

const DAY_SECS: u64 = 24 * 60 * 60;

/// `amount` units per `period`, at most `burst` at once.
///
/// Made by [`Quota::new`]; whoever takes a quota that may have been written by hand checks it again
/// ([`Limit::token_bucket`](super::Limit::token_bucket) does).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Units that become available per `period`.
    pub amount: NonZeroU64,
    /// The period of `amount`: 1 ms to 31 days.
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

    pub(super) fn check(&self) -> Result<(), QuotaError> {
        if self.period < MIN_PERIOD {
            return Err(QuotaError::PeriodTooShort);
        }
        if self.period > MAX_PERIOD {
            return Err(QuotaError::PeriodTooLong);
        }
        let period_ns = self.period.as_nanos();
        if u128::from(self.amount.get()) > period_ns {
            return Err(QuotaError::RateTooHigh);
        }
        // 64 bits times 52 bits, and 57 bits times 52 bits: neither can overflow
        let demand = u128::from(self.burst.get()).saturating_mul(period_ns);
        let bound = MAX_FILL
            .as_nanos()
            .saturating_mul(u128::from(self.amount.get()));
        if demand > bound {
            return Err(QuotaError::FillTooLong);
        }
        Ok(())
    }

    /// The period in nanoseconds; it fits because a period is at most [`MAX_PERIOD`].
    pub(super) fn period_ns(&self) -> u64 {
        u64::try_from(self.period.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The rate as a configuration writes it: `60/min`, `5/15min`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u128, &str); 5] = [
            (86_400_000, "d"),
            (3_600_000, "h"),
            (60_000, "min"),
            (1_000, "s"),
            (1, "ms"),
        ];
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

/// Why a quota is refused. The message is fit for a diagnostic: it says the bound and what to write instead.
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
        ];
        for (result, error) in refused {
            assert_eq!(result, Err(error));
        }
    }
}
