//! When a gateway asks again: pauses while the pool is short, and how long tokens may lie idle.

use super::{Algorithm, Forecast, Lease, NS_PER_S, Pause, Terms, terms::PAUSE_MIN_NS};

/// A poll of a short pool should bring so many tokens; with twice that, the next comes sooner.
const GOOD_POLL: u64 = 8;
/// The pause between polls of a window that brings nothing grows by this part of the time for which it has brought nothing.
const POLL_GROWTH: u64 = 8;
/// The pause between polls of a window is at most this part of the time to its end: what is not granted then is granted to
/// nobody. A sliding window has more all the time, a fixed one only what comes back.
const LAST_PART_SLIDING: u64 = 4;
const LAST_PART_FIXED: u64 = 2;
/// The only gateway asks for each unit when it is there, or for all that have come within this time.
const SOLE_PAUSE_NS: u64 = 4_000_000;
/// Tokens go back after a time in which so many requests were expected and none came: the demand has gone elsewhere.
const IDLE_ARRIVALS: f64 = 16.0;
const IDLE_MIN_NS: u64 = 10_000_000;
/// While the pool is short, they go back after this time in any case.
const IDLE_NS: u64 = 500_000_000;
/// While it is not, they stay for this part of the horizon in any case: a machine that stands still for a moment has no requests.
const IDLE_PARTS: u64 = 8;
/// In horizons: what is further back says nothing about the rate.
const MAX_QUIET: f64 = 2.0;

impl Lease {
    /// How long a pool is left alone that is short, or that is a window too short for the request that was refused: other gateways
    /// may hand back to a window what it lacks, and no clock tells when. A bucket that is too short for one request only is
    /// asked again when it has filled, as the forecast says.
    pub(super) fn pace(
        &mut self,
        now_ns: u64,
        terms: &Terms,
        forecast: &Forecast,
        refused: Option<u64>,
        (rtt_ns, jitter): (u64, f64),
    ) -> Option<Pause> {
        let is_window = matches!(terms.algorithm, Algorithm::Fixed | Algorithm::Sliding);
        let least = match refused {
            _ if self.short => 0,
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
        // nobody else takes what comes: it is asked for when it is there
        let sole_ns = now_ns.saturating_add(sole_pause_ns(terms));
        let until_ns = match terms.algorithm {
            // a new window is open for everybody
            Algorithm::Fixed => until_ns.min(forecast.not_before_ns(terms, u64::MAX).max(now_ns)),
            Algorithm::Bucket => {
                let until_ns = if self.is_sole {
                    until_ns.min(sole_ns)
                } else {
                    until_ns
                };
                until_ns.max(forecast.not_before_ns(terms, 1))
            }
            Algorithm::Sliding if self.is_sole => {
                until_ns.min(forecast.not_before_ns(terms, least.max(1)).max(sole_ns))
            }
            _ => until_ns,
        };
        Some(Pause { until_ns, least })
    }

    fn longest_pause_ns(&self, now_ns: u64, terms: &Terms, forecast: &Forecast) -> u64 {
        let longest_ns = terms.longest_pause_ns();
        let last_part = match terms.algorithm {
            Algorithm::Fixed => LAST_PART_FIXED,
            Algorithm::Sliding => LAST_PART_SLIDING,
            _ => return longest_ns,
        };
        let barren_ns = now_ns.saturating_sub(self.got_ns);
        let left_ns = forecast.end_ns.saturating_sub(now_ns);
        longest_ns
            .max(barren_ns.checked_div(POLL_GROWTH).unwrap_or(0))
            .min(left_ns.checked_div(last_part).unwrap_or(0))
            .max(PAUSE_MIN_NS)
    }

    /// Whether to ask again by itself when a refusal ends: somebody keeps coming.
    pub fn polls(&self, now_ns: u64, terms: &Terms, until_ns: u64) -> bool {
        let pause_ns = until_ns.saturating_sub(now_ns);
        // the next window is for those that ask for it: the demand may have moved
        let is_next = terms.algorithm == Algorithm::Fixed
            && self.pool.is_none_or(|pool| until_ns >= pool.until_ns);
        terms.ahead && !is_next && self.rate * pause_ns as f64 / NS_PER_S >= 2.0
    }

    /// With fewer tokens the pool is short. From the only gateway nothing is withheld: its pool is short when it is empty.
    pub(super) fn short_below(&self, terms: &Terms) -> f64 {
        if self.is_sole {
            1.0
        } else {
            terms.short_below()
        }
    }

    /// Whether one more may wait for a call in flight: while the pool is short and others ask for it, no more than the last call
    /// brought.
    pub fn may_queue(&self, now_ns: u64, terms: &Terms, waiting: u64) -> bool {
        // of what is asked for every request, nobody but the store knows what has come back
        let is_short = || {
            let pool = self.pool(now_ns, terms);
            pool.is_some_and(|pool| pool < self.short_below(terms))
        };
        !terms.ahead || self.is_sole || waiting < self.last_got.max(1) || !is_short()
    }

    /// When to look again at a hand that holds tokens.
    pub fn look_again_ns(&self, now_ns: u64, horizon_ns: u64) -> u64 {
        now_ns.saturating_add(self.patience_ns(horizon_ns).min(horizon_ns))
    }

    /// How long tokens may lie idle: until it is certain that the demand has gone elsewhere, and no longer than a moment while
    /// others are refused.
    pub(super) fn patience_ns(&self, horizon_ns: u64) -> u64 {
        // the rate before it fell because nobody came
        let quiet = self.rate_at_ns.saturating_sub(self.arrived_ns) as f64 / horizon_ns as f64;
        let rate = self.rate * quiet.min(MAX_QUIET).exp();
        let expected_ns = (IDLE_ARRIVALS / rate.max(1.0) * NS_PER_S) as u64;
        if self.short {
            expected_ns.clamp(IDLE_MIN_NS, IDLE_NS).min(horizon_ns)
        } else {
            expected_ns.max(horizon_ns.div_euclid(IDLE_PARTS))
        }
    }
}

/// How long the only gateway leaves a spent pool alone, beside the time to the next unit: not at all, where units come slowly.
fn sole_pause_ns(terms: &Terms) -> u64 {
    let unit_ns = (1e3 / terms.rate) as u64;
    if unit_ns < SOLE_PAUSE_NS {
        SOLE_PAUSE_NS
    } else {
        0
    }
}
