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
pub mod check;
mod exceptions;
mod exchange;
pub mod explain;
mod fields;
mod majority;
pub mod notebook;
pub mod operate;
mod own;
mod plan;
mod purse;
mod record;
pub mod rulings;
mod shared;
mod slots;
mod station;
mod suspicion;
mod together;

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    time::SystemTime,
};

use http::{Request, Response, Uri, Version, request::Parts};
use http_body::Body as _;
use tokio::time::Instant;

use crate::{
    identity::{HeldToken, Prefixes, TokenCache, Tokens},
    listener::{
        Peer,
        inbound::{InboundBody, RequestBody},
        request::{self, Addressed},
    },
    response::{FieldWriter, Refusal},
    route::{Found, host, path},
    telemetry::{access::AccessLog, log::Throttle, trace::Spans},
    upstream::{
        self, SpareTable, Upstream,
        forward::Failed,
        headers::{BodyFraming, Continued, Outbound},
    },
};

use answer::RequestIds;
use body::Source;
use exchange::{Asked, Exchange, Stopped, Target, Understood};
use majority::Majority;
use notebook::{Admissions, Notebook};
use record::Record;

pub use body::Body;
pub use plan::PlanError;
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
    /// It explains requests that nobody has sent: no limit is charged for them.
    only_looks: bool,
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
        let mut exchange = Exchange::begin(head, from, &token, unrouted, self.request_ids.next());
        let mut body = InboundBody::new(body, from);
        body.remove_from_trailers(&self.shared.plan.managed);
        if exchange.grpc.is_some() {
            body.may_trickle();
        }
        let response = match self.decide(&mut exchange, &mut body).await {
            Ok(target) => self.forward(&mut exchange, &target, body).await,
            Err(stopped) => {
                let response = match stopped {
                    Stopped::Denied => self.deny(&exchange),
                    Stopped::Refused(refusal) => self.refuse(&exchange, &refusal, None),
                    Stopped::OwnQuotas => self.own_quotas(&exchange),
                };
                answer::leave_unread(&body, &exchange, response)
            }
        };
        answer::refuse_upgrade(&exchange, response)
    }
}

