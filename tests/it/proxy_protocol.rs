//! The PROXY protocol against the real binary: every vector, in every split, and invalid headers.

use std::{
    io::Write as _,
    net::{Shutdown, SocketAddr},
    time::Duration,
};

use serde_json::Value;

use crate::support::{Gateway, eventually, raw, wait::time_passes};

const VECTORS: &str = include_str!("../vectors/identity_vectors.json");

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: a.example\r\nconnection: close\r\n\r\n";

/// Long enough for any machine.
const SOON: Duration = Duration::from_secs(10);

/// Long enough to show that nothing happens; on a slower machine the test passes either way.
const SILENCE: Duration = Duration::from_millis(100);

const REJECTED: &str = r#"tidegate_identity_rejected_total{source="proxy_protocol"}"#;

/// An echo upstream that returns the address it received.
fn gateway(trusted: &str) -> Gateway {
    Gateway::with(&format!(
        r#"
        [[listen]]
        address = "127.0.0.1:0"
        proxy_protocol = "required"
        header_timeout = "30s"
        [client_ip]
        trusted_proxies = ["{trusted}"]
        "#
    ))
    .start()
}

/// The bytes of a vector: text with escapes, or `hex:`.
fn bytes(input: &str) -> Vec<u8> {
    match input.strip_prefix("hex:") {
        None => input.replace("\\r", "\r").replace("\\n", "\n").into_bytes(),
        Some(digits) => (0..digits.len() / 2)
            .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("hex"))
            .collect(),
    }
}

/// The vectors with a matching result.
fn vectors(wanted: impl Fn(&str) -> bool) -> Vec<(Vec<u8>, String)> {
    let vectors: Value = serde_json::from_str(VECTORS).expect("the vectors are JSON");
    let all = vectors["proxy_protocol"].as_array().expect("a list");
    assert_eq!(all.len(), 26);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    all.iter()
        .map(|vector| (bytes(&text(&vector["input"])), text(&vector["result"])))
        .filter(|(_, result)| wanted(result))
        .collect()
}

/// The address that the origin receives if these pieces precede a request.
fn told(address: SocketAddr, pieces: &[&[u8]]) -> String {
    let mut stream = raw::open(address);
    for (at, piece) in pieces.iter().enumerate() {
        if at > 0 {
            // so that the pieces usually arrive separately
            time_passes(
                Duration::from_micros(300),
                "the pieces usually arrive apart",
            );
        }
        stream.write_all(piece).expect("it reads on");
    }
    let reply = raw::read(&mut stream, SOON).text();
    let field = reply
        .lines()
        .find_map(|line| line.strip_prefix("x-forwarded-for: "));
    field
        .unwrap_or_else(|| panic!("no answer: {reply:?}"))
        .to_owned()
}

fn expected(result: &str) -> String {
    match result.parse::<SocketAddr>() {
        Ok(source) => source.ip().to_string(),
        Err(_) => {
            assert!(result.ends_with("use socket peer"), "{result}");
            "127.0.0.1".to_owned()
        }
    }
}

fn names_a_peer(result: &str) -> bool {
    result != "drop" && result != "need more"
}

#[test]
fn every_vector_that_names_a_peer_does_so_wherever_it_is_split() {
    let gateway = gateway("127.0.0.1");
    let vectors = vectors(names_a_peer);
    assert_eq!(vectors.len(), 11);
    for (header, result) in &vectors {
        let expected = expected(result);
        assert_eq!(
            told(gateway.address(), &[&[header, REQUEST].concat()]),
            expected
        );
        for split in 1..header.len() {
            let (one, two) = header.split_at(split);
            let found = told(gateway.address(), &[one, two, REQUEST]);
            assert_eq!(found, expected, "{} at {split}", header.escape_ascii());
        }
    }
    assert_eq!(gateway.metric(REJECTED) as u64, 0);
}

#[test]
fn every_vector_that_is_no_header_closes_the_connection_without_an_answer() {
    let gateway = gateway("127.0.0.1");
    let vectors = vectors(|result| result == "drop");
    assert_eq!(vectors.len(), 13);
    for (header, _) in &vectors {
        let alone = raw::send(gateway.address(), header, SOON);
        assert!(
            alone.closed && alone.bytes.is_empty(),
            "{}: {}",
            header.escape_ascii(),
            alone.text()
        );
        let with_request = raw::send(gateway.address(), &[header, REQUEST].concat(), SOON);
        assert_eq!(
            with_request.statuses(),
            [""; 0],
            "{}",
            header.escape_ascii()
        );
    }
    gateway.wait_for_metric(REJECTED, 26.0);
    let checksum = r#"tidegate_identity_rejected_total{source="proxy_protocol",kind="checksum"}"#;
    assert_eq!(gateway.metric(checksum) as u64, 2);
}

#[test]
fn every_vector_that_is_a_beginning_is_waited_for() {
    let gateway = gateway("127.0.0.1");
    let vectors = vectors(|result| result == "need more");
    assert_eq!(vectors.len(), 2);
    for (header, _) in &vectors {
        let mut stream = raw::open(gateway.address());
        stream.write_all(header).expect("it reads");
        assert!(!raw::read(&mut stream, SILENCE).closed);
        stream.shutdown(Shutdown::Write).expect("a TCP stream");
        let reply = raw::read(&mut stream, SOON);
        assert!(reply.closed && reply.bytes.is_empty(), "{}", reply.text());
    }
    let incomplete =
        r#"tidegate_identity_rejected_total{source="proxy_protocol",kind="incomplete"}"#;
    gateway.wait_for_metric(incomplete, 2.0);
}

