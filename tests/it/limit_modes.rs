//! Limit features beyond admitting and rejecting: overrides, shadow, tags, delays, concurrency,
//! body keys.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::support::{Client, Gate, Gateway, Origin, Request, wait::eventually_eq};

/// A configuration with one limit on all requests, from this table.
fn limited(limit: &str) -> String {
    format!("[gateway]\nlimits = [\"l\"]\n[limit.l]\n{limit}\n")
}

/// Trusts loopback as a proxy.
const TRUSTING: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.0/8"]
    [[user]]
    from = "header"
    header = "x-user-id"
    tier_header = "x-user-tier"
"#;

const ONE_PER_IP: &str = "key = [\"ip\"]\nrate = \"1/h\"\nburst = 1\n";

fn outcome(gateway: &Gateway, outcome: &str) -> f64 {
    gateway.metric(&format!(
        r#"tidegate_decisions_total{{limit="l",outcome="{outcome}"}}"#
    ))
}

#[test]
fn a_limit_in_shadow_counts_and_never_acts() {
    let origin = Origin::ok();
    let toml = limited(&format!("{ONE_PER_IP}mode = \"shadow\""));
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let response = gateway.get("/");
    assert_eq!(
        response.header("ratelimit"),
        None,
        "clients are told of limits that act"
    );
    assert_eq!(gateway.statuses(&Request::get("/"), 4), [200; 4]);
    assert_eq!(outcome(&gateway, "shadow_rejected"), 4.0);
    assert_eq!(outcome(&gateway, "admitted"), 1.0);
    assert_eq!(outcome(&gateway, "rejected"), 0.0);
}

#[test]
fn a_limit_that_tags_admits_and_tells_the_upstream() {
    let origin = Origin::ok();
    let toml = limited(&format!("{ONE_PER_IP}mode = \"tag\""));
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let forged = Request::get("/").header("x-ratelimit-over", "forged");
    assert_eq!(gateway.statuses(&forged, 2), [200; 2]);
    let seen = origin.requests();
    assert_eq!(seen[0].header("x-ratelimit-over"), None);
    assert_eq!(seen[1].header("x-ratelimit-over"), Some("l"));
    assert_eq!(outcome(&gateway, "tagged"), 1.0);
}

#[test]
fn a_limit_that_is_off_does_not_even_count() {
    let origin = Origin::ok();
    let toml = limited(&format!("{ONE_PER_IP}mode = \"off\""));
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    assert_eq!(
        outcome(&gateway, "admitted") + outcome(&gateway, "shadow_rejected"),
        0.0
    );
}

#[test]
fn a_limit_enforced_in_part_acts_on_the_same_keys_every_time() {
    let origin = Origin::ok();
    let toml = limited(&format!("{ONE_PER_IP}enforce_percent = 50"));
    let gateway = Gateway::with(&format!("{TRUSTING}{toml}"))
        .upstream(&origin)
        .start();
    let mut acted_on = 0;
    for client in 0..100 {
        let request = Request::get("/").header("x-forwarded-for", &format!("192.0.2.{client}"));
        let statuses = gateway.statuses(&request, 3);
        assert!(
            statuses == [200, 429, 429] || statuses == [200; 3],
            "{statuses:?}"
        );
        acted_on += usize::from(statuses[1] == 429);
    }
    assert!((25..=75).contains(&acted_on), "{acted_on} of 100 at 50 %");
}

#[test]
fn whoever_is_exempt_is_not_counted() {
    let origin = Origin::ok();
    let exempt =
        "exempt = { ips = [\"10.9.0.0/16\"], users = [\"monitoring\"], tiers = [\"internal\"] }";
    let toml = limited(&format!("{ONE_PER_IP}{exempt}"));
    let gateway = Gateway::with(&format!("{TRUSTING}{toml}"))
        .upstream(&origin)
        .start();
    let from = |ip: &str| Request::get("/").header("x-forwarded-for", ip);
    let free = [
        from("10.9.1.1"),
        from("192.0.2.1").header("x-user-id", "monitoring"),
        from("192.0.2.1")
            .header("x-user-id", "a")
            .header("x-user-tier", "internal"),
    ];
    for request in free {
        assert_eq!(gateway.statuses(&request, 3), [200; 3]);
    }
    assert_eq!(outcome(&gateway, "exempt"), 9.0);
    assert_eq!(gateway.statuses(&from("192.0.2.1"), 2), [200, 429]);
}

