//! Responses of an origin as the client sees them: framing, statuses without a body, invalid
//! responses.

use crate::support::{Broken, Gateway, Origin, Request, Response};

/// The client's result for these origin bytes, followed by a close.
fn through(bytes: &str) -> Result<Response, Broken> {
    let origin = Origin::sending_then_closing(bytes);
    let gateway = Gateway::with("").upstream(&origin).start();
    gateway.connect().try_send(&Request::get("/"))
}

/// The status that a client sees; the response must be complete.
fn status_of(bytes: &str) -> u16 {
    through(bytes)
        .unwrap_or_else(|broken| panic!("{broken:?} instead of an answer to {bytes:?}"))
        .status
}

#[test]
fn unknown_statuses_and_reasons_pass() {
    assert_eq!(
        status_of("HTTP/1.1 299 Whatever This Is\r\nContent-Length: 0\r\n\r\n"),
        299
    );
    assert_eq!(status_of("HTTP/1.1 599 \r\nContent-Length: 0\r\n\r\n"), 599);
    assert_eq!(
        status_of("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"),
        200
    );
}

#[test]
fn a_body_may_end_with_the_origins_connection() {
    let response = through("HTTP/1.1 200 OK\r\n\r\nuntil the end").expect("an answer");
    assert_eq!(
        (response.status, response.text().as_str()),
        (200, "until the end")
    );
}

#[test]
fn chunks_pass_and_their_extensions_do_not() {
    let response = through(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    )
    .expect("an answer");
    assert_eq!((response.status, response.text().as_str()), (200, "abcde"));
}

#[test]
fn head_204_and_304_have_no_body_whatever_their_length_says() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        let status = exchange.request.target.trim_start_matches('/').to_owned();
        exchange.write(
            format!("HTTP/1.1 {status} Fine\r\nContent-Length: 2\r\nX-Answer: {status}\r\n\r\nhi")
                .as_bytes(),
        )
    });
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    let head = client.send(&Request::new("HEAD", "/200"));
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("2"))
    );
    let empty = client.send(&Request::get("/204"));
    assert_eq!(
        (
            empty.status,
            empty.header("content-length"),
            empty.body.len()
        ),
        (204, None, 0)
    );
    assert_eq!(client.send(&Request::get("/304")).status, 304);
    // surplus bytes are never taken for the next response
    let after = client.send(&Request::get("/200"));
    assert_eq!(
        (
            after.status,
            after.header("x-answer"),
            after.text().as_str()
        ),
        (200, Some("200"), "hi")
    );
    assert_eq!(
        origin.connections(),
        4,
        "none that had sent too much was used again"
    );
}

#[test]
fn bytes_after_an_answer_are_never_an_answer() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        let target = exchange.request.target.clone();
        let length = target.len();
        exchange.write(
            format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{target}HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
                .as_bytes(),
        )
    });
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    for target in ["/one", "/two", "/three"] {
        assert_eq!(gateway.get(target).text(), target);
    }
}

#[test]
fn an_answer_that_is_framed_in_doubt_is_502() {
    let doubtful = [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nX : y\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    ];
    for bytes in doubtful {
        assert_eq!(status_of(bytes), 502, "{bytes:?}");
    }
}

#[test]
fn an_answer_with_two_framings_is_502_or_only_chunked() {
    let bytes = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n";
    let response = through(bytes).expect("an answer");
    if response.status != 502 {
        // the client's own parser rejects double framing
        assert_eq!((response.status, response.text().as_str()), (200, "ab"));
        assert_eq!(response.header("content-length"), None);
    }
}

#[test]
fn equal_lengths_become_one() {
    let response = through("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab")
        .expect("an answer");
    if response.status != 502 {
        assert_eq!(
            (response.header("content-length"), response.text().as_str()),
            (Some("2"), "ab")
        );
    }
}

#[test]
fn what_is_not_an_http_answer_is_502() {
    let nonsense = [
        "",
        "HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 600 High\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 2000 Long\r\nContent-Length: 0\r\n\r\n",
        "HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        "<html>HTTP/0.9</html>",
        "HTTP/1.1 200 OK\r\nContent-Le",
        "SSH-2.0-OpenSSH_9.2\r\n",
    ];
    for bytes in nonsense {
        assert_eq!(status_of(bytes), 502, "{bytes:?}");
    }
}

#[test]
fn a_response_head_without_end_is_502_not_memory() {
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.write(b"HTTP/1.1 200 OK\r\n")?;
        loop {
            exchange.write(&[b"X-Filler: ", vec![b'a'; 8000].as_slice(), b"\r\n"].concat())?;
        }
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 502);
}

#[test]
fn an_upgrade_that_nobody_asked_for_is_502() {
    let bytes =
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert_eq!(status_of(bytes), 502);
}

#[test]
fn what_a_client_has_to_upgrade_to_is_passed_on() {
    let response = through(
        "HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.2, HTTP/2.0\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n",
    )
    .expect("an answer");
    assert_eq!(response.status, 426);
    assert_eq!(response.header("upgrade"), Some("TLS/1.2, HTTP/2.0"));
    assert_eq!(response.header("connection"), Some("upgrade"));
    let other = through(
        "HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n",
    )
    .expect("an answer");
    assert_eq!(other.header("upgrade"), None);
}
