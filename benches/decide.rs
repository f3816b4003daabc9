//! The decision alone: nanoseconds, allocations, bytes per key. `cargo bench --bench decide`.
//!
//! Each figure is the median of interleaved rounds (every case once per round), so that a slow moment of the machine
//! hits all cases alike. Every algorithm is measured, and `governor` over a `dashmap` beside them. Keys are drawn at random and hashed from a counter inside the loop; what that costs is the first
//! row. The clock is a counter too (for `governor` one that stands still): reading it is not part of the decision. Two threads work
//! on the same keys. An allocation on a measured path ends the run with an error, except for sliding logs, whose rings grow.
//! `TIDEGATE_BENCH_LARGE=1` adds ten million keys for every algorithm (several GB).

use std::{
    hint::black_box,
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use governor::{
    RateLimiter, clock::FakeRelativeClock, middleware::NoOpMiddleware, nanos::Nanos,
    state::keyed::DashMapStateStore,
};
use tidegate::limit::{Algorithm, Attached, Charge, Key, Limit, Quota, Store};

const ROUNDS: usize = 21;
const DECISIONS: u64 = 200_000;
const MAX_KEYS: u64 = 1_000_000;
/// How far the clock goes from one decision to the next.
const STEP_NS: u64 = 1_000;

/// What is measured one by one, beside the token bucket.
const OTHERS: [Algorithm; 5] = [
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
    Algorithm::Concurrency,
];

type Governor =
    RateLimiter<u128, DashMapStateStore<u128>, FakeRelativeClock, NoOpMiddleware<Nanos>>;

fn main() {
    // cargo test builds this too, and starts it without that argument
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let cases = cases();
    let mut ns: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, ns) in cases.iter().zip(&mut ns) {
            ns.push(case.round());
        }
    }
    println!(
        "{:<44} {:>8} {:>14} {:>14}",
        "decision", "ns", "million/s", "bytes per key"
    );
    for (case, ns) in cases.iter().zip(&mut ns) {
        ns.sort_by(f64::total_cmp);
        let median = ns[ns.len() / 2];
        println!(
            "{:<44} {median:>8.1} {:>14.1} {:>14.1}",
            case.name(),
            case.threads as f64 * 1_000.0 / median,
            case.bytes
        );
    }
    println!(
        "allocations per decision: 0, sliding logs and governor apart (counted, {} decisions)",
        cases.len() * ROUNDS * DECISIONS as usize
    );
    memory();
}

/// What is decided.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Nothing: the loop, the random number and the key.
    Loop,
    /// Keys that are in the table, admitted.
    Known { limits: usize },
    /// The same, all of them out of units.
    Denied { limits: usize },
    /// Keys that were never seen, in a table full of idle ones.
    Fresh,
    /// Known keys of one limit that counts like this; slots are given back at once.
    Of(Algorithm),
    /// Known keys, admitted by `governor`.
    Governor,
}

struct Case {
    kind: Kind,
    keys: u64,
    threads: u64,
    store: Store,
    limits: Vec<Arc<Attached>>,
    governor: Option<Governor>,
    /// Bytes per key of what was allocated for it.
    bytes: f64,
    /// Virtual nanoseconds, and the source of fresh keys.
    clock: AtomicU64,
}

fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new(Kind::Loop, 1, 1)];
    for limits in [1, 3] {
        for keys in [1, 10_000, MAX_KEYS] {
            for threads in [1, 2] {
                cases.push(Case::new(Kind::Known { limits }, keys, threads));
            }
        }
    }
    let large = std::env::var_os("TIDEGATE_BENCH_LARGE").is_some();
    let others = OTHERS.map(Kind::Of).into_iter().chain([Kind::Governor]);
    for kind in others {
        let most = if large { 4 } else { 3 };
        for keys in [1, 10_000, MAX_KEYS, 10 * MAX_KEYS].into_iter().take(most) {
            for threads in [1, 2] {
                cases.push(Case::new(kind, keys, threads));
            }
        }
    }
    for threads in [1, 2] {
        cases.push(Case::new(Kind::Known { limits: 1 }, 10 * MAX_KEYS, threads));
    }
    cases.push(Case::new(Kind::Denied { limits: 1 }, 10_000, 1));
    cases.push(Case::new(Kind::Denied { limits: 3 }, 10_000, 1));
    for threads in [1, 2] {
        cases.push(Case::new(Kind::Fresh, MAX_KEYS, threads));
    }
    cases
}

