//! Admission and rejection by limits, and their cost to clients.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::support::{
    Client, Gateway, Origin, Request, curl::curl, http2, tokens::sha256_hex, wait::time_passes,
};

/// One limit per client address, of `burst` requests that hardly refill.
fn per_ip(burst: u32) -> String {
    format!(
        "[gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = {burst}\n"
    )
}

/// Trusts loopback as a proxy: `X-Forwarded-For` and the identity headers count.
const TRUSTING: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.0/8"]
    [[user]]
    from = "header"
    header = "x-user-id"
    tier_header = "x-user-tier"
"#;

fn from_ip(address: &str) -> Request {
    Request::get("/").header("x-forwarded-for", address)
}

fn from_user(user: &str) -> Request {
    Request::get("/").header("x-user-id", user)
}

#[test]
fn five_of_ten_pass_a_burst_of_five_and_retry_after_is_true() {
    let origin = Origin::ok();
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["per_ip"]
        [limit.per_ip]
        key = ["ip"]
        rate = "1/2s"
        burst = 5
        "#,
    )
    .upstream(&origin)
    .start();

    let mut client = gateway.connect();
    let responses: Vec<_> = (0..10).map(|_| client.send(&Request::get("/"))).collect();
    let statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    assert_eq!(statuses, [[200; 5], [429; 5]].concat());

    let wait = responses[9]
        .retry_after()
        .expect("a rejection says when to return");
    assert!(
        (1..=2).contains(&wait),
        "one unit refills in 2 s, but Retry-After is {wait}"
    );
    time_passes(Duration::from_secs(wait), "Retry-After passes");
    assert_eq!(
        client.send(&Request::get("/")).status,
        200,
        "a request sent after Retry-After"
    );
    assert_eq!(
        client.send(&Request::get("/")).status,
        429,
        "only one unit had come back"
    );
    assert_eq!(
        origin.requests().len(),
        6,
        "rejected requests do not reach the origin"
    );
}

#[test]
fn thirty_two_clients_at_once_are_admitted_exactly_five_hundred_times() {
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["global"]
        [limit.global]
        key = []
        rate = "500/h"
        burst = 500
        "#,
    )
    .start();
    let begun = Instant::now();
    let address = gateway.address();
    let clients: Vec<_> = (0..32)
        .map(|_| {
            thread::spawn(move || {
                let mut client = Client::connect(address);
                let admitted = |_: &i32| client.send(&Request::get("/")).status == 200;
                (0..25).filter(admitted).count()
            })
        })
        .collect();
    let admitted: usize = clients
        .into_iter()
        .map(|client| client.join().expect("a client"))
        .sum();
    // one unit refills every 7.2 s
    let refilled = usize::try_from(begun.elapsed().as_millis() / 7200).expect("a short test");
    assert!(
        (500..=500 + refilled).contains(&admitted),
        "{admitted} of 800 were admitted"
    );
    gateway.wait_for_metric(
        r#"tidegate_decisions_total{limit="global",outcome="rejected"}"#,
        800.0 - admitted as f64,
    );
}

#[test]
fn a_rejection_spends_nothing_on_the_other_limits() {
    let gateway = Gateway::with(
        r#"
        [limit.wide]
        key = ["ip"]
        rate = "1/h"
        burst = 10
        [limit.narrow]
        key = ["ip"]
        rate = "1/h"
        burst = 1
        [[route]]
        name = "both"
        path = "/both"
        upstream = "origin"
        limits = ["wide", "narrow"]
        [[route]]
        name = "narrow_first"
        path = "/narrow-first"
        upstream = "origin"
        limits = ["narrow", "wide"]
        [[route]]
        name = "wide_only"
        path = "/wide"
        upstream = "origin"
        limits = ["wide"]
        "#,
    )
    .start();
    assert_eq!(gateway.get("/both").status, 200);
    for path in ["/both", "/narrow-first", "/both", "/narrow-first"] {
        assert_eq!(gateway.get(path).status, 429);
    }
    let response = gateway.get("/wide");
    assert_eq!(response.status, 200);
    assert_eq!(
        response.remaining("wide"),
        8,
        "two of ten were spent: one on /both, one on /wide"
    );
}

