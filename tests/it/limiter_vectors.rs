//! The worked examples of the limit algorithms, through the public interface of `limit`.
//!
//! The test asserts by name and count which examples run, so none is skipped silently. Two kinds of
//! examples use other terms and are translated:
//!
//! - `gc-3` states the tolerance τ = 15 s with T = 10 s, a bucket of 2½ units. It runs in half
//!   units: twice the rate, 5 half units of burst, 2 per request. A whole unit is available when
//!   two halves are. The bucket has all its *whole* units half a unit's time before it is full.
//! - `tb-8` and `fw-8` step the clock back by 2 s and measure waits from the latest time seen. We
//!   keep no latest time per key. Below [`STEP_BACK_NS`] the debt stays, and a wait is measured
//!   from the stepped clock, hence longer by the step. Decisions are the same. `gc-6` steps back by
//!   60 s. Beyond [`STEP_BACK_NS`] the debt moves to the clock, as in the example.
//!
//! Windows of each key begin at its own offset. Windows of the examples begin at 0 or at a stated
//! origin, so their times are shifted by the difference.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde_json::Value;
use tidegate::{
    limit::{
        Algorithm, Attached, Charge, ChargeLocation, Key, Limit, Quota, STEP_BACK_NS, Standing,
        Store, Verdict,
    },
    response::RejectedRequest,
};

const VECTORS: &str = include_str!("../vectors/limiter_vectors.json");

fn vectors() -> Vec<Value> {
    let file: Value = serde_json::from_str(VECTORS).expect("the file is JSON");
    file["vectors"]
        .as_array()
        .expect("a list of vectors")
        .clone()
}

fn name(vector: &Value) -> &str {
    vector["id"].as_str().expect("an id")
}

fn steps(vector: &Value) -> &[Value] {
    vector["steps"].as_array().expect("a list of steps")
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array()
        .expect("a list of names")
        .iter()
        .flat_map(Value::as_str)
        .collect()
}

fn number(value: &Value, name: &str) -> u64 {
    value[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} is a number in {value}"))
}

/// Longer than any delay in the examples.
const HOUR_NS: u64 = 3_600_000_000_000;

/// A limit of a vector, in its own store.
struct Subject {
    store: Store,
    limit: Arc<Attached>,
    key: Option<Key>,
    /// Our units per unit of the vector.
    parts: u64,
    /// Capacity of our bucket beyond the vector's whole units, as time.
    surplus_ns: u64,
    part_ns: u64,
    /// Our time minus the vector's.
    shift_ns: u64,
    max_delay_ns: u64,
}

/// The outcome of one request, in the vector's units.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    admitted: bool,
    remaining: u64,
    retry_after_ns: Option<u64>,
    next_unit_ns: u64,
    reset_ns: u64,
}

/// The algorithm, the quota, and our units per unit of the vector.
fn rule(vector: &Value) -> (Algorithm, Quota, u64) {
    let params = &vector["params"];
    let quota = |amount, period, burst| {
        let period = Duration::from_nanos(number(params, period));
        Quota::new(amount, period, burst).expect("within bounds")
    };
    let window = || quota(number(params, "limit"), "window_ns", 1);
    let capacity = || {
        quota(
            number(params, "per"),
            "period_ns",
            number(params, "capacity"),
        )
    };
    match vector["algorithm"].as_str().expect("an algorithm") {
        "token_bucket" => (Algorithm::TokenBucket, capacity(), 1),
        "leaky_meter" | "leaky_queue" => (Algorithm::LeakyBucket, capacity(), 1),
        "fixed_window" => (Algorithm::FixedWindow, window(), 1),
        "sliding_counter" => (Algorithm::SlidingWindow, window(), 1),
        "sliding_log" => (Algorithm::SlidingLog, window(), 1),
        "concurrency" => {
            let slots = Quota::slots(number(params, "limit")).expect("within bounds");
            (Algorithm::Concurrency, slots, 1)
        }
        "gcra" => match params["tau_ns"].as_u64() {
            None => {
                let count = number(params, "count");
                let quota = quota(count, "period_ns", number(params, "burst"));
                (Algorithm::Gcra, quota, 1)
            }
            Some(tau_ns) => {
                let amount = 2 * number(params, "count");
                let part_ns = number(params, "period_ns") / amount;
                let quota = quota(amount, "period_ns", tau_ns / part_ns + 2);
                (Algorithm::Gcra, quota, 2)
            }
        },
        other => panic!("{other} is not one of ours"),
    }
}

