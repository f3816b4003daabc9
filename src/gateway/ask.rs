//! Asks limits, and charges all of them or none.
//!
//! Local and shared limits are decided together. A limit that counts answers (`count_status`) is
//! only peeked at here; the answer charges it.

use arrayvec::ArrayVec;

use super::{
    applied_limit::{AppliedLimit, LimitOutcome},
    decision_context::DecisionContext,
    decision_effect::DecisionEffect,
    worker::Worker,
};
use crate::{
    budget::{Budget, DecisionSource, SharedClaim, SharedKeyName, SlotGuard, Unavailable},
    config::Mode,
    limit::{Charge, Finding, MAX_LIMITS, Verdict},
    response::Refusal,
};

type PerLimit<T> = ArrayVec<T, MAX_LIMITS>;

/// The result of asking limits.
#[derive(Debug)]
pub(super) enum Asked {
    Decided(Vec<SlotGuard>),
    /// Redis is unavailable, and the limit at this index admits nothing without it.
    Unavailable(usize),
}

impl Worker {
    /// Asks local limits. On admission it charges those that count now, unless the effect is
    /// [`DecisionEffect::Look`].
    pub(super) fn ask_local<'a>(
        &self,
        now_ns: u64,
        limits: &mut [LimitOutcome<'a>],
        effect: DecisionEffect,
    ) {
        let store = &self.active.process.store;
        let is_blocked = limits.iter().any(|one| one.applied.block.is_some());
        // `collect` would move the whole array.
        let mut now = PerLimit::<Charge<'a>>::new();
        now.extend(local(limits, false));
        let mut verdict = Verdict::default();
        if now.len() == limits.len() && effect.charges() && !is_blocked {
            store.admit_into(now_ns, &now, &mut verdict);
            for (one, finding) in limits.iter_mut().zip(&verdict.findings) {
                one.finding = Some(*finding);
            }
            return;
        }
        let later: PerLimit<Charge<'a>> = local(limits, true).collect();
        let later = store.peek(now_ns, &later);
        let now = match effect.charges() && !is_blocked && later.admitted() {
            true => store.admit(now_ns, &now),
            false => store.peek(now_ns, &now),
        };
        distribute(limits, now, later, Verdict::default(), &[]);
    }

    /// Asks limits of which some are shared. Waits only if Redis must be asked.
    pub(super) async fn ask_shared<'a>(
        &self,
        budget: &Budget,
        decision: &DecisionContext<'_>,
        now_ns: u64,
        limits: &mut [LimitOutcome<'a>],
        effect: DecisionEffect,
    ) -> Asked {
        let store = &self.active.process.store;
        let is_blocked = limits.iter().any(|one| one.applied.block.is_some());
        let now: PerLimit<Charge<'a>> = local(limits, false).collect();
        let later: PerLimit<Charge<'a>> = local(limits, true).collect();
        let later = store.peek(now_ns, &later);
        let claims: PerLimit<SharedClaim<'_>> = shared(limits).map(|(_, claim)| claim).collect();
        if is_blocked || !effect.charges() || !later.admitted() {
            let (now, known) = (store.peek(now_ns, &now), budget.peek(now_ns, &claims));
            distribute(limits, now, later, known, &[]);
            return Asked::Decided(Vec::new());
        }
        let name = |index: usize| {
            let asked = shared(limits).nth(index);
            asked.map_or_else(SharedKeyName::default, |(at, _)| {
                self.shared_name(decision, &limits[at].applied)
            })
        };
        match budget.admit(now_ns, store, &now, &claims, name).await {
            Ok(decided) => {
                let (now, known) = (decided.local, decided.shared);
                distribute(limits, now, later, known, &decided.sources);
                Asked::Decided(decided.slot_guard)
            }
            Err(Unavailable { claim }) => {
                let asked = shared(limits).nth(claim);
                Asked::Unavailable(asked.map_or(0, |(at, _)| at))
            }
        }
    }

    /// The bucket's name in Redis, the same for all gateways.
    fn shared_name(
        &self,
        decision: &DecisionContext<'_>,
        applied: &AppliedLimit<'_>,
    ) -> SharedKeyName {
        let Some(attributes) = &decision.attributes else {
            return SharedKeyName::default();
        };
        let plan = &self.active.plan;
        decision.with_subject(&plan.table, attributes, |subject| {
            SharedKeyName(applied.limit.rule.key.shared(plan.prefixes, subject))
        })
    }
}

/// 503 if an enforced limit admits nothing without Redis. An observing limit has no effect then.
pub(super) fn unavailable(applied: &AppliedLimit<'_>) -> Result<(), Refusal> {
    let rule = &applied.limit.rule;
    if rule.mode() != Mode::Enforce {
        return Ok(());
    }
    let limit = rule.settings.disclose.then(|| rule.name.clone());
    Err(Refusal::LimitUnavailable { limit })
}

/// The charges on local limits, charged now or later.
fn local<'a>(limits: &[LimitOutcome<'a>], later: bool) -> impl Iterator<Item = Charge<'a>> {
    limits
        .iter()
        .filter(move |one| !one.applied.is_shared() && one.applied.counts_later() == later)
        .map(|one| one.applied.charge())
}

/// The claims on shared limits, with their indices.
fn shared<'a>(limits: &[LimitOutcome<'a>]) -> impl Iterator<Item = (usize, SharedClaim<'a>)> {
    let limits = limits.iter().enumerate();
    limits.filter_map(|(index, one)| Some((index, one.applied.claim()?)))
}

/// Assigns each limit its finding, in order.
fn distribute<'a>(
    limits: &mut [LimitOutcome<'a>],
    now: Verdict<'a>,
    later: Verdict<'a>,
    known: Verdict<'a>,
    sources: &[DecisionSource],
) {
    let [mut now, mut later, mut known] =
        [now, later, known].map(|verdict| verdict.findings.into_iter());
    let mut sources = sources.iter().copied();
    for one in limits {
        let applied = &one.applied;
        let finding: Option<Finding<'a>> = match (applied.is_shared(), applied.counts_later()) {
            (true, _) => known.next(),
            (false, true) => later.next(),
            (false, false) => now.next(),
        };
        one.finding = finding.map(|finding| applied.closed_or(finding));
        if applied.is_shared() {
            one.source = Some(sources.next().unwrap_or_default());
        }
    }
}
