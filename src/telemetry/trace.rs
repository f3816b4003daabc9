//! Spans of OpenTelemetry: one for each sampled request, told by its `traceparent` to whoever it is sent on to.
//!
//! A span is what the access line says, in another form ([`Line`]); a worker writes it in the encoding of OTLP and hands it to a
//! bounded queue ([`Spans`]), from which a thread of its own sends it on. Nobody waits: a span that finds no room is dropped and
//! counted. Without an endpoint none of this exists, and a `traceparent` passes as any field does.
//!
//! Why the crates of OpenTelemetry were left out: `docs/decisions/0004-spans-by-hand.md`.

use std::time::SystemTime;

use http::HeaderValue;

use super::{
    access::{Line, VALUE_MAX_BYTES},
    protobuf::{put_bytes, put_choice, put_fixed64, put_number},
};

pub use super::otlp::{BadCollector, Collector, Spans};

/// `[trace]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceSettings {
    /// Where spans are sent; nowhere where there is none.
    pub collector: Option<Collector>,
    /// Of a million requests so many have a span, where no trusted proxy has decided.
    pub sample_ppm: u32,
}

/// What a `traceparent` says (W3C Trace Context §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    trace: u128,
    span: u64,
    /// Whether the caller has a span itself.
    pub sampled: bool,
}

impl Incoming {
    /// Reads `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`; of later versions what is said there, too.
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

/// Lower case only, as the standard has it.
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

/// Where a span of ours stands: in which trace, below which other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    trace: u128,
    span: u64,
    parent: Option<u64>,
}

impl Place {
    /// Below the caller's span, or at the root of a new trace. `draw` gives random numbers.
    pub fn below(caller: Option<Incoming>, mut draw: impl FnMut() -> u64) -> Place {
        let span = draw().max(1);
        match caller {
            Some(caller) => Place {
                trace: caller.trace,
                span,
                parent: Some(caller.span),
            },
            None => Place {
                trace: (u128::from(draw()) << 64 | u128::from(draw())).max(1),
                span,
                parent: None,
            },
        }
    }

    /// Whether the trace begins here.
    pub fn is_root(&self) -> bool {
        self.parent.is_none()
    }

    /// The trace's id.
    pub fn trace_id(&self) -> u128 {
        self.trace
    }

    /// What the next server is told.
    pub fn traceparent(&self) -> Option<HeaderValue> {
        let text = format!("00-{:032x}-{:016x}-01", self.trace, self.span);
        HeaderValue::try_from(text).ok()
    }

    /// The span of a request as OTLP has it (`opentelemetry.proto.trace.v1.Span`).
    pub fn span_of(&self, line: &Line<'_>, allowed: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        put_bytes(&mut out, 1, &self.trace.to_be_bytes());
        put_bytes(&mut out, 2, &self.span.to_be_bytes());
        if let Some(parent) = self.parent {
            put_bytes(&mut out, 4, &parent.to_be_bytes());
        }
        let method = known_method(line.method);
        let name = format!("{method} {}", line.route.unwrap_or_default());
        put_bytes(&mut out, 5, name.as_bytes());
        put_number(&mut out, 6, SERVER);
        let start = line
            .time
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(0);
        put_fixed64(&mut out, 7, nanoseconds(start));
        put_fixed64(&mut out, 8, nanoseconds(start + line.duration));
        put_attributes(&mut out, method, line, allowed);
        if line.status >= 500 {
            put_bytes(&mut out, 15, &[3 << 3, ERROR]);
        }
        out
    }
}

/// `SPAN_KIND_SERVER`.
const SERVER: u64 = 2;
/// `STATUS_CODE_ERROR`.
const ERROR: u8 = 2;

/// Names of spans come from closed lists: a client may call its method what it likes.
fn known_method(method: &[u8]) -> &'static str {
    const KNOWN: [&str; 8] = [
        "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY",
    ];
    let known = KNOWN.iter().find(|known| known.as_bytes() == method);
    known.copied().unwrap_or("HTTP")
}

enum Value<'a> {
    Text(&'a [u8]),
    Number(u64),
    Boolean(bool),
}

fn put_attributes(out: &mut Vec<u8>, method: &str, line: &Line<'_>, allowed: bool) {
    let mut put = |name: &str, value: Value<'_>| put_attribute(out, 9, name, &value);
    let method = if method == "HTTP" { "_OTHER" } else { method };
    put("http.request.method", Value::Text(method.as_bytes()));
    put("url.path", Value::Text(line.path));
    if let Some(host) = line.host {
        put("server.address", Value::Text(host));
    }
    if let Some(address) = line.client_ip {
        put(
            "client.address",
            Value::Text(address.to_string().as_bytes()),
        );
    }
    put(
        "http.response.status_code",
        Value::Number(line.status.into()),
    );
    put("tidegate.request_id", Value::Text(line.request_id));
    if let Some(route) = line.route {
        put("tidegate.route", Value::Text(route.as_bytes()));
    }
    put("ratelimit.allowed", Value::Boolean(allowed));
    if let Some(limit) = line.limit {
        put("ratelimit.limit", Value::Text(limit.name.as_bytes()));
        put("ratelimit.key", Value::Text(limit.key));
        put("ratelimit.remaining", Value::Number(limit.remaining));
        put("ratelimit.source", Value::Text(limit.source.as_bytes()));
    }
    if let Some(went) = line.went {
        put("tidegate.upstream", Value::Text(went.upstream.as_bytes()));
    }
    // of what the gateway says in place of a server, what was wrong with the server tells more
    let refused = line.error.filter(|_| line.status >= 500);
    if let Some(error) = line.went.and_then(|went| went.error).or(refused) {
        put("error.type", Value::Text(error.as_bytes()));
    }
}

/// `opentelemetry.proto.common.v1.KeyValue`.
fn put_attribute(out: &mut Vec<u8>, field: u8, name: &str, value: &Value<'_>) {
    let mut any = Vec::with_capacity(32);
    match value {
        Value::Text(text) => put_bytes(&mut any, 1, printable(text).as_bytes()),
        Value::Boolean(yes) => put_choice(&mut any, 2, u64::from(*yes)),
        Value::Number(number) => put_choice(&mut any, 3, *number),
    }
    let mut pair = Vec::with_capacity(name.len() + any.len() + 4);
    put_bytes(&mut pair, 1, name.as_bytes());
    put_bytes(&mut pair, 2, &any);
    put_bytes(out, field, &pair);
}

/// A text attribute of something else than a span.
pub(super) fn put_text(out: &mut Vec<u8>, field: u8, name: &str, text: &str) {
    put_attribute(out, field, name, &Value::Text(text.as_bytes()));
}

/// UTF-8, and no longer than a value of an access line.
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
        let place = Place::below(Some(incoming), || 0xabc);
        let told = place.traceparent().expect("it is ASCII");
        assert_eq!(
            told,
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000abc-01"
        );
        assert!(!place.is_root());
        let mut numbers = 1..;
        let root = Place::below(None, || numbers.next().expect("endless"));
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