impl Subject {
    fn new(vector: &Value, key: Option<Key>) -> Subject {
        let (algorithm, quota, parts) = rule(vector);
        let store = Store::new(10);
        let limit = Limit::new("vector", algorithm, &[quota]).expect("a quota within bounds");
        let limit = store.attach(&limit).expect("the first limit");
        let period_ns = quota.period.as_nanos() as u64;
        let part_ns = period_ns / quota.amount;
        let offset = key.map_or(Duration::ZERO, |key| key.window_offset(quota.period));
        let origin_ns = vector["params"]["origin_ns"].as_u64().unwrap_or(0);
        let shift_ns = match algorithm {
            Algorithm::FixedWindow | Algorithm::SlidingWindow => {
                (offset.as_nanos() as u64 + period_ns - origin_ns) % period_ns
            }
            _ => 0,
        };
        let queue = vector["algorithm"] == "leaky_queue";
        let subject = Subject {
            store,
            limit,
            key,
            parts,
            surplus_ns: quota.burst.get() % parts * part_ns,
            part_ns,
            shift_ns,
            max_delay_ns: if queue { HOUR_NS } else { 0 },
        };
        subject.begin(&vector["initial"], period_ns);
        subject
    }

    /// Charges the initial usage of the vector's windows.
    fn begin(&self, initial: &Value, window_ns: u64) {
        let Some(index) = initial["index"].as_u64() else {
            return;
        };
        for (index, count) in [(index - 1, "prev"), (index, "cur")] {
            let charge = self.charge(number(initial, count));
            self.store
                .charge(self.shift_ns + index * window_ns, &charge);
        }
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge {
            limit: &self.limit,
            tier: 0,
            key: self.key,
            cost: cost * self.parts,
            max_delay_ns: self.max_delay_ns,
        }
    }

    fn standing(&self, now_ns: u64, cost: u64) -> Standing {
        let verdict = self
            .store
            .admit(now_ns + self.shift_ns, &[self.charge(cost)]);
        let standing = verdict.standings()[0];
        assert_eq!(standing.denied, !verdict.admitted());
        assert_eq!(
            standing.never,
            standing.denied && standing.retry_after_ns.is_none()
        );
        standing
    }

    fn admit(&self, now_ns: u64, cost: u64) -> Told {
        let standing = self.standing(now_ns, cost);
        let missing_parts = self.parts - 1 - standing.remaining % self.parts;
        let is_whole = standing.reset_ns <= self.surplus_ns;
        Told {
            admitted: !standing.denied,
            remaining: standing.remaining / self.parts,
            retry_after_ns: standing.retry_after_ns,
            next_unit_ns: if is_whole {
                0
            } else {
                standing.next_unit_ns + missing_parts * self.part_ns
            },
            reset_ns: standing.reset_ns.saturating_sub(self.surplus_ns),
        }
    }
}

/// Expected outcome of the last request in a step; waits count from `shift_ns` after `t_ns`.
fn expected(step: &Value, shift_ns: u64) -> Told {
    let admitted = step["allow_last"].as_bool().expect("a decision");
    let wait = (!admitted && !step["never"].as_bool().expect("a flag"))
        .then(|| number(step, "retry_after_ns"));
    let next_unit_ns = step["next_unit_ns"].as_u64();
    Told {
        admitted,
        remaining: number(step, "remaining"),
        retry_after_ns: wait.map(|wait| wait + shift_ns),
        next_unit_ns: next_unit_ns.map_or(0, |wait| wait + shift_ns),
        reset_ns: number(step, "reset_after_ns") + shift_ns,
    }
}

