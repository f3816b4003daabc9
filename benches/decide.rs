//! The limit decision alone: nanoseconds, allocations, bytes per key. `cargo bench --bench decide`.
//!
//! Each figure is the median of interleaved rounds (every case once per round), so that a slow
//! moment of the machine affects all cases alike. Every algorithm is measured, beside `governor`
//! over a `dashmap`. Two threads work on the same keys.
//!
//! For a fair comparison:
//!
//! - Keys are random and made from a counter inside the loop; the first row is that cost. The clock
//!   is a counter too (a constant for `governor`), because reading the time is not part of the
//!   decision.
//! - tidegate's keys are hashes already: the gateway hashes the client's data once, keyed, whatever
//!   the number of limits. So `governor` is measured twice: with the standard library's keyed hash of
//!   the 128-bit key, and "hashed", where its map uses 64 bits of the key directly. `governor`
//!   answers yes or no, like the plain rows of tidegate. "told" adds the data for clients: capacity,
//!   remaining, next unit, reset, wait, and the binding limit.
//! - Tables have room for a million keys, the default `max_keys`, or for all keys in use if there
//!   are more. In a full table one key in five is not in the first place searched. "Full table" has
//!   room for its keys alone.
//!
//! An allocation on a measured path ends the run with an error, except for sliding logs, whose
//! rings grow. Arguments select cases by name:
//! `cargo bench --bench decide -- token governor memory`. `TIDEGATE_BENCH_LARGE=1` adds ten million
//! keys for every algorithm (several GB).

mod counting;

use std::{
    hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState},
    hint::black_box,
    iter,
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use governor::{
    RateLimiter, clock::FakeRelativeClock, middleware::NoOpMiddleware, nanos::Nanos,
    state::keyed::DashMapStateStore,
};
use tidegate::limit::{Algorithm, Attached, Charge, Key, Limit, MAX_LIMITS, Quota, Store, Verdict};

const ROUNDS: usize = 11;
/// Enough decisions per round to make the first look-up of 10,000 keys in cold caches negligible.
const DECISIONS: u64 = 1_000_000;
/// Default of `server.max_keys`.
const MAX_KEYS: u64 = 1_000_000;
/// Clock step between two decisions.
const STEP_NS: u64 = 1_000;

/// Algorithms measured one by one, beside the token bucket.
const OTHERS: [Algorithm; 5] = [
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
    Algorithm::Concurrency,
];

type Governor<S> =
    RateLimiter<u128, DashMapStateStore<u128, S>, FakeRelativeClock, NoOpMiddleware<Nanos>>;

/// Uses a key as its own hash.
#[derive(Clone, Copy, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are integers");
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn main() {
    // cargo test also builds this, and starts it without that argument
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let cases = cases(&wanted);
    let mut ns: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, ns) in cases.iter().zip(&mut ns) {
            ns.push(case.round());
        }
    }
    println!(
        "{:<44} {:>8} {:>8} {:>14} {:>14}",
        "decision", "ns", "quickest", "million/s", "bytes per key"
    );
    for (case, ns) in cases.iter().zip(&mut ns) {
        ns.sort_by(f64::total_cmp);
        let median = ns[ns.len() / 2];
        println!(
            "{:<44} {median:>8.1} {:>8.1} {:>14.1} {:>14.1}",
            name(case.kind, case.keys, case.threads),
            ns[0],
            case.threads as f64 * 1_000.0 / median,
            case.bytes
        );
    }
    println!(
        "allocations per decision: 0, sliding logs and governor apart (counted, {} decisions)",
        cases.len() * ROUNDS * DECISIONS as usize
    );
    if wanted.is_empty() || wanted.iter().any(|part| part == "memory") {
        memory();
    }
}

/// The measured operation.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// None: the loop, the random number and the key.
    Loop,
    /// Known keys, admitted.
    Known { limits: usize },
    /// The same for one limit, in a table with room for just these keys.
    Packed,
    /// The same, with the status for the client.
    Told { limits: usize },
    /// The same, with all units spent.
    Denied { limits: usize },
    /// New keys, in a table full of idle ones.
    Fresh,
    /// Known keys of one limit with this algorithm; slots are released at once.
    Of(Algorithm),
    /// Known keys, admitted by `governor`.
    Governor { hashed: bool },
}

struct Case {
    kind: Kind,
    keys: u64,
    threads: u64,
    store: Store,
    limits: Vec<Arc<Attached>>,
    governor: Option<Governor<RandomState>>,
    governor_hashed: Option<Governor<BuildHasherDefault<Hashed>>>,
    /// Bytes allocated per key.
    bytes: f64,
    /// Virtual nanoseconds; also the source of fresh keys.
    clock: AtomicU64,
}