impl Case {
    /// A store that already holds every key.
    fn new(kind: Kind, keys: u64, threads: u64) -> Case {
        let (limits, quota) = match kind {
            Kind::Loop => (0, quota(1, 1)),
            Kind::Known { limits } => (limits, quota(1_000_000_000, 1_000_000_000)),
            Kind::Denied { limits } => (limits, quota(1, 1)),
            Kind::Fresh => (1, quota(1_000_000_000, 1)),
            Kind::Of(Algorithm::Concurrency) => (1, Quota::slots(4).expect("within bounds")),
            Kind::Of(Algorithm::LeakyBucket) => (1, quota(1_000_000_000, 1_000_000_000)),
            // never over: a decision takes STEP_NS
            Kind::Of(_) => {
                let period = Duration::from_millis(1);
                (1, Quota::new(4_000, period, 1).expect("within bounds"))
            }
            Kind::Governor => (0, quota(1, 1)),
        };
        let algorithm = match kind {
            Kind::Of(algorithm) => algorithm,
            _ => Algorithm::TokenBucket,
        };
        let before = counting::held();
        // three limits are one for all, and two by key
        let store = Store::new((keys * limits.saturating_sub(1).max(1) as u64) as usize);
        let attach = |n: usize| {
            let limit = Limit::new(&format!("limit {n}"), algorithm, &[quota])
                .expect("a quota within bounds");
            store.attach(&limit).expect("few limits")
        };
        let limits: Vec<_> = (0..limits).map(attach).collect();
        let governor = (kind == Kind::Governor).then(|| {
            let most = std::num::NonZeroU32::MAX;
            let quota = governor::Quota::per_second(most).allow_burst(most);
            RateLimiter::dashmap_with_clock(quota, FakeRelativeClock::default())
        });
        let mut case = Case {
            kind,
            keys,
            threads,
            store,
            limits,
            governor,
            bytes: 0.0,
            clock: AtomicU64::new(1_000_000_000),
        };
        for n in 0..keys {
            case.decide(1_000_000_000 * STEP_NS, key(n));
        }
        case.bytes = counting::held().saturating_sub(before) as f64 / keys as f64;
        case
    }

    fn name(&self) -> String {
        let (threads, keys) = (self.threads, self.keys);
        let plural = |n: u64, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        let what = match self.kind {
            Kind::Loop => return "(loop and key alone)".to_owned(),
            Kind::Known { limits } => plural(limits as u64, "limit"),
            Kind::Denied { limits } => format!("{}, denied", plural(limits as u64, "limit")),
            Kind::Fresh => "1 limit, fresh among".to_owned(),
            Kind::Of(algorithm) => format!("{algorithm:?}"),
            Kind::Governor => "governor, dashmap".to_owned(),
        };
        format!(
            "{what}, {}, {}",
            plural(keys, "key"),
            plural(threads, "thread")
        )
    }

