//! The counters of all limits in bounded memory.
//!
//! A key in debt is never evicted for a fresh one, so flooding the table cannot clear a debt. A
//! slot is reassigned only when its bucket is full, which is also a fresh key's state.
//!
//! Each limit has a guaranteed part of the slots, and none can take them all (module `share`). A
//! fresh key that finds no slot shares one of its limit's `OVERFLOW_BUCKETS` overflow buckets,
//! selected by hash. Sharing is strict: the keys of one bucket together get what one key would, and
//! all keys without a slot at most 256 times that. A key that gets a slot later inherits the debt
//! of its overflow bucket, so it cannot spend its quota twice.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{
    attached::Attached,
    counters::LimitCounters,
    key::Key,
    log::{Logs, RingOwner, Rings},
    registry::{Registry, TooManyLimits},
    rule::{Limit, Rule},
    share::SharedCapacity,
    standing::Standing,
    table::{SlotOwner, Table},
    word_request::WordRequest,
};

/// The counters of all limits of a process, in memory bounded by `max_keys`.
#[derive(Debug)]
pub struct Store {
    pub(super) table: Table,
    /// How limits divide the slots of the table.
    slots: SharedCapacity,
    rings: Rings,
    pub(super) registry: Registry,
}

impl Store {
    /// A store for about `max_keys` keys of one limit, and half as many in the guaranteed parts of
    /// all limits (clamped to 1 to 10⁹). Takes 32 bytes of address space per key, which the system
    /// backs with memory as keys arrive. Aborts the process if there is no address space. Sliding
    /// logs use up to [`ENTRIES_PER_KEY`](super::log::ENTRIES_PER_KEY) · 16 more bytes per key.
    pub fn new(max_keys: usize) -> Store {
        Store {
            table: Table::new(max_keys),
            slots: SharedCapacity::for_keys(max_keys),
            rings: Rings::new(max_keys),
            registry: Registry::new(),
        }
    }

    /// Joins a limit to fresh counters.
    pub fn attach(&self, limit: &Limit) -> Result<Arc<Attached>, TooManyLimits> {
        let attached = self.registry.attach(limit, None)?;
        self.run(&attached);
        self.divide();
        Ok(attached)
    }

    /// Keys of a limit that certainly find room, whatever other limits hold; `None` while it is the
    /// only one of its kind.
    pub fn guaranteed_keys(&self, limit: &Attached) -> Option<u64> {
        let part = match &limit.rule {
            Rule::Words(_) => self.slots.guaranteed(),
            Rule::Logs(logs) => self.rings.guaranteed(logs),
        };
        (part < u64::MAX).then_some(part)
    }

    /// Gives the limit a guaranteed part from the next division on.
    pub(super) fn run(&self, limit: &Attached) {
        let occupied = limit.occupancy();
        let is_log = matches!(limit.rule, Rule::Logs(_));
        occupied.slots.set_running(!is_log);
        occupied.entries.set_running(is_log);
    }

    pub(super) fn divide(&self) {
        let all = self.registry.occupied();
        self.slots.divide(all.iter().map(|one| &one.slots));
        self.rings.divide(all.iter().map(|one| &one.entries));
    }

    /// The status of a ring of the counters `id`, if there is one.
    pub(super) fn look_at_ring(
        &self,
        id: u16,
        key: Option<Key>,
        logs: &Logs,
        ask: &WordRequest,
    ) -> Option<Standing> {
        self.rings.look((id, RingOwner::own(key)), logs, ask)
    }

    /// Drops the entries of a ring of the counters `id`.
    pub(super) fn drop_ring(&self, id: u16, key: Option<Key>) {
        self.rings.clear((id, RingOwner::own(key)));
    }

    /// Which slots a fresh key of these counters may take: unowned ones if its limit may grow, and
    /// those whose word carries no information at `now_ns`.
    fn takes<'s>(
        &'s self,
        state: &'s LimitCounters,
        now_ns: u64,
    ) -> impl Fn(Option<SlotOwner>, u64) -> bool + 's {
        let occupied = &state.occupancy;
        let may_grow = self.slots.may_grow(&occupied.slots, 1);
        move |owner, word| {
            let Some(owner) = owner else { return may_grow };
            self.registry.by_id(owner.limit).is_some_and(|state| {
                state.is_idle(now_ns, owner.spread, word)
                    && (may_grow
                        || self
                            .slots
                            .may_replace(&occupied.slots, &state.occupancy.slots))
            })
        }
    }

    /// The limit's own slots whose words carry no information.
    fn gives<'s>(
        &'s self,
        state: &'s LimitCounters,
        now_ns: u64,
    ) -> impl Fn(Option<SlotOwner>, u64) -> bool + 's {
        let occupied = &state.occupancy;
        move |owner, word| {
            let Some(owner) = owner else { return false };
            self.registry.by_id(owner.limit).is_some_and(|state| {
                Arc::ptr_eq(&state.occupancy, occupied) && state.is_idle(now_ns, owner.spread, word)
            })
        }
    }

    fn count(&self, limit: &LimitCounters, previous: Option<u16>) {
        limit.keys.fetch_add(1, Relaxed);
        self.slots.grow(&limit.occupancy.slots, 1);
        if let Some(previous) = previous {
            self.count_gone(previous);
        }
    }

    fn count_gone(&self, id: u16) {
        if let Some(state) = self.registry.by_id(id) {
            state.keys.fetch_sub(1, Relaxed);
            state.evictions.fetch_add(1, Relaxed);
            self.slots.shrink(&state.occupancy.slots, 1);
        }
    }
}

mod admit;
mod ring;
mod word;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod every_algorithm;
#[cfg(test)]
mod settling;
