//! All metrics: name, type, unit, labels and meaning.
//!
//! The table below is authoritative. Tests compare `docs/metrics.md` with it, and both with the
//! output of `/metrics`. Label values come from the configuration and from closed lists, never from
//! a request.

use metrics::Unit;

/// One row of the metrics table.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name as shown, with unit and `_total`.
    pub name: &'static str,
    /// How the value moves.
    pub kind: MetricKind,
    /// The unit; [`Unit::Count`] if the name already says what is counted.
    pub unit: Unit,
    /// Label names, in the order in which handles take their values.
    pub labels: &'static [&'static str],
    /// The meaning, in one sentence.
    pub help: &'static str,
}

/// How a metric's value moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetricKind {
    /// Only increases.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// A distribution with these upper bounds.
    Histogram(&'static [f64]),
}

/// From a cached response on the same host to a half-minute export.
const EXCHANGE_SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
];
/// From a decision on a hot key to one that waited for a distant Redis or for CPU time.
const DECISION_SECONDS: &[f64] = &[
    2.5e-7, 5e-7, 1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3,
    1e-2, 2.5e-2, 5e-2, 0.1,
];
/// From a Redis on the same host to a call that times out.
const CALL_SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
];
/// From an immediate turn to the longest delay that a limit may configure.
const DELAY_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    300.0, 3600.0,
];
/// From a hundredth of the estimate to a hundred times it.
const COST_RATIOS: &[f64] = &[
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
];
/// From one second to one day.
const WAIT_SECONDS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21_600.0, 86_400.0,
];

macro_rules! table {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $kind:expr, $unit:ident, [$($label:literal),*], $help:literal;)*) => {
        $(
            $(#[$doc])*
            pub(super) const $id: Metric =
                Metric { name: $name, kind: $kind, unit: Unit::$unit, labels: &[$($label),*], help: $help };
        )*
        /// Every metric, in the order of the documentation.
        pub const ALL: &[Metric] = &[$($id),*];
    };
}

