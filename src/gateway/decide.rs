//! WHERE A REQUEST IS DECIDED. Live requests, `/check` and `explain` all go through
//! [`Worker::decide`]. Its steps:
//!
//! ```text
//! resolve ─▶ bound the body ─▶ overload ─▶ body fields ─▶ limits ─▶ record ─▶ conclude
//!    │                            │            │             │                   │
//!   400                          503          429           429              401 404 405 413
//! ```
//!
//! Only `resolve` reads the HTTP head.
//! [`DecisionContext`](super::decision_context::DecisionContext) decides limits from attributes
//! alone. A caller that brings its own attributes starts at [`Worker::admit`].

use super::{
    body_source::{BodyBounds, BodySource},
    decision_effect::DecisionEffect,
    observer::DecisionObserver,
    request_context::{LocalReply, RequestContext, Resolved, UpstreamTarget},
    worker::Worker,
};
use crate::response::Refusal;

impl Worker {
    /// Decides one request: its upstream target, or our own answer. Waits only for a body that keys
    /// a limit and for tokens of shared limits. The caller applies the delay that limits impose.
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
            true => self.forward_admitted(resolved, request),
            false => Err(LocalReply::Denied),
        }
    }

    /// The route's bounds on the request body.
    pub(super) fn body_bounds(&self, request: &RequestContext<'_>) -> BodyBounds {
        let route = request.decision.route;
        let listener = &request.from.listener;
        let upstream_state = self.active.plan.upstreams.get(route.upstream);
        BodyBounds {
            max_bytes: route.max_body_bytes.unwrap_or(listener.max_body_bytes),
            per_message: request.grpc.is_some()
                && upstream_state
                    .is_some_and(|upstream_state| upstream_state.settings().speaks_http2()),
        }
    }

    /// Forwards an admitted request, unless identity, routing or the body failed.
    fn forward_admitted<'a>(
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
