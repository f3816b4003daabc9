//! Builds the answer to the client: the upstream's response with our fields, a denial or a refusal.

use arrayvec::ArrayVec;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode, Version,
    header::{CONNECTION, UPGRADE, VIA},
};

use super::{
    applied_limit::AppliedLimit,
    body::Body,
    body::ResponseSource,
    plan::LimitPlan,
    record::{self, LocalReplyReason, Record},
    request_context::RequestContext,
    worker::Worker,
};
use crate::{
    identity::Rejected,
    limit::{MAX_LIMITS, Standing, Standings},
    listener::{
        Peer,
        inbound::InboundBody,
        request::{self},
    },
    response::{self, LimitReport, Refusal, RejectedRequest, X_RATELIMIT_WARNING, X_REQUEST_ID},
    upstream::{self, Tunnel, UpstreamError},
};

impl upstream::headers::InterimSink for Peer {
    fn send_interim(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        self.pass_on_interim(status, headers)
    }
}

/// Time one decision in this many: reading the clock twice costs as much as a decision.
const TIMED: u32 = 16;

impl Worker {
    /// Returns the upstream's response, with the fields that describe the limits.
    pub(super) fn forward_response(
        &self,
        request: &RequestContext<'_>,
        mut response: Response<ResponseSource>,
        mut record: Record,
    ) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return match response.body_mut().take_tunnel() {
                Some(tunnel) => self.switch(request, response, tunnel, record),
                None => self.refuse(request, &Refusal::UpstreamProtocol, Some(record)),
            };
        }
        if !response.body().request_was_sent() {
            request.from.leave_body_unread();
        }
        if let Some(unsent) = response.body_mut().unsent_mut() {
            // Both sides are sending: end the exchange only if both are silent for `body_timeout`.
            unsent.may_pause();
        }
        self.describe(request, &mut response, &mut record);
        // HTTP/1 may leave no room for trailers.
        let is_http2 = request.head.version == Version::HTTP_2;
        let grpc = request.grpc.filter(|_| is_http2);
        if response.body().has_ended()
            && let Some(costs) = record.costs_mut()
        {
            costs.ended();
        }
        response.map(|source| Body::recorded(source, record, grpc))
    }

    /// Handles a 101: hands the connection to the upstream. The tunnel holds the slots until it
    /// ends.
    fn switch(
        &self,
        request: &RequestContext<'_>,
        mut response: Response<ResponseSource>,
        mut tunnel: Tunnel,
        mut record: Record,
    ) -> Response<Body> {
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        self.describe(request, &mut response, &mut record);
        request.from.upgrade_to(Box::new(move |client| {
            Box::pin(async move {
                let _open = record.open_tunnel();
                let relayed = tunnel.relay(client, |bytes| record.sent(bytes)).await;
                record.tunnel_ended(relayed.is_ok());
                if let Err(ended) = relayed {
                    tracing::debug!(%ended, "a tunnel ended early");
                    if let Some(custody) = record.abandoned_exchanges() {
                        custody.keep(tunnel.abandon());
                    }
                }
            })
        }));
        response.map(|_| Body::authored(Bytes::new()))
    }

    /// Records that the response begins, and adds our fields.
    fn describe<B>(
        &self,
        request: &RequestContext<'_>,
        response: &mut Response<B>,
        record: &mut Record,
    ) {
        let status = response.status();
        let headers = response.headers_mut();
        if let Some(costs) = record.costs_mut() {
            costs.answered(&request.head.method, status, headers);
        }
        headers.insert(&X_REQUEST_ID, request.request_id.clone());
        if let Some(limit) = request.decision.warning
            && let Ok(limit) = HeaderValue::from_str(limit)
        {
            headers.insert(&X_RATELIMIT_WARNING, limit);
        }
        let settings = &self.active.plan.response;
        self.fields.borrow_mut().write(
            headers,
            status,
            &reports(request, &request.decision.limits.standings()),
            settings,
            self.active.process.wall_clock(request.decision.decided_at),
        );
        record.answered(status);
        self.count_answer(&request.decision, status);
    }

    /// 429: a limit denies the request.
    pub(super) fn deny(&self, request: &RequestContext<'_>) -> Response<Body> {
        let standings = request.decision.limits.standings();
        // If an undisclosed limit denies the request, report no other limit either.
        let met = if is_undisclosed(request) {
            ArrayVec::new()
        } else {
            reports(request, &standings)
        };
        let denial = RejectedRequest::new(&met, self.return_after_ns(request, &standings));
        let settings = &self.active.plan.response;
        let response = response::too_many_requests(
            &denial,
            &asked(request),
            settings,
            &mut self.fields.borrow_mut(),
            self.active.process.wall_clock(request.decision.decided_at),
        );
        let retry_after = denial.retry_after();
        let binding = standings
            .binding()
            .and_then(|index| request.decision.limits.enforced().get(index));
        if let Some((binding, seconds)) = binding.zip(retry_after) {
            binding
                .applied
                .limit
                .rule
                .metrics
                .retry_after_seconds
                .record(f64::from(seconds));
        }
        record::record_local_reply(
            self,
            request,
            // Log the denial as 429: a gRPC client receives it in a 200.
            StatusCode::TOO_MANY_REQUESTS,
            response.body().len() as u64,
            LocalReplyReason::Denied { retry_after },
        );
        response.map(Body::authored)
    }

    /// The wait for `Retry-After`: the longest wait plus random jitter, so that clients denied
    /// together do not return together. The denying limits bound the jitter.
    fn return_after_ns(&self, request: &RequestContext<'_>, standings: &Standings) -> Option<u64> {
        let wait_ns = standings.denial()?.retry_after_ns?;
        let limits = request.decision.limits.enforced().iter();
        let jitter = limits
            .filter(|one| one.denies())
            .map(|one| one.applied.limit.rule.settings.retry_jitter)
            .max()?;
        if jitter.ppm() == 0 {
            return Some(wait_ns);
        }
        let most = u128::from(wait_ns) * u128::from(jitter.ppm()) / 1_000_000;
        let part = (most * u128::from(self.request_ids.draw())) >> 64;
        Some(wait_ns.saturating_add(u64::try_from(part).unwrap_or(u64::MAX)))
    }

    /// Any answer of ours but 429. `record` is set if the request was forwarded.
    pub(super) fn refuse(
        &self,
        request: &RequestContext<'_>,
        refusal: &Refusal,
        record: Option<Record>,
    ) -> Response<Body> {
        let settings = &self.active.plan.response;
        let asked = asked(request);
        let mut response = response::refuse(refusal, &asked, settings.body);
        let status = refusal.status();
        if asked.grpc.is_none() {
            self.fields.borrow_mut().write(
                response.headers_mut(),
                status,
                &reports(request, &request.decision.limits.standings()),
                settings,
                self.active.process.wall_clock(request.decision.decided_at),
            );
        }
        self.count_answer(&request.decision, status);
        match record {
            Some(mut record) => {
                record.refused(refusal);
                response.map(|body| Body::recorded(ResponseSource::authored(body), record, None))
            }
            None => {
                let (bytes, ours) = (
                    response.body().len() as u64,
                    LocalReplyReason::Refused(refusal.slug()),
                );
                record::record_local_reply(self, request, status, bytes, ours);
                response.map(Body::authored)
            }
        }
    }

    /// Counts the decision of each limit.
    pub(super) fn note_decision(&self, request: &RequestContext<'_>) {
        let admitted = request.decision.limits.admitted();
        for one in request.decision.limits.enforced() {
            let decisions = &one.applied.limit.decisions;
            if !admitted {
                if one.denies() {
                    decisions.rejected.increment(1);
                    self.count_rejected(request, &one.applied);
                }
            } else if one.finding.is_some_and(|finding| finding.delay_ns() > 0) {
                decisions.delayed.increment(1);
            } else {
                decisions.admitted.increment(1);
            }
        }
        let count = self.decisions.get();
        self.decisions.set(count.wrapping_add(1));
        if count.is_multiple_of(TIMED) {
            self.active
                .process
                .decision_seconds
                .record(request.decision.arrived.elapsed());
        }
    }

    /// 401, counted by cause.
    pub(super) fn unauthorized(&self, rejected: &Rejected) -> Refusal {
        self.active.plan.count_rejected(rejected);
        Refusal::Unauthorized {
            challenge: rejected.challenge(),
        }
    }

    /// 502, 503 or 504; logged at most once a second per upstream.
    pub(super) fn upstream_failed(
        &self,
        request: &RequestContext<'_>,
        server: Option<usize>,
        error: &UpstreamError,
    ) -> Refusal {
        let index = request.decision.route.upstream;
        let upstream_state = &self.active.plan.upstreams[index];
        if let Some(suppressed) = self.warnings[index].speak() {
            let (upstream, kind) = (&upstream_state.settings().name, error.kind());
            let server = server.map(|server| upstream_state.server_name(server));
            let request_id = request.request_id.to_str().unwrap_or_default();
            tracing::warn!(upstream, server, kind, request_id, suppressed, %error, "the upstream gave no response");
        }
        match error {
            UpstreamError::Connect(_) | UpstreamError::Tls(_) | UpstreamError::Closed(_) => {
                Refusal::UpstreamUnreachable
            }
            UpstreamError::Busy(_) | UpstreamError::Refused(_) => Refusal::UpstreamBusy,
            UpstreamError::Timeout(_) => Refusal::UpstreamTimeout,
            UpstreamError::Protocol(_) => Refusal::UpstreamProtocol,
            UpstreamError::Broken(wait) => Refusal::UpstreamBroken {
                retry_after: u32::try_from(wait.as_millis().div_ceil(1_000).max(1))
                    .unwrap_or(u32::MAX),
            },
        }
    }
}

