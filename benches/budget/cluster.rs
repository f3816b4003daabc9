//! Faults of a cluster, and flushed scripts, under load.

use std::{collections::BTreeSet, time::Duration};

use redis::Value;
use tidegate::budget::{RedisServer, RedisTarget, WhenDown};

use crate::{
    gateway::{Answer, Limit, at},
    load::{Request, Run, Told, until},
    support::{
        redis::{Cluster, Redis},
        wait::within,
    },
    verdict::{
        Bound::{AtMost, Within},
        Verdicts,
    },
};

/// A strict limit that fails where Redis does not answer.
fn run(seconds: u64) -> Run {
    Run {
        gateways: 2,
        keys: 60,
        limit: Limit::per_second(20).strict().when_down(WhenDown::Closed),
        load: 0.8,
        seconds,
        deaths: None,
    }
}

fn failed(told: &Told) -> Vec<&Request> {
    let all = told.requests.iter();
    all.filter(|request| request.decision.answer == Answer::Unavailable)
        .collect()
}

/// Item 11.
pub fn cluster(verdicts: &mut Verdicts) {
    let one = Redis::start();
    let told = run(5).go(&at(&one.url()), |begun| {
        for turn in 1..20 {
            until(begun, f64::from(turn) / 4.0);
            one.run::<Value>(&["SCRIPT", "FLUSH"]);
        }
    });
    verdicts.add(
        11,
        "SCRIPT FLUSH, 19 times: failed requests",
        failed(&told).len() as f64,
        AtMost(0.0),
    );

    let mut servers = Cluster::start(1);
    let seed = RedisServer::parse(&servers.seed()).expect("a URL");
    let target = RedisTarget::Cluster(vec![seed]);
    let told = run(10).go(&target, |begun| {
        until(begun, 1.0);
        for part in 0..5 {
            let slots = part * 500 + 10_923..(part + 1) * 500 + 10_923;
            servers.begin_to_move(slots.clone(), 2, 1);
            servers.finish_to_move(slots, 2, 1);
        }
        println!(
            "2500 slots moved in {:?}",
            begun.elapsed() - Duration::from_secs(1)
        );
    });
    verdicts.add(
        11,
        "2,500 slots moved: failed requests",
        failed(&told).len() as f64,
        AtMost(0.0),
    );

    let (mut killed, mut taken_over, mut kept) = (0.0, 0.0, 0);
    let told = run(12).go(&target, |begun| {
        until(begun, 3.0);
        kept = servers.masters[0]
            .keys()
            .iter()
            .filter(|key| key.contains("{bench:"))
            .count();
        killed = begun.elapsed().as_secs_f64();
        servers.masters[0].kill();
        within(Duration::from_secs(8), "the replica to take over", || {
            let role: Vec<Value> = servers.replicas[0].run(&["ROLE"]);
            let is_master = role.first() == Some(&Value::BulkString(b"master".to_vec()));
            is_master.then_some(()).ok_or_else(String::new)
        });
        taken_over = begun.elapsed().as_secs_f64();
    });
    let failed = failed(&told);
    let last = failed
        .iter()
        .map(|request| request.came)
        .fold(killed, f64::max);
    let keys: BTreeSet<u64> = failed.iter().map(|request| request.key).collect();
    println!(
        "{} requests of {} failed; the replica took over {:.2} s after its master was killed",
        failed.len(),
        told.asked(),
        taken_over - killed
    );
    let of = |what: &str| format!("a master killed: s until the last failure {what}");
    let bound = Within(0.1, 4.0);
    verdicts.add(11, of("(2 s + 2 s)"), last - killed, bound);
    let late = (last - taken_over).max(0.0);
    verdicts.add(11, of("after the replica took over"), late, AtMost(0.5));
    verdicts.add(
        11,
        format!("a master killed, {kept} keys: keys that failed"),
        keys.len() as f64,
        Within(1.0, kept as f64),
    );
}
