//! Circuit breaker and adaptive concurrency bound for one Redis. Pure; receives the time from its
//! caller.
//!
//! ```text
//!     5 failures in a row, or silence                a probe is due
//!   closed ──────────────────────▶ open, 250 ms ±25 % ────────────▶ probing ─── reply ──▶ closed, 2 in flight
//!                                       ▲                              └ none ─┐
//!                                       └─────────────────────────────────────┘
//! ```
//!
//! The probe is never a user's request. The bound on calls in flight protects an overloaded store
//! from collapse. Without it every call waits longer than its request does, and every reply is
//! useless. The bound grows with every reply, but hardly with one that was nearly late. All
//! gateways share the store's queue. If each grew its bound until its calls were late, all would
//! time out and open their breakers at once, leaving Redis idle.

/// Consecutive failures that open it. Also the number of timeouts for which a failure streak may
/// last, where the bound allows too few calls for that many failures.
const FAILURES: u32 = 5;
/// How long it stays open before the next probe.
const OPEN_NS: u64 = 250_000_000;
/// At this many calls in flight the bound is removed.
const LIFTED: f64 = 256.0;
/// The bound after a successful probe.
const AFTER_PROBE: f64 = 2.0;
/// Below this bound an instant reply raises it by a half; above, by 2/bound, so about 2 per round
/// of calls.
const EAGER: f64 = 4.0;
/// A reply raises the bound by its remaining share of the timeout to this power: at half of the
/// timeout, by a sixteenth.
const CAUTION: i32 = 4;

/// Whether a call may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allowed {
    Yes,
    /// The bound on calls in flight is reached.
    Bounded,
    /// The breaker is open.
    Open,
}

#[derive(Debug)]
pub(super) struct Breaker {
    state: BreakerState,
    failures: u32,
    /// When the present failure streak began.
    failing_ns: u64,
    in_flight: u32,
    /// `None` until the first timeout.
    bound: Option<f64>,
    halved_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    Closed,
    Open { until_ns: u64 },
    Probing,
}

impl Breaker {
    pub(super) fn new() -> Breaker {
        Breaker {
            state: BreakerState::Closed,
            failures: 0,
            failing_ns: 0,
            in_flight: 0,
            bound: None,
            halved_ns: 0,
        }
    }

    /// Requests permission for a call. If it is granted, report the end of the call with
    /// [`Breaker::ended`].
    pub(super) fn enter(&mut self, now_ns: u64, timeout_ns: u64, jitter: f64) -> Allowed {
        if self.state != BreakerState::Closed {
            return Allowed::Open;
        }
        let is_full = |bound: f64| f64::from(self.in_flight) >= bound.max(1.0).floor();
        if self.bound.is_some_and(is_full) {
            let silent_ns = now_ns.saturating_sub(self.failing_ns);
            if self.failures == 0 || silent_ns < timeout_ns.saturating_mul(FAILURES.into()) {
                return Allowed::Bounded;
            }
            self.open(now_ns, jitter);
            return Allowed::Open;
        }
        self.in_flight = self.in_flight.saturating_add(1);
        Allowed::Yes
    }

    /// Whether a background call may be made: the last permit is reserved for calls that requests
    /// wait for.
    pub(super) fn has_room(&self) -> bool {
        let after = f64::from(self.in_flight) + 2.0;
        self.state == BreakerState::Closed && self.bound.is_none_or(|bound| after <= bound)
    }

