//! Request targets: the origin receives exactly the target that was decided on.

use std::time::Duration;

use crate::support::{
    Gateway, Origin,
    frames::{self, Block},
    raw,
};

#[test]
fn an_empty_path_is_the_root() {
    for (target, seen) in [
        ("http://a.example", "/"),
        ("http://a.example?q=1", "/?q=1"),
        ("http://a?/../x", "/?/../x"),
        ("http://a.example/?/../x", "/?/../x"),
    ] {
        let origin = Origin::ok();
        let gateway = Gateway::with("").upstream(&origin).start();
        let request =
            format!("GET {target} HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n");
        let reply = raw::send(
            gateway.address(),
            request.as_bytes(),
            Duration::from_secs(10),
        );
        assert_eq!(reply.statuses(), ["200"], "{target}");
        assert_eq!(origin.request().target, seen, "{target}");
    }
}

#[test]
fn a_path_of_http2_begins_with_a_slash() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    for path in ["?x", "?/../x", "?", "x", "*"] {
        let fields = [
            (":method", "GET"),
            (":scheme", "http"),
            (":authority", "a.example"),
            (":path", path),
        ];
        let block = Block {
            fields: fields
                .map(|(name, value)| (name.into(), value.into()))
                .to_vec(),
            ..Block::default()
        };
        let outcome = frames::send(gateway.address(), &block, Duration::from_secs(10));
        let is_malformed = outcome.status == Some(400) || outcome.reset == Some(1);
        assert!(is_malformed, "{path}: {outcome:?}");
    }
    assert!(origin.requests().is_empty(), "{:?}", origin.requests());
}
