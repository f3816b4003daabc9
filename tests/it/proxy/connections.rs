//! Connections on either side: kept, pipelined, closed, and stale.

use std::time::Duration;

use crate::support::{Client, Gateway, Origin, Request, curl::curl, http2, raw, wait::time_passes};

const SOON: Duration = Duration::from_secs(5);

const ONE: &str = r#"
    [gateway]
    limits = ["one"]
    [limit.one]
    key = ["ip"]
    rate = "1/h"
    burst = 1
"#;

#[test]
fn one_connection_serves_many_requests_on_both_sides() {
    let origin = Origin::ok();
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 50), [200; 50]);
    assert_eq!(gateway.statuses(&Request::post("/", "body"), 50), [200; 50]);
    assert_eq!(origin.connections(), 1);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        let target = exchange.request.target.clone();
        exchange.respond(200, &[], target.as_bytes())
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let targets = ["/one", "/two", "/three", "/four"];
    let bytes: Vec<u8> = targets
        .iter()
        .flat_map(|target| Request::get(target).to_bytes())
        .collect();
    client.write(&bytes).expect("all leave at once");
    for target in targets {
        assert_eq!(
            client.read_response("GET").expect("an answer").text(),
            target
        );
    }
}

#[test]
fn of_two_pipelined_requests_the_one_over_the_limit_is_rejected() {
    let gateway = Gateway::with(ONE).start();
    let mut client = gateway.connect();
    client
        .write(&[Request::get("/a").to_bytes(), Request::get("/b").to_bytes()].concat())
        .expect("both leave");
    let statuses = [0, 1].map(|_| client.read_response("GET").expect("an answer").status);
    assert_eq!(statuses, [200, 429]);
    assert_eq!(
        client.send(&Request::get("/c")).status,
        429,
        "and the connection lives on"
    );
}

