//! One budget for several gateways, in a Redis of the test's own.

mod afterwards;
mod aggregate;
mod boundaries;
mod changes;
mod chaos;
mod costs;
mod disagreeing;
mod failing;
mod hostile;
mod losses;
mod recovery;
mod rulings;
mod scripts;
mod secured;
mod servers;
mod slack;
mod slots;
mod told;

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use crate::support::{Client, Gateway, Redis, Request, eventually, wait::time_passes};

/// Others have to find out and agree first.
const FAILOVER: Duration = Duration::from_secs(40);

/// A shared limit on everybody together, with these keys besides.
fn shared(redis: &Redis, limit: &str) -> Gateway {
    shared_at(&redis.url(), limit)
}

fn shared_at(url: &str, limit: &str) -> Gateway {
    shared_by(&format!("url = {url:?}"), limit)
}

/// The same with these keys of `[redis]`.
fn shared_by(redis: &str, limit: &str) -> Gateway {
    waiting("1s", redis, limit)
}

/// The same, where requests wait so long for Redis. A busy machine is not a slow Redis: it is longer than by default, and where
/// nothing is to fail as long as it may be.
fn waiting(timeout: &str, redis: &str, limit: &str) -> Gateway {
    Gateway::with(&format!(
        "[redis]\n{redis}\ntimeout = \"{timeout}\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"shared\"]\n\
         [limit.shared]\nkey = []\nscope = \"global\"\n{limit}\n"
    ))
    .start()
}

/// Statuses and how often each was given, for this many requests to each gateway over `clients` connections each, all at once.
fn burst(gateways: &[Gateway], each: usize, clients: usize) -> BTreeMap<u16, usize> {
    let send = |gateway: &Gateway| {
        let address = gateway.address();
        thread::spawn(move || {
            let mut client = Client::connect(address);
            let request = Request::get("/");
            (0..each / clients)
                .map(|_| client.send(&request).status)
                .collect::<Vec<u16>>()
        })
    };
    let running: Vec<_> = gateways
        .iter()
        .flat_map(|gateway| (0..clients).map(move |_| send(gateway)))
        .collect();
    let mut statuses = BTreeMap::new();
    for client in running {
        for status in client.join().expect("a client") {
            *statuses.entry(status).or_default() += 1;
        }
    }
    statuses
}

fn admitted(statuses: &BTreeMap<u16, usize>) -> usize {
    let other = statuses.keys().find(|status| ![200, 429].contains(status));
    assert_eq!(other, None, "{statuses:?}");
    statuses.get(&200).copied().unwrap_or(0)
}

/// 600 an hour, all at once if need be.
const HOURLY: &str = "rate = \"600/h\"\nburst = 600";

/// What refills of it since then.
fn refilled(begun: Instant) -> usize {
    (begun.elapsed().as_secs() / 6) as usize + 1
}

#[test]
fn three_gateways_admit_a_burst_of_six_hundred_together_and_no_more() {
    let redis = Redis::start();
    let gateways: Vec<Gateway> = (0..3).map(|_| shared(&redis, HOURLY)).collect();
    let begun = Instant::now();
    let first = admitted(&burst(&gateways, 500, 10));
    assert!(first <= 600 + refilled(begun), "{first} were admitted");
    assert!(first >= 450, "{first} were admitted at once");
    // what a gateway kept for requests that did not come goes back
    let mut all = first;
    eventually("the rest to be admitted", || {
        all += admitted(&burst(&gateways, 8, 2));
        if all >= 590 {
            Ok(())
        } else {
            Err(format!("{all} of 600"))
        }
    });
    assert!(all <= 600 + refilled(begun), "{all} were admitted");
    println!("{first} of 600 at once, {all} after {:?}", begun.elapsed());
}

#[test]
fn a_strict_limit_is_kept_exactly() {
    let redis = Redis::start();
    let strict = format!("{HOURLY}\nsync = \"strict\"");
    let gateways: Vec<Gateway> = (0..3).map(|_| shared(&redis, &strict)).collect();
    let begun = Instant::now();
    let all = admitted(&burst(&gateways, 500, 10));
    assert!(
        (600..=600 + refilled(begun)).contains(&all),
        "{all} were admitted"
    );
}

