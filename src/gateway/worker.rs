//! What the gateway keeps on one worker thread for one configuration: the state that the steps of a request use.
//!
//! Everything here belongs to one thread: nothing is locked, nothing crosses threads but the limiter's cells and the metrics'
//! counters. The steps are methods of [`Worker`] in files of their own, which [`decide`](super::decide) and
//! [`gateway`](super) call in order.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use tokio::time::Instant;

use super::{
    majority::Majority,
    notebook::{Admissions, Notebook},
    request_id::RequestIds,
    shared::Shared,
};
use crate::{
    identity::TokenCache,
    response::FieldWriter,
    telemetry::{access::AccessLog, log::Throttle, trace::Spans},
    upstream::{SpareTable, Upstream},
};

/// The gateway on one worker thread, with one configuration.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) upstreams: Vec<Rc<Upstream>>,
    pub(super) request_ids: RequestIds,
    pub(super) fields: RefCell<FieldWriter>,
    pub(super) spare: SpareTable,
    pub(super) access: Option<AccessLog>,
    pub(super) spans: Option<Spans>,
    pub(super) tokens: TokenCache,
    /// Decisions so far, to sample their time and their keys.
    pub(super) decisions: Cell<u32>,
    /// By limit.
    pub(super) majorities: RefCell<Box<[Majority]>>,
    /// By upstream: what went wrong with it.
    pub(super) warnings: Vec<Throttle>,
    /// That requests are shed.
    pub(super) shedding: Throttle,
    pub(super) notebook: Arc<Notebook>,
    pub(super) admissions: Admissions,
}

impl Worker {
    /// Opens no connection yet. Upstreams that are as they were keep the connections of the worker before.
    pub(super) fn new(shared: Arc<Shared>, previous: Option<&Worker>) -> Self {
        let request_ids = RequestIds::new();
        let upstreams = shared.plan.upstreams.iter().map(|fleet| {
            let mut before = previous.iter().flat_map(|worker| &worker.upstreams);
            let unchanged = before.find(|upstream| Arc::ptr_eq(upstream.fleet(), fleet));
            let new = || Rc::new(Upstream::new(Arc::clone(fleet), request_ids.random()));
            unchanged.map_or_else(new, Rc::clone)
        });
        let upstreams: Vec<_> = upstreams.collect();
        let notebook = match previous {
            Some(worker) => Arc::clone(&worker.notebook),
            None => shared.process.notebooks.open(),
        };
        notebook.retain(|limit| shared.plan.limit(limit).is_some());
        Self {
            notebook,
            admissions: Admissions::default(),
            shedding: Throttle::default(),
            warnings: upstreams.iter().map(|_| Throttle::default()).collect(),
            upstreams,
            request_ids,
            fields: RefCell::default(),
            spare: SpareTable::default(),
            access: shared.access_log(),
            spans: shared.process.spans().cloned(),
            tokens: TokenCache::new(shared.process.token_secret),
            decisions: Cell::new(0),
            majorities: RefCell::new(
                // the page of own quotas has a limit, too
                vec![Majority::default(); shared.snapshot().limits.len() + 1].into(),
            ),
            shared,
        }
    }

    /// Closes upstream connections that have been idle for too long.
    pub(super) fn sweep(&self, now: Instant) {
        self.upstreams
            .iter()
            .for_each(|upstream| upstream.sweep(now));
    }
}
