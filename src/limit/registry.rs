//! The limits that a store knows: counters that outlive configurations, found again by name.
//!
//! A limit's counters belong to its name and to the form of its words ([`Form`]: for a bucket its unit of time, for a
//! window its length). They are never removed, and an id is never given to another name, because slots of the table may
//! carry it for as long as the process runs. When a new configuration changes a limit so that its form changes (from 100/s
//! to 7/min, say), the old words cannot be read any more: the limit starts afresh, with every key full. A change within the
//! same form keeps every key's debt. Tiers of one limit share its counters, except where their windows differ in
//! length: those count apart.
//!
//! Ids are looked up on the slow path only, and without a lock: two levels of write-once cells.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{Limit, Rule, words::Form};

/// Ids per chunk; 256 chunks of 256.
const CHUNK: usize = 256;

/// More limits than ids: 65,535 names (a name counts again for each form it has had).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process has seen 65535 different limits and cannot tell more apart; restart it")]
pub struct TooManyLimits;

/// A word alone on its cache line, for the cells that every request of a limit may touch.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Line(pub(super) AtomicU64);

/// The counters of one limit.
#[derive(Debug)]
pub(super) struct State {
    pub(super) id: u16,
    pub(super) form: Form,
    /// The bucket of charges without a key.
    pub(super) unkeyed: Line,
    /// The bucket that keys share while the table has no room for them.
    pub(super) overflow: Line,
    pub(super) keys: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) overflowed: AtomicU64,
}

/// A limit joined to its counters. Cheap to keep: configurations that follow each other share the counters.
#[derive(Debug)]
pub struct Attached {
    name: Box<str>,
    pub(super) rule: Rule,
    /// The counters of the default tier, and of those that share them.
    state: Arc<State>,
    /// The counters of the other tiers, in their order.
    others: Box<[Arc<State>]>,
}

impl Attached {
    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Keys that hold a slot of the table (or, for a sliding log, a ring). Those that have all of their units are among
    /// them until somebody needs the slot.
    pub fn keys(&self) -> u64 {
        self.sum(|state| &state.keys)
    }

    /// Keys that lost their slot to another key. They had all of their units, so no decision changed.
    pub fn evictions(&self) -> u64 {
        self.sum(|state| &state.evictions)
    }

    /// Charges that were decided by the shared overflow bucket, because every slot that the key could have had was
    /// held by a key in debt.
    pub fn overflowed(&self) -> u64 {
        self.sum(|state| &state.overflowed)
    }

    /// The counters of a tier; of the default tier, if it does not exist.
    #[inline]
    pub(super) fn state(&self, tier: usize) -> &Arc<State> {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.state)
    }

    fn sum(&self, count: impl Fn(&State) -> &AtomicU64) -> u64 {
        let mut states: Vec<&Arc<State>> = self.others.iter().chain([&self.state]).collect();
        states.sort_unstable_by_key(|state| state.id);
        states.dedup_by_key(|state| state.id);
        let counts = states.into_iter().map(|state| count(state).load(Relaxed));
        counts.fold(0, u64::saturating_add)
    }
}

type Name = (Box<str>, Form);
type Chunk = Box<[OnceLock<Arc<State>>]>;

/// All limits by name and by id.
#[derive(Debug)]
pub(super) struct Registry {
    by_name: Mutex<HashMap<Name, Arc<State>>>,
    by_id: Box<[OnceLock<Chunk>]>,
}

impl Registry {
    pub(super) fn new() -> Registry {
        Registry {
            by_name: Mutex::default(),
            by_id: cells(),
        }
    }

    pub(super) fn attach(&self, limit: &Limit) -> Result<Arc<Attached>, TooManyLimits> {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = |tier: usize| {
            let name = (limit.name.clone(), limit.form(tier));
            if let Some(state) = by_name.get(&name) {
                return Ok(Arc::clone(state));
            }
            let id = by_name
                .len()
                .checked_add(1)
                .and_then(|id| u16::try_from(id).ok())
                .ok_or(TooManyLimits)?;
            let state = self.enter(id, name.1);
            by_name.insert(name, Arc::clone(&state));
            Ok(state)
        };
        Ok(Arc::new(Attached {
            name: limit.name.clone(),
            rule: limit.rule.clone(),
            state: state(0)?,
            others: (1..limit.tiers()).map(state).collect::<Result<_, _>>()?,
        }))
    }

    /// The limit with this id; `None` for an id that was never given out.
    pub(super) fn by_id(&self, id: u16) -> Option<&Arc<State>> {
        let [chunk, index] = id.to_be_bytes();
        self.by_id
            .get(usize::from(chunk))?
            .get()?
            .get(usize::from(index))?
            .get()
    }

    fn enter(&self, id: u16, form: Form) -> Arc<State> {
        let state = Arc::new(State {
            id,
            form,
            unkeyed: Line::default(),
            overflow: Line::default(),
            keys: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
        });
        let [chunk, index] = id.to_be_bytes();
        if let Some(chunk) = self.by_id.get(usize::from(chunk))
            && let Some(cell) = chunk.get_or_init(cells).get(usize::from(index))
        {
            return Arc::clone(cell.get_or_init(|| state));
        }
        state
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
    fn counters_are_found_again_by_name() {
        let registry = Registry::new();
        let [first, again, other] = [("a", 10), ("a", 20), ("b", 10)].map(|(name, amount)| {
            let attached = registry.attach(&limit(name, amount)).unwrap();
            assert_eq!(attached.name(), name);
            attached
        });
        assert!(Arc::ptr_eq(&first.state, &again.state));
        assert!(!Arc::ptr_eq(&first.state, &other.state));
    }

    #[test]
    fn limit_whose_unit_of_time_changes_starts_afresh_and_finds_its_old_counters_when_it_changes_back()
     {
        let registry = Registry::new();
        let first = registry.attach(&limit("a", 10)).unwrap();
        let sevenths = registry.attach(&limit("a", 7)).unwrap();
        let back = registry.attach(&limit("a", 10)).unwrap();
        assert!(!Arc::ptr_eq(&first.state, &sevenths.state));
        assert!(Arc::ptr_eq(&first.state, &back.state));
    }

    #[test]
    fn ids_run_out_with_an_error_and_not_by_reuse() {
        let registry = Registry::new();
        for n in 1..=u16::MAX {
            let attached = registry.attach(&limit(&n.to_string(), 10)).unwrap();
            assert_eq!(attached.state.id, n);
            assert!(
                registry
                    .by_id(n)
                    .is_some_and(|state| Arc::ptr_eq(state, &attached.state))
            );
        }
        assert_eq!(
            registry.attach(&limit("one more", 10)).err(),
            Some(TooManyLimits)
        );
        assert!(registry.attach(&limit("1", 10)).is_ok());
        assert!(registry.by_id(0).is_none());
    }
}
