//! Decisions that were made, remembered with their reasons.

use std::{sync::Arc, time::SystemTime};

use super::{
    THEN, denied, refused,
    report::{Answer, Explanation},
};
use crate::{
    gateway::{
        RequestContext, Worker,
        admit::{self, Noted, What},
        notebook::Remembered,
        plan::LimitPlan,
        request_context::Resolved,
    },
    response::Refusal,
};

impl Worker {
    /// Remembers a decision and why it was made: every rejection, as far as there is time for it, and now and then an admission.
    pub(in crate::gateway) fn remember(
        &self,
        request: &RequestContext<'_>,
        resolved: &Resolved<'_>,
    ) {
        let admitted = request.decision.verdict.admitted();
        if admitted && !self.admissions.is_next(request.decision.decided_at) {
            return;
        }
        let mut pairs = request
            .decision
            .met
            .iter()
            .zip(request.decision.verdict.iter());
        let denying = pairs.find(|(_, finding)| finding.denied());
        let key = denying.and_then(|(met, _)| met.key());
        if self.notebook.may_explain(request.decision.decided_at, key) {
            self.notebook.remember(Remembered {
                at: SystemTime::now(),
                request_id: request.request_id.to_str().unwrap_or_default().to_owned(),
                admitted,
                explanation: Arc::new(self.recall(request, resolved)),
            });
        }
    }

    /// Explains a decision that has been made.
    #[cold]
    fn recall(&self, request: &RequestContext<'_>, resolved: &Resolved<'_>) -> Explanation {
        let (from, headers) = (request.from, &request.head.headers);
        let mut explained = self.reason(from.ip, from.certificate.as_deref(), headers, THEN);
        explained.asked = Some(self.asked(request, &resolved.target));
        let noted = self.noted_again(request, resolved.rejected.is_some());
        explained.limits = self.limits(request, &noted);
        explained.answer = match (&resolved.rejected, &resolved.found) {
            _ if !request.decision.verdict.admitted() => denied(request),
            (Some(rejected), _) => Answer::Refused(refused(&Refusal::Unauthorized {
                challenge: rejected.challenge(),
            })),
            (None, Err(refusal)) => Answer::Refused(refused(refusal)),
            (None, Ok(())) => match self.sent_on(request, &resolved.target, None) {
                Some(forwarded) => Answer::Forwarded(forwarded),
                None => Answer::Refused(refused(&Refusal::Internal)),
            },
        };
        explained.clip();
        explained
    }

    /// What each limit of the route had to do with the request.
    fn noted_again<'a>(
        &self,
        request: &RequestContext<'a>,
        guesses: bool,
    ) -> Vec<(&'a LimitPlan, Noted<'a>)> {
        let mut noted = Vec::new();
        let Some(asked) = &request.decision.attributes else {
            return noted;
        };
        let now_ns = self.shared.process.nanoseconds(request.decision.decided_at);
        request
            .decision
            .with_subject(&self.shared.plan.table, asked, |subject| {
                for limit in &request.decision.route.limits {
                    let stance = self.stance(asked, limit, guesses, subject);
                    stance.noted(limit, &mut noted);
                    if let What::Met(met, false) = &stance.what
                        && request.decision.verdict.admitted()
                        && !met.is_shared()
                    {
                        let stands = self
                            .shared
                            .process
                            .store
                            .peek(now_ns, &[met.charge(request.decision.route)]);
                        let finding = stands.findings.first().copied();
                        noted.extend(finding.map(|finding| (limit, Noted::LookedOn(finding))));
                    }
                }
            });
        noted
    }

    /// Counts a rejection among those of its key.
    pub(in crate::gateway) fn count_rejected(
        &self,
        request: &RequestContext<'_>,
        met: &admit::Met<'_>,
    ) {
        let rule = &met.limit.rule;
        let name = || {
            request
                .decision
                .attributes
                .as_ref()
                .map_or_else(String::new, |asked| {
                    request
                        .decision
                        .with_subject(&self.shared.plan.table, asked, |subject| {
                            rule.key.readable(
                                &self.shared.process.hasher,
                                self.shared.plan.prefixes,
                                subject,
                            )
                        })
                })
        };
        self.notebook
            .rejected(&rule.name, met.key(), request.decision.decided_at, name);
    }
}
