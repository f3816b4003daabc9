//! The active configuration: its plan, its shared budget, its bound on requests in flight. A reload
//! replaces it and keeps the [`Process`]. The next configuration continues with the shared budget,
//! the bound and the upstreams whose settings are unchanged.
//!
//! Starting and reloading take the same two steps. [`ActiveConfig::prepare`] builds the next
//! configuration without touching the running one. [`ActiveConfig::take_over`] moves the counters
//! to it. Workers switch one by one, and a request keeps the configuration it began with. All other
//! code uses [`ActiveConfigHandle`].

use std::{collections::HashMap, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tokio::{task::JoinSet, time::Instant};

use super::{
    plan::{Plan, PlanError},
    process::Process,
    shared_budget::SharedBudget,
};
use crate::{
    config::Snapshot,
    identity::{KeyRing, KeysUrl},
    overload::Overload,
    telemetry::{AccessLines, access::AccessLog},
};

/// A running configuration, shared by all workers. Requests take no lock in it.
#[derive(Debug)]
pub struct ActiveConfig {
    pub(super) process: Arc<Process>,
    pub(super) plan: Plan,
    /// The budget shared with other gateways.
    pub(super) budget: Option<Arc<SharedBudget>>,
    /// Bounds the requests in flight.
    pub(super) overload: Option<Arc<Overload>>,
    snapshot: Arc<Snapshot>,
}

/// By limit: the overflow count seen so far, and the time of the last warning.
#[derive(Debug, Default)]
pub struct OverflowSeen(HashMap<String, (u64, Option<Instant>)>);

/// How long closing Redis, the collector and standard output may take, each.
const CLOSING: Duration = Duration::from_secs(1);

impl ActiveConfig {
    /// Prepares a configuration without affecting `previous`, which keeps running. Shared limits
    /// also need
    /// [`connect`](Self::connect).
    pub fn prepare(
        process: &Arc<Process>,
        snapshot: Arc<Snapshot>,
        previous: Option<&ActiveConfig>,
    ) -> Result<Self, PlanError> {
        let plan = Plan::bind(&snapshot, process, previous.map(|active| &active.plan))?;
        process.start_access_log(&snapshot)?;
        let overload = snapshot.overload.as_ref().map(|wanted| {
            let mut running = previous
                .iter()
                .filter_map(|active| active.overload.as_ref());
            // If the bound is unchanged, requests in flight stay counted.
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

    /// Connects to Redis if the configuration shares limits, or reuses the connection of
    /// `previous`. Blocks until Redis answers or its timeout passes. Do not call it on a
    /// low-priority thread: the lease manager's thread would inherit the priority.
    pub fn connect(&mut self, previous: Option<&ActiveConfig>) -> Result<(), PlanError> {
        let previous = previous.and_then(|active| active.budget.as_ref());
        self.budget = SharedBudget::of(&self.snapshot, &self.plan, &self.process, previous)?;
        Ok(())
    }

    /// A copy of the plan with separate metrics and decision log, for trying decisions.
    pub(super) fn beside(&self) -> Result<Self, PlanError> {
        let process = self.process.observer();
        let plan = Plan::bind(&self.snapshot, &process, Some(&self.plan))?;
        // Copy the fetched key sets, or no token would verify.
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

    /// Moves the usage from the previous plan's buckets to this plan's. Call it once, before any
    /// worker uses this configuration.
    pub fn take_over(&self, before: &ActiveConfig) {
        let process = &self.process;
        process
            .body_buffers
            .set_max(self.snapshot.server.max_body_buffer);
        let now_ns = process.nanoseconds(Instant::now());
        let (before, after) = (before.plan.buckets(), self.plan.buckets());
        process.store.change_over(now_ns, before, after);
    }

    /// The state that reloads keep.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The configuration behind this plan.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// The key sets to fetch, with the rings that use them.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.plan.identifier.published_keys()
    }

    /// Returns leased tokens to Redis, then closes the logs. Blocks: call it outside any runtime,
    /// after the last worker has stopped.
    pub fn close(&self) {
        if let Some(budget) = &self.budget {
            budget.close(CLOSING);
        }
        self.process.close(CLOSING);
    }

    /// Returns leased tokens to Redis, unless `after` reuses the budget. Blocks: call it outside
    /// any runtime, once no worker uses this configuration.
    pub fn retire(&self, after: &ActiveConfig) {
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

    /// Resolves the names of upstream servers and checks their health, forever. Run it outside the
    /// workers.
    pub async fn run_health_checks(self: Arc<Self>) {
        let mut watches = JoinSet::new();
        for upstream_state in &self.plan.upstreams {
            watches.spawn(Arc::clone(upstream_state).run_health_checks());
        }
        while watches.join_next().await.is_some() {}
    }

    /// Warns, at most once a minute per limit, when new keys find no free bucket and start to share
    /// one. Call it about once a second, outside the workers.
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
                    "this limit has used all of its buckets: its new keys share overflow buckets; raise server.max_keys, or key the limit by a value that clients cannot choose"
                );
            }
            *known = count;
        }
    }

    /// An access-line writer for one worker, if the configuration wants access lines.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        let wanted = self.snapshot.log.access != AccessLines::Off;
        wanted.then(|| self.process.access_log()).flatten()
    }

    pub(super) fn logs_all(&self) -> bool {
        self.snapshot.log.access == AccessLines::All
    }

    /// Decides whether a rejection gets a line. `Some(n)`: write it, and report `n` suppressed
    /// before it.
    pub(super) fn admit_rejected_line(&self, at: Instant) -> Option<u64> {
        let most = self.snapshot.log.max_rejected;
        self.process.admit_rejected_line(at, most)
    }
}

/// The running configuration.
#[derive(Debug)]
pub struct ActiveConfigHandle {
    active: ArcSwap<ActiveConfig>,
}

impl ActiveConfigHandle {
    /// Starts with the first configuration.
    pub fn new(active: Arc<ActiveConfig>) -> Arc<Self> {
        let current = Arc::new(Self {
            active: ArcSwap::new(active),
        });
        let shown = Arc::downgrade(&current);
        current.active().process.metrics().on_render(move || {
            if let Some(current) = shown.upgrade() {
                let active = current.active();
                let (bodies, metrics) = (&active.process.body_buffers, active.process.metrics());
                metrics.body_buffers(bodies.used(), bodies.refused());
                active
                    .plan
                    .limits
                    .iter()
                    .for_each(|rule| rule.refresh_metrics());
            }
        });
        current
    }

    /// The running configuration. Do not store it: a reload replaces it.
    pub fn active(&self) -> Arc<ActiveConfig> {
        self.active.load_full()
    }

    /// Replaces the running configuration.
    pub fn replace(&self, active: Arc<ActiveConfig>) {
        let previous = self.active.swap(active);
        let active = self.active();
        for rule in &previous.plan.limits {
            if active.plan.limit(&rule.name).is_none() {
                rule.metrics.keys.set(0.0);
            }
        }
    }
}
