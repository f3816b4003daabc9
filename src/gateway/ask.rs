//! Asks limits, and charges all of them or none.
//!
//! Local and shared limits are decided together. A limit that counts answers (`count_status`) is
//! only peeked at here; the answer charges it, at the other gateways too if they share it.

use arrayvec::ArrayVec;

use super::{
    applied_limit::{AppliedLimit, LimitOutcome},
    decision_context::DecisionContext,
    decision_effect::DecisionEffect,
    worker::Worker,
};
use crate::{
    budget::{
        Budget, DecisionSource, LateCharge, SharedClaim, SharedKeyName, SlotGuard, Unavailable,
    },
    config::Mode,
    limit::{Charge, Finding, MAX_LIMITS, Verdict},
    response::Refusal,
};

type PerLimit<T> = ArrayVec<T, MAX_LIMITS>;

/// The result of asking limits.
#[derive(Debug)]
pub(super) enum AskOutcome {
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
        let verdicts = Verdicts {
            now,
            later,
            ..Verdicts::default()
        };
        verdicts.distribute(limits, &[]);
    }

    /// Asks limits of which some are shared. Waits only if Redis must be asked.
    pub(super) async fn ask_shared<'a>(
        &self,
        budget: &Budget,
        decision: &DecisionContext<'_>,
        now_ns: u64,
        limits: &mut [LimitOutcome<'a>],
        effect: DecisionEffect,
    ) -> AskOutcome {
        let store = &self.active.process.store;
        let is_blocked = limits.iter().any(|one| one.applied.block.is_some());
        let now: PerLimit<Charge<'a>> = local(limits, false).collect();
        let later: PerLimit<Charge<'a>> = local(limits, true).collect();
        let later = store.peek(now_ns, &later);
        let shared_later: PerLimit<SharedClaim<'_>> =
            shared(limits, true).map(|(_, claim)| claim).collect();
        let shared_later = match budget.look(now_ns, &shared_later) {
            Ok(verdict) => verdict,
            Err(Unavailable { claim }) => return unavailable_at(limits, true, claim),
        };
        let claims: PerLimit<SharedClaim<'_>> =
            shared(limits, false).map(|(_, claim)| claim).collect();
        let admits_later = later.admitted() && shared_later.admitted();
        let mut verdicts = Verdicts {
            later,
            shared_later,
            ..Verdicts::default()
        };
        if is_blocked || !effect.charges() || !admits_later {
            verdicts.now = store.peek(now_ns, &now);
            verdicts.shared = budget.peek(now_ns, &claims);
            verdicts.distribute(limits, &[]);
            return AskOutcome::Decided(Vec::new());
        }
        let name = |index: usize| {
            let asked = shared(limits, false).nth(index);
            asked.map_or_else(SharedKeyName::default, |(at, _)| {
                self.shared_name(decision, &limits[at].applied)
            })
        };
        match budget.admit(now_ns, store, &now, &claims, name).await {
            Ok(decided) => {
                (verdicts.now, verdicts.shared) = (decided.local, decided.shared);
                verdicts.distribute(limits, &decided.sources);
                AskOutcome::Decided(decided.slot_guard)
            }
            Err(Unavailable { claim }) => unavailable_at(limits, false, claim),
        }
    }

    /// Charges a limit for a past event, as far as units are left: a response or a rejection that
    /// counts.
    pub(super) fn charge_event(
        &self,
        decision: &DecisionContext<'_>,
        now_ns: u64,
        applied: &AppliedLimit<'_>,
    ) {
        match applied.claim().zip(self.active.budget.as_ref()) {
            Some((claim, budget)) => {
                let name = self.shared_name(decision, applied);
                // if the lease manager's queue is full, the event is not counted
                budget.settle(now_ns, &claim, name, LateCharge::Event);
            }
            None => self.active.process.store.charge(now_ns, &applied.charge()),
        }
    }

    /// What is left of a limit; charges nothing.
    pub(super) fn look_at<'a>(
        &self,
        now_ns: u64,
        applied: &AppliedLimit<'a>,
    ) -> Option<Finding<'a>> {
        match applied.claim().zip(self.active.budget.as_ref()) {
            Some((claim, budget)) => {
                let verdict = budget.look(now_ns, &[claim]);
                verdict.ok()?.findings.pop()
            }
            None => {
                let store = &self.active.process.store;
                store.peek(now_ns, &[applied.charge()]).findings.pop()
            }
        }
    }

    /// The bucket's name in Redis, the same for all gateways.
    pub(super) fn shared_name(
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

/// The claims on shared limits, charged now or later, with their indices.
fn shared<'a>(
    limits: &[LimitOutcome<'a>],
    later: bool,
) -> impl Iterator<Item = (usize, SharedClaim<'a>)> {
    let limits = limits.iter().enumerate();
    let limits = limits.filter(move |(_, one)| one.applied.counts_later() == later);
    limits.filter_map(|(index, one)| Some((index, one.applied.claim()?)))
}

fn unavailable_at(limits: &[LimitOutcome<'_>], later: bool, claim: usize) -> AskOutcome {
    let asked = shared(limits, later).nth(claim);
    AskOutcome::Unavailable(asked.map_or(0, |(at, _)| at))
}

/// What each kind of limits said, each in order.
#[derive(Default)]
struct Verdicts<'a> {
    now: Verdict<'a>,
    later: Verdict<'a>,
    shared: Verdict<'a>,
    shared_later: Verdict<'a>,
}

impl<'a> Verdicts<'a> {
    /// Assigns each limit its finding.
    fn distribute(self, limits: &mut [LimitOutcome<'a>], sources: &[DecisionSource]) {
        let mut now = self.now.findings.into_iter();
        let mut later = self.later.findings.into_iter();
        let mut shared = self.shared.findings.into_iter();
        let mut shared_later = self.shared_later.findings.into_iter();
        let mut sources = sources.iter().copied();
        for one in limits {
            let applied = &one.applied;
            let finding: Option<Finding<'a>> = match (applied.is_shared(), applied.counts_later()) {
                (true, false) => shared.next(),
                (true, true) => shared_later.next(),
                (false, true) => later.next(),
                (false, false) => now.next(),
            };
            one.finding = finding.map(|finding| applied.closed_or(finding));
            one.source = match (applied.is_shared(), applied.counts_later()) {
                (true, false) => Some(sources.next().unwrap_or_default()),
                (true, true) => Some(DecisionSource::default()),
                (false, _) => None,
            };
        }
    }
}
