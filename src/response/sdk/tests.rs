//! Fields, waits and bodies as SDKs read them.

use std::time::UNIX_EPOCH;

use bytes::Bytes;
use http::{Response, StatusCode, Version};
use serde_json::Value;

use super::*;
use crate::{
    limit::Quota,
    response::{FieldFamilies, FieldWriter, Policy, too_many_requests},
};

const SECOND: u64 = NS_PER_SECOND;

fn policy(name: &str, unit: &str, sdk: Option<Sdk>) -> Policy {
    let quota = Quota::new(20_000, Duration::from_secs(60), 20_000).expect("a quota");
    let terms = CostTerms {
        unit: unit.into(),
        counted: CountedTokens::All,
        sdk,
        is_budget: false,
        currency: None,
    };
    let policy = Policy::compile(name, &quota).expect("a name");
    policy.with_costs(&quota, terms)
}

fn requests() -> Policy {
    let quota = Quota::new(60, Duration::from_secs(60), 10).expect("a quota");
    Policy::compile("requests", &quota).expect("a name")
}

fn report(policy: &Policy, remaining: u64, wait_ns: u64) -> LimitReport<'_> {
    LimitReport {
        policy,
        remaining,
        available_ns: wait_ns,
        reset_ns: 72_300_000_000,
        denied: wait_ns > 0,
        never: false,
        closed: false,
    }
}

fn settings() -> ResponseSettings {
    ResponseSettings {
        fields: FieldFamilies::default(),
        on: Default::default(),
        body: Default::default(),
        sdk: true,
    }
}

fn denied(policy: &Policy, wait_ns: u64, settings: &ResponseSettings) -> Response<Bytes> {
    let met = [report(policy, 0, wait_ns)];
    let id = HeaderValue::from_static("id-1");
    let asked = RequestFacts {
        is_head: false,
        version: Version::HTTP_11,
        request_id: Some(&id),
        grpc: None,
    };
    let denial = RejectedRequest::new(&met, Some(wait_ns));
    too_many_requests(
        &denial,
        &asked,
        settings,
        &mut FieldWriter::new(),
        UNIX_EPOCH,
    )
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers
        .get(name)
        .map_or("", |value| value.to_str().unwrap_or_default())
}

#[test]
fn each_family_has_the_tightest_limit_on_tokens_and_on_requests() {
    let tight = policy("minute", "tokens", Some(Sdk::OpenAi));
    let wide = policy("day", "tokens", Some(Sdk::Anthropic));
    let points = policy("points", "points", None);
    let requests = requests();
    let met = [
        report(&wide, 9_000, 0),
        report(&tight, 15_300, 0),
        report(&points, 1, 0),
        report(&requests, 7, 0),
    ];
    let mut headers = HeaderMap::new();
    let theirs = HeaderValue::from_static("of the operator's account");
    headers.insert("x-ratelimit-limit-tokens", theirs.clone());
    headers.insert("anthropic-ratelimit-input-tokens-limit", theirs);
    put_families(&mut headers, &met, &settings(), UNIX_EPOCH);
    for (name, value) in [
        ("x-ratelimit-limit-tokens", "20000"),
        ("x-ratelimit-remaining-tokens", "9000"),
        ("x-ratelimit-reset-tokens", "1m12.3s"),
        ("x-ratelimit-limit-requests", "10"),
        ("x-ratelimit-remaining-requests", "7"),
        ("anthropic-ratelimit-tokens-remaining", "9000"),
        ("anthropic-ratelimit-tokens-reset", "1970-01-01T00:01:13Z"),
        ("anthropic-ratelimit-requests-remaining", "7"),
        ("anthropic-ratelimit-input-tokens-limit", ""),
    ] {
        assert_eq!(field(&headers, name), value, "{name}");
    }
}

