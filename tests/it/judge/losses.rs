//! The excess over a limit when Redis loses its data, for every algorithm and every kind of loss.
//!
//! Takes about six minutes, so it runs only on request:
//! `TIDEGATE_JUDGE_LOSSES=1 cargo test --test it judge::losses -- --nocapture`.

use std::{env, net::SocketAddr, sync::Arc, thread, time::Duration};

use super::{
    clients::{self, Clock},
    plan::{Arrivals, Configuration},
    set::known,
    table::{PAIRS, beyond, start},
};
use crate::support::{
    Gateway, Redis,
    judge::{MILLISECOND, SECOND, Time, beyond::beyond as excess},
    random::Random,
    wait::time_passes,
};

/// How Redis loses its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Nothing,
    Flush,
    RestartEmpty,
    /// Restarted from a snapshot of this age.
    Snapshot(Duration),
    /// Only the keys of the limits.
    Eviction,
}

const LOSSES: [Loss; 6] = [
    Loss::Nothing,
    Loss::Flush,
    Loss::RestartEmpty,
    Loss::Snapshot(Duration::from_secs(1)),
    Loss::Snapshot(Duration::from_secs(7)),
    Loss::Eviction,
];

/// Which gateways receive the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// All gateways equally.
    Even,
    /// Nearly all go to the first gateway before the loss, and to the others after it.
    Moved,
}

const BURST: u64 = 600;
const PERIOD_MS: u64 = 24_000;

/// Time into a window at which nine tenths are spent. Later, gateways refuse from memory and make
/// no calls.
const LOST_AFTER: Time = 7_300 * MILLISECOND;

/// In per cent of the burst.
const GOAL: f64 = 2.0;

#[test]
fn what_redis_loses_is_hardly_admitted_again() {
    if env::var("TIDEGATE_JUDGE_LOSSES").is_err() {
        return;
    }
    let names = PAIRS.map(|(algorithm, scope)| format!("{algorithm}, {scope:?}"));
    println!("\nbeyond the limit, per cent of the burst of {BURST}\n");
    println!(
        "| | {} |\n|---|{}",
        names.join(" | "),
        "---|".repeat(PAIRS.len())
    );
    let mut missed = Vec::new();
    for spread in [Spread::Even, Spread::Moved] {
        for loss in LOSSES {
            let excesses = lose(loss, spread).map(|units| 100.0 * units as f64 / BURST as f64);
            let cells = excesses.map(|part| format!("{part:.1}")).join(" | ");
            println!("| {loss:?}, {spread:?} | {cells} |");
            for (name, excess) in names.iter().zip(excesses) {
                // docs/shared-limits.md: a gateway that is asked no more cannot notice an eviction
                let most = match (loss, spread) {
                    (Loss::Eviction, Spread::Moved) => 100.0,
                    _ => GOAL,
                };
                if excess > most {
                    missed.push(format!("{loss:?}, {spread:?}, {name}: {excess:.1} %"));
                }
            }
        }
    }
    assert!(
        missed.is_empty(),
        "more than {GOAL} %:\n{}",
        missed.join("\n")
    );
}

/// The worst excess of each pair, in units.
fn lose(loss: Loss, spread: Spread) -> [u64; PAIRS.len()] {
    let limits = PAIRS.map(|(algorithm, scope)| Configuration {
        algorithm,
        scope,
        amount: BURST,
        period_ms: PERIOD_MS,
        burst: BURST,
        costs: vec![1],
        gateways: vec![0, 1, 2],
        arrivals: Arrivals::Poisson,
        // a bucket refills meanwhile, so its content falls as fast as a window's
        load: if algorithm == "token_bucket" {
            4.0
        } else {
            3.0
        },
        most_requests: f64::MAX,
        on_redis_down: "local",
    });
    let mut redis = Redis::start();
    let gateways = start(&redis, &limits, 3);
    let clock = Arc::new(Clock::start());
    let period = PERIOD_MS.cast_signed() * MILLISECOND;
    let boundaries = clock.boundaries(period);
    let begins = (clock.now() - boundaries.earliest).div_euclid(period) + 1;
    let begins = boundaries.earliest + begins * period + 200 * MILLISECOND;
    let mut random = Random::new(1);
    let span = (begins, begins + 23 * SECOND);
    let mut planned = Vec::new();
    for (number, limit) in limits.iter().enumerate() {
        planned.extend(limit.requests(number, span, boundaries, &mut random).0);
    }
    let lost = begins + LOST_AFTER;
    if spread == Spread::Moved {
        for request in &mut planned {
            let other = 1 + random.next() as usize % 2;
            let first = request.at < lost && random.is(0.95);
            request.gateway = if first { 0 } else { other };
        }
    }
    let addresses: Vec<SocketAddr> = gateways.iter().map(Gateway::address).collect();
    let clients = {
        let clock = Arc::clone(&clock);
        thread::spawn(move || clients::run(&clock, &addresses, planned, Vec::new()))
    };
    let until = |time: Time| {
        let ahead = (time - clock.now()).max(0);
        time_passes(
            Duration::from_nanos(ahead.unsigned_abs()),
            "a request is sent on schedule",
        );
    };
    if let Loss::Snapshot(age) = loss {
        until(lost - Time::try_from(age.as_nanos()).unwrap_or(0));
        redis.run::<()>(&["SAVE"]);
    }
    until(lost);
    match loss {
        Loss::Nothing => {}
        Loss::Flush => redis.run::<()>(&["FLUSHALL"]),
        // starts from its saved data, if any
        Loss::RestartEmpty | Loss::Snapshot(_) => redis.restart(),
        Loss::Eviction => {
            for key in redis.keys() {
                if key.starts_with("tidegate:{c") {
                    redis.run::<()>(&["DEL", &key]);
                }
            }
        }
    }
    let histories = clients.join().expect("the clients end");
    clock.look();
    let mut number = 0;
    limits.map(|limit| {
        let faults: Vec<_> = excess(&known(&limit, &clock), &histories[&number])
            .into_iter()
            .collect();
        number += 1;
        beyond(&faults)
    })
}
