//! What an admitted request holds of its limits, and gives back: a slot of a concurrency limit until the server's work has
//! ended, a place in a queue until its turn has come.
//!
//! Given back on every way out: the guard is dropped with the response's body, with a panic, and where the client leaves
//! while the server is at work, with the task that waits for the server ([`Slots::outlast`]).

use std::sync::Arc;

use super::{applied_limit::AppliedLimit, plan::LimitRule, shared::Shared};
use crate::{
    budget::Lent,
    limit::{Charge, Held, Key},
    overload::Place,
    telemetry::handles,
    upstream::abandoned::Abandoned,
};

/// What one request holds. Empty, and without an allocation, for most.
#[derive(Debug, Default)]
pub(super) struct Slots {
    held: Vec<(Arc<Shared>, Slot)>,
    lent: Vec<Lent>,
    /// Among all requests that are under way.
    place: Option<Place>,
}

/// What it holds of one limit.
#[derive(Debug)]
pub(super) struct Slot {
    rule: Arc<LimitRule>,
    tier: usize,
    key: Option<Key>,
    cost: u64,
    held: Held,
    charged_at_ns: u64,
}

impl Slot {
    pub(super) fn of(applied: &AppliedLimit<'_>, now_ns: u64, held: Held) -> Self {
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

impl Slots {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.lent.is_empty() && self.place.is_none()
    }

    /// Among all requests that are under way.
    pub(super) fn occupy(&mut self, place: Place) {
        self.place = Some(place);
    }

    pub(super) fn add(&mut self, shared: &Arc<Shared>, slot: Slot) {
        self.held.push((Arc::clone(shared), slot));
    }

    /// Of limits that gateways share.
    pub(super) fn lend(&mut self, mut lent: Vec<Lent>) {
        if self.lent.is_empty() {
            self.lent = lent;
        } else {
            self.lent.append(&mut lent);
        }
    }

    /// Holds everything until the server's work on these exchanges has ended, in a task of its own. Bounded by the upstream's
    /// `abandoned_timeout`.
    pub(super) fn outlast(self, abandoned: Vec<Abandoned>, counted: handles::Held) {
        tokio::task::spawn_local(async move {
            for exchange in abandoned {
                exchange.ended().await;
            }
            drop((self, counted));
        });
    }

    /// Its turn has come: a place in a queue is spent and no longer given back, a slot stays held.
    pub(super) fn turn_has_come(&mut self) {
        self.held.retain(|(_, slot)| slot.rule.holds_slots);
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for (shared, slot) in &self.held {
            let charge = Charge {
                limit: &slot.rule.buckets,
                tier: slot.tier,
                key: slot.key,
                cost: slot.cost,
                max_delay_ns: slot.rule.max_delay_ns,
            };
            shared
                .process
                .store
                .release(slot.charged_at_ns, &charge, slot.held);
        }
    }
}