#[test]
fn every_algorithm_is_kept_together() {
    for (algorithm, sync) in [
        ("gcra", "lease"),
        ("fixed_window", "lease"),
        ("fixed_window", "strict"),
        ("sliding_window", "lease"),
        ("sliding_window", "strict"),
        ("sliding_log", "strict"),
    ] {
        let redis = Redis::start();
        let limit = format!("rate = \"60/d\"\nalgorithm = \"{algorithm}\"\nsync = \"{sync}\"");
        let limit = if algorithm == "gcra" {
            format!("{limit}\nburst = 60")
        } else {
            limit
        };
        let gateways: Vec<Gateway> = (0..2).map(|_| shared(&redis, &limit)).collect();
        let mut all = admitted(&burst(&gateways, 80, 4));
        assert!(all <= 60, "{algorithm} {sync}: {all} were admitted");
        if sync == "strict" {
            assert_eq!(all, 60, "{algorithm} {sync}");
        }
        eventually("the rest to be admitted", || {
            all += admitted(&burst(&gateways, 2, 1));
            if all >= 58 {
                Ok(())
            } else {
                Err(format!("{algorithm} {sync}: {all} of 60"))
            }
        });
        assert!(all <= 60, "{algorithm} {sync}: {all} were admitted");
        for key in redis.keys() {
            let left: i64 = redis.run(&["PTTL", &key]);
            assert!(left > 0, "{algorithm} {sync}: {key} lives for {left} ms");
        }
    }
}

#[test]
fn far_below_its_limit_a_request_costs_next_to_no_commands() {
    let redis = Redis::start();
    let gateways = [shared(&redis, "rate = \"1000000/min\"")];
    redis.commands();
    assert_eq!(admitted(&burst(&gateways, 8_000, 8)), 8_000);
    let commands = redis.commands();
    println!("{commands} commands for 8000 requests");
    assert!(commands <= 400, "{commands} commands for 8000 requests");
}

#[test]
fn a_reply_that_brings_nothing_is_not_asked_for_again_until_somebody_spends() {
    let redis = Redis::start();
    // the share of one of four in what is left is less than a token for a while
    let gateways: Vec<Gateway> = (0..4)
        .map(|_| shared(&redis, "rate = \"20/s\"\nburst = 20"))
        .collect();
    let statuses = burst(&gateways, 400, 2);
    let requests: usize = statuses.values().sum();
    let calls: f64 = gateways
        .iter()
        .map(|gateway| gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}"))
        .sum();
    println!("{calls} calls for {requests} requests");
    assert!(
        calls <= requests as f64,
        "{calls} calls for {requests} requests"
    );
}

#[test]
fn a_refusal_is_remembered_and_costs_no_calls() {
    let redis = Redis::start();
    let gateways = [shared(
        &redis,
        "rate = \"5/h\"\nburst = 5\nsync = \"strict\"",
    )];
    let mut client = gateways[0].connect();
    let statuses: Vec<u16> = (0..6)
        .map(|_| client.send(&Request::get("/")).status)
        .collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
    let calls = || gateways[0].metric("tidegate_redis_calls_total");
    let before = calls();
    assert_eq!(admitted(&burst(&gateways, 1_000, 4)), 0);
    assert_eq!(calls(), before);
}

#[test]
fn a_gateway_that_is_stopped_returns_what_it_has_not_spent() {
    let redis = Redis::start();
    let mut gateways: Vec<Gateway> = (0..2).map(|_| shared(&redis, HOURLY)).collect();
    let begun = Instant::now();
    let mut first = gateways.remove(0);
    let statuses = first.statuses(&Request::get("/"), 100);
    assert!(statuses.iter().all(|&status| status == 200), "{statuses:?}");
    let held = first.metric("tidegate_lease_tokens");
    first.signal("TERM");
    assert!(first.wait().success());
    let rest = admitted(&burst(&gateways, 600, 1));
    println!("{rest} of 500 were left; {held} had been borrowed ahead");
    assert!(
        (490..=500 + refilled(begun)).contains(&rest),
        "{rest} were left; {held} had been borrowed ahead"
    );
}

#[test]
fn clients_are_told_what_is_left_and_when_to_return() {
    let redis = Redis::start();
    let gateway = shared(&redis, "rate = \"1/4s\"\nburst = 3");
    let mut client = gateway.connect();
    let responses: Vec<_> = (0..4).map(|_| client.send(&Request::get("/"))).collect();
    assert_eq!(responses[0].header("x-ratelimit-limit"), Some("3"));
    assert_eq!(responses[0].header("x-ratelimit-remaining"), Some("2"));
    assert_eq!(responses[3].status, 429);
    let wait = responses[3]
        .retry_after()
        .expect("a rejection says when to return");
    assert!(
        (1..=4).contains(&wait),
        "one unit refills in 4 s, but Retry-After is {wait}"
    );
    time_passes(Duration::from_secs(wait), "Retry-After passes");
    assert_eq!(
        client.send(&Request::get("/")).status,
        200,
        "after Retry-After"
    );
}