fn run(vector: &Value, key: Option<Key>) -> usize {
    let subject = Subject::new(vector, key);
    let mut latest_ns = 0;
    for (index, step) in steps(vector).iter().enumerate() {
        let (now_ns, cost, n) = (
            number(step, "t_ns"),
            number(step, "cost"),
            number(step, "n"),
        );
        latest_ns = latest_ns.max(now_ns);
        let shift_ns = if latest_ns - now_ns < STEP_BACK_NS {
            latest_ns - now_ns
        } else {
            0
        };
        let told: Vec<Told> = (0..n).map(|_| subject.admit(now_ns, cost)).collect();
        let context = format!("{} step {index}: {step}", name(vector));
        assert_eq!(
            told.iter().filter(|told| told.admitted).count() as u64,
            number(step, "allowed"),
            "{context}"
        );
        assert_eq!(told.last(), Some(&expected(step, shift_ns)), "{context}");
    }
    steps(vector).len()
}

/// Runs the vectors of these algorithms that `is_ours` selects, with and without a key; returns
/// their names and the number of steps.
fn run_all(algorithms: &[&str], is_ours: impl Fn(&Value) -> bool) -> (Vec<String>, usize) {
    let (mut names, mut steps) = (Vec::new(), 0);
    for vector in vectors() {
        let algorithm = vector["algorithm"].as_str().expect("an algorithm");
        if algorithms.contains(&algorithm) && is_ours(&vector) {
            steps += run(&vector, None);
            run(&vector, Some(Key(u128::MAX / 7)));
            run(&vector, Some(Key(0x0123_4567_89AB_CDEF << 37)));
            names.push(name(&vector).to_owned());
        }
    }
    (names, steps)
}

fn numbered(prefix: &str, count: usize, suffix: &str) -> Vec<String> {
    let name = |n| format!("{prefix}-{n}{suffix}");
    (1..=count).map(name).collect()
}

#[test]
fn token_bucket_and_gcra_vectors_hold_with_and_without_a_key() {
    let (run, steps) = run_all(&["token_bucket", "gcra"], |_| true);
    let mut buckets = numbered("tb", 10, "");
    buckets.insert(1, "tb-1b".to_owned());
    assert_eq!(run, [buckets, numbered("gc", 7, "")].concat());
    assert_eq!(steps, 75);
}

#[test]
fn fixed_window_vectors_hold_at_every_offset() {
    let (run, steps) = run_all(&["fixed_window"], |_| true);
    assert_eq!(run, numbered("fw", 9, ""));
    assert_eq!(steps, 32);
}

#[test]
fn sliding_window_vectors_of_the_rule_that_rounds_down_hold_at_every_offset() {
    let (run, steps) = run_all(&["sliding_counter"], |vector| {
        vector["params"]["variant"] == "floor"
    });
    assert_eq!(run, numbered("sc", 9, "-floor"));
    assert_eq!(steps, 16);
}

#[test]
fn sliding_log_vectors_hold_with_and_without_a_key() {
    let (run, steps) = run_all(&["sliding_log"], |_| true);
    assert_eq!(run, numbered("sl", 5, ""));
    assert_eq!(steps, 21);
}

#[test]
fn leaky_bucket_vectors_hold_with_and_without_a_key() {
    let (run, steps) = run_all(&["leaky_meter"], |vector| {
        vector["params"]["rule"].is_null()
    });
    assert_eq!(run, ["lm-1"]);
    assert_eq!(steps, 3);
}

#[test]
fn leaky_bucket_queue_vectors_hold_delay_by_delay() {
    let all = vectors();
    let queues = all
        .iter()
        .filter(|vector| vector["algorithm"] == "leaky_queue");
    let mut steps_run = 0;
    for vector in queues {
        let subject = Subject::new(vector, Some(Key(1)));
        for (index, step) in steps(vector).iter().enumerate() {
            let (now_ns, cost) = (number(step, "t_ns"), number(step, "cost"));
            let n = number(step, "n");
            let told: Vec<Standing> = (0..n).map(|_| subject.standing(now_ns, cost)).collect();
            let context = format!("{} step {index}: {step}", name(vector));
            let delays = told.iter().filter(|told| !told.denied);
            let delays: Vec<Value> = delays.map(|told| told.delay_ns.into()).collect();
            assert_eq!(step["delays_ns"], Value::Array(delays), "{context}");
            let last = told.last().expect("at least one request");
            assert_eq!(
                Some(!last.denied),
                step["allow_last"].as_bool(),
                "{context}"
            );
            assert_eq!(last.remaining, number(step, "remaining"), "{context}");
            let retry = last.retry_after_ns.unwrap_or(0);
            assert_eq!(retry, number(step, "retry_after_ns"), "{context}");
            steps_run += 1;
        }
    }
    assert_eq!(steps_run, 6);
}

