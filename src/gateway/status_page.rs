//! The status page: shows a caller the state of its limits, and charges none of them.
//!
//! A built-in limit by address applies to the page, so that polling it cannot keep the gateway
//! busy. A caller with an invalid credential never sees it; the limits on guessing apply instead.

use http::{Response, StatusCode};

use super::{
    answer,
    applied_limit::{Applicability, AppliedLimit},
    body::Body,
    cost_rule::KnownCost,
    plan::LimitPlan,
    record::{self, LocalReplyReason},
    request_context::RequestContext,
    status_limit,
    worker::Worker,
};
use crate::{
    config,
    limit::Standing,
    response::{self, OwnQuota},
};

impl Worker {
    /// Lists every limit disclosed to the caller, in configuration order.
    pub(super) fn own_quotas(&self, request: &RequestContext<'_>) -> Response<Body> {
        let plan = &self.active.plan;
        let mut limits: Vec<&LimitPlan> = plan.limits_in_use().collect();
        limits.retain(|limit| limit.rule.name != status_limit::NAME);
        limits.sort_by_key(|limit| limit.rule.place);
        let quotas: Vec<OwnQuota<'_>> = limits
            .into_iter()
            .filter_map(|limit| self.own_quota(request, limit))
            .collect();
        let standings = request.decision.limits.standings();
        let response = response::own_quotas(
            &quotas,
            &answer::reports(request, &standings),
            &answer::asked(request),
            &plan.response,
            &mut self.fields.borrow_mut(),
            self.active.process.wall_clock(request.decision.decided_at),
        );
        let bytes = response.body().len() as u64;
        record::record_local_reply(
            self,
            request,
            StatusCode::OK,
            bytes,
            LocalReplyReason::Asked,
        );
        response.map(Body::authored)
    }

    /// The state of one limit; `None` if it does not count the caller, is not enforced or is not
    /// disclosed.
    fn own_quota<'a>(
        &self,
        request: &RequestContext<'_>,
        limit: &'a LimitPlan,
    ) -> Option<OwnQuota<'a>> {
        let (rule, plan) = (&limit.rule, &self.active.plan);
        if !rule.settings.disclose || rule.mode() != config::Mode::Enforce {
            return None;
        }
        let asked = request.decision.attributes.as_ref()?;
        // Assume a request that costs one unit.
        let bucket = request
            .decision
            .with_subject(&plan.table, asked, |subject| {
                self.bucket(asked, limit, subject, &KnownCost::ONE)
            });
        let applied = match bucket {
            Applicability::Applies(applied) => applied,
            // This key depends on the request's target, and the page's own target says nothing
            // about others.
            Applicability::NoKey | Applicability::MissingKey if rule.key.depends_on_target() => {
                let bucket = (rule.tier(&asked.client), None);
                AppliedLimit::new(limit, bucket, 1, None, None)
            }
            _ => return None,
        };
        let policy = &rule.policies[applied.tier()];
        if rule.key.depends_on_target() {
            let stands = None;
            return Some(OwnQuota { policy, stands });
        }
        if !rule.enforces(rule.mode(), applied.key()) {
            return None;
        }
        let standing = self.standing(request, &applied)?;
        let stands = Some(answer::report(&applied, &standing));
        Some(OwnQuota { policy, stands })
    }

    /// The standing known to this gateway; for a shared limit it may lag behind Redis.
    fn standing(
        &self,
        request: &RequestContext<'_>,
        applied: &AppliedLimit<'_>,
    ) -> Option<Standing> {
        let shared = &self.active;
        let now_ns = shared.process.nanoseconds(request.decision.decided_at);
        let verdict = match (&shared.budget, applied.claim()) {
            (Some(budget), Some(claim)) => budget.peek(now_ns, &[claim]),
            _ => shared.process.store.peek(now_ns, &[applied.charge()]),
        };
        let finding = verdict.findings.first()?;
        Some(applied.closed_or(*finding).standing())
    }
}