/// The disclosed limits that apply, as reported to the client. The binding limit comes first.
pub(super) fn reports<'a>(
    request: &'a RequestContext<'_>,
    standings: &Standings,
) -> ArrayVec<LimitReport<'a>, MAX_LIMITS> {
    let binding = standings.binding();
    let limits = request.decision.limits.enforced();
    let others = (0..limits.len()).filter(|&index| Some(index) != binding);
    let in_order = binding.into_iter().chain(others);
    in_order
        .filter_map(|index| limits.get(index).zip(standings.get(index)))
        .filter(|(one, _)| one.applied.limit.rule.settings.disclose)
        .map(|(one, standing)| report(&one.applied, standing))
        .collect()
}

/// The report to the client about one limit.
pub(super) fn report<'a>(applied: &AppliedLimit<'a>, standing: &Standing) -> LimitReport<'a> {
    let limit: &'a LimitPlan = applied.limit;
    LimitReport {
        policy: &limit.rule.policies[applied.tier()],
        remaining: standing.remaining,
        available_ns: standing.retry_after_ns.unwrap_or(standing.next_unit_ns),
        reset_ns: standing.reset_ns,
        denied: standing.denied,
        never: standing.never,
        closed: applied.block.is_some(),
    }
}

/// Whether an undisclosed limit denies the request.
fn is_undisclosed(request: &RequestContext<'_>) -> bool {
    let mut limits = request.decision.limits.enforced().iter();
    limits.any(|one| one.denies() && !one.applied.limit.rule.settings.disclose)
}

