//! The handles through which the gateway counts, resolved when a configuration is built.

use std::{
    io,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use metrics::{Counter, Gauge, Histogram};

use super::metrics::{self as table, Metrics};

impl Metrics {
    /// The route's handles. Requests that match no route are counted under a name of the caller's choice.
    pub fn route(&self, route: &str) -> RouteMetrics {
        RouteMetrics {
            common: COMMON_CODES.map(|code| {
                self.counter(&table::REQUESTS, &[route, itoa::Buffer::new().format(code)])
            }),
            rare: OnceLock::new(),
            request_seconds: self.histogram(&table::REQUEST_SECONDS, &[route]),
            in_flight: self.gauge(&table::IN_FLIGHT, &[route]),
            tunnels: self.gauge(&table::TUNNELS, &[route]),
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

    /// Requests of a priority that were shed.
    pub fn shed(&self, priority: &str) -> Counter {
        self.counter(&table::SHED, &[priority])
    }

    /// Memory in use for bodies that are read ahead, and bodies that found no room so far.
    pub fn body_buffers(&self, used_bytes: usize, refused: u64) {
        self.gauge(&table::BODY_BUFFER, &[]).set(used_bytes as f64);
        self.counter(&table::BODY_BUFFER_REFUSED, &[])
            .absolute(refused);
    }

    /// The limit's handles.
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

    /// The handles of what is shared with other gateways; errors are counted under one of `kinds`.
    pub fn budget(&self, kinds: &[&'static str], losses: &[&'static str]) -> BudgetMetrics {
        let calls = |outcome| self.counter(&table::BUDGET_CALLS, &[outcome]);
        let kind = |&kind| (kind, self.counter(&table::BUDGET_ERRORS, &[kind]));
        let loss = |&kind| (kind, self.counter(&table::BUDGET_LOSSES, &[kind]));
        BudgetMetrics {
            ok: calls("ok"),
            late: calls("late"),
            errors: calls("error"),
            seconds: self.histogram(&table::BUDGET_CALL_SECONDS, &[]),
            by_kind: kinds.iter().map(kind).collect(),
            losses: losses.iter().map(loss).collect(),
            gateways: self.gauge(&table::BUDGET_GATEWAYS, &[]),
            breaker_open: self.gauge(&table::BUDGET_BREAKER_OPEN, &[]),
            bound: self.gauge(&table::BUDGET_IN_FLIGHT_BOUND, &[]),
            degraded: self.gauge(&table::DEGRADED, &[]),
        }
    }

    /// The handles of one limit that is shared; `behaviour` is what it does without the others.
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

    /// The listener's handles; `listener` is its address as configured, `cuts` why connections may be cut short.
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

    /// The handles of spans for a collector of traces.
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

    /// Notes when the certificates of a file expire; `name` is the file's, as configured.
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

    /// The handles of one published key set; `url` holds no secret.
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

/// What becomes of spans.
#[derive(Clone, Debug)]
pub struct SpanMetrics {
    /// The collector took them.
    pub sent: Counter,
    /// It did not, or could not be asked.
    pub failed: Counter,
    /// The queue was full.
    pub dropped: Counter,
}

/// What is counted of a published key set.
#[derive(Debug)]
pub struct IssuerMetrics {
    by_outcome: Vec<(&'static str, Counter)>,
    keys: Gauge,
    timestamp: Gauge,
}

impl IssuerMetrics {
    /// Counts a fetch; an outcome that is not known is not counted.
    pub fn fetched(&self, outcome: &str) {
        let mut known = self.by_outcome.iter();
        if let Some((_, counter)) = known.find(|(known, _)| *known == outcome) {
            counter.increment(1);
        }
    }

    /// Notes how many keys are in use.
    pub fn hold(&self, keys: usize) {
        // a gauge is a float: exact up to 2⁵³
        self.keys.set(keys as f64);
    }

    /// Notes that the set was fetched now.
    pub fn refreshed(&self) {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        self.timestamp.set(now.as_secs_f64());
    }
}

/// What a route counts.
#[derive(Debug)]
pub struct RouteMetrics {
    common: [Counter; COMMON_CODES.len()],
    /// Made when the route first answers with an uncommon code: a route that never does costs no table.
    rare: OnceLock<Box<[OnceLock<Counter>]>>,
    /// From arrival to the end of the answer.
    pub request_seconds: Histogram,
    in_flight: Gauge,
    tunnels: Gauge,
    abandoned: Gauge,
    metrics: Metrics,
    route: Box<str>,
}

impl RouteMetrics {
    /// Whether they are handles of this registry.
    pub fn are_of(&self, metrics: &Metrics) -> bool {
        self.metrics.is(metrics)
    }

    /// Counts one request answered with `code`. One atomic addition, but for the first use of an uncommon code.
    pub fn answered(&self, code: http::StatusCode) {
        let code = code.as_u16();
        let at = code.wrapping_sub(FIRST_CODE) as usize;
        match COMMON_AT.get(at) {
            Some(&slot) if slot != RARE => self.common[usize::from(slot)].increment(1),
            _ => self.rare(at.min(CODES)).increment(1),
        }
    }

    /// Counts a request as being in flight until the guard is dropped.
    pub fn enter(&self) -> Held {
        Held::new(&self.in_flight)
    }

    /// Counts a request as abandoned, and its server as at work, until the guard is dropped.
    pub fn enter_abandoned(&self) -> Held {
        Held::new(&self.abandoned)
    }

    /// Counts a WebSocket as being open until the guard is dropped.
    pub fn enter_tunnel(&self) -> Held {
        Held::new(&self.tunnels)
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

/// Something that a gauge counts for as long as this lives: a request in flight, a connection.
#[derive(Debug)]
#[must_use = "the gauge goes down again when this is dropped"]
pub struct Held {
    gauge: Gauge,
}

impl Held {
    fn new(gauge: &Gauge) -> Held {
        gauge.increment(1.0);
        Held {
            gauge: gauge.clone(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}

/// What one limit decided on one route.
#[derive(Clone, Debug)]
pub struct DecisionMetrics {
    /// Requests that the limit let pass.
    pub admitted: Counter,
    /// Requests that the limit stopped.
    pub rejected: Counter,
    /// Requests that the limit held until their turn.
    pub delayed: Counter,
    /// Requests that the limit would have stopped, were it not in shadow.
    pub shadow_rejected: Counter,
    /// Requests that the limit let pass with a note to the upstream.
    pub tagged: Counter,
    /// Requests that an exception spared the limit.
    pub exempt: Counter,
}

/// What a limit counts.
#[derive(Clone, Debug)]
pub struct LimitMetrics {
    /// The waits that clients were told.
    pub retry_after_seconds: Histogram,
    /// Requests that passed with little left, from `warn_at` on.
    pub near_limit: Counter,
    /// How long requests were held.
    pub delayed_seconds: Histogram,
    /// Buckets held.
    pub keys: Gauge,
    /// Buckets forgotten to make room.
    pub key_evictions: Counter,
    /// Decisions made in a shared overflow bucket.
    pub key_overflows: Counter,
    /// Counts in which one key was dominant.
    pub dominant_keys: Counter,
    /// 1 while operators keep it from acting.
    pub kill_switch: Gauge,
}

/// What is counted of the budget that gateways share.
#[derive(Clone, Debug)]
pub struct BudgetMetrics {
    /// Calls that were answered in time.
    pub ok: Counter,
    /// Calls that took longer than a request waits.
    pub late: Counter,
    /// Calls that failed.
    pub errors: Counter,
    /// How long calls took that were answered.
    pub seconds: Histogram,
    by_kind: Vec<(&'static str, Counter)>,
    losses: Vec<(&'static str, Counter)>,
    /// Gateways that are known to live.
    pub gateways: Gauge,
    /// Servers that are not asked at the moment.
    pub breaker_open: Gauge,
    /// Calls that the slowest server may have in flight; 0 where none is slow.
    pub bound: Gauge,
    /// 1 while some shared limit goes on alone.
    pub degraded: Gauge,
}

impl BudgetMetrics {
    /// Counts a loss of data under its kind.
    pub fn lost(&self, kind: &str) {
        if let Some((_, counter)) = self.losses.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }

    /// Counts a failure under its kind.
    pub fn failed(&self, kind: &str) {
        if let Some((_, counter)) = self.by_kind.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }
}

/// What a shared limit counts of its tokens.
#[derive(Clone, Debug)]
pub struct LeaseMetrics {
    /// Keys that this gateway keeps a lease for.
    pub keys: Gauge,
    /// Tokens borrowed ahead and not spent.
    pub in_hand: Gauge,
    /// Tokens granted to requests that waited.
    pub granted: Counter,
    /// Tokens granted ahead.
    pub granted_ahead: Counter,
    /// Tokens given back.
    pub returned: Counter,
    /// Tokens whose time was over before somebody needed them.
    pub lapsed: Counter,
    /// Tokens charged afterwards.
    pub debt: Counter,
    /// Units that passed before Redis was asked.
    pub slack: Counter,
    /// Calls to Redis.
    pub calls: Counter,
    /// Units refused, by a refusal that is remembered.
    pub refused_by_memory: Counter,
    /// Units refused after Redis was asked.
    pub refused_by_redis: Counter,
    /// How long requests waited that found no token.
    pub waited: Histogram,
    /// Keys of which so little is left that they are asked for in turns.
    pub short_keys: Gauge,
    /// 1 while gateways with other terms count the same keys.
    pub disagreement: Gauge,
    /// Decisions made alone, and those of them that rejected.
    pub degraded: Counter,
    /// See there.
    pub degraded_rejected: Counter,
}

/// What an upstream counts.
#[derive(Clone, Debug)]
pub struct UpstreamMetrics {
    /// Until the head of the response.
    pub seconds: Histogram,
    /// No connection could be opened.
    pub connect_errors: Counter,
    /// The server did not prove who it is.
    pub tls_errors: Counter,
    /// Every connection that the configuration allows was in use.
    pub busy_errors: Counter,
    /// The connection ended before there was a response.
    pub closed_errors: Counter,
    /// The response head took too long.
    pub timeout_errors: Counter,
    /// What came back was not HTTP.
    pub protocol_errors: Counter,
    /// The server would not look at the request.
    pub refused_errors: Counter,
    /// A body broke off, in either direction.
    pub body_errors: Counter,
    /// The upstream was not asked, since it keeps failing.
    pub breaker_errors: Counter,
    /// Requests that were sent to another server.
    pub retries: Counter,
    /// Requests that were not, for want of budget.
    pub retries_denied: Counter,
    /// By server: 1 while it is in service.
    pub healthy: Vec<Gauge>,
}

/// What a listener counts.
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
    /// Counts a connection that was cut short; a kind that was not asked for is not counted.
    pub fn cut(&self, kind: &str) {
        if let Some((_, counter)) = self.cut.iter().find(|(known, _)| *known == kind) {
            counter.increment(1);
        }
    }

    /// Counts a connection as open until the guard is dropped.
    pub fn open(&self) -> Held {
        Held::new(&self.connections)
    }

    /// Counts a failed accept under its kind.
    pub fn accept_failed(&self, error: &io::Error) {
        // from asm-generic/errno.h; the standard library has no kinds for most of them
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

/// TLS handshakes with clients, by how they ended.
#[derive(Clone, Debug)]
pub struct HandshakeMetrics {
    /// Complete, with certificates.
    pub full: Counter,
    /// Complete, by a ticket of an earlier session.
    pub resumed: Counter,
    /// The client has no certificate that is accepted.
    pub certificate: Counter,
    /// The client refused, such as for not trusting our certificate.
    pub refused: Counter,
    /// Nothing that both speak, or not TLS at all.
    pub failed: Counter,
    /// The client left.
    pub closed: Counter,
    /// The client took too long.
    pub timeout: Counter,
    /// Given up for a newer one, because too many were under way.
    pub shed: Counter,
}

/// What a source of users counts.
#[derive(Clone, Debug)]
pub struct IdentityMetrics {
    by_kind: Vec<(&'static str, Counter)>,
}

impl IdentityMetrics {
    /// Counts one; a kind that was not asked for is not counted.
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

/// What most answers are; shown from the start, and counted without a look into the table of rare ones.
const COMMON_CODES: [u16; 19] = [
    200, 201, 202, 204, 206, 301, 302, 304, 400, 401, 403, 404, 413, 429, 499, 500, 502, 503, 504,
];

/// Code less 100 to index into [`COMMON_CODES`], or [`RARE`].
static COMMON_AT: [u8; CODES] = {
    let mut slots = [RARE; CODES];
    let mut slot = 0;
    while slot < COMMON_CODES.len() {
        slots[(COMMON_CODES[slot] - FIRST_CODE) as usize] = slot as u8;
        slot += 1;
    }
    slots
};
