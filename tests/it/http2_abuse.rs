//! HTTP/2 clients that cause much work with few bytes, hold unused resources, or keep connections
//! open.

use std::time::{Duration, Instant};

use crate::support::{
    Gateway, Origin, Request,
    frames::{
        ACK, CONTINUATION, Connection, DATA, END_STREAM, GOAWAY, HEADERS, PING, PRIORITY,
        RST_STREAM, SETTINGS, WINDOW_UPDATE,
    },
    http2,
    wait::{Gate, PATIENCE, eventually_eq},
};

/// `SETTINGS_INITIAL_WINDOW_SIZE`.
const INITIAL_WINDOW: u16 = 4;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// Whether another client is served.
fn is_well(gateway: &Gateway) -> bool {
    http2::send(gateway.address(), &Request::get("/")).status == 200
}

fn cuts(gateway: &Gateway, kind: &str) -> f64 {
    gateway.metric(&format!("tidegate_connections_cut_total{{kind={kind:?}}}"))
}

/// Client stream IDs are odd.
fn streams(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|index| 2 * index + 1)
}

#[test]
fn a_rapid_reset_is_charged_and_ends_the_connection() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with(
        r#"
        [limit.all]
        key = []
        rate = "1000000/h"
        burst = 1000000
        [gateway]
        limits = ["all"]
        "#,
    )
    .upstream(&origin)
    .start();
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    // the h2 crate hides a request that was reset before it was read, so one stays open
    assert!(attacker.get(1, "/"));
    origin.wait_for_requests(1);
    let mut sent = 0;
    for stream in streams(100_000).skip(1) {
        // each request must arrive before its reset, or the h2 crate hides it
        if !attacker.get(stream, "/") || !attacker.send(RST_STREAM, 0, stream, &CANCEL) {
            break;
        }
        sent = stream;
        if stream % 16 == 1 {
            std::thread::yield_now();
        }
    }
    gate.open();
    assert!(sent < 199_999, "the connection was ended");
    let charged = gateway.metric("tidegate_decisions_total{limit=\"all\"}");
    assert!(charged >= 1.0, "what arrives is counted when it arrives");
    assert!(is_well(&gateway));
}

#[test]
fn resets_that_the_gateway_is_provoked_to_end_the_connection() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    let ended = streams(100_000).any(|stream| {
        // MadeYouReset: an increment of zero is a stream error (RFC 9113 §6.9), so the gateway
        // resets the stream
        !attacker.get(stream, "/") || !attacker.send(WINDOW_UPDATE, 0, stream, &[0; 4])
    });
    gate.open();
    assert!(ended);
    assert!(is_well(&gateway));
}

#[test]
fn abandoned_requests_end_the_connection_even_where_each_was_seen() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    let mut seen = 0.0;
    for stream in streams(100_000) {
        if !attacker.get(stream, "/") {
            break;
        }
        if seen < 210.0 {
            let deadline = Instant::now() + Duration::from_secs(5);
            while gateway.metric("tidegate_in_flight") < 1.0 && Instant::now() < deadline {
                if cuts(&gateway, "resets") > 0.0 {
                    break;
                }
            }
        }
        if !attacker.send(RST_STREAM, 0, stream, &CANCEL) {
            break;
        }
        eventually_eq("the request to be let go", 0.0, || {
            gateway.metric("tidegate_in_flight")
        });
        seen += 1.0;
        if cuts(&gateway, "resets") > 0.0 {
            break;
        }
    }
    gate.open();
    assert!(cuts(&gateway, "resets") >= 1.0, "after {seen} requests");
    assert!(seen >= 200.0, "not before: a browser abandons some too");
    assert!(is_well(&gateway));
}

/// Reads until the stream has a frame of this kind; false if the connection ended.
fn read_until(client: &mut Connection, stream: u32, kind: u8) -> bool {
    while let Some(frame) = client.next() {
        if (frame.stream, frame.kind) == (stream, kind) {
            return true;
        }
    }
    false
}

