//! `[gateway]`, `[[route]]` and `[response]`.

use super::record::{
    DefaultValue::{Note, Required, Value},
    KeyRecord, Keys, TEXT,
    ValueKind::{Boolean, Choice, Integer, List, Size, Text},
};

/// `[gateway]`.
pub(in crate::config) static GATEWAY: Keys = Keys {
    title: "[gateway]",
    keys: &[KeyRecord::new(
        "limits",
        List("list of names", &TEXT),
        Value("[]"),
        "limits that apply to every request, before those of its route",
    )],
};

/// `[[route]]`.
pub(in crate::config) static ROUTE: Keys = Keys {
    title: "[[route]]",
    keys: &[
        KeyRecord::new(
            "name",
            Text("name"),
            Required,
            "the name in logs and metrics",
        ),
        KeyRecord::new(
            "hosts",
            List("list", &TEXT),
            Note("any"),
            "exact, or `\"*.example.com\"`",
        ),
        KeyRecord::new(
            "path",
            Text("text"),
            Required,
            "`\"/exact\"`, `\"/users/{id}\"`, `\"/files/{*rest}\"`, matched on the [normalised \
             path](#paths)",
        ),
        KeyRecord::new(
            "methods",
            List("list", &TEXT),
            Note("any"),
            "`\"GET\"`, `\"POST\"`",
        ),
        KeyRecord::new(
            "upstream",
            Text("name"),
            Required,
            "the upstream of its requests",
        ),
        KeyRecord::new(
            "limits",
            List("list of names", &TEXT),
            Value("[]"),
            "limits that apply in addition to those of `[gateway]`",
        ),
        KeyRecord::new(
            "skip_limits",
            List("list of names", &TEXT),
            Value("[]"),
            "limits of `[gateway]` that do not apply to its requests",
        ),
        KeyRecord::new(
            "cost",
            Integer(1, 1_000_000_000),
            Value("1"),
            "units that a request charges to each limit; at most its burst, its window's count \
             or its `limit`",
        ),
        KeyRecord::new(
            "max_body_size",
            Size(0, u64::MAX),
            Note("the listener's"),
            "size of a request body (413). For gRPC it bounds [each message](protocols.md#grpc)",
        ),
        KeyRecord::new(
            "priority",
            Choice(&["critical", "normal", "low"]),
            Value("\"normal\""),
            "priority under [overload](#overload); low requests are shed first",
        ),
    ],
};

/// `[response]`.
pub(in crate::config) static RESPONSE: Keys = Keys {
    title: "[response]",
    keys: &[
        KeyRecord::new(
            "fields",
            List(
                "list",
                &Choice(&[
                    "ratelimit",
                    "ratelimit_triple",
                    "x_ratelimit",
                    "openai",
                    "anthropic",
                ]),
            ),
            Value("[\"ratelimit\", \"x_ratelimit\"]"),
            "`ratelimit`: RateLimit and RateLimit-Policy; `ratelimit_triple`: RateLimit-Limit, \
             -Remaining, -Reset; `x_ratelimit`: the same as X-RateLimit-*, with reset in epoch \
             seconds. The first two exclude each other. `openai` and `anthropic`: the [fields of \
             these providers](costs.md#clients), also without a limit that has their preset",
        ),
        KeyRecord::new(
            "sdk",
            Boolean,
            Value("true"),
            "limits with a [preset](costs.md#presets) send the fields and the 429 body that the \
             provider's SDK reads",
        ),
        KeyRecord::new(
            "on",
            Choice(&["always", "rejected"]),
            Value("\"always\""),
            "the responses with these fields",
        ),
        KeyRecord::new(
            "body",
            Choice(&["problem_json", "json", "text"]),
            Value("\"problem_json\""),
            "the format of the gateway's responses; gRPC calls get a [gRPC \
             status](protocols.md#grpc)",
        ),
        KeyRecord::new(
            "status_path",
            Text("path, or `\"\"` for none"),
            Value("\"/.well-known/ratelimit\""),
            "`GET` shows callers [their own quotas](#the-callers-own-quotas)",
        ),
    ],
};
