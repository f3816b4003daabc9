//! Forward-auth: decides requests that another proxy serves. Takes the steps of the request path up
//! to forwarding.
//!
//! The request is described as for [`explain`](super::explain), but the decision counts: it is
//! charged, counted, logged and kept for explanations. This gateway never sees the response. So
//! concurrency limits hold no slot, and limits that count answers count none. Delays are not
//! applied, because each would occupy one of the admin listener's few connections.
//!
//! Decisions need a worker, and the admin listener has none. A dedicated thread has one that opens
//! no connection; it starts with the first check.

use std::{io, rc::Rc, sync::Arc, thread, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use tokio::{
    runtime::LocalOptions,
    sync::{mpsc, oneshot},
};

use super::{
    active_config::ActiveConfig,
    active_config::ActiveConfigHandle,
    answer,
    body::Body,
    decision_effect::DecisionEffect,
    described::{Described, DescribedSource},
    observer::Unobserved,
    record::{self, LocalReplyReason},
    request_context::LocalReply,
    request_context::RequestContext,
    worker::Worker,
};
use crate::{
    identity::HeldToken,
    listener::{self, Peer},
    response::{X_RATELIMIT_WARNING, X_REQUEST_ID},
};

/// Checks that may queue. Further callers wait for a place.
const WAITING: usize = 64;
/// Fields for the upstream. The asking proxy copies them.
static USER: HeaderName = HeaderName::from_static("x-user-id");
static TIER: HeaderName = HeaderName::from_static("x-rate-limit-tier");
static OVER: HeaderName = HeaderName::from_static("x-ratelimit-over");
/// How often the thread checks for a new configuration, to release the old one.
const LOOK: Duration = Duration::from_secs(1);

/// Sends checks to the forward-auth thread. Clones use the same thread.
#[derive(Clone, Debug)]
pub struct ForwardAuth {
    questions: mpsc::Sender<CheckRequest>,
}

#[derive(Debug)]
struct CheckRequest {
    described: Described,
    answer: oneshot::Sender<Response<Bytes>>,
}

impl ForwardAuth {
    /// Starts the thread. It decides by the running configuration until the last handle drops.
    /// Fails if the system cannot start a thread.
    pub fn open(current: Arc<ActiveConfigHandle>) -> io::Result<ForwardAuth> {
        let (questions, asked) = mpsc::channel(WAITING);
        let work = move || match tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
        {
            Ok(runtime) => runtime.block_on(serve(&current, asked)),
            // Callers then get `None`.
            Err(error) => {
                tracing::error!(%error, "forward-auth is unavailable: cannot start its thread")
            }
        };
        thread::Builder::new()
            .name("check".to_owned())
            .spawn(work)?;
        Ok(ForwardAuth { questions })
    }

    /// The client's answer: 200 with the describing fields if the request would be forwarded.
    /// `None` if the thread has failed.
    pub async fn ask(&self, described: Described) -> Option<Response<Bytes>> {
        let (answer, told) = oneshot::channel();
        let question = CheckRequest { described, answer };
        self.questions.send(question).await.ok()?;
        told.await.ok()
    }
}

/// The worker that decides, with the first listener, whose bounds apply to described requests.
#[derive(Clone, Debug)]
struct ForwardAuthWorker {
    worker: Rc<Worker>,
    listener: Rc<listener::ListenerSettings>,
}

impl ForwardAuthWorker {
    fn new(shared: Arc<ActiveConfig>, previous: Option<&ForwardAuthWorker>) -> ForwardAuthWorker {
        let listener = Rc::new(shared.snapshot().listeners[0].clone());
        let previous = previous.map(|clerk| &*clerk.worker);
        ForwardAuthWorker {
            worker: Rc::new(Worker::new(shared, previous)),
            listener,
        }
    }
}

async fn serve(current: &ActiveConfigHandle, mut asked: mpsc::Receiver<CheckRequest>) {
    let mut clerk = ForwardAuthWorker::new(current.active(), None);
    loop {
        let question = tokio::time::timeout(LOOK, asked.recv()).await;
        let shared = current.active();
        if !Arc::ptr_eq(&shared, &clerk.worker.active) {
            clerk = ForwardAuthWorker::new(shared, Some(&clerk));
        }
        match question {
            Ok(Some(CheckRequest { described, answer })) => {
                let clerk = clerk.clone();
                // In a task, so that a panic costs only this check: its caller gets `None`.
                tokio::task::spawn_local(async move {
                    let response = clerk.worker.check(&described, clerk.listener).await;
                    // The caller may have left.
                    let _ = answer.send(response);
                });
            }
            Ok(None) => return,
            Err(_) => {}
        }
    }
}

impl Worker {
    async fn check(
        &self,
        described: &Described,
        listener: Rc<listener::ListenerSettings>,
    ) -> Response<Bytes> {
        let from = Peer::described(described.peer, listener, None);
        let token = HeldToken::default();
        let (head, unrouted) = (&described.head, &self.active.plan.unrouted);
        let mut request =
            RequestContext::begin(head, &from, &token, unrouted, self.request_ids.next());
        let mut body = DescribedSource::new(&described.body);
        let (effect, observer) = (DecisionEffect::Charge, &mut Unobserved);
        let decided = self.decide(&mut request, &mut body, effect, observer).await;
        if let Some(costs) = request.decision.costs.take() {
            costs.leave_charged();
        }
        // Do not hold queue places: the asking proxy would have to wait.
        request.decision.slots.turn_has_come();
        let response = match decided {
            Ok(_) => self.allow(&request),
            Err(LocalReply::Refused(refusal)) => self.refuse(&request, &refusal, None),
            Err(LocalReply::Denied) => self.deny(&request),
            Err(LocalReply::OwnQuotas) => self.allow(&request),
        };
        response.map(Body::into_authored)
    }

    /// 200, with the fields for the client and the upstream.
    fn allow(&self, request: &RequestContext<'_>) -> Response<Body> {
        let mut response = Response::new(Body::authored(Bytes::new()));
        let headers = response.headers_mut();
        headers.insert(&X_REQUEST_ID, request.request_id.clone());
        if let Some(limit) = request.decision.warning {
            set_field(headers, &X_RATELIMIT_WARNING, limit);
        }
        self.fields.borrow_mut().write(
            headers,
            StatusCode::OK,
            &answer::reports(request, &request.decision.limits.standings()),
            &self.active.plan.response,
            self.active.process.wall_clock(request.decision.decided_at),
        );
        // Always set, so that a proxy that copies them replaces whatever the client sent.
        let client = request
            .decision
            .attributes
            .as_ref()
            .map(|asked| &asked.client);
        let user = client.and_then(|client| client.user);
        let tier = client.and_then(|client| client.tier);
        set_field(headers, &USER, user.unwrap_or_default());
        set_field(headers, &TIER, tier.unwrap_or_default());
        set_field(headers, &OVER, &request.decision.tags.join(", "));
        record::record_local_reply(self, request, StatusCode::OK, 0, LocalReplyReason::Asked);
        response
    }
}

/// Sets a field; a value that no header can carry becomes empty.
fn set_field(headers: &mut HeaderMap, name: &HeaderName, value: &str) {
    let value = HeaderValue::from_bytes(value.as_bytes());
    let value = value.unwrap_or(HeaderValue::from_static(""));
    headers.insert(name, value);
}
