//! `[limit.NAME]`, `[limit.NAME.exempt]` and `[[override]]`.

use super::{
    cost::COST_OR_PRESET,
    record::{
        DefaultValue::{Note, Required, Value},
        HOUR, KeyRecord, Keys, TEXT,
        ValueKind::{
            Boolean, ByTier, Choice, Date, Duration, Integer, List, Rate, Share, Table, Text,
        },
    },
};
use crate::limit::{Algorithm, quota::MAX_SLOTS};

/// The largest bucket: the largest structured-field integer (RFC 9651 §3.3.1).
pub(in crate::config) const MAX_BURST: u64 = 999_999_999_999_999;

/// `[limit.NAME]`.
pub(in crate::config) static LIMIT: Keys = Keys {
    title: "[limit.NAME]",
    keys: &[
        KeyRecord::new(
            "key",
            List("list of [parts](#parts-of-a-key)", &TEXT),
            Required,
            "requests with equal parts share a bucket; `[]` is one bucket for all requests",
        ),
        KeyRecord::new(
            "algorithm",
            Choice(&Algorithm::NAMES),
            Value("\"token_bucket\""),
            "how tidegate counts requests",
        )
        .said("[one of seven](#algorithms)"),
        KeyRecord::new(
            "rate",
            ByTier(&Rate),
            Note("required"),
            "how fast a bucket refills, or the requests that a window admits. A table needs \
             `default`",
        ),
        KeyRecord::new(
            "burst",
            ByTier(&Integer(1, MAX_BURST)),
            Note("[see below](#burst)"),
            "the capacity of a bucket",
        ),
        KeyRecord::new(
            "limit",
            ByTier(&Integer(1, MAX_SLOTS)),
            Note("required"),
            "for `concurrency`, instead of a rate: requests in flight at once",
        ),
        KeyRecord::new(
            "over",
            Choice(&["reject", "delay"]),
            Value("\"reject\""),
            "answer 429, or hold the request until its turn",
        ),
        KeyRecord::new(
            "max_delay",
            Duration(1, HOUR),
            Note("required to delay"),
            "a request with a longer delay gets 429 at once",
        ),
        KeyRecord::new(
            "mode",
            Choice(&["enforce", "shadow", "tag", "off"]),
            Value("\"enforce\""),
            "`enforce` acts; `shadow` only counts, logs and measures; `tag` admits, and tells \
             the upstream with `X-RateLimit-Over: NAME`; `off` does nothing",
        ),
        KeyRecord::new(
            "enforce_percent",
            Integer(0, 100),
            Value("100"),
            "the percentage of keys on which it acts, always the same keys; the others are in \
             shadow mode",
        ),
        KeyRecord::new(
            "missing",
            Choice(&["skip", "shared", "reject"]),
            Value("\"skip\""),
            "for a request without a part of the key: the limit does not apply; all such \
             requests share one bucket; or 400",
        ),
        KeyRecord::new(
            "charge_rejected",
            Boolean,
            Value("false"),
            "as a penalty, the limit also charges requests that it or another limit rejects",
        ),
        KeyRecord::new(
            "count_status",
            // from 200 up: an interim response never ends a request
            List("list of 200 to 599", &Integer(200, 599)),
            Value("[]"),
            "charge only responses with these statuses, also the gateway's, when the status is \
             known. Concurrent requests are all admitted before the first is charged. Add a \
             `concurrency` limit to bound their number",
        ),
        KeyRecord::new(
            "exempt",
            Table(&EXEMPT),
            Note("none"),
            "exempts clients from the limit, [see below](#limitnameexempt)",
        ),
        KeyRecord::new(
            "warn_at",
            Share(0, 1_000_000),
            Note("never"),
            "adds `X-RateLimit-Warning: NAME` when this share of the limit is used",
        ),
        KeyRecord::new(
            "slow_at",
            Share(0, 1_000_000),
            Note("never"),
            "delays each request when this share of the limit is used",
        ),
        KeyRecord::new(
            "slow_by",
            Duration(1, HOUR),
            Note("with `slow_at`"),
            "the delay of `slow_at`",
        ),
        KeyRecord::new(
            "retry_jitter",
            Share(0, 1_000_000),
            Value("0"),
            "adds a random share, up to this one, to `Retry-After`, so that rejected clients do \
             not all return together",
        ),
        KeyRecord::new(
            "disclose",
            Boolean,
            Value("true"),
            "`false`: clients see only `Retry-After`, not the quota or its remainder. So a \
             login limit is no oracle",
        ),
        KeyRecord::new(
            "scope",
            Choice(&["local", "global"]),
            Value("\"local\""),
            "counters in this process, or [shared by all \
             gateways](#limits-that-gateways-share). Without `[redis]` every limit is local",
        ),
        KeyRecord::new(
            "sync",
            Choice(&["lease", "strict"]),
            Value("\"lease\""),
            "how exactly gateways share it: with tokens borrowed ahead, or with a call to Redis \
             for every request. A `sliding_log` is always strict",
        ),
        KeyRecord::new(
            "slack",
            Share(0, 100_000),
            Value("0"),
            "the share by which gateways together may exceed the limit, so that new or quiet \
             keys [need no call](#slack); 0 turns it off",
        ),
        KeyRecord::new(
            "on_redis_down",
            Choice(&["local", "open", "closed"]),
            Value("\"local\""),
            "if Redis does not answer: use a part of the limit locally, admit everything, or \
             answer 503",
        ),
        KeyRecord::new(
            "local_fraction",
            Share(1, 1_000_000),
            Value("0.5"),
            "the part of the limit that all gateways together use locally",
        ),
        KeyRecord::new(
            "cost",
            COST_OR_PRESET,
            Note("none"),
            "charges [the cost of each request](#limitnamecost) instead of one unit",
        )
        .said("[preset](costs.md#presets), or a table"),
    ],
};

