//! One HTTP request on its way through the gateway: its head, and what each step finds out about it.

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

/// One request: each step of the path fills in its part.
#[derive(Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) head: &'a Parts,
    pub(super) from: &'a Peer,
    /// Where the client's token is kept.
    pub(super) token: &'a HeldToken,
    pub(super) request_id: HeaderValue,
    /// Which kind of gRPC it speaks, if any.
    pub(super) grpc: Option<Grpc>,
    /// Whether it may ask for a WebSocket: until it is known to be valid, any may.
    pub(super) may_upgrade: bool,
    /// Its span, if it is sampled.
    pub(super) traced: Option<Traced>,
    /// What its limits decide.
    pub(super) decision: DecisionContext<'a>,
}

/// The span of a request that was sampled.
#[derive(Clone, Debug)]
pub(super) struct Traced {
    pub(super) place: trace::Place,
    /// What the upstream receives as `traceparent`.
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

    /// Who asks and for what, once the request is known to be valid.
    pub(super) fn attributes(&self) -> Option<&RequestAttributes<'a>> {
        self.decision.attributes.as_ref()
    }
}

/// What the upstream is asked for: exactly what was matched.
#[derive(Debug)]
pub(super) struct UpstreamTarget<'a> {
    pub(super) authority: &'a str,
    pub(super) path_and_query: Cow<'a, str>,
    pub(super) websocket: bool,
}

/// Why the gateway answers a request itself.
#[derive(Debug)]
pub(super) enum LocalReply {
    /// A limit denies it.
    Denied,
    /// It cannot be served.
    Refused(Refusal),
    /// It asks for the caller's own quotas.
    OwnQuotas,
}

impl From<Refusal> for LocalReply {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// What a request asks for, before any limit is asked.
#[derive(Debug)]
pub(super) struct Resolved<'a> {
    pub(super) target: UpstreamTarget<'a>,
    /// A credential that does not verify.
    pub(super) rejected: Option<Rejected>,
    /// Whether a route takes it.
    pub(super) found: Result<(), Refusal>,
}

impl Resolved<'_> {
    /// Whether the client guesses at credentials: then only some of the limits apply.
    pub(super) fn guesses(&self) -> bool {
        self.rejected.is_some()
    }
}
