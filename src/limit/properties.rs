//! The properties that every algorithm must satisfy, each over 10,000 random traces in a
//! full run (tests).
//!
//! An algorithm's model states by definition, in exact integers, three things: whether a request
//! passes, how many whole units remain, and whether any charge is left. Every wait is then checked
//! by its definition: 1 ns earlier the request is denied, at its end it is admitted. A new
//! algorithm is one more entry in [`models::ALGORITHMS`]. Slots do not return with time; their
//! properties are in the tests of the store.

use std::{fmt::Debug, sync::Arc, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestCaseResult, TestRunner},
};

use super::{
    Attached, Charge, Key, Limit, Quota, STEP_BACK_NS, Standing, Store, test_size::samples,
};

mod models;

use models::{ALGORITHMS, KeyModel, ModelAlgorithm};

/// After 5 years a limit may deny everything, because its words have reached their range.
const LATE_NS: u64 = 5 * 365 * 24 * 3_600 * 1_000_000_000;

/// One limit in its own store, its model, and the key under test.
struct PropertySubject {
    algorithm: &'static dyn ModelAlgorithm,
    quota: Quota,
    store: Store,
    limit: Arc<Attached>,
    model: Box<dyn KeyModel>,
    key: Option<Key>,
}

impl PropertySubject {
    fn new(algorithm: &'static dyn ModelAlgorithm, quota: Quota, keyed: bool) -> PropertySubject {
        let store = Store::new(8);
        let limit = store.attach(&limit(algorithm, "subject", quota)).unwrap();
        let key = keyed.then_some(KEY);
        PropertySubject {
            algorithm,
            quota,
            store,
            limit,
            model: model(algorithm, quota, key),
            key,
        }
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge {
            limit: &self.limit,
            tier: 0,
            key: self.key,
            cost,
            max_delay_ns: self.algorithm.max_delay_ns(self.quota),
        }
    }

    fn admit(&self, now_ns: u64, cost: u64) -> Standing {
        self.store.admit(now_ns, &[self.charge(cost)]).standings()[0]
    }

    fn peek(&self, now_ns: u64, cost: u64) -> Standing {
        self.store.peek(now_ns, &[self.charge(cost)]).standings()[0]
    }

    fn admits(&self, now_ns: u64, cost: u64) -> bool {
        !self.peek(now_ns, cost).denied
    }
}

const KEY: Key = Key(0x0123_4567_89AB_CDEF_0011_2233_4455_6677);

fn limit(algorithm: &dyn ModelAlgorithm, name: &str, quota: Quota) -> Limit {
    Limit::new(name, algorithm.algorithm(), &[quota]).unwrap()
}

fn model(algorithm: &dyn ModelAlgorithm, quota: Quota, key: Option<Key>) -> Box<dyn KeyModel> {
    let offset = key.map_or(Duration::ZERO, |key| key.window_offset(quota.period));
    algorithm.model(quota, offset.as_nanos() as u64)
}

/// One request as drawn: numbers that become a moment and a cost once the quota is known.
type Draw = (u8, u16, u8, u64);

/// The data of a trace: a quota, whether the limit is keyed, its start, its requests.
type Trace = (Quota, bool, u64, Vec<Draw>);

fn traces() -> impl Strategy<Value = Trace> {
    let starts = prop_oneof![Just(0), 0..1_000_000_000_000_000_u64];
    (quotas(), any::<bool>(), starts, vec(any::<Draw>(), 1..48))
}

fn quotas() -> impl Strategy<Value = Quota> {
    const MS: u64 = 1_000_000;
    const HOUR: u64 = 3_600_000 * MS;
    let amounts = prop_oneof![Just(1), Just(7), Just(100), 1..100_u64, 1..1_000_000_u64];
    let periods = prop_oneof![
        Just(MS),
        Just(1_000 * MS),
        Just(60_000 * MS),
        Just(HOUR),
        MS..=31 * 24 * HOUR
    ];
    let bursts = prop_oneof![Just(1), 1..10_u64, 1..100_000_u64];
    let drawn = (amounts, periods, bursts);
    drawn.prop_filter_map("a quota out of bounds", |(amount, period_ns, burst)| {
        Quota::new(amount, Duration::from_nanos(period_ns), burst).ok()
    })
}

/// How long one unit and the whole bucket take to refill, rounded down.
fn spans(quota: Quota) -> (u64, u64) {
    let unit = quota.period.as_nanos() / u128::from(quota.amount.get());
    (unit as u64, (unit * u128::from(quota.burst.get())) as u64)
}

