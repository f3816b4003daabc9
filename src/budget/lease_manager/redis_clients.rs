//! Calls to Redis for the lease manager: permission, outcome, and which servers are considered
//! down.
//!
//! Nothing here waits: a call is its own task, and its outcome returns as an [`Event`]. A call that
//! exceeds the timeout is first reported as overdue. When it ends, or has taken twenty timeouts, it
//! is reported as ended; a later reply is reported as late. `losses` detects what Redis has lost.

mod losses;

use std::{
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};

use super::{
    config::{LeaseManagerConfig, PATIENCE},
    scripts::{Scripts, reply},
};
use crate::{
    budget::{
        breaker::{Allowed, Breaker},
        cluster::ClusterServers,
        degraded::Degraded,
        key_table::Tag,
        lease::{self, LeaseAlgorithm},
        redis::{Failure, ScriptCall},
    },
    telemetry::{handles::BudgetMetrics, log::Throttle},
};

/// The outcome of a call, or of a check of a server.
pub(super) struct Event {
    pub(super) place: usize,
    pub(super) tag: Tag,
    pub(super) shard: usize,
    pub(super) id: u64,
    pub(super) sent_ns: u64,
    pub(super) kind: EventKind,
}

pub(super) enum EventKind {
    /// It exceeded the timeout.
    Overdue,
    Ended(Result<lease::Reply, Failure>),
    /// The reply to an abandoned call: what it grants goes back.
    Late(lease::Reply),
    Probed(Result<(), Failure>),
    /// A background check of an idle server has ended.
    Checked(Result<(), Failure>),
    /// The servers of a cluster own other slots now.
    Moved,
    /// The number of live gateways; and whether this one was unknown.
    Counted {
        gateways: u64,
        is_new: bool,
    },
}

impl Event {
    /// An event of a server, without a key.
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

/// The subject of a call.
pub(super) struct CallSubject {
    pub(super) place: usize,
    pub(super) tag: Tag,
    pub(super) shard: usize,
    pub(super) key: Rc<str>,
    /// The key's name in older versions, for this gateway's first call.
    pub(super) former_key: Option<Rc<str>>,
    pub(super) algorithm: LeaseAlgorithm,
    /// The index of the argument with this gateway's memory.
    pub(super) memory_at: Option<usize>,
}

/// One Redis with some of the keys: its own breaker, its own round-trip time.
struct RedisShard {
    breaker: Breaker,
    rtt_ns: f64,
    /// The server run that answered last; 0 if unknown.
    run: u32,
    /// When it last recorded that this gateway is alive.
    noted_ns: Option<u64>,
    /// It lost data, and the keys have not been reported yet.
    has_lost: bool,
    /// When it last answered.
    answered_ns: u64,
}

/// Every server and its state.
pub(super) struct RedisClients {
    servers: Rc<ClusterServers>,
    /// In the order of the servers.
    shards: Vec<RedisShard>,
    scripts: Rc<Scripts>,
    events: mpsc::Sender<Event>,
    degraded: Arc<Degraded>,
    metrics: BudgetMetrics,
    prefix: String,
    timeout: Duration,
    epoch: Instant,
    id: String,
    calls: u64,
    random: u64,
    gateways: f64,
    /// After a loss: the former number of gateways, and until when it applies.
    at_least: (f64, u64),
    /// Whether some server was slow lately.
    shows_bound: bool,
    /// When to send the next heartbeat.
    count_ns: u64,
    /// Throttles log lines about rejected scripts.
    script_failed: Throttle,
    /// Throttles log lines about lost data: of a server, of a key.
    server_lost: Throttle,
    key_lost: Throttle,
}

/// Assumed until a call has been timed.
const RTT_NS: f64 = 1e6;
/// Heartbeat interval, and the silence after which a gateway counts as gone.
const COUNT_NS: u64 = 2_000_000_000;
const GONE_MS: u64 = 6_000;

impl RedisClients {
    pub(super) fn new(config: LeaseManagerConfig, events: mpsc::Sender<Event>) -> RedisClients {
        RedisClients {
            servers: Rc::new(ClusterServers::new(&config.target, config.timeouts)),
            shards: Vec::new(),
            scripts: Rc::new(Scripts::new()),
            events,
            degraded: config.degraded,
            metrics: config.metrics,
            prefix: config.prefix,
            timeout: config.timeout,
            epoch: config.epoch,
            id: config.id,
            calls: 0,
            random: config.seed | 1,
            gateways: 1.0,
            at_least: (0.0, 0),
            shows_bound: false,
            count_ns: 0,
            script_failed: Throttle::default(),
            server_lost: Throttle::default(),
            key_lost: Throttle::default(),
        }
    }

