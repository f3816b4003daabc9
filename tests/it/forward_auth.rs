//! `/check`: verdicts for other proxies, which serve the requests themselves.

mod recipes;

use crate::support::{Client, Gateway, Request, Response, wait::eventually_eq};

const LIMITED: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [[user]]
    from = "header"
    header = "x-user-id"
    tier_header = "x-user-tier"
    [gateway]
    limits = ["per_ip"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 3
    [limit.login]
    key = ["ip"]
    rate = "1/h"
    burst = 1
    [[route]]
    name = "login"
    hosts = ["shop.example"]
    path = "/login"
    methods = ["POST"]
    upstream = "origin"
    limits = ["login"]
    [[route]]
    name = "all"
    path = "/{*rest}"
    upstream = "origin"
"#;

/// With a proxy that is trusted to verify users.
fn believing(toml: &str) -> String {
    format!("[admin]\naddress = \"127.0.0.1:0\"\ncheck_identity_from = [\"127.0.0.0/8\"]\n{toml}")
}

/// A proxy's request to `/check` for this client address and target.
fn question(path: &str, client: &str, target: &str) -> Request {
    Request::get(path)
        .header("host", "shop.example")
        .header("x-forwarded-for", client)
        .header("x-forwarded-uri", target)
}

fn ask(gateway: &Gateway, question: &Request) -> Response {
    Client::connect(gateway.admin_address()).send(question)
}

fn statuses(gateway: &Gateway, question: &Request, count: usize) -> Vec<u16> {
    let ask = |_| ask(gateway, question).status;
    (0..count).map(ask).collect()
}

#[test]
fn a_verdict_is_what_the_client_would_be_told_and_costs_the_same() {
    let gateway = Gateway::with(&believing(LIMITED)).start();
    let asked = question("/check", "203.0.113.9", "/a?b=c");
    let first = ask(
        &gateway,
        &asked
            .header("x-user-id", "alice")
            .header("x-user-tier", "pro"),
    );
    assert_eq!((first.status, first.text().as_str()), (200, ""));
    assert_eq!(first.remaining("per_ip"), 2);
    assert_eq!(first.header("x-user-id"), Some("alice"));
    assert_eq!(first.header("x-rate-limit-tier"), Some("pro"));
    assert!(first.header("x-request-id").is_some());
    assert_eq!(first.header("x-ratelimit-limit"), Some("3"));

    let served = Request::get("/").header("x-forwarded-for", "203.0.113.9");
    assert_eq!(gateway.statuses(&served, 1), [200], "the same bucket");
    assert_eq!(
        statuses(&gateway, &question("/check", "203.0.113.9", "/"), 1),
        [200]
    );

    let denied = ask(&gateway, &question("/check", "203.0.113.9", "/"));
    assert_eq!(denied.status, 429);
    assert!(
        denied.retry_after().is_some_and(|wait| wait > 3_000),
        "{denied:?}"
    );
    assert_eq!(denied.remaining("per_ip"), 0);
    assert_eq!(
        denied.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(gateway.statuses(&served, 1), [429]);
    let other = question("/check", "203.0.113.10", "/");
    assert_eq!(
        statuses(&gateway, &other, 4),
        [200, 200, 200, 429],
        "another client"
    );
    assert_eq!(
        gateway.metric("tidegate_decisions_total{limit=\"per_ip\",outcome=\"rejected\"}"),
        3.0
    );
}

#[test]
fn a_rejection_can_be_explained_by_its_request_id() {
    let gateway = Gateway::with(LIMITED).start();
    let asked = question("/check", "203.0.113.9", "/a").header("x-request-id", "edge-4711");
    assert_eq!(statuses(&gateway, &asked, 4), [200, 200, 200, 429]);
    let explained = gateway.look("/api/v1/decisions/edge-4711");
    let text = explained["text"].as_str().unwrap_or_default().to_owned();
    assert!(
        text.contains("203.0.113.9") && text.contains("per_ip"),
        "{text}"
    );
}

#[test]
fn the_route_is_that_of_the_request_which_the_proxy_has_received() {
    let gateway = Gateway::with(LIMITED).start();
    let login = question("/check", "203.0.113.9", "/login").header("x-forwarded-method", "POST");
    let elsewhere =
        question("/check", "203.0.113.9", "/login").header("x-forwarded-host", "api.example");
    assert_eq!(ask(&gateway, &login).limits(), ["login", "per_ip"]);
    assert_eq!(
        ask(&gateway, &login).limits().first().map(String::as_str),
        Some("login")
    );
    assert_eq!(ask(&gateway, &login).status, 429);
    let elsewhere = ask(&gateway, &elsewhere.header("x-forwarded-method", "POST"));
    assert_eq!(
        (elsewhere.status, elsewhere.limits()),
        (200, vec!["per_ip".to_owned()])
    );
    let envoy = Request::new("POST", "/check/login")
        .header("host", "shop.example")
        .header("x-forwarded-for", "203.0.113.20");
    assert_eq!(ask(&gateway, &envoy).limits(), ["login", "per_ip"]);
}

#[test]
fn whoever_is_no_trusted_proxy_spends_nobody_s_quota() {
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"a\"]\n[limit.a]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = 3\n",
    )
    .start();
    let asked = question("/check", "203.0.113.9", "/");
    assert_eq!(statuses(&gateway, &asked, 5), [403; 5]);
    assert_eq!(gateway.metric("tidegate_decisions_total"), 0.0);
    let said = || gateway.stderr().matches("rejected /check").count();
    eventually_eq("the log says it once", 1, said);
}

#[test]
fn a_user_in_a_header_is_believed_from_named_peers_only() {
    let elsewhere = believing(LIMITED).replace("127.0.0.0/8", "10.0.0.5");
    for toml in [LIMITED, &elsewhere] {
        let gateway = Gateway::with(toml).start();
        let asked = question("/check", "203.0.113.9", "/")
            .header("x-user-id", "admin")
            .header("x-user-tier", "pro");
        let verdict = ask(&gateway, &asked);
        assert_eq!(verdict.status, 200);
        for name in ["x-user-id", "x-rate-limit-tier", "x-ratelimit-over"] {
            assert_eq!(verdict.header(name), Some(""), "it replaces the client's");
        }
        let said = || gateway.stderr().matches("check_identity_from").count();
        eventually_eq("the log says it", 1, said);
        ask(&gateway, &asked);
        eventually_eq("once", 1, said);
        // on a listener the same proxy is still trusted
        let served = Request::get("/")
            .header("x-forwarded-for", "203.0.113.9")
            .header("x-user-id", "admin");
        assert_eq!(gateway.send(&served).status, 200);
    }
}

#[test]
fn a_name_that_the_proxy_passes_on_cannot_say_otherwise() {
    let gateway = Gateway::with(LIMITED).start();
    let asked = question("/check", "203.0.113.9", "/").header("x-original-uri", "/cheap");
    assert_eq!(ask(&gateway, &asked).status, 400);
    let nothing = Request::get("/check").header("host", "shop.example");
    assert_eq!(ask(&gateway, &nothing).status, 400);
    let bad = question("/check?style=nginx", "203.0.113.9", "/%2e%2e/");
    let bad = ask(&gateway, &bad);
    assert_eq!(
        (bad.status, bad.header("x-ratelimit-status")),
        (403, Some("400"))
    );
}

#[test]
fn nginx_gets_statuses_that_it_can_tell_apart() {
    let gateway = Gateway::with(LIMITED).start();
    let asked = question("/check?style=nginx", "203.0.113.9", "/");
    assert_eq!(statuses(&gateway, &asked, 3), [200; 3]);
    let denied = ask(&gateway, &asked);
    assert_eq!(denied.status, 403);
    assert_eq!(denied.header("x-ratelimit-status"), Some("429"));
    assert!(denied.retry_after().is_some());
}

#[test]
fn a_denied_grpc_call_is_not_told_in_a_200_which_would_let_it_pass() {
    let gateway = Gateway::with(LIMITED).start();
    let asked = question("/check", "203.0.113.9", "/pkg.Service/Call");
    let asked = asked
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers");
    assert_eq!(statuses(&gateway, &asked, 4), [200, 200, 200, 429]);
}

#[test]
fn what_ends_with_the_request_is_not_held_for_a_verdict() {
    let gateway = Gateway::with(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n[gateway]\nlimits = [\"slots\", \"failed\", \"queue\"]\n\
         [limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = 1\n\
         [limit.failed]\nkey = []\nrate = \"1/h\"\nburst = 1\ncount_status = [200]\n\
         [limit.queue]\nkey = []\nrate = \"10/h\"\nburst = 1\nover = \"delay\"\nmax_delay = \"1h\"\n",
    )
    .start();
    let asked = question("/check", "203.0.113.9", "/");
    assert_eq!(statuses(&gateway, &asked, 4), [200; 4], "at once");
}

#[test]
fn a_reload_holds_for_the_next_verdict() {
    let gateway = Gateway::with(LIMITED).start();
    let asked = question("/check", "203.0.113.9", "/");
    assert_eq!(ask(&gateway, &asked).header("x-ratelimit-limit"), Some("3"));
    gateway.reconfigure(&LIMITED.replace("burst = 3", "burst = 7"));
    assert_eq!(ask(&gateway, &asked).header("x-ratelimit-limit"), Some("7"));
}
