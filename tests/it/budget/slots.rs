//! Requests in flight, counted over all gateways: a request holds a slot until its response ends,
//! and always returns it.

use std::time::Duration;

use redis::Value;

use crate::support::{
    Client, Gateway, Origin, Redis, Request, eventually,
    wait::{Gate, time_passes, within},
};

/// An origin whose responses to `/slow` end when the gate opens or their client has left.
fn slow_origin() -> (Origin, Gate) {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        if exchange.request.target != "/slow" {
            return exchange.respond(200, &[], b"ok");
        }
        exchange.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nsl\r\n")?;
        exchange.wait_for(&held)?;
        exchange.write(b"2\r\now\r\n0\r\n\r\n")
    });
    (origin, gate)
}

fn gateway(redis: &Redis, origin: &Origin, limit: &str) -> Gateway {
    Gateway::with(&format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"slots\"]\n\
         [limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nscope = \"global\"\n{limit}\n",
        redis.url()
    ))
    .upstream(origin)
    .start()
}

/// Sends a request whose response does not end; returns the client that holds its slot, or `None`
/// if it was refused.
fn hold(gateway: &Gateway) -> Option<Client> {
    let mut client = gateway.connect();
    let head = client.begin(&Request::get("/slow"));
    assert!([200, 429].contains(&head.status), "{}", head.status);
    (head.status == 200).then_some(client)
}

/// All admitted clients, of `each` sent to each gateway in turn.
fn hold_all(gateways: &[Gateway], each: usize) -> Vec<Client> {
    let in_turn = (0..each).flat_map(|_| gateways);
    in_turn.filter_map(hold).collect()
}

#[test]
fn no_more_requests_than_the_limit_are_under_way_over_all_gateways() {
    for sync in ["lease", "strict"] {
        let (redis, (origin, gate)) = (Redis::start(), slow_origin());
        let limit = format!("limit = 5\nsync = \"{sync}\"");
        let gateways: Vec<Gateway> = (0..3).map(|_| gateway(&redis, &origin, &limit)).collect();
        let mut held = hold_all(&gateways, 4);
        assert_eq!(held.len(), 5, "{sync}");
        let refused = gateways[0].get("/");
        assert_eq!((refused.status, refused.retry_after()), (429, Some(1)));
        // one client leaves: its slot goes to the next request, at any gateway
        drop(held.pop());
        eventually("the slot to be free again", || {
            let next = gateways.iter().find_map(hold);
            held.push(next.ok_or("refused")?);
            Ok(())
        });
        assert_eq!(hold_all(&gateways, 1).len(), 0, "{sync}");
        gate.open();
        drop(held);
        eventually("all slots to be free again", || {
            let mut free = 0;
            for gateway in &gateways {
                free += gateway
                    .statuses(&Request::get("/"), 5)
                    .into_iter()
                    .filter(|&status| status == 200)
                    .count();
            }
            if free == 15 {
                Ok(())
            } else {
                Err(format!("{free} of 15"))
            }
        });
    }
}

#[test]
fn a_busy_key_costs_next_to_no_calls_and_an_idle_one_leaves_nothing_behind() {
    let (redis, origin) = (Redis::start(), Origin::ok());
    let gateway = gateway(&redis, &origin, "limit = 100");
    let statuses = gateway.statuses(&Request::get("/"), 1_000);
    assert!(statuses.iter().all(|&status| status == 200));
    let calls = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
    assert!(calls <= 100.0, "{calls} calls for 1000 requests");
    eventually("the slot to go back", || {
        let moved = |how| gateway.metric(&format!("tidegate_lease_moved_total{{how=\"{how}\"}}"));
        match (moved("granted"), moved("returned")) {
            (granted, returned) if granted == returned => Ok(()),
            both => Err(format!("{both:?}")),
        }
    });
    for key in redis.keys() {
        let left: i64 = redis.run(&["PTTL", &key]);
        assert!((1..=20_000).contains(&left), "{key} lives for {left} ms");
    }
    gateway.wait_for_metric("tidegate_lease_keys", 0.0);
}

#[test]
fn a_gateway_that_is_killed_frees_its_slots_after_one_life() {
    let (redis, (origin, _gate)) = (Redis::start(), slow_origin());
    let mut dies = gateway(&redis, &origin, "limit = 3");
    let lives = gateway(&redis, &origin, "limit = 3");
    let held: Vec<Client> = (0..3).filter_map(|_| hold(&dies)).collect();
    assert_eq!(held.len(), 3);
    assert!(hold(&lives).is_none());
    dies.signal("KILL");
    dies.wait();
    let mut all = Vec::new();
    within(
        Duration::from_secs(40),
        "the slots of dead gateways to be free",
        || {
            all.extend(hold(&lives));
            if all.len() == 3 {
                Ok(())
            } else {
                Err(format!("{} of 3", all.len()))
            }
        },
    );
    assert!(hold(&lives).is_none(), "three, and not one more");
}

