//! A raw HTTP/2 client that can violate RFC 9113: frames are built by hand, field blocks are not
//! checked.
//!
//! It implements only the preface, HEADERS with CONTINUATION, and DATA. It sends HPACK literals
//! without indexing or Huffman coding (RFC 7541 §6.2.2). From responses it reads only the `:status`
//! at the start of each field block.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use super::raw;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// The default maximum frame size of a peer (RFC 9113 §4.2).
const MAX_FRAME: usize = 16_384;

/// A request as a list of fields, including pseudo-fields, in the order in which they are sent.
/// Each character is one byte (Latin-1).
#[derive(Default)]
pub struct Block {
    pub fields: Vec<(String, String)>,
    pub body: Option<Vec<u8>>,
    pub trailers: Vec<(String, String)>,
}

/// The peer's reaction to one request on its own connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub status: Option<u16>,
    pub reset: Option<u32>,
    pub goaway: Option<u32>,
    pub closed: bool,
}

/// Sends one request and reads until the peer has answered, reset the stream or closed the
/// connection.
pub fn send(address: SocketAddr, request: &Block, patience: Duration) -> Outcome {
    let mut stream = raw::open(address);
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    frame(&mut bytes, SETTINGS, 0, 0, &[]);
    let ends = request.body.is_none() && request.trailers.is_empty();
    field_block(&mut bytes, &request.fields, ends);
    if let Some(body) = &request.body {
        let flags = if request.trailers.is_empty() {
            END_STREAM
        } else {
            0
        };
        frame(&mut bytes, DATA, flags, 1, body);
    }
    if !request.trailers.is_empty() {
        field_block(&mut bytes, &request.trailers, true);
    }
    // the peer may close the connection before it has read everything
    let _ = stream.write_all(&bytes);
    read_outcome(&mut stream, patience)
}

/// A connection for tests with more than one request.
pub struct Connection<S = TcpStream> {
    stream: S,
}

/// A frame from the peer.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Connection {
    /// Opens a connection with these settings (RFC 9113 §6.5.2) instead of the defaults.
    pub fn open(address: SocketAddr, settings: &[(u16, u32)]) -> Connection {
        Connection::begin(raw::open(address), settings)
    }

    /// The server side of a connection: reads the client's preface and sends settings.
    pub fn accept(mut stream: TcpStream) -> Connection {
        let mut preface = [0; 24];
        let read = stream.read_exact(&mut preface);
        read.expect("the preface of a client");
        let mut bytes = Vec::new();
        frame(&mut bytes, SETTINGS, 0, 0, &[]);
        let sent = stream.write_all(&bytes);
        sent.expect("the client takes settings");
        Connection { stream }
    }

    /// Reads and drops responses on another thread, so that they do not slow down a flood.
    pub fn discard_answers(&self) {
        let mut stream = self.stream.try_clone().expect("a socket can be cloned");
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    }

    /// Sets the timeout of [`next`](Self::next).
    pub fn patience(&self, patience: Duration) {
        let set = self.stream.set_read_timeout(Some(patience));
        set.expect("a timeout above zero");
    }
}

impl<S: Read + Write> Connection<S> {
    /// Like [`Connection::open`], on an open stream.
    pub fn begin(mut stream: S, settings: &[(u16, u32)]) -> Connection<S> {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let mut payload = Vec::new();
        for (setting, value) in settings {
            payload.extend_from_slice(&setting.to_be_bytes());
            payload.extend_from_slice(&value.to_be_bytes());
        }
        frame(&mut bytes, SETTINGS, 0, 0, &payload);
        stream.write_all(&bytes).expect("the gateway accepts");
        Connection { stream }
    }

    /// Sends a frame; false if the peer has closed the connection.
    pub fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> bool {
        let mut bytes = Vec::new();
        frame(&mut bytes, kind, flags, stream, payload);
        self.stream.write_all(&bytes).is_ok()
    }

