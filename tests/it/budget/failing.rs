//! Faults of Redis: slow, gone, full, read-only, emptied, or not a Redis at all.

use std::{
    cell::Cell,
    io::{Read, Write},
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use redis::Value;

use super::{HOURLY, burst, refilled, waiting};
use crate::support::{Gateway, Redis, Request, eventually, redis::free_address, wait::time_passes};

fn shared(redis: &Redis, limit: &str) -> Gateway {
    shared_at(&redis.url(), limit)
}

fn shared_at(url: &str, limit: &str) -> Gateway {
    waiting("200ms", &format!("url = {url:?}"), limit)
}

/// A rate that no test exhausts.
pub const PLENTY: &str = "rate = \"1000000/s\"";

fn passed(gateway: &Gateway, requests: usize) -> usize {
    let statuses = gateway.statuses(&Request::get("/"), requests);
    let other = statuses
        .iter()
        .find(|&&status| ![200, 429].contains(&status));
    assert_eq!(other, None, "{statuses:?}");
    statuses.iter().filter(|&&status| status == 200).count()
}

/// Sends requests until the breaker opens.
pub fn until_given_up(gateway: &Gateway) {
    eventually("the breaker to open", || {
        let status = gateway.get("/").status;
        assert!([200, 429, 503].contains(&status), "{status}");
        match gateway.metric("tidegate_degraded") {
            1.0 => Ok(()),
            other => Err(format!("degraded is {other}")),
        }
    });
}

#[test]
fn without_redis_a_limit_goes_on_with_its_part_or_opens_or_closes() {
    let url = format!("redis://{}", free_address());
    for (behaviour, expected) in [
        ("on_redis_down = \"local\"", 200..=305),
        (
            "on_redis_down = \"local\"\nlocal_fraction = 0.25",
            100..=155,
        ),
        ("on_redis_down = \"open\"", 1_000..=1_000),
    ] {
        let gateway = shared_at(&url, &format!("{HOURLY}\n{behaviour}"));
        let passed = passed(&gateway, 1_000);
        assert!(
            expected.contains(&passed),
            "{behaviour}: {passed} of 1000 with a limit of 600"
        );
        assert_eq!(gateway.metric("tidegate_degraded"), 1.0);
        assert!(gateway.metric("tidegate_degraded_decisions_total") >= 1.0);
    }
    let gateway = shared_at(&url, &format!("{HOURLY}\non_redis_down = \"closed\""));
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [503, 503, 503]);
    let closed = gateway.get("/");
    assert_eq!(closed.retry_after(), Some(1));
    let problem = closed.json();
    let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
    assert_eq!(problem["type"], kind);
    assert_eq!(problem["title"], "Temporary Reduced Capacity");
    assert_eq!(problem["violated-policies"], serde_json::json!(["shared"]));
}

#[test]
fn a_redis_that_is_killed_and_comes_back_is_used_again_and_told_what_it_missed() {
    let mut redis = Redis::start();
    let gateway = shared(&redis, "rate = \"100/h\"\nburst = 100\nsync = \"strict\"");
    assert_eq!(passed(&gateway, 40), 40);
    redis.kill();
    until_given_up(&gateway);
    let alone = passed(&gateway, 100);
    // 60 were left, of which the fallback may spend half
    assert!((20..=31).contains(&alone), "{alone} passed without Redis");
    redis.restart();
    gateway.wait_for_metric("tidegate_degraded", 0.0);
    let after = passed(&gateway, 100);
    assert!(
        after <= 60 - alone,
        "{after} passed after {alone} without Redis"
    );
    assert!(
        after >= 25 - (alone - 20),
        "{after} passed after {alone} without Redis"
    );
}

#[test]
fn a_key_gets_its_part_once_however_long_redis_is_away() {
    let mut redis = Redis::start();
    // with Redis the key would be forgotten after a second without a call
    let gateway = shared(&redis, "rate = \"20/s\"\nburst = 20");
    assert_eq!(gateway.get("/").status, 200);
    redis.kill();
    until_given_up(&gateway);
    let (begun, mut alone) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(6) {
        alone += passed(&gateway, 20);
        time_passes(Duration::from_millis(20), "a client paces itself");
    }
    // ten at once, and ten a second
    let most = 10.0 + 10.0 * begun.elapsed().as_secs_f64() + 2.0;
    assert!(
        f64::from(u32::try_from(alone).expect("few")) <= most,
        "{alone} of {most}"
    );
}

