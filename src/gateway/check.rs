//! A verdict for another proxy that serves the request itself (forward-auth): the path of a request, up to where it would be
//! sent on.
//!
//! The request is described, as it is for [`explain`](super::explain), but it is decided for good: its limits are charged, the
//! decision is counted, remembered and logged. Nobody learns how the request ends, so a limit of requests in flight holds
//! nothing, one that counts answers by their status counts none, and nothing is held until its turn: who asks has a connection
//! of the admin listener, of which there are few.
//!
//! Decisions need a worker, and the admin listener has none: one thread has a worker of its own for them, which opens no
//! connection. It begins with the first question.

use std::{io, rc::Rc, sync::Arc, thread, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::{
    runtime::LocalOptions,
    sync::{mpsc, oneshot},
};

use super::{
    answer,
    body::Body,
    decide::DecisionEffect,
    described::{Described, DescribedSource},
    observer::Unobserved,
    record::{self, Ours},
    request_context::LocalReply,
    request_context::RequestContext,
    shared::Current,
    shared::Shared,
    worker::Worker,
};
use crate::{
    identity::HeldToken,
    listener::{self, Peer},
    response::{X_RATELIMIT_WARNING, X_REQUEST_ID},
};

/// Questions that may wait; who asks beyond that waits to ask.
const WAITING: usize = 64;
/// What the upstream receives where we forward; here the proxy that asks passes it on.
static USER: HeaderName = HeaderName::from_static("x-user-id");
static TIER: HeaderName = HeaderName::from_static("x-rate-limit-tier");
static OVER: HeaderName = HeaderName::from_static("x-ratelimit-over");
/// How long a configuration that no longer runs may be kept.
const LOOK: Duration = Duration::from_secs(1);

/// Where verdicts are asked for. Clones ask at the same place.
#[derive(Clone, Debug)]
pub struct Desk {
    questions: mpsc::Sender<Question>,
}

#[derive(Debug)]
struct Question {
    described: Described,
    answer: oneshot::Sender<Response<Bytes>>,
}

impl Desk {
    /// Decides by the configuration that runs, for as long as somebody may ask. Fails where the system has no thread for it.
    pub fn open(current: Arc<Current>) -> io::Result<Desk> {
        let (questions, asked) = mpsc::channel(WAITING);
        let work = move || match tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
        {
            Ok(runtime) => runtime.block_on(serve(&current, asked)),
            // whoever asks learns that nobody answers
            Err(error) => tracing::error!(%error, "cannot decide for other proxies"),
        };
        thread::Builder::new()
            .name("check".to_owned())
            .spawn(work)?;
        Ok(Desk { questions })
    }

    /// What the client would be told: 200 with the fields of an answer where the request would be sent on. `None` where
    /// nobody can say.
    pub async fn ask(&self, described: Described) -> Option<Response<Bytes>> {
        let (answer, told) = oneshot::channel();
        let question = Question { described, answer };
        self.questions.send(question).await.ok()?;
        told.await.ok()
    }
}

/// The worker that decides, and the listener whose bounds hold for what is described: the first.
#[derive(Clone, Debug)]
struct Clerk {
    worker: Rc<Worker>,
    listener: Rc<listener::Settings>,
}

impl Clerk {
    fn new(shared: Arc<Shared>, previous: Option<&Clerk>) -> Clerk {
        let listener = Rc::new(shared.snapshot().listeners[0].clone());
        let previous = previous.map(|clerk| &*clerk.worker);
        Clerk {
            worker: Rc::new(Worker::new(shared, previous)),
            listener,
        }
    }
}

async fn serve(current: &Current, mut asked: mpsc::Receiver<Question>) {
    let mut clerk = Clerk::new(current.shared(), None);
    loop {
        let question = tokio::time::timeout(LOOK, asked.recv()).await;
        let shared = current.shared();
        if !Arc::ptr_eq(&shared, &clerk.worker.shared) {
            clerk = Clerk::new(shared, Some(&clerk));
        }
        match question {
            Ok(Some(Question { described, answer })) => {
                let clerk = clerk.clone();
                // a panic costs this question, whose asker is told that nobody answers
                tokio::task::spawn_local(async move {
                    let response = clerk.worker.check(&described, clerk.listener).await;
                    // whoever asked may have left
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
        listener: Rc<listener::Settings>,
    ) -> Response<Bytes> {
        let from = Peer::described(described.peer, listener, None);
        let token = HeldToken::default();
        let (head, unrouted) = (&described.head, &self.shared.plan.unrouted);
        let mut request =
            RequestContext::begin(head, &from, &token, unrouted, self.request_ids.next());
        let mut body = DescribedSource::new(&described.body);
        let (effect, observer) = (DecisionEffect::Charge, &mut Unobserved);
        let decided = self.decide(&mut request, &mut body, effect, observer).await;
        // nothing is held until its turn, since the proxy that asks would have to wait for it
        request.decision.slots.turn_has_come();
        let response = match decided {
            Ok(_) => self.let_pass(&request),
            Err(LocalReply::Refused(refusal)) => self.refuse(&request, &refusal, None),
            Err(LocalReply::Denied) => self.deny(&request),
            Err(LocalReply::OwnQuotas) => self.let_pass(&request),
        };
        let (head, body) = response.into_parts();
        // what we author is whole, and does not fail
        let body = body.collect().await;
        let body = body.map_or_else(|_| Bytes::new(), |body| body.to_bytes());
        Response::from_parts(head, body)
    }

    /// 200, with what the client is to be told, and the upstream.
    fn let_pass(&self, request: &RequestContext<'_>) -> Response<Body> {
        let mut response = Response::new(Body::authored(Bytes::new()));
        let headers = response.headers_mut();
        headers.insert(&X_REQUEST_ID, request.request_id.clone());
        if let Some(limit) = request.decision.warning {
            say(headers, &X_RATELIMIT_WARNING, limit);
        }
        self.fields.borrow_mut().write(
            headers,
            StatusCode::OK,
            &answer::reports(request, &request.decision.limits.standings()),
            &self.shared.plan.response,
            self.shared.process.wall_clock(request.decision.decided_at),
        );
        // always: a proxy that copies them then replaces whatever the client has sent
        let client = request
            .decision
            .attributes
            .as_ref()
            .map(|asked| &asked.client);
        let user = client.and_then(|client| client.user);
        let tier = client.and_then(|client| client.tier);
        say(headers, &USER, user.unwrap_or_default());
        say(headers, &TIER, tier.unwrap_or_default());
        say(headers, &OVER, &request.decision.tags.join(", "));
        record::note(self, request, StatusCode::OK, 0, Ours::Asked);
        response
    }
}

/// Writes a field; what no field can hold is left empty.
fn say(headers: &mut HeaderMap, name: &HeaderName, value: &str) {
    let value = HeaderValue::from_bytes(value.as_bytes());
    let value = value.unwrap_or(HeaderValue::from_static(""));
    headers.insert(name, value);
}
