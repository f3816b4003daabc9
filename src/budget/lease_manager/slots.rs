//! Every key with a limit on requests in flight: which requests wait for a slot, and when this
//! gateway declares its slots to Redis.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
};

use tokio::sync::mpsc::{Sender, WeakSender};

use super::{
    entry::CallInFlight,
    message::{KeeperOutcome, KeyRequest, Waiter},
    redis_clients::{CallSubject, Event, RedisClients},
};
use crate::budget::{
    key_table::{CellNotice, KeyTable, SlotGuard, Tag},
    lease::{self, LeaseTerms},
    settings::{SharedKeyName, SharedLimit, WhenDown},
    slot_lease::{LIFE_NS, SlotLease},
};

/// One key in use.
struct SlotEntry {
    limit: Arc<SharedLimit>,
    tier: usize,
    tag: Tag,
    key: Rc<str>,
    shard: usize,
    slot_lease: SlotLease,
    /// Requests that wait for the next call.
    queue: VecDeque<Waiter>,
    flight: Option<CallInFlight>,
    refuse_until_ns: u64,
    /// The time of the last request.
    asked_ns: u64,
    /// The next time to look at it.
    look_ns: u64,
    /// Its contribution of free slots to the gauge.
    counted: u64,
}

/// Keys by the index of their cell.
pub(super) struct ConcurrencyLeases {
    key_table: Arc<KeyTable>,
    /// For notifications of returned slots; weak, so that the lease manager stops when all workers'
    /// senders are gone.
    notices: WeakSender<CellNotice>,
    entries: HashMap<usize, SlotEntry>,
    looks: BinaryHeap<Reverse<(u64, usize)>>,
}

impl ConcurrencyLeases {
    pub(super) fn new(
        key_table: Arc<KeyTable>,
        notices: WeakSender<CellNotice>,
    ) -> ConcurrencyLeases {
        ConcurrencyLeases {
            key_table,
            notices,
            entries: HashMap::new(),
            looks: BinaryHeap::new(),
        }
    }

    /// Whether the cell at this index (still) belongs to this key.
    pub(super) fn has(&self, place: usize, tag: Tag) -> bool {
        let entry = self.entries.get(&place);
        entry.is_some_and(|entry| entry.tag == tag)
    }

    /// A request that found no free slot in the cell.
    pub(super) fn ask(&mut self, clients: &mut RedisClients, now_ns: u64, question: KeyRequest) {
        let Some(notices) = self.notices.upgrade() else {
            return;
        };
        let place = self.entry_of(clients, now_ns, &question);
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        entry.asked_ns = now_ns;
        let waiter = Waiter {
            cost: question.cost,
            answer: question.answer,
        };
        if self
            .key_table
            .slots(place)
            .take(now_ns, waiter.cost)
            .is_ok()
        {
            entry.lend(waiter, place, &self.key_table, &notices);
        } else if now_ns < entry.refuse_until_ns {
            waiter.tell(place, KeeperOutcome::Refused);
        } else if clients.is_open(entry.shard) {
            waiter.tell(place, KeeperOutcome::Alone);
        } else {
            entry.queue.push_back(waiter);
            if entry.flight.is_none() {
                self.call(clients, now_ns, place, 0);
            }
        }
        self.settle(clients, now_ns, place);
    }

