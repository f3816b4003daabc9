//! The admin listener: probes, metrics, the API, forward-auth and the dashboard.
//!
//! A small HTTP/1 server on the control thread. One request per connection, with one deadline for
//! all of it. Slow clients keep no one else out: see `connections` for the bounds. Pages read no
//! body, operations (`api`) a short one. On a loopback address without a token, any local process
//! has access. The `Host` check keeps web pages from using it through a browser (DNS rebinding).

mod api;
mod api_request;
mod api_response;
mod check;
mod connections;
mod dashboard;
mod decisions;
mod health;
mod limits;
mod pages;
mod reload;
mod status;
mod status_history;
mod text_response;

use std::{convert::Infallible, future::Future, io, net::IpAddr, time::Duration};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, Uri,
    header::{AUTHORIZATION, CACHE_CONTROL, HOST},
    uri::Authority,
};
use http_body::Body;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use subtle::ConstantTimeEq;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time,
};

pub use connections::WAITING_MAX;
pub use health::{Readiness, ReadinessState};
pub use pages::AdminPages;
pub use reload::{Reload, Reloaded};

use connections::AdminConnection;
use pages::CROWDED;
use text_response::text;

use crate::response::{BodyStyle, Refusal, RequestFacts, refuse};

const HEAD_MAX_BYTES: usize = 16 * 1024;
const HEAD_MAX_FIELDS: usize = 64;
/// Pause after a failed accept: descriptors do not become free sooner by retrying in a loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for responses in flight when the process ends.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The handler of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdminEndpoint {
    Page,
    Style,
    Script,
    Metrics,
    Healthz,
    Readyz,
}

impl AdminEndpoint {
    const ALL: [(AdminEndpoint, &'static str); 6] = [
        (AdminEndpoint::Page, "/"),
        (AdminEndpoint::Style, "/dashboard.css"),
        (AdminEndpoint::Script, "/dashboard.js"),
        (AdminEndpoint::Metrics, "/metrics"),
        (AdminEndpoint::Healthz, "/healthz"),
        (AdminEndpoint::Readyz, "/readyz"),
    ];

    fn find(path: &str) -> Option<AdminEndpoint> {
        let mut all = AdminEndpoint::ALL.iter();
        all.find(|(_, at)| *at == path)
            .map(|(endpoint, _)| *endpoint)
    }

    /// Whether it needs no token. Probes carry none and reveal nothing protected. The page itself
    /// contains no data of this gateway.
    fn is_open(self) -> bool {
        self != AdminEndpoint::Metrics
    }
}

impl AdminPages {
    /// Serves until `shutdown` resolves, then gives responses in flight one second. Never fails:
    /// accept and connection errors are counted and logged.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()>) {
        let mut connections = JoinSet::new();
        let mut noting = JoinSet::new();
        noting.spawn(self.clone().keep_history());
        tokio::pin!(shutdown);
        // accepted, but perhaps not admitted yet: the other branches must not drop it
        let mut arrived = None;
        loop {
            let entered = async {
                let peer = match &arrived {
                    Some((_, peer)) => *peer,
                    None => {
                        let (stream, peer) = listener.accept().await?;
                        arrived.insert((stream, peer.ip())).1
                    }
                };
                let crowded = || self.inner.listener.cut(CROWDED);
                Ok(self.inner.connections.enter(peer, crowded).await)
            };
            tokio::select! {
                () = &mut shutdown => break,
                Some(_) = connections.join_next() => {}
                entered = entered => match (entered, arrived.take()) {
                    (Ok(connection), Some((stream, peer))) => {
                        let admin = self.clone();
                        connections.spawn(async move {
                            admin.connection(stream, peer, &connection).await;
                        });
                    }
                    (Ok(_), None) => {}
                    (Err(error), _) => self.pause_after(&error).await,
                }
            }
        }
        drop(listener);
        let finished = async { while connections.join_next().await.is_some() {} };
        // dropping the set closes the connections that are left
        let _ = time::timeout(DRAIN_TIMEOUT, finished).await;
    }

    async fn pause_after(&self, error: &io::Error) {
        self.inner.listener.accept_failed(error);
        tracing::warn!(%error, "the admin listener cannot accept a connection");
        time::sleep(ACCEPT_PAUSE).await;
    }