    /// Opens the first connections. The breaker of a Redis that does not answer opens until a probe
    /// succeeds: the gateway starts without it.
    pub(super) async fn connect(&mut self) -> Result<(), Failure> {
        self.servers.refresh().await;
        self.meet_servers();
        let mut first = Ok(());
        for shard in 0..self.shards.len() {
            if !self.servers.is_used(shard) {
                continue;
            }
            let key = self.servers.probe_key(&self.prefix, shard);
            let result = self.servers.link(shard).probe(&key).await;
            if result.is_err() {
                self.shards[shard].breaker.probing();
                self.probed(shard, result);
                first = result;
            }
        }
        first
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Converts to an instant for the runtime's timers.
    pub(super) fn moment(&self, ns: u64) -> Instant {
        self.epoch + Duration::from_nanos(ns)
    }

    fn timeout_ns(&self) -> u64 {
        u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Random, 0 to 1 (xorshift64).
    pub(super) fn jitter(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The prefix of every key in Redis.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The unique name of this process.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The number of gateways, as far as known.
    pub(super) fn gateways(&self) -> f64 {
        self.gateways
    }

    /// The round-trip time to this server.
    pub(super) fn rtt_ns(&self, shard: usize) -> u64 {
        self.shards[shard].rtt_ns as u64
    }

    /// The index of the server that stores a key.
    pub(super) fn shard_of(&mut self, key: &str) -> usize {
        self.meet_servers();
        self.servers.shard_of(key)
    }

    /// Whether this server's breaker is open.
    pub(super) fn is_open(&self, shard: usize) -> bool {
        self.shards[shard].breaker.is_open()
    }

    /// Requests permission for a call to this server. If it is granted, make the call.
    pub(super) fn may_call(&mut self, now_ns: u64, shard: usize) -> bool {
        let (timeout_ns, jitter) = (self.timeout_ns(), self.jitter());
        let allowed = self.shards[shard].breaker.enter(now_ns, timeout_ns, jitter);
        if allowed == Allowed::Open && !self.is_degraded(shard) {
            self.opened(shard, Failure::Timeout);
        }
        allowed == Allowed::Yes
    }

    /// Whether this server has room for a background call.
    pub(super) fn has_room(&self, shard: usize) -> bool {
        self.shards[shard].breaker.has_room()
    }

    /// The number of the next call.
    pub(super) fn number(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    /// Sends a call; its outcome returns as an event.
    pub(super) fn send(&self, now_ns: u64, id: u64, about: CallSubject, arguments: Vec<Vec<u8>>) {
        let (servers, scripts) = (Rc::clone(&self.servers), Rc::clone(&self.scripts));
        let (events, timeout) = (self.events.clone(), self.timeout);
        tokio::task::spawn_local(async move {
            let event = |kind| Event {
                place: about.place,
                tag: about.tag,
                shard: about.shard,
                id,
                sent_ns: now_ns,
                kind,
            };
            let script = scripts.of(about.algorithm);
            let call = ScriptCall {
                former_key: about.former_key.as_deref(),
                memory_at: about.memory_at,
                ..ScriptCall::new(&about.key, &arguments)
            };
            let call = servers.call(script, call);
            tokio::pin!(call);
            // the receiver is gone only when the process ends
            let begun = Instant::now();
            let steps = [
                (timeout, EventKind::Overdue),
                (timeout * PATIENCE, EventKind::Ended(Err(Failure::Timeout))),
            ];
            for (after, kind) in steps {
                if let Ok(ended) = tokio::time::timeout_at(begun + after, &mut call).await {
                    let ended = ended.and_then(|value| reply(&value));
                    let _ = events.send(event(EventKind::Ended(ended))).await;
                    return;
                }
                let _ = events.send(event(kind)).await;
            }
            if let Ok(reply) = call.await.and_then(|value| reply(&value)) {
                let _ = events.send(event(EventKind::Late(reply))).await;
            }
        });
    }

    /// A call exceeded the timeout.
    pub(super) fn overdue(&mut self, now_ns: u64, event: &Event) {
        self.metrics.late.increment(1);
        self.metrics.failed(Failure::Timeout.label());
        let (timeout_ns, jitter) = (self.timeout_ns(), self.jitter());
        let breaker = &mut self.shards[event.shard].breaker;
        let was_open = breaker.is_open();
        breaker.timed_out(now_ns, timeout_ns, jitter);
        self.show_bound();
        self.ended_badly(event.shard, was_open, Failure::Timeout);
    }

    pub(super) fn failed(&mut self, now_ns: u64, event: &Event, failure: Failure) {
        let is_late = self.is_late(now_ns, event);
        let jitter = self.jitter();
        let breaker = &mut self.shards[event.shard].breaker;
        let was_open = breaker.is_open();
        breaker.ended();
        // an overdue call has already counted as a failure
        if !is_late && failure.is_of_server() {
            breaker.failed(now_ns, jitter);
        }
        self.metrics.errors.increment(1);
        if failure == Failure::Script
            && let Some(suppressed) = self.script_failed.speak()
        {
            tracing::warn!(
                redis = self.servers.link(event.shard).address(),
                error = self.servers.link(event.shard).trouble(),
                suppressed,
                "Redis rejected a script: another program may use the same key; check key_prefix. \
                 The limit applies on_redis_down"
            );
        }
        if failure != Failure::Timeout {
            self.metrics.failed(failure.label());
        }
        self.ended_badly(event.shard, was_open, failure);
    }

    /// A call was answered, in time or late. A late answer is no success, because its waiters have
    /// left.
    pub(super) fn answered(&mut self, now_ns: u64, event: &Event) {
        // a redirect may have led to a new server
        self.meet_servers();
        let is_late = self.is_late(now_ns, event);
        let taken_ns = now_ns.saturating_sub(event.sent_ns);
        let timeout_ns = self.timeout_ns();
        let shard = &mut self.shards[event.shard];
        shard.breaker.ended();
        shard.answered_ns = now_ns;
        self.metrics.seconds.record(Duration::from_nanos(taken_ns));
        if !is_late {
            self.metrics.ok.increment(1);
            shard.breaker.replied(taken_ns, timeout_ns);
            shard.rtt_ns += 0.1 * (taken_ns as f64 - shard.rtt_ns);
            if shard.breaker.bound().is_some() || self.shows_bound {
                self.show_bound();
            }
        }
    }

    /// An abandoned call was answered.
    pub(super) fn answered_late(&mut self, now_ns: u64, event: &Event) {
        self.meet_servers();
        self.shards[event.shard].answered_ns = now_ns;
    }

    fn is_late(&self, now_ns: u64, event: &Event) -> bool {
        now_ns.saturating_sub(event.sent_ns) > self.timeout_ns()
    }

    fn ended_badly(&mut self, shard: usize, was_open: bool, failure: Failure) {
        if !was_open && self.is_open(shard) {
            self.opened(shard, failure);
        }
        self.refresh();
    }

    /// Probes servers that are due, and sends heartbeats.
    pub(super) fn look_at_due(&mut self, now_ns: u64) {
        for shard in 0..self.shards.len() {
            let due = self.shards[shard].breaker.probe_due_ns();
            if due.is_some_and(|due| due <= now_ns) {
                self.probe(shard);
            }
        }
        if now_ns >= self.count_ns {
            self.count_ns = now_ns.saturating_add(COUNT_NS);
            if !self.degraded.all.load(Relaxed) {
                self.count(false);
            }
            for shard in 0..self.shards.len() {
                self.check(now_ns, shard);
            }
        }
    }

    /// When the next action is due.
    pub(super) fn next_ns(&self) -> u64 {
        let shards = self.shards.iter();
        let probe = shards
            .filter_map(|shard| shard.breaker.probe_due_ns())
            .min();
        self.count_ns.min(probe.unwrap_or(u64::MAX))
    }

    /// Checks a server that has been silent for a while: without requests, nothing else would
    /// notice a failure.
    fn check(&self, now_ns: u64, shard: usize) {
        let silent_ns = now_ns.saturating_sub(self.shards[shard].answered_ns);
        if silent_ns >= COUNT_NS && self.servers.is_used(shard) && !self.is_open(shard) {
            self.spawn_probe(now_ns, shard, EventKind::Checked);
        }
    }

    pub(super) fn checked(&mut self, now_ns: u64, event: &Event, result: &Result<(), Failure>) {
        let jitter = self.jitter();
        let is_open = self.is_open(event.shard);
        let shard = &mut self.shards[event.shard];
        match *result {
            Ok(()) => shard.answered_ns = now_ns,
            Err(failure) if !is_open && shard.answered_ns < event.sent_ns => {
                shard.breaker.give_up(now_ns, jitter);
                self.metrics.failed(failure.label());
                self.opened(event.shard, failure);
                self.refresh();
            }
            Err(_) => {}
        }
    }

    fn probe(&mut self, shard: usize) {
        self.shards[shard].breaker.probing();
        self.spawn_probe(self.now_ns(), shard, EventKind::Probed);
    }

    fn spawn_probe(&self, now_ns: u64, shard: usize, kind: fn(Result<(), Failure>) -> EventKind) {
        let key = self.servers.probe_key(&self.prefix, shard);
        let (link, events) = (self.servers.link(shard), self.events.clone());
        tokio::task::spawn_local(async move {
            let result = link.probe(&key).await;
            let event = Event {
                sent_ns: now_ns,
                ..Event::about(shard, kind(result))
            };
            let _ = events.send(event).await;
        });
    }

    pub(super) fn probed(&mut self, shard: usize, result: Result<(), Failure>) {
        let (now_ns, jitter) = (self.now_ns(), self.jitter());
        // ignore a server that no longer stores keys
        let is_used = self.servers.is_used(shard);
        let breaker = &mut self.shards[shard].breaker;
        breaker.probed(now_ns, result.is_ok() || !is_used, jitter);
        if result.is_ok() {
            self.shards[shard].answered_ns = now_ns;
        }
        let was_degraded = self.is_degraded(shard);
        match result {
            Ok(()) => tracing::info!(
                redis = self.servers.link(shard).address(),
                "Redis answers again: shared limits use it again"
            ),
            Err(failure) => {
                self.metrics.failed(failure.label());
                if !was_degraded && is_used {
                    self.opened(shard, failure);
                }
                self.refresh();
            }
        }
        self.show_degraded();
    }

    fn is_degraded(&self, shard: usize) -> bool {
        self.degraded.servers[shard].load(Relaxed)
    }

    /// Logs one line each time that a server's breaker opens.
    fn opened(&mut self, shard: usize, failure: Failure) {
        self.servers.link(shard).give_up();
        tracing::warn!(
            redis = self.servers.link(shard).address(),
            kind = failure.label(),
            error = self.servers.link(shard).trouble(),
            "Redis does not answer: shared limits apply on_redis_down until it does"
        );
        self.show_degraded();
    }

    /// Publishes the smallest bound of any server.
    fn show_bound(&mut self) {
        let bounds = self.shards.iter().filter_map(|shard| shard.breaker.bound());
        let least = bounds.reduce(f64::min);
        self.shows_bound = least.is_some();
        self.metrics.bound.set(least.map_or(0.0, f64::floor));
    }

    /// Publishes which servers are down, to workers and operators.
    fn show_degraded(&mut self) {
        let (mut used, mut open) = (0, 0);
        for (index, shard) in self.shards.iter().enumerate() {
            let is_used = self.servers.is_used(index);
            let is_open = is_used && shard.breaker.is_open();
            self.degraded.servers[index].store(is_open, Relaxed);
            used += u32::from(is_used);
            open += u32::from(is_open);
        }
        self.degraded.all.store(open > 0 && open == used, Relaxed);
        self.metrics.breaker_open.set(f64::from(open));
        self.metrics.degraded.set(f64::from(open.min(1)));
        self.show_bound();
    }

    /// Adds a breaker for each new server.
    fn meet_servers(&mut self) {
        let new = || RedisShard {
            breaker: Breaker::new(),
            rtt_ns: RTT_NS,
            run: 0,
            noted_ns: None,
            has_lost: false,
            answered_ns: 0,
        };
        self.shards.resize_with(self.servers.count(), new);
    }

    /// Fetches the slot map of a cluster; the result is an event.
    fn refresh(&self) {
        let (servers, events) = (Rc::clone(&self.servers), self.events.clone());
        tokio::task::spawn_local(async move {
            if servers.refresh().await {
                let _ = events.send(Event::about(0, EventKind::Moved)).await;
            }
        });
    }

    /// Keys have moved to other servers.
    pub(super) fn moved(&mut self) {
        self.meet_servers();
        self.show_degraded();
    }
}
