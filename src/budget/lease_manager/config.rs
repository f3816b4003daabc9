//! The arguments and bounds of the lease manager.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    budget::{
        degraded::Degraded,
        key_table::KeyTable,
        redis::{RedisTarget, RedisTimeouts},
    },
    telemetry::handles::BudgetMetrics,
};

/// Most messages queued for the lease manager, and most events.
pub(in crate::budget) const QUEUE: usize = 16_384;
/// A call stays in flight for this many timeouts; a later reply only returns what it grants.
pub(in crate::budget) const PATIENCE: u32 = 20;

/// The arguments that start the lease manager.
pub(in crate::budget) struct LeaseManagerConfig {
    pub(in crate::budget) key_table: Arc<KeyTable>,
    pub(in crate::budget) degraded: Arc<Degraded>,
    pub(in crate::budget) target: RedisTarget,
    pub(in crate::budget) timeouts: RedisTimeouts,
    pub(in crate::budget) prefix: String,
    pub(in crate::budget) timeout: Duration,
    pub(in crate::budget) epoch: Instant,
    pub(in crate::budget) metrics: BudgetMetrics,
    /// A name unique to this process.
    pub(in crate::budget) id: String,
    pub(in crate::budget) seed: u64,
}
