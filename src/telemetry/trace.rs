//! OpenTelemetry spans: one for each sampled request, propagated in its `traceparent`.
//!
//! A span has the content of an access line ([`AccessLine`]). A worker builds it as an OTLP message
//! and pushes it to a bounded queue ([`Spans`]); a separate thread sends it. Workers never wait: if
//! the queue is full, the span is dropped and counted. Without a collector no spans exist, and
//! `traceparent` is forwarded like any other field.
//!
//! `docs/decisions/0004-spans-by-hand.md` explains why tidegate does not use the OpenTelemetry
//! crates.

use std::time::SystemTime;

use http::HeaderValue;

use super::{
    access::{AccessLine, VALUE_MAX_BYTES},
    otlp_messages::{KeyValue, Span, SpanKind, SpanStatus, StatusCode},
};

pub use super::otlp::{BadCollector, Collector, Spans};

/// Settings of `[trace]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceSettings {
    /// Where spans are sent; `None` disables them.
    pub collector: Option<Collector>,
    /// How many of a million requests have a span, unless a trusted proxy has decided.
    pub sample_ppm: u32,
}

/// A parsed `traceparent` (W3C Trace Context §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    trace: u128,
    span: u64,
    /// Whether the caller sampled the trace.
    pub sampled: bool,
}

impl Incoming {
    /// Parses `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`. Later versions are read as
    /// far as this one specifies.
    pub fn parse(value: &[u8]) -> Option<Incoming> {
        let (head, rest) = value.split_at_checked(55)?;
        let [v1, v2, b'-', ids @ ..] = head else {
            return None;
        };
        let version = hexadecimal(&[*v1, *v2])?;
        let is_known = version == 0 && rest.is_empty();
        let is_later = (1..0xff).contains(&version) && matches!(rest, [] | [b'-', ..]);
        let (trace, ids) = ids.split_at(32);
        let (span, flags) = ids.split_at(17);
        if !(is_known || is_later) || span[0] != b'-' || flags[0] != b'-' {
            return None;
        }
        let incoming = Incoming {
            trace: hexadecimal(trace)?,
            span: u64::try_from(hexadecimal(&span[1..])?).ok()?,
            sampled: hexadecimal(&flags[1..])? & 1 == 1,
        };
        (incoming.trace != 0 && incoming.span != 0).then_some(incoming)
    }
}

/// Parses lower-case hexadecimal digits only, as the standard requires.
fn hexadecimal(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0_u128, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// The position of a span: its trace and its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    trace: u128,
    span: u64,
    parent: Option<u64>,
}

impl SpanContext {
    /// A child of the caller's span, or the root of a new trace. `draw` returns random numbers.
    pub fn below(caller: Option<Incoming>, mut draw: impl FnMut() -> u64) -> SpanContext {
        let span = draw().max(1);
        match caller {
            Some(caller) => SpanContext {
                trace: caller.trace,
                span,
                parent: Some(caller.span),
            },
            None => SpanContext {
                trace: (u128::from(draw()) << 64 | u128::from(draw())).max(1),
                span,
                parent: None,
            },
        }
    }

    /// Whether the trace starts here.
    pub fn is_root(&self) -> bool {
        self.parent.is_none()
    }

    /// The trace ID.
    pub fn trace_id(&self) -> u128 {
        self.trace
    }

    /// The `traceparent` for the next server.
    pub fn traceparent(&self) -> Option<HeaderValue> {
        let text = format!("00-{:032x}-{:016x}-01", self.trace, self.span);
        HeaderValue::try_from(text).ok()
    }

    /// The span of a request, built from its access line.
    pub fn span_of(&self, line: &AccessLine<'_>, allowed: bool) -> Span {
        let method = known_method(line.method);
        let start = line
            .time
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(0);
        let is_error = line.status >= 500;
        Span {
            trace_id: self.trace.to_be_bytes().to_vec(),
            span_id: self.span.to_be_bytes().to_vec(),
            parent_span_id: self
                .parent
                .map_or_else(Vec::new, |parent| parent.to_be_bytes().to_vec()),
            name: format!("{method} {}", line.route.unwrap_or_default()),
            kind: SpanKind::Server.into(),
            start_time_unix_nano: nanoseconds(start),
            end_time_unix_nano: nanoseconds(start + line.duration),
            attributes: attributes(method, line, allowed),
            status: is_error.then(|| SpanStatus {
                code: StatusCode::Error.into(),
            }),
        }
    }
}

/// Span names come from closed lists, because clients choose method names freely.
fn known_method(method: &[u8]) -> &'static str {
    const KNOWN: [&str; 8] = [
        "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY",
    ];
    let known = KNOWN.iter().find(|known| known.as_bytes() == method);
    known.copied().unwrap_or("HTTP")
}

fn attributes(method: &str, line: &AccessLine<'_>, allowed: bool) -> Vec<KeyValue> {
    let method = if method == "HTTP" { "_OTHER" } else { method };
    let mut attributes = vec![
        KeyValue::text("http.request.method", method.to_owned()),
        KeyValue::number("http.response.status_code", line.status.into()),
        KeyValue::boolean("ratelimit.allowed", allowed),
    ];
    let mut text = |key: &str, value: Option<&[u8]>| {
        attributes.extend(value.map(|value| KeyValue::text(key, printable(value).into_owned())));
    };
    text("url.path", Some(line.path));
    text("server.address", line.host);
    let address = line.client_ip.map(|address| address.to_string());
    text("client.address", address.as_deref().map(str::as_bytes));
    text("tidegate.request_id", Some(line.request_id));
    text("tidegate.route", line.route.map(str::as_bytes));
    text(
        "tidegate.upstream",
        line.went.map(|went| went.upstream.as_bytes()),
    );
    // if the gateway answers in place of a server, the server's error is more specific
    let refused = line.error.filter(|_| line.status >= 500);
    let error = line.went.and_then(|went| went.error).or(refused);
    text("error.type", error.map(str::as_bytes));
    if let Some(limit) = line.limit {
        text("ratelimit.limit", Some(limit.name.as_bytes()));
        text("ratelimit.key", Some(limit.key));
        text("ratelimit.source", Some(limit.source.as_bytes()));
        attributes.push(KeyValue::number("ratelimit.remaining", limit.remaining));
    }
    attributes
}

/// Valid UTF-8, cut to the length of an access line's value.
fn printable(text: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(&text[..text.len().min(VALUE_MAX_BYTES)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_and_continued() {
        let incoming = Incoming::parse(GOOD.as_bytes()).expect("the standard's own example");
        assert!(incoming.sampled);
        let place = SpanContext::below(Some(incoming), || 0xabc);
        let told = place.traceparent().expect("it is ASCII");
        assert_eq!(
            told,
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000abc-01"
        );
        assert!(!place.is_root());
        let mut numbers = 1..;
        let root = SpanContext::below(None, || numbers.next().expect("endless"));
        assert!(root.is_root());
        let told = root.traceparent().expect("it is ASCII");
        assert_eq!(
            told,
            "00-00000000000000020000000000000003-0000000000000001-01"
        );
    }

    #[test]
    fn a_later_version_may_say_more() {
        let read = |text: &str| Incoming::parse(text.as_bytes());
        assert!(read(&GOOD.replace("00-4", "01-4")).is_some());
        assert!(read(&format!("cc{}-what-else", &GOOD[2..])).is_some());
        let unsampled = format!("{}00", &GOOD[..53]);
        assert!(!read(&unsampled).expect("valid").sampled);
    }

    #[test]
    fn what_is_no_traceparent_is_none() {
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0g",
        ] {
            assert_eq!(Incoming::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
