//! What all workers of a process share: the plan, the buckets, the metrics, the access log.
//!
//! A reload makes another [`Shared`] with a plan of its own and everything else in common ([`Shared::succeed`]). Workers take
//! it up one by one; a request keeps the one that it began with. Whoever is not a worker asks [`Current`].

use std::{
    collections::HashMap,
    io::{self, IsTerminal as _},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use metrics::{Counter, Histogram};
use tokio::{task::JoinSet, time::Instant};

use super::{
    notebook::Notebooks,
    plan::{Plan, PlanError},
    purse::Purse,
    rulings::Rulings,
    suspicion::Once,
};
use crate::{
    config::Snapshot,
    identity::{KeyHasher, KeyRing, KeysUrl},
    limit::Store,
    listener::body_buffers::BodyBuffers,
    overload::Overload,
    telemetry::{
        AccessLines, Metrics,
        access::{AccessLog, LineCap, Style},
        trace::Spans,
    },
};

/// Shared by every worker; nothing in it is locked on a request's path.
#[derive(Debug)]
pub struct Shared {
    pub(super) plan: Plan,
    pub(super) store: Arc<Store>,
    pub(super) hasher: KeyHasher,
    /// Under which workers remember tokens.
    pub(super) token_secret: [u8; 32],
    /// Where limits are kept together with other gateways.
    pub(super) budget: Option<Arc<Purse>>,
    /// Of all bodies that are read ahead, on whichever worker.
    pub(super) body_buffers: Arc<BodyBuffers>,
    /// How many requests are under way, and may be.
    pub(super) overload: Option<Arc<Overload>>,
    pub(super) decision_seconds: Histogram,
    /// Our name in `Via`: one of its own for each process, so that a loop is told from two gateways in a row.
    pub(super) pseudonym: String,
    snapshot: Arc<Snapshot>,
    metrics: Metrics,
    /// Workers write through clones of their own.
    access: Option<Arc<Mutex<AccessLog>>>,
    /// How many lines rejections get.
    rejected_lines: Arc<LineCap>,
    rejected_left_out: Counter,
    spans: Option<Spans>,
    /// What operators have decided beside the configuration.
    pub(super) rulings: Arc<Rulings>,
    /// What workers remember of their decisions.
    pub(super) notebooks: Arc<Notebooks>,
    /// That a proxy seems to be unnamed.
    pub(super) unnamed_proxy: Arc<Once>,
    /// The origin of the limiter's time.
    epoch: Instant,
    /// What the wall clock said then, in nanoseconds since 1970.
    epoch_wall_ns: Arc<AtomicU64>,
}

/// By limit: how many decisions have found no room, and when that was last said.
#[derive(Debug, Default)]
pub struct OverflowSeen(HashMap<String, (u64, Option<Instant>)>);

/// Bytes of access lines that may wait for standard output.
const ACCESS_QUEUE_BYTES: usize = 4 * 1024 * 1024;

impl Shared {
    /// Puts a configuration to work.
    pub fn new(snapshot: Arc<Snapshot>, metrics: Metrics) -> Result<Self, PlanError> {
        let store = Store::new(snapshot.server.max_keys);
        let rulings = Arc::<Rulings>::default();
        let plan = Plan::bind(&snapshot, &store, &metrics, &rulings, None)?;
        let access = access_log(&snapshot, &metrics)?;
        let spans = spans(&snapshot, &metrics)?;
        let (key_secret, token_secret) = (secret()?, secret()?);
        let epoch = Instant::now();
        let workers = snapshot.server.worker_threads();
        let budget = Purse::of(&snapshot, &plan, epoch, &metrics, &rulings, None)?;
        Ok(Self {
            plan,
            store: Arc::new(store),
            hasher: KeyHasher::new(key_secret),
            token_secret,
            budget,
            body_buffers: BodyBuffers::new(snapshot.server.max_body_buffer),
            overload: snapshot.overload.clone().map(Overload::new),
            decision_seconds: metrics.decision_seconds(),
            pseudonym: pseudonym(),
            snapshot,
            rejected_lines: Arc::default(),
            rejected_left_out: metrics.log_lines_left_out(),
            spans,
            metrics,
            access,
            rulings,
            notebooks: Arc::new(Notebooks::new(workers)),
            unnamed_proxy: Arc::default(),
            epoch,
            epoch_wall_ns: Arc::new((wall_ns().saturating_sub(since_ns(epoch))).into()),
        })
    }

    /// Puts another configuration to work beside this one, with the same buckets, counters and logs. Changes nothing for
    /// whoever still uses this one. May wait for Redis.
    pub fn succeed(&self, snapshot: Arc<Snapshot>) -> Result<Self, PlanError> {
        let before = Some(&self.plan);
        let plan = Plan::bind(&snapshot, &self.store, &self.metrics, &self.rulings, before)?;
        let access = match (&self.access, snapshot.log.access) {
            (Some(running), _) => Some(Arc::clone(running)),
            (None, _) => access_log(&snapshot, &self.metrics)?,
        };
        let before = self.budget.as_ref();
        let (epoch, rulings) = (self.epoch, &self.rulings);
        let budget = Purse::of(&snapshot, &plan, epoch, &self.metrics, rulings, before)?;
        Ok(Self {
            plan,
            budget,
            body_buffers: Arc::clone(&self.body_buffers),
            overload: self.overload_of(&snapshot),
            store: Arc::clone(&self.store),
            hasher: self.hasher,
            token_secret: self.token_secret,
            decision_seconds: self.decision_seconds.clone(),
            pseudonym: self.pseudonym.clone(),
            snapshot,
            metrics: self.metrics.clone(),
            access,
            rejected_lines: Arc::clone(&self.rejected_lines),
            rejected_left_out: self.rejected_left_out.clone(),
            // where spans go is settled when the process starts
            spans: self.spans.clone(),
            rulings: Arc::clone(&self.rulings),
            notebooks: Arc::clone(&self.notebooks),
            unnamed_proxy: Arc::clone(&self.unnamed_proxy),
            epoch: self.epoch,
            epoch_wall_ns: Arc::clone(&self.epoch_wall_ns),
        })
    }

    /// What is under way goes on being counted, where the bound is as it was.
    fn overload_of(&self, snapshot: &Snapshot) -> Option<Arc<Overload>> {
        let wanted = snapshot.overload.as_ref()?;
        let same = self.overload.as_ref();
        let same = same.filter(|running| running.settings() == wanted);
        Some(same.map_or_else(|| Overload::new(wanted.clone()), Arc::clone))
    }

    /// The same plan and the same buckets, with metrics and notes of its own: for trying what it would decide.
    pub(super) fn beside(&self) -> Result<Self, PlanError> {
        let metrics = Metrics::install();
        let before = Some(&self.plan);
        let snapshot = &self.snapshot;
        let plan = Plan::bind(snapshot, &self.store, &metrics, &self.rulings, before)?;
        // key sets that were fetched, or no token would verify
        for (url, keys) in plan.identifier.published_keys() {
            let mut known = self.published_keys();
            if let Some((_, known)) = known.find(|(known, _)| *known == url) {
                keys.continue_from(known);
            }
        }
        Ok(Self {
            plan,
            metrics,
            budget: self.budget.clone(),
            body_buffers: Arc::clone(&self.body_buffers),
            overload: self.overload.clone(),
            store: Arc::clone(&self.store),
            hasher: self.hasher,
            token_secret: self.token_secret,
            decision_seconds: Histogram::noop(),
            pseudonym: self.pseudonym.clone(),
            snapshot: Arc::clone(snapshot),
            access: None,
            rejected_lines: Arc::default(),
            rejected_left_out: Counter::noop(),
            spans: None,
            rulings: Arc::clone(&self.rulings),
            notebooks: Arc::new(Notebooks::new(1)),
            unnamed_proxy: Arc::clone(&self.unnamed_proxy),
            epoch: self.epoch,
            epoch_wall_ns: Arc::clone(&self.epoch_wall_ns),
        })
    }

    /// The buckets of this plan's limits go on where those of the one before are now. To be called once, before any worker
    /// decides by it.
    pub fn take_over(&self, before: &Shared) {
        self.body_buffers
            .set_max(self.snapshot.server.max_body_buffer);
        let now_ns = self.nanoseconds(Instant::now());
        self.store
            .change_over(now_ns, before.plan.buckets(), self.plan.buckets());
    }

    /// The configuration of this plan.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// The memory for bodies that are read ahead.
    pub fn body_buffers(&self) -> &BodyBuffers {
        &self.body_buffers
    }

    /// The key sets that are to be fetched, and where they are put to use.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.plan.identifier.published_keys()
    }

    /// The registry of this gateway's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Hands back what was borrowed from other gateways, sends the spans that wait, and what waits in the access log to
    /// standard output; waits for each, but not for ever. To be called when no worker serves any more, and on no runtime.
    pub fn close(&self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if let Some(budget) = &self.budget {
            budget.close(PATIENCE);
        }
        if let Some(spans) = &self.spans {
            spans.close(PATIENCE);
        }
        if let Some(access) = &self.access {
            access
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .close(PATIENCE);
        }
    }

    /// Hands back what was borrowed from other gateways, where the configuration after this one does not go on with it. To be
    /// called when no worker uses it any more, and on no runtime.
    pub fn retire(&self, after: &Shared) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if let Some(budget) = &self.budget
            && !after
                .budget
                .as_ref()
                .is_some_and(|kept| Arc::ptr_eq(kept, budget))
        {
            budget.close(PATIENCE);
        }
    }

    /// Resolves the names of upstream servers and checks their health, for ever; to be run off the workers.
    pub async fn keep_watch(self: Arc<Self>) {
        let mut watches = JoinSet::new();
        for fleet in &self.plan.upstreams {
            watches.spawn(Arc::clone(fleet).keep_watch());
        }
        while watches.join_next().await.is_some() {}
    }

    /// Warns, at most once a minute for each limit, when new keys find no room: from then on they share a bucket. To be
    /// called every second or so, off the workers.
    pub fn warn_of_overflow(&self, seen: &mut OverflowSeen) {
        const PAUSE: Duration = Duration::from_secs(60);
        for rule in &self.plan.limits {
            let count = rule.buckets.overflowed();
            let (known, warned) = seen.0.entry(rule.name.clone()).or_default();
            if count > *known && warned.is_none_or(|at| at.elapsed() >= PAUSE) {
                *warned = Some(Instant::now());
                tracing::warn!(
                    limit = rule.name,
                    decisions = count,
                    max_keys = self.snapshot.server.max_keys,
                    "this limit holds all the buckets that it may: its new keys share overflow buckets (other limits are not affected); raise server.max_keys, or key the limit by what clients cannot choose"
                );
            }
            *known = count;
        }
    }

    /// Follows a wall clock that was set. To be called every second or so, off the workers.
    pub fn follow_wall_clock(&self) {
        let seen = wall_ns().saturating_sub(since_ns(self.epoch));
        if seen.abs_diff(self.epoch_wall_ns.load(Relaxed)) > CLOCK_WAS_SET_NS {
            self.epoch_wall_ns.store(seen, Relaxed);
        }
    }

    /// A moment as a date. The same for every worker, and steady while the system's clock is nudged into step: the end of one
    /// window is always the same second.
    pub(super) fn wall_clock(&self, at: Instant) -> SystemTime {
        let since = self
            .epoch_wall_ns
            .load(Relaxed)
            .saturating_add(self.nanoseconds(at));
        SystemTime::UNIX_EPOCH + Duration::from_nanos(since)
    }

    /// A writer of access lines for one worker.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        let wanted = self.snapshot.log.access != AccessLines::Off;
        self.access.as_ref().filter(|_| wanted).map(|access| {
            access
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        })
    }

    pub(super) fn logs_all(&self) -> bool {
        self.snapshot.log.access == AccessLines::All
    }

    /// Whether a rejection gets a line; if so, how many got none before it.
    pub(super) fn admit_rejected_line(&self, at: Instant) -> Option<u64> {
        let second = self.nanoseconds(at) / 1_000_000_000;
        let admitted = self
            .rejected_lines
            .admit(second, self.snapshot.log.max_rejected);
        if admitted.is_none() {
            self.rejected_left_out.increment(1);
        }
        admitted
    }

    /// Where spans go, if anywhere.
    pub(super) fn spans(&self) -> Option<&Spans> {
        self.spans.as_ref()
    }

    /// A moment in the limiter's time.
    pub(super) fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The wall clock may differ by so much from what it was expected to say before it is believed to have been set.
