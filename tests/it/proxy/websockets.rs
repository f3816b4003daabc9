//! WebSocket: valid upgrades, and every request for an upgrade that must be ignored or rejected.

use std::{
    io::{Read, Write},
    net::Shutdown,
    thread,
    time::Duration,
};

use crate::support::{
    Broken, Client, Gate, Gateway, Origin, Request, Response, eventually, raw,
    wait::{eventually_eq, time_passes},
    websocket::{AGREED, KEY, echo, handshake, send_back},
};

/// Opens a WebSocket; returns its connection.
fn open(gateway: &Gateway) -> Client {
    let mut client = gateway.connect();
    let agreed = client.begin(&handshake());
    assert_eq!(agreed.status, 101, "{agreed:?}");
    client
}

/// Reads exactly `length` bytes.
fn read(client: &mut Client, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    client
        .stream_mut()
        .read_exact(&mut bytes)
        .expect("so many bytes");
    bytes
}

fn read_to_end(client: &mut Client) -> Vec<u8> {
    let mut bytes = Vec::new();
    client
        .stream_mut()
        .read_to_end(&mut bytes)
        .expect("an orderly end");
    bytes
}

#[test]
fn a_websocket_passes_in_both_directions() {
    let origin = echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let agreed = client.begin(&handshake());
    assert_eq!(agreed.status, 101);
    assert_eq!(agreed.header("upgrade"), Some("websocket"));
    assert_eq!(agreed.header("connection"), Some("upgrade"));
    assert_eq!(
        agreed.header("sec-websocket-accept"),
        Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
    );
    assert!(agreed.header("x-request-id").is_some());
    for length in [1, 2, 125, 70_000] {
        let sent: Vec<u8> = (0..length).map(|at| at as u8).collect();
        client.write(&sent).expect("the tunnel takes it");
        assert!(
            read(&mut client, length) == sent,
            "{length} bytes came back"
        );
    }
    let seen = origin.request();
    assert_eq!(seen.header("connection"), Some("upgrade"));
    assert_eq!(seen.header("upgrade"), Some("websocket"));
    assert_eq!(seen.header("sec-websocket-key"), Some(KEY));
    assert_eq!(seen.header("sec-websocket-version"), Some("13"));
    assert_eq!(seen.header("sec-websocket-protocol"), Some("chat"));
    assert_eq!(seen.header("via").map(|via| &via[..4]), Some("1.1 "));
}