#[test]
fn a_redis_that_hangs_is_given_up_and_used_again_when_it_answers() {
    let redis = Redis::start();
    let gateway = shared(
        &redis,
        &format!("{PLENTY}\nsync = \"strict\"\non_redis_down = \"open\""),
    );
    assert_eq!(passed(&gateway, 10), 10);
    redis.pause();
    until_given_up(&gateway);
    let late = gateway.metric("tidegate_redis_calls_total{outcome=\"late\"}");
    assert_eq!(passed(&gateway, 200), 200);
    // calls in flight when the breaker opened may still end late, but no new ones are made
    let later = gateway.metric("tidegate_redis_calls_total{outcome=\"late\"}");
    assert!(
        later <= late + 5.0,
        "{late}, then {later} late calls: no request waits while the breaker is open"
    );
    redis.resume();
    gateway.wait_for_metric("tidegate_degraded", 0.0);
    let before = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
    assert_eq!(passed(&gateway, 10), 10);
    assert!(gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}") > before);
    let log = eventually("the line that it answers again", || {
        let log = gateway.stderr();
        match log.contains("Redis answers again") {
            true => Ok(log),
            false => Err(log),
        }
    });
    assert_eq!(log.matches("Redis does not answer").count(), 1, "{log}");
    assert_eq!(log.matches("Redis answers again").count(), 1, "{log}");
}

#[test]
fn what_a_redis_that_stood_still_granted_to_nobody_goes_back() {
    for limit in [
        "rate = \"20/d\"\nburst = 20\nsync = \"strict\"",
        "rate = \"20/d\"\nburst = 20",
        "rate = \"20/30d\"\nalgorithm = \"fixed_window\"\nsync = \"strict\"",
        "rate = \"20/30d\"\nalgorithm = \"sliding_window\"\nsync = \"strict\"",
        "rate = \"20/d\"\nalgorithm = \"sliding_log\"\nsync = \"strict\"",
    ] {
        let redis = Redis::start();
        let gateway = waiting(
            "20ms",
            &format!("url = {:?}", redis.url()),
            &format!("{limit}\non_redis_down = \"closed\""),
        );
        let admitted = Cell::new(0);
        let send = || {
            let status = gateway.get("/").status;
            admitted.set(admitted.get() + usize::from(status == 200));
            status
        };
        let admit = |until: usize| {
            eventually("requests to be admitted", || {
                let status = send();
                match admitted.get() {
                    now if now >= until => Ok(()),
                    now => Err(format!("{now} of {until}, {limit}: {status}")),
                }
            });
        };
        admit(5);
        redis.pause();
        // several calls at once: each receives grants when Redis continues
        let statuses = burst(std::slice::from_ref(&gateway), 8, 8);
        let passed = statuses.get(&200).copied().unwrap_or(0);
        admitted.set(admitted.get() + passed);
        eventually("the breaker to open", || {
            send();
            match gateway.metric("tidegate_degraded") {
                1.0 => Ok(()),
                other => Err(format!("degraded is {other}")),
            }
        });
        time_passes(
            Duration::from_secs(2),
            "Redis stands still for longer than a call lasts",
        );
        redis.resume();
        gateway.wait_for_metric("tidegate_degraded", 0.0);
        admit(20);
        assert_eq!(gateway.statuses(&Request::get("/"), 5), [429; 5], "{limit}");
    }
}

#[test]
fn a_redis_that_hangs_is_noticed_although_nobody_sends_a_request() {
    let redis = Redis::start();
    let gateway = shared(&redis, PLENTY);
    gateway.wait_for_metric("tidegate_lease_gateways", 1.0);
    assert_eq!(gateway.metric("tidegate_degraded"), 0.0);
    redis.pause();
    gateway.wait_for_metric("tidegate_degraded", 1.0);
    redis.resume();
    gateway.wait_for_metric("tidegate_degraded", 0.0);
}

