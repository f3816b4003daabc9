//! The table under a scheduler that explores interleavings of its atomic steps (tests).
//!
//! The table's source is compiled a second time, with Shuttle's atomics and locks in place of the
//! system's. The scheduler may switch threads at each of them. The rest of this file is the store's
//! loop in minimal form. Shuttle assumes sequentially consistent memory: it finds a wrong order of
//! steps, not a wrong `Ordering`.

use std::sync::Arc;

use shuttle::{check_pct, check_random, thread};

use super::{
    Key, Quota,
    bucket::{BucketKind, Buckets},
    word_request::WordRequest,
};

mod sync {
    pub(super) use shuttle::{
        sync::{Mutex, atomic::AtomicU64},
        thread::yield_now,
    };

    pub(super) fn zeroed(length: usize) -> Box<[AtomicU64]> {
        std::iter::repeat_with(|| AtomicU64::new(0))
            .take(length)
            .collect()
    }
}

#[path = "table.rs"]
#[expect(
    clippy::duplicate_mod,
    reason = "compiles the same source over other atomics on purpose"
)]
#[expect(dead_code, reason = "the model uses only part of it")]
mod table;

use table::{Cell, Insertion, SlotOwner, Table, TableAddress};

const SECOND: u64 = 1_000_000_000;
const ITERATIONS: usize = 3_000;

/// A table of one group, where every key contends for the same four slots.
fn table() -> Table {
    Table::new(1)
}

fn address(n: u64, limit: u16) -> TableAddress {
    let mixed = u128::from(n + 1).wrapping_mul(0xDA94_2042_E4DD_58B5_9E37_79B9_7F4A_7C15);
    TableAddress::new(Key(mixed ^ (mixed >> 61)), limit)
}

/// A bucket of this burst that refills one unit per second.
fn bucket(burst: u64) -> Buckets {
    let quota = Quota::new(1, std::time::Duration::from_secs(1), burst).unwrap();
    Buckets::new(BucketKind::Burst, &[quota], None).unwrap()
}

fn ask(now_ns: u64) -> WordRequest {
    WordRequest {
        tier: 0,
        now_ns,
        cost: 1,
        max_delay_ns: 0,
        spread: 0,
    }
}

/// TATs for limit 1, slots in use for limit 2.
fn idle(now_ns: u64) -> impl Fn(Option<SlotOwner>, u64) -> bool {
    move |owner, word| owner.is_none_or(|owner| word <= if owner.limit == 1 { now_ns } else { 0 })
}

/// The outcome of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Charged {
    Admitted { placed: bool },
    Denied,
    Full,
}

/// The store's loop: find, change, insert.
fn charge(
    table: &Table,
    address: &TableAddress,
    now_ns: u64,
    next: impl Fn(u64) -> Result<u64, u64>,
    swap: impl Fn(Cell<'_>, u64, u64) -> bool,
) -> Charged {
    let mut place = table.find(address);
    loop {
        while let Some((cell, word)) = place.and_then(|cell| Some((cell, cell.load()?))) {
            match next(word) {
                Err(_) => return Charged::Denied,
                Ok(next) if swap(cell, word, next) => return Charged::Admitted { placed: false },
                Ok(_) => {}
            }
        }
        let Ok(word) = next(0) else {
            return Charged::Denied;
        };
        match table.insert(address, word, idle(now_ns)) {
            Insertion::Placed(..) => return Charged::Admitted { placed: true },
            Insertion::Present(cell) => place = Some(cell),
            Insertion::Full => return Charged::Full,
        }
    }
}

fn charge_tat(table: &Table, bucket: &Buckets, key: u64, now_ns: u64) -> Charged {
    let next = |word: u64| bucket.charge(&ask(now_ns), word);
    let swap = |cell: Cell<'_>, old, new| cell.swap(old, new);
    charge(table, &address(key, 1), now_ns, next, swap)
}

/// Runs under random schedules, and under schedules that switch rarely but at the worst moment.
fn under_all_schedules(body: impl Fn() + Send + Sync + Clone + 'static) {
    check_random(body.clone(), ITERATIONS);
    check_pct(body, ITERATIONS, 3);
}

/// Runs the same body in `count` threads and returns their results.
fn in_threads<T: Send + 'static>(
    threads: u64,
    work: impl Fn(u64) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let work = Arc::new(work);
    let started: Vec<_> = (0..threads)
        .map(|thread| {
            let work = Arc::clone(&work);
            thread::spawn(move || work(thread))
        })
        .collect();
    started
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

fn count(charged: &[Charged], is: impl Fn(&Charged) -> bool) -> usize {
    charged.iter().filter(|charged| is(charged)).count()
}

#[test]
fn no_charge_of_one_cell_is_lost_and_none_is_admitted_twice() {
    under_all_schedules(|| {
        let (table, bucket) = (table(), bucket(3));
        charge_tat(&table, &bucket, 0, SECOND);
        let charged = in_threads(3, move |_| charge_tat(&table, &bucket, 0, SECOND));
        assert_eq!(
            count(&charged, |one| *one == Charged::Admitted { placed: false }),
            2
        );
        assert_eq!(count(&charged, |one| *one == Charged::Denied), 1);
    });
}

#[test]
fn key_that_several_bring_at_once_gets_one_slot() {
    under_all_schedules(|| {
        let (table, bucket) = (table(), bucket(2));
        let charged = in_threads(3, move |_| charge_tat(&table, &bucket, 0, SECOND));
        assert_eq!(
            count(&charged, |one| *one == Charged::Admitted { placed: true }),
            1
        );
        assert_eq!(
            count(&charged, |one| *one == Charged::Admitted { placed: false }),
            1
        );
        assert_eq!(count(&charged, |one| *one == Charged::Denied), 1);
    });
}

#[test]
fn idle_slots_that_several_take_at_once_go_to_one_each_and_debtors_keep_theirs() {
    under_all_schedules(|| {
        let (table, bucket) = (table(), bucket(1));
        for key in 0..4 {
            charge_tat(&table, &bucket, key, SECOND);
        }
        // the four keys are idle by now; two return while two others want their slots, each key
        // twice
        let charged = in_threads(4, move |thread| {
            let keys = [[2, 3], [3, 2], [4, 5], [5, 4]][thread as usize];
            keys.map(|key| charge_tat(&table, &bucket, key, 10 * SECOND))
        });
        let charged = charged.concat();
        let admitted = count(&charged, |one| matches!(one, Charged::Admitted { .. }));
        assert_eq!(
            (admitted, count(&charged, |one| *one == Charged::Denied)),
            (4, 4)
        );
    });
}

/// As the store does for slots: takes back a charge that reached another key's word.
fn take(table: &Table, key: u64) -> bool {
    let next = |used: u64| if used < 1 { Ok(used + 1) } else { Err(used) };
    let swap = |cell: Cell<'_>, old: u64, new: u64| {
        let swapped = cell.swap(old, new);
        if swapped && !cell.is_kept() {
            cell.update(|used| used - 1);
            return false;
        }
        swapped
    };
    let charged = charge(table, &address(key, 2), SECOND, next, swap);
    matches!(charged, Charged::Admitted { .. })
}