    /// The index of the key's cell; a new key is set up.
    fn entry_of(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        question: &KeyRequest,
    ) -> usize {
        let tier = question.limit.tier(question.tier);
        let key_table = &self.key_table;
        let place = key_table
            .claim(question.tag, tier.overflow)
            .unwrap_or_else(|| key_table.overflow(tier.overflow));
        let known = self.entries.get(&place);
        if known.is_some_and(|entry| entry.tag == question.tag || !key_table.has_key(place)) {
            return place;
        }
        // keys without a cell of their own share a bucket in the store, too
        let name = if key_table.has_key(place) {
            question.name
        } else {
            SharedKeyName::OVERFLOW
        };
        let key = question
            .limit
            .redis_key(clients.prefix(), &tier.terms, name);
        let shard = clients.shard_of(&key);
        key_table.cell(place).set_shard(shard);
        let entry = SlotEntry {
            limit: Arc::clone(&question.limit),
            tier: question.tier,
            tag: question.tag,
            key: key.into(),
            shard,
            slot_lease: SlotLease::default(),
            queue: VecDeque::new(),
            flight: None,
            refuse_until_ns: 0,
            asked_ns: now_ns,
            look_ns: u64::MAX,
            counted: 0,
        };
        entry.prepare_alone(key_table, place, clients.gateways());
        question.limit.metrics.keys.increment(1.0);
        self.entries.insert(place, entry);
        place
    }

