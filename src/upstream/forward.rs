//! One request, sent to one server after another until one answers, as far as that is safe and can be afforded.
//!
//! ```text
//! circuit closed? ─▶ choose a server ─▶ exchange ─▶ its response
//!      │                   ▲               │
//!     503                  └── failed, and may be asked elsewhere: another server, at most `retries` times
//! ```
//!
//! What may be asked again (RFC 9110 §9.2.2), always before any byte of a response:
//! - on the same server, once: a request on a kept connection that the server closed in the very moment of its reuse, if
//!   its method is idempotent and it has no body;
//! - on another server: the same, and any request of which nothing has left yet, because no connection could be had.
//!
//! A request that was sent and not answered in time is not sent again: whoever waits has waited long enough, and what is
//! slow once is slow twice. Retries come out of a [budget](super::retry).

use std::rc::Rc;

use arrayvec::ArrayVec;
use bytes::Bytes;
use http::{Method, Response};
use http_body::Body;
use tokio::time::Instant;

use super::{
    HostHeader, MAX_RETRIES, ResponseBody, Server, Upstream, UpstreamError,
    echo::{self, EchoBody},
    exchange::exchange,
    fleet::Open,
    headers::{self, BodyFraming, Outbound},
    http2::{self, Lines, StreamBody},
    pool::ServerPool,
    sending::Sending,
};

/// The response of a server.
#[derive(Debug)]
pub struct Answered<B> {
    /// The body still to be read.
    pub response: Response<Answer<B>>,
    /// Which server gave it.
    pub server: usize,
}

/// The body of a response.
#[derive(Debug)]
pub enum Answer<B> {
    /// Over a connection of its own.
    Remote(ResponseBody<B>),
    /// Over a stream of a connection.
    Stream(Box<StreamBody<B>>),
    /// The built-in server's.
    Echo(EchoBody<B>),
}

/// There is no response to pass on.
#[derive(Debug)]
pub struct Unanswered<E> {
    /// The server that was asked last.
    pub server: Option<usize>,
    /// Why not.
    pub failed: Failed<E>,
}

/// Why there is no response to pass on.
#[derive(Debug)]
pub enum Failed<E> {
    /// The server's side.
    Upstream(UpstreamError),
    /// The client's side: its body failed before the response began.
    RequestBody(E),
}

impl<E> From<UpstreamError> for Failed<E> {
    fn from(error: UpstreamError) -> Self {
        Self::Upstream(error)
    }
}

/// Sends the request to a server of the upstream and returns its response, the body still to be read. `body` is the request's,
/// where it has one.
pub async fn forward<B>(
    upstream: &Upstream,
    request: &Outbound<'_>,
    body: Option<B>,
    now: Instant,
) -> Result<Answered<B>, Unanswered<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (mut unsent, mut now) = (body, now);
    let is_repeatable = unsent.is_none() && is_idempotent(request.method);
    let fleet = &upstream.fleet;
    if let Err(error) = fleet.enter(now) {
        return Err(Unanswered {
            server: None,
            failed: error.into(),
        });
    }
    upstream.budget.earn();
    let mut tried = ArrayVec::<usize, { MAX_RETRIES + 1 }>::new();
    let mut server = upstream.choose(request, now);
    loop {
        let attempt = upstream.attempt(server, request, &mut unsent, is_repeatable, now);
        let error = match attempt.await {
            Ok(response) => {
                fleet.succeeded(server);
                return Ok(Answered { response, server });
            }
            Err(Failed::Upstream(error)) => error,
            Err(failed) => {
                return Err(Unanswered {
                    server: Some(server),
                    failed,
                });
            }
        };
        fleet.failed(server, &error);
        tried.push(server);
        let closed = matches!(error, UpstreamError::Closed(_));
        let may_repeat = error.nothing_was_sent() || (closed && is_repeatable);
        now = Instant::now();
        let another = (may_repeat && tried.len() <= fleet.settings().retries)
            .then(|| upstream.choose_another(request, &tried, now));
        match another.flatten() {
            Some(another) => {
                let (upstream, failed) = (&fleet.settings().name, fleet.server_name(server));
                tracing::debug!(upstream, server = failed, %error, "trying another server");
                server = another;
            }
            None => {
                return Err(Unanswered {
                    server: Some(server),
                    failed: error.into(),
                });
            }
        }
    }
}

impl Upstream {
    /// The server that a request is sent to first.
    fn choose(&self, request: &Outbound<'_>, now: Instant) -> usize {
        if self.pools.len() == 1 {
            return 0;
        }
        let open = Open {
            fleet: &self.fleet,
            tried: &[],
            now,
            regardless: false,
        };
        self.choose_in_service(open, request).unwrap_or_else(|| {
            let regardless = Open {
                regardless: true,
                ..open
            };
            self.balancer
                .choose(&regardless, request.client)
                .unwrap_or_default()
        })
    }

