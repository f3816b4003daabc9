//! The store's guarantees for every algorithm: under threads, for charges after the event, and for
//! refunds.

use std::{collections::HashMap, time::Duration};

use proptest::{collection::vec, prelude::*, test_runner::Config};

use super::{
    tests::{HOUR, SECOND, in_threads, key, remaining},
    *,
};
use crate::limit::{
    Algorithm, Charge, ChargeLocation, Quota, Verdict, slot_counters::RETRY_NS, test_size::samples,
};

const ALL: [Algorithm; 7] = [
    Algorithm::TokenBucket,
    Algorithm::Gcra,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
    Algorithm::Concurrency,
];

/// `amount` per hour, or as many slots.
fn attach(store: &Store, algorithm: Algorithm, amount: u64) -> Arc<Attached> {
    let quota = match algorithm {
        Algorithm::Concurrency => Quota::slots(amount),
        _ => Quota::new(amount, Duration::from_secs(3_600), amount),
    };
    let name = format!("{algorithm:?} {amount}");
    let limit = Limit::new(&name, algorithm, &[quota.unwrap()]).unwrap();
    store.attach(&limit).unwrap()
}

fn charge(limit: &Attached, key: Option<u128>, cost: u64) -> Charge<'_> {
    Charge {
        limit,
        tier: 0,
        key: key.map(Key),
        cost,
        max_delay_ns: 0,
    }
}

/// A moment when hourly windows of any offset have begun and none ends for some minutes.
fn early(key: Option<u128>) -> u64 {
    let offset = key.map_or(Duration::ZERO, |key| {
        Key(key).window_offset(Duration::from_secs(3_600))
    });
    10 * HOUR + offset.as_nanos() as u64
}

#[test]
fn thirty_two_threads_admit_exactly_the_limit() {
    for algorithm in ALL {
        for key in [None, Some(key(5))] {
            let store = Store::new(1_000);
            let limit = attach(&store, algorithm, 700);
            let wider = attach(&store, Algorithm::FixedWindow, 900);
            let charges = [charge(&wider, key, 1), charge(&limit, key, 1)];
            let admitted = in_threads(32, |_| {
                let tries = (0..100).map(|_| store.admit(early(key), &charges));
                tries.filter(Verdict::admitted).count() as u64
            });
            assert_eq!(admitted, 700, "{algorithm:?}");
            let left = charges.map(|charge| remaining(&store, early(key), charge));
            assert_eq!(
                left,
                [200, 0],
                "{algorithm:?}: a denied request costs nothing"
            );
        }
    }
}

#[test]
fn every_pair_of_algorithms_is_charged_together_or_not_at_all() {
    for wide in ALL {
        for narrow in ALL {
            let store = Store::new(1_000);
            let (wide, narrow) = (attach(&store, wide, 5), attach(&store, narrow, 3));
            let now = early(Some(key(1)));
            let charges = [&wide, &narrow].map(|limit| charge(limit, Some(key(1)), 1));
            let admitted = (0..9).filter(|_| store.admit(now, &charges).admitted());
            assert_eq!(admitted.count(), 3);
            assert_eq!(charges.map(|charge| remaining(&store, now, charge)), [2, 0]);
        }
    }
}

/// The first limit admits and the second denies, while threads name the two in opposite orders.
#[test]
fn whatever_is_rolled_back_is_there_again() {
    for algorithm in ALL {
        let store = Store::new(1_000);
        let a = attach(&store, algorithm, 300);
        let b = attach(&store, Algorithm::SlidingLog, 301);
        let key = Some(key(1));
        let orders = [
            [charge(&a, key, 1), charge(&b, key, 1)],
            [charge(&b, key, 1), charge(&a, key, 1)],
        ];
        let admitted = in_threads(16, |thread| {
            let charges = &orders[thread as usize % 2];
            let tries = (0..50).map(|_| store.admit(early(key), charges));
            tries.filter(Verdict::admitted).count() as u64
        });
        let left = orders[0].map(|charge| remaining(&store, early(key), charge));
        assert_eq!(left, [300 - admitted, 301 - admitted], "{algorithm:?}");
    }
}

#[test]
fn what_an_admitted_request_gives_back_is_there_again() {
    for algorithm in ALL {
        for key in [None, Some(key(2))] {
            let store = Store::new(1_000);
            let limit = attach(&store, algorithm, 10);
            let (now, charges) = (early(key), [charge(&limit, key, 4)]);
            let first = store.admit(now, &charges);
            assert!(store.admit(now + 1, &charges).admitted());
            assert_eq!(first.standings()[0].held, ChargeLocation::Own);
            store.release(now, &charges[0], first.standings()[0].held);
            let left = remaining(&store, now + 1, charges[0]);
            assert_eq!(left, 6, "{algorithm:?}");
            let denied = [charge(&limit, key, 7)];
            let held = store.admit(now + 1, &denied).standings()[0].held;
            assert_eq!(
                held,
                ChargeLocation::Nowhere,
                "a denied request holds nothing"
            );
            let free = [charge(&limit, key, 0)];
            let held = store.admit(now + 1, &free).standings()[0].held;
            assert_eq!(
                held,
                ChargeLocation::Nowhere,
                "nor does one that costs nothing"
            );
        }
    }
}

