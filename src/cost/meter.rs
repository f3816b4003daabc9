//! Reads the usage that one answer reports, from its head and from the pieces of its body as they
//! pass.
//!
//! [`UsageMeter`] keeps no copy and delays nothing: the gateway forwards each piece and then shows
//! it here. The state is at most [`MAX_STATE_BYTES`], whatever the body's size.

use std::sync::Arc;

use http::{
    HeaderMap, StatusCode,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};

use super::{
    counters::UsageCounters,
    events::EventStreamReader,
    format::{ReportedUsage, UsageSchema},
    json::{JsonScanner, Unreadable},
};

/// The most memory for reading one answer.
pub const MAX_STATE_BYTES: usize = 512;

/// Why a body is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadBody {
    /// Compressed, although the request asked for `identity`.
    Encoding,
    /// Neither JSON nor an event stream, or a partial response (206).
    ContentType,
    /// Not JSON.
    NotJson,
    /// Too many open brackets.
    TooDeep,
}

impl From<Unreadable> for UnreadBody {
    fn from(why: Unreadable) -> Self {
        match why {
            Unreadable::NotJson => UnreadBody::NotJson,
            Unreadable::TooDeep => UnreadBody::TooDeep,
        }
    }
}

#[derive(Clone, Debug)]
enum BodyReader {
    Events(EventStreamReader),
    /// One JSON value, or one growing array.
    Value,
    /// One JSON value per line.
    Lines,
    Unread(UnreadBody),
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct UsageMeter {
    schema: Arc<UsageSchema>,
    body: BodyReader,
    json: JsonScanner,
    counters: UsageCounters,
    bytes: u64,
}

impl UsageMeter {
    /// Starts reading an answer with this head.
    pub fn new(schema: Arc<UsageSchema>, status: StatusCode, headers: &HeaderMap) -> UsageMeter {
        let body = reader_of(status, headers).unwrap_or_else(BodyReader::Unread);
        UsageMeter {
            schema,
            body,
            json: JsonScanner::new(),
            counters: UsageCounters::new(),
            bytes: 0,
        }
    }

    /// Whether it reads what this schema wants.
    pub fn reads_like(&self, schema: &Arc<UsageSchema>) -> bool {
        let format = self.schema.format();
        Arc::ptr_eq(&self.schema, schema) || format.is_some() && format == schema.format()
    }

    /// Whether the answer is a stream of events.
    pub fn is_event_stream(&self) -> bool {
        matches!(self.body, BodyReader::Events(_))
    }

    /// Reads the next piece of the body. Returns the offset where the last event completed in it
    /// ends.
    pub fn feed(&mut self, piece: &[u8]) -> Option<usize> {
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
        let paths = &self.schema.paths;
        match &mut self.body {
            BodyReader::Events(events) => {
                events.feed(&mut self.json, paths, &mut self.counters, piece)
            }
            BodyReader::Value | BodyReader::Lines => {
                self.json.feed(paths, &mut self.counters, piece);
                None
            }
            BodyReader::Unread(_) => None,
        }
    }

    /// Ends the body. A final event counts even without its empty line.
    pub fn end(&mut self) {
        match &mut self.body {
            BodyReader::Events(events) => events.end(&mut self.json),
            BodyReader::Value | BodyReader::Lines => {
                if let Some(why) = self.json.unreadable() {
                    self.body = BodyReader::Unread(why.into());
                }
                self.json.end();
            }
            BodyReader::Unread(_) => {}
        }
    }

    /// The usage reported so far, if any.
    pub fn reported(&self) -> Option<ReportedUsage> {
        self.schema.usage(&self.counters)
    }

    /// The model named in the answer.
    pub fn model(&self) -> Option<&str> {
        self.counters.model()
    }

    /// Why nothing, or only a part, was read.
    pub fn unread(&self) -> Option<UnreadBody> {
        match &self.body {
            BodyReader::Unread(why) => Some(*why),
            // An event that is not JSON carries nothing, and does not affect others.
            BodyReader::Events(_) => None,
            BodyReader::Value | BodyReader::Lines => self.json.unreadable().map(UnreadBody::from),
        }
    }

    /// Events with data, including `[DONE]`; JSON lines; or elements of a growing array. 0 for a
    /// single value, whose progress is unknown.
    pub fn events(&self) -> u64 {
        match &self.body {
            BodyReader::Events(events) => events.events(),
            BodyReader::Lines => self.json.objects(),
            BodyReader::Value if self.json.in_array() => self.json.objects(),
            BodyReader::Value | BodyReader::Unread(_) => 0,
        }
    }

    /// Events that carried output: all except `[DONE]`.
    pub fn progress(&self) -> u64 {
        match &self.body {
            BodyReader::Events(events) => events.progress(),
            _ => self.events(),
        }
    }

    /// Bytes of the body so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn reader_of(status: StatusCode, headers: &HeaderMap) -> Result<BodyReader, UnreadBody> {
    let is_plain = |coding: &http::HeaderValue| {
        let coding = coding.as_bytes().trim_ascii();
        coding.is_empty() || coding.eq_ignore_ascii_case(b"identity")
    };
    if !headers.get_all(CONTENT_ENCODING).iter().all(is_plain) {
        return Err(UnreadBody::Encoding);
    }
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let kind = match (kinds.next(), kinds.next()) {
        (Some(kind), None) if status != StatusCode::PARTIAL_CONTENT => kind.as_bytes(),
        _ => return Err(UnreadBody::ContentType),
    };
    let name = kind.split(|&byte| byte == b';').next().unwrap_or(kind);
    let name = name.trim_ascii();
    let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
    let suffix = name.len().checked_sub(5).and_then(|at| name.get(at..));
    if is("text/event-stream") {
        return Ok(BodyReader::Events(EventStreamReader::new()));
    }
    if is("application/x-ndjson") || is("application/jsonl") {
        return Ok(BodyReader::Lines);
    }
    let is_json = is("application/json")
        || is("text/json")
        || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case(b"+json"));
    match is_json {
        true => Ok(BodyReader::Value),
        false => Err(UnreadBody::ContentType),
    }
}
