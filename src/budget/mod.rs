//! Limits shared by all gateways through Redis, with almost no Redis calls on the request path.
//!
//! Read in this order:
//!
//! - [`lease`]: the arithmetic of token leases
//! - `slack`: admission before Redis is asked
//! - `slot_lease`: leases of slots, for requests in flight
//! - `key_table`: the local state that workers decide with
//! - `lease_manager`: the task that calls Redis
//! - `breaker`: when to stop calling
//! - `redis`: one connection
//! - `cluster`: the server of a key
//! - the scripts beside them
//!
//! **All or none.** Local and shared limits apply to a request. Remembered refusals are checked
//! first, then local tokens are taken, then Redis is asked for the rest. Each limit is a separate
//! parallel call, so the limits of one request may be anywhere in a cluster. If any limit refuses,
//! the tokens go back into their cells for the next request. So two additions in memory replace a
//! transaction over several servers. Strict limits come last, because returning their grants takes
//! a call.
//!
//! **Without Redis** a request waits for at most the Redis timeout, and not at all once the breaker
//! is open: the limit's `on_redis_down` decides.

pub mod lease;

mod override_sync;
mod breaker;
mod cluster;
mod degraded;
mod key_table;
mod slot_lease;
mod lease_manager;
mod loss;
mod redis;
mod settings;
mod slack;
mod spend;

use std::{
    io,
    sync::{Arc, mpsc::sync_channel},
    thread,
    time::Duration,
};

use tokio::{runtime::LocalOptions, sync::mpsc, time::Instant};

pub use key_table::SlotGuard;
pub use override_sync::{OverrideEntry, OverrideReader, OverrideSnapshot, OverrideSync};
pub use redis::{RedisServer, RedisTarget, RedisTls};
pub use settings::{FAILURES, LOSSES, RedisSettings, SharedKeyName, SharedLimit, Sync, WhenDown};
pub use spend::{Decided, DecisionSource, LateCharge, SharedClaim, Unavailable};

use degraded::Degraded;
use key_table::{CellNotice, KeyTable};
use lease::LeaseAlgorithm;
use lease_manager::{LeaseManager, LeaseManagerConfig, Message, PATIENCE, QUEUE};
use redis::RedisTimeouts;

use crate::telemetry::handles::BudgetMetrics;

/// The shared state from which every worker spends.
#[derive(Debug)]
pub struct Budget {
    key_table: Arc<KeyTable>,
    manager: mpsc::Sender<Message>,
    notices: mpsc::Sender<CellNotice>,
    degraded: Arc<Degraded>,
    override_sync: OverrideSync,
    wait: Duration,
}

impl Budget {
    /// The hash through which gateways share runtime overrides.
    pub fn override_sync(&self) -> &OverrideSync {
        &self.override_sync
    }
}

/// The thread that talks to Redis.
#[derive(Debug)]
pub struct LeaseManagerThread {
    manager: mpsc::Sender<Message>,
    thread: thread::JoinHandle<()>,
}

/// Starts the thread that talks to Redis, and waits for the first answer or failure: a gateway
/// starts without Redis, too. `epoch` is the origin of the time with which requests are decided.
pub fn start(
    settings: &RedisSettings,
    max_keys: usize,
    limits: &[Arc<SharedLimit>],
    epoch: Instant,
    metrics: BudgetMetrics,
    reader: OverrideReader,
) -> io::Result<(Budget, LeaseManagerThread)> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
    let id = random
        .iter()
        .skip(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let seed = random
        .iter()
        .take(8)
        .fold(0, |seed, &byte| seed << 8 | u64::from(byte));
    let key_table = Arc::new(key_table(max_keys, limits));
    let degraded: Arc<Degraded> = Arc::default();
    let timeouts = RedisTimeouts {
        connect: settings.connect_timeout,
        response: settings.timeout * PATIENCE,
    };
    let (manager, messages) = mpsc::channel(QUEUE);
    let (override_sync, posts) = OverrideSync::new();
    let reading = override_sync::OverrideSyncConfig {
        target: settings.target.clone(),
        timeouts,
        prefix: settings.key_prefix.clone(),
        reader,
    };
    let (notices, noticed) = mpsc::channel(QUEUE);
    let own_notices = notices.clone();
    let target = settings.target.clone();
    let (hands_of, degraded_of) = (Arc::clone(&key_table), Arc::clone(&degraded));
    let (prefix, timeout) = (settings.key_prefix.clone(), settings.timeout);
    let (started, has_started) = sync_channel(1);
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default());
        let Ok(runtime) = runtime else { return };
        let config = LeaseManagerConfig {
            key_table: hands_of,
            degraded: degraded_of,
            target,
            timeouts,
            prefix,
            timeout,
            epoch,
            metrics,
            id,
            seed,
        };
        runtime.block_on(async {
            tokio::task::spawn_local(override_sync::serve(reading, posts));
            LeaseManager::run(config, own_notices, (messages, noticed), started).await;
        });
    };
    let thread = thread::Builder::new().name("budget".into()).spawn(work)?;
    let first = has_started
        .recv()
        .map_err(|_| io::Error::other("the Redis thread could not start its runtime"))?;
    if first.is_ok() {
        tracing::info!(redis = settings.target.address(), "shared limits use Redis");
    }
    let budget = Budget {
        key_table,
        manager: manager.clone(),
        notices,
        degraded,
        override_sync,
        wait: settings.timeout,
    };
    Ok((budget, LeaseManagerThread { manager, thread }))
}

/// A table with room for every key, and an overflow cell per quota.
fn key_table(max_keys: usize, limits: &[Arc<SharedLimit>]) -> KeyTable {
    let quotas = limits.iter().map(|limit| limit.quotas()).sum();
    let key_table = KeyTable::new(max_keys, quotas);
    for limit in limits {
        for tier in &limit.tiers {
            let place = key_table.overflow(tier.overflow);
            if limit.algorithm() == LeaseAlgorithm::Slots {
                if let Some(most) = lease_manager::most_alone(&tier.terms, limit.when_down, 1.0) {
                    key_table.slots(place).prepare_alone(most);
                }
            } else if let Some(alone) =
                lease_manager::alone(&tier.terms, limit.when_down, 1.0, None)
            {
                key_table.cell(place).prepare_alone(0, &alone);
            }
        }
    }
    key_table
}

impl LeaseManagerThread {
    /// Returns every leased token and stops. Takes at most slightly longer than `patience`.
    pub fn close(self, timeouts: Duration) {
        // a lease manager that has ended has nothing to return
        if self.manager.blocking_send(Message::Close(timeouts)).is_ok() {
            let _ = self.thread.join();
        }
    }
}
