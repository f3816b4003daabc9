//! A key with a limit on requests in flight: which requests get a slot, and when this gateway
//! declares its slots to Redis.

use std::{collections::VecDeque, mem};

use super::{
    fallback::most_alone,
    key::{CallInFlight, KeyCalls, KeyContext, LeasedKey},
    message::{KeeperOutcome, Waiter},
    redis_clients::Event,
};
use crate::budget::{
    key_table::{SlotCell, SlotGuard},
    lease::Reply,
    slot_lease::{LIFE_NS, SlotLease},
};

/// A key with a lease of slots.
pub(super) struct SlotKey {
    calls: KeyCalls,
    slot_lease: SlotLease,
    refuse_until_ns: u64,
    /// The time of the last request.
    asked_ns: u64,
    /// Its contribution of free slots to the gauge.
    counted: u64,
}

impl LeasedKey for SlotKey {
    fn calls(&self) -> &KeyCalls {
        &self.calls
    }

    fn calls_mut(&mut self) -> &mut KeyCalls {
        &mut self.calls
    }

    fn ask(&mut self, at: &mut KeyContext<'_>, waiter: Waiter) {
        self.asked_ns = at.now_ns;
        if at.slots().take(at.now_ns, waiter.cost).is_ok() {
            self.lend(at, waiter);
        } else if at.now_ns < self.refuse_until_ns {
            at.answer(waiter, KeeperOutcome::Refused);
        } else if at.clients.is_open(self.calls.shard) {
            at.answer(waiter, KeeperOutcome::Alone);
        } else {
            self.calls.queue.push_back(waiter);
            if self.calls.flight.is_none() {
                self.call(at, 0);
            }
        }
    }

    fn noticed(&mut self, at: &mut KeyContext<'_>) -> bool {
        let free = at.slots().free();
        let (terms, gateways) = (self.calls.terms(), at.clients.gateways());
        if self.slot_lease.freed(at.now_ns, &terms, gateways, free) {
            return self.look(at, false);
        }
        true
    }

    fn replied(
        &mut self,
        at: &mut KeyContext<'_>,
        event: &Event,
        reply: &Reply,
        flight: Option<CallInFlight>,
    ) {
        let (jitter, gateways) = (at.clients.jitter(), at.clients.gateways());
        let (now_ns, slots) = (at.now_ns, at.slots());
        let terms = self.calls.terms();
        let lease = &mut self.slot_lease;
        let slot_reply = lease.replied(now_ns, event.sent_ns, event.id, reply, &terms, jitter);
        let Some(slot_reply) = slot_reply else { return };
        self.calls
            .limit
            .metrics
            .granted
            .increment(slot_reply.granted);
        self.refuse_until_ns = slot_reply.refuse_until_ns;
        slots.know(
            self.slot_lease.mine(),
            reply.pool,
            slot_reply.refuse_until_ns,
        );
        self.prepare_alone(slots, gateways);
        // the pool before the grants: the store granted in this order
        let (mut whole, mut granted) = (
            slot_reply.granted.saturating_add(reply.pool),
            slot_reply.granted,
        );
        let asked = flight.map(|flight| flight.waiters).unwrap_or_default();
        let mut rest = VecDeque::new();
        for waiter in asked {
            if waiter.cost <= whole.min(granted) {
                (whole, granted) = (whole - waiter.cost, granted - waiter.cost);
                self.lend(at, waiter);
            } else {
                rest.push_back((waiter, true));
            }
        }
        slots.add(granted, slot_reply.good_until_ns);
        let queue = mem::take(&mut self.calls.queue);
        rest.extend(queue.into_iter().map(|waiter| (waiter, false)));
        for (waiter, was_asked) in rest {
            // for a strict limit only the store knows which slots were returned
            let may_fit = !terms.ahead || waiter.cost <= reply.pool;
            if slots.take(now_ns, waiter.cost).is_ok() {
                self.lend(at, waiter);
            } else if !was_asked && may_fit {
                self.calls.queue.push_back(waiter);
            } else {
                at.answer(waiter, KeeperOutcome::Refused);
            }
        }
        if !self.calls.queue.is_empty() {
            self.call(at, 0);
        }
    }

    /// Declares the slots again at once.
    fn lost(&mut self, at: &mut KeyContext<'_>) {
        if self.calls.flight.is_none() {
            self.call(at, 0);
        }
    }

    fn tell(&mut self, at: &mut KeyContext<'_>) {
        self.call(at, 0);
    }