#[test]
fn every_layer_limits_on_its_own() {
    let gateway = Gateway::with(&format!(
        r#"
        {TRUSTING}
        [gateway]
        limits = ["global", "per_ip"]
        [limit.global]
        key = []
        rate = "1/h"
        burst = 7
        [limit.per_ip]
        key = ["ip"]
        rate = "1/h"
        burst = 4
        [limit.per_user]
        key = ["user"]
        rate = "1/h"
        burst = 2
        [limit.per_route]
        key = ["route"]
        rate = "1/h"
        burst = 1
        [[route]]
        name = "export"
        path = "/export"
        upstream = "origin"
        limits = ["per_route"]
        [[route]]
        name = "all"
        path = "/{{*rest}}"
        upstream = "origin"
        limits = ["per_user"]
        "#
    ))
    .start();
    let request = |path: &str, ip: &str, user: &str| {
        gateway.send(
            &Request::get(path)
                .header("x-forwarded-for", ip)
                .header("x-user-id", user),
        )
    };
    let violated = |response: crate::support::Response| {
        assert_eq!(response.status, 429);
        response.json()["violated-policies"].clone()
    };

    assert_eq!(request("/", "198.51.100.1", "ann").status, 200);
    assert_eq!(request("/", "198.51.100.1", "ann").status, 200);
    assert_eq!(
        violated(request("/", "198.51.100.1", "ann")),
        serde_json::json!(["per_user"])
    );
    assert_eq!(
        request("/", "198.51.100.1", "bob").status,
        200,
        "another user has a bucket of their own"
    );
    assert_eq!(request("/export", "198.51.100.1", "bob").status, 200);
    assert_eq!(
        violated(request("/", "198.51.100.1", "bob")),
        serde_json::json!(["per_ip"])
    );
    assert_eq!(
        violated(request("/export", "198.51.100.2", "cid")),
        serde_json::json!(["per_route"])
    );
    assert_eq!(request("/", "198.51.100.2", "cid").status, 200);
    assert_eq!(request("/", "198.51.100.2", "cid").status, 200);
    assert_eq!(
        request("/", "198.51.100.3", "dot").status,
        200,
        "the seventh of all"
    );
    assert_eq!(
        violated(request("/", "198.51.100.4", "eve")),
        serde_json::json!(["global"])
    );
}

#[test]
fn a_limit_by_user_does_not_apply_to_anonymous_requests() {
    let gateway = Gateway::with(&format!(
        "{TRUSTING}\n[gateway]\nlimits = [\"per_user\"]\n\
         [limit.per_user]\nkey = [\"user\"]\nrate = \"1/h\"\nburst = 1\n"
    ))
    .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200, 200, 200]);
    assert_eq!(gateway.statuses(&from_user("ann"), 2), [200, 429]);
}

#[test]
fn user_or_ip_counts_anonymous_requests_by_address() {
    let gateway = Gateway::with(&format!(
        "{TRUSTING}\n[gateway]\nlimits = [\"each\"]\n\
         [limit.each]\nkey = [\"user_or_ip\"]\nrate = \"1/h\"\nburst = 1\n"
    ))
    .start();
    assert_eq!(gateway.statuses(&from_ip("198.51.100.1"), 2), [200, 429]);
    assert_eq!(gateway.statuses(&from_ip("198.51.100.2"), 2), [200, 429]);
    let ann = from_ip("198.51.100.1").header("x-user-id", "ann");
    assert_eq!(gateway.statuses(&ann, 2), [200, 429]);
    let look_alike = from_ip("198.51.100.9").header("x-user-id", "198.51.100.1");
    assert_eq!(
        gateway.statuses(&look_alike, 1),
        [200],
        "a user named like an address is not that address"
    );
}

#[test]
fn a_tier_has_its_own_rate() {
    let gateway = Gateway::with(&format!(
        r#"
        {TRUSTING}
        [gateway]
        limits = ["per_user"]
        [limit.per_user]
        key = ["user"]
        rate = {{ default = "1/h", pro = "100/s" }}
        "#
    ))
    .start();
    let tiered = |user: &str, tier: &str| from_user(user).header("x-user-tier", tier);
    assert_eq!(
        gateway.statuses(&from_user("ann"), 2),
        [200, 429],
        "no tier: the default"
    );
    assert_eq!(
        gateway.statuses(&tiered("bob", "unheard-of"), 2),
        [200, 429],
        "an unknown tier: the default"
    );
    assert_eq!(
        gateway.statuses(&tiered("cid", "pro"), 20),
        [200; 20],
        "a burst of one second of 100/s"
    );
}

