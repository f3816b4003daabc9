//! Origins that die, stall, or stop half-way; clients that leave.

use std::{
    net::Shutdown,
    thread,
    time::{Duration, Instant},
};

use crate::support::{
    Broken, Gate, Gateway, Origin, Request, http2,
    origin::nobody,
    wait::{eventually_eq, time_passes},
};

const IMPATIENT: &str = r#"
    [upstream.origin]
    servers = ["{origin}"]
    response_timeout = "300ms"
"#;

#[test]
fn an_origin_that_is_not_there_is_502() {
    let gateway = Gateway::with("")
        .upstream_at(&format!("http://{}", nobody()))
        .start();
    let response = gateway.get("/");
    assert_eq!(response.status, 502);
    assert_eq!(response.retry_after(), None);
    assert_eq!(
        http2::send(gateway.address(), &Request::get("/")).status,
        502
    );
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{upstream="origin"}"#, 2.0);
}

#[test]
fn a_killed_origin_is_502_until_it_is_back() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    origin.kill();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [502; 3]);
    origin.revive();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 3),
        [200; 3],
        "nobody had to help"
    );
}

#[test]
fn an_origin_killed_in_the_middle_of_an_exchange_is_502() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        held.wait();
        exchange.close()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let waiting =
        thread::spawn(move || client.try_send(&Request::post("/", "not to be sent twice")));
    origin.wait_for_requests(1);
    origin.kill();
    assert_eq!(
        waiting
            .join()
            .expect("the client's thread")
            .expect("an answer")
            .status,
        502
    );
    gate.open();
    assert_eq!(
        origin.requests().len(),
        1,
        "a POST that the origin has seen is never repeated"
    );
}

#[test]
fn an_origin_that_resets_is_502() {
    let origin = Origin::new(|exchange| exchange.reset());
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 502);
}

#[test]
fn a_request_that_waited_for_a_connection_has_its_whole_response_timeout() {
    let gate = Gate::default();
    let held = gate.clone();
    // one response keeps the only connection: its head is sent, its body has not ended
    let origin = Origin::new(move |exchange| {
        if exchange.request.target == "/long" {
            exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlo")?;
            held.wait();
            return exchange.write(b"ng");
        }
        exchange.respond(200, &[], b"short")
    });
    let gateway = Gateway::with(
        "[server]\nworkers = 1\n[upstream.origin]\nservers = [\"{origin}\"]\nmax_connections = 1\n\
         connect_timeout = \"20s\"\nresponse_timeout = \"1s\"\n",
    )
    .upstream(&origin)
    .start();
    thread::scope(|scope| {
        let long = scope.spawn(|| gateway.get("/long"));
        origin.wait_for_requests(1);
        let short = scope.spawn(|| gateway.get("/short"));
        // longer than the timeout, which has not started
        time_passes(
            Duration::from_millis(1_500),
            "a timeout that had started would have ended",
        );
        gate.open();
        assert_eq!(long.join().expect("answered").text(), "long");
        let short = short.join().expect("answered");
        assert_eq!((short.status, short.text().as_str()), (200, "short"));
    });
    assert_eq!(origin.connections(), 1);
}

#[test]
fn a_slow_origin_is_504_after_the_response_timeout() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with(IMPATIENT).upstream(&origin).start();
    let asked = Instant::now();
    let response = gateway.get("/");
    let waited = asked.elapsed();
    gate.open();
    assert_eq!((response.status, response.retry_after()), (504, None));
    assert!(
        waited >= Duration::from_millis(300),
        "given up after {waited:?}"
    );
    assert!(
        waited < Duration::from_secs(3),
        "given up after {waited:?} only"
    );
    // the late response never reaches another client
    assert_eq!(gateway.get("/").text(), "late", "a fresh exchange");
    assert_eq!(origin.connections(), 2);
}

