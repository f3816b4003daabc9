//! The one task that talks to Redis: it keeps a lease for every key in use, and everything that waits for one.
//!
//! ```text
//!   workers ── ask, low, return ──▶ bounded queue ──▶ keeper ── one call per key ──▶ Redis
//!      ▲                                                │  ▲                           │
//!      └── answer (oneshot) ◀── hands (atomics) ◀───────┘  └──── reply, or none ◀──────┘
//! ```
//!
//! It lives on a thread of its own, so that nothing an operator asks for delays a request. A request that finds no token waits
//! for the reply to the call of its key; whoever arrives meanwhile waits for the same one. When a call has taken the budget,
//! all who wait are told to go on alone; its reply is banked when it comes.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use redis::Value;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    Degraded,
    breaker::{Allowed, Breaker},
    cluster::Servers,
    hand::{Alone, Hand, Hands, Spent, Tag},
    lease::{self, Algorithm, Call, Lease, Report, Terms},
    redis::{Failure, Patience, Script, Target, reply},
    settings::{Name, SharedLimit, WhenDown},
};
use crate::telemetry::handles::BudgetMetrics;

/// What workers tell the keeper.
#[derive(Debug)]
pub(super) enum Message {
    /// A request waits for tokens.
    Ask(Question),
    /// A hand should be filled up.
    Low(usize, Tag),
    /// Units of a limit that is always asked for were granted by this call and not used.
    Return {
        place: usize,
        tag: Tag,
        generation: u32,
        tokens: u64,
    },
    /// Hand everything back, and end.
    Close(Duration),
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) limit: Arc<SharedLimit>,
    pub(super) tier: usize,
    pub(super) tag: Tag,
    pub(super) name: Name,
    pub(super) cost: u64,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// What it is told, and the place of its key's hand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) place: usize,
    pub(super) word: Word,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    /// It has its tokens: the store granted them to it.
    Granted(Grant),
    /// It has its tokens: out of the hand.
    Taken(lease::Hand),
    /// Refused; the hand knows for how long.
    Refused,
    /// Redis does not answer in time: the limit's own way to go on, for which the hand is prepared.
    Alone,
}

/// Where tokens belong that were granted to requests that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) slot: usize,
    pub(super) generation: u32,
    pub(super) deadline_ns: u64,
}

#[derive(Debug)]
struct Waiter {
    cost: u64,
    answer: oneshot::Sender<Answer>,
}

impl Waiter {
    /// False when it has gone.
    fn tell(self, place: usize, word: Word) -> bool {
        self.answer.send(Answer { place, word }).is_ok()
    }
}

/// One key in use.
struct Entry {
    limit: Arc<SharedLimit>,
    tier: usize,
    tag: Tag,
    key: Rc<str>,
    shard: usize,
    lease: Lease,
    /// Requests that wait for the next call.
    queue: VecDeque<Waiter>,
    flight: Option<Flight>,
    refuse_until_ns: u64,
    /// When to ask again by itself.
    poll_ns: Option<u64>,
    /// When it is looked at next.
    look_ns: u64,
    /// What the gauge counts of its tokens.
    counted: u64,
}

/// A call under way.
struct Flight {
    id: u64,
    waiters: VecDeque<Waiter>,
}

/// How a call ended, or that it has taken the budget.
struct Event {
    place: usize,
    tag: Tag,
    shard: usize,
    id: u64,
    sent_ns: u64,
    kind: EventKind,
}

enum EventKind {
    Overdue,
    Ended(Result<lease::Reply, Failure>),
    Probed(Result<(), Failure>),
    /// The servers of a cluster keep other slots now.
    Moved,
    /// So many gateways live.
    Counted(u64),
}

impl Event {
    /// Of a server, and no key.
    fn about(shard: usize, kind: EventKind) -> Event {
        Event {
            place: usize::MAX,
            tag: Tag::NONE,
            shard,
            id: 0,
            sent_ns: 0,
            kind,
        }
    }
}

/// Messages that may wait for the keeper, and events.
pub(super) const QUEUE: usize = 16_384;

/// Everything that the keeper is started with.
pub(super) struct Duty {
    pub(super) hands: Arc<Hands>,
    pub(super) degraded: Arc<Degraded>,
    pub(super) target: Target,
    pub(super) patience: Patience,
    pub(super) prefix: String,
    pub(super) budget: Duration,
    pub(super) epoch: Instant,
    pub(super) metrics: BudgetMetrics,
    /// A name that no other process has.
    pub(super) id: String,
    pub(super) seed: u64,
}

/// One Redis that keeps some of the keys: its own breaker, its own distance.
struct Shard {
    breaker: Breaker,
    rtt_ns: f64,
}

