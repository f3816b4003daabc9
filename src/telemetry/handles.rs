//! Metric handles, resolved when a configuration is compiled.

use std::{
    io,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use metrics::{Counter, Gauge, Histogram};

use super::{metric_table as table, metrics::Metrics};

impl Metrics {
    /// The handles of one route. The caller chooses a name for requests that match no route.
    pub fn route(&self, route: &str) -> RouteMetrics {
        RouteMetrics {
            common: COMMON_CODES.map(|code| {
                self.counter(&table::REQUESTS, &[route, itoa::Buffer::new().format(code)])
            }),
            rare: OnceLock::new(),
            request_seconds: self.histogram(&table::REQUEST_SECONDS, &[route]),
            in_flight: self.gauge(&table::IN_FLIGHT, &[route]),
            tunnels: self.gauge(&table::UPGRADED_CONNECTIONS, &[route]),
            abandoned: self.gauge(&table::ABANDONED, &[route]),
            metrics: self.clone(),
            route: route.into(),
        }
    }

    /// The handles of one limit on one route.
    pub fn decisions(&self, route: &str, limit: &str) -> DecisionMetrics {
        let counter = |outcome| self.counter(&table::DECISIONS, &[route, limit, outcome]);
        DecisionMetrics {
            admitted: counter("admitted"),
            rejected: counter("rejected"),
            delayed: counter("delayed"),
            shadow_rejected: counter("shadow_rejected"),
            tagged: counter("tagged"),
            exempt: counter("exempt"),
        }
    }

    /// Counts shed requests of one priority.
    pub fn shed(&self, priority: &str) -> Counter {
        self.counter(&table::SHED, &[priority])
    }

    /// Sets the memory used by buffered bodies, and the number of bodies that found no room.
    pub fn body_buffers(&self, used_bytes: usize, refused: u64) {
        self.gauge(&table::BODY_BUFFER, &[]).set(used_bytes as f64);
        self.counter(&table::BODY_BUFFER_REFUSED, &[])
            .absolute(refused);
    }

    /// The handles of one limit.
    pub fn limit(&self, limit: &str) -> LimitMetrics {
        LimitMetrics {
            retry_after_seconds: self.histogram(&table::RETRY_AFTER, &[limit]),
            near_limit: self.counter(&table::NEAR_LIMIT, &[limit]),
            delayed_seconds: self.histogram(&table::DELAYED, &[limit]),
            keys: self.gauge(&table::KEYS, &[limit]),
            key_evictions: self.counter(&table::KEY_EVICTIONS, &[limit]),
            key_overflows: self.counter(&table::KEY_OVERFLOWS, &[limit]),
            dominant_keys: self.counter(&table::DOMINANT_KEYS, &[limit]),
            kill_switch: self.gauge(&table::KILL_SWITCH, &[limit]),
        }
    }

    /// The handles for shared limits. Errors are counted by `kinds`, data losses by `losses`.
    pub fn budget(&self, kinds: &[&'static str], losses: &[&'static str]) -> BudgetMetrics {
        let calls = |outcome| self.counter(&table::REDIS_CALLS, &[outcome]);
        let kind = |&kind| (kind, self.counter(&table::REDIS_ERRORS, &[kind]));
        let loss = |&kind| (kind, self.counter(&table::REDIS_LOSSES, &[kind]));
        BudgetMetrics {
            ok: calls("ok"),
            late: calls("late"),
            errors: calls("error"),
            seconds: self.histogram(&table::REDIS_CALL_SECONDS, &[]),
            by_kind: kinds.iter().map(kind).collect(),
            losses: losses.iter().map(loss).collect(),
            gateways: self.gauge(&table::LEASE_GATEWAYS, &[]),
            breaker_open: self.gauge(&table::REDIS_BREAKER_OPEN, &[]),
            bound: self.gauge(&table::REDIS_IN_FLIGHT_BOUND, &[]),
            degraded: self.gauge(&table::DEGRADED, &[]),
        }
    }

    /// The handles of one shared limit; `behaviour` is its `on_redis_down`.
    pub fn lease(&self, limit: &str, behaviour: &str) -> LeaseMetrics {
        LeaseMetrics {
            keys: self.gauge(&table::LEASE_KEYS, &[limit]),
            in_hand: self.gauge(&table::LEASE_TOKENS, &[limit, "in_hand"]),
            granted: self.counter(&table::LEASE_MOVED, &[limit, "granted"]),
            granted_ahead: self.counter(&table::LEASE_MOVED, &[limit, "granted_ahead"]),
            returned: self.counter(&table::LEASE_MOVED, &[limit, "returned"]),
            lapsed: self.counter(&table::LEASE_MOVED, &[limit, "lapsed"]),
            debt: self.counter(&table::LEASE_MOVED, &[limit, "debt"]),
            slack: self.counter(&table::LEASE_MOVED, &[limit, "slack"]),
            calls: self.counter(&table::LEASE_CALLS, &[limit]),
            refused_by_memory: self.counter(&table::LEASE_REFUSED, &[limit, "memory"]),
            refused_by_redis: self.counter(&table::LEASE_REFUSED, &[limit, "redis"]),
            waited: self.histogram(&table::LEASE_WAIT_SECONDS, &[limit]),
            short_keys: self.gauge(&table::LEASE_SHORT_KEYS, &[limit]),
            disagreement: self.gauge(&table::LEASE_DISAGREEMENT, &[limit]),
            degraded: self.counter(&table::DEGRADED_DECISIONS, &[limit, behaviour]),
            degraded_rejected: self.counter(&table::DEGRADED_REJECTED, &[limit, behaviour]),
        }
    }

    /// The handles of an upstream and its servers.
    pub fn upstream(&self, upstream: &str, servers: &[String]) -> UpstreamMetrics {
        let error = |kind| self.counter(&table::UPSTREAM_ERRORS, &[upstream, kind]);
        let retry = |outcome| self.counter(&table::UPSTREAM_RETRIES, &[upstream, outcome]);
        UpstreamMetrics {
            seconds: self.histogram(&table::UPSTREAM_SECONDS, &[upstream]),
            connect_errors: error("connect"),
            tls_errors: error("tls"),
            busy_errors: error("busy"),
            closed_errors: error("closed"),
            timeout_errors: error("timeout"),
            refused_errors: error("refused"),
            protocol_errors: error("protocol"),
            body_errors: error("body"),
            breaker_errors: error("breaker"),
            retries: retry("sent"),
            retries_denied: retry("over_budget"),
            healthy: servers
                .iter()
                .map(|server| self.gauge(&table::UPSTREAM_HEALTHY, &[upstream, server]))
                .collect(),
        }
    }

    /// The handles of a listener. `listener` is its address as configured; `cuts` are the reasons
    /// for closing a connection.
    pub fn listener(&self, listener: &str, cuts: &[&'static str]) -> ListenerMetrics {
        let cut = |&kind| {
            (
                kind,
                self.counter(&table::CONNECTIONS_CUT, &[listener, kind]),
            )
        };
        let error = |kind| self.counter(&table::ACCEPT_ERRORS, &[listener, kind]);
        ListenerMetrics {
            connections: self.gauge(&table::CONNECTIONS, &[listener]),
            no_descriptors: error("no_descriptors"),
            no_memory: error("no_memory"),
            aborted: error("aborted"),
            other: error("other"),
            cut: cuts.iter().map(cut).collect(),
        }
    }

    /// The handles of TLS handshakes.
    pub fn handshakes(&self) -> HandshakeMetrics {
        let outcome = |outcome| {
            let counter = self.counter(&table::TLS_HANDSHAKES, &[outcome]);
            counter.increment(0);
            counter
        };
        HandshakeMetrics {
            full: outcome("full"),
            resumed: outcome("resumed"),
            certificate: outcome("certificate"),
            refused: outcome("refused"),
            failed: outcome("failed"),
            closed: outcome("closed"),
            timeout: outcome("timeout"),
            shed: outcome("shed"),
        }
    }

    /// The handles for exported spans.
    pub fn spans(&self) -> SpanMetrics {
        let outcome = |outcome| {
            let counter = self.counter(&table::TRACE_SPANS, &[outcome]);
            counter.increment(0);
            counter
        };
        SpanMetrics {
            sent: outcome("sent"),
            failed: outcome("failed"),
            dropped: outcome("dropped"),
        }
    }

    /// Sets the expiry of a file's certificates. `name` is the file as configured.
    pub fn certificate_expires(&self, name: &str, at: SystemTime) {
        let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.gauge(&table::CERTIFICATE_EXPIRY, &[name])
            .set(since.as_secs_f64());
    }

    /// The handles of one kind of `[[user]]` source.
    pub fn identity(&self, source: &str, kinds: &[&'static str]) -> IdentityMetrics {
        let counter = |&kind| {
            (
                kind,
                self.counter(&table::IDENTITY_REJECTED, &[source, kind]),
            )
        };
        IdentityMetrics {
            by_kind: kinds.iter().map(counter).collect(),
        }
    }

    /// The handles of one published key set. `url` must not contain secrets.
    pub fn issuer(&self, url: &str) -> IssuerMetrics {
        let outcomes = [
            "success", "connect", "tls", "timeout", "status", "protocol", "keys",
        ];
        let counter = |outcome| (outcome, self.counter(&table::JWKS_FETCHES, &[url, outcome]));
        let (keys, timestamp) = (
            self.gauge(&table::JWKS_KEYS, &[url]),
            self.gauge(&table::JWKS_TIMESTAMP, &[url]),
        );
        keys.set(0.0);
        timestamp.set(0.0);
        IssuerMetrics {
            by_outcome: outcomes.map(counter).into(),
            keys,
            timestamp,
        }
    }
}

/// Counts spans by result.
#[derive(Clone, Debug)]
pub struct SpanMetrics {
    /// The collector accepted them.
    pub sent: Counter,
    /// The collector rejected them or could not be reached.
    pub failed: Counter,
    /// The queue was full.
    pub dropped: Counter,
}

/// Metrics of one published key set.
#[derive(Debug)]
pub struct IssuerMetrics {
    by_outcome: Vec<(&'static str, Counter)>,
    keys: Gauge,
    timestamp: Gauge,
}

impl IssuerMetrics {
    /// Counts a fetch. An unknown outcome is not counted.
    pub fn fetched(&self, outcome: &str) {
        let mut known = self.by_outcome.iter();
        if let Some((_, counter)) = known.find(|(known, _)| *known == outcome) {
            counter.increment(1);
        }
    }

    /// Sets the number of keys in use.
    pub fn set_keys(&self, keys: usize) {
        // a gauge is an `f64`, exact up to 2⁵³
        self.keys.set(keys as f64);
    }

    /// Sets the time of the last fetch to now.
    pub fn refreshed(&self) {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        self.timestamp.set(now.as_secs_f64());
    }
}

/// Metrics of one route.
#[derive(Debug)]
pub struct RouteMetrics {
    common: [Counter; COMMON_CODES.len()],
    /// Allocated when the route first answers with an uncommon code, so other routes have no table.
    rare: OnceLock<Box<[OnceLock<Counter>]>>,
    /// From the request's arrival to the end of its response.
    pub request_seconds: Histogram,
    in_flight: Gauge,
    tunnels: Gauge,
    abandoned: Gauge,
    metrics: Metrics,
    route: Box<str>,
}

impl RouteMetrics {
    /// Whether the handles belong to this registry.
    pub fn are_of(&self, metrics: &Metrics) -> bool {
        self.metrics.is(metrics)
    }

    /// Counts one response with `code`. One atomic addition, except for the first use of an
    /// uncommon code.
    pub fn answered(&self, code: http::StatusCode) {
        let code = code.as_u16();
        let at = code.wrapping_sub(FIRST_CODE) as usize;
        match COMMON_AT.get(at) {
            Some(&slot) if slot != RARE => self.common[usize::from(slot)].increment(1),
            _ => self.rare(at.min(CODES)).increment(1),
        }
    }

    /// Counts a request in flight until the guard is dropped.
    pub fn enter(&self) -> GaugeGuard {
        GaugeGuard::new(&self.in_flight)
    }

    /// Counts an abandoned request, whose server is still working, until the guard is dropped.
    pub fn enter_abandoned(&self) -> GaugeGuard {
        GaugeGuard::new(&self.abandoned)
    }

    /// Counts an open WebSocket until the guard is dropped.
    pub fn enter_tunnel(&self) -> GaugeGuard {
        GaugeGuard::new(&self.tunnels)
    }

    fn rare(&self, at: usize) -> &Counter {
        let table = self
            .rare
            .get_or_init(|| (0..=CODES).map(|_| OnceLock::new()).collect());
        table[at].get_or_init(|| {
            let mut digits = itoa::Buffer::new();
            let code = if at == CODES {
                "other"
            } else {
                digits.format(at + usize::from(FIRST_CODE))
            };
            self.metrics.counter(&table::REQUESTS, &[&self.route, code])
        })
    }
}

/// Counts in a gauge while it exists, for example a request in flight or a connection.
#[derive(Debug)]
#[must_use = "the gauge goes down again when this is dropped"]
pub struct GaugeGuard {
    gauge: Gauge,
}

impl GaugeGuard {
    fn new(gauge: &Gauge) -> GaugeGuard {
        gauge.increment(1.0);
        GaugeGuard {
            gauge: gauge.clone(),
        }
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}

/// Decisions of one limit on one route.
#[derive(Clone, Debug)]
pub struct DecisionMetrics {
    /// Requests that the limit admitted.
    pub admitted: Counter,
    /// Requests that the limit rejected.
    pub rejected: Counter,
    /// Requests that the limit held until their turn.
    pub delayed: Counter,
    /// Requests that the limit would have rejected, but it is in shadow mode.
    pub shadow_rejected: Counter,
    /// Requests that the limit admitted with a header for the upstream.
    pub tagged: Counter,
    /// Requests that an exception excluded from the limit.
    pub exempt: Counter,
}

/// Metrics of one limit.
#[derive(Clone, Debug)]
pub struct LimitMetrics {
    /// The waits announced to clients.
    pub retry_after_seconds: Histogram,
    /// Requests admitted with little quota left, from `warn_at` on.
    pub near_limit: Counter,
    /// How long requests were delayed.
    pub delayed_seconds: Histogram,
    /// Buckets in memory.
    pub keys: Gauge,
    /// Buckets evicted to make room.
    pub key_evictions: Counter,
    /// Decisions made in a shared overflow bucket.
    pub key_overflows: Counter,
    /// Samples in which one key was dominant.
    pub dominant_keys: Counter,
    /// 1 while an operator disables the limit.
    pub kill_switch: Gauge,
}

/// Metrics of shared limits.
#[derive(Clone, Debug)]
pub struct BudgetMetrics {
    /// Calls answered in time.
    pub ok: Counter,
    /// Calls that took longer than a request waits.
    pub late: Counter,
    /// Calls that failed.
    pub errors: Counter,
    /// Duration of calls that were answered.
    pub seconds: Histogram,
    by_kind: Vec<(&'static str, Counter)>,
    losses: Vec<(&'static str, Counter)>,
    /// Gateways known to be alive.
    pub gateways: Gauge,
    /// Redis servers with an open circuit breaker.
    pub breaker_open: Gauge,
    /// Calls that the slowest server may have in flight; 0 if none is slow.
    pub bound: Gauge,
    /// 1 while a shared limit uses its fallback.
    pub degraded: Gauge,
}

impl BudgetMetrics {
    /// Counts a loss of data by kind.
    pub fn lost(&self, kind: &str) {
        if let Some((_, counter)) = self.losses.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }

    /// Counts a failure by kind.
    pub fn failed(&self, kind: &str) {
        if let Some((_, counter)) = self.by_kind.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }
}

/// Tokens of one shared limit.
#[derive(Clone, Debug)]
pub struct LeaseMetrics {
    /// Keys for which this gateway holds a lease.
    pub keys: Gauge,
    /// Tokens leased and not yet spent.
    pub in_hand: Gauge,
    /// Tokens granted to waiting requests.
    pub granted: Counter,
    /// Tokens granted ahead of requests.
    pub granted_ahead: Counter,
    /// Tokens returned.
    pub returned: Counter,
    /// Tokens that expired unused.
    pub lapsed: Counter,
    /// Tokens charged later.
    pub debt: Counter,
    /// Units admitted before the reply of Redis.
    pub slack: Counter,
    /// Calls to Redis.
    pub calls: Counter,
    /// Units rejected by a remembered rejection.
    pub refused_by_memory: Counter,
    /// Units rejected by Redis.
    pub refused_by_redis: Counter,
    /// How long requests without a token waited.
    pub waited: Histogram,
    /// Keys with so little left that requests take turns to ask Redis.
    pub short_keys: Gauge,
    /// 1 while gateways with different terms count the same keys.
    pub disagreement: Gauge,
    /// Decisions made by the fallback.
    pub degraded: Counter,
    /// Rejections among those decisions.
    pub degraded_rejected: Counter,
}

/// Metrics of one upstream.
#[derive(Clone, Debug)]
pub struct UpstreamMetrics {
    /// Time until the response head.
    pub seconds: Histogram,
    /// No connection could be opened.
    pub connect_errors: Counter,
    /// The server's certificate did not verify.
    pub tls_errors: Counter,
    /// Every allowed connection was in use.
    pub busy_errors: Counter,
    /// The connection ended before there was a response.
    pub closed_errors: Counter,
    /// The response head took too long.
    pub timeout_errors: Counter,
    /// The response was not valid HTTP.
    pub protocol_errors: Counter,
    /// The server did not process the request.
    pub refused_errors: Counter,
    /// A body broke off, in either direction.
    pub body_errors: Counter,
    /// Not sent, because the circuit breaker is open.
    pub breaker_errors: Counter,
    /// Requests retried at another server.
    pub retries: Counter,
    /// Requests not retried, because the retry budget was used up.
    pub retries_denied: Counter,
    /// For each server: 1 while it is in service.
    pub healthy: Vec<Gauge>,
}

/// Metrics of one listener.
#[derive(Clone, Debug)]
pub struct ListenerMetrics {
    connections: Gauge,
    no_descriptors: Counter,
    no_memory: Counter,
    aborted: Counter,
    other: Counter,
    cut: Vec<(&'static str, Counter)>,
}

impl ListenerMetrics {
    /// Counts a closed connection by reason. An unregistered reason is not counted.
    pub fn cut(&self, kind: &str) {
        if let Some((_, counter)) = self.cut.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }

    /// Counts an open connection until the guard is dropped.
    pub fn open(&self) -> GaugeGuard {
        GaugeGuard::new(&self.connections)
    }

    /// Counts a failed accept by kind.
    pub fn accept_failed(&self, error: &io::Error) {
        // from asm-generic/errno.h; `std::io::ErrorKind` lacks most of them
        const ENOMEM: i32 = 12;
        const ENFILE: i32 = 23;
        const EMFILE: i32 = 24;
        const ENOBUFS: i32 = 105;
        let counter = match error.raw_os_error() {
            Some(EMFILE | ENFILE) => &self.no_descriptors,
            Some(ENOMEM | ENOBUFS) => &self.no_memory,
            _ if matches!(
                error.kind(),
                io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
            ) =>
            {
                &self.aborted
            }
            _ => &self.other,
        };
        counter.increment(1);
    }
}

/// TLS handshakes with clients, by result.
#[derive(Clone, Debug)]
pub struct HandshakeMetrics {
    /// Complete, with certificates.
    pub full: Counter,
    /// Resumed with a ticket of an earlier session.
    pub resumed: Counter,
    /// The client has no accepted certificate.
    pub certificate: Counter,
    /// The client aborted, for example because it does not trust our certificate.
    pub refused: Counter,
    /// No common parameters, or not TLS at all.
    pub failed: Counter,
    /// The client closed the connection.
    pub closed: Counter,
    /// The client took too long.
    pub timeout: Counter,
    /// Dropped for a newer one, because too many were in progress.
    pub shed: Counter,
}

/// Metrics of one user source.
#[derive(Clone, Debug)]
pub struct IdentityMetrics {
    by_kind: Vec<(&'static str, Counter)>,
}

impl IdentityMetrics {
    /// Counts a rejection. An unregistered kind is not counted.
    pub fn rejected(&self, kind: &str) {
        if let Some((_, counter)) = self.by_kind.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }
}

const FIRST_CODE: u16 = 100;
/// 100 to 599 (RFC 9110 §15).
const CODES: usize = 500;
const RARE: u8 = u8::MAX;

/// The codes of most responses. They are shown from the start and counted without a lookup.
const COMMON_CODES: [u16; 19] = [
    200, 201, 202, 204, 206, 301, 302, 304, 400, 401, 403, 404, 413, 429, 499, 500, 502, 503, 504,
];

/// Maps a code minus 100 to its index in [`COMMON_CODES`], or to [`RARE`].
static COMMON_AT: [u8; CODES] = {
    let mut slots = [RARE; CODES];
    let mut slot = 0;
    while slot < COMMON_CODES.len() {
        slots[(COMMON_CODES[slot] - FIRST_CODE) as usize] = slot as u8;
        slot += 1;
    }
    slots
};
