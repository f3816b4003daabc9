//! The state of an upstream that all workers share: which servers are available, and how busy each
//! is.
//!
//! A server is unavailable while its active checks fail, or while it is ejected (its circuit
//! breaker is open). Two rules prevent harm: the last available server is never ejected, and if
//! none is available, all are tried, as a guess beats a certain failure. Only failed connections,
//! timeouts and broken responses count, never a status. Otherwise one client could eject every
//! server with a request that makes an origin fail.
//!
//! All state is atomic; the lock is taken only when a server's state changes.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

use metrics::Gauge;
use tokio::time::Instant;

use super::{
    TlsError, UpstreamError, UpstreamSettings,
    balance::{self, Candidates},
    circuit_breaker::CircuitBreaker,
    endpoint::{self, ServerEndpoint},
};
use crate::telemetry::handles::UpstreamMetrics;

/// The shared state of one upstream.
#[derive(Debug)]
pub struct UpstreamState {
    settings: UpstreamSettings,
    members: Vec<ServerState>,
    /// Open: the whole upstream is refused.
    breaker: CircuitBreaker,
    metrics: UpstreamMetrics,
    epoch: Instant,
    changing: Mutex<()>,
}

/// One server.
#[derive(Debug)]
struct ServerState {
    /// Name in the configuration.
    name: String,
    seed: u64,
    endpoint: ServerEndpoint,
    /// Its active checks fail.
    is_unhealthy: AtomicBool,
    /// Open: the server is ejected.
    ejection: CircuitBreaker,
    outstanding: CachePadded<AtomicUsize>,
    healthy: Gauge,
}

/// On its own cache line: every worker writes it for every request.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

impl UpstreamState {
    /// Assumes every server healthy until a check fails. Opens no connection.
    pub fn new(settings: UpstreamSettings, metrics: UpstreamMetrics) -> Result<Self, TlsError> {
        let mut outlier = settings.outlier;
        if settings.servers.len() == 1 {
            outlier.failures = 0;
        }
        let tls = endpoint::tls_config(&settings)?;
        let mut members = Vec::with_capacity(settings.servers.len());
        for (server, healthy) in settings.servers.iter().zip(&metrics.healthy) {
            let name = server.to_string();
            healthy.set(1.0);
            members.push(ServerState {
                seed: balance::seed(&name),
                name,
                endpoint: ServerEndpoint::new(server, tls.as_ref(), &settings)?,
                is_unhealthy: AtomicBool::new(false),
                ejection: CircuitBreaker::new(outlier),
                outstanding: CachePadded::default(),
                healthy: healthy.clone(),
            });
        }
        Ok(Self {
            members,
            breaker: CircuitBreaker::new(settings.breaker),
            settings,
            metrics,
            epoch: Instant::now(),
            changing: Mutex::default(),
        })
    }

    /// The settings of the upstream.
    pub fn settings(&self) -> &UpstreamSettings {
        &self.settings
    }

    /// Its metrics.
    pub fn metrics(&self) -> &UpstreamMetrics {
        &self.metrics
    }

    /// Name of a server in the configuration.
    pub fn server_name(&self, server: usize) -> &str {
        &self.members[server].name
    }

    pub(super) fn endpoint(&self, server: usize) -> &ServerEndpoint {
        &self.members[server].endpoint
    }

    /// Whether the circuit breaker of the upstream lets a request pass.
    pub(super) fn enter(&self, now: Instant) -> Result<(), UpstreamError> {
        if self.breaker.is_closed() {
            return Ok(());
        }
        let now_ms = self.milliseconds(now);
        if self.breaker.enter(now_ms) {
            return Ok(());
        }
        let wait = self.breaker.blocked_for(now_ms);
        let broken = UpstreamError::Broken(wait);
        self.count(&broken);
        Err(broken)
    }

    /// Whether the chosen server accepts the request. If it is ejected and a trial is due, one
    /// worker gets it.
    pub(super) fn enter_server(&self, server: usize, now: Instant) -> bool {
        let ejection = &self.members[server].ejection;
        ejection.is_closed() || ejection.enter(self.milliseconds(now))
    }

    /// Counts a request in flight at a server.
    pub(super) fn begin(&self, server: usize) {
        self.members[server].outstanding.0.fetch_add(1, Relaxed);
    }

    pub(super) fn end(&self, server: usize) {
        self.members[server].outstanding.0.fetch_sub(1, Relaxed);
    }

