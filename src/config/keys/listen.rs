//! `[[listen]]` and its tables.

use super::record::{
    DAY,
    DefaultValue::{Note, Required, Value},
    KeyRecord, Keys,
    ValueKind::{Boolean, Choice, Duration, Integer, Size, Table, Tables, Text},
};

/// `[[listen]]`.
pub(in crate::config) static LISTEN: Keys = Keys {
    title: "[[listen]]",
    keys: &[
        KeyRecord::new(
            "address",
            Text("text"),
            Required,
            "`\"127.0.0.1:8080\"`, `\"0.0.0.0:8080\"`, `\"[::]:8080\"`, `\"unix:/path\"`, or \
             `\"systemd:NAME\"` for a [socket of the service manager](restart.md#systemd)",
        ),
        KeyRecord::new(
            "http2",
            Boolean,
            Value("true"),
            "HTTP/2 beside HTTP/1.1: over TLS by ALPN, in cleartext with prior knowledge",
        ),
        KeyRecord::new(
            "proxy_protocol",
            Choice(&["off", "required"]),
            Value("\"off\""),
            "every connection begins with a PROXY header (version 1 or 2), and only \
             `trusted_proxies` may connect, [see below](#the-proxy-protocol)",
        ),
        KeyRecord::new(
            "header_timeout",
            Duration(1, DAY),
            Value("\"10s\""),
            "time for a complete request head (408)",
        ),
        KeyRecord::new(
            "body_timeout",
            Duration(1, DAY),
            Value("\"30s\""),
            "longest silence in a request body (408). After the response has begun, the \
             upstream's [applies](protocols.md#grpc)",
        ),
        KeyRecord::new(
            "min_body_rate",
            Size(0, 1 << 30),
            Value("\"240B\""),
            "minimum average of bytes a second in a request body, after tidegate has waited \
             `body_timeout` for it (408). Time in which the upstream does not read does not \
             count. It does not apply to gRPC; `\"0B\"` turns it off",
        ),
        KeyRecord::new(
            "idle_timeout",
            Duration(1, DAY),
            Value("\"75s\""),
            "how long a connection stays open between requests, and how long a client may read \
             nothing of a response. In HTTP/2 the latter applies to each stream",
        ),
        KeyRecord::new(
            "max_header_size",
            Size(256, 16 << 20),
            Value("\"32KiB\""),
            "size of a request head (431)",
        ),
        KeyRecord::new(
            "max_header_count",
            Integer(1, 10_000),
            Value("100"),
            "fields of a request head (431)",
        ),
        KeyRecord::new(
            "max_uri_size",
            Size(16, 64 << 10),
            Value("\"8KiB\""),
            "size of a request target (414)",
        ),
        KeyRecord::new(
            "max_body_size",
            Size(0, u64::MAX),
            Value("\"10MiB\""),
            "size of a request body (413); a route can override it. For gRPC it bounds [each \
             message](protocols.md#grpc)",
        ),
        KeyRecord::new(
            "max_streams",
            Integer(1, 10_000),
            Value("128"),
            "concurrent HTTP/2 streams per connection",
        ),
        KeyRecord::new(
            "tls",
            Table(&LISTEN_TLS),
            Note("none"),
            "TLS instead of cleartext, [see below](#listentls)",
        ),
    ],
};

/// `[listen.tls]`.
pub(in crate::config) static LISTEN_TLS: Keys = Keys {
    title: "[listen.tls]",
    keys: &[
        KeyRecord::new(
            "certificates",
            Tables(&[&CERTIFICATE]),
            Required,
            "at least one, selected by the name that the client requests (SNI). The first \
             serves all other names",
        ),
        KeyRecord::new(
            "min_version",
            Choice(&["1.2", "1.3"]),
            Value("\"1.2\""),
            "the oldest accepted version of TLS",
        ),
        KeyRecord::new(
            "client_ca",
            Text("path"),
            Note("none"),
            "tidegate requests a client certificate, signed by one of these authorities (PEM)",
        ),
        KeyRecord::new(
            "client_auth",
            Choice(&["optional", "required"]),
            Value("\"optional\""),
            "with `client_ca`: whether a client needs a certificate. An invalid one is always \
             rejected",
        ),
        KeyRecord::new(
            "max_handshakes",
            Integer(1, 1_000_000),
            Value("1000"),
            "concurrent handshakes on each worker; beyond it tidegate drops the oldest",
        ),
    ],
};

/// `[[listen.tls.certificates]]`.
pub(in crate::config) static CERTIFICATE: Keys = Keys {
    title: "[[listen.tls.certificates]]",
    keys: &[
        KeyRecord::new(
            "cert",
            Text("path"),
            Required,
            "PEM: the server's certificate, then its chain",
        ),
        KeyRecord::new(
            "key",
            Text("path"),
            Required,
            "PEM: its private key, RSA, ECDSA or Ed25519, not encrypted",
        ),
    ],
};
