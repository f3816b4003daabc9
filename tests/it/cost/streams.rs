//! Streams: reservations that grow, streams without a report, streams that are cut.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{ask, balance, limited, provider, reporting, settled_from, units};
use crate::support::{Gateway, eventually, wait::time_passes};

/// Tokens at no cost of input: 1000 a minute, 1000 at once.
fn small(more: &str) -> String {
    format!(
        "rate = \"1000/h\"\n\
         cost = {{ preset = \"openai\", estimate = 100, count = {{ input = 0 }}{more} }}"
    )
}

/// The status of a second request while a stream has sent this many events.
fn beside(gateway: &Gateway, begun: Instant, events: u64) -> u16 {
    let due = Duration::from_millis(5) * events as u32;
    time_passes(due.saturating_sub(begun.elapsed()), "the stream goes on");
    gateway.send(&reporting(0)).status
}

#[test]
fn a_reservation_grows_with_its_stream_and_refuses_others_in_time() {
    let origin = provider();
    for (more, last) in [("", 429), (", grow = 0", 200)] {
        let gateway = limited(&origin, &small(more));
        let stream = ask(&json!({"events": 2_000, "pace_ms": 5, "completion": 2_000}));
        thread::scope(|scope| {
            let begun = Instant::now();
            let streaming = scope.spawn(|| gateway.send(&stream).status);
            assert_eq!(beside(&gateway, begun, 400), 200, "{more}");
            assert_eq!(beside(&gateway, begun, 1_300), last, "{more}");
            assert_eq!(streaming.join().expect("a stream"), 200);
        });
        balance(&gateway);
        assert_eq!(units(&gateway, "settled"), 2_000);
        let grown = units(&gateway, "grown");
        match last {
            429 => assert!((1_900..=2_400).contains(&grown), "{grown}"),
            _ => assert_eq!(grown, 0),
        }
        let after = gateway.send(&reporting(0)).status;
        assert_eq!(after, 429, "{more}");
    }
}

#[test]
fn a_stream_that_reports_nothing_is_charged_by_its_events() {
    let origin = provider();
    let limit = "rate = \"1000000/min\"\n\
                 cost = { preset = \"openai\", estimate = 10, count = { input = 0 } }";
    let gateway = limited(&origin, limit);
    let unreported = ask(&json!({"events": 300}));
    gateway.send(&unreported);
    balance(&gateway);
    assert_eq!(units(&gateway, "settled"), 300, "one token for each event");
    assert_eq!(settled_from(&gateway, "counted"), 1);
    // 3 tokens for each event, learned from 20 streams that say so
    let reported = ask(&json!({"events": 100, "completion": 300}));
    for _ in 0..20 {
        gateway.send(&reported);
    }
    balance(&gateway);
    let before = units(&gateway, "settled");
    gateway.send(&unreported);
    balance(&gateway);
    let charged = units(&gateway, "settled") - before;
    assert!((855..=945).contains(&charged), "{charged} of 900");
}

#[test]
fn a_stream_is_cut_only_where_that_is_asked_for_and_between_events() {
    let origin = provider();
    for (more, is_cut) in [(", cut = \"empty\"", true), ("", false)] {
        let gateway = limited(&origin, &small(more));
        let begun = Instant::now();
        let stream = ask(&json!({"events": 2_000, "pace_ms": 2, "completion": 2_000}));
        let answer = gateway.send(&stream);
        let text = answer.text();
        let events: Vec<&str> = text
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .collect();
        let last = events.last().expect("events");
        for event in &events {
            let data = event.strip_prefix("data: ").expect("whole events only");
            let parsed = serde_json::from_str::<serde_json::Value>(data);
            assert!(parsed.is_ok() || data == "[DONE]", "{event:?}");
        }
        assert_eq!(last.contains("budget_exceeded"), is_cut, "{last}");
        balance(&gateway);
        let cut = gateway.metric("tidegate_cost_cut_total{limit=\"tokens\"}");
        assert_eq!(cut, f64::from(u8::from(is_cut)));
        if is_cut {
            assert!(events.len() < 1_500, "{} events", events.len());
            let settled = units(&gateway, "settled");
            assert!((700..=1_100).contains(&settled), "{settled}");
            eventually("the upstream to be cancelled", || match origin.aborted() {
                0 => Err("it goes on".to_owned()),
                _ => Ok(()),
            });
            assert!(begun.elapsed() < Duration::from_secs(4));
        } else {
            assert_eq!(events.len(), 2_002);
        }
    }
}
