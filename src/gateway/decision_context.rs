//! What limits decide about, and what they decided. It has no HTTP head: a question that consists of attributes alone is
//! decided by the same steps.

use std::{borrow::Cow, time::Duration};

use http::{HeaderMap, Method};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{admit::Met, plan::RoutePlan, slots::Slots};
use crate::{
    budget::Source,
    identity::{BodyFields, Client, Subject},
    limit::Kept,
    response::Refusal,
    route::RouteTable,
};

/// Something for each limit of a request: in place for four of them, on the heap for more. What is kept while a request is under
/// way is moved with it, so it is small.
pub(super) type PerLimit<T> = SmallVec<[T; 4]>;

/// The limits of one request: input first, then results.
#[derive(Debug)]
pub(super) struct DecisionContext<'a> {
    pub(super) arrived: Instant,
    /// `None` until the request is known to be valid.
    pub(super) attributes: Option<RequestAttributes<'a>>,
    /// The route that decides, or the plan's stand-in for none.
    pub(super) route: &'a RoutePlan,
    /// The fields of the body that limits are keyed by; `None` where there is none, or nothing is wanted.
    pub(super) body: Option<BodyFields>,
    /// The answer to a request whose body failed, given once its limits are charged: too large, broken, late.
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
    /// Limits that would have denied it, for the upstream to know.
    pub(super) tags: Vec<&'a str>,
}

/// Who asks, and for what, in the one form in which it is matched and counted.
#[derive(Debug)]
pub(super) struct RequestAttributes<'a> {
    pub(super) client: Client<'a>,
    pub(super) method: &'a Method,
    pub(super) host: Cow<'a, str>,
    pub(super) path: Cow<'a, str>,
    pub(super) query: Option<&'a str>,
    pub(super) headers: &'a HeaderMap,
}

impl<'a> DecisionContext<'a> {
    pub(super) fn begin(route: &'a RoutePlan, arrived: Instant) -> Self {
        Self {
            arrived,
            attributes: None,
            route,
            body: None,
            body_failed: None,
            decided_at: arrived,
            met: SmallVec::new(),
            verdict: Kept::default(),
            sources: SmallVec::new(),
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
        attributes: &RequestAttributes<'_>,
        show: impl FnOnce(&Subject<'_>) -> R,
    ) -> R {
        let params = self
            .route
            .index
            .map(|route| table.params(route, &attributes.path));
        show(&Subject {
            client: &attributes.client,
            method: attributes.method,
            host: &attributes.host,
            route: &self.route.name,
            path: &attributes.path,
            headers: attributes.headers,
            query: attributes.query,
            params: &|name| params.and_then(|params| params.get(name)),
            body: self.body.as_ref(),
        })
    }
}
