//! Limit fields in responses, case by case.

use std::{
    num::NonZeroU64,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Version};
use tidegate::{
    limit::Quota,
    response::{
        BodyStyle, FieldFamilies, FieldWriter, FieldsOn, Grpc, LimitReport, Policy,
        RejectedRequest, RequestFacts, ResponseSettings, too_many_requests,
    },
};

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;
const ALL: FieldFamilies = FieldFamilies {
    ratelimit: true,
    ratelimit_triple: false,
    x_ratelimit: true,
    openai: false,
    anthropic: false,
};
const SETTINGS: ResponseSettings = ResponseSettings {
    fields: ALL,
    on: FieldsOn::Always,
    body: BodyStyle::ProblemJson,
    sdk: true,
};

fn policy(name: &str, amount: u64, period: Duration, burst: u64) -> Policy {
    let quota = Quota {
        amount: nonzero(amount),
        period,
        burst: nonzero(burst),
    };
    Policy::compile(name, &quota).expect("the name is printable")
}

fn nonzero(number: u64) -> NonZeroU64 {
    NonZeroU64::new(number).expect("tests use quotas that exist")
}

fn per_minute(name: &str, amount: u64) -> Policy {
    policy(name, amount, Duration::from_secs(60), amount)
}

fn admitted(policy: &Policy, remaining: u64, available_ns: u64, reset_ns: u64) -> LimitReport<'_> {
    LimitReport {
        policy,
        remaining,
        available_ns,
        reset_ns,
        denied: false,
        never: false,
        closed: false,
    }
}