#[test]
fn overrides_raise_close_and_lift_a_limit_for_one_key_until_a_day() {
    let origin = Origin::ok();
    let toml = r#"
        [gateway]
        limits = ["l"]
        [limit.l]
        key = ["user"]
        rate = "1/h"
        burst = 1
        [[override]]
        limit = "l"
        user = "acme"
        rate = "3/h"
        burst = 3
        until = 2999-01-31T00:00:00Z
        note = "load test"
        [[override]]
        limit = "l"
        user = "free"
        exempt = true
        [[override]]
        limit = "l"
        user = "abuser"
        block = true
        [[override]]
        limit = "l"
        user = "gone"
        exempt = true
        until = 2020-01-01T00:00:00Z
    "#;
    let gateway = Gateway::with(&format!("{TRUSTING}{toml}"))
        .upstream(&origin)
        .start();
    let user = |name: &str| Request::get("/").header("x-user-id", name);
    assert_eq!(gateway.statuses(&user("acme"), 4), [200, 200, 200, 429]);
    assert_eq!(gateway.statuses(&user("free"), 4), [200; 4]);
    assert_eq!(
        gateway.statuses(&user("gone"), 2),
        [200, 429],
        "the exception has ended"
    );
    assert_eq!(gateway.statuses(&user("anybody"), 2), [200, 429]);
    let closed = gateway.send(&user("abuser"));
    assert_eq!((closed.status, closed.retry_after()), (429, None));
    assert!(
        closed.text().contains("blocks this client"),
        "{}",
        closed.text()
    );
    let problem = closed.json();
    let kind = "https://iana.org/assignments/http-problem-types#abnormal-usage-detected";
    assert_eq!(problem["type"], kind);
    assert_eq!(problem["title"], "Abnormal Usage Detected");
    assert_eq!(problem["violated-policies"], serde_json::json!(["l"]));
}

#[test]
fn only_answers_with_the_counted_statuses_are_charged() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        let status = if exchange.request.target == "/wrong" {
            401
        } else {
            200
        };
        exchange.respond(status, &[], b"")
    });
    let toml = limited("key = [\"ip\"]\nrate = \"2/h\"\nburst = 2\ncount_status = [401, 403]");
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    assert_eq!(gateway.statuses(&Request::get("/right"), 5), [200; 5]);
    assert_eq!(
        gateway.statuses(&Request::get("/wrong"), 3),
        [401, 401, 429]
    );
    assert_eq!(
        gateway.get("/right").status,
        429,
        "the limit is spent for every request"
    );
}

#[test]
fn a_penalty_limit_is_charged_by_what_it_rejects() {
    let origin = Origin::ok();
    let limit = |penalty| {
        limited(&format!(
            "key = [\"ip\"]\nrate = \"2/s\"\nburst = 1\ncharge_rejected = {penalty}"
        ))
    };
    for (penalty, longest) in [(false, 1), (true, 1)] {
        let gateway = Gateway::with(&limit(penalty)).upstream(&origin).start();
        let mut client = gateway.connect();
        let waits: Vec<_> = (0..5)
            .map(|_| client.send(&Request::get("/")).retry_after())
            .collect();
        assert_eq!(waits[0], None);
        assert_eq!(
            waits[4],
            Some(longest),
            "{waits:?}: a debt is at most one burst"
        );
    }
}

