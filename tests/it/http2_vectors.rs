//! The HTTP/2 vectors of `tests/vectors/http_vectors.json`: field sets, some of them malformed,
//! sent frame by frame to the real gateway with an origin behind it.

use std::time::Duration;

use serde_json::Value;

use crate::{
    http1_vectors::{all_at_once, all_in_order, expected, none_differs, text, vectors},
    support::{
        Gateway, Origin,
        frames::{self, Block, Outcome},
        wait::PATIENCE,
    },
};

/// Vectors with a known different outcome, each with its reason. A vector that ends as listed must
/// leave this list.
const KNOWN_DIFFERENCES: &[(&str, &str)] = &[(
    "trailers-pseudo",
    "h2 drops a pseudo-field in trailers before anybody can see it; it is not forwarded",
)];

fn block(vector: &Value) -> Block {
    let pairs = |member: &str| -> Vec<(String, String)> {
        let list = vector[member].as_array().cloned().unwrap_or_default();
        let string = |value: &Value| {
            value
                .as_str()
                .unwrap_or_else(|| panic!("a field of {vector}"))
                .to_owned()
        };
        list.iter()
            .map(|pair| (string(&pair[0]), string(&pair[1])))
            .collect()
    };
    let mut fields = pairs("headers");
    fields.extend(generated(vector));
    let body = vector["body"].as_str().map(|body| body.as_bytes().to_vec());
    Block {
        fields,
        body,
        trailers: pairs("trailers"),
    }
}

/// `[name, value, count]`: `{i}` in the name is the index, `y*1000` repeats `y` a thousand times.
fn generated(vector: &Value) -> Vec<(String, String)> {
    let Some(generator) = vector["gen"].as_array() else {
        return Vec::new();
    };
    let part = |index: usize| {
        generator[index]
            .as_str()
            .unwrap_or_else(|| panic!("generator of {vector}"))
    };
    let value = match part(1).split_once('*') {
        Some((unit, count)) => unit.repeat(count.parse().expect("a count")),
        None => part(1).to_owned(),
    };
    let count = generator[2].as_u64().expect("a count");
    (0..count)
        .map(|index| (part(0).replace("{i}", &index.to_string()), value.clone()))
        .collect()
}

/// Whether the outcome is in the vector's list: a status, `RST n`, `GOAWAY n`, or `GOAWAY` with any
/// code.
fn accepted(outcome: &Outcome, expected: &[&str]) -> bool {
    let served = outcome.status.filter(|status| *status < 400);
    if let Some(status) = served {
        return expected.contains(&status.to_string().as_str());
    }
    let goaway = outcome.goaway.filter(|code| *code != 0);
    expected
        .iter()
        .any(|expected| match expected.split_once(' ') {
            Some(("RST", code)) => outcome.reset.is_some_and(|reset| reset.to_string() == code),
            Some(("GOAWAY", code)) => goaway.is_some_and(|goaway| goaway.to_string() == code),
            _ if *expected == "GOAWAY" => goaway.is_some(),
            _ => outcome
                .status
                .is_some_and(|status| status.to_string() == *expected),
        })
}

#[test]
fn every_http2_vector_ends_as_listed() {
    let vectors = vectors("h2", 58);
    let origin = Origin::ok();
    // the vectors assume a header list of 16 KiB
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_header_size = \"16KiB\"\n")
            .upstream(&origin)
            .start();
    let address = gateway.address();
    let outcomes = all_at_once(&vectors, |_, vector| {
        frames::send(address, &block(vector), PATIENCE)
    });
    let mut wrong = Vec::new();
    for (vector, outcome) in vectors.iter().zip(&outcomes) {
        let id = text(vector, "id");
        let expected = expected(vector);
        let known = KNOWN_DIFFERENCES.iter().find(|(known, _)| *known == id);
        match (accepted(outcome, &expected), known) {
            (true, None) | (false, Some(_)) => {}
            (true, Some(_)) => wrong.push(format!(
                "{id}: ends as listed now; take it from the known differences"
            )),
            (false, None) => wrong.push(format!(
                "{id}: {outcome:?}, not {} ({})",
                expected.join(" or "),
                text(vector, "why")
            )),
        }
    }
    none_differs(&wrong, &vectors);
    all_in_order(&origin, 8);
    assert_eq!(gateway.metric("tidegate_panics_total"), 0.0);
}

#[test]
fn a_malformed_request_ends_before_it_reaches_the_origin() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    let sent = |fields: &[(&str, &str)]| {
        let fields = fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        frames::send(
            gateway.address(),
            &Block {
                fields,
                ..Block::default()
            },
            Duration::from_secs(5),
        )
    };
    let base = [
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", "a.example"),
        (":path", "/"),
    ];
    for extra in [
        ("connection", "close"),
        ("host", "b.example"),
        ("x", " a"),
        ("te", "gzip"),
    ] {
        let outcome = sent(&[&base[..], &[extra]].concat());
        assert!(
            outcome.status.is_none_or(|status| status == 400),
            "{extra:?}: {outcome:?}"
        );
    }
    assert_eq!(origin.requests().len(), 0);
    assert_eq!(sent(&base).status, Some(200));
}