fn stopped(policy: &Policy, available_ns: u64) -> LimitReport<'_> {
    LimitReport {
        denied: true,
        ..admitted(policy, 0, available_ns, available_ns)
    }
}

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn written(status: u16, met: &[LimitReport<'_>], settings: &ResponseSettings) -> HeaderMap {
    let mut headers = HeaderMap::new();
    write_into(&mut headers, status, met, settings);
    headers
}

fn write_into(
    headers: &mut HeaderMap,
    status: u16,
    met: &[LimitReport<'_>],
    settings: &ResponseSettings,
) {
    let status = StatusCode::from_u16(status).expect("a status");
    FieldWriter::new().write(headers, status, met, settings, at(1_000));
}

fn rejected(met: &[LimitReport<'_>], retry_after_ns: Option<u64>) -> Response<Bytes> {
    answer(met, retry_after_ns, false, &SETTINGS)
}

fn answer(
    met: &[LimitReport<'_>],
    retry_after_ns: Option<u64>,
    is_head: bool,
    settings: &ResponseSettings,
) -> Response<Bytes> {
    let id = HeaderValue::from_static("id-1");
    let asked = RequestFacts {
        is_head,
        version: Version::HTTP_11,
        request_id: Some(&id),
        grpc: None,
    };
    too_many_requests(
        &RejectedRequest::new(met, retry_after_ns),
        &asked,
        settings,
        &mut FieldWriter::new(),
        at(1_000),
    )
}

/// All lines of a field, as sent.
fn lines<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
    headers
        .get_all(name)
        .iter()
        .map(|value| value.to_str().expect("our values are ASCII"))
        .collect()
}

#[track_caller]
fn shows(headers: &HeaderMap, name: &str, expected: &str) {
    assert_eq!(lines(headers, name), [expected], "{name}");
}

#[test]
fn half_spent_bucket_shows_the_share_of_its_window_that_is_left() {
    let p = per_minute("p", 100);
    let headers = written(200, &[admitted(&p, 50, 600 * MS, 30 * S)], &SETTINGS);
    shows(&headers, "ratelimit", "\"p\";r=50;t=30");
    shows(&headers, "ratelimit-policy", "\"p\";q=100;w=60");
    shows(&headers, "x-ratelimit-limit", "100");
    shows(&headers, "x-ratelimit-remaining", "50");
    shows(&headers, "x-ratelimit-reset", "1030");
}

#[test]
fn empty_bucket_that_refills_in_half_a_second_says_one_second() {
    let p = policy("p", 2, Duration::from_secs(1), 10);
    let response = rejected(&[stopped(&p, 500 * MS)], Some(500 * MS));
    assert_eq!(response.status(), 429);
    shows(response.headers(), "retry-after", "1");
    shows(response.headers(), "ratelimit", "\"p\";r=0;t=1");
    shows(response.headers(), "ratelimit-policy", "\"p\";q=10;w=5");
}

#[test]
fn full_bucket_with_a_broken_window_rounds_the_window_up() {
    let p = policy("p", 10, Duration::from_secs(1), 21);
    let headers = written(200, &[admitted(&p, 21, 0, 0)], &SETTINGS);
    shows(&headers, "ratelimit-policy", "\"p\";q=21;w=3");
    shows(&headers, "ratelimit", "\"p\";r=21;t=3");
    shows(&headers, "x-ratelimit-reset", "1000");
}

#[test]
fn waits_are_rounded_up_to_whole_seconds_and_at_least_one() {
    let p = per_minute("p", 1);
    for (wait, expected) in [
        (1, "1"),
        (S, "1"),
        (S + 1, "2"),
        (59 * S + 1, "60"),
        (u64::MAX, "2147483647"),
    ] {
        let response = rejected(
            &[LimitReport {
                remaining: 0,
                ..stopped(&p, wait.min(60 * S))
            }],
            Some(wait),
        );
        assert_eq!(lines(response.headers(), "retry-after").len(), 1);
        let shown: u64 = response.headers()["retry-after"]
            .to_str()
            .expect("ASCII")
            .parse()
            .expect("a number");
        let at_least: u64 = expected.parse().expect("a number");
        assert_eq!(shown, at_least, "a wait of {wait} ns");
    }
}

#[test]
fn zero_wait_is_still_a_second() {
    let p = policy("p", 1000, Duration::from_secs(1), 1000);
    shows(
        rejected(&[stopped(&p, 0)], Some(0)).headers(),
        "retry-after",
        "1",
    );
}

#[test]
fn cost_above_the_quota_has_no_retry_after_and_says_that_it_never_passes() {
    let p = per_minute("p", 10);
    let met = [LimitReport {
        denied: true,
        never: true,
        closed: false,
        ..admitted(&p, 10, 0, 0)
    }];
    let response = rejected(&met, None);
    assert_eq!(response.status(), 429);
    assert!(response.headers().get("retry-after").is_none());
    shows(response.headers(), "ratelimit", "\"p\";r=10;t=60");
    let body: serde_json::Value = serde_json::from_slice(response.body()).expect("it is JSON");
    assert_eq!(body["error"], "cost_exceeds_limit");
    assert_eq!(
        body["detail"],
        "This request costs more than the limit p (10/min, at most 10 at once) allows. It can never be admitted."
    );
    assert!(body.get("retry_after").is_none());
}

#[test]
fn of_two_violated_limits_the_longer_wait_counts_and_both_are_named() {
    let (perip, search, other) = (
        per_minute("perip", 100),
        per_minute("search", 10),
        per_minute("other", 6),
    );
    let met = [
        stopped(&search, 13 * S),
        stopped(&perip, 2 * S),
        admitted(&other, 3, 10 * S, 30 * S),
    ];
    let response = rejected(&met, Some(13 * S));
    shows(response.headers(), "retry-after", "13");
    shows(
        response.headers(),
        "ratelimit",
        "\"search\";r=0;t=13, \"perip\";r=0;t=2, \"other\";r=3;t=30",
    );
    shows(
        response.headers(),
        "ratelimit-policy",
        "\"search\";q=10;w=60, \"perip\";q=100;w=60, \"other\";q=6;w=60",
    );
    let body: serde_json::Value = serde_json::from_slice(response.body()).expect("it is JSON");
    assert_eq!(
        body,
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Quota Exceeded",
            "status": 429,
            "detail": "The limit search (10/min, at most 10 at once) is exceeded. Try again in 13 s.",
            "violated-policies": ["search", "perip"],
            "error": "rate_limited",
            "limit": "search",
            "retry_after": 13,
            "request_id": "id-1",
        })
    );
}

#[test]
fn retry_after_is_never_earlier_than_t_of_a_violated_limit() {
    // a request that costs 5 of 10 per 10 s with 4 left: one unit is missing for 1 s, and the four
    // need not last
    let p = policy("p", 1, Duration::from_secs(1), 10);
    let met = [LimitReport {
        denied: true,
        ..admitted(&p, 4, S, 6 * S)
    }];
    let response = rejected(&met, Some(S));
    shows(response.headers(), "ratelimit", "\"p\";r=4;t=1");
    shows(response.headers(), "retry-after", "1");

    let q = policy("q", 1, Duration::from_secs(1), 10);
    let response = rejected(&[met[0], stopped(&q, 3 * S)], Some(2 * S));
    shows(
        response.headers(),
        "ratelimit",
        "\"p\";r=4;t=1, \"q\";r=0;t=3",
    );
    shows(response.headers(), "retry-after", "3");
}

#[test]
fn upstream_members_are_kept_and_ours_follow() {
    let p = per_minute("perip", 20);
    let mut headers = HeaderMap::new();
    headers.insert("ratelimit", HeaderValue::from_static("\"up\";r=3;t=9"));
    headers.insert(
        "ratelimit-policy",
        HeaderValue::from_static("\"up\";q=5;w=10"),
    );
    write_into(
        &mut headers,
        200,
        &[admitted(&p, 7, 3 * S, 39 * S)],
        &SETTINGS,
    );
    assert_eq!(
        lines(&headers, "ratelimit"),
        ["\"up\";r=3;t=9", "\"perip\";r=7;t=21"]
    );
    assert_eq!(
        lines(&headers, "ratelimit-policy"),
        ["\"up\";q=5;w=10", "\"perip\";q=20;w=60"]
    );
}

#[test]
fn upstream_single_values_give_way_to_ours_on_what_the_upstream_serves() {
    let p = per_minute("p", 20);
    let mut headers = HeaderMap::new();
    headers.append("x-ratelimit-limit", HeaderValue::from_static("1"));
    headers.append("x-ratelimit-remaining", HeaderValue::from_static("0"));
    headers.append("x-ratelimit-remaining", HeaderValue::from_static("9"));
    write_into(
        &mut headers,
        200,
        &[admitted(&p, 7, 3 * S, 39 * S)],
        &SETTINGS,
    );
    shows(&headers, "x-ratelimit-limit", "20");
    shows(&headers, "x-ratelimit-remaining", "7");
    shows(&headers, "x-ratelimit-reset", "1039");
}

#[test]
fn upstream_single_values_stay_whole_on_its_own_429() {
    let p = per_minute("p", 20);
    let mut headers = HeaderMap::new();
    headers.insert("x-ratelimit-remaining", HeaderValue::from_static("0"));
    write_into(
        &mut headers,
        429,
        &[admitted(&p, 7, 3 * S, 39 * S)],
        &SETTINGS,
    );
    shows(&headers, "x-ratelimit-remaining", "0");
    assert!(
        !headers.contains_key("x-ratelimit-limit"),
        "half of each family would contradict itself"
    );
    shows(&headers, "ratelimit", "\"p\";r=7;t=21");

    let mut bare = HeaderMap::new();
    write_into(&mut bare, 429, &[admitted(&p, 7, 3 * S, 39 * S)], &SETTINGS);
    shows(&bare, "x-ratelimit-remaining", "7");
}

#[test]
fn redirections_carry_no_fields() {
    let p = per_minute("p", 20);
    for status in [301, 302, 304, 307] {
        assert!(
            written(status, &[admitted(&p, 7, 3 * S, 39 * S)], &SETTINGS).is_empty(),
            "{status}"
        );
    }
    for status in [200, 404, 502] {
        assert!(
            !written(status, &[admitted(&p, 7, 3 * S, 39 * S)], &SETTINGS).is_empty(),
            "{status}"
        );
    }
}

#[test]
fn request_that_met_no_limit_gets_no_fields() {
    assert!(written(200, &[], &SETTINGS).is_empty());
}

#[test]
fn only_the_chosen_families_are_written_and_only_where_chosen() {
    let p = per_minute("p", 20);
    let met = [admitted(&p, 7, 3 * S, 38 * S + 1)];
    let triple = FieldFamilies {
        ratelimit_triple: true,
        ..FieldFamilies::default()
    };
    let headers = written(
        200,
        &met,
        &ResponseSettings {
            fields: triple,
            ..SETTINGS
        },
    );
    shows(&headers, "ratelimit-limit", "20");
    shows(&headers, "ratelimit-remaining", "7");
    shows(&headers, "ratelimit-reset", "39");
    assert_eq!(headers.len(), 3);

    assert!(
        written(
            200,
            &met,
            &ResponseSettings {
                fields: FieldFamilies::default(),
                ..SETTINGS
            }
        )
        .is_empty()
    );

    let on_rejection = ResponseSettings {
        on: FieldsOn::Rejected,
        ..SETTINGS
    };
    assert!(written(200, &met, &on_rejection).is_empty());
    let response = answer(&[stopped(&p, 3 * S)], Some(3 * S), false, &on_rejection);
    shows(response.headers(), "ratelimit", "\"p\";r=0;t=3");
}

#[test]
fn numbers_beyond_a_structured_field_are_clamped() {
    let p = policy("p", 1, Duration::from_secs(31 * 86_400), u64::MAX);
    let headers = written(
        200,
        &[admitted(&p, u64::MAX, u64::MAX, u64::MAX)],
        &SETTINGS,
    );
    shows(
        &headers,
        "ratelimit",
        "\"p\";r=999999999999999;t=999999999999999",
    );
    shows(
        &headers,
        "ratelimit-policy",
        "\"p\";q=999999999999999;w=999999999999999",
    );
    shows(&headers, "x-ratelimit-remaining", "999999999999999");
    // 584 years from now
    shows(&headers, "x-ratelimit-reset", "18446745074");
}

#[test]
fn extreme_quotas_neither_overflow_nor_divide_by_zero() {
    for (amount, period, burst) in [
        (u64::MAX, Duration::from_millis(1), 1),
        (1, Duration::MAX, u64::MAX),
        (u64::MAX, Duration::ZERO, u64::MAX),
    ] {
        let p = policy("p", amount, period, burst);
        let met = [LimitReport {
            denied: true,
            ..admitted(&p, u64::MAX, u64::MAX, u64::MAX)
        }];
        assert_eq!(
            rejected(&met, Some(u64::MAX)).headers()["retry-after"],
            "2147483647"
        );
    }
}

#[test]
fn names_are_escaped_as_structured_field_strings() {
    let p = per_minute(r#"a"b\c d"#, 5);
    let headers = written(200, &[admitted(&p, 5, 0, 0)], &SETTINGS);
    shows(&headers, "ratelimit", r#""a\"b\\c d";r=5;t=60"#);
    let response = rejected(&[stopped(&p, S)], Some(S));
    let body: serde_json::Value = serde_json::from_slice(response.body()).expect("it is JSON");
    assert_eq!(body["violated-policies"], serde_json::json!([r#"a"b\c d"#]));
}

#[test]
fn names_that_cannot_be_sent_are_refused() {
    let quota = Quota {
        amount: nonzero(1),
        period: Duration::from_secs(1),
        burst: nonzero(1),
    };
    for name in ["", "Größe", "a\nb", "a\u{7f}"] {
        assert!(Policy::compile(name, &quota).is_err(), "{name:?}");
    }
}

#[test]
fn rejected_head_has_the_head_of_a_429_and_no_body() {
    let p = per_minute("p", 5);
    let met = [stopped(&p, S)];
    let get = answer(&met, Some(S), false, &SETTINGS);
    let head = answer(&met, Some(S), true, &SETTINGS);
    assert!(head.body().is_empty());
    assert_eq!(head.status(), get.status());
    assert_eq!(head.headers(), get.headers());
}

#[test]
fn every_429_is_traceable_and_never_cached() {
    let p = per_minute("p", 5);
    for (style, media_type) in [
        (BodyStyle::ProblemJson, "application/problem+json"),
        (BodyStyle::Json, "application/json"),
        (BodyStyle::Text, "text/plain; charset=utf-8"),
    ] {
        let response = answer(
            &[stopped(&p, S)],
            Some(S),
            false,
            &ResponseSettings {
                body: style,
                ..SETTINGS
            },
        );
        shows(response.headers(), "content-type", media_type);
        shows(response.headers(), "cache-control", "no-store");
        shows(response.headers(), "x-request-id", "id-1");
        assert!(!response.body().is_empty());
    }
}

#[test]
fn json_and_text_say_the_same() {
    let p = per_minute("p", 5);
    let body = |style| {
        let settings = ResponseSettings {
            body: style,
            ..SETTINGS
        };
        String::from_utf8(
            answer(&[stopped(&p, S)], Some(S), false, &settings)
                .into_body()
                .to_vec(),
        )
        .expect("UTF-8")
    };
    assert_eq!(
        body(BodyStyle::Text),
        "The limit p (5/min, at most 5 at once) is exceeded. Try again in 1 s.\n"
    );
    let json: serde_json::Value = serde_json::from_str(&body(BodyStyle::Json)).expect("it is JSON");
    assert_eq!(
        json,
        serde_json::json!({
            "error": "rate_limited",
            "status": 429,
            "message": "The limit p (5/min, at most 5 at once) is exceeded. Try again in 1 s.",
            "limit": "p",
            "retry_after": 1,
            "request_id": "id-1",
        })
    );
}

#[test]
fn clock_before_1970_does_not_matter() {
    let p = per_minute("p", 5);
    let mut headers = HeaderMap::new();
    let before = UNIX_EPOCH - Duration::from_secs(9);
    FieldWriter::new().write(
        &mut headers,
        StatusCode::OK,
        &[admitted(&p, 4, S, 12 * S)],
        &SETTINGS,
        before,
    );
    shows(&headers, "x-ratelimit-reset", "12");
}

fn fixed(amount: u64) -> Policy {
    let quota = Quota {
        amount: nonzero(amount),
        period: Duration::from_secs(60),
        burst: nonzero(amount),
    };
    Policy::of_window("p", &quota).expect("the name is printable")
}

#[test]
fn a_fixed_window_shows_the_time_to_its_end() {
    let p = fixed(100);
    // 45 of 100 used, 15 s into a minute; 10 used, 50 s into it: the rest is soon renewed
    for (remaining, left, shown) in [(55, 45, "\"p\";r=55;t=45"), (90, 10, "\"p\";r=90;t=10")] {
        let headers = written(
            200,
            &[admitted(&p, remaining, left * S, left * S)],
            &SETTINGS,
        );
        shows(&headers, "ratelimit", shown);
    }
    let response = rejected(&[stopped(&p, 29 * S)], Some(29 * S));
    shows(response.headers(), "ratelimit", "\"p\";r=0;t=29");
    shows(response.headers(), "retry-after", "29");
    let untouched = written(200, &[admitted(&p, 100, 0, 0)], &SETTINGS);
    shows(&untouched, "ratelimit", "\"p\";r=100;t=60");
}

#[test]
fn requests_in_flight_have_a_unit_and_no_window() {
    let p = Policy::of_slots("inflight", 20).expect("the name is printable");
    let met = [LimitReport {
        denied: true,
        ..admitted(&p, 0, 0, 0)
    }];
    let response = rejected(&met, Some(S));
    let policy = "\"inflight\";q=20;qu=\"concurrent-requests\"";
    shows(response.headers(), "ratelimit-policy", policy);
    shows(response.headers(), "ratelimit", "\"inflight\";r=0");
    shows(response.headers(), "retry-after", "1");
}

/// The client's view of our fields beside an upstream's line.
fn beside(field: &'static str, theirs: &'static str, name: &str) -> HeaderMap {
    let p = per_minute(name, 20);
    let mut headers = HeaderMap::new();
    headers.insert(field, HeaderValue::from_static(theirs));
    write_into(
        &mut headers,
        200,
        &[admitted(&p, 7, 3 * S, 39 * S)],
        &SETTINGS,
    );
    headers
}

#[test]
fn a_name_that_the_upstream_uses_too_is_made_another() {
    let headers = beside("ratelimit", "\"perip\";r=3;t=9", "perip");
    assert_eq!(
        lines(&headers, "ratelimit"),
        ["\"perip\";r=3;t=9", "\"gateway.perip\";r=7;t=21"]
    );
    // both fields use the same name for a limit
    shows(&headers, "ratelimit-policy", "\"gateway.perip\";q=20;w=60");

    let twice = "\"p\";q=1;w=1, \"gateway.p\";q=2;w=1";
    let headers = beside("ratelimit-policy", twice, "p");
    assert_eq!(
        lines(&headers, "ratelimit-policy"),
        [twice, "\"gateway.gateway.p\";q=20;w=60"]
    );
}

#[test]
fn nothing_is_added_to_what_another_draft_wrote() {
    let theirs = "limit=100, remaining=45, reset=30";
    let headers = beside("ratelimit", theirs, "perip");
    shows(&headers, "ratelimit", theirs);
    shows(&headers, "ratelimit-policy", "\"perip\";q=20;w=60");
    let theirs = "100;w=60";
    let headers = beside("ratelimit-policy", theirs, "perip");
    shows(&headers, "ratelimit-policy", theirs);
    shows(&headers, "ratelimit", "\"perip\";r=7;t=21");
}

/// The response to a gRPC call that a limit rejects.
fn refused_call(met: &[LimitReport<'_>], retry_after_ns: Option<u64>) -> Response<Bytes> {
    let id = HeaderValue::from_static("id-1");
    let asked = RequestFacts {
        is_head: false,
        version: Version::HTTP_2,
        request_id: Some(&id),
        grpc: Some(Grpc::Native),
    };
    let denial = RejectedRequest::new(met, retry_after_ns);
    let mut writer = FieldWriter::new();
    too_many_requests(&denial, &asked, &SETTINGS, &mut writer, at(1_000))
}

#[test]
fn a_grpc_call_is_told_its_status_and_the_exact_wait_in_its_only_head() {
    let p = per_minute("p", 5);
    for (wait, pushback, details) in [
        (
            5 * S,
            "5000",
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ",
        ),
        (
            500 * MS,
            "500",
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIICgYQgMq17gE",
        ),
    ] {
        let response = refused_call(&[stopped(&p, wait)], Some(wait));
        assert_eq!(
            (response.status().as_u16(), response.body().len()),
            (200, 0)
        );
        let headers = response.headers();
        shows(headers, "content-type", "application/grpc");
        shows(headers, "grpc-status", "8");
        shows(headers, "grpc-message", "rate limit exceeded");
        shows(headers, "grpc-retry-pushback-ms", pushback);
        shows(headers, "grpc-status-details-bin", details);
        // it is read as trailers, where these fields are not allowed
        for field in [
            "ratelimit",
            "ratelimit-policy",
            "x-ratelimit-limit",
            "retry-after",
        ] {
            assert!(!headers.contains_key(field), "{field}");
        }
    }
}

#[test]
fn a_grpc_call_that_can_never_pass_is_told_not_to_try_again() {
    let p = per_minute("p", 10);
    let met = [LimitReport {
        denied: true,
        never: true,
        ..admitted(&p, 10, 0, 0)
    }];
    let headers = refused_call(&met, None).into_parts().0.headers;
    shows(&headers, "grpc-status", "8");
    shows(&headers, "grpc-retry-pushback-ms", "-1");
    assert!(!headers.contains_key("grpc-status-details-bin"));
}
