//! Explains decisions after they were made, for the decision log.

use std::{sync::Arc, time::SystemTime};

use super::{
    THEN, denied, refused,
    report::{ExplainedOutcome, Explanation},
};
use crate::{
    gateway::{
        applied_limit::{Applicability, AppliedLimit},
        decision_log::RememberedDecision,
        plan::LimitPlan,
        request_context::RequestContext,
        request_context::Resolved,
        worker::Worker,
    },
    response::Refusal,
};

impl Worker {
    /// Logs a decision with its reasons: every rejection within the rate limits, and an admission
    /// now and then.
    pub(in crate::gateway) fn remember(
        &self,
        request: &RequestContext<'_>,
        resolved: &Resolved<'_>,
    ) {
        let limits = &request.decision.limits;
        let admitted = limits.admitted();
        if admitted && !self.admissions.is_next(request.decision.decided_at) {
            return;
        }
        let denying = limits.enforced().iter().find(|one| one.denies());
        let key = denying.and_then(|one| one.applied.key());
        if self
            .decision_log
            .may_explain(request.decision.decided_at, key)
        {
            self.decision_log.remember(RememberedDecision {
                at: SystemTime::now(),
                request_id: request.request_id.to_str().unwrap_or_default().to_owned(),
                admitted,
                explanation: Arc::new(self.recall(request, resolved)),
            });
        }
    }

    /// Explains a decision already made.
    #[cold]
    fn recall(&self, request: &RequestContext<'_>, resolved: &Resolved<'_>) -> Explanation {
        let (from, headers) = (request.from, &request.head.headers);
        let mut explained =
            self.explain_identity(from.ip, from.certificate.as_deref(), headers, THEN);
        explained.asked = Some(self.asked(request, &resolved.target));
        let noted = self.recompute_limits(request, resolved.rejected.is_some());
        explained.limits = self.limits(request, &noted);
        explained.answer = match (&resolved.rejected, &resolved.found) {
            _ if !request.decision.limits.admitted() => denied(request),
            (Some(rejected), _) => ExplainedOutcome::Refused(refused(&Refusal::Unauthorized {
                challenge: rejected.challenge(),
            })),
            (None, Err(refusal)) => ExplainedOutcome::Refused(refused(refusal)),
            (None, Ok(())) => match self.sent_on(request, &resolved.target, None) {
                Some(forwarded) => ExplainedOutcome::Forwarded(forwarded),
                None => ExplainedOutcome::Refused(refused(&Refusal::Internal)),
            },
        };
        explained.clip();
        explained
    }

    /// Recomputes which limits of the route apply.
    fn recompute_limits<'a>(
        &self,
        request: &RequestContext<'a>,
        guesses: bool,
    ) -> Vec<(&'a LimitPlan, Applicability<'a>)> {
        let Some(attributes) = request.attributes() else {
            return Vec::new();
        };
        let (table, route) = (&self.active.plan.table, request.decision.route);
        let known = request.decision.known_cost();
        request.decision.with_subject(table, attributes, |subject| {
            let limits = route.limits.iter();
            let applicability =
                |limit| self.applicability(attributes, limit, guesses, subject, &known);
            limits.map(|limit| (limit, applicability(limit))).collect()
        })
    }

    /// Counts a rejection of its key.
    pub(in crate::gateway) fn count_rejected(
        &self,
        request: &RequestContext<'_>,
        applied: &AppliedLimit<'_>,
    ) {
        let rule = &applied.limit.rule;
        let decision = &request.decision;
        let name = || {
            request.attributes().map_or_else(String::new, |attributes| {
                decision.with_subject(&self.active.plan.table, attributes, |subject| {
                    rule.key.readable(
                        &self.active.process.hasher,
                        self.active.plan.prefixes,
                        subject,
                    )
                })
            })
        };
        self.decision_log
            .rejected(&rule.name, applied.key(), decision.decided_at, name);
    }
}