/// A time step at an edge: none, a nanosecond, about a unit, exactly some units, a whole bucket.
fn gap_ns(quota: Quota, kind: u8, size: u16) -> u64 {
    const LONGEST: u64 = 1_000_000_000_000_000;
    let (unit, fill) = spans(quota);
    let size = u64::from(size);
    let gap = match kind % 8 {
        0 | 1 => 0,
        2 => size % 4,
        3 => ((u128::from(unit) * u128::from(size)) >> 14) as u64,
        4 | 5 => unit
            .saturating_mul(size % 8)
            .saturating_add(size / 8 % 3)
            .saturating_sub(1),
        6 => STEP_BACK_NS - 1 + size % 3,
        _ => ((u128::from(fill) * u128::from(size)) >> 15) as u64,
    };
    gap.min(LONGEST)
}

/// A cost at an edge.
fn cost(quota: Quota, kind: u8, size: u64) -> u64 {
    let burst = quota.burst.get();
    match kind % 8 {
        0 => 0,
        1 => burst.saturating_add(1).saturating_add(size % 3),
        2 => burst,
        3 => 1 + size % burst,
        4 => size,
        _ => 1 + size % 3,
    }
}

/// Moments that never go back, with costs.
fn forward(&(quota, _, start, ref draws): &Trace) -> Vec<(u64, u64)> {
    let mut now_ns = start;
    let step = |&(gap_kind, gap_size, cost_kind, cost_size): &Draw| {
        now_ns += gap_ns(quota, gap_kind, gap_size);
        (now_ns, cost(quota, cost_kind, cost_size))
    };
    draws.iter().map(step).collect()
}

/// Moments that also go back, sometimes anywhere, with costs.
fn back_and_forth(&(quota, _, start, ref draws): &Trace) -> Vec<(u64, u64)> {
    let mut now_ns = start;
    let step = |&(gap_kind, gap_size, cost_kind, cost_size): &Draw| {
        let gap = gap_ns(quota, gap_kind, gap_size);
        now_ns = match (gap_kind >> 3) % 8 {
            0..4 => now_ns.saturating_add(gap),
            4..7 => now_ns.saturating_sub(gap),
            _ => cost_size.rotate_left(32),
        };
        (now_ns, cost(quota, cost_kind, cost_size))
    };
    draws.iter().map(step).collect()
}

