//! What every key with a lease has, of tokens or of slots: the requests that wait for it, its call
//! in flight, and its server.

use std::{collections::VecDeque, rc::Rc, sync::Arc};

use tokio::sync::mpsc::Sender;

use super::{
    message::{KeeperOutcome, LateMessage, Waiter},
    redis_clients::{CallSubject, Event, RedisClients},
};
use crate::budget::{
    key_table::{CellNotice, KeyCell, KeyTable, SlotCell, Tag},
    lease::{LeaseTerms, Origin, Reply, Requests},
    settings::{SharedKeyName, SharedLimit},
};

/// After a loss, keys are reported in batches, at this interval.
pub(super) const TELL_PAUSE_NS: u64 = 5_000_000;

/// The calls of one key.
pub(super) struct KeyCalls {
    pub(super) limit: Arc<SharedLimit>,
    pub(super) tier: usize,
    pub(super) tag: Tag,
    redis_key: Rc<str>,
    /// The key's name in older versions, for the first call.
    former_key: Option<Rc<str>>,
    pub(super) shard: usize,
    /// Requests that wait for the next call.
    pub(super) queue: VecDeque<Waiter>,
    pub(super) flight: Option<CallInFlight>,
    /// Whether it is queued for a call without a request.
    pub(super) is_to_tell: bool,
}

/// A call in flight.
pub(super) struct CallInFlight {
    pub(super) id: u64,
    pub(super) waiters: VecDeque<Waiter>,
    /// The units requested for its waiters.
    pub(super) need: Requests,
}

/// Keys that are reported to Redis without a request, because it lost them or units go back; and
/// limits on which gateways disagree.
pub(super) struct Backlog {
    pub(super) telling: VecDeque<usize>,
    /// When the next ones are due.
    pub(super) tell_ns: u64,
    pub(super) disagreeing: Vec<Arc<SharedLimit>>,
}

/// What an action on a key works with.
pub(super) struct KeyContext<'a> {
    pub(super) now_ns: u64,
    /// The index of the key's cell.
    pub(super) place: usize,
    pub(super) key_table: &'a Arc<KeyTable>,
    /// For the slots that requests return.
    pub(super) notices: &'a Sender<CellNotice>,
    pub(super) clients: &'a mut RedisClients,
    pub(super) backlog: &'a mut Backlog,
}

/// A key with a lease: of tokens, or of slots.
pub(super) trait LeasedKey {
    fn calls(&self) -> &KeyCalls;

    fn calls_mut(&mut self) -> &mut KeyCalls;

