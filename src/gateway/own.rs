//! The caller's own quotas: a page that says how each limit stands that counts this caller, and charges none of them.
//!
//! The page meets one limit of its own, by address, so that asking is no way to keep the gateway busy. A caller whose credential does not
//! verify never sees it: guessing meets what it meets elsewhere.

use http::{Response, StatusCode};

use super::{
    answer,
    applied_limit::{Applicability, AppliedLimit},
    body::Body,
    plan::LimitPlan,
    record::{self, Ours},
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
    /// Answers with every limit that the caller may know of, in the order of the configuration.
    pub(super) fn own_quotas(&self, request: &RequestContext<'_>) -> Response<Body> {
        let plan = &self.shared.plan;
        let mut limits: Vec<&LimitPlan> = plan.met().collect();
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
            self.shared.process.wall_clock(request.decision.decided_at),
        );
        let bytes = response.body().len() as u64;
        record::note(self, request, StatusCode::OK, bytes, Ours::Asked);
        response.map(Body::authored)
    }

    /// How one limit stands to the caller; `None` where it does not count them, acts on nobody, or is not disclosed.
    fn own_quota<'a>(
        &self,
        request: &RequestContext<'_>,
        limit: &'a LimitPlan,
    ) -> Option<OwnQuota<'a>> {
        let (rule, plan) = (&limit.rule, &self.shared.plan);
        if !rule.settings.disclose || rule.mode() != config::Mode::Enforce {
            return None;
        }
        let asked = request.decision.attributes.as_ref()?;
        // how the limit stands to a request that costs one unit
        let bucket = request
            .decision
            .with_subject(&plan.table, asked, |subject| {
                self.bucket(asked, limit, subject, 1)
            });
        let applied = match bucket {
            Applicability::Applies(applied) => applied,
            // what the page is asked for says nothing of what other requests are for
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
        let standing = self.stands(request, &applied)?;
        let stands = Some(answer::report(&applied, &standing));
        Some(OwnQuota { policy, stands })
    }

    /// As far as this gateway knows, where others keep the limit, too.
    fn stands(&self, request: &RequestContext<'_>, applied: &AppliedLimit<'_>) -> Option<Standing> {
        let shared = &self.shared;
        let now_ns = shared.process.nanoseconds(request.decision.decided_at);
        let verdict = match (&shared.budget, applied.claim()) {
            (Some(budget), Some(claim)) => budget.peek(now_ns, &[claim]),
            _ => shared.process.store.peek(now_ns, &[applied.charge()]),
        };
        let finding = verdict.findings.first()?;
        Some(applied.closed_or(*finding).standing())
    }
}
