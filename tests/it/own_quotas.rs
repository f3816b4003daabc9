//! The status page, on which callers see their own quotas.

use serde_json::{Value, json};

use crate::support::{Gateway, Origin, Request};

const PAGE: &str = "/.well-known/ratelimit";

const LIMITS: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [[user]]
    from = "header"
    tier_header = "x-user-tier"
    [gateway]
    limits = ["per_user", "everybody", "login", "per_path", "slots", "watching", "closed"]
    [limit.per_user]
    key = ["user"]
    rate = { default = "6/min", pro = "60/min" }
    burst = { default = 3, pro = 30 }
    [limit.everybody]
    key = []
    algorithm = "fixed_window"
    rate = "1000/d"
    [limit.login]
    key = ["ip"]
    rate = "100/min"
    disclose = false
    [limit.per_path]
    key = ["ip", "path"]
    rate = "10/s"
    [limit.slots]
    key = ["ip"]
    algorithm = "concurrency"
    limit = 7
    [limit.watching]
    key = ["ip"]
    rate = "1/h"
    mode = "shadow"
    [limit.closed]
    key = ["user"]
    rate = "10/s"
    exempt = { users = ["alice", "bob"] }
    [[override]]
    limit = "closed"
    user = "mallory"
    block = true
"#;

fn page_of(user: &str) -> Request {
    Request::get(PAGE).header("x-user-id", user)
}

/// Each limit on the page, by name.
fn limits(gateway: &Gateway, request: &Request) -> Vec<(String, Value)> {
    let response = gateway.send(request);
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let page = response.json();
    let id = response.header("x-request-id").expect("an id");
    assert_eq!(page["request_id"], id);
    let limits = page["limits"].as_array().expect("a list");
    limits
        .iter()
        .map(|limit| {
            (
                limit["name"].as_str().expect("a name").to_owned(),
                limit.clone(),
            )
        })
        .collect()
}

fn names(limits: &[(String, Value)]) -> Vec<&str> {
    limits.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn callers_see_how_their_own_limits_stand_and_no_others() {
    let gateway = Gateway::with(LIMITS).start();
    let alice = Request::get("/").header("x-user-id", "alice");
    assert_eq!(gateway.statuses(&alice, 2), [200, 200]);

    let seen = limits(&gateway, &page_of("alice"));
    assert_eq!(names(&seen), ["per_user", "everybody", "per_path", "slots"]);
    let per_user = &seen[0].1;
    assert_eq!(
        per_user["description"],
        "per_user (6/min, at most 3 at once)"
    );
    assert_eq!(
        (&per_user["quota"], &per_user["window"]),
        (&json!(3), &json!(30))
    );
    assert_eq!(per_user["remaining"], 1);
    let reset = per_user["reset"].as_u64().expect("seconds");
    assert!((1..=20).contains(&reset), "{reset}");
    assert_eq!(
        (&seen[1].1["quota"], &seen[1].1["remaining"]),
        (&json!(1000), &json!(998))
    );
    // the path decides which bucket counts
    assert_eq!(
        (&seen[2].1["quota"], seen[2].1.get("remaining")),
        (&json!(10), None)
    );
    let slots = json!({"name": "slots", "description": "slots (7 at a time)", "quota": 7,
        "unit": "concurrent-requests", "remaining": 7});
    assert_eq!(seen[3].1, slots);

    let pro = page_of("bob").header("x-user-tier", "pro");
    let of_bob = &limits(&gateway, &pro)[0].1;
    assert_eq!(
        (&of_bob["quota"], &of_bob["remaining"]),
        (&json!(30), &json!(30))
    );
    let nobody = limits(&gateway, &Request::get(PAGE));
    assert_eq!(
        names(&nobody),
        ["everybody", "per_path", "slots"],
        "nobody has no user"
    );
    let mallory = limits(&gateway, &page_of("mallory"));
    let closed = &mallory.last().expect("a limit").1;
    assert_eq!(
        (&closed["name"], &closed["remaining"]),
        (&json!("closed"), &json!(0))
    );
    assert_eq!(closed["closed"], true);
}

#[test]
fn the_page_charges_nothing_and_reaches_no_origin() {
    let origin = Origin::echo();
    let gateway = Gateway::with(LIMITS).upstream(&origin).start();
    let mut client = gateway.connect();
    for spelling in [
        PAGE,
        "/.well-known//ratelimit/?a=b",
        "/x/../.well-known/%72atelimit",
    ] {
        for _ in 0..2 {
            let request = Request::get(spelling).header("x-user-id", "alice");
            assert_eq!(client.send(&request).status, 200, "{spelling}");
        }
    }
    let seen = limits(&gateway, &page_of("alice"));
    assert_eq!(
        (&seen[0].1["remaining"], &seen[1].1["remaining"]),
        (&json!(3), &json!(1000))
    );
    assert_eq!(origin.requests().len(), 0);
    let head = client.send(&Request::new("HEAD", PAGE));
    assert_eq!((head.status, head.body.len()), (200, 0));
    let post = client.send(&Request::post(PAGE, "x"));
    assert_eq!(
        (post.status, post.header("allow")),
        (405, Some("GET, HEAD"))
    );
    assert_eq!(
        gateway.metric(r#"tidegate_requests_total{route="(status)",code="200"}"#),
        8.0
    );
}

#[test]
fn the_page_has_a_limit_of_its_own() {
    let gateway = Gateway::with(LIMITS).start();
    let mut client = gateway.connect();
    let asked: Vec<_> = (0..40).map(|_| client.send(&page_of("alice"))).collect();
    let shown = asked
        .iter()
        .filter(|response| response.status == 200)
        .count();
    assert!((10..=25).contains(&shown), "{shown} of 40 at once");
    let rejected = asked
        .iter()
        .find(|response| response.status == 429)
        .expect("a rejection");
    assert_eq!(rejected.retry_after(), Some(1));
    assert_eq!(rejected.limits(), ["(status)"]);
    // the status page's own limit applies to no other route
    assert_eq!(
        gateway
            .send(&Request::get("/").header("x-user-id", "alice"))
            .status,
        200
    );
}

#[test]
fn the_page_is_no_way_to_guess_credentials() {
    let gateway = Gateway::with(
        r#"
        [[user]]
        from = "api_key"
        keys_file = "keys.toml"
        [gateway]
        limits = ["per_ip"]
        [limit.per_ip]
        key = ["ip"]
        rate = "1/h"
        burst = 2
    "#,
    )
    .file("keys.toml", "[keys]\n")
    .start();
    let guess = Request::get(PAGE).header("x-api-key", "guess");
    assert_eq!(
        gateway.statuses(&guess, 3),
        [401, 401, 429],
        "it is charged as elsewhere"
    );
    assert_eq!(gateway.get(PAGE).status, 200);
}

#[test]
fn the_page_may_be_elsewhere_or_nowhere() {
    let origin = Origin::echo();
    let gateway = Gateway::with("[response]\nstatus_path = \"/v1/limits\"")
        .upstream(&origin)
        .start();
    assert_eq!(gateway.get("/v1/limits").json()["limits"], json!([]));
    gateway.get(PAGE);
    assert_eq!(origin.requests().len(), 1);

    let gateway = Gateway::with("[response]\nstatus_path = \"\"")
        .upstream(&origin)
        .start();
    gateway.get(PAGE);
    assert_eq!(origin.requests().len(), 2);
}
