//! Limits on what requests cost: reserved on arrival, grown while an answer runs, settled at its
//! end.

mod answers;
mod balance;
mod bodies;
mod shared;
mod streams;

use std::{
    io,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::support::{
    Gateway, Origin, Request, eventually, metrics::Metrics, origin::Exchange, wait::time_passes,
};

/// A provider of a language model that does as the `plan` in the request's body says:
///
/// - `status`: 200 by default
/// - `prompt`, `completion`: the usage it reports; not at all without them
/// - `events`, `pace_ms`: a stream of so many events at this pace; one JSON value without them
/// - `ends`: `"close"` or `"reset"` in the middle, `"never"` for no answer at all
fn provider() -> Origin {
    Origin::new(|exchange| {
        let body = exchange.read_body()?;
        let request: Value = serde_json::from_slice(&body).unwrap_or_default();
        let plan = &request["plan"];
        match plan["ends"].as_str() {
            Some("never") => return exchange.wait_for_abort(),
            Some("unanswered") => return exchange.close(),
            _ => {}
        }
        match plan["events"].as_u64() {
            Some(events) => stream(exchange, plan, events),
            None => whole(exchange, plan),
        }
    })
}

fn usage(plan: &Value) -> Option<Value> {
    let completion = plan["completion"].as_u64()?;
    let prompt = plan["prompt"].as_u64().unwrap_or(0);
    Some(json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }))
}

fn whole(exchange: &mut Exchange<'_>, plan: &Value) -> io::Result<()> {
    let status = plan["status"].as_u64().unwrap_or(200) as u16;
    let mut answer = json!({"model": "m", "choices": [{"message": {"content": "hello"}}]});
    if let Some(usage) = usage(plan) {
        answer["usage"] = usage;
    }
    let fields = [("Content-Type", "application/json")];
    exchange.respond(status, &fields, answer.to_string().as_bytes())
}

fn stream(exchange: &mut Exchange<'_>, plan: &Value, events: u64) -> io::Result<()> {
    let head = "HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    exchange.write(head.as_bytes())?;
    let pace = Duration::from_millis(plan["pace_ms"].as_u64().unwrap_or(0));
    let begun = Instant::now();
    for event in 1..=events {
        let data = json!({"model": "m", "choices": [{"delta": {"content": "word"}}]});
        send_event(exchange, &data)?;
        // at the pace on average, however long a sleep takes
        let due = pace * event as u32;
        time_passes(due.saturating_sub(begun.elapsed()), "the next event is due");
    }
    match plan["ends"].as_str() {
        Some("close") => return exchange.close(),
        Some("reset") => return exchange.reset(),
        _ => {}
    }
    if let Some(usage) = usage(plan) {
        send_event(
            exchange,
            &json!({"model": "m", "choices": [], "usage": usage}),
        )?;
    }
    exchange.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
}

fn send_event(exchange: &mut Exchange<'_>, data: &Value) -> io::Result<()> {
    let event = format!("data: {data}\n\n");
    exchange.write(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes())
}

/// A gateway before the provider with this limit named `tokens`.
fn limited(origin: &Origin, limit: &str) -> Gateway {
    let toml = format!(
        "[gateway]\nlimits = [\"tokens\"]\n[log]\naccess = \"all\"\nformat = \"json\"\n\
         [limit.tokens]\nkey = [\"header:x-user\"]\nmissing = \"shared\"\n{limit}\n"
    );
    Gateway::with(&toml).upstream(origin).start()
}

/// A request for what the provider is to do.
fn ask(plan: &Value) -> Request {
    let body = json!({"model": "m", "stream": plan["events"].is_u64(), "plan": plan});
    Request::post("/v1/chat/completions", body.to_string())
        .header("Content-Type", "application/json")
}

/// An answer that reports this many tokens in all.
fn reporting(tokens: u64) -> Request {
    ask(&json!({"prompt": 0, "completion": tokens}))
}

/// Units that met one of these fates.
fn units(gateway: &Gateway, kind: &str) -> u64 {
    let selector = format!("tidegate_cost_units_total{{limit=\"tokens\",kind=\"{kind}\"}}");
    gateway.metric(&selector) as u64
}

fn in_flight(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_cost_in_flight_units{limit=\"tokens\"}")
}

/// Waits until nothing is in flight, and checks that every unit is accounted for.
fn balance(gateway: &Gateway) {
    eventually("everything to be settled", || match in_flight(gateway) {
        0.0 => Ok(()),
        held => Err(format!("{held} units are held")),
    });
    let metrics: Metrics = gateway.metrics();
    let of = |kind: &str| {
        let selector = format!("tidegate_cost_units_total{{limit=\"tokens\",kind=\"{kind}\"}}");
        metrics.sum(&selector) as i64
    };
    assert_eq!(
        of("reserved") + of("grown") + of("extra") - of("refunded"),
        of("settled")
    );
}

/// Requests settled from this source.
fn settled_from(gateway: &Gateway, source: &str) -> u64 {
    let selector = format!("tidegate_cost_settled_total{{limit=\"tokens\",source=\"{source}\"}}");
    gateway.metric(&selector) as u64
}

/// The access lines about the cost of requests.
fn cost_lines(gateway: &Gateway, count: usize) -> Vec<Value> {
    let mut lines = Vec::new();
    eventually("the access lines", || {
        let output = gateway.output();
        let parsed = output
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        lines = parsed
            .filter(|line: &Value| line["cost"].is_u64())
            .collect();
        match lines.len() >= count {
            true => Ok(()),
            false => Err(format!("{} of {count}", lines.len())),
        }
    });
    lines
}
