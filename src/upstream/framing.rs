//! Strict parser for HTTP/1.1 responses: where each begins and ends (RFC 9112 §6.3, §7.1).
//!
//! A response of ambiguous length is refused: `Content-Length` beside `Transfer-Encoding`,
//! differing lengths, a coding other than one `chunked`. Chunk sizes are hexadecimal digits that
//! fit 64 bits. Lines end in CR LF only. Chunk extensions are dropped. Every size has a bound,
//! named here.

use std::{mem::MaybeUninit, ops::Range};

use arrayvec::ArrayVec;
use bytes::{Buf, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE},
};

use super::{SpareHeaderMap, UpstreamError, field_rules};

/// Most bytes of a response head.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Most fields of a response head or of trailers.
pub(super) const MAX_FIELDS: usize = 128;
/// Most interim responses (100, 103, …) before the final one.
pub(super) const MAX_INTERIM: u8 = 32;
/// Most bytes of one chunk-size line with its extensions.
const MAX_CHUNK_LINE_BYTES: usize = 4 * 1024;
/// Most bytes of the trailer section.
const MAX_TRAILER_BYTES: usize = 16 * 1024;

/// A response head, and the framing of its body.
#[derive(Debug)]
pub struct ResponseHead {
    /// 100 to 599.
    pub status: StatusCode,
    /// End-to-end fields; hop-by-hop fields are removed.
    pub headers: HeaderMap,
    /// Framing of the body.
    pub framing: Framing,
    /// Whether the server keeps the connection open.
    pub keep_alive: bool,
    /// Whether it is a 101 that switches to WebSocket.
    pub to_websocket: bool,
}

/// How the end of a body is found.
#[derive(Debug)]
pub enum Framing {
    /// No body, whatever the fields say.
    Empty,
    /// This many more bytes.
    Length(u64),
    /// The last chunk.
    Chunked(Chunks),
    /// The end of the connection.
    UntilClose,
    /// No body: the connection speaks another protocol after the head.
    Switched,
}

/// Removes a complete head from the inbox; `None` while it is incomplete. `to_head`: the request
/// method was HEAD.
pub fn take_head(
    inbox: &mut BytesMut,
    to_head: bool,
    spare: &SpareHeaderMap,
) -> Result<Option<ResponseHead>, UpstreamError> {
    // left uninitialized: clearing it would cost more than the rest of this function
    let mut room = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut parsed = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut parsed, inbox, &mut room) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD_BYTES => length,
        Ok(httparse::Status::Partial) if inbox.len() < MAX_HEAD_BYTES => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Err(UpstreamError::Protocol("the head is too large"));
        }
        Err(_) => return Err(UpstreamError::Protocol("the head is not HTTP/1")),
    };
    let code = parsed.code.unwrap_or(0);
    if !(100..=599).contains(&code) {
        return Err(UpstreamError::Protocol(
            "the status is not between 100 and 599",
        ));
    }
    let status = StatusCode::from_u16(code)
        .map_err(|_| UpstreamError::Protocol("the status code is invalid"))?;
    let http11 = parsed.version == Some(1);
    // the byte ranges of the fields in the inbox, so that values can share the head's memory
    let base = inbox.as_ptr() as usize;
    let place = |part: &[u8]| {
        let start = part.as_ptr() as usize - base;
        start..start + part.len()
    };
    // pushed one by one: `collect` would move the whole array
    let mut places = ArrayVec::<(Range<usize>, Range<usize>), MAX_FIELDS>::new();
    for field in parsed.headers.iter() {
        places.push((place(field.name.as_bytes()), place(field.value)));
    }
    let head = inbox.split_to(length).freeze();
    let mut hop = HopByHop::default();
    let mut stated = None;
    // with capacity for the gateway's fields
    let mut headers = spare.take(places.len() + OURS);
    for (name, value) in &places {
        let name = HeaderName::from_bytes(&head[name.clone()])
            .map_err(|_| UpstreamError::Protocol("a field name is invalid"))?;
        let value = HeaderValue::from_maybe_shared(head.slice(value.clone()))
            .map_err(|_| UpstreamError::Protocol("a field value is invalid"))?;
        if hop.take(&name, &value) {
            // end-to-end here: it names the protocol that the client must use (RFC 9110 §15.5.22)
            if status == StatusCode::UPGRADE_REQUIRED && name == UPGRADE {
                headers.append(name, value);
            }
            continue;
        }
        if name == CONTENT_LENGTH {
            if stated.is_some() {
                // equal lines become one
                same_length(headers.get(CONTENT_LENGTH), &value)?;
                continue;
            }
            stated = Some(length_of(&value)?);
        }
        headers.append(name, value);
    }
    for name in &hop.named {
        headers.remove(name);
    }
    if status == StatusCode::UPGRADE_REQUIRED && headers.contains_key(UPGRADE) {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    let framing = framing(&mut headers, &hop, stated, status, http11, to_head)?;
    Ok(Some(ResponseHead {
        status,
        headers,
        framing,
        keep_alive: http11 && !hop.closes,
        to_websocket: status == StatusCode::SWITCHING_PROTOCOLS && http11 && hop.to_websocket(),
    }))
}

