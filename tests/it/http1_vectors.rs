//! The HTTP/1.1 and path vectors of `tests/vectors/http_vectors.json`, sent to the real gateway
//! with an origin behind it. The outcome is what a client sees: the statuses in order, and whether
//! the connection was closed.

use std::{fs, thread, time::Duration};

use serde_json::Value;

use crate::support::{Gateway, Origin, Seen, raw, raw::Reply};

/// Silence after which the outcome of a vector is final.
const IDLE: Duration = Duration::from_millis(600);

/// Attempts before an unexpected outcome is final, since the machine may be busy.
const ROUNDS: usize = 5;

/// Loads the vectors. They are part of the contract, so fewer than `expected_count` fail the test.
pub fn vectors(kind: &str, expected_count: usize) -> Vec<Value> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/vectors/http_vectors.json"
    );
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut all: Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
    let Value::Array(vectors) = all[kind].take() else {
        panic!("{path} holds no list {kind:?}")
    };
    assert_eq!(
        vectors.len(),
        expected_count,
        "the number of {kind} vectors"
    );
    vectors
}

/// A string member of a vector.
pub fn text<'a>(vector: &'a Value, member: &str) -> &'a str {
    vector[member]
        .as_str()
        .unwrap_or_else(|| panic!("no {member:?} in {vector}"))
}

/// The outcomes that a vector accepts.
pub fn expected(vector: &Value) -> Vec<&str> {
    let list = vector["expect"]
        .as_array()
        .unwrap_or_else(|| panic!("no outcome in {vector}"));
    list.iter()
        .map(|outcome| outcome.as_str().expect("an outcome is a string"))
        .collect()
}

/// Text to bytes: each character of a vector is one byte.
pub fn latin1(text: &str) -> Vec<u8> {
    text.chars()
        .map(|c| u8::try_from(c).expect("vectors are Latin-1"))
        .collect()
}

/// The bytes of a vector: given, or generated from literals, repetitions and numbered fields.
fn bytes(vector: &Value) -> Vec<u8> {
    if vector["raw"].is_string() {
        return latin1(text(vector, "raw"));
    }
    let mut bytes = Vec::new();
    for part in vector["gen"]
        .as_array()
        .unwrap_or_else(|| panic!("no bytes in {vector}"))
    {
        let string = |index: usize| {
            part[index]
                .as_str()
                .unwrap_or_else(|| panic!("part {part}"))
        };
        let count = || usize::try_from(part[2].as_u64().expect("a count")).expect("a small count");
        match string(0) {
            "lit" => bytes.extend(latin1(string(1))),
            "rep" => bytes.extend(latin1(&string(1).repeat(count()))),
            "fields" => {
                for index in 0..count() {
                    bytes.extend(latin1(&format!("{}{index}: {}\r\n", string(1), string(3))));
                }
            }
            other => panic!("unknown generator {other:?}"),
        }
    }
    bytes
}

/// `200`, `100,200`, `400 close`, `h2`, or `timeout`.
pub fn outcome(reply: &Reply) -> String {
    let is_http2 = reply.bytes.get(3..5) == Some(&[4, 0]);
    let statuses = if is_http2 {
        "h2".to_owned()
    } else {
        reply.statuses().join(",")
    };
    let statuses = if statuses.is_empty() {
        "timeout".to_owned()
    } else {
        statuses
    };
    if reply.closed {
        format!("{statuses} close")
    } else {
        statuses
    }
}

/// Whether an outcome is expected. An additional close is allowed.
pub fn accepted(outcome: &str, expected: &[&str]) -> bool {
    expected
        .iter()
        .any(|expected| outcome == *expected || outcome.strip_suffix(" close") == Some(expected))
}

/// Runs each vector on its own thread, all at once; the results in order.
pub fn all_at_once<T: Send>(vectors: &[Value], run: impl Fn(usize, &Value) -> T + Sync) -> Vec<T> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = vectors
            .iter()
            .enumerate()
            .map(|(index, vector)| scope.spawn(move || run(index, vector)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a vector's thread"))
            .collect()
    })
}

/// Fails with all vectors that end differently than listed.
#[track_caller]
pub fn none_differs(wrong: &[String], vectors: &[Value]) {
    assert!(
        wrong.is_empty(),
        "{} of {} vectors differ:\n{}",
        wrong.len(),
        vectors.len(),
        wrong.join("\n")
    );
}

/// The requests at the origin are in order, and enough of them arrived to prove it.
#[track_caller]
pub fn all_in_order(origin: &Origin, least: usize) {
    let seen = origin.requests();
    assert!(
        seen.len() >= least,
        "only {} requests reached the origin",
        seen.len()
    );
    let faults: Vec<String> = seen.iter().flat_map(Seen::faults).collect();
    assert!(
        faults.is_empty(),
        "what reached the origin:\n{}",
        faults.join("\n")
    );
}