    /// Declares the slots held, requests more for the waiters, and gives back `surplus` free ones.
    fn call(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize, surplus: u64) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let slots = self.key_table.slots(place);
        if !clients.may_call(now_ns, entry.shard) {
            for waiter in entry.queue.drain(..) {
                waiter.tell(place, KeeperOutcome::Alone);
            }
            return;
        }
        let (waiters, need) = lease::Requests::begin(&mut entry.queue, |waiter| waiter.cost);
        let units = waiters.iter().map(|waiter| waiter.cost).sum();
        if surplus > 0 {
            // first: a request that arrives in between must not be refused a slot that is on its
            // way back
            entry.refuse_until_ns = 0;
            slots.forget_refusal();
        }
        let back = slots.withdraw(surplus);
        entry.limit.metrics.returned.increment(back);
        entry.limit.metrics.calls.increment(1);
        let id = clients.number();
        let alone = slots.used_alone();
        let declared = entry.slot_lease.declare(now_ns, id, back, alone, units);
        let terms = entry.terms();
        let arguments = vec![
            clients.id().to_owned(),
            terms.capacity.to_string(),
            declared.held.to_string(),
            need.to_string(),
            (LIFE_NS / 1000).to_string(),
            id.to_string(),
        ];
        let arguments = arguments.into_iter().map(String::into_bytes).collect();
        entry.flight = Some(CallInFlight { id, waiters, need });
        let about = CallSubject {
            place,
            tag: entry.tag,
            shard: entry.shard,
            key: Rc::clone(&entry.key),
            former_key: None,
            algorithm: terms.algorithm,
            memory_at: None,
        };
        clients.send(now_ns, id, about, arguments);
    }

    /// Releases the waiters of an overdue call.
    pub(super) fn give_up(&mut self, event: &Event) {
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        if let Some(flight) = entry.flight.take_if(|flight| flight.id == event.id) {
            flight.give_up(&mut entry.queue, event.place);
        }
    }

    fn entry_about(&mut self, event: &Event) -> Option<&mut SlotEntry> {
        let entry = self.entries.get_mut(&event.place);
        entry.filter(|entry| entry.tag == event.tag)
    }

    pub(super) fn replied(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        event: &Event,
        reply: &lease::Reply,
    ) {
        let (jitter, gateways) = (clients.jitter(), clients.gateways());
        let key_table = Arc::clone(&self.key_table);
        let notices = self.notices.upgrade();
        let slots = key_table.slots(event.place);
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        entry.shard = clients.shard_of(&entry.key);
        key_table.cell(event.place).set_shard(entry.shard);
        let flight = entry.flight.take_if(|flight| flight.id == event.id);
        let terms = entry.terms();
        let slot_reply =
            entry
                .slot_lease
                .replied(now_ns, event.sent_ns, event.id, reply, &terms, jitter);
        let Some(slot_reply) = slot_reply else { return };
        entry.limit.metrics.granted.increment(slot_reply.granted);
        entry.refuse_until_ns = slot_reply.refuse_until_ns;
        slots.know(
            entry.slot_lease.mine(),
            reply.pool,
            slot_reply.refuse_until_ns,
        );
        entry.prepare_alone(&key_table, event.place, gateways);
        // the pool before the grants: the store granted in this order
        let (mut whole, mut granted) = (
            slot_reply.granted.saturating_add(reply.pool),
            slot_reply.granted,
        );
        let asked = flight.map(|flight| flight.waiters).unwrap_or_default();
        let mut rest = VecDeque::new();
        for waiter in asked {
            match &notices {
                Some(notices) if waiter.cost <= whole.min(granted) => {
                    (whole, granted) = (whole - waiter.cost, granted - waiter.cost);
                    entry.lend(waiter, event.place, &key_table, notices);
                }
                _ => rest.push_back((waiter, true)),
            }
        }
        slots.add(granted, slot_reply.good_until_ns);
        rest.extend(entry.queue.drain(..).map(|waiter| (waiter, false)));
        for (waiter, was_asked) in rest {
            let is_free = slots.take(now_ns, waiter.cost).is_ok();
            // for a strict limit only the store knows which slots were returned
            let may_fit = !terms.ahead || waiter.cost <= reply.pool;
            match (&notices, is_free) {
                (Some(notices), true) => entry.lend(waiter, event.place, &key_table, notices),
                (_, false) if !was_asked && may_fit => entry.queue.push_back(waiter),
                _ => _ = waiter.tell(event.place, KeeperOutcome::Refused),
            }
        }
        if !entry.queue.is_empty() {
            self.call(clients, now_ns, event.place, 0);
        }
    }

    /// A slot was returned.
    pub(super) fn freed(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let free = self.key_table.slots(place).free();
        let (terms, gateways) = (entry.terms(), clients.gateways());
        if entry.slot_lease.freed(now_ns, &terms, gateways, free) {
            return self.look(clients, now_ns, place);
        }
        self.settle(clients, now_ns, place);
    }

    /// Looks at every key that is due.
    pub(super) fn look_at_due(&mut self, clients: &mut RedisClients, now_ns: u64) {
        while let Some(&Reverse((due, place))) = self.looks.peek()
            && due <= now_ns
        {
            self.looks.pop();
            // a key may have several planned looks; only the one that it remembers counts
            let entry = self.entries.get_mut(&place);
            if let Some(entry) = entry.filter(|entry| entry.look_ns == due) {
                entry.look_ns = u64::MAX;
                self.look(clients, now_ns, place);
            }
        }
    }

    /// When the next key is due.
    pub(super) fn next_ns(&self) -> u64 {
        self.looks.peek().map_or(u64::MAX, |&Reverse((due, _))| due)
    }

    fn look(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        if entry.flight.is_none() {
            let slots = self.key_table.slots(place);
            let (free, alone) = (slots.free(), slots.used_alone());
            let (terms, gateways) = (entry.terms(), clients.gateways());
            let back = entry.slot_lease.surplus(now_ns, &terms, gateways, free);
            if !clients.is_open(entry.shard) && entry.slot_lease.is_due(now_ns, back, alone) {
                self.call(clients, now_ns, place, back);
            } else if entry.slot_lease.is_idle(now_ns, entry.asked_ns, alone) {
                return self.forget(place);
            }
        }
        self.settle(clients, now_ns, place);
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.entries.remove(&place) {
            let quota = entry.limit.tier(entry.tier).overflow;
            self.key_table.release(place, quota);
            entry.limit.metrics.keys.decrement(1.0);
            entry.limit.metrics.in_hand.decrement(entry.counted as f64);
        }
    }

    /// Plans the next look at a key and updates its gauge.
    pub(super) fn settle(&mut self, clients: &RedisClients, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let slots = self.key_table.slots(place);
        let (free, alone) = (slots.free(), slots.used_alone());
        let (terms, gateways) = (entry.terms(), clients.gateways());
        // if some slots are kept, a look is planned anyway
        if free == 0 || entry.slot_lease.keeps_nothing(now_ns, &terms, gateways) {
            slots.listen();
        }
        let gauge = &entry.limit.metrics.in_hand;
        gauge.increment(free as f64 - entry.counted as f64);
        entry.counted = free;
        let next = if clients.is_open(entry.shard) {
            // no declaration is possible now; free slots stay available to the next request
            now_ns.saturating_add(LIFE_NS / 10)
        } else {
            let slot_lease = &entry.slot_lease;
            slot_lease.look_again_ns(now_ns, &terms, gateways, (free, alone))
        };
        // a look that comes too early plans the next one
        if next < entry.look_ns {
            entry.look_ns = next;
            self.looks.push(Reverse((next, place)));
        }
    }

    /// A server has lost data: declares all its keys again at once.
    pub(super) fn lost(&mut self, clients: &mut RedisClients, now_ns: u64, shard: usize) {
        let keys = self.entries.iter();
        let keys = keys.filter(|(_, entry)| entry.shard == shard && entry.flight.is_none());
        let places: Vec<usize> = keys.map(|(&place, _)| place).collect();
        for place in places {
            self.call(clients, now_ns, place, 0);
        }
    }

    /// Keys have moved to other servers.
    pub(super) fn moved(&mut self, clients: &mut RedisClients) {
        for (&place, entry) in &mut self.entries {
            entry.shard = clients.shard_of(&entry.key);
            self.key_table.cell(place).set_shard(entry.shard);
        }
    }

    /// Gives back every free slot in parallel; returns their number. Slots in use become free when
    /// their declaration expires.
    pub(super) fn hand_back(&mut self, clients: &mut RedisClients, now_ns: u64) -> u64 {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        let mut returned: u64 = 0;
        for place in places {
            let slots = self.key_table.slots(place);
            if let Some(entry) = self.entries.get_mut(&place) {
                entry.flight = None;
                let free = slots.free();
                if entry.slot_lease.is_due(now_ns, free, slots.used_alone()) {
                    returned += free;
                    self.call(clients, now_ns, place, free);
                }
            }
        }
        returned
    }

    /// Removes all keys from the gauges: a gateway may continue with another lease manager.
    pub(super) fn forget_all(&mut self) {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        places.into_iter().for_each(|place| self.forget(place));
    }

    /// Whether calls are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.entries.values().any(|entry| entry.flight.is_some())
    }

    /// Only records that a call has ended.
    pub(super) fn leave(&mut self, event: &Event) {
        if let Some(entry) = self.entries.get_mut(&event.place) {
            entry.flight.take_if(|flight| flight.id == event.id);
        }
    }
}