#[test]
fn bytes_that_come_with_either_head_are_not_lost() {
    let origin = Origin::new(|exchange| {
        exchange.write(&[AGREED.as_bytes(), b"welcome"].concat())?;
        send_back(exchange)
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(&[handshake().to_bytes(), b"early".to_vec()].concat())
        .expect("all leaves");
    assert_eq!(client.read_head().expect("an answer").status, 101);
    assert_eq!(read(&mut client, 12), b"welcomeearly");
}

#[test]
fn megabytes_pass_both_ways_at_once() {
    const LENGTH: usize = 8 * 1024 * 1024;
    let origin = echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = open(&gateway);
    let mut writer = client.stream().try_clone().expect("a second handle");
    let sent: Vec<u8> = (0..LENGTH).map(|at| (at % 251) as u8).collect();
    let expected = sent.clone();
    let writing = thread::spawn(move || {
        writer.write_all(&sent).expect("the tunnel takes it");
        writer
            .shutdown(Shutdown::Write)
            .expect("a connected stream");
    });
    let received = read_to_end(&mut client);
    writing.join().expect("the writer's thread");
    assert!(received == expected, "{} bytes came back", received.len());
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_closes_its_side_before_it_is_agreed_to_costs_nothing_while_the_other_side_is_silent()
 {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        // by then the gateway has seen that the client closed its side
        time_passes(
            Duration::from_millis(300),
            "the gateway sees that the client closed its side",
        );
        exchange.write(AGREED.as_bytes())?;
        held.wait();
        exchange.close()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(&handshake().to_bytes())
        .expect("the handshake leaves");
    client
        .stream()
        .shutdown(Shutdown::Write)
        .expect("a connected stream");
    assert_eq!(client.read_head().expect("an answer").status, 101);
    let before = gateway.metric("process_cpu_seconds_total");
    assert!(!client.closes_within(Duration::from_millis(1500)));
    let spent = gateway.metric("process_cpu_seconds_total") - before;
    assert!(spent < 0.5, "{spent} s of CPU for a tunnel that is idle");
    gate.open();
    assert!(client.closes_within(Duration::from_secs(10)));
}

#[test]
fn either_side_may_end_first_and_hear_the_other_out() {
    let origin = Origin::new(|exchange| {
        exchange.write(AGREED.as_bytes())?;
        if exchange.request.target == "/chat" {
            // the client ends first: the server answers only then
            let mut heard = Vec::new();
            while let Ok(bytes) = exchange.read_some() {
                heard.extend(bytes);
            }
            exchange.write(&[b"heard ", heard.as_slice()].concat())?;
        }
        exchange.close()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = open(&gateway);
    client.write(b"all of this").expect("the tunnel takes it");
    client
        .stream()
        .shutdown(Shutdown::Write)
        .expect("a connected stream");
    assert_eq!(read_to_end(&mut client), b"heard all of this");

    let origin = Origin::new(|exchange| {
        exchange.write(AGREED.as_bytes())?;
        exchange.write(b"bye")?;
        exchange.end_writing()?;
        let heard = exchange.read_some()?;
        assert_eq!(heard, b"bye, too");
        exchange.close()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = open(&gateway);
    assert_eq!(read_to_end(&mut client), b"bye");
    client.write(b"bye, too").expect("still open this way");
    client
        .stream()
        .shutdown(Shutdown::Write)
        .expect("a connected stream");
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 0.0);
    assert_eq!(origin.aborted(), 0, "the origin heard it out");
}

#[test]
fn an_origin_that_breaks_off_breaks_the_websocket() {
    let origin = Origin::new(|exchange| {
        exchange.write(AGREED.as_bytes())?;
        exchange.read_some()?;
        exchange.reset()
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = open(&gateway);
    client.write(b"x").expect("the tunnel takes it");
    assert!(client.closes_within(Duration::from_secs(10)));
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_leaves_takes_its_websocket_with_it() {
    let origin = echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let client = open(&gateway);
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 1.0);
    drop(client);
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 0.0);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_websocket_holds_its_slot_until_it_ends() {
    let origin = echo();
    let gateway = Gateway::with(
        "[limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = 1\n[gateway]\nlimits = [\"slots\"]\n",
    )
    .upstream(&origin)
    .start();
    let client = open(&gateway);
    assert_eq!(gateway.get("/").status, 429);
    let refused = gateway.send(&handshake());
    assert_eq!(refused.status, 429);
    assert_eq!(refused.header("connection"), Some("close"));
    drop(client);
    eventually("the slot to come back", || match gateway.get("/").status {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
    drop(open(&gateway));
}

#[test]
fn a_websocket_is_counted_and_logged_when_it_ends() {
    let origin = echo();
    let gateway = Gateway::with("[log]\naccess = \"all\"\nformat = \"json\"\n")
        .upstream(&origin)
        .start();
    let mut client = open(&gateway);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="101"}"#, 1.0);
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 1.0);
    client.write(b"four").expect("the tunnel takes it");
    assert_eq!(read(&mut client, 4), b"four");
    assert!(
        !gateway.output().contains("\"status\":101"),
        "not before it ends"
    );
    drop(client);
    eventually_eq("an access line", true, || {
        let output = gateway.output();
        let mut lines = output.lines();
        lines.any(|line| line.contains("\"status\":101") && line.contains("\"bytes\":4"))
    });
}

#[test]
fn the_connection_of_a_websocket_is_never_used_again() {
    let origin = echo();
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    assert_eq!(gateway.get("/").status, 200);
    drop(open(&gateway));
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 0.0);
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(
        origin.connections(),
        2,
        "one for the first request and the WebSocket, one for what came after"
    );
}

#[test]
fn a_websocket_in_which_nothing_moves_is_closed() {
    let origin = echo();
    let gateway =
        Gateway::with("[upstream.origin]\nservers = [\"{origin}\"]\nbody_timeout = \"300ms\"\n")
            .upstream(&origin)
            .start();
    let mut client = open(&gateway);
    for _ in 0..4 {
        // longer in total than the bound, but never silent for that long
        crate::support::wait::time_passes(Duration::from_millis(100), "half of the timeout passes");
        client.write(b"x").expect("the tunnel takes it");
        assert_eq!(read(&mut client, 1), b"x");
    }
    assert!(client.closes_within(Duration::from_secs(10)));
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

#[test]
fn a_client_that_reads_nothing_holds_a_bounded_amount_for_a_bounded_time() {
    let origin = Origin::new(|exchange| {
        exchange.write(AGREED.as_bytes())?;
        loop {
            exchange.write(&[7; 64 * 1024])?;
        }
    });
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nidle_timeout = \"300ms\"\n")
            .upstream(&origin)
            .start();
    let before = gateway.peak_memory_bytes();
    let _client = open(&gateway);
    eventually_eq("the origin is let go", 1, || origin.aborted());
    gateway.wait_for_metric(r#"tidegate_upgraded_connections{route="all"}"#, 0.0);
    let grown = gateway.peak_memory_bytes() - before;
    assert!(grown < 8 * 1024 * 1024, "{grown} bytes");
}

#[test]
fn a_drain_lets_a_websocket_go_on_until_it_ends() {
    let origin = echo();
    let mut gateway = Gateway::with("[server]\nworkers = 1\ndrain_timeout = \"30s\"\n")
        .upstream(&origin)
        .start();
    let mut client = open(&gateway);
    gateway.signal("TERM");
    eventually_eq("it drains", true, || gateway.stderr().contains("draining"));
    client.write(b"still here").expect("the tunnel takes it");
    assert_eq!(read(&mut client, 10), b"still here");
    assert!(gateway.is_running());
    drop(client);
    assert_eq!(gateway.wait().code(), Some(0));
}

#[test]
fn a_drain_ends_a_websocket_at_its_deadline() {
    let origin = echo();
    let mut gateway = Gateway::with("[server]\nworkers = 1\ndrain_timeout = \"300ms\"\n")
        .upstream(&origin)
        .start();
    let mut client = open(&gateway);
    gateway.signal("TERM");
    assert!(client.closes_within(Duration::from_secs(10)));
    assert_eq!(gateway.wait().code(), Some(0));
}

#[test]
fn a_server_that_refuses_is_heard_and_the_connection_ends() {
    let origin = Origin::new(|exchange| exchange.respond(403, &[("X-Why", "origin")], b"no"));
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    // a client that expects the tunnel may already have sent bytes that look like a request
    let smuggled = b"GET /smuggled HTTP/1.1\r\nHost: a.example\r\n\r\n".to_vec();
    client
        .write(&[handshake().to_bytes(), smuggled].concat())
        .expect("all leaves");
    let refused = client.read_response("GET").expect("an answer");
    assert_eq!(
        (
            refused.status,
            refused.text().as_str(),
            refused.header("connection")
        ),
        (403, "no", Some("close"))
    );
    assert!(client.closes_within(Duration::from_secs(10)));
    assert_eq!(origin.request().target, "/chat");
}

#[test]
fn a_101_that_answers_nothing_is_502() {
    let answers = [
        // wrong for this key
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n",
        "Upgrade: websocket\r\nConnection: Upgrade\r\n",
        "Upgrade: h2c\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n",
        "Connection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n",
        "Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n",
    ];
    for fields in answers {
        let origin = Origin::sending(format!("HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n"));
        let gateway = Gateway::with("").upstream(&origin).start();
        let refused = gateway.send(&handshake());
        assert_eq!(refused.status, 502, "{fields}");
        assert_eq!(refused.header("connection"), Some("close"));
        gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="protocol"}"#, 1.0);
    }
}

#[test]
fn a_handshake_that_is_none_is_400_and_never_forwarded() {
    let origin = echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let base = || {
        Request::get("/chat")
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
    };
    let wrong = [
        base(),
        base().header("sec-websocket-key", "short"),
        base().header("sec-websocket-key", "dGhlIHNhbXBsZSBub25j#Q=="),
        base()
            .header("sec-websocket-key", KEY)
            .header("sec-websocket-key", KEY),
        Request {
            method: "POST".into(),
            ..base().header("sec-websocket-key", KEY)
        },
        Request {
            body: b"hello".to_vec(),
            ..base().header("sec-websocket-key", KEY)
        },
        base()
            .header("sec-websocket-key", KEY)
            .header("transfer-encoding", "chunked"),
    ];
    for request in wrong {
        let refused = gateway.send(&request);
        assert_eq!(
            (refused.status, refused.header("connection")),
            (400, Some("close")),
            "{request:?}"
        );
    }
    assert_eq!(origin.requests().len(), 0);
}

#[test]
fn every_other_upgrade_is_ignored() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    let upgrades = [
        ("upgrade, HTTP2-Settings", "h2c"),
        ("upgrade", "TLS/1.0"),
        ("upgrade", "h2c, foo/2"),
        // without `Connection: upgrade` it is no upgrade request
        ("keep-alive", "websocket"),
    ];
    for (connection, upgrade) in upgrades {
        let mut client = gateway.connect();
        let request = Request::get("/")
            .header("connection", connection)
            .header("upgrade", upgrade)
            .header("http2-settings", "AAMAAABkAARAAAAAAAIAAAAA")
            .header("sec-websocket-key", KEY);
        assert_eq!(client.send(&request).status, 200, "{upgrade}");
        // Java's client offers h2c in each first request; the connection is kept for the next
        assert_eq!(client.send(&Request::get("/")).status, 200, "{upgrade}");
    }
    for seen in origin.requests() {
        assert_eq!(seen.faults(), Vec::<String>::new());
        assert_eq!(seen.header("connection"), None);
    }
    let old = raw::send(
        gateway.address(),
        format!("GET / HTTP/1.0\r\nHost: a.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {KEY}\r\n\r\n").as_bytes(),
        Duration::from_secs(5),
    );
    assert_eq!(old.statuses(), ["200"], "HTTP/1.0 knows no upgrades");
}

#[test]
fn a_list_of_upgrades_asks_for_websocket_only() {
    let origin = echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let request = Request::get("/chat")
        .header("connection", "upgrade, http2-settings")
        .header("upgrade", "h2c, WebSocket")
        .header("sec-websocket-key", KEY)
        .header("http2-settings", "AAMAAABkAARAAAAAAAIAAAAA");
    assert_eq!(client.begin(&request).status, 101);
    assert_eq!(origin.request().header("upgrade"), Some("websocket"));
    assert_eq!(origin.request().header("http2-settings"), None);
}

#[test]
fn the_built_in_echo_speaks_no_websocket() {
    let gateway = Gateway::with("").start();
    let ended: Result<Response, Broken> = gateway.connect().try_send(&handshake());
    assert_eq!(ended.expect("an answer").status, 200);
}