    /// The server answered.
    pub(super) fn succeeded(&self, server: usize) {
        let member = &self.members[server];
        if member.ejection.succeeded() {
            let _changing = self.lock();
            member.show();
            let (upstream, server) = (&self.settings.name, &member.name);
            tracing::info!(
                upstream,
                server,
                "a server answers again; no longer ejected"
            );
        }
        if self.breaker.succeeded() {
            let upstream = &self.settings.name;
            tracing::info!(
                upstream,
                "the upstream answers again; its circuit breaker closes"
            );
        }
    }

    /// The server did not answer. Counts the failure, and ejects the server at the threshold.
    pub(super) fn failed(&self, server: usize, error: &UpstreamError) {
        self.count(error);
        if !error.is_the_servers() {
            return;
        }
        let now_ms = self.milliseconds(Instant::now());
        if self.members[server].ejection.failed() {
            self.eject(server, now_ms, error);
        }
        if self.breaker.failed() && self.breaker.open(now_ms) {
            let upstream = &self.settings.name;
            let (failures, retry) = (self.settings.breaker.failures, self.settings.breaker.pause);
            tracing::warn!(upstream, failures, ?retry, %error, "the upstream keeps failing; its circuit breaker opens and its requests get 503");
        }
    }

    /// The health of a server changed: `problem` is its failure, `None` if it recovered.
    pub(super) fn found(&self, server: usize, problem: Option<&str>) {
        let _changing = self.lock();
        let member = &self.members[server];
        member.is_unhealthy.store(problem.is_some(), Relaxed);
        member.show();
        let (upstream, server) = (&self.settings.name, &member.name);
        match problem {
            Some(problem) => {
                let in_service = self.members.iter().filter(|member| member.is_in_service());
                let left = in_service.count();
                tracing::warn!(
                    upstream,
                    server,
                    problem,
                    in_service = left,
                    "a server is unhealthy; its health checks fail"
                );
            }
            None => tracing::info!(
                upstream,
                server,
                "a server is healthy again; its health checks pass"
            ),
        }
    }

    fn eject(&self, server: usize, now_ms: u64, error: &UpstreamError) {
        let _changing = self.lock();
        let member = &self.members[server];
        let is_last = !self
            .members
            .iter()
            .enumerate()
            .any(|(other, member)| other != server && member.is_in_service());
        if is_last || !member.ejection.open(now_ms) {
            return;
        }
        member.show();
        let (upstream, server) = (&self.settings.name, &member.name);
        let rating = member.ejection.config();
        tracing::warn!(upstream, server, failures = rating.failures, eject_for = ?rating.pause, %error, "ejecting a server that keeps failing");
    }

    fn count(&self, error: &UpstreamError) {
        let metrics = &self.metrics;
        let counter = match error {
            UpstreamError::Connect(_) => &metrics.connect_errors,
            UpstreamError::Tls(_) => &metrics.tls_errors,
            UpstreamError::Busy(_) => &metrics.busy_errors,
            UpstreamError::Timeout(_) => &metrics.timeout_errors,
            UpstreamError::Closed(_) => &metrics.closed_errors,
            UpstreamError::Refused(_) => &metrics.refused_errors,
            UpstreamError::Protocol(_) => &metrics.protocol_errors,
            UpstreamError::Broken(_) => &metrics.breaker_errors,
        };
        counter.increment(1);
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds on a clock that is never zero.
    fn milliseconds(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch).as_millis();
        u64::try_from(since + 1).unwrap_or(u64::MAX)
    }
}

impl ServerState {
    fn is_in_service(&self) -> bool {
        !self.is_unhealthy.load(Relaxed) && self.ejection.is_closed()
    }

    fn show(&self) {
        self.healthy
            .set(if self.is_in_service() { 1.0 } else { 0.0 });
    }
}

/// The servers that may still receive this request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open<'a> {
    pub(super) upstream_state: &'a UpstreamState,
    /// Servers that have already failed it.
    pub(super) tried: &'a [usize],
    pub(super) now: Instant,
    /// No server is in service: all may be tried.
    pub(super) regardless: bool,
}

impl Candidates for Open<'_> {
    fn count(&self) -> usize {
        self.upstream_state.members.len()
    }

    fn may_take(&self, server: usize) -> bool {
        let member = &self.upstream_state.members[server];
        let is_open = || {
            let ejection = &member.ejection;
            !member.is_unhealthy.load(Relaxed)
                && (ejection.is_closed()
                    || ejection
                        .blocked_for(self.upstream_state.milliseconds(self.now))
                        .is_zero())
        };
        !self.tried.contains(&server) && (self.regardless || is_open())
    }

    fn outstanding(&self, server: usize) -> usize {
        self.upstream_state.members[server]
            .outstanding
            .0
            .load(Relaxed)
    }

    fn seed(&self, server: usize) -> u64 {
        self.upstream_state.members[server].seed
    }
}
