//! When a request of any cost fits, according to the store's last reply.

use super::{
    reply::Reply,
    terms::{LeaseAlgorithm, LeaseTerms},
};

/// A remembered refusal is shorter than the wait by this part, because clocks of gateway and store
/// may drift apart.
const DRIFT: u64 = 1024;

/// The store reports whole µs, rounded up.
const ROUNDED_NS: u64 = 2_000;

/// The store's last reply, in this gateway's nanoseconds. All zero: nothing is known, and every
/// request may fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forecast {
    /// When the reply arrived.
    pub told_ns: u64,
    /// How long the call took: the store answered at most this much earlier.
    pub delay_ns: u64,
    /// The end of the window, or when it may have more if that is sooner; for a log, when the first
    /// refused request fits.
    pub end_ns: u64,
    /// Bucket: when it is full. Fixed window: what is left. Sliding window: both counts. Log: the
    /// cost of the first refused request.
    pub state: u64,
}

impl Forecast {
    /// From the reply to a call sent at `sent_ns`. `refused` is the cost of the first refused
    /// request.
    pub fn new(
        now_ns: u64,
        sent_ns: u64,
        terms: &LeaseTerms,
        reply: &Reply,
        refused: Option<u64>,
    ) -> Forecast {
        let later = |us: u64| now_ns.saturating_add(us.saturating_mul(1000));
        let [first, second] = reply.state;
        let state = match terms.algorithm {
            LeaseAlgorithm::Bucket => later(first),
            LeaseAlgorithm::Sliding => {
                let scale = scale(terms);
                let part = |count: u64| count.div_ceil(scale).min(u64::from(u32::MAX));
                part(first) << 32 | part(second)
            }
            LeaseAlgorithm::Log => refused.unwrap_or(0),
            LeaseAlgorithm::Fixed | LeaseAlgorithm::Slots => reply.pool,
        };
        let end_us = match terms.algorithm {
            LeaseAlgorithm::Log => reply.wait_us,
            // earlier than the window's end while the store grants little after a loss
            LeaseAlgorithm::Fixed if reply.wait_us > 0 => reply.wait_us.min(reply.valid_us),
            _ => reply.valid_us,
        };
        Forecast {
            told_ns: now_ns,
            delay_ns: now_ns.saturating_sub(sent_ns),
            end_ns: later(end_us),
            state,
        }
    }

    /// When this many units are available if none are taken: late rather than early. Reported to
    /// clients.
    pub fn fits_ns(&self, terms: &LeaseTerms, cost: u64) -> u64 {
        let missing = terms.capacity.saturating_sub(cost);
        match terms.algorithm {
            LeaseAlgorithm::Bucket => {
                let ns = missing as f64 * 1e3 / terms.rate;
                self.state.saturating_sub(ns as u64)
            }
            LeaseAlgorithm::Fixed if cost <= self.state => 0,
            LeaseAlgorithm::Fixed => self.end_ns,
            LeaseAlgorithm::Sliding => self.slides_ns(terms, missing),
            LeaseAlgorithm::Log if cost == self.state => self.end_ns,
            LeaseAlgorithm::Log | LeaseAlgorithm::Slots => 0,
        }
    }

    /// A request of this cost is refused before then, and Redis is asked from then on: early rather
    /// than late.
    pub fn not_before_ns(&self, terms: &LeaseTerms, cost: u64) -> u64 {
        let fits_ns = self.fits_ns(terms, cost);
        let wait_ns = fits_ns.saturating_sub(self.told_ns);
        let drift_ns = wait_ns.checked_div(DRIFT).unwrap_or(0);
        fits_ns.saturating_sub(self.delay_ns.saturating_add(drift_ns))
    }

