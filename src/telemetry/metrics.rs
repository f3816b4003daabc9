//! All metrics: name, type, unit, labels and meaning.
//!
//! The table below is authoritative. Tests compare `docs/metrics.md` with it, and both with the
//! output of `/metrics`. Each [`Metrics`] has its own registry, so several gateways can share one
//! process. Handles are resolved when a configuration is compiled (see
//! [`handles`](super::handles)). On the request path, a counter costs one atomic addition and a
//! histogram (`histogram.rs`) two.
//!
//! Label values come from the configuration and from closed lists, never from a request.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

pub use super::handles::{
    BudgetMetrics, DecisionMetrics, GaugeGuard, HandshakeMetrics, IdentityMetrics, IssuerMetrics,
    LeaseMetrics, LimitMetrics, ListenerMetrics, RouteMetrics, SpanMetrics, UpstreamMetrics,
};
use super::{histogram::Histograms, process};

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

/// The registry and its data. Clones share it.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<SharedMetrics>,
}

struct SharedMetrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    histograms: Histograms,
    running_config: Mutex<Option<Gauge>>,
    refreshers: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl Metrics {
    /// Creates a registry that describes every metric. Metrics without a configured label are
    /// present at zero.
    pub fn install() -> Metrics {
        let builder = PrometheusBuilder::new().with_recommended_naming(true);
        let recorder = builder.build_recorder();
        for metric in ALL {
            let (name, unit, help) = (metric.name.into(), Some(metric.unit), metric.help.into());
            match metric.kind {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram(_) => {}
            }
        }
        let handle = recorder.handle();
        let shared = SharedMetrics {
            recorder,
            handle,
            histograms: Histograms::default(),
            running_config: Mutex::default(),
            refreshers: Mutex::default(),
        };
        let metrics = Metrics {
            shared: Arc::new(shared),
        };
        metrics
            .gauge(&BUILD_INFO, &[env!("CARGO_PKG_VERSION"), COMMIT])
            .set(1.0);
        metrics.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(0.0);
        metrics.gauge(&CONFIG_RELOAD_TIMESTAMP, &[]).set(0.0);
        metrics.panics().increment(0);
        metrics.log_lines_dropped().increment(0);
        metrics.log_lines_left_out().increment(0);
        metrics.body_buffers(0, 0);
        for priority in ["critical", "normal", "low"] {
            metrics.shed(priority).increment(0);
        }
        let _ = metrics.spans();
        let _ = metrics.decision_seconds();
        let _ = metrics.handshakes();
        let _ = metrics.budget(&[], &[]);
        metrics
    }

    /// Whether both share one registry.
    pub(super) fn is(&self, other: &Metrics) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Time that the gateway itself spends on a request. Reading the clock twice costs more than a
    /// decision, so sample it.
    pub fn decision_seconds(&self) -> Histogram {
        self.histogram(&DECISION_SECONDS_METRIC, &[])
    }

    /// Panics; for the panic hook.
    pub fn panics(&self) -> Counter {
        self.counter(&PANICS, &[])
    }

    /// Dropped access lines; for the access log.
    pub fn log_lines_dropped(&self) -> Counter {
        self.counter(&LOG_LINES_DROPPED, &[])
    }

    /// Rejections without a line; for the access log.
    pub fn log_lines_left_out(&self) -> Counter {
        self.counter(&LOG_LINES_LEFT_OUT, &[])
    }

    /// Records that the configuration with this hash runs since `at`.
    pub fn config_loaded(&self, hash: &str, at: SystemTime) {
        let mut running = lock(&self.shared.running_config);
        if let Some(previous) = running.take() {
            previous.set(0.0);
        }
        let info = self.gauge(&CONFIG_INFO, &[hash]);
        info.set(1.0);
        *running = Some(info);
        self.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(1.0);
        let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.gauge(&CONFIG_RELOAD_TIMESTAMP, &[])
            .set(since.as_secs_f64());
    }

    /// Records that an invalid configuration was read and the previous one still runs.
    pub fn config_refused(&self) {
        self.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(0.0);
    }

    /// Calls `refresh` before each [`render`](Self::render), for values that are pulled (keys
    /// held).
    ///
    /// `refresh` must not call `on_render` or `render`.
    pub fn on_render(&self, refresh: impl Fn() + Send + 'static) {
        lock(&self.shared.refreshers).push(Box::new(refresh));
    }

    /// The Prometheus text format, version 0.0.4, sorted by name. Costs a sort of all series.
    pub fn render(&self) -> String {
        for refresh in lock(&self.shared.refreshers).iter() {
            refresh();
        }
        let mut text = self.shared.handle.render();
        self.shared.histograms.render(&mut text);
        process::render(&mut text);
        in_order(&text)
    }

    pub(super) fn counter(&self, metric: &Metric, labels: &[&str]) -> Counter {
        self.shared
            .recorder
            .register_counter(&key(metric, labels), &METADATA)
    }

    pub(super) fn gauge(&self, metric: &Metric, labels: &[&str]) -> Gauge {
        self.shared
            .recorder
            .register_gauge(&key(metric, labels), &METADATA)
    }

    pub(super) fn histogram(&self, metric: &Metric, labels: &[&str]) -> Histogram {
        self.shared.histograms.handle(metric, labels)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Sorts metrics by name and series by label. Histogram buckets keep their order.
fn in_order(text: &str) -> String {
    let mut families: Vec<Vec<&str>> = Vec::new();
    // series cannot be removed: each earlier configuration stays at 0, one per reload
    let is_past = |line: &str| line.starts_with(CONFIG_INFO.name) && line.ends_with(" 0");
    let lines = text.lines().filter(|line| !line.is_empty());
    for line in lines.filter(|line| !is_past(line)) {
        match families.last_mut() {
            Some(family) if !line.starts_with("# HELP ") => family.push(line),
            _ => families.push(vec![line]),
        }
    }
    families.sort();
    let mut ordered = String::with_capacity(text.len());
    for mut family in families {
        let is_histogram =
            |line: &&str| line.starts_with("# TYPE ") && line.ends_with(" histogram");
        if !family.iter().any(is_histogram) {
            family.sort_by_key(|line| (!line.starts_with('#')).then_some(*line));
        }
        for line in family {
            ordered.push_str(line);
            ordered.push('\n');
        }
        ordered.push('\n');
    }
    ordered
}

static METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

/// Set by the release build.
const COMMIT: &str = match option_env!("TIDEGATE_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

fn key(metric: &Metric, labels: &[&str]) -> Key {
    debug_assert_eq!(metric.labels.len(), labels.len(), "{}", metric.name);
    let labels: Vec<Label> = metric
        .labels
        .iter()
        .zip(labels)
        .map(|(name, value)| Label::new(*name, (*value).to_owned()))
        .collect();
    Key::from_parts(metric.name, labels)
}

/// The guarded data is consistent between statements, so a panic elsewhere does not damage it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