fn give_back(table: &Table, key: u64) {
    let cell = table
        .find(&address(key, 2))
        .expect("a key that holds a slot is in the table");
    cell.update(|used| used - 1);
}

#[test]
fn slots_in_flight_come_back_to_the_key_that_took_them() {
    under_all_schedules(|| {
        let table = Arc::new(table());
        let held = Arc::new([0; 6].map(|_: i32| std::sync::atomic::AtomicU64::new(0)));
        let (seen, holds) = (Arc::clone(&table), Arc::clone(&held));
        in_threads(3, move |thread| {
            for n in 0..4 {
                let key = (n + 2 * thread) % 6;
                if take(&seen, key) {
                    let others =
                        holds[key as usize].fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    assert_eq!(others, 0, "two hold the only slot of a key");
                    thread::yield_now();
                    holds[key as usize].fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    give_back(&seen, key);
                }
            }
        });
        for key in 0..6 {
            let used = table.find(&address(key, 2)).and_then(|cell| cell.load());
            assert_eq!(used.unwrap_or(0), 0, "a slot was leaked");
        }
    });
}

/// One thread returns its idle key while another vacates idle slots and a third takes free ones.
#[test]
fn slot_in_flight_is_not_taken_from_a_key_whose_slot_is_given_up() {
    under_all_schedules(|| {
        let table = Arc::new(table());
        for key in 0..4 {
            assert!(take(&table, key));
        }
        (0..4).for_each(|key| give_back(&table, key));
        let seen = Arc::clone(&table);
        in_threads(3, move |thread| {
            if thread == 0 {
                let gives = |owner: Option<SlotOwner>, word| owner.is_some() && word == 0;
                seen.vacate(&address(9, 2), gives);
                return;
            }
            for key in [0..4, 4..6][thread as usize - 1].clone() {
                if take(&seen, key) {
                    give_back(&seen, key);
                }
            }
        });
        for key in 0..6 {
            let used = table.find(&address(key, 2)).and_then(|cell| cell.load());
            assert_eq!(used.unwrap_or(0), 0, "a slot was leaked");
        }
    });
}

/// One thread has found its idle slot. Before it takes the slot, others take all idle slots and
/// release them, so another key now has the same count.
#[test]
fn slot_in_flight_is_not_taken_under_another_keys_name() {
    under_all_schedules(|| {
        let table = Arc::new(table());
        for key in 0..4 {
            assert!(take(&table, key));
        }
        (0..4).for_each(|key| give_back(&table, key));
        let seen = Arc::clone(&table);
        in_threads(2, move |thread| {
            let keys = [0..1, 4..8][thread as usize].clone();
            for key in keys {
                if take(&seen, key) {
                    give_back(&seen, key);
                }
            }
        });
        for key in 0..8 {
            let used = table.find(&address(key, 2)).and_then(|cell| cell.load());
            assert_eq!(used.unwrap_or(0), 0, "a slot was leaked");
        }
    });
}
