//! How a limit is counted, and the times and amounts that follow from it: the same for every gateway.

use std::time::Duration;

/// How the store counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Token bucket: refills all the time.
    Bucket,
    /// Fixed window.
    Fixed,
    /// Sliding window from two counters.
    Sliding,
    /// Sliding log: exact, never ahead.
    Log,
    /// Requests in flight: no tokens but slots, which come back (see the module `holding`).
    Slots,
}

/// One quota of a shared limit, as lease and store want it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// How the store counts.
    pub algorithm: Algorithm,
    /// The most that can be had at once (B).
    pub capacity: u64,
    /// A bucket's time to fill, else the window (W), in µs.
    pub span_us: u64,
    /// Tokens per µs.
    pub rate: f64,
    /// Whether tokens may be borrowed ahead; otherwise every request is asked for.
    pub ahead: bool,
}

/// Pool below this share of the capacity is short: asked in turns, not by every request.
const SHORT_BUCKET: f64 = 0.05;
const SHORT_WINDOW: f64 = 0.01;
/// The horizon is this share of the span, within its bounds.
const HORIZON: f64 = 0.5;
/// Nothing refills in a fixed window: what lies idle where the demand was is missing where it is now, until the end.
const HORIZON_WINDOW: f64 = 0.15;
const HORIZON_MIN_NS: u64 = 20_000_000;
const HORIZON_MAX_NS: u64 = 20_000_000_000;
/// The shortest and longest pause between polls of a short pool.
pub(super) const PAUSE_MIN_NS: u64 = 1_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// What one gateway may hold ahead: what the limit grants in so many horizons, and as much as this in any case.
const AHEAD_HORIZONS: u64 = 4;
const AHEAD_LEAST: u64 = 8;
/// The shortest generation.
const GENERATION_MIN_NS: u64 = 250_000_000;

impl Terms {
    /// `amount` per `period`, at most `burst` at once (which windows do not have).
    pub fn new(
        algorithm: Algorithm,
        amount: u64,
        period: Duration,
        burst: u64,
        ahead: bool,
    ) -> Terms {
        let period_us = period.as_micros() as f64;
        let rate = amount as f64 / period_us.max(1.0);
        let (capacity, span) = match algorithm {
            Algorithm::Bucket => (burst, burst as f64 / rate),
            _ => (amount, period_us),
        };
        Terms {
            algorithm,
            capacity: capacity.max(1),
            // a float that is cast is brought within bounds
            span_us: (span.ceil() as u64).max(1),
            rate,
            ahead: ahead && algorithm != Algorithm::Log,
        }
    }

    /// So many requests in flight. `kept`: a slot that comes back is kept for the next request for a moment.
    pub fn slots(limit: u64, kept: bool) -> Terms {
        Terms {
            algorithm: Algorithm::Slots,
            capacity: limit.max(1),
            span_us: 1,
            rate: 0.0,
            ahead: kept,
        }
    }

    /// Whether units that were granted to a request and not used may stay in hand: a window takes them back with its end. Behind those
    /// of a bucket, which are on no books, it would refill.
    pub fn banks_grants(&self) -> bool {
        self.ahead && matches!(self.algorithm, Algorithm::Fixed | Algorithm::Sliding)
    }

    /// A part of these: at least one token.
    pub fn part(self, share: f64) -> Terms {
        let capacity = (self.capacity as f64 * share) as u64;
        Terms {
            capacity: capacity.max(1),
            rate: self.rate * share,
            ..self
        }
    }

    pub(super) fn span_ns(&self) -> f64 {
        self.span_us as f64 * 1e3
    }

    /// H: how far ahead tokens are borrowed, and the memory of the rate of arrivals.
    pub fn horizon_ns(&self, rtt_ns: u64) -> u64 {
        let least = HORIZON_MIN_NS
            .max(rtt_ns.saturating_mul(4))
            .min(HORIZON_MAX_NS);
        let part = match self.algorithm {
            Algorithm::Fixed => HORIZON_WINDOW,
            _ => HORIZON,
        };
        ((part * self.span_ns()) as u64).clamp(least, HORIZON_MAX_NS)
    }

    /// τ: the length of a generation in the store's time, for buckets. It depends on the limit alone, so that all gateways
    /// agree on it whatever their distance to the store.
    pub fn generation_us(&self) -> u64 {
        self.horizon_ns(0)
            .saturating_mul(2)
            .max(GENERATION_MIN_NS)
            .checked_div(1000)
            .unwrap_or(1)
    }

    /// Tokens that fill within this time.
    pub fn refill(&self, ns: u64) -> f64 {
        self.rate * ns as f64 / 1e3
    }

    /// A pool with fewer tokens is short. Where every request is asked for, only an empty one is: nothing is withheld.
    pub(super) fn short_below(&self) -> f64 {
        let share = match self.algorithm {
            _ if !self.ahead => return 1.0,
            Algorithm::Bucket => SHORT_BUCKET,
            _ => SHORT_WINDOW,
        };
        (share * self.capacity as f64).max(1.0)
    }

    /// The most that one gateway holds ahead: no more than the limit grants in four horizons. What a gateway holds that is
    /// killed is lost for the others as if it were spent.
    pub fn most_ahead(&self) -> u64 {
        let horizon_ns = self.horizon_ns(0).saturating_mul(AHEAD_HORIZONS);
        let most = self.refill(horizon_ns).ceil() as u64;
        most.max(AHEAD_LEAST).min(self.capacity)
    }

    pub(super) fn longest_pause_ns(&self) -> u64 {
        let share = match self.algorithm {
            Algorithm::Bucket => 0.05,
            Algorithm::Fixed => 0.1,
            _ => 0.02,
        };
        ((share * self.span_ns()) as u64).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS)
    }
}