#[test]
fn charge_after_the_fact_takes_what_is_left_and_no_more() {
    for algorithm in ALL {
        for key in [None, Some(key(3))] {
            let store = Store::new(1_000);
            let limit = attach(&store, algorithm, 10);
            let (now, one) = (early(key), charge(&limit, key, 1));
            let reset = |now| store.peek(now, &[one]).standings()[0].reset_ns;
            store.charge(now, &charge(&limit, key, 7));
            let is_slots = algorithm == Algorithm::Concurrency;
            let left = if is_slots { 10 } else { 3 };
            assert_eq!(remaining(&store, now, one), left, "{algorithm:?}");
            for _ in 0..100 {
                store.charge(now, &charge(&limit, key, u64::MAX));
            }
            let left = if is_slots { 10 } else { 0 };
            assert_eq!(remaining(&store, now, one), left, "{algorithm:?}");
            let longest = if algorithm == Algorithm::SlidingWindow {
                2 * HOUR
            } else {
                HOUR
            };
            assert!(reset(now) <= longest, "{algorithm:?}: the debt is bounded");
        }
    }
}

#[test]
fn slots_come_back_when_they_are_released_and_not_with_time() {
    let store = Store::new(1_000);
    let limit = attach(&store, Algorithm::Concurrency, 2);
    let one = charge(&limit, Some(key(1)), 1);
    let held: Vec<ChargeLocation> = (0..2)
        .map(|_| store.admit(0, &[one]).standings()[0].held)
        .collect();
    let standing = store.admit(10 * 24 * HOUR, &[one]).standings()[0];
    assert!(standing.denied && standing.retry_after_ns == Some(RETRY_NS));
    store.release(0, &one, held[0]);
    assert!(store.admit(0, &[one]).admitted());
    assert!(!store.admit(0, &[one]).admitted());
}

#[test]
fn slot_of_a_key_without_room_comes_back_to_where_it_was_taken() {
    let store = Store::new(1);
    let limit = attach(&store, Algorithm::Concurrency, 2);
    let charges: Vec<Charge<'_>> = (0..8).map(|n| charge(&limit, Some(key(n)), 1)).collect();
    let held: Vec<ChargeLocation> = charges
        .iter()
        .map(|one| store.admit(0, &[*one]).standings()[0].held)
        .collect();
    let (own, shared) = (ChargeLocation::Own, ChargeLocation::Overflow);
    assert_eq!(held, [own, own, own, own, shared, shared, shared, shared]);
    // the first keys return their slots; the fifth still holds one in its overflow bucket and gets
    // no second quota
    store.release(0, &charges[0], held[0]);
    let again = [(); 2].map(|()| store.admit(0, &[charges[4]]).standings()[0].held);
    assert_eq!(again, [shared, ChargeLocation::Nowhere]);
    store.release(0, &charges[4], again[0]);
    store.release(0, &charges[4], held[4]);
    assert_eq!(store.admit(0, &[charges[4]]).standings()[0].held, own);
    assert_eq!(remaining(&store, 0, charges[4]), 1);
}

#[test]
fn threads_that_take_and_give_back_slots_in_a_crowded_table_leak_none() {
    let store = Store::new(16);
    let [slots, other] = [3, 1_000].map(|n| attach(&store, Algorithm::Concurrency, n));
    let narrow = attach(&store, Algorithm::Concurrency, 2);
    in_threads(16, |thread| {
        for n in 0..5_000 {
            let key = Some(key(n * (thread + 1) % 40));
            let charges = [
                charge(&slots, key, 1),
                charge(&other, None, 1),
                charge(&narrow, key, 1),
            ];
            let verdict = store.admit(n, &charges);
            if verdict.admitted() {
                for (charge, standing) in charges.iter().zip(verdict.standings().iter()) {
                    store.release(n, charge, standing.held);
                }
            }
        }
        0
    });
    for n in 0..40 {
        assert_eq!(remaining(&store, 0, charge(&slots, Some(key(n)), 1)), 3);
        assert_eq!(remaining(&store, 0, charge(&narrow, Some(key(n)), 1)), 2);
    }
    assert_eq!(remaining(&store, 0, charge(&other, None, 1)), 1_000);
    for limit in [&slots, &narrow] {
        let shared = |n| limit.state(0).overflow(n).unwrap().word.load(Relaxed);
        assert!((0..256).all(|n| shared(n) == 0), "what keys shared is free");
    }
}

