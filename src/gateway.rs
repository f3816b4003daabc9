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

mod answer;
mod body;
mod plan;
mod record;
mod shared;

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use arrayvec::ArrayVec;
use http::{HeaderValue, Request, Response, Uri, Version, request::Parts};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::{
    identity::{Client, Keyed, Missing, Subject},
    limit::{Charge, MAX_LIMITS, Verdict},
    listener::{
        Handler, Peer,
        inbound::InboundBody,
        request::{self, Addressed},
    },
    response::{FieldWriter, Refusal},
    route::{Found, host, path},
    telemetry::access::AccessLog,
    upstream::{
        self, Upstream,
        forward::{Destination, Failed},
        headers::Outbound,
    },
};

use answer::RequestIds;
use plan::{LimitPlan, RoutePlan};

pub use body::Body;
pub use plan::PlanError;
pub use shared::Shared;

/// The gateway on one worker thread.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    upstreams: Vec<Upstream>,
    request_ids: RequestIds,
    fields: RefCell<FieldWriter>,
    access: Option<AccessLog>,
    /// Decisions so far, to sample their time.
    decisions: Cell<u32>,
}

/// One request, as far as it is understood: each step of the path fills in what it finds.
#[derive(Debug)]
struct Exchange<'a> {
    head: &'a Parts,
    from: &'a Peer,
    arrived: Instant,
    request_id: HeaderValue,
    /// `None` until the request is known to be valid.
    asked: Option<Asked<'a>>,
    /// The route that decides, or the plan's stand-in for none.
    route: &'a RoutePlan,
    /// The limits that the request met with the client's tier in each, and how they stand, in the same order.
    met: ArrayVec<(&'a LimitPlan, usize), MAX_LIMITS>,
    verdict: Verdict,
}

/// Who asks, and for what, in the one form in which it is matched and counted.
#[derive(Debug)]
struct Asked<'a> {
    client: Client<'a>,
    host: Cow<'a, str>,
    path: Cow<'a, str>,
}

impl<'a> Exchange<'a> {
    fn begin(
        head: &'a Parts,
        from: &'a Peer,
        route: &'a RoutePlan,
        request_id: HeaderValue,
    ) -> Self {
        let arrived = Instant::now();
        Self {
            head,
            from,
            arrived,
            request_id,
            asked: None,
            route,
            met: ArrayVec::new(),
            verdict: Verdict::default(),
        }
    }

    /// What a limit's key is made of.
    fn subject<'s>(&'s self, asked: &'s Asked<'_>) -> Subject<'s> {
        Subject {
            client: &asked.client,
            method: &self.head.method,
            host: &asked.host,
            route: &self.route.name,
            path: &asked.path,
            headers: &self.head.headers,
            query: self.head.uri.query(),
            params: &|_| None,
            body: None,
        }
    }
}

impl Handler for Worker {
    type Body = Body;

    async fn handle(self: Rc<Self>, request: Request<Incoming>, from: Rc<Peer>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let mut exchange = Exchange::begin(
            &head,
            &from,
            &self.shared.plan.unrouted,
            self.request_ids.next(),
        );
        match self.decide(&mut exchange) {
            Ok(target) => {
                let in_flight = exchange.route.metrics.enter();
                match self.forward(&exchange, &target, body).await {
                    Ok(response) => self.pass_on(&exchange, response, in_flight),
                    Err(refusal) => self.refuse(&exchange, &refusal),
                }
            }
            Err(Stopped::Denied) => self.deny(&exchange),
            Err(Stopped::Refused(refusal)) => self.refuse(&exchange, &refusal),
        }
    }

    fn head_timeout_answer(&self) -> &'static [u8] {
        crate::response::HEAD_TIMEOUT
    }
}

/// Why a request is not forwarded.
#[derive(Debug)]
enum Stopped {
    /// A limit denies it.
    Denied,
    /// It cannot be served.
    Refused(Refusal),
}

impl From<Refusal> for Stopped {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// What the upstream is asked for: exactly what was matched.
#[derive(Debug)]
struct Target<'a> {
    authority: &'a str,
    path_and_query: Cow<'a, str>,
}

impl Worker {
    /// Opens no connection yet.
    pub fn new(shared: Arc<Shared>) -> Self {
        let upstreams = shared
            .plan
            .upstreams
            .iter()
            .map(|(settings, _)| Upstream::new(settings.clone()))
            .collect();
        let access = shared.access_log();
        Self {
            shared,
            upstreams,
            request_ids: RequestIds::new(),
            fields: RefCell::default(),
            access,
            decisions: Cell::new(0),
        }
    }

    /// Closes upstream connections that have been idle for too long.
    pub fn sweep(&self, now: Instant) {
        self.upstreams
            .iter()
            .for_each(|upstream| upstream.sweep(now));
    }

