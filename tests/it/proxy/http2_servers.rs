//! HTTP/2 servers (`h2c://`): the requests they receive, their responses, and their failures.

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use http::{HeaderMap, HeaderValue, Response};

use crate::support::{
    Broken, Gateway, Origin, Request,
    h2c::{H2cOrigin, send_all},
    http2, raw,
    wait::{eventually_eq, time_passes, time_passes_in_task},
};

/// One worker, so that all requests share its connections.
fn through(origin: &H2cOrigin) -> Gateway {
    Gateway::with("[server]\nworkers = 1\n")
        .upstream_at(&origin.url())
        .start()
}

#[test]
fn a_request_is_told_in_http2_whatever_the_client_spoke() {
    let origin = H2cOrigin::echo();
    let gateway = through(&origin);
    let request = Request::post("/a%20b?c=d", "hello")
        .header("cookie", "a=1")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("x-end", "2")
        .header("keep-alive", "timeout=5")
        .header("te", "trailers");
    let answer = gateway.send(&request);
    assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
    assert_eq!(
        http2::send(gateway.address(), &Request::get("/two")).status,
        200
    );
    let seen = origin.requests();
    let (first, second) = (&seen[0], &seen[1]);
    assert_eq!(first.method, "POST");
    assert_eq!(first.uri, "http://a.example/a%20b?c=d");
    for (name, value) in [
        ("content-length", "5"),
        ("cookie", "a=1"),
        ("x-end", "2"),
        ("te", "trailers"),
        ("x-forwarded-proto", "http"),
    ] {
        assert_eq!(first.headers[name], value, "{name}");
    }
    for name in [
        "host",
        "connection",
        "x-hop",
        "keep-alive",
        "transfer-encoding",
    ] {
        assert!(!first.headers.contains_key(name), "{name}");
    }
    assert_eq!(second.uri, "http://a.example/two");
    assert!(!second.headers.contains_key("te"));
    assert_eq!(origin.connections(), 1, "both on one connection");
}

#[test]
fn a_body_of_unknown_length_passes_and_so_do_trailers() {
    let origin = H2cOrigin::echo();
    let gateway = through(&origin);
    let reply = raw::send(
        gateway.address(),
        b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX-Sum: 5\r\nContent-Length: 9\r\n\r\n",
        Duration::from_secs(10),
    );
    assert_eq!(reply.statuses(), ["200"]);
    assert!(reply.text().contains("abc"), "{}", reply.text());
    let over_http2 = http2::exchange_with_trailers(
        gateway.address(),
        &Request::post("/", "abcde"),
        &[("x-sum", "5"), ("host", "evil")],
    );
    let (answer, trailers) = over_http2.expect("an answer");
    assert_eq!(answer.text(), "abcde");
    assert_eq!(trailers.get("x-sum"), Some(&HeaderValue::from_static("5")));
    assert_eq!(trailers.len(), 1, "{trailers:?}");
    let seen = origin.requests();
    assert!(!seen[0].headers.contains_key("transfer-encoding"));
}

#[test]
fn trailers_pass_between_http2_and_chunks() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nGrpc-Status: 0\r\nX-T: v\r\nContent-Length: 3\r\n\r\n")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let (answer, trailers) = http2::exchange_with_trailers(
        gateway.address(),
        &Request::post("/", "x").header("te", "trailers"),
        &[("x-up", "1")],
    )
    .expect("an answer");
    assert_eq!(answer.text(), "ok");
    assert_eq!(
        trailers.get("grpc-status"),
        Some(&HeaderValue::from_static("0"))
    );
    assert_eq!(trailers.get("x-t"), Some(&HeaderValue::from_static("v")));
    assert_eq!(trailers.len(), 2, "{trailers:?}");
    let seen = origin.request();
    assert_eq!(seen.header("te"), Some("trailers"), "sent afresh");
    assert_eq!(seen.header("connection"), Some("te"));
}