pub(super) struct Keeper {
    duty: Duty,
    servers: Rc<Servers>,
    /// In the order of the servers.
    shards: Vec<Shard>,
    scripts: Rc<Scripts>,
    entries: HashMap<usize, Entry>,
    looks: BinaryHeap<Reverse<(u64, usize)>>,
    events: mpsc::Sender<Event>,
    calls: u64,
    random: u64,
    /// How many gateways there are, as far as is known.
    gateways: f64,
    /// When to say again that this one lives.
    count_ns: u64,
}

/// Until a call has been timed.
const RTT_NS: f64 = 1e6;
/// How often a gateway says that it lives, and after how long it is taken for gone.
const COUNT_NS: u64 = 2_000_000_000;
const GONE_MS: u64 = 6_000;
/// A call keeps its place for so many budgets.
pub(super) const PATIENCE: u32 = 20;

/// One for each form of state.
#[derive(Debug)]
struct Scripts {
    nodes: Script,
    bucket: Script,
    window: Script,
    log: Script,
}

impl Scripts {
    fn new() -> Scripts {
        Scripts {
            nodes: Script::new(include_str!("nodes.lua")),
            bucket: Script::new(include_str!("bucket.lua")),
            window: Script::new(include_str!("window.lua")),
            log: Script::new(include_str!("log.lua")),
        }
    }

    fn of(&self, algorithm: Algorithm) -> &Script {
        match algorithm {
            Algorithm::Bucket => &self.bucket,
            Algorithm::Fixed | Algorithm::Sliding => &self.window,
            Algorithm::Log => &self.log,
        }
    }
}