/// Bytes of a body that are read before the decision, where a limit is keyed by one of its fields. The fields of a larger body
/// are unclear.
const MAX_READ_AHEAD_BYTES: usize = 256 * 1024;

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
            None => shared.notebooks.open(),
        };
        notebook.retain(|limit| shared.plan.limit(limit).is_some());
        Self {
            notebook,
            admissions: Admissions::default(),
            only_looks: false,
            shedding: Throttle::default(),
            warnings: upstreams.iter().map(|_| Throttle::default()).collect(),
            upstreams,
            request_ids,
            fields: RefCell::default(),
            spare: SpareTable::default(),
            access: shared.access_log(),
            spans: shared.spans().cloned(),
            tokens: TokenCache::new(shared.token_secret),
            decisions: Cell::new(0),
            majorities: RefCell::new(
                // the page of own quotas has a limit, too
                vec![Majority::default(); shared.snapshot().limits.len() + 1].into(),
            ),
            shared,
        }
    }

    /// What finding out about a token takes.
    fn tokens<'a>(&'a self, held: &'a HeldToken) -> Tokens<'a> {
        Tokens {
            cache: &self.tokens,
            held,
            now: SystemTime::now,
        }
    }

    /// Closes upstream connections that have been idle for too long.
    fn sweep(&self, now: Instant) {
        self.upstreams
            .iter()
            .for_each(|upstream| upstream.sweep(now));
    }

    /// Who asks for what, and may they? Waits only for a body that keys a limit, for tokens of a limit that gateways share, and
    /// for the request's turn.
    async fn decide<'a>(
        &'a self,
        exchange: &mut Exchange<'a>,
        body: &mut InboundBody,
    ) -> Result<Target<'a>, Stopped> {
        let understood = self.understand(exchange)?;
        let route = exchange.route;
        if let Some(max_bytes) = route.max_body_bytes {
            body.set_max_bytes(max_bytes);
        }
        let fleet = self.shared.plan.upstreams.get(route.upstream);
        if exchange.grpc.is_some() && fleet.is_some_and(|fleet| fleet.settings().speaks_http2()) {
            body.bound_messages();
        }
        self.make_room(exchange)?;
        if body.is_too_large() {
            exchange.body_failed = Some(Box::new(Refusal::BodyTooLarge));
        }
        let (guesses, has_body) = (understood.rejected.is_some(), !body.is_end_stream());
        let read = async |exchange: &Exchange<'_>| {
            let asked = exchange.asked.as_ref();
            let address = asked.map_or(exchange.from.ip, |asked| asked.client.address);
            let client = Prefixes::default().aggregate(address);
            let read = body.read_ahead(MAX_READ_AHEAD_BYTES, &self.shared.body_buffers, client);
            let read = Box::pin(self.while_client_stays(exchange, read)).await;
            read.map_err(|error| answer::bad_body(&error))
        };
        self.decide_limits(exchange, guesses, has_body, read, |_, _| ())
            .await?;
        self.settle(exchange, &understood)?;
        if !exchange.delay.is_zero() {
            // a client that leaves meanwhile takes its place in the queue with it
            exchange.from.needs_client(true);
            let turn = tokio::time::sleep(exchange.delay);
            self.while_client_stays(exchange, turn).await;
            exchange.from.needs_client(false);
        }
        exchange.slots.turn_has_come();
        // only now: whoever is refused has waited for its turn too, or refusals would be free
        self.conclude(understood, exchange)
    }

    /// A place among the requests that are under way, before any limit is charged: what is shed costs its client nothing.
    fn make_room(&self, exchange: &mut Exchange<'_>) -> Result<(), Refusal> {
        let Some(overload) = &self.shared.overload else {
            return Ok(());
        };
        let priority = exchange.route.priority;
        let place = overload.enter(priority).ok_or_else(|| {
            exchange.route.shed.increment(1);
            if let Some(unsaid) = self.shedding.speak() {
                let (priority, most) = (priority.as_str(), overload.bound());
                tracing::warn!(priority, most, unsaid, "overload: a request was shed");
            }
            Refusal::Overloaded
        })?;
        exchange.slots.occupy(place);
        Ok(())
    }

    /// The decision is made: it is counted, and remembered with its reasons. Whoever is denied goes no further.
    fn settle(&self, exchange: &Exchange<'_>, understood: &Understood<'_>) -> Result<(), Stopped> {
        self.note_decision(exchange);
        self.remember(exchange, understood);
        match exchange.verdict.admitted() {
            true => Ok(()),
            false => Err(Stopped::Denied),
        }
    }

    /// What becomes of a request that no limit turns away.
    fn conclude<'a>(
        &self,
        understood: Understood<'a>,
        exchange: &Exchange<'_>,
    ) -> Result<Target<'a>, Stopped> {
        if let Some(rejected) = understood.rejected {
            return Err(self.unauthorized(&rejected).into());
        }
        understood.found?;
        if let Some(refusal) = &exchange.body_failed {
            return Err(Refusal::clone(refusal).into());
        }
        match exchange.route.shows_quotas {
            true => Err(Stopped::OwnQuotas),
            false => Ok(understood.target),
        }
    }

    /// Who asks for what: everything that needs no limit.
    fn understand<'a>(&'a self, exchange: &mut Exchange<'a>) -> Result<Understood<'a>, Refusal> {
        let plan = &self.shared.plan;
        let head = exchange.head;
        let addressed = request::check(head, &exchange.from.listener).map_err(answer::malformed)?;
        exchange.may_upgrade = addressed.websocket;
        // `*` addresses the whole server: it meets the limits of its root
        let path = if addressed.path == "*" {
            "/"
        } else {
            addressed.path
        };
        let normal = path::normalise(path).map_err(answer::bad_path)?;
        let host = host::normalise(addressed.host);

        let tokens = self.tokens(exchange.token);
        let from = exchange.from;
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
        self.suspect_peer(&client, &head.headers);
        if let Some(theirs) = answer::trusted_request_id(&client, &head.headers) {
            exchange.request_id = theirs;
        }
        exchange.traced = self.trace(&client, &head.headers);
        let found = match plan.table.find(&host, &normal.key, &head.method) {
            _ if rejected.is_none() && plan.is_status_page(&normal.key) => {
                exchange.route = &plan.status;
                own::takes(&head.method)
            }
            Found::Route(index, _) => {
                exchange.route = &plan.routes[index];
                Ok(())
            }
            Found::WrongMethod(allow) => Err(Refusal::MethodNotAllowed { allow }),
            Found::None => Err(Refusal::NotFound),
        };
        exchange.asked = Some(Asked {
            client,
            host,
            path: normal.key,
        });
        let target = Target {
            authority: addressed.authority,
            path_and_query: path_and_query(&head.uri, &addressed, normal.forward),
            websocket: addressed.websocket,
        };
        Ok(Understood {
            target,
            rejected,
            found,
        })
    }

    /// Sends the request on, and answers with the upstream's response, or with what we say instead.
    async fn forward(
        &self,
        exchange: &mut Exchange<'_>,
        target: &Target<'_>,
        body: InboundBody,
    ) -> Response<Body> {
        let slots = std::mem::take(&mut exchange.slots);
        let exchange = &*exchange;
        let (head, route) = (exchange.head, exchange.route);
        let framing = upstream::body_framing(&head.method, &body);
        let Some(outbound) = self.outbound(exchange, target, framing) else {
            return self.refuse(exchange, &Refusal::Internal, None);
        };
        if answer::came_through(&head.headers, &self.shared.pseudonym) {
            return self.refuse(exchange, &Refusal::LoopDetected, None);
        }
        let upstream = &self.upstreams[route.upstream];
        let mut record = Record::begin(self, exchange, slots);
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
                self.pass_on(exchange, answered.response.map(Source::from), record)
            }
            Err(unanswered) => {
                let refusal = match &unanswered.failed {
                    Failed::Upstream(error) => {
                        record.asked(unanswered.server, Some(error.kind()));
                        self.upstream_failed(exchange, unanswered.server, error)
                    }
                    Failed::RequestBody(error) => {
                        record.asked(unanswered.server, None);
                        answer::bad_body(error)
                    }
                };
                self.refuse(exchange, &refusal, Some(record))
            }
        }
    }
}

