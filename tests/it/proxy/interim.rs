//! Interim responses of an origin (1xx): forwarded to HTTP/1.1 clients as they arrive, never in
//! place of the final response.

use std::{
    io::{BufReader, Write as _},
    time::Duration,
};

use crate::support::{
    Gate, Gateway, Origin, Request,
    h2c::H2cOrigin,
    http::read_head,
    http2, raw,
    tls::{Authority, Hello},
    wait::time_passes,
};

const HINTS: &[u8] =
    b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nKeep-Alive: 5\r\n\r\n";

/// Hints, then a response that names its request.
fn hinting() -> Origin {
    Origin::new(|exchange| {
        let body = exchange.read_body()?;
        let answer = format!("{} {}", exchange.request.target, body.len());
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        let answer = if exchange.request.method == "HEAD" {
            ""
        } else {
            &*answer
        };
        exchange.write(&[HINTS, head.as_bytes(), answer.as_bytes()].concat())
    })
}

#[test]
fn hints_arrive_before_the_answer_is_there() {
    let ready = Gate::default();
    let held = ready.clone();
    let origin = Origin::new(move |exchange| {
        exchange.write(HINTS)?;
        held.wait();
        exchange.respond(200, &[], b"ok")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut stream = raw::open(gateway.address());
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
        .expect("the request leaves");
    let mut stream = BufReader::new(stream);
    let (line, fields) = read_head(&mut stream).expect("the hints");
    assert_eq!(line, "HTTP/1.1 103 Early Hints");
    let link = ("link".to_owned(), "</a.css>; rel=preload".to_owned());
    assert_eq!(
        fields,
        [link],
        "but for what concerned the origin's connection"
    );
    ready.open();
    let (line, _) = read_head(&mut stream).expect("the answer");
    assert_eq!(line, "HTTP/1.1 200 OK");
}

#[test]
fn each_of_pipelined_requests_has_its_own_hints() {
    let origin = hinting();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let requests = [
        Request::get("/one"),
        Request::post("/two", "a body"),
        Request::new("HEAD", "/three"),
        Request::get("/four"),
    ];
    for request in &requests {
        client
            .write(&request.to_bytes())
            .expect("the requests leave");
    }
    for (method, answer) in [
        ("GET", "/one 0"),
        ("POST", "/two 6"),
        ("HEAD", ""),
        ("GET", "/four 0"),
    ] {
        let response = client.read_response(method).expect("a response");
        assert_eq!((response.status, response.text().as_str()), (200, answer));
        assert_eq!(response.interim, [103], "before {answer:?}");
    }
}

#[test]
fn hints_pass_through_tls_and_behind_a_100() {
    let authority = Authority::new("authority");
    let issued = authority.server(&["gateway.example"]);
    let origin = hinting();
    let gateway = Gateway::with(
        "[[listen]]\naddress = \"127.0.0.1:0\"\n[listen.tls]\ncertificates = [{ cert = \"server.pem\", key = \"server.key\" }]\n",
    )
    .file("server.pem", &issued.cert)
    .file("server.key", &issued.key)
    .upstream(&origin)
    .start();
    let mut client = Hello::new(&authority, "gateway.example")
        .connect(gateway.address())
        .expect("a handshake");
    let response = client.send(&Request::post("/", "a body").header("expect", "100-continue"));
    assert_eq!((response.status, response.text().as_str()), (200, "/ 6"));
    assert_eq!(response.interim, [100, 103]);
}

#[test]
fn a_client_that_reads_nothing_loses_hints_and_no_answer() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        // exceeds the socket buffers of a client that does not read
        let hints = format!(
            "HTTP/1.1 103 Early Hints\r\nLink: {}\r\n\r\n",
            "x".repeat(30_000)
        );
        exchange.write(hints.repeat(20).as_bytes())?;
        exchange.respond(200, &[], &[b'a'; 3_000_000])
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    let request = Request::get("/").to_bytes();
    for _ in 0..4 {
        client.write(&request).expect("the requests leave");
    }
    time_passes(Duration::from_millis(300), "the buffers of both sides fill");
    for _ in 0..4 {
        let response = client.read_response("GET").expect("a whole response");
        assert_eq!((response.status, response.body.len()), (200, 3_000_000));
        assert!(response.interim.iter().all(|status| *status == 103));
    }
}

#[test]
fn clients_that_cannot_have_hints_get_the_answer_alone() {
    let origin = hinting();
    let gateway = Gateway::with("").upstream(&origin).start();
    let old = b"GET / HTTP/1.0\r\nHost: a.example\r\n\r\n";
    let old = raw::send(gateway.address(), old, Duration::from_secs(5));
    assert_eq!(old.statuses(), ["200"], "HTTP/1.0 knows no interim answers");
    assert_eq!(
        http2::send(gateway.address(), &Request::get("/")).status,
        200
    );
}

#[test]
fn what_nobody_asked_for_ends_at_the_gateway() {
    let origin = Origin::sending(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    );
    let gateway = Gateway::with("").upstream(&origin).start();
    let response = gateway.get("/");
    assert_eq!((response.status, response.text().as_str()), (200, "ok"));
    assert_eq!(
        response.interim,
        [102],
        "the origin was not asked to continue"
    );
}

#[test]
fn hints_of_an_http2_server_reach_an_http1_client() {
    let origin = H2cOrigin::new(|mut call| async move {
        let mut hints = http::Response::new(());
        *hints.status_mut() = http::StatusCode::EARLY_HINTS;
        let link = http::HeaderValue::from_static("</a.css>");
        hints.headers_mut().insert("link", link);
        call.respond.send_informational(hints).expect("hints leave");
        call.answer(http::Response::new(()), true);
    });
    let gateway = Gateway::with("").upstream_at(&origin.url()).start();
    let response = gateway.get("/");
    assert_eq!((response.status, &*response.interim), (200, &[103][..]));
}

#[test]
fn interim_answers_without_end_are_502() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        loop {
            exchange.write("HTTP/1.1 103 Early Hints\r\n\r\n".repeat(100).as_bytes())?;
        }
    });
    let toml = "[upstream.origin]\nservers = [\"{origin}\"]\nresponse_timeout = \"1s\"\n";
    let gateway = Gateway::with(toml).upstream(&origin).start();
    let status = gateway.get("/").status;
    assert!(matches!(status, 502 | 504), "{status}");
}