#[test]
fn answers_without_a_body_have_none() {
    let origin = H2cOrigin::new(|mut call| async move {
        let target = call.target();
        let status: u16 = target[1..].parse().expect("the path is a status");
        let mut head = Response::new(());
        *head.status_mut() = http::StatusCode::from_u16(status).expect("a status");
        if status != 204 {
            head.headers_mut()
                .insert("content-length", HeaderValue::from_static("2"));
        }
        call.answer(head, true);
    });
    let gateway = through(&origin);
    let mut client = gateway.connect();
    let head = client.send(&Request::new("HEAD", "/200"));
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("2"))
    );
    assert_eq!(client.send(&Request::get("/204")).status, 204);
    assert_eq!(client.send(&Request::get("/304")).status, 304);
}

#[test]
fn a_body_that_breaks_off_never_ends_cleanly() {
    // the target decides how it breaks off
    let origin = H2cOrigin::new(|mut call| async move {
        let target = call.target();
        let mut send = call.answer(Response::new(()), false);
        send_all(&mut send, Bytes::from_static(b"hello"))
            .await
            .expect("room");
        time_passes_in_task(Duration::from_millis(50), "the gateway passes the start on").await;
        match target.as_str() {
            "/cancel" => send.send_reset(Reason::CANCEL),
            "/no-error" => send.send_reset(Reason::NO_ERROR),
            _ => send.send_reset(Reason::INTERNAL_ERROR),
        }
    });
    let gateway = through(&origin);
    for target in ["/cancel", "/no-error", "/internal"] {
        let ended = gateway.connect().try_send(&Request::get(target));
        assert!(
            matches!(ended, Err(Broken::Closed | Broken::Cut | Broken::Reset)),
            "{target} became {ended:?}"
        );
        let over_http2 = http2::send_all(gateway.address(), &[Request::get(target)]).remove(0);
        assert!(over_http2.is_err(), "{target} became {over_http2:?}");
    }
    assert_eq!(
        origin.connections(),
        1,
        "a stream that fails costs only itself"
    );
}

#[test]
fn a_server_that_answers_in_full_may_stop_the_upload() {
    let origin = H2cOrigin::new(|mut call| async move {
        let mut head = Response::new(());
        *head.status_mut() = http::StatusCode::PAYLOAD_TOO_LARGE;
        let mut send = call.answer(head, false);
        send.send_data(Bytes::from_static(b"too large"), true)
            .expect("room");
        // dropping it with part of the request unread resets the stream with NO_ERROR
    });
    let gateway = through(&origin);
    let over_http2 = http2::send(gateway.address(), &Request::post("/", vec![7; 4 << 20]));
    assert_eq!(
        (over_http2.status, over_http2.text().as_str()),
        (413, "too large")
    );
}

#[test]
fn a_request_that_was_refused_unseen_is_sent_again() {
    let origin = H2cOrigin::new(|mut call| async move {
        if call.number == 1 {
            call.respond.send_reset(Reason::REFUSED_STREAM);
        } else {
            call.answer(Response::new(()), true);
        }
    });
    let gateway = through(&origin);
    let without_body = Request::new("POST", "/");
    assert_eq!(gateway.send(&without_body).status, 200);
    assert_eq!(origin.requests().len(), 2);
}

#[test]
fn a_request_that_is_always_refused_is_503() {
    let origin = H2cOrigin::new(|mut call| async move {
        call.respond.send_reset(Reason::REFUSED_STREAM);
    });
    let gateway = through(&origin);
    let refused = gateway.get("/");
    assert_eq!((refused.status, refused.retry_after()), (503, Some(1)));
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="refused"}"#, 1.0);
    let with_body = gateway.send(&Request::post("/", "hello"));
    assert!(
        matches!(with_body.status, 502 | 503),
        "{}",
        with_body.status
    );
    assert!(origin.requests().len() <= 4);
}

#[test]
fn a_request_that_was_seen_is_not_sent_again() {
    let origin = H2cOrigin::new(|mut call| async move {
        call.respond.send_reset(Reason::INTERNAL_ERROR);
    });
    let gateway = through(&origin);
    assert_eq!(gateway.get("/").status, 502);
    assert_eq!(origin.requests().len(), 1);
}

#[test]
fn a_server_that_does_not_speak_it_is_502() {
    let origin = Origin::ok();
    let gateway = Gateway::with("")
        .upstream_at(&origin.url().replace("http://", "h2c://"))
        .start();
    assert_eq!(gateway.get("/").status, 502);
    assert_eq!(gateway.get("/").status, 502);
}