    fn look(&mut self, at: &mut KeyContext<'_>, _may_remember: bool) -> bool {
        if self.calls.flight.is_some() {
            return true;
        }
        let (now_ns, slots) = (at.now_ns, at.slots());
        let (free, alone) = (slots.free(), slots.used_alone());
        let (terms, gateways) = (self.calls.terms(), at.clients.gateways());
        let back = self.slot_lease.surplus(now_ns, &terms, gateways, free);
        let is_open = at.clients.is_open(self.calls.shard);
        if !is_open && self.slot_lease.is_due(now_ns, back, alone) {
            self.call(at, back);
            return true;
        }
        !self.slot_lease.is_idle(now_ns, self.asked_ns, alone)
    }

    fn next_look_ns(&mut self, at: &mut KeyContext<'_>) -> u64 {
        let (now_ns, slots) = (at.now_ns, at.slots());
        let (free, alone) = (slots.free(), slots.used_alone());
        let (terms, gateways) = (self.calls.terms(), at.clients.gateways());
        // if some slots are kept, a look is planned anyway
        if free == 0 || self.slot_lease.keeps_nothing(now_ns, &terms, gateways) {
            slots.listen();
        }
        let gauge = &self.calls.limit.metrics.in_hand;
        gauge.increment(free as f64 - self.counted as f64);
        self.counted = free;
        if at.clients.is_open(self.calls.shard) {
            // no declaration is possible now; free slots stay available to the next request
            return now_ns.saturating_add(LIFE_NS / 10);
        }
        let lease = &self.slot_lease;
        lease.look_again_ns(now_ns, &terms, gateways, (free, alone))
    }

    /// Slots in use become free when their declaration expires.
    fn hand_back(&mut self, at: &mut KeyContext<'_>) -> u64 {
        self.calls.flight = None;
        let free = at.slots().free();
        let alone = at.slots().used_alone();
        if !self.slot_lease.is_due(at.now_ns, free, alone) {
            return 0;
        }
        self.call(at, free);
        free
    }

    fn hide(&self) {
        let metrics = &self.calls.limit.metrics;
        metrics.keys.decrement(1.0);
        metrics.in_hand.decrement(self.counted as f64);
    }
}

impl SlotKey {
    /// A key in use for the first time.
    pub(super) fn new(at: &KeyContext<'_>, calls: KeyCalls) -> SlotKey {
        let key = SlotKey {
            calls,
            slot_lease: SlotLease::default(),
            refuse_until_ns: 0,
            asked_ns: at.now_ns,
            counted: 0,
        };
        key.prepare_alone(at.slots(), at.clients.gateways());
        key
    }

    /// Declares the slots held, requests more for the waiters, and gives back `surplus` free ones.
    fn call(&mut self, at: &mut KeyContext<'_>, surplus: u64) {
        if !self.calls.may_call(at) {
            return;
        }
        let slots = at.slots();
        let (waiters, need) = self.calls.begin();
        let units = waiters.iter().map(|waiter| waiter.cost).sum();
        if surplus > 0 {
            // first: a request that arrives in between must not be refused a slot that is on its
            // way back
            self.refuse_until_ns = 0;
            slots.forget_refusal();
        }
        let back = slots.withdraw(surplus);
        self.calls.limit.metrics.returned.increment(back);
        let id = at.clients.number();
        let alone = slots.used_alone();
        let declared = self.slot_lease.declare(at.now_ns, id, back, alone, units);
        let arguments = [
            at.clients.id().to_owned(),
            self.calls.terms().capacity.to_string(),
            declared.held.to_string(),
            need.to_string(),
            (LIFE_NS / 1000).to_string(),
            id.to_string(),
        ];
        let arguments = arguments.map(String::into_bytes).into();
        let flight = CallInFlight { id, waiters, need };
        self.calls.send(at, flight, arguments, None);
    }

    /// Hands taken slots to this request; if it is gone, they come back.
    fn lend(&self, at: &KeyContext<'_>, waiter: Waiter) {
        let (cell, cost) = ((at.place, self.calls.tag), waiter.cost);
        let slot_guard = SlotGuard::new((at.key_table, at.notices), cell, cost, false);
        at.answer(waiter, KeeperOutcome::Lent(slot_guard));
    }

    /// Sets the most requests in flight here while Redis is down: this gateway's share, times the
    /// configured fraction.
    fn prepare_alone(&self, slots: SlotCell<'_>, gateways: f64) {
        let share = self.slot_lease.share().unwrap_or(1.0 / gateways);
        let when_down = self.calls.limit.when_down;
        if let Some(most) = most_alone(&self.calls.terms(), when_down, share) {
            slots.prepare_alone(most);
        }
    }
}