/// Fields that the gateway usually adds to a response.
const OURS: usize = 6;

/// Hop-by-hop information of a response, which is not forwarded.
#[derive(Debug, Default)]
struct HopByHop {
    /// `Connection: close`.
    closes: bool,
    /// `Connection: upgrade`.
    upgrades: bool,
    /// Other fields that `Connection` names.
    named: Vec<HeaderName>,
    /// Number of `Upgrade` lines, and whether the first is WebSocket.
    protocols: usize,
    websocket: bool,
    /// Number of `Transfer-Encoding` lines, and whether the first is exactly `chunked`.
    codings: usize,
    chunked: bool,
}

impl HopByHop {
    /// Records a hop-by-hop field; `false` if the field is end-to-end.
    fn take(&mut self, name: &HeaderName, value: &HeaderValue) -> bool {
        if !field_rules::is_hop_by_hop_in_responses(name) {
            return false;
        }
        let value = value.as_bytes().trim_ascii();
        if name == CONNECTION {
            let tokens = value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
            tokens.for_each(|token| self.name(token));
        } else if name == TRANSFER_ENCODING {
            if self.codings == 0 {
                self.chunked = value.eq_ignore_ascii_case(b"chunked");
            }
            self.codings += 1;
        } else if name == UPGRADE {
            if self.protocols == 0 {
                self.websocket = value.eq_ignore_ascii_case(b"websocket");
            }
            self.protocols += 1;
        }
        true
    }

    fn name(&mut self, token: &[u8]) {
        if token.eq_ignore_ascii_case(b"keep-alive") {
        } else if token.eq_ignore_ascii_case(b"close") {
            self.closes = true;
        } else if token.eq_ignore_ascii_case(b"upgrade") {
            self.upgrades = true;
        } else if let Ok(name) = HeaderName::from_bytes(token)
            && field_rules::may_be_named(&name)
        {
            self.named.push(name);
        }
    }

    fn to_websocket(&self) -> bool {
        self.upgrades && self.websocket && self.protocols == 1
    }
}

/// RFC 9112 §6.3; refuses the response wherever the RFC allows a choice.
fn framing(
    headers: &mut HeaderMap,
    hop: &HopByHop,
    length: Option<u64>,
    status: StatusCode,
    http11: bool,
    to_head: bool,
) -> Result<Framing, UpstreamError> {
    let coded = hop.codings > 0;
    if coded {
        if !hop.chunked || hop.codings > 1 {
            return Err(UpstreamError::Protocol(
                "the transfer coding is not one `chunked`",
            ));
        }
        if length.is_some() {
            return Err(UpstreamError::Protocol(
                "both Content-Length and Transfer-Encoding",
            ));
        }
        if !http11 {
            return Err(UpstreamError::Protocol("Transfer-Encoding in HTTP/1.0"));
        }
    }
    if status.is_informational() || status == StatusCode::NO_CONTENT {
        // neither field is allowed here (RFC 9110 §8.6), so both are removed
        headers.remove(CONTENT_LENGTH);
        return Ok(Framing::Empty);
    }
    if to_head || status == StatusCode::NOT_MODIFIED {
        return Ok(Framing::Empty);
    }
    Ok(match length {
        _ if coded => Framing::Chunked(Chunks::default()),
        Some(0) => Framing::Empty,
        Some(length) => Framing::Length(length),
        None => Framing::UntilClose,
    })
}

