//! The algorithms by which a limit can count.

/// How a limit counts. See `docs/algorithms.md` for what a client sees of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Token bucket, kept as one timestamp per key: `amount` per `period`, at most `burst` at once.
    TokenBucket,
    /// Another name for the token bucket.
    Gcra,
    /// Token bucket without a delay; with one, a queue of `burst` places including the request in
    /// service.
    LeakyBucket,
    /// At most `amount` in each `period`; the count resets at the end of each. Ignores the burst.
    FixedWindow,
    /// About `amount` at most in any `period`, from two counters. Ignores the burst.
    SlidingWindow,
    /// At most `amount` in any `period`, exactly, from a log of at most 10,000. Ignores the burst.
    SlidingLog,
    /// At most this many in flight ([`Quota::slots`]); return them with [`Store::release`].
    Concurrency,
}

impl Algorithm {
    /// Whether the quota has a burst beside the rate.
    pub fn has_burst(self) -> bool {
        matches!(
            self,
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket
        )
    }
}