#[test]
fn a_route_may_cost_more_than_one_unit() {
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["units"]
        [limit.units]
        key = ["ip"]
        rate = "1/h"
        burst = 25
        [[route]]
        name = "export"
        path = "/export"
        upstream = "origin"
        cost = 10
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .start();
    assert_eq!(gateway.get("/export").remaining("units"), 15);
    assert_eq!(gateway.get("/export").remaining("units"), 5);
    let rejected = gateway.get("/export");
    assert_eq!(rejected.status, 429);
    let wait = rejected.retry_after().expect("ten units come back in time");
    assert!(
        (4 * 3600..=5 * 3600).contains(&wait),
        "five units are missing at one per hour: {wait} s"
    );
    assert_eq!(
        gateway.get("/other").remaining("units"),
        4,
        "the rejected export cost nothing"
    );
}

#[test]
fn a_route_skips_and_adds_limits() {
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["everywhere"]
        [limit.everywhere]
        key = ["ip"]
        rate = "1/h"
        burst = 1
        [[route]]
        name = "free"
        path = "/free"
        upstream = "origin"
        skip_limits = ["everywhere"]
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 2), [200, 429]);
    let free = gateway.get("/free");
    assert_eq!((free.status, free.limits()), (200, Vec::<String>::new()));
}