#[test]
fn concurrency_vectors_hold_and_every_slot_comes_back_once() {
    let all = vectors();
    let several = all
        .iter()
        .filter(|vector| vector["algorithm"] == "concurrency");
    let mut steps_run = 0;
    for (vector, key) in several.flat_map(|vector| [(vector, None), (vector, Some(Key(9)))]) {
        let subject = Subject::new(vector, key);
        for (index, step) in steps(vector).iter().enumerate() {
            let context = format!("{} step {index}: {step}", name(vector));
            let cost = number(step, "cost");
            if step["op"] == "release" {
                subject
                    .store
                    .release(0, &subject.charge(cost), ChargeLocation::Own);
            } else {
                let standing = subject.standing(0, cost);
                assert_eq!(Some(!standing.denied), step["allow"].as_bool(), "{context}");
            }
            let standing = subject.store.peek(0, &[subject.charge(1)]).standings()[0];
            assert_eq!(standing.remaining, number(step, "remaining"), "{context}");
            steps_run += 1;
        }
    }
    assert_eq!(steps_run, 2 * 14);
}

/// Runs a vector with several limits, which it names.
fn run_several(vector: &Value) -> usize {
    let Value::Object(limiters) = &vector["params"]["limiters"] else {
        panic!("no limiters in {vector}")
    };
    let store = Store::new(10);
    let limits = limiters.iter().map(|(name, params)| {
        let (algorithm, quota, _) =
            rule(&serde_json::json!({"algorithm": params["algorithm"], "params": params}));
        let limit = Limit::new(name, algorithm, &[quota]).expect("within bounds");
        (name.as_str(), store.attach(&limit).expect("few limits"))
    });
    let limits: HashMap<&str, Arc<Attached>> = limits.collect();
    for (index, step) in steps(vector).iter().enumerate() {
        let met = names(&vector["params"]["kinds"][step["kind"].as_str().expect("a kind")]);
        let charges = met.iter().map(|&met| Charge {
            limit: &limits[met],
            tier: 0,
            key: Some(Key(1)),
            cost: 1,
            max_delay_ns: 0,
        });
        let charges: Vec<Charge<'_>> = charges.collect();
        let verdicts = (0..number(step, "n")).map(|_| store.admit(number(step, "t_ns"), &charges));
        let verdicts: Vec<_> = verdicts.collect();
        let context = format!("{} step {index}: {step}", name(vector));
        assert_eq!(admitted(&verdicts), number(step, "allowed"), "{context}");
        let last = verdicts.last().expect("at least one request");
        let retry = last
            .standings()
            .denial()
            .map_or(Some(0), |denial| denial.retry_after_ns);
        assert_eq!(retry, step["retry_after_ns"].as_u64(), "{context}");
        for (&met, standing) in met.iter().zip(last.standings().iter()) {
            assert_eq!(
                standing.remaining,
                number(&step["remaining"], met),
                "{context}"
            );
            assert_eq!(
                standing.denied,
                names(&step["violated"]).contains(&met),
                "{context}"
            );
        }
    }
    steps(vector).len()
}

fn admitted(verdicts: &[Verdict]) -> u64 {
    verdicts.iter().filter(|verdict| verdict.admitted()).count() as u64
}

#[test]
fn multi_limit_vectors_hold() {
    let all = vectors();
    let several = all
        .iter()
        .filter(|vector| vector["algorithm"] == "multi_all_or_nothing");
    let run: Vec<_> = several
        .map(|vector| (name(vector), run_several(vector)))
        .collect();
    assert_eq!(run, [("mt-free", 9), ("mt-pro", 4), ("mt-ent", 3)]);
}