pub(super) fn asked<'a>(request: &'a RequestContext<'_>) -> response::RequestFacts<'a> {
    let head = request.head;
    response::RequestFacts {
        is_head: head.method == Method::HEAD,
        version: head.version,
        request_id: Some(&request.request_id),
        grpc: request.grpc,
    }
}

/// Answers without reading the request body. HTTP/1 responses then carry `Connection: close`.
pub(super) fn leave_unread(
    body: &InboundBody,
    request: &RequestContext<'_>,
    mut response: Response<Body>,
) -> Response<Body> {
    if !body.has_ended() && request.head.version < Version::HTTP_2 {
        request.from.leave_body_unread();
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Closes the connection after a refused WebSocket upgrade, because bytes that are not HTTP may
/// follow the request (RFC 9931 §4).
pub(super) fn refuse_upgrade(
    request: &RequestContext<'_>,
    mut response: Response<Body>,
) -> Response<Body> {
    if request.may_upgrade
        && response.status() != StatusCode::SWITCHING_PROTOCOLS
        && request::asks_for_websocket(request.head)
    {
        let headers = response.headers_mut();
        let connection = match headers.contains_key(UPGRADE) {
            true => "close, upgrade",
            false => "close",
        };
        headers.insert(CONNECTION, HeaderValue::from_static(connection));
    }
    response
}

/// Whether this process has forwarded the request before.
pub(super) fn has_via(headers: &HeaderMap, pseudonym: &str) -> bool {
    let mut lines = headers.get_all(VIA).iter();
    lines.any(|line| {
        line.as_bytes()
            .windows(pseudonym.len())
            .any(|part| part == pseudonym.as_bytes())
    })
}
