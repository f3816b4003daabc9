//! Pure arithmetic of slack: how much of a cold key is admitted before Redis is asked.
//!
//! Slack admits a few units of each key without a call. It recovers at the same part of the limit's
//! rate, so a key that needs no more never costs a call. The first call charges the unrecovered
//! part as a debt. Until the key is cold again it has no slack. The limit may be exceeded by this
//! part of its rate, and by twice the part of its burst: recent slack may not be charged yet, and
//! charged slack may have recovered.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use super::lease::LeaseTerms;

/// The slack of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slack {
    /// Units admitted and not recovered.
    used: f64,
    at_ns: u64,
}

/// This gateway's part of the allowed excess, in whole units: none if there are many gateways and
/// the limit is small.
pub(super) fn room(slack: f64, terms: &LeaseTerms, gateways: f64) -> u64 {
    if !terms.ahead {
        return 0;
    }
    (slack * terms.capacity as f64 / gateways.max(1.0)) as u64
}

impl Slack {
    /// Whether this many units are admitted.
    pub(super) fn spend(&mut self, now_ns: u64, terms: &LeaseTerms, room: u64, cost: u64) -> bool {
        self.flow_back(now_ns, terms, room);
        let used = self.used + cost as f64;
        let passes = used <= room as f64;
        if passes {
            self.used = used;
        }
        passes
    }

    /// Returns units of a request that another limit refused.
    pub(super) fn refund(&mut self, cost: u64) {
        self.used = (self.used - cost as f64).max(0.0);
    }

    /// The units to charge with a call made now.
    pub(super) fn charge(&mut self, now_ns: u64, terms: &LeaseTerms, room: u64) -> u64 {
        self.flow_back(now_ns, terms, room);
        std::mem::take(&mut self.used).ceil() as u64
    }

    /// Whether all slack has recovered, so it can be forgotten.
    pub(super) fn is_whole(&self, now_ns: u64, terms: &LeaseTerms, room: u64) -> bool {
        let mut then = *self;
        then.flow_back(now_ns, terms, room);
        then.used <= 0.0
    }

    /// All slack recovers within the limit's span.
    fn flow_back(&mut self, now_ns: u64, terms: &LeaseTerms, room: u64) {
        let passed_us = now_ns.saturating_sub(self.at_ns) as f64 / 1e3;
        let back = room as f64 * passed_us / terms.span_us as f64;
        self.used = (self.used - back).max(0.0);
        self.at_ns = self.at_ns.max(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::budget::lease::LeaseAlgorithm;

    const SECOND: u64 = 1_000_000_000;

    fn terms(ahead: bool) -> LeaseTerms {
        LeaseTerms::new(
            LeaseAlgorithm::Bucket,
            100,
            Duration::from_secs(100),
            100,
            ahead,
        )
    }

    #[test]
    fn a_part_of_the_limit_is_let_through_and_flows_back_within_its_span() {
        let (terms, mut slack) = (terms(true), Slack::default());
        let room = room(0.1, &terms, 2.0);
        assert_eq!(room, 5);
        let passed = (0..10).filter(|_| slack.spend(0, &terms, room, 1));
        assert_eq!(passed.count(), 5);
        assert!(!slack.spend(19 * SECOND, &terms, room, 1));
        assert!(slack.spend(20 * SECOND, &terms, room, 1), "one in 20 s");
        assert!(!slack.is_whole(100 * SECOND, &terms, room));
        assert!(slack.is_whole(120 * SECOND, &terms, room));
    }

    #[test]
    fn what_has_not_flowed_back_is_charged_once_and_rounded_up() {
        let (terms, mut slack) = (terms(true), Slack::default());
        assert!(slack.spend(0, &terms, 5, 3));
        slack.refund(1);
        assert_eq!(slack.charge(SECOND, &terms, 5), 2);
        assert_eq!(slack.charge(SECOND, &terms, 5), 0);
    }

    #[test]
    fn a_limit_that_is_asked_for_every_request_or_is_small_has_none() {
        assert_eq!(room(0.1, &terms(false), 1.0), 0);
        assert_eq!(room(0.01, &terms(true), 2.0), 0);
        let mut slack = Slack::default();
        assert!(!slack.spend(0, &terms(true), 0, 1));
    }
}
