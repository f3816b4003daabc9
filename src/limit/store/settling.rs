//! Estimates are reserved, then settled with the actual cost (tests): sequences from test vectors,
//! slow models, and concurrent requests.

use std::time::Duration;

use proptest::{collection::vec, prelude::*, test_runner::Config};
use serde_json::Value;

use super::*;
use crate::limit::{
    Algorithm, Charge, ChargeLocation, Overdraft, Quota,
    store::{
        tests::{in_threads, key},
        word::WordAttempt,
    },
};

const SECOND: u64 = 1_000_000_000;

/// Every algorithm that supports estimates.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::Gcra,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
];

/// A limit of estimates in its own store. Without a key its windows start at the store's time 0.
struct Estimates {
    store: Store,
    limit: Arc<Attached>,
    key: Option<Key>,
}

impl Estimates {
    fn new(algorithm: Algorithm, quota: Quota, debt_ppm: u64) -> Estimates {
        let overdraft = Overdraft::from_ppm(debt_ppm).unwrap();
        let limit = Limit::of_estimates("tokens", algorithm, &[quota], overdraft).unwrap();
        let store = Store::new(100);
        let limit = store.attach(&limit).unwrap();
        Estimates {
            store,
            limit,
            key: None,
        }
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge {
            limit: &self.limit,
            tier: 0,
            key: self.key,
            cost,
            max_delay_ns: 0,
        }
    }

    fn reserve(&self, now_ns: u64, estimate: u64) -> Standing {
        let verdict = self.store.admit(now_ns, &[self.charge(estimate)]);
        verdict.standings()[0]
    }

    /// Returns the units forgiven.
    fn settle(&self, now_ns: u64, from_ns: u64, held: u64, actual: u64) -> u64 {
        if actual >= held {
            return self.store.overdraw(now_ns, &self.charge(actual - held));
        }
        let refund = self.charge(held - actual);
        self.store.release(from_ns, &refund, ChargeLocation::Own);
        0
    }

    fn remaining(&self, now_ns: u64) -> u64 {
        self.store.peek(now_ns, &[self.charge(0)]).standings()[0].remaining
    }

    /// Units owed, including debt beyond the capacity.
    fn owed(&self, now_ns: u64) -> u64 {
        let charge = self.charge(0);
        let Rule::Words(words) = &self.limit.rule else {
            panic!("it keeps words");
        };
        let mut word = WordAttempt::new(&charge, words, now_ns);
        let (_, old, _) = word.propose(&self.store);
        words.owed(&charge.ask(now_ns, 0), old)
    }
}

fn quota(amount: u64, period_ns: u64, burst: u64) -> Quota {
    Quota::new(amount, Duration::from_nanos(period_ns), burst).unwrap()
}

#[test]
fn the_sequences_of_the_vectors() {
    let text = include_str!("../../../tests/vectors/cost_vectors.json");
    let vectors: Value = serde_json::from_str(text).unwrap();
    let sequences = vectors["settle"].as_array().unwrap();
    assert_eq!(sequences.len(), 12);
    for sequence in sequences {
        let number = |name: &str| sequence[name].as_u64();
        let debt_ppm = number("debt").unwrap_or(1) * 1_000_000;
        let (capacity, algorithms) = match sequence["kind"].as_str().unwrap() {
            "token_bucket" => (number("burst").unwrap(), &ALGORITHMS[..3]),
            "fixed_window" => (number("limit").unwrap(), &ALGORITHMS[3..4]),
            _ => (number("limit").unwrap(), &ALGORITHMS[4..]),
        };
        let period = number("period_s").or(number("window_s")).unwrap() * SECOND;
        let amount = number("amount").unwrap_or(capacity);
        for &algorithm in algorithms {
            let limit = Estimates::new(algorithm, quota(amount, period, capacity), debt_ppm);
            for (index, step) in sequence["steps"].as_array().unwrap().iter().enumerate() {
                check_step(
                    &limit,
                    capacity,
                    step,
                    &format!("{} {index}", sequence["id"]),
                );
            }
        }
    }
}

