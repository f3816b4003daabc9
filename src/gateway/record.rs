//! Records a request when its answer ends: counters, durations, the access line.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::time::Instant;

use super::{
    body_error::BodyError,
    held_costs::{HeldCosts, SettledCost},
    request_context::RequestContext,
    request_context::Traced,
    slots::RequestSlots,
    worker::Worker,
};
use crate::{
    budget::DecisionSource,
    identity::Client,
    listener::inbound::InboundBody,
    response::{self, Refusal},
    telemetry::{
        access::{AccessLine, AccessLog, AccessUpstream, CostPart, LimitPart},
        handles::{GaugeGuard, RouteMetrics},
        trace::{self, Spans},
    },
    upstream::{UpstreamState, abandoned::AbandonedExchanges},
};

/// A forwarded request, until its answer is sent or the client leaves. Written when dropped.
#[derive(Debug)]
pub(super) struct Record {
    metrics: Arc<RouteMetrics>,
    upstream_state: Arc<UpstreamState>,
    /// The last server tried.
    server: Option<usize>,
    /// How that server failed.
    error: Option<&'static str>,
    /// Why we answered after all.
    refused: Option<&'static str>,
    arrived: Instant,
    /// `None` until the answer begins.
    status: Option<StatusCode>,
    bytes: u64,
    _in_flight: GaugeGuard,
    /// Released when both the answer and the server's work have ended.
    slots: RequestSlots,
    /// Settled when the answer has ended.
    costs: Option<Box<HeldCosts>>,
    /// Exchanges that ended for the client, but perhaps not for the server.
    custody: AbandonedExchanges,
    /// `Some` if the request gets an access line or a span.
    told: Option<Box<AccessData>>,
}

impl Record {
    /// Starts the record; call it just before forwarding.
    pub(super) fn begin(
        worker: &Worker,
        request: &RequestContext<'_>,
        slots: RequestSlots,
        costs: Option<Box<HeldCosts>>,
    ) -> Self {
        let route = request.decision.route;
        let upstream_state = &worker.active.plan.upstreams[route.upstream];
        Self {
            metrics: Arc::clone(&route.metrics),
            upstream_state: Arc::clone(upstream_state),
            server: None,
            error: None,
            refused: None,
            arrived: request.decision.arrived,
            status: None,
            bytes: 0,
            _in_flight: route.metrics.enter(),
            slots,
            costs,
            custody: AbandonedExchanges::default(),
            told: AccessData::of(worker, request, None).map(Box::new),
        }
    }

    /// Records that the request is about to be sent.
    pub(super) fn sending(&mut self, now: Instant, body: &mut InboundBody) {
        if let Some(costs) = &mut self.costs {
            costs.sending(now, &self.upstream_state.settings().name);
            if costs.counts_request() {
                body.count_into(costs.count_request());
            }
        }
    }

    /// Records whether no server has received the whole request.
    pub(super) fn sent_nothing(&mut self, nothing: bool) {
        if let Some(costs) = self.costs.as_mut().filter(|_| nothing) {
            costs.was_not_sent();
        }
    }

    /// What limits on costs hold of the request.
    pub(super) fn costs_mut(&mut self) -> Option<&mut HeldCosts> {
        self.costs.as_deref_mut()
    }

    /// Records the status of the answer.
    pub(super) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
        self.metrics.answered(status);
    }

    /// Records our answer in place of a server's.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        self.refused = Some(refusal.slug());
        self.answered(refusal.status());
    }

    /// Records the last server tried, and how it failed.
    pub(super) fn asked(&mut self, server: Option<usize>, error: Option<&'static str>) {
        self.server = server;
        self.error = error;
    }

    /// Takes exchanges abandoned while the request holds slots.
    pub(super) fn abandoned_exchanges(&self) -> Option<&AbandonedExchanges> {
        (!self.slots.is_empty()).then_some(&self.custody)
    }

    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Counts the connection as a tunnel until the guard drops.
    pub(super) fn open_tunnel(&self) -> GaugeGuard {
        self.metrics.enter_tunnel()
    }

    /// A tunnel has ended, in order or broken off.
    pub(super) fn tunnel_ended(&mut self, is_whole: bool) {
        let bytes = self.bytes;
        if let Some(costs) = &mut self.costs {
            costs.passed(bytes);
            if is_whole {
                costs.ended();
            }
        }
    }

    pub(super) fn record_body_error(&mut self, error: &BodyError) {
        self.error = Some("body");
        self.upstream_state.metrics().body_errors.increment(1);
        tracing::debug!(%error, "a response was cut short");
    }

    /// The request body failed and ended the response early. The server is not at fault.
    pub(super) fn request_broke(&mut self, refusal: &Refusal, error: &BodyError) {
        self.refused = Some(refusal.slug());
        tracing::debug!(%error, "a request body failed after the response had started");
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let abandoned = self.custody.take();
        if !abandoned.is_empty() {
            let counted = self.metrics.enter_abandoned();
            std::mem::take(&mut self.slots).hold_until_done(abandoned, counted);
        }
        let duration = self.arrived.elapsed();
        self.metrics.request_seconds.record(duration);
        let status = self.status.unwrap_or_else(|| {
            let gone = response::client_gone();
            self.metrics.answered(gone);
            gone
        });
        let cost = self.costs.as_deref_mut().and_then(HeldCosts::settle);
        if let Some(told) = &self.told {
            let went = AccessUpstream {
                upstream: &self.upstream_state.settings().name,
                server: self
                    .server
                    .map(|server| self.upstream_state.server_name(server)),
                error: self.error,
            };
            let cost = cost.map(SettledCost::part);
            let outcome = AccessOutcome {
                went: Some(went),
                cost,
                refused: self.refused,
            };
            told.report(status, outcome, self.bytes, duration);
        }
    }
}

