//! Charges all limits that apply to a request, or none.
//!
//! ```text
//! each limit ─▶ off? exempt? overridden? ─▶ its key
//!    ├─▶ enforced: asked and charged together, or not at all
//!    ├─▶ counts the answer (count_status): asked now, charged by the answer
//!    └─▶ observes (shadow, tag): asked alone, once the others admit
//! ```

use std::time::Duration;

use super::{
    applied_limit::{AppliedLimit, LimitOutcome, LimitOutcomes},
    ask::{AskOutcome, unavailable},
    decision_context::DecisionContext,
    decision_effect::DecisionEffect,
    observer::DecisionObserver,
    slots::{HeldSlot, RequestSlots},
    worker::Worker,
};
use crate::{
    config::{Mode, Share},
    limit::ChargeLocation,
    response::Refusal,
};

impl Worker {
    /// Applies the limits. While a client guesses credentials, only limits by address and global
    /// limits apply. Guessing is limited, and cannot spend what the route's users share. Waits only
    /// for shared limits.
    pub(super) async fn admit<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        guesses: bool,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<(), Refusal> {
        let granted = self.apply_limits(decision, guesses, effect, observer)?;
        let now_ns = self.active.process.nanoseconds(decision.decided_at);
        let mut limits = std::mem::take(&mut decision.limits);
        let shared = limits.enforced().iter().any(|one| one.applied.is_shared());
        match self.active.budget.as_ref().filter(|_| shared) {
            Some(budget) => {
                let asked = limits.enforced_mut();
                let asking = self.ask_shared(budget, decision, now_ns, asked, effect);
                match Box::pin(asking).await {
                    AskOutcome::Decided(lent) => decision.slots.add_shared(lent),
                    AskOutcome::Unavailable(index) => {
                        unavailable(&limits.enforced()[index].applied)?
                    }
                }
            }
            None => self.ask_local(now_ns, limits.enforced_mut(), effect),
        }
        let admitted = limits.admitted();
        if admitted {
            self.hold_admitted(decision, now_ns, &limits);
            self.hold_costs(decision, now_ns, &limits, effect);
            let observed = self.observe(decision, now_ns, &mut limits, effect);
            if let Err(refusal) = observed.await {
                // This refusal is immediate: release what the request holds.
                decision.delay = Duration::ZERO;
                decision.slots = RequestSlots::default();
                decision.costs = None;
                return Err(refusal);
            }
        } else {
            let granted = granted.into_iter();
            granted.for_each(|(boost, units)| boost.give_back(units));
            self.charge_rejected(decision, now_ns, &mut limits, effect);
        }
        decision.limits = limits;
        Ok(())
    }

    /// Charges a rejection to the limits with `charge_rejected`. The client sees their state after
    /// that charge.
    pub(super) fn charge_rejected(
        &self,
        decision: &DecisionContext<'_>,
        now_ns: u64,
        limits: &mut LimitOutcomes<'_>,
        effect: DecisionEffect,
    ) {
        if !effect.charges() {
            return;
        }
        for one in limits.enforced_mut() {
            if !one.applied.limit.rule.settings.charge_rejected {
                continue;
            }
            self.charge_event(decision, now_ns, &one.applied);
            // A block already carries its own duration.
            if one.applied.block.is_none() {
                let after = self.look_at(now_ns, &one.applied);
                // What this gateway knows of a shared limit may be older than the denial.
                let is_newer = after.is_some_and(|after| after.denied() || !one.denies());
                one.finding = after.filter(|_| is_newer).or(one.finding);
            }
        }
    }

    /// Gives an admitted request its slots, queue places and delay.
    fn hold_admitted<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        limits: &LimitOutcomes<'a>,
    ) {
        let mut slowed = Duration::ZERO;
        let mut turn = Duration::ZERO;
        for LimitOutcome {
            applied, finding, ..
        } in limits.enforced()
        {
            let Some(finding) = finding else { continue };
            let limit = applied.limit;
            let rule = &limit.rule;
            let settings = &rule.settings;
            let is_reached = |share: Share| {
                let standing = finding.standing();
                let used = standing.capacity.saturating_sub(standing.remaining);
                share.is_reached(used, standing.capacity)
            };
            if settings.warn_at.is_some_and(is_reached) {
                rule.metrics.near_limit.increment(1);
                if settings.disclose && decision.warning.is_none() {
                    decision.warning = Some(&rule.name);
                }
            }
            let slow = settings.slow.filter(|slow| is_reached(slow.at));
            let slow = slow.map_or(Duration::ZERO, |slow| slow.by);
            let delay_ns = finding.delay_ns();
            if delay_ns > 0 || !slow.is_zero() {
                let wait = Duration::from_nanos(delay_ns);
                rule.metrics.delayed_seconds.record(wait + slow);
                slowed = slowed.max(slow);
                turn = turn.max(wait);
            }
            let held = finding.held();
            if held != ChargeLocation::Nowhere && (rule.holds_slots || delay_ns > 0) {
                let slot = HeldSlot::of(applied, now_ns, held);
                decision.slots.add(&self.active, slot);
            }
        }
        decision.delay = turn + slowed;
    }

    /// Counts what limits in shadow mode would have done, and collects tags for the upstream.
    async fn observe<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        limits: &mut LimitOutcomes<'a>,
        effect: DecisionEffect,
    ) -> Result<(), Refusal> {
        for one in limits.observed_mut() {
            let applied: AppliedLimit<'a> = one.applied;
            let rule = &applied.limit.rule;
            let alone = std::slice::from_mut(one);
            match &self.active.budget {
                Some(budget) if applied.is_shared() => {
                    let asking = self.ask_shared(budget, decision, now_ns, alone, effect);
                    match Box::pin(asking).await {
                        AskOutcome::Decided(lent) => decision.slots.add_shared(lent),
                        AskOutcome::Unavailable(_) => unavailable(&applied)?,
                    }
                }
                _ => self.ask_local(now_ns, alone, effect),
            }
            let Some(finding) = one.finding else {
                continue;
            };
            let decisions = &applied.limit.decisions;
            if !finding.denied() {
                decisions.admitted.increment(1);
            } else if rule.mode() == Mode::Tag {
                decisions.tagged.increment(1);
                decision.tags.push(&rule.name);
            } else {
                decisions.shadow_rejected.increment(1);
            }
            if rule.holds_slots && finding.held() != ChargeLocation::Nowhere {
                let slot = HeldSlot::of(&applied, now_ns, finding.held());
                decision.slots.add(&self.active, slot);
            }
            if effect.charges() && rule.cost.is_some() {
                self.hold_cost(decision, now_ns, one);
            }
        }
        Ok(())
    }

    /// Charges the limits that count answers by status.
    pub(super) fn count_answer(&self, decision: &DecisionContext<'_>, status: http::StatusCode) {
        let mut now_ns = None;
        for one in decision.limits.all() {
            let counted = &one.applied.limit.rule.settings.count_status;
            let is_due = one.finding.is_some() && one.applied.counts_later();
            if is_due && counted.contains(&status) {
                let now_ns = *now_ns.get_or_insert_with(|| {
                    self.active.process.nanoseconds(tokio::time::Instant::now())
                });
                self.charge_event(decision, now_ns, &one.applied);
            }
        }
    }
}
