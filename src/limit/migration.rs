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

use std::sync::{Arc, atomic::Ordering::Relaxed};

use arrayvec::ArrayVec;

use super::{
    algorithm::{StateFormat, WordAlgorithm},
    attached::{Attached, GENERATIONS, PreviousRule},
    counters::{LimitCounters, OVERFLOW_BUCKETS},
    key::Key,
    registry::TooManyLimits,
    rule::{Limit, Rule},
    standing::Standing,
    store::Store,
    table::TableAddress,
    word_request::{SpentUnits, WordRequest},
};

impl Store {
    /// Joins a limit to the counters of the one that it replaces. No key regains spent units, and
    /// none waits longer than the new quota takes to refill (see the module `migration`). `was`
    /// maps each of its tiers to its tier in `before`. Changes nothing until
    /// [`Store::change_over`].
    pub fn attach_after(
        &self,
        limit: &Limit,
        before: &Attached,
        was: &[usize],
    ) -> Result<Arc<Attached>, TooManyLimits> {
        let was: Vec<usize> = (0..limit.tiers())
            .map(|tier| was.get(tier).copied().unwrap_or(0))
            .collect();
        self.registry.attach(limit, Some((before, &was)))
    }

    /// From `now_ns` on the limits of `after` count, and those of `before` no longer. Counters that
    /// no limit of `after` continues are dropped. Call once, before the first decision by `after`.
    pub fn change_over<'a>(
        &self,
        now_ns: u64,
        before: impl Iterator<Item = &'a Attached>,
        after: impl Iterator<Item = &'a Attached> + Clone,
    ) {
        for limit in after.clone() {
            limit.begin(self, now_ns);
        }
        for occupied in self.registry.occupied() {
            let mut runs = after.clone();
            match runs.find(|limit| Arc::ptr_eq(limit.occupancy(), &occupied)) {
                Some(limit) => self.run(limit),
                None => {
                    occupied.slots.set_running(false);
                    occupied.entries.set_running(false);
                }
            }
        }
        self.divide();
        for limit in before {
            for state in limit.states() {
                let goes_on = |after: &Attached| after.remembers(state.id);
                if state.form != StateFormat::Slots && !after.clone().any(goes_on) {
                    state.retire(now_ns, now_ns);
                }
            }
        }
    }

    /// Clears what a key has spent of a limit, also under previous rules. Slots in flight still
    /// count; their requests release them.
    pub fn forget(&self, limit: &Attached, key: Option<Key>) {
        limit.forget(self, key);
    }
}

impl PreviousRule {
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
                words.owed(&WordRequest::zero_cost(tier, at_ns, spread), word)
            }
            Rule::Logs(logs) => {
                let id = self.limit.state(tier).id;
                used(&store.look_at_ring(id, key, logs, &WordRequest::zero_cost(tier, at_ns, 0))?)
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
    pub(super) fn begin(&self, store: &Store, now_ns: u64) {
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
            let word =
                self.first_word(store, words, None, &WordRequest::zero_cost(tier, now_ns, 0));
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
            let units = before.owed(&WordRequest::zero_cost(was, now_ns, shared.spread), word);
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
        let after = store.attach_after(after, before, &[0, 1, 2]).unwrap();
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
        let after = store.attach_after(&after, &before, &[0, 0, 1]).unwrap();
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
