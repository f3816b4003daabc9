//! Responses of ambiguous length are refused; all others are read to their end and no further.

use bytes::BytesMut;

use super::*;

/// Whether decoding the inbox fails.
fn breaks_the_rules(inbox: &[u8]) -> bool {
    let (mut chunks, mut inbox) = (Chunks::default(), BytesMut::from(inbox));
    loop {
        match chunks.take(&mut inbox) {
            Ok(Some(DecoderOutput::Data(_))) => {}
            Ok(_) => return false,
            Err(_) => return true,
        }
    }
}

#[test]
fn a_look_ahead_finds_what_reading_finds() {
    let whole = b"3\r\nabc\r\nA;x=\"y\"\r\n0123456789\r\n0\r\nx: y\r\n\r\nnext".as_slice();
    let mut broken = 0;
    for end in 0..=whole.len() {
        for at in 0..end {
            for byte in [b'z', b'0', b'9', b'\r', b'\n', b' ', 0] {
                let mut inbox = whole[..end].to_vec();
                inbox[at] = byte;
                let found = Chunks::default().check(&inbox).is_err();
                assert_eq!(found, breaks_the_rules(&inbox), "{}", inbox.escape_ascii());
                broken += usize::from(found);
            }
        }
    }
    assert!(broken > 1000, "{broken}");
}

fn head(text: &str) -> Result<Option<ResponseHead>, UpstreamError> {
    head_of(text.as_bytes())
}

fn head_of(bytes: &[u8]) -> Result<Option<ResponseHead>, UpstreamError> {
    take_head(
        &mut BytesMut::from(bytes),
        false,
        &SpareHeaderMap::default(),
    )
}

fn whole(text: &str) -> ResponseHead {
    head(text)
        .unwrap_or_else(|error| panic!("{text:?}: {error}"))
        .unwrap_or_else(|| panic!("{text:?} is incomplete"))
}

fn ok(fields: &str) -> String {
    format!("HTTP/1.1 200 OK\r\n{fields}\r\n")
}

#[test]
fn a_head_is_taken_when_it_is_complete_and_leaves_the_body() {
    let text = ok("Content-Length: 5\r\nX-A: b\r\n");
    for end in 0..text.len() {
        assert!(head(&text[..end]).expect("no error").is_none(), "{end}");
    }
    let mut inbox = BytesMut::from(format!("{text}hello").as_str());
    let head = take_head(&mut inbox, false, &SpareHeaderMap::default())
        .expect("valid")
        .expect("complete");
    assert!(matches!(head.framing, Framing::Length(5)));
    assert_eq!(head.headers["x-a"], "b");
    assert_eq!(&inbox[..], b"hello");
}

#[test]
fn a_length_stated_twice_alike_is_stated_once() {
    let head = whole(&ok("Content-Length: 2\r\nContent-Length: 2\r\n"));
    assert!(matches!(head.framing, Framing::Length(2)));
    assert_eq!(head.headers.get_all(CONTENT_LENGTH).iter().count(), 1);
}

#[test]
fn an_ambiguous_or_unknown_framing_is_refused() {
    for fields in [
        "Content-Length: 2\r\nContent-Length: 3\r\n",
        "Content-Length: 2\r\nContent-Length: 2\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: \r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: \r\n",
        "Content-Length: 18446744073709551616\r\n",
    ] {
        assert!(
            matches!(head(&ok(fields)), Err(UpstreamError::Protocol(_))),
            "{fields:?}"
        );
    }
    assert!(head("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").is_err());
}

#[test]
fn what_is_not_a_response_is_refused() {
    for text in [
        "hello\r\n\r\n",
        "HTTP/1.1 600 No\r\n\r\n",
        "HTTP/1.1 099 No\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
    ] {
        assert!(head(text).is_err(), "{text:?}");
    }
}

#[test]
fn a_head_has_a_bound_in_bytes_and_in_fields() {
    assert!(
        head(&format!(
            "HTTP/1.1 200 OK\r\nX: {}",
            "a".repeat(MAX_HEAD_BYTES)
        ))
        .is_err()
    );
    assert!(head(&ok(&"a: b\r\n".repeat(MAX_FIELDS + 1))).is_err());
    assert_eq!(
        whole(&ok(&"a: b\r\n".repeat(MAX_FIELDS))).headers.len(),
        MAX_FIELDS
    );
}

