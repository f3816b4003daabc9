//! THE REQUEST PATH: decide, forward | answer. Read this first.
//!
//! ```text
//! request ─▶ decide ─────────────────────────────────────────────▶ forward ─▶ response
//!            resolve ─▶ overload ─▶ body fields ─▶ limits ─▶ conclude    │
//!              │           │            │            │          │        │
//!             400         503          429       429 503   401 404 405  413 502 504
//! ```
//!
//! `decide` has the steps of a decision; forward-auth (`/check`) and `explain` take the same. All
//! status codes of our own come from `response`. Only this module calls identity, routes, limits
//! and upstreams, so the step order exists in one place. One request uses one plan and one `now`.
//! Everything here belongs to one worker thread and takes no lock. Threads share only the limiter's
//! cells and the metrics' counters.

// one decision, in the order of its steps
mod decide;
mod resolve;
mod request_context;
mod decision_context;
mod decision_effect;
mod body_source;
mod body_fields;
mod request_body;
mod body_error;
mod applicability;
mod applied_limit;
mod ask;
mod cost;
mod cost_rule;
mod held_costs;
mod admit;
mod observer;

// the response, and what is recorded of it
mod answer;
mod refusals;
mod outbound;
mod body;
mod metered_answer;
mod record;
mod request_id;
mod slots;

// who asks: a listener's worker, another proxy, an operator
mod worker;
mod worker_service;
pub mod check;
pub mod described;
pub mod explain;
pub mod admin_view;
mod status_limit;
mod status_page;

// what a reload keeps, and what it replaces
mod process;
mod active_config;
mod plan;
mod config_exceptions;
mod cost_terms;
mod shared_budget;
pub mod runtime_overrides;
pub mod decision_log;

// what looks wrong with a configuration while it runs
mod proxy_detection;
mod majority_vote;
mod log_once;

use std::rc::Rc;

use http::{Request, Response, request::Parts};
use tokio::time::Instant;

use crate::{
    identity::HeldToken,
    listener::{
        Peer,
        inbound::{InboundBody, RequestBody},
    },
    response::Refusal,
    upstream::{self, Failed, headers::Outbound},
};

use body::ResponseSource;
use decision_effect::DecisionEffect;
use observer::Unobserved;
use record::Record;
use request_body::LiveBody;
use request_context::{LocalReply, RequestContext, UpstreamTarget};
use worker::Worker;

pub use active_config::{ActiveConfig, ActiveConfigHandle, OverflowSeen};
pub use body::Body;
pub use plan::PlanError;
pub use process::Process;
pub use worker_service::WorkerService;

impl Worker {
    /// Answers one request.
    fn serve<R>(
        self: Rc<Self>,
        request: Request<RequestBody>,
        from: Rc<Peer>,
        finish: impl FnOnce(Response<Body>) -> R,
    ) -> impl Future<Output = R> {
        // Split before building the future, which would otherwise store both the request and its
        // parts.
        let (head, body) = request.into_parts();
        async move {
            let response = self.answer(&head, body, &from).await;
            self.spare.keep(head.headers);
            finish(response)
        }
    }

    async fn answer(&self, head: &Parts, body: RequestBody, from: &Rc<Peer>) -> Response<Body> {
        let token = HeldToken::default();
        let unrouted = &self.active.plan.unrouted;
        let mut request =
            RequestContext::begin(head, from, &token, unrouted, self.request_ids.next());
        let mut body = InboundBody::new(body, from);
        body.remove_from_trailers(&self.active.plan.managed);
        if request.grpc.is_some() {
            body.may_trickle();
        }
        let mut source = LiveBody {
            worker: self,
            body: &mut body,
        };
        let (effect, observer) = (DecisionEffect::Serve, &mut Unobserved);
        let decided = self
            .decide(&mut request, &mut source, effect, observer)
            .await;
        self.wait_for_turn(&mut request).await;
        // Match by reference: a future reserves room for a value and again for what is moved out of
        // it.
        let response = match &decided {
            Ok(target) => self.forward(&mut request, target, body).await,
            Err(reply) => {
                let response = match reply {
                    LocalReply::Denied => self.deny(&request),
                    LocalReply::Refused(refusal) => self.refuse(&request, refusal, None),
                    LocalReply::OwnQuotas => self.own_quotas(&request),
                };
                answer::leave_unread(&body, &request, response)
            }
        };
        answer::refuse_upgrade(&request, response)
    }
}

impl Worker {
    /// Applies the delay that limits impose, whatever the answer. An immediate refusal would let
    /// clients skip the queue.
    async fn wait_for_turn(&self, request: &mut RequestContext<'_>) {
        let delay = request.decision.delay;
        if !delay.is_zero() {
            // If the client disconnects during the delay, it loses its place in the queue.
            request.from.needs_client(true);
            let turn = tokio::time::sleep(delay);
            self.while_client_stays(request, turn).await;
            request.from.needs_client(false);
        }
        request.decision.slots.turn_has_come();
    }

    /// Forwards the request. Returns the upstream's response, or our own answer if that fails.
    async fn forward(
        &self,
        request: &mut RequestContext<'_>,
        target: &UpstreamTarget<'_>,
        mut body: InboundBody,
    ) -> Response<Body> {
        let slots = std::mem::take(&mut request.decision.slots);
        let costs = request.decision.costs.take();
        let request = &*request;
        let (head, route) = (request.head, request.decision.route);
        let framing = upstream::body_framing(&head.method, &body);
        let Some(outbound) = self.outbound(request, target, framing) else {
            return self.refuse(request, &Refusal::Internal, None);
        };
        if answer::has_via(&head.headers, &self.active.process.pseudonym) {
            return self.refuse(request, &Refusal::LoopDetected, None);
        }
        let upstream = &self.upstreams[route.upstream];
        let mut record = Record::begin(self, request, slots, costs);
        let sent = Instant::now();
        record.sending(sent, &mut body);
        let outbound = Outbound {
            custody: record.abandoned_exchanges(),
            ..outbound
        };
        let body = framing.has_body().then(|| Box::new(body));
        let answered = upstream::forward(upstream, &outbound, body, sent).await;
        if let Some(overload) = &self.active.overload {
            overload.answered(sent.elapsed());
        }
        match answered {
            Ok(answered) => {
                upstream.state().metrics().seconds.record(sent.elapsed());
                record.asked(Some(answered.server), None);
                self.forward_response(request, answered.response.map(ResponseSource::from), record)
            }
            Err(unanswered) => {
                let refusal = match &unanswered.failed {
                    Failed::Upstream(error) => {
                        record.sent_nothing(error.nothing_was_sent());
                        record.asked(unanswered.server, Some(error.kind()));
                        self.upstream_failed(request, unanswered.server, error)
                    }
                    Failed::RequestBody(error) => {
                        record.sent_nothing(true);
                        record.asked(unanswered.server, None);
                        refusals::bad_body(error)
                    }
                };
                self.refuse(request, &refusal, Some(record))
            }
        }
    }
}
