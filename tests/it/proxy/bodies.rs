//! Bodies of any size are streamed, not buffered: a slow reader slows the sender.

use std::{
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::support::{Client, Gateway, Origin, Request, raw, wait::time_passes};

const MIB: u64 = 1024 * 1024;

/// Size of a big body.
const BIG: u64 = 1024 * MIB;

const LARGE: &str =
    "[server]\nworkers = 2\n[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"2GiB\"\n";

/// Writes `length` bytes to the stream in pieces of 1 MiB.
fn write_much(stream: &mut impl Write, length: u64) -> std::io::Result<()> {
    let piece = vec![b'x'; 1024 * 1024];
    (0..length / MIB).try_for_each(|_| stream.write_all(&piece))
}

#[cfg(target_os = "linux")]
#[test]
fn big_bodies_pass_both_ways_and_memory_stays_flat() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        if exchange.request.method == "POST" {
            return exchange.respond(200, &[], b"got it");
        }
        exchange.write(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", BIG).as_bytes())?;
        let piece = vec![b'x'; 1024 * 1024];
        (0..BIG / MIB).try_for_each(|_| exchange.write(&piece))
    });
    let gateway = Gateway::with(LARGE).upstream(&origin).start();
    assert_eq!(gateway.send(&Request::post("/", "warm")).status, 200);
    let before = gateway.peak_memory_bytes();

    let mut client = gateway.connect();
    client
        .write(
            format!(
                "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: {}\r\n\r\n",
                BIG
            )
            .as_bytes(),
        )
        .expect("the head leaves");
    write_much(&mut client.stream(), BIG).expect("the body leaves");
    assert_eq!(
        client.read_response("POST").expect("an answer").text(),
        "got it"
    );
    assert_eq!(origin.requests()[1].body_length, BIG);

    assert_eq!(client.begin(&Request::get("/")).status, 200);
    assert_eq!(client.discard(BIG), Ok(BIG));

    let grown = gateway.peak_memory_bytes() - before;
    assert!(
        grown < 24 * MIB,
        "memory grew by {} MiB for bodies of {} MiB",
        grown / MIB,
        BIG / MIB
    );
}

#[test]
fn a_body_without_a_length_streams_in_chunks() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        .expect("the request leaves");
    assert_eq!(
        client.read_response("POST").expect("an answer").text(),
        "abcde"
    );
    let seen = origin.request();
    assert_eq!(
        (
            seen.header("transfer-encoding"),
            seen.header("content-length")
        ),
        (Some("chunked"), None)
    );
}

#[test]
fn the_start_of_a_body_does_not_wait_for_its_end() {
    // the origin answers each piece as it arrives, so both directions must flow at once
    let origin = Origin::new(|exchange| {
        let mut seen = Vec::new();
        while !seen.ends_with(b"5\r\nfirst\r\n") {
            seen.extend(exchange.read_some()?);
        }
        exchange.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npong\r\n")?;
        while !seen.ends_with(b"0\r\n\r\n") {
            seen.extend(exchange.read_some()?);
        }
        exchange.write(b"3\r\nend\r\n0\r\n\r\n")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        .expect("the start leaves");
    assert_eq!(
        client
            .read_head()
            .expect("the head of an early answer")
            .status,
        200
    );
    let mut piece = [0; 9];
    client
        .stream_mut()
        .read_exact(&mut piece)
        .expect("the first piece of it");
    assert_eq!(&piece, b"4\r\npong\r\n");
    client.write(b"0\r\n\r\n").expect("the end leaves");
    let mut rest = [0; 13];
    client
        .stream_mut()
        .read_exact(&mut rest)
        .expect("the rest of it");
    assert_eq!(&rest, b"3\r\nend\r\n0\r\n\r\n");
}

#[test]
fn a_reader_that_stops_stops_the_origin() {
    let written = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&written);
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        exchange.write(
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 512 * MIB).as_bytes(),
        )?;
        let piece = vec![b'x'; 64 * 1024];
        loop {
            exchange.write(&piece)?;
            counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
        }
    });
    let gateway = Gateway::with(LARGE).upstream(&origin).start();
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/")).status, 200);
    let settled = settle(&written);
    // the kernel buffers of two connections, and the gateway's own bounded one
    assert!(
        settled < 48 * MIB,
        "{} MiB were taken from the origin for a reader that reads nothing",
        settled / MIB
    );
    assert!(
        client.discard(64 * MIB).is_ok_and(|read| read == 64 * MIB),
        "and it goes on when the reader does"
    );
}

