//! Migrates a limit's counters when a configuration changes the limit in operation.
//!
//! **Words with the same meaning** under the new rule are kept: another amount of a window, a
//! larger burst, other slots.
//!
//! **Otherwise** (another rate of a bucket, a smaller burst, another window length, another
//! algorithm) the limit starts with fresh counters. A key not yet migrated inherits its old usage:
//! the units that the old rule counted at the change are charged as if spent at that moment, at
//! most the whole capacity.
//!
//! ```text
//!   100/h, 60 spent         the change        10/min
//!  ───────────────────────────┼─────────────────────────────▶ time
//!                     spent: 60 of 100 ─▶ 10 of 10
//! ```
//!
//! So no key is refilled, and none waits longer than a key that has just spent all of the new
//! quota. The inherited usage depends only on the moment of the change. It is computed whenever the
//! key returns, and nothing is copied. Workers switch to the new configuration one by one and never
//! read words of another format. (A worker that has not switched yet still charges the old
//! counters: these few requests count by the old rule only.)
//!
//! **Memory.** Replaced counters keep their slots until they no longer matter, which takes as long
//! as the new quota takes to refill. A limit that changes again before that remembers its last
//! [`GENERATIONS`] rules. Slots (requests in flight) are always kept, because requests return them;
//! they are no debt to any other algorithm.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use arrayvec::ArrayVec;

use super::{
    Key, Rule, Standing, Store,
    registry::{Attached, LimitCounters, OVERFLOW_BUCKETS},
    table::TableAddress,
    word_algorithm::{WordAlgorithm, WordRequest},
};

/// Previous rules that a limit remembers.
const GENERATIONS: usize = 8;

/// A limit's rule until some moment.
#[derive(Clone, Debug)]
pub(super) struct PreviousRule {
    limit: Arc<Attached>,
    /// Maps each tier of the next rule to its tier here.
    tiers: Box<[usize]>,
    change: Arc<RuleChange>,
}

/// When one rule replaced another; `u64::MAX` while the change is only planned.
#[derive(Debug)]
struct RuleChange {
    at_ns: AtomicU64,
    /// From then on earlier usage does not matter.
    until_ns: AtomicU64,
}

impl RuleChange {
    fn planned() -> Arc<RuleChange> {
        Arc::new(RuleChange {
            at_ns: AtomicU64::new(u64::MAX),
            until_ns: AtomicU64::new(u64::MAX),
        })
    }
}

/// Units spent at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpentUnits {
    pub(super) at_ns: u64,
    pub(super) units: u64,
}

