//! Step 1 of a decision: find the client, the route and the target from the HTTP head. Needs no
//! limit.

use std::{borrow::Cow, time::SystemTime};

use http::Uri;

use super::{
    decision_context::{DecisionContext, RequestAttributes},
    decision_effect::DecisionEffect,
    refusals,
    request_context::{RequestContext, Resolved, UpstreamTarget},
    request_id, status_limit,
    worker::Worker,
};
use crate::{
    identity::{HeldToken, TokenWorkspace},
    listener::request::{self, Addressed},
    response::Refusal,
    route::{Found, host, path},
};

impl Worker {
    /// The cache and the clock for checking tokens.
    pub(super) fn tokens<'a>(&'a self, held: &'a HeldToken) -> TokenWorkspace<'a> {
        TokenWorkspace {
            cache: &self.tokens,
            held,
            now: SystemTime::now,
        }
    }

    /// Finds the client, the route and the target. Everything here needs no limit.
    pub(super) fn resolve<'a>(
        &'a self,
        request: &mut RequestContext<'a>,
    ) -> Result<Resolved<'a>, Refusal> {
        let plan = &self.active.plan;
        let head = request.head;
        let addressed =
            request::check(head, &request.from.listener).map_err(refusals::malformed)?;
        request.may_upgrade = addressed.websocket;
        // `*` addresses the whole server; the limits of its root apply.
        let path = if addressed.path == "*" {
            "/"
        } else {
            addressed.path
        };
        let normal = path::normalise(path).map_err(refusals::bad_path)?;
        let host = host::normalise(addressed.host);

        let tokens = self.tokens(request.token);
        let from = request.from;
        let certificate = from.certificate.as_deref();
        let identified = plan
            .identifier
            .identify(from.ip, certificate, &head.headers, tokens);
        let (client, rejected) = match identified {
            Ok(client) => (client, None),
            Err(rejected) => (rejected.client, Some(rejected)),
        };
        if let Some(doubt) = client.doubt {
            plan.addresses.rejected(doubt.label());
        }
        self.check_peer(&client, &head.headers);
        if let Some(theirs) = request_id::trusted_request_id(&client, &head.headers) {
            request.request_id = theirs;
        }
        request.traced = self.trace(&client, &head.headers);
        let found = match plan.table.find(&host, &normal.key, &head.method) {
            _ if rejected.is_none() && plan.is_status_page(&normal.key) => {
                request.decision.route = &plan.status;
                status_limit::takes(&head.method)
            }
            Found::Route(index, _) => {
                request.decision.route = &plan.routes[index];
                Ok(())
            }
            Found::WrongMethod(allow) => Err(Refusal::MethodNotAllowed { allow }),
            Found::None => Err(Refusal::NotFound),
        };
        request.decision.attributes = Some(RequestAttributes {
            client,
            method: &head.method,
            host,
            path: normal.key,
            query: head.uri.query(),
            headers: &head.headers,
        });
        let target = UpstreamTarget {
            authority: addressed.authority,
            path_and_query: path_and_query(&head.uri, &addressed, normal.forward),
            websocket: addressed.websocket,
        };
        Ok(Resolved {
            target,
            rejected,
            found,
        })
    }

    /// Takes a place among the requests in flight before any limit is charged, so a shed request
    /// costs its client nothing. A request that another proxy serves takes no place, but can be
    /// shed.
    pub(super) fn enter_overload(
        &self,
        decision: &mut DecisionContext<'_>,
        effect: DecisionEffect,
    ) -> Result<(), Refusal> {
        let Some(overload) = &self.active.overload else {
            return Ok(());
        };
        let priority = decision.route.priority;
        let is_admitted = match effect {
            DecisionEffect::Serve => {
                let permit = overload.enter(priority);
                let is_admitted = permit.is_some();
                permit
                    .into_iter()
                    .for_each(|permit| decision.slots.occupy(permit));
                is_admitted
            }
            DecisionEffect::Charge | DecisionEffect::Look => overload.has_room(priority),
        };
        if is_admitted {
            return Ok(());
        }
        if effect.charges() {
            decision.route.shed.increment(1);
            if let Some(suppressed) = self.shedding.speak() {
                let (priority, most) = (priority.as_str(), overload.bound());
                tracing::warn!(priority, most, suppressed, "overload: a request was shed");
            }
        }
        Err(Refusal::Overloaded)
    }
}

/// The normalised path with the original query. Borrowed if the path arrived in normal form.
fn path_and_query<'a>(
    uri: &'a Uri,
    addressed: &Addressed<'a>,
    forward: Cow<'a, str>,
) -> Cow<'a, str> {
    match uri.path_and_query() {
        _ if addressed.path == "*" => Cow::Borrowed("*"),
        // The path of `http://host?query` is empty, but `Uri` reports "/".
        Some(unchanged) if unchanged.path() == forward && unchanged.as_str().starts_with('/') => {
            Cow::Borrowed(unchanged.as_str())
        }
        _ => addressed.query.map_or(forward.clone(), |query| {
            Cow::Owned(format!("{forward}?{query}"))
        }),
    }
}
