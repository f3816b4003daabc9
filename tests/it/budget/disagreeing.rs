//! Gateways that disagree with each other or with Redis's data: another amount, another algorithm,
//! an older format, another program's value under the key.

use redis::Value;

use super::{HOURLY, refilled, servers::from, shared};
use crate::support::{Gateway, Redis, Request, eventually};
use std::time::Instant;

fn passed(gateway: &Gateway, requests: usize) -> usize {
    let statuses = gateway.statuses(&Request::get("/"), requests);
    statuses.iter().filter(|&&status| status == 200).count()
}

#[test]
fn of_two_amounts_of_one_limit_each_gateway_keeps_its_own_and_both_count_together() {
    let (redis, begun) = (Redis::start(), Instant::now());
    let strict = "\nsync = \"strict\"";
    let small = shared(&redis, &format!("rate = \"300/h\"\nburst = 300{strict}"));
    let large = shared(&redis, &format!("{HOURLY}{strict}"));
    assert!(passed(&small, 200) == 200);
    let rest = passed(&large, 600);
    assert!((400..=400 + refilled(begun)).contains(&rest), "{rest}");
    assert!(passed(&small, 10) <= refilled(begun));
}

#[test]
fn what_another_program_stores_under_a_key_costs_that_key_only() {
    let redis = Redis::start();
    let gateway = Gateway::with(&format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nrate = \"40/d\"\nburst = 40\nscope = \"global\"\nsync = \"strict\"\n",
        redis.url()
    ))
    .start();
    assert_eq!(gateway.send(&from(1)).status, 200);
    let keys = redis.keys();
    let key = keys
        .iter()
        .find(|key| key.contains("{per_ip:"))
        .expect("a bucket");
    redis.run::<Value>(&["DEL", key]);
    redis.run::<Value>(&["RPUSH", key, "something else"]);
    let statuses = gateway.statuses(&from(1), 60);
    let alone = statuses.iter().filter(|&&status| status == 200).count();
    // half of what was left
    assert!((19..=20).contains(&alone), "{statuses:?}");
    let refused = gateway.metric("tidegate_redis_errors_total{kind=\"script\"}");
    assert!(refused >= 20.0, "{refused}");
    eventually("the log to say so", || {
        let log = gateway.stderr();
        if log.contains("Redis rejected a script") {
            Ok(())
        } else {
            Err(log)
        }
    });
    assert_eq!(gateway.metric("tidegate_degraded"), 0.0);
    // other keys still use Redis for each request
    assert_eq!(gateway.statuses(&from(2), 41)[38..], [200, 200, 429]);
}

#[test]
fn a_state_of_another_form_is_a_key_that_is_not_there() {
    let redis = Redis::start();
    let gateway = shared(&redis, "rate = \"5/d\"\nburst = 5\nsync = \"strict\"");
    assert_eq!(passed(&gateway, 2), 2);
    let keys = redis.keys();
    let key = keys
        .iter()
        .find(|key| key.contains("{shared:"))
        .expect("a bucket");
    redis.run::<Value>(&["SET", key, "as an older gateway wrote it", "PX", "60000"]);
    // from this gateway's memory, three of five, and not a full bucket
    assert_eq!(passed(&gateway, 6), 3);
    assert_eq!(gateway.metric("tidegate_redis_errors_total"), 0.0);
}

#[test]
fn deployments_with_prefixes_of_their_own_share_nothing() {
    let redis = Redis::start();
    for prefix in ["a", "a:b", "a:"] {
        let gateway = Gateway::with(&format!(
            "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\nkey_prefix = \"{prefix}\"\n\
             [gateway]\nlimits = [\"shared\"]\n\
             [limit.shared]\nkey = []\nrate = \"2/d\"\nburst = 2\nscope = \"global\"\nsync = \"strict\"\n",
            redis.url()
        ))
        .start();
        assert_eq!(
            gateway.statuses(&Request::get("/"), 3),
            [200, 200, 429],
            "{prefix}"
        );
        assert_eq!(gateway.metric("tidegate_lease_gateways"), 1.0, "{prefix}");
    }
}
