//! What all workers of a process share: the plan, the buckets, the metrics, the access log.

use std::{
    collections::HashMap,
    io::{self, IsTerminal as _},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use metrics::Histogram;
use tokio::{task::JoinSet, time::Instant};

use super::{
    plan::{Plan, PlanError},
    suspicion::Once,
};
use crate::{
    budget::{self, Budget, KeeperThread},
    config::Snapshot,
    identity::{KeyHasher, KeyRing, KeysUrl},
    limit::Store,
    telemetry::{
        AccessLines, Metrics,
        access::{AccessLog, Style},
    },
};

/// Shared by every worker; nothing in it is locked on a request's path.
#[derive(Debug)]
pub struct Shared {
    pub(super) plan: Plan,
    pub(super) store: Store,
    pub(super) hasher: KeyHasher,
    /// Under which workers remember tokens.
    pub(super) token_secret: [u8; 16],
    /// Where limits are kept together with other gateways.
    pub(super) budget: Option<Budget>,
    keeper: Mutex<Option<KeeperThread>>,
    pub(super) decision_seconds: Histogram,
    /// Our name in `Via`: one of its own for each process, so that a loop is told from two gateways in a row.
    pub(super) pseudonym: String,
    snapshot: Arc<Snapshot>,
    metrics: Metrics,
    /// Workers write through clones of their own.
    access: Option<Mutex<AccessLog>>,
    /// That a proxy seems to be unnamed.
    pub(super) unnamed_proxy: Once,
    /// The origin of the limiter's time.
    epoch: Instant,
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
        let plan = Plan::bind(&snapshot, &store, &metrics)?;
        let access = match snapshot.log.access {
            AccessLines::Off => None,
            AccessLines::All | AccessLines::Rejected => {
                let style = if snapshot.log.format.is_json(io::stdout().is_terminal()) {
                    Style::Json
                } else {
                    Style::Text
                };
                let log = AccessLog::start(
                    style,
                    Box::new(io::stdout()),
                    ACCESS_QUEUE_BYTES,
                    metrics.log_lines_dropped(),
                )?;
                Some(Mutex::new(log))
            }
        };
        let (key_secret, token_secret) = (secret()?, secret()?);
        let epoch = Instant::now();
        let (budget, keeper) = match &snapshot.redis {
            Some(redis) if !plan.shared.is_empty() => {
                let metrics = metrics.budget(&budget::FAILURES);
                let max_keys = snapshot.server.max_keys;
                let started = budget::start(redis, max_keys, &plan.shared, epoch, metrics)?;
                (Some(started.0), Some(started.1))
            }
            _ => (None, None),
        };
        let rules: Vec<_> = plan.rules().cloned().collect();
        metrics.on_render(move || {
            for rule in &rules {
                rule.refresh_metrics();
            }
        });
        Ok(Self {
            plan,
            store,
            hasher: KeyHasher::new(key_secret),
            token_secret,
            budget,
            keeper: Mutex::new(keeper),
            decision_seconds: metrics.decision_seconds(),
            pseudonym: pseudonym(),
            snapshot,
            metrics,
            access,
            unnamed_proxy: Once::default(),
            epoch,
        })
    }

    /// The running configuration.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// The key sets that are to be fetched, and where they are put to use.
    pub fn published_keys(&self) -> impl Iterator<Item = (&KeysUrl, &Arc<KeyRing>)> {
        self.plan.identifier.published_keys()
    }

    /// The registry of this gateway's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Hands back what was borrowed from other gateways, and what waits in the access log to standard output; waits for
    /// both, but not for ever. To be called when no worker serves any more, and on no runtime.
    pub fn close(&self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let keeper = self
            .keeper
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(keeper) = keeper {
            keeper.close(PATIENCE);
        }
        if let Some(access) = &self.access {
            access
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .close(PATIENCE);
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
        for rule in self.plan.rules() {
            let count = rule.buckets.overflowed();
            let (known, warned) = seen.0.entry(rule.name.clone()).or_default();
            if count > *known && warned.is_none_or(|at| at.elapsed() >= PAUSE) {
                *warned = Some(Instant::now());
                tracing::warn!(
                    limit = rule.name,
                    decisions = count,
                    max_keys = self.snapshot.server.max_keys,
                    "every bucket is held by a key in debt: new keys of this limit share one; raise server.max_keys, or key the limit by less"
                );
            }
            *known = count;
        }
    }

    /// A writer of access lines for one worker.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        self.access.as_ref().map(|access| {
            access
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        })
    }

    pub(super) fn logs_all(&self) -> bool {
        self.snapshot.log.access == AccessLines::All
    }

    /// A moment in the limiter's time.
    pub(super) fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }
}

fn secret() -> io::Result<[u8; 16]> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(secret)
}

fn pseudonym() -> String {
    let mut id = [0; 4];
    // without entropy two processes may share a name: a chain of both would then be taken for a loop
    if getrandom::fill(&mut id).is_err() {
        id = std::process::id().to_le_bytes();
    }
    format!("tidegate-{:08x}", u32::from_le_bytes(id))
}
