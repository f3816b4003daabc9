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
    rating: BreakerConfig,
    /// Consecutive.
    failures: AtomicU32,
    /// 0 while closed; otherwise when the next trial may begin.
    trial_at_ms: AtomicU64,
}

impl CircuitBreaker {
    pub(super) fn new(rating: BreakerConfig) -> Self {
        Self {
            rating,
            failures: AtomicU32::new(0),
            trial_at_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn rating(&self) -> BreakerConfig {
        self.rating
    }

    pub(super) fn is_whole(&self) -> bool {
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
        !self.is_whole() && self.trial_at_ms.swap(0, Relaxed) != 0
    }

    /// Records a failure. `true` if the threshold is reached: the caller may now
    /// [`blow`](Self::blow) it.
    pub(super) fn failed(&self) -> bool {
        let rated = self.rating.failures;
        // saturates, so that a flood of failures cannot overflow it
        let failures = self.failures.load(Relaxed).min(rated);
        if failures < rated {
            let failures = self.failures.fetch_add(1, Relaxed) + 1;
            return failures >= rated && self.is_whole();
        }
        rated != 0 && self.is_whole()
    }

    /// Opens the breaker. `true` if it was closed until now.
    pub(super) fn blow(&self, now_ms: u64) -> bool {
        let next = self.pause_from(now_ms);
        self.trial_at_ms
            .compare_exchange(0, next, Relaxed, Relaxed)
            .is_ok()
    }

    fn pause_from(&self, now_ms: u64) -> u64 {
        let pause_ms = u64::try_from(self.rating.pause.as_millis()).unwrap_or(u64::MAX);
        now_ms.saturating_add(pause_ms).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fuse(failures: u32) -> CircuitBreaker {
        CircuitBreaker::new(BreakerConfig {
            failures,
            pause: Duration::from_millis(100),
        })
    }

    #[test]
    fn only_failures_in_a_row_blow_it() {
        let fuse = fuse(3);
        for _ in 0..10 {
            assert!(!fuse.failed() && !fuse.failed());
            assert!(!fuse.succeeded(), "it was closed all the time");
        }
        assert!(!fuse.failed() && !fuse.failed());
        assert!(fuse.failed());
        assert!(fuse.is_whole(), "until the caller says so");
        assert!(fuse.blow(1));
        assert!(!fuse.blow(1), "once");
    }

    #[test]
    fn one_trial_passes_for_each_pause_and_an_answer_mends_it() {
        let fuse = fuse(1);
        assert!(fuse.failed() && fuse.blow(1_000));
        assert_eq!(fuse.blocked_for(1_000), Duration::from_millis(100));
        assert!(!fuse.enter(1_099));
        assert!(fuse.enter(1_100), "the trial");
        assert!(!fuse.enter(1_100), "and no other");
        assert!(!fuse.failed(), "a failed trial changes nothing");
        assert!(!fuse.enter(1_199));
        assert!(fuse.enter(1_200), "the next trial");
        assert!(fuse.succeeded(), "news");
        assert!(fuse.enter(1_200) && fuse.enter(1_200));
        assert!(fuse.failed(), "it counts from the beginning");
    }

    #[test]
    fn a_fuse_rated_at_zero_never_blows() {
        let fuse = fuse(0);
        assert!((0..1_000).all(|_| !fuse.failed()));
    }
}
