//! Keeps the budget shared with other gateways across reloads.
//!
//! A new configuration with the same shared limits and the same Redis keeps the budget and its
//! leased tokens. Any other starts a new budget. The old one returns its tokens to Redis after its
//! last request.

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
    budget::{self, Budget, LeaseManagerThread, OverrideReader, SharedLimit},
    config::Snapshot,
};

/// A budget with the settings that it was built from.
#[derive(Debug)]
pub(super) struct SharedBudget {
    budget: Budget,
    keeper: Mutex<Option<LeaseManagerThread>>,
    limits: Vec<Arc<SharedLimit>>,
    redis: serde_json::Value,
}

impl SharedBudget {
    /// The budget of a plan, if it shares limits: the previous plan's, or a new one. Blocks until
    /// the first attempt to reach Redis ends.
    pub(super) fn of(
        snapshot: &Snapshot,
        plan: &Plan,
        process: &Process,
        previous: Option<&Arc<SharedBudget>>,
    ) -> Result<Option<Arc<SharedBudget>>, PlanError> {
        let Some(redis) = snapshot.redis.as_ref().filter(|_| !plan.shared.is_empty()) else {
            return Ok(None);
        };
        let written = &snapshot.written.tables["redis"];
        let is_same = |shared_budget: &&Arc<SharedBudget>| {
            let pairs = shared_budget.limits.iter().zip(&plan.shared);
            shared_budget.redis == *written
                && shared_budget.limits.len() == plan.shared.len()
                && pairs.into_iter().all(|(one, other)| one.is_like(other))
        };
        if let Some(same) = previous.filter(is_same) {
            return Ok(Some(Arc::clone(same)));
        }
        let counted = process.metrics().budget(&budget::FAILURES, &budget::LOSSES);
        let max_keys = snapshot.server.max_keys;
        let runtime_overrides = Arc::clone(&process.runtime_overrides);
        let reader =
            OverrideReader::new(move |posted, is_news| runtime_overrides.read(&posted, is_news));
        let limits = &plan.shared;
        let (budget, keeper) =
            budget::start(redis, max_keys, limits, process.epoch(), counted, reader)?;
        Ok(Some(Arc::new(SharedBudget {
            budget,
            keeper: Mutex::new(Some(keeper)),
            limits: plan.shared.clone(),
            redis: written.clone(),
        })))
    }

    /// Returns leased tokens to Redis. Blocks for about `patience` at most; call it outside any
    /// runtime.
    pub(super) fn close(&self, patience: Duration) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keeper) = keeper.take() {
            keeper.close(patience);
        }
    }
}

impl Deref for SharedBudget {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.budget
    }
}