#[test]
fn watches_that_are_cancelled_after_their_head_do_not_end_the_connection() {
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n";
    let gate = Gate::default();
    let opened = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.write(HEAD)?;
        exchange.wait_for(&opened)?;
        exchange.write(b"0\r\n\r\n")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    for kind in [HEADERS, DATA] {
        let mut client = Connection::open(gateway.address(), &[]);
        client.patience(PATIENCE);
        assert!(client.get(1, "/"));
        assert!(read_until(&mut client, 1, DATA), "the healthy stream");
        for stream in streams(1001).skip(1) {
            assert!(client.get(stream, "/"), "stream {stream}");
            assert!(read_until(&mut client, stream, kind), "stream {stream}");
            assert!(client.send(RST_STREAM, 0, stream, &CANCEL));
        }
        if kind == DATA {
            gate.open();
            assert!(read_until(&mut client, 1, DATA), "the healthy stream lives");
        } else {
            assert!(client.send(PING, 0, 0, &[7; 8]));
            assert!(read_until(&mut client, 0, PING), "the connection lives");
        }
    }
    assert_eq!(cuts(&gateway, "resets"), 0.0);
}

#[test]
fn requests_whose_empty_response_was_not_sent_count_as_abandoned() {
    // a response that is ready at once and has no body
    let gateway = Gateway::with("").upstream_at("builtin:echo").start();
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    attacker.send_cancelled(streams(1000), "HEAD", "/", CANCEL);
    eventually_eq("the cut of a flood", 1.0, || cuts(&gateway, "resets"));
    assert!(is_well(&gateway));
}

/// The error code of GOAWAY, once the connection has ended.
fn goodbye(client: &mut Connection) -> Option<u32> {
    let mut code = None;
    while let Some(frame) = client.next() {
        if let (GOAWAY, [_, _, _, _, a, b, c, d, ..]) = (frame.kind, &*frame.payload) {
            code = Some(u32::from_be_bytes([*a, *b, *c, *d]));
        }
    }
    code
}

#[test]
fn a_client_that_is_cut_off_is_told_why() {
    const ENHANCE_YOUR_CALM: u32 = 11;
    let gateway = Gateway::with("").upstream_at("builtin:echo").start();
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(PATIENCE);
    client.send_cancelled(streams(1000), "GET", "/", CANCEL);
    // the account of the resets is settled when more arrives
    client.send(PING, 0, 0, &[7; 8]);
    assert_eq!(goodbye(&mut client), Some(ENHANCE_YOUR_CALM), "resets");
    let counted = |kind| eventually_eq("the metric", 1.0, || cuts(&gateway, kind));
    counted("resets");
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(PATIENCE);
    // PRIORITY is not answered, unlike PING
    client.send_many(80_000, PRIORITY, 0, 1, &[0; 5]);
    assert_eq!(goodbye(&mut client), Some(ENHANCE_YOUR_CALM), "frames");
    counted("frames");
    assert!(is_well(&gateway));
}

/// Sends requests and their resets in one write.
fn cancel_unread(client: &mut Connection, first: u32, count: u32) -> bool {
    let requests = (0..count).map(|index| first + 2 * index);
    client.send_cancelled(requests, "GET", "/", CANCEL)
}