/// The length that all `Content-Length` lines state; equal lines become one.
pub(super) fn content_length(headers: &mut HeaderMap) -> Result<Option<u64>, UpstreamError> {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lines.next() else {
        return Ok(None);
    };
    let length = length_of(first)?;
    let mut repeated = false;
    for line in lines {
        same_length(Some(first), line)?;
        repeated = true;
    }
    if repeated {
        let one = first.clone();
        headers.insert(CONTENT_LENGTH, one);
    }
    Ok(Some(length))
}

fn length_of(line: &HeaderValue) -> Result<u64, UpstreamError> {
    let digits = line.as_bytes().iter();
    let length = digits.clone().try_fold(0_u64, |length, &byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        length.checked_mul(10)?.checked_add(digit)
    });
    length
        .filter(|_| digits.len() > 0)
        .ok_or(UpstreamError::Protocol("Content-Length is invalid"))
}

fn same_length(first: Option<&HeaderValue>, line: &HeaderValue) -> Result<(), UpstreamError> {
    match first == Some(line) {
        true => Ok(()),
        false => Err(UpstreamError::Protocol("Content-Length lines differ")),
    }
}

/// Incremental decoder of a chunked body (RFC 9112 §7.1).
#[derive(Debug, Default)]
pub struct Chunks {
    state: ChunkState,
}

#[derive(Debug, Default)]
enum ChunkState {
    /// At the start of a chunk-size line.
    #[default]
    Size,
    /// Inside a chunk's data: bytes left.
    Data(u64),
    /// At the CR LF after a chunk's data.
    DataEnd,
    /// At the trailer section.
    Trailers,
    /// After the end.
    End,
}

/// Output of the decoder.
#[derive(Debug)]
pub enum DecoderOutput {
    /// Body bytes.
    Data(Bytes),
    /// The trailers, which end the body.
    Trailers(HeaderMap),
    /// The end of the body.
    End,
}

impl Chunks {
    /// Validates the chunks already in the inbox, without consuming them.
    pub(super) fn check(&self, mut inbox: &[u8]) -> Result<(), &'static str> {
        if !matches!(self.state, ChunkState::Size) {
            return Ok(());
        }
        while let Some((size, line)) = size_line(inbox)? {
            inbox = &inbox[line..];
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            if size == 0 {
                return parse_trailers(inbox).map(drop);
            }
            let Some(behind) = inbox.get(size..) else {
                break;
            };
            inbox = match behind {
                [b'\r', b'\n', rest @ ..] => rest,
                [] | [b'\r'] => break,
                _ => return Err(NO_CHUNK_END),
            };
        }
        Ok(())
    }

    /// Whether the end was reached.
    pub fn ended(&self) -> bool {
        matches!(self.state, ChunkState::End)
    }

    /// The next piece in the inbox; `None` when more bytes are needed.
    pub fn take(&mut self, inbox: &mut BytesMut) -> Result<Option<DecoderOutput>, &'static str> {
        loop {
            match self.state {
                ChunkState::Size => {
                    let Some((size, line)) = size_line(inbox)? else {
                        return Ok(None);
                    };
                    inbox.advance(line);
                    self.state = if size == 0 {
                        ChunkState::Trailers
                    } else {
                        ChunkState::Data(size)
                    };
                }
                ChunkState::Data(left) => {
                    if inbox.is_empty() {
                        return Ok(None);
                    }
                    let here = usize::try_from(left).unwrap_or(usize::MAX).min(inbox.len());
                    let rest = left - here as u64;
                    self.state = if rest == 0 {
                        ChunkState::DataEnd
                    } else {
                        ChunkState::Data(rest)
                    };
                    return Ok(Some(DecoderOutput::Data(inbox.split_to(here).freeze())));
                }
                ChunkState::DataEnd => {
                    match &inbox[..] {
                        [] | [b'\r'] => return Ok(None),
                        [b'\r', b'\n', ..] => inbox.advance(2),
                        _ => return Err(NO_CHUNK_END),
                    }
                    self.state = ChunkState::Size;
                }
                ChunkState::Trailers => {
                    let Some(trailers) = take_trailers(inbox)? else {
                        return Ok(None);
                    };
                    self.state = ChunkState::End;
                    return Ok(Some(if trailers.is_empty() {
                        DecoderOutput::End
                    } else {
                        DecoderOutput::Trailers(trailers)
                    }));
                }
                ChunkState::End => return Ok(Some(DecoderOutput::End)),
            }
        }
    }
}

