//! The limits that a store knows: counters that outlive configurations.
//!
//! A limit has one set of counters for each [`StateFormat`] of its words: for a bucket its unit of
//! time, for a window its length. Tiers share counters, except where their windows differ in
//! length. An id is never reused for other counters, because slots of the table may carry it for
//! the life of the process. After a reload the limit keeps its counters if the new rule reads them
//! alike. Otherwise it gets fresh counters and a reference to the previous rule: see the module
//! `migration`.
//!
//! Ids are looked up on the slow path only, and without a lock: two levels of write-once cells.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use super::{
    algorithm::StateFormat,
    attached::{Attached, inherited, previous_rules},
    counters::{LimitCounters, Occupied},
    rule::Limit,
};

/// Ids per chunk; 256 chunks of 256.
const CHUNK: usize = 256;

/// The ids are used up: there are 65,535. A limit takes another for each change that its counters
/// do not survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process has used all 65535 limit ids; restart tidegate")]
pub struct TooManyLimits;

type Chunk = Box<[OnceLock<Arc<LimitCounters>>]>;

/// All counters by id.
#[derive(Debug)]
pub(super) struct Registry {
    /// Ids assigned.
    ids: AtomicU32,
    by_id: Box<[OnceLock<Chunk>]>,
}

impl Registry {
    pub(super) fn new() -> Registry {
        Registry {
            ids: AtomicU32::new(0),
            by_id: cells(),
        }
    }

    /// Joins a limit to counters: those of `before` where its rule reads them alike, otherwise
    /// fresh ones. `was` maps each tier to its tier in `before`.
    pub(super) fn attach(
        &self,
        limit: &Limit,
        before: Option<(&Attached, &[usize])>,
    ) -> Result<Arc<Attached>, TooManyLimits> {
        let kept = before.filter(|(before, was)| limit.rule.continues(&before.rule, was));
        let occupied = before.map(|(before, _)| Arc::clone(before.occupancy()));
        let occupied = occupied.unwrap_or_default();
        let mut states: Vec<Arc<LimitCounters>> = Vec::with_capacity(limit.tiers());
        for tier in 0..limit.tiers() {
            let form = limit.form(tier);
            let known = match kept {
                Some((before, was)) => Some(before.state(was.get(tier).copied().unwrap_or(0))),
                None => states.iter().find(|state| state.form == form),
            };
            let known = known.map(Arc::clone);
            states.push(known.map_or_else(|| self.enter(form, &occupied), Ok)?);
        }
        let past = match (kept, before) {
            (Some((before, was)), _) => inherited(before, was),
            (None, Some((before, was))) => previous_rules(before, was),
            (None, None) => Box::default(),
        };
        let mut states = states.into_iter();
        Ok(Arc::new(Attached {
            name: limit.name.clone(),
            rule: limit.rule.clone(),
            // a limit has at least one tier
            state: states.next().ok_or(TooManyLimits)?,
            others: states.collect(),
            past,
        }))
    }

    /// The counters with this id; `None` for an id never assigned.
    pub(super) fn by_id(&self, id: u16) -> Option<&Arc<LimitCounters>> {
        let [chunk, index] = id.to_be_bytes();
        self.by_id
            .get(usize::from(chunk))?
            .get()?
            .get(usize::from(index))?
            .get()
    }

    /// The memory holdings of every limit that the process has seen, each once.
    pub(super) fn occupied(&self) -> Vec<Arc<Occupied>> {
        let last = u16::try_from(self.ids.load(Relaxed)).unwrap_or(u16::MAX);
        let states = (1..=last).filter_map(|id| self.by_id(id));
        let mut all: Vec<_> = states.map(|state| Arc::clone(&state.occupancy)).collect();
        all.sort_unstable_by_key(Arc::as_ptr);
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }

    fn enter(
        &self,
        form: StateFormat,
        occupied: &Arc<Occupied>,
    ) -> Result<Arc<LimitCounters>, TooManyLimits> {
        let next = |ids: u32| ids.checked_add(1).filter(|&id| id <= u32::from(u16::MAX));
        let given = self.ids.fetch_update(Relaxed, Relaxed, next);
        let id = given
            .ok()
            .and_then(next)
            .and_then(|id| u16::try_from(id).ok());
        let id = id.ok_or(TooManyLimits)?;
        let state = Arc::new(LimitCounters::new(id, form, Arc::clone(occupied)));
        let [chunk, index] = id.to_be_bytes();
        if let Some(chunk) = self.by_id.get(usize::from(chunk))
            && let Some(cell) = chunk.get_or_init(cells).get(usize::from(index))
        {
            return Ok(Arc::clone(cell.get_or_init(|| state)));
        }
        Ok(state)
    }
}

fn cells<T>() -> Box<[OnceLock<T>]> {
    std::iter::repeat_with(OnceLock::new).take(CHUNK).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::{Algorithm, Quota};

    fn limit(name: &str, amount: u64) -> Limit {
        Limit::new(
            name,
            Algorithm::TokenBucket,
            &[Quota::new(amount, Duration::from_secs(1), 5).unwrap()],
        )
        .unwrap()
    }

    #[test]
    fn ids_run_out_with_an_error_and_not_by_reuse() {
        let registry = Registry::new();
        for n in 1..=u16::MAX {
            let attached = registry.attach(&limit("a", 10), None).unwrap();
            assert_eq!(attached.state.id, n);
            assert!(
                registry
                    .by_id(n)
                    .is_some_and(|state| Arc::ptr_eq(state, &attached.state))
            );
        }
        assert_eq!(
            registry.attach(&limit("one more", 10), None).err(),
            Some(TooManyLimits)
        );
        assert!(registry.by_id(0).is_none());
    }
}