#[test]
fn a_slow_body_is_not_a_slow_origin() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")?;
        held.wait();
        exchange.write(b"cd")
    });
    let gateway = Gateway::with(IMPATIENT).upstream(&origin).start();
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/")).status, 200);
    assert_eq!(client.discard(2), Ok(2), "and what there is of the body");
    assert!(
        !client.closes_within(Duration::from_millis(500)),
        "the response timeout is over with the head"
    );
    gate.open();
    assert_eq!(client.discard(2), Ok(2));
}

#[test]
fn a_body_cut_short_never_ends_cleanly() {
    let cuts = [
        "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    ];
    for bytes in cuts {
        let origin = Origin::sending_then_closing(bytes);
        let gateway = Gateway::with("").upstream(&origin).start();
        let ended = gateway.connect().try_send(&Request::get("/"));
        assert!(
            matches!(ended, Err(Broken::Closed | Broken::Cut | Broken::Reset)),
            "{bytes:?} became {ended:?}"
        );

        let over_http2 = http2::send_all(gateway.address(), &[Request::get("/")]).remove(0);
        assert!(
            over_http2.is_err(),
            "{bytes:?} became {over_http2:?} over HTTP/2"
        );
        assert_eq!(gateway.admin("/healthz").status, 200);
    }
}

#[test]
fn a_client_that_leaves_takes_its_request_with_it() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.wait_for_abort()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(&Request::get("/").to_bytes())
        .expect("the request leaves");
    origin.wait_for_requests(1);
    client
        .stream()
        .shutdown(Shutdown::Both)
        .expect("a connected stream");
    drop(client);
    eventually_eq("exchanges given up", 1, || origin.aborted());
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_upload_never_completes_it() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        .expect("the start leaves");
    origin.wait_for_requests(1);
    drop(client);
    eventually_eq("exchanges given up", 1, || origin.aborted());
    assert!(
        !origin.request().complete,
        "the origin must not take the part for the whole"
    );
}

#[test]
fn a_stream_that_is_reset_takes_its_request_with_it() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.wait_for_abort()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    http2::send_and_reset(
        gateway.address(),
        &Request::get("/"),
        || origin.requests().len() == 1,
        || origin.aborted() == 1,
    );
}

#[test]
fn a_connection_that_the_origin_closed_meanwhile_costs_no_request() {
    // promises to keep the connection but closes it, like an origin that restarts
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[], b"ok")?;
        exchange.close()
    });
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    let statuses = gateway.statuses(&Request::get("/"), 20);
    assert_eq!(statuses, [200; 20]);
    assert_eq!(origin.connections(), 20);
}

#[test]
fn a_client_that_leaves_before_the_answer_is_counted_and_logged() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.wait_for_abort()
    });
    let gateway = Gateway::with("[log]\naccess = \"all\"\nformat = \"json\"\n")
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    client
        .write(&Request::get("/slow").to_bytes())
        .expect("the request leaves");
    origin.wait_for_requests(1);
    drop(client);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="499"}"#, 1.0);
    eventually_eq("the access line says so", true, || {
        gateway
            .output()
            .contains(r#""path":"/slow","route":"all","status":499,"upstream":"origin""#)
    });
}

#[test]
fn a_response_body_that_stalls_is_cut_short_after_the_body_timeout() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")?;
        exchange.wait_for_abort()
    });
    let impatient = "[upstream.origin]\nservers = [\"{origin}\"]\nbody_timeout = \"200ms\"\n";
    let gateway = Gateway::with(impatient).upstream(&origin).start();
    let ended = gateway.connect().try_send(&Request::get("/"));
    assert!(
        matches!(ended, Err(Broken::Closed | Broken::Cut | Broken::Reset)),
        "{ended:?}"
    );
    eventually_eq("connections to the origin given up", 1, || origin.aborted());
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="body"}"#, 1.0);
}

