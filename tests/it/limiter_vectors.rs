//! The worked examples of the limit algorithms, through the public interface of `limit`.
//!
//! What is run and what is not is asserted by name and by count, so no example is left out in silence. Two
//! examples are stated in other terms than ours and are translated:
//!
//! - `gc-3` gives the tolerance τ = 15 s beside T = 10 s, a bucket of 2½ units. It is run in half units: twice the
//!   rate, 5 half units of burst, 2 per request. A whole unit is there when two halves are, and the bucket holds all
//!   its *whole* units half a unit's time before it is full.
//! - `tb-8` steps the clock back by 2 s and measures waits from the latest time seen. We keep no latest time per key:
//!   below [`STEP_BACK_NS`] the debt stays where it is and a wait is measured from the stepped clock, hence longer by
//!   the step. Decisions are the same. `gc-6` steps back by 60 s, beyond which the debt is moved to the clock, as
//!   the example has it.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tidegate::limit::{Attached, Charge, Key, Limit, Quota, Store, bucket::STEP_BACK_NS};

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

/// A bucket as a vector describes it, in a store of its own.
struct Bucket {
    store: Store,
    limit: Arc<Attached>,
    key: Option<Key>,
    /// Our units per unit of the vector.
    parts: u64,
    /// What our bucket holds beyond the vector's whole units, as time.
    surplus_ns: u64,
    part_ns: u64,
}

/// What one request was told, in the vector's units.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    admitted: bool,
    remaining: u64,
    retry_after_ns: Option<u64>,
    next_unit_ns: u64,
    reset_ns: u64,
}

impl Bucket {
    fn new(vector: &Value, key: Option<Key>) -> Bucket {
        let params = &vector["params"];
        let period_ns = number(params, "period_ns");
        let (amount, burst, parts) = match params["tau_ns"].as_u64() {
            None if vector["algorithm"] == "token_bucket" => {
                (number(params, "per"), number(params, "capacity"), 1)
            }
            None => (number(params, "count"), number(params, "burst"), 1),
            Some(tau_ns) => {
                let amount = 2 * number(params, "count");
                let part_ns = period_ns / amount;
                (amount, tau_ns / part_ns + 2, 2)
            }
        };
        let quota =
            Quota::new(amount, Duration::from_nanos(period_ns), burst).expect("within bounds");
        let store = Store::new(10);
        let limit = Limit::token_bucket("vector", &[quota]).expect("a quota within bounds");
        let limit = store.attach(&limit).expect("the first limit");
        let part_ns = period_ns / amount;
        Bucket {
            store,
            limit,
            key,
            parts,
            surplus_ns: burst % parts * part_ns,
            part_ns,
        }
    }