    /// Sends the same frame `count` times in one write.
    pub fn send_many(
        &mut self,
        count: usize,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> bool {
        let mut bytes = Vec::new();
        for _ in 0..count {
            frame(&mut bytes, kind, flags, stream, payload);
        }
        self.stream.write_all(&bytes).is_ok()
    }

    /// Sends requests for this path, each followed by its reset, in one write.
    pub fn send_cancelled(
        &mut self,
        streams: impl Iterator<Item = u32>,
        method: &str,
        path: &str,
        code: [u8; 4],
    ) -> bool {
        let block = encode(&fields_of(method, path, &[]));
        let mut bytes = Vec::new();
        for stream in streams {
            frame(
                &mut bytes,
                HEADERS,
                END_STREAM | END_HEADERS,
                stream,
                &block,
            );
            frame(&mut bytes, RST_STREAM, 0, stream, &code);
        }
        self.stream.write_all(&bytes).is_ok()
    }

    /// Sends a GET for this path, which ends the stream.
    pub fn get(&mut self, stream: u32, path: &str) -> bool {
        self.head("GET", END_STREAM, stream, path)
    }

    /// Sends a POST to this path and leaves the stream open for the body.
    pub fn post(&mut self, stream: u32, path: &str) -> bool {
        self.head("POST", 0, stream, path)
    }

    /// Like [`Connection::post`], with more fields.
    pub fn post_with(&mut self, stream: u32, path: &str, more: &[(&str, &str)]) -> bool {
        self.head_with("POST", 0, stream, path, more)
    }

    fn head(&mut self, method: &str, flags: u8, stream: u32, path: &str) -> bool {
        self.head_with(method, flags, stream, path, &[])
    }

    fn head_with(
        &mut self,
        method: &str,
        flags: u8,
        stream: u32,
        path: &str,
        more: &[(&str, &str)],
    ) -> bool {
        let fields = fields_of(method, path, more);
        self.send(HEADERS, flags | END_HEADERS, stream, &encode(&fields))
    }

    /// The next frame, without SETTINGS and WINDOW_UPDATE of the connection. `None` if the peer has
    /// closed the connection.
    pub fn next(&mut self) -> Option<Frame> {
        loop {
            let (kind, flags, stream, payload) = read_frame_of(&mut self.stream).ok()?;
            match kind {
                SETTINGS if flags & ACK == 0 => {
                    self.send(SETTINGS, ACK, 0, &[]);
                }
                SETTINGS => {}
                WINDOW_UPDATE if stream == 0 => {}
                _ => {
                    return Some(Frame {
                        kind,
                        flags,
                        stream,
                        payload,
                    });
                }
            }
        }
    }
}

impl Frame {
    /// The status at the start of a response's HEADERS frame.
    pub fn status(&self) -> Option<u16> {
        status_of(&self.payload)
    }
}

fn read_outcome(stream: &mut TcpStream, patience: Duration) -> Outcome {
    let mut outcome = Outcome::default();
    let deadline = Instant::now() + patience;
    while let Some(left) = deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
    {
        stream
            .set_read_timeout(Some(left))
            .expect("a timeout above zero");
        let (kind, flags, payload) = match read_frame(stream) {
            Ok(frame) => frame,
            Err(ended) => {
                outcome.closed = ended;
                break;
            }
        };
        let code = |at: usize| {
            payload
                .get(at..at + 4)
                .map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
        };
        match kind {
            SETTINGS if flags & ACK == 0 => {
                let mut ack = Vec::new();
                frame(&mut ack, SETTINGS, ACK, 0, &[]);
                let _ = stream.write_all(&ack);
            }
            HEADERS if outcome.status.is_none() => {
                outcome.status = status_of(&payload).filter(|status| *status >= 200);
            }
            RST_STREAM => outcome.reset = code(0),
            GOAWAY => outcome.goaway = code(4),
            _ => {}
        }
        let ended = flags & END_STREAM != 0 && matches!(kind, HEADERS | DATA);
        if outcome.reset.is_some() || outcome.goaway.is_some_and(|code| code != 0) || ended {
            break;
        }
    }
    outcome
}

/// The next frame. `Err(true)` if the connection ended, `Err(false)` if nothing arrived in time.
fn read_frame(stream: &mut TcpStream) -> Result<(u8, u8, Vec<u8>), bool> {
    read_frame_of(stream).map(|(kind, flags, _, payload)| (kind, flags, payload))
}

/// Like [`read_frame`], also with the stream's number.
fn read_frame_of(stream: &mut impl Read) -> Result<(u8, u8, u32, Vec<u8>), bool> {
    let mut head = [0; 9];
    let ended = |error: std::io::Error| {
        !matches!(
            error.kind(),
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
        )
    };
    stream.read_exact(&mut head).map_err(ended)?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload).map_err(ended)?;
    let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    Ok((head[3], head[4], id, payload))
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len())
        .expect("a frame of a test is small")
        .to_be_bytes();
    bytes.extend_from_slice(&length[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}

/// HEADERS, followed by as many CONTINUATION frames as the block needs.
fn field_block(bytes: &mut Vec<u8>, fields: &[(String, String)], end_stream: bool) {
    let block = encode(fields);
    let chunks: Vec<&[u8]> = block.chunks(MAX_FRAME).collect();
    for (index, chunk) in chunks.iter().enumerate() {
        let (kind, stream_flag) = if index == 0 {
            (HEADERS, if end_stream { END_STREAM } else { 0 })
        } else {
            (CONTINUATION, 0)
        };
        let head_flag = if index + 1 == chunks.len() {
            END_HEADERS
        } else {
            0
        };
        frame(bytes, kind, stream_flag | head_flag, 1, chunk);
    }
}

/// The fields of a request.
fn fields_of(method: &str, path: &str, more: &[(&str, &str)]) -> Vec<(String, String)> {
    let pseudo = [
        (":method", method),
        (":scheme", "http"),
        (":authority", "a.example"),
        (":path", path),
    ];
    let fields = pseudo.iter().chain(more);
    fields
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn encode(fields: &[(String, String)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        if name == "cookie" && value.is_empty() {
            // entry 32 of the static table: one byte on the wire, 38 bytes in the peer's memory
            block.push(0x80 | 32);
            continue;
        }
        block.push(0);
        for text in [name, value] {
            let bytes: Vec<u8> = text
                .chars()
                .map(|c| u8::try_from(c).expect("Latin-1"))
                .collect();
            integer(&mut block, bytes.len());
            block.extend_from_slice(&bytes);
        }
    }
    block
}

/// An integer with a 7-bit prefix (RFC 7541 §5.1).
fn integer(block: &mut Vec<u8>, value: usize) {
    let Some(mut rest) = value.checked_sub(127) else {
        block.push(u8::try_from(value).expect("below 127"));
        return;
    };
    block.push(127);
    while rest >= 128 {
        block.push(0x80 | u8::try_from(rest % 128).expect("below 128"));
        rest /= 128;
    }
    block.push(u8::try_from(rest).expect("below 128"));
}

/// The status at the start of a response's field block: indexed, or a literal with the name of
/// entry 8 of the static table. Table size updates may precede it.
fn status_of(block: &[u8]) -> Option<u16> {
    let start = block.iter().position(|byte| byte & 0xe0 != 0x20)?;
    match *block.get(start)? {
        first @ 0x88..=0x8e => [200, 204, 206, 304, 400, 404, 500]
            .get(usize::from(first - 0x88))
            .copied(),
        0x48 | 0x08 | 0x18 => {
            let length = usize::from(block.get(start + 1)? & 0x7f);
            let text = block.get(start + 2..start + 2 + length)?;
            let huffman = block.get(start + 1)? & 0x80 != 0;
            if huffman {
                digits(text)
            } else {
                std::str::from_utf8(text).ok()?.parse().ok()
            }
        }
        _ => None,
    }
}

/// Decodes three digits in HPACK's Huffman code. `0` to `2` have 5 bits (00000 to 00010), `3` to
/// `9` have 6 (011001 to 011111).
fn digits(bytes: &[u8]) -> Option<u16> {
    let bits: Vec<u16> = bytes
        .iter()
        .flat_map(|byte| (0..8).rev().map(move |i| u16::from(byte >> i & 1)))
        .collect();
    let number = |bits: &[u16]| bits.iter().fold(0, |number, bit| number * 2 + bit);
    let (mut at, mut status) = (0, 0);
    for _ in 0..3 {
        let five = number(bits.get(at..at + 5)?);
        let digit = if five <= 2 {
            at += 5;
            five
        } else {
            let six = number(bits.get(at..at + 6)?);
            at += 6;
            six.checked_sub(0b01_1001)? + 3
        };
        status = status * 10 + digit;
    }
    Some(status)
}

#[test]
fn a_status_is_read_in_every_form_that_hpack_gives_it() {
    assert_eq!(status_of(&[0x88]), Some(200));
    assert_eq!(status_of(&[0x20, 0x8c]), Some(400));
    assert_eq!(status_of(&[0x48, 3, b'4', b'3', b'1']), Some(431));
    // RFC 7541 appendix C.6.1: 302 is 0x6402
    assert_eq!(status_of(&[0x48, 0x82, 0x64, 0x02]), Some(302));
    assert_eq!(status_of(&[0x00, 1, b'x']), None);
}
