//! Traces: spans sent to a collector, and the trace context sent to servers.

use crate::support::{
    Client, Gateway, Origin, Request, Seen,
    collector::{Collector, Span},
};

const CALLERS: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn traced(collector: &Collector, sample: &str, toml: &str) -> String {
    format!(
        "[trace]\notlp_endpoint = \"{}\"\nsample = {sample}\n{toml}",
        collector.url()
    )
}

/// A burst of two requests per user, named by a secret header.
const LIMITED: &str = r#"
    [gateway]
    limits = ["per_device"]
    [limit.per_device]
    key = ["ip", "header:x-device"]
    rate = "1/h"
    burst = 2
"#;

fn attribute<'a>(span: &'a Span, name: &str) -> &'a str {
    let value = span.attributes.get(name);
    value.unwrap_or_else(|| panic!("no {name} in {span:?}"))
}

fn sent<'a>(seen: &'a Seen, name: &str) -> Vec<&'a str> {
    crate::support::http::values(&seen.headers, name)
}

#[test]
fn a_request_has_a_span_that_says_what_its_limits_did() {
    let (collector, origin) = (Collector::start(), Origin::echo());
    let gateway = Gateway::with(&traced(&collector, "1", LIMITED))
        .upstream(&origin)
        .start();
    let request = Request::get("/search?q=secret")
        .header("x-device", "secret-device")
        .header("traceparent", CALLERS)
        .header("tracestate", "vendor=1");
    assert_eq!(gateway.statuses(&request, 3), [200, 200, 429]);
    let spans = collector.wait_for(3);

    let first = &spans[0];
    assert_eq!(first.service, "tidegate");
    assert_eq!((first.name.as_str(), first.kind), ("GET all", 2));
    assert_eq!(first.trace, "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(first.parent, "00f067aa0ba902b7");
    assert!(first.start_ns > 1_700_000_000_000_000_000 && first.end_ns >= first.start_ns);
    for (name, value) in [
        ("http.request.method", "GET"),
        ("url.path", "/search"),
        ("http.response.status_code", "200"),
        ("tidegate.route", "all"),
        ("tidegate.upstream", "origin"),
        ("client.address", "127.0.0.1"),
        ("ratelimit.limit", "per_device"),
        ("ratelimit.allowed", "true"),
        ("ratelimit.remaining", "1"),
        ("ratelimit.source", "local"),
    ] {
        assert_eq!(attribute(first, name), value, "{name}");
    }
    let key = attribute(first, "ratelimit.key");
    assert!(
        key.starts_with("ip=127.0.0.1/32, header:x-device=#"),
        "{key}"
    );
    assert!(!format!("{spans:?}").contains("secret"), "{spans:?}");

    let rejected = &spans[2];
    assert_eq!(attribute(rejected, "ratelimit.allowed"), "false");
    assert_eq!(attribute(rejected, "ratelimit.remaining"), "0");
    assert_eq!(attribute(rejected, "http.response.status_code"), "429");
    assert_eq!(rejected.status, 0, "a limit that works is no error");

    // the server's span is a child of ours, in the caller's trace
    let seen = &origin.requests()[0];
    let told = format!("00-{}-{}-01", first.trace, first.id);
    assert_eq!(sent(seen, "traceparent"), [told]);
    assert_eq!(sent(seen, "tracestate"), ["vendor=1"]);
    gateway.wait_for_metric(r#"tidegate_trace_spans_total{outcome="sent"}"#, 3.0);
}

#[test]
fn a_request_without_a_trace_begins_one() {
    let (collector, origin) = (Collector::start(), Origin::echo());
    let gateway = Gateway::with(&traced(&collector, "1.0", ""))
        .upstream(&origin)
        .start();
    gateway.get("/");
    gateway.send(
        &Request::get("/")
            .header("traceparent", "nonsense")
            .header("tracestate", "a=1"),
    );
    let spans = collector.wait_for(2);
    assert!(
        spans
            .iter()
            .all(|span| span.parent.is_empty() && span.trace.len() == 32)
    );
    assert_ne!(spans[0].trace, spans[1].trace);
    assert_eq!(attribute(&spans[0], "ratelimit.allowed"), "true");
    let seen = &origin.requests()[1];
    assert_eq!(sent(seen, "traceparent").len(), 1);
    assert_eq!(
        sent(seen, "tracestate").len(),
        0,
        "of a trace that is not continued"
    );
}

#[test]
fn a_trusted_proxy_decides_and_nobody_else() {
    let (collector, origin) = (Collector::start(), Origin::echo());
    let unsampled = CALLERS.replace("-01", "-00");
    let asking = |traceparent: &str| Request::get("/").header("traceparent", traceparent);
    let trusting = "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n";
    let gateway = Gateway::with(&traced(&collector, "0", trusting))
        .upstream(&origin)
        .start();
    gateway.send(&asking(&unsampled));
    gateway.send(&asking(CALLERS));
    assert_eq!(collector.wait_for(1).len(), 1);
    let passed = origin.requests();
    assert_eq!(sent(&passed[0], "traceparent"), [unsampled]);
    assert_ne!(sent(&passed[1], "traceparent"), [CALLERS]);

    let gateway = Gateway::with(&traced(&collector, "0", ""))
        .upstream(&origin)
        .start();
    gateway.send(&asking(CALLERS));
    let passed = origin.requests();
    assert_eq!(
        sent(&passed[2], "traceparent"),
        [CALLERS],
        "without a span, as it came"
    );
    assert_eq!(gateway.metric("tidegate_trace_spans_total"), 0.0);
}

#[test]
fn an_upstream_that_fails_is_an_error_of_the_span() {
    let collector = Collector::start();
    let nobody = format!("http://{}", crate::support::origin::nobody());
    let gateway = Gateway::with(&traced(&collector, "1", ""))
        .upstream_at(&nobody)
        .start();
    assert_eq!(gateway.get("/").status, 502);
    let spans = collector.wait_for(1);
    assert_eq!(spans[0].status, 2);
    assert_eq!(attribute(&spans[0], "error.type"), "connect");
}

#[test]
fn why_the_gateway_does_not_serve_a_request_is_an_error_of_its_span() {
    let collector = Collector::start();
    let toml = traced(&collector, "1", "[overload]\nmax_in_flight = 1\n");
    let gateway = Gateway::with(&toml).start();
    assert_eq!(gateway.get("/").status, 503, "one place is kept");
    let spans = collector.wait_for(1);
    assert_eq!(attribute(&spans[0], "error.type"), "overloaded");
}

#[test]
fn without_a_collector_a_trace_passes_as_it_came() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    gateway.send(
        &Request::get("/")
            .header("traceparent", CALLERS)
            .header("tracestate", "a=1"),
    );
    let seen = &origin.requests()[0];
    assert_eq!(sent(seen, "traceparent"), [CALLERS]);
    assert_eq!(sent(seen, "tracestate"), ["a=1"]);
}

#[test]
fn the_last_spans_arrive_before_the_process_ends() {
    let collector = Collector::start();
    let mut gateway = Gateway::with(&traced(&collector, "1", "")).start();
    let mut client = gateway.connect();
    (0..700).for_each(|_| assert_eq!(client.send(&Request::get("/")).status, 200));
    drop(client);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    assert_eq!(collector.wait_for(700).len(), 700);
}

#[test]
fn a_collector_that_hangs_costs_spans_and_no_request() {
    let collector = Collector::hanging();
    let mut gateway = Gateway::with(&traced(&collector, "1", "")).start();
    let address = gateway.address();
    // exceeds the queue plus the batch being sent
    let send = || {
        let mut client = Client::connect(address);
        (0..3_000).for_each(|_| assert_eq!(client.send(&Request::get("/")).status, 200));
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|_| drop(scope.spawn(send)));
    });
    let dropped = r#"tidegate_trace_spans_total{outcome="dropped"}"#;
    assert!(
        gateway.metric(dropped) >= 1.0,
        "{} dropped",
        gateway.metric(dropped)
    );
    gateway.signal("TERM");
    assert!(gateway.wait().success(), "nor does it hold up the end");
}
