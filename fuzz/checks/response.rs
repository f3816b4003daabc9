//! Bytes as an origin's HTTP/1 answer: an accepted answer has one reading.
//!
//! Three invariants:
//!
//! - However the bytes are cut into packets, the result is the same.
//! - A second, lenient parser that believes every line reads the same length from an accepted
//!   answer. So no forwarded field states another length.
//! - The forwarded head parses to the same framing again.

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, StatusCode,
    header::{CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING, UPGRADE},
};
use tidegate::upstream::{
    SpareHeaderMap,
    framing::{Chunks, DecoderOutput, Framing, ResponseHead, take_head},
};

/// Interim responses before the final one.
const MAX_INTERIM: usize = 8;

/// The first byte selects a HEAD request and the packet size. The rest is the answer.
pub fn check(data: &[u8]) {
    let Some((&how, bytes)) = data.split_first() else {
        return;
    };
    let to_head = how & 1 == 1;
    let packet = usize::from(how >> 1) % 9 + 1;
    let at_once = read(bytes, bytes.len().max(1), to_head);
    let in_packets = read(bytes, packet, to_head);
    assert_eq!(
        at_once, in_packets,
        "the packets change the result: {packet}"
    );
}

/// The result of reading an answer.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    heads: Vec<(StatusCode, HeaderMap, Kind)>,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
    end: End,
    /// Bytes after the end.
    rest: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    Reached,
    MoreIsNeeded,
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Empty,
    Length(u64),
    Chunked,
    UntilClose,
    Switched,
}

impl Kind {
    fn of(framing: &Framing) -> Kind {
        match framing {
            Framing::Empty => Kind::Empty,
            Framing::Length(length) => Kind::Length(*length),
            Framing::Chunked(_) => Kind::Chunked,
            Framing::UntilClose => Kind::UntilClose,
            Framing::Switched => Kind::Switched,
        }
    }
}

/// An inbox that fills packet by packet.
struct Wire<'a> {
    inbox: BytesMut,
    to_come: &'a [u8],
    packet: usize,
}

impl Wire<'_> {
    /// Returns whether another packet arrived.
    fn receive(&mut self) -> bool {
        let (packet, to_come) = self.to_come.split_at(self.packet.min(self.to_come.len()));
        self.inbox.extend_from_slice(packet);
        self.to_come = to_come;
        !packet.is_empty()
    }

    fn left(&self) -> usize {
        self.inbox.len() + self.to_come.len()
    }
}

fn read(bytes: &[u8], packet: usize, to_head: bool) -> Answer {
    let mut wire = Wire {
        inbox: BytesMut::new(),
        to_come: bytes,
        packet,
    };
    let mut answer = Answer {
        heads: Vec::new(),
        body: Vec::new(),
        trailers: None,
        end: End::MoreIsNeeded,
        rest: 0,
    };
    answer.end = read_into(&mut answer, &mut wire, bytes, to_head);
    if answer.end == End::Reached {
        answer.rest = wire.left();
    }
    answer
}

fn read_into(answer: &mut Answer, wire: &mut Wire<'_>, bytes: &[u8], to_head: bool) -> End {
    let spare = SpareHeaderMap::default();
    for _ in 0..MAX_INTERIM {
        let start = bytes.len() - wire.left();
        let head = loop {
            match take_head(&mut wire.inbox, to_head, &spare) {
                Ok(Some(head)) => break head,
                Ok(None) if wire.receive() => {}
                Ok(None) => return End::MoreIsNeeded,
                Err(_) => return End::Refused,
            }
        };
        let end = bytes.len() - wire.left();
        let kind = Kind::of(&head.framing);
        check_head(&bytes[start..end], &head, kind, to_head);
        let status = head.status;
        answer.heads.push((status, head.headers, kind));
        if !status.is_informational() || status == StatusCode::SWITCHING_PROTOCOLS {
            return match head.framing {
                Framing::Empty | Framing::Switched => End::Reached,
                Framing::Length(length) => read_length(answer, wire, length),
                Framing::UntilClose => read_length(answer, wire, u64::MAX),
                Framing::Chunked(chunks) => read_chunks(answer, wire, chunks, &bytes[end..]),
            };
        }
    }
    End::Refused
}

fn read_length(answer: &mut Answer, wire: &mut Wire<'_>, length: u64) -> End {
    while wire.receive() {}
    let here = usize::try_from(length)
        .unwrap_or(usize::MAX)
        .min(wire.inbox.len());
    answer.body.extend_from_slice(&wire.inbox.split_to(here));
    match here as u64 == length {
        true => End::Reached,
        false => End::MoreIsNeeded,
    }
}

fn read_chunks(answer: &mut Answer, wire: &mut Wire<'_>, mut chunks: Chunks, sent: &[u8]) -> End {
    loop {
        match chunks.take(&mut wire.inbox) {
            Ok(Some(DecoderOutput::Data(data))) => {
                assert!(!data.is_empty(), "an empty piece looks like the end");
                answer.body.extend_from_slice(&data);
            }
            Ok(Some(DecoderOutput::Trailers(trailers))) => {
                for name in [CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, TRAILER, TE] {
                    assert!(
                        !trailers.contains_key(&name),
                        "a trailer frames nothing: {name}"
                    );
                }
                answer.trailers = Some(trailers);
                break;
            }
            Ok(Some(DecoderOutput::End)) => break,
            Ok(None) if wire.receive() => {}
            Ok(None) => return End::MoreIsNeeded,
            Err(_) => return End::Refused,
        }
    }
    assert!(chunks.ended());
    let (body, length) =
        lenient_chunks(sent).expect("a lenient parser accepts what a strict one accepts");
    assert_eq!(body, answer.body, "two parsers read two bodies");
    assert_eq!(
        length,
        sent.len() - wire.left(),
        "two parsers end the body at different bytes"
    );
    End::Reached
}

