//! The tables of a configuration file.

use super::{
    identity::{CLIENT_IP, USER_API_KEY, USER_CLIENT_CERT, USER_HEADER, USER_JWT},
    limit::{LIMIT, OVERRIDE},
    listen::LISTEN,
    prices::PRICES,
    process::{ADMIN, LOG, OVERLOAD, SERVER, TRACE},
    record::{
        DefaultValue::{Note, Required},
        KeyRecord, Keys,
        ValueKind::{Named, Table, Tables},
    },
    redis::REDIS,
    route::{GATEWAY, RESPONSE, ROUTE},
    upstream::UPSTREAM,
};

const NONE: super::record::DefaultValue = Note("none");

/// The tables of a configuration file.
pub(in crate::config) static FILE: Keys = Keys {
    title: "the file",
    keys: &[
        KeyRecord::new("server", Table(&SERVER), NONE, "the bounds of the process"),
        KeyRecord::new(
            "listen",
            Tables(&[&LISTEN]),
            NONE,
            "a listener for requests",
        ),
        KeyRecord::new(
            "client_ip",
            Table(&CLIENT_IP),
            NONE,
            "how tidegate finds the client address",
        ),
        KeyRecord::new(
            "user",
            Tables(&[&USER_API_KEY, &USER_JWT, &USER_HEADER, &USER_CLIENT_CERT]),
            NONE,
            "a credential that identifies users",
        ),
        KeyRecord::new(
            "upstream",
            Named(&UPSTREAM),
            Required,
            "a group of servers for requests",
        ),
        KeyRecord::new(
            "limit",
            Named(&LIMIT),
            NONE,
            "a limit that counts requests by a key",
        ),
        KeyRecord::new(
            "prices",
            PRICES,
            NONE,
            "the prices of models, for limits in money",
        ),
        KeyRecord::new(
            "gateway",
            Table(&GATEWAY),
            NONE,
            "what applies to all routes",
        ),
        KeyRecord::new(
            "route",
            Tables(&[&ROUTE]),
            Required,
            "a route connects requests with an upstream and with limits",
        ),
        KeyRecord::new(
            "override",
            Tables(&[&OVERRIDE]),
            NONE,
            "an exception to a limit, for one user, tenant, network or key",
        ),
        KeyRecord::new(
            "response",
            Table(&RESPONSE),
            NONE,
            "the fields and the format of responses",
        ),
        KeyRecord::new(
            "overload",
            Table(&OVERLOAD),
            NONE,
            "bounds the requests in flight",
        ),
        KeyRecord::new(
            "redis",
            Table(&REDIS),
            NONE,
            "the Redis for shared limits and runtime overrides",
        ),
        KeyRecord::new(
            "admin",
            Table(&ADMIN),
            NONE,
            "the listener for operators, monitoring and other proxies",
        ),
        KeyRecord::new("log", Table(&LOG), NONE, "the log and the access lines"),
        KeyRecord::new("trace", Table(&TRACE), NONE, "OpenTelemetry spans"),
    ],
};
