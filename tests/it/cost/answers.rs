//! What answers cost, whole and broken.

use std::{thread, time::Duration};

use serde_json::json;

use super::{ask, balance, cost_lines, limited, provider, reporting, settled_from, units};
use crate::support::{Gateway, Request, eventually, origin::nobody, wait::time_passes};

/// An estimate of this many tokens, where input counts nothing.
fn fixed(rate: u64, estimate: u64) -> String {
    format!("rate = \"{rate}/min\"\ncost = {{ preset = \"openai\", estimate = {estimate} }}")
}

#[test]
fn of_twenty_expensive_requests_at_once_ten_are_admitted_and_the_debt_is_paid_back() {
    let origin = provider();
    let gateway = limited(&origin, &fixed(10_000, 1_000));
    let address = gateway.address();
    let clients: Vec<_> = (0..20)
        .map(|_| {
            thread::spawn(move || {
                let mut client = crate::support::Client::connect(address);
                client.send(&reporting(5_000)).status
            })
        })
        .collect();
    let statuses = clients
        .into_iter()
        .map(|client| client.join().expect("a client"));
    let admitted = statuses.filter(|&status| status == 200).count();
    assert!((2..=10).contains(&admitted), "{admitted} of 20");
    balance(&gateway);
    let used = 5_000 * admitted as u64;
    assert_eq!(units(&gateway, "settled"), used);
    let refused = gateway.send(&reporting(5_000));
    assert_eq!(refused.status, 429);
    // a debt of one capacity, and the estimate of the next request
    let wait = refused.retry_after().expect("a wait");
    assert!((1..=66).contains(&wait), "{wait} s");
    assert_eq!(refused.remaining("tokens"), 0);
}

#[test]
fn a_wait_that_is_told_is_true_to_the_second() {
    let origin = provider();
    // 6000 a minute are 100 a second
    let limit = "rate = \"6000/min\"\nburst = 1000\n\
                 cost = { preset = \"openai\", estimate = 500 }";
    let gateway = limited(&origin, limit);
    assert_eq!(gateway.send(&reporting(1_250)).status, 200);
    balance(&gateway);
    let refused = gateway.send(&reporting(1));
    let wait = refused.retry_after().expect("a wait");
    // it owes 250, and needs 500
    assert!((7..=8).contains(&wait), "{wait} s");
    time_passes(Duration::from_secs(wait - 2), "the debt is paid back");
    assert_eq!(gateway.send(&reporting(1)).status, 429);
    time_passes(Duration::from_secs(2), "the wait is over");
    assert_eq!(gateway.send(&reporting(1)).status, 200);
}

#[test]
fn what_a_request_did_not_use_comes_back_at_once() {
    let origin = provider();
    let limit = "rate = \"2000/min\"\ncost = { preset = \"openai\", estimate = 1_000 }";
    let gateway = limited(&origin, limit);
    let mut client = gateway.connect();
    for _ in 0..8 {
        assert_eq!(client.send(&reporting(100)).status, 200);
    }
    balance(&gateway);
    assert_eq!(units(&gateway, "reserved"), 8_000);
    assert_eq!(units(&gateway, "refunded"), 7_200);
    assert_eq!(units(&gateway, "settled"), 800);
    assert_eq!(settled_from(&gateway, "reported"), 8);
}

#[test]
fn after_twenty_answers_the_estimate_is_their_mean() {
    let origin = provider();
    let limit = "rate = \"10000/min\"\ncost = \"openai\"";
    let gateway = limited(&origin, limit);
    // each of 20 users has a bucket of its own; what is learned belongs to the limit
    for user in 0..20 {
        let user = format!("user {user}");
        let request = reporting(5_000).header("x-user", &user);
        assert_eq!(gateway.send(&request).status, 200);
    }
    balance(&gateway);
    let before = units(&gateway, "reserved");
    let request = ask(&json!({"completion": 5_000, "events": 1, "pace_ms": 400}));
    let statuses: Vec<u16> = thread::scope(|scope| {
        let send = || scope.spawn(|| gateway.send(&request).status);
        let clients = [send(), send(), send()];
        clients
            .map(|client| client.join().expect("a client"))
            .into()
    });
    let admitted = statuses.iter().filter(|&&status| status == 200).count();
    // 10 000 hold one estimate of 5 000 and a little for the request's bytes
    assert_eq!(admitted, 1, "{statuses:?}");
    balance(&gateway);
    let held = units(&gateway, "reserved") - before;
    assert!((5_001..=5_100).contains(&held), "{held}");
}

