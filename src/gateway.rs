//! THE REQUEST PATH: identify, find, admit, forward | answer. Read this first.
//!
//! ```text
//! request ─▶ check ─▶ identify ─▶ find ─▶ admit ─▶ forward ─▶ response with its fields
//!              │          │         │        │         │
//!             400        401     404 405    429     502 504          (authored by `response`)
//! ```
//!
//! Only this module calls identity, routes, limits and upstreams, so the order of steps exists in one place. One
//! request uses one plan and one `now`. Everything here belongs to one worker thread: nothing is locked, nothing
//! crosses threads but the limiter's cells and the metrics' counters.

mod admit;
mod answer;
mod body;
mod body_fields;
mod body_source;
pub mod check;
mod decide;
mod decision_context;
pub mod described;
mod exceptions;
mod refusals;
mod request_body;
mod request_context;
mod request_id;
mod resolve;
pub mod explain;
mod majority;
pub mod notebook;
pub mod operate;
mod observer;
mod own;
mod plan;
mod process;
mod purse;
mod record;
pub mod rulings;
mod shared;
mod slots;
mod station;
mod suspicion;
mod together;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use http::{Request, Response, Version, request::Parts};
use tokio::time::Instant;

use crate::{
    identity::{HeldToken, TokenCache},
    listener::{
        Peer,
        inbound::{InboundBody, RequestBody},
    },
    response::{FieldWriter, Refusal},
    telemetry::{access::AccessLog, log::Throttle, trace::Spans},
    upstream::{
        self, SpareTable, Upstream,
        forward::Failed,
        headers::{BodyFraming, Continued, Outbound},
    },
};

use body::Source;
use decide::DecisionEffect;
use majority::Majority;
use notebook::{Admissions, Notebook};
use observer::Unobserved;
use record::Record;
use request_body::LiveBody;
use request_context::{LocalReply, RequestContext, UpstreamTarget};
use request_id::RequestIds;

pub use body::Body;
pub use plan::PlanError;
pub use process::Process;
pub use shared::{Current, OverflowSeen, Shared};
pub use station::Station;

/// The gateway on one worker thread, with one configuration.
#[derive(Debug)]
struct Worker {
    shared: Arc<Shared>,
    upstreams: Vec<Rc<Upstream>>,
    request_ids: RequestIds,
    fields: RefCell<FieldWriter>,
    spare: SpareTable,
    access: Option<AccessLog>,
    spans: Option<Spans>,
    tokens: TokenCache,
    /// Decisions so far, to sample their time and their keys.
    decisions: Cell<u32>,
    /// By limit.
    majorities: RefCell<Box<[Majority]>>,
    /// By upstream: what went wrong with it.
    warnings: Vec<Throttle>,
    /// That requests are shed.
    shedding: Throttle,
    notebook: Arc<Notebook>,
    admissions: Admissions,
}

impl Worker {
    /// Answers one request.
    fn serve<R>(
        self: Rc<Self>,
        request: Request<RequestBody>,
        from: Rc<Peer>,
        finish: impl FnOnce(Response<Body>) -> R,
    ) -> impl Future<Output = R> {
        // before the future is made: it would have room for the request and for its parts
        let (head, body) = request.into_parts();
        async move {
            let response = self.answer(&head, body, &from).await;
            self.spare.keep(head.headers);
            finish(response)
        }
    }

