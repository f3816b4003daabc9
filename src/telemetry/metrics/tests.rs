//! The output of `/metrics`, and its agreement with the documentation.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use http::StatusCode;

use super::*;
use crate::telemetry::handles::RouteMetrics;

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

/// Resolves the handles of a small configuration.
fn configured(metrics: &Metrics) -> RouteMetrics {
    let _ = metrics.decisions("search", "per_ip");
    let _ = metrics.limit("per_ip");
    let _ = metrics.cost("per_ip", &["reported"], &["encoding"], ["m"].into_iter());
    let _ = metrics.upstream("api", &["http://a:80".to_owned()]);
    metrics.certificate_expires("api.pem", SystemTime::now());
    let _ = metrics.listener("127.0.0.1:8080", &["resets"]);
    let _ = metrics.identity("api_key", &["unknown"]);
    let _ = metrics.issuer("https://issuer.example/keys");
    let _ = metrics.budget(&["timeout"], &["key"]);
    let _ = metrics.lease("per_user", "local");
    metrics.config_loaded("abc", UNIX_EPOCH + Duration::from_secs(7));
    metrics.route("search")
}

/// The value of a series, given its rendered name and labels.
fn value(text: &str, series: &str) -> Option<f64> {
    let rest = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(rest.parse().expect("a sample is a number"))
}

/// The type of every family in the output, by name.
fn shown(text: &str) -> BTreeMap<String, String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| {
            let (name, kind) = line.split_once(' ').expect("a type line has two words");
            (name.to_owned(), kind.to_owned())
        })
        .collect()
}

fn kind_name(kind: MetricKind) -> &'static str {
    match kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    }
}

#[test]
fn documentation_lists_exactly_the_metrics_that_exist() {
    let rows = DOCUMENT.lines().filter(|line| line.starts_with("| `"));
    let documented: BTreeSet<[String; 4]> = rows
        .map(|row| {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            assert_eq!(cells.len(), 7, "{row}");
            [1, 2, 3, 4].map(|at| cells[at].replace('`', ""))
        })
        .collect();
    let ours = ALL.iter().map(|metric| {
        [
            metric.name.to_owned(),
            kind_name(metric.kind).to_owned(),
            metric.unit.as_str().to_owned(),
            metric.labels.join(", "),
        ]
    });
    let process = process::ALL
        .iter()
        .map(|row| [row.0, row.1, row.2, ""].map(str::to_owned));
    let existing: BTreeSet<[String; 4]> = ours.chain(process).collect();
    assert!(existing.len() > 20);
    assert_eq!(documented, existing);
}

#[cfg(target_os = "linux")]
#[test]
fn every_documented_metric_is_shown_from_the_start_and_nothing_else() {
    let metrics = Metrics::install();
    let _route = configured(&metrics);
    let shown = shown(&metrics.render());
    let ours = ALL
        .iter()
        .map(|metric| (metric.name.to_owned(), kind_name(metric.kind).to_owned()));
    let process = process::ALL
        .iter()
        .map(|row| (row.0.to_owned(), row.1.to_owned()));
    assert_eq!(shown, ours.chain(process).collect());
}

