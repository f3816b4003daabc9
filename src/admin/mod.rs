//! What an operator asks a running process.
//!
//! A small HTTP/1 server on the control thread. One request per connection and one deadline for the whole of it: a
//! scraper that hangs holds one of `CONNECTIONS_MAX` places for `Timeouts::connection`, and no body is ever read.
//! On a loopback address without a token any local process may look; the `Host` check keeps web pages from doing so
//! through a browser (DNS rebinding).

mod health;
mod page;

use std::{convert::Infallible, future::Future, net::IpAddr, sync::Arc, time::Duration};

use http::{
    HeaderValue, Method, Request, Response, Uri,
    header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST},
    uri::Authority,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use subtle::ConstantTimeEq;
use tokio::{net::TcpListener, net::TcpStream, sync::Semaphore, task::JoinSet, time};

pub use health::{Readiness, State};

use crate::{
    config::Snapshot,
    response::{Asked, BodyStyle, Refusal, refuse},
    telemetry::{Metrics, metrics::ListenerMetrics},
};

/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
const HEAD_MAX_BYTES: usize = 16 * 1024;
const HEAD_MAX_FIELDS: usize = 64;
/// After a failed accept: descriptors do not come back sooner by asking in a loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// What answers in flight get when the process ends.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
const TIMEOUTS: Timeouts = Timeouts {
    head: Duration::from_secs(5),
    connection: Duration::from_secs(30),
};

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// To send the head of its request.
    head: Duration,
    /// From accept to the last byte of the answer.
    connection: Duration,
}

/// The admin pages of one gateway.
#[derive(Clone, Debug)]
pub struct Admin {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    snapshot: Arc<Snapshot>,
    metrics: Metrics,
    readiness: Readiness,
    listener: ListenerMetrics,
    timeouts: Timeouts,
}

/// What answers at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Page,
    Metrics,
    Healthz,
    Readyz,
}

impl Endpoint {
    /// Every endpoint: its path, and what the page says of it.
    const ALL: [(Endpoint, &'static str, &'static str); 4] = [
        (Endpoint::Page, "/", "this page"),
        (
            Endpoint::Metrics,
            "/metrics",
            "metrics, in the Prometheus text format",
        ),
        (Endpoint::Healthz, "/healthz", "200 while the process lives"),
        (
            Endpoint::Readyz,
            "/readyz",
            "200 when ready to serve, 503 while starting and draining",
        ),
    ];

    fn find(path: &str) -> Option<Endpoint> {
        Endpoint::ALL
            .iter()
            .find(|(_, at, _)| *at == path)
            .map(|(endpoint, ..)| *endpoint)
    }

    /// Probes carry no token, and learn nothing that needs one.
    fn is_open(self) -> bool {
        matches!(self, Endpoint::Healthz | Endpoint::Readyz)
    }
}

impl Admin {
    /// The pages for what `snapshot` describes.
    pub fn new(snapshot: Arc<Snapshot>, metrics: Metrics, readiness: Readiness) -> Admin {
        Admin::with_timeouts(snapshot, metrics, readiness, TIMEOUTS)
    }

    fn with_timeouts(
        snapshot: Arc<Snapshot>,
        metrics: Metrics,
        readiness: Readiness,
        timeouts: Timeouts,
    ) -> Admin {
        let listener = metrics.listener("admin", &[]);
        Admin {
            inner: Arc::new(Inner {
                snapshot,
                metrics,
                readiness,
                listener,
                timeouts,
            }),
        }
    }