#[test]
fn every_http1_vector_ends_as_listed() {
    let vectors = vectors("h1", 124);
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let address = gateway.address();
    let wrong: Vec<String> = all_at_once(&vectors, |_, vector| {
        let expected = expected(vector);
        let mut stream = raw::open(address);
        // the gateway may reject the request before it has read everything
        let _ = std::io::Write::write_all(&mut stream, &bytes(vector));
        let mut reply = Reply::default();
        for _ in 0..ROUNDS {
            let more = raw::read(&mut stream, IDLE);
            reply.bytes.extend(more.bytes);
            reply.closed = more.closed;
            if more.closed || accepted(&outcome(&reply), &expected) {
                break;
            }
        }
        let outcome = outcome(&reply);
        let id = text(vector, "id");
        (!accepted(&outcome, &expected)).then(|| {
            format!(
                "{id}: {outcome}, not {} ({})",
                expected.join(" or "),
                text(vector, "why")
            )
        })
    })
    .into_iter()
    .flatten()
    .collect();
    none_differs(&wrong, &vectors);
    all_in_order(&origin, 21);
}

#[test]
fn no_http1_vector_costs_another_client_its_answer() {
    let vectors = vectors("h1", 124);
    let origin = Origin::ok();
    // one worker, so that all share its connections to the origin
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    for vector in &vectors {
        raw::send_and_finish(gateway.address(), &bytes(vector), Duration::from_millis(20));
        let innocent = gateway.get("/innocent");
        assert_eq!(
            (innocent.status, innocent.text().as_str()),
            (200, "ok"),
            "after {}",
            text(vector, "id")
        );
    }
    let requested = origin
        .requests()
        .iter()
        .filter(|seen| seen.target == "/innocent")
        .count();
    assert_eq!(
        requested,
        vectors.len(),
        "each was forwarded once, and nothing smuggled another"
    );
    assert_eq!(gateway.metric("tidegate_panics_total"), 0.0);
}

#[test]
fn every_path_vector_is_forwarded_and_routed_as_listed() {
    let vectors = vectors("path", 49);
    let origin = Origin::ok();
    let gateway = Gateway::with(
        r#"
        [limit.login]
        key = []
        rate = "1000/s"
        [[route]]
        name = "login"
        path = "/login"
        upstream = "origin"
        limits = ["login"]
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .upstream(&origin)
    .start();
    let address = gateway.address();
    let replies = all_at_once(&vectors, |index, vector| {
        let mut request = b"GET ".to_vec();
        request.extend(latin1(text(vector, "target")));
        request.extend(
            format!(
                " HTTP/1.1\r\nHost: a.example\r\nX-Vector: {index}\r\nConnection: close\r\n\r\n"
            )
            .bytes(),
        );
        raw::send(address, &request, Duration::from_secs(10))
    });
    let seen = origin.requests();
    let mut wrong = Vec::new();
    for (index, (vector, reply)) in vectors.iter().zip(&replies).enumerate() {
        let target = text(vector, "target");
        let forwarded = seen
            .iter()
            .find(|seen| seen.header("x-vector") == Some(&index.to_string()));
        let forwarded = forwarded.map(|seen| seen.target.as_str());
        // the parser drops a fragment before the gateway sees it; harmless, since nothing else sees
        // it either
        let cut = target.split_once('#').map(|(path, _)| path);
        let right = match vector["forward"].as_str() {
            Some(forward) => forwarded == Some(forward) && reply.statuses() == ["200"],
            None if forwarded.is_none() => reply.statuses() == ["400"],
            None => cut.is_some() && forwarded == cut,
        };
        let limited = reply
            .text()
            .to_ascii_lowercase()
            .contains("\nratelimit: \"login\"");
        let keyed = vector["key"]
            .as_str()
            .is_none_or(|key| (key == "/login") == limited);
        if !right || !keyed {
            let statuses = reply.statuses();
            wrong.push(format!("{target:?}: forwarded {forwarded:?}, {statuses:?}, limited {limited}; listed {vector}"));
        }
    }
    none_differs(&wrong, &vectors);
}

#[test]
fn outcomes_are_read_and_compared_as_the_list_means_them() {
    let reply = |bytes: &str, closed| Reply {
        bytes: latin1(bytes),
        closed,
    };
    assert_eq!(
        outcome(&reply(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
            false
        )),
        "100,200"
    );
    assert_eq!(
        outcome(&reply("HTTP/1.1 400 Bad\r\n\r\n", true)),
        "400 close"
    );
    assert_eq!(outcome(&reply("\0\0\u{18}\u{4}\0", false)), "h2");
    assert_eq!(outcome(&reply("", false)), "timeout");
    assert!(
        accepted("200 close", &["200"]),
        "a close that is not asked for is allowed"
    );
    assert!(
        !accepted("400", &["400 close"]),
        "one that is asked for is needed"
    );
    assert!(!accepted("200", &["400 close", "501"]));
    let generated =
        serde_json::json!({"gen": [["lit", "a"], ["rep", "b", 2], ["fields", "X-", 2, "y"]]});
    assert_eq!(bytes(&generated), b"abbX-0: y\r\nX-1: y\r\n");
}
