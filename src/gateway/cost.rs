//! The steps of a request that limits on costs add: reading what the request says about its cost,
//! and holding what was reserved.

use bytes::Bytes;

use super::{
    applied_limit::{AppliedLimit, LimitOutcome, LimitOutcomes},
    body_source::BodySource,
    cost_rule::{CostFacts, KnownCost, announced_bytes},
    decision_context::DecisionContext,
    decision_effect::DecisionEffect,
    held_costs::{CostedRequest, HeldCost, HeldCosts},
    request_context::RequestContext,
    worker::Worker,
};
use crate::{
    budget::{LateCharge, SharedClaim},
    cost::{CostInputs, CostReservation},
    limit::ChargeLocation,
};

impl<'a> DecisionContext<'a> {
    /// What is known about the cost of the request.
    pub(super) fn known_cost(&self) -> KnownCost<'_> {
        KnownCost {
            route: self.route.cost,
            facts: self.cost_facts.as_deref(),
        }
    }
}

impl Worker {
    /// Reads from a whole body what an estimate needs, and asks the upstream for the usage of a
    /// stream if a limit wants that.
    pub(super) fn read_cost_facts(
        &self,
        request: &mut RequestContext<'_>,
        whole: &Bytes,
        body: &mut impl BodySource,
    ) {
        let needs = request.decision.route.costs;
        if !needs.reads_request {
            return;
        }
        let inputs = CostInputs::read(whole);
        if needs.asks_usage && inputs.is_stream && !inputs.has_stream_options {
            ask_for_usage(whole, body);
        }
        request.decision.cost_facts = Some(Box::new(CostFacts {
            inputs,
            body: needs.keeps_request.then(|| whole.clone()),
        }));
    }

    /// Holds what enforced limits on costs have reserved for an admitted request.
    pub(super) fn hold_costs<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        limits: &LimitOutcomes<'a>,
        effect: DecisionEffect,
    ) {
        if effect.charges() {
            for outcome in limits.enforced() {
                self.hold_cost(decision, now_ns, outcome);
            }
        }
    }

    /// Holds what one limit has reserved, unless it denies the request or knows the cost already.
    pub(super) fn hold_cost<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        outcome: &LimitOutcome<'a>,
    ) {
        let applied = &outcome.applied;
        let rule = &applied.limit.rule;
        let (Some(cost), Some(finding)) = (&rule.cost, &outcome.finding) else {
            return;
        };
        if finding.denied() {
            return;
        }
        let units = applied.cost();
        if !cost.reserves() {
            cost.metrics.reserved.increment(units);
            cost.metrics.settled.increment(units);
            cost.metrics.settled_from("fixed");
            return;
        }
        let source = outcome.source.filter(|_| applied.is_shared());
        if source.is_none() && finding.held() == ChargeLocation::Nowhere {
            return;
        }
        let shared = source.map(|source| (self.shared_name(decision, applied), source));
        let model = self.named_model(decision, applied);
        let held = HeldCost {
            rule: rule.clone(),
            tier: applied.tier(),
            key: applied.key(),
            place: finding.held(),
            shared,
            reservation: CostReservation::new(units, now_ns),
            ratios: cost.ratios(model.as_deref()),
            estimate: units,
            stated: None,
            meter: None,
        };
        let mut costs = match decision.costs.take() {
            Some(costs) => costs,
            None => Box::new(HeldCosts::new(&self.active, costed(decision, model))),
        };
        costs.push(held);
        // The limit admits up to its capacity. The rest of the estimate becomes debt.
        let beyond = applied.beyond_capacity();
        if let Some((claim, budget)) = applied.claim().zip(self.active.budget.as_ref())
            && let Some((name, _)) = shared
            && beyond > 0
        {
            let claim = SharedClaim {
                cost: beyond,
                ..claim
            };
            budget.settle(now_ns, &claim, name, LateCharge::Extra);
        }
        decision.costs = Some(costs);
    }

    fn named_model(
        &self,
        decision: &DecisionContext<'_>,
        applied: &AppliedLimit<'_>,
    ) -> Option<Box<str>> {
        let cost = applied.limit.rule.cost.as_ref()?;
        let attributes = decision.attributes.as_ref()?;
        let inputs = decision.cost_facts.as_ref().map(|facts| &facts.inputs);
        let table = &self.active.plan.table;
        decision.with_subject(table, attributes, |subject| {
            let model = cost.model(inputs, attributes.headers, subject);
            model.map(Box::from)
        })
    }
}

/// The facts that settling needs of a request.
fn costed(decision: &DecisionContext<'_>, model: Option<Box<str>>) -> CostedRequest {
    let inputs = decision.cost_facts.as_ref().map(|facts| &facts.inputs);
    let announced = || {
        let attributes = decision.attributes.as_ref();
        attributes.map_or(0, |attributes| announced_bytes(attributes.headers))
    };
    CostedRequest {
        bytes: inputs.map_or_else(announced, |inputs| inputs.bytes),
        model,
        choices: inputs.map_or(1, |inputs| inputs.choices),
        ..CostedRequest::default()
    }
}

/// Adds `stream_options` to a request that has none.
fn ask_for_usage(whole: &Bytes, body: &mut impl BodySource) {
    const ASKS: &[u8] = br#""stream_options":{"include_usage":true},"#;
    let Some(open) = whole.iter().position(|&byte| byte == b'{') else {
        return;
    };
    let begun = whole.slice(..=open);
    let beginning = [&begun[..], ASKS].concat();
    body.replace_beginning(Bytes::from(beginning), begun.len());
}
