//! What limits decide about, and what they decided. It has no HTTP head: a question that consists of attributes alone is
//! decided by the same steps.

use std::{borrow::Cow, time::Duration};

use http::{HeaderMap, Method};
use tokio::time::Instant;

use super::{applied_limit::LimitOutcomes, plan::RoutePlan, slots::Slots};
use crate::{
    identity::{BodyFields, Client, Subject},
    response::Refusal,
    route::RouteTable,
};

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
    /// The limits that apply, with what they decided.
    pub(super) limits: LimitOutcomes<'a>,
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
            limits: LimitOutcomes::default(),
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
