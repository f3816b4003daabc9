//! The input and the results of a limit decision. It contains no HTTP head, so a request made of
//! attributes alone takes the same steps.

use std::{borrow::Cow, time::Duration};

use http::{HeaderMap, Method};
use tokio::time::Instant;

use super::{
    applied_limit::LimitOutcomes, cost_rule::CostFacts, held_costs::HeldCosts, plan::RoutePlan,
    slots::RequestSlots,
};
use crate::{
    identity::{BodyFields, Client, KeySubject},
    response::Refusal,
    route::RouteTable,
};

/// The limits of one request: input first, then results.
#[derive(Debug)]
pub(super) struct DecisionContext<'a> {
    pub(super) arrived: Instant,
    /// `None` until the request is validated.
    pub(super) attributes: Option<RequestAttributes<'a>>,
    /// The matching route, or the plan's placeholder if none matches.
    pub(super) route: &'a RoutePlan,
    /// Body fields that key limits; `None` if there are none or no limit needs them.
    pub(super) body: Option<BodyFields>,
    /// The answer if the body is too large, broken or late. Sent once the limits are charged.
    pub(super) body_failed: Option<Box<Refusal>>,
    /// When limits were asked, which may be after reading the body.
    pub(super) decided_at: Instant,
    /// The applying limits and their outcomes.
    pub(super) limits: LimitOutcomes<'a>,
    /// The delay before forwarding.
    pub(super) delay: Duration,
    /// What the body says about the cost of the request.
    pub(super) cost_facts: Option<Box<CostFacts>>,
    /// What limits on costs hold of it.
    pub(super) costs: Option<Box<HeldCosts>>,
    /// Slots and queue places held while in flight.
    pub(super) slots: RequestSlots,
    /// The name of a limit that is nearly used up.
    pub(super) warning: Option<&'a str>,
    /// Names of tag-mode limits that would have denied the request, for the upstream.
    pub(super) tags: Vec<&'a str>,
}

/// The client and the target, normalised for matching and counting.
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
            cost_facts: None,
            costs: None,
            slots: RequestSlots::default(),
            warning: None,
            tags: Vec::new(),
        }
    }

    /// Passes `f` the values that limit keys consist of.
    pub(super) fn with_subject<R>(
        &self,
        table: &RouteTable,
        attributes: &RequestAttributes<'_>,
        show: impl FnOnce(&KeySubject<'_>) -> R,
    ) -> R {
        let params = self
            .route
            .index
            .map(|route| table.params(route, &attributes.path));
        show(&KeySubject {
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