#[test]
fn fields_without_a_preset_are_left_alone() {
    let points = policy("points", "points", None);
    let mut headers = HeaderMap::new();
    let theirs = HeaderValue::from_static("7");
    headers.insert("x-ratelimit-limit-tokens", theirs.clone());
    put_families(
        &mut headers,
        &[report(&points, 1, 0)],
        &settings(),
        UNIX_EPOCH,
    );
    assert_eq!(headers.len(), 1);
    let off = ResponseSettings {
        sdk: false,
        ..settings()
    };
    let tokens = policy("tokens", "tokens", Some(Sdk::OpenAi));
    put_families(&mut headers, &[report(&tokens, 1, 0)], &off, UNIX_EPOCH);
    assert_eq!(headers.get("x-ratelimit-limit-tokens"), Some(&theirs));
}

#[test]
fn a_short_wait_is_told_in_milliseconds_and_a_long_one_is_not_retried() {
    let tokens = policy("tokens", "tokens", Some(Sdk::OpenAi));
    for (wait_ns, seconds, ms, should_retry) in [
        (12_300_000_000, "13", "12300", ""),
        (60 * SECOND, "60", "60000", ""),
        (3_600 * SECOND, "3600", "3600000", "false"),
    ] {
        let response = denied(&tokens, wait_ns, &settings());
        let headers = response.headers();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(field(headers, "retry-after"), seconds);
        assert_eq!(field(headers, "retry-after-ms"), ms);
        assert_eq!(field(headers, "x-should-retry"), should_retry);
    }
}

#[test]
fn the_body_is_that_of_the_provider() {
    let body = |sdk, settings: &ResponseSettings| -> Value {
        let tokens = policy("tokens", "tokens", sdk);
        let response = denied(&tokens, 12_300_000_000, settings);
        serde_json::from_slice(response.body()).expect("it is JSON")
    };
    let message = "The limit tokens (20000/min, at most 20000 tokens at once) is exceeded. Try again in 13 s.";
    let openai = body(Some(Sdk::OpenAi), &settings());
    let error = &openai["error"];
    assert_eq!(error["message"], message);
    assert_eq!(
        (&error["type"], &error["code"]),
        (&Value::from("tokens"), &Value::from("rate_limit_exceeded"))
    );
    assert_eq!(error["param"], Value::Null);
    assert_eq!(
        (&error["limit"], &error["request_id"]),
        (&Value::from("tokens"), &Value::from("id-1"))
    );
    let anthropic = body(Some(Sdk::Anthropic), &settings());
    assert_eq!(anthropic["type"], "error");
    assert_eq!(anthropic["error"]["type"], "rate_limit_error");
    assert_eq!(anthropic["error"]["message"], message);
    assert_eq!(anthropic["request_id"], "id-1");
    let gemini = body(Some(Sdk::Gemini), &settings());
    assert_eq!(gemini["error"]["status"], "RESOURCE_EXHAUSTED");
    assert_eq!(gemini["error"]["details"][0]["retryDelay"], "12.300s");
    let off = ResponseSettings {
        sdk: false,
        ..settings()
    };
    for plain in [body(None, &settings()), body(Some(Sdk::OpenAi), &off)] {
        assert_eq!(plain["title"], "Quota Exceeded");
        assert_eq!(plain["error"], "rate_limited");
    }
}

#[test]
fn a_spent_budget_is_an_insufficient_quota() {
    let quota = Quota::new(500_000_000, Duration::from_secs(86_400), 500_000_000);
    let quota = quota.expect("a quota");
    let terms = CostTerms {
        unit: "micro-usd".into(),
        counted: CountedTokens::All,
        sdk: Some(Sdk::OpenAi),
        is_budget: true,
        currency: Some("usd".into()),
    };
    let policy = Policy::compile("day", &quota).expect("a name");
    let policy = policy.with_costs(&quota, terms);
    assert_eq!(
        policy.member(),
        "\"day\";q=500000000;w=86400;qu=\"micro-usd\""
    );
    let response = denied(&policy, 3_600 * SECOND, &settings());
    let body: Value = serde_json::from_slice(response.body()).expect("it is JSON");
    assert_eq!(body["error"]["code"], "insufficient_quota");
    assert_eq!(body["error"]["type"], "insufficient_quota");
    let message = body["error"]["message"].as_str().expect("text");
    assert!(
        message.contains("day (500 usd/d, at most 500 usd at once)"),
        "{message}"
    );
}
