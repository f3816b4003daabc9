//! DATA on closed HTTP/2 streams: sent before the sender saw that the stream was reset.

use std::{io::Read as _, net::TcpListener, thread, time::Duration};

use crate::support::{
    Gateway, Origin, Request,
    frames::{Connection, DATA, END_STREAM, HEADERS, RST_STREAM, WINDOW_UPDATE},
};

const LIMITED: &str = r#"
    [limit.uploads]
    key = ["ip"]
    rate = "1/d"
    [[route]]
    name = "upload"
    path = "/upload"
    upstream = "origin"
    limits = ["uploads"]
    [[route]]
    name = "rest"
    path = "/{*rest}"
    upstream = "origin"
    limits = []
"#;
/// `SETTINGS_HEADER_TABLE_SIZE`: the peer sends every status in full.
const NO_TABLE: (u16, u32) = (1, 0);
/// A small gRPC message.
const SMALL: &[u8] = b"a small frame";

fn cuts(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_connections_cut_total")
}

/// Begins an upload, and waits until it is rejected and its stream reset.
fn begin_and_be_refused(client: &mut Connection, stream: u32) {
    assert!(client.post(stream, "/upload"));
    let mut status = None;
    loop {
        let frame = client.next().expect("the connection stays open");
        if frame.stream != stream {
            continue;
        }
        match frame.kind {
            HEADERS => status = frame.status(),
            RST_STREAM => break,
            _ => {}
        }
    }
    assert_eq!(status, Some(429));
}

/// The status of a GET, ignoring other frames of the gateway.
fn get(client: &mut Connection, stream: u32) -> Option<u16> {
    assert!(client.get(stream, "/"), "the connection is open");
    loop {
        let frame = client.next()?;
        if frame.stream == stream && frame.kind == HEADERS {
            return frame.status();
        }
    }
}

fn limited(origin: &Origin) -> Gateway {
    let gateway = Gateway::with(LIMITED).upstream(origin).start();
    let only = gateway.send(&Request::post("/upload", b"the only one of the day"));
    assert_eq!(only.status, 200);
    gateway
}

#[test]
fn twenty_thousand_late_frames_of_refused_uploads_cost_nothing() {
    let origin = Origin::ok();
    let gateway = limited(&origin);
    let mut client = Connection::open(gateway.address(), &[NO_TABLE]);
    client.patience(Duration::from_secs(20));
    // enough window for all responses
    assert!(client.send(WINDOW_UPDATE, 0, 0, &(1_u32 << 30).to_be_bytes()));
    let uploads: Vec<u32> = (0..200).map(|index| 2 * index + 1).collect();
    for &stream in &uploads {
        begin_and_be_refused(&mut client, stream);
    }
    for &stream in &uploads {
        assert!(client.send_many(100, DATA, 0, stream, SMALL));
    }
    assert_eq!(get(&mut client, 401), Some(200));
    assert!(cuts(&gateway) < 1.0);
}

#[test]
fn one_refused_upload_may_go_on_for_twenty_thousand_frames() {
    let origin = Origin::ok();
    let gateway = limited(&origin);
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(Duration::from_secs(20));
    begin_and_be_refused(&mut client, 1);
    assert!(client.send_many(19_999, DATA, 0, 1, SMALL));
    assert!(client.send(DATA, END_STREAM, 1, SMALL));
    assert_eq!(get(&mut client, 3), Some(200));
    assert!(cuts(&gateway) < 1.0);
}

#[test]
fn padding_is_no_late_data() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[], b"taken")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = Connection::open(gateway.address(), &[]);
    // applies the gateway's settings, and with them its windows
    assert_eq!(get(&mut client, 1), Some(200));
    client.discard_answers();
    assert!(client.post(3, "/upload"));
    // 5 MB of padding around 20 kB
    let mut padded = vec![0; 257];
    padded[0] = 255;
    let alive = (0..20_000).all(|_| client.send(DATA, 8, 3, &padded));
    assert!(alive && client.send(DATA, END_STREAM, 3, b"!"));
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="200"}"#, 2.0);
    assert_eq!(origin.requests()[1].body_length, 20_001);
    assert!(cuts(&gateway) < 1.0);
}

#[test]
fn a_flood_of_data_for_a_stream_that_is_over_is_cut_and_counted() {
    let origin = Origin::ok();
    let gateway = limited(&origin);
    let mut attacker = Connection::open(gateway.address(), &[]);
    attacker.patience(Duration::from_secs(20));
    begin_and_be_refused(&mut attacker, 1);
    attacker.discard_answers();
    let ended = (0..10_000).any(|_| !attacker.send_many(100, DATA, 0, 1, SMALL));
    assert!(ended, "13 MB were taken for a stream that was over");
    gateway.wait_for_metric("tidegate_connections_cut_total{kind=\"frames\"}", 1.0);
}

/// A hand-written HTTP/2 origin with one connection. It begins a response on each stream, and sends
/// `late` small frames on each stream that the gateway resets. Returns after `resets` resets, once
/// it has ended the response on the first stream.
fn stubborn_origin(listener: &TcpListener, resets: usize, late: usize) {
    let (socket, _) = listener.accept().expect("the gateway connects");
    let mut gateway = Connection::accept(socket);
    let mut seen = 0;
    while seen < resets {
        let frame = gateway.next().expect("the gateway keeps the connection");
        match frame.kind {
            HEADERS => {
                // :status 200, in the static table
                assert!(gateway.send(HEADERS, 4, frame.stream, &[0x88]));
                assert!(gateway.send(DATA, 0, frame.stream, SMALL));
            }
            RST_STREAM => {
                seen += 1;
                assert!(gateway.send_many(late, DATA, 0, frame.stream, SMALL));
            }
            _ => assert_eq!(frame.kind, WINDOW_UPDATE),
        }
    }
    assert!(gateway.send(DATA, END_STREAM, 1, b"the end"));
    while gateway.next().is_some() {}
}

#[test]
fn late_frames_of_an_origin_do_not_cost_its_connection() {
    const CANCELLED: usize = 200;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("a bound listener");
    let origin = thread::spawn(move || stubborn_origin(&listener, CANCELLED, 100));
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream_at(&format!("h2c://{address}"))
        .start();
    let begin = || {
        let mut client = gateway.connect();
        assert_eq!(client.begin(&Request::get("/")).status, 200);
        client
    };
    let mut first = begin();
    for _ in 0..CANCELLED {
        drop(begin());
    }
    let mut body = Vec::new();
    let mut part = [0; 1024];
    while !body.ends_with(b"the end\r\n0\r\n\r\n") {
        let read = first.stream_mut().read(&mut part).expect("more of it");
        assert!(read > 0, "it broke off: {}", String::from_utf8_lossy(&body));
        body.extend_from_slice(&part[..read]);
    }
    drop(gateway);
    origin.join().expect("one connection served them all");
}
