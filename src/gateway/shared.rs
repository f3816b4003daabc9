//! What all workers of a process share: the plan, the buckets, the metrics, the access log.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::plan::{LimitRule, Plan, PlanError};
use crate::{
    config::Snapshot,
    identity::KeyHasher,
    limit::Store,
    telemetry::{self, AccessLog, Metrics, access},
};

/// Shared by every worker; nothing in it is locked on a request's path.
#[derive(Debug)]
pub struct Shared {
    pub(super) plan: Plan,
    pub(super) store: Store,
    pub(super) hasher: KeyHasher,
    metrics: Metrics,
    pub(super) access: Option<AccessLog>,
    pub(super) access_all: bool,
    /// The origin of the limiter's time.
    pub(super) epoch: Instant,
    /// Our name in `Via`: one of its own for each process, so that a loop is told from two gateways in a row.
    pub(super) pseudonym: String,
    config_hash: String,
}
