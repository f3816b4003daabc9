//! Slack: keys that are new to a gateway pass before Redis is asked, and are charged when it is.

use super::shared;
use crate::support::{Gateway, Redis, Request, eventually};

fn calls(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_lease_calls_total{limit=\"shared\"}")
}

fn passed(gateway: &Gateway, requests: usize) -> usize {
    let statuses = gateway.statuses(&Request::get("/"), requests);
    statuses.iter().filter(|&&status| status == 200).count()
}

const DAILY: &str = "rate = \"100/d\"\nburst = 100\nslack = 0.1";

#[test]
fn a_key_that_asks_seldom_costs_no_call_and_is_charged_when_it_asks_more() {
    let redis = Redis::start();
    let gateway = shared(&redis, DAILY);
    assert_eq!(passed(&gateway, 10), 10);
    assert_eq!(calls(&gateway), 0.0);
    let buckets = || {
        redis
            .keys()
            .iter()
            .filter(|key| key.contains("{shared:"))
            .count()
    };
    assert_eq!(buckets(), 0);
    let mut all = 10;
    eventually("the rest to be admitted", || {
        all += passed(&gateway, 20);
        match all {
            98.. => Ok(()),
            all => Err(format!("{all} of 100")),
        }
    });
    assert!(calls(&gateway) > 0.0);
    assert!(all <= 101, "{all} of 100");
    let charged = gateway.metric("tidegate_lease_moved_total{limit=\"shared\",how=\"debt\"}");
    assert_eq!(charged, 10.0);
}

#[test]
fn each_gateway_exceeds_a_spent_limit_by_its_part_of_the_slack_and_no_more() {
    let redis = Redis::start();
    let gateways = [shared(&redis, DAILY), shared(&redis, DAILY)];
    for gateway in &gateways {
        gateway.wait_for_metric("tidegate_lease_gateways", 2.0);
    }
    let mut all = 0;
    eventually("the limit to be spent", || {
        all += passed(&gateways[0], 40);
        match all {
            98.. => Ok(()),
            all => Err(format!("{all} of 100")),
        }
    });
    let more = passed(&gateways[1], 40);
    // a tenth of it, for two gateways; and what the first left
    assert!((5..=7).contains(&more), "{more} passed beyond {all}");
}

#[test]
fn what_another_limit_refuses_uses_up_no_slack() {
    let redis = Redis::start();
    let gateway = Gateway::with(&format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\n\
         [[user]]\nfrom = \"header\"\nheader = \"x-user-id\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [gateway]\nlimits = [\"shared\", \"per_user\"]\n\
         [limit.shared]\nkey = []\nscope = \"global\"\n{DAILY}\n\
         [limit.per_user]\nkey = [\"user\"]\nrate = \"1/d\"\nburst = 1\nscope = \"global\"\nsync = \"strict\"\n",
        redis.url()
    ))
    .start();
    for user in 0..10 {
        let from = Request::get("/").header("x-user-id", &format!("user-{user}"));
        assert_eq!(gateway.statuses(&from, 2), [200, 429], "{user}");
    }
    assert_eq!(calls(&gateway), 0.0, "ten were admitted, and ten refused");
}
