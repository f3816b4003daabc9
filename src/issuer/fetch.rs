//! Fetches a key set with one GET, over https with the system's roots, or over http. Follows no
//! redirects; sends no cookies or credentials.

use std::{error::Error as _, io, pin::pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Request, Response, StatusCode, Uri,
    header::{ACCEPT, HOST, USER_AGENT},
};
use http_body::Body;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, crypto::aws_lc_rs, pki_types::ServerName};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::identity::jwt::KeyError;

/// The largest key set.
const BODY_MAX_BYTES: usize = 256 * 1024;
/// The largest response head.
const HEAD_MAX_BYTES: usize = 64 * 1024;

/// Why a fetch failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The host has no address, or does not answer.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The certificate is not valid, or the server does not use TLS.
    #[error("TLS failed: {0}")]
    Tls(io::Error),
    /// The server answers too slowly.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The status is not 200.
    #[error("the response has status {status}{}", hint(*.status))]
    Status {
        /// The status of the response.
        status: StatusCode,
    },
    /// The server does not speak HTTP/1.1, or closed the connection early.
    #[error("the response could not be read: {}", with_causes(.0))]
    Protocol(hyper::Error),
    /// The body is larger than any key set.
    #[error("the response is larger than {BODY_MAX_BYTES} bytes")]
    TooLarge,
    /// The body is not a key set, or has no usable key.
    #[error("the response cannot be used: {0}")]
    Keys(#[from] KeyError),
}

fn hint(status: StatusCode) -> &'static str {
    match status.is_redirection() {
        true => ": redirects are not followed, configure their target",
        false => "",
    }
}

fn with_causes(error: &hyper::Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

impl FetchError {
    /// The metric label.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            FetchError::Connect(_) => "connect",
            FetchError::Tls(_) => "tls",
            FetchError::Timeout(_) => "timeout",
            FetchError::Status { .. } => "status",
            FetchError::Protocol(_) | FetchError::TooLarge => "protocol",
            FetchError::Keys(_) => "keys",
        }
    }
}

/// The HTTP client. It loads the system's roots on first use.
#[derive(Debug, Default)]
pub(super) struct Fetcher {
    tls: Option<Arc<ClientConfig>>,
}

impl Fetcher {
    /// The body of a 200. Its size is bounded; the caller bounds the time.
    pub(super) async fn get(&mut self, url: &Uri) -> Result<Vec<u8>, FetchError> {
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        let is_tls = url.scheme_str() == Some("https");
        let port = url.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let stream = TcpStream::connect((host, port))
            .await
            .map_err(FetchError::Connect)?;
        if !is_tls {
            return exchange(stream, url).await;
        }
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| FetchError::Tls(io::Error::other(error)))?;
        let connector = TlsConnector::from(self.tls()?);
        let stream = connector.connect(name, stream).await;
        exchange(stream.map_err(FetchError::Tls)?, url).await
    }

    fn tls(&mut self) -> Result<Arc<ClientConfig>, FetchError> {
        if let Some(tls) = &self.tls {
            return Ok(Arc::clone(tls));
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_platform_verifier())
            .map_err(|error| FetchError::Tls(io::Error::other(error)))?
            .with_no_client_auth();
        Ok(Arc::clone(self.tls.insert(Arc::new(tls))))
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    url: &Uri,
) -> Result<Vec<u8>, FetchError> {
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_MAX_BYTES)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(FetchError::Protocol)?;
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let host = url.authority().map_or("", |authority| authority.as_str());
    let mut request = Request::new(String::new());
    *request.uri_mut() = path.parse().unwrap_or_default();
    let headers = request.headers_mut();
    headers.insert(
        HOST,
        HeaderValue::from_str(host).unwrap_or(HeaderValue::from_static("")),
    );
    headers.insert(
        ACCEPT,
        HeaderValue::from_static("application/jwk-set+json, application/json"),
    );
    headers.insert(
        USER_AGENT,
        HeaderValue::from_static(concat!("tidegate/", env!("CARGO_PKG_VERSION"))),
    );
    let answer = async {
        let response = sender.send_request(request).await;
        read(response.map_err(FetchError::Protocol)?).await
    };
    let (mut answer, connection) = (pin!(answer), pin!(connection));
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        // many servers close abruptly after a complete response, so only the response tells
        // whether it is complete
        _ = connection => answer.await,
    }
}

async fn read(response: Response<Incoming>) -> Result<Vec<u8>, FetchError> {
    if response.status() != StatusCode::OK {
        let status = response.status();
        return Err(FetchError::Status { status });
    }
    let mut body = pin!(response.into_body());
    let mut bytes = Vec::new();
    while let Some(frame) = std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        let frame = frame.map_err(FetchError::Protocol)?;
        let data: Bytes = frame.into_data().unwrap_or_default();
        if bytes.len() + data.remaining() > BODY_MAX_BYTES {
            return Err(FetchError::TooLarge);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}
