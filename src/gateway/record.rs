//! What is noted of a request when its answer ends: counters, durations, the access line.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{HeaderValue, StatusCode};
use tokio::time::Instant;

use super::{Exchange, Worker, body::BodyError, slots::Slots};
use crate::{
    response,
    telemetry::{
        access::{AccessLog, LimitPart, Line, Went},
        handles::{Held, RouteMetrics},
    },
    upstream::Fleet,
};

/// A request that was sent on, until its answer has left or the client has. Noted when it is dropped.
#[derive(Debug)]
pub(super) struct Record {
    metrics: Arc<RouteMetrics>,
    fleet: Arc<Fleet>,
    /// The server that was asked last.
    server: Option<usize>,
    /// What went wrong with it.
    error: Option<&'static str>,
    arrived: Instant,
    /// `None` until there is an answer.
    status: Option<StatusCode>,
    bytes: u64,
    _in_flight: Held,
    /// Given back when the answer has ended.
    _slots: Slots,
    /// Only where every request gets a line.
    line: Option<Box<(AccessLog, Kept)>>,
}

impl Record {
    /// The request is about to be sent on.
    pub(super) fn begin(worker: &Worker, exchange: &Exchange<'_>, slots: Slots) -> Self {
        let route = exchange.route;
        let fleet = &worker.shared.plan.upstreams[route.upstream];
        let access = worker.access.as_ref().filter(|_| worker.shared.logs_all());
        let kept = || Kept::of(worker, exchange, None);
        Self {
            metrics: Arc::clone(&route.metrics),
            fleet: Arc::clone(fleet),
            server: None,
            error: None,
            arrived: exchange.arrived,
            status: None,
            bytes: 0,
            _in_flight: route.metrics.enter(),
            _slots: slots,
            line: access.map(|access| Box::new((access.clone(), kept()))),
        }
    }

    /// There is an answer.
    pub(super) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
        self.metrics.answered(status);
    }

    /// Which server was asked last, and how it failed.
    pub(super) fn asked(&mut self, server: Option<usize>, error: Option<&'static str>) {
        self.server = server;
        self.error = error;
    }

    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The connection has become a tunnel; it is counted as one until the guard is dropped.
    pub(super) fn open_tunnel(&self) -> Held {
        self.metrics.enter_tunnel()
    }

    pub(super) fn broke(&mut self, error: &BodyError) {
        self.error = Some("body");
        self.fleet.metrics().body_errors.increment(1);
        tracing::debug!(%error, "a response was cut short");
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let duration = self.arrived.elapsed();
        self.metrics.request_seconds.record(duration);
        let status = self.status.unwrap_or_else(|| {
            let gone = response::client_gone();
            self.metrics.answered(gone);
            gone
        });
        if let Some((access, kept)) = self.line.as_deref() {
            let went = Went {
                upstream: &self.fleet.settings().name,
                server: self.server.map(|server| self.fleet.server_name(server)),
                error: self.error,
            };
            access.write(&kept.line(status, Some(went), self.bytes, duration));
        }
    }
}

/// Notes an answer of ours to a request that was not sent on; it is complete when it is made.
pub(super) fn note(
    worker: &Worker,
    exchange: &Exchange<'_>,
    status: StatusCode,
    bytes: u64,
    retry_after: Option<u32>,
) {
    let duration = exchange.arrived.elapsed();
    exchange.route.metrics.answered(status);
    exchange.route.metrics.request_seconds.record(duration);
    if let Some(access) = &worker.access
        && (worker.shared.logs_all() || !exchange.verdict.admitted())
    {
        let kept = Kept::of(worker, exchange, retry_after);
        access.write(&kept.line(status, None, bytes, duration));
    }
}