#[test]
fn slots_follow_a_count_through_any_sequence() {
    let config = Config {
        cases: samples(10_000),
        ..Config::default()
    };
    proptest!(config, |(capacity in 1..20_u64, steps in vec((0..3_u64, 0..25_u64, any::<bool>()), 1..60))| {
        let store = Store::new(100);
        let limit = attach(&store, Algorithm::Concurrency, capacity);
        let mut held: Vec<(u64, u64, ChargeLocation)> = Vec::new();
        let mut used: HashMap<u64, u64> = HashMap::new();
        for (who, cost, takes) in steps {
            let one = |who, cost| charge(&limit, (who > 0).then(|| key(who)), cost);
            if takes {
                let standing = store.admit(0, &[one(who, cost)]).standings()[0];
                let count = used.entry(who).or_default();
                prop_assert_eq!(standing.denied, cost > 0 && *count + cost > capacity);
                prop_assert_eq!(standing.never, cost > capacity);
                if !standing.denied {
                    *count += cost;
                    held.push((who, cost, standing.held));
                }
                prop_assert_eq!(standing.remaining, capacity - *count);
            } else if let Some((who, cost, held)) = held.pop() {
                store.release(0, &one(who, cost), held);
                *used.entry(who).or_default() -= cost;
            }
        }
    });
}

#[test]
fn logs_set_memory_aside_share_where_there_is_none_and_drop_what_is_gone() {
    let store = Store::new(1);
    let limit = attach(&store, Algorithm::SlidingLog, 9_992);
    for n in 0..20 {
        store.admit(HOUR, &[charge(&limit, Some(key(n)), 9_000)]);
    }
    // 100,000 entries, ten logs of 9,992 and 8
    assert_eq!((limit.keys(), limit.overflowed()), (10, 10));
    let standing = |now, n| {
        store
            .peek(now, &[charge(&limit, Some(key(n)), 1_000)])
            .standings()[0]
    };
    assert!(standing(HOUR, 19).denied, "they share one");
    assert!(standing(HOUR, 0).denied, "no key lost its own ring");
    for n in 0..20 {
        store.admit(3 * HOUR, &[charge(&limit, Some(key(n + 100)), 9_000)]);
    }
    assert_eq!((limit.keys(), limit.evictions()), (10, 10));
}

#[test]
fn tiers_whose_windows_differ_count_apart_and_others_together() {
    for algorithm in [
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::SlidingLog,
    ] {
        let store = Store::new(100);
        let quota = |amount, secs| Quota::new(amount, Duration::from_secs(secs), 1).unwrap();
        let quotas = [quota(5, 3_600), quota(50, 3_600), quota(7, 60)];
        let limit = Limit::new("tiers", algorithm, &quotas).unwrap();
        let limit = store.attach(&limit).unwrap();
        let (who, now) = (Some(key(4)), early(Some(key(4))));
        let of_tier = |tier, cost| Charge {
            tier,
            ..charge(&limit, who, cost)
        };
        assert!(store.admit(now, &[of_tier(0, 3)]).admitted());
        let left = [0, 1, 2, 9].map(|tier| remaining(&store, now, of_tier(tier, 1)));
        assert_eq!(left, [2, 47, 7, 2], "{algorithm:?}");
        assert!(store.admit(now, &[of_tier(2, 1)]).admitted());
        assert_eq!(limit.keys(), 2);
    }
}

#[test]
fn amount_that_does_not_fit_is_refused_with_the_largest_that_does() {
    let refused = |algorithm, amount, period_ms| {
        let quota = Quota::new(amount, Duration::from_millis(period_ms), 1).unwrap();
        Limit::new("wide", algorithm, &[quota]).err()
    };
    for (period_ms, most) in [(1, 4_095), (1_000, 131_071), (60_000, 1_048_575)] {
        let full = Some(crate::limit::QuotaError::WindowTooFull { most });
        assert_eq!(refused(Algorithm::SlidingWindow, most, period_ms), None);
        assert_eq!(refused(Algorithm::SlidingWindow, most + 1, period_ms), full);
    }
    assert_eq!(refused(Algorithm::FixedWindow, 1_000_000, 1), None);
    assert_eq!(refused(Algorithm::SlidingLog, 10_000, 1_000), None);
    let long = Some(crate::limit::QuotaError::LogTooLong);
    assert_eq!(refused(Algorithm::SlidingLog, 10_001, 1_000), long);
    let rate = Some(crate::limit::QuotaError::SlotsHaveNoRate);
    assert_eq!(refused(Algorithm::Concurrency, 1, 1_000), rate);
}

#[test]
fn held_requests_leave_one_interval_apart_and_a_place_that_is_given_up_is_used_again() {
    let store = Store::new(100);
    let quota = Quota::new(10, Duration::from_secs(1), 20).unwrap();
    let limit = Limit::new("queue", Algorithm::LeakyBucket, &[quota]).unwrap();
    let limit = store.attach(&limit).unwrap();
    let one = Charge {
        max_delay_ns: SECOND / 2,
        ..charge(&limit, None, 1)
    };
    let admit = || store.admit(SECOND, &[one]);
    let waiting: Vec<Verdict> = (0..6).map(|_| admit()).collect();
    let delays = waiting
        .iter()
        .map(|verdict| verdict.delay_ns() / (SECOND / 10));
    assert_eq!(delays.collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let late = admit().standings()[0];
    assert_eq!(
        (late.denied, late.retry_after_ns),
        (true, Some(SECOND / 10))
    );
    store.release(SECOND, &one, waiting[3].standings()[0].held);
    let next = admit();
    assert!(next.admitted() && next.delay_ns() == SECOND / 2);
    assert!(!admit().admitted());
}
