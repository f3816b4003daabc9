//! When a gateway asks again: pauses while the pool is short, and how long tokens may stay idle.

use super::{
    call::Pause,
    forecast::Forecast,
    terms::{LeaseAlgorithm, LeaseTerms, PAUSE_MIN_NS},
};

const NS_PER_S: f64 = 1e9;

/// Target tokens per poll of a short pool; at twice as many, the next poll comes sooner.
const GOOD_POLL: u64 = 8;
/// The pause between unsuccessful polls of a window grows by this part of the time since the last
/// success.
const POLL_GROWTH: u64 = 8;
/// The pause between polls of a window is at most this part of the time to its end, because
/// capacity unused by then is lost. A sliding window gains capacity all the time, a fixed one only
/// from returned tokens.
const LAST_PART_SLIDING: u64 = 4;
const LAST_PART_FIXED: u64 = 2;
/// The only gateway asks for each unit when it refills, or for all that refill within this time.
const SOLE_PAUSE_NS: u64 = 4_000_000;
/// Tokens go back after a time with this many expected requests but no actual one: the demand has
/// moved.
const IDLE_ARRIVALS: f64 = 16.0;
const IDLE_MIN_NS: u64 = 10_000_000;
/// While the pool is short, they go back after this time in any case.
const IDLE_NS: u64 = 500_000_000;
/// Otherwise they stay at least for this part of the horizon: a briefly stalled machine has no
/// requests either.
const IDLE_PARTS: u64 = 8;
/// In horizons: longer silence says nothing about the rate.
const MAX_QUIET: f64 = 2.0;

/// The state of the pool according to the replies so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Whether the pool was short at the last reply.
    pub(super) is_short: bool,
    /// Other gateways have almost no demand for the key.
    pub(super) is_sole: bool,
    /// What the last reply granted.
    pub(super) last_got: u64,
    /// The last reply that granted anything.
    pub(super) got_ns: u64,
    pause_ns: u64,
}

impl Pace {
    /// How long to pause when a pool is short, or when a window has too little for the refused
    /// request. Other gateways may return tokens to a window at any time. A bucket with too little
    /// for a single request is asked again when it has filled, according to the forecast.
    pub(super) fn pause(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        forecast: &Forecast,
        refused: Option<u64>,
        (rtt_ns, jitter): (u64, f64),
    ) -> Option<Pause> {
        let is_window = matches!(
            terms.algorithm,
            LeaseAlgorithm::Fixed | LeaseAlgorithm::Sliding
        );
        let least = match refused {
            _ if self.is_short => 0,
            Some(cost) if is_window => cost,
            _ => {
                self.pause_ns = 0;
                return None;
            }
        };
        if !terms.ahead {
            return None;
        }
        let longest_ns = self.longest_pause_ns(now_ns, terms, forecast);
        self.pause_ns = match (self.pause_ns, self.last_got) {
            (0, _) => rtt_ns.max(PAUSE_MIN_NS),
            (pause, got) if got < GOOD_POLL => pause.saturating_mul(2),
            (pause, got) if got >= GOOD_POLL.saturating_mul(2) => pause.div_euclid(2),
            (pause, _) => pause,
        }
        .clamp(PAUSE_MIN_NS, longest_ns);
        let pause_ns = (self.pause_ns as f64 * (0.75 + 0.5 * jitter)) as u64;
        let until_ns = now_ns.saturating_add(pause_ns);
        // no other gateway takes what refills: ask when it is there
        let sole_ns = now_ns.saturating_add(sole_pause_ns(terms));
        let until_ns = match terms.algorithm {
            // a new window is open to all gateways
            LeaseAlgorithm::Fixed => {
                until_ns.min(forecast.not_before_ns(terms, u64::MAX).max(now_ns))
            }
            LeaseAlgorithm::Bucket => {
                let until_ns = if self.is_sole {
                    until_ns.min(sole_ns)
                } else {
                    until_ns
                };
                until_ns.max(forecast.not_before_ns(terms, 1))
            }
            LeaseAlgorithm::Sliding if self.is_sole => {
                until_ns.min(forecast.not_before_ns(terms, least.max(1)).max(sole_ns))
            }
            _ => until_ns,
        };
        Some(Pause { until_ns, least })
    }

    fn longest_pause_ns(&self, now_ns: u64, terms: &LeaseTerms, forecast: &Forecast) -> u64 {
        let longest_ns = terms.longest_pause_ns();
        let last_part = match terms.algorithm {
            LeaseAlgorithm::Fixed => LAST_PART_FIXED,
            LeaseAlgorithm::Sliding => LAST_PART_SLIDING,
            _ => return longest_ns,
        };
        let barren_ns = now_ns.saturating_sub(self.got_ns);
        let left_ns = forecast.end_ns.saturating_sub(now_ns);
        longest_ns
            .max(barren_ns.checked_div(POLL_GROWTH).unwrap_or(0))
            .min(left_ns.checked_div(last_part).unwrap_or(0))
            .max(PAUSE_MIN_NS)
    }

    /// The pool is short below this many tokens. The only gateway has all of it, so its pool is
    /// short when it is empty.
    pub(super) fn short_below(&self, terms: &LeaseTerms) -> f64 {
        if self.is_sole {
            1.0
        } else {
            terms.short_below()
        }
    }
}

/// How long tokens may stay idle: until the demand has certainly moved, and only briefly while
/// others are refused. `rate` is that of the last arrival, measured `quiet_ns` later.
pub(super) fn patience_ns(rate: f64, quiet_ns: u64, is_short: bool, horizon_ns: u64) -> u64 {
    // the rate before silence made it fall
    let quiet = quiet_ns as f64 / horizon_ns as f64;
    let rate = rate * quiet.min(MAX_QUIET).exp();
    let expected_ns = (IDLE_ARRIVALS / rate.max(1.0) * NS_PER_S) as u64;
    if is_short {
        expected_ns.clamp(IDLE_MIN_NS, IDLE_NS).min(horizon_ns)
    } else {
        expected_ns.max(horizon_ns.div_euclid(IDLE_PARTS))
    }
}

/// How long the only gateway pauses at an empty pool, beyond the time to the next unit: 0 if units
/// refill slowly.
fn sole_pause_ns(terms: &LeaseTerms) -> u64 {
    let unit_ns = (1e3 / terms.rate) as u64;
    if unit_ns < SOLE_PAUSE_NS {
        SOLE_PAUSE_NS
    } else {
        0
    }
}
