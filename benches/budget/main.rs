//! The guarantees of shared limits, measured against a private Redis: every figure beside its
//! bound. Items are numbered as in docs/decisions/0003-global-budget.md.
//!
//! `cargo bench --bench budget` runs all parts in ten minutes; `-- hand script four eight hot
//! deaths empty away slow cluster lossy` selects parts, in this order. Timed parts need an
//! otherwise idle machine. Items that need no clock are tests: the contracts of the scripts (item
//! 1), several limits on one request (13) and slots (14) in `tests/it/budget`, and the arithmetic
//! against a model in `src/budget/lease/model.rs`.

#![allow(unreachable_pub, reason = "a standalone program that nothing links")]

mod cluster;
mod cost;
#[path = "../counting/mod.rs"]
mod counting;
mod faults;
mod gateway;
mod load;
mod loads;
mod proxy;
#[allow(dead_code, reason = "tests use more of it")]
mod support;
mod verdict;

use verdict::Verdicts;

/// One part of the benchmark.
type Part = fn(&mut Verdicts);

const PARTS: [(&str, Part); 11] = [
    ("hand", cost::hand),
    ("script", cost::script),
    ("four", loads::four),
    ("eight", loads::eight),
    ("hot", loads::hot),
    ("deaths", faults::deaths),
    ("empty", faults::empty),
    ("away", faults::away),
    ("slow", faults::slow),
    ("cluster", cluster::cluster),
    ("lossy", faults::lossy),
];

fn main() {
    // cargo adds its own options
    let arguments = std::env::args().skip(1);
    let wanted: Vec<String> = arguments.filter(|word| !word.starts_with('-')).collect();
    let mut verdicts = Verdicts::default();
    for (name, part) in PARTS {
        if wanted.is_empty() || wanted.iter().any(|word| word == name) {
            println!("\n# {name}");
            part(&mut verdicts);
        }
    }
    verdicts.print();
}
