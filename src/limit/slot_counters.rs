//! Concurrency limits: the number of requests in flight, as one count per key.
//!
//! The word is the number of slots in use. Admission takes the request's cost in slots. The caller
//! returns them exactly once, when the request ends ([`Store::release`](super::Store::release)). No
//! wait is certain to help, so a denial advertises the constant [`RETRY_NS`]. Bound: exact; the
//! limit is never exceeded. A word of 0 carries no information, and a key that holds a slot is
//! never evicted.

use super::{ChargeLocation, Quota, QuotaError, Standing, word_request::WordRequest};

/// Retry time of a denial: 1 s. Slots return when other requests end, which nothing can predict.
pub const RETRY_NS: u64 = 1_000_000_000;

/// The slots of one limit, by tier. A key keeps the slots that it holds when its tier changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotCounters {
    slots: Box<[u64]>,
    default: u64,
}

impl SlotCounters {
    pub(super) fn new(quotas: &[Quota]) -> Result<SlotCounters, QuotaError> {
        quotas.iter().try_for_each(Quota::check_slots)?;
        let default = quotas.first().ok_or(QuotaError::NoQuota)?.amount.get();
        let slots = quotas.iter().map(|quota| quota.amount.get()).collect();
        Ok(SlotCounters { slots, default })
    }

    pub(super) fn tiers(&self) -> usize {
        self.slots.len()
    }

    /// A tier that does not exist is treated as the default tier.
    fn slots(&self, tier: usize) -> u64 {
        self.slots.get(tier).copied().unwrap_or(self.default)
    }

    pub(super) fn charge(&self, ask: &WordRequest, used: u64) -> Result<u64, u64> {
        let after = used.saturating_add(ask.cost);
        if ask.cost == 0 || after <= self.slots(ask.tier) {
            Ok(after)
        } else {
            Err(used)
        }
    }

    pub(super) fn refund(&self, ask: &WordRequest, used: u64) -> u64 {
        used.saturating_sub(ask.cost)
    }

    pub(super) fn standing(&self, ask: &WordRequest, used: u64) -> Standing {
        let capacity = self.slots(ask.tier);
        let never = ask.cost > capacity;
        let denied = ask.cost > 0 && used.saturating_add(ask.cost) > capacity;
        Standing {
            capacity,
            remaining: capacity.saturating_sub(used),
            retry_after_ns: (denied && !never).then_some(RETRY_NS),
            denied,
            never,
            next_unit_ns: 0,
            reset_ns: 0,
            delay_ns: 0,
            held: ChargeLocation::Nowhere,
        }
    }
}
