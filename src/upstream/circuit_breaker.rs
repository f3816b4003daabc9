//! Circuit breaker: opens after consecutive failures; half-open admits one trial per pause.
//!
//! ```text
//! closed ──consecutive failures──▶ open ──pause──▶ half-open: one trial ──answered──▶ closed
//!                                   ▲                   │
//!                                   └───── failed ──────┘
//! ```
//!
//! Ejects a single server or refuses a whole upstream. All workers share it. While it is closed and
//! no request fails, it is only read. If a trial never ends (its client left), another follows
//! after the same pause. Times are milliseconds on a clock of the caller that is never zero.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// When a circuit breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Consecutive failures; 0 disables it.
    pub failures: u32,
    /// Time until the first trial, and between trials.
    pub pause: Duration,
}

#[derive(Debug)]
pub(super) struct CircuitBreaker {
    config: BreakerConfig,
    /// Consecutive.
    failures: AtomicU32,
    /// 0 while closed; otherwise when the next trial may begin.
    trial_at_ms: AtomicU64,
}

impl CircuitBreaker {
    pub(super) fn new(config: BreakerConfig) -> Self {
        Self {
            config,
            failures: AtomicU32::new(0),
            trial_at_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn config(&self) -> BreakerConfig {
        self.config
    }

    pub(super) fn is_closed(&self) -> bool {
        self.trial_at_ms.load(Relaxed) == 0
    }

    /// Time until the next trial; zero if closed or if a trial is due.
    pub(super) fn blocked_for(&self, now_ms: u64) -> Duration {
        Duration::from_millis(self.trial_at_ms.load(Relaxed).saturating_sub(now_ms))
    }

    /// Whether a request may pass, as the trial if one is due. Only one of several concurrent
    /// workers gets the trial.
    pub(super) fn enter(&self, now_ms: u64) -> bool {
        let due = self.trial_at_ms.load(Relaxed);
        if due == 0 {
            return true;
        }
        let next = self.pause_from(now_ms);
        due <= now_ms
            && self
                .trial_at_ms
                .compare_exchange(due, next, Relaxed, Relaxed)
                .is_ok()
    }

    /// Records a success. `true` if it closes the breaker.
    pub(super) fn succeeded(&self) -> bool {
        if self.failures.load(Relaxed) != 0 {
            self.failures.store(0, Relaxed);
        }
        !self.is_closed() && self.trial_at_ms.swap(0, Relaxed) != 0
    }

    /// Records a failure. `true` if the threshold is reached: the caller may now
    /// [`open`](Self::open) it.
    pub(super) fn failed(&self) -> bool {
        let threshold = self.config.failures;
        // saturates, so that a flood of failures cannot overflow it
        let failures = self.failures.load(Relaxed).min(threshold);
        if failures < threshold {
            let failures = self.failures.fetch_add(1, Relaxed) + 1;
            return failures >= threshold && self.is_closed();
        }
        threshold != 0 && self.is_closed()
    }

    /// Opens the breaker. `true` if it was closed until now.
    pub(super) fn open(&self, now_ms: u64) -> bool {
        let next = self.pause_from(now_ms);
        self.trial_at_ms
            .compare_exchange(0, next, Relaxed, Relaxed)
            .is_ok()
    }

    fn pause_from(&self, now_ms: u64) -> u64 {
        let pause_ms = u64::try_from(self.config.pause.as_millis()).unwrap_or(u64::MAX);
        now_ms.saturating_add(pause_ms).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker(failures: u32) -> CircuitBreaker {
        CircuitBreaker::new(BreakerConfig {
            failures,
            pause: Duration::from_millis(100),
        })
    }

    #[test]
    fn only_consecutive_failures_open_it() {
        let breaker = breaker(3);
        for _ in 0..10 {
            assert!(!breaker.failed() && !breaker.failed());
            assert!(!breaker.succeeded(), "it was closed all the time");
        }
        assert!(!breaker.failed() && !breaker.failed());
        assert!(breaker.failed());
        assert!(breaker.is_closed(), "until the caller says so");
        assert!(breaker.open(1));
        assert!(!breaker.open(1), "once");
    }

    #[test]
    fn one_trial_passes_for_each_pause_and_an_answer_closes_it() {
        let breaker = breaker(1);
        assert!(breaker.failed() && breaker.open(1_000));
        assert_eq!(breaker.blocked_for(1_000), Duration::from_millis(100));
        assert!(!breaker.enter(1_099));
        assert!(breaker.enter(1_100), "the trial");
        assert!(!breaker.enter(1_100), "and no other");
        assert!(!breaker.failed(), "a failed trial changes nothing");
        assert!(!breaker.enter(1_199));
        assert!(breaker.enter(1_200), "the next trial");
        assert!(breaker.succeeded(), "news");
        assert!(breaker.enter(1_200) && breaker.enter(1_200));
        assert!(breaker.failed(), "it counts from the beginning");
    }

    #[test]
    fn a_breaker_without_a_threshold_never_opens() {
        let breaker = breaker(0);
        assert!((0..1_000).all(|_| !breaker.failed()));
    }
}
