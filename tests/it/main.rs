//! User-visible behavior, one module per subject, tested against the real binary.
#![expect(
    unreachable_pub,
    reason = "`pub` in support/ marks the language of the tests"
)]

mod abandoned;
mod admin_listener;
mod answers;
mod body_keys;
mod budget;
mod cli;
mod config;
mod corpora;
mod cost;
mod credential_headers;
mod dashboard;
mod decisions_agree;
mod explain;
mod forward_auth;
mod grpc;
mod harness;
mod http1_vectors;
mod http2_abuse;
mod http2_uploads;
mod http2_vectors;
mod identity_vectors;
mod judge;
mod jwt_vectors;
mod late_data;
mod lifecycle;
mod limiter_memory;
mod limiter_vectors;
mod limit_modes;
mod limits;
mod lines;
mod load_tests;
mod memory;
mod metric_names;
mod overload;
mod own_quotas;
mod operate;
mod path_vectors;
mod proxy;
mod proxy_protocol;
mod reload;
mod response_fields;
mod restart;
mod schema;
mod secrets;
mod smuggling;
mod spoofing;
mod support;
mod suspicion;
mod tidy;
mod tls;
mod tokens;
mod traces;
mod upstream_vectors;
mod upstreams;