/// Why we wrote the answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum LocalReplyReason {
    /// The client asked for it, or left before any other answer.
    Asked,
    /// A limit denies the request. Holds the seconds until a retry can succeed.
    Denied { retry_after: Option<u32> },
    /// Any other refusal, by name.
    Refused(&'static str),
}

/// Records our answer to a request that was not forwarded. Such an answer is complete at once.
pub(super) fn record_local_reply(
    worker: &Worker,
    request: &RequestContext<'_>,
    status: StatusCode,
    bytes: u64,
    ours: LocalReplyReason,
) {
    let (retry_after, refused) = match ours {
        LocalReplyReason::Asked => (None, None),
        LocalReplyReason::Denied { retry_after } => (retry_after, None),
        LocalReplyReason::Refused(name) => (None, Some(name)),
    };
    let duration = request.decision.arrived.elapsed();
    request.decision.route.metrics.answered(status);
    request
        .decision
        .route
        .metrics
        .request_seconds
        .record(duration);
    if let Some(told) = AccessData::of(worker, request, retry_after) {
        let outcome = AccessOutcome {
            went: None,
            cost: None,
            refused,
        };
        told.report(status, outcome, bytes, duration);
    }
}

/// The data for an access line, a span, or both.
#[derive(Debug)]
struct AccessData {
    access: Option<AccessLog>,
    span: Option<(Spans, trace::SpanContext)>,
    /// No limit rejects the request.
    allowed: bool,
    /// Earlier rejections whose lines were suppressed.
    lines_dropped: u64,
    kept: AccessRecord,
}

/// How a request ended, beside its status.
struct AccessOutcome<'a> {
    went: Option<AccessUpstream<'a>>,
    cost: Option<CostPart<'a>>,
    /// Why we answered in place of a server.
    refused: Option<&'static str>,
}

impl AccessData {
    /// `None` if neither a line nor a span is due.
    fn of(worker: &Worker, request: &RequestContext<'_>, retry_after: Option<u32>) -> Option<Self> {
        if worker.access.is_none() && request.traced.is_none() {
            return None;
        }
        let allowed = request.decision.limits.admitted();
        let logged = worker.access.as_ref().and_then(|access| {
            let lines_dropped = match allowed {
                true => worker.logs_admitted().then_some(0),
                false => worker.active.admit_rejected_line(request.decision.arrived),
            };
            Some((access.clone(), lines_dropped?))
        });
        let traced = request.traced.as_ref().map(|traced| traced.place);
        let span = worker.spans.clone().zip(traced);
        (logged.is_some() || span.is_some()).then(|| {
            let (access, lines_dropped) = logged.unzip();
            Self {
                access,
                span,
                allowed,
                lines_dropped: lines_dropped.unwrap_or(0),
                kept: AccessRecord::of(worker, request, retry_after),
            }
        })
    }

    fn report(
        &self,
        status: StatusCode,
        outcome: AccessOutcome<'_>,
        bytes: u64,
        duration: Duration,
    ) {
        let line = AccessLine {
            error: outcome.refused,
            cost: outcome.cost,
            trace: self.span.as_ref().map(|(_, place)| place.trace_id()),
            lines_dropped: self.lines_dropped,
            ..self.kept.line(status, outcome.went, bytes, duration)
        };
        if let Some(access) = &self.access {
            access.write(&line);
        }
        if let Some((spans, place)) = &self.span {
            spans.push(place.span_of(&line, self.allowed));
        }
    }
}

impl Worker {
    /// Whether an admitted request gets an access line.
    fn logs_admitted(&self) -> bool {
        self.active.logs_all() || self.is_drawn(self.active.snapshot().log.sample_ppm)
    }

    /// Draws true with a probability of `ppm` in a million.
    fn is_drawn(&self, ppm: u32) -> bool {
        ppm > 0 && (u128::from(self.request_ids.draw()) * 1_000_000) >> 64 < u128::from(ppm)
    }