fn check_step(limit: &Estimates, capacity: u64, step: &Value, name: &str) {
    let number = |name: &str| step[name].as_u64();
    let expect = &step["expect"];
    let now_ns = number("t").unwrap() * SECOND;
    match number("cost") {
        Some(cost) => {
            let standing = limit.reserve(now_ns, cost);
            assert_eq!(Some(!standing.denied), expect["ok"].as_bool(), "{name}");
            if let Some(retry_s) = expect["retry_s"].as_u64() {
                let wait_ns = standing.retry_after_ns.unwrap();
                assert_eq!(wait_ns.div_ceil(SECOND), retry_s, "{name}");
            }
        }
        None => {
            let from_ns = number("from").unwrap_or(0) * SECOND;
            let (held, actual) = (number("held").unwrap(), number("actual").unwrap());
            let forgiven = limit.settle(now_ns, from_ns, held, actual);
            assert_eq!(Some(forgiven), expect["forgiven"].as_u64(), "{name}");
        }
    }
    let owed = limit.owed(now_ns);
    match expect["used"].as_u64() {
        Some(used) => assert_eq!(owed, used, "{name}"),
        None => {
            let level = i128::from(capacity) - i128::from(owed);
            assert_eq!(Some(level as i64), expect["level"].as_i64(), "{name}");
        }
    }
}

/// The definition of a limit of estimates.
trait Model {
    fn advance(&mut self, now_ns: u64);
    /// Whether it is admitted.
    fn reserve(&mut self, estimate: u64) -> bool;
    /// Returns the units forgiven.
    fn extra(&mut self, units: u64) -> u64;
    fn refund(&mut self, from_ns: u64, units: u64);
    fn remaining(&self) -> u64;
}

/// A bucket; its level is in units of 1/period.
struct SettlingBucket {
    amount: i128,
    period: i128,
    full: i128,
    least: i128,
    level: i128,
    now_ns: u64,
}

impl SettlingBucket {
    fn new(quota: Quota, debt_ppm: u64) -> SettlingBucket {
        let period = quota.period.as_nanos() as i128;
        let full = i128::from(quota.burst.get()) * period;
        SettlingBucket {
            amount: i128::from(quota.amount.get()),
            period,
            full,
            least: -full * i128::from(debt_ppm) / 1_000_000,
            level: full,
            now_ns: 0,
        }
    }

    fn span(&self, units: u64) -> i128 {
        i128::from(units) * self.period
    }
}

impl Model for SettlingBucket {
    fn advance(&mut self, now_ns: u64) {
        let elapsed = i128::from(now_ns - self.now_ns);
        self.level = self.full.min(self.level + elapsed * self.amount);
        self.now_ns = now_ns;
    }

    fn reserve(&mut self, estimate: u64) -> bool {
        let admits = self.level >= self.span(estimate).min(self.full);
        if admits && estimate > 0 {
            self.level -= self.span(estimate).min(self.full - self.least);
        }
        admits || estimate == 0
    }

    fn extra(&mut self, units: u64) -> u64 {
        let level = self.level - self.span(units);
        let forgiven = (self.least - level).max(0);
        self.level = level.max(self.least);
        forgiven.div_euclid(self.period) as u64 + u64::from(forgiven % self.period != 0)
    }

    fn refund(&mut self, _: u64, units: u64) {
        self.level = self.full.min(self.level + self.span(units));
    }

    fn remaining(&self) -> u64 {
        self.level.max(0).div_euclid(self.period) as u64
    }
}

/// Windows that start at the store's time 0: units used in each.
struct SettlingWindow {
    slides: bool,
    limit: u64,
    most: u64,
    window_ns: u64,
    index: u64,
    now_ns: u64,
    used: [u64; 2],
}

impl SettlingWindow {
    fn new(quota: Quota, debt_ppm: u64, slides: bool) -> SettlingWindow {
        let limit = quota.amount.get();
        SettlingWindow {
            slides,
            limit,
            most: limit + limit * debt_ppm / 1_000_000,
            window_ns: quota.period.as_nanos() as u64,
            index: 0,
            now_ns: 0,
            used: [0, 0],
        }
    }

    fn weighed(&self) -> u64 {
        let left = (self.index + 1) * self.window_ns - self.now_ns;
        let before = u128::from(self.used[0]) * u128::from(left) / u128::from(self.window_ns);
        let before = if self.slides { before as u64 } else { 0 };
        before + self.used[1]
    }
}

impl Model for SettlingWindow {
    fn advance(&mut self, now_ns: u64) {
        let index = now_ns / self.window_ns;
        if index > self.index {
            let before = if index == self.index + 1 {
                self.used[1]
            } else {
                0
            };
            self.used = [before, 0];
        }
        (self.index, self.now_ns) = (index, now_ns);
    }

    fn reserve(&mut self, estimate: u64) -> bool {
        let admits = self.weighed() + estimate.min(self.limit) <= self.limit;
        if admits {
            self.used[1] += estimate.min(self.most);
        }
        admits || estimate == 0
    }

    fn extra(&mut self, units: u64) -> u64 {
        let used = self.used[1] + units;
        self.used[1] = used.min(self.most).max(self.used[1]);
        used - self.used[1]
    }