impl Worker {
    /// Waits, and notes a client that leaves meanwhile.
    pub(super) async fn while_client_stays<T>(
        &self,
        exchange: &Exchange<'_>,
        wait: impl Future<Output = T>,
    ) -> T {
        let mut waiting = Waiting {
            worker: self,
            exchange,
            stayed: false,
        };
        let awaited = wait.await;
        waiting.stayed = true;
        awaited
    }
}

/// A request that waits in the gateway. Dropped before that is over, its client has left.
struct Waiting<'a> {
    worker: &'a Worker,
    exchange: &'a Exchange<'a>,
    stayed: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.stayed {
            note(self.worker, self.exchange, response::client_gone(), 0, None);
        }
    }
}

/// What an access line says, kept until it can be written.
#[derive(Debug)]
struct Kept {
    time: SystemTime,
    request_id: HeaderValue,
    client_ip: Option<std::net::IpAddr>,
    user: Option<String>,
    tenant: Option<String>,
    tier: Option<String>,
    method: http::Method,
    host: Option<String>,
    path: String,
    route: String,
    limit: Option<KeptLimit>,
}

/// The binding limit.
#[derive(Debug)]
struct KeptLimit {
    name: String,
    algorithm: &'static str,
    key: String,
    capacity: u64,
    remaining: u64,
    retry_after: Option<u32>,
}

impl Kept {
    fn of(worker: &Worker, exchange: &Exchange<'_>, retry_after: Option<u32>) -> Self {
        let asked = exchange.asked.as_ref();
        let client = asked.map(|asked| &asked.client);
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Self {
            time: SystemTime::now()
                .checked_sub(exchange.arrived.elapsed())
                .unwrap_or(SystemTime::UNIX_EPOCH),
            request_id: exchange.request_id.clone(),
            client_ip: client.map(|client| client.address),
            user: owned(client.and_then(|client| client.user)),
            tenant: owned(client.and_then(|client| client.tenant)),
            tier: owned(client.and_then(|client| client.tier)),
            method: exchange.head.method.clone(),
            host: asked.map(|asked| asked.host.to_string()),
            path: exchange.head.uri.path().to_owned(),
            route: exchange.route.name.clone(),
            limit: KeptLimit::of(worker, exchange, retry_after),
        }
    }

    fn line<'a>(
        &'a self,
        status: StatusCode,
        went: Option<Went<'a>>,
        bytes: u64,
        duration: Duration,
    ) -> Line<'a> {
        let limit = self.limit.as_ref().map(|limit| LimitPart {
            name: &limit.name,
            key: limit.key.as_bytes(),
            algorithm: limit.algorithm,
            capacity: limit.capacity,
            remaining: limit.remaining,
            retry_after: limit.retry_after,
        });
        Line {
            time: self.time,
            request_id: self.request_id.as_bytes(),
            client_ip: self.client_ip,
            user: self.user.as_deref().map(str::as_bytes),
            tenant: self.tenant.as_deref().map(str::as_bytes),
            tier: self.tier.as_deref().map(str::as_bytes),
            method: self.method.as_str().as_bytes(),
            host: self.host.as_deref().map(str::as_bytes),
            path: self.path.as_bytes(),
            route: Some(&self.route),
            status: status.as_u16(),
            limit,
            went,
            bytes,
            duration,
        }
    }
}

impl KeptLimit {
    fn of(worker: &Worker, exchange: &Exchange<'_>, retry_after: Option<u32>) -> Option<Self> {
        let standings = exchange.verdict.standings();
        let index = standings.binding()?;
        let rule = &exchange.met.get(index)?.limit.rule;
        let standing = standings.get(index)?;
        let plan = &worker.shared.plan;
        let key = exchange.with_subject(&plan.table, exchange.asked.as_ref()?, |subject| {
            rule.key
                .readable(&worker.shared.hasher, plan.prefixes, subject)
        });
        Some(Self {
            name: rule.name.clone(),
            algorithm: rule.algorithm,
            key,
            capacity: standing.capacity,
            remaining: standing.remaining,
            retry_after,
        })
    }
}