#[test]
fn a_rejection_that_is_charged_is_told_what_remains_after_its_own_penalty() {
    let origin = Origin::ok();
    let limit = "key = []\nrate = \"5/h\"\nburst = 5\ncharge_rejected = true";
    let costly = format!(
        "{}\n[[route]]\nname = \"costly\"\npath = \"/costly\"\nupstream = \"origin\"\ncost = 3\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"origin\"\n",
        limited(limit)
    );
    let gateway = Gateway::with(&costly).upstream(&origin).start();
    let mut client = gateway.connect();
    let first = client.send(&Request::get("/costly"));
    assert_eq!(
        (first.status, first.header("x-ratelimit-remaining")),
        (200, Some("2"))
    );
    let rejected = client.send(&Request::get("/costly"));
    assert_eq!(rejected.status, 429);
    assert_eq!(rejected.header("x-ratelimit-remaining"), Some("0"));
    // three units at five per hour: the two available ones were spent
    assert_eq!(rejected.retry_after(), Some(3 * 720));
}

#[test]
fn a_request_that_lacks_a_part_of_the_key_is_skipped_shared_or_rejected() {
    let origin = Origin::ok();
    let limit = |missing: &str| {
        limited(&format!(
            "key = [\"header:x-device\"]\nrate = \"1/h\"\nburst = 1\nmissing = {missing:?}"
        ))
    };
    for (missing, expected) in [
        ("skip", [200, 200]),
        ("shared", [200, 429]),
        ("reject", [400, 400]),
    ] {
        let gateway = Gateway::with(&limit(missing)).upstream(&origin).start();
        let statuses = [gateway.get("/").status, gateway.get("/").status];
        assert_eq!(statuses, expected, "{missing}");
        let device = Request::get("/").header("x-device", "a");
        assert_eq!(gateway.statuses(&device, 2), [200, 429], "{missing}");
    }
}