#[test]
fn what_fails_is_charged_as_far_as_it_worked() {
    let origin = provider();
    let limit = "rate = \"100000/min\"\ncost = { preset = \"openai\", estimate = 1_000 }";
    let gateway = Gateway::with(&format!(
        "[gateway]\nlimits = [\"tokens\"]\n[limit.tokens]\nkey = []\n{limit}\n\
         [upstream.origin]\nservers = [{:?}]\nresponse_timeout = \"300ms\"\n",
        origin.url()
    ))
    .start();
    for status in [400, 429, 500] {
        let answered = gateway.send(&ask(&json!({"status": status})));
        assert_eq!(answered.status, status);
        balance(&gateway);
        assert_eq!(units(&gateway, "settled"), 0, "{status}");
    }
    assert_eq!(settled_from(&gateway, "refunded"), 3);
    // usage counts, whatever the status
    gateway.send(&ask(&json!({"status": 500, "prompt": 3, "completion": 4})));
    balance(&gateway);
    assert_eq!(units(&gateway, "settled"), 7);
    // sent and never answered: input only, a quarter of its bytes; what is not read counts by length
    let silent = ask(&json!({"ends": "never"}));
    let input = silent.to_bytes().len() as u64 / 4;
    assert_eq!(gateway.send(&silent).status, 504);
    balance(&gateway);
    let charged = units(&gateway, "settled") - 7;
    assert!((10..=input).contains(&charged), "{charged} of {input}");
    assert_eq!(settled_from(&gateway, "silent"), 1);
}

#[test]
fn a_server_that_cannot_be_reached_costs_nothing() {
    let gateway = Gateway::with(&format!(
        "[gateway]\nlimits = [\"tokens\"]\n[limit.tokens]\nkey = []\n{}\n",
        fixed(10_000, 1_000)
    ))
    .upstream_at(&format!("http://{}", nobody()))
    .start();
    for _ in 0..3 {
        assert!(gateway.send(&reporting(5_000)).status >= 502);
    }
    balance(&gateway);
    assert_eq!(units(&gateway, "settled"), 0);
    assert_eq!(units(&gateway, "refunded"), units(&gateway, "reserved"));
}

