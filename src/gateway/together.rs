//! Limits that gateways share, decided together with those of this process: all are charged, or none.

use arrayvec::ArrayVec;

use super::{
    Worker,
    admit::Met,
    decide::DecisionEffect,
    decision_context::{DecisionContext, PerLimit},
};
use crate::{
    budget::{Budget, Claim, Decided, Lent, Name, Source, Unavailable},
    config::Mode,
    limit::{Charge, MAX_LIMITS, Verdict},
    response::Refusal,
};

/// What was decided together with other gateways.
#[derive(Debug, Default)]
pub(super) struct Together<'a> {
    /// In the order of the limits.
    pub(super) verdict: Verdict<'a>,
    /// What the request holds of them.
    pub(super) lent: Vec<Lent>,
    /// Who decided, in the same order; `None` where the limit is this process's own.
    pub(super) sources: PerLimit<Option<Source>>,
}

impl Worker {
    /// What limits of which some are shared decide. Waits only where Redis has to be asked. 503 where Redis does not answer
    /// and a limit admits nothing without it.
    pub(super) async fn ask_together<'a>(
        &self,
        budget: &Budget,
        decision: &DecisionContext<'_>,
        now_ns: u64,
        met: &[Met<'a>],
        effect: DecisionEffect,
    ) -> Result<Together<'a>, Refusal> {
        let (route, store) = (decision.route, &self.shared.process.store);
        let local = |later: bool| -> ArrayVec<Charge<'a>, MAX_LIMITS> {
            let chosen = met
                .iter()
                .filter(move |met| !met.is_shared() && met.counts_later() == later);
            chosen.map(|met| met.charge(route)).collect()
        };
        let shared: PerLimit<(&Met<'_>, Claim<'_>)> = met
            .iter()
            .filter_map(|met| Some((met, met.claim(route.cost)?)))
            .collect();
        let claims: PerLimit<Claim<'_>> = shared.iter().map(|(_, claim)| *claim).collect();
        let later = store.peek(now_ns, &local(true));
        let blocked = met.iter().any(|met| met.blocked.is_some());
        let decided = if later.admitted() && !blocked && effect.charges() {
            let name = |index: usize| self.name(decision, shared.get(index).map(|(met, _)| *met));
            let charges = local(false);
            let decided = budget.admit(now_ns, store, &charges, &claims, name);
            match decided.await {
                Ok(decided) => decided,
                Err(Unavailable { claim }) => match shared.get(claim) {
                    // one that only looks on says nothing then
                    Some((met, _)) if met.limit.rule.mode() != Mode::Enforce => {
                        return Ok(Default::default());
                    }
                    met => {
                        let rule = met.map(|(met, _)| &met.limit.rule);
                        let disclosed = rule.filter(|rule| rule.settings.disclose);
                        let limit = disclosed.map(|rule| rule.name.clone());
                        return Err(Refusal::LimitUnavailable { limit });
                    }
                },
            }
        } else {
            Decided {
                local: store.peek(now_ns, &local(false)),
                shared: budget.peek(now_ns, &claims),
                lent: Vec::new(),
                sources: claims.iter().map(|_| Source::Lease).collect(),
            }
        };
        let mut sources = decided.sources.into_iter();
        let sources = met
            .iter()
            .map(|met| met.is_shared().then(|| sources.next()).flatten())
            .collect();
        let [mut now, mut later, mut together] =
            [decided.local, later, decided.shared].map(|verdict| verdict.findings.into_iter());
        let in_order = met.iter().filter_map(|met| {
            let finding = match (met.is_shared(), met.counts_later()) {
                (true, _) => together.next(),
                (false, true) => later.next(),
                (false, false) => now.next(),
            }?;
            let closed = met.blocked.map(|blocked| blocked.finding(&finding));
            Some(closed.unwrap_or(finding))
        });
        let verdict = Verdict {
            findings: in_order.collect(),
        };
        Ok(Together {
            verdict,
            lent: decided.lent,
            sources,
        })
    }

    /// What all gateways call the bucket of a request.
    fn name(&self, decision: &DecisionContext<'_>, met: Option<&Met<'_>>) -> Name {
        let (Some(met), Some(asked)) = (met, &decision.attributes) else {
            return Name::default();
        };
        let plan = &self.shared.plan;
        decision.with_subject(&plan.table, asked, |subject| {
            Name(met.limit.rule.key.shared(plan.prefixes, subject))
        })
    }
}

impl<'a> Met<'a> {
    pub(super) fn claim(&self, cost: u64) -> Option<Claim<'a>> {
        Some(Claim {
            limit: self.limit.rule.shared.as_ref()?,
            tier: self.tier,
            key: self.key(),
            cost,
        })
    }
}