    fn refund(&mut self, from_ns: u64, units: u64) {
        match self.index - from_ns / self.window_ns {
            0 => self.used[1] = self.used[1].saturating_sub(units),
            1 if self.slides => self.used[0] = self.used[0].saturating_sub(units),
            _ => {}
        }
    }

    fn remaining(&self) -> u64 {
        self.limit.saturating_sub(self.weighed())
    }
}

fn model(algorithm: Algorithm, quota: Quota, debt_ppm: u64) -> Box<dyn Model> {
    match algorithm {
        Algorithm::FixedWindow => Box::new(SettlingWindow::new(quota, debt_ppm, false)),
        Algorithm::SlidingWindow => Box::new(SettlingWindow::new(quota, debt_ppm, true)),
        _ => Box::new(SettlingBucket::new(quota, debt_ppm)),
    }
}

/// A drawn step: the operation, its amount, the delay before it.
type SettlingDraw = (u8, u16, u16);

proptest! {
    #![proptest_config(Config::with_cases(2_000))]

    #[test]
    fn every_algorithm_settles_as_its_model_does(
        amount in 1..60_u64,
        burst in (1..60_u64).prop_map(|half| 2 * half),
        debt_ppm in prop_oneof![Just(0_u64), Just(500_000), Just(1_000_000), Just(3_000_000)],
        draws in vec(any::<SettlingDraw>(), 1..40),
    ) {
        for algorithm in ALGORITHMS {
            // a window's capacity is its amount
            let amount = if algorithm.has_burst() { amount } else { burst };
            let quota = quota(amount, 60 * SECOND, burst);
            let limit = Estimates::new(algorithm, quota, debt_ppm);
            let mut model = model(algorithm, quota, debt_ppm);
            let mut held: Vec<(u64, u64)> = Vec::new();
            let mut now_ns = 0;
            for &(what, size, gap) in &draws {
                now_ns += u64::from(gap) * 1_000_003;
                model.advance(now_ns);
                let units = u64::from(size) % (4 * burst);
                match what % 4 {
                    0 | 1 => {
                        let standing = limit.reserve(now_ns, units);
                        prop_assert_eq!(!standing.denied, model.reserve(units), "{:?}", algorithm);
                        if standing.denied {
                            let wait_ns = standing.retry_after_ns.expect("no estimate is impossible");
                            let denied = |at_ns| limit.store.peek(at_ns, &[limit.charge(units)]).standings()[0].denied;
                            prop_assert!(denied(now_ns + wait_ns - 1) && !denied(now_ns + wait_ns));
                        } else {
                            held.push((now_ns, units.min(limit.limit.largest_claim(0))));
                        }
                    }
                    2 => {
                        let forgiven = limit.store.overdraw(now_ns, &limit.charge(units));
                        prop_assert_eq!(forgiven, model.extra(units), "{:?}", algorithm);
                    }
                    _ => {
                        let Some((from_ns, held)) = held.pop() else { continue };
                        let units = units.min(held);
                        limit.settle(now_ns, from_ns, units, 0);
                        model.refund(from_ns, units);
                    }
                }
                prop_assert_eq!(limit.remaining(now_ns), model.remaining(), "{:?}", algorithm);
            }
        }
    }
}

#[test]
fn several_limits_reserve_their_own_estimates_or_none_of_them() {
    for first in ALGORITHMS {
        for second in ALGORITHMS {
            let store = Store::new(100);
            let attach = |name, algorithm, amount| {
                let quota = quota(amount, 3_600 * SECOND, amount);
                let limit = Limit::of_estimates(name, algorithm, &[quota], Overdraft::ONE);
                store.attach(&limit.unwrap()).unwrap()
            };
            let limits = [
                attach("tokens", first, 1_000),
                attach("money", second, 500),
                attach("full", Algorithm::TokenBucket, 10),
            ];
            let charge = |limit, cost| Charge {
                limit,
                tier: 0,
                key: None,
                cost,
                max_delay_ns: 0,
            };
            let [tokens, money, full] = &limits;
            assert_eq!(store.overdraw(0, &charge(full, 20)), 0);
            let three = [charge(tokens, 400), charge(money, 700), charge(full, 1)];
            let remaining = || {
                let asked = [charge(tokens, 0), charge(money, 0)];
                let standings = store.peek(0, &asked).standings();
                [standings[0].remaining, standings[1].remaining]
            };
            for _ in 0..100 {
                assert!(!store.admit(0, &three).admitted());
                assert_eq!(remaining(), [1_000, 500], "{first:?} {second:?}");
            }
            assert!(store.admit(0, &three[..2]).admitted());
            assert_eq!(remaining(), [600, 0]);
            store.release(0, &charge(money, 690), ChargeLocation::Own);
            assert_eq!(remaining(), [600, 490], "700 were held, 10 are kept");
        }
    }
}

