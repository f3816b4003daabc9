//! Forwards one request: tries servers until one answers, as far as retries are safe and
//! affordable.
//!
//! ```text
//! circuit closed? ─▶ choose a server ─▶ exchange ─▶ its response
//!      │                   ▲               │
//!     503                  └── failed and retryable: another server, at most `retries` times
//! ```
//!
//! Retries happen only before the first byte of a response (RFC 9110 §9.2.2):
//! - on the same server, once: the server closed a reused connection just as the request was sent.
//!   The method must be idempotent and the request must have no body.
//! - on another server: the same, and any request of which nothing was sent because no connection
//!   could be opened.
//!
//! A request that was sent and timed out is not retried: the client has waited long enough, and the
//! next server would probably be as slow. Retries come out of a [budget](super::retry).

use std::rc::Rc;

use arrayvec::ArrayVec;
use bytes::Bytes;
use http::{Method, Response};
use http_body::Body;
use tokio::time::Instant;

use super::{
    Failed, HostHeader, MAX_RETRIES, ServerAddress, Upstream, UpstreamError, echo,
    exchange::exchange,
    forwarded_body::ForwardedBody,
    headers::{self, Outbound},
    http2::{self, H2Pool, StreamBody},
    pool::ServerPool,
    request_writer::RequestWriter,
    state::Open,
};

/// The response of a server.
#[derive(Debug)]
pub struct UpstreamResponse<B> {
    /// The response; its body is still to be read.
    pub response: Response<ForwardedBody<B>>,
    /// The server that answered.
    pub server: usize,
}

/// A request without a response to forward.
#[derive(Debug)]
pub struct ForwardFailure<E> {
    /// The last server tried.
    pub server: Option<usize>,
    /// The cause.
    pub failed: Failed<E>,
}

/// Sends the request to a server of the upstream and returns the response, whose body is still to
/// be read. `body` is that of the request, if any.
pub async fn forward<B>(
    upstream: &Upstream,
    request: &Outbound<'_>,
    body: Option<B>,
    now: Instant,
) -> Result<UpstreamResponse<B>, ForwardFailure<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (mut unsent, mut now) = (body, now);
    let is_repeatable = unsent.is_none() && is_idempotent(request.method);
    let upstream_state = &upstream.state;
    if let Err(error) = upstream_state.enter(now) {
        return Err(ForwardFailure {
            server: None,
            failed: error.into(),
        });
    }
    upstream.budget.deposit();
    let mut tried = ArrayVec::<usize, { MAX_RETRIES + 1 }>::new();
    let mut server = upstream.choose(request, now);
    loop {
        let attempt = upstream.attempt(server, request, &mut unsent, is_repeatable, now);
        let error = match attempt.await {
            Ok(response) => {
                upstream_state.succeeded(server);
                return Ok(UpstreamResponse { response, server });
            }
            Err(Failed::Upstream(error)) => error,
            Err(failed) => {
                return Err(ForwardFailure {
                    server: Some(server),
                    failed,
                });
            }
        };
        upstream_state.failed(server, &error);
        tried.push(server);
        let closed = matches!(error, UpstreamError::Closed(_));
        let may_repeat = error.nothing_was_sent() || (closed && is_repeatable);
        now = Instant::now();
        let another = (may_repeat && tried.len() <= upstream_state.settings().retries)
            .then(|| upstream.choose_another(request, &tried, now));
        match another.flatten() {
            Some(another) => {
                let (upstream, failed) = (
                    &upstream_state.settings().name,
                    upstream_state.server_name(server),
                );
                tracing::debug!(upstream, server = failed, %error, "trying another server");
                server = another;
            }
            None => {
                return Err(ForwardFailure {
                    server: Some(server),
                    failed: error.into(),
                });
            }
        }
    }
}

impl Upstream {
    /// Chooses the first server.
    fn choose(&self, request: &Outbound<'_>, now: Instant) -> usize {
        if self.pools.len() == 1 {
            return 0;
        }
        let open = Open {
            upstream_state: &self.state,
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

    /// Another server in service that has not failed the request, if the retry budget allows.
    fn choose_another(
        &self,
        request: &Outbound<'_>,
        tried: &[usize],
        now: Instant,
    ) -> Option<usize> {
        let open = Open {
            upstream_state: &self.state,
            tried,
            now,
            regardless: false,
        };
        let another = self.choose_in_service(open, request)?;
        let metrics = self.state.metrics();
        if self.budget.spend(now) {
            metrics.retries.increment(1);
            Some(another)
        } else {
            metrics.retries_denied.increment(1);
            None
        }
    }

    fn choose_in_service(&self, open: Open<'_>, request: &Outbound<'_>) -> Option<usize> {
        // another worker may win the trial of an ejected server, which is then no longer available
        (0..self.pools.len()).find_map(|_| {
            let server = if open.tried.is_empty() {
                self.balancer.choose(&open, request.client)?
            } else {
                self.balancer.choose_instead(&open, request.client)?
            };
            self.state.enter_server(server, open.now).then_some(server)
        })
    }

    /// One exchange with one server, plus a second one if the reused connection was dead.
    async fn attempt<B>(
        &self,
        server: usize,
        request: &Outbound<'_>,
        unsent: &mut Option<B>,
        is_repeatable: bool,
        now: Instant,
    ) -> Result<Response<ForwardedBody<B>>, Failed<B::Error>>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let pool = &self.pools[server];
        if matches!(pool.server(), ServerAddress::Echo) {
            let response = echo::respond(request, unsent.take());
            return Ok(response.map(ForwardedBody::Echo));
        }
        if pool.server().speaks_http2() {
            // boxed, here and below, so that a request's future is sized for the usual case
            let response = Box::pin(self.attempt_http2(pool, request, unsent, is_repeatable));
            return Ok(response
                .await?
                .map(|body| ForwardedBody::Stream(Box::new(body))));
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
            let sending = RequestWriter::new(unsent.take(), request.framing);
            let reused = connection.reused;
            match exchange(connection, sending, self.state.settings(), request, now).await {
                Err(Failed::Upstream(UpstreamError::Closed(_))) if reused && is_repeatable => {
                    connection = Box::pin(pool.take_fresh()).await?;
                    now = Instant::now();
                }
                outcome => return outcome.map(|response| response.map(ForwardedBody::Remote)),
            }
        }
    }

    /// `Host` for the first server, for `explain`.
    pub fn first_host<'a>(&'a self, asked: &'a str) -> &'a [u8] {
        match &*self.pools[0] {
            pool if matches!(pool.server(), ServerAddress::Echo) => asked.as_bytes(),
            pool => self.host_for(pool, asked),
        }
    }

    /// The same over HTTP/2. A second exchange follows if the connection was dead or the server
    /// refused the stream unprocessed.
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
            let place = H2Pool::take(pool).await?;
            let reused = place.reused;
            let outcome =
                http2::exchange(place, head, unsent, self.state.settings(), request).await;
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

    /// The `Host` field for a server.
    fn host_for<'a>(&'a self, pool: &'a ServerPool, asked: &'a str) -> &'a [u8] {
        match &self.state.settings().host {
            // only an HTTP/1.0 client sends no host; HTTP/1.1 requires one
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
