//! Bodies pass unchanged, and compressed ones are not read.

use serde_json::json;

use super::{ask, balance, limited, provider, settled_from, units};
use crate::support::{Gateway, Origin, Request};

const TOKENS: &str = "rate = \"100000000/min\"\ncost = { preset = \"openai\", estimate = 50 }";

#[test]
fn the_upstream_is_asked_not_to_compress_what_is_read() {
    let origin = provider();
    let request = ask(&json!({"completion": 1})).header("Accept-Encoding", "gzip, br");
    let gateway = limited(&origin, TOKENS);
    gateway.send(&request);
    assert_eq!(origin.request().header("accept-encoding"), Some("identity"));
    let other = provider();
    let limit = "rate = \"1000/s\"\ncost = { from = \"response_bytes\", estimate = 1 }";
    limited(&other, limit).send(&request);
    assert_eq!(other.request().header("accept-encoding"), Some("gzip, br"));
}

#[test]
fn a_compressed_answer_passes_unread_and_is_counted() {
    let bytes: Vec<u8> = (0..2_000_u32).map(|byte| (byte * 7) as u8).collect();
    let sent = bytes.clone();
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        let fields = [
            ("Content-Type", "application/json"),
            ("Content-Encoding", "gzip"),
        ];
        exchange.respond(200, &fields, &sent)
    });
    let gateway = limited(&origin, TOKENS);
    let answer = gateway.send(&ask(&json!({})));
    assert_eq!(answer.body, bytes);
    balance(&gateway);
    assert_eq!(settled_from(&gateway, "counted"), 1);
    let unread = "tidegate_cost_unread_total{limit=\"tokens\",why=\"encoding\"}";
    assert_eq!(gateway.metric(unread), 1.0);
}

#[test]
fn answers_pass_byte_for_byte_however_they_are_split() {
    let origin = Origin::new(|exchange| {
        let body = exchange.read_body()?;
        let seed = u64::from(body.len() as u32) * 31 + u64::from(body[body.len() - 2]);
        let head = "HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream\r\n\
                    Transfer-Encoding: chunked\r\n\r\n";
        exchange.write(head.as_bytes())?;
        let text = text_of(seed);
        let mut rest = &text[..];
        let mut state = seed | 1;
        while !rest.is_empty() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let length = (1 + (state >> 33) as usize % 300).min(rest.len());
            let (piece, left) = rest.split_at(length);
            let mut chunk = format!("{length:x}\r\n").into_bytes();
            chunk.extend_from_slice(piece);
            chunk.extend_from_slice(b"\r\n");
            exchange.write(&chunk)?;
            rest = left;
        }
        exchange.write(b"0\r\n\r\n")
    });
    let gateway = limited(&origin, TOKENS);
    let mut client = gateway.connect();
    for number in 0..1_000_u64 {
        let body = format!("{{\"number\":{number}}}");
        let seed = u64::from(body.len() as u32) * 31 + u64::from(body.as_bytes()[body.len() - 2]);
        let answer = client.send(&Request::post("/", body));
        assert!(answer.body == text_of(seed), "answer {number}");
    }
    balance(&gateway);
}

fn text_of(seed: u64) -> Vec<u8> {
    let mut text = Vec::new();
    for event in 0..(seed % 23) {
        text.extend_from_slice(
            format!("data: {{\"n\":{event},\"text\":\"\u{e9}\"}}\r\n\r\n").as_bytes(),
        );
    }
    text.extend_from_slice(b": a comment\n\ndata: [DONE]\n\n");
    text
}

#[test]
fn usage_is_asked_for_where_the_client_says_nothing_of_it() {
    let origin = provider();
    let limit = "rate = \"1000000/min\"\ncost = { preset = \"openai\", ask_usage = true }";
    let gateway = limited(&origin, limit);
    let body = |seen: &crate::support::origin::Seen| -> serde_json::Value {
        serde_json::from_slice(&seen.body).expect("JSON")
    };
    gateway.send(&ask(&json!({"events": 3, "completion": 5})));
    let seen = origin.request();
    assert_eq!(
        body(&seen)["stream_options"],
        json!({"include_usage": true})
    );
    assert_eq!(body(&seen)["plan"]["events"], 3);
    assert!(seen.faults().is_empty() && seen.complete);
    let whole = ask(&json!({"completion": 5}));
    gateway.send(&whole);
    let seen = origin.wait_for_requests(2);
    assert!(body(&seen[1]).get("stream_options").is_none());
    let said = r#"{"stream":true,"stream_options":{"include_usage":false},"plan":{"events":1}}"#;
    gateway.send(&Request::post("/", said));
    let seen = origin.wait_for_requests(3);
    assert_eq!(seen[2].body, said.as_bytes());
    balance(&gateway);
}

#[test]
fn costs_are_read_from_headers_trailers_bytes_and_requests() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.write(
            b"HTTP/1.1 200 Fine\r\nX-Cost: 0.25\r\nTransfer-Encoding: chunked\r\n\
              Trailer: X-Last\r\n\r\n5\r\nhello\r\n0\r\nX-Last: 40\r\n\r\n",
        )
    });
    for (cost, settled) in [
        (
            "{ from = \"response_header:x-cost\", scale = 1000, hide = true, estimate = 5 }",
            250,
        ),
        ("{ from = \"response_trailer:x-last\", estimate = 5 }", 40),
        ("{ from = \"response_bytes\", estimate = 1 }", 5),
        ("{ from = \"request_bytes\", estimate = 1 }", 11),
        ("{ from = \"bytes\", estimate = 1 }", 16),
        (
            "{ from = \"request_json\", field = \"first\", estimate = 1 }",
            12,
        ),
        ("{ from = \"request_header:x-cost\", estimate = 3 }", 3),
    ] {
        let gateway = limited(&origin, &format!("rate = \"1000/s\"\ncost = {cost}"));
        let request = Request::post("/", r#"{"first":12"#.to_owned() + "}").header("X-Cost", "7");
        let answer = gateway.send(&Request::post("/", "{\"first\":12}"));
        assert_eq!(answer.body, b"hello");
        let is_hidden = cost.contains("hide");
        assert_eq!(answer.header("x-cost").is_none(), is_hidden);
        balance(&gateway);
        let counted = units(&gateway, "settled");
        let counted = match cost.contains("bytes") {
            // the body of the request has 12 bytes
            true => counted - u64::from(!cost.contains("response")),
            false => counted,
        };
        assert_eq!(counted, settled, "{cost}");
        drop(request);
    }
}

#[test]
fn a_header_of_the_request_is_believed_from_trusted_proxies_only() {
    let origin = provider();
    let limit = |identity: &str| {
        format!(
            "{identity}[gateway]\nlimits = [\"tokens\"]\n[limit.tokens]\nkey = []\n\
             rate = \"1000/s\"\ncost = {{ from = \"request_header:x-cost\", estimate = 3 }}\n"
        )
    };
    for (identity, told, charged) in [
        ("", "7", 3),
        ("[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n", "7", 7),
        (
            "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n",
            "seven",
            3,
        ),
    ] {
        let gateway = Gateway::with(&limit(identity)).upstream(&origin).start();
        gateway.send(&Request::get("/").header("X-Cost", told));
        assert_eq!(units(&gateway, "settled"), charged, "{identity} {told}");
    }
}
