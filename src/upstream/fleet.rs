//! What all workers know of an upstream together: which of its servers may be asked, and how busy each is.
//!
//! A server is passed over while its active checks fail, or while it is ejected (its `Fuse` has blown). Two rules keep
//! that from making things worse: the last server that may be asked is never ejected, and when none may be asked, all
//! are, since a guess is better than a certain refusal. Only connections that fail, time out or break off count, never a
//! status: else one client with one request that breaks an origin could eject every server.
//!
//! Everything is atomic; the lock is taken only when a server's state changes.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

use metrics::Gauge;
use tokio::time::Instant;

use super::{
    Settings, TlsError, UpstreamError,
    balance::{self, Candidates},
    endpoint::{self, Endpoint},
    fuse::Fuse,
};
use crate::telemetry::handles::UpstreamMetrics;

/// One upstream as all workers share it.
#[derive(Debug)]
pub struct Fleet {
    settings: Settings,
    members: Vec<Member>,
    /// Blown: the whole upstream is refused.
    breaker: Fuse,
    metrics: UpstreamMetrics,
    epoch: Instant,
    changing: Mutex<()>,
}

/// One server.
#[derive(Debug)]
struct Member {
    /// As in the configuration.
    name: String,
    seed: u64,
    endpoint: Endpoint,
    /// Its active checks fail.
    is_unhealthy: AtomicBool,
    /// Blown: it is ejected.
    ejection: Fuse,
    outstanding: Padded<AtomicUsize>,
    healthy: Gauge,
}

/// On a cache line of its own: every worker writes it for every request.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

impl Fleet {
    /// Every server counts as healthy until it is known not to be. Opens no connection.
    pub fn new(settings: Settings, metrics: UpstreamMetrics) -> Result<Self, TlsError> {
        let mut outlier = settings.outlier;
        if settings.servers.len() == 1 {
            outlier.failures = 0;
        }
        let tls = endpoint::tls_config(&settings)?;
        let mut members = Vec::with_capacity(settings.servers.len());
        for (server, healthy) in settings.servers.iter().zip(&metrics.healthy) {
            let name = server.to_string();
            healthy.set(1.0);
            members.push(Member {
                seed: balance::seed(&name),
                name,
                endpoint: Endpoint::new(server, tls.as_ref(), &settings)?,
                is_unhealthy: AtomicBool::new(false),
                ejection: Fuse::new(outlier),
                outstanding: Padded::default(),
                healthy: healthy.clone(),
            });
        }
        Ok(Self {
            members,
            breaker: Fuse::new(settings.breaker),
            settings,
            metrics,
            epoch: Instant::now(),
            changing: Mutex::default(),
        })
    }

    /// The settings that it was made from.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What it counts.
    pub fn metrics(&self) -> &UpstreamMetrics {
        &self.metrics
    }

    /// A server as the configuration names it.
    pub fn server_name(&self, server: usize) -> &str {
        &self.members[server].name
    }

    pub(super) fn endpoint(&self, server: usize) -> &Endpoint {
        &self.members[server].endpoint
    }

    /// Whether the upstream may be asked at all.
    pub(super) fn enter(&self, now: Instant) -> Result<(), UpstreamError> {
        if self.breaker.is_whole() {
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

    /// Whether a server that was chosen takes the request. Of several workers that would end its ejection, one may.
    pub(super) fn enter_server(&self, server: usize, now: Instant) -> bool {
        let ejection = &self.members[server].ejection;
        ejection.is_whole() || ejection.enter(self.milliseconds(now))
    }

    /// Counts a request as being in flight at a server.
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
                "a server answers again: it is no longer ejected"
            );
        }
        if self.breaker.succeeded() {
            let upstream = &self.settings.name;
            tracing::info!(
                upstream,
                "the upstream answers again: the circuit is closed"
            );
        }
    }

    /// The server did not answer. Counts it, and ejects the server where it is one too many.
    pub(super) fn failed(&self, server: usize, error: &UpstreamError) {
        self.count(error);
        if !error.is_the_servers() {
            return;
        }
        let now_ms = self.milliseconds(Instant::now());
        if self.members[server].ejection.failed() {
            self.eject(server, now_ms, error);
        }
        if self.breaker.failed() && self.breaker.blow(now_ms) {
            let upstream = &self.settings.name;
            let (failures, retry) = (self.settings.breaker.failures, self.settings.breaker.pause);
            tracing::warn!(upstream, failures, ?retry, %error, "the upstream keeps failing: the circuit is open, its requests are answered 503");
        }
    }

    /// The checks of a server have come to another finding: what is wrong with it, or that nothing is.
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
                    "a server is unhealthy: its checks fail"
                );
            }
            None => tracing::info!(
                upstream,
                server,
                "a server is healthy again: its checks pass"
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
        if is_last || !member.ejection.blow(now_ms) {
            return;
        }
        member.show();
        let (upstream, server) = (&self.settings.name, &member.name);
        let rating = member.ejection.rating();
        tracing::warn!(upstream, server, failures = rating.failures, eject_for = ?rating.pause, %error, "a server keeps failing: it is ejected");
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

    /// On a clock that never stands at zero.
    fn milliseconds(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch).as_millis();
        u64::try_from(since + 1).unwrap_or(u64::MAX)
    }
}

impl Member {
    fn is_in_service(&self) -> bool {
        !self.is_unhealthy.load(Relaxed) && self.ejection.is_whole()
    }

    fn show(&self) {
        self.healthy
            .set(if self.is_in_service() { 1.0 } else { 0.0 });
    }
}

/// The servers that one request may still be sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open<'a> {
    pub(super) fleet: &'a Fleet,
    /// Servers that have failed it already.
    pub(super) tried: &'a [usize],
    pub(super) now: Instant,
    /// Where none is in service: all of them.
    pub(super) regardless: bool,
}

impl Candidates for Open<'_> {
    fn count(&self) -> usize {
        self.fleet.members.len()
    }

    fn may_take(&self, server: usize) -> bool {
        let member = &self.fleet.members[server];
        let is_open = || {
            let ejection = &member.ejection;
            !member.is_unhealthy.load(Relaxed)
                && (ejection.is_whole()
                    || ejection
                        .blocked_for(self.fleet.milliseconds(self.now))
                        .is_zero())
        };
        !self.tried.contains(&server) && (self.regardless || is_open())
    }

    fn outstanding(&self, server: usize) -> usize {
        self.fleet.members[server].outstanding.0.load(Relaxed)
    }

    fn seed(&self, server: usize) -> u64 {
        self.fleet.members[server].seed
    }
}
