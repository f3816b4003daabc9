//! Handles limits keyed by body fields: a step of every decision.
//!
//! ```text
//! limits that need no body ─▶ refuse already? 429, no byte of the body is read, nothing charged
//!           │ no
//!     read the body ─▶ no room for it? 503, nothing charged
//!           │
//!     all limits together: charged, or not at all ─▶ only now 413, 400, 408, if the body failed
//! ```
//!
//! A failed body has unknown fields, and is charged like a complete one. Otherwise a client could
//! send truncated bodies for free.

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    applied_limit::{Applicability, LimitOutcomes},
    body_source::{BodySource, MAX_READ_AHEAD_BYTES},
    decision_context::DecisionContext,
    decision_effect::DecisionEffect,
    observer::DecisionObserver,
    plan::{LimitPlan, RoutePlan},
    refusals::LACKS_KEY,
    request_context::RequestContext,
    worker::Worker,
};
use crate::{
    identity::{BodyFields, BodyFormat},
    response::Refusal,
};

impl Worker {
    /// Reads the body fields that key limits. Returns true, without reading, if a limit that needs
    /// no body denies the request; that is then the verdict.
    pub(super) async fn read_body_fields<'a>(
        &self,
        request: &mut RequestContext<'a>,
        guesses: bool,
        body: &mut impl BodySource,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<bool, Refusal> {
        let decision = &mut request.decision;
        decision.body_failed = body.fault().map(Box::new);
        let wanted = &decision.route.wanted_fields;
        let reads_costs = decision.route.costs.reads_request;
        if body.is_empty() || wanted.is_empty() && !reads_costs {
            return Ok(false);
        }
        let format = BodyFormat::of(&request.head.headers);
        let is_known = format != BodyFormat::Unclear || reads_costs;
        let is_known = is_known && decision.body_failed.is_none();
        let mut whole = None;
        if is_known {
            if self.deny_before_body(decision, guesses, effect, observer)? {
                return Ok(true);
            }
            let most = match reads_costs {
                true => usize::try_from(self.body_bounds(request).max_bytes).unwrap_or(usize::MAX),
                false => MAX_READ_AHEAD_BYTES,
            };
            let read = body.read_ahead(request, most).await;
            let decision = &mut request.decision;
            match read {
                Ok(read) => whole = read,
                Err(refusal) if refusal.is_temporary() => return Err(refusal),
                Err(refusal) => decision.body_failed = Some(Box::new(refusal)),
            }
            decision.decided_at = Instant::now();
        }
        if whole.as_ref().is_some_and(Bytes::is_empty) {
            // An empty body counts as none, however it is framed.
            return Ok(false);
        }
        if let Some(whole) = &whole {
            self.read_cost_facts(request, whole, body);
        }
        if !wanted.is_empty() {
            // A body that is read for its cost alone may be longer.
            let short = whole.filter(|bytes| bytes.len() <= MAX_READ_AHEAD_BYTES);
            let fields = short.map(|bytes| format.read(&bytes, wanted));
            request.decision.body = Some(fields.unwrap_or_else(BodyFields::unclear));
        }
        Ok(false)
    }

    /// Asks the limits that need no body, and charges none. A denial is the verdict. Shared limits
    /// are asked later: only Redis knows their state.
    fn deny_before_body<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        guesses: bool,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<bool, Refusal> {
        let route: &'a RoutePlan = decision.route;
        let Some(attributes) = &decision.attributes else {
            return Ok(false);
        };
        let now_ns = self.active.process.nanoseconds(decision.decided_at);
        let needs_body = |limit: &LimitPlan| limit.rule.needs_body();
        let known = decision.known_cost();
        let table = &self.active.plan.table;
        let mut limits = decision.with_subject(table, attributes, |subject| {
            let applicability =
                |limit| self.applicability(attributes, limit, guesses, subject, &known);
            let mut limits = LimitOutcomes::default();
            for limit in route.limits.iter().filter(|limit| !needs_body(limit)) {
                match applicability(limit) {
                    Applicability::MissingKey => {
                        observer.limit(limit, &Applicability::MissingKey);
                        return Err(LACKS_KEY);
                    }
                    Applicability::Applies(applied)
                        if applied.is_enforced && !applied.is_shared() =>
                    {
                        limits.push(applied);
                    }
                    _ => {}
                }
            }
            self.ask_local(now_ns, limits.enforced_mut(), DecisionEffect::Look);
            if !limits.admitted() {
                for limit in &route.limits {
                    match needs_body(limit) {
                        true => observer.limit(limit, &Applicability::NotRead),
                        false => observer.limit(limit, &applicability(limit)),
                    }
                }
            }
            Ok(limits)
        })?;
        if limits.admitted() {
            return Ok(false);
        }
        self.charge_rejected(decision, now_ns, &mut limits, effect);
        decision.limits = limits;
        Ok(true)
    }
}