fn cases(wanted: &[String]) -> Vec<Case> {
    let most = match std::env::var_os("TIDEGATE_BENCH_LARGE") {
        Some(_) => 4,
        None => 3,
    };
    let sizes = [1, 10_000, MAX_KEYS, 10 * MAX_KEYS];
    let one = [Kind::Known { limits: 1 }, Kind::Told { limits: 1 }];
    let governor = [false, true].map(|hashed| Kind::Governor { hashed });
    let three = [Kind::Known { limits: 3 }, Kind::Told { limits: 3 }];
    let mut chosen = vec![(Kind::Loop, 1, 1)];
    let mut add = |kinds: &[Kind], sizes: &[u64]| {
        for &kind in kinds {
            for &keys in sizes {
                chosen.extend([1, 2].map(|threads| (kind, keys, threads)));
            }
        }
    };
    add(&one, &sizes);
    add(&governor, &sizes);
    add(&[Kind::Packed], &sizes[1..2]);
    add(&three, &sizes[..3]);
    add(&[4, 10].map(|limits| Kind::Known { limits }), &[10_000]);
    add(&OTHERS.map(Kind::Of), &sizes[..most]);
    add(&[1, 3].map(|limits| Kind::Denied { limits }), &[10_000]);
    add(&[Kind::Fresh], &[MAX_KEYS]);
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part));
    chosen
        .into_iter()
        .filter(|&(kind, keys, threads)| is_wanted(&name(kind, keys, threads)))
        .map(|(kind, keys, threads)| Case::new(kind, keys, threads))
        .collect()
}

fn name(kind: Kind, keys: u64, threads: u64) -> String {
    let plural = |n: u64, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let limits = |n: usize| match n {
        1 => "token bucket".to_owned(),
        _ => format!("{n} token buckets"),
    };
    let what = match kind {
        Kind::Loop => return "(loop and key alone)".to_owned(),
        Kind::Known { limits: n } => limits(n),
        Kind::Packed => format!("{}, full table", limits(1)),
        Kind::Told { limits: n } => format!("{}, told", limits(n)),
        Kind::Denied { limits: n } => format!("{}, denied", limits(n)),
        Kind::Fresh => "token bucket, fresh among".to_owned(),
        Kind::Of(algorithm) => format!("{algorithm:?}"),
        Kind::Governor { hashed: false } => "governor".to_owned(),
        Kind::Governor { hashed: true } => "governor, hashed".to_owned(),
    };
    let (keys, threads) = (plural(keys, "key"), plural(threads, "thread"));
    format!("{what}, {keys}, {threads}")
}

impl Case {
    /// A store that already holds every key.
    fn new(kind: Kind, keys: u64, threads: u64) -> Case {
        let (limits, quota) = match kind {
            Kind::Loop => (0, quota(1, 1)),
            Kind::Known { limits } | Kind::Told { limits } => {
                (limits, quota(1_000_000_000, 1_000_000_000))
            }
            Kind::Packed => (1, quota(1_000_000_000, 1_000_000_000)),
            Kind::Denied { limits } => (limits, quota(1, 1)),
            Kind::Fresh => (1, quota(1_000_000_000, 1)),
            Kind::Of(Algorithm::Concurrency) => (1, Quota::slots(4).expect("within bounds")),
            Kind::Of(Algorithm::LeakyBucket) => (1, quota(1_000_000_000, 1_000_000_000)),
            // long enough to never end: a decision takes STEP_NS
            Kind::Of(_) => {
                let period = Duration::from_millis(1);
                (1, Quota::new(4_000, period, 1).expect("within bounds"))
            }
            Kind::Governor { .. } => (0, quota(1, 1)),
        };
        let algorithm = match kind {
            Kind::Of(algorithm) => algorithm,
            _ => Algorithm::TokenBucket,
        };
        let before = counting::held();
        // with several limits, one is global and the others are per key
        let used = keys * limits.saturating_sub(1).max(1) as u64;
        let room = match kind {
            Kind::Packed => used,
            _ => used.max(MAX_KEYS),
        };
        let store = Store::new(room as usize);
        let attach = |n: usize| {
            let limit = Limit::new(&format!("limit {n}"), algorithm, &[quota])
                .expect("a quota within bounds");
            store.attach(&limit).expect("few limits")
        };
        let limits: Vec<_> = (0..limits).map(attach).collect();
        let most = std::num::NonZeroU32::MAX;
        let most = governor::Quota::per_second(most).allow_burst(most);
        let clock = FakeRelativeClock::default;
        let governor = (kind == Kind::Governor { hashed: false })
            .then(|| RateLimiter::dashmap_with_clock(most, clock()));
        let governor_hashed = (kind == Kind::Governor { hashed: true }).then(|| {
            RateLimiter::dashmap_with_clock_and_hasher(most, clock(), BuildHasherDefault::default())
        });
        let mut case = Case {
            kind,
            keys,
            threads,
            store,
            limits,
            governor,
            governor_hashed,
            bytes: 0.0,
            clock: AtomicU64::new(1_000_000_000),
        };
        for n in 0..keys {
            case.decide(1_000_000_000 * STEP_NS, key(n));
        }
        case.bytes = counting::held().saturating_sub(before) as f64 / keys as f64;
        case
    }