    async fn answer(&self, head: &Parts, body: RequestBody, from: &Rc<Peer>) -> Response<Body> {
        let token = HeldToken::default();
        let unrouted = &self.shared.plan.unrouted;
        let mut request =
            RequestContext::begin(head, from, &token, unrouted, self.request_ids.next());
        let mut body = InboundBody::new(body, from);
        body.remove_from_trailers(&self.shared.plan.managed);
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
        // by reference: a future has room for a value and for what is moved out of it
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
    /// Opens no connection yet. Upstreams that are as they were keep the connections of the worker before.
    fn new(shared: Arc<Shared>, previous: Option<&Worker>) -> Self {
        let request_ids = RequestIds::new();
        let upstreams = shared.plan.upstreams.iter().map(|fleet| {
            let mut before = previous.iter().flat_map(|worker| &worker.upstreams);
            let unchanged = before.find(|upstream| Arc::ptr_eq(upstream.fleet(), fleet));
            let new = || Rc::new(Upstream::new(Arc::clone(fleet), request_ids.random()));
            unchanged.map_or_else(new, Rc::clone)
        });
        let upstreams: Vec<_> = upstreams.collect();
        let notebook = match previous {
            Some(worker) => Arc::clone(&worker.notebook),
            None => shared.process.notebooks.open(),
        };
        notebook.retain(|limit| shared.plan.limit(limit).is_some());
        Self {
            notebook,
            admissions: Admissions::default(),
            shedding: Throttle::default(),
            warnings: upstreams.iter().map(|_| Throttle::default()).collect(),
            upstreams,
            request_ids,
            fields: RefCell::default(),
            spare: SpareTable::default(),
            access: shared.access_log(),
            spans: shared.process.spans().cloned(),
            tokens: TokenCache::new(shared.process.token_secret),
            decisions: Cell::new(0),
            majorities: RefCell::new(
                // the page of own quotas has a limit, too
                vec![Majority::default(); shared.snapshot().limits.len() + 1].into(),
            ),
            shared,
        }
    }

    /// Closes upstream connections that have been idle for too long.
    fn sweep(&self, now: Instant) {
        self.upstreams
            .iter()
            .for_each(|upstream| upstream.sweep(now));
    }

    /// Holds a request for as long as its limits say, whatever the answer is: a refusal that came at once would let clients skip
    /// the queue.
    async fn wait_for_turn(&self, request: &mut RequestContext<'_>) {
        let delay = request.decision.delay;
        if !delay.is_zero() {
            // a client that leaves meanwhile takes its place in the queue with it
            request.from.needs_client(true);
            let turn = tokio::time::sleep(delay);
            self.while_client_stays(request, turn).await;
            request.from.needs_client(false);
        }
        request.decision.slots.turn_has_come();
    }

    /// Sends the request on, and answers with the upstream's response, or with what we say instead.
    async fn forward(
        &self,
        request: &mut RequestContext<'_>,
        target: &UpstreamTarget<'_>,
        body: InboundBody,
    ) -> Response<Body> {
        let slots = std::mem::take(&mut request.decision.slots);
        let request = &*request;
        let (head, route) = (request.head, request.decision.route);
        let framing = upstream::body_framing(&head.method, &body);
        let Some(outbound) = self.outbound(request, target, framing) else {
            return self.refuse(request, &Refusal::Internal, None);
        };
        if answer::came_through(&head.headers, &self.shared.process.pseudonym) {
            return self.refuse(request, &Refusal::LoopDetected, None);
        }
        let upstream = &self.upstreams[route.upstream];
        let mut record = Record::begin(self, request, slots);
        let outbound = Outbound {
            custody: record.custody(),
            ..outbound
        };
        let body = framing.has_body().then(|| Box::new(body));
        let sent = Instant::now();
        let answered = upstream::forward(upstream, &outbound, body, sent).await;
        if let Some(overload) = &self.shared.overload {
            overload.answered(sent.elapsed());
        }
        match answered {
            Ok(answered) => {
                upstream.fleet().metrics().seconds.record(sent.elapsed());
                record.asked(Some(answered.server), None);
                self.pass_on(request, answered.response.map(Source::from), record)
            }
            Err(unanswered) => {
                let refusal = match &unanswered.failed {
                    Failed::Upstream(error) => {
                        record.asked(unanswered.server, Some(error.kind()));
                        self.upstream_failed(request, unanswered.server, error)
                    }
                    Failed::RequestBody(error) => {
                        record.asked(unanswered.server, None);
                        refusals::bad_body(error)
                    }
                };
                self.refuse(request, &refusal, Some(record))
            }
        }
    }
}

impl Worker {
    /// The request as the upstream is to receive it; `None` while nobody knows who asks.
    fn outbound<'a>(
        &'a self,
        request: &'a RequestContext<'_>,
        target: &'a UpstreamTarget<'_>,
        framing: BodyFraming,
    ) -> Option<Outbound<'a>> {
        let head = request.head;
        Some(Outbound {
            method: &head.method,
            target: &target.path_and_query,
            framing,
            headers: &head.headers,
            host: target.authority,
            scheme: request.from.scheme(),
            via_version: match head.version {
                Version::HTTP_2 => "2.0",
                Version::HTTP_10 => "1.0",
                _ => "1.1",
            },
            client: &request.decision.attributes.as_ref()?.client,
            traced: request.traced.as_ref().map(|traced| Continued {
                traceparent: &traced.traceparent,
                is_root: traced.place.is_root(),
            }),
            managed: &self.shared.plan.managed,
            request_id: &request.request_id,
            pseudonym: &self.shared.process.pseudonym,
            priority: request.decision.route.priority.stated(),
            over: &request.decision.tags,
            websocket: target.websocket,
            hears: (head.version == Version::HTTP_11).then_some(request.from as _),
            spare: &self.spare,
            custody: None,
        })
    }
}
