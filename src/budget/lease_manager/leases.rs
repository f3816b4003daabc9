//! Every key with a lease: which requests wait for its tokens, when Redis is asked, and how replies
//! are applied.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
};

use super::{
    entry::{CallInFlight, KeyEntry, arguments, memory_at},
    message::{Grant, KeeperOutcome, KeyRequest, LateKind, LateMessage, Waiter},
    redis_clients::{CallSubject, Event, RedisClients},
};
use crate::budget::{
    key_table::{KeyTable, SpendOutcome, Tag},
    lease::{self, Lease},
    settings::{SharedKeyName, SharedLimit},
    slack::Slack,
};

/// Keys by the index of their cell.
pub(super) struct Leases {
    key_table: Arc<KeyTable>,
    entries: HashMap<usize, KeyEntry>,
    looks: BinaryHeap<Reverse<(u64, usize)>>,
    /// Keys to report to Redis without a request, because it lost them or units go back; and when
    /// the next ones are due.
    telling: VecDeque<usize>,
    tell_ns: u64,
    /// Limits on which gateways disagree.
    disagreeing: Vec<Arc<SharedLimit>>,
}

/// After a loss, keys are reported in batches of this size, at this interval.
const TOLD_AT_ONCE: usize = 32;
const TELL_PAUSE_NS: u64 = 5_000_000;
/// Idle keys are kept up to this number if a Redis that loses them would need a report.
const MAX_REMEMBERED: usize = 65_536;

impl Leases {
    pub(super) fn new(key_table: Arc<KeyTable>) -> Leases {
        Leases {
            key_table,
            entries: HashMap::new(),
            looks: BinaryHeap::new(),
            telling: VecDeque::new(),
            tell_ns: u64::MAX,
            disagreeing: Vec::new(),
        }
    }

    /// Whether the cell at this index (still) belongs to this key.
    pub(super) fn has(&self, place: usize, tag: Tag) -> bool {
        let entry = self.entries.get(&place);
        entry.is_some_and(|entry| entry.tag == tag)
    }

    /// A request that found no local token.
    pub(super) fn ask(&mut self, clients: &mut RedisClients, now_ns: u64, question: KeyRequest) {
        let KeyRequest {
            limit, tier, tag, ..
        } = &question;
        let place = self.entry_of(clients, now_ns, limit, (*tier, *tag), question.name);
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let cell = self.key_table.cell(place);
        let horizon_ns = entry.terms().horizon_ns(clients.rtt_ns(entry.shard));
        entry.look(now_ns, cell, horizon_ns);
        if question.cost <= 1 {
            entry.lease.arrived(now_ns, horizon_ns, 0, question.cost);
        }
        entry.lease.asked(now_ns, horizon_ns, question.cost);
        let waiter = Waiter {
            cost: question.cost,
            answer: question.answer,
        };
        let spent = entry.spend(now_ns, horizon_ns, cell, question.cost);
        if let SpendOutcome::Taken { tokens, .. } = spent {
            if !waiter.tell(place, KeeperOutcome::Taken(tokens)) {
                cell.put_back(tokens);
            }
        } else if matches!(spent, SpendOutcome::Refused { .. }) {
            entry.limit.metrics.refused_by_memory.increment(waiter.cost);
            waiter.tell(place, KeeperOutcome::Refused);
        } else if entry.passes(now_ns, horizon_ns, clients.gateways(), question.cost) {
            if !waiter.tell(place, KeeperOutcome::Slack) {
                entry.slack.refund(question.cost);
            }
        } else if clients.is_open(entry.shard) {
            waiter.tell(place, KeeperOutcome::Alone);
        } else if entry.flight.is_some() && !entry.may_queue(now_ns) {
            entry.limit.metrics.refused_by_redis.increment(waiter.cost);
            waiter.tell(place, KeeperOutcome::Refused);
        } else {
            entry.queue.push_back(waiter);
            if entry.flight.is_none() {
                self.call(clients, now_ns, place, true);
            }
        }
        self.settle(clients, now_ns, place);
    }

