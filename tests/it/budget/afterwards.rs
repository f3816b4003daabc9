//! Shared limits that are charged after the answer: `count_status` and `charge_rejected`.

use std::time::Duration;

use super::{failing::until_given_up, shared, waiting};
use crate::support::{Gateway, Origin, Redis, Request, eventually, wait::time_passes};

/// An origin that answers 401 to `/wrong` and 200 to all else.
fn login() -> Origin {
    Origin::new(|exchange| {
        exchange.read_body()?;
        let status = match exchange.request.target.as_str() {
            "/wrong" => 401,
            _ => 200,
        };
        exchange.respond(status, &[], b"")
    })
}

fn guarding(redis: &Redis, origin: &Origin, limit: &str) -> Gateway {
    Gateway::with(&format!(
        "[redis]\nurl = {:?}\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"failed\"]\n\
         [limit.failed]\nkey = [\"ip\"]\nscope = \"global\"\n{limit}\n",
        redis.url()
    ))
    .upstream(origin)
    .start()
}

const ANSWERED: &str = "tidegate_redis_calls_total{outcome=\"ok\"}";

/// How many of these attempts reach the origin before one is refused, by turns at each gateway.
/// Where Redis is asked, each attempt waits until it has answered the charge of the one before.
fn attempts(gateways: &[Gateway], most: usize, waits: bool) -> usize {
    let by_turns = gateways.iter().cycle().take(most);
    by_turns
        .take_while(|gateway| {
            let answered = gateway.metric(ANSWERED);
            let is_admitted = gateway.get("/wrong").status == 401;
            if is_admitted && waits {
                eventually("the charge to be answered", || {
                    match gateway.metric(ANSWERED) > answered {
                        true => Ok(()),
                        false => Err("it is not".to_owned()),
                    }
                });
            }
            is_admitted
        })
        .count()
}

#[test]
fn answers_that_count_are_counted_together() {
    for (algorithm, sync) in [
        ("token_bucket", "lease"),
        ("token_bucket", "strict"),
        ("fixed_window", "lease"),
        ("fixed_window", "strict"),
        ("sliding_window", "lease"),
        ("sliding_log", "strict"),
    ] {
        let (redis, origin) = (Redis::start(), login());
        let burst = match algorithm {
            "token_bucket" => "\nburst = 10",
            _ => "",
        };
        let limit = format!(
            "algorithm = \"{algorithm}\"\nsync = \"{sync}\"\nrate = \"10/d\"{burst}\n\
             count_status = [401]"
        );
        let gateways = [
            guarding(&redis, &origin, &limit),
            guarding(&redis, &origin, &limit),
        ];
        for gateway in &gateways {
            assert_eq!(gateway.statuses(&Request::get("/right"), 20), [200; 20]);
        }
        let admitted = attempts(&gateways, 40, true);
        // a gateway learns what others have counted with its own next charge
        assert!(
            (10..=12).contains(&admitted),
            "{algorithm} {sync}: {admitted} of 10 wrong passwords"
        );
        eventually("both gateways to refuse", || {
            let statuses: Vec<u16> = gateways
                .iter()
                .map(|one| one.get("/wrong").status)
                .collect();
            match statuses[..] {
                [429, 429] => Ok(()),
                _ => Err(format!("{algorithm} {sync}: {statuses:?}")),
            }
        });
        let refused = gateways[0].get("/right");
        assert_eq!(refused.status, 429, "spent for every request");
        assert!(refused.retry_after() > Some(60), "{algorithm} {sync}");
    }
}

#[test]
fn answers_that_nobody_counts_make_no_call() {
    let (redis, origin) = (Redis::start(), login());
    let limit = "rate = \"10/d\"\nburst = 10\ncount_status = [401]";
    let gateway = guarding(&redis, &origin, limit);
    assert_eq!(gateway.statuses(&Request::get("/right"), 50), [200; 50]);
    assert_eq!(gateway.metric("tidegate_lease_calls_total"), 0.0);
    assert_eq!(gateway.get("/wrong").status, 401);
    gateway.wait_for_metric("tidegate_lease_calls_total", 1.0);
}

#[test]
fn without_redis_answers_are_counted_by_the_fallback() {
    let (mut redis, origin) = (Redis::start(), login());
    let limit = "rate = \"10/d\"\nburst = 10\ncount_status = [401]\nlocal_fraction = 0.5";
    let gateway = guarding(&redis, &origin, limit);
    assert_eq!(gateway.get("/wrong").status, 401);
    gateway.wait_for_metric("tidegate_lease_calls_total", 1.0);
    redis.kill();
    eventually("the gateway to notice", || {
        match gateway.metric("tidegate_degraded") {
            1.0 => Ok(()),
            other => Err(format!("degraded is {other}")),
        }
    });
    let admitted = attempts(std::slice::from_ref(&gateway), 20, false);
    assert!((3..=5).contains(&admitted), "{admitted} of half of nine");
    let limit =
        format!("{limit}\non_redis_down = \"closed\"").replace("local_fraction = 0.5\n", "");
    let closed = guarding(&redis, &origin, &limit);
    assert_eq!(closed.get("/right").status, 503);
}

#[test]
fn rejections_that_count_are_counted_together() {
    let redis = Redis::start();
    let limit = "rate = \"5/h\"\nburst = 5\nsync = \"strict\"\ncharge_rejected = true";
    let gateways = [shared(&redis, limit), shared(&redis, limit)];
    assert_eq!(gateways[0].statuses(&Request::get("/"), 5), [200; 5]);
    let first = gateways[1].get("/");
    assert_eq!(first.status, 429);
    // each rejection charges what has refilled: the bucket stays empty
    time_passes(Duration::from_millis(100), "the bucket refills");
    let later = gateways[0].get("/");
    assert_eq!(later.status, 429);
    assert!(
        later.retry_after() >= Some(719),
        "{:?}",
        later.retry_after()
    );
}

#[test]
fn rejections_at_one_gateway_keep_a_client_out_at_the_other() {
    // one unit refills in 2 s: a client that goes on knocking never gets it
    let redis = Redis::start();
    let limit = |charges: bool| {
        format!("rate = \"30/min\"\nburst = 1\nsync = \"strict\"\ncharge_rejected = {charges}")
    };
    for charges in [true, false] {
        redis.run::<()>(&["FLUSHALL"]);
        let gateways = [
            shared(&redis, &limit(charges)),
            shared(&redis, &limit(charges)),
        ];
        assert_eq!(gateways[0].get("/").status, 200);
        let mut admitted = 0;
        for _ in 0..25 {
            time_passes(Duration::from_millis(100), "the bucket refills");
            admitted += usize::from(gateways[0].get("/").status == 200);
        }
        let elsewhere = gateways[1].get("/").status;
        match charges {
            true => assert_eq!((admitted, elsewhere), (0, 429)),
            false => assert_eq!(admitted, 1),
        }
    }
}

#[test]
fn a_penalty_goes_on_without_redis() {
    let mut redis = Redis::start();
    let limit = "rate = \"100/h\"\nburst = 100\ncharge_rejected = true";
    let gateway = waiting("200ms", &format!("url = {:?}", redis.url()), limit);
    assert_eq!(gateway.get("/").status, 200);
    redis.kill();
    until_given_up(&gateway);
    let statuses = gateway.statuses(&Request::get("/"), 120);
    assert!(
        statuses.contains(&429) && !statuses.contains(&503),
        "{statuses:?}"
    );
}