#[test]
fn configured_series_are_there_at_zero() {
    let metrics = Metrics::install();
    let _route = configured(&metrics);
    let text = metrics.render();
    for series in [
        r#"tidegate_requests_total{route="search",code="200"}"#,
        r#"tidegate_requests_total{route="search",code="429"}"#,
        r#"tidegate_decisions_total{route="search",limit="per_ip",outcome="admitted"}"#,
        r#"tidegate_decisions_total{route="search",limit="per_ip",outcome="rejected"}"#,
        r#"tidegate_request_seconds_count{route="search"}"#,
        r#"tidegate_request_seconds_bucket{route="search",le="0.0005"}"#,
        r#"tidegate_in_flight{route="search"}"#,
        r#"tidegate_retry_after_seconds_count{limit="per_ip"}"#,
        r#"tidegate_keys{limit="per_ip"}"#,
        r#"tidegate_key_evictions_total{limit="per_ip"}"#,
        r#"tidegate_upstream_errors_total{upstream="api",kind="connect"}"#,
        r#"tidegate_upstream_errors_total{upstream="api",kind="body"}"#,
        r#"tidegate_connections{listener="127.0.0.1:8080"}"#,
        r#"tidegate_accept_errors_total{listener="127.0.0.1:8080",kind="no_descriptors"}"#,
        r#"tidegate_identity_rejected_total{source="api_key",kind="unknown"}"#,
        "tidegate_panics_total",
        "tidegate_log_lines_dropped_total",
        "tidegate_decision_seconds_count",
    ] {
        assert_eq!(value(&text, series), Some(0.0), "{series}");
    }
    assert_eq!(
        value(&text, r#"tidegate_config_info{hash="abc"}"#),
        Some(1.0)
    );
    assert_eq!(value(&text, "tidegate_config_reload_success"), Some(1.0));
    assert_eq!(
        value(&text, "tidegate_config_reload_timestamp_seconds"),
        Some(7.0)
    );
}

#[test]
fn answers_are_counted_under_their_code_common_or_not() {
    let metrics = Metrics::install();
    let route = metrics.route("search");
    for code in [200, 200, 429, 418, 418, 100, 599, 600, 999] {
        route.answered(StatusCode::from_u16(code).expect("three digits"));
    }
    let text = metrics.render();
    let count = |code: &str| {
        value(
            &text,
            &format!(r#"tidegate_requests_total{{route="search",code="{code}"}}"#),
        )
    };
    assert_eq!(count("200"), Some(2.0));
    assert_eq!(count("429"), Some(1.0));
    assert_eq!(count("418"), Some(2.0));
    assert_eq!(count("100"), Some(1.0));
    assert_eq!(count("599"), Some(1.0));
    assert_eq!(
        count("other"),
        Some(2.0),
        "invalid status codes do not create series"
    );
    assert_eq!(count("505"), None);
}

#[test]
fn requests_in_flight_go_up_and_down() {
    let metrics = Metrics::install();
    let route = metrics.route("search");
    let in_flight = || value(&metrics.render(), r#"tidegate_in_flight{route="search"}"#);
    let (one, two) = (route.enter(), route.enter());
    assert_eq!(in_flight(), Some(2.0));
    drop(one);
    assert_eq!(in_flight(), Some(1.0));
    drop(two);
    assert_eq!(in_flight(), Some(0.0));
}

#[test]
fn a_sample_is_in_every_bucket_that_is_not_below_it() {
    let metrics = Metrics::install();
    let upstream = metrics.upstream("api", &["http://a:80".to_owned()]);
    upstream.seconds.record(0.002);
    upstream.seconds.record(7.0);
    let text = metrics.render();
    assert_eq!(
        value(&text, r#"tidegate_upstream_seconds_count{upstream="api"}"#),
        Some(2.0)
    );
    assert_eq!(
        value(
            &text,
            r#"tidegate_upstream_seconds_bucket{upstream="api",le="0.001"}"#
        ),
        Some(0.0)
    );
    assert_eq!(
        value(
            &text,
            r#"tidegate_upstream_seconds_bucket{upstream="api",le="0.0025"}"#
        ),
        Some(1.0)
    );
    assert_eq!(
        value(
            &text,
            r#"tidegate_upstream_seconds_bucket{upstream="api",le="+Inf"}"#
        ),
        Some(2.0)
    );
}

#[test]
fn values_that_are_read_are_refreshed_before_they_are_shown() {
    let metrics = Metrics::install();
    let limit = metrics.limit("per_ip");
    metrics.on_render(move || limit.keys.set(42.0));
    assert_eq!(
        value(&metrics.render(), r#"tidegate_keys{limit="per_ip"}"#),
        Some(42.0)
    );
}

#[test]
fn next_configuration_takes_the_place_of_the_last() {
    let metrics = Metrics::install();
    metrics.config_loaded("old", UNIX_EPOCH);
    metrics.config_loaded("new", UNIX_EPOCH);
    let text = metrics.render();
    assert_eq!(
        value(&text, r#"tidegate_config_info{hash="old"}"#),
        None,
        "otherwise each reload would leave one"
    );
    assert_eq!(
        value(&text, r#"tidegate_config_info{hash="new"}"#),
        Some(1.0)
    );
}

#[test]
fn accept_errors_are_told_apart() {
    let metrics = Metrics::install();
    let listener = metrics.listener("l", &[]);
    for code in [24, 23, 12, 105, 103, 1] {
        listener.accept_failed(&io::Error::from_raw_os_error(code));
    }
    let text = metrics.render();
    let count = |kind: &str| {
        value(
            &text,
            &format!(r#"tidegate_accept_errors_total{{listener="l",kind="{kind}"}}"#),
        )
    };
    assert_eq!(count("no_descriptors"), Some(2.0));
    assert_eq!(count("no_memory"), Some(2.0));
    assert_eq!(count("aborted"), Some(1.0));
    assert_eq!(count("other"), Some(1.0));
}

#[test]
fn two_registries_in_one_process_do_not_mix() {
    let (one, two) = (Metrics::install(), Metrics::install());
    one.panics().increment(3);
    assert_eq!(value(&one.render(), "tidegate_panics_total"), Some(3.0));
    assert_eq!(value(&two.render(), "tidegate_panics_total"), Some(0.0));
}

#[test]
fn the_page_is_in_the_order_of_the_names_and_keeps_buckets_in_theirs() {
    let metrics = Metrics::install();
    for route in ["b", "a"] {
        metrics.route(route).answered(http::StatusCode::OK);
    }
    let text = metrics.render();
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    assert!(names.len() > 10 && names.is_sorted(), "{names:?}");
    let counted: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("tidegate_requests_total{"))
        .collect();
    assert!(counted.len() > 2 && counted.is_sorted(), "{counted:?}");
    let decisions = "tidegate_decision_seconds_bucket{le=\"";
    let bounds: Vec<f64> = text
        .lines()
        .filter_map(|line| line.strip_prefix(decisions)?.split('"').next())
        .map(|bound| bound.parse().unwrap_or(f64::INFINITY))
        .collect();
    assert!(bounds.is_sorted(), "{bounds:?}");
}
