//! Connections on either side: kept, pipelined, closed, old.

use std::time::Duration;

use crate::support::{Gateway, Origin, Request, curl::curl, http2, raw};

const SOON: Duration = Duration::from_secs(5);

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
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"one\"]\n[limit.one]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = 1\n",
    )
    .start();
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
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"one\"]\n[limit.one]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = 1\n",
    )
    .start();
    let mut client = gateway.connect();
    assert_eq!(client.send(&Request::get("/")).status, 200);
    let rejected = client.send(&Request::post(
        "/",
        "GET /smuggled HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ));
    assert_eq!(rejected.status, 429);
    // kept or closed, but never an answer to what was a body
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