impl SlotEntry {
    fn terms(&self) -> LeaseTerms {
        self.limit.tier(self.tier).terms
    }

    /// Hands taken slots to this request; if it is gone, they come back.
    fn lend(
        &self,
        waiter: Waiter,
        place: usize,
        key_table: &Arc<KeyTable>,
        notices: &Sender<CellNotice>,
    ) {
        let slot_guard =
            SlotGuard::new((key_table, notices), (place, self.tag), waiter.cost, false);
        waiter.tell(place, KeeperOutcome::Lent(slot_guard));
    }

    /// Sets the most requests in flight here while Redis is down: this gateway's share, times the
    /// configured fraction.
    fn prepare_alone(&self, key_table: &KeyTable, place: usize, gateways: f64) {
        let share = self.slot_lease.share().unwrap_or(1.0 / gateways);
        if let Some(most) = most_alone(&self.terms(), self.limit.when_down, share) {
            key_table.slots(place).prepare_alone(most);
        }
    }
}

/// The most requests in flight for a gateway with this share of the limit on its own, at least one.
pub(in crate::budget) fn most_alone(
    terms: &LeaseTerms,
    when_down: WhenDown,
    share: f64,
) -> Option<u64> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let most = fraction * share * terms.capacity as f64;
    Some((most as u64).max(1))
}