    #[inline]
    fn decide(&self, now_ns: u64, key: Key) {
        let charge = |n: usize, key: Option<Key>| Charge {
            limit: &self.limits[n],
            tier: 0,
            key,
            cost: 1,
            max_delay_ns: 0,
        };
        let admit = |charges: &[Charge<'_>]| _ = black_box(&self.store.admit(now_ns, charges));
        match self.limits.len() {
            0 => match &self.governor {
                Some(governor) => _ = black_box(governor.check_key(&key.0)),
                None => _ = black_box((now_ns, key)),
            },
            1 if self.kind == Kind::Of(Algorithm::Concurrency) => {
                let one = charge(0, Some(key));
                let verdict = self.store.admit(now_ns, &[one]);
                for standing in &verdict.standings {
                    self.store.release(now_ns, &one, standing.held);
                }
            }
            1 => admit(&[charge(0, Some(key))]),
            _ => admit(&[charge(0, None), charge(1, Some(key)), charge(2, Some(key))]),
        }
    }

    /// Nanoseconds per decision of one thread, in one round.
    fn round(&self) -> f64 {
        let start = self.clock.fetch_add(DECISIONS * self.threads, Relaxed);
        let barrier = Barrier::new(self.threads as usize);
        let work = |thread: u64| {
            let mut random = start ^ (thread << 48) | 1;
            barrier.wait();
            let allocated = counting::allocations();
            let begin = Instant::now();
            for n in 0..DECISIONS {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let drawn = ((u128::from(random) * u128::from(self.keys)) >> 64) as u64;
                let fresh = start + thread * DECISIONS + n;
                self.decide(
                    (start + n) * STEP_NS,
                    key(if self.kind == Kind::Fresh {
                        fresh
                    } else {
                        drawn
                    }),
                );
            }
            let elapsed = begin.elapsed();
            assert!(
                counting::allocations() == allocated
                    || self.kind == Kind::Of(Algorithm::SlidingLog),
                "{} allocates",
                self.name()
            );
            elapsed.as_nanos() as f64 / DECISIONS as f64
        };
        if self.threads == 1 {
            return work(0);
        }
        thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads)
                .map(|thread| scope.spawn(move || work(thread)))
                .collect();
            let ns: Vec<f64> = workers
                .into_iter()
                .map(|worker| worker.join().expect("no panic"))
                .collect();
            ns.iter().sum::<f64>() / ns.len() as f64
        })
    }
}

fn quota(per_second: u64, burst: u64) -> Quota {
    Quota::new(per_second, Duration::from_secs(1), burst).expect("within bounds")
}

/// Stands in for the keyed hash, whose cost is not the decision's.
#[inline]
fn key(n: u64) -> Key {
    let mixed = u128::from(n.wrapping_add(0x9E37_79B9_7F4A_7C15))
        .wrapping_mul(0xDA94_2042_E4DD_58B5_9E37_79B9_7F4A_7C15);
    Key(mixed ^ (mixed >> 61))
}

/// What a store costs when it is made, and per key when it is full.
fn memory() {
    for max_keys in [MAX_KEYS, 10 * MAX_KEYS] {
        let before = counting::held();
        let begin = Instant::now();
        let store = Store::new(max_keys as usize);
        let elapsed = begin.elapsed();
        let bytes = counting::held() - before;
        let quota = quota(1, 1);
        let limit = store
            .attach(&Limit::new("limit", Algorithm::TokenBucket, &[quota]).expect("within bounds"))
            .expect("few limits");
        for n in 0..max_keys {
            store.admit(
                0,
                &[Charge {
                    limit: &limit,
                    tier: 0,
                    key: Some(key(n)),
                    cost: 1,
                    max_delay_ns: 0,
                }],
            );
        }
        let (held, shared) = (limit.keys(), limit.overflowed());
        let per_key = bytes as f64 / max_keys as f64;
        println!(
            "max_keys {max_keys}: made in {elapsed:?}, {per_key:.1} bytes per key; of as many debtors {held} have their own bucket, {shared} share one"
        );
    }
}

/// Counts what is allocated, and by each thread how often.
mod counting {
    #![expect(
        unsafe_code,
        reason = "GlobalAlloc is an unsafe trait; every call goes to the system's allocator unchanged"
    )]

    use std::{
        alloc::{GlobalAlloc, Layout, System},
        cell::Cell,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
    };

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    static BYTES: AtomicUsize = AtomicUsize::new(0);

    thread_local! {
        static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    }

    /// Allocations of this thread so far.
    pub(super) fn allocations() -> u64 {
        ALLOCATIONS.with(Cell::get)
    }

    /// Bytes that all threads hold.
    pub(super) fn held() -> usize {
        BYTES.load(Relaxed)
    }

    struct Counting;

    fn count(bytes: usize) {
        BYTES.fetch_add(bytes, Relaxed);
        ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
    }

    // SAFETY: the contract of each call is the one of the call that it forwards
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            unsafe { System.alloc(layout) }
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            unsafe { System.alloc_zeroed(layout) }
        }

        unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            count(size);
            BYTES.fetch_sub(layout.size(), Relaxed);
            unsafe { System.realloc(pointer, layout, size) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            BYTES.fetch_sub(layout.size(), Relaxed);
            unsafe { System.dealloc(pointer, layout) }
        }
    }
}
