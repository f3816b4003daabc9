//! WHERE A REQUEST IS DECIDED. Live requests, `/check` and `explain` all go through [`Worker::decide`], and its steps are these:
//!
//! ```text
//! resolve ─▶ bound the body ─▶ overload ─▶ body fields ─▶ limits ─▶ record ─▶ conclude
//!    │                            │            │             │                   │
//!   400                          503          429           429              401 404 405 413
//! ```
//!
//! Only `resolve` reads the HTTP head. Limits are decided by [`DecisionContext`](super::decision_context::DecisionContext),
//! which has attributes and no head: a question that brings its own attributes enters at [`Worker::admit`].

use super::{
    body_source::{BodyBounds, BodySource},
    observer::DecisionObserver,
    request_context::{LocalReply, RequestContext, Resolved, UpstreamTarget},
    worker::Worker,
};
use crate::response::Refusal;

/// What a decision changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecisionEffect {
    /// The gateway serves the request itself: limits are charged, and it counts among the requests in flight.
    Serve,
    /// Another proxy serves the request: limits are charged.
    Charge,
    /// Nothing: no limit is charged and nothing is recorded.
    Look,
}

impl DecisionEffect {
    pub(super) fn charges(self) -> bool {
        self != Self::Look
    }
}

impl Worker {
    /// Decides one request: where it is sent, or why the gateway answers it itself. Waits only for a body that keys a limit and
    /// for tokens of a shared limit; the delay that limits impose is left to the caller.
    pub(super) async fn decide<'a>(
        &'a self,
        request: &mut RequestContext<'a>,
        body: &mut impl BodySource,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<UpstreamTarget<'a>, LocalReply> {
        let resolved = self.resolve(request)?;
        observer.resolved(request, &resolved);
        body.bound(self.body_bounds(request));
        self.enter_overload(&mut request.decision, effect)?;
        let guesses = resolved.guesses();
        let is_denied = self
            .read_body_fields(request, guesses, body, effect, observer)
            .await?;
        if !is_denied {
            self.admit(&mut request.decision, guesses, effect, observer)
                .await?;
        }
        if effect.charges() {
            self.note_decision(request);
            self.remember(request, &resolved);
        }
        match request.decision.limits.admitted() {
            true => self.conclude(resolved, request),
            false => Err(LocalReply::Denied),
        }
    }

    /// The bounds of the route on the request's body.
    fn body_bounds(&self, request: &RequestContext<'_>) -> BodyBounds {
        let route = request.decision.route;
        let listener = &request.from.listener;
        let fleet = self.shared.plan.upstreams.get(route.upstream);
        BodyBounds {
            max_bytes: route.max_body_bytes.unwrap_or(listener.max_body_bytes),
            per_message: request.grpc.is_some()
                && fleet.is_some_and(|fleet| fleet.settings().speaks_http2()),
        }
    }

    /// The answer to a request that all limits admit: sent on, unless something else is wrong with it.
    fn conclude<'a>(
        &self,
        resolved: Resolved<'a>,
        request: &RequestContext<'_>,
    ) -> Result<UpstreamTarget<'a>, LocalReply> {
        if let Some(rejected) = resolved.rejected {
            return Err(self.unauthorized(&rejected).into());
        }
        resolved.found?;
        if let Some(refusal) = &request.decision.body_failed {
            return Err(Refusal::clone(refusal).into());
        }
        match request.decision.route.shows_quotas {
            true => Err(LocalReply::OwnQuotas),
            false => Ok(resolved.target),
        }
    }
}