#[test]
fn a_limit_that_delays_sends_requests_on_at_its_rate_and_rejects_a_full_queue() {
    let origin = Origin::ok();
    let toml = limited(
        "key = [\"ip\"]\nalgorithm = \"leaky_bucket\"\nrate = \"10/s\"\nburst = 10\nover = \"delay\"\nmax_delay = \"350ms\"",
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let start = Instant::now();
    let outcomes: Vec<(u16, Duration)> = thread::scope(|scope| {
        let send = || {
            let status = gateway.get("/").status;
            (status, start.elapsed())
        };
        let clients: Vec<_> = (0..8).map(|_| scope.spawn(send)).collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("no panic"))
            .collect()
    });
    let mut passed: Vec<_> = outcomes
        .iter()
        .filter(|(status, _)| *status == 200)
        .map(|(_, at)| *at)
        .collect();
    passed.sort_unstable();
    assert!((4..=5).contains(&passed.len()), "{outcomes:?}");
    for (place, at) in passed.iter().enumerate() {
        let turn = Duration::from_millis(100) * u32::try_from(place).expect("few");
        assert!(
            *at >= turn.saturating_sub(Duration::from_millis(5)),
            "{place} passed at {at:?}"
        );
    }
    assert!(outcome(&gateway, "delayed") >= 3.0);
    // distinguishes a delay of 100 ms from one of 300
    let short = gateway.metric(r#"tidegate_delayed_seconds_bucket{limit="l",le="0.25"}"#);
    let all = gateway.metric(r#"tidegate_delayed_seconds_count{limit="l"}"#);
    assert!(short > 0.0 && short < all, "{short} of {all}");
}

#[test]
fn a_client_that_leaves_the_queue_gives_its_place_back() {
    let origin = Origin::ok();
    let toml = limited(
        "key = [\"ip\"]\nalgorithm = \"leaky_bucket\"\nrate = \"1/s\"\nburst = 5\nover = \"delay\"\nmax_delay = \"3s\"",
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 200);
    // these would take the next three seconds
    for waiting in 1..=3 {
        let mut client = gateway.connect();
        client
            .write(&Request::get("/left").to_bytes())
            .expect("it leaves");
        eventually_eq("it waits", f64::from(waiting), || {
            outcome(&gateway, "delayed")
        });
        drop(client);
    }
    eventually_eq("their connections are closed", 0.0, || {
        gateway.metric(&format!(
            r#"tidegate_connections{{listener="{}"}}"#,
            gateway.address()
        ))
    });
    let start = Instant::now();
    assert_eq!(gateway.get("/").status, 200);
    assert!(
        start.elapsed() < Duration::from_millis(1900),
        "{:?}",
        start.elapsed()
    );
    assert!(origin.requests().iter().all(|seen| seen.target != "/left"));
}

#[test]
fn clients_near_a_limit_are_warned_and_then_slowed() {
    let origin = Origin::ok();
    let toml = limited(
        "key = [\"ip\"]\nrate = \"1/h\"\nburst = 10\nwarn_at = 0.5\nslow_at = 0.9\nslow_by = \"150ms\"",
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let mut client = gateway.connect();
    let mut timed = || {
        let start = Instant::now();
        let response = client.send(&Request::get("/"));
        assert_eq!(response.status, 200);
        (
            response.header("x-ratelimit-warning").map(str::to_owned),
            start.elapsed(),
        )
    };
    let all: Vec<_> = (0..10).map(|_| timed()).collect();
    let warned: Vec<bool> = all
        .iter()
        .map(|(warning, _)| warning.as_deref() == Some("l"))
        .collect();
    assert_eq!(
        warned,
        [
            false, false, false, false, true, true, true, true, true, true
        ]
    );
    assert!(
        all[8].1 >= Duration::from_millis(150) && all[9].1 >= Duration::from_millis(150),
        "{all:?}"
    );
    assert_eq!(
        gateway.metric(r#"tidegate_near_limit_total{limit="l"}"#),
        6.0
    );
}

#[test]
fn slots_are_held_until_the_answer_has_ended_and_never_leaked() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        if exchange.request.target == "/abandoned" {
            return exchange.wait_for_abort();
        }
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl")?;
        held.wait();
        exchange.write(b"ow")
    });
    // bounds the hidden work of a server on an abandoned request
    let toml = format!(
        "{}[upstream.origin]\nservers = [\"{{origin}}\"]\nabandoned_timeout = \"1s\"\n",
        limited("key = [\"ip\"]\nalgorithm = \"concurrency\"\nlimit = 2")
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let mut first = gateway.connect();
    let mut second = gateway.connect();
    for client in [&mut first, &mut second] {
        client.begin(&Request::get("/"));
    }
    let denied = gateway.get("/");
    assert_eq!((denied.status, denied.retry_after()), (429, Some(1)));
    let policy = denied
        .header("ratelimit-policy")
        .unwrap_or_default()
        .to_owned();
    assert_eq!(policy, r#""l";q=2;qu="concurrent-requests""#);
    // one client leaves, the other is served to the end
    drop(first);
    eventually_eq("a slot is free again", 200, || {
        let mut client = gateway.connect();
        client
            .write(&Request::get("/").to_bytes())
            .expect("it leaves");
        client.read_head().map_or(0, |head| head.status)
    });
    gate.open();
    drop(second);
    for _ in 0..20 {
        let mut client = gateway.connect();
        client
            .write(&Request::get("/abandoned").to_bytes())
            .expect("it leaves");
        drop(client);
    }
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
    eventually_eq("both slots are free again", true, || {
        let mut clients: Vec<Client> = (0..2).map(|_| gateway.connect()).collect();
        clients
            .iter_mut()
            .all(|client| client.send(&Request::get("/")).status == 200)
    });
}

#[test]
fn a_login_is_limited_by_address_and_name_and_by_each_alone_and_tells_nothing() {
    let origin = Origin::new(|exchange| {
        let body = exchange.read_body()?;
        let right = body.windows(5).any(|part| part == b"right");
        exchange.respond(if right { 200 } else { 401 }, &[], b"")
    });
    let toml = r#"
        [client_ip]
        trusted_proxies = ["127.0.0.0/8"]
        [limit.pair]
        key = ["ip", "body:username"]
        algorithm = "sliding_log"
        rate = "5/h"
        disclose = false
        [limit.address]
        key = ["ip"]
        algorithm = "sliding_log"
        rate = "10/h"
        disclose = false
        [limit.name]
        key = ["body:username"]
        algorithm = "sliding_log"
        rate = "10/h"
        disclose = false
        [[route]]
        name = "login"
        path = "/login"
        methods = ["POST"]
        upstream = "origin"
        limits = ["pair", "address", "name"]
    "#;
    let gateway = Gateway::with(toml).upstream(&origin).start();
    let login = |ip: &str, name: &str| {
        Request::post("/login", format!("username={name}&password=wrong"))
            .header("content-type", "application/x-www-form-urlencoded")
            .header("x-forwarded-for", ip)
    };
    let admitted = |requests: &[Request]| {
        let statuses = requests.iter().map(|request| gateway.send(request).status);
        statuses.filter(|status| *status == 401).count()
    };
    let times = |request: Request, count: usize| vec![request; count];
    assert_eq!(
        admitted(&times(login("192.0.2.1", "alice"), 6)),
        5,
        "the pair"
    );
    assert_eq!(
        admitted(&times(login("192.0.2.2", "Alice"), 6)),
        5,
        "a name has one spelling"
    );
    assert_eq!(
        admitted(&times(login("192.0.2.3", "alice"), 2)),
        0,
        "the name is spent"
    );
    let many: Vec<_> = (0..12)
        .map(|n| login("192.0.2.9", &format!("user{n}")))
        .collect();
    assert_eq!(admitted(&many), 10, "the address");
    let json = Request::post("/login", r#"{"password":"x","username":"ALICE "}"#)
        .header("content-type", "application/json")
        .header("x-forwarded-for", "192.0.2.4");
    let denied = gateway.send(&json);
    assert_eq!(denied.status, 429, "in JSON it is the same name");
    assert!(denied.retry_after().is_some());
    for field in [
        "ratelimit",
        "ratelimit-policy",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
    ] {
        assert_eq!(denied.header(field), None, "{field}");
    }
    let told = denied.text();
    assert!(
        !["pair", "address", "name\""]
            .iter()
            .any(|word| told.contains(word)),
        "{told}"
    );
}

#[test]
fn a_body_that_keys_a_limit_reaches_the_upstream_byte_for_byte() {
    let toml = r#"
        [limit.l]
        key = ["body:name"]
        rate = "100/h"
        burst = 100
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        limits = ["l"]
        max_body_size = "1MiB"
    "#;
    let gateway = Gateway::with(toml).upstream_at("builtin:echo").start();
    let small = format!("{{\"name\": \"a\", \"rest\": \"{}\"}}", "x".repeat(50_000));
    let large = format!("{{\"name\": \"a\", \"rest\": \"{}\"}}", "x".repeat(900_000));
    for (text, counted) in [(&small, 1), (&large, 1)] {
        let before = gateway.metric(r#"tidegate_decisions_total{limit="l",outcome="admitted"}"#);
        let request = Request::post("/", text.clone()).header("content-type", "application/json");
        let response = gateway.send(&request);
        assert_eq!(response.status, 200);
        assert!(
            response.text().ends_with(text.as_str()),
            "the body has changed"
        );
        let after = gateway.metric(r#"tidegate_decisions_total{limit="l",outcome="admitted"}"#);
        assert_eq!(
            after - before,
            f64::from(counted),
            "over the bound the field is unclear"
        );
    }
    let mut client = gateway.connect();
    let chunked = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"name\":\r\n4\r\n\"a\"}\r\n0\r\n\r\n";
    client.write(chunked).expect("it leaves");
    let response = client.read_response("POST").expect("it is answered");
    assert!(
        response.text().ends_with("{\"name\":\"a\"}"),
        "{}",
        response.text()
    );
}

#[test]
fn query_cookie_and_path_parameters_key_limits() {
    let origin = Origin::ok();
    for (part, same, other) in [
        ("query:page", ["/?page=1", "/?x=y&%70age=%31"], "/?page=2"),
        ("param:id", ["/items/7", "/items/7/"], "/items/8"),
    ] {
        let toml = format!(
            "[limit.l]\nkey = [{part:?}]\nrate = \"1/h\"\nburst = 1\n\
             [[route]]\nname = \"item\"\npath = \"/items/{{id}}\"\nupstream = \"origin\"\nlimits = [\"l\"]\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"origin\"\nlimits = [\"l\"]\n"
        );
        let gateway = Gateway::with(&toml).upstream(&origin).start();
        assert_eq!(gateway.get(same[0]).status, 200, "{part}");
        assert_eq!(gateway.get(same[1]).status, 429, "{part}");
        assert_eq!(gateway.get(other).status, 200, "{part}");
    }
    let toml = limited("key = [\"cookie:session\"]\nrate = \"1/h\"\nburst = 1");
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let cookie = |value: &str| Request::get("/").header("cookie", value);
    assert_eq!(gateway.statuses(&cookie("a=b; session=1"), 2), [200, 429]);
    assert_eq!(gateway.send(&cookie("session=2")).status, 200);
    assert_eq!(
        gateway.statuses(&Request::get("/"), 2),
        [200; 2],
        "no session is not counted"
    );
}

#[test]
fn every_cell_of_a_table_of_plans_holds() {
    let plans = r#"
        [limit.all]
        key = ["user"]
        rate = { default = "60/min", pro = "600/min", enterprise = "6000/min" }
        burst = { default = 5, pro = 50, enterprise = 500 }
        [limit.search]
        key = ["user"]
        algorithm = "sliding_log"
        rate = { default = "10/min", pro = "100/min", enterprise = "1000/min" }
        [limit.export]
        key = ["user"]
        algorithm = "sliding_log"
        rate = { default = "2/h", pro = "20/h", enterprise = "200/h" }
        [gateway]
        limits = ["all"]
        [[route]]
        name = "search"
        path = "/search"
        upstream = "origin"
        limits = ["search"]
        [[route]]
        name = "export"
        path = "/export"
        upstream = "origin"
        limits = ["export"]
        [[route]]
        name = "rest"
        path = "/{*rest}"
        upstream = "origin"
    "#;
    let gateway = Gateway::with(&format!("{TRUSTING}{plans}"))
        .upstream_at("builtin:echo")
        .start();
    let user = |tier: &str, path: &str, n: usize| {
        let request = Request::get(path).header("x-user-id", &format!("{tier}-{path}-{n}"));
        if tier == "free" {
            request
        } else {
            request.header("x-user-tier", tier)
        }
    };
    let passed = |request: &Request, count: usize| {
        gateway
            .statuses(request, count)
            .iter()
            .filter(|status| **status == 200)
            .count()
    };
    for (tier, burst, export) in [("free", 5, 2), ("pro", 50, 20), ("enterprise", 500, 200)] {
        let start = Instant::now();
        let rest = passed(&user(tier, "/list", 0), burst + 20);
        // the bucket refills while requests are sent: a whole burst takes five seconds
        let refilled = start.elapsed().as_secs_f64() * burst as f64 / 5.0;
        assert!(
            rest >= burst && rest as f64 <= burst as f64 + refilled + 1.0,
            "{tier}: {rest} of a burst of {burst}, and {refilled} since"
        );
        let exports = passed(&user(tier, "/export", 0), export + 10);
        let expected = export.min(burst);
        assert_eq!(exports.min(export), expected, "{tier}: exports");
        assert!(exports <= export, "{tier}: {exports} exports");
    }
    assert_eq!(passed(&user("free", "/search", 0), 5), 5);
    let response = gateway.send(&user("free", "/search", 1));
    assert_eq!(
        response.parameter("ratelimit-policy", "search", "q"),
        Some(10)
    );
    assert_eq!(
        response.parameter("ratelimit-policy", "search", "w"),
        Some(60)
    );
    let response = gateway.send(&user("pro", "/search", 1));
    assert_eq!(
        response.parameter("ratelimit-policy", "search", "q"),
        Some(100)
    );
    let response = gateway.send(&user("enterprise", "/search", 1));
    assert_eq!(
        response.parameter("ratelimit-policy", "search", "q"),
        Some(1000)
    );
}

#[test]
fn two_bursts_at_a_windows_edge_show_what_each_algorithm_promises() {
    // windows begin at a key's own offset: bursts half a second apart straddle one boundary
    let passed = |algorithm: &str| {
        let toml = limited(&format!(
            "key = [\"ip\"]\nalgorithm = {algorithm:?}\nrate = \"10/s\""
        ));
        let gateway = Gateway::with(&toml).upstream_at("builtin:echo").start();
        let mut client = gateway.connect();
        let (start, mut passed) = (Instant::now(), Vec::new());
        while start.elapsed() < Duration::from_millis(1500) {
            let sent = start.elapsed();
            if client.send(&Request::get("/")).status == 200 {
                passed.push((sent, start.elapsed()));
            }
        }
        // each is admitted between its sending and its answer: surely within a second of each other
        let within = |from: Duration| {
            let to = from + Duration::from_millis(990);
            let is_within =
                |&&(sent, answered): &&(Duration, Duration)| sent >= from && answered < to;
            passed.iter().filter(is_within).count()
        };
        let counts = passed.iter().map(|&(sent, _)| within(sent));
        counts.max().unwrap_or(0)
    };
    assert!(passed("sliding_log") <= 10);
    let fixed = passed("fixed_window");
    assert!(
        (10..=20).contains(&fixed),
        "a fixed window admits up to twice its limit: {fixed}"
    );
}

#[test]
fn a_flood_of_keys_is_bounded_warned_of_and_does_not_wash_a_debt_off() {
    let origin = Origin::ok();
    let toml = format!(
        "[server]\nworkers = 2\nmax_keys = 100\n{TRUSTING}{}",
        limited(ONE_PER_IP)
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let from = |n: u32| {
        let ip = format!("192.{}.{}.{}", n >> 16 & 255, n >> 8 & 255, n & 255);
        Request::get("/").header("x-forwarded-for", &ip)
    };
    let mut client = gateway.connect();
    assert_eq!(client.send(&from(0)).status, 200);
    let mut strangers = 0;
    for n in 1..=1000 {
        strangers += u32::from(client.send(&from(n)).status == 200);
        if n % 100 == 0 {
            assert_eq!(client.send(&from(0)).status, 429, "the abuser's debt stays");
        }
    }
    // at most max_keys own buckets, and 256 shared ones
    assert!(
        strangers <= 100 + 256,
        "{strangers} fresh keys were admitted"
    );
    assert!(gateway.metric(r#"tidegate_key_overflows_total{limit="l"}"#) > 0.0);
    eventually_eq("it is said", true, || {
        gateway.stderr().contains("raise server.max_keys")
    });
}

#[test]
fn a_refused_request_waits_for_its_turn_like_any_other() {
    let origin = Origin::ok();
    let keys = "[keys.alice]\nsha256 = \"2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90\"\n";
    let user = "[[user]]\nfrom = \"api_key\"\nheader = \"x-api-key\"\nkeys_file = \"keys.toml\"\n";
    let toml = limited(
        "key = [\"ip\"]\nalgorithm = \"leaky_bucket\"\nrate = \"5/s\"\nburst = 5\nover = \"delay\"\nmax_delay = \"1s\"",
    );
    let gateway = Gateway::with(&format!("{user}{toml}"))
        .file("keys.toml", keys)
        .upstream(&origin)
        .start();
    let guess = Request::get("/").header("x-api-key", "a guess");
    let start = Instant::now();
    assert_eq!(gateway.statuses(&guess, 4), [401; 4]);
    assert!(
        start.elapsed() >= Duration::from_millis(590),
        "four guesses at 5/s took {:?}",
        start.elapsed()
    );
}

#[test]
fn the_gateways_own_401_counts_where_401s_are_counted() {
    let origin = Origin::ok();
    let keys = "[keys.alice]\nsha256 = \"2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90\"\n";
    let user = "[[user]]\nfrom = \"api_key\"\nheader = \"x-api-key\"\nkeys_file = \"keys.toml\"\n";
    let toml = limited("key = [\"ip\"]\nrate = \"2/h\"\nburst = 2\ncount_status = [401]");
    let gateway = Gateway::with(&format!("{user}{toml}"))
        .file("keys.toml", keys)
        .upstream(&origin)
        .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let guess = Request::get("/").header("x-api-key", "a guess");
    assert_eq!(gateway.statuses(&guess, 3), [401, 401, 429]);
}