#[test]
fn interim_responses_without_end_are_502() {
    let mut flood = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n".repeat(1000);
    flood.extend_from_slice(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let origin = Origin::sending(flood);
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 502);
    let few = b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let origin = Origin::sending(*few);
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/").text(), "ok");
}

#[test]
fn a_dead_origin_is_logged_once_a_second_and_counted_each_time() {
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream_at(&format!("http://{}", nobody()))
        .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 200), [502; 200]);
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="connect"}"#, 200.0);
    let lines = gateway
        .stderr()
        .matches("the upstream gave no response")
        .count();
    assert!((1..=20).contains(&lines), "{lines} lines for 200 failures");
}

#[test]
fn an_early_answer_reaches_a_client_that_is_still_sending() {
    // the target decides whether the connection stays open or closes at once
    let origin = Origin::new(|exchange| {
        exchange.write(
            b"HTTP/1.1 413 Too Large\r\nContent-Length: 9\r\nX-Why: origin\r\n\r\ntoo large",
        )?;
        match exchange.request.target.as_str() {
            "/closes" => exchange.close(),
            "/resets" => exchange.reset(),
            _ => exchange.wait_for_abort(),
        }
    });
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"64MiB\"\n")
            .upstream(&origin)
            .start();
    // if a server closes with unread bytes, the reset may overtake the response (RFC 9112 §9.6);
    // this happens sometimes on a busy machine
    for (target, at_least) in [("/waits", 5), ("/closes", 4)] {
        let mut answered = 0;
        for round in 0..5 {
            let mut client = gateway.connect();
            let mut writer = client.stream().try_clone().expect("a second handle");
            let head = format!(
                "POST {target} HTTP/1.1\r\nHost: a.example\r\nContent-Length: 16777216\r\n\r\n"
            );
            client.write(head.as_bytes()).expect("the head leaves");
            let uploading = thread::spawn(move || {
                // writes as much as possible before it reads
                let _ = std::io::Write::write_all(&mut writer, &vec![7; 16 << 20]);
            });
            let answer = client.read_response("POST");
            let answer = answer.unwrap_or_else(|broken| panic!("{target}, {round}: {broken:?}"));
            match (answer.status, answer.header("x-why")) {
                (413, Some("origin")) => {
                    assert_eq!(answer.text(), "too large");
                    answered += 1;
                }
                (502, None) => {}
                other => panic!("{target}, {round}: {other:?}"),
            }
            // it may already be closed
            let _ = client.stream().shutdown(Shutdown::Both);
            uploading.join().expect("the uploading thread");
            let over_http2 = Request::post(target, vec![7; 1 << 20]);
            let status = http2::send(gateway.address(), &over_http2).status;
            assert!(
                status == 413 || (status == 502 && at_least < 5),
                "{target}, {round}: {status}"
            );
        }
        assert!(answered >= at_least, "{target}: {answered} of 5");
    }
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_leaves_while_a_limit_delays_it_is_counted_and_logged() {
    let origin = Origin::ok();
    let gateway = Gateway::with(
        r#"
        [log]
        access = "all"
        format = "json"
        [limit.turns]
        key = []
        rate = "2/h"
        burst = 1
        over = "delay"
        max_delay = "1h"
        [gateway]
        limits = ["turns"]
        "#,
    )
    .upstream(&origin)
    .start();
    assert_eq!(gateway.get("/first").status, 200);
    let mut client = gateway.connect();
    client
        .write(&Request::get("/waiting").to_bytes())
        .expect("the request leaves");
    gateway.wait_for_metric(r#"tidegate_decisions_total{outcome="delayed"}"#, 1.0);
    drop(client);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="499"}"#, 1.0);
    eventually_eq("the access line says so", true, || {
        let output = gateway.output();
        let mut lines = output.lines();
        lines.any(|line| line.contains(r#""path":"/waiting""#) && line.contains(r#""status":499"#))
    });
    assert_eq!(origin.requests().len(), 1);
}