    /// A request found nothing in the cell.
    fn ask(&mut self, at: &mut KeyContext<'_>, waiter: Waiter);

    /// The cell is low, or a slot was returned to it. False if the key can be forgotten.
    fn noticed(&mut self, at: &mut KeyContext<'_>) -> bool;

    /// Applies a reply; `flight` is its call, unless that was given up.
    fn replied(
        &mut self,
        at: &mut KeyContext<'_>,
        event: &Event,
        reply: &Reply,
        flight: Option<CallInFlight>,
    );

    /// The server has lost data.
    fn lost(&mut self, at: &mut KeyContext<'_>);

    /// Reports the key without a request.
    fn tell(&mut self, at: &mut KeyContext<'_>);

    /// Looks at the key when it is due. False if it can be forgotten. `may_remember`: there is room
    /// for idle keys that a Redis without data would need.
    fn look(&mut self, at: &mut KeyContext<'_>, may_remember: bool) -> bool;

    /// Updates the gauges; returns when to look at the key again.
    fn next_look_ns(&mut self, at: &mut KeyContext<'_>) -> u64;

    /// Returns everything that no request uses; returns how much.
    fn hand_back(&mut self, at: &mut KeyContext<'_>) -> u64;

    /// Removes the key's contribution from the gauges.
    fn hide(&self);

    /// Units granted to a request that did not use them.
    fn unused(&mut self, _at: &mut KeyContext<'_>, _origin: Origin, _tokens: u64) {}

    /// Units admitted by slack were not used.
    fn unslacked(&mut self, _tokens: u64) {}

    /// Units are charged or refunded after an answer.
    fn late(&mut self, _at: &mut KeyContext<'_>, _late: &LateMessage) {}

    /// Whether to call even if no request waits.
    fn has_news(&self) -> bool {
        false
    }
}

impl Default for Backlog {
    fn default() -> Backlog {
        Backlog {
            telling: VecDeque::new(),
            tell_ns: u64::MAX,
            disagreeing: Vec::new(),
        }
    }
}

impl Backlog {
    /// Reports the keys that wait for it in a moment.
    pub(super) fn tell_soon(&mut self, now_ns: u64) {
        self.tell_ns = self.tell_ns.min(now_ns.saturating_add(TELL_PAUSE_NS));
    }
}

impl<'a> KeyContext<'a> {
    pub(super) fn cell(&self) -> KeyCell<'a> {
        self.key_table.cell(self.place)
    }

    pub(super) fn slots(&self) -> SlotCell<'a> {
        self.key_table.slots(self.place)
    }

    pub(super) fn answer(&self, waiter: Waiter, outcome: KeeperOutcome) -> bool {
        waiter.tell(self.place, outcome)
    }
}

impl KeyCalls {
    /// A key without calls.
    pub(super) fn new(
        at: &mut KeyContext<'_>,
        limit: &Arc<SharedLimit>,
        (tier, tag): (usize, Tag),
        name: SharedKeyName,
    ) -> KeyCalls {
        // keys without a cell of their own share a bucket in the store, too
        let name = if at.key_table.has_key(at.place) {
            name
        } else {
            SharedKeyName::OVERFLOW
        };
        let terms = limit.tier(tier).terms;
        let redis_key = limit.redis_key(at.clients.prefix(), &terms, name);
        let former_key = limit.former_key(at.clients.prefix(), &terms, name);
        let shard = at.clients.shard_of(&redis_key);
        at.cell().set_shard(shard);
        KeyCalls {
            limit: Arc::clone(limit),
            tier,
            tag,
            redis_key: redis_key.into(),
            former_key: former_key.map(Rc::from),
            shard,
            queue: VecDeque::new(),
            flight: None,
            is_to_tell: false,
        }
    }

    pub(super) fn terms(&self) -> LeaseTerms {
        self.limit.tier(self.tier).terms
    }

    /// Finds the key's server again.
    pub(super) fn find_server(&mut self, clients: &mut RedisClients, cell: KeyCell<'_>) {
        self.shard = clients.shard_of(&self.redis_key);
        cell.set_shard(self.shard);
    }

    /// Permission for a call. If it is not granted, the waiting requests use their fallback.
    pub(super) fn may_call(&mut self, at: &mut KeyContext<'_>) -> bool {
        let may = at.clients.may_call(at.now_ns, self.shard);
        if !may {
            for waiter in self.queue.drain(..) {
                at.answer(waiter, KeeperOutcome::Alone);
            }
        }
        may
    }

    /// Takes from the queue the requests for the next call.
    pub(super) fn begin(&mut self) -> (VecDeque<Waiter>, Requests) {
        Requests::begin(&mut self.queue, |waiter| waiter.cost)
    }

    /// Sends a call.
    pub(super) fn send(
        &mut self,
        at: &KeyContext<'_>,
        call: CallInFlight,
        arguments: Vec<Vec<u8>>,
        memory_at: Option<usize>,
    ) {
        self.limit.metrics.calls.increment(1);
        let about = CallSubject {
            place: at.place,
            tag: self.tag,
            shard: self.shard,
            key: Rc::clone(&self.redis_key),
            former_key: self.former_key.clone(),
            algorithm: self.terms().algorithm,
            memory_at,
        };
        let id = call.id;
        self.flight = Some(call);
        at.clients.send(at.now_ns, id, about, arguments);
    }

    /// A call was answered. Returns it, unless it was given up.
    pub(super) fn answered(&mut self, at: &mut KeyContext<'_>, id: u64) -> Option<CallInFlight> {
        self.find_server(at.clients, at.cell());
        self.former_key = None;
        self.take_flight(id)
    }

    pub(super) fn take_flight(&mut self, id: u64) -> Option<CallInFlight> {
        self.flight.take_if(|flight| flight.id == id)
    }

    /// A call is overdue or failed: its waiters use their fallback, and also those of the next call.
    pub(super) fn give_up(&mut self, place: usize, id: u64) {
        if let Some(flight) = self.take_flight(id) {
            for waiter in flight.waiters.into_iter().chain(self.queue.drain(..)) {
                waiter.tell(place, KeeperOutcome::Alone);
            }
        }
    }
}