impl Keeper {
    /// Serves until it is told to close. `started` hears whether Redis answered the first time.
    pub(super) async fn run(
        duty: Duty,
        mut messages: mpsc::Receiver<Message>,
        started: std::sync::mpsc::SyncSender<Result<(), Failure>>,
    ) {
        let (events, mut happened) = mpsc::channel(QUEUE);
        let mut keeper = Keeper {
            servers: Rc::new(Servers::new(&duty.target, duty.patience)),
            shards: Vec::new(),
            scripts: Rc::new(Scripts::new()),
            entries: HashMap::new(),
            looks: BinaryHeap::new(),
            events,
            calls: 0,
            random: duty.seed | 1,
            gateways: 1.0,
            count_ns: 0,
            duty,
        };
        // nobody waits for the answer any more where the process gives up
        let _ = started.send(keeper.connect().await);
        loop {
            let wake = keeper.next_wake();
            tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Close(patience)) => {
                        return keeper.close(&mut happened, patience).await;
                    }
                    Some(message) => keeper.hear(message),
                    None => return,
                },
                // the keeper holds a sender: there is always another event
                Some(event) = happened.recv() => keeper.happened(event),
                () = tokio::time::sleep_until(wake) => keeper.look_at_due(),
            }
        }
    }

    /// The first connections. A Redis that does not answer is given up until a probe is answered: the gateway starts without.
    async fn connect(&mut self) -> Result<(), Failure> {
        self.servers.refresh().await;
        self.meet_servers();
        let mut first = Ok(());
        for shard in 0..self.shards.len() {
            if !self.servers.is_used(shard) {
                continue;
            }
            let key = self.servers.probe_key(&self.duty.prefix, shard);
            let result = self.servers.link(shard).probe(&key).await;
            if result.is_err() {
                self.shards[shard].breaker.probing();
                self.probed(shard, result);
                first = result;
            }
        }
        first
    }

    /// Servers that are new get a breaker.
    fn meet_servers(&mut self) {
        let new = || Shard {
            breaker: Breaker::new(),
            rtt_ns: RTT_NS,
        };
        self.shards.resize_with(self.servers.count(), new);
    }

    /// Looks up who keeps what in a cluster; what comes of it is an event.
    fn refresh(&self) {
        let (servers, events) = (Rc::clone(&self.servers), self.events.clone());
        tokio::task::spawn_local(async move {
            if servers.refresh().await {
                let _ = events.send(Event::about(0, EventKind::Moved)).await;
            }
        });
    }

    /// Keys are kept elsewhere now.
    fn moved(&mut self) {
        self.meet_servers();
        for (&place, entry) in &mut self.entries {
            entry.shard = self.servers.shard_of(&entry.key);
            self.duty.hands.hand(place).set_shard(entry.shard);
        }
        self.show_degraded();
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.duty.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn budget_ns(&self) -> u64 {
        u64::try_from(self.duty.budget.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Random, 0 to 1 (xorshift64).
    fn jitter(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn hear(&mut self, message: Message) {
        let now_ns = self.now_ns();
        match message {
            Message::Ask(question) => self.ask(now_ns, question),
            Message::Low(place, tag) => {
                if self.is_current(place, tag) {
                    self.fill(now_ns, place);
                    self.settle(now_ns, place);
                }
            }
            Message::Return {
                place,
                tag,
                generation,
                tokens,
            } => {
                if self.is_current(place, tag) {
                    self.unused(now_ns, place, generation, tokens);
                }
            }
            Message::Close(_) => {}
        }
    }

    fn is_current(&self, place: usize, tag: Tag) -> bool {
        self.entries
            .get(&place)
            .is_some_and(|entry| entry.tag == tag)
    }

    /// A request that found no token in the hand.
    fn ask(&mut self, now_ns: u64, question: Question) {
        let place = self.entry_of(now_ns, &question);
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let hand = self.duty.hands.hand(place);
        let horizon_ns = entry.terms(&self.shards[entry.shard]).1;
        entry.look(now_ns, hand, horizon_ns);
        entry.lease.arrived(now_ns, horizon_ns, 0, question.cost);
        let waiter = Waiter {
            cost: question.cost,
            answer: question.answer,
        };
        if let Some(tokens) = entry.spend(now_ns, hand, question.cost) {
            waiter.tell(place, Word::Taken(tokens));
        } else if now_ns < entry.refuse_until_ns {
            waiter.tell(place, Word::Refused);
        } else if self.shards[entry.shard].breaker.is_open() {
            waiter.tell(place, Word::Alone);
        } else if entry.flight.is_some() && !entry.lease.may_queue(entry.waiting()) {
            waiter.tell(place, Word::Refused);
        } else {
            entry.queue.push_back(waiter);
            if entry.flight.is_none() {
                self.call(now_ns, place, true);
            }
        }
        self.settle(now_ns, place);
    }

    /// The place of the hand of the question's key, which is set up where it is new.
    fn entry_of(&mut self, now_ns: u64, question: &Question) -> usize {
        let tier = question.limit.tier(question.tier);
        let hands = Arc::clone(&self.duty.hands);
        let place = hands
            .claim(question.tag)
            .unwrap_or_else(|| hands.overflow(tier.overflow));
        if self
            .entries
            .get(&place)
            .is_some_and(|entry| entry.tag == question.tag || !hands.has_key(place))
        {
            return place;
        }
        // keys that find no room share a bucket in the store, too
        let name = if hands.has_key(place) {
            question.name
        } else {
            Name(*b"(no room for it)")
        };
        let key = question
            .limit
            .redis_key(&self.duty.prefix, &tier.terms, name);
        self.meet_servers();
        let shard = self.servers.shard_of(&key);
        hands.hand(place).set_shard(shard);
        let entry = Entry {
            limit: Arc::clone(&question.limit),
            tier: question.tier,
            tag: question.tag,
            key: key.into(),
            shard,
            lease: Lease::default(),
            queue: VecDeque::new(),
            flight: None,
            refuse_until_ns: 0,
            poll_ns: None,
            look_ns: u64::MAX,
            counted: 0,
        };
        entry.prepare_alone(now_ns, hands.hand(place), self.gateways);
        question.limit.metrics.keys.increment(1.0);
        self.entries.insert(place, entry);
        place
    }

    /// Makes a call for whoever waits; `fill` asks for tokens ahead, too.
    fn call(&mut self, now_ns: u64, place: usize, fill: bool) {
        self.call_back(now_ns, place, fill, [0, 0]);
    }

    /// The same, and hands these tokens back, which were taken out of the hand.
    fn call_back(&mut self, now_ns: u64, place: usize, fill: bool, back: lease::Hand) {
        let (budget_ns, jitter) = (self.budget_ns(), self.jitter());
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let hand = self.duty.hands.hand(place);
        let index = entry.shard;
        let shard = &mut self.shards[index];
        let allowed = shard.breaker.enter(now_ns, budget_ns, jitter);
        if allowed != Allowed::Yes {
            for waiter in entry.queue.drain(..) {
                waiter.tell(place, Word::Alone);
            }
            if allowed == Allowed::Open && !self.is_degraded(index) {
                self.opened(index, Failure::Timeout);
            }
            return;
        }
        let terms = entry.limit.tier(entry.tier).terms;
        let horizon_ns = terms.horizon_ns(shard.rtt_ns as u64);
        // the next request that spends need not say that the hand is low
        hand.set_low(None);
        entry.settle_alone(now_ns, hand, self.gateways);
        let waiters = std::mem::take(&mut entry.queue);
        let need = waiters.iter().map(|waiter| waiter.cost).sum();
        let (held, _) = hand.held(now_ns);
        let ask = lease::Ask { need, back, fill };
        let call = entry.lease.call(now_ns, &terms, horizon_ns, held, ask);
        let returned: u64 = back.iter().sum();
        entry.limit.metrics.returned.increment(returned);
        self.calls += 1;
        let id = self.calls;
        entry.flight = Some(Flight { id, waiters });
        entry.poll_ns = None;
        let arguments = arguments(&terms, &call, &self.duty.id, id);
        self.send(now_ns, place, id, arguments);
    }

    /// Sends a call; what becomes of it comes back as an event.
    fn send(&mut self, now_ns: u64, place: usize, id: u64, arguments: Vec<String>) {
        let Some(entry) = self.entries.get(&place) else {
            return;
        };
        let algorithm = entry.limit.tier(entry.tier).terms.algorithm;
        let (tag, key) = (entry.tag, Rc::clone(&entry.key));
        let (servers, shard) = (Rc::clone(&self.servers), entry.shard);
        let (scripts, events, budget) = (
            Rc::clone(&self.scripts),
            self.events.clone(),
            self.duty.budget,
        );
        let event = move |kind| Event {
            place,
            tag,
            shard,
            id,
            sent_ns: now_ns,
            kind,
        };
        tokio::task::spawn_local(async move {
            let call = servers.call(scripts.of(algorithm), &key, &arguments);
            tokio::pin!(call);
            let ended = tokio::select! {
                biased;
                ended = &mut call => Some(ended),
                () = tokio::time::sleep(budget) => None,
            };
            let ended = match ended {
                Some(ended) => ended,
                None => {
                    // the keeper is gone only when the process ends
                    let _ = events.send(event(EventKind::Overdue)).await;
                    call.await
                }
            };
            let ended = ended.and_then(|value| reply(&value));
            let _ = events.send(event(EventKind::Ended(ended))).await;
        });
    }

    fn happened(&mut self, event: Event) {
        let now_ns = self.now_ns();
        match event.kind {
            EventKind::Overdue => self.overdue(now_ns, &event),
            EventKind::Ended(Ok(reply)) => self.replied(now_ns, &event, &reply),
            EventKind::Ended(Err(failure)) => self.failed(now_ns, &event, failure),
            EventKind::Probed(result) => self.probed(event.shard, result),
            EventKind::Moved => self.moved(),
            EventKind::Counted(gateways) => self.counted(gateways),
        }
        if let Some(entry) = self.entries.get(&event.place)
            && entry.tag == event.tag
        {
            self.settle(now_ns, event.place);
        }
    }

    /// A call has taken the budget: whoever waits goes on alone, and the next request makes a call of its own.
    fn overdue(&mut self, now_ns: u64, event: &Event) {
        self.duty.metrics.late.increment(1);
        let (budget_ns, jitter) = (self.budget_ns(), self.jitter());
        let breaker = &mut self.shards[event.shard].breaker;
        let was_open = breaker.is_open();
        breaker.timed_out(now_ns, budget_ns, jitter);
        self.duty.metrics.failed(Failure::Timeout.label());
        self.give_up(event, was_open, Failure::Timeout);
    }

    fn failed(&mut self, now_ns: u64, event: &Event, failure: Failure) {
        let is_late = self.is_late(now_ns, event);
        let jitter = self.jitter();
        let breaker = &mut self.shards[event.shard].breaker;
        let was_open = breaker.is_open();
        breaker.ended();
        self.duty.metrics.errors.increment(1);
        if failure != Failure::Timeout {
            self.duty.metrics.failed(failure.label());
        }
        // one that was overdue has been counted as a failure already
        if !is_late {
            breaker.failed(now_ns, jitter);
        }
        self.give_up(event, was_open, failure);
    }

    fn is_late(&self, now_ns: u64, event: &Event) -> bool {
        now_ns.saturating_sub(event.sent_ns) > self.budget_ns()
    }

    /// Tells whoever waits for a call that it brings nothing in time.
    fn give_up(&mut self, event: &Event, was_open: bool, failure: Failure) {
        if let Some(entry) = self.entries.get_mut(&event.place)
            && entry.tag == event.tag
            && entry
                .flight
                .as_ref()
                .is_some_and(|flight| flight.id == event.id)
        {
            let flight = entry.flight.take();
            let waiters = flight.into_iter().flat_map(|flight| flight.waiters);
            for waiter in waiters.chain(entry.queue.drain(..)) {
                waiter.tell(event.place, Word::Alone);
            }
        }
        if !was_open && self.shards[event.shard].breaker.is_open() {
            self.opened(event.shard, failure);
        }
        self.refresh();
    }

    fn replied(&mut self, now_ns: u64, event: &Event, reply: &lease::Reply) {
        // a redirect may have led to a server that was not known
        self.meet_servers();
        let is_late = self.is_late(now_ns, event);
        let taken_ns = now_ns.saturating_sub(event.sent_ns);
        let shard = &mut self.shards[event.shard];
        shard.breaker.ended();
        self.duty
            .metrics
            .seconds
            .record(Duration::from_nanos(taken_ns));
        if !is_late {
            self.duty.metrics.ok.increment(1);
            shard.breaker.replied();
            shard.rtt_ns += 0.1 * (taken_ns as f64 - shard.rtt_ns);
        }
        let rtt_ns = shard.rtt_ns as u64;
        let jitter = self.jitter();
        let hands = Arc::clone(&self.duty.hands);
        let hand = hands.hand(event.place);
        let gateways = self.gateways;
        let Some(entry) = self
            .entries
            .get_mut(&event.place)
            .filter(|entry| entry.tag == event.tag)
        else {
            return;
        };
        let terms = entry.limit.tier(entry.tier).terms;
        let horizon_ns = terms.horizon_ns(rtt_ns);
        entry.shard = self.servers.shard_of(&entry.key);
        hand.set_shard(entry.shard);
        entry.look(now_ns, hand, horizon_ns);
        entry.settle_alone(now_ns, hand, gateways);
        let sent_ns = event.sent_ns;
        let granted = entry
            .lease
            .replied(now_ns, sent_ns, &terms, rtt_ns, reply, jitter);
        if granted.replaces {
            let lapsed = hand.empty(granted.slot);
            entry.limit.metrics.lapsed.increment(lapsed);
        }
        if granted.bank > 0 {
            hand.bank(granted.slot, granted.deadline_ns, granted.bank);
        }
        entry.limit.metrics.granted_ahead.increment(granted.bank);
        entry.limit.metrics.granted.increment(reply.need);
        entry.prepare_alone(now_ns, hand, gateways);
        let share = entry.lease.share().unwrap_or(1.0);
        let pool = (share * reply.pool as f64).round() as u64;
        hand.set_pool(pool, now_ns, granted.deadline_ns);
        entry.refuse_until_ns = granted.refuse_until_ns.unwrap_or(0);
        hand.refuse_until(entry.refuse_until_ns);

        let is_ours = |flight: &mut Flight| flight.id == event.id;
        let flight = entry.flight.take_if(is_ours);
        let mut waiters = flight.map(|flight| flight.waiters).unwrap_or_default();
        waiters.append(&mut entry.queue);
        let grant = Grant {
            slot: granted.slot,
            generation: reply.generation,
            deadline_ns: granted.deadline_ns,
        };
        let unused = entry.serve(now_ns, event.place, hand, waiters, reply.need, grant);
        if unused > 0 && terms.ahead {
            hand.bank(grant.slot, grant.deadline_ns, unused);
        } else if unused > 0 {
            entry.lease.unused(reply.generation, unused);
        }
        self.go_on(now_ns, event.place);
    }

    /// What is to be done for a key that has no call in flight.
    fn go_on(&mut self, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        if entry.flight.is_some() {
            return;
        }
        if !entry.queue.is_empty() || entry.lease.has_unused() {
            return self.call(now_ns, place, true);
        }
        let hand = self.duty.hands.hand(place);
        let shard = &self.shards[entry.shard];
        let (terms, horizon_ns) = entry.terms(shard);
        let rtt_ns = shard.rtt_ns as u64;
        if now_ns < entry.refuse_until_ns {
            let pause_ns = entry.refuse_until_ns - now_ns;
            let polls = entry.lease.polls(&terms, pause_ns);
            entry.poll_ns = polls.then_some(entry.refuse_until_ns);
            return;
        }
        let (held, _) = hand.held(now_ns);
        if entry.lease.is_low(now_ns, &terms, horizon_ns, rtt_ns, held) {
            return self.call(now_ns, place, true);
        }
        hand.set_low(entry.lease.low_mark(now_ns, &terms, horizon_ns, rtt_ns));
    }

    /// A hand has said that it is low.
    fn fill(&mut self, now_ns: u64, place: usize) {
        if let Some(entry) = self.entries.get_mut(&place) {
            let horizon_ns = entry.terms(&self.shards[entry.shard]).1;
            entry.look(now_ns, self.duty.hands.hand(place), horizon_ns);
            self.go_on(now_ns, place);
        }
    }

    /// Units of a limit that is always asked for were granted and not used.
    fn unused(&mut self, now_ns: u64, place: usize, generation: u32, tokens: u64) {
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.lease.unused(generation, tokens);
            self.go_on(now_ns, place);
        }
    }

    /// Looks at every key whose time has come.
    fn look_at_due(&mut self) {
        let now_ns = self.now_ns();
        for shard in 0..self.shards.len() {
            let due = self.shards[shard].breaker.probe_due_ns();
            if due.is_some_and(|due| due <= now_ns) {
                self.probe(shard);
            }
        }
        if now_ns >= self.count_ns {
            self.count_ns = now_ns.saturating_add(COUNT_NS);
            if !self.duty.degraded.all.load(Relaxed) {
                self.count(false);
            }
        }
        while let Some(&Reverse((due, place))) = self.looks.peek()
            && due <= now_ns
        {
            self.looks.pop();
            // of several looks that were planned for a key, the one that counts is the one it remembers
            if self
                .entries
                .get(&place)
                .is_some_and(|entry| entry.look_ns == due)
            {
                self.look(now_ns, place);
            }
        }
    }

    fn look(&mut self, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        entry.look_ns = u64::MAX;
        let hand = self.duty.hands.hand(place);
        let (terms, horizon_ns) = entry.terms(&self.shards[entry.shard]);
        entry.look(now_ns, hand, horizon_ns);
        if entry.flight.is_none() {
            if entry.poll_ns.take_if(|due| *due <= now_ns).is_some() {
                if entry.lease.is_wanted() {
                    self.call(now_ns, place, true);
                }
            } else {
                let (held, _) = hand.held(now_ns);
                let surplus = entry.lease.surplus(now_ns, &terms, horizon_ns, held);
                let back = hand.withdraw(surplus);
                if back != [0, 0] || entry.lease.debt() > 0 {
                    self.call_back(now_ns, place, false, back);
                } else if held == [0, 0] && entry.lease.is_idle(now_ns, horizon_ns) {
                    return self.forget(place);
                }
            }
        }
        self.settle(now_ns, place);
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.entries.remove(&place) {
            entry.limit.metrics.keys.decrement(1.0);
            entry.limit.metrics.in_hand.decrement(entry.counted as f64);
        }
        self.duty.hands.release(place);
    }

    /// Plans the next look at a key, and brings its gauge up to date.
    fn settle(&mut self, now_ns: u64, place: usize) {
        let Some(entry) = self.entries.get_mut(&place) else {
            return;
        };
        let (_, horizon_ns) = entry.terms(&self.shards[entry.shard]);
        let (held, _) = self.duty.hands.hand(place).held(now_ns);
        let held: u64 = held.iter().sum();
        let gauge = &entry.limit.metrics.in_hand;
        gauge.increment(held as f64 - entry.counted as f64);
        entry.counted = held;
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

    fn probe(&mut self, shard: usize) {
        self.shards[shard].breaker.probing();
        let key = self.servers.probe_key(&self.duty.prefix, shard);
        let (link, events) = (self.servers.link(shard), self.events.clone());
        tokio::task::spawn_local(async move {
            let result = link.probe(&key).await;
            let event = Event::about(shard, EventKind::Probed(result));
            let _ = events.send(event).await;
        });
    }

    fn probed(&mut self, shard: usize, result: Result<(), Failure>) {
        let (now_ns, jitter) = (self.now_ns(), self.jitter());
        // a server that keeps nothing any more is left alone
        let is_used = self.servers.is_used(shard);
        let breaker = &mut self.shards[shard].breaker;
        breaker.probed(now_ns, result.is_ok() || !is_used, jitter);
        let was_degraded = self.is_degraded(shard);
        match result {
            Ok(()) => tracing::info!(
                redis = self.servers.link(shard).address(),
                "Redis answers again: shared limits are kept together"
            ),
            Err(failure) => {
                self.duty.metrics.failed(failure.label());
                if !was_degraded && is_used {
                    self.opened(shard, failure);
                }
                self.refresh();
            }
        }
        self.show_degraded();
    }

    fn is_degraded(&self, shard: usize) -> bool {
        self.duty.degraded.servers[shard].load(Relaxed)
    }

    /// One line for each time that Redis is given up.
    fn opened(&mut self, shard: usize, failure: Failure) {
        tracing::warn!(
            redis = self.servers.link(shard).address(),
            kind = failure.label(),
            "Redis does not answer: shared limits go on as on_redis_down says, until it does"
        );
        self.show_degraded();
    }

    /// Tells workers and operators which servers are given up.
    fn show_degraded(&mut self) {
        let degraded = &self.duty.degraded;
        let (mut used, mut open) = (0, 0);
        for (index, shard) in self.shards.iter().enumerate() {
            let is_used = self.servers.is_used(index);
            let is_open = is_used && shard.breaker.is_open();
            degraded.servers[index].store(is_open, Relaxed);
            used += u32::from(is_used);
            open += u32::from(is_open);
        }
        degraded.all.store(open > 0 && open == used, Relaxed);
        self.duty.metrics.breaker_open.set(f64::from(open));
        self.duty.metrics.degraded.set(f64::from(open.min(1)));
    }

    /// Says that this gateway lives, or that it goes, and learns how many do.
    fn count(&mut self, goes: bool) -> tokio::task::JoinHandle<()> {
        let key = format!("{}:gateways", self.duty.prefix);
        let goes = u8::from(goes).to_string();
        let arguments = [self.duty.id.clone(), GONE_MS.to_string(), goes];
        let (servers, scripts, events) = (
            Rc::clone(&self.servers),
            Rc::clone(&self.scripts),
            self.events.clone(),
        );
        tokio::task::spawn_local(async move {
            // where it fails, the last number holds
            if let Ok(Value::Int(count)) = servers.call(&scripts.nodes, &key, &arguments).await {
                let count = u64::try_from(count).unwrap_or(0);
                let _ = events
                    .send(Event::about(0, EventKind::Counted(count)))
                    .await;
            }
        })
    }

    fn counted(&mut self, gateways: u64) {
        self.gateways = gateways.max(1) as f64;
        self.duty.metrics.gateways.set(self.gateways);
    }

    fn next_wake(&self) -> Instant {
        let probes = self
            .shards
            .iter()
            .filter_map(|shard| shard.breaker.probe_due_ns());
        let look = self.looks.peek().map(|&Reverse((due, _))| due);
        let next = probes.chain(look).min().unwrap_or(u64::MAX);
        self.duty.epoch + Duration::from_nanos(next.min(self.count_ns))
    }

    /// Hands every token back, all at once, and waits for the replies, but not for longer than `patience`.
    async fn close(mut self, happened: &mut mpsc::Receiver<Event>, patience: Duration) {
        let now_ns = self.now_ns();
        let deadline = Instant::now() + patience;
        let places: Vec<usize> = self.entries.keys().copied().collect();
        let mut returned: u64 = 0;
        for place in places {
            let Some(entry) = self.entries.get_mut(&place) else {
                continue;
            };
            let hand = self.duty.hands.hand(place);
            let (_, horizon_ns) = entry.terms(&self.shards[entry.shard]);
            entry.look(now_ns, hand, horizon_ns);
            entry.flight = None;
            let back = hand.withdraw([u64::MAX; 2]);
            let count: u64 = back.iter().sum();
            if count > 0 || entry.lease.debt() > 0 {
                returned += count;
                self.call_back(now_ns, place, false, back);
            }
        }
        let good_bye = self.count(true);
        while self.entries.values().any(|entry| entry.flight.is_some()) {
            match tokio::time::timeout_at(deadline, happened.recv()).await {
                Ok(Some(event)) => self.leave(&event),
                Ok(None) | Err(_) => break,
            }
        }
        let _ = tokio::time::timeout_at(deadline, good_bye).await;
        if returned > 0 {
            tracing::info!(tokens = returned, "handed back what was borrowed ahead");
        }
    }

    /// Notes only that a call has ended.
    fn leave(&mut self, event: &Event) {
        if !matches!(event.kind, EventKind::Overdue)
            && let Some(entry) = self.entries.get_mut(&event.place)
        {
            entry.flight.take_if(|flight| flight.id == event.id);
        }
    }
}

impl Entry {
    fn terms(&self, shard: &Shard) -> (Terms, u64) {
        let terms = self.limit.tier(self.tier).terms;
        (terms, terms.horizon_ns(shard.rtt_ns as u64))
    }

    fn waiting(&self) -> u64 {
        let in_flight = self.flight.iter().flat_map(|flight| &flight.waiters);
        in_flight.chain(&self.queue).map(|waiter| waiter.cost).sum()
    }

    /// Learns from the hand what workers did.
    fn look(&mut self, now_ns: u64, hand: Hand<'_>, horizon_ns: u64) {
        let (held, lapsed) = hand.held(now_ns);
        for (slot, has_lapsed) in lapsed.into_iter().enumerate() {
            if has_lapsed {
                self.limit.metrics.lapsed.increment(hand.empty(slot));
                self.lease.lapsed(slot);
            }
        }
        self.lease
            .look(now_ns, horizon_ns, held, hand.take_refused());
    }

    /// Answers those who wait: first with what was granted to them, then from the hand; refuses the rest while the pool is
    /// short, and lets them wait for the next call otherwise. Returns what was granted and nobody waits for.
    fn serve(
        &mut self,
        now_ns: u64,
        place: usize,
        hand: Hand<'_>,
        waiters: VecDeque<Waiter>,
        mut granted: u64,
        grant: Grant,
    ) -> u64 {
        for waiter in waiters {
            let cost = waiter.cost;
            if waiter.answer.is_closed() {
                // it has gone on alone, or away
            } else if cost <= granted {
                if waiter.tell(place, Word::Granted(grant)) {
                    granted -= cost;
                }
            } else if let Some(tokens) = self.spend(now_ns, hand, cost) {
                if !waiter.tell(place, Word::Taken(tokens)) {
                    hand.put_back(tokens);
                }
            } else if now_ns < self.refuse_until_ns {
                waiter.tell(place, Word::Refused);
            } else {
                self.queue.push_back(waiter);
            }
        }
        granted
    }

    /// Takes tokens out of the hand for a request that waits. It was counted when it came.
    fn spend(&mut self, now_ns: u64, hand: Hand<'_>, cost: u64) -> Option<lease::Hand> {
        match hand.spend(now_ns, cost) {
            Spent::Taken { tokens, .. } => {
                self.lease.took(tokens);
                Some(tokens)
            }
            Spent::Refused { .. } | Spent::Nothing => None,
        }
    }

    /// Charges what was admitted alone and the store could not know.
    fn settle_alone(&mut self, now_ns: u64, hand: Hand<'_>, gateways: f64) {
        let (admitted, missing) = hand.alone(now_ns);
        if admitted == 0 {
            return;
        }
        let terms = self.limit.tier(self.tier).terms;
        let share = self.lease.share().unwrap_or(1.0 / gateways);
        let capacity = terms.capacity as f64;
        let level = self.lease.pool(now_ns, &terms).unwrap_or(capacity);
        let expected = share * (capacity - level);
        let debt = (missing - expected).ceil().clamp(0.0, admitted as f64) as u64;
        self.limit.metrics.debt.increment(debt);
        self.lease.owe(debt);
        hand.settled_alone(now_ns, expected);
    }

    /// Prepares the hand for a time without the store: this gateway's share of what is left, in part.
    fn prepare_alone(&self, now_ns: u64, hand: Hand<'_>, gateways: f64) {
        let terms = self.limit.tier(self.tier).terms;
        // a share of nothing would never be used again
        let share = self.lease.share().unwrap_or(1.0 / gateways).max(1e-3);
        let pool = self.lease.pool(now_ns, &terms);
        if let Some(alone) = alone(&terms, self.limit.when_down, share, pool) {
            hand.prepare_alone(now_ns, &alone);
        }
    }
}

/// What a gateway with this share of the demand may do alone, where the pool was last known to hold so much.
pub(super) fn alone(
    terms: &Terms,
    when_down: WhenDown,
    share: f64,
    pool: Option<f64>,
) -> Option<Alone> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let capacity = terms.capacity as f64;
    let pool = pool.unwrap_or(capacity);
    let part = fraction * share;
    Some(Alone {
        rate: part * terms.rate / 1e3,
        capacity: (part * capacity).max(1.0),
        level: (part * pool).max(pool.min(1.0)),
        shadow_rate: share * terms.rate / 1e3,
        shadow_missing: share * (capacity - pool),
    })
}

/// The arguments of a call, as its script reads them: numbers as decimal text.
fn arguments(terms: &Terms, call: &Call, id: &str, number: u64) -> Vec<String> {
    let mut arguments = match terms.algorithm {
        Algorithm::Log => vec![
            terms.capacity.to_string(),
            terms.span_us.to_string(),
            call.need.to_string(),
            id.to_owned(),
            (number & u64::from(u32::MAX)).to_string(),
        ],
        algorithm => {
            let [second, third] = match algorithm {
                Algorithm::Bucket => [terms.rate.to_string(), terms.generation_us().to_string()],
                _ => {
                    let slides = u8::from(algorithm == Algorithm::Sliding);
                    [terms.span_us.to_string(), slides.to_string()]
                }
            };
            vec![
                terms.capacity.to_string(),
                second,
                third,
                call.need.to_string(),
                call.want.to_string(),
                call.part.to_string(),
                call.arrivals.to_string(),
                call.rate.to_string(),
                call.since_us.to_string(),
                call.memory_us.to_string(),
                call.unknown.to_string(),
            ]
        }
    };
    for report in &call.reports {
        let (kind, generation, tokens) = match report {
            Report::Spent { generation, tokens } => (0, *generation, tokens.to_string()),
            Report::Returned { generation, tokens } => (1, *generation, tokens.to_string()),
            Report::Debt { tokens } => (2, 0, tokens.to_string()),
        };
        arguments.extend([kind.to_string(), generation.to_string(), tokens]);
    }
    arguments
}