    pub(super) fn ended(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// A reply within the timeout.
    pub(super) fn replied(&mut self, taken_ns: u64, timeout_ns: u64) {
        self.failures = 0;
        if let Some(bound) = self.bound {
            let left = 1.0 - (taken_ns as f64 / timeout_ns as f64).min(1.0);
            let step = if bound < EAGER { 0.5 } else { 2.0 / bound };
            let raised = bound + step * left.powi(CAUTION);
            self.bound = Some(raised).filter(|&bound| bound < LIFTED);
        }
    }

    /// No reply within the timeout. Calls in flight together are late together: they count as one
    /// failure. `jitter` is random, 0 to 1.
    pub(super) fn timed_out(&mut self, now_ns: u64, timeout_ns: u64, jitter: f64) {
        if self.bound.is_some() && now_ns.saturating_sub(self.halved_ns) < timeout_ns {
            return;
        }
        self.halved_ns = now_ns;
        let bound = self.bound.unwrap_or_else(|| f64::from(self.in_flight));
        self.bound = Some((bound / 2.0).max(1.0));
        self.failed(now_ns, jitter);
    }

    /// The call could not be made, or was rejected in a way that the next one will be, too.
    pub(super) fn failed(&mut self, now_ns: u64, jitter: f64) {
        if self.failures == 0 {
            self.failing_ns = now_ns;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures >= FAILURES && self.state == BreakerState::Closed {
            self.open(now_ns, jitter);
        }
    }

    /// Opens the breaker after a background check found that the server does not answer.
    pub(super) fn give_up(&mut self, now_ns: u64, jitter: f64) {
        if self.state == BreakerState::Closed {
            self.open(now_ns, jitter);
        }
    }

    /// When the next probe is due.
    pub(super) fn probe_due_ns(&self) -> Option<u64> {
        match self.state {
            BreakerState::Open { until_ns } => Some(until_ns),
            BreakerState::Closed | BreakerState::Probing => None,
        }
    }

    pub(super) fn probing(&mut self) {
        self.state = BreakerState::Probing;
    }

    /// The outcome of a probe.
    pub(super) fn probed(&mut self, now_ns: u64, answered: bool, jitter: f64) {
        if answered {
            self.state = BreakerState::Closed;
            self.failures = 0;
            self.bound = Some(AFTER_PROBE + f64::from(self.in_flight));
        } else {
            self.open(now_ns, jitter);
        }
    }

    /// The bound on calls in flight; `None` while there is none.
    pub(super) fn bound(&self) -> Option<f64> {
        self.bound
    }

    pub(super) fn is_open(&self) -> bool {
        self.state != BreakerState::Closed
    }

    fn open(&mut self, now_ns: u64, jitter: f64) {
        let pause = OPEN_NS as f64 * (0.75 + 0.5 * jitter);
        self.state = BreakerState::Open {
            until_ns: now_ns.saturating_add(pause as u64),
        };
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: u64 = 5_000_000;

    fn enter(breaker: &mut Breaker) -> Allowed {
        breaker.enter(0, BUDGET, 0.5)
    }

    #[test]
    fn five_failures_in_a_row_open_it_and_a_reply_between_them_does_not() {
        let mut breaker = Breaker::new();
        for _ in 0..4 {
            breaker.failed(0, 0.5);
        }
        breaker.replied(0, BUDGET);
        for _ in 0..4 {
            breaker.failed(0, 0.5);
        }
        assert_eq!(enter(&mut breaker), Allowed::Yes);
        breaker.failed(0, 0.5);
        assert_eq!(enter(&mut breaker), Allowed::Open);
        assert_eq!(breaker.probe_due_ns(), Some(250_000_000));
    }

    #[test]
    fn only_an_answered_probe_closes_it_and_then_two_may_be_in_flight() {
        let mut breaker = Breaker::new();
        (0..5).for_each(|_| breaker.failed(0, 0.5));
        breaker.probing();
        assert_eq!(enter(&mut breaker), Allowed::Open);
        breaker.probed(1, false, 0.5);
        assert!(breaker.is_open());
        breaker.probing();
        breaker.probed(2, true, 0.5);
        let allowed: Vec<Allowed> = (0..3).map(|_| enter(&mut breaker)).collect();
        assert_eq!(allowed, [Allowed::Yes, Allowed::Yes, Allowed::Bounded]);
    }

    #[test]
    fn timeouts_halve_the_bound_once_a_budget_and_replies_lift_it() {
        let mut breaker = Breaker::new();
        (0..64).for_each(|_| assert_eq!(enter(&mut breaker), Allowed::Yes));
        breaker.timed_out(BUDGET, BUDGET, 0.5);
        breaker.timed_out(BUDGET + 1, BUDGET, 0.5);
        (0..33).for_each(|_| breaker.ended());
        assert_eq!(enter(&mut breaker), Allowed::Yes, "31 of 32");
        assert_eq!(enter(&mut breaker), Allowed::Bounded);
        (0..20_000).for_each(|_| breaker.replied(0, BUDGET));
        (0..1_000).for_each(|_| assert_eq!(enter(&mut breaker), Allowed::Yes));
    }

    #[test]
    fn calls_that_are_late_together_are_one_failure_of_the_five() {
        let mut breaker = Breaker::new();
        for turn in 1..=5 {
            assert!(!breaker.is_open(), "{turn}");
            (0..64).for_each(|_| breaker.timed_out(turn * BUDGET, BUDGET, 0.5));
        }
        assert!(breaker.is_open());
    }

    #[test]
    fn a_reply_raises_the_bound_by_less_the_later_it_comes() {
        let raised_by = |taken_ns: u64| {
            let mut breaker = Breaker::new();
            breaker.probed(0, true, 0.5);
            breaker.replied(taken_ns, BUDGET);
            breaker.bound().map(|bound| bound - AFTER_PROBE)
        };
        assert_eq!(raised_by(0), Some(0.5));
        assert_eq!(raised_by(BUDGET / 2), Some(0.03125));
        assert_eq!(raised_by(BUDGET), Some(0.0));
    }

    #[test]
    fn calls_that_nobody_waits_for_leave_the_last_place_to_others() {
        let mut breaker = Breaker::new();
        assert!(breaker.has_room(), "nothing is slow");
        (0..6).for_each(|_| assert_eq!(enter(&mut breaker), Allowed::Yes));
        breaker.timed_out(BUDGET, BUDGET, 0.5);
        assert!(!breaker.has_room(), "6 of 3");
        (0..5).for_each(|_| breaker.ended());
        assert!(breaker.has_room(), "1 of 3");
        assert_eq!(enter(&mut breaker), Allowed::Yes);
        assert!(!breaker.has_room(), "2 of 3");
        assert_eq!(enter(&mut breaker), Allowed::Yes);
    }

    #[test]
    fn there_is_always_room_for_one() {
        let mut breaker = Breaker::new();
        for turn in 1..5 {
            breaker.timed_out(turn * BUDGET, BUDGET, 0.5);
            breaker.replied(0, BUDGET);
        }
        assert_eq!(enter(&mut breaker), Allowed::Yes);
    }

    #[test]
    fn silence_opens_it_where_the_bound_leaves_no_room_for_five_failures() {
        let mut breaker = Breaker::new();
        assert_eq!(breaker.enter(0, BUDGET, 0.5), Allowed::Yes);
        breaker.timed_out(BUDGET, BUDGET, 0.5);
        assert_eq!(breaker.enter(2 * BUDGET, BUDGET, 0.5), Allowed::Bounded);
        assert_eq!(breaker.enter(6 * BUDGET, BUDGET, 0.5), Allowed::Open);
        assert!(breaker.is_open());
    }
}