#[test]
fn usage_in_text_in_other_objects_and_in_requests_changes_nothing() {
    let answers = [
        r#"{"choices":[{"message":{"content":"{\"usage\":{\"total_tokens\":9}}"}}]}"#,
        r#"{"choices":[{"usage":{"prompt_tokens":9,"completion_tokens":9}}]}"#,
        r#"{"tool":{"usage":{"total_tokens":9}},"usage":{"total_tokens":"9"}}"#,
        r#"{"text":"data: {\"usage\":{\"total_tokens\":9}}\n\n"}"#,
    ];
    for answer in answers {
        let origin = crate::support::Origin::new(move |exchange| {
            exchange.read_body()?;
            let fields = [("Content-Type", "application/json"), ("X-Usage", "9")];
            exchange.respond(200, &fields, answer.as_bytes())
        });
        let limit = "rate = \"10000/min\"\n\
                     cost = { preset = \"openai\", estimate = 100, unreported = 7 }";
        let gateway = limited(&origin, limit);
        let request = Request::post("/", r#"{"usage":{"total_tokens":9},"stream":false}"#)
            .header("usage", "9")
            .header("x-usage", "9");
        assert_eq!(gateway.send(&request).status, 200);
        balance(&gateway);
        assert_eq!(units(&gateway, "settled"), 7, "{answer}");
        assert_eq!(settled_from(&gateway, "fixed"), 1);
    }
}

#[test]
fn the_access_line_tells_the_cost_of_a_request() {
    let origin = provider();
    let gateway = limited(&origin, &fixed(10_000, 1_000));
    gateway.send(&ask(&json!({"prompt": 30, "completion": 12})));
    let lines = cost_lines(&gateway, 1);
    let line = &lines[0];
    assert_eq!(line["cost"], 42);
    assert_eq!(line["cost_held"], 1_000);
    assert_eq!(line["cost_source"], "reported");
    assert_eq!(line["unit"], "tokens");
    assert_eq!(line["model"], "m");
    assert_eq!(
        (&line["tokens_in"], &line["tokens_out"]),
        (&json!(30), &json!(12))
    );
}

#[test]
fn three_limits_hold_all_or_nothing() {
    let origin = provider();
    let limit = |name: &str, rate: u64| {
        format!(
            "[limit.{name}]\nkey = []\nrate = \"{rate}/d\"\n\
             cost = {{ preset = \"openai\", estimate = 1_000 }}\n"
        )
    };
    let gateway = Gateway::with(&format!(
        "[gateway]\nlimits = [\"tokens\", \"second\", \"third\"]\n{}{}{}",
        limit("tokens", 50_000),
        limit("second", 60_000),
        limit("third", 1_500)
    ))
    .upstream(&origin)
    .start();
    // the third has room for one estimate of a thousand
    assert_eq!(gateway.send(&reporting(900)).status, 200);
    balance(&gateway);
    let mut seen = None;
    for _ in 0..500 {
        // a connection whose body is not read is closed
        let refused = gateway.send(&reporting(900));
        assert_eq!(refused.status, 429);
        let remaining = (refused.remaining("tokens"), refused.remaining("second"));
        assert_eq!(*seen.get_or_insert(remaining), remaining);
    }
    let (first, second) = seen.expect("it was refused");
    assert!((49_100..=49_110).contains(&first) && (59_100..=59_110).contains(&second));
    assert_eq!(units(&gateway, "settled"), 900);
}

#[test]
fn debt_is_bounded_and_what_is_beyond_is_forgiven() {
    let origin = provider();
    let limit = "rate = \"1000/h\"\ncost = { preset = \"openai\", estimate = 100 }";
    let gateway = limited(&origin, limit);
    assert_eq!(gateway.send(&reporting(10_000)).status, 200);
    balance(&gateway);
    let forgiven = units(&gateway, "forgiven");
    assert!((7_990..=8_000).contains(&forgiven), "{forgiven}");
    assert_eq!(
        gateway.metric("tidegate_cost_owed_keys_total{limit=\"tokens\"}"),
        1.0
    );
    let wait = gateway.send(&reporting(1)).retry_after();
    assert!(
        wait.is_some_and(|wait| (3_900..=3_960).contains(&wait)),
        "{wait:?}"
    );
}

#[test]
fn a_client_that_leaves_pays_for_what_was_made() {
    let origin = provider();
    let limit = "rate = \"100000/min\"\ncost = { preset = \"openai\", estimate = 10 }";
    let gateway = limited(&origin, limit);
    let mut client = gateway.connect();
    let request = ask(&json!({"events": 500, "pace_ms": 10, "completion": 500}));
    let head = client.begin(&request);
    assert_eq!(head.status, 200);
    let mut read = 0;
    let mut buffer = [0; 4096];
    while read < 50 {
        let bytes = std::io::Read::read(client.stream_mut(), &mut buffer).expect("events");
        let text = String::from_utf8_lossy(&buffer[..bytes]);
        read += text.matches("data:").count();
    }
    drop(client);
    balance(&gateway);
    let charged = units(&gateway, "settled");
    assert!((45..=110).contains(&charged), "{charged} for {read} events");
    assert_eq!(settled_from(&gateway, "aborted"), 1);
    assert_eq!(cost_lines(&gateway, 1)[0]["cost_source"], "aborted");
    eventually("the upstream's connection to be closed", || {
        match origin.aborted() {
            0 => Err("it is open".to_owned()),
            _ => Ok(()),
        }
    });
}