    fn admit(&self, now_ns: u64, cost: u64) -> Told {
        let charge = Charge {
            limit: &self.limit,
            tier: 0,
            key: self.key,
            cost: cost * self.parts,
        };
        let verdict = self.store.admit(now_ns, &[charge]);
        let standing = verdict.standings[0];
        assert_eq!(standing.denied, !verdict.admitted());
        assert_eq!(
            standing.never,
            standing.denied && standing.retry_after_ns.is_none()
        );
        let missing_parts = self.parts - 1 - standing.remaining % self.parts;
        let is_whole = standing.reset_ns <= self.surplus_ns;
        Told {
            admitted: verdict.admitted(),
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

/// What the vector expects of the last request of a step; waits are counted from `shift_ns` later than `t_ns`.
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

fn run_bucket(vector: &Value, key: Option<Key>) -> usize {
    let bucket = Bucket::new(vector, key);
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
        let told: Vec<Told> = (0..n).map(|_| bucket.admit(now_ns, cost)).collect();
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

/// Runs the steps of a vector with several limits up to the first that needs an algorithm other than GCRA.
fn run_several(vector: &Value) -> usize {
    let Value::Object(limiters) = &vector["params"]["limiters"] else {
        panic!("no limiters in {vector}")
    };
    let store = Store::new(10);
    let gcra = limiters
        .iter()
        .filter(|(_, params)| params["algorithm"] == "gcra")
        .map(|(name, params)| {
            let period = Duration::from_nanos(number(params, "period_ns"));
            let quota = Quota::new(number(params, "count"), period, number(params, "burst"))
                .expect("within bounds");
            store
                .attach(&Limit::token_bucket(name, &[quota]).expect("within bounds"))
                .expect("few limits")
        });
    let gcra: Vec<Arc<Attached>> = gcra.collect();
    for (index, step) in steps(vector).iter().enumerate() {
        let met = names(&vector["params"]["kinds"][step["kind"].as_str().expect("a kind")]);
        let limits: Vec<_> = met
            .iter()
            .flat_map(|&met| gcra.iter().find(|limit| limit.name() == met))
            .collect();
        if limits.len() < met.len() {
            return index;
        }
        let charges = limits.iter().map(|limit| Charge {
            limit,
            tier: 0,
            key: Some(Key(1)),
            cost: 1,
        });
        let charges: Vec<Charge<'_>> = charges.collect();
        let verdicts = (0..number(step, "n")).map(|_| store.admit(number(step, "t_ns"), &charges));
        let verdicts: Vec<_> = verdicts.collect();
        let context = format!("{} step {index}: {step}", name(vector));
        assert_eq!(
            verdicts.iter().filter(|v| v.admitted()).count() as u64,
            number(step, "allowed"),
            "{context}"
        );
        let last = verdicts.last().expect("at least one request");
        let retry = last
            .denial()
            .map_or(Some(0), |denial| denial.retry_after_ns);
        assert_eq!(retry, step["retry_after_ns"].as_u64(), "{context}");
        for (&met, standing) in met.iter().zip(&last.standings) {
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

#[test]
fn token_bucket_and_gcra_vectors_hold_with_and_without_a_key() {
    for key in [None, Some(Key(u128::MAX / 7))] {
        let mut run = Vec::new();
        let mut steps = 0;
        for vector in vectors() {
            if vector["algorithm"] == "token_bucket" || vector["algorithm"] == "gcra" {
                steps += run_bucket(&vector, key);
                run.push(name(&vector).to_owned());
            }
        }
        let buckets = [
            "tb-1", "tb-1b", "tb-2", "tb-3", "tb-4", "tb-5", "tb-6", "tb-7", "tb-8", "tb-9",
            "tb-10",
        ];
        let gcra = ["gc-1", "gc-2", "gc-3", "gc-4", "gc-5", "gc-6", "gc-7"];
        assert_eq!(run, [&buckets[..], &gcra].concat());
        assert_eq!(steps, 75);
    }
}

#[test]
fn multi_limit_vectors_hold_as_far_as_their_algorithms_are_built() {
    let all = vectors();
    let several = all
        .iter()
        .filter(|vector| vector["algorithm"] == "multi_all_or_nothing");
    let run: Vec<_> = several
        .map(|vector| (name(vector), run_several(vector), steps(vector).len()))
        .collect();
    // the other steps meet a sliding log
    assert_eq!(run, [("mt-free", 0, 9), ("mt-pro", 1, 4), ("mt-ent", 1, 3)]);
}

#[test]
fn every_vector_that_is_not_run_is_known_by_name() {
    let built = ["token_bucket", "gcra", "multi_all_or_nothing"];
    let all = vectors();
    assert_eq!(all.len(), 66);
    let not_run = all
        .iter()
        .filter(|vector| !built.contains(&vector["algorithm"].as_str().unwrap_or_default()));
    let not_run: Vec<&str> = not_run.map(name).collect();
    println!("not run yet: {not_run:?}");
    let windows = [
        "fw-1", "fw-2", "fw-3", "fw-4", "fw-5", "fw-6", "fw-7", "fw-8", "fw-9",
    ];
    let logs = ["sl-1", "sl-2", "sl-3", "sl-4", "sl-5"];
    let counters =
        [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|n| [format!("sc-{n}-floor"), format!("sc-{n}-exact")]);
    let others = [
        "lm-1", "lm-2", "lq-1", "lq-2", "ngx-1", "cc-1", "cc-2", "mt-login", "ad-1", "sp-1",
        "sp-2", "rd-1",
    ];
    let counters = [0, 1].map(|rule| counters.each_ref().map(|both| both[rule].as_str()));
    let not_built = [
        &windows[..],
        &logs,
        &counters.concat(),
        &others,
        &["sc-worst"],
    ];
    assert_eq!(not_run, not_built.concat());
}
