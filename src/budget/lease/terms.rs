//! How a limit is counted, and the times and amounts derived from it; every gateway computes the
//! same.

use std::time::Duration;

/// The algorithm by which Redis counts.
pub use crate::limit::SharedMethod as LeaseAlgorithm;

/// One quota of a shared limit, as leases and the store use it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeaseTerms {
    /// The store's algorithm.
    pub algorithm: LeaseAlgorithm,
    /// Most units available at once (B).
    pub capacity: u64,
    /// A bucket's time to fill, or the window (W), in µs.
    pub span_us: u64,
    /// Tokens per µs.
    pub rate: f64,
    /// Whether tokens may be leased ahead; otherwise every request is a call.
    pub ahead: bool,
}

/// A pool below this share of the capacity is short: gateways poll it instead of calling for every
/// request.
const SHORT_BUCKET: f64 = 0.05;
const SHORT_WINDOW: f64 = 0.01;
/// The horizon is this share of the span, within its bounds.
const HORIZON: f64 = 0.5;
/// A fixed window never refills: tokens left idle where the demand was are missing elsewhere until
/// the window ends.
const HORIZON_WINDOW: f64 = 0.15;
const HORIZON_MIN_NS: u64 = 20_000_000;
const HORIZON_MAX_NS: u64 = 20_000_000_000;
/// The shortest and longest pause between polls of a short pool.
pub(super) const PAUSE_MIN_NS: u64 = 1_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// Most tokens that one gateway holds ahead: what the limit grants in this many horizons, and at
/// least the second number.
const AHEAD_HORIZONS: u64 = 4;
const AHEAD_LEAST: u64 = 8;
/// The shortest generation.
const GENERATION_MIN_NS: u64 = 250_000_000;

impl LeaseTerms {
    /// `amount` per `period`, at most `burst` at once (which windows do not have).
    pub fn new(
        algorithm: LeaseAlgorithm,
        amount: u64,
        period: Duration,
        burst: u64,
        ahead: bool,
    ) -> LeaseTerms {
        let period_us = period.as_micros() as f64;
        let rate = amount as f64 / period_us.max(1.0);
        let (capacity, span) = match algorithm {
            LeaseAlgorithm::Bucket => (burst, burst as f64 / rate),
            _ => (amount, period_us),
        };
        LeaseTerms {
            algorithm,
            capacity: capacity.max(1),
            // a float-to-integer cast saturates
            span_us: (span.ceil() as u64).max(1),
            rate,
            ahead: ahead && algorithm != LeaseAlgorithm::Log,
        }
    }

    /// A limit on requests in flight. `kept`: a returned slot is kept briefly for the next request.
    pub fn slots(limit: u64, kept: bool) -> LeaseTerms {
        LeaseTerms {
            algorithm: LeaseAlgorithm::Slots,
            capacity: limit.max(1),
            span_us: 1,
            rate: 0.0,
            ahead: kept,
        }
    }

    /// Whether units granted to a request and not used may stay local: a window reclaims them at
    /// its end. A bucket has not recorded them as leased and would refill behind them.
    pub fn banks_grants(&self) -> bool {
        self.ahead
            && matches!(
                self.algorithm,
                LeaseAlgorithm::Fixed | LeaseAlgorithm::Sliding
            )
    }

    /// A share of these terms: at least one token.
    pub fn part(self, share: f64) -> LeaseTerms {
        let capacity = (self.capacity as f64 * share) as u64;
        LeaseTerms {
            capacity: capacity.max(1),
            rate: self.rate * share,
            ..self
        }
    }

    pub(super) fn span_ns(&self) -> f64 {
        self.span_us as f64 * 1e3
    }

    /// H: how far ahead tokens are leased, and the memory of the arrival rate.
    pub fn horizon_ns(&self, rtt_ns: u64) -> u64 {
        let least = HORIZON_MIN_NS
            .max(rtt_ns.saturating_mul(4))
            .min(HORIZON_MAX_NS);
        let part = match self.algorithm {
            LeaseAlgorithm::Fixed => HORIZON_WINDOW,
            _ => HORIZON,
        };
        ((part * self.span_ns()) as u64).clamp(least, HORIZON_MAX_NS)
    }

    /// τ: the length of a generation in the store's time, for buckets. It depends on the limit
    /// alone, so that all gateways agree on it whatever their distance to the store.
    pub fn generation_us(&self) -> u64 {
        self.horizon_ns(0)
            .saturating_mul(2)
            .max(GENERATION_MIN_NS)
            .checked_div(1000)
            .unwrap_or(1)
    }

    /// Tokens that refill within this time.
    pub fn refill(&self, ns: u64) -> f64 {
        self.rate * ns as f64 / 1e3
    }

    /// A pool with fewer tokens is short. A strict limit's pool is short only when it is empty.
    pub(super) fn short_below(&self) -> f64 {
        let share = match self.algorithm {
            _ if !self.ahead => return 1.0,
            LeaseAlgorithm::Bucket => SHORT_BUCKET,
            _ => SHORT_WINDOW,
        };
        (share * self.capacity as f64).max(1.0)
    }

    /// Most tokens that one gateway holds ahead: at most what the limit grants in four horizons. A
    /// killed gateway's tokens are lost to the others as if they were spent.
    pub fn most_ahead(&self) -> u64 {
        let horizon_ns = self.horizon_ns(0).saturating_mul(AHEAD_HORIZONS);
        let most = self.refill(horizon_ns).ceil() as u64;
        most.max(AHEAD_LEAST).min(self.capacity)
    }

    pub(super) fn longest_pause_ns(&self) -> u64 {
        let share = match self.algorithm {
            LeaseAlgorithm::Bucket => 0.05,
            LeaseAlgorithm::Fixed => 0.1,
            _ => 0.02,
        };
        ((share * self.span_ns()) as u64).clamp(PAUSE_MIN_NS, PAUSE_MAX_NS)
    }
}
