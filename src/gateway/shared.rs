//! The active configuration: its plan, its shared budget, its bound on requests in flight. A reload replaces all of it and
//! keeps the [`Process`].
//!
//! A start and a reload take the same two steps: [`Shared::prepare`] makes the next configuration beside the one that runs,
//! which changes nothing; [`Shared::take_over`] moves the counters to it. Workers take it up one by one, and a request keeps
//! the one that it began with. Everybody else asks [`Current`].

use std::{collections::HashMap, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tokio::{task::JoinSet, time::Instant};

use super::{
    plan::{Plan, PlanError},
    process::Process,
    purse::Purse,
};
use crate::{
    config::Snapshot,
    identity::{KeyRing, KeysUrl},
    overload::Overload,
    telemetry::{AccessLines, access::AccessLog},
};

/// One configuration at work, shared by every worker; nothing in it is locked on a request's path.
#[derive(Debug)]
pub struct Shared {
    pub(super) process: Arc<Process>,
    pub(super) plan: Plan,
    /// Where limits are kept together with other gateways.
    pub(super) budget: Option<Arc<Purse>>,
    /// How many requests are under way, and may be.
    pub(super) overload: Option<Arc<Overload>>,
    snapshot: Arc<Snapshot>,
}

/// By limit: how many decisions have found no room, and when that was last said.
#[derive(Debug, Default)]
pub struct OverflowSeen(HashMap<String, (u64, Option<Instant>)>);

/// How long a connection to Redis, the collector or standard output may take to close.
const CLOSING: Duration = Duration::from_secs(1);

impl Shared {
    /// Makes a configuration ready to run, beside the one that runs now, if any: `previous` notices nothing. Limits that are
    /// shared need [`connect`](Self::connect) besides.
    pub fn prepare(
        process: &Arc<Process>,
        snapshot: Arc<Snapshot>,
        previous: Option<&Shared>,
    ) -> Result<Self, PlanError> {
        let plan = Plan::bind(&snapshot, process, previous.map(|shared| &shared.plan))?;
        process.start_access_log(&snapshot)?;
        let overload = snapshot.overload.as_ref().map(|wanted| {
            let mut running = previous
                .iter()
                .filter_map(|shared| shared.overload.as_ref());
            // requests in flight stay counted where the bound stays
            let same = running.find(|running| running.settings() == wanted);
            same.map_or_else(|| Overload::new(wanted.clone()), Arc::clone)
        });
        Ok(Self {
            process: Arc::clone(process),
            plan,
            budget: None,
            overload,
            snapshot,
        })
    }

    /// Connects to Redis where the configuration has limits that gateways share, or goes on with the connection of `previous`.
    /// Waits until Redis has answered, or its timeout has passed. Not on a thread of low priority: the thread that keeps
    /// the leases inherits it.
    pub fn connect(&mut self, previous: Option<&Shared>) -> Result<(), PlanError> {
        let previous = previous.and_then(|shared| shared.budget.as_ref());
        self.budget = Purse::of(&self.snapshot, &self.plan, &self.process, previous)?;
        Ok(())
    }

    /// The same plan with metrics and notes of its own: for trying what it would decide.
    pub(super) fn beside(&self) -> Result<Self, PlanError> {
        let process = self.process.observer();
        let plan = Plan::bind(&self.snapshot, &process, Some(&self.plan))?;
        // key sets that were fetched, or no token would verify
        for (url, keys) in plan.identifier.published_keys() {
            let mut known = self.published_keys();
            if let Some((_, known)) = known.find(|(known, _)| *known == url) {
                keys.continue_from(known);
            }
        }
        Ok(Self {
            process,
            plan,
            budget: self.budget.clone(),
            overload: self.overload.clone(),
            snapshot: Arc::clone(&self.snapshot),
        })
    }

    /// The buckets of this plan's limits go on where those of the one before are now. Call it once, before any worker decides
    /// by this configuration.
    pub fn take_over(&self, before: &Shared) {
        let process = &self.process;
        process
            .body_buffers
            .set_max(self.snapshot.server.max_body_buffer);
        let now_ns = process.nanoseconds(Instant::now());
        let (before, after) = (before.plan.buckets(), self.plan.buckets());
        process.store.change_over(now_ns, before, after);
    }

    /// What a reload keeps.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The configuration of this plan.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// The key sets that are to be fetched, and where they are put to use.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.plan.identifier.published_keys()
    }

    /// Hands back what was borrowed from other gateways, then closes the process's logs. Call it when no worker serves any more,
    /// and on no runtime.
    pub fn close(&self) {
        if let Some(budget) = &self.budget {
            budget.close(CLOSING);
        }
        self.process.close(CLOSING);
    }

    /// Hands back what was borrowed from other gateways, where the next configuration does not go on with it. Call it when no
    /// worker uses this one any more, and on no runtime.
    pub fn retire(&self, after: &Shared) {
        let is_kept = |budget| {
            let kept = after.budget.as_ref();
            kept.is_some_and(|kept| Arc::ptr_eq(kept, budget))
        };
        if let Some(budget) = &self.budget
            && !is_kept(budget)
        {
            budget.close(CLOSING);
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

    /// A writer of access lines for one worker, if the configuration wants any.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        let wanted = self.snapshot.log.access != AccessLines::Off;
        wanted.then(|| self.process.access_log()).flatten()
    }

    pub(super) fn logs_all(&self) -> bool {
        self.snapshot.log.access == AccessLines::All
    }

    /// Whether a rejection gets a line; if so, how many got none before it.
    pub(super) fn admit_rejected_line(&self, at: Instant) -> Option<u64> {
        let most = self.snapshot.log.max_rejected;
        self.process.admit_rejected_line(at, most)
    }
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
        current.shared().process.metrics().on_render(move || {
            if let Some(current) = shown.upgrade() {
                let shared = current.shared();
                let (bodies, metrics) = (&shared.process.body_buffers, shared.process.metrics());
                metrics.body_buffers(bodies.used(), bodies.refused());
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