    /// The index of the key's cell; a new key is set up.
    fn entry_of(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        limit: &Arc<SharedLimit>,
        (quota, tag): (usize, Tag),
        name: SharedKeyName,
    ) -> usize {
        let tier = limit.tier(quota);
        let key_table = &self.key_table;
        let place = key_table
            .claim(tag, tier.overflow)
            .unwrap_or_else(|| key_table.overflow(tier.overflow));
        if self
            .entries
            .get(&place)
            .is_some_and(|entry| entry.tag == tag || !key_table.has_key(place))
        {
            return place;
        }
        // keys without a cell of their own share a bucket in the store, too
        let name = if key_table.has_key(place) {
            name
        } else {
            SharedKeyName::OVERFLOW
        };
        let key = limit.redis_key(clients.prefix(), &tier.terms, name);
        let shard = clients.shard_of(&key);
        key_table.cell(place).set_shard(shard);
        let entry = KeyEntry {
            limit: Arc::clone(limit),
            tier: quota,
            tag,
            key: key.into(),
            shard,
            former_key: limit
                .former_key(clients.prefix(), &tier.terms, name)
                .map(Rc::from),
            lease: Lease::default(),
            slack: Slack::default(),
            is_to_tell: false,
            queue: VecDeque::new(),
            flight: None,
            pause_until_ns: 0,
            poll_ns: None,
            look_ns: u64::MAX,
            counted: 0,
            counted_short: false,
        };
        entry.prepare_alone(now_ns, key_table.cell(place), clients.gateways());
        limit.metrics.keys.increment(1.0);
        self.entries.insert(place, entry);
        place
    }

    /// Calls Redis for the waiters; `fill` also requests tokens ahead.
    fn call(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize, fill: bool) {
        self.call_back(clients, now_ns, place, fill, [0, 0]);
    }

