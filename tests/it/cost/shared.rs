//! Limits on costs that gateways share.

use std::{thread, time::Duration};

use serde_json::json;

use super::{ask, balance, provider, reporting, units};
use crate::support::{Gateway, Origin, Redis, eventually, wait::time_passes};

fn sharing(redis: &Redis, origin: &Origin, limit: &str) -> Gateway {
    Gateway::with(&format!(
        "[redis]\nurl = {:?}\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"tokens\"]\n\
         [limit.tokens]\nkey = []\nscope = \"global\"\n{limit}\n",
        redis.url()
    ))
    .upstream(origin)
    .start()
}

#[test]
fn what_one_gateway_did_not_use_the_other_can() {
    for sync in ["lease", "strict"] {
        for algorithm in ["token_bucket", "fixed_window", "sliding_window"] {
            let (redis, origin) = (Redis::start(), provider());
            let limit = format!(
                "algorithm = \"{algorithm}\"\nrate = \"10000/d\"\nsync = \"{sync}\"\n\
                 cost = {{ preset = \"openai\", estimate = 4_000 }}"
            );
            let gateways = [
                sharing(&redis, &origin, &limit),
                sharing(&redis, &origin, &limit),
            ];
            // 18 estimates of 4 000 in 10 000, of which each uses 500
            for round in 0..18 {
                let gateway = &gateways[round % 2];
                eventually("the refund to arrive", || {
                    match gateway.send(&reporting(500)).status {
                        200 => Ok(()),
                        status => Err(format!("{algorithm} {sync} {round}: {status}")),
                    }
                });
                if round >= 11 {
                    break;
                }
            }
            for gateway in &gateways {
                balance(gateway);
            }
            let used: u64 = gateways
                .iter()
                .map(|gateway| units(gateway, "settled"))
                .sum();
            assert_eq!(used, 6_000, "{algorithm} {sync}");
        }
    }
}

#[test]
fn what_one_gateway_used_beyond_its_estimate_refuses_at_the_other() {
    for sync in ["lease", "strict"] {
        let (redis, origin) = (Redis::start(), provider());
        let limit = format!(
            "rate = \"10000/d\"\nsync = \"{sync}\"\n\
             cost = {{ preset = \"openai\", estimate = 100 }}"
        );
        let gateways = [
            sharing(&redis, &origin, &limit),
            sharing(&redis, &origin, &limit),
        ];
        assert_eq!(gateways[0].send(&reporting(15_000)).status, 200);
        eventually("the other gateway to refuse", || {
            match gateways[1].send(&reporting(0)).status {
                429 => Ok(()),
                status => Err(format!("{sync}: {status}")),
            }
        });
        let refused = gateways[0].send(&reporting(1));
        assert_eq!(refused.status, 429, "{sync}");
        // it owes half of what refills in a day
        assert!(
            refused.retry_after() > Some(40_000),
            "{:?}",
            refused.retry_after()
        );
    }
}

#[test]
fn streams_at_two_gateways_together_keep_the_limit() {
    let (redis, origin) = (Redis::start(), provider());
    let limit = "rate = \"10000/d\"\ncost = { preset = \"openai\", estimate = 200, \
                 count = { input = 0 } }";
    let gateways = [
        sharing(&redis, &origin, limit),
        sharing(&redis, &origin, limit),
    ];
    let stream = ask(&json!({"events": 400, "pace_ms": 2, "completion": 400}));
    let admitted: usize = thread::scope(|scope| {
        let clients: Vec<_> = gateways
            .iter()
            .flat_map(|gateway| (0..6).map(move |_| gateway))
            .map(|gateway| {
                let stream = &stream;
                scope.spawn(move || {
                    let sent = (0..6).map(|_| gateway.send(stream).status);
                    sent.filter(|&status| status == 200).count()
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("a client"))
            .sum()
    });
    for gateway in &gateways {
        balance(gateway);
    }
    let used = 400 * admitted as u64;
    // what is in flight when the budget runs out: twelve streams, of which each may lack half
    assert!((9_000..=12_400).contains(&used), "{used} of 10 000");
    let settled: u64 = gateways
        .iter()
        .map(|gateway| units(gateway, "settled"))
        .sum();
    assert_eq!(settled, used);
}

#[test]
fn a_redis_that_is_gone_in_mid_stream_fails_no_request() {
    let (mut redis, origin) = (Redis::start(), provider());
    let limit = "rate = \"100000/d\"\ncost = { preset = \"openai\", estimate = 100 }";
    let gateway = sharing(&redis, &origin, limit);
    let stream = ask(&json!({"events": 600, "pace_ms": 5, "completion": 600}));
    thread::scope(|scope| {
        let streaming = scope.spawn(|| gateway.send(&stream).status);
        time_passes(Duration::from_millis(500), "the stream goes on");
        redis.kill();
        assert_eq!(streaming.join().expect("a stream"), 200);
    });
    assert_eq!(gateway.send(&reporting(50)).status, 200);
    balance(&gateway);
    assert_eq!(units(&gateway, "settled"), 650);
}
