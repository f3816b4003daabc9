//! Parsing of token usage alone: nanoseconds per event and microseconds per megabyte of JSON.
//! `cargo bench --bench usage`.
//!
//! Each figure is the median of interleaved rounds, so that a slow moment of the machine affects
//! all cases alike. An allocation while an answer is read ends the run with an error.

mod counting;

use std::{hint::black_box, sync::Arc, time::Instant};

use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use tidegate::cost::{UsageFormat, UsageMeter, UsageSchema};

const ROUNDS: usize = 21;
const EVENTS: usize = 20_000;
const PIECE: usize = 16 * 1_024;

fn main() {
    // cargo test also builds this, and starts it without that argument
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let cases = [
        events("event of 200 bytes without usage", "", usize::MAX),
        events("the same with usage: null", r#","usage":null"#, usize::MAX),
        events("the same without usage, in pieces of 100 bytes", "", 100),
        json("one long text", &"word and word ".repeat(75_000)),
        json("numbers", &"-0.0123456789,".repeat(75_000)),
        json(
            "small objects",
            &r#"{"token":"ab","top":[]},"#.repeat(40_000),
        ),
    ];
    let mut figures = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, figures) in cases.iter().zip(&mut figures) {
            figures.push(case.round());
        }
    }
    for (case, figures) in cases.iter().zip(&mut figures) {
        figures.sort_by(f64::total_cmp);
        let median = figures[figures.len() / 2];
        println!("{:<52} {median:>9.1} {}", case.name, case.unit);
    }
    println!("allocations: 0 (counted)");
    println!("state of one answer: {} bytes", size_of::<UsageMeter>());
}

struct Case {
    name: String,
    unit: &'static str,
    meter: UsageMeter,
    pieces: Vec<Vec<u8>>,
    repeats: usize,
    /// Divides a round's nanoseconds to give the figure.
    per: f64,
}

impl Case {
    fn round(&self) -> f64 {
        let mut meter = self.meter.clone();
        let before = counting::allocations();
        let start = Instant::now();
        for _ in 0..self.repeats {
            for piece in &self.pieces {
                black_box(meter.feed(black_box(piece)));
            }
        }
        let elapsed = start.elapsed().as_nanos() as f64;
        assert_eq!(counting::allocations(), before, "reading allocates");
        black_box(meter.reported());
        elapsed / self.per
    }
}

fn meter(content_type: &'static str) -> UsageMeter {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    let schema = Arc::new(UsageSchema::of_format(UsageFormat::OpenAi));
    UsageMeter::new(schema, StatusCode::OK, &headers)
}

fn events(name: &str, usage: &str, piece: usize) -> Case {
    let text = "x".repeat(50);
    let head = r#"data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m""#;
    let tail = format!(
        r#","choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}]"#
    );
    let event = format!("{head}{tail}{usage}}}\n\n");
    let mut meter = meter("text/event-stream");
    // the first event names the model and is always read
    meter.feed(event.as_bytes());
    Case {
        name: name.to_owned(),
        unit: "ns/event",
        meter,
        pieces: event.as_bytes().chunks(piece).map(<[u8]>::to_vec).collect(),
        repeats: EVENTS,
        per: EVENTS as f64,
    }
}

fn json(name: &str, content: &str) -> Case {
    let is_text = content.starts_with('w');
    let content = match is_text {
        true => format!("\"{content}\""),
        false => format!("[{content}0]"),
    };
    let body = format!(r#"{{"data":[{{"content":{content}}}],"usage":{{"prompt_tokens":1}}}}"#);
    Case {
        name: format!("JSON of {name}, in pieces of 16 KiB"),
        unit: "us/MB",
        meter: meter("application/json"),
        pieces: body.as_bytes().chunks(PIECE).map(<[u8]>::to_vec).collect(),
        repeats: 1,
        per: 1_000.0 * body.len() as f64 / 1e6,
    }
}
