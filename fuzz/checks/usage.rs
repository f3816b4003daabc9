//! Bytes as the body of an answer that may report usage.
//!
//! Two invariants:
//!
//! - However the bytes are cut into pieces, the result is the same.
//! - What a JSON parser finds at a counter's path is reported. Exceptions: the body nests deeper
//!   than the reader follows, or escapes its names.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde_json::Value;
use tidegate::cost::{
    Decimal, ReportedUsage, UnreadBody, UsageFormat, UsageMeter, UsageSchema, decimal::MAX_VALUE,
};

const FORMATS: [UsageFormat; 5] = [
    UsageFormat::OpenAi,
    UsageFormat::Anthropic,
    UsageFormat::Gemini,
    UsageFormat::Ollama,
    UsageFormat::Bedrock,
];

const KINDS: [&str; 3] = [
    "application/json",
    "text/event-stream",
    "application/x-ndjson",
];

/// The result of reading a body.
#[derive(Debug, PartialEq)]
struct Reading {
    reported: Option<ReportedUsage>,
    model: Option<String>,
    events: [u64; 2],
    unread: Option<UnreadBody>,
}

/// The first byte selects the format and type of the rest, the second the length of the pieces.
pub fn check(data: &[u8]) {
    let &[how, size, ref body @ ..] = data else {
        return;
    };
    let schema = match FORMATS.get(usize::from(how) % 6) {
        Some(format) => UsageSchema::of_format(*format),
        None => UsageSchema::of_field("usage.cost", Decimal::from_nanos(1_500_000_000))
            .expect("it is a path"),
    };
    let kind = KINDS[usize::from(how) / 6 % KINDS.len()];
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    let meter = UsageMeter::new(Arc::new(schema), StatusCode::OK, &headers);
    let whole = read(meter.clone(), body, body.len().max(1));
    let pieces = read(meter, body, usize::from(size) % 33 + 1);
    assert_eq!(whole, pieces, "the pieces change the result");
    if kind == KINDS[0] && how % 6 == 0 {
        check_against_serde(body, &whole);
    }
}

fn read(mut meter: UsageMeter, body: &[u8], size: usize) -> Reading {
    for piece in body.chunks(size) {
        let boundary = meter.feed(piece);
        assert!(boundary.is_none_or(|at| at <= piece.len()));
    }
    meter.end();
    assert_eq!(meter.bytes(), body.len() as u64);
    if let Some(ReportedUsage::Tokens(usage)) = meter.reported() {
        assert!(usage.cached <= usage.input && usage.reasoning <= usage.output);
    }
    Reading {
        reported: meter.reported(),
        model: meter.model().map(str::to_owned),
        events: [meter.events(), meter.progress()],
        unread: meter.unread(),
    }
}

fn check_against_serde(body: &[u8], reading: &Reading) {
    let Ok(value) = serde_json::from_slice::<Value>(body) else {
        return;
    };
    if body.contains(&b'\\') || reading.unread == Some(UnreadBody::TooDeep) {
        return;
    }
    assert_eq!(reading.unread, None, "serde accepts this JSON");
    let Some(input) = value["usage"]["prompt_tokens"].as_u64() else {
        return;
    };
    match reading.reported {
        // For duplicate fields, serde keeps the last and the meter the larger.
        Some(ReportedUsage::Tokens(usage)) => assert!(usage.input >= input.min(MAX_VALUE)),
        // Seconds are reported only without tokens.
        Some(ReportedUsage::Seconds(_)) => assert_eq!(input, 0),
        ref other => panic!("{input} tokens are told, {other:?} is reported"),
    }
}