    /// Serves until `shutdown` resolves, then gives answers in flight a second. Never fails: what goes wrong with one
    /// connection, or with accepting one, is counted and logged.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let accepted = async {
                let place = Arc::clone(&places)
                    .acquire_owned()
                    .await
                    .expect("the semaphore is never closed");
                (listener.accept().await, place)
            };
            tokio::select! {
                () = &mut shutdown => break,
                Some(_) = connections.join_next() => {}
                (accepted, place) = accepted => match accepted {
                    Ok((stream, _)) => {
                        let admin = self.clone();
                        connections.spawn(async move {
                            admin.connection(stream).await;
                            drop(place);
                        });
                    }
                    Err(error) => {
                        self.inner.listener.accept_failed(&error);
                        tracing::warn!(%error, "the admin listener could not accept a connection");
                        time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
        drop(listener);
        let finished = async { while connections.join_next().await.is_some() {} };
        // whoever is not done by then is cut off when the set is dropped
        let _ = time::timeout(DRAIN_TIMEOUT, finished).await;
    }

    async fn connection(&self, stream: TcpStream) {
        let _open = self.inner.listener.open();
        let timeouts = self.inner.timeouts;
        let service = service_fn(|request: Request<Incoming>| {
            let response = self.answer(&request);
            async move { Ok::<_, Infallible>(response) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeouts.head)
            .keep_alive(false)
            .max_headers(HEAD_MAX_FIELDS)
            .max_header_size(HEAD_MAX_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        match time::timeout(timeouts.connection, served).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "an admin connection broke off"),
            Err(_) => tracing::debug!("an admin connection took too long"),
        }
    }

    /// The answer to a request; its body is not read.
    fn answer<B>(&self, request: &Request<B>) -> Response<String> {
        let mut response = match self.endpoint(request) {
            Ok(endpoint) => self.show(endpoint),
            Err(refusal) => {
                let asked = Asked {
                    is_head: false,
                    version: request.version(),
                    request_id: None,
                    grpc: None,
                };
                // every body of ours is UTF-8
                refuse(&refusal, &asked, BodyStyle::ProblemJson)
                    .map(|body| String::from_utf8_lossy(&body).into_owned())
            }
        };
        let headers = response.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(
            "x-content-type-options",
            HeaderValue::from_static("nosniff"),
        );
        response
    }

    fn endpoint<B>(&self, request: &Request<B>) -> Result<Endpoint, Refusal> {
        let settings = &self.inner.snapshot.admin;
        if settings.address.ip().is_loopback() && !asks_for_loopback(request) {
            return Err(Refusal::Misdirected);
        }
        let endpoint = Endpoint::find(request.uri().path());
        let open = endpoint.is_some_and(Endpoint::is_open);
        if let Some(token) = &settings.token
            && !open
            && !carries(request, token)
        {
            return Err(Refusal::Unauthorized {
                challenge: "Bearer",
            });
        }
        let endpoint = endpoint.ok_or(Refusal::NotFound)?;
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return Err(Refusal::MethodNotAllowed {
                allow: HeaderValue::from_static("GET, HEAD"),
            });
        }
        Ok(endpoint)
    }

    fn show(&self, endpoint: Endpoint) -> Response<String> {
        let Inner {
            snapshot,
            metrics,
            readiness,
            ..
        } = &*self.inner;
        match endpoint {
            Endpoint::Page => page::overview(snapshot, readiness.state()),
            Endpoint::Metrics => text("text/plain; version=0.0.4; charset=utf-8", metrics.render()),
            Endpoint::Healthz => health::live(),
            Endpoint::Readyz => health::ready(readiness.state()),
        }
    }
}

fn text(content_type: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Whether the request carries the bearer token (RFC 6750 §2.1). Takes as long for any wrong token of its length; an
/// empty token is carried by nobody.
fn carries<B>(request: &Request<B>, token: &str) -> bool {
    let Some(value) = request.headers().get(AUTHORIZATION) else {
        return false;
    };
    let Some((scheme, credential)) = value.as_bytes().split_at_checked("Bearer ".len()) else {
        return false;
    };
    !token.is_empty()
        && scheme.eq_ignore_ascii_case(b"Bearer ")
        && bool::from(credential.trim_ascii().ct_eq(token.as_bytes()))
}

/// Whether the host that the client believes to talk to is this machine.
fn asks_for_loopback<B>(request: &Request<B>) -> bool {
    let is_loopback = |authority: &Authority| {
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    };
    if let Some(authority) = Uri::authority(request.uri()) {
        return is_loopback(authority);
    }
    let mut hosts = request.headers().get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    Authority::try_from(host.as_bytes()).is_ok_and(|authority| is_loopback(&authority))
}

#[cfg(test)]
mod tests;
