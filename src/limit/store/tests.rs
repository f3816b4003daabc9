//! The store's guarantees over several limits, under threads, and when it is full.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use super::*;
use crate::limit::{Algorithm, Charge, Denial, MAX_LIMITS, Quota, counters::OVERFLOW_BUCKETS};

const ALGORITHMS: [Algorithm; 7] = [
    Algorithm::TokenBucket,
    Algorithm::Gcra,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
    Algorithm::Concurrency,
];

pub(super) const SECOND: u64 = 1_000_000_000;
pub(super) const HOUR: u64 = 3_600 * SECOND;

fn limit(name: &str, amount: u64, period_ns: u64, burst: u64) -> Limit {
    Limit::new(
        name,
        Algorithm::TokenBucket,
        &[Quota::new(amount, Duration::from_nanos(period_ns), burst).unwrap()],
    )
    .unwrap()
}

fn charge(limit: &Attached, key: impl Into<Option<u128>>, cost: u64) -> Charge<'_> {
    Charge {
        limit,
        tier: 0,
        key: key.into().map(Key),
        cost,
        max_delay_ns: 0,
    }
}

pub(super) fn remaining(store: &Store, now_ns: u64, charge: Charge<'_>) -> u64 {
    store.peek(now_ns, &[charge]).standings()[0].remaining
}

