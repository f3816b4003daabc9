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
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

use super::{
    Limit, Rule,
    migration::{self, PreviousRule},
    share::Occupancy,
    word_algorithm::StateFormat,
};

/// Ids per chunk; 256 chunks of 256.
const CHUNK: usize = 256;

/// Overflow buckets per limit; a power of two, at most 2¹⁶.
pub(super) const OVERFLOW_BUCKETS: usize = 256;

/// The ids are used up: there are 65,535. A limit takes another for each change that its counters
/// do not survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process has used all 65535 limit ids; restart tidegate")]
pub struct TooManyLimits;

/// A word alone on its cache line, for cells that every request of a limit may touch.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct CacheLine(pub(super) AtomicU64);

/// The counters of one limit.
#[derive(Debug)]
pub(super) struct LimitCounters {
    pub(super) id: u16,
    pub(super) form: StateFormat,
    /// The bucket for charges without a key.
    pub(super) unkeyed: CacheLine,
    /// The buckets that keys without a slot share, by hash; allocated on first use.
    overflow: OnceLock<Box<[AtomicU64]>>,
    /// The memory that the limit holds, under this rule and previous ones.
    pub(super) occupancy: Arc<Occupied>,
    pub(super) keys: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) overflowed: AtomicU64,
    /// When another rule replaced it, and until when it still matters; both `u64::MAX` while it is
    /// in use.
    pub(super) succeeded_ns: AtomicU64,
    pub(super) until_ns: AtomicU64,
}

/// How much of each kind of memory one limit holds.
#[derive(Debug, Default)]
pub(super) struct Occupied {
    /// Slots of the table.
    pub(super) slots: Occupancy,
    /// Entries of sliding logs.
    pub(super) entries: Occupancy,
}

/// One of the buckets for keys without a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverflowBucket<'a> {
    pub(super) word: &'a AtomicU64,
    /// Stands in for the key's hash: all keys of the bucket share its windows.
    pub(super) spread: u64,
}

/// Index of the overflow bucket for keys with this hash.
pub(super) fn overflow_index(spread: u64) -> usize {
    (spread as usize) & (OVERFLOW_BUCKETS - 1)
}

impl LimitCounters {
    /// The overflow bucket for keys with this hash; allocates the buckets if needed.
    #[cold]
    pub(super) fn overflow(&self, spread: u64) -> Option<OverflowBucket<'_>> {
        let new = || std::iter::repeat_with(AtomicU64::default);
        let buckets = self
            .overflow
            .get_or_init(|| new().take(OVERFLOW_BUCKETS).collect());
        overflow_bucket(buckets, overflow_index(spread))
    }

    /// As above, but `None` if no key has needed one yet.
    #[inline]
    pub(super) fn overflow_used(&self, spread: u64) -> Option<OverflowBucket<'_>> {
        overflow_bucket(self.overflow.get()?, overflow_index(spread))
    }
}

fn overflow_bucket(buckets: &[AtomicU64], index: usize) -> Option<OverflowBucket<'_>> {
    let spread = (index as u64) << 40;
    let word = buckets.get(index)?;
    Some(OverflowBucket { word, spread })
}

/// A limit joined to its counters. Cheap to keep: successive configurations share the counters.
#[derive(Debug)]
pub struct Attached {
    name: Box<str>,
    pub(super) rule: Rule,
    /// The counters of the default tier, and of those that share them.
    state: Arc<LimitCounters>,
    /// The counters of the other tiers, in their order.
    others: Box<[Arc<LimitCounters>]>,
    /// Previous rules whose counters it could not keep; latest first.
    pub(super) past: Box<[PreviousRule]>,
}

impl Attached {
    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The largest charge of one estimate: the capacity plus the largest debt. A reservation never
    /// holds more.
    pub fn largest_claim(&self, tier: usize) -> u64 {
        match &self.rule {
            Rule::Words(words) => words.largest_claim(tier),
            Rule::Logs(_) => 1,
        }
    }

    /// Keys that hold a slot of the table or, for a sliding log, a ring. Includes idle keys, which
    /// keep their slot until another key needs it.
    pub fn keys(&self) -> u64 {
        self.sum(|state| &state.keys)
    }

    /// Keys that lost their slot to another key. Their buckets were full, so no decision changed.
    pub fn evictions(&self) -> u64 {
        self.sum(|state| &state.evictions)
    }

    /// Charges decided by an overflow bucket, because the key found no slot.
    pub fn overflowed(&self) -> u64 {
        self.sum(|state| &state.overflowed)
    }

    /// How much of the store's memory it holds.
    pub(super) fn occupancy(&self) -> &Arc<Occupied> {
        &self.state.occupancy
    }

    /// The counters of a tier; of the default tier, if it does not exist.
    #[inline]
    pub(super) fn state(&self, tier: usize) -> &Arc<LimitCounters> {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.state)
    }

    pub(super) fn tiers(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    /// Its distinct counters.
    pub(super) fn states(&self) -> Vec<&Arc<LimitCounters>> {
        let mut states: Vec<&Arc<LimitCounters>> =
            self.others.iter().chain([&self.state]).collect();
        states.sort_unstable_by_key(|state| state.id);
        states.dedup_by_key(|state| state.id);
        states
    }

    /// A copy without previous rules.
    pub(super) fn without_past(&self) -> Attached {
        Attached {
            name: self.name.clone(),
            rule: self.rule.clone(),
            state: Arc::clone(&self.state),
            others: self.others.clone(),
            past: Box::default(),
        }
    }

    fn sum(&self, count: impl Fn(&LimitCounters) -> &AtomicU64) -> u64 {
        let counts = self.states().into_iter();
        let counts = counts.map(|state| count(state).load(Relaxed));
        counts.fold(0, u64::saturating_add)
    }
}

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
            (Some((before, was)), _) => migration::inherited(before, was),
            (None, Some((before, was))) => migration::formers(before, was),
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
        let state = Arc::new(LimitCounters {
            id,
            form,
            unkeyed: CacheLine::default(),
            overflow: OnceLock::new(),
            occupancy: Arc::clone(occupied),
            keys: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            succeeded_ns: AtomicU64::new(u64::MAX),
            until_ns: AtomicU64::new(u64::MAX),
        });
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
