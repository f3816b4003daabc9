//! Tests with answers of real providers and hostile ones, whole and in pieces.
//! `tests/vectors/cost_vectors.json` lists what each reports.

use std::sync::Arc;

use base64::{Engine, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use proptest::{collection::vec, prelude::*};
use serde_json::{Value, json};

use super::{
    Decimal, ReportedUsage, UnreadBody, UsageFormat, UsageMeter, UsageSchema,
    meter::MAX_STATE_BYTES,
};

const VECTORS: &str = include_str!("../../tests/vectors/cost_vectors.json");

/// The result of reading one answer.
#[derive(Clone, Debug, PartialEq)]
struct VectorReading {
    reported: Option<ReportedUsage>,
    model: Option<String>,
    events: u64,
    progress: u64,
    unread: Option<UnreadBody>,
}

fn read<'a>(meter: &UsageMeter, pieces: impl IntoIterator<Item = &'a [u8]>) -> VectorReading {
    let mut meter = meter.clone();
    for piece in pieces {
        meter.feed(piece);
    }
    meter.end();
    VectorReading {
        reported: meter.reported(),
        model: meter.model().map(str::to_owned),
        events: meter.events(),
        progress: meter.progress(),
        unread: meter.unread(),
    }
}

fn format(name: &str) -> UsageFormat {
    match name {
        "openai" => UsageFormat::OpenAi,
        "anthropic" => UsageFormat::Anthropic,
        "gemini" => UsageFormat::Gemini,
        "ollama" => UsageFormat::Ollama,
        "bedrock" => UsageFormat::Bedrock,
        other => panic!("no format is called {other}"),
    }
}

fn meter(schema: UsageSchema, content_type: &str, encoding: Option<&str>) -> UsageMeter {
    let mut headers = HeaderMap::new();
    let value = |text: &str| HeaderValue::from_str(text).expect("it is a value");
    headers.insert(header::CONTENT_TYPE, value(content_type));
    if let Some(encoding) = encoding {
        headers.insert(header::CONTENT_ENCODING, value(encoding));
    }
    UsageMeter::new(Arc::new(schema), StatusCode::OK, &headers)
}

fn meter_of(vector: &Value) -> UsageMeter {
    let schema = match vector["field"].as_str() {
        Some(field) => {
            let scale = vector["scale"].as_u64().unwrap_or(1).to_string();
            let scale = Decimal::parse(&scale).expect("it is a decimal");
            UsageSchema::of_field(field, scale).expect("it is a path")
        }
        None => UsageSchema::of_format(format(vector["format"].as_str().expect("a format"))),
    };
    let content_type = vector["content_type"].as_str().expect("a type");
    meter(schema, content_type, vector["content_encoding"].as_str())
}

fn body_of(vector: &Value) -> Vec<u8> {
    match vector["body_base64"].as_str() {
        Some(text) => BASE64_STANDARD.decode(text).expect("it is base64"),
        None => vector["body"].as_str().expect("a body").as_bytes().to_vec(),
    }
}

/// The reported usage as the vectors write it.
fn told(reading: &VectorReading) -> Value {
    let mut told = match reading.reported {
        None => return Value::Null,
        Some(ReportedUsage::Units(cost)) => return json!({ "cost": cost }),
        Some(ReportedUsage::Seconds(seconds)) => json!({ "seconds": seconds }),
        Some(ReportedUsage::Tokens(usage)) => json!({
            "input": usage.input, "cached": usage.cached, "written": usage.written,
            "output": usage.output, "reasoning": usage.reasoning,
            "total": usage.input + usage.output,
        }),
    };
    if let Some(model) = &reading.model {
        told["model"] = json!(model);
    }
    told
}

