//! Interfaces for operators: metric names, and the dashboard and alerts in this repository.

use std::{collections::BTreeSet, fs};

use crate::support::{Gateway, Redis};

/// All tidegate metric names in a text, without the suffixes that Prometheus adds to histograms.
fn names(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.split(|c| !is_part(c))
        .filter(|word| word.starts_with("tidegate_"))
        .map(|word| {
            let histogram = ["_bucket", "_sum", "_count"];
            let cut = histogram.iter().find_map(|end| word.strip_suffix(end));
            cut.unwrap_or(word).to_owned()
        })
        .collect()
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_that_exist() {
    let documented = fs::read_to_string("docs/metrics.md").expect("the documentation");
    let documented = names(&documented);
    for file in [
        "load/grafana/dashboards/gateway.json",
        "load/prometheus/alerts.yml",
    ] {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let asked = names(&text);
        assert!(asked.len() > 8, "{file} asks for {asked:?} only");
        let unknown: Vec<_> = asked.difference(&documented).collect();
        assert!(unknown.is_empty(), "{file} asks for {unknown:?}");
    }
}

/// A fixed range is too long for a load of ten seconds, and too short if scrapes are a minute
/// apart.
#[test]
fn the_dashboard_takes_rates_over_the_interval_of_the_scrapes() {
    let read =
        |file: &str| fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let dashboard = read("load/grafana/dashboards/gateway.json");
    let exprs: Vec<&str> = dashboard
        .lines()
        .filter(|line| line.contains("\"expr\""))
        .collect();
    assert!(exprs.len() > 20, "{}", exprs.len());
    for expr in exprs {
        let ranges = expr.matches('[').count();
        let right = expr.matches("[$__rate_interval]").count();
        assert_eq!(ranges, right, "{expr}");
        assert_eq!(ranges > 0, expr.contains("rate("), "{expr}");
    }
    let seconds = |file: &str, key: &str| {
        let text = read(file);
        let mut found = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix(key));
        found.next().map(str::to_owned)
    };
    let scraped = seconds("load/prometheus/prometheus.yml", "scrape_interval: ");
    assert!(scraped.is_some());
    let known = seconds("load/grafana/datasources/prometheus.yml", "timeInterval: ");
    assert_eq!(known, scraped);
}

#[test]
fn every_metric_that_dashboards_rely_on_is_there_before_the_first_request() {
    let redis = Redis::start();
    let gateway = Gateway::with(&format!(
        r#"
        [redis]
        url = "{}"
        [gateway]
        limits = ["shared", "own"]
        [limit.shared]
        key = ["ip"]
        rate = "10/s"
        scope = "global"
        [limit.own]
        key = ["ip"]
        rate = "10/s"
    "#,
        redis.url()
    ))
    .start();
    let metrics = gateway.metrics();
    for selector in [
        r#"tidegate_requests_total{route="all",code="200"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="admitted"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="rejected"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="delayed"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="shadow_rejected"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="tagged"}"#,
        r#"tidegate_decisions_total{route="all",limit="own",outcome="exempt"}"#,
        r#"tidegate_near_limit_total{limit="own"}"#,
        "tidegate_decision_seconds_count",
        r#"tidegate_request_seconds_count{route="all"}"#,
        r#"tidegate_upstream_seconds_count{upstream="origin"}"#,
        r#"tidegate_retry_after_seconds_count{limit="own"}"#,
        r#"tidegate_delayed_seconds_count{limit="own"}"#,
        r#"tidegate_in_flight{route="all"}"#,
        r#"tidegate_keys{limit="own"}"#,
        r#"tidegate_key_evictions_total{limit="own"}"#,
        r#"tidegate_redis_calls_total{outcome="ok"}"#,
        "tidegate_redis_call_seconds_count",
        r#"tidegate_redis_errors_total{kind="timeout"}"#,
        "tidegate_redis_breaker_open",
        "tidegate_degraded",
        r#"tidegate_degraded_decisions_total{limit="shared",behaviour="local"}"#,
        r#"tidegate_lease_tokens{limit="shared",state="in_hand"}"#,
        r#"tidegate_upstream_errors_total{upstream="origin",kind="timeout"}"#,
        r#"tidegate_upstream_healthy{upstream="origin"}"#,
        "tidegate_connections",
        r#"tidegate_tls_handshakes_total{outcome="full"}"#,
        r#"tidegate_identity_rejected_total{source="api_key"}"#,
        "tidegate_config_reload_success",
        "tidegate_config_reload_timestamp_seconds",
        "tidegate_config_info",
        r#"tidegate_kill_switch{limit="own"}"#,
        "tidegate_panics_total",
        "tidegate_build_info",
        "process_open_fds",
    ] {
        assert!(!metrics.select(selector).is_empty(), "no {selector}");
    }
}