#[test]
fn a_response_without_a_body_has_none_whatever_its_fields_say() {
    for status in ["204 No Content", "304 Not Modified", "103 Early Hints"] {
        let head = whole(&format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n"));
        assert!(matches!(head.framing, Framing::Empty), "{status}");
    }
    let to_head = take_head(
        &mut BytesMut::from(ok("Content-Length: 2\r\n").as_str()),
        true,
        &SpareHeaderMap::default(),
    );
    let to_head = to_head.expect("valid").expect("complete");
    assert!(matches!(to_head.framing, Framing::Empty));
    assert_eq!(
        to_head.headers[CONTENT_LENGTH], "2",
        "a HEAD is told the length all the same"
    );
    let none = whole("HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n");
    assert!(!none.headers.contains_key(CONTENT_LENGTH));
}

#[test]
fn what_concerns_the_servers_connection_stays_there() {
    let fields = "Connection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nUpgrade: h2c\r\nX-End: 2\r\n";
    let head = whole(&ok(fields));
    let names: Vec<&str> = head.headers.keys().map(HeaderName::as_str).collect();
    assert_eq!(names, ["x-end"]);
    assert!(head.keep_alive);
    assert!(!whole(&ok("Connection: Close\r\n")).keep_alive);
    assert!(!whole("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").keep_alive);
}

#[test]
fn a_server_switches_to_websocket_once_and_to_nothing_else() {
    let switches = |fields: &str| {
        whole(&format!("HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n")).to_websocket
    };
    let (upgrade, connection) = ("Upgrade: WebSocket\r\n", "Connection: Upgrade\r\n");
    assert!(switches(&format!("{upgrade}{connection}")));
    assert!(!switches(upgrade));
    assert!(!switches(connection));
    assert!(!switches(&format!("Upgrade: h2c\r\n{connection}")));
    assert!(!switches(&format!("{upgrade}{upgrade}{connection}")));
    assert!(!whole(&ok(&format!("{upgrade}{connection}"))).to_websocket);
}

/// The body, the trailers, and the bytes left after them.
type Decoded = (Vec<u8>, Option<HeaderMap>, Vec<u8>);

/// Feeds the bytes in pieces of `step`.
fn decode(bytes: &[u8], step: usize) -> Result<Decoded, &'static str> {
    let mut chunks = Chunks::default();
    let (mut inbox, mut body) = (BytesMut::new(), Vec::new());
    let mut rest = bytes.chunks(step);
    loop {
        match chunks.take(&mut inbox)? {
            Some(DecoderOutput::Data(data)) => body.extend_from_slice(&data),
            Some(DecoderOutput::Trailers(trailers)) => {
                return Ok((body, Some(trailers), left(&inbox, rest)));
            }
            Some(DecoderOutput::End) => return Ok((body, None, left(&inbox, rest))),
            None => inbox.extend_from_slice(rest.next().ok_or("incomplete")?),
        }
    }
}

fn left(inbox: &[u8], rest: std::slice::Chunks<'_, u8>) -> Vec<u8> {
    [inbox, &rest.flatten().copied().collect::<Vec<u8>>()].concat()
}

#[test]
fn chunks_are_joined_however_they_arrive() {
    let bytes = b"5\r\nhello\r\n00A;a=b;c=\"d\"\r\n, chunked!\r\n0\r\nX-T: v\r\nHost: evil\r\nContent-Length: 9\r\n\r\nHTTP/1.1";
    for step in 1..=bytes.len() {
        let (body, trailers, left) = decode(bytes, step).expect("valid");
        assert_eq!(body, b"hello, chunked!", "{step}");
        let trailers = trailers.expect("there are some");
        assert_eq!(trailers.len(), 1, "what frames or routes is no trailer");
        assert_eq!(trailers["x-t"], "v");
        assert_eq!(left, b"HTTP/1.1");
    }
}

#[test]
fn a_chunk_that_two_parsers_could_read_differently_is_refused() {
    for bytes in [
        "5\nhello\r\n0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "5\r\nhelloX\r\n0\r\n\r\n",
        "5\r\nhelloXX0\r\n\r\n",
        "5;a\nb\r\nhello\r\n0\r\n\r\n",
        "5;a\rb\r\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "5 0\r\nhello\r\n0\r\n\r\n",
        "5\t;a\r\nhello\r\n0 b\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        "-5\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "\r\nhello\r\n0\r\n\r\n",
        "1_0\r\nhello\r\n0\r\n\r\n",
        "fffffffffffffffff5\r\nhello\r\n0\r\n\r\n",
        "10000000000000005\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello\r\n0\r\nX T: v\r\n\r\n",
        "5\r\nhello\r\n0\r\nX: y\n\r\n",
        "5\r\nhello\r\n0\r\n\n",
    ] {
        for step in [1, 2, bytes.len()] {
            let outcome = decode(bytes.as_bytes(), step);
            assert!(
                outcome.as_ref().is_err_and(|&why| why != "incomplete"),
                "{bytes:?}: {outcome:?}"
            );
        }
    }
}

#[test]
fn chunk_lines_and_trailers_have_a_bound() {
    let line = format!(
        "5;{}\r\nhello\r\n0\r\n\r\n",
        "a".repeat(MAX_CHUNK_LINE_BYTES)
    );
    assert!(decode(line.as_bytes(), line.len()).is_err());
    let trailers = format!("0\r\nX: {}\r\n\r\n", "a".repeat(2 * MAX_TRAILER_BYTES));
    assert!(decode(trailers.as_bytes(), 1024).is_err());
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, step in 1usize..9) {
        let _ = decode(&bytes, step);
        let _ = head_of(&bytes);
        let _ = head_of(&[b"HTTP/1.1 200 OK\r\n", &bytes[..]].concat());
    }
}