impl Worker {
    /// The request as the upstream is to receive it; `None` while nobody knows who asks.
    fn outbound<'a>(
        &'a self,
        exchange: &'a Exchange<'_>,
        target: &'a Target<'_>,
        framing: BodyFraming,
    ) -> Option<Outbound<'a>> {
        let head = exchange.head;
        Some(Outbound {
            method: &head.method,
            target: &target.path_and_query,
            framing,
            headers: &head.headers,
            host: target.authority,
            scheme: exchange.from.scheme(),
            via_version: match head.version {
                Version::HTTP_2 => "2.0",
                Version::HTTP_10 => "1.0",
                _ => "1.1",
            },
            client: &exchange.asked.as_ref()?.client,
            traced: exchange.traced.as_ref().map(|traced| Continued {
                traceparent: &traced.traceparent,
                is_root: traced.place.is_root(),
            }),
            managed: &self.shared.plan.managed,
            request_id: &exchange.request_id,
            pseudonym: &self.shared.pseudonym,
            priority: exchange.route.priority.stated(),
            over: &exchange.tags,
            websocket: target.websocket,
            hears: (head.version == Version::HTTP_11).then_some(exchange.from as _),
            spare: &self.spare,
            custody: None,
        })
    }
}

/// The normalised path with the query as it came. Borrowed when the path came in its normal form.
fn path_and_query<'a>(
    uri: &'a Uri,
    addressed: &Addressed<'a>,
    forward: Cow<'a, str>,
) -> Cow<'a, str> {
    match uri.path_and_query() {
        _ if addressed.path == "*" => Cow::Borrowed("*"),
        // the path of `http://host?query` is empty, and is said to be "/"
        Some(unchanged) if unchanged.path() == forward && unchanged.as_str().starts_with('/') => {
            Cow::Borrowed(unchanged.as_str())
        }
        _ => addressed.query.map_or(forward.clone(), |query| {
            Cow::Owned(format!("{forward}?{query}"))
        }),
    }
}
