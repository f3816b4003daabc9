//! A limit joined to its counters, and to the rules that it replaced.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{
    counters::{LimitCounters, Occupied},
    rule::Rule,
};

/// A limit joined to its counters. Cheap to keep: successive configurations share the counters.
#[derive(Debug)]
pub struct Attached {
    pub(super) name: Box<str>,
    pub(super) rule: Rule,
    /// The counters of the default tier, and of those that share them.
    pub(super) state: Arc<LimitCounters>,
    /// The counters of the other tiers, in their order.
    pub(super) others: Box<[Arc<LimitCounters>]>,
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

    /// Whether it uses these counters, or refers to them as a previous rule's.
    pub(super) fn remembers(&self, id: u16) -> bool {
        let mut formers = self.past.iter().flat_map(|former| former.limit.states());
        self.states().into_iter().any(|state| state.id == id) || formers.any(|state| state.id == id)
    }

    /// Whether it counts requests in flight.
    pub(super) fn counts_slots(&self) -> bool {
        matches!(&self.rule, Rule::Words(words) if words.is_slots())
    }

    fn sum(&self, count: impl Fn(&LimitCounters) -> &AtomicU64) -> u64 {
        let counts = self.states().into_iter();
        let counts = counts.map(|state| count(state).load(Relaxed));
        counts.fold(0, u64::saturating_add)
    }
}

/// Previous rules that a limit remembers.
pub(super) const GENERATIONS: usize = 8;

/// A limit's rule until some moment.
#[derive(Clone, Debug)]
pub(super) struct PreviousRule {
    pub(super) limit: Arc<Attached>,
    /// Maps each tier of the next rule to its tier here.
    tiers: Box<[usize]>,
    pub(super) change: Arc<RuleChange>,
}

/// When one rule replaced another; `u64::MAX` while the change is only planned.
#[derive(Debug)]
pub(super) struct RuleChange {
    pub(super) at_ns: AtomicU64,
    /// From then on earlier usage does not matter.
    pub(super) until_ns: AtomicU64,
}

impl RuleChange {
    fn planned() -> Arc<RuleChange> {
        Arc::new(RuleChange {
            at_ns: AtomicU64::new(u64::MAX),
            until_ns: AtomicU64::new(u64::MAX),
        })
    }
}

impl PreviousRule {
    /// The tier of this rule that corresponds to a tier of the next.
    pub(super) fn was(&self, tier: usize) -> usize {
        self.tiers.get(tier).copied().unwrap_or(0)
    }
}

/// The previous rules of a limit that replaces `before` with fresh counters; `tiers` maps each of
/// its tiers to its old tier.
pub(super) fn previous_rules(before: &Attached, tiers: &[usize]) -> Box<[PreviousRule]> {
    let direct = PreviousRule {
        limit: Arc::new(before.without_past()),
        tiers: tiers.into(),
        change: RuleChange::planned(),
    };
    let earlier = before.past.iter().cloned();
    [direct]
        .into_iter()
        .chain(earlier)
        .take(GENERATIONS)
        .collect()
}

/// The previous rules of a limit that keeps the counters of `before`.
pub(super) fn inherited(before: &Attached, tiers: &[usize]) -> Box<[PreviousRule]> {
    let mut past = before.past.clone();
    if let Some(direct) = past.first_mut() {
        direct.tiers = tiers.iter().map(|&tier| direct.was(tier)).collect();
    }
    past
}