#[test]
fn a_redis_that_has_forgotten_everything_gives_no_second_burst() {
    let redis = Redis::start();
    let gateway = shared(&redis, HOURLY);
    let begun = Instant::now();
    let before = passed(&gateway, 560);
    assert!(before >= 500, "{before}");
    redis.run::<Value>(&["FLUSHALL"]);
    let after = passed(&gateway, 600);
    let most = 600 + refilled(begun) + 2;
    assert!(
        before + after <= most,
        "{before}, and {after} after the flush"
    );
}

#[test]
fn forgotten_scripts_are_sent_again_and_no_request_notices() {
    let redis = Redis::start();
    let gateway = shared(
        &redis,
        &format!("{PLENTY}\nsync = \"strict\"\non_redis_down = \"closed\""),
    );
    for _ in 0..5 {
        assert_eq!(passed(&gateway, 20), 20);
        redis.run::<Value>(&["SCRIPT", "FLUSH"]);
    }
    assert_eq!(
        gateway.metric("tidegate_redis_calls_total{outcome=\"error\"}"),
        0.0
    );
}

#[test]
fn a_full_a_read_only_and_a_loading_redis_count_under_their_names_and_recover() {
    let redis = Redis::start();
    let gateway = shared(
        &redis,
        &format!("{PLENTY}\nsync = \"strict\"\non_redis_down = \"open\""),
    );
    let fill: &[&str] = &["CONFIG", "SET", "maxmemory", "1"];
    let free: &[&str] = &["CONFIG", "SET", "maxmemory", "0"];
    let follow: &[&str] = &["REPLICAOF", "127.0.0.1", "1"];
    let lead: &[&str] = &["REPLICAOF", "NO", "ONE"];
    for (kind, spoil, mend) in [("oom", fill, free), ("readonly", follow, lead)] {
        assert_eq!(passed(&gateway, 5), 5);
        redis.run::<Value>(spoil);
        until_given_up(&gateway);
        assert!(
            gateway.metric(&format!("tidegate_redis_errors_total{{kind=\"{kind}\"}}")) >= 5.0,
            "{kind}"
        );
        assert_eq!(passed(&gateway, 20), 20, "{kind}");
        redis.run::<Value>(mend);
        let before = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
        eventually("calls to be answered again", || {
            assert_eq!(passed(&gateway, 1), 1);
            let now = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
            if now > before {
                Ok(())
            } else {
                Err(kind.to_owned())
            }
        });
        gateway.wait_for_metric("tidegate_degraded", 0.0);
    }
}

#[test]
fn what_is_no_redis_is_given_up() {
    for nonsense in [
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        "*1\r\n*1\r\n*1\r\n$-1\r\n",
        "\0\0\0\0\0\0\0\0",
        "+OK\r\n",
        ":1\r\n",
        "*2\r\n:1\r\n$3\r\nabc\r\n",
    ] {
        let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let url = format!("redis://{}", socket.local_addr().expect("it is bound"));
        thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                thread::spawn(move || {
                    let mut stream = stream;
                    let mut buffer = [0; 4096];
                    // one answer per command, so that nothing looks like a timeout
                    while let Ok(read @ 1..) = stream.read(&mut buffer) {
                        let commands = buffer[..read].iter().filter(|&&byte| byte == b'*').count();
                        for _ in 0..commands.max(1) {
                            if stream.write_all(nonsense.as_bytes()).is_err() {
                                return;
                            }
                        }
                    }
                });
            }
        });
        let gateway = shared_at(
            &url,
            &format!("{PLENTY}\nsync = \"strict\"\non_redis_down = \"closed\""),
        );
        for _ in 0..20 {
            assert_eq!(gateway.get("/").status, 503, "{nonsense:?}");
        }
        assert!(gateway.metric("tidegate_redis_errors_total") >= 1.0);
    }
}

#[test]
fn two_gateways_share_what_goes_on_alone() {
    let mut redis = Redis::start();
    let limit = "rate = \"400/h\"\nburst = 400";
    let gateways: Vec<Gateway> = (0..2).map(|_| shared(&redis, limit)).collect();
    let before = burst(&gateways, 50, 5);
    assert_eq!(before.get(&200), Some(&100));
    redis.kill();
    gateways.iter().for_each(until_given_up);
    let alone: usize = gateways.iter().map(|gateway| passed(gateway, 400)).sum();
    // the local tokens, and half of what is left
    assert!(
        alone <= 300,
        "{alone} passed without Redis, after 100 of 400"
    );
}
