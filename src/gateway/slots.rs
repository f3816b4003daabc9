//! The resources that an admitted request holds: slots of concurrency limits until the server
//! finishes, and queue places until its turn.
//!
//! Every exit releases them: the guard drops with the response body or with a panic. If the client
//! leaves while the server works, the task that waits for the server drops it
//! ([`RequestSlots::hold_until_done`]).

use std::sync::Arc;

use super::{active_config::ActiveConfig, applied_limit::AppliedLimit, plan::LimitRule};
use crate::{
    budget::SlotGuard,
    limit::{Charge, ChargeLocation, Key},
    overload::OverloadPermit,
    telemetry::handles,
    upstream::abandoned::AbandonedExchange,
};

/// Everything that one request holds. Usually empty, and then without an allocation.
#[derive(Debug, Default)]
pub(super) struct RequestSlots {
    held: Vec<(Arc<ActiveConfig>, HeldSlot)>,
    lent: Vec<SlotGuard>,
    /// The place among all requests in flight.
    place: Option<OverloadPermit>,
}

/// A charge on one limit, released with the request.
#[derive(Debug)]
pub(super) struct HeldSlot {
    rule: Arc<LimitRule>,
    tier: usize,
    key: Option<Key>,
    cost: u64,
    held: ChargeLocation,
    charged_at_ns: u64,
}

impl HeldSlot {
    pub(super) fn of(applied: &AppliedLimit<'_>, now_ns: u64, held: ChargeLocation) -> Self {
        Self {
            rule: Arc::clone(&applied.limit.rule),
            tier: applied.tier(),
            key: applied.key(),
            cost: applied.cost(),
            held,
            charged_at_ns: now_ns,
        }
    }
}

impl RequestSlots {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.lent.is_empty() && self.place.is_none()
    }

    /// Holds the request's place among all requests in flight.
    pub(super) fn occupy(&mut self, place: OverloadPermit) {
        self.place = Some(place);
    }

    pub(super) fn add(&mut self, active: &Arc<ActiveConfig>, slot: HeldSlot) {
        self.held.push((Arc::clone(active), slot));
    }

    /// Holds slots of limits that gateways share.
    pub(super) fn add_shared(&mut self, mut lent: Vec<SlotGuard>) {
        if self.lent.is_empty() {
            self.lent = lent;
        } else {
            self.lent.append(&mut lent);
        }
    }

    /// Spawns a task that holds everything until the server finishes these exchanges. The
    /// upstream's `abandoned_timeout` bounds it.
    pub(super) fn hold_until_done(
        self,
        abandoned: Vec<AbandonedExchange>,
        counted: handles::GaugeGuard,
    ) {
        tokio::task::spawn_local(async move {
            for exchange in abandoned {
                exchange.ended().await;
            }
            drop((self, counted));
        });
    }

    /// Spends the queue places, so that they are not released. Slots stay held.
    pub(super) fn turn_has_come(&mut self) {
        self.held.retain(|(_, slot)| slot.rule.holds_slots);
    }
}

impl Drop for RequestSlots {
    fn drop(&mut self) {
        for (active, slot) in &self.held {
            let charge = Charge {
                limit: &slot.rule.buckets,
                tier: slot.tier,
                key: slot.key,
                cost: slot.cost,
                max_delay_ns: slot.rule.max_delay_ns,
            };
            active
                .process
                .store
                .release(slot.charged_at_ns, &charge, slot.held);
        }
    }
}
