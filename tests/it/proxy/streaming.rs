//! Slow responses: server-sent events, long polls, and clients that do not read.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    sync::mpsc,
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};

use crate::support::{
    Gate, Gateway, Origin, Request,
    wait::{PATIENCE, eventually_eq, time_passes},
};

const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

fn chunk(event: &str) -> Vec<u8> {
    format!("{:X}\r\n{event}\r\n", event.len()).into_bytes()
}

#[test]
fn each_event_arrives_before_the_next_is_sent() {
    let (arrived, next) = mpsc::sync_channel::<()>(1);
    let next = std::sync::Mutex::new(next);
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        exchange.write(EVENTS)?;
        for count in 0..20 {
            exchange.write(&chunk(&format!("data: {count}\n\n")))?;
            // only once the client has received the previous one
            let next = next.lock().expect("one request at a time");
            next.recv_timeout(PATIENCE).expect("the event arrives");
        }
        exchange.write(b"0\r\n\r\n")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let head = client.begin(&Request::get("/events"));
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    for count in 0..20 {
        let expected = chunk(&format!("data: {count}\n\n"));
        let mut event = vec![0; expected.len()];
        client
            .stream_mut()
            .read_exact(&mut event)
            .expect("the event");
        assert_eq!(event, expected);
        arrived.send(()).expect("the origin waits");
    }
    let mut end = [0; 5];
    client.stream_mut().read_exact(&mut end).expect("the end");
    assert_eq!(&end, b"0\r\n\r\n");
}

#[test]
fn a_long_poll_may_outlast_the_idle_timeout_of_the_client() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"200ms\"\nheader_timeout = \"200ms\"\n")
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    client
        .write(&Request::get("/poll").to_bytes())
        .expect("the request leaves");
    time_passes(
        Duration::from_millis(700),
        "the client's timeouts would have run out",
    );
    gate.open();
    assert_eq!(
        client.read_response("GET").expect("an answer").text(),
        "late"
    );
}

const SLOTS: &str = r#"
    [limit.slots]
    key = []
    algorithm = "concurrency"
    limit = 1
    [gateway]
    limits = ["slots"]
    [[listen]]
    address = "127.0.0.1:0"
    idle_timeout = "300ms"
"#;

fn endless() -> Origin {
    Origin::new(|exchange| {
        exchange.read_body()?;
        if exchange.request.target != "/endless" {
            return exchange.respond(200, &[], b"ok");
        }
        exchange.write(EVENTS)?;
        loop {
            exchange.write(&chunk(&"x".repeat(16 * 1024)))?;
        }
    })
}

#[test]
fn a_client_that_reads_nothing_gives_back_its_slot_and_the_origin_in_bounded_time() {
    let origin = endless();
    let gateway = Gateway::with(SLOTS).upstream(&origin).start();
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/endless")).status, 200);
    assert_eq!(gateway.get("/").status, 429, "it holds the slot");
    // it stays connected, but does not read
    eventually_eq("the origin is let go", 1, || origin.aborted());
    eventually_eq("the slot is back", 200, || gateway.get("/").status);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
    drop(client);
}

#[test]
fn a_client_that_leaves_half_way_gives_back_its_slot_and_the_origin() {
    let origin = endless();
    let gateway = Gateway::with(SLOTS).upstream(&origin).start();
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/endless")).status, 200);
    assert_eq!(client.discard(100_000), Ok(100_000));
    drop(client);
    eventually_eq("the origin is let go", 1, || origin.aborted());
    eventually_eq("the slot is back", 200, || gateway.get("/").status);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

/// Simulates a distant client: small packets and a small receive buffer.
fn far_away(gateway: &Gateway) -> Socket {
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    client.set_recv_buffer_size(4 * 1024).expect("it is small");
    client.set_tcp_mss(536).expect("it is small");
    client.set_read_timeout(Some(PATIENCE)).expect("above zero");
    client
        .connect(&gateway.address().into())
        .expect("it listens");
    client
}

#[test]
fn a_client_that_closes_its_side_and_reads_slowly_gets_the_whole_answer_and_its_end() {
    /// Shorter than the time that the gateway grants a client which has closed its side.
    const SOON: Duration = Duration::from_millis(1500);
    let origin = Origin::new(|exchange| {
        let length = exchange.request.target[1..].parse();
        let length = length.map_err(io::Error::other)?;
        exchange.respond(200, &[], &vec![b'x'; length])
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    // the length decides how much the gateway still holds once it has the whole response
    for length in (64..448).step_by(16).map(|kibibytes| kibibytes * 1024) {
        let mut client = far_away(&gateway);
        let request = Request::get(&format!("/{length}"));
        client
            .write_all(&request.to_bytes())
            .expect("the request leaves");
        client.shutdown(Shutdown::Write).expect("it is connected");
        let mut answer = Vec::new();
        let mut piece = [0; 16 * 1024];
        let mut last = Instant::now();
        loop {
            match client.read(&mut piece).expect("the answer goes on") {
                0 => break,
                count => answer.extend_from_slice(&piece[..count]),
            }
            time_passes(Duration::from_micros(300), "a far client reads slowly");
            last = Instant::now();
        }
        let body = answer.iter().rev().take_while(|byte| **byte == b'x');
        assert_eq!(body.count(), length, "the end of the answer is missing");
        let waited = last.elapsed();
        assert!(waited < SOON, "it hears of the end {waited:?} later");
    }
}
