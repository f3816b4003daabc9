//! Truncated responses: the client receives every byte that arrived, and then an error. It never
//! receives nothing, since it would then assume that its request never began.

use std::io::{Read, Write};

use bytes::Bytes;

use crate::support::{
    Gateway, Origin, Request,
    frames::{Connection, DATA, END_STREAM, HEADERS, RST_STREAM},
    h2c::{H2cOrigin, send_all},
    raw,
    tls::{Authority, Hello},
    wait::{PATIENCE, time_passes, time_passes_in_task},
};

/// Repetitions, since a race in the timing of writes fails only sometimes.
const TIMES: usize = 400;
const NAME: &str = "api.example.com";

/// Truncated responses of an origin: a name, the head, and the body bytes as framed.
fn responses() -> Vec<(&'static str, String)> {
    let length = "HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n";
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let some = "z".repeat(100);
    vec![
        ("head-length", length.to_owned()),
        ("head-chunked", chunked.to_owned()),
        ("part-of-length", format!("{length}{some}")),
        ("whole-chunk", format!("{chunked}64\r\n{some}\r\n")),
        ("part-of-chunk", format!("{chunked}c8\r\n{some}")),
    ]
}

/// Number of body bytes.
fn body_of(response: &str) -> usize {
    response.bytes().filter(|&byte| byte == b'z').count()
}