const CLOCK_WAS_SET_NS: u64 = 500_000_000;

fn wall_ns() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn since_ns(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn secret<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut secret = [0; BYTES];
    getrandom::fill(&mut secret).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(secret)
}

/// Starts what sends spans, if anything is to.
fn spans(snapshot: &Snapshot, metrics: &Metrics) -> io::Result<Option<Spans>> {
    let collector = snapshot.trace.collector.clone();
    let start = |collector| Spans::start(collector, metrics.spans());
    collector.map(start).transpose()
}

/// Starts the access log, if there is to be one.
fn access_log(snapshot: &Snapshot, metrics: &Metrics) -> io::Result<Option<Arc<Mutex<AccessLog>>>> {
    if snapshot.log.access == AccessLines::Off {
        return Ok(None);
    }
    let style = match snapshot.log.format.is_json(io::stdout().is_terminal()) {
        true => Style::Json,
        false => Style::Text,
    };
    let dropped = metrics.log_lines_dropped();
    let log = AccessLog::start(style, Box::new(io::stdout()), ACCESS_QUEUE_BYTES, dropped)?;
    Ok(Some(Arc::new(Mutex::new(log))))
}

/// The configuration that runs.
#[derive(Debug)]
pub struct Current {
    shared: ArcSwap<Shared>,
}