    /// The same, and returns these tokens, which were withdrawn from the cell.
    fn call_back(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        place: usize,
        fill: bool,
        back: lease::TokenPair,
    ) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let cell = self.key_table.cell(place);
        if !clients.may_call(now_ns, entry.shard) {
            cell.put_back(back);
            for waiter in entry.queue.drain(..) {
                waiter.tell(place, KeeperOutcome::Alone);
            }
            return;
        }
        let terms = entry.terms();
        let horizon_ns = terms.horizon_ns(clients.rtt_ns(entry.shard));
        // this call makes low-water notifications unnecessary
        cell.set_low(None);
        entry.settle_alone(now_ns, cell, clients.gateways());
        entry.charge_slack(now_ns, clients.gateways());
        entry.limit.metrics.calls.increment(1);
        let (waiters, need) = entry.begin();
        let (held, _) = cell.held(now_ns);
        let (held, back) = if waiters.is_empty() {
            (held, back)
        } else {
            // too few for the waiters: return them so that the store can grant both together
            let more = cell.withdraw(held);
            let add = |slot: usize| back[slot].saturating_add(more[slot]);
            (cell.held(now_ns).0, [add(0), add(1)])
        };
        let ask = lease::CallReason {
            need: need.clone(),
            back,
            fill,
        };
        let call = entry.lease.call(now_ns, &terms, horizon_ns, held, ask);
        let returned: u64 = back.iter().sum();
        entry.limit.metrics.returned.increment(returned);
        let id = clients.number();
        entry.flight = Some(CallInFlight { id, waiters, need });
        entry.poll_ns = None;
        let about = CallSubject {
            place,
            tag: entry.tag,
            shard: entry.shard,
            key: entry.key.clone(),
            former_key: entry.former_key.clone(),
            algorithm: terms.algorithm,
            memory_at: Some(memory_at(terms.algorithm)),
        };
        let arguments = arguments(&terms, &call, (clients.id(), id), clients.gateways());
        clients.send(now_ns, id, about, arguments);
    }

    /// Releases the waiters of an overdue call; the next request makes its own call.
    pub(super) fn give_up(&mut self, event: &Event) {
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        if let Some(flight) = entry.flight.take_if(|flight| flight.id == event.id) {
            flight.give_up(&mut entry.queue, event.place);
        }
    }

    fn entry_about(&mut self, event: &Event) -> Option<&mut KeyEntry> {
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
        let (rtt_ns, jitter) = (clients.rtt_ns(event.shard), clients.jitter());
        let gateways = clients.gateways();
        let key_table = Arc::clone(&self.key_table);
        let cell = key_table.cell(event.place);
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        let terms = entry.terms();
        let horizon_ns = terms.horizon_ns(rtt_ns);
        entry.shard = clients.shard_of(&entry.key);
        cell.set_shard(entry.shard);
        entry.look(now_ns, cell, horizon_ns);
        entry.settle_alone(now_ns, cell, gateways);
        let sent_ns = event.sent_ns;
        let flight = entry.flight.take_if(|flight| flight.id == event.id);
        let whole = reply
            .need
            .saturating_add(reply.want)
            .saturating_add(reply.pool);
        let refused = flight
            .as_ref()
            .and_then(|flight| flight.need.grant(whole).1);
        let granted =
            entry
                .lease
                .replied(now_ns, sent_ns, &terms, (reply, refused), (rtt_ns, jitter));
        entry.former_key = None;
        if granted.is_lost {
            clients.lost_key(event.shard);
        }
        let mut disagreeing = None;
        if reply.disagrees {
            let limit = &entry.limit;
            let was_known = limit.disagreement.lasts(now_ns);
            limit.disagreement.seen(now_ns);
            if !was_known && limit.disagreement.lasts(now_ns) {
                clients.disagree(limit);
                disagreeing = Some(Arc::clone(limit));
            }
        }
        if granted.replaces {
            let lapsed = cell.empty(granted.slot);
            entry.limit.metrics.lapsed.increment(lapsed);
        }
        if granted.bank > 0 {
            cell.bank(granted.slot, granted.deadline_ns, granted.bank);
        }
        entry.limit.metrics.granted_ahead.increment(granted.bank);
        entry.limit.metrics.granted.increment(reply.need);
        entry.prepare_alone(now_ns, cell, gateways);
        cell.know(reply.pool, &granted.forecast, granted.pause);
        let pause = granted.pause.filter(|pause| pause.least == 0);
        entry.pause_until_ns = pause.map_or(0, |pause| pause.until_ns);

        let waiters = flight.map(|flight| flight.waiters).unwrap_or_default();
        let grant = Grant {
            slot: granted.slot,
            origin: granted.origin,
            deadline_ns: granted.deadline_ns,
        };
        let at = (event.place, cell);
        let unused = entry.serve(now_ns, horizon_ns, at, waiters, (reply, grant));
        if unused > 0 && terms.banks_grants() {
            cell.bank(grant.slot, grant.deadline_ns, unused);
        } else if unused > 0 {
            entry.lease.unused(granted.origin, unused);
        }
        self.disagreeing.extend(disagreeing);
        self.go_on(clients, now_ns, event.place, false);
    }

    /// The next action for a key without a call in flight. Only a request that spends triggers a
    /// refill: retrying after an empty reply would loop for ever.
    fn go_on(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize, has_spent: bool) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        if entry.flight.is_some() {
            return;
        }
        let gives_back = entry.lease.has_news() && clients.has_room(entry.shard);
        if !entry.queue.is_empty() || gives_back {
            return self.call(clients, now_ns, place, true);
        }
        if entry.lease.has_news() && !clients.is_open(entry.shard) {
            // as soon as there is room
            if !std::mem::replace(&mut entry.is_to_tell, true) {
                self.telling.push_back(place);
            }
            self.tell_ns = self.tell_ns.min(now_ns.saturating_add(TELL_PAUSE_NS));
        }
        let cell = self.key_table.cell(place);
        let rtt_ns = clients.rtt_ns(entry.shard);
        let terms = entry.terms();
        let horizon_ns = terms.horizon_ns(rtt_ns);
        if now_ns < entry.pause_until_ns {
            let polls = entry.lease.polls(now_ns, &terms, entry.pause_until_ns);
            entry.poll_ns = polls.then_some(entry.pause_until_ns);
            return;
        }
        let (held, _) = cell.held(now_ns);
        let is_low = || {
            let lease = &entry.lease;
            lease.is_low(now_ns, &terms, horizon_ns, rtt_ns, held)
        };
        if has_spent && is_low() {
            return self.call(clients, now_ns, place, true);
        }
        cell.set_low(entry.lease.low_mark(now_ns, &terms, horizon_ns, rtt_ns));
    }

    /// A cell is below its low-water mark.
    pub(super) fn fill(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize) {
        if let Some(entry) = self.entries.get_mut(&place) {
            let horizon_ns = entry.terms().horizon_ns(clients.rtt_ns(entry.shard));
            entry.look(now_ns, self.key_table.cell(place), horizon_ns);
            self.go_on(clients, now_ns, place, true);
            self.settle(clients, now_ns, place);
        }
    }

    /// Return unused units of a strict (per-request) limit.
    pub(super) fn unused(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        place: usize,
        origin: lease::Origin,
        tokens: u64,
    ) {
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.lease.unused(origin, tokens);
            self.go_on(clients, now_ns, place, false);
        }
    }

    /// Charges or refunds units after an answer, with the next call. Makes one if none is in flight
    /// and it cannot wait.
    pub(super) fn late(&mut self, clients: &mut RedisClients, now_ns: u64, late: &LateMessage) {
        let LateMessage { limit, units, .. } = late;
        let place = self.entry_of(clients, now_ns, limit, (late.tier, late.tag), late.name);
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let terms = entry.terms();
        match late.kind {
            LateKind::Charge => entry.lease.charge_late(*units),
            LateKind::Debt => entry.lease.owe_late(now_ns, &terms, *units),
            LateKind::Refund { charged_ns } => {
                entry.lease.refund_late(now_ns, &terms, *units, charged_ns);
            }
        }
        self.go_on(clients, now_ns, place, false);
        self.settle(clients, now_ns, place);
    }

    /// Units admitted by slack were not used.
    pub(super) fn unslacked(&mut self, place: usize, tokens: u64) {
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.slack.refund(tokens);
        }
    }

    /// Updates limits on which gateways disagreed: they may agree again.
    pub(super) fn look_at_disagreements(&mut self, now_ns: u64) {
        self.disagreeing.retain(|limit| {
            let lasts = limit.disagreement.lasts(now_ns);
            limit.metrics.disagreement.set(f64::from(u8::from(lasts)));
            lasts
        });
    }

    /// A server has lost data: reports every remembered key of it, a few at a time.
    pub(super) fn lost(&mut self, now_ns: u64, shard: usize) {
        let keys = self.entries.iter();
        let keys = keys.filter(|(_, entry)| entry.shard == shard && entry.remembers(now_ns));
        // reporting a queued key twice is harmless
        self.telling.extend(keys.map(|(&place, _)| place));
        self.tell_ns = now_ns;
    }

    /// A server answers again: reports keys with units to return, a few at a time.
    pub(super) fn tell_news(&mut self, clients: &RedisClients, now_ns: u64, shard: usize) {
        if !clients.is_open(shard) {
            let keys = self.entries.iter();
            let keys = keys.filter(|(_, entry)| entry.shard == shard && entry.lease.has_news());
            self.telling.extend(keys.map(|(&place, _)| place));
            self.tell_ns = now_ns;
        }
    }

    fn tell(&mut self, clients: &mut RedisClients, now_ns: u64) {
        if now_ns < self.tell_ns {
            return;
        }
        for _ in 0..TOLD_AT_ONCE {
            let Some(place) = self.telling.pop_front() else {
                self.tell_ns = u64::MAX;
                return;
            };
            let Some(entry) = self.entries.get_mut(&place) else {
                continue;
            };
            entry.is_to_tell = false;
            if entry.flight.is_some() {
                // the call in flight reports it
                continue;
            }
            if clients.has_room(entry.shard) {
                self.call(clients, now_ns, place, false);
                self.settle(clients, now_ns, place);
            } else {
                entry.is_to_tell = true;
                self.telling.push_back(place);
                break;
            }
        }
        self.tell_ns = now_ns.saturating_add(TELL_PAUSE_NS);
    }

    /// Looks at every key that is due.
    pub(super) fn look_at_due(&mut self, clients: &mut RedisClients, now_ns: u64) {
        self.tell(clients, now_ns);
        while let Some(&Reverse((due, place))) = self.looks.peek()
            && due <= now_ns
        {
            self.looks.pop();
            // a key may have several planned looks; only the one that it remembers counts
            let entry = self.entries.get(&place);
            if entry.is_some_and(|entry| entry.look_ns == due) {
                self.look(clients, now_ns, place);
            }
        }
    }

    /// When the next key is due.
    pub(super) fn next_ns(&self) -> u64 {
        let look_ns = self.looks.peek().map_or(u64::MAX, |&Reverse((due, _))| due);
        look_ns.min(self.tell_ns)
    }

    fn look(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize) {
        let may_remember = self.entries.len() <= MAX_REMEMBERED;
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        entry.look_ns = u64::MAX;
        let cell = self.key_table.cell(place);
        let terms = entry.terms();
        let horizon_ns = terms.horizon_ns(clients.rtt_ns(entry.shard));
        entry.look(now_ns, cell, horizon_ns);
        if entry.flight.is_none() {
            if entry.poll_ns.take_if(|due| *due <= now_ns).is_some() {
                if entry.lease.is_wanted() {
                    self.call(clients, now_ns, place, true);
                }
            } else {
                let (held, _) = cell.held(now_ns);
                let is_open = clients.is_open(entry.shard);
                let has_room = clients.has_room(entry.shard);
                let surplus = entry.lease.surplus(now_ns, &terms, horizon_ns, held);
                let back = cell.withdraw(if has_room { surplus } else { [0, 0] });
                let (alone, _) = cell.alone(now_ns);
                let owes = entry.lease.debt() > 0 || alone > 0;
                // a busy key's debt goes with its next call
                let settles = owes && has_room && entry.lease.is_quiet(now_ns, horizon_ns);
                let is_kept = may_remember && entry.remembers(now_ns);
                let is_idle = held == [0, 0]
                    && !is_kept
                    && entry.is_idle(now_ns, horizon_ns, clients.gateways());
                let gives_back = has_room && entry.lease.has_news();
                if back != [0, 0] || settles || gives_back {
                    self.call_back(clients, now_ns, place, false, back);
                } else if is_idle && !owes && !is_open {
                    // without Redis a forgotten key would start again with a burst that it has
                    // already had
                    return self.forget(place);
                }
            }
        }
        self.settle(clients, now_ns, place);
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.entries.remove(&place) {
            let quota = entry.limit.tier(entry.tier).overflow;
            self.key_table.release(place, quota);
            entry.hide();
        }
    }

    /// Plans the next look at a key and updates its gauge.
    pub(super) fn settle(&mut self, clients: &RedisClients, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let horizon_ns = entry.terms().horizon_ns(clients.rtt_ns(entry.shard));
        let (held, _) = self.key_table.cell(place).held(now_ns);
        let held: u64 = held.iter().sum();
        entry.show(held);
        let quiet_ns = now_ns.saturating_add(horizon_ns.saturating_mul(2));
        let mut next = match held {
            0 => quiet_ns,
            _ => entry.lease.look_again_ns(now_ns, horizon_ns),
        };
        if let Some(poll_ns) = entry.poll_ns {
            next = next.min(poll_ns);
        }
        // a look that comes too early plans the next one
        if next < entry.look_ns {
            entry.look_ns = next;
            self.looks.push(Reverse((next, place)));
        }
    }

    /// Keys have moved to other servers.
    pub(super) fn moved(&mut self, clients: &mut RedisClients) {
        for (&place, entry) in &mut self.entries {
            entry.shard = clients.shard_of(&entry.key);
            self.key_table.cell(place).set_shard(entry.shard);
        }
    }

    /// Returns every token in parallel; returns their number.
    pub(super) fn hand_back(&mut self, clients: &mut RedisClients, now_ns: u64) -> u64 {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        let mut returned: u64 = 0;
        for place in places {
            let Some(entry) = self.entries.get_mut(&place) else {
                continue;
            };
            let cell = self.key_table.cell(place);
            let horizon_ns = entry.terms().horizon_ns(clients.rtt_ns(entry.shard));
            entry.look(now_ns, cell, horizon_ns);
            entry.flight = None;
            let back = cell.withdraw([u64::MAX; 2]);
            let count: u64 = back.iter().sum();
            if count > 0 || entry.lease.debt() > 0 {
                returned += count;
                self.call_back(clients, now_ns, place, false, back);
            }
        }
        returned
    }

    /// Removes all keys from the gauges: a gateway may continue with another lease manager.
    pub(super) fn forget_all(&mut self) {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        places.into_iter().for_each(|place| self.forget(place));
        for limit in self.disagreeing.drain(..) {
            limit.metrics.disagreement.set(0.0);
        }
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
