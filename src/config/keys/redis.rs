//! `[redis]`: the Redis through which gateways share limits.

use super::record::{
    DefaultValue::{Note, Value},
    KeyRecord, Keys, TEXT,
    ValueKind::{Duration, List, Share, Table, Text},
};

/// `[redis]`.
pub(in crate::config) static REDIS: Keys = Keys {
    title: "[redis]",
    keys: &[
        KeyRecord::new(
            "url",
            Text("text"),
            Value("\"redis://127.0.0.1:6379\""),
            "`redis://USER:PASSWORD@HOST:PORT/DATABASE`, `rediss://…` for TLS, or \
             `unix:///path/redis.sock?user=…&pass=…&db=…`",
        ),
        KeyRecord::new(
            "cluster",
            List("list", &TEXT),
            Value("[]"),
            "instead of `url`: some servers of a Redis Cluster, which name the others; URLs, or \
             `\"HOST:PORT\"`",
        ),
        KeyRecord::new(
            "sentinel",
            Table(&SENTINEL),
            Note("none"),
            "the master that Sentinels name, [see below](#redissentinel)",
        ),
        KeyRecord::new(
            "tls_ca",
            Text("path"),
            Note("the system's"),
            "certificates in PEM that verify `rediss://` servers",
        ),
        KeyRecord::new(
            "tls_cert",
            Text("path"),
            Note("none"),
            "the certificate for servers that request one, in PEM",
        ),
        KeyRecord::new(
            "tls_key",
            Text("path"),
            Note("with `tls_cert`"),
            "its private key, in PEM",
        ),
        KeyRecord::new(
            "key_prefix",
            Text("1 to 64 of `A-Z a-z 0-9 _ . - : /`"),
            Value("\"tidegate\""),
            "the prefix of every key in Redis; gateways with the same prefix share their limits",
        ),
        KeyRecord::new(
            "timeout",
            Duration(1, 1_000),
            Value("\"5ms\""),
            "the longest wait of a request for Redis; then `on_redis_down` decides",
        ),
        KeyRecord::new(
            "connect_timeout",
            Duration(1, 10_000),
            Value("\"50ms\""),
            "time to open a connection, with the first calls on it",
        ),
        KeyRecord::new(
            "region_share",
            Share(1, 1_000_000),
            Value("1.0"),
            "this region's part of every shared limit, if each region has its own Redis",
        ),
    ],
};

/// `[redis.sentinel]`.
pub(in crate::config) static SENTINEL: Keys = Keys {
    title: "[redis.sentinel]",
    keys: &[
        KeyRecord::new(
            "master",
            Text("text"),
            Note("required"),
            "the name of the master in the Sentinels",
        ),
        KeyRecord::new(
            "nodes",
            List("list", &TEXT),
            Value("[]"),
            "the Sentinels, asked in this order: URLs, or `\"HOST:PORT\"`; an empty list turns \
             Sentinel off",
        ),
    ],
};
