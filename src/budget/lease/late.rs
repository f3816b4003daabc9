//! Units that are charged or refunded after an answer.

use super::{Lease, LeaseAlgorithm, LeaseTerms, Origin};

/// A call for a debt that nobody waits for is made at once if the debt is this part of the
/// capacity; a smaller one waits for the next call of a busy key.
const DUE_PART: u64 = 100;

impl Lease {
    /// Charges units for a past event, as far as they are left at the store.
    pub fn charge_late(&mut self, tokens: u64) {
        self.late.charge = self.late.charge.saturating_add(tokens);
        self.late.is_due = true;
    }

    /// Charges units that an answer cost beyond its reservation, even if they are missing.
    pub fn owe_late(&mut self, now_ns: u64, terms: &LeaseTerms, tokens: u64) {
        self.owe(now_ns, tokens);
        let due = terms.capacity.div_euclid(DUE_PART).max(1);
        self.late.is_due |= !terms.ahead || self.debt >= due;
    }

    /// Returns units reserved at `charged_ns` that an answer did not cost: in a window, to the
    /// window of the reservation. One before the previous window no longer counts.
    pub fn refund_late(&mut self, now_ns: u64, terms: &LeaseTerms, tokens: u64, charged_ns: u64) {
        if terms.algorithm == LeaseAlgorithm::Bucket {
            if self.late.refund == 0 {
                self.late.refund_ns = now_ns;
            }
            self.late.refund = self.late.refund.saturating_add(tokens);
            self.late.is_due = true;
            return;
        }
        let Some(generation) = self.window_at(terms, charged_ns) else {
            return;
        };
        let origin = Origin {
            generation,
            ..Origin::default()
        };
        self.unused(origin, tokens);
    }

    /// The number of the window that contained this moment; `None` unless it is the last known one
    /// or the one before.
    fn window_at(&self, terms: &LeaseTerms, at_ns: u64) -> Option<u32> {
        let pool = self.pool?;
        let span_ns = terms.span_us.saturating_mul(1_000);
        let begin_ns = pool.until_ns.saturating_sub(span_ns);
        let before_ns = begin_ns.saturating_sub(span_ns);
        match at_ns {
            // the end is known later than it is reached by the clock of the store: a moment just
            // before it belongs to the next window
            at_ns if at_ns >= pool.until_ns => Some(pool.generation.wrapping_add(1)),
            at_ns if at_ns >= begin_ns => Some(pool.generation),
            at_ns if at_ns >= before_ns => Some(pool.generation.wrapping_sub(1)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::budget::lease::{CallReason, LeaseReport, Reply};

    const SECOND: u64 = 1_000_000_000;

    fn terms(algorithm: LeaseAlgorithm) -> LeaseTerms {
        LeaseTerms::new(algorithm, 1_000, Duration::from_secs(10), 1_000, true)
    }

    fn reports(lease: &mut Lease, now_ns: u64, terms: &LeaseTerms) -> Vec<LeaseReport> {
        let call = lease.call(now_ns, terms, SECOND, [0, 0], CallReason::default());
        call.reports
    }

    #[test]
    fn charges_are_summed_up_and_repeated_until_a_reply() {
        let terms = terms(LeaseAlgorithm::Bucket);
        let mut lease = Lease::default();
        lease.charge_late(2);
        lease.charge_late(3);
        assert!(lease.has_news());
        let charge = LeaseReport::Charge { tokens: 5 };
        assert_eq!(reports(&mut lease, SECOND, &terms), [charge]);
        assert!(!lease.has_news() && lease.debt() == 5);
        assert_eq!(reports(&mut lease, SECOND, &terms), [charge]);
        lease.replied(SECOND, SECOND, &terms, (&Reply::default(), None), (0, 0.5));
        assert_eq!(lease.debt(), 0);
    }

    #[test]
    fn a_small_debt_waits_for_the_next_call_and_a_large_one_makes_it() {
        let terms = terms(LeaseAlgorithm::Bucket);
        let mut lease = Lease::default();
        lease.owe_late(SECOND, &terms, 9);
        assert!(!lease.has_news());
        lease.owe_late(SECOND, &terms, 1);
        assert!(lease.has_news());
    }

    #[test]
    fn a_refund_of_a_bucket_is_reported_once_and_not_after_its_time_to_fill() {
        let terms = terms(LeaseAlgorithm::Bucket);
        let mut lease = Lease::default();
        lease.refund_late(SECOND, &terms, 7, 0);
        lease.refund_late(2 * SECOND, &terms, 1, 0);
        assert_eq!(
            reports(&mut lease, 2 * SECOND, &terms),
            [LeaseReport::Refund { tokens: 8 }]
        );
        assert!(reports(&mut lease, 2 * SECOND, &terms).is_empty());
        lease.refund_late(2 * SECOND, &terms, 7, 0);
        assert!(reports(&mut lease, 13 * SECOND, &terms).is_empty());
    }

    #[test]
    fn a_refund_of_a_window_goes_to_the_window_of_the_reservation() {
        let terms = terms(LeaseAlgorithm::Fixed);
        let mut lease = Lease::default();
        let reply = Reply {
            generation: 7,
            valid_us: 10_000_000,
            ..Reply::default()
        };
        let now_ns = 100 * SECOND;
        lease.replied(now_ns, now_ns, &terms, (&reply, None), (0, 0.5));
        let mut window = |charged_ns| {
            lease.refund_late(now_ns, &terms, 1, charged_ns);
            reports(&mut lease, now_ns, &terms)
        };
        let returned = |generation| {
            vec![LeaseReport::Returned {
                generation,
                tokens: 1,
            }]
        };
        assert_eq!(window(105 * SECOND), returned(7));
        assert_eq!(window(95 * SECOND), returned(6));
        assert_eq!(window(111 * SECOND), returned(8));
        assert_eq!(window(80 * SECOND), []);
    }
}
