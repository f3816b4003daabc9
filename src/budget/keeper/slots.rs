//! Every key whose requests in flight are counted: who waits for a slot, and when Redis is told what is held here.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
};

use tokio::sync::mpsc::{Sender, WeakSender};

use super::{
    entry::Flight,
    message::{Message, Question, Waiter, Word},
    wire::{About, Event, Wire},
};
use crate::budget::{
    hand::{Hands, Lent, Tag},
    holding::{Holding, LIFE_NS},
    lease::{self, Terms},
    settings::{Name, SharedLimit, WhenDown},
};

/// One key in use.
struct Entry {
    limit: Arc<SharedLimit>,
    tier: usize,
    tag: Tag,
    key: Rc<str>,
    shard: usize,
    holding: Holding,
    /// Requests that wait for the next call.
    queue: VecDeque<Waiter>,
    flight: Option<Flight>,
    refuse_until_ns: u64,
    /// When somebody last asked.
    asked_ns: u64,
    /// When it is looked at next.
    look_ns: u64,
    /// What the gauge counts of its free slots.
    counted: u64,
}

/// Keys by the place of their hand.
pub(super) struct InFlight {
    hands: Arc<Hands>,
    /// To hear of slots that come back; weak, as the keeper ends when nobody else can tell it anything.
    keeper: WeakSender<Message>,
    entries: HashMap<usize, Entry>,
    looks: BinaryHeap<Reverse<(u64, usize)>>,
}

impl InFlight {
    pub(super) fn new(hands: Arc<Hands>, keeper: WeakSender<Message>) -> InFlight {
        InFlight {
            hands,
            keeper,
            entries: HashMap::new(),
            looks: BinaryHeap::new(),
        }
    }

    /// Whether a place is (still) this key's.
    pub(super) fn has(&self, place: usize, tag: Tag) -> bool {
        let entry = self.entries.get(&place);
        entry.is_some_and(|entry| entry.tag == tag)
    }

    /// A request that found no free slot in the hand.
    pub(super) fn ask(&mut self, wire: &mut Wire, now_ns: u64, question: Question) {
        let Some(keeper) = self.keeper.upgrade() else {
            return;
        };
        let place = self.entry_of(wire, now_ns, &question);
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        entry.asked_ns = now_ns;
        let waiter = Waiter {
            cost: question.cost,
            answer: question.answer,
        };
        if self.hands.slots(place).take(now_ns, waiter.cost).is_ok() {
            entry.lend(waiter, place, &self.hands, &keeper);
        } else if now_ns < entry.refuse_until_ns {
            waiter.tell(place, Word::Refused);
        } else if wire.is_open(entry.shard) {
            waiter.tell(place, Word::Alone);
        } else {
            entry.queue.push_back(waiter);
            if entry.flight.is_none() {
                self.call(wire, now_ns, place, 0);
            }
        }
        self.settle(wire, now_ns, place);
    }

    /// The place of the hand of the question's key, which is set up where it is new.
    fn entry_of(&mut self, wire: &mut Wire, now_ns: u64, question: &Question) -> usize {
        let tier = question.limit.tier(question.tier);
        let hands = &self.hands;
        let place = hands
            .claim(question.tag, tier.overflow)
            .unwrap_or_else(|| hands.overflow(tier.overflow));
        let known = self.entries.get(&place);
        if known.is_some_and(|entry| entry.tag == question.tag || !hands.has_key(place)) {
            return place;
        }
        // keys that find no room share a bucket in the store, too
        let name = if hands.has_key(place) {
            question.name
        } else {
            Name::OVERFLOW
        };
        let key = question.limit.redis_key(wire.prefix(), &tier.terms, name);
        let shard = wire.shard_of(&key);
        hands.hand(place).set_shard(shard);
        let entry = Entry {
            limit: Arc::clone(&question.limit),
            tier: question.tier,
            tag: question.tag,
            key: key.into(),
            shard,
            holding: Holding::default(),
            queue: VecDeque::new(),
            flight: None,
            refuse_until_ns: 0,
            asked_ns: now_ns,
            look_ns: u64::MAX,
            counted: 0,
        };
        entry.prepare_alone(hands, place, wire.gateways());
        question.limit.metrics.keys.increment(1.0);
        self.entries.insert(place, entry);
        place
    }