#[test]
fn login_vector_holds_over_three_keys_at_once() {
    let all = vectors();
    let mut several = all.iter().filter(|vector| name(vector) == "mt-login");
    let vector = several.next().expect("the login vector");
    let params = &vector["params"];
    let store = Store::new(100);
    let period = Duration::from_nanos(number(params, "window_ns"));
    let limits = ["pair", "ip", "user"].map(|name| {
        let quota = Quota::new(number(&params["limits"], name), period, 1).expect("within bounds");
        let limit = Limit::new(name, Algorithm::SlidingLog, &[quota]).expect("within bounds");
        store.attach(&limit).expect("few limits")
    });
    let key = |text: &str| {
        let hash = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(0x0100_0193_0001);
        Some(Key(text.bytes().fold(0x6C62_272E, hash)))
    };
    for (index, step) in steps(vector).iter().enumerate() {
        let (ip, user) = (step["ip"].as_str().unwrap(), step["user"].as_str().unwrap());
        let keys = [key(&format!("{ip} {user}")), key(ip), key(user)];
        let charges = [0, 1, 2].map(|n| Charge {
            limit: &limits[n],
            tier: 0,
            key: keys[n],
            cost: 1,
            max_delay_ns: 0,
        });
        let verdicts = (0..number(step, "n")).map(|_| store.admit(number(step, "t_ns"), &charges));
        let verdicts: Vec<_> = verdicts.collect();
        let context = format!("step {index}: {step}");
        assert_eq!(admitted(&verdicts), number(step, "allowed"), "{context}");
        let last = verdicts.last().expect("at least one request").standings();
        let violated = limits
            .iter()
            .zip(last.iter())
            .filter(|(_, told)| told.denied);
        let violated: Vec<&str> = violated.map(|(limit, _)| limit.name()).collect();
        assert_eq!(violated, names(&step["violated"]), "{context}");
    }
    assert_eq!(steps(vector).len(), 8);
}

#[test]
fn worst_case_of_the_sliding_window_is_twice_its_limit_in_one_window_and_not_more() {
    const MS: u64 = 1_000_000;
    let all = vectors();
    let worst = all.iter().find(|vector| name(vector) == "sc-worst");
    let worst = worst.expect("the worst case");
    let params = &worst["params"];
    let (limit, window_ms) = (number(params, "limit"), number(params, "window_ms"));
    let vector = serde_json::json!({"algorithm": "sliding_counter",
        "params": {"limit": limit, "window_ns": window_ms * MS}});
    let subject = Subject::new(&vector, Some(Key(3)));
    let mut admitted_ms: Vec<u64> = Vec::new();
    for now_ms in [window_ms - 1; 100]
        .into_iter()
        .chain(window_ms..2 * window_ms)
    {
        if subject.admit(now_ms * MS, 1).admitted {
            admitted_ms.push(now_ms);
        }
    }
    let trailing = |&end: &u64| {
        let within = admitted_ms
            .iter()
            .filter(|&&at| at <= end && at + window_ms > end);
        within.count() as u64
    };
    let most = admitted_ms.iter().map(trailing).max();
    assert_eq!(most, worst["max_in_trailing_window"].as_u64());
}

#[test]
fn waits_are_rounded_up_to_whole_seconds() {
    let all = vectors();
    let rounding = all.iter().find(|vector| name(vector) == "rd-1");
    for step in steps(rounding.expect("the vector of roundings")) {
        let retry_after_ns = step["wait_ns"].as_u64();
        let told = RejectedRequest::new(&[], retry_after_ns).retry_after();
        assert_eq!(told.map(u64::from), step["retry_after_header_s"].as_u64());
    }
}

#[test]
fn every_vector_that_is_not_run_is_known_by_name() {
    let run = [
        "token_bucket",
        "gcra",
        "leaky_queue",
        "fixed_window",
        "sliding_log",
        "concurrency",
        "multi_all_or_nothing",
        "multi_keys",
        "sliding_counter_adversary",
        "retry_after_rounding",
    ];
    let all = vectors();
    assert_eq!(all.len(), 66);
    let not_run = all.iter().filter(|vector| {
        let algorithm = vector["algorithm"].as_str().unwrap_or_default();
        !run.contains(&algorithm)
            && vector["params"]["variant"] != "floor"
            && name(vector) != "lm-1"
    });
    let not_run: Vec<&str> = not_run.map(name).collect();
    // excluded: the stricter sliding-window rule, an overfilling meter, nginx's mixture, and
    // examples that are no limit algorithm
    let mut expected = numbered("sc", 9, "-exact");
    expected.extend(["lm-2", "ngx-1", "ad-1", "sp-1", "sp-2"].map(str::to_owned));
    assert_eq!(not_run, expected);
}
