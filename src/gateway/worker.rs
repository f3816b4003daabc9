//! The state of one worker thread for one configuration, used by all steps of a request.
//!
//! It belongs to one thread and takes no lock. Threads share only the limiter's cells and the
//! metrics' counters. The steps are methods of [`Worker`] in separate files;
//! [`decide`](super::decide) and
//! [`gateway`](super) call them in order.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use tokio::time::Instant;

use super::{
    active_config::ActiveConfig,
    decision_log::{Admissions, DecisionLog},
    majority_vote::MajorityVote,
    request_id::RequestIds,
};
use crate::{
    identity::TokenCache,
    response::FieldWriter,
    telemetry::{access::AccessLog, log::Throttle, trace::Spans},
    upstream::{SpareHeaderMap, Upstream},
};

/// The gateway on one worker thread, with one configuration.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) active: Arc<ActiveConfig>,
    pub(super) upstreams: Vec<Rc<Upstream>>,
    pub(super) request_ids: RequestIds,
    pub(super) fields: RefCell<FieldWriter>,
    pub(super) spare: SpareHeaderMap,
    pub(super) access: Option<AccessLog>,
    pub(super) spans: Option<Spans>,
    pub(super) tokens: TokenCache,
    /// Number of decisions, used to sample their durations and keys.
    pub(super) decisions: Cell<u32>,
    /// Dominant-key detectors, by limit.
    pub(super) majorities: RefCell<Box<[MajorityVote]>>,
    /// Throttles the warnings about each upstream.
    pub(super) warnings: Vec<Throttle>,
    /// Throttles the warnings about shed requests.
    pub(super) shedding: Throttle,
    pub(super) decision_log: Arc<DecisionLog>,
    pub(super) admissions: Admissions,
}

impl Worker {
    /// Creates the worker without opening connections. Unchanged upstreams keep the previous
    /// worker's connections.
    pub(super) fn new(active: Arc<ActiveConfig>, previous: Option<&Worker>) -> Self {
        let request_ids = RequestIds::new();
        let upstreams = active.plan.upstreams.iter().map(|upstream_state| {
            let mut before = previous.iter().flat_map(|worker| &worker.upstreams);
            let unchanged = before.find(|upstream| Arc::ptr_eq(upstream.state(), upstream_state));
            let new = || {
                Rc::new(Upstream::new(
                    Arc::clone(upstream_state),
                    request_ids.random(),
                ))
            };
            unchanged.map_or_else(new, Rc::clone)
        });
        let upstreams: Vec<_> = upstreams.collect();
        let decision_log = match previous {
            Some(worker) => Arc::clone(&worker.decision_log),
            None => active.process.decision_logs.open(),
        };
        decision_log.retain(|limit| active.plan.limit(limit).is_some());
        Self {
            decision_log,
            admissions: Admissions::default(),
            shedding: Throttle::default(),
            warnings: upstreams.iter().map(|_| Throttle::default()).collect(),
            upstreams,
            request_ids,
            fields: RefCell::default(),
            spare: SpareHeaderMap::default(),
            access: active.access_log(),
            spans: active.process.spans().cloned(),
            tokens: TokenCache::new(active.process.token_secret),
            decisions: Cell::new(0),
            majorities: RefCell::new(
                // One more for the limit of the status page.
                vec![MajorityVote::default(); active.snapshot().limits.len() + 1].into(),
            ),
            active,
        }
    }

    /// Closes upstream connections that have been idle for too long.
    pub(super) fn sweep(&self, now: Instant) {
        self.upstreams
            .iter()
            .for_each(|upstream| upstream.sweep(now));
    }
}
