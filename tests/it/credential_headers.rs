//! Credentials reach the upstream only as the fields that the gateway checks: in no other spelling,
//! and not in trailers. Behind CGI, `x_api_key` and `X-Api-Key` are both `HTTP_X_API_KEY`. The
//! upstream would accept a user whom the gateway does not see and does not limit.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::support::{Gateway, Origin, Request, h2c::H2cOrigin, http2, raw, tokens::sha256_hex};

/// One user by API key, one by token, each in a header of its own.
const USERS: &str = r#"
[[user]]
from = "api_key"
keys_file = "keys.toml"
[[user]]
from = "jwt"
header = "x-jwt"
secret_file = "hmac.secret"
"#;

/// Other spellings of these two headers.
const SPELLINGS: [&str; 6] = [
    "x_api_key",
    "X.API.Key",
    "x-api_key",
    "X_API-KEY",
    "x_jwt",
    "X.Jwt",
];

/// Fields that frame, route or authenticate; none may be a trailer.
const NO_TRAILERS: [(&str, &str); 16] = [
    ("x-api-key", "eve"),
    ("x_api_key", "eve"),
    ("x.api.key", "eve"),
    ("x-jwt", "eve"),
    ("x_jwt", "eve"),
    ("authorization", "eve"),
    ("cookie", "eve"),
    ("traceparent", "eve"),
    ("tracestate", "eve"),
    ("x-http-method-override", "eve"),
    ("x_http_method", "eve"),
    ("x-method-override", "eve"),
    ("x-original-url", "eve"),
    ("x-rewrite-url", "eve"),
    ("sec-websocket-key", "eve"),
    ("sec_websocket_protocol", "eve"),
];

/// A gateway that knows these users and forwards to `server`.
fn gateway(config: &str, server: &str) -> Gateway {
    let keys = format!("[keys.bob]\nsha256 = \"{}\"\n", sha256_hex("bobkey"));
    Gateway::with(&format!("{config}{USERS}"))
        .file("keys.toml", &keys)
        .file("hmac.secret", "a-secret-of-at-least-thirty-two-bytes\n")
        .upstream_at(server)
        .start()
}

#[test]
fn credential_reaches_the_server_only_in_the_spelling_that_is_checked() {
    for config in ["", "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n"] {
        let origin = Origin::echo();
        let gateway = gateway(config, &origin.url());
        for name in SPELLINGS {
            let request = Request::get("/").header(name, "bobkey");
            assert_eq!(gateway.send(&request).status, 200, "{name}");
            let request = Request::get("/").header(&name.to_lowercase(), "bobkey");
            let over_http2 = http2::send(gateway.address(), &request);
            assert_eq!(over_http2.status, 200, "{name}");
        }
        let seen = origin.requests();
        assert_eq!(seen.len(), 2 * SPELLINGS.len());
        assert!(!format!("{seen:?}").contains("bobkey"), "{seen:?}");
        gateway.send(&Request::get("/").header("X-API-Key", "bobkey"));
        let seen = origin.requests().pop().expect("the last one");
        assert_eq!(seen.header("x-api-key"), Some("bobkey"), "{seen:?}");
        assert_eq!(seen.header("x-user-id"), Some("bob"), "{seen:?}");
    }
}

#[test]
fn credential_reaches_an_http2_server_only_in_the_spelling_that_is_checked() {
    let origin = H2cOrigin::echo();
    let gateway = gateway("", &origin.url());
    for name in SPELLINGS {
        gateway.send(&Request::get("/").header(name, "bobkey"));
    }
    let seen = origin.requests();
    assert_eq!(seen.len(), SPELLINGS.len());
    assert!(!format!("{seen:?}").contains("bobkey"), "{seen:?}");
}

/// An HTTP/1 server that keeps the last message with its trailers, as it came.
fn recording() -> (Origin, Arc<Mutex<String>>) {
    let written = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&written);
    let origin = Origin::new(move |exchange| {
        let mut bytes = Vec::new();
        // the trailer section ends with an empty line
        while !(bytes.windows(5).any(|part| part == b"\r\n0\r\n") && bytes.ends_with(b"\r\n\r\n")) {
            bytes.extend(exchange.read_some()?);
        }
        *kept.lock().expect("no test panics with it") =
            String::from_utf8_lossy(&bytes).into_owned();
        exchange.respond(200, &[], b"ok")
    });
    (origin, written)
}

fn with_others() -> Vec<(&'static str, &'static str)> {
    [&NO_TRAILERS[..], &[("x-checksum", "7")]].concat()
}

#[test]
fn trailers_hold_no_field_that_frames_routes_or_authenticates() {
    let (origin, written) = recording();
    let gateway = gateway("", &origin.url());
    let trailers: String = with_others()
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let request = format!(
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n1\r\nb\r\n0\r\n{trailers}\r\n"
    );
    let patience = Duration::from_secs(5);
    let reply = raw::send(gateway.address(), request.as_bytes(), patience);
    assert_eq!(reply.statuses(), ["200"], "{}", reply.text());
    let written = written.lock().expect("no test panics with it");
    assert!(written.contains("x-checksum: 7"), "others pass: {written}");
    assert!(!written.contains("eve"), "{written}");
}

#[test]
fn trailers_of_an_http2_client_hold_no_field_that_frames_routes_or_authenticates() {
    // this server sends the trailers back
    let origin = H2cOrigin::echo();
    let gateway = gateway("", &origin.url());
    let request = Request::post("/", "b").header("te", "trailers");
    let (_, trailers) = http2::exchange_with_trailers(gateway.address(), &request, &with_others())
        .expect("an answer");
    assert_eq!(trailers.len(), 1, "{trailers:?}");
    assert!(trailers.contains_key("x-checksum"), "{trailers:?}");
}
