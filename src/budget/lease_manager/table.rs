//! The lease table: every key in use, and when to look at it.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::Arc,
};

use tokio::sync::mpsc::Sender;

use super::{
    key::{Backlog, KeyCalls, KeyContext, LeasedKey, TELL_PAUSE_NS},
    message::{KeyRequest, LateMessage, Waiter},
    redis_clients::{Event, RedisClients},
    slots::SlotKey,
    tokens::TokenKey,
};
use crate::budget::{
    key_table::{CellNotice, KeyTable, Tag},
    lease::{LeaseAlgorithm, Origin, Reply},
    settings::{SharedKeyName, SharedLimit},
};

/// Keys reported at once after a loss.
const TOLD_AT_ONCE: usize = 32;
/// Idle keys are kept up to this number if a Redis that loses them would need a report.
const MAX_REMEMBERED: usize = 65_536;

/// Keys by the index of their cell.
pub(super) struct LeaseTable {
    key_table: Arc<KeyTable>,
    notices: Sender<CellNotice>,
    entries: HashMap<usize, LeaseEntry>,
    looks: BinaryHeap<Reverse<(u64, usize)>>,
    backlog: Backlog,
}

/// One key in use.
struct LeaseEntry {
    key: Box<dyn LeasedKey>,
    /// The next time to look at it.
    look_ns: u64,
}

/// Returned at the end.
#[derive(Debug, Default)]
pub(super) struct HandedBack {
    pub(super) tokens: u64,
    pub(super) slots: u64,
}

impl LeaseTable {
    pub(super) fn new(key_table: Arc<KeyTable>, notices: Sender<CellNotice>) -> LeaseTable {
        LeaseTable {
            key_table,
            notices,
            entries: HashMap::new(),
            looks: BinaryHeap::new(),
            backlog: Backlog::default(),
        }
    }

    /// Acts on the key of this cell; `None` if it is not in use.
    fn act<T>(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        place: usize,
        act: impl FnOnce(&mut dyn LeasedKey, &mut KeyContext<'_>) -> T,
    ) -> Option<T> {
        let entry = self.entries.get_mut(&place)?;
        let mut at = KeyContext {
            now_ns,
            place,
            key_table: &self.key_table,
            notices: &self.notices,
            clients,
            backlog: &mut self.backlog,
        };
        Some(act(&mut *entry.key, &mut at))
    }

    /// Whether the cell at this index (still) belongs to this key.
    fn has(&self, place: usize, tag: Tag) -> bool {
        let entry = self.entries.get(&place);
        entry.is_some_and(|entry| entry.key.calls().tag == tag)
    }

    /// A request that found nothing in its cell.
    pub(super) fn ask(&mut self, clients: &mut RedisClients, now_ns: u64, request: KeyRequest) {
        let key = (request.tier, request.tag);
        let place = self.place_of(clients, now_ns, &request.limit, key, request.name);
        let waiter = Waiter {
            cost: request.cost,
            answer: request.answer,
        };
        self.act(clients, now_ns, place, |key, at| key.ask(at, waiter));
        self.plan(clients, now_ns, place);
    }

    /// Units of a key are charged or refunded after an answer.
    pub(super) fn late(&mut self, clients: &mut RedisClients, now_ns: u64, late: &LateMessage) {
        let key = (late.tier, late.tag);
        let place = self.place_of(clients, now_ns, &late.limit, key, late.name);
        self.act(clients, now_ns, place, |key, at| key.late(at, late));
        self.plan(clients, now_ns, place);
    }

    /// The index of the key's cell; a new key is set up.
    fn place_of(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        limit: &Arc<SharedLimit>,
        (tier, tag): (usize, Tag),
        name: SharedKeyName,
    ) -> usize {
        let overflow = limit.tier(tier).overflow;
        let key_table = &self.key_table;
        let place = key_table
            .claim(tag, overflow)
            .unwrap_or_else(|| key_table.overflow(overflow));
        if self.has(place, tag) || self.entries.contains_key(&place) && !key_table.has_key(place) {
            return place;
        }
        let mut at = KeyContext {
            now_ns,
            place,
            key_table,
            notices: &self.notices,
            clients,
            backlog: &mut self.backlog,
        };
        let calls = KeyCalls::new(&mut at, limit, (tier, tag), name);
        let key: Box<dyn LeasedKey> = match limit.algorithm() {
            LeaseAlgorithm::Slots => Box::new(SlotKey::new(&at, calls)),
            _ => Box::new(TokenKey::new(&at, calls)),
        };
        limit.metrics.keys.increment(1.0);
        let look_ns = u64::MAX;
        self.entries.insert(place, LeaseEntry { key, look_ns });
        place
    }

    /// A cell needs attention.
    pub(super) fn notice(&mut self, clients: &mut RedisClients, now_ns: u64, notice: CellNotice) {
        let CellNotice { place, tag } = notice;
        if self.has(place, tag) {
            let is_kept = self.act(clients, now_ns, place, |key, at| key.noticed(at));
            self.plan_or_forget(clients, now_ns, place, is_kept);
        }
    }

    /// Units granted by a call to Redis, and not used.
    pub(super) fn unused(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        (place, tag): (usize, Tag),
        (origin, tokens): (Origin, u64),
    ) {
        if self.has(place, tag) {
            let act = |key: &mut dyn LeasedKey, at: &mut KeyContext<'_>| {
                key.unused(at, origin, tokens);
            };
            self.act(clients, now_ns, place, act);
        }
    }