#[test]
fn a_slow_server_is_504_and_its_stream_is_given_up() {
    let origin = H2cOrigin::new(|mut call| async move {
        let reset = std::future::poll_fn(|cx| call.respond.poll_reset(cx)).await;
        call.note_reset(reset.is_ok());
    });
    let gateway = Gateway::with(&format!(
        "[server]\nworkers = 1\n[upstream.origin]\nservers = [{:?}]\nresponse_timeout = \"300ms\"\n",
        origin.url()
    ))
    .start();
    assert_eq!(gateway.get("/").status, 504);
    origin.wait_for_resets(1);
    assert_eq!(gateway.get("/").status, 504);
    assert_eq!(
        origin.connections(),
        2,
        "what may be dead is not tried again"
    );
}

#[test]
fn a_client_that_leaves_takes_its_stream_with_it() {
    let origin = H2cOrigin::new(|mut call| async move {
        let mut send = call.answer(Response::new(()), false);
        send_all(&mut send, Bytes::from_static(b"hello"))
            .await
            .expect("room");
        call.wait_for_reset(send).await;
    });
    let gateway = through(&origin);
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/")).status, 200);
    drop(client);
    origin.wait_for_resets(1);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_reads_nothing_stops_its_own_stream_and_no_other() {
    let origin = H2cOrigin::new(|mut call| async move {
        let endless = call.target() == "/endless";
        let mut send = call.answer(Response::new(()), !endless);
        if !endless {
            return;
        }
        loop {
            if send_all(&mut send, Bytes::from_static(&[7; 16 * 1024]))
                .await
                .is_err()
            {
                return;
            }
        }
    });
    let gateway = through(&origin);
    let before = gateway.peak_memory_bytes();
    let stalled: Vec<_> = (0..8)
        .map(|_| {
            let mut client = gateway.connect();
            assert_eq!(client.begin(&Request::get("/endless")).status, 200);
            client
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(gateway.get("/short").status, 200);
    }
    assert_eq!(origin.connections(), 1);
    let grown = gateway.peak_memory_bytes() - before;
    assert!(grown < 24 * 1024 * 1024, "{grown} bytes");
    drop(stalled);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn interim_answers_without_end_are_502_and_few_are_skipped() {
    let origin = H2cOrigin::new(|mut call| async move {
        let count = if call.target() == "/few" { 3 } else { 100 };
        for _ in 0..count {
            let mut hints = Response::new(());
            *hints.status_mut() = http::StatusCode::EARLY_HINTS;
            if call.respond.send_informational(hints).is_err() {
                return;
            }
        }
        call.answer(Response::new(()), true);
    });
    let gateway = through(&origin);
    assert_eq!(gateway.get("/few").status, 200);
    assert_eq!(gateway.get("/many").status, 502);
}

#[test]
fn a_head_that_is_too_large_or_ambiguous_is_502() {
    let origin = H2cOrigin::new(|mut call| async move {
        let mut head = Response::new(());
        let headers: &mut HeaderMap = head.headers_mut();
        match call.target().as_str() {
            "/many" => {
                for _ in 0..200 {
                    headers.append("x-many", HeaderValue::from_static("v"));
                }
            }
            "/lengths" => {
                headers.append("content-length", HeaderValue::from_static("0"));
                headers.append("content-length", HeaderValue::from_static("1"));
            }
            _ => {}
        }
        call.answer(head, true);
    });
    let gateway = through(&origin);
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(gateway.get("/many").status, 502);
    assert_eq!(gateway.get("/lengths").status, 502);
}

#[test]
fn idle_connections_are_closed_and_opened_again() {
    let origin = H2cOrigin::echo();
    let gateway = Gateway::with(&format!(
        "[server]\nworkers = 1\n[upstream.origin]\nservers = [{:?}]\nidle_timeout = \"100ms\"\n",
        origin.url()
    ))
    .start();
    assert_eq!(gateway.get("/").status, 200);
    crate::support::eventually("another connection", || {
        assert_eq!(gateway.get("/").status, 200);
        time_passes(Duration::from_millis(1500), "the idle timeout passes");
        match origin.connections() {
            1 => Err("still the first".into()),
            _ => Ok(()),
        }
    });
    eventually_eq("nothing is left in flight", 0.0, || {
        gateway.metric(r#"tidegate_in_flight{route="all"}"#)
    });
}