#[test]
fn requests_that_are_cancelled_before_they_are_read_count_like_others() {
    let gate = Gate::default();
    let opened = gate.clone();
    let origin = Origin::new(move |exchange| {
        exchange.wait_for(&opened)?;
        exchange.respond(200, &[], b"ok")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(PATIENCE);
    assert!(client.get(1, "/"));
    origin.wait_for_requests(1);
    assert!(cancel_unread(&mut client, 3, 150));
    gate.open();
    assert!(read_until(&mut client, 1, DATA), "150 are forgiven");
    assert_eq!(cuts(&gateway, "resets"), 0.0);
    // and the account has not forgotten them; it closes the connection when more arrives
    cancel_unread(&mut client, 303, 60);
    eventually_eq("the cut", 1.0, || {
        client.send(PING, 0, 0, &[7; 8]);
        cuts(&gateway, "resets")
    });
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    cancel_unread(&mut attacker, 1, 1000);
    eventually_eq("the cut of a flood", 2.0, || cuts(&gateway, "resets"));
    assert!(is_well(&gateway));
}

#[test]
fn floods_of_pings_and_settings_end_the_connection() {
    let gateway = Gateway::with("").start();
    for (index, (kind, payload)) in [(PING, &[7; 8][..]), (SETTINGS, &[])]
        .into_iter()
        .enumerate()
    {
        let mut attacker = Connection::open(gateway.address(), &[]);
        attacker.discard_answers();
        let ended = (0..1000).any(|_| !attacker.send_many(1000, kind, 0, 0, payload));
        assert!(ended, "a million frames of kind {kind}");
        eventually_eq("the cut", (index + 1) as f64, || cuts(&gateway, "frames"));
        assert!(is_well(&gateway));
    }
}

#[test]
fn a_large_upload_and_a_large_answer_are_no_flood() {
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"64MiB\"\n").start();
    let body = vec![b'a'; 20 << 20];
    let answer = http2::send(gateway.address(), &Request::post("/", body.clone()));
    assert_eq!(answer.status, 200);
    assert!(answer.body.ends_with(&body), "it is echoed");
    assert!(cuts(&gateway, "frames") < 1.0);
}

#[test]
fn continuation_without_end_ends_the_connection_within_bounds() {
    let gateway = Gateway::with("").start();
    assert!(is_well(&gateway));
    let before = gateway.peak_memory_bytes();
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.discard_answers();
    attacker.send(HEADERS, END_STREAM, 1, &[0x82]);
    // a literal field, repeated without END_HEADERS
    let field = [&[0, 1, b'a', 127, 0x81, 0x7e][..], &[b'x'; 16_200]].concat();
    let ended = (0..20_000).any(|_| !attacker.send(CONTINUATION, 0, 1, &field[..6 + 127]));
    assert!(ended, "2.6 MB of field block");
    assert!(is_well(&gateway));
    let grown = gateway.peak_memory_bytes() - before;
    assert!(grown < 16 << 20, "{grown} bytes");
}

#[test]
fn a_client_without_a_window_does_not_keep_the_origin() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")?;
        let some = vec![b'a'; 64 * 1024];
        loop {
            exchange.write(&some)?;
        }
    });
    let gateway = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"1s\"\n")
        .upstream(&origin)
        .start();
    let mut client = Connection::open(gateway.address(), &[(INITIAL_WINDOW, 0)]);
    client.patience(Duration::from_secs(10));
    client.get(1, "/");
    let head = client.next().expect("the head of the answer");
    assert_eq!((head.kind, head.stream), (HEADERS, 1));
    let reset = client.next().expect("the end of the stream");
    assert_eq!((reset.kind, reset.stream), (RST_STREAM, 1), "{reset:?}");
    eventually_eq("the origin's connection to be let go", 0.0, || {
        gateway.metric("tidegate_in_flight")
    });
    // the connection itself was active, and stays open
    assert!(client.get(3, "/"));
}

#[test]
fn a_slow_but_steady_reader_is_served() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[], &[b'a'; 200])
    });
    let gateway = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"2s\"\n")
        .upstream(&origin)
        .start();
    let mut client = Connection::open(gateway.address(), &[(INITIAL_WINDOW, 0)]);
    client.patience(Duration::from_secs(10));
    client.get(1, "/");
    assert_eq!(client.next().map(|frame| frame.kind), Some(HEADERS));
    let mut received = 0;
    for _ in 0..4 {
        client.send(WINDOW_UPDATE, 0, 1, &50u32.to_be_bytes());
        let data = client.next().expect("some of it");
        assert_eq!(data.kind, DATA, "{data:?}");
        received += data.payload.len();
    }
    assert_eq!(received, 200);
}

#[test]
fn an_idle_connection_is_told_that_it_ends() {
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"300ms\"\n").start();
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(Duration::from_secs(10));
    client.get(1, "/");
    let mut goaways = 0;
    while let Some(frame) = client.next() {
        match frame.kind {
            GOAWAY => {
                assert_eq!(frame.payload.get(4..8), Some(&[0; 4][..]), "no error");
                goaways += 1;
            }
            PING if frame.flags & ACK == 0 => {
                client.send(PING, ACK, 0, &frame.payload);
            }
            _ => {}
        }
    }
    assert!(goaways >= 1, "before the end");
}

#[test]
fn a_drain_tells_connections_and_does_not_wait_for_those_that_do_not_answer() {
    let mut gateway = Gateway::with("[server]\nworkers = 1\ndrain_timeout = \"1h\"\n").start();
    let mut deaf = Connection::open(gateway.address(), &[]);
    deaf.patience(Duration::from_secs(10));
    deaf.get(1, "/");
    assert_eq!(deaf.next().map(|frame| frame.kind), Some(HEADERS));
    gateway.signal("TERM");
    let mut told = false;
    while let Some(frame) = deaf.next() {
        told |= frame.kind == GOAWAY;
    }
    assert!(told);
    assert!(gateway.wait().success());
}
