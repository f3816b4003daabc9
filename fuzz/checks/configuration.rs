//! Bytes as a configuration file and as a rate.
//!
//! - A problem is reported at its position.
//! - No text of the file reaches the terminal as a control sequence.
//! - Equal texts compile to equal configurations.
//! - A printed rate parses to the same rate.

use std::{path::Path, time::Duration};

use tidegate::{
    config::{self, Changes, DiagnosticReport, LoadedConfig, MAX_LINE_BYTES, MAX_SHOWN, Severity},
    identity::Identifier,
    route::RouteTable,
};

/// Bytes as a file.
pub fn text(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match (compile(&text), compile(&text)) {
        (Ok(one), Ok(other)) => {
            assert_eq!(one.warnings.errors(), 0, "the warnings contain an error");
            check_report(&text, &one.warnings);
            assert_eq!(one.snapshot.hash, other.snapshot.hash);
            assert!(Changes::between(&one.snapshot, &other.snapshot).is_empty());
            check_snapshot(&one);
        }
        (Err(one), Err(other)) => {
            assert!(one.errors() > 0, "rejected without an error");
            check_report(&text, &one);
            assert_eq!(one.json(), other.json());
        }
        _ => panic!("the second compilation gave another result"),
    }
}

fn compile(text: &str) -> Result<LoadedConfig, DiagnosticReport> {
    let variable = |name: &str| (name == "A").then(|| "\"a\" \u{1b}[31m ${A}".to_owned());
    config::compile("fuzz.toml", text, Path::new("fuzz/checks"), &variable)
}

/// A report marks positions within the text, and contains no control character of the file.
fn check_report(text: &str, report: &DiagnosticReport) {
    assert!(report.diagnostics.len() <= MAX_SHOWN);
    assert!(report.errors() + report.warnings() >= report.diagnostics.len());
    let lines = text.split('\n').count();
    for diagnostic in &report.diagnostics {
        assert!(!diagnostic.message.is_empty());
        assert!(matches!(
            diagnostic.severity,
            Severity::Error | Severity::Warning
        ));
        let Some(place) = &diagnostic.place else {
            continue;
        };
        assert!(
            (1..=lines).contains(&place.line),
            "line {} of {lines}",
            place.line
        );
        assert!(place.column >= 1);
        if let Some(line) = &place.text {
            assert!(line.len() <= MAX_LINE_BYTES);
            assert!(line.get(place.marked.clone()).is_some(), "{place:?}");
        }
    }
    let shown = report.text(false);
    let command = shown
        .chars()
        .find(|&c| c.is_control() && !matches!(c, '\n' | '\t'));
    assert_eq!(command, None, "a control character reaches the terminal");
}

/// An accepted configuration can run.
fn check_snapshot(loaded: &LoadedConfig) {
    let snapshot = &loaded.snapshot;
    assert!(!snapshot.listeners.is_empty() && !snapshot.upstreams.is_empty());
    let patterns: Vec<_> = snapshot
        .routes
        .iter()
        .map(|route| route.pattern.clone())
        .collect();
    let table = RouteTable::build(&patterns).expect("routes were checked");
    let _ = table.find("shop.example", "/a/b", &http::Method::GET);
    let _ = Identifier::new(&snapshot.identity);
    for route in &snapshot.routes {
        assert!(route.upstream < snapshot.upstreams.len());
        let limits = route.limits.iter().chain(&snapshot.gateway_limits);
        for &limit in limits {
            assert!(limit < snapshot.limits.len());
        }
    }
    for limit in &snapshot.limits {
        assert!(!limit.quotas.is_empty(), "{}", limit.name);
    }
    assert!(snapshot.written.redacted().is_object());
}

/// Bytes as a rate, a duration and a time.
pub fn rate(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(span) = config::parse_span(&text) {
        let written = format!("{}ms", span.as_millis());
        assert_eq!(config::parse_span(&written), Ok(span));
    }
    let _ = config::parse_moment(&text);
    let file = |rate: &str| config::quick("builtin:echo", rate, None, None);
    let compiled = compile(&file(&text));
    if config::parse_limit(&text).is_err() {
        assert!(compiled.is_err(), "an invalid rate compiled: {text:?}");
        return;
    }
    // A valid rate may still not suit this limit: its burst may take years to fill.
    let Ok(compiled) = compiled else {
        return;
    };
    let quota = compiled.snapshot.limits[0].quotas[0];
    assert!((Duration::from_millis(1)..=Duration::from_secs(31 * 86_400)).contains(&quota.period));
    assert!(u128::from(quota.amount.get()) <= quota.period.as_nanos());
    let printed = quota.to_string();
    let again = compile(&file(&printed)).unwrap_or_else(|report| panic!("{printed}: {report}"));
    assert_eq!(again.snapshot.limits[0].quotas[0], quota, "{printed}");
}
