//! One HTTP request on its way through the gateway: its head, and the results of each step.

use std::borrow::Cow;

use http::{HeaderValue, request::Parts};
use tokio::time::Instant;

use super::{
    decision_context::{DecisionContext, RequestAttributes},
    plan::RoutePlan,
};
use crate::{
    identity::{HeldToken, Rejected},
    listener::Peer,
    response::{Grpc, Refusal},
    telemetry::trace,
};

/// One request. Each step fills in its part.
#[derive(Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) head: &'a Parts,
    pub(super) from: &'a Peer,
    /// Stores the client's token.
    pub(super) token: &'a HeldToken,
    pub(super) request_id: HeaderValue,
    /// The gRPC variant, for gRPC calls.
    pub(super) grpc: Option<Grpc>,
    /// Whether the request may ask for a WebSocket. True until validation.
    pub(super) may_upgrade: bool,
    /// The span, if sampled.
    pub(super) traced: Option<Traced>,
    /// The input and results of its limits.
    pub(super) decision: DecisionContext<'a>,
}

/// The span of a sampled request.
#[derive(Clone, Debug)]
pub(super) struct Traced {
    pub(super) place: trace::SpanContext,
    /// The `traceparent` for the upstream.
    pub(super) traceparent: HeaderValue,
}

impl<'a> RequestContext<'a> {
    pub(super) fn begin(
        head: &'a Parts,
        from: &'a Peer,
        token: &'a HeldToken,
        route: &'a RoutePlan,
        request_id: HeaderValue,
    ) -> Self {
        Self {
            head,
            from,
            token,
            request_id,
            grpc: Grpc::of(&head.headers),
            may_upgrade: true,
            traced: None,
            decision: DecisionContext::begin(route, Instant::now()),
        }
    }

    /// The client and the target, once the request is validated.
    pub(super) fn attributes(&self) -> Option<&RequestAttributes<'a>> {
        self.decision.attributes.as_ref()
    }
}

/// The target for the upstream: exactly the one that was matched.
#[derive(Debug)]
pub(super) struct UpstreamTarget<'a> {
    pub(super) authority: &'a str,
    pub(super) path_and_query: Cow<'a, str>,
    pub(super) websocket: bool,
}

/// Why the gateway answers the request itself.
#[derive(Debug)]
pub(super) enum LocalReply {
    /// A limit denies it.
    Denied,
    /// The request cannot be served.
    Refused(Refusal),
    /// The client asks for its own quotas.
    OwnQuotas,
}

impl From<Refusal> for LocalReply {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The target of a request, before any limit is asked.
#[derive(Debug)]
pub(super) struct Resolved<'a> {
    pub(super) target: UpstreamTarget<'a>,
    /// Set if a credential is invalid.
    pub(super) rejected: Option<Rejected>,
    /// Whether a route matches.
    pub(super) found: Result<(), Refusal>,
}

impl Resolved<'_> {
    /// Whether the client guesses credentials. Then only some limits apply.
    pub(super) fn guesses(&self) -> bool {
        self.rejected.is_some()
    }
}