    /// Whole units available now or when the reply arrived: a request is older than the reply to
    /// it.
    pub fn left(&self, now_ns: u64, terms: &LeaseTerms) -> u64 {
        let capacity = terms.capacity;
        let now_ns = now_ns.max(self.told_ns);
        match terms.algorithm {
            LeaseAlgorithm::Bucket => {
                let full_ns = self.state.saturating_sub(now_ns);
                let missing = terms.refill(full_ns.saturating_sub(ROUNDED_NS)).ceil();
                capacity.saturating_sub(missing as u64)
            }
            LeaseAlgorithm::Fixed if now_ns < self.end_ns => self.state,
            LeaseAlgorithm::Sliding => {
                let (current, previous) = self.counts(terms);
                let span_ns = terms.span_ns();
                let left_ns = self.end_ns.saturating_sub(now_ns) as f64;
                let over_ns = now_ns.saturating_sub(self.end_ns) as f64;
                let part = |ns: f64| (ns / span_ns).clamp(0.0, 1.0);
                let used = if over_ns > 0.0 {
                    current * (1.0 - part(over_ns))
                } else {
                    current + previous * part(left_ns)
                };
                capacity.saturating_sub(used.ceil() as u64)
            }
            _ => capacity,
        }
    }

    /// The state with fewer units: as if they had been spent now. At most one capacity is owed, as
    /// at the store.
    pub fn less(&self, state: u64, now_ns: u64, units: u64, terms: &LeaseTerms) -> u64 {
        match terms.algorithm {
            LeaseAlgorithm::Bucket => {
                let ns = |units: u64| (units as f64 * 1e3 / terms.rate) as u64;
                let most_ns = now_ns.saturating_add(ns(terms.capacity.saturating_mul(2)));
                let full_ns = state.max(now_ns).saturating_add(ns(units));
                full_ns.min(most_ns)
            }
            LeaseAlgorithm::Fixed => state.saturating_sub(units),
            LeaseAlgorithm::Sliding => {
                let part = units.div_ceil(scale(terms));
                let current = (state >> 32).saturating_add(part).min(u64::from(u32::MAX));
                current << 32 | (state & u64::from(u32::MAX))
            }
            LeaseAlgorithm::Log | LeaseAlgorithm::Slots => state,
        }
    }

    /// Sliding window: when the estimate has fallen to at most `most`.
    fn slides_ns(&self, terms: &LeaseTerms, most: u64) -> u64 {
        let (current, previous) = self.counts(terms);
        let (most, span_ns) = (most as f64, terms.span_ns());
        let free = most - current;
        if free >= 0.0 {
            if previous <= free {
                return 0;
            }
            // when enough of the previous window has left
            let early_ns = (free / previous * span_ns) as u64;
            return self.end_ns.saturating_sub(early_ns);
        }
        // in the next window, where this one is the previous
        let late_ns = ((1.0 - most / current) * span_ns).ceil() as u64;
        self.end_ns.saturating_add(late_ns)
    }

    fn counts(&self, terms: &LeaseTerms) -> (f64, f64) {
        let scale = scale(terms) as f64;
        let (current, previous) = (self.state >> 32, self.state & u64::from(u32::MAX));
        (current as f64 * scale, previous as f64 * scale)
    }
}

