//! Watching a decision while it is made, for explanations. Serving a request observes nothing and costs nothing for it.

use super::{
    admit::Noted,
    plan::LimitPlan,
    request_context::{RequestContext, Resolved},
};

/// Receives the intermediate results of a decision.
pub(super) trait DecisionObserver<'a> {
    /// The client, the route and the target are known.
    fn resolved(&mut self, _request: &RequestContext<'a>, _resolved: &Resolved<'a>) {}

    /// What a limit has to do with the request.
    fn limit(&mut self, _limit: &'a LimitPlan, _noted: Noted<'a>) {}
}

/// Nobody watches.
#[derive(Debug)]
pub(super) struct Unobserved;

impl DecisionObserver<'_> for Unobserved {}

/// Keeps what each limit had to do with the request.
impl<'a> DecisionObserver<'a> for Vec<(&'a LimitPlan, Noted<'a>)> {
    fn limit(&mut self, limit: &'a LimitPlan, noted: Noted<'a>) {
        self.push((limit, noted));
    }
}