/// `[limit.NAME.exempt]`.
pub(in crate::config) static EXEMPT: Keys = Keys {
    title: "[limit.NAME.exempt]",
    keys: &[
        KeyRecord::new(
            "ips",
            List("list of networks", &TEXT),
            Value("[]"),
            "client addresses, before the prefix applies",
        ),
        KeyRecord::new("users", List("list", &TEXT), Value("[]"), "users"),
        KeyRecord::new("tiers", List("list of names", &TEXT), Value("[]"), "tiers"),
    ],
};

/// `[[override]]`.
pub(in crate::config) static OVERRIDE: Keys = Keys {
    title: "[[override]]",
    keys: &[
        KeyRecord::new("limit", Text("name"), Required, "the limit"),
        KeyRecord::new(
            "user",
            Text("text"),
            Note("one of these four"),
            "for this user; the limit's key has `user` or `user_or_ip`",
        ),
        KeyRecord::new(
            "tenant",
            Text("text"),
            Note(""),
            "for this tenant; the limit's key has `tenant`",
        ),
        KeyRecord::new(
            "ip",
            Text("network"),
            Note(""),
            "for clients in this network; the limit's key has `ip` or `user_or_ip`",
        ),
        KeyRecord::new(
            "key",
            Text("text"),
            Note(""),
            "for this key, as log lines show it: `\"user=acme, route=export\"`, or `\"all\"` if \
             the limit's key is empty. Not available for keys that are logged as a hash",
        ),
        KeyRecord::new(
            "rate",
            Rate,
            Note("one of these three"),
            "another rate; not for `concurrency`",
        ),
        KeyRecord::new(
            "exempt",
            Boolean,
            Note(""),
            "`true`: the limit does not apply",
        ),
        KeyRecord::new(
            "block",
            Boolean,
            Note(""),
            "`true`: the limit rejects every request",
        ),
        KeyRecord::new(
            "burst",
            Integer(1, MAX_BURST),
            Note("as [without `burst`](#burst), or the limit's default burst if that is more"),
            "with `rate`, if the algorithm has a burst",
        ),
        KeyRecord::new(
            "until",
            Date,
            Note("for ever"),
            "`2027-01-31` is its first moment in UTC; a time of day needs its zone: \
             `2027-01-31T18:00:00+01:00`",
        ),
        KeyRecord::new("note", Text("text"), Note("none"), "the reason, for people"),
    ],
};
