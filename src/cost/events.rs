//! Reads event streams (WHATWG HTML §9.2) whose events each carry one JSON value.
//!
//! Lines end in LF, CR or CRLF. A leading byte order mark is skipped, and one space after the
//! colon. Comments and the fields `event`, `id` and `retry` carry no usage. The scanner reads data
//! lines as they arrive. Most events lie whole within one piece. Those are not scanned if one
//! search finds none of the wanted names.

use super::{counters::UsageCounters, json::JsonScanner, paths::UsagePaths};

const MARK: [u8; 3] = [0xEF, 0xBB, 0xBF];

/// The data that ends an OpenAI stream. It is not JSON.
const DONE: &[u8] = b"[DONE]";

/// The name of the data field.
const DATA: &[u8] = b"data";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    /// This many bytes of the name are read, and all match `data`.
    Name(u8),
    /// A line without data.
    Other,
    /// After the colon of a data line; one space is skipped.
    Colon,
    Data,
}

/// Splits a stream into events, and reads their data.
#[derive(Clone, Debug)]
pub(super) struct EventStreamReader {
    line: LineState,
    /// Bytes of the byte order mark still to come.
    mark: u8,
    /// The last byte was CR, so a following LF belongs to it.
    after_cr: bool,
    /// The event has data.
    has_data: bool,
    /// Bytes of `[DONE]` that the data matches so far; `u8::MAX` for other data.
    done: u8,
    events: u64,
    done_events: u64,
}

impl EventStreamReader {
    pub(super) fn new() -> EventStreamReader {
        EventStreamReader {
            line: LineState::Name(0),
            mark: MARK.len() as u8,
            after_cr: false,
            has_data: false,
            done: 0,
            events: 0,
            done_events: 0,
        }
    }

    /// Events with data.
    pub(super) fn events(&self) -> u64 {
        self.events
    }

    /// Events with data other than `[DONE]`.
    pub(super) fn progress(&self) -> u64 {
        self.events.saturating_sub(self.done_events)
    }

    /// Reads the next piece. Returns the offset where the last event completed in this piece ends.
    pub(super) fn feed(
        &mut self,
        json: &mut JsonScanner,
        paths: &UsagePaths,
        found: &mut UsageCounters,
        piece: &[u8],
    ) -> Option<usize> {
        let mut boundary = None;
        let mut rest = piece;
        while let Some((&byte, tail)) = rest.split_first() {
            if self.mark > 0 {
                let at = MARK.len() - usize::from(self.mark);
                if MARK.get(at) == Some(&byte) {
                    self.mark -= 1;
                    rest = tail;
                    continue;
                }
                self.mark = 0;
            }
            if std::mem::take(&mut self.after_cr) && byte == b'\n' {
                rest = tail;
                continue;
            }
            if matches!(byte, b'\n' | b'\r') {
                self.after_cr = byte == b'\r';
                rest = tail;
                if self.line_ends(json, paths, found) {
                    boundary = Some(piece.len() - rest.len());
                }
                continue;
            }
            rest = match self.line {
                LineState::Name(matched) => self.name(matched, byte, tail),
                LineState::Colon if byte == b' ' => {
                    self.line = LineState::Data;
                    tail
                }
                LineState::Colon | LineState::Data => self.data(json, paths, found, rest),
                LineState::Other => {
                    let end = memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
                    rest.get(end..).unwrap_or_default()
                }
            };
        }
        boundary
    }

    /// Ends the stream. An event without its final empty line counts, because the upstream sent it.
    pub(super) fn end(&mut self, json: &mut JsonScanner) {
        self.event_ends(json);
    }

    fn name<'a>(&mut self, matched: u8, byte: u8, tail: &'a [u8]) -> &'a [u8] {
        self.line = match DATA.get(usize::from(matched)) {
            Some(&expected) if expected == byte => LineState::Name(matched + 1),
            None if byte == b':' => LineState::Colon,
            _ => LineState::Other,
        };
        tail
    }

    /// Reads the data line up to its end or the end of the piece.
    fn data<'a>(
        &mut self,
        json: &mut JsonScanner,
        paths: &UsagePaths,
        found: &mut UsageCounters,
        rest: &'a [u8],
    ) -> &'a [u8] {
        let end = memchr::memchr2(b'\n', b'\r', rest);
        let (data, behind) = rest.split_at(end.unwrap_or(rest.len()));
        let is_first = !std::mem::replace(&mut self.has_data, true);
        self.line = LineState::Data;
        if is_first && json.is_fresh() && is_whole_event(behind) && is_skipped(paths, found, data) {
            // Same result as scanning: the scanner resets at the end of the event.
            self.done = if data == DONE {
                DONE.len() as u8
            } else {
                u8::MAX
            };
            return behind;
        }
        for &byte in data {
            match DONE.get(usize::from(self.done)) {
                Some(&expected) if expected == byte => self.done += 1,
                _ => {
                    self.done = u8::MAX;
                    break;
                }
            }
        }
        json.feed(paths, found, data);
        behind
    }

    /// Ends a line. Returns true if that ends an event with data.
    fn line_ends(
        &mut self,
        json: &mut JsonScanner,
        paths: &UsagePaths,
        found: &mut UsageCounters,
    ) -> bool {
        match std::mem::replace(&mut self.line, LineState::Name(0)) {
            LineState::Name(0) => self.event_ends(json),
            LineState::Colon | LineState::Data => {
                if self.has_data && usize::from(self.done) < DONE.len() {
                    self.done = u8::MAX;
                }
                json.feed(paths, found, b"\n");
                false
            }
            LineState::Name(_) | LineState::Other => false,
        }
    }

    fn event_ends(&mut self, json: &mut JsonScanner) -> bool {
        let is_done = std::mem::take(&mut self.done) == DONE.len() as u8;
        let has_data = std::mem::take(&mut self.has_data);
        self.events += u64::from(has_data);
        self.done_events += u64::from(has_data && is_done);
        json.end();
        has_data
    }
}

/// Whether these bytes show that the event ends after its first data line.
fn is_whole_event(behind: &[u8]) -> bool {
    matches!(
        behind,
        [b'\r', b'\n', b'\r' | b'\n', ..] | [b'\n', b'\r' | b'\n', ..] | [b'\r', b'\r', ..]
    )
}

/// Whether the data contains nothing still wanted.
fn is_skipped(paths: &UsagePaths, found: &UsageCounters, data: &[u8]) -> bool {
    (!paths.wants_model() || found.model().is_some()) && !paths.may_contain_counter(data)
}