#[test]
fn a_rejected_request_with_a_small_body_does_not_derail_the_next() {
    let gateway = Gateway::with(ONE).start();
    let mut client = gateway.connect();
    assert_eq!(client.send(&Request::get("/")).status, 200);
    let rejected = client.send(&Request::post(
        "/",
        "GET /smuggled HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ));
    assert_eq!(rejected.status, 429);
    // kept or closed, but body bytes never become a request
    if let Ok(next) = client.try_send(&Request::new("HEAD", "/")) {
        assert_eq!(next.status, 429);
        assert!(
            !client.closes_within(Duration::from_millis(100))
                || rejected.header("connection").is_none()
        );
    }
    gateway.wait_for_metric(r#"tidegate_requests_total{code="200"}"#, 1.0);
}

#[test]
fn http_1_0_is_answered_and_closed_unless_it_asks_to_be_kept() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange
            .write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let reply = raw::send(
        gateway.address(),
        b"GET / HTTP/1.0\r\nHost: a.example\r\n\r\n",
        SOON,
    );
    assert_eq!(
        (reply.statuses(), reply.closed),
        (vec!["200".to_owned()], true)
    );
    let text = reply.text();
    assert!(
        text.ends_with("\r\n\r\nhello"),
        "HTTP/1.0 knows no chunks: {text:?}"
    );
    assert!(!text.to_ascii_lowercase().contains("transfer-encoding"));
}

#[test]
fn connection_close_is_honoured() {
    let gateway = Gateway::with("").start();
    let mut client = gateway.connect();
    let response = client.send(&Request::get("/").header("connection", "close"));
    assert_eq!(
        (response.status, response.header("connection")),
        (200, Some("close"))
    );
    assert!(client.closes_within(SOON));
}

#[test]
fn many_streams_share_one_http2_connection() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let requests: Vec<Request> = (0..100)
        .map(|n| Request::post("/", format!("body {n}")))
        .collect();
    for (n, response) in http2::send_all(gateway.address(), &requests)
        .into_iter()
        .enumerate()
    {
        let response = response.expect("an answer");
        assert_eq!(
            (response.status, response.text()),
            (200, format!("body {n}"))
        );
    }
    assert_eq!(origin.requests().len(), 100);
}

#[test]
fn a_listener_may_leave_http2_out() {
    let origin = Origin::ok();
    let gateway = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nhttp2 = false\n")
        .upstream(&origin)
        .start();
    let reply = raw::send(
        gateway.address(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        SOON,
    );
    assert!(reply.closed);
    let refused = reply
        .statuses()
        .iter()
        .all(|status| status == "400" || status == "505");
    assert!(refused, "{:?}", reply.text());
    assert_eq!(origin.requests().len(), 0, "PRI is never forwarded");
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn curl_speaks_both_protocols_and_uploads() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let url = format!("http://{}/path", gateway.address());
    for protocol in ["--http1.0", "--http1.1", "--http2-prior-knowledge"] {
        assert_eq!(
            curl(&[protocol, "--data", "sent by curl", &url]),
            "sent by curl",
            "{protocol}"
        );
        assert_eq!(curl(&[protocol, &url]), "", "{protocol}");
    }
    let head = curl(&["--http1.1", "--head", &url]);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

/// Longer than the idle time before parking.
const PARKED: Duration = Duration::from_millis(1500);

#[test]
fn a_connection_that_was_idle_for_long_serves_on() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    for turn in 0..3 {
        let body = "x".repeat(turn * 10_000);
        let answer = client.send(&Request::post("/", body.clone()));
        assert_eq!((answer.status, answer.text()), (200, body), "turn {turn}");
        time_passes(PARKED, "the gateway parks the connection");
    }
    // a head in two parts, each of which arrives on an idle connection
    let request = Request::post("/", "hello").to_bytes();
    let (first, second) = request.split_at(7);
    client.write(first).expect("the connection is open");
    time_passes(PARKED, "the gateway parks the connection");
    client.write(second).expect("the connection is open");
    let answer = client.read_response("POST").expect("an answer");
    assert_eq!(answer.text(), "hello");
    assert_eq!(origin.connections(), 1);
}

#[test]
fn the_start_of_a_head_behind_a_request_is_not_lost_while_nothing_else_comes() {
    let origin = Origin::echo();
    let gateway = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nheader_timeout = \"3s\"\n")
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    let (one, two) = (
        Request::post("/", "one"),
        Request::post("/", "two").to_bytes(),
    );
    client
        .write(&[&one.to_bytes(), &two[..9]].concat())
        .expect("the requests leave");
    assert_eq!(
        client.read_response("POST").expect("an answer").text(),
        "one"
    );
    time_passes(PARKED, "the gateway parks the connection");
    client.write(&two[9..]).expect("the connection is open");
    assert_eq!(
        client.read_response("POST").expect("an answer").text(),
        "two"
    );

    client
        .write(&[&one.to_bytes(), &two[..9]].concat())
        .expect("the requests leave");
    assert_eq!(
        client.read_response("POST").expect("an answer").text(),
        "one"
    );
    let late = client.read_response("POST").expect("an answer");
    assert_eq!(late.status, 408, "a head that has begun has to end");
}

#[test]
fn an_answer_that_its_client_is_slow_to_take_is_not_lost_while_nothing_else_moves() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        let length: usize = exchange.request.target[1..].parse().expect("a length");
        exchange.respond(200, &[], &vec![b'a'; length])
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    // for some of these lengths, the gateway holds the end of the response and the kernel the rest
    let mut clients: Vec<_> = (0..64)
        .map(|step| {
            let length = step * 100_000;
            let mut client = gateway.connect();
            let request = Request::get(&format!("/{length}"));
            client
                .write(&request.to_bytes())
                .expect("the request leaves");
            (client, length)
        })
        .collect();
    time_passes(PARKED * 2, "the buffers of both sides fill");
    for (client, length) in &mut clients {
        let answer = client.read_response("GET").expect("a whole answer");
        assert_eq!(answer.body.len(), *length);
        assert_eq!(
            client.send(&Request::get("/1")).body,
            b"a",
            "and it serves on"
        );
    }
}

#[test]
fn a_parked_connection_ends_after_the_idle_timeout_and_when_the_gateway_does() {
    let mut gateway = Gateway::with(
        "[server]\ndrain_timeout = \"1h\"\n[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"3s\"\n[[listen]]\naddress = \"127.0.0.1:0\"\n",
    )
    .start();
    let mut impatient = gateway.connect();
    let mut patient = Client::connect(gateway.listeners()[1]);
    for client in [&mut impatient, &mut patient] {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    time_passes(PARKED, "the gateway parks the connection");
    assert!(!impatient.closes_within(Duration::from_millis(100)));
    assert!(
        impatient.closes_within(Duration::from_secs(30)),
        "after idle_timeout"
    );
    gateway.signal("TERM");
    assert!(gateway.wait().success(), "nothing waits for the other one");
    assert!(patient.closes_within(Duration::from_secs(30)));
}
