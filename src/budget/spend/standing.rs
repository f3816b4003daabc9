//! The status of a shared limit for clients: how much is left, and when to retry.

use super::{Budget, ClaimState, DecisionSource, SharedClaim, Taken};
use crate::{
    budget::{key_table::KeyCell, lease::LeaseAlgorithm},
    limit::{ChargeLocation, Standing, slot_counters::RETRY_NS},
};

impl Budget {
    /// The status of a limit. An estimate for clients, never part of a decision.
    pub(super) fn standing(&self, now_ns: u64, claim: &SharedClaim<'_>, taken: Taken) -> Standing {
        let terms = &claim.limit.tier(claim.tier).terms;
        if terms.algorithm == LeaseAlgorithm::Slots {
            return self.standing_of_slots(terms.capacity, taken);
        }
        let capacity = terms.capacity;
        let cell = taken.place.map(|place| self.key_table.cell(place));
        let forecast = cell.map(|cell| cell.forecast()).unwrap_or_default();
        let end_ns = forecast.end_ns;
        // the whole pool at the last reply: any gateway may spend it
        let left = |cell: KeyCell<'_>| match terms.algorithm {
            LeaseAlgorithm::Log => cell.pool(),
            _ => forecast.left(now_ns, terms),
        };
        let remaining = match (taken.what, cell) {
            (ClaimState::Never, _) => 0,
            // some is available, but not enough
            (ClaimState::Refused { .. }, Some(cell))
                if taken.source != DecisionSource::Fallback =>
            {
                let held = cell.held(now_ns).0.iter().sum::<u64>();
                held.saturating_add(left(cell))
                    .min(claim.cost.saturating_sub(1))
            }
            (ClaimState::Refused { .. }, Some(cell)) => {
                cell.left_alone(now_ns).min(claim.cost.saturating_sub(1))
            }
            (ClaimState::Refused { .. }, None) => 0,
            (ClaimState::Alone, Some(cell)) => cell.left_alone(now_ns),
            // the pool is not known yet
            (ClaimState::Slack, _) => capacity.saturating_sub(claim.cost),
            (_, Some(cell)) => {
                let held = cell.held(now_ns).0.iter().sum::<u64>();
                held.saturating_add(left(cell))
            }
            (_, None) => capacity,
        };
        let remaining = remaining.min(capacity);
        let refill_ns = |tokens: u64| (tokens as f64 * 1e3 / terms.rate).ceil() as u64;
        let window_ns = end_ns.saturating_sub(now_ns);
        let (next_unit_ns, reset_ns) = match terms.algorithm {
            _ if remaining == capacity => (0, 0),
            LeaseAlgorithm::Bucket => (refill_ns(1), refill_ns(capacity - remaining)),
            LeaseAlgorithm::Fixed => (window_ns, window_ns),
            // at the latest when this window no longer counts
            LeaseAlgorithm::Sliding => (window_ns, window_ns.saturating_add(terms.span_us * 1000)),
            LeaseAlgorithm::Log | LeaseAlgorithm::Slots => {
                (terms.span_us * 1000, terms.span_us * 1000)
            }
        };
        let wait_ns = match taken.what {
            ClaimState::Refused { until_ns } => Some(until_ns.saturating_sub(now_ns).max(1)),
            _ => None,
        };
        let never = taken.what == ClaimState::Never;
        Standing {
            capacity,
            remaining,
            retry_after_ns: wait_ns,
            denied: wait_ns.is_some() || never,
            never,
            next_unit_ns: wait_ns.unwrap_or(next_unit_ns),
            reset_ns: reset_ns.max(wait_ns.unwrap_or(0)),
            delay_ns: 0,
            held: ChargeLocation::Nowhere,
        }
    }

    /// The same for slots, which do not return with time.
    fn standing_of_slots(&self, capacity: u64, taken: Taken) -> Standing {
        let never = taken.what == ClaimState::Never;
        let refused = matches!(taken.what, ClaimState::Refused { .. });
        let slots = taken.place.map(|place| self.key_table.slots(place));
        let left = slots.map_or(capacity, |slots| {
            slots.free().saturating_add(slots.elsewhere())
        });
        Standing {
            capacity,
            remaining: if refused || never {
                0
            } else {
                left.min(capacity)
            },
            retry_after_ns: refused.then_some(RETRY_NS),
            denied: refused || never,
            never,
            next_unit_ns: 0,
            reset_ns: 0,
            delay_ns: 0,
            held: ChargeLocation::Nowhere,
        }
    }
}