impl Current {
    /// The first one.
    pub fn new(shared: Arc<Shared>) -> Arc<Self> {
        let current = Arc::new(Self {
            shared: ArcSwap::new(shared),
        });
        let shown = Arc::downgrade(&current);
        current.shared().metrics.on_render(move || {
            if let Some(current) = shown.upgrade() {
                let shared = current.shared();
                let bodies = &shared.body_buffers;
                shared.metrics.body_buffers(bodies.used(), bodies.refused());
                shared
                    .plan
                    .limits
                    .iter()
                    .for_each(|rule| rule.refresh_metrics());
            }
        });
        current
    }

    /// What runs now. Not for keeping: a reload replaces it.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.load_full()
    }

    /// Another one runs from now on.
    pub fn replace(&self, shared: Arc<Shared>) {
        let previous = self.shared.swap(shared);
        let shared = self.shared();
        for rule in &previous.plan.limits {
            if shared.plan.limit(&rule.name).is_none() {
                rule.metrics.keys.set(0.0);
            }
        }
    }
}

fn pseudonym() -> String {
    let mut id = [0; 4];
    // without entropy two processes may share a name: a chain of both would then be taken for a loop
    if getrandom::fill(&mut id).is_err() {
        id = std::process::id().to_le_bytes();
    }
    format!("tidegate-{:08x}", u32::from_le_bytes(id))
}
