//! HTTP/2 with prior knowledge through hyper: a well-behaved client.

use std::{future::Future, net::SocketAddr};

use http_body_util::{BodyExt, Full};
use hyper::{body::Bytes, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpStream, time::timeout};

use super::{
    http::{Request, Response},
    wait::{PATIENCE, until},
};

/// Sends all requests concurrently on one connection. Returns a response or an error for each.
pub fn send_all(address: SocketAddr, requests: &[Request]) -> Vec<Result<Response, String>> {
    block_on(async {
        let mut sender = connect(address).await;
        let sent: Vec<_> = requests
            .iter()
            .map(|request| sender.send_request(to_hyper(address, request)))
            .collect();
        let mut responses = Vec::new();
        for response in sent {
            responses.push(within(complete(response)).await);
        }
        responses
    })
}

/// Sends one request on a new connection.
pub fn send(address: SocketAddr, request: &Request) -> Response {
    send_all(address, std::slice::from_ref(request))
        .remove(0)
        .unwrap_or_else(|error| {
            panic!("{} {} over HTTP/2: {error}", request.method, request.target)
        })
}

/// Sends one request with trailers on a new connection. Returns the response and its trailers.
pub fn exchange_with_trailers(
    address: SocketAddr,
    request: &Request,
    trailers: &[(&'static str, &'static str)],
) -> Result<(Response, http::HeaderMap), String> {
    block_on(async {
        let fields = trailers.iter().map(|&(name, value)| {
            (
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            )
        });
        let trailers: http::HeaderMap = fields.collect();
        let body = Full::new(Bytes::from(request.body.clone()))
            .with_trailers(std::future::ready(Some(Ok(trailers))));
        let mut sender = connect(address).await;
        let request = to_hyper(address, request).map(|_| body);
        let response = within(async {
            sender
                .send_request(request)
                .await
                .map_err(|error| format!("{error:?}"))
        })
        .await?;
        let (head, body) = response.into_parts();
        let collected =
            within(async { body.collect().await.map_err(|e| format!("{e:?}")) }).await?;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        let response = hyper::Response::from_parts(head, Full::new(collected.to_bytes()));
        Ok((complete(async { Ok(response) }).await?, trailers))
    })
}

/// Sends a request, resets its stream once the request `has_arrived`, and keeps the connection open
/// until the reset `has_taken_effect`.
pub fn send_and_reset(
    address: SocketAddr,
    request: &Request,
    has_arrived: impl Fn() -> bool,
    has_taken_effect: impl Fn() -> bool,
) {
    block_on(async {
        let mut sender = connect(address).await;
        let response = tokio::spawn(sender.send_request(to_hyper(address, request)));
        until("the request to arrive", has_arrived).await;
        response.abort();
        let _ = response.await;
        // dropping the response future queues the reset
        until("the reset to take effect", has_taken_effect).await;
        drop(sender);
    });
}

async fn connect<B>(address: SocketAddr) -> http2::SendRequest<B>
where
    B: hyper::body::Body<Data = Bytes, Error = std::convert::Infallible> + Send + Unpin + 'static,
{
    let stream = within(async {
        TcpStream::connect(address)
            .await
            .map_err(|error| error.to_string())
    })
    .await;
    let stream =
        TokioIo::new(stream.unwrap_or_else(|error| panic!("connect to {address}: {error}")));
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        // until the gateway has announced its maximum
        .initial_max_send_streams(1)
        .handshake(stream)
        .await
        .unwrap_or_else(|error| panic!("handshake: {error}"));
    // ends when the sender is dropped or the gateway closes the connection
    tokio::spawn(connection);
    sender
}

fn to_hyper(address: SocketAddr, request: &Request) -> hyper::Request<Full<Bytes>> {
    let host = request
        .headers
        .iter()
        .find(|(name, _)| name == "host")
        .map_or("a.example", |(_, value)| value);
    let mut builder = hyper::Request::builder()
        .method(request.method.as_str())
        .uri(format!("http://{host}{}", request.target));
    for (name, value) in request.headers.iter().filter(|(name, _)| name != "host") {
        builder = builder.header(name, value);
    }
    builder
        .body(Full::new(Bytes::from(request.body.clone())))
        .unwrap_or_else(|error| panic!("a request to {address}: {error}"))
}

async fn complete<B>(
    response: impl Future<Output = hyper::Result<hyper::Response<B>>>,
) -> Result<Response, String>
where
    B: hyper::body::Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let response = response.await.map_err(|error| format!("{error:?}"))?;
    let headers = response
        .headers()
        .iter()
        .map(|(name, value)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into_owned(),
            )
        })
        .collect();
    let status = response.status().as_u16();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(|error| format!("{error:?}"))?;
    Ok(Response {
        status,
        headers,
        body: body.to_bytes().to_vec(),
        interim: Vec::new(),
    })
}

async fn within<T>(future: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| Err("nothing came".into()))
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime for one test")
        .block_on(future)
}