#[test]
fn every_answer_of_the_vectors_reports_the_same_however_it_is_split() {
    let vectors: Value = serde_json::from_str(VECTORS).expect("it is JSON");
    let answers = vectors["usage"].as_array().expect("a list");
    assert_eq!(answers.len(), 77);
    let mut later = 0;
    for vector in answers {
        let (id, meter, body) = (&vector["id"], meter_of(vector), body_of(vector));
        let whole = read(&meter, [&*body]);
        if vector["stage"] == 2 {
            // Compressed answers and binary frames are not read yet.
            assert_eq!((whole.reported, whole.events), (None, 0), "{id}");
            later += 1;
            continue;
        }
        assert_eq!(told(&whole), vector["expect"], "{id}");
        if let Some(events) = vector["events"].as_u64() {
            assert_eq!(whole.events, events, "{id}: events");
        }
        for at in 0..=body.len() {
            let (first, second) = body.split_at(at);
            assert_eq!(read(&meter, [first, second]), whole, "{id} split at {at}");
        }
        for size in 1..=17 {
            assert_eq!(
                read(&meter, body.chunks(size)),
                whole,
                "{id} in pieces of {size}"
            );
        }
    }
    assert_eq!(later, 4);
}

#[test]
fn an_answer_that_is_cut_off_never_reports_more_than_the_whole() {
    let vectors: Value = serde_json::from_str(VECTORS).expect("it is JSON");
    for vector in vectors["usage"].as_array().expect("a list") {
        let (meter, body) = (meter_of(vector), body_of(vector));
        let total = |bytes: &[u8]| match read(&meter, [bytes]).reported {
            Some(ReportedUsage::Tokens(usage)) => usage.input + usage.output,
            Some(ReportedUsage::Seconds(units) | ReportedUsage::Units(units)) => units,
            None => 0,
        };
        let whole = total(&body);
        for at in 0..body.len() {
            assert!(total(&body[..at]) <= whole, "{} cut at {at}", vector["id"]);
        }
    }
}

#[test]
fn done_is_an_event_without_progress() {
    let schema = || UsageSchema::of_format(UsageFormat::OpenAi);
    let meter = meter(schema(), "text/event-stream", None);
    for (body, events, progress) in [
        ("data: {}\n\ndata: [DONE]\n\n", 2, 1),
        ("data: {}\n\ndata:[DONE]\n\n", 2, 1),
        ("data: [DONE] \n\n", 1, 1),
        ("data: [DONE\ndata: ]\n\n", 1, 1),
        (": comment\n\nevent: ping\n\ndata:\n\ndata\n\n", 0, 0),
        ("data: a\r\rdata: b\r\n\r\ndata: c", 3, 3),
    ] {
        for size in [1, 2, 3, 64] {
            let reading = read(&meter, body.as_bytes().chunks(size));
            assert_eq!(
                (reading.events, reading.progress),
                (events, progress),
                "{body:?}"
            );
        }
    }
}

#[test]
fn a_piece_says_where_its_last_event_ends() {
    let schema = UsageSchema::of_format(UsageFormat::OpenAi);
    let mut meter = meter(schema, "text/event-stream", None);
    assert_eq!(meter.feed(b"data: {}\n\ndata: {"), Some(10));
    assert_eq!(meter.feed(b"}\n"), None);
    assert_eq!(meter.feed(b"\n: a comment\n\n"), Some(1));
    assert_eq!(meter.feed(b"\n\n"), None);
}

#[test]
fn lines_and_elements_of_an_array_are_events_and_one_value_is_not() {
    let ollama = UsageSchema::of_format(UsageFormat::Ollama);
    let gemini = UsageSchema::of_format(UsageFormat::Gemini);
    let body: &[u8] = b"{\"a\":{}}\n{\"a\":[{}]}\n{}";
    assert_eq!(
        read(&meter(ollama, "application/x-ndjson", None), [body]).progress,
        3
    );
    let json = meter(gemini, "application/json", None);
    assert_eq!(read(&json, [&b"[{\"a\":1},{\"b\":{}}"[..]]).progress, 2);
    assert_eq!(read(&json, [&b"{\"a\":[{},{}]}"[..]]).progress, 0);
}

