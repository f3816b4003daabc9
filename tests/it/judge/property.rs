//! Judges random configurations: everything that clients see is within the guarantees of the
//! limits.
//!
//! A *set* is a Redis, some gateways at different distances from it, and dozens of limits, each
//! with its own requests. One event happens half-way. Every limit is one configuration.
//! `cargo test --test it judge::property` runs 200 of them.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `TIDEGATE_JUDGE_CONFIGURATIONS` | how many; 10,000 by hand | `200` |
//! | `TIDEGATE_JUDGE_SEED` | of the first set; each next one takes the next number | `1` |
//! | `TIDEGATE_JUDGE_SETS` | sets that run side by side | `3` |
//! | `TIDEGATE_JUDGE_EVENT` | the event of all sets, such as `Reload` | each in turn |
//!
//! A fault is printed with the seed of its set, the configuration and the shortest history that
//! shows it. To run that set again:
//! `TIDEGATE_JUDGE_SEED=17 TIDEGATE_JUDGE_CONFIGURATIONS=25 cargo test --test it judge::property`.

use std::{
    env,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use super::{
    set::{EACH, Set},
    verdicts::Summary,
};
use crate::support::wait::lock;

/// Share of requests to leased limits that may be refused wrongly, because tokens are held by
/// another gateway or on their way back.
const LEASES_REFUSED_WRONGLY: f64 = 0.15;

#[test]
fn limits_of_random_configurations_keep_their_promises() {
    let number = |name: &str, default: u64| {
        let text = env::var(name).ok();
        text.map_or(default, |text| text.parse().expect(name))
    };
    let configurations = number("TIDEGATE_JUDGE_CONFIGURATIONS", 200);
    let seed = number("TIDEGATE_JUDGE_SEED", 1);
    let (next, last) = (
        AtomicU64::new(seed),
        seed + configurations.div_ceil(EACH as u64),
    );
    let summary = Mutex::new(Summary::default());
    thread::scope(|scope| {
        for _ in 0..number("TIDEGATE_JUDGE_SETS", 3) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= last {
                        return;
                    }
                    let judged = Set::new(seed).run();
                    lock(&summary).add(&judged);
                }
            });
        }
    });
    let summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.print();
    let share = summary.leases_refused_wrongly();
    println!(
        "{:.1} % of the requests to leases were refused wrongly",
        100.0 * share
    );
    assert!(share <= LEASES_REFUSED_WRONGLY, "{share}");
    assert!(
        summary.broken.is_empty(),
        "{} promises are broken:\n{}",
        summary.broken.len(),
        summary.broken.join("\n")
    );
}