    /// Declares what is held, for whoever waits, and gives back so many free slots.
    fn call(&mut self, wire: &mut Wire, now_ns: u64, place: usize, surplus: u64) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let slots = self.hands.slots(place);
        if !wire.may_call(now_ns, entry.shard) {
            for waiter in entry.queue.drain(..) {
                waiter.tell(place, Word::Alone);
            }
            return;
        }
        let (waiters, need) = lease::Requests::begin(&mut entry.queue, |waiter| waiter.cost);
        let units = waiters.iter().map(|waiter| waiter.cost).sum();
        if surplus > 0 {
            // first: whoever comes between would be refused a slot that is on its way back
            entry.refuse_until_ns = 0;
            slots.forget_refusal();
        }
        let back = slots.withdraw(surplus);
        entry.limit.metrics.returned.increment(back);
        entry.limit.metrics.calls.increment(1);
        let id = wire.number();
        let alone = slots.used_alone();
        let declared = entry.holding.declare(now_ns, id, back, alone, units);
        let terms = entry.terms();
        let arguments = vec![
            wire.id().to_owned(),
            terms.capacity.to_string(),
            declared.held.to_string(),
            need.to_string(),
            (LIFE_NS / 1000).to_string(),
            id.to_string(),
        ];
        let arguments = arguments.into_iter().map(String::into_bytes).collect();
        entry.flight = Some(Flight { id, waiters, need });
        let about = About {
            place,
            tag: entry.tag,
            shard: entry.shard,
            key: Rc::clone(&entry.key),
            former_key: None,
            algorithm: terms.algorithm,
            memory_at: None,
        };
        wire.send(now_ns, id, about, arguments);
    }

    /// Tells whoever waits for a call that it brings nothing in time.
    pub(super) fn give_up(&mut self, event: &Event) {
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        if let Some(flight) = entry.flight.take_if(|flight| flight.id == event.id) {
            flight.give_up(&mut entry.queue, event.place);
        }
    }

    fn entry_about(&mut self, event: &Event) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(&event.place);
        entry.filter(|entry| entry.tag == event.tag)
    }

    pub(super) fn replied(
        &mut self,
        wire: &mut Wire,
        now_ns: u64,
        event: &Event,
        reply: &lease::Reply,
    ) {
        let (jitter, gateways) = (wire.jitter(), wire.gateways());
        let hands = Arc::clone(&self.hands);
        let keeper = self.keeper.upgrade();
        let slots = hands.slots(event.place);
        let Some(entry) = self.entry_about(event) else {
            return;
        };
        entry.shard = wire.shard_of(&entry.key);
        hands.hand(event.place).set_shard(entry.shard);
        let flight = entry.flight.take_if(|flight| flight.id == event.id);
        let terms = entry.terms();
        let lot = entry
            .holding
            .replied(now_ns, event.sent_ns, event.id, reply, &terms, jitter);
        let Some(lot) = lot else { return };
        entry.limit.metrics.granted.increment(lot.granted);
        entry.refuse_until_ns = lot.refuse_until_ns;
        slots.know(entry.holding.mine(), reply.pool, lot.refuse_until_ns);
        entry.prepare_alone(&hands, event.place, gateways);
        // what there was: the store handed it out in this order
        let (mut whole, mut granted) = (lot.granted.saturating_add(reply.pool), lot.granted);
        let asked = flight.map(|flight| flight.waiters).unwrap_or_default();
        let mut rest = VecDeque::new();
        for waiter in asked {
            match &keeper {
                Some(keeper) if waiter.cost <= whole.min(granted) => {
                    (whole, granted) = (whole - waiter.cost, granted - waiter.cost);
                    entry.lend(waiter, event.place, &hands, keeper);
                }
                _ => rest.push_back((waiter, true)),
            }
        }
        slots.add(granted, lot.good_until_ns);
        rest.extend(entry.queue.drain(..).map(|waiter| (waiter, false)));
        for (waiter, was_asked) in rest {
            let is_free = slots.take(now_ns, waiter.cost).is_ok();
            // of what is asked for every request, nobody but the store knows what has come back
            let may_fit = !terms.ahead || waiter.cost <= reply.pool;
            match (&keeper, is_free) {
                (Some(keeper), true) => entry.lend(waiter, event.place, &hands, keeper),
                (_, false) if !was_asked && may_fit => entry.queue.push_back(waiter),
                _ => _ = waiter.tell(event.place, Word::Refused),
            }
        }
        if !entry.queue.is_empty() {
            self.call(wire, now_ns, event.place, 0);
        }
    }

    /// A slot has come back.
    pub(super) fn freed(&mut self, wire: &mut Wire, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let free = self.hands.slots(place).free();
        let (terms, gateways) = (entry.terms(), wire.gateways());
        if entry.holding.freed(now_ns, &terms, gateways, free) {
            return self.look(wire, now_ns, place);
        }
        self.settle(wire, now_ns, place);
    }

    /// Looks at every key whose time has come.
    pub(super) fn look_at_due(&mut self, wire: &mut Wire, now_ns: u64) {
        while let Some(&Reverse((due, place))) = self.looks.peek()
            && due <= now_ns
        {
            self.looks.pop();
            // of several looks that were planned for a key, the one that counts is the one it remembers
            let entry = self.entries.get_mut(&place);
            if let Some(entry) = entry.filter(|entry| entry.look_ns == due) {
                entry.look_ns = u64::MAX;
                self.look(wire, now_ns, place);
            }
        }
    }

    /// When a key is to be looked at next.
    pub(super) fn next_ns(&self) -> u64 {
        self.looks.peek().map_or(u64::MAX, |&Reverse((due, _))| due)
    }

    fn look(&mut self, wire: &mut Wire, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        if entry.flight.is_none() {
            let slots = self.hands.slots(place);
            let (free, alone) = (slots.free(), slots.used_alone());
            let (terms, gateways) = (entry.terms(), wire.gateways());
            let back = entry.holding.surplus(now_ns, &terms, gateways, free);
            if !wire.is_open(entry.shard) && entry.holding.is_due(now_ns, back, alone) {
                self.call(wire, now_ns, place, back);
            } else if entry.holding.is_idle(now_ns, entry.asked_ns, alone) {
                return self.forget(place);
            }
        }
        self.settle(wire, now_ns, place);
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.entries.remove(&place) {
            let quota = entry.limit.tier(entry.tier).overflow;
            self.hands.release(place, quota);
            entry.limit.metrics.keys.decrement(1.0);
            entry.limit.metrics.in_hand.decrement(entry.counted as f64);
        }
    }

    /// Plans the next look at a key, and brings its gauge up to date.
    pub(super) fn settle(&mut self, wire: &Wire, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let slots = self.hands.slots(place);
        let (free, alone) = (slots.free(), slots.used_alone());
        let (terms, gateways) = (entry.terms(), wire.gateways());
        // where some are kept, a look is planned anyway
        if free == 0 || entry.holding.keeps_nothing(now_ns, &terms, gateways) {
            slots.listen();
        }
        let gauge = &entry.limit.metrics.in_hand;
        gauge.increment(free as f64 - entry.counted as f64);
        entry.counted = free;
        let next = if wire.is_open(entry.shard) {
            // nothing can be told; what is free is there for the next request
            now_ns.saturating_add(LIFE_NS / 10)
        } else {
            let holding = &entry.holding;
            holding.look_again_ns(now_ns, &terms, gateways, (free, alone))
        };
        // a look that comes too early plans the next one
        if next < entry.look_ns {
            entry.look_ns = next;
            self.looks.push(Reverse((next, place)));
        }
    }

    /// A server has lost something: what is held is declared anew at once.
    pub(super) fn lost(&mut self, wire: &mut Wire, now_ns: u64, shard: usize) {
        let keys = self.entries.iter();
        let keys = keys.filter(|(_, entry)| entry.shard == shard && entry.flight.is_none());
        let places: Vec<usize> = keys.map(|(&place, _)| place).collect();
        for place in places {
            self.call(wire, now_ns, place, 0);
        }
    }

    /// Keys are kept elsewhere now.
    pub(super) fn moved(&mut self, wire: &mut Wire) {
        for (&place, entry) in &mut self.entries {
            entry.shard = wire.shard_of(&entry.key);
            self.hands.hand(place).set_shard(entry.shard);
        }
    }

    /// Gives every free slot back, all at once; how many there are. What requests hold is free when its life is over.
    pub(super) fn hand_back(&mut self, wire: &mut Wire, now_ns: u64) -> u64 {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        let mut returned: u64 = 0;
        for place in places {
            let slots = self.hands.slots(place);
            if let Some(entry) = self.entries.get_mut(&place) {
                entry.flight = None;
                let free = slots.free();
                if entry.holding.is_due(now_ns, free, slots.used_alone()) {
                    returned += free;
                    self.call(wire, now_ns, place, free);
                }
            }
        }
        returned
    }

    /// No gauge counts any more what was kept here: a gateway may go on with another keeper.
    pub(super) fn forget_all(&mut self) {
        let places: Vec<usize> = self.entries.keys().copied().collect();
        places.into_iter().for_each(|place| self.forget(place));
    }

    /// Whether calls are under way.
    pub(super) fn is_busy(&self) -> bool {
        self.entries.values().any(|entry| entry.flight.is_some())
    }

    /// Notes only that a call has ended.
    pub(super) fn leave(&mut self, event: &Event) {
        if let Some(entry) = self.entries.get_mut(&event.place) {
            entry.flight.take_if(|flight| flight.id == event.id);
        }
    }
}

impl Entry {
    fn terms(&self) -> Terms {
        self.limit.tier(self.tier).terms
    }

    /// Slots were taken for this request: it gets them, or they come back because it has gone.
    fn lend(&self, waiter: Waiter, place: usize, hands: &Arc<Hands>, keeper: &Sender<Message>) {
        let lent = Lent::new((hands, keeper), (place, self.tag), waiter.cost, false);
        waiter.tell(place, Word::Lent(lent));
    }

    /// How many requests may be under way here while Redis does not answer: this gateway's share, in part.
    fn prepare_alone(&self, hands: &Hands, place: usize, gateways: f64) {
        let share = self.holding.share().unwrap_or(1.0 / gateways);
        if let Some(most) = most_alone(&self.terms(), self.limit.when_down, share) {
            hands.slots(place).prepare_alone(most);
        }
    }
}

/// As many requests as a gateway with this share of the limit may have under way alone, at least one.
pub(in crate::budget) fn most_alone(terms: &Terms, when_down: WhenDown, share: f64) -> Option<u64> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let most = fraction * share * terms.capacity as f64;
    Some((most as u64).max(1))
}