    /// Who asks for what, and may they? Everything up to the verdict; nothing here waits.
    fn decide<'a>(&'a self, exchange: &mut Exchange<'a>) -> Result<Target<'a>, Stopped> {
        let plan = &self.shared.plan;
        let head = exchange.head;
        let addressed = request::check(head, &exchange.from.listener).map_err(answer::malformed)?;
        // `*` addresses the whole server: it meets the limits of its root
        let normal = path::normalise(if addressed.path == "*" {
            "/"
        } else {
            addressed.path
        })
        .map_err(answer::bad_path)?;
        let host = host::normalise(addressed.host);

        let (client, rejected) = match plan.identifier.identify(exchange.from.ip, &head.headers) {
            Ok(client) => (client, None),
            Err(rejected) => (rejected.client, Some(rejected)),
        };
        if let Some(theirs) = answer::trusted_request_id(&client, &head.headers) {
            exchange.request_id = theirs;
        }
        let found = plan.table.find(&host, &normal.key, &head.method);
        // an unknown credential is nobody: it meets only what everybody meets, so that guessing is limited too
        if let (&Found::Route(index, _), None) = (&found, &rejected) {
            exchange.route = &plan.routes[index];
        }
        let found = match found {
            Found::Route(..) => Ok(()),
            Found::WrongMethod(allow) => Err(Refusal::MethodNotAllowed { allow }),
            Found::None => Err(Refusal::NotFound),
        };
        exchange.asked = Some(Asked {
            client,
            host,
            path: normal.key,
        });
        self.admit(exchange);
        self.note_decision(exchange);
        if !exchange.verdict.admitted() {
            return Err(Stopped::Denied);
        }
        if let Some(rejected) = rejected {
            return Err(self.unauthorized(&rejected).into());
        }
        found?;
        Ok(Target {
            authority: addressed.authority,
            path_and_query: path_and_query(&head.uri, &addressed, normal.forward),
        })
    }

    /// All of the route's limits, or none.
    fn admit<'a>(&self, exchange: &mut Exchange<'a>) {
        let route: &'a RoutePlan = exchange.route;
        let mut met = ArrayVec::new();
        let mut charges = ArrayVec::<Charge<'_>, MAX_LIMITS>::new();
        let Some(asked) = &exchange.asked else { return };
        let subject = exchange.subject(asked);
        for limit in &route.limits {
            let rule = &*limit.rule;
            let key = match rule.key.is_empty() {
                true => None,
                false => {
                    let prefixes = self.shared.plan.prefixes;
                    match rule
                        .key
                        .key(Missing::Skip, &self.shared.hasher, prefixes, &subject)
                    {
                        Keyed::Bucket(key) => Some(key),
                        // a request without a value for the key is not this limit's business
                        Keyed::Skip | Keyed::Missing(_) => continue,
                    }
                }
            };
            let tier = rule.tier(&asked.client);
            met.push((limit, tier));
            charges.push(Charge {
                limit: &rule.buckets,
                tier,
                key,
                cost: route.cost,
                max_delay_ns: 0,
            });
        }
        exchange.met = met;
        exchange.verdict = self
            .shared
            .store
            .admit(self.shared.nanoseconds(exchange.arrived), &charges);
    }

    /// Sends the request on; what comes back is the upstream's response, or what we say instead.
    async fn forward(
        &self,
        exchange: &Exchange<'_>,
        target: &Target<'_>,
        body: Incoming,
    ) -> Result<Response<Body>, Refusal> {
        let (head, route) = (exchange.head, exchange.route);
        let Some(asked) = &exchange.asked else {
            return Err(Refusal::Internal);
        };
        let listener = &exchange.from.listener;
        let max_body_bytes = route.max_body_bytes.unwrap_or(listener.max_body_bytes);
        let body = InboundBody::new(body, max_body_bytes, listener.body_timeout);
        if body.size_hint().lower() > max_body_bytes {
            return Err(Refusal::BodyTooLarge);
        }
        if answer::came_through(&head.headers, &self.shared.pseudonym) {
            return Err(Refusal::LoopDetected);
        }
        let outbound = Outbound {
            method: &head.method,
            target: &target.path_and_query,
            headers: &head.headers,
            host: target.authority,
            scheme: "http",
            via_version: if head.version == Version::HTTP_2 {
                "2.0"
            } else {
                "1.1"
            },
            client: &asked.client,
            managed: &self.shared.plan.managed,
            request_id: &exchange.request_id,
            pseudonym: &self.shared.pseudonym,
        };
        let upstream = &self.upstreams[route.upstream];
        let sent = Instant::now();
        match upstream.destination() {
            Destination::Echo => Ok(upstream::echo::respond(&outbound, body).map(Body::echo)),
            Destination::Remote(pool) => {
                match upstream::forward(upstream, pool, &outbound, body).await {
                    Ok(response) => {
                        self.shared.plan.upstreams[route.upstream]
                            .1
                            .seconds
                            .record(sent.elapsed());
                        Ok(response.map(Body::remote))
                    }
                    Err(Failed::Upstream(error)) => Err(self.upstream_failed(exchange, &error)),
                    Err(Failed::RequestBody(error)) => Err(answer::bad_body(&error)),
                }
            }
        }
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
        Some(unchanged) if unchanged.path() == forward => Cow::Borrowed(unchanged.as_str()),
        _ => addressed.query.map_or(forward.clone(), |query| {
            Cow::Owned(format!("{forward}?{query}"))
        }),
    }
}
