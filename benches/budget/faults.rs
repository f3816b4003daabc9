//! Faults of gateways and Redis under load.

use std::time::Duration;

use redis::Value;
use tidegate::budget::WhenDown;

use crate::{
    gateway::{Answer, Limit, at},
    load::{Run, until},
    proxy::Proxy,
    support::{redis::Redis, wait::time_passes},
    verdict::{
        Bound::{AtLeast, AtMost, Within},
        Verdicts,
    },
};

/// Item 7: half of the gateways are killed; one is shut down.
pub fn deaths(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    let run = Run {
        gateways: 8,
        keys: 10,
        limit: Limit::per_second(200),
        load: 1.2,
        seconds: 10,
        deaths: Some((4, Duration::from_secs(5))),
    };
    let told = run.go(&at(&redis.url()), |_| {});
    let beyond = told.beyond(&run.limit, 0.0..f64::MAX);
    verdicts.add(
        7,
        "4 of 8 gateways killed at 1.2 x: beyond",
        beyond,
        AtMost(0.0),
    );
    let exact = told.exact(&run.limit, 0.0..f64::MAX);
    println!(
        "{:.1} % of what one bucket admits",
        100.0 * told.admitted() / exact
    );
    redis.run::<Value>(&["FLUSHALL"]);

    let hourly = Limit {
        amount: 600,
        period: Duration::from_secs(86_400),
        burst: 600,
        ..Limit::per_second(1)
    };
    let one = Run {
        gateways: 4,
        keys: 1,
        limit: hourly,
        // 120 requests
        load: 8_640.0,
        seconds: 2,
        deaths: None,
    };
    let mut held = 0.0;
    let told = one.go(&at(&redis.url()), |begun| {
        until(begun, 1.9);
        held = spent(&redis);
    });
    let (spent, admitted) = (spent(&redis), told.admitted());
    let unspent = held - admitted;
    let returned = 100.0 * (held - spent) / unspent;
    println!(
        "4 gateways had borrowed {held:.0} and spent {admitted:.0}; {spent:.0} were spent when they had ended"
    );
    verdicts.add(
        7,
        "% of what was not spent back after SIGTERM",
        returned,
        AtLeast(95.0),
    );
}

/// The deficit of the only bucket in Redis: the first number of its state.
fn spent(redis: &Redis) -> f64 {
    let keys = redis.keys();
    let bucket = keys.iter().find(|key| key.contains("{bench:"));
    let state: Vec<u8> = redis.run(&["GET", bucket.expect("there is a bucket")]);
    let (bytes, _) = state.split_first_chunk().expect("32 bytes");
    f64::from_le_bytes(*bytes)
}

/// Item 8: Redis is killed, and restarted empty.
pub fn empty(verdicts: &mut Verdicts) {
    let mut redis = Redis::start();
    let run = Run {
        gateways: 4,
        keys: 10,
        limit: Limit {
            burst: 2_000,
            ..Limit::per_second(100)
        },
        load: 4.0,
        seconds: 14,
        deaths: None,
    };
    let target = at(&redis.url());
    let told = run.go(&target, |begun| {
        until(begun, 9.0);
        redis.kill();
        time_passes(Duration::from_millis(100), "Redis is away");
        redis.restart();
        println!(
            "restarted after {:.2} s",
            begun.elapsed().as_secs_f64() - 9.0
        );
    });
    let beyond = 100.0 * told.beyond(&run.limit, 0.0..f64::MAX) / told.admitted();
    verdicts.add(8, "restarted empty at 4 x: % beyond", beyond, AtMost(2.0));
    let excess = 100.0 * told.excess(&run.limit);
    verdicts.add(
        8,
        "restarted empty at 4 x: excess, % of the burst",
        excess,
        AtMost(10.0),
    );
}

/// Item 9: Redis hangs for ten seconds.
pub fn away(verdicts: &mut Verdicts) {
    const GONE: f64 = 4.0;
    const BACK: f64 = 14.0;
    let redis = Redis::start();
    for (load, exact) in [(0.5, AtLeast(90.0)), (3.0, Within(40.0, 60.0))] {
        let timeout = Duration::from_millis(5);
        let limit = Limit {
            timeout,
            ..Limit::per_second(1_000)
        };
        let run = Run {
            gateways: 4,
            keys: 10,
            limit,
            load,
            seconds: 20,
            deaths: None,
        };
        let told = run.go(&at(&redis.url()), |begun| {
            until(begun, GONE);
            redis.pause();
            until(begun, BACK);
            redis.resume();
        });
        let of = |what: &str| format!("away for 10 s, local 50 %, {load} x: {what}");
        let part = |when: std::ops::Range<f64>| {
            100.0 * told.beyond(&run.limit, when.clone()) / told.admitted_within(when).max(1.0)
        };
        let share = 100.0 * told.admitted_within(GONE..BACK) / told.exact(&run.limit, GONE..BACK);
        verdicts.add(9, of("% of exact"), share, exact);
        verdicts.add(9, of("% beyond during"), part(GONE..BACK), AtMost(0.5));
        verdicts.add(9, of("% beyond after"), part(BACK..f64::MAX), AtMost(1.0));
        let full = load.min(1.0) * limit.rate() * run.keys as f64;
        // the first tenth of a second from which on the rate is at least 90 % of the expected one
        let slice = |number: i32| {
            let at = BACK + f64::from(number) / 10.0;
            told.admitted_within(at..at + 0.1) >= 0.9 * full / 10.0
        };
        let last_poor = (0..40).rev().find(|&number| !slice(number));
        let again = last_poor.map_or(0.0, |number| f64::from(number + 1) / 10.0);
        println!("full again in the slice that begins {again} s after its return");
        verdicts.add(9, of("s until full again"), again, AtMost(0.5));
        let (longest, most) = told.waits();
        println!(
            "the longest wait {:.1} ms, 99.9 % at most {:.1} ms; the machine woke clients up to {:.1} ms late",
            longest * 1e3,
            most * 1e3,
            told.late * 1e3
        );
        verdicts.add(9, of("ms waited, 99.9 %"), most * 1e3, AtMost(6.0));
        redis.run::<Value>(&["FLUSHALL"]);
    }
}