    /// One decision of this kind.
    fn decide(&self, now_ns: u64, key: Key) {
        match &self.governor {
            Some(governor) => asked(governor, key),
            None if let Some(governor) = &self.governor_hashed => asked(governor, key),
            None if self.limits.len() > 1 => self.decide_several(now_ns, key),
            None => self.decide_one(now_ns, key),
        }
    }

    #[inline(always)]
    fn decide_one(&self, now_ns: u64, key: Key) {
        if let Some(limit) = self.limits.first() {
            self.admit(now_ns, &[charge(limit, Some(key))]);
        }
    }

    /// One global limit, the others per key.
    #[inline(always)]
    fn decide_several(&self, now_ns: u64, key: Key) {
        let keys = iter::once(None).chain(iter::repeat(Some(key)));
        let charges: ArrayVec<Charge<'_>, MAX_LIMITS> = iter::zip(&self.limits, keys)
            .map(|(limit, key)| charge(limit, key))
            .collect();
        self.admit(now_ns, &charges);
    }

    #[inline(always)]
    fn admit(&self, now_ns: u64, charges: &[Charge<'_>]) {
        let mut verdict = Verdict::default();
        self.store.admit_into(now_ns, charges, &mut verdict);
        match self.kind {
            Kind::Of(Algorithm::Concurrency) => {
                for (charge, finding) in charges.iter().zip(&verdict.findings) {
                    self.store.release(now_ns, charge, finding.held());
                }
            }
            Kind::Told { .. } => {
                let standings = verdict.standings();
                black_box((standings.binding(), &standings));
            }
            _ => {
                black_box(verdict.admitted());
            }
        }
    }

    /// Nanoseconds per decision of one thread in one round. The kind is matched once, not for each
    /// decision.
    fn round(&self) -> f64 {
        match &self.governor {
            Some(governor) => self.time(|_, key| asked(governor, key)),
            None if let Some(governor) = &self.governor_hashed => {
                self.time(|_, key| asked(governor, key))
            }
            None => match self.limits.len() {
                0 => self.time(|now_ns, key| _ = black_box((now_ns, key))),
                1 => self.time(|now_ns, key| self.decide_one(now_ns, key)),
                _ => self.time(|now_ns, key| self.decide_several(now_ns, key)),
            },
        }
    }

    fn time(&self, decide: impl Fn(u64, Key) + Sync) -> f64 {
        let start = self.clock.fetch_add(DECISIONS * self.threads, Relaxed);
        let barrier = Barrier::new(self.threads as usize);
        let is_fresh = self.kind == Kind::Fresh;
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
                let number = if is_fresh { fresh } else { drawn };
                decide((start + n) * STEP_NS, key(number));
            }
            let elapsed = begin.elapsed();
            assert!(
                counting::allocations() == allocated
                    || self.kind == Kind::Of(Algorithm::SlidingLog),
                "{} allocates",
                name(self.kind, self.keys, self.threads)
            );
            elapsed.as_nanos() as f64 / DECISIONS as f64
        };
        if self.threads == 1 {
            return work(0);
        }
        thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let work = &work;
                    scope.spawn(move || work(thread))
                })
                .collect();
            let ns: Vec<f64> = workers
                .into_iter()
                .map(|worker| worker.join().expect("no panic"))
                .collect();
            ns.iter().sum::<f64>() / ns.len() as f64
        })
    }
}

#[inline(always)]
fn asked<S: BuildHasher + Clone>(governor: &Governor<S>, key: Key) {
    drop(black_box(governor.check_key(&key.0)));
}

#[inline(always)]
fn charge(limit: &Attached, key: Option<Key>) -> Charge<'_> {
    Charge {
        limit,
        tier: 0,
        key,
        cost: 1,
        max_delay_ns: 0,
    }
}

fn quota(per_second: u64, burst: u64) -> Quota {
    Quota::new(per_second, Duration::from_secs(1), burst).expect("within bounds")
}

/// Stands in for the keyed hash, whose cost is not part of the decision.
#[inline]
fn key(n: u64) -> Key {
    let mixed = u128::from(n.wrapping_add(0x9E37_79B9_7F4A_7C15))
        .wrapping_mul(0xDA94_2042_E4DD_58B5_9E37_79B9_7F4A_7C15);
    Key(mixed ^ (mixed >> 61))
}

/// The cost of creating a store, and its memory per key when it is full.
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
            store.admit(0, &[charge(&limit, Some(key(n)))]);
        }
        let (held, shared) = (limit.keys(), limit.overflowed());
        let per_key = bytes as f64 / max_keys as f64;
        println!(
            "max_keys {max_keys}: made in {elapsed:?}, {per_key:.1} bytes per key; of as many keys in debt {held} have their own bucket, {shared} share one"
        );
    }
}