    /// Units admitted by slack, and not used.
    pub(super) fn unslacked(&mut self, place: usize, tag: Tag, tokens: u64) {
        let entry = self.entries.get_mut(&place);
        if let Some(entry) = entry.filter(|entry| entry.key.calls().tag == tag) {
            entry.key.unslacked(tokens);
        }
    }

    /// Releases the waiters of an overdue call; the next request makes its own call.
    pub(super) fn give_up(&mut self, event: &Event) {
        if self.has(event.place, event.tag)
            && let Some(entry) = self.entries.get_mut(&event.place)
        {
            entry.key.calls_mut().give_up(event.place, event.id);
        }
    }

    /// A call was answered.
    pub(super) fn replied(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        event: &Event,
        reply: &Reply,
    ) {
        if self.has(event.place, event.tag) {
            self.act(clients, now_ns, event.place, |key, at| {
                let flight = key.calls_mut().answered(at, event.id);
                key.replied(at, event, reply, flight);
            });
        }
    }

    /// Plans the next look at the key of an event.
    pub(super) fn plan_after(&mut self, clients: &mut RedisClients, now_ns: u64, event: &Event) {
        if self.has(event.place, event.tag) {
            self.plan(clients, now_ns, event.place);
        }
    }

    /// Updates limits on which gateways disagreed: they may agree again.
    pub(super) fn look_at_disagreements(&mut self, now_ns: u64) {
        self.backlog.disagreeing.retain(|limit| {
            let lasts = limit.disagreement.lasts(now_ns);
            limit.metrics.disagreement.set(f64::from(u8::from(lasts)));
            lasts
        });
    }

    /// A server has lost data: slots are declared again at once, and every remembered key is
    /// reported, a few at a time.
    pub(super) fn lost(&mut self, clients: &mut RedisClients, now_ns: u64, shard: usize) {
        for place in self.places(|key| key.calls().shard == shard) {
            self.act(clients, now_ns, place, |key, at| key.lost(at));
        }
        self.backlog.tell_ns = now_ns;
    }

    /// A server answers again: reports keys with units to return, a few at a time.
    pub(super) fn tell_news(&mut self, clients: &RedisClients, now_ns: u64, shard: usize) {
        if !clients.is_open(shard) {
            let places = self.places(|key| key.calls().shard == shard && key.has_news());
            self.backlog.telling.extend(places);
            self.backlog.tell_ns = now_ns;
        }
    }

    fn places(&self, is_meant: impl Fn(&dyn LeasedKey) -> bool) -> Vec<usize> {
        let meant = self
            .entries
            .iter()
            .filter(|(_, entry)| is_meant(&*entry.key));
        meant.map(|(&place, _)| place).collect()
    }