    /// Starts the request's span if it is sampled. Follows a trusted proxy's sampling decision;
    /// samples other requests at random.
    pub(super) fn trace(&self, client: &Client<'_>, headers: &HeaderMap) -> Option<Traced> {
        self.spans.as_ref()?;
        let mut lines = headers.get_all("traceparent").iter();
        let caller = match (lines.next(), lines.next()) {
            (Some(line), None) => trace::Incoming::parse(line.as_bytes()),
            _ => None,
        };
        let sampled = match caller {
            Some(caller) if client.peer_trusted => caller.sampled,
            _ => self.is_drawn(self.active.snapshot().trace.sample_ppm),
        };
        if !sampled {
            return None;
        }
        let place = trace::SpanContext::below(caller, || self.request_ids.draw());
        let traceparent = place.traceparent()?;
        Some(Traced { place, traceparent })
    }

    /// Awaits `wait`. Records the request as abandoned if the client leaves meanwhile.
    pub(super) async fn while_client_stays<T>(
        &self,
        request: &RequestContext<'_>,
        wait: impl Future<Output = T>,
    ) -> T {
        let mut waiting = WaitingRequest {
            worker: self,
            request,
            stayed: false,
        };
        let awaited = wait.await;
        waiting.stayed = true;
        awaited
    }
}

/// A request waiting in the gateway. If it drops before the wait ends, the client has left.
struct WaitingRequest<'a, 'b> {
    worker: &'a Worker,
    request: &'a RequestContext<'b>,
    stayed: bool,
}

impl Drop for WaitingRequest<'_, '_> {
    fn drop(&mut self) {
        if !self.stayed {
            let gone = response::client_gone();
            record_local_reply(self.worker, self.request, gone, 0, LocalReplyReason::Asked);
        }
    }
}

/// The content of an access line, stored until the line is written.
#[derive(Debug)]
struct AccessRecord {
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
    scope: &'static str,
    mode: &'static str,
    key: String,
    capacity: u64,
    remaining: u64,
    retry_after: Option<u32>,
    source: &'static str,
}

impl AccessRecord {
    fn of(worker: &Worker, request: &RequestContext<'_>, retry_after: Option<u32>) -> Self {
        let asked = request.decision.attributes.as_ref();
        let client = asked.map(|asked| &asked.client);
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Self {
            time: SystemTime::now()
                .checked_sub(request.decision.arrived.elapsed())
                .unwrap_or(SystemTime::UNIX_EPOCH),
            request_id: request.request_id.clone(),
            client_ip: client.map(|client| client.address),
            user: owned(client.and_then(|client| client.user)),
            tenant: owned(client.and_then(|client| client.tenant)),
            tier: owned(client.and_then(|client| client.tier)),
            method: request.head.method.clone(),
            host: asked.map(|asked| asked.host.to_string()),
            path: request.head.uri.path().to_owned(),
            route: request.decision.route.name.clone(),
            limit: KeptLimit::of(worker, request, retry_after),
        }
    }

    fn line<'a>(
        &'a self,
        status: StatusCode,
        went: Option<AccessUpstream<'a>>,
        bytes: u64,
        duration: Duration,
    ) -> AccessLine<'a> {
        let limit = self.limit.as_ref().map(|limit| LimitPart {
            name: &limit.name,
            key: limit.key.as_bytes(),
            algorithm: limit.algorithm,
            scope: limit.scope,
            mode: limit.mode,
            capacity: limit.capacity,
            remaining: limit.remaining,
            retry_after: limit.retry_after,
            source: limit.source,
        });
        AccessLine {
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
            cost: None,
            error: None,
            trace: None,
            lines_dropped: 0,
            bytes,
            duration,
        }
    }
}

impl KeptLimit {
    fn of(worker: &Worker, request: &RequestContext<'_>, retry_after: Option<u32>) -> Option<Self> {
        let standings = request.decision.limits.standings();
        let index = standings.binding()?;
        let outcome = request.decision.limits.enforced().get(index)?;
        let rule = &outcome.applied.limit.rule;
        let standing = standings.get(index)?;
        let plan = &worker.active.plan;
        let key = request.decision.with_subject(
            &plan.table,
            request.decision.attributes.as_ref()?,
            |subject| {
                rule.key
                    .readable(&worker.active.process.hasher, plan.prefixes, subject)
            },
        );
        Some(Self {
            name: rule.name.clone(),
            algorithm: rule.algorithm,
            scope: rule.settings.scope(),
            mode: rule.mode().as_str(),
            key,
            capacity: standing.capacity,
            remaining: standing.remaining,
            retry_after,
            source: match outcome.source {
                None => "local",
                Some(DecisionSource::Lease) => "lease",
                Some(DecisionSource::Redis) => "redis",
                Some(DecisionSource::Fallback) => "fallback",
            },
        })
    }
}
