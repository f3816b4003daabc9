//! One request on its way through the gateway, as far as it is understood.

use std::{borrow::Cow, time::Duration};

use http::{HeaderValue, request::Parts};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{admit::Met, plan::RoutePlan, slots::Slots};
use crate::{
    budget::Source,
    identity::{BodyFields, Client, HeldToken, Rejected, Subject},
    limit::Kept,
    listener::Peer,
    response::{Grpc, Refusal},
    route::RouteTable,
    telemetry::trace,
};

/// Something for each limit of a request: in place for four of them, on the heap for more. What is kept while a request is under
/// way is moved with it, so it is small.
pub(super) type PerLimit<T> = SmallVec<[T; 4]>;

/// One request, as far as it is understood: each step of the path fills in what it finds.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    pub(super) head: &'a Parts,
    pub(super) from: &'a Peer,
    /// Where the client's token is kept.
    pub(super) token: &'a HeldToken,
    pub(super) arrived: Instant,
    pub(super) request_id: HeaderValue,
    /// Which kind of gRPC it speaks, if any.
    pub(super) grpc: Option<Grpc>,
    /// Whether it may ask for a WebSocket: until it is known to be valid, any may.
    pub(super) may_upgrade: bool,
    /// `None` until the request is known to be valid.
    pub(super) asked: Option<Asked<'a>>,
    /// The route that decides, or the plan's stand-in for none.
    pub(super) route: &'a RoutePlan,
    /// What limits want to know of the body; `None` where there is none, or nothing is wanted.
    pub(super) body: Option<BodyFields>,
    /// What becomes of the request for its body's sake, once its limits were charged: too large, broken, late.
    pub(super) body_failed: Option<Box<Refusal>>,
    /// When the limits were asked: a body may have had to be read before.
    pub(super) decided_at: Instant,
    /// The limits that act on the request, and what each found, in the same order.
    pub(super) met: PerLimit<Met<'a>>,
    pub(super) verdict: Kept<'a>,
    /// Who decided, where gateways keep some of them together; else none.
    pub(super) sources: PerLimit<Option<Source>>,
    /// Limits that look on and count the answer.
    pub(super) counting: Vec<Met<'a>>,
    /// How long it is held before it is sent on.
    pub(super) delay: Duration,
    /// What it holds while it is under way.
    pub(super) slots: Slots,
    /// A limit of which little is left.
    pub(super) warning: Option<&'a str>,
    /// The span that it has, if it has one.
    pub(super) traced: Option<Traced>,
    /// Limits that would have denied it, for the upstream to know.
    pub(super) tags: Vec<&'a str>,
}

/// The span of a request that was sampled.
#[derive(Clone, Debug)]
pub(super) struct Traced {
    pub(super) place: trace::Place,
    /// What the upstream is told.
    pub(super) traceparent: HeaderValue,
}

/// Who asks, and for what, in the one form in which it is matched and counted.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) client: Client<'a>,
    pub(super) host: Cow<'a, str>,
    pub(super) path: Cow<'a, str>,
}

impl<'a> Exchange<'a> {
    pub(super) fn begin(
        head: &'a Parts,
        from: &'a Peer,
        token: &'a HeldToken,
        route: &'a RoutePlan,
        request_id: HeaderValue,
    ) -> Self {
        let arrived = Instant::now();
        Self {
            head,
            from,
            token,
            arrived,
            request_id,
            grpc: Grpc::of(&head.headers),
            may_upgrade: true,
            asked: None,
            route,
            body: None,
            body_failed: None,
            decided_at: arrived,
            met: SmallVec::new(),
            verdict: Kept::default(),
            sources: SmallVec::new(),
            traced: None,
            counting: Vec::new(),
            delay: Duration::ZERO,
            slots: Slots::default(),
            warning: None,
            tags: Vec::new(),
        }
    }

    /// Shows what limits' keys are made of.
    pub(super) fn with_subject<R>(
        &self,
        table: &RouteTable,
        asked: &Asked<'_>,
        show: impl FnOnce(&Subject<'_>) -> R,
    ) -> R {
        let params = self
            .route
            .index
            .map(|route| table.params(route, &asked.path));
        show(&Subject {
            client: &asked.client,
            method: &self.head.method,
            host: &asked.host,
            route: &self.route.name,
            path: &asked.path,
            headers: &self.head.headers,
            query: self.head.uri.query(),
            params: &|name| params.and_then(|params| params.get(name)),
            body: self.body.as_ref(),
        })
    }
}

/// What the upstream is asked for: exactly what was matched.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) authority: &'a str,
    pub(super) path_and_query: Cow<'a, str>,
    pub(super) websocket: bool,
}

/// Why a request is not forwarded.
#[derive(Debug)]
pub(super) enum Stopped {
    /// A limit denies it.
    Denied,
    /// It cannot be served.
    Refused(Refusal),
    /// It asks for the caller's own quotas.
    OwnQuotas,
}

impl From<Refusal> for Stopped {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// What a request asks for, before any limit is asked.
#[derive(Debug)]
pub(super) struct Understood<'a> {
    pub(super) target: Target<'a>,
    /// A credential that does not verify.
    pub(super) rejected: Option<Rejected>,
    /// Whether a route takes it.
    pub(super) found: Result<(), Refusal>,
}