/// Item 12: one of a hundred calls and one of a hundred replies are lost.
pub fn lossy(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    for (when_down, most) in [
        (WhenDown::Closed, 0.0),
        (WhenDown::Local { fraction: 0.5 }, 0.1),
    ] {
        let proxy = Proxy::losing(
            std::net::SocketAddr::from(([127, 0, 0, 1], redis.port())),
            100,
        );
        let run = Run {
            gateways: 4,
            keys: 10,
            limit: Limit::per_second(100).when_down(when_down),
            load: 1.2,
            seconds: 15,
            deaths: None,
        };
        let told = run.go(&proxy.target(), |_| {});
        let beyond = 100.0 * told.beyond(&run.limit, 0.0..f64::MAX) / told.admitted();
        let what = format!(
            "1 % of calls and replies lost, {}: % beyond",
            when_down.as_str()
        );
        verdicts.add(12, what, beyond, AtMost(most));
        let exact = told.exact(&run.limit, 0.0..f64::MAX);
        println!(
            "{:.1} % of what one bucket admits; {} received 503",
            100.0 * told.admitted() / exact,
            told.count(Answer::Unavailable)
        );
        redis.run::<Value>(&["FLUSHALL"]);
    }
}

/// Item 10: 64 gateways ask for more than Redis can do, and it also hangs for a while.
pub fn slow(verdicts: &mut Verdicts) {
    // Redis is slowed to a quarter of its design speed, and the gateways' timeout is extended to
    // match
    const TIMEOUT: Duration = Duration::from_millis(20);
    const OUTAGE: f64 = 5.0;
    let redis = Redis::start();
    let to = std::net::SocketAddr::from(([127, 0, 0, 1], redis.port()));
    let run = |when_down, seconds| Run {
        gateways: 64,
        keys: 66,
        limit: Limit {
            timeout: TIMEOUT,
            ..Limit::per_second(100).when_down(when_down)
        },
        load: 0.8,
        seconds,
        deaths: None,
    };
    let proxy = Proxy::slow(to, Duration::ZERO, TIMEOUT);
    run(WhenDown::Closed, 5).go(&proxy.target(), |_| {});
    let asked = proxy.served().calls as f64 / 5.0;
    let service = Duration::from_secs_f64(1.0 / (0.8 * asked));
    println!(
        "64 gateways ask for {asked:.0} calls/s; Redis now does one in {service:?}, and is gone from 15 s to 20 s"
    );
    for (when_down, least) in [
        (WhenDown::Closed, 45.0),
        (WhenDown::Local { fraction: 0.5 }, 85.0),
    ] {
        redis.run::<Value>(&["FLUSHALL"]);
        let proxy = Proxy::slow(to, service, TIMEOUT);
        let run = run(when_down, 35);
        let told = run.go(&proxy.target(), |begun| {
            until(begun, 15.0);
            proxy.hang(Duration::from_secs_f64(OUTAGE));
        });
        let served = proxy.served();
        let part =
            |calls: u64| calls as f64 * service.as_secs_f64() / (run.seconds as f64 - OUTAGE);
        let useful = part(served.useful);
        let of = |what: &str| format!("80 % of the calls, {}: {what}", when_down.as_str());
        verdicts.add(10, of("% busy and useful"), 100.0 * useful, AtLeast(80.0));
        let share = 100.0 * told.admitted() / told.exact(&run.limit, 0.0..f64::MAX);
        verdicts.add(10, of("% of exact"), share, AtLeast(least));
        let beyond = told.beyond(&run.limit, 0.0..f64::MAX);
        println!(
            "{} calls, {} of them answered in time; {beyond} beyond; {} requests decided without Redis",
            served.calls,
            served.useful,
            told.alone()
        );
        println!(
            "{:.1} % of the time went into replies that came too late; Redis had nothing to do for {:.1} s",
            100.0 * part(served.calls - served.useful),
            served.idle.as_secs_f64()
        );
    }
}