const NO_CHUNK_END: &str = "a chunk's data does not match its size";

/// The size in the inbox's first line, and the length of the line with its CR LF.
fn size_line(inbox: &[u8]) -> Result<Option<(u64, usize)>, &'static str> {
    let seen = &inbox[..inbox.len().min(MAX_CHUNK_LINE_BYTES)];
    let Some(end) = seen.iter().position(|&byte| byte == b'\n') else {
        let bare_cr = seen.iter().rev().skip(1).any(|&byte| byte == b'\r');
        return match seen.len() {
            _ if bare_cr => Err("a bare CR in a chunk-size line"),
            MAX_CHUNK_LINE_BYTES => Err("a chunk-size line is too long"),
            _ => Ok(None),
        };
    };
    let line = seen[..end]
        .strip_suffix(b"\r")
        .ok_or("a chunk-size line ends in a bare LF")?;
    if line.contains(&b'\r') {
        return Err("a bare CR in a chunk-size line");
    }
    let digits = line
        .iter()
        .take_while(|byte| byte.is_ascii_hexdigit())
        .count();
    // only white space may precede an extension or the end of the line (RFC 9112 §7.1.1)
    let mut behind = line[digits..].iter();
    match behind.find(|byte| !matches!(byte, b' ' | b'\t')) {
        None | Some(b';') => {}
        Some(_) => return Err("a chunk size is not hexadecimal"),
    }
    let mut size = 0u64;
    for &digit in &line[..digits] {
        let value = char::from(digit).to_digit(16).unwrap_or(0);
        size = size
            .checked_mul(16)
            .and_then(|size| size.checked_add(u64::from(value)))
            .ok_or("a chunk size overflows")?;
    }
    if digits == 0 {
        return Err("a chunk has no size");
    }
    Ok(Some((size, end + 1)))
}

/// Takes the trailer section with its final empty line; drops fields not allowed there (RFC 9110
/// §6.5.1).
fn take_trailers(inbox: &mut BytesMut) -> Result<Option<HeaderMap>, &'static str> {
    let Some((trailers, length)) = parse_trailers(inbox)? else {
        return Ok(None);
    };
    inbox.advance(length);
    Ok(Some(trailers))
}

/// The trailers, and the length of their section.
fn parse_trailers(inbox: &[u8]) -> Result<Option<(HeaderMap, usize)>, &'static str> {
    let mut trailers = HeaderMap::new();
    if inbox.starts_with(b"\r\n") {
        return Ok(Some((trailers, 2)));
    }
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let length = match httparse::parse_headers(inbox, &mut fields) {
        // httparse accepts a bare LF as the end of a line
        Ok(httparse::Status::Complete((length, _))) if has_bare_lf(&inbox[..length]) => {
            return Err("a line of the trailers ends in a bare LF");
        }
        Ok(httparse::Status::Complete((length, fields))) => {
            for field in fields.iter() {
                let name = HeaderName::from_bytes(field.name.as_bytes())
                    .map_err(|_| "a trailer name is invalid")?;
                let value = HeaderValue::from_bytes(field.value)
                    .map_err(|_| "a trailer value is invalid")?;
                if field_rules::may_be_trailer(&name) {
                    trailers.append(name, value);
                }
            }
            length
        }
        Ok(httparse::Status::Partial) if inbox.len() < MAX_TRAILER_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) => return Err("the trailers are too large"),
        Err(_) => return Err("the trailers are malformed"),
    };
    Ok(Some((trailers, length)))
}

fn has_bare_lf(lines: &[u8]) -> bool {
    let mut ends = lines.iter().enumerate().filter(|&(_, &byte)| byte == b'\n');
    ends.any(|(at, _)| at == 0 || lines[at - 1] != b'\r')
}

#[cfg(test)]
mod tests;