    /// A server in service that has not failed the request, if there is one and the retry can be afforded.
    fn choose_another(
        &self,
        request: &Outbound<'_>,
        tried: &[usize],
        now: Instant,
    ) -> Option<usize> {
        let open = Open {
            fleet: &self.fleet,
            tried,
            now,
            regardless: false,
        };
        let another = self.choose_in_service(open, request)?;
        let metrics = self.fleet.metrics();
        if self.budget.spend(now) {
            metrics.retries.increment(1);
            Some(another)
        } else {
            metrics.retries_denied.increment(1);
            None
        }
    }

    fn choose_in_service(&self, open: Open<'_>, request: &Outbound<'_>) -> Option<usize> {
        // another worker may get the trial of a server that is ejected; then it is no longer open
        (0..self.pools.len()).find_map(|_| {
            let server = if open.tried.is_empty() {
                self.balancer.choose(&open, request.client)?
            } else {
                self.balancer.choose_instead(&open, request.client)?
            };
            self.fleet.enter_server(server, open.now).then_some(server)
        })
    }

    /// One server, one exchange; and a second one where a kept connection turned out to be dead.
    async fn attempt<B>(
        &self,
        server: usize,
        request: &Outbound<'_>,
        unsent: &mut Option<B>,
        is_repeatable: bool,
        now: Instant,
    ) -> Result<Response<Answer<B>>, Failed<B::Error>>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let pool = &self.pools[server];
        if matches!(pool.server(), Server::Echo) {
            let response = echo::respond(request, unsent.take());
            return Ok(response.map(Answer::Echo));
        }
        if pool.server().speaks_http2() {
            // boxed, here and below, so that a request keeps room for what is usual
            let response = Box::pin(self.attempt_http2(pool, request, unsent, is_repeatable));
            return Ok(response.await?.map(|body| Answer::Stream(Box::new(body))));
        }
        let mut now = now;
        let mut connection = pool.take(&mut now).await?;
        loop {
            connection.outbox.clear();
            headers::write_head(
                &mut connection.outbox,
                request,
                self.host_for(pool, request.host),
            );
            let sending = Sending::new(unsent.take(), request.framing);
            let reused = connection.reused;
            match exchange(connection, sending, self.fleet.settings(), request, now).await {
                Err(Failed::Upstream(UpstreamError::Closed(_))) if reused && is_repeatable => {
                    connection = Box::pin(pool.take_fresh()).await?;
                    now = Instant::now();
                }
                outcome => return outcome.map(|response| response.map(Answer::Remote)),
            }
        }
    }

    /// What the first server would be told as `Host`. For explaining.
    pub fn first_host<'a>(&'a self, asked: &'a str) -> &'a [u8] {
        match &*self.pools[0] {
            pool if matches!(pool.server(), Server::Echo) => asked.as_bytes(),
            pool => self.host_for(pool, asked),
        }
    }

    /// The same over HTTP/2: a second one where the line turned out to be dead, or the server would not look at the first.
    async fn attempt_http2<B>(
        &self,
        pool: &Rc<ServerPool>,
        request: &Outbound<'_>,
        unsent: &mut Option<B>,
        is_repeatable: bool,
    ) -> Result<Response<StreamBody<B>>, Failed<B::Error>>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let mut is_first = true;
        loop {
            let head = http2::head(request, self.host_for(pool, request.host))?;
            let place = Lines::take(pool).await?;
            let reused = place.reused;
            let outcome =
                http2::exchange(place, head, unsent, self.fleet.settings(), request).await;
            let may_repeat = match &outcome {
                Err(Failed::Upstream(UpstreamError::Refused(_))) => is_first,
                Err(Failed::Upstream(UpstreamError::Closed(_))) => {
                    is_first && reused && is_repeatable
                }
                _ => false,
            };
            if !may_repeat {
                return outcome;
            }
            is_first = false;
        }
    }

    /// What the server is told as `Host`.
    fn host_for<'a>(&'a self, pool: &'a ServerPool, asked: &'a str) -> &'a [u8] {
        match &self.fleet.settings().host {
            // only an HTTP/1.0 client asks for no host; HTTP/1.1 must name one
            HostHeader::Preserve if asked.is_empty() => pool.authority().as_bytes(),
            HostHeader::Preserve => asked.as_bytes(),
            HostHeader::Server => pool.authority().as_bytes(),
            HostHeader::Literal(value) => value.as_bytes(),
        }
    }
}

/// RFC 9110 §9.2.2.
fn is_idempotent(method: &Method) -> bool {
    matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE | Method::TRACE
    )
}

/// How a request with this body is framed towards the server.
pub fn body_framing<B: Body>(method: &Method, body: &B) -> BodyFraming {
    match body.size_hint().exact() {
        Some(0) if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => {
            BodyFraming::Length(0)
        }
        Some(0) => BodyFraming::None,
        Some(length) => BodyFraming::Length(length),
        None => BodyFraming::Chunked,
    }
}