    fn tell(&mut self, clients: &mut RedisClients, now_ns: u64) {
        if now_ns < self.backlog.tell_ns {
            return;
        }
        for _ in 0..TOLD_AT_ONCE {
            let Some(place) = self.backlog.telling.pop_front() else {
                self.backlog.tell_ns = u64::MAX;
                return;
            };
            let Some(entry) = self.entries.get_mut(&place) else {
                continue;
            };
            let calls = entry.key.calls_mut();
            calls.is_to_tell = false;
            if calls.flight.is_some() {
                // the call in flight reports it
                continue;
            }
            if clients.has_room(calls.shard) {
                self.act(clients, now_ns, place, |key, at| key.tell(at));
                self.plan(clients, now_ns, place);
            } else {
                calls.is_to_tell = true;
                self.backlog.telling.push_back(place);
                break;
            }
        }
        self.backlog.tell_ns = now_ns.saturating_add(TELL_PAUSE_NS);
    }

    /// Looks at every key that is due.
    pub(super) fn look_at_due(&mut self, clients: &mut RedisClients, now_ns: u64) {
        self.tell(clients, now_ns);
        while let Some(&Reverse((due, place))) = self.looks.peek()
            && due <= now_ns
        {
            self.looks.pop();
            let may_remember = self.entries.len() <= MAX_REMEMBERED;
            // a key may have several planned looks; only the one that it remembers counts
            let entry = self.entries.get_mut(&place);
            if let Some(entry) = entry.filter(|entry| entry.look_ns == due) {
                entry.look_ns = u64::MAX;
                let look =
                    |key: &mut dyn LeasedKey, at: &mut KeyContext<'_>| key.look(at, may_remember);
                let is_kept = self.act(clients, now_ns, place, look);
                self.plan_or_forget(clients, now_ns, place, is_kept);
            }
        }
    }

    /// When the next key is due.
    pub(super) fn next_ns(&self) -> u64 {
        let look_ns = self.looks.peek().map_or(u64::MAX, |&Reverse((due, _))| due);
        look_ns.min(self.backlog.tell_ns)
    }

    fn plan_or_forget(
        &mut self,
        clients: &mut RedisClients,
        now_ns: u64,
        place: usize,
        is_kept: Option<bool>,
    ) {
        match is_kept {
            Some(false) => self.forget(place),
            _ => self.plan(clients, now_ns, place),
        }
    }

    /// Plans the next look at a key and updates its gauges.
    fn plan(&mut self, clients: &mut RedisClients, now_ns: u64, place: usize) {
        let next = self.act(clients, now_ns, place, |key, at| key.next_look_ns(at));
        // a look that comes too early plans the next one
        if let (Some(next), Some(entry)) = (next, self.entries.get_mut(&place))
            && next < entry.look_ns
        {
            entry.look_ns = next;
            self.looks.push(Reverse((next, place)));
        }
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.entries.remove(&place) {
            let calls = entry.key.calls();
            let overflow = calls.limit.tier(calls.tier).overflow;
            self.key_table.release(place, overflow);
            entry.key.hide();
        }
    }

    /// Keys have moved to other servers.
    pub(super) fn moved(&mut self, clients: &mut RedisClients) {
        for (&place, entry) in &mut self.entries {
            let cell = self.key_table.cell(place);
            entry.key.calls_mut().find_server(clients, cell);
        }
    }

    /// Returns everything that no request uses, in parallel.
    pub(super) fn hand_back(&mut self, clients: &mut RedisClients, now_ns: u64) -> HandedBack {
        let mut all = HandedBack::default();
        for place in self.places(|_| true) {
            let back = self.act(clients, now_ns, place, |key, at| {
                (key.hand_back(at), key.calls().terms().algorithm)
            });
            match back {
                Some((units, LeaseAlgorithm::Slots)) => all.slots += units,
                Some((units, _)) => all.tokens += units,
                None => {}
            }
        }
        all
    }

    /// Removes all keys from the gauges: a gateway may continue with another lease manager.
    pub(super) fn forget_all(&mut self) {
        for place in self.places(|_| true) {
            self.forget(place);
        }
        for limit in self.backlog.disagreeing.drain(..) {
            limit.metrics.disagreement.set(0.0);
        }
    }

    /// Whether calls are in flight.
    pub(super) fn is_busy(&self) -> bool {
        let mut entries = self.entries.values();
        entries.any(|entry| entry.key.calls().flight.is_some())
    }

    /// Only records that a call has ended.
    pub(super) fn leave(&mut self, event: &Event) {
        if let Some(entry) = self.entries.get_mut(&event.place) {
            entry.key.calls_mut().take_flight(event.id);
        }
    }
}
