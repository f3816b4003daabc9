//! What is spent together with other gateways, from one configuration to the next.
//!
//! A configuration that shares the same limits through the same Redis goes on with the purse of the one before, and with the
//! tokens in it. Any other has a purse of its own; the old one is emptied back into Redis when its last request has ended.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{
    plan::{Plan, PlanError},
    process::Process,
};
use crate::{
    budget::{self, Budget, KeeperThread, Reader, SharedLimit},
    config::Snapshot,
};

/// A budget, and what it was made for.
#[derive(Debug)]
pub(super) struct Purse {
    budget: Budget,
    keeper: Mutex<Option<KeeperThread>>,
    limits: Vec<Arc<SharedLimit>>,
    redis: serde_json::Value,
}

impl Purse {
    /// The purse of a plan, if it shares limits: that of the plan before, or a new one. Waits until Redis has answered or not.
    pub(super) fn of(
        snapshot: &Snapshot,
        plan: &Plan,
        process: &Process,
        previous: Option<&Arc<Purse>>,
    ) -> Result<Option<Arc<Purse>>, PlanError> {
        let Some(redis) = snapshot.redis.as_ref().filter(|_| !plan.shared.is_empty()) else {
            return Ok(None);
        };
        let written = &snapshot.written.tables["redis"];
        let is_same = |purse: &&Arc<Purse>| {
            let pairs = purse.limits.iter().zip(&plan.shared);
            purse.redis == *written
                && purse.limits.len() == plan.shared.len()
                && pairs.into_iter().all(|(one, other)| one.is_like(other))
        };
        if let Some(same) = previous.filter(is_same) {
            return Ok(Some(Arc::clone(same)));
        }
        let counted = process.metrics().budget(&budget::FAILURES, &budget::LOSSES);
        let max_keys = snapshot.server.max_keys;
        let rulings = Arc::clone(&process.rulings);
        let reader = Reader::new(move |posted, is_news| rulings.read(&posted, is_news));
        let limits = &plan.shared;
        let (budget, keeper) =
            budget::start(redis, max_keys, limits, process.epoch(), counted, reader)?;
        Ok(Some(Arc::new(Purse {
            budget,
            keeper: Mutex::new(Some(keeper)),
            limits: plan.shared.clone(),
            redis: written.clone(),
        })))
    }

    /// Hands back what was borrowed from other gateways. Takes no longer than `patience`, or a little; not on a runtime.
    pub(super) fn close(&self, patience: Duration) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keeper) = keeper.take() {
            keeper.close(patience);
        }
    }
}

impl Deref for Purse {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.budget
    }
}