#[test]
fn an_answer_that_cannot_be_read_says_why() {
    let schema = || UsageSchema::of_format(UsageFormat::OpenAi);
    let usage = b"{\"usage\":{\"prompt_tokens\":1}}";
    for (content_type, encoding, body, why) in [
        ("application/json", None, &usage[..], None),
        (
            "APPLICATION/JSON ; charset=utf-8",
            Some("Identity"),
            usage,
            None,
        ),
        (
            "application/json",
            Some("gzip"),
            usage,
            Some(UnreadBody::Encoding),
        ),
        ("text/html", None, usage, Some(UnreadBody::ContentType)),
        ("json", None, usage, Some(UnreadBody::ContentType)),
        (
            "application/json",
            None,
            b"<html>",
            Some(UnreadBody::NotJson),
        ),
        (
            "application/json",
            None,
            &[b'['; 65],
            Some(UnreadBody::TooDeep),
        ),
        (
            "application/json",
            None,
            b"{\"a\":[}]",
            Some(UnreadBody::NotJson),
        ),
    ] {
        let reading = read(&meter(schema(), content_type, encoding), [body]);
        assert_eq!(reading.unread, why, "{content_type} {encoding:?}");
        assert_eq!(reading.reported.is_some(), why.is_none());
    }
    let mut headers = HeaderMap::new();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    let part = UsageMeter::new(Arc::new(schema()), StatusCode::PARTIAL_CONTENT, &headers);
    assert_eq!(part.unread(), Some(UnreadBody::ContentType));
}

#[test]
fn reading_an_answer_takes_a_bounded_state() {
    assert!(
        size_of::<UsageMeter>() <= MAX_STATE_BYTES,
        "{}",
        size_of::<UsageMeter>()
    );
}

/// Random bytes rich in structural characters.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    const WORDS: [&[u8]; 9] = [
        b"data:",
        b"\n\n",
        b"\"usage\"",
        b"{\"usage\":{\"prompt_tokens\":",
        b"\"completion_tokens\":12",
        b"\"model\":\"m\"",
        b"[DONE]",
        b"\xEF\xBB\xBF",
        b"}}",
    ];
    let words = proptest::sample::select(&WORDS[..]);
    let bytes = proptest::sample::select(&b"{}[]\",:\\u019.eE- \r\nntrfx"[..]);
    let part = prop_oneof![2 => words.prop_map(<[u8]>::to_vec), 3 => vec(bytes, 1..6)];
    vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn pieces_give_what_the_whole_gives(body in junk(), cuts in vec(1..9_usize, 1..40), stream: bool) {
        let content_type = if stream { "text/event-stream" } else { "application/json" };
        let meter = meter(UsageSchema::of_format(UsageFormat::OpenAi), content_type, None);
        let whole = read(&meter, [&*body]);
        let (mut pieces, mut rest) = (Vec::new(), &*body);
        for cut in cuts {
            let (piece, tail) = rest.split_at(cut.min(rest.len()));
            pieces.push(piece);
            rest = tail;
        }
        pieces.push(rest);
        prop_assert_eq!(read(&meter, pieces), whole);
    }

    #[test]
    fn what_serde_reads_at_a_path_is_what_is_reported(before in any::<String>(), tokens in 0..1_000_000_000_u32) {
        let value = json!({
            "choices": [{ "message": { "content": before, "usage": { "prompt_tokens": 1 } } }],
            "usage": { "prompt_tokens": tokens, "x": [[{ "prompt_tokens": 9 }]] },
        });
        let meter = meter(UsageSchema::of_format(UsageFormat::OpenAi), "application/json", None);
        let reading = read(&meter, [value.to_string().as_bytes()]);
        prop_assert_eq!(&told(&reading)["input"], &json!(tokens));
    }
}
