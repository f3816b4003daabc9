//! The format of access lines, and that writing them never blocks a worker.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::UNIX_EPOCH,
};

use serde_json::{Value, json};

use super::*;
use crate::telemetry::test_support::{Captured, ReadableCounter};

const PATIENCE: Duration = Duration::from_secs(10);

/// A sink that reports its first write, then blocks until the test releases it.
struct Stuck {
    reached: mpsc::SyncSender<()>,
    release: mpsc::Receiver<()>,
}

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.reached.send(());
        let _ = self.release.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct BrokenSink;

impl Write for BrokenSink {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn line() -> AccessLine<'static> {
    AccessLine {
        time: UNIX_EPOCH + Duration::from_millis(1_700_000_000_123),
        request_id: b"0190-a",
        client_ip: Some([192, 0, 2, 7].into()),
        user: Some(b"ada"),
        tenant: None,
        tier: Some(b"pro"),
        method: b"GET",
        host: Some(b"api.example.com"),
        path: b"/v1/search",
        route: Some("search"),
        status: 429,
        limit: Some(LimitPart {
            name: "per_user",
            key: b"user:ada",
            algorithm: "token_bucket",
            scope: "local",
            mode: "enforce",
            capacity: 20,
            remaining: 0,
            retry_after: Some(3),
            source: "local",
        }),
        cost: None,
        went: None,
        error: None,
        trace: Some(0x4bf9),
        lines_dropped: 7,
        bytes: 312,
        duration: Duration::from_micros(1_000_042),
    }
}

fn written(style: Style, line: &AccessLine<'_>) -> String {
    let mut out = Vec::new();
    format(&mut out, style, line);
    String::from_utf8(out).expect("lines are UTF-8")
}

fn started(
    sink: impl Write + Send + 'static,
    max_bytes: usize,
) -> (AccessLog, Arc<ReadableCounter>) {
    let count = Arc::new(ReadableCounter::default());
    let dropped = Counter::from_arc(Arc::clone(&count));
    (
        AccessLog::start(Style::Json, Box::new(sink), max_bytes, dropped).expect("a thread starts"),
        count,
    )
}

#[test]
fn json_line_holds_every_known_field_once() {
    let read: Value = serde_json::from_str(&written(Style::Json, &line())).expect("it is JSON");
    let expected = json!({
        "timestamp": "2023-11-14T22:13:20.123Z", "request_id": "0190-a", "client_ip": "192.0.2.7", "user": "ada",
        "tier": "pro", "method": "GET", "host": "api.example.com", "path": "/v1/search", "route": "search",
        "status": 429, "limit": "per_user", "key": "user:ada", "algorithm": "token_bucket",
        "scope": "local", "mode": "enforce", "capacity": 20, "remaining": 0, "retry_after": 3, "source": "local",
        "trace_id": "00000000000000000000000000004bf9", "lines_dropped": 7, "bytes": 312, "seconds": 1.000042,
    });
    assert_eq!(read, expected);
}

#[test]
fn a_second_has_so_many_lines_and_the_next_says_how_many_are_missing() {
    let cap = LineCap::default();
    let admitted: Vec<_> = (0..5).map(|_| cap.admit(9, 2)).collect();
    assert_eq!(admitted, [Some(0), Some(0), None, None, None]);
    assert_eq!(cap.admit(10, 2), Some(3));
    assert_eq!((cap.admit(10, 2), cap.admit(10, 2)), (Some(0), None));
    assert_eq!(cap.admit(11, 0), None, "none at all");
    assert_eq!(cap.admit(4_294_967_296 + 12, 1), Some(2));
}

#[test]
fn text_line_reads_as_name_value_pairs() {
    let text = written(
        Style::Text,
        &AccessLine {
            user: Some(b"ada lovelace"),
            ..line()
        },
    );
    assert_eq!(
        text,
        "2023-11-14T22:13:20.123Z request_id=0190-a client_ip=192.0.2.7 user=\"ada lovelace\" tier=pro method=GET \
         host=api.example.com path=/v1/search route=search status=429 limit=per_user key=user:ada \
         algorithm=token_bucket scope=local mode=enforce capacity=20 remaining=0 retry_after=3 source=local bytes=312 seconds=1.000042 \
         trace_id=00000000000000000000000000004bf9 lines_dropped=7\n"
    );
}

#[test]
fn hostile_values_stay_inside_their_field_and_line() {
    let hostile = b"/\"},{\"admin\":true}\n\r\x1b[2K\xff status=200";
    let line = AccessLine {
        path: hostile,
        request_id: b"",
        ..line()
    };
    let json = written(Style::Json, &line);
    let read: Value = serde_json::from_str(&json).expect("it is JSON");
    assert_eq!(
        read["path"],
        "/\"},{\"admin\":true}\n\r\u{1b}[2K\u{fffd} status=200"
    );
    assert_eq!(read["status"], 429);
    let text = written(Style::Text, &line);
    for line in [json, text] {
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
    }
}

#[test]
fn values_are_cut_at_their_bound() {
    let long = vec![b'a'; VALUE_MAX_BYTES * 9];
    for style in [Style::Text, Style::Json] {
        let text = written(
            style,
            &AccessLine {
                path: &long,
                ..line()
            },
        );
        assert!(text.len() < VALUE_MAX_BYTES + 600, "{}", text.len());
        assert!(text.contains("a…\""));
    }
}

#[test]
fn lines_of_all_clones_reach_the_sink_whole_before_close_returns() {
    let sink = Captured::default();
    let (log, dropped) = started(sink.clone(), 1 << 20);
    thread::scope(|scope| {
        for _ in 0..4 {
            let log = log.clone();
            scope.spawn(move || (0..100).for_each(|_| log.write(&line())));
        }
    });
    assert!(log.close(PATIENCE));
    let text = sink.text();
    assert_eq!(text.lines().count(), 400);
    assert!(
        text.lines()
            .all(|line| serde_json::from_str::<Value>(line).is_ok())
    );
    assert_eq!(dropped.get(), 0);
}

#[test]
fn full_queue_drops_and_counts_instead_of_waiting() {
    let (reached, was_reached) = mpsc::sync_channel(16);
    let (let_go, release) = mpsc::sync_channel(16);
    let length = written(Style::Json, &line()).len();
    let (log, dropped) = started(Stuck { reached, release }, 3 * length);
    log.write(&line());
    was_reached
        .recv_timeout(PATIENCE)
        .expect("the writer takes the first line");
    for _ in 0..10 {
        log.write(&line());
    }
    assert_eq!(dropped.get(), 7, "three lines fit");
    assert!(
        !log.close(Duration::from_millis(1)),
        "the sink is stuck, and close does not wait for ever"
    );
    drop(let_go);
    assert!(log.close(PATIENCE));
}

#[test]
fn lines_that_a_broken_sink_refuses_are_counted() {
    let (log, dropped) = started(BrokenSink, 1 << 20);
    log.write(&line());
    log.write(&line());
    assert!(log.close(PATIENCE));
    assert_eq!(dropped.get(), 2);
    log.write(&line());
    assert_eq!(dropped.get(), 3, "after the end nothing is queued");
}
