//! One request's demand on one limit.

use super::{attached::Attached, key::Key, word_request::WordRequest};

/// One request's demand on one limit.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// The limit, as attached to the store that decides.
    pub limit: &'a Attached,
    /// Index into the limit's quotas; an index out of range means 0, the default tier.
    pub tier: usize,
    /// The key whose bucket is charged; `None` is the limit's single bucket for all.
    pub key: Option<Key>,
    /// Units. 0 is always admitted and changes nothing; more than the tier's capacity is never
    /// admitted.
    pub cost: u64,
    /// How long the request may be held until its turn; 0 means not at all. Applies to buckets
    /// only, and must be equal in every charge of one limit. A TAT further ahead than the burst,
    /// this delay and 10 s counts as one from before a clock step.
    pub max_delay_ns: u64,
}

impl Charge<'_> {
    #[inline]
    pub(super) fn ask(&self, now_ns: u64, spread: u64) -> WordRequest {
        WordRequest {
            tier: self.tier,
            now_ns,
            cost: self.cost,
            max_delay_ns: self.max_delay_ns,
            spread,
        }
    }
}
