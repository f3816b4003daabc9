//! `[server]`, `[overload]`, `[redis]`, `[admin]`, `[log]` and `[trace]`: the process itself.

use super::record::{
    DAY,
    DefaultValue::{Note, Value},
    KeyRecord, Keys, TEXT,
    ValueKind::{Boolean, Choice, Duration, Integer, List, OneOf, Share, Size, Table, Text},
};

/// `[server]`.
pub(in crate::config) static SERVER: Keys = Keys {
    title: "[server]",
    keys: &[
        KeyRecord::new(
            "workers",
            OneOf(&[Choice(&["auto"]), Integer(1, 1024)]),
            Value("\"auto\""),
            "worker threads; `\"auto\"` is one per core",
        ),
        KeyRecord::new(
            "drain_delay",
            Duration(0, DAY),
            Value("\"0ms\""),
            "after SIGTERM, the time for which `/readyz` answers 503 while tidegate still \
             accepts requests. Load balancers use it to stop sending",
        ),
        KeyRecord::new(
            "drain_timeout",
            Duration(0, DAY),
            Value("\"30s\""),
            "after the delay, the time for requests in flight and open WebSockets to end",
        ),
        KeyRecord::new(
            "max_connections",
            Integer(1, 10_000_000),
            Value("100_000"),
            "connections over all listeners. At the bound tidegate stops accepting. It also \
             stops at three quarters of the allowed file descriptors (`ulimit -Hn`), and logs \
             this bound at the start",
        ),
        KeyRecord::new(
            "max_connections_per_ip",
            Integer(1, 10_000_000),
            Note("a quarter of `max_connections`, at least 1000"),
            "connections of one address (`ipv4_prefix`, `ipv6_prefix`), over all listeners. A \
             further one is closed at once. `trusted_proxies` and peers on a Unix socket are \
             not counted",
        ),
        KeyRecord::new(
            "max_keys",
            Integer(1, 100_000_000),
            Value("1_000_000"),
            "buckets of one limit in memory, and half as many again in [guaranteed parts for \
             each limit](limiter-memory.md)",
        ),
        KeyRecord::new(
            "max_body_buffer",
            Size(1 << 20, 1 << 40),
            Value("\"64MiB\""),
            "memory for all request bodies that are read before the decision, for \
             [`body:FIELD`](#parts-of-a-key). One client address (IPv6: /64) may use an eighth \
             of what the others leave. A body that finds no room gets 503 `body_buffer_full`",
        ),
        KeyRecord::new(
            "watch_config",
            Boolean,
            Value("true"),
            "[reload](operations.md#reload) if the content of this file, or of a key file or CA \
             that it names, changes. SIGHUP always reloads",
        ),
    ],
};

/// `[overload]`.
pub(in crate::config) static OVERLOAD: Keys = Keys {
    title: "[overload]",
    keys: &[
        KeyRecord::new(
            "max_in_flight",
            OneOf(&[Integer(1, 1_000_000), Choice(&["adaptive", "off"])]),
            Value("\"adaptive\""),
            "beyond it tidegate sheds requests: 503 with `Retry-After: 1`",
        ),
        KeyRecord::new(
            "reserve",
            Table(&RESERVE),
            Note("below"),
            "shares of the bound for higher priorities",
        ),
        KeyRecord::new(
            "floor",
            Integer(1, 1_000_000),
            Value("10"),
            "the minimum of an adaptive bound",
        ),
    ],
};

/// `[overload.reserve]`.
pub(in crate::config) static RESERVE: Keys = Keys {
    title: "[overload.reserve]",
    keys: &[
        KeyRecord::new(
            "critical",
            Share(0, 1_000_000),
            Value("0.2"),
            "only requests of routes with `priority = \"critical\"` may use this share",
        ),
        KeyRecord::new(
            "normal",
            Share(0, 1_000_000),
            Value("0.2"),
            "requests with `priority = \"low\"` may not use this share either",
        ),
    ],
};

/// `[admin]`.
pub(in crate::config) static ADMIN: Keys = Keys {
    title: "[admin]",
    keys: &[
        KeyRecord::new(
            "address",
            Text("IP address and port"),
            Value("\"127.0.0.1:9901\""),
            "address of `/metrics`, `/healthz`, `/readyz`, the [page and the \
             API](operations.md), [`/check`](forward-auth.md)",
        ),
        KeyRecord::new(
            "token_file",
            Text("path"),
            Note("none"),
            "the file with the bearer token; required unless the address is loopback",
        ),
        KeyRecord::new(
            "check_identity_from",
            List("addresses and networks", &TEXT),
            Value("[]"),
            "trusted proxies from which [`/check`](forward-auth.md#trusted-headers) reads \
             identity headers (`[[user]] from = \"header\"`). It ignores these headers from \
             other peers",
        ),
    ],
};

/// `[log]`.
pub(in crate::config) static LOG: Keys = Keys {
    title: "[log]",
    keys: &[
        KeyRecord::new(
            "level",
            Choice(&["error", "warn", "info", "debug", "trace"]),
            Value("\"info\""),
            "the least severe level that is logged",
        ),
        KeyRecord::new(
            "format",
            Choice(&["auto", "text", "json"]),
            Value("\"auto\""),
            "`auto` is text on a terminal and JSON otherwise",
        ),
        KeyRecord::new(
            "access",
            Choice(&["all", "rejected", "off"]),
            Value("\"rejected\""),
            "the requests with an access line",
        ),
        KeyRecord::new(
            "sample",
            Share(0, 1_000_000),
            Value("0"),
            "with `\"rejected\"`: the share of all other requests that also get a line",
        ),
        KeyRecord::new(
            "max_rejected",
            Integer(0, 1_000_000),
            Value("1000"),
            "lines about rejections in one second, for every value of `access`; the next line \
             has their number as `lines_dropped`",
        ),
    ],
};

/// `[trace]`.
pub(in crate::config) static TRACE: Keys = Keys {
    title: "[trace]",
    keys: &[
        KeyRecord::new(
            "otlp_endpoint",
            Text("`\"http://HOST:PORT\"`, `https://`, or `\"\"` for none"),
            Value("\"\""),
            "a trace collector: OTLP over gRPC, default port 4317. A change needs a restart",
        ),
        KeyRecord::new(
            "sample",
            Share(0, 1_000_000),
            Value("0.01"),
            "the share of requests that have a span",
        ),
    ],
};