/// An origin that sends the response for `/NAME/fin` or `/NAME/rst`, and breaks off that way.
fn breaking(responses: Vec<(&'static str, String)>) -> Origin {
    Origin::new(move |exchange| {
        let target = exchange.request.target.clone();
        let (name, end) = target[1..].split_once('/').expect("/NAME/END");
        let (_, response) = responses
            .iter()
            .find(|(known, _)| *known == name)
            .expect("a known name");
        exchange.write(response.as_bytes())?;
        match end {
            "rst" => exchange.reset(),
            _ => exchange.close(),
        }
    })
}

/// Every response with either end, and the number of its body bytes that must arrive.
fn cases(responses: &[(&'static str, String)]) -> Vec<(String, usize)> {
    let ends = ["fin", "rst"];
    let case = |end: &'static str| {
        responses
            .iter()
            .map(move |(name, response)| (format!("/{name}/{end}"), body_of(response)))
    };
    ends.into_iter().flat_map(case).collect()
}

/// Checks an HTTP/1.1 client's bytes: all arrived, and the end is an error.
fn check_http1(target: &str, body: usize, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    assert!(text.starts_with("HTTP/1.1 200"), "{target}: {text:?}");
    let (_, rest) = text.split_once("\r\n\r\n").expect("a whole head");
    assert_eq!(body_of(rest), body, "{target}");
    assert!(!rest.ends_with("0\r\n\r\n"), "{target} ends in order");
}

/// Sends a GET and reads the stream to its end: all bytes arrived, and the end is a reset.
fn check_http2<S: Read + Write>(
    client: &mut Connection<S>,
    stream: u32,
    target: &str,
    body: usize,
) {
    assert!(client.get(stream, target), "{target}: the connection ended");
    let (mut status, mut got) = (None, 0);
    loop {
        let frame = client.next().expect("the connection stays open");
        assert_eq!(frame.stream, stream, "{target}: {frame:?}");
        assert_eq!(frame.flags & END_STREAM, 0, "{target} ends in order");
        match frame.kind {
            HEADERS => status = frame.status(),
            DATA => got += frame.payload.len(),
            RST_STREAM => break,
            _ => panic!("{target}: {frame:?}"),
        }
    }
    assert_eq!((status, got), (Some(200), body), "{target}");
}

/// Windows larger than any response of these tests.
fn wide<S: Read + Write>(stream: S) -> Connection<S> {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    let mut client = Connection::begin(stream, &[(INITIAL_WINDOW_SIZE, 1 << 30)]);
    assert!(client.send(
        crate::support::frames::WINDOW_UPDATE,
        0,
        0,
        &(1u32 << 30).to_be_bytes()
    ));
    client
}

fn each_on_http2<S: Read + Write>(
    mut client: Connection<S>,
    cases: &[(String, usize)],
    times: usize,
) {
    let streams = (1..).step_by(2);
    let in_turn = (0..times).flat_map(|_| cases);
    for (stream, (target, body)) in streams.zip(in_turn) {
        check_http2(&mut client, stream, target, *body);
    }
}

fn secured(origin: &Origin) -> (Authority, Gateway) {
    let authority = Authority::new("test");
    let issued = authority.server(&[NAME]);
    let toml = "[[listen]]\naddress = \"127.0.0.1:0\"\n[listen.tls]\n\
                certificates = [{ cert = \"server.pem\", key = \"server.key\" }]\n";
    let gateway = Gateway::with(toml)
        .file("server.pem", &issued.cert)
        .file("server.key", &issued.key)
        .upstream(origin)
        .start();
    (authority, gateway)
}

#[test]
fn an_http1_client_gets_all_that_came_of_a_response_that_breaks_off() {
    let origin = breaking(responses());
    let gateway = Gateway::with("").upstream(&origin).start();
    for (target, body) in cases(&responses()) {
        let request = Request::get(&target).to_bytes();
        for _ in 0..TIMES {
            let reply = raw::send(gateway.address(), &request, PATIENCE);
            check_http1(&target, body, &reply.bytes);
        }
    }
}

#[test]
fn an_http2_client_gets_all_that_came_of_a_response_that_breaks_off() {
    let origin = breaking(responses());
    let gateway = Gateway::with("").upstream(&origin).start();
    let client = wide(raw::open(gateway.address()));
    each_on_http2(client, &cases(&responses()), TIMES);
}

#[test]
fn over_tls_all_arrives_that_came_of_a_response_that_breaks_off() {
    let origin = breaking(responses());
    let (authority, gateway) = secured(&origin);
    let hello = Hello::new(&authority, NAME).offering(&["http/1.1"]);
    for (target, body) in cases(&responses()) {
        // one TLS handshake each
        for _ in 0..TIMES / 10 {
            let mut client = hello.connect(gateway.address()).expect("a handshake");
            client
                .write(&Request::get(&target).to_bytes())
                .expect("a request");
            let mut bytes = Vec::new();
            // without a close_notify, which would mark the response as complete
            let ended = client.stream_mut().read_to_end(&mut bytes);
            assert!(ended.is_err(), "{target} ends in order");
            check_http1(&target, body, &bytes);
        }
    }
    let hello = Hello::new(&authority, NAME).offering(&["h2"]);
    let client = hello.connect(gateway.address()).expect("a handshake");
    each_on_http2(wide(client.into_stream()), &cases(&responses()), TIMES);
}

#[test]
fn a_large_part_of_a_response_arrives_to_the_last_byte() {
    let length = "HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n";
    let large = vec![("large", format!("{length}{}", "z".repeat(300_000)))];
    // after a reset, the origin's kernel discards unsent bytes
    let cases = [("/large/fin".to_owned(), 300_000)];
    let origin = breaking(large);
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = Request::get(&cases[0].0).to_bytes();
    for _ in 0..TIMES / 4 {
        let reply = raw::send(gateway.address(), &request, PATIENCE);
        check_http1(&cases[0].0, cases[0].1, &reply.bytes);
    }
    let client = wide(raw::open(gateway.address()));
    each_on_http2(client, &cases, TIMES / 4);
}

#[test]
fn a_client_that_reads_slowly_gets_all_that_came_of_a_response_that_breaks_off() {
    let length = "HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n";
    let large = vec![("large", format!("{length}{}", "z".repeat(3_000_000)))];
    let origin = breaking(large);
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut slow = raw::open(gateway.address());
    slow.write_all(&Request::get("/large/fin").to_bytes())
        .expect("a request");
    // the origin has sent as much as buffers allow, and has broken off
    time_passes(
        std::time::Duration::from_millis(300),
        "the buffers fill and the origin breaks off",
    );
    let reply = raw::read(&mut slow, PATIENCE);
    check_http1("/large/fin", 3_000_000, &reply.bytes);

    // HTTP/2 windows hold 65,535 bytes
    let mut slow = Connection::open(gateway.address(), &[]);
    assert!(slow.get(1, "/large/fin"));
    time_passes(
        std::time::Duration::from_millis(300),
        "the buffers fill and the origin breaks off",
    );
    let mut got = 0;
    let reset = loop {
        let frame = slow.next().expect("the connection stays open");
        match frame.kind {
            DATA if !frame.payload.is_empty() => {
                got += frame.payload.len();
                let more = u32::try_from(frame.payload.len()).expect("a frame is small");
                for stream in [0, 1] {
                    slow.send(8, 0, stream, &more.to_be_bytes());
                }
            }
            RST_STREAM => break frame,
            _ => {}
        }
    };
    assert_eq!(got, 3_000_000);
    assert_eq!(reset.payload, [0, 0, 0, 2], "INTERNAL_ERROR");
}

#[test]
fn all_arrives_that_came_of_a_response_whose_http2_origin_resets_the_stream() {
    let origin = H2cOrigin::new(|mut call| async move {
        let mut send = call.answer(http::Response::new(()), false);
        let body = match call.target().as_str() {
            "/some" => Bytes::from_static(&[b'z'; 100]),
            _ => Bytes::new(),
        };
        if send_all(&mut send, body).await.is_ok() {
            // a reset discards the origin's unsent bytes
            time_passes_in_task(std::time::Duration::from_millis(2), "they leave").await;
            send.send_reset(h2::Reason::INTERNAL_ERROR);
        }
    });
    let gateway = Gateway::with("").upstream_at(&origin.url()).start();
    let cases = [("/none".to_owned(), 0), ("/some".to_owned(), 100)];
    for (target, body) in &cases {
        for _ in 0..TIMES / 4 {
            let request = Request::get(target).to_bytes();
            let reply = raw::send(gateway.address(), &request, PATIENCE);
            check_http1(target, *body, &reply.bytes);
        }
    }
    let client = wide(raw::open(gateway.address()));
    each_on_http2(client, &cases, TIMES / 4);
}

#[test]
fn a_bad_chunk_in_the_packet_of_its_head_is_502() {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    for bad in [
        "zz\r\nabc\r\n0\r\n\r\n",
        "3\r\nabcd\r\n0\r\n\r\n",
        "3\r\nabc\r\n-1\r\n\r\n",
        "3\r\nabc\r\n0\r\nno field\r\n\r\n",
        "3\nabc\r\n0\r\n\r\n",
    ] {
        let origin = Origin::sending_then_closing(format!("{chunked}{bad}"));
        let gateway = Gateway::with("").upstream(&origin).start();
        assert_eq!(gateway.get("/").status, 502, "{bad:?}");
        gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="502"}"#, 1.0);
    }
}

#[test]
fn a_response_head_over_64_kib_is_502_however_it_arrives() {
    for (bytes, status) in [(60_000, 200), (64 * 1024, 502), (70_000, 502)] {
        let large = "x".repeat(bytes);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-large: {large}\r\n\r\nok");
        let origin = Origin::sending_then_closing(head);
        let gateway = Gateway::with("").upstream(&origin).start();
        assert_eq!(gateway.get("/").status, status, "{bytes} bytes");
    }
}