/// Units per count in a forecast: 1 for limits up to two billion.
fn scale(terms: &LeaseTerms) -> u64 {
    terms.capacity.div_ceil(1 << 31).max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn terms(algorithm: LeaseAlgorithm) -> LeaseTerms {
        LeaseTerms::new(algorithm, 10, Duration::from_secs(10), 10, false)
    }

    fn reply(pool: u64, valid_us: u64, state: [u64; 2]) -> Reply {
        Reply {
            pool,
            valid_us,
            state,
            ..Reply::default()
        }
    }

    #[test]
    fn nothing_known_refuses_nothing() {
        for algorithm in [
            LeaseAlgorithm::Bucket,
            LeaseAlgorithm::Fixed,
            LeaseAlgorithm::Sliding,
            LeaseAlgorithm::Log,
        ] {
            let forecast = Forecast::default();
            assert_eq!(forecast.not_before_ns(&terms(algorithm), 10), 0);
        }
    }

    #[test]
    fn a_window_that_grants_little_for_a_while_is_asked_again_before_it_ends() {
        let terms = terms(LeaseAlgorithm::Fixed);
        let after_a_loss = Reply {
            wait_us: 3_000_000,
            ..reply(1, 10_000_000, [9, 0])
        };
        let forecast = Forecast::new(SECOND, SECOND, &terms, &after_a_loss, Some(2));
        assert_eq!(forecast.fits_ns(&terms, 2), 4 * SECOND);
        assert_eq!(forecast.fits_ns(&terms, 1), 0);
    }

    #[test]
    fn a_bucket_fills_one_unit_after_the_other() {
        let terms = terms(LeaseAlgorithm::Bucket);
        // three available, one a second refills
        let told = reply(3, 0, [7_000_000, 0]);
        let forecast = Forecast::new(SECOND, SECOND, &terms, &told, None);
        assert_eq!(forecast.fits_ns(&terms, 3), SECOND);
        assert_eq!(forecast.fits_ns(&terms, 7), 5 * SECOND);
        assert_eq!(forecast.fits_ns(&terms, 10), 8 * SECOND);
        assert_eq!(forecast.left(SECOND, &terms), 3);
        assert_eq!(forecast.left(4 * SECOND, &terms), 6);
        assert_eq!(forecast.left(0, &terms), 3, "as reported");
        // the script rounds up
        let told = reply(3, 0, [7_000_001, 0]);
        let forecast = Forecast::new(SECOND, SECOND, &terms, &told, None);
        assert_eq!(forecast.left(SECOND, &terms), 3);
    }

    #[test]
    fn a_fixed_window_has_what_is_left_until_its_end() {
        let terms = terms(LeaseAlgorithm::Fixed);
        let told = reply(3, 4_000_000, [7, 0]);
        let forecast = Forecast::new(SECOND, SECOND, &terms, &told, None);
        assert_eq!(forecast.fits_ns(&terms, 3), 0);
        assert_eq!(forecast.fits_ns(&terms, 4), 5 * SECOND);
        assert_eq!(forecast.left(2 * SECOND, &terms), 3);
        assert_eq!(forecast.left(5 * SECOND, &terms), 10);
    }

    #[test]
    fn a_sliding_window_frees_first_the_window_before_and_then_its_own() {
        let terms = terms(LeaseAlgorithm::Sliding);
        // at half of the window, five are counted in it and four before: seven in all
        let told = reply(3, 5_000_000, [5, 4]);
        let forecast = Forecast::new(0, 0, &terms, &told, None);
        assert_eq!(forecast.left(0, &terms), 3);
        assert!(forecast.fits_ns(&terms, 3) <= 1, "now");
        assert_eq!(forecast.fits_ns(&terms, 4), 5 * SECOND - 5 * SECOND / 2);
        assert_eq!(forecast.fits_ns(&terms, 5), 5 * SECOND);
        // five in the previous window, of which four may count: a fifth of it has to leave
        assert_eq!(forecast.fits_ns(&terms, 6), 7 * SECOND);
        assert_eq!(forecast.fits_ns(&terms, 10), 15 * SECOND);
        assert_eq!(forecast.left(7 * SECOND, &terms), 6);
    }

    #[test]
    fn a_log_knows_the_wait_of_the_request_that_was_refused() {
        let terms = terms(LeaseAlgorithm::Log);
        let told = Reply {
            wait_us: 2_000_000,
            ..Reply::default()
        };
        let forecast = Forecast::new(SECOND, SECOND, &terms, &told, Some(3));
        assert_eq!(forecast.fits_ns(&terms, 3), 3 * SECOND);
        assert_eq!(forecast.fits_ns(&terms, 4), 0, "it has to be asked");
    }

    #[test]
    fn a_refusal_is_remembered_from_the_sending_of_the_call_and_told_from_the_reply() {
        let terms = terms(LeaseAlgorithm::Fixed);
        let forecast = Forecast::new(
            SECOND,
            SECOND - 50_000_000,
            &terms,
            &reply(0, 1_024_000, [10, 0]),
            Some(1),
        );
        assert_eq!(forecast.fits_ns(&terms, 1), SECOND + 1_024_000_000);
        let early = SECOND - 50_000_000 + 1_023_000_000;
        assert_eq!(forecast.not_before_ns(&terms, 1), early);
    }
}