/// The previous rules of a limit that replaces `before` with fresh counters; `tiers` maps each of
/// its tiers to its old tier.
pub(super) fn formers(before: &Attached, tiers: &[usize]) -> Box<[PreviousRule]> {
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

impl PreviousRule {
    fn was(&self, tier: usize) -> usize {
        self.tiers.get(tier).copied().unwrap_or(0)
    }

    /// Units this rule had counted for a key when it was replaced; `None` for an unknown key.
    fn spent(&self, store: &Store, key: Option<Key>, tier: usize) -> Option<u64> {
        let at_ns = self.change.at_ns.load(Relaxed);
        Some(match &self.limit.rule {
            Rule::Words(words) => {
                let state = self.limit.state(tier);
                let (word, spread) = match key {
                    None => (state.unkeyed.0.load(Relaxed), 0),
                    Some(key) => {
                        let address = TableAddress::new(key, state.id);
                        (store.table.find(&address)?.load()?, address.spread())
                    }
                };
                words.owed(&ask(tier, at_ns, spread), word)
            }
            Rule::Logs(logs) => {
                let id = self.limit.state(tier).id;
                used(&store.look_at_ring(id, key, logs, &ask(tier, at_ns, 0))?)
            }
        })
    }
}

impl Attached {
    /// Usage of a key without counters under previous rules; `None` for nothing.
    #[cold]
    pub(super) fn inheritance(
        &self,
        store: &Store,
        key: Option<Key>,
        tier: usize,
        now_ns: u64,
    ) -> Option<SpentUnits> {
        if self.counts_slots() {
            return None;
        }
        let mut tiers = ArrayVec::<usize, GENERATIONS>::new();
        let mut tier = tier;
        for (age, former) in self.past.iter().take(GENERATIONS).enumerate() {
            if former.change.until_ns.load(Relaxed) <= now_ns || former.limit.counts_slots() {
                return None;
            }
            tier = former.was(tier);
            tiers.push(tier);
            let Some(units) = former.spent(store, key, tier) else {
                continue;
            };
            let mut spent = former.at(units);
            // carried from rule to rule, oldest first
            for (former, &tier) in self.past.iter().zip(&tiers).take(age).rev() {
                let until_ns = former.change.at_ns.load(Relaxed);
                spent = former.at(former.limit.rule.still_spent(spent, key, tier, until_ns));
            }
            return (spent.units > 0).then_some(spent);
        }
        None
    }

    /// The initial word of a key.
    #[inline]
    pub(super) fn first_word(
        &self,
        store: &Store,
        words: &WordAlgorithm,
        key: Option<Key>,
        ask: &WordRequest,
    ) -> u64 {
        if self.past.is_empty() {
            return 0;
        }
        let spent = self.inheritance(store, key, ask.tier, ask.now_ns);
        spent.map_or(0, |spent| words.spent(spent, ask.tier, ask.spread))
    }

    /// Replaces the previous rule at `now_ns`, unless that has happened already.
    pub(super) fn take_over(&self, store: &Store, now_ns: u64) {
        let Some(former) = self.past.first() else {
            return;
        };
        if former.change.at_ns.load(Relaxed) != u64::MAX {
            return;
        }
        let until_ns = now_ns.saturating_add(self.rule.recovery_ns());
        former.change.at_ns.store(now_ns, Relaxed);
        former.change.until_ns.store(until_ns, Relaxed);
        for state in former.limit.states() {
            state.retire(now_ns, until_ns);
        }
        let Rule::Words(words) = &self.rule else {
            return;
        };
        for tier in 0..self.tiers() {
            let (state, was) = (self.state(tier), former.was(tier));
            let word = self.first_word(store, words, None, &ask(tier, now_ns, 0));
            state.unkeyed.0.fetch_max(word, Relaxed);
            if let Rule::Words(before) = &former.limit.rule
                && !(words.is_slots() || before.is_slots())
            {
                former.carry_overflow((words, before), (state, tier), was, now_ns);
            }
        }
    }

    pub(super) fn forget(&self, store: &Store, key: Option<Key>) {
        let before = self.past.iter().map(|former| &*former.limit);
        for limit in before.chain([self]) {
            for state in limit.states() {
                match &limit.rule {
                    _ if limit.counts_slots() => {}
                    Rule::Logs(_) => store.drop_ring(state.id, key),
                    Rule::Words(_) => match key {
                        None => state.unkeyed.0.store(0, Relaxed),
                        Some(key) => {
                            if let Some(cell) = store.table.find(&TableAddress::new(key, state.id))
                            {
                                cell.clear();
                            }
                        }
                    },
                }
            }
        }
    }

    /// Whether it uses these counters, or refers to them as a previous rule's.
    pub(super) fn remembers(&self, id: u16) -> bool {
        let mut formers = self.past.iter().flat_map(|former| former.limit.states());
        self.states().into_iter().any(|state| state.id == id) || formers.any(|state| state.id == id)
    }

    /// Whether it counts requests in flight.
    fn counts_slots(&self) -> bool {
        matches!(&self.rule, Rule::Words(words) if words.is_slots())
    }
}

impl PreviousRule {
    /// Keys without a slot inherit what the keys of their overflow bucket had spent.
    fn carry_overflow(
        &self,
        (words, before): (&WordAlgorithm, &WordAlgorithm),
        (state, tier): (&LimitCounters, usize),
        was: usize,
        now_ns: u64,
    ) {
        for index in 0..OVERFLOW_BUCKETS as u64 {
            let Some(shared) = self.limit.state(was).overflow_used(index) else {
                return;
            };
            let word = shared.word.load(Relaxed);
            let units = before.owed(&ask(was, now_ns, shared.spread), word);
            if units > 0
                && let Some(bucket) = state.overflow(index)
            {
                let word = words.spent(self.at(units), tier, bucket.spread);
                bucket.word.fetch_max(word, Relaxed);
            }
        }
    }

    fn at(&self, units: u64) -> SpentUnits {
        let at_ns = self.change.at_ns.load(Relaxed);
        SpentUnits { at_ns, units }
    }
}

impl LimitCounters {
    /// Freezes these counters at `now_ns`; they matter until `until_ns`.
    pub(super) fn retire(&self, now_ns: u64, until_ns: u64) {
        self.succeeded_ns.store(now_ns, Relaxed);
        self.until_ns.store(until_ns, Relaxed);
    }

    /// Whether a word carries no information: a key without a word would have the same status.
    pub(super) fn is_idle(&self, now_ns: u64, spread: u64, word: u64) -> bool {
        let then_ns = now_ns.min(self.succeeded_ns.load(Relaxed));
        self.form.is_idle(then_ns, spread, word) || self.until_ns.load(Relaxed) <= now_ns
    }
}

impl Rule {
    /// Whether counters of `before` mean the same under this rule.
    pub(super) fn continues(&self, before: &Rule, tiers: &[usize]) -> bool {
        match (self, before) {
            (Rule::Words(words), Rule::Words(before)) => words.continues(before, tiers),
            (Rule::Logs(logs), Rule::Logs(before)) => {
                let mut pairs = tiers.iter().enumerate();
                pairs.all(|(tier, &was)| logs.form(tier) == before.form(was))
            }
            _ => false,
        }
    }

    /// The time after which nothing spent now counts any more.
    fn recovery_ns(&self) -> u64 {
        match self {
            Rule::Words(words) => words.recovery_ns(),
            Rule::Logs(logs) => logs.recovery_ns(),
        }
    }

    /// The part of `spent` that still counts at a later moment, if nothing else was spent.
    fn still_spent(&self, spent: SpentUnits, key: Option<Key>, tier: usize, at_ns: u64) -> u64 {
        match self {
            Rule::Words(words) => {
                let spread = key.map_or(0, |key| TableAddress::new(key, 0).spread());
                let word = words.spent(spent, tier, spread);
                words.owed(&ask(tier, at_ns, spread), word)
            }
            Rule::Logs(logs) => logs.still_spent(spent, tier, at_ns),
        }
    }
}

impl WordAlgorithm {
    /// The word of a key that has spent these units just now and nothing else.
    pub(super) fn spent_now(&self, ask: &WordRequest, units: u64) -> u64 {
        let at_ns = ask.now_ns;
        self.spent(SpentUnits { at_ns, units }, ask.tier, ask.spread)
    }

    /// The word of a key that has spent this and nothing else.
    fn spent(&self, spent: SpentUnits, tier: usize, spread: u64) -> u64 {
        let ask = WordRequest {
            cost: spent.units,
            ..ask(tier, spent.at_ns, spread)
        };
        self.overdraw(&ask, 0).0
    }
}

fn ask(tier: usize, now_ns: u64, spread: u64) -> WordRequest {
    WordRequest {
        tier,
        now_ns,
        cost: 0,
        max_delay_ns: 0,
        spread,
    }
}

fn used(standing: &Standing) -> u64 {
    standing.capacity.saturating_sub(standing.remaining)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::{Algorithm, Charge, Limit, Quota};

    const SECOND: u64 = 1_000_000_000;
    const HOUR: u64 = 3_600 * SECOND;

    const RATES: [Algorithm; 5] = [
        Algorithm::TokenBucket,
        Algorithm::LeakyBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::SlidingLog,
    ];

    fn limit(algorithm: Algorithm, quotas: &[(u64, u64)]) -> Limit {
        let quota = |&(amount, period_ns)| {
            Quota::new(amount, Duration::from_nanos(period_ns), amount).unwrap()
        };
        let quotas: Vec<Quota> = quotas.iter().map(quota).collect();
        Limit::new("a", algorithm, &quotas).unwrap()
    }

    fn charge(limit: &Attached, key: u128) -> Charge<'_> {
        Charge {
            limit,
            tier: 0,
            key: (key > 0).then_some(Key(
                key.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_0C12_3456_789B)
            )),
            cost: 1,
            max_delay_ns: 0,
        }
    }

    fn spend(store: &Store, now_ns: u64, charge: &Charge<'_>, times: u64) -> u64 {
        let admitted = (0..times).filter(|_| store.admit(now_ns, &[*charge]).admitted());
        admitted.count() as u64
    }

    fn left(store: &Store, now_ns: u64, charge: &Charge<'_>) -> u64 {
        store.peek(now_ns, &[*charge]).standings()[0].remaining
    }

    /// `before` counts until the hour, then its replacement.
    fn change(store: &Store, now_ns: u64, before: &Attached, after: &Limit) -> Arc<Attached> {
        let after = store.succeed(after, before, &[0, 1, 2]).unwrap();
        store.change_over(now_ns, [before].into_iter(), [&*after].into_iter());
        after
    }

    #[test]
    fn what_was_spent_stays_spent_whatever_the_limit_becomes() {
        for (old, new) in RATES.iter().flat_map(|old| RATES.map(|new| (*old, new))) {
            for key in [0, 7] {
                let case = format!("{old:?} to {new:?}, key {key}");
                let store = Store::new(100);
                let before = store.attach(&limit(old, &[(60, HOUR)])).unwrap();
                assert_eq!(spend(&store, HOUR, &charge(&before, key), 45), 45, "{case}");
                let more = change(&store, HOUR, &before, &limit(new, &[(100, 60 * SECOND)]));
                let key_of_more = charge(&more, key);
                assert_eq!(left(&store, HOUR, &key_of_more), 55, "{case}");
                assert_eq!(spend(&store, HOUR, &key_of_more, 100), 55, "{case}");
                // both windows of a sliding window
                assert_eq!(
                    left(&store, HOUR + 120 * SECOND, &key_of_more),
                    100,
                    "{case}"
                );

                let before = store.attach(&limit(old, &[(60, HOUR)])).unwrap();
                spend(&store, HOUR, &charge(&before, key), 45);
                let less = change(&store, HOUR, &before, &limit(new, &[(10, 60 * SECOND)]));
                let key_of_less = charge(&less, key);
                assert_eq!(spend(&store, HOUR, &key_of_less, 9), 0, "{case}: 45 of 10");
                assert_eq!(
                    left(&store, HOUR + 120 * SECOND, &key_of_less),
                    10,
                    "{case}"
                );
            }
        }
    }

    #[test]
    fn a_key_that_comes_back_late_has_what_time_has_given_back_by_the_new_rule() {
        let store = Store::new(100);
        let rates = |amount| limit(Algorithm::TokenBucket, &[(amount, HOUR)]);
        let before = store.attach(&rates(60)).unwrap();
        spend(&store, HOUR, &charge(&before, 7), 60);
        let after = change(&store, HOUR, &before, &rates(120));
        assert_eq!(left(&store, HOUR, &charge(&after, 7)), 60);
        assert_eq!(left(&store, HOUR + HOUR / 4, &charge(&after, 7)), 90);
        // the key has its own slot, is full and is forgotten: that must not bring its debt back
        spend(&store, HOUR + HOUR / 4, &charge(&after, 7), 1);
        assert_eq!(left(&store, 3 * HOUR, &charge(&after, 7)), 120);
        assert!(
            after
                .inheritance(&store, charge(&after, 7).key, 0, 3 * HOUR)
                .is_none()
        );
    }

    #[test]
    fn changes_that_follow_each_other_are_told_on() {
        let store = Store::new(100);
        let rates = |amount, period| limit(Algorithm::TokenBucket, &[(amount, period)]);
        let mut running = store.attach(&rates(60, HOUR)).unwrap();
        spend(&store, HOUR, &charge(&running, 7), 30);
        for turn in 1..=100 {
            running = change(&store, HOUR, &running, &rates(60 + turn, HOUR));
        }
        assert_eq!(
            left(&store, HOUR, &charge(&running, 7)),
            160,
            "of a key not seen for {GENERATIONS} rules nothing is known"
        );
        assert_eq!(running.past.len(), GENERATIONS);

        let mut running = store.attach(&rates(60, HOUR)).unwrap();
        spend(&store, HOUR, &charge(&running, 8), 30);
        for turn in 1..GENERATIONS as u64 {
            running = change(&store, HOUR, &running, &rates(60 + turn, HOUR));
        }
        let last = 60 + GENERATIONS as u64 - 1;
        assert_eq!(left(&store, HOUR, &charge(&running, 8)), last - 30);
        assert_eq!(spend(&store, HOUR, &charge(&running, 8), 100), last - 30);
    }

    #[test]
    fn a_tier_is_charged_what_the_tier_of_that_name_had_spent() {
        let store = Store::new(100);
        let before = limit(Algorithm::FixedWindow, &[(10, HOUR), (100, 60 * SECOND)]);
        let before = store.attach(&before).unwrap();
        let pro = Charge {
            tier: 1,
            ..charge(&before, 7)
        };
        assert_eq!(spend(&store, HOUR, &pro, 40), 40);
        // the second tier is the third now
        let after = limit(
            Algorithm::FixedWindow,
            &[(10, HOUR), (50, HOUR), (100, 2 * HOUR)],
        );
        let after = store.succeed(&after, &before, &[0, 0, 1]).unwrap();
        store.change_over(HOUR, [&*before].into_iter(), [&*after].into_iter());
        let tier = |tier| Charge {
            tier,
            ..charge(&after, 7)
        };
        let left = [0, 1, 2].map(|index| left(&store, HOUR, &tier(index)));
        assert_eq!(left, [10, 50, 60]);
    }

    #[test]
    fn counters_that_still_mean_the_same_are_kept() {
        let store = Store::new(100);
        let attach =
            |algorithm, amount| store.attach(&limit(algorithm, &[(amount, HOUR)])).unwrap();
        let same = |before: &Arc<Attached>, after: &Limit| {
            let after = change(&store, HOUR, before, after);
            Arc::ptr_eq(before.state(0), after.state(0))
        };
        for algorithm in [
            Algorithm::FixedWindow,
            Algorithm::SlidingWindow,
            Algorithm::SlidingLog,
        ] {
            assert!(same(
                &attach(algorithm, 10),
                &limit(algorithm, &[(20, HOUR)])
            ));
        }
        let bucket = |burst| {
            let quota = Quota::new(10, Duration::from_secs(1), burst).unwrap();
            Limit::new("a", Algorithm::TokenBucket, &[quota]).unwrap()
        };
        assert!(same(&store.attach(&bucket(10)).unwrap(), &bucket(30)));
        assert!(
            !same(&store.attach(&bucket(30)).unwrap(), &bucket(10)),
            "the key that owes 30"
        );
        let slots = |count| {
            Limit::new("a", Algorithm::Concurrency, &[Quota::slots(count).unwrap()]).unwrap()
        };
        let before = store.attach(&slots(3)).unwrap();
        let held = store.admit(HOUR, &[charge(&before, 7)]).findings[0].held();
        let after = change(&store, HOUR, &before, &slots(1));
        assert_eq!(
            left(&store, HOUR, &charge(&after, 7)),
            0,
            "one is in flight"
        );
        store.release(HOUR, &charge(&before, 7), held);
        assert_eq!(left(&store, HOUR, &charge(&after, 7)), 1);
    }

    #[test]
    fn what_a_removed_limit_held_is_room_for_others() {
        let store = Store::new(8);
        let long = limit(Algorithm::TokenBucket, &[(1, HOUR)]);
        let gone = store.attach(&long).unwrap();
        (1..=64).for_each(|key| _ = spend(&store, HOUR, &charge(&gone, key), 1));
        let other = store.attach(&long).unwrap();
        spend(&store, HOUR, &charge(&other, 99), 1);
        assert_eq!(
            (other.keys(), other.overflowed() > 0),
            (0, true),
            "full of debtors"
        );
        store.change_over(HOUR, [&*gone, &*other].into_iter(), [&*other].into_iter());
        assert_eq!(spend(&store, HOUR, &charge(&other, 100), 1), 1);
        assert_eq!(other.keys(), 1);
    }
}