#[test]
fn keys_are_counted_apart_and_hold_nothing_of_the_client() {
    let redis = Redis::start();
    let gateway = Gateway::with(&format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\nkey_prefix = \"edge\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nrate = \"2/h\"\nburst = 2\nscope = \"global\"\n",
        redis.url()
    ))
    .start();
    for address in ["203.0.113.1", "203.0.113.2"] {
        let request = Request::get("/").header("x-forwarded-for", address);
        assert_eq!(gateway.statuses(&request, 3), [200, 200, 429], "{address}");
    }
    let keys = redis.keys();
    let buckets: Vec<&String> = keys
        .iter()
        .filter(|key| key.starts_with("edge:{per_ip:"))
        .collect();
    assert_eq!(buckets.len(), 2, "{keys:?}");
    assert!(
        keys.iter()
            .all(|key| key.starts_with("edge:") && !key.contains("203")),
        "{keys:?}"
    );
    for key in keys {
        let left: i64 = redis.run(&["PTTL", &key]);
        assert!(left > 0, "{key} lives for {left} ms");
    }
}

#[test]
fn a_changed_rate_keeps_what_was_spent() {
    let redis = Redis::start();
    let mut before = shared(&redis, "rate = \"100/d\"\nburst = 100");
    assert_eq!(before.statuses(&Request::get("/"), 80), [200; 80]);
    before.signal("TERM");
    assert!(before.wait().success());
    let after = shared(&redis, "rate = \"120/d\"\nburst = 120\nsync = \"strict\"");
    let statuses = after.statuses(&Request::get("/"), 60);
    let passed = statuses.iter().filter(|&&status| status == 200).count();
    assert_eq!(passed, 40, "{statuses:?}");
}

#[test]
fn a_refused_request_spends_nothing_of_another_shared_limit() {
    for sync in ["lease", "strict"] {
        let redis = Redis::start();
        let gateway = Gateway::with(&format!(
            "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\n\
             [[user]]\nfrom = \"header\"\nheader = \"x-user-id\"\n\
             [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
             [gateway]\nlimits = [\"all\", \"per_user\", \"process\"]\n\
             [limit.all]\nkey = []\nrate = \"20/d\"\nburst = 20\nscope = \"global\"\nsync = \"{sync}\"\n\
             [limit.per_user]\nkey = [\"user\"]\nrate = \"5/d\"\nburst = 5\nscope = \"global\"\nsync = \"{sync}\"\n\
             [limit.process]\nkey = []\nrate = \"20/d\"\nburst = 20\n",
            redis.url()
        ))
        .start();
        let from = |user: &str| Request::get("/").header("x-user-id", user);
        let mut all = 0;
        for user in ["a", "b", "c", "d", "e"] {
            let statuses = gateway.statuses(&from(user), 8);
            let passed = statuses.iter().filter(|&&status| status == 200).count();
            assert_eq!(
                passed,
                if user == "e" { 0 } else { 5 },
                "{sync} {user}: {statuses:?}"
            );
            all += passed;
        }
        assert_eq!(all, 20, "{sync}");
    }
}

#[test]
fn a_user_a_password_a_database_and_a_socket_are_taken_from_the_url() {
    let mut redis = Redis::with(&["--requirepass", "s3cret", "--unixsocket", "redis.sock"]);
    let socket = redis.folder().join("redis.sock");
    let urls = [
        format!("redis://default:s3cret@127.0.0.1:{}/3", redis.port()),
        format!("unix://{}?pass=s3cret&db=4", socket.display()),
    ];
    for url in urls {
        let gateway = shared_at(
            &url,
            "rate = \"2/h\"\nburst = 2\non_redis_down = \"closed\"",
        );
        assert_eq!(
            gateway.statuses(&Request::get("/"), 3),
            [200, 200, 429],
            "{url}"
        );
        assert!(!gateway.output().contains("s3cret"), "{}", gateway.output());
    }
    redis.kill();
}
