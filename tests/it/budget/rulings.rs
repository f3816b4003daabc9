//! A runtime override made at one gateway applies at all gateways that share a Redis.

use serde_json::{Value, json};

use super::shared;
use crate::support::{Gateway, Redis, Request, wait::eventually_eq};

const LIMIT: &str = "rate = \"1/h\"\nburst = 1\n[limit.here]\nkey = [\"ip\"]\nrate = \"1000/s\"\n\
                     [[route]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"origin\"\nlimits = [\"here\"]\n";
const KEY: &str = "/api/v1/limits/here/keys/ip=127.0.0.1/32";

fn becomes(gateway: &Gateway, what: &str, status: u16) {
    eventually_eq(what, status, || gateway.get("/").status);
}

#[test]
fn a_switch_a_ban_and_a_boost_reach_all_gateways_and_end_at_all() {
    let redis = Redis::start();
    let [one, other] = [0, 1].map(|_| shared(&redis, LIMIT));
    eventually_eq("the burst to be spent", (429, 429), || {
        (one.get("/").status, other.get("/").status)
    });

    let killed = one.change("PUT", "/api/v1/kill", &json!({ "for": "15m" }));
    assert_eq!(killed["reach"], "all gateways");
    assert_eq!(one.get("/").status, 200, "here at once");
    becomes(&other, "the switch to arrive", 200);
    other.change("DELETE", "/api/v1/kill", &Value::Null);
    becomes(&one, "the switch to be taken back", 429);

    one.change(
        "PUT",
        "/api/v1/limits/shared/mode",
        &json!({ "mode": "shadow", "for": "15m" }),
    );
    becomes(&other, "the mode to arrive", 200);
    other.change("POST", &format!("{KEY}/ban"), &json!({ "for": "1h" }));
    becomes(&one, "the ban to arrive", 429);

    // a gateway that starts later reads earlier overrides
    let late = shared(&redis, LIMIT);
    eventually_eq(
        "the ban and the mode to be read",
        (json!(true), json!("shadow")),
        || {
            let banned = late.look(KEY)["banned"].clone();
            (banned, late.look("/api/v1/limits/shared")["mode"].clone())
        },
    );
    assert_eq!(late.get("/").status, 429);
    one.change("DELETE", KEY, &Value::Null);
    for gateway in [&one, &other, &late] {
        becomes(gateway, "the ban to be lifted", 200);
    }

    one.change(
        "POST",
        &format!("{KEY}/boost"),
        &json!({ "amount": 30, "for": "1h" }),
    );
    eventually_eq("each to have its part", json!(10), || {
        late.look(KEY)["boost"]["amount"].clone()
    });
    late.statuses(&Request::get("/"), 12);
    assert_eq!(late.look(KEY)["boost"], Value::Null, "it is spent");
    // other overrides must not grant it again
    one.change(
        "PUT",
        "/api/v1/limits/here/mode",
        &json!({ "mode": "shadow", "for": "15m" }),
    );
    eventually_eq("the news", json!("shadow"), || {
        late.look("/api/v1/limits/here")["mode"].clone()
    });
    assert_eq!(late.look(KEY)["boost"], Value::Null);
}

#[test]
fn what_is_ruled_while_redis_is_away_holds_here_at_once_and_elsewhere_when_it_is_back() {
    let mut redis = Redis::start();
    let [one, other] = [0, 1].map(|_| shared(&redis, LIMIT));
    one.change(
        "PUT",
        "/api/v1/limits/here/mode",
        &json!({ "mode": "shadow", "for": "15m" }),
    );
    let here = |gateway: &Gateway| gateway.look("/api/v1/limits/here")["mode"].clone();
    eventually_eq("the mode to arrive", json!("shadow"), || here(&other));
    redis.kill();
    one.change("POST", &format!("{KEY}/ban"), &json!({ "for": "1h" }));
    assert_eq!(one.look(KEY)["banned"], true);
    // it restarts empty
    redis.restart();
    eventually_eq("the ban to arrive", json!(true), || {
        other.look(KEY)["banned"].clone()
    });
    eventually_eq(
        "what was ruled before",
        (json!("shadow"), json!("shadow")),
        || (here(&one), here(&other)),
    );
}