    async fn connection(&self, stream: TcpStream, peer: IpAddr, connection: &AdminConnection) {
        let _open = self.inner.listener.open();
        connection.watch(&stream);
        let timeouts = self.inner.timeouts;
        let service = service_fn(|request: Request<Incoming>| async move {
            Ok::<_, Infallible>(self.respond(request, peer, connection).await)
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeouts.head)
            .keep_alive(false)
            .half_close(true)
            .max_headers(HEAD_MAX_FIELDS)
            .max_header_size(HEAD_MAX_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let served = time::timeout(timeouts.connection, served);
        tokio::select! {
            biased;
            () = connection.closed() => tracing::debug!(%peer, "closed an admin connection to make room"),
            served = served => match served {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "an admin connection broke off"),
                Err(_) => tracing::debug!("an admin connection took too long"),
            }
        }
    }

    /// The response to a request.
    async fn respond<B>(
        &self,
        request: Request<B>,
        peer: IpAddr,
        connection: &AdminConnection,
    ) -> Response<String>
    where
        B: Body<Data = Bytes>,
    {
        if check::is_for(request.uri().path()) {
            return with_page_headers(self.check(request, peer, connection).await);
        }
        if !api::is_for(request.uri().path()) {
            return self.answer(&request, connection).await;
        }
        let response = match self.may_ask(&request, false) {
            Ok(()) => self.call(request, peer, connection).await.into_response(),
            Err(refusal) => refused(&request, &refusal),
        };
        with_page_headers(response)
    }

    /// The response to a request for a page; its body is not read.
    async fn answer<B>(
        &self,
        request: &Request<B>,
        connection: &AdminConnection,
    ) -> Response<String> {
        with_page_headers(match self.endpoint(request) {
            Ok(endpoint) => self.show(endpoint, connection).await,
            Err(refusal) => refused(request, &refusal),
        })
    }

    async fn metrics(&self, connection: &AdminConnection) -> Response<String> {
        let metrics = self.inner.metrics.clone();
        match connection.in_turn(move || metrics.render()).await {
            Some(rendered) => text("text/plain; version=0.0.4; charset=utf-8", rendered),
            None => api_response::ApiResponse::failed().into_response(),
        }
    }

    fn endpoint<B>(&self, request: &Request<B>) -> Result<AdminEndpoint, Refusal> {
        let endpoint = AdminEndpoint::find(request.uri().path());
        self.may_ask(request, endpoint.is_some_and(AdminEndpoint::is_open))?;
        let endpoint = endpoint.ok_or(Refusal::NotFound)?;
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return Err(Refusal::MethodNotAllowed {
                allow: HeaderValue::from_static("GET, HEAD"),
            });
        }
        Ok(endpoint)
    }

    /// Checks access to a path; an `open` one needs no token.
    fn may_ask<B>(&self, request: &Request<B>, open: bool) -> Result<(), Refusal> {
        if self.inner.on_loopback && !asks_for_loopback(request) {
            return Err(Refusal::Misdirected);
        }
        let active = self.inner.current.active();
        match &active.snapshot().admin.token {
            Some(token) if !open && !carries(request, token) => Err(Refusal::Unauthorized {
                challenge: "Bearer",
            }),
            _ => Ok(()),
        }
    }

    async fn show(
        &self,
        endpoint: AdminEndpoint,
        connection: &AdminConnection,
    ) -> Response<String> {
        match endpoint {
            AdminEndpoint::Metrics => self.metrics(connection).await,
            AdminEndpoint::Page => dashboard::page(),
            AdminEndpoint::Style => dashboard::style(),
            AdminEndpoint::Script => dashboard::script(),
            AdminEndpoint::Healthz => health::live(),
            AdminEndpoint::Readyz => health::ready(self.inner.readiness.state()),
        }
    }
}

fn refused<B>(request: &Request<B>, refusal: &Refusal) -> Response<String> {
    let asked = RequestFacts {
        is_head: false,
        version: request.version(),
        request_id: None,
        grpc: None,
    };
    // all bodies of the gateway are UTF-8
    refuse(refusal, &asked, BodyStyle::ProblemJson)
        .map(|body| String::from_utf8_lossy(&body).into_owned())
}

/// Adds the fields that every response carries.
fn with_page_headers(mut response: Response<String>) -> Response<String> {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert("x-content-type-options", nosniff);
    response
}

/// Whether the request carries the bearer token (RFC 6750 §2.1). Constant time for tokens of equal
/// length; an empty token never matches.
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

/// Whether the `Host` of the request is a loopback name.
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