/// A well-distributed key for each number, like a keyed hash.
pub(super) fn key(n: u64) -> u128 {
    let mix = |n: u64| {
        let n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        n ^ (n >> 31)
    };
    let (high, low) = (
        mix(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        mix(n.wrapping_add(0x1234_5678_9ABC_DEF0)),
    );
    u128::from(high) << 64 | u128::from(low)
}

#[test]
fn denied_request_costs_nothing_anywhere() {
    let store = Store::new(100);
    let [wide, narrow, other] = [("wide", 100), ("narrow", 2), ("other", 50)]
        .map(|(name, burst)| store.attach(&limit(name, 1, SECOND, burst)).unwrap());
    let charges = [
        charge(&wide, None, 1),
        charge(&narrow, 7, 1),
        charge(&other, 7, 1),
    ];
    for left in [1, 0] {
        let verdict = store.admit(SECOND, &charges);
        assert!(verdict.admitted());
        assert_eq!(
            verdict
                .standings()
                .iter()
                .map(|s| s.remaining)
                .collect::<Vec<_>>(),
            [98 + left, left, 48 + left]
        );
    }
    for _ in 0..10 {
        let verdict = store.admit(SECOND, &charges);
        assert_eq!(
            verdict.standings().denial(),
            Some(Denial {
                limit: 1,
                retry_after_ns: Some(SECOND)
            })
        );
        assert_eq!(
            verdict
                .standings()
                .iter()
                .map(|s| s.remaining)
                .collect::<Vec<_>>(),
            [98, 0, 48]
        );
    }
    assert!(store.admit(2 * SECOND, &charges).admitted());
}

#[test]
fn the_longest_wait_is_what_the_whole_request_must_wait() {
    let store = Store::new(100);
    let fast = store.attach(&limit("fast", 10, SECOND, 1)).unwrap();
    let slow = store.attach(&limit("slow", 1, 60 * SECOND, 1)).unwrap();
    let charges = [charge(&slow, 1, 1), charge(&fast, 1, 1)];
    assert!(store.admit(0, &charges).admitted());
    let denial = store.admit(0, &charges).standings().denial().unwrap();
    assert_eq!(
        denial,
        Denial {
            limit: 0,
            retry_after_ns: Some(60 * SECOND)
        }
    );
    assert!(!store.admit(60 * SECOND - 1, &charges).admitted());
    assert!(store.admit(60 * SECOND, &charges).admitted());
}

#[test]
fn request_that_names_a_bucket_twice_pays_twice_or_nothing() {
    let store = Store::new(100);
    let limit = store.attach(&limit("twice", 1, SECOND, 3)).unwrap();
    for key in [None, Some(9)] {
        let twice = [charge(&limit, key, 1), charge(&limit, key, 1)];
        assert!(store.admit(0, &twice).admitted());
        let denied = store.admit(0, &twice);
        let standings = denied.standings();
        let told = standings.iter().map(|s| (s.denied, s.remaining));
        assert_eq!(told.collect::<Vec<_>>(), [(false, 1), (true, 0)]);
        assert_eq!(
            denied.standings().denial().unwrap().retry_after_ns,
            Some(SECOND)
        );
        assert_eq!(remaining(&store, 0, twice[0]), 1);
    }
}

#[test]
fn fresh_key_that_is_denied_holds_no_slot() {
    let store = Store::new(100);
    let limit = store.attach(&limit("strict", 1, SECOND, 3)).unwrap();
    assert!(store.admit(0, &[charge(&limit, 1, 4)]).standings()[0].never);
    assert!(store.admit(0, &[charge(&limit, 1, 0)]).admitted());
    assert!(store.peek(0, &[charge(&limit, 1, 1)]).admitted());
    assert_eq!(limit.keys(), 0);
    assert!(store.admit(0, &[charge(&limit, 1, 1)]).admitted());
    assert_eq!(limit.keys(), 1);
}

#[test]
fn one_key_has_one_bucket_per_limit() {
    let store = Store::new(100);
    let limits = ["a", "b", "c"].map(|name| store.attach(&limit(name, 1, SECOND, 5)).unwrap());
    for (cost, limit) in (1..).zip(&limits) {
        assert!(store.admit(0, &[charge(limit, 77, cost)]).admitted());
    }
    assert_eq!(
        limits
            .each_ref()
            .map(|limit| remaining(&store, 0, charge(limit, 77, 1))),
        [4, 3, 2]
    );
}

#[test]
fn too_many_charges_are_denied_and_cost_nothing() {
    let store = Store::new(100);
    let limit = store.attach(&limit("a", 1, SECOND, 100)).unwrap();
    let charges = [charge(&limit, 1, 1); MAX_LIMITS + 1];
    assert!(store.admit(0, &charges[1..]).admitted());
    let verdict = store.admit(0, &charges);
    assert!(
        !verdict.admitted()
            && verdict
                .standings()
                .denial()
                .unwrap()
                .retry_after_ns
                .is_none()
    );
    assert!(!store.peek(0, &charges).admitted());
    assert_eq!(remaining(&store, 0, charges[0]), 100 - MAX_LIMITS as u64);
}

#[test]
fn tier_that_does_not_exist_is_the_default_one() {
    let store = Store::new(100);
    let [free, pro] = [2, 20].map(|burst| Quota::new(1, Duration::from_secs(1), burst).unwrap());
    let limit = store
        .attach(&Limit::new("plans", Algorithm::TokenBucket, &[free, pro]).unwrap())
        .unwrap();
    let capacity = |tier| {
        store
            .peek(
                0,
                &[Charge {
                    tier,
                    ..charge(&limit, 1, 1)
                }],
            )
            .standings()[0]
            .capacity
    };
    assert_eq!([0, 1, 2, usize::MAX].map(capacity), [2, 20, 2, 2]);
}

#[test]
fn debt_outlives_a_configuration_that_changes_the_rate() {
    let store = Store::new(100);
    let before = store.attach(&limit("a", 1, SECOND, 10)).unwrap();
    assert!(store.admit(0, &[charge(&before, 1, 10)]).admitted());
    let after = store
        .attach_after(&limit("a", 2, SECOND, 30), &before, &[])
        .unwrap();
    store.change_over(0, [&*before].into_iter(), [&*after].into_iter());
    assert_eq!(
        remaining(&store, 0, charge(&after, 1, 1)),
        20,
        "10 of 30 are spent"
    );
}

/// Runs `work` in this many threads at once and sums the results.
pub(super) fn in_threads(threads: u64, work: impl Fn(u64) -> u64 + Sync) -> u64 {
    let (total, barrier) = (AtomicU64::new(0), Barrier::new(threads as usize));
    thread::scope(|scope| {
        for thread in 0..threads {
            let (work, total, barrier) = (&work, &total, &barrier);
            scope.spawn(move || {
                barrier.wait();
                total.fetch_add(work(thread), Ordering::Relaxed);
            });
        }
    });
    total.into_inner()
}

#[test]
fn threads_that_share_limits_admit_exactly_the_burst() {
    let store = Store::new(1_000);
    let hourly = store.attach(&limit("hourly", 500, HOUR, 500)).unwrap();
    let wider = store.attach(&limit("wider", 600, HOUR, 600)).unwrap();
    for key in [None, Some(5)] {
        let charges = [charge(&hourly, key, 1), charge(&wider, key, 1)];
        let admitted = in_threads(32, |_| {
            (0..100)
                .filter(|_| store.admit(HOUR, &charges).admitted())
                .count() as u64
        });
        assert_eq!(admitted, 500);
        assert_eq!(
            remaining(&store, HOUR, charges[1]),
            100,
            "a denied request costs nothing"
        );
    }
}

#[test]
fn threads_that_race_for_two_limits_in_opposite_orders_exceed_neither_and_leak_nothing() {
    let store = Store::new(1_000);
    let [a, b] = ["a", "b"].map(|name| store.attach(&limit(name, 300, HOUR, 300)).unwrap());
    let orders = [
        [charge(&a, 1, 1), charge(&b, 1, 1)],
        [charge(&b, 1, 1), charge(&a, 1, 1)],
    ];
    let admitted = in_threads(16, |thread| {
        let charges = &orders[thread as usize % 2];
        (0..200)
            .filter(|_| store.admit(HOUR, charges).admitted())
            .count() as u64
    });
    let left = orders[0].map(|charge| remaining(&store, HOUR, charge));
    assert_eq!(left, [300 - admitted; 2]);
}

#[test]
fn threads_that_bring_the_same_fresh_keys_admit_exactly_the_burst_of_each() {
    let store = Store::new(10_000);
    let limit = store.attach(&limit("fresh", 3, HOUR, 3)).unwrap();
    let admitted = in_threads(16, |_| {
        let keys = (0..2_000).map(key);
        keys.map(|key| {
            (0..2)
                .filter(|_| store.admit(HOUR, &[charge(&limit, key, 1)]).admitted())
                .count() as u64
        })
        .sum()
    });
    assert_eq!(
        (admitted, limit.keys(), limit.overflowed()),
        (6_000, 2_000, 0)
    );
}

#[test]
fn threads_that_take_idle_slots_from_each_other_lose_no_debt() {
    // a table so small that fresh keys keep taking slots that are just filling up, on a moving
    // clock
    let store = Store::new(64);
    let limits = [("a", 1_000), ("b", 7_000)]
        .map(|(name, rate)| store.attach(&limit(name, rate, SECOND, 2)).unwrap());
    let slow = store.attach(&limit("slow", 5, HOUR, 5)).unwrap();
    let clock = AtomicU64::new(SECOND);
    let admitted = in_threads(8, |thread| {
        let mut admitted = 0;
        for n in 0..20_000 {
            let now = clock.fetch_add(10_000, Ordering::Relaxed);
            store.admit(
                now,
                &[charge(&limits[n as usize % 2], key(thread << 32 | n), 1)],
            );
            admitted += u64::from(
                store
                    .admit(now, &[charge(&slow, key(n % 16), 1)])
                    .admitted(),
            );
        }
        admitted
    });
    // 1.6 s go by: no unit of `slow` comes back (one per 720 s)
    assert_eq!((admitted, slow.overflowed(), slow.keys()), (16 * 5, 0, 16));
    assert!(limits[0].evictions() > 1_000 && limits[1].evictions() > 1_000);
    let held: u64 = [&limits[0], &limits[1], &slow]
        .map(|limit| limit.keys())
        .iter()
        .sum();
    // three parts of 10, plus what two limits may take of a pool of 64 beside the third; each of 8
    // threads may overshoot by one
    assert!(held <= 88 + 8, "{held} keys");
}

#[test]
fn table_with_as_many_debtors_as_it_is_made_for_has_room_for_nearly_all() {
    const MAX_KEYS: u64 = 200_000;
    let store = Store::new(MAX_KEYS as usize);
    let limit = store.attach(&limit("per_ip", 1, HOUR, 1)).unwrap();
    for n in 0..MAX_KEYS {
        store.admit(0, &[charge(&limit, key(n), 1)]);
    }
    // theory predicts one in 20,000
    assert!(limit.overflowed() <= MAX_KEYS / 10_000);
    assert!(limit.keys() >= MAX_KEYS - MAX_KEYS / 10_000);
}

#[test]
fn flood_of_fresh_keys_washes_no_debt_off() {
    const MAX_KEYS: u64 = 1_000;
    let store = Store::new(MAX_KEYS as usize);
    let limit = store.attach(&limit("per_ip", 2, HOUR, 2)).unwrap();
    let abuser = charge(&limit, key(0), 1);
    assert!(store.admit(0, &[abuser]).admitted() && store.admit(0, &[abuser]).admitted());
    let mut refused = 0;
    for n in 1..=10 * MAX_KEYS {
        let verdict = store.admit(n, &[charge(&limit, key(n), 1)]);
        refused += u64::from(!verdict.admitted());
        assert!(
            !store.admit(n, &[abuser]).admitted(),
            "after {n} fresh keys"
        );
    }
    assert_eq!(limit.evictions(), 0);
    assert!(limit.keys() >= MAX_KEYS, "{} keys held", limit.keys());
    // the abuser also has a slot; some keys find a slot but inherit the debt of their overflow
    // bucket
    assert_eq!(
        10 * MAX_KEYS - refused,
        limit.keys() - 1 + 2 * OVERFLOW_BUCKETS as u64,
        "each overflow bucket admits its burst and no more"
    );

    let later = 2 * HOUR;
    for n in 0..MAX_KEYS {
        assert!(
            store
                .admit(later, &[charge(&limit, key(n << 20 | 1), 2)])
                .admitted(),
            "idle slots are given away"
        );
    }
    assert!(limit.evictions() > MAX_KEYS / 2);
}

#[test]
fn limit_that_fills_the_table_takes_nothing_from_the_clients_of_another() {
    const MAX_KEYS: u64 = 20_000;
    for algorithm in ALGORITHMS {
        let store = Store::new(MAX_KEYS as usize);
        let attach = |name, amount| {
            let quota = match algorithm {
                Algorithm::Concurrency => Quota::slots(amount).unwrap(),
                _ => Quota::new(amount, Duration::from_nanos(24 * HOUR), amount).unwrap(),
            };
            let limit = Limit::new(name, algorithm, &[quota]).unwrap();
            store.attach(&limit).unwrap()
        };
        let signup = attach("signup", 3);
        let others = ["login", "search", "orders"].map(|name| attach(name, 5));
        let guaranteed = store.guaranteed_keys(&signup).unwrap();
        assert!(guaranteed >= 2_000, "{algorithm:?}: {guaranteed}");
        // debtors from before the flood, one with a unit left
        let debtors = |limit| (1..100).map(move |n| charge(limit, key(n << 50), 4));
        let before: Vec<_> = others.iter().flat_map(|limit| debtors(limit)).collect();
        for one in &before {
            assert!(store.admit(1, &[*one]).admitted());
        }
        let victim = charge(&signup, key(7 << 40), 3);
        assert!(store.admit(1, &[victim]).admitted());
        for n in 0..2 * MAX_KEYS {
            store.admit(2, &[charge(&signup, key(n), 1)]);
        }
        assert!(signup.overflowed() > 0, "{algorithm:?}: it is full");
        // all three limits apply to each fresh client of the others, which gets its full quota
        for n in 0..1_000 {
            let charges = others
                .each_ref()
                .map(|limit| charge(limit, key(n << 20), 1));
            let admitted = (0..8).filter(|_| store.admit(3, &charges).admitted());
            assert_eq!(admitted.count(), 5, "{algorithm:?}: fresh client {n}");
        }
        for limit in &others {
            assert_eq!(limit.overflowed(), 0, "{algorithm:?}");
        }
        for one in &before {
            assert_eq!(remaining(&store, 4, *one), 1, "{algorithm:?}");
        }
        assert_eq!(remaining(&store, 4, victim), 0, "{algorithm:?}");
    }
}

#[test]
fn key_that_spent_its_quota_in_an_overflow_bucket_does_not_get_it_again_with_a_slot() {
    for algorithm in ALGORITHMS {
        if algorithm == Algorithm::Concurrency {
            continue;
        }
        let store = Store::new(100);
        let quota = Quota::new(3, Duration::from_nanos(HOUR), 3).unwrap();
        let limit = Limit::new("login", algorithm, &[quota]).unwrap();
        let limit = store.attach(&limit).unwrap();
        let mut fresh = 0;
        let mut next = || {
            fresh += 1;
            charge(&limit, key(fresh), 1)
        };
        // windows start at different moments for different keys: pick a time when none ends soon
        while limit.overflowed() == 0 {
            store.admit(HOUR, &[next()]);
        }
        let late = next();
        let spent = (0..5)
            .filter(|_| store.admit(HOUR, &[late]).admitted())
            .count();
        assert!(spent <= 3, "{algorithm:?}: {spent}");
        for n in 0..fresh {
            store.forget(&limit, Some(Key(key(n))));
        }
        let again = (0..5)
            .filter(|_| store.admit(HOUR + 1, &[late]).admitted())
            .count();
        assert!(
            spent + again <= 3,
            "{algorithm:?}: {spent} and {again} more"
        );
        assert_eq!(remaining(&store, 5 * HOUR, late), 3, "{algorithm:?}");
    }
}

#[test]
fn limit_that_holds_all_it_may_gives_up_idle_keys_of_its_own() {
    const MAX_KEYS: u64 = 3_000;
    let store = Store::new(MAX_KEYS as usize);
    let [busy, other] =
        ["busy", "other"].map(|name| store.attach(&limit(name, 1, SECOND, 1)).unwrap());
    // a key is idle after a second: never more than 1,000 are in debt
    for n in 0..20 * MAX_KEYS {
        let now = 10 * SECOND + n * SECOND / 1_000;
        assert!(store.admit(now, &[charge(&busy, key(n), 1)]).admitted());
    }
    assert_eq!((busy.overflowed(), other.keys()), (0, 0));
    let held = busy.keys();
    assert!((3_000..=3_200).contains(&held), "{held}");
}

#[test]
fn key_without_room_is_shown_its_overflow_bucket() {
    let store = Store::new(4);
    let limit = store.attach(&limit("a", 5, HOUR, 5)).unwrap();
    for n in 0..1_000_000 {
        store.admit(0, &[charge(&limit, key(n), 5)]);
        if limit.overflowed() > 5_000 {
            break;
        }
    }
    let counted = limit.overflowed();
    assert_eq!(remaining(&store, 0, charge(&limit, key(5_000), 1)), 0);
    assert_eq!(limit.overflowed(), counted, "looking does not count");
}

#[test]
fn slot_is_given_away_when_its_bucket_is_full_and_not_a_nanosecond_before() {
    for (amount, period_ns, full_ns) in [(1, SECOND, SECOND), (7, 60 * SECOND, 8_571_428_572)] {
        let store = Store::new(1);
        let limit = store.attach(&limit("a", amount, period_ns, 1)).unwrap();
        for n in 0..4 {
            assert!(store.admit(0, &[charge(&limit, key(n), 1)]).admitted());
        }
        assert!(
            store
                .admit(full_ns - 1, &[charge(&limit, key(4), 1)])
                .admitted()
        );
        assert_eq!(
            (limit.keys(), limit.evictions(), limit.overflowed()),
            (4, 0, 1)
        );
        assert!(
            store
                .admit(full_ns, &[charge(&limit, key(5), 1)])
                .admitted()
        );
        assert_eq!(
            (limit.keys(), limit.evictions(), limit.overflowed()),
            (4, 1, 1)
        );
    }
}

#[test]
fn request_that_takes_the_idle_slot_of_its_own_other_limit_charges_each_bucket_once() {
    let store = Store::new(1);
    let [slow, fast, fresh] = [
        ("slow", HOUR, 1),
        ("fast", SECOND, 1),
        ("fresh", SECOND, 10),
    ]
    .map(|(name, period_ns, burst)| store.attach(&limit(name, 1, period_ns, burst)).unwrap());
    let more = store.attach(&limit("more", 1, HOUR, 1)).unwrap();
    for (limit, n) in [(&slow, 0), (&slow, 1), (&more, 2)] {
        assert!(store.admit(0, &[charge(limit, key(n), 1)]).admitted());
    }
    assert!(store.admit(0, &[charge(&fast, key(3), 1)]).admitted());
    let both = [charge(&fresh, key(3), 1), charge(&fast, key(3), 1)];
    let verdict = store.admit(SECOND, &both);
    assert!(verdict.admitted());
    assert_eq!(both.map(|charge| remaining(&store, SECOND, charge)), [9, 0]);
    assert_eq!((fast.keys(), fast.overflowed(), fresh.keys()), (0, 1, 1));
}
