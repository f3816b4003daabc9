//! Gateways return to Redis as soon as it is back, after any fault. A probe is sent every quarter
//! of a second and none may be wasted. The test counts probes, because a busy machine stretches any
//! time.

use std::{thread, time::Instant};

use redis::Value;

use super::{
    FAILOVER,
    failing::{PLENTY, until_given_up},
    servers::from,
    waiting,
};
use crate::support::{
    Client, Gateway, Redis, Request, eventually,
    redis::{Sentinel, ask_sentinel},
    wait::within,
};

/// Probes that may fail once Redis is back: one in flight, and one sent at the same moment.
const WASTED: f64 = 2.0;

/// A gateway that calls Redis for every request.
fn asking(redis: &str) -> Gateway {
    let limit = format!("{PLENTY}\nsync = \"strict\"\non_redis_down = \"open\"");
    let gateway = waiting("500ms", redis, &limit);
    assert_eq!(gateway.statuses(&Request::get("/"), 5), [200; 5]);
    assert!(ok_calls(&gateway) >= 5.0);
    gateway
}

fn ok_calls(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}")
}

fn failed(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_redis_errors_total")
}

/// Requires that the gateway returns to Redis, which has just come back after an outage.
fn is_used_again(gateway: &Gateway) {
    let (back, answered, wasted) = (Instant::now(), ok_calls(gateway), failed(gateway));
    eventually("calls to be answered again", || {
        assert_eq!(gateway.get("/").status, 200);
        let now = ok_calls(gateway);
        (now > answered)
            .then_some(())
            .ok_or_else(|| now.to_string())
    });
    println!("used again after {:?}", back.elapsed());
    let wasted = failed(gateway) - wasted;
    assert!(wasted <= WASTED, "{wasted} calls and probes failed");
    gateway.wait_for_metric("tidegate_degraded", 0.0);
}

fn url(redis: &Redis) -> String {
    format!("url = {:?}", redis.url())
}

#[test]
fn the_first_probes_find_a_redis_that_was_killed_and_restarted() {
    let mut redis = Redis::start();
    let gateway = asking(&url(&redis));
    redis.kill();
    until_given_up(&gateway);
    redis.restart();
    is_used_again(&gateway);
}

#[test]
fn the_first_probes_find_a_redis_that_was_stopped_and_continued() {
    let redis = Redis::start();
    let gateway = asking(&url(&redis));
    redis.pause();
    until_given_up(&gateway);
    redis.resume();
    redis.run::<Value>(&["PING"]);
    is_used_again(&gateway);
}

#[test]
fn the_first_probes_find_a_redis_that_has_memory_again() {
    let redis = Redis::start();
    let gateway = asking(&url(&redis));
    redis.run::<Value>(&["CONFIG", "SET", "maxmemory", "1"]);
    until_given_up(&gateway);
    redis.run::<Value>(&["CONFIG", "SET", "maxmemory", "0"]);
    is_used_again(&gateway);
}

#[test]
fn a_redis_that_stands_still_for_a_moment_is_not_given_up_however_many_calls_are_late() {
    let redis = Redis::start();
    // one client per call: calls of one key would wait for each other
    let gateway = Gateway::with(&format!(
        "[redis]\n{}\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nscope = \"global\"\n{PLENTY}\nsync = \"strict\"\non_redis_down = \"open\"\n",
        url(&redis)
    ))
    .start();
    let late = || gateway.metric("tidegate_redis_calls_total{outcome=\"late\"}");
    redis.pause();
    let clients: Vec<_> = (0..10)
        .map(|who| {
            let address = gateway.address();
            thread::spawn(move || Client::connect(address).send(&from(who)).status)
        })
        .collect();
    eventually("five calls to be late", || {
        let late = late();
        (late >= 5.0).then_some(()).ok_or_else(|| late.to_string())
    });
    redis.resume();
    for client in clients {
        assert_eq!(client.join().expect("a client"), 200);
    }
    eventually("calls to be answered in time", || {
        let before = ok_calls(&gateway);
        assert_eq!(gateway.send(&from(0)).status, 200);
        let now = ok_calls(&gateway);
        (now > before).then_some(()).ok_or_else(|| now.to_string())
    });
    let log = gateway.stderr();
    assert!(!log.contains("Redis does not answer"), "{log}");
}

#[test]
fn a_redis_that_forgets_data_and_scripts_is_never_given_up() {
    let redis = Redis::start();
    let gateway = asking(&url(&redis));
    for _ in 0..5 {
        redis.run::<Value>(&["FLUSHALL"]);
        redis.run::<Value>(&["SCRIPT", "FLUSH"]);
        let before = ok_calls(&gateway);
        assert_eq!(gateway.statuses(&Request::get("/"), 5), [200; 5]);
        assert!(ok_calls(&gateway) >= before + 5.0);
    }
    assert_eq!(failed(&gateway), 0.0);
    assert_eq!(gateway.metric("tidegate_degraded_decisions_total"), 0.0);
}

#[test]
fn the_first_probes_find_the_replica_that_sentinel_promotes() {
    let mut sentinel = Sentinel::start();
    let nodes = sentinel.address;
    let gateway = asking(&format!(
        "sentinel = {{ master = \"mymaster\", nodes = [\"{nodes}\"] }}"
    ));
    sentinel.master.kill();
    until_given_up(&gateway);
    within(FAILOVER, "the Sentinel to name the replica", || {
        let (_, port): (String, u16) =
            ask_sentinel(nodes, &["GET-MASTER-ADDR-BY-NAME", "mymaster"])?;
        let is_replica = port == sentinel.replica.port();
        is_replica.then_some(()).ok_or_else(|| port.to_string())
    });
    is_used_again(&gateway);
}