#[test]
fn a_header_that_does_not_end_is_cut_off_in_size_and_in_time() {
    let gateway = Gateway::with(
        r#"
        [[listen]]
        address = "127.0.0.1:0"
        proxy_protocol = "required"
        header_timeout = "300ms"
        [client_ip]
        trusted_proxies = ["127.0.0.1"]
        "#,
    )
    .start();
    let kind = |kind| format!(r#"tidegate_identity_rejected_total{{kind="{kind}"}}"#);
    let huge = bytes("hex:0d0a0d0a000d0a515549540a2111ffff");
    for (sent, fault) in [
        (huge, "too_long"),
        (
            [b"PROXY UNKNOWN ".to_vec(), vec![b'x'; 1000]].concat(),
            "malformed",
        ),
        (b"PROXY TCP4 192.0.2.1 ".to_vec(), "timeout"),
        (bytes("hex:0d0a0d0a000d0a515549540a21113000"), "timeout"),
    ] {
        let before = gateway.metric(&kind(fault));
        let reply = raw::send(gateway.address(), &sent, SOON);
        assert!(reply.closed && reply.bytes.is_empty(), "{}", reply.text());
        gateway.wait_for_metric(&kind(fault), before + 1.0);
    }
    // single bytes gain no time: the whole header has one deadline
    let mut stream = raw::open(gateway.address());
    let drips = b"PROXY TCP4 192.0.2.1 198.51.100.7 56324 44"
        .iter()
        .take_while(|byte| {
            let taken = stream.write_all(&[**byte]).is_ok();
            taken && !raw::read(&mut stream, Duration::from_millis(50)).closed
        })
        .count();
    assert!(drips < 42, "all of it was waited for");
}

#[test]
fn who_is_not_trusted_cannot_connect_and_the_log_says_so_once_a_second() {
    let gateway = gateway("10.0.0.0/8");
    let header = b"PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n";
    for _ in 0..50 {
        let reply = raw::send(gateway.address(), &[header, REQUEST].concat(), SOON);
        assert!(reply.closed && reply.bytes.is_empty(), "{}", reply.text());
    }
    let untrusted = r#"tidegate_identity_rejected_total{source="proxy_protocol",kind="untrusted"}"#;
    gateway.wait_for_metric(untrusted, 50.0);
    let lines = eventually("a line in the log", || {
        let log = gateway.stderr();
        let lines = log
            .lines()
            .filter(|line| line.contains("the peer is not in client_ip.trusted_proxies"))
            .count();
        if lines > 0 { Ok(lines) } else { Err(log) }
    });
    assert!(lines < 25, "{lines} lines:\n{}", gateway.stderr());
}

#[test]
fn a_health_check_that_says_nothing_is_nobodys_fault() {
    let gateway = gateway("127.0.0.1");
    for _ in 0..5 {
        assert!(raw::send_and_finish(gateway.address(), b"", SOON).closed);
    }
    assert_eq!(gateway.metric(REJECTED) as u64, 0);
    assert!(!gateway.stderr().contains("closed a connection"));
}

#[test]
fn the_limit_counts_the_announced_address_and_headers_buy_nothing() {
    let gateway = Gateway::with(
        r#"
        [[listen]]
        address = "127.0.0.1:0"
        proxy_protocol = "required"
        [client_ip]
        trusted_proxies = ["127.0.0.1", "10.0.0.0/8"]
        [gateway]
        limits = ["one"]
        [limit.one]
        key = ["ip"]
        rate = "1/h"
        burst = 1
        "#,
    )
    .start();
    let status = |source: &str, forwarded: &str| {
        let bytes = format!(
            "PROXY TCP4 {source} 198.51.100.7 1 2\r\nGET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: {forwarded}\r\nconnection: close\r\n\r\n"
        );
        raw::send(gateway.address(), bytes.as_bytes(), SOON).statuses()
    };
    assert_eq!(status("192.0.2.1", "1.1.1.1"), ["200"]);
    assert_eq!(status("192.0.2.1", "1.1.1.2"), ["429"], "a stranger's word");
    assert_eq!(status("192.0.2.2", "1.1.1.1"), ["200"]);
    assert_eq!(status("10.0.0.1", "1.1.1.1"), ["200"], "a proxy's word");
    assert_eq!(
        status("10.0.0.2", "1.1.1.1"),
        ["429"],
        "for the same client"
    );
}

#[test]
fn without_the_setting_a_header_is_no_request() {
    let gateway = Gateway::with("[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n").start();
    for (header, _) in vectors(names_a_peer) {
        let reply = raw::send(gateway.address(), &[&header, REQUEST].concat(), SOON);
        assert!(reply.closed, "{}", reply.text());
        assert!(
            !reply.statuses().contains(&"200".to_owned()),
            "{}: {}",
            header.escape_ascii(),
            reply.text()
        );
    }
}

#[test]
fn a_gateway_drains_past_a_connection_that_has_not_announced_itself() {
    let mut gateway = gateway("127.0.0.1");
    let mut stream = raw::open(gateway.address());
    let listener = format!("tidegate_connections{{listener=\"{}\"}}", gateway.address());
    gateway.wait_for_metric(&listener, 1.0);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    assert!(raw::read(&mut stream, SOON).closed);
}
