//! Decisions that were made, remembered with their reasons.

use std::{sync::Arc, time::SystemTime};

use super::{
    THEN, denied, refused,
    report::{Answer, Explanation},
};
use crate::{
    gateway::{
        Exchange, Worker,
        admit::{self, Noted, What},
        exchange::Understood,
        notebook::Remembered,
        plan::LimitPlan,
    },
    response::Refusal,
};

impl Worker {
    /// Remembers a decision and why it was made: every rejection, as far as there is time for it, and now and then an admission.
    pub(in crate::gateway) fn remember(
        &self,
        exchange: &Exchange<'_>,
        understood: &Understood<'_>,
    ) {
        let admitted = exchange.verdict.admitted();
        if self.only_looks || admitted && !self.admissions.is_next(exchange.decided_at) {
            return;
        }
        let mut pairs = exchange.met.iter().zip(exchange.verdict.iter());
        let denying = pairs.find(|(_, finding)| finding.denied());
        let key = denying.and_then(|(met, _)| met.key());
        if self.notebook.may_explain(exchange.decided_at, key) {
            self.notebook.remember(Remembered {
                at: SystemTime::now(),
                request_id: exchange.request_id.to_str().unwrap_or_default().to_owned(),
                admitted,
                explanation: Arc::new(self.recall(exchange, understood)),
            });
        }
    }

    /// Explains a decision that has been made.
    #[cold]
    fn recall(&self, exchange: &Exchange<'_>, understood: &Understood<'_>) -> Explanation {
        let (from, headers) = (exchange.from, &exchange.head.headers);
        let mut explained = self.reason(from.ip, from.certificate.as_deref(), headers, THEN);
        explained.asked = Some(self.asked(exchange, &understood.target));
        let noted = self.noted_again(exchange, understood.rejected.is_some());
        explained.limits = self.limits(exchange, &noted);
        explained.answer = match (&understood.rejected, &understood.found) {
            _ if !exchange.verdict.admitted() => denied(exchange),
            (Some(rejected), _) => Answer::Refused(refused(&Refusal::Unauthorized {
                challenge: rejected.challenge(),
            })),
            (None, Err(refusal)) => Answer::Refused(refused(refusal)),
            (None, Ok(())) => match self.sent_on(exchange, &understood.target, None) {
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
        exchange: &Exchange<'a>,
        guesses: bool,
    ) -> Vec<(&'a LimitPlan, Noted<'a>)> {
        let mut noted = Vec::new();
        let Some(asked) = &exchange.asked else {
            return noted;
        };
        let now_ns = self.shared.nanoseconds(exchange.decided_at);
        exchange.with_subject(&self.shared.plan.table, asked, |subject| {
            for limit in &exchange.route.limits {
                let stance = self.stance(asked, limit, guesses, subject);
                stance.noted(limit, &mut |limit, what| noted.push((limit, what)));
                if let What::Met(met, false) = &stance.what
                    && exchange.verdict.admitted()
                    && !met.is_shared()
                {
                    let stands = self
                        .shared
                        .store
                        .peek(now_ns, &[met.charge(exchange.route)]);
                    let finding = stands.findings.first().copied();
                    noted.extend(finding.map(|finding| (limit, Noted::LookedOn(finding))));
                }
            }
        });
        noted
    }

    /// Counts a rejection among those of its key.
    pub(in crate::gateway) fn count_rejected(&self, exchange: &Exchange<'_>, met: &admit::Met<'_>) {
        let rule = &met.limit.rule;
        let name = || {
            exchange.asked.as_ref().map_or_else(String::new, |asked| {
                exchange.with_subject(&self.shared.plan.table, asked, |subject| {
                    rule.key
                        .readable(&self.shared.hasher, self.shared.plan.prefixes, subject)
                })
            })
        };
        self.notebook
            .rejected(&rule.name, met.key(), exchange.decided_at, name);
    }
}
