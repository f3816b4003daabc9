//! Retry budget: retries can never multiply the load on a failing upstream.
//!
//! Each request earns a fifth of a retry, and each second a few, so that quiet upstreams get
//! retries too. The balance is bounded. The scheme follows Finagle and linkerd (`RetryBudget`);
//! each worker has its own.

use std::cell::Cell;

use tokio::time::Instant;

/// Retries in percent of requests.
pub const BUDGET_PERCENT: u32 = 20;
/// Retries per second and worker that every upstream gets.
pub const BUDGET_FLOOR_PER_SECOND: u32 = 3;
/// Largest balance of retries per worker.
const MOST_SAVED: u32 = 30;

/// Retries that one worker may still make for one upstream.
#[derive(Debug)]
pub(super) struct RetryBudget {
    /// In hundredths of a retry.
    saved: Cell<u32>,
    paid_at: Cell<Instant>,
}

impl RetryBudget {
    /// Starts with the floor of one second.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            saved: Cell::new(BUDGET_FLOOR_PER_SECOND * 100),
            paid_at: Cell::new(now),
        }
    }

    /// A request is sent for the first time.
    pub(super) fn deposit(&self) {
        self.add(BUDGET_PERCENT);
    }

    /// Pays for a retry; `false` if the balance is too low.
    pub(super) fn spend(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.paid_at.get());
        let floor_ms = since
            .as_millis()
            .saturating_mul(BUDGET_FLOOR_PER_SECOND.into());
        let earned = u32::try_from(floor_ms / 10).unwrap_or(u32::MAX);
        if earned > 0 {
            self.paid_at.set(now);
            self.add(earned);
        }
        let left = self.saved.get().checked_sub(100);
        self.saved.set(left.unwrap_or(self.saved.get()));
        left.is_some()
    }

    fn add(&self, hundredths: u32) {
        let saved = self.saved.get().saturating_add(hundredths);
        self.saved.set(saved.min(MOST_SAVED * 100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_outage_is_retried_for_a_fifth_of_the_requests_and_no_more() {
        let start = Instant::now();
        let budget = RetryBudget::new(start);
        let retried = (0..1_000)
            .filter(|_| {
                budget.deposit();
                budget.spend(start)
            })
            .count();
        assert_eq!(retried, 200 + 3);
    }

    #[test]
    fn a_quiet_upstream_is_retried_too_and_savings_are_bounded() {
        let start = Instant::now();
        let budget = RetryBudget::new(start);
        assert_eq!((0..10).filter(|_| budget.spend(start)).count(), 3);
        let later = start + Duration::from_secs(1);
        assert_eq!((0..10).filter(|_| budget.spend(later)).count(), 3);
        let much_later = start + Duration::from_secs(86_400 * 365);
        assert_eq!((0..100).filter(|_| budget.spend(much_later)).count(), 30);
    }
}