#[test]
fn a_request_that_lasts_longer_than_a_declaration_keeps_its_slot() {
    let (redis, (origin, _gate)) = (Redis::start(), slow_origin());
    let gateways = [
        gateway(&redis, &origin, "limit = 2"),
        gateway(&redis, &origin, "limit = 2"),
    ];
    let _held = hold_all(&gateways[..1], 2);
    for _ in 0..13 {
        time_passes(
            Duration::from_secs(1),
            "a declaration without renewal would have lapsed",
        );
        assert!(hold(&gateways[1]).is_none());
    }
}

#[test]
fn a_redis_that_has_forgotten_them_is_told_what_is_held_within_seconds() {
    let (redis, (origin, _gate)) = (Redis::start(), slow_origin());
    let gateway = gateway(&redis, &origin, "limit = 3");
    let _held = hold_all(std::slice::from_ref(&gateway), 3);
    redis.run::<Value>(&["FLUSHALL"]);
    let slots = || redis.keys().into_iter().any(|key| key.contains("{slots:"));
    eventually("it to be declared again", || {
        slots().then_some(()).ok_or_else(String::new)
    });
    assert!(hold(&gateway).is_none());
}

#[test]
fn without_redis_slots_go_on_with_a_part_or_open_or_closed_and_are_counted_when_it_is_back() {
    for (behaviour, expected) in [("local", 5), ("open", 12), ("closed", 0)] {
        let (mut redis, (origin, gate)) = (Redis::start(), slow_origin());
        redis.kill();
        let limit = format!("limit = 10\non_redis_down = \"{behaviour}\"");
        let gateway = gateway(&redis, &origin, &limit);
        let mut held = Vec::new();
        for _ in 0..12 {
            let mut client = gateway.connect();
            match client.begin(&Request::get("/slow")).status {
                200 => held.push(client),
                429 if behaviour == "local" => {}
                503 if behaviour == "closed" => {}
                other => panic!("{behaviour}: {other}"),
            }
        }
        assert_eq!(held.len(), expected, "{behaviour}");
        redis.restart();
        gateway.wait_for_metric("tidegate_degraded", 0.0);
        if behaviour == "local" {
            // the five in flight are declared, five more fit
            eventually("the other five to be admitted", || {
                held.extend(hold(&gateway));
                if held.len() == 10 {
                    Ok(())
                } else {
                    Err(format!("{} of 10", held.len()))
                }
            });
            assert!(hold(&gateway).is_none());
        }
        gate.open();
    }
}

#[test]
fn a_slot_of_a_request_that_another_limit_refuses_is_free_at_once() {
    let (redis, origin) = (Redis::start(), Origin::ok());
    let gateway = Gateway::with(&format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\n\
         [gateway]\nlimits = [\"slots\", \"all\"]\n\
         [limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = 1\nscope = \"global\"\n\
         [limit.all]\nkey = []\nrate = \"3/d\"\nburst = 3\n",
        redis.url()
    ))
    .upstream(&origin)
    .start();
    let statuses = gateway.statuses(&Request::get("/"), 20);
    assert_eq!(statuses[..4], [200, 200, 200, 429]);
    // refused by the rate each time, never for lack of a slot
    let refused = gateway.get("/");
    assert_eq!(refused.status, 429);
    assert!(refused.text().contains("\"all\""), "{}", refused.text());
}

#[test]
fn who_comes_alone_is_not_refused_a_slot_that_is_on_its_way_back() {
    let (redis, origin) = (Redis::start(), Origin::ok());
    let gateway = gateway(&redis, &origin, "limit = 1");
    let mut client = gateway.connect();
    let mut ask = || assert_eq!(client.send(&Request::get("/")).status, 200);
    for turn in 0..40 {
        ask();
        // a free slot is returned after some 20 ms, and a refusal is remembered for up to 25
        redis.run::<Value>(&["CLIENT", "PAUSE", "40", "ALL"]);
        time_passes(
            Duration::from_millis(20 + turn % 5),
            "the slot is on its way back, or just there",
        );
        ask();
    }
}

#[test]
fn a_gateway_that_is_stopped_gives_its_slots_back_at_once() {
    let (redis, origin) = (Redis::start(), Origin::ok());
    let mut stops = gateway(&redis, &origin, "limit = 20");
    assert_eq!(stops.get("/").status, 200);
    stops.signal("TERM");
    assert!(stops.wait().success());
    let (origin, _gate) = slow_origin();
    let goes_on = gateway(&redis, &origin, "limit = 20");
    let held = hold_all(std::slice::from_ref(&goes_on), 20);
    assert_eq!(held.len(), 20);
}

const SLOTS: &str = concat!(
    include_str!("../../../src/budget/requests.lua"),
    include_str!("../../../src/budget/slots.lua")
);
const KEY: &str = "tidegate:{test:slots}";