#[test]
fn many_at_once_leave_what_was_used() {
    for algorithm in ALGORITHMS {
        for key in [None, Some(key(5))] {
            let quota = quota(1_000_000, 3_600 * SECOND, 1_000_000);
            let mut limit = Estimates::new(algorithm, quota, 1_000_000);
            limit.key = key.map(Key);
            // windows of any offset have begun, and none ends
            let now_ns = match limit.key {
                Some(key) => 3_600 * SECOND + key.window_offset(quota.period).as_nanos() as u64,
                None => 0,
            };
            in_threads(8, |thread| {
                for round in 0..500 {
                    assert!(!limit.reserve(now_ns, 100).denied);
                    // 100 are held: 90 come back, or 10 more are due
                    let actual = if (thread + round) % 2 == 0 { 10 } else { 110 };
                    limit.settle(now_ns, now_ns, 100, actual);
                }
                0
            });
            let used = 8 * 250 * (10 + 110);
            assert_eq!(limit.remaining(now_ns), 1_000_000 - used, "{algorithm:?}");
        }
    }
}

#[test]
fn debt_is_waited_for_and_no_flood_of_keys_washes_it_off() {
    let mut limit = Estimates::new(
        Algorithm::TokenBucket,
        quota(1_000, 60 * SECOND, 1_000),
        1_000_000,
    );
    limit.key = Some(Key(key(1)));
    assert!(!limit.reserve(0, 1_000).denied);
    assert_eq!(limit.settle(0, 0, 1_000, 10_000), 8_000);
    for other in 2..2_000 {
        let charge = Charge {
            key: Some(Key(key(other))),
            ..limit.charge(1)
        };
        _ = limit.store.admit(0, &[charge]);
    }
    let standing = limit.reserve(0, 500);
    assert_eq!(
        (standing.remaining, standing.retry_after_ns),
        (0, Some(90 * SECOND))
    );
    assert!(limit.reserve(90 * SECOND - 1, 500).denied);
    assert!(!limit.reserve(90 * SECOND, 500).denied);
}

#[test]
fn debt_outlives_a_change_of_the_rule() {
    let store = Store::new(100);
    let rule = |amount| {
        let quota = quota(amount, 60 * SECOND, 1_000);
        Limit::of_estimates("tokens", Algorithm::TokenBucket, &[quota], Overdraft::ONE).unwrap()
    };
    let before = store.attach(&rule(1_000)).unwrap();
    let charge = |limit, cost| Charge {
        limit,
        tier: 0,
        key: Some(Key(key(1))),
        cost,
        max_delay_ns: 0,
    };
    assert!(store.admit(0, &[charge(&*before, 1_000)]).admitted());
    assert_eq!(store.overdraw(0, &charge(&*before, 500)), 0);
    let after = store.attach_after(&rule(500), &before, &[0]).unwrap();
    store.change_over(0, [&*before].into_iter(), [&*after].into_iter());
    let standing = store.peek(0, &[charge(&*after, 1)]).standings()[0];
    assert_eq!(standing.retry_after_ns, Some(501 * 60 * SECOND / 500));
}

#[test]
fn a_quota_with_its_debt_must_fit_the_word() {
    let most = |algorithm, amount, period_ns| {
        let quota = quota(amount, period_ns, amount);
        Limit::of_estimates("tokens", algorithm, &[quota], Overdraft::ONE).err()
    };
    assert_eq!(most(Algorithm::SlidingWindow, 524_287, 60 * SECOND), None);
    assert_eq!(
        most(Algorithm::SlidingWindow, 524_288, 60 * SECOND),
        Some(crate::limit::QuotaError::WindowTooFull { most: 524_287 })
    );
    let day = 24 * 3_600 * SECOND;
    let years = |burst| {
        let quota = Quota::new(1, Duration::from_nanos(day), burst).unwrap();
        Limit::of_estimates("tokens", Algorithm::Gcra, &[quota], Overdraft::ONE).err()
    };
    assert_eq!(years(548), None);
    assert_eq!(years(549), Some(crate::limit::QuotaError::FillTooLong));
    for algorithm in [Algorithm::SlidingLog, Algorithm::Concurrency] {
        let quota = match algorithm {
            Algorithm::Concurrency => Quota::slots(5).unwrap(),
            _ => quota(5, SECOND, 5),
        };
        let refused = Limit::of_estimates("tokens", algorithm, &[quota], Overdraft::ONE).err();
        assert_eq!(refused, Some(crate::limit::QuotaError::NoEstimates));
    }
}
