//! `[upstream.NAME]` and its tables.

use super::record::{
    DAY,
    DefaultValue::{Note, Required, Value},
    HOUR, KeyRecord, Keys, TEXT,
    ValueKind::{Choice, Duration, Integer, List, Table, Text},
};
use crate::upstream::MAX_RETRIES;

/// `[upstream.NAME]`.
pub(in crate::config) static UPSTREAM: Keys = Keys {
    title: "[upstream.NAME]",
    keys: &[
        KeyRecord::new(
            "servers",
            List("list", &TEXT),
            Required,
            "`\"http://HOST:PORT\"` (default port 80), `\"https://HOST:PORT\"` (443), \
             `\"h2c://HOST:PORT\"` (80) for [HTTP/2](protocols.md#http2-to-servers), \
             `\"unix:/path\"`, or `\"builtin:echo\"`, which answers without a server",
        ),
        KeyRecord::new(
            "balance",
            Choice(&["least_requests", "round_robin", "hash:ip", "hash:user"]),
            Value("\"least_requests\""),
            "how tidegate selects the server of a request",
        ),
        KeyRecord::new(
            "connect_timeout",
            Duration(1, DAY),
            Value("\"1s\""),
            "time to open a connection (502)",
        ),
        KeyRecord::new(
            "response_timeout",
            Duration(1, DAY),
            Value("\"30s\""),
            "time until the response head (504)",
        ),
        KeyRecord::new(
            "body_timeout",
            Duration(1, DAY),
            Value("\"5min\""),
            "the longest silence in a response body, after which the response breaks off, and \
             the longest silence of a [WebSocket](protocols.md#websocket). Increase it for \
             streams that may be silent for longer",
        ),
        KeyRecord::new(
            "abandoned_timeout",
            Duration(1, DAY),
            Note("as `response_timeout`"),
            "how long a request keeps its slots of a `concurrency` limit, and its place in \
             `[overload]`, after its client has left or got 504. During this time tidegate \
             waits for the server to [end its work](algorithms.md#concurrency). Set it to the \
             longest work of the server. If clients leave endless streams, such as gRPC watches \
             over `h2c://`, make it short",
        ),
        KeyRecord::new(
            "idle_timeout",
            Duration(1, DAY),
            Value("\"60s\""),
            "how long an unused connection stays open",
        ),
        KeyRecord::new(
            "max_connections",
            Integer(1, 1_000_000),
            Value("1024"),
            "connections per server and worker; an open WebSocket counts as one",
        ),
        KeyRecord::new(
            "retries",
            Integer(0, MAX_RETRIES as u64),
            Value("1"),
            "the number of other servers to try if one fails, [see below](#when-a-server-fails)",
        ),
        KeyRecord::new(
            "host",
            Text("text"),
            Value("\"preserve\""),
            "the `Host` for the servers: the client's (`\"preserve\"`), the server's \
             (`\"server\"`), or a literal one",
        ),
        KeyRecord::new(
            "tls_ca",
            Text("path"),
            Note("the system's"),
            "certificates in PEM. A server behind `https://` must present a certificate that \
             they signed; no other authority is trusted",
        ),
        KeyRecord::new(
            "tls_server_name",
            Text("name"),
            Note("the server's host"),
            "the name in the server's certificate, and in SNI",
        ),
        KeyRecord::new(
            "health",
            Table(&HEALTH),
            Note("none"),
            "[active health checks](#upstreamnamehealth)",
        ),
        KeyRecord::new(
            "outlier",
            Table(&OUTLIER),
            Note("see below"),
            "when a failing server is [ejected](#upstreamnameoutlier)",
        ),
        KeyRecord::new(
            "breaker",
            Table(&BREAKER),
            Note("none"),
            "when a [circuit breaker](#upstreamnamebreaker) stops all requests to a failing \
             upstream",
        ),
    ],
};

/// `[upstream.NAME.health]`.
pub(in crate::config) static HEALTH: Keys = Keys {
    title: "[upstream.NAME.health]",
    keys: &[
        KeyRecord::new(
            "path",
            Text("text"),
            Required,
            "the path of the check: `\"/healthz\"`",
        ),
        KeyRecord::new(
            "interval",
            Duration(100, HOUR),
            Value("\"5s\""),
            "time between checks of a server",
        ),
        KeyRecord::new(
            "timeout",
            Duration(1, DAY),
            Value("\"1s\""),
            "time for a whole check",
        ),
        KeyRecord::new(
            "unhealthy_after",
            Integer(1, 1_000),
            Value("3"),
            "consecutive failed checks that take a server out of service",
        ),
        KeyRecord::new(
            "healthy_after",
            Integer(1, 1_000),
            Value("2"),
            "consecutive passed checks that bring it back",
        ),
    ],
};

/// `[upstream.NAME.outlier]`.
pub(in crate::config) static OUTLIER: Keys = Keys {
    title: "[upstream.NAME.outlier]",
    keys: &[
        KeyRecord::new(
            "failures",
            Integer(0, 1_000_000),
            Value("5"),
            "consecutive failures; 0 never ejects",
        ),
        KeyRecord::new(
            "eject_for",
            Duration(100, HOUR),
            Value("\"10s\""),
            "time until the trial request",
        ),
    ],
};

/// `[upstream.NAME.breaker]`.
pub(in crate::config) static BREAKER: Keys = Keys {
    title: "[upstream.NAME.breaker]",
    keys: &[
        KeyRecord::new(
            "failures",
            Integer(0, 1_000_000),
            Value("20"),
            "consecutive failures; 0 never opens",
        ),
        KeyRecord::new(
            "open_for",
            Duration(100, HOUR),
            Value("\"5s\""),
            "time between trial requests",
        ),
    ],
};