/// Runs a property over random traces of each algorithm.
fn for_each_algorithm(property: impl Fn(&'static dyn ModelAlgorithm, Trace) -> TestCaseResult) {
    for_each_drawn(traces(), |algorithm, (quota, keyed, start, draws)| {
        property(algorithm, (algorithm.fit(quota), keyed, start, draws))
    });
}

/// Runs a property over inputs drawn from another strategy.
fn for_each_drawn<T: Debug>(
    drawn: impl Strategy<Value = T>,
    property: impl Fn(&'static dyn ModelAlgorithm, T) -> TestCaseResult,
) {
    let config = Config {
        cases: samples(10_000),
        source_file: Some(file!()),
        ..Config::default()
    };
    for algorithm in ALGORITHMS {
        if let Err(failure) =
            TestRunner::new(config.clone()).run(&drawn, |drawn| property(algorithm, drawn))
        {
            panic!("{:?}: {failure}", algorithm.algorithm());
        }
    }
}

/// Sends a trace and checks that no interval between two admitted requests exceeds its bound. Only
/// forward time counts: stepping back neither gains nor loses units.
fn check_windows(subject: &PropertySubject, trace: &[(u64, u64)]) -> TestCaseResult {
    let (mut elapsed_ns, mut before) = (0, 0);
    let mut admitted: Vec<(u128, u64)> = Vec::new();
    for &(now_ns, cost) in trace {
        elapsed_ns += u128::from(now_ns.saturating_sub(before));
        before = now_ns;
        if !subject.admit(now_ns, cost).denied {
            admitted.push((elapsed_ns, cost));
        }
    }
    for (index, &(first_ns, _)) in admitted.iter().enumerate() {
        let mut total = 0;
        for &(last_ns, cost) in &admitted[index..] {
            total += u128::from(cost);
            let span_ns = last_ns - first_ns;
            let most = subject.algorithm.most_within(subject.quota, span_ns);
            prop_assert!(
                total <= most,
                "{total} admitted within {span_ns} ns, at most {most}"
            );
        }
    }
    Ok(())
}

#[test]
fn never_over_quota_in_any_window() {
    for_each_algorithm(|algorithm, trace| {
        check_windows(
            &PropertySubject::new(algorithm, trace.0, trace.1),
            &forward(&trace),
        )
    });
}

#[test]
fn decisions_and_remaining_are_the_models() {
    for_each_algorithm(|algorithm, trace| {
        let mut subject = PropertySubject::new(algorithm, trace.0, trace.1);
        for (now_ns, cost) in forward(&trace) {
            let standing = subject.admit(now_ns, cost);
            prop_assert_eq!(standing.denied, !subject.model.admits(now_ns, cost));
            if !standing.denied {
                prop_assert_eq!(standing.delay_ns, subject.model.delay_ns(now_ns, cost));
                prop_assert!(standing.delay_ns <= subject.charge(cost).max_delay_ns);
                subject.model.charge(now_ns, cost);
            }
            prop_assert_eq!(standing.remaining, subject.model.remaining(now_ns));
            prop_assert_eq!(standing.capacity, trace.0.burst.get());
            prop_assert_eq!(standing.never, cost > standing.capacity);
            prop_assert_eq!(
                standing.retry_after_ns.is_some(),
                standing.denied && !standing.never
            );
        }
        Ok(())
    });
}

#[test]
fn advertised_waits_are_exact() {
    for_each_algorithm(|algorithm, trace| {
        let mut subject = PropertySubject::new(algorithm, trace.0, trace.1);
        for (now_ns, cost) in forward(&trace) {
            let standing = subject.admit(now_ns, cost);
            if !standing.denied {
                subject.model.charge(now_ns, cost);
            }
            let model = &subject.model;
            if let Some(wait) = standing.retry_after_ns {
                prop_assert!(wait > 0);
                prop_assert!(
                    !subject.admits(now_ns + wait - 1, cost),
                    "admitted 1 ns before {wait} ns"
                );
                prop_assert!(!model.admits(now_ns + wait - 1, cost));
                prop_assert!(
                    subject.admits(now_ns + wait, cost),
                    "refused after {wait} ns"
                );
                prop_assert!(model.admits(now_ns + wait, cost));
            }
            let (next, reset) = (standing.next_unit_ns, standing.reset_ns);
            prop_assert_eq!(next == 0, standing.remaining == standing.capacity);
            if next > 0 {
                prop_assert_eq!(model.remaining(now_ns + next - 1), standing.remaining);
                prop_assert!(model.remaining(now_ns + next) > standing.remaining);
            }
            prop_assert!(model.is_full(now_ns + reset));
            prop_assert!(reset == 0 || !model.is_full(now_ns + reset - 1));
        }
        Ok(())
    });
}

#[test]
fn denial_changes_no_state() {
    for_each_algorithm(|algorithm, trace| {
        let [all, admitted_only] =
            [(); 2].map(|()| PropertySubject::new(algorithm, trace.0, trace.1));
        for (now_ns, cost) in forward(&trace) {
            let expected = admitted_only.peek(now_ns, cost);
            let standing = all.admit(now_ns, cost);
            prop_assert_eq!(standing.denied, expected.denied);
            if standing.denied {
                prop_assert_eq!(standing, expected);
            } else {
                admitted_only.admit(now_ns, cost);
            }
        }
        Ok(())
    });
}

#[test]
fn remaining_is_what_is_admitted_now() {
    for_each_algorithm(|algorithm, trace| {
        let subject = PropertySubject::new(algorithm, trace.0, trace.1);
        let mut end = 0;
        for (now_ns, cost) in forward(&trace) {
            let remaining = subject.admit(now_ns, cost).remaining;
            prop_assert!(subject.admits(now_ns, remaining));
            let more = subject.peek(now_ns, remaining + 1);
            prop_assert!(more.denied || more.delay_ns > 0);
            end = now_ns;
        }
        // with delays, several units may be too late where one of the same cost is not
        if subject.charge(1).max_delay_ns == 0 {
            let remaining = subject.peek(end, 1).remaining.min(50);
            for left in (0..remaining).rev() {
                prop_assert!(subject.admit(end, 1).remaining >= left);
            }
        }
        prop_assert_eq!(
            subject.admit(end, subject.peek(end, 0).remaining).denied,
            false
        );
        let more = subject.admit(end, 1);
        prop_assert!(more.denied || more.delay_ns > 0);
        Ok(())
    });
}

#[test]
fn cost_zero_is_admitted_and_changes_nothing_and_a_cost_over_the_capacity_never_is() {
    for_each_algorithm(|algorithm, trace| {
        let subject = PropertySubject::new(algorithm, trace.0, trace.1);
        for (now_ns, cost) in back_and_forth(&trace) {
            subject.admit(now_ns, cost);
            let before = subject.peek(now_ns, 1);
            prop_assert!(!subject.admit(now_ns, 0).denied);
            for too_much in [before.capacity + 1, u64::MAX] {
                let standing = subject.admit(now_ns, too_much);
                prop_assert!(
                    standing.denied && standing.never && standing.retry_after_ns.is_none()
                );
            }
            prop_assert_eq!(subject.peek(now_ns, 1), before);
        }
        Ok(())
    });
}

#[test]
fn clock_that_steps_anywhere_mints_nothing() {
    for_each_algorithm(|algorithm, trace| {
        check_windows(
            &PropertySubject::new(algorithm, trace.0, trace.1),
            &back_and_forth(&trace),
        )
    });
}

#[test]
fn wait_after_a_step_back_is_bounded_and_true() {
    for_each_algorithm(|algorithm, trace| {
        let subject = PropertySubject::new(algorithm, trace.0, trace.1);
        let (unit, fill) = spans(trace.0);
        for (now_ns, cost) in back_and_forth(&trace) {
            let standing = subject.admit(now_ns, cost);
            let wait = standing.retry_after_ns;
            // beyond a certain process age nothing is admitted, so a wait that ends there cannot
            // hold
            if let Some(wait) = wait.filter(|wait| now_ns.saturating_add(*wait) <= LATE_NS) {
                // rounding adds less than a nanosecond per unit
                let fills = algorithm.most_fills() * (fill + trace.0.burst.get());
                let delay = subject.charge(cost).max_delay_ns;
                let bound = fills + delay + cost * (unit + 1) + STEP_BACK_NS;
                prop_assert!(wait <= bound, "{wait} ns to wait, at most {bound}");
                prop_assert!(!subject.admits(now_ns + wait - 1, cost));
                prop_assert!(subject.admits(now_ns + wait, cost));
            }
        }
        Ok(())
    });
}

#[test]
fn several_limits_admit_together_or_cost_nothing() {
    let drawn = (vec(quotas(), 1..4), traces());
    for_each_drawn(drawn, |first, (quotas, trace)| {
        let store = Store::new(32);
        let key = trace.1.then_some(KEY);
        let first = ALGORITHMS
            .iter()
            .position(|&other| other.is(first))
            .unwrap();
        let algorithms = ALGORITHMS.iter().cycle().skip(first);
        let rules = algorithms
            .zip(quotas)
            .map(|(&algorithm, quota)| (algorithm, algorithm.fit(quota)));
        let rules: Vec<(&dyn ModelAlgorithm, Quota)> = rules.collect();
        let attach = |(index, &(algorithm, quota)): (usize, &(&dyn ModelAlgorithm, Quota))| {
            let limit = limit(algorithm, &format!("limit {index}"), quota);
            store.attach(&limit).unwrap()
        };
        let limits: Vec<_> = rules.iter().enumerate().map(attach).collect();
        let of_rule =
            |&(algorithm, quota): &(&dyn ModelAlgorithm, Quota)| model(algorithm, quota, key);
        let mut models: Vec<_> = rules.iter().map(of_rule).collect();
        for (step, (now_ns, cost)) in forward(&trace).into_iter().enumerate() {
            // a subset of the limits, in one order or the other
            let mut chosen: Vec<usize> = (0..limits.len())
                .filter(|index| step % (index + 2) != 0)
                .collect();
            if cost % 2 == 0 {
                chosen.reverse();
            }
            let charge = |&index: &usize| Charge {
                limit: &limits[index],
                tier: 0,
                key,
                cost,
                max_delay_ns: rules[index].0.max_delay_ns(rules[index].1),
            };
            let charges: Vec<Charge<'_>> = chosen.iter().map(charge).collect();
            let verdict = store.admit(now_ns, &charges);
            prop_assert_eq!(
                verdict.admitted(),
                chosen
                    .iter()
                    .all(|&index| models[index].admits(now_ns, cost))
            );
            for (&index, standing) in chosen.iter().zip(verdict.standings().iter()) {
                prop_assert_eq!(standing.denied, !models[index].admits(now_ns, cost));
                if verdict.admitted() {
                    models[index].charge(now_ns, cost);
                }
                prop_assert_eq!(standing.remaining, models[index].remaining(now_ns));
            }
            if let Some(wait) = verdict
                .standings()
                .denial()
                .and_then(|denial| denial.retry_after_ns)
            {
                prop_assert!(!store.peek(now_ns + wait - 1, &charges).admitted());
                prop_assert!(store.peek(now_ns + wait, &charges).admitted());
            }
        }
        Ok(())
    });
}
