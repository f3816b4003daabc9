//! What an algorithm receives: the demand of a request, or usage that a key brings along.

/// A `now` less than this behind the latest one is taken for a slow thread, not for a clock step.
/// So a `now` must be used within 10 s of being read.
pub const STEP_BACK_NS: u64 = 10_000_000_000;

/// A request's demand on a word.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordRequest {
    pub(super) tier: usize,
    pub(super) now_ns: u64,
    pub(super) cost: u64,
    pub(super) max_delay_ns: u64,
    /// 48 bits of the key's hash, which offset its windows from other keys'.
    pub(super) spread: u64,
}

/// Units spent at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpentUnits {
    pub(super) at_ns: u64,
    pub(super) units: u64,
}

impl WordRequest {
    /// A demand of no units, which any word admits.
    pub(super) fn zero_cost(tier: usize, now_ns: u64, spread: u64) -> WordRequest {
        WordRequest {
            tier,
            now_ns,
            cost: 0,
            max_delay_ns: 0,
            spread,
        }
    }
}