#[test]
fn routes_tell_hosts_methods_and_paths_apart() {
    let gateway = Gateway::with(
        r#"
        [limit.login]
        key = ["ip"]
        rate = "1/h"
        burst = 1
        [[route]]
        name = "login"
        hosts = ["api.example.com"]
        path = "/users/{id}/login"
        methods = ["POST"]
        upstream = "origin"
        limits = ["login"]
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .start();
    let login = |method: &str, host: &str, path: &str| {
        gateway
            .send(
                &Request::new(method, path)
                    .header("host", host)
                    .header("content-length", "0"),
            )
            .limits()
            .len()
    };
    assert_eq!(login("POST", "api.example.com", "/users/7/login"), 1);
    assert_eq!(
        login("POST", "API.example.com:80", "/users/8/login"),
        1,
        "neither case nor port is part of a host"
    );
    assert_eq!(login("GET", "api.example.com", "/users/7/login"), 0);
    assert_eq!(login("POST", "www.example.com", "/users/7/login"), 0);
    assert_eq!(login("POST", "api.example.com", "/users/7/8/login"), 0);
}

#[test]
fn no_route_is_404_and_meets_the_limits_of_every_request() {
    let gateway = Gateway::with(&format!(
        "{}\n[[route]]\nname = \"only\"\npath = \"/only\"\nupstream = \"origin\"\n",
        per_ip(2)
    ))
    .start();
    let absent = gateway.get("/absent");
    assert_eq!(absent.status, 404);
    assert_eq!(
        absent.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(gateway.get("/only").status, 200);
    assert_eq!(
        gateway.get("/absent").status,
        429,
        "who tries names is limited like everybody"
    );
}

#[test]
fn an_api_key_names_its_user_and_an_unknown_one_is_401() {
    let origin = Origin::ok();
    let keys = format!(
        "[keys.ann]\nsha256 = \"{}\"\nuser = \"ann\"\ntier = \"pro\"\n[keys.bob]\nsha256 = \"{}\"\nuser = \"bob\"\n",
        sha256_hex("ann's secret"),
        sha256_hex("bob's secret"),
    );
    let gateway = Gateway::with(
        r#"
        [[user]]
        from = "api_key"
        header = "x-api-key"
        keys_file = "keys.toml"
        [gateway]
        limits = ["per_user"]
        [limit.per_user]
        key = ["user"]
        rate = { default = "1/h", pro = "100/s" }
        "#,
    )
    .file("keys.toml", &keys)
    .upstream(&origin)
    .start();
    let with_key = |key: &str| Request::get("/").header("x-api-key", key);

    assert_eq!(gateway.statuses(&with_key("bob's secret"), 2), [200, 429]);
    assert_eq!(
        gateway.statuses(&with_key("ann's secret"), 5),
        [200; 5],
        "the key's tier is pro"
    );
    let unknown = gateway.send(&with_key("nobody's secret"));
    assert_eq!(unknown.status, 401);
    assert_eq!(unknown.header("www-authenticate"), Some("ApiKey"));
    assert!(
        !unknown.text().contains("nobody's secret"),
        "the answer does not repeat the key"
    );
    let seen = origin.requests();
    assert_eq!(seen.len(), 6, "an unknown key does not reach the origin");
    assert_eq!(seen[0].header("x-user-id"), Some("bob"));
    assert_eq!(seen[1].header("x-user-id"), Some("ann"));
    assert_eq!(seen[1].header("x-rate-limit-tier"), Some("pro"));
    gateway.wait_for_metric("tidegate_identity_rejected_total", 1.0);
}

#[test]
fn a_key_in_authorization_is_asked_for_as_a_bearer() {
    let gateway = Gateway::with(
        "[[user]]\nfrom = \"api_key\"\nheader = \"authorization\"\nkeys_file = \"keys.toml\"\n",
    )
    .file("keys.toml", "[keys]\n")
    .start();
    let unknown = gateway.send(&Request::get("/").header("authorization", "Bearer nobody"));
    assert_eq!(unknown.status, 401);
    assert_eq!(unknown.header("www-authenticate"), Some("Bearer"));
}

#[test]
fn an_unknown_key_may_be_anonymous_instead() {
    let keys = format!(
        "[keys.ann]\nsha256 = \"{}\"\nuser = \"ann\"\n",
        sha256_hex("s")
    );
    let gateway = Gateway::with(
        r#"
        [[user]]
        from = "api_key"
        header = "x-api-key"
        keys_file = "keys.toml"
        invalid = "anonymous"
        [gateway]
        limits = ["each"]
        [limit.each]
        key = ["user_or_ip"]
        rate = "1/h"
        burst = 2
        "#,
    )
    .file("keys.toml", &keys)
    .start();
    assert_eq!(
        gateway.statuses(&Request::get("/").header("x-api-key", "wrong"), 1),
        [200]
    );
    assert_eq!(
        gateway.statuses(&Request::get("/"), 2),
        [200, 429],
        "it was counted by its address"
    );
    assert_eq!(
        gateway.statuses(&Request::get("/").header("x-api-key", "s"), 1),
        [200]
    );
}

#[test]
fn forwarded_addresses_from_untrusted_peers_change_nothing() {
    let gateway = Gateway::with(&format!(
        "[client_ip]\ntrusted_proxies = [\"192.0.2.0/24\"]\n{}",
        per_ip(3)
    ))
    .start();
    let statuses: Vec<u16> = (1..=4)
        .map(|n| gateway.send(&from_ip(&format!("198.51.100.{n}"))).status)
        .collect();
    assert_eq!(statuses, [200, 200, 200, 429]);
}

#[test]
fn forwarded_addresses_from_trusted_peers_are_read_from_the_right() {
    let gateway = Gateway::with(&format!("{TRUSTING}\n{}", per_ip(1))).start();
    assert_eq!(gateway.statuses(&from_ip("198.51.100.1"), 2), [200, 429]);
    assert_eq!(
        gateway.statuses(&from_ip("198.51.100.2"), 1),
        [200],
        "another client"
    );
    assert_eq!(
        gateway.statuses(&from_ip("10.1.1.1, 198.51.100.1, 127.0.0.9"), 1),
        [429],
        "what the client wrote itself stands left of its address; trusted hops stand right of it"
    );
}

#[test]
fn addresses_may_be_read_from_forwarded_instead() {
    let trusting = "[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\nheader = \"forwarded\"\n";
    let gateway = Gateway::with(&format!("{trusting}{}", per_ip(1))).start();
    let forwarded = |value: &str| Request::get("/").header("forwarded", value);
    let first = forwarded("for=\"[2001:db8::1]:4711\";proto=https");
    assert_eq!(gateway.statuses(&first, 2), [200, 429]);
    let behind = "for=10.1.1.1, For=\"[2001:db8::1]\", for=127.0.0.9;by=_hidden";
    assert_eq!(
        gateway.statuses(&forwarded(behind), 1),
        [429],
        "the same client"
    );
    let other = forwarded("for=198.51.100.2").header("x-forwarded-for", "2001:db8::1");
    assert_eq!(
        gateway.statuses(&other, 1),
        [200],
        "the other header is not read"
    );
}

#[test]
fn users_named_by_untrusted_peers_are_nobody() {
    let origin = Origin::ok();
    let gateway = Gateway::with(
        r#"
        [client_ip]
        trusted_proxies = ["192.0.2.0/24"]
        [[user]]
        from = "header"
        header = "x-user-id"
        [gateway]
        limits = ["each"]
        [limit.each]
        key = ["user_or_ip"]
        rate = "1/h"
        burst = 2
        "#,
    )
    .upstream(&origin)
    .start();
    let statuses: Vec<u16> = ["ann", "bob", "cid"]
        .iter()
        .map(|user| gateway.send(&from_user(user)).status)
        .collect();
    assert_eq!(statuses, [200, 200, 429], "all are one address");
    assert_eq!(
        origin.requests()[0].header("x-user-id"),
        None,
        "the claim is removed before the origin sees it"
    );
}

#[test]
fn ipv6_clients_share_a_bucket_by_network() {
    let gateway = Gateway::with(&format!("{TRUSTING}\n{}", per_ip(2))).start();
    assert_eq!(gateway.statuses(&from_ip("2001:db8:1:2::a"), 1), [200]);
    assert_eq!(
        gateway.statuses(&from_ip("2001:db8:1:2:ffff::b"), 2),
        [200, 429],
        "the same /64"
    );
    assert_eq!(
        gateway.statuses(&from_ip("2001:db8:1:3::a"), 1),
        [200],
        "another /64"
    );
    assert_eq!(gateway.statuses(&from_ip("::ffff:198.51.100.7"), 1), [200]);
    assert_eq!(
        gateway.statuses(&from_ip("198.51.100.7"), 2),
        [200, 429],
        "IPv4 in either spelling"
    );
}

#[test]
fn a_header_may_be_the_key_and_padding_does_not_make_it_another() {
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"per_device\"]\n\
         [limit.per_device]\nkey = [\"header:x-device\"]\nrate = \"1/h\"\nburst = 1\n",
    )
    .start();
    let device = |value: &str| Request::get("/").header("x-device", value);
    assert_eq!(gateway.statuses(&device("one"), 2), [200, 429]);
    assert_eq!(gateway.statuses(&device("  one\t"), 1), [429]);
    assert_eq!(gateway.statuses(&device("two"), 1), [200]);
    assert_eq!(
        gateway.statuses(&Request::get("/"), 2),
        [200, 200],
        "without the field the limit does not apply"
    );
}

#[test]
fn every_spelling_of_a_path_meets_its_limit() {
    let gateway = Gateway::with(
        r#"
        [limit.login]
        key = ["ip"]
        rate = "1/h"
        burst = 100
        [[route]]
        name = "login"
        path = "/login"
        upstream = "origin"
        limits = ["login"]
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .start();
    for path in [
        "/login",
        "//login",
        "/./login",
        "/a/../login",
        "/%6Cogin",
        "/login/",
        "/login;x=1",
        "/login?a",
    ] {
        assert_eq!(gateway.get(path).limits(), ["login"], "{path}");
    }
    for path in ["/Login", "/login2", "/", "/login%20"] {
        assert_eq!(gateway.get(path).limits(), Vec::<String>::new(), "{path}");
    }
}

#[test]
fn both_protocols_spend_from_one_bucket() {
    let gateway = Gateway::with(&per_ip(3)).start();
    assert_eq!(gateway.get("/").status, 200);
    let both: Vec<u16> =
        http2::send_all(gateway.address(), &[Request::get("/"), Request::get("/")])
            .into_iter()
            .map(|response| response.expect("an answer").status)
            .collect();
    assert_eq!(both, [200, 200]);
    assert_eq!(gateway.get("/").status, 429);
    let over_http2 = http2::send(gateway.address(), &Request::get("/"));
    assert_eq!(over_http2.status, 429);
    assert!(over_http2.retry_after().is_some());
}

#[test]
fn curl_sees_the_limit_too() {
    let gateway = Gateway::with(&per_ip(2)).start();
    let url = format!("http://{}/", gateway.address());
    let status = |option: &str| {
        curl(&[
            option,
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code} %{http_version}",
            &url,
        ])
    };
    assert_eq!(status("--http1.1"), "200 1.1");
    assert_eq!(status("--http2-prior-knowledge"), "200 2");
    assert_eq!(status("--http2-prior-knowledge"), "429 2");
    assert_eq!(status("--http1.1"), "429 1.1");
}

#[test]
fn guessing_keys_is_limited_where_the_route_counts_addresses() {
    let origin = Origin::ok();
    let toml = r#"
        [[user]]
        from = "api_key"
        header = "x-api-key"
        keys_file = "keys.toml"
        [limit.per_ip]
        key = ["ip"]
        rate = "1/h"
        burst = 3
        [limit.shared]
        key = []
        rate = "1/h"
        burst = 5
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        limits = ["per_ip", "shared"]
    "#;
    let keys = "[keys.alice]\nsha256 = \"2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90\"\n";
    let gateway = Gateway::with(toml)
        .file("keys.toml", keys)
        .upstream(&origin)
        .start();
    let guess = Request::get("/").header("x-api-key", "a guess");
    assert_eq!(gateway.statuses(&guess, 5), [401, 401, 401, 429, 429]);
    // a client with a guessed credential cannot spend the route's shared limit
    let admitted = r#"tidegate_decisions_total{limit="shared",outcome="admitted"}"#;
    assert_eq!(gateway.metric(admitted), 0.0);
}
