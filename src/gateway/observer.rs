//! Observes a decision in progress, for explanations. Serving a request uses [`Unobserved`], at no
//! cost.

use super::{
    applied_limit::Applicability,
    plan::LimitPlan,
    request_context::{RequestContext, Resolved},
};

/// Receives the intermediate results of a decision.
pub(super) trait DecisionObserver<'a> {
    /// The client, the route and the target are known.
    fn resolved(&mut self, _request: &RequestContext<'a>, _resolved: &Resolved<'a>) {}

    /// Whether a limit of the route applies.
    fn limit(&mut self, _limit: &'a LimitPlan, _applicability: &Applicability<'a>) {}
}

/// Observes nothing.
#[derive(Debug)]
pub(super) struct Unobserved;

impl DecisionObserver<'_> for Unobserved {}