table! {
    REQUESTS = "tidegate_requests_total", MetricKind::Counter, Count, ["route", "code"],
        "Answered requests, by route and status code.";
    REQUEST_SECONDS = "tidegate_request_seconds", MetricKind::Histogram(EXCHANGE_SECONDS), Seconds, ["route"],
        "Time from the arrival of a request to the end of its response.";
    IN_FLIGHT = "tidegate_in_flight", MetricKind::Gauge, Count, ["route"],
        "Requests whose response is not complete.";
    UPGRADED_CONNECTIONS = "tidegate_upgraded_connections", MetricKind::Gauge, Count, ["route"],
        "Open WebSockets; each is also in flight.";
    ABANDONED = "tidegate_abandoned_requests", MetricKind::Gauge, Count, ["route"],
        "Requests whose client has left, but which hold slots because the server still works.";
    SHED = "tidegate_shed_total", MetricKind::Counter, Count, ["priority"],
        "Requests rejected by overload protection.";
    DECISIONS = "tidegate_decisions_total", MetricKind::Counter, Count, ["route", "limit", "outcome"],
        "Decisions, one for each limit that applies to a request.";
    DECISION_SECONDS_METRIC = "tidegate_decision_seconds", MetricKind::Histogram(DECISION_SECONDS), Seconds, [],
        "Time from the arrival of a request to its decision, sampled.";
    NEAR_LIMIT = "tidegate_near_limit_total", MetricKind::Counter, Count, ["limit"],
        "Requests that were admitted with little quota left, from warn_at on.";
    DELAYED = "tidegate_delayed_seconds", MetricKind::Histogram(DELAY_SECONDS), Seconds, ["limit"],
        "Time for which the limit held requests before it forwarded them.";
    RETRY_AFTER = "tidegate_retry_after_seconds", MetricKind::Histogram(WAIT_SECONDS), Seconds, ["limit"],
        "Wait announced to rejected clients.";
    KEYS = "tidegate_keys", MetricKind::Gauge, Count, ["limit"],
        "Buckets in memory.";
    KEY_EVICTIONS = "tidegate_key_evictions_total", MetricKind::Counter, Count, ["limit"],
        "Buckets evicted to make room for others.";
    KEY_OVERFLOWS = "tidegate_key_overflows_total", MetricKind::Counter, Count, ["limit"],
        "Decisions made in an overflow bucket, because the limit is full and a new key found no slot.";
    DOMINANT_KEYS = "tidegate_dominant_keys_total", MetricKind::Counter, Count, ["limit"],
        "Times that one key had more than 80 % of the limit's requests, in samples.";
    BODY_BUFFER = "tidegate_body_buffer_bytes", MetricKind::Gauge, Bytes, [],
        "Memory used by request bodies that are read before the decision.";
    BODY_BUFFER_REFUSED = "tidegate_body_buffer_refused_total", MetricKind::Counter, Count, [],
        "Requests rejected because their body found no room in max_body_buffer.";
    KILL_SWITCH = "tidegate_kill_switch", MetricKind::Gauge, Count, ["limit"],
        "1 while an operator keeps the limit from rejecting.";
    COST_UNITS = "tidegate_cost_units_total", MetricKind::Counter, Count, ["limit", "kind"],
        "Units of a limit on costs, by what happened to them.";
    COST_SETTLED = "tidegate_cost_settled_total", MetricKind::Counter, Count, ["limit", "source"],
        "Requests whose cost is known, by its source.";
    COST_IN_FLIGHT = "tidegate_cost_in_flight_units", MetricKind::Gauge, Count, ["limit"],
        "Units that requests in flight hold.";
    COST_RATIO = "tidegate_cost_ratio", MetricKind::Histogram(COST_RATIOS), Count, ["limit"],
        "Cost of a request divided by its estimate.";
    COST_MODEL_UNITS = "tidegate_cost_model_units_total", MetricKind::Counter, Count, ["limit", "model"],
        "Units used, by model of the price table.";
    COST_UNREAD = "tidegate_cost_unread_total", MetricKind::Counter, Count, ["limit", "why"],
        "Answers whose usage could not be read.";
    COST_CUT = "tidegate_cost_cut_total", MetricKind::Counter, Count, ["limit"],
        "Streams that were ended because their key had nothing left.";
    COST_OWED_KEYS = "tidegate_cost_owed_keys_total", MetricKind::Counter, Count, ["limit"],
        "Times that an answer has cost more than its key had left.";
    REDIS_CALLS = "tidegate_redis_calls_total", MetricKind::Counter, Count, ["outcome"],
        "Calls to Redis for shared limits.";
    REDIS_CALL_SECONDS = "tidegate_redis_call_seconds", MetricKind::Histogram(CALL_SECONDS), Seconds, [],
        "Time that Redis took to answer calls for shared limits.";
    REDIS_ERRORS = "tidegate_redis_errors_total", MetricKind::Counter, Count, ["kind"],
        "Calls and probes that failed.";
    REDIS_LOSSES = "tidegate_redis_losses_total", MetricKind::Counter, Count, ["kind"],
        "Losses of data in Redis that this gateway detected.";
    LEASE_GATEWAYS = "tidegate_lease_gateways", MetricKind::Gauge, Count, [],
        "Gateways that share limits, at the last heartbeat.";
    REDIS_BREAKER_OPEN = "tidegate_redis_breaker_open", MetricKind::Gauge, Count, [],
        "Redis servers with an open circuit breaker, because they do not answer.";
    REDIS_IN_FLIGHT_BOUND = "tidegate_redis_in_flight_bound", MetricKind::Gauge, Count, [],
        "Calls that a Redis server may have in flight: the smallest bound of all servers, 0 if none was slow.";
    DEGRADED = "tidegate_degraded", MetricKind::Gauge, Count, [],
        "1 while at least one shared limit uses its local fallback because Redis does not answer.";
    DEGRADED_DECISIONS = "tidegate_degraded_decisions_total", MetricKind::Counter, Count, ["limit", "behaviour"],
        "Decisions of shared limits without Redis.";
    DEGRADED_REJECTED = "tidegate_degraded_rejected_total", MetricKind::Counter, Count, ["limit", "behaviour"],
        "Rejections among the decisions of shared limits without Redis.";
    LEASE_CALLS = "tidegate_lease_calls_total", MetricKind::Counter, Count, ["limit"],
        "Calls to Redis for one shared limit.";
    LEASE_REFUSED = "tidegate_lease_refused_total", MetricKind::Counter, Count, ["limit", "by"],
        "Units that a shared limit rejected while Redis answers.";
    LEASE_WAIT_SECONDS = "tidegate_lease_wait_seconds", MetricKind::Histogram(CALL_SECONDS), Seconds, ["limit"],
        "Time that requests waited for Redis because the gateway had no token of the shared limit.";
    LEASE_SHORT_KEYS = "tidegate_lease_short_keys", MetricKind::Gauge, Count, ["limit"],
        "Keys of a shared limit with so little quota left that requests take turns to ask Redis.";
    LEASE_DISAGREEMENT = "tidegate_lease_disagreement", MetricKind::Gauge, Count, ["limit"],
        "1 while gateways with another configuration of a shared limit count the same keys.";
    LEASE_KEYS = "tidegate_lease_keys", MetricKind::Gauge, Count, ["limit"],
        "Keys of a shared limit for which this gateway stores tokens or rejections.";
    LEASE_TOKENS = "tidegate_lease_tokens", MetricKind::Gauge, Count, ["limit", "state"],
        "Tokens of a shared limit that this gateway has borrowed ahead.";
    LEASE_MOVED = "tidegate_lease_moved_total", MetricKind::Counter, Count, ["limit", "how"],
        "Tokens of a shared limit that moved between this gateway and Redis.";
    UPSTREAM_SECONDS = "tidegate_upstream_seconds", MetricKind::Histogram(EXCHANGE_SECONDS), Seconds, ["upstream"],
        "Time from sending a request to an upstream to the head of its response.";
    UPSTREAM_ERRORS = "tidegate_upstream_errors_total", MetricKind::Counter, Count, ["upstream", "kind"],
        "Failed exchanges with an upstream.";
    UPSTREAM_RETRIES = "tidegate_upstream_retries_total", MetricKind::Counter, Count, ["upstream", "outcome"],
        "Requests that failed at one server and could be sent to another.";
    UPSTREAM_HEALTHY = "tidegate_upstream_healthy", MetricKind::Gauge, Count, ["upstream", "server"],
        "1 while a server is in service, 0 while its health checks fail or it is ejected.";
    CONNECTIONS = "tidegate_connections", MetricKind::Gauge, Count, ["listener"],
        "Open client connections.";
    ACCEPT_ERRORS = "tidegate_accept_errors_total", MetricKind::Counter, Count, ["listener", "kind"],
        "Connections that could not be accepted.";
    CONNECTIONS_CUT = "tidegate_connections_cut_total", MetricKind::Counter, Count, ["listener", "kind"],
        "Connections closed because of their clients' behaviour.";
    TLS_HANDSHAKES = "tidegate_tls_handshakes_total", MetricKind::Counter, Count, ["outcome"],
        "TLS handshakes with clients, by result.";
    CERTIFICATE_EXPIRY = "tidegate_certificate_expiry_timestamp_seconds", MetricKind::Gauge, Seconds, ["name"],
        "Expiry of the first certificate of a file to expire, in seconds since 1970.";
    IDENTITY_REJECTED = "tidegate_identity_rejected_total", MetricKind::Counter, Count, ["source", "kind"],
        "Rejected identities, by source and kind.";
    JWKS_FETCHES = "tidegate_jwks_fetches_total", MetricKind::Counter, Count, ["url", "outcome"],
        "Fetches of a published key set.";
    JWKS_KEYS = "tidegate_jwks_keys", MetricKind::Gauge, Count, ["url"],
        "Keys in use of a published key set; 0 while all its tokens are rejected.";
    JWKS_TIMESTAMP = "tidegate_jwks_timestamp_seconds", MetricKind::Gauge, Seconds, ["url"],
        "Time of the last fetch of a published key set, in seconds since 1970; 0 for never.";
    LOG_LINES_DROPPED = "tidegate_log_lines_dropped_total", MetricKind::Counter, Count, [],
        "Log and access lines that were lost because the output was too slow.";
    LOG_LINES_LEFT_OUT = "tidegate_log_lines_left_out_total", MetricKind::Counter, Count, [],
        "Rejections without an access line, because that second had too many.";
    TRACE_SPANS = "tidegate_trace_spans_total", MetricKind::Counter, Count, ["outcome"],
        "Spans for the trace collector, by outcome.";
    PANICS = "tidegate_panics_total", MetricKind::Counter, Count, [],
        "Bugs that ended a task.";
    CONFIG_INFO = "tidegate_config_info", MetricKind::Gauge, Count, ["hash"],
        "1 for the running configuration.";
    CONFIG_RELOAD_SUCCESS = "tidegate_config_reload_success", MetricKind::Gauge, Count, [],
        "1 if the last configuration that was read is the running one.";
    CONFIG_RELOAD_TIMESTAMP = "tidegate_config_reload_timestamp_seconds", MetricKind::Gauge, Seconds, [],
        "Time when the running configuration was loaded, in seconds since 1970.";
    BUILD_INFO = "tidegate_build_info", MetricKind::Gauge, Count, ["version", "commit"],
        "1 for the running version.";
}