/// One call of the script: granted, left, whether others want slots, held by all.
fn declare(
    redis: &Redis,
    who: &str,
    held: u64,
    need: impl ToString,
    number: u64,
    life_ms: u64,
) -> [i64; 4] {
    let need = need.to_string();
    let [held, number] = [held, number].map(|number| number.to_string());
    let life = (life_ms * 1000).to_string();
    let answer: Vec<i64> = redis.run(&[
        "EVAL", SLOTS, "1", KEY, who, "10", &held, &need, &life, &number,
    ]);
    let [granted, 0, 0, 0, left, wanted, 0, sum, ..] = answer[..] else {
        panic!("{answer:?}")
    };
    [granted, left, i64::from(wanted > 0), sum]
}

const LONG: u64 = 100_000;

#[test]
fn a_declaration_made_twice_changes_nothing_and_a_late_one_neither() {
    let redis = Redis::start();
    assert_eq!(declare(&redis, "a", 0, 4, 1, LONG), [4, 6, 0, 4]);
    assert_eq!(declare(&redis, "a", 4, 0, 2, LONG), [0, 6, 0, 4]);
    assert_eq!(declare(&redis, "a", 4, 0, 2, LONG), [0, 6, 0, 4], "twice");
    assert_eq!(
        declare(&redis, "b", 0, 8, 1, LONG),
        [6, 0, 1, 10],
        "what is left"
    );
    assert_eq!(declare(&redis, "a", 0, 4, 1, LONG), [0, 0, 1, 10], "late");
    // the next declaration frees what a lost reply granted
    assert_eq!(declare(&redis, "b", 0, 0, 2, LONG), [0, 6, 1, 4]);
    assert_eq!(declare(&redis, "a", 0, 0, 3, LONG), [0, 10, 1, 0]);
}

#[test]
fn a_request_gets_all_of_its_slots_or_none_and_leaves_what_it_cannot_have_to_others() {
    let redis = Redis::start();
    assert_eq!(declare(&redis, "a", 0, 7, 1, LONG), [7, 3, 0, 7]);
    // requests for 4, 1, 5 and 1 slots, with three available
    let answer = declare(&redis, "b", 0, "4*1 1*1 5*1 1*1", 1, LONG);
    assert_eq!(answer, [2, 1, 1, 9]);
    assert_eq!(declare(&redis, "c", 0, "4*2", 1, LONG), [0, 1, 1, 9]);
    assert_eq!(declare(&redis, "d", 0, "1*1", 1, LONG), [1, 0, 1, 10]);
}

#[test]
fn what_is_held_beyond_the_limit_is_counted_and_nothing_more_is_granted() {
    let redis = Redis::start();
    assert_eq!(declare(&redis, "a", 25, 1, 1, LONG), [0, 0, 1, 25]);
    assert_eq!(declare(&redis, "b", 0, 1, 1, LONG), [0, 0, 1, 25]);
    assert_eq!(declare(&redis, "a", 9, 0, 2, LONG), [0, 1, 1, 9]);
}

#[test]
fn a_declaration_is_over_after_its_life_and_those_of_others_are_not() {
    let redis = Redis::start();
    declare(&redis, "dead", 0, 7, 1, 300);
    declare(&redis, "lives", 0, 2, 1, LONG);
    eventually("the dead gateway's slots to be free", || {
        let answer = declare(&redis, "lives", 2, 0, 2, LONG);
        if answer == [0, 8, 0, 2] {
            Ok(())
        } else {
            Err(format!("{answer:?}"))
        }
    });
    let left: i64 = redis.run(&["PTTL", KEY]);
    assert!((1..=2 * 100_000).contains(&left), "{left}");
    let bytes: i64 = redis.run(&["MEMORY", "USAGE", KEY]);
    assert!(bytes <= 320, "{bytes} bytes for one gateway and the sum");
}

#[test]
fn a_clock_that_goes_back_an_hour_does_not_keep_the_slots_of_the_dead_for_an_hour() {
    let redis = Redis::start();
    declare(&redis, "dead", 0, 7, 1, LONG);
    let ahead = "for _, name in ipairs({ARGV[1], ''}) do
        local n, over, last = struct.unpack('<ddd', redis.call('HGET', KEYS[1], name))
        redis.call('HSET', KEYS[1], name, struct.pack('<ddd', n, over + 3600e6, last)) end
        return redis.status_reply('OK')";
    redis.run::<Value>(&["EVAL", ahead, "1", KEY, "dead"]);
    assert_eq!(declare(&redis, "lives", 0, 0, 1, 200), [0, 3, 0, 7]);
    eventually("they to be free after one life", || {
        let answer = declare(&redis, "lives", 0, 0, 2, 200);
        if answer == [0, 10, 0, 0] {
            Ok(())
        } else {
            Err(format!("{answer:?}"))
        }
    });
}
