//! Fields on every response, and the responses that the gateway generates itself.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::support::{Gateway, Origin, Request, Response, http2, wait::time_passes};

/// Burst of three, one request refilled every ten seconds; `[response]` is the caller's.
fn three_per_ip(response: &str) -> String {
    format!(
        "[response]\n{response}\n[gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nrate = \"6/min\"\nburst = 3\n"
    )
}

fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    i64::try_from(since.as_secs()).expect("a date of this age")
}

fn number(response: &Response, name: &str) -> i64 {
    let value = response
        .header(name)
        .unwrap_or_else(|| panic!("no {name} in {:?}", response.headers));
    value
        .parse()
        .unwrap_or_else(|_| panic!("{name} is {value:?}"))
}

#[test]
fn admitted_responses_describe_the_limit_in_the_draft_syntax() {
    let gateway = Gateway::with(&three_per_ip(r#"fields = ["ratelimit"]"#)).start();
    let first = gateway.get("/");
    assert_eq!(first.status, 200);
    // a bucket of 3 that refills one per 10 s fills in 30 s; the two that remain are worth 20 s
    assert_eq!(
        first.header("ratelimit-policy"),
        Some(r#""per_ip";q=3;w=30"#)
    );
    assert_eq!(first.header("ratelimit"), Some(r#""per_ip";r=2;t=20"#));
    assert_eq!(
        gateway.get("/").header("ratelimit"),
        Some(r#""per_ip";r=1;t=10"#)
    );
    let x_fields = first
        .headers
        .iter()
        .filter(|(name, _)| name.to_ascii_lowercase().starts_with("x-ratelimit"));
    assert_eq!(x_fields.count(), 0, "only the family that was asked for");
}

#[test]
fn admitted_responses_describe_the_limit_in_the_x_fields() {
    let gateway = Gateway::with(&three_per_ip(r#"fields = ["x_ratelimit"]"#)).start();
    let before = now();
    let first = gateway.get("/");
    assert_eq!(number(&first, "x-ratelimit-limit"), 3);
    assert_eq!(number(&first, "x-ratelimit-remaining"), 2);
    let reset = number(&first, "x-ratelimit-reset");
    assert!(
        (before..=now() + 31).contains(&reset),
        "the reset {reset} is no second of the next half minute"
    );
    assert_eq!(first.header("ratelimit"), None);
}

#[test]
fn admitted_responses_describe_the_limit_in_the_old_triple() {
    let gateway = Gateway::with(&three_per_ip(r#"fields = ["ratelimit_triple"]"#)).start();
    let first = gateway.get("/");
    assert_eq!(number(&first, "ratelimit-limit"), 3);
    assert_eq!(number(&first, "ratelimit-remaining"), 2);
    assert!(
        (1..=30).contains(&number(&first, "ratelimit-reset")),
        "a delay in seconds, not a date"
    );
}

#[test]
fn the_default_is_the_draft_and_the_x_fields_on_every_response() {
    let gateway = Gateway::with(&three_per_ip("")).start();
    let first = gateway.get("/");
    assert_eq!(first.remaining("per_ip"), 2);
    assert_eq!(number(&first, "x-ratelimit-remaining"), 2);
    assert_eq!(
        first.retry_after(),
        None,
        "an admitted response has no Retry-After"
    );
}

#[test]
fn fields_may_be_left_to_rejections() {
    let gateway = Gateway::with(&three_per_ip(r#"on = "rejected""#)).start();
    for _ in 0..3 {
        let admitted = gateway.get("/");
        assert_eq!((admitted.status, admitted.header("ratelimit")), (200, None));
        assert_eq!(admitted.header("x-ratelimit-limit"), None);
    }
    let rejected = gateway.get("/");
    assert_eq!((rejected.status, rejected.remaining("per_ip")), (429, 0));
}

#[test]
fn a_rejection_says_everything_that_a_client_needs() {
    let gateway = Gateway::with(&three_per_ip("")).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let before = now();
    let rejected = gateway.get("/");
    assert_eq!(rejected.status, 429);
    assert_eq!(rejected.header("cache-control"), Some("no-store"));
    assert_eq!(
        rejected.header("content-type"),
        Some("application/problem+json")
    );
    assert!(
        rejected
            .header("x-request-id")
            .is_some_and(|id| !id.is_empty())
    );
    assert!(rejected.header("date").is_some());
    assert_eq!(
        rejected.header("ratelimit-policy"),
        Some(r#""per_ip";q=3;w=30"#)
    );
    assert_eq!(rejected.remaining("per_ip"), 0);

    let wait = rejected.retry_after().expect("when to come back");
    assert!(
        (9..=10).contains(&wait),
        "one unit refills in 10 s, but Retry-After is {wait}"
    );
    let t = rejected
        .parameter("ratelimit", "per_ip", "t")
        .expect("t of a bucket");
    assert!(
        t <= i64::try_from(wait).expect("small"),
        "Retry-After {wait} points before the window's end, t={t}"
    );
    assert_eq!(number(&rejected, "x-ratelimit-remaining"), 0);
    assert!((before..=now() + 31).contains(&number(&rejected, "x-ratelimit-reset")));

    let problem = rejected.json();
    assert_eq!(
        problem["type"],
        "https://iana.org/assignments/http-problem-types#quota-exceeded"
    );
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], serde_json::json!(["per_ip"]));
    assert!(problem["title"].is_string());
}

#[test]
fn two_limits_that_deny_are_both_named_and_the_longer_wait_counts() {
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["fast", "slow", "roomy"]
        [limit.fast]
        key = ["ip"]
        rate = "1/10s"
        burst = 1
        [limit.slow]
        key = ["ip"]
        rate = "1/min"
        burst = 1
        [limit.roomy]
        key = ["ip"]
        rate = "100/s"
        "#,
    )
    .start();
    let admitted = gateway.get("/");
    assert_eq!(admitted.status, 200);
    let mut described = admitted.limits();
    described.sort();
    assert_eq!(
        described,
        ["fast", "roomy", "slow"],
        "every limit that applies to the request"
    );
    let rejected = gateway.get("/");
    assert_eq!(rejected.status, 429);
    let mut violated: Vec<_> = rejected.json()["violated-policies"]
        .as_array()
        .expect("a list")
        .iter()
        .map(ToString::to_string)
        .collect();
    violated.sort();
    assert_eq!(violated, ["\"fast\"", "\"slow\""]);
    assert!((59..=60).contains(&rejected.retry_after().expect("when to come back")));
}

#[test]
fn the_binding_limit_comes_first() {
    let gateway = Gateway::with(
        r#"
        [gateway]
        limits = ["wide", "narrow"]
        [limit.wide]
        key = ["ip"]
        rate = "1/h"
        burst = 1000
        [limit.narrow]
        key = ["ip"]
        rate = "1/h"
        burst = 3
        "#,
    )
    .start();
    let response = gateway.get("/");
    assert_eq!(response.limits(), ["narrow", "wide"]);
    assert_eq!(
        number(&response, "x-ratelimit-limit"),
        3,
        "the X fields can describe only one"
    );
}

#[test]
fn a_refused_head_has_fields_and_no_body() {
    let gateway = Gateway::with(&three_per_ip("")).start();
    let mut client = gateway.connect();
    let head = Request::new("HEAD", "/");
    let statuses: Vec<u16> = (0..3).map(|_| client.send(&head).status).collect();
    assert_eq!(statuses, [200; 3]);
    let rejected = client.send(&head);
    assert_eq!(rejected.status, 429);
    assert!(rejected.retry_after().is_some());
    assert_eq!(
        rejected.header("content-type"),
        Some("application/problem+json")
    );
    // a body would be read as the next response
    assert_eq!(client.send(&Request::get("/")).status, 429);
}

#[test]
fn the_body_of_a_rejection_may_be_json_or_text() {
    for (style, content_type) in [("json", "application/json"), ("text", "text/plain")] {
        let gateway = Gateway::with(&three_per_ip(&format!("body = \"{style}\""))).start();
        assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
        let rejected = gateway.get("/");
        assert_eq!(rejected.status, 429);
        let found = rejected.header("content-type").expect("a content type");
        assert!(found.starts_with(content_type), "{style}: {found}");
        assert!(!rejected.body.is_empty());
        if style == "json" {
            assert!(rejected.json().is_object());
        }
    }
}

#[test]
fn rejections_over_http2_carry_the_same() {
    let gateway = Gateway::with(&three_per_ip("")).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let rejected = http2::send(gateway.address(), &Request::get("/"));
    assert_eq!(rejected.status, 429);
    assert_eq!(rejected.remaining("per_ip"), 0);
    assert_eq!(rejected.json()["status"], 429);
    assert!(rejected.retry_after().is_some());
}

#[test]
fn the_origins_own_limits_are_kept_beside_ours() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(
            200,
            &[
                ("RateLimit", "\"up\";r=3;t=9"),
                ("RateLimit-Policy", "\"up\";q=5;w=10"),
            ],
            b"",
        )
    });
    let gateway = Gateway::with(&three_per_ip(r#"fields = ["ratelimit"]"#))
        .upstream(&origin)
        .start();
    let response = gateway.get("/");
    assert_eq!(response.limits(), ["up", "per_ip"]);
    assert_eq!(response.remaining("up"), 3);
    assert_eq!(response.parameter("ratelimit-policy", "up", "q"), Some(5));
    assert_eq!(
        response.parameter("ratelimit-policy", "per_ip", "q"),
        Some(3)
    );
}

#[test]
fn redirects_carry_no_ratelimit_field() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(301, &[("Location", "/elsewhere")], b"")
    });
    let gateway = Gateway::with(&three_per_ip(r#"fields = ["ratelimit"]"#))
        .upstream(&origin)
        .start();
    let response = gateway.get("/");
    assert_eq!(
        (response.status, response.header("location")),
        (301, Some("/elsewhere"))
    );
    // a client may take it for a reason to wait before it follows the redirect
    assert_eq!(response.header("ratelimit"), None);
    assert_eq!(gateway.get("/").status, 301, "it is charged all the same");
}

#[test]
fn errors_of_our_own_are_problems_too() {
    let gateway = Gateway::with("")
        .upstream_at(&format!("http://{}", crate::support::origin::nobody()))
        .start();
    let dead = gateway.get("/");
    assert_eq!(dead.status, 502);
    assert_eq!(
        dead.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(dead.header("cache-control"), Some("no-store"));
    assert_eq!(dead.json()["status"], 502);
    assert!(dead.header("x-request-id").is_some());
}

#[test]
fn the_reset_of_a_window_is_one_second_however_long_the_answer_takes() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        if exchange.request.target == "/slow" {
            time_passes(
                Duration::from_millis(1_200),
                "the second of the first answer ends",
            );
        }
        exchange.respond(200, &[], b"")
    });
    let gateway = Gateway::with(
        "[response]\nfields = [\"x_ratelimit\"]\n[gateway]\nlimits = [\"hourly\"]\n\
         [limit.hourly]\nkey = []\nalgorithm = \"fixed_window\"\nrate = \"1000/h\"\n",
    )
    .upstream(&origin)
    .start();
    let targets = ["/", "/slow", "/", "/slow", "/"];
    let resets: Vec<i64> = targets
        .iter()
        .map(|target| number(&gateway.get(target), "x-ratelimit-reset"))
        .collect();
    let first = resets[0];
    assert!(
        resets
            .iter()
            .all(|reset| *reset == first || *reset == first + 3_600),
        "within one window the reset wobbles: {resets:?}"
    );
    assert!(resets.is_sorted(), "{resets:?}");
}

#[test]
fn a_costly_request_is_told_the_wait_that_it_needs_whatever_remains() {
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"all\"]\n\
         [limit.all]\nkey = []\nrate = \"60/min\"\nburst = 60\n\
         [[route]]\nname = \"costly\"\npath = \"/costly\"\nupstream = \"origin\"\ncost = 40\n\
         [[route]]\nname = \"rest\"\npath = \"/{*rest}\"\nupstream = \"origin\"\n",
    )
    .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 30), [200; 30]);
    let rejected = gateway.get("/costly");
    assert_eq!(rejected.status, 429);
    // ten units are missing and one refills each second; a wait of thirty would be a fixed window's
    let wait = rejected.retry_after().expect("when to come back");
    assert!((9..=10).contains(&wait), "Retry-After is {wait}");
    let [remaining, window] = ["r", "t"].map(|name| rejected.parameter("ratelimit", "all", name));
    assert!((30..=31).contains(&remaining.expect("r")), "{remaining:?}");
    assert_eq!(window, i64::try_from(wait).ok());
}

#[test]
fn jitter_spreads_the_return_of_clients_and_only_upwards() {
    let gateway = Gateway::with(&format!("{}retry_jitter = 0.5\n", three_per_ip(""))).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let told: Vec<u64> = (0..60)
        .map(|_| {
            let rejected = gateway.get("/");
            let seconds = rejected.retry_after().expect("when to come back");
            assert_eq!(rejected.json()["retry_after"], seconds);
            let t = rejected
                .parameter("ratelimit", "per_ip", "t")
                .expect("t of a bucket");
            assert!(
                i64::try_from(seconds).expect("small") >= t,
                "{seconds} is before t={t}"
            );
            seconds
        })
        .collect();
    // one unit refills in at most 10 s, part of which may have passed
    assert!(
        told.iter().all(|seconds| (1..=15).contains(seconds)),
        "{told:?}"
    );
    let different: std::collections::BTreeSet<_> = told.iter().collect();
    assert!(different.len() > 2, "60 clients come back in {different:?}");
}