/// A lenient parser's reading of a head: every line that could state a length.
struct Believed {
    http11: bool,
    lengths: Vec<Vec<u8>>,
    codings: Vec<Vec<u8>>,
}

impl Believed {
    fn of(head: &[u8]) -> Believed {
        let mut lines = head
            .split(|&byte| byte == b'\n')
            .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
            .skip_while(|line| line.is_empty());
        let status = lines.next().unwrap_or_default();
        let mut believed = Believed {
            http11: status.starts_with(b"HTTP/1.1"),
            lengths: Vec::new(),
            codings: Vec::new(),
        };
        for line in lines {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else {
                continue;
            };
            let name = line[..colon].trim_ascii().to_ascii_lowercase();
            let value = line[colon + 1..].trim_ascii().to_ascii_lowercase();
            match &*name {
                b"content-length" => believed.lengths.push(value),
                b"transfer-encoding" => believed.codings.push(value),
                _ => {}
            }
        }
        believed
    }
}

fn check_head(raw: &[u8], head: &ResponseHead, kind: Kind, to_head: bool) {
    let believed = Believed::of(raw);
    for name in [CONNECTION, TRANSFER_ENCODING, UPGRADE, TE] {
        assert!(
            !head.headers.contains_key(&name),
            "{name} concerns one connection"
        );
    }
    let passed_on: Vec<_> = head.headers.get_all(CONTENT_LENGTH).iter().collect();
    assert!(passed_on.len() <= 1, "more than one length was forwarded");
    assert!(
        believed.lengths.is_empty() || believed.codings.is_empty(),
        "two kinds of length"
    );
    for length in &believed.lengths {
        assert_eq!(length, &believed.lengths[0], "two lengths");
        assert!(
            !length.is_empty() && length.iter().all(u8::is_ascii_digit),
            "not a length"
        );
        assert!(
            passed_on
                .iter()
                .all(|passed| passed.as_bytes() == &**length),
            "another length was forwarded"
        );
    }
    let status = head.status;
    let has_no_body = to_head
        || status.is_informational()
        || matches!(status.as_u16(), 204 | 304)
        || kind == Kind::Switched;
    let length = believed.lengths.first().map(|length| {
        let digits = std::str::from_utf8(length).expect("digits");
        digits.parse::<u64>().expect("a length fits 64 bits")
    });
    match kind {
        Kind::Empty | Kind::Switched => assert!(has_no_body || length == Some(0)),
        Kind::Length(stated) => assert_eq!(Some(stated), length),
        Kind::Chunked => {
            assert_eq!(believed.codings, [b"chunked".to_vec()]);
            assert!(believed.http11, "HTTP/1.0 has no chunks");
        }
        Kind::UntilClose => assert!(length.is_none() && believed.codings.is_empty()),
    }
    check_passed_on(head, kind, to_head);
}

/// Checks that the forwarded head means the same to the next parser.
fn check_passed_on(head: &ResponseHead, kind: Kind, to_head: bool) {
    let mut written = format!("HTTP/1.1 {}\r\n", head.status.as_u16()).into_bytes();
    for (name, value) in &head.headers {
        written.extend_from_slice(name.as_str().as_bytes());
        written.extend_from_slice(b": ");
        written.extend_from_slice(value.as_bytes());
        written.extend_from_slice(b"\r\n");
    }
    if kind == Kind::Chunked {
        written.extend_from_slice(b"transfer-encoding: chunked\r\n");
    }
    written.extend_from_slice(b"\r\n");
    let mut inbox = BytesMut::from(&*written);
    let again = take_head(&mut inbox, to_head, &SpareHeaderMap::default());
    let again = again
        .expect("the forwarded head is valid")
        .expect("the forwarded head is complete");
    assert!(inbox.is_empty(), "a field ends the head early");
    assert_eq!(again.status, head.status);
    assert_eq!(again.headers, head.headers);
    if kind != Kind::Switched {
        assert_eq!(Kind::of(&again.framing), kind);
    }
}

/// Reads a chunked body as a careless parser does. Returns the data, and its length on the wire.
fn lenient_chunks(sent: &[u8]) -> Option<(Bytes, usize)> {
    let mut data = Vec::new();
    let mut at = 0;
    let line = |at: &mut usize| {
        let rest = &sent[*at..];
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        *at += end + 1;
        Some(rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]))
    };
    loop {
        let size = line(&mut at)?.split(|&byte| byte == b';').next()?;
        let size = std::str::from_utf8(size).ok()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        if size == 0 {
            while !line(&mut at)?.is_empty() {}
            return Some((data.into(), at));
        }
        data.extend_from_slice(sent.get(at..at.checked_add(size)?)?);
        at += size;
        line(&mut at)?;
    }
}