#[test]
fn an_origin_that_stops_reading_stops_the_client() {
    let gate = crate::support::Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        held.wait();
        exchange.read_body()?;
        exchange.respond(200, &[], b"read it all")
    });
    let gateway = Gateway::with(LARGE).upstream(&origin).start();
    let mut stream = raw::open(gateway.address());
    let total = 64 * MIB;
    stream
        .write_all(
            format!("POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: {total}\r\n\r\n")
                .as_bytes(),
        )
        .expect("the head leaves");
    origin.wait_for_requests(1);
    let written = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&written);
    let mut sender = stream.try_clone().expect("a connected stream");
    let sending = thread::spawn(move || {
        let piece = vec![b'x'; 64 * 1024];
        for _ in 0..total / piece.len() as u64 {
            sender.write_all(&piece)?;
            counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
        }
        Ok::<(), std::io::Error>(())
    });
    let settled = settle(&written);
    assert!(
        settled < 48 * MIB,
        "{} MiB were taken from the client for an origin that reads nothing",
        settled / MIB
    );
    gate.open();
    sending
        .join()
        .expect("the sender's thread")
        .expect("the rest leaves");
    assert_eq!(
        Client::over(stream)
            .read_response("POST")
            .expect("an answer")
            .text(),
        "read it all"
    );
}

/// Waits until a counter has not changed for 200 ms, and returns it.
fn settle(counter: &AtomicU64) -> u64 {
    let mut last = u64::MAX;
    for _ in 0..50 {
        let now = counter.load(Ordering::SeqCst);
        if now == last && now > 0 {
            break;
        }
        last = now;
        time_passes(Duration::from_millis(200), "what is under way arrives");
    }
    counter.load(Ordering::SeqCst)
}

#[test]
fn a_denied_upload_is_told_why_even_by_a_client_that_only_sends_first() {
    let origin = Origin::ok();
    let limited = "[gateway]\nlimits = [\"per_ip\"]\n[limit.per_ip]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = 1\n";
    let gateway = Gateway::with(limited).upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 200);
    for _ in 0..10 {
        // only as much as the socket buffers of both sides surely hold, below the bound on
        // discarded bytes
        let upload = Request::post("/", vec![b'x'; 300 * 1024]);
        let denied = gateway.connect().send(&upload);
        assert_eq!(denied.status, 429);
        assert_eq!(denied.header("connection"), Some("close"));
        assert!(denied.retry_after().is_some());
    }
}

/// A limit that reads bodies.
const READS_BODIES: &str = r#"
    [limit.name]
    key = ["body:name"]
    rate = "100/h"
    [gateway]
    limits = ["name"]
    [[listen]]
    address = "127.0.0.1:0"
    body_timeout = "1s"
    min_body_rate = "0B"
"#;

#[test]
fn a_body_in_which_no_limit_can_find_a_field_is_not_waited_for() {
    let origin = Origin::new(|exchange| {
        exchange.read_some()?;
        exchange.respond(200, &[], b"early")
    });
    let gateway = Gateway::with(READS_BODIES).upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        .expect("the start leaves");
    let answer = client.read_response("POST").expect("an early answer");
    assert_eq!((answer.status, answer.text().as_str()), (200, "early"));
}

#[test]
fn a_body_that_a_limit_reads_has_to_be_whole_in_time() {
    let origin = Origin::echo();
    let gateway = Gateway::with(READS_BODIES).upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        .expect("the head leaves");
    // never silent, and without a minimum rate
    while client.write(b" ").is_ok() && !client.closes_within(Duration::from_millis(50)) {}
    gateway.wait_for_metric("tidegate_requests_total{code=\"408\"}", 1.0);
    assert_eq!(origin.requests().len(), 0);
}
