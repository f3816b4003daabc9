//! Exports spans to a collector with OTLP over gRPC (`opentelemetry-proto` 1.x,
//! TraceService/Export), on its own thread.
//!
//! ```text
//! workers ──try_send──▶ queue (QUEUE_SPANS) ──▶ batch (BATCH_SPANS or LINGER) ──▶ one call
//! (CALL_TIMEOUT) ──▶ collector
//!             full? dropped and counted                    failed? counted, not tried again
//! ```
//!
//! So a slow or absent collector costs spans, never requests. Memory is bounded by the queue and
//! one batch.

use std::{fmt, io, sync::Arc, sync::mpsc as std_mpsc, thread, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use http::{HeaderMap, Request, Uri, header::CONTENT_TYPE};
use rustls::{ClientConfig, crypto::aws_lc_rs, pki_types::ServerName};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{mpsc, watch},
    time::{Instant, timeout, timeout_at},
};
use tokio_rustls::TlsConnector;

use prost::Message as _;

use super::{
    handles::SpanMetrics,
    log::Throttle,
    otlp_messages::{
        ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans,
        ScopeSpans, Span,
    },
};

/// The most spans that wait for the collector.
const QUEUE_SPANS: usize = 4096;
/// The most spans in one call.
const BATCH_SPANS: usize = 512;
/// How long spans gather before a call.
const LINGER: Duration = Duration::from_secs(1);
/// Timeout of one call, including a new connection if needed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The most bytes of a response that are read.
const ANSWER_MAX_BYTES: usize = 64 * 1024;

/// The address of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    is_tls: bool,
    host: String,
    port: u16,
}

/// Why a text is not the address of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCollector {
    /// Not a supported URL.
    #[error("it must be http://HOST:PORT or https://HOST:PORT")]
    Form,
    /// OTLP over HTTP needs a path; gRPC has none.
    #[error("it must have no path, because tidegate sends spans over gRPC")]
    Path,
}

impl Collector {
    /// Parses `http://HOST:PORT` or `https://HOST:PORT`. The default port is 4317.
    pub fn parse(text: &str) -> Result<Collector, BadCollector> {
        let uri: Uri = text.parse().map_err(|_| BadCollector::Form)?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(BadCollector::Form),
        };
        let authority = uri.authority().ok_or(BadCollector::Form)?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(BadCollector::Form);
        }
        if uri.path_and_query().is_some_and(|path| path != "/") {
            return Err(BadCollector::Path);
        }
        Ok(Collector {
            is_tls,
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(4317),
        })
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

/// The queue of spans. Clones share one sender thread.
#[derive(Clone, Debug)]
pub struct Spans {
    queue: mpsc::Sender<Span>,
    metrics: SpanMetrics,
    closing: Arc<watch::Sender<bool>>,
    ended: Arc<std::sync::Mutex<std_mpsc::Receiver<()>>>,
}

impl Spans {
    /// Starts the sender thread, which connects when there are spans. Fails if the system cannot
    /// start a thread.
    pub fn start(collector: Collector, metrics: SpanMetrics) -> io::Result<Spans> {
        let (queue, waiting) = mpsc::channel(QUEUE_SPANS);
        let (closing, close) = watch::channel(false);
        let (ending, ended) = std_mpsc::sync_channel(0);
        let sender = Sender {
            collector,
            waiting,
            close,
            metrics: metrics.clone(),
            line: None,
            tls: None,
            warning: Throttle::default(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        thread::Builder::new()
            .name("spans".to_owned())
            .spawn(move || {
                // dropped at the end, also on panic, so that `close` never waits for a thread that
                // is gone
                let _ending = ending;
                runtime.block_on(sender.send_until_closed());
            })?;
        Ok(Spans {
            queue,
            metrics,
            closing: Arc::new(closing),
            ended: Arc::new(std::sync::Mutex::new(ended)),
        })
    }

    /// Queues a span. Never waits: if the queue is full, the span is dropped and counted.
    pub fn push(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            self.metrics.dropped.increment(1);
        }
    }

    /// Sends the queued spans and stops; waits at most `limit`. Do not call it from an async
    /// runtime.
    pub fn close(&self, limit: Duration) {
        self.closing.send_replace(true);
        let ended = self
            .ended
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // the channel never carries a value: an error means that the thread has ended
        let _ = ended.recv_timeout(limit);
    }
}

/// The state of the sender thread.
struct Sender {
    collector: Collector,
    waiting: mpsc::Receiver<Span>,
    close: watch::Receiver<bool>,
    metrics: SpanMetrics,
    line: Option<SendRequest<Bytes>>,
    tls: Option<Arc<ClientConfig>>,
    warning: Throttle,
}

/// Why spans were not delivered.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{0}")]
    Connect(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] h2::Error),
    #[error("no response within {CALL_TIMEOUT:?}")]
    Timeout,
    #[error("the collector answered {0}")]
    Refused(String),
}

impl Sender {
    async fn send_until_closed(mut self) {
        loop {
            let batch = self.batch().await;
            if !batch.is_empty() {
                self.send(batch).await;
            } else if *self.close.borrow() || self.waiting.is_closed() {
                return;
            }
        }
    }

    /// The spans of the next call; empty if the queue is closed and drained.
    async fn batch(&mut self) -> Vec<Span> {
        let mut batch = Vec::new();
        let first = tokio::select! {
            biased;
            span = self.waiting.recv() => span,
            _ = self.close.wait_for(|close| *close) => None,
        };
        batch.extend(first);
        let until = Instant::now() + LINGER;
        while (1..BATCH_SPANS).contains(&batch.len()) {
            let more = async {
                tokio::select! {
                    biased;
                    span = self.waiting.recv() => span,
                    _ = self.close.wait_for(|close| *close) => None,
                }
            };
            match timeout_at(until, more).await {
                Ok(Some(span)) => batch.push(span),
                Ok(None) | Err(_) => break,
            }
        }
        batch
    }

    async fn send(&mut self, batch: Vec<Span>) {
        let count = batch.len() as u64;
        let sent = timeout(CALL_TIMEOUT, self.call(message(batch))).await;
        match sent.unwrap_or(Err(ExportError::Timeout)) {
            Ok(()) => self.metrics.sent.increment(count),
            Err(error) => {
                self.line = None;
                self.metrics.failed.increment(count);
                if let Some(suppressed) = self.warning.speak() {
                    let collector = self.collector.to_string();
                    tracing::warn!(collector, spans = count, suppressed, %error, "the trace collector did not accept the spans, so they are lost");
                }
            }
        }
    }

    async fn call(&mut self, message: Bytes) -> Result<(), ExportError> {
        let line = match self.line.take() {
            Some(line) => line,
            None => self.connect().await?,
        };
        let mut line = line.ready().await?;
        let uri = format!(
            "{}/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            self.collector
        );
        let request = Request::post(uri)
            .header(CONTENT_TYPE, "application/grpc")
            .header("te", "trailers")
            .header(
                "user-agent",
                concat!("tidegate/", env!("CARGO_PKG_VERSION")),
            )
            .body(())
            .map_err(|error| ExportError::Refused(error.to_string()))?;
        let (response, mut body) = line.send_request(request, false)?;
        body.send_data(message, true)?;
        let (head, mut body) = response.await?.into_parts();
        if head.status != http::StatusCode::OK {
            return Err(ExportError::Refused(head.status.to_string()));
        }
        let mut length = 0;
        while let Some(data) = body.data().await {
            let data = data?;
            length += data.len();
            if length > ANSWER_MAX_BYTES {
                return Err(ExportError::Refused("more than 64 KiB".to_owned()));
            }
            let _ = body.flow_control().release_capacity(data.len());
        }
        let trailers = body.trailers().await?;
        status(trailers.as_ref().unwrap_or(&head.headers))?;
        self.line = Some(line);
        Ok(())
    }

    async fn connect(&mut self) -> Result<SendRequest<Bytes>, ExportError> {
        let host = self.collector.host.trim_matches(['[', ']']).to_owned();
        let stream = TcpStream::connect((host.as_str(), self.collector.port)).await?;
        if !self.collector.is_tls {
            return begin(stream).await;
        }
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let connector = TlsConnector::from(self.tls()?);
        begin(connector.connect(name, stream).await?).await
    }

    fn tls(&mut self) -> io::Result<Arc<ClientConfig>> {
        if let Some(tls) = &self.tls {
            return Ok(Arc::clone(tls));
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_platform_verifier())
            .map_err(io::Error::other)?
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::clone(self.tls.insert(Arc::new(tls))))
    }
}

/// Starts HTTP/2 and drives the connection in a task until it ends.
async fn begin<S>(stream: S) -> Result<SendRequest<Bytes>, ExportError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (line, connection) = h2::client::handshake(stream).await?;
    tokio::spawn(async move {
        // the next call detects a closed connection
        let _ = connection.await;
    });
    Ok(line)
}

fn status(fields: &HeaderMap) -> Result<(), ExportError> {
    let text = |name: &str| fields.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status") {
        Some("0") => Ok(()),
        code => {
            let (code, message) = (code.unwrap_or("no status"), text("grpc-message"));
            let message = message.unwrap_or_default();
            Err(ExportError::Refused(format!("{code} {message}")))
        }
    }
}

/// An `ExportTraceServiceRequest` framed as a gRPC message.
fn message(spans: Vec<Span>) -> Bytes {
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: vec![
                    KeyValue::text("service.name", "tidegate".to_owned()),
                    KeyValue::text("service.version", env!("CARGO_PKG_VERSION").to_owned()),
                ],
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(InstrumentationScope {
                    name: "tidegate".to_owned(),
                }),
                spans,
            }],
        }],
    };
    let length = request.encoded_len();
    let mut framed = BytesMut::with_capacity(length + 5);
    // not compressed
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    framed.put_slice(&request.encode_to_vec());
    framed.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_an_address_without_a_path() {
        let read = |text: &str| Collector::parse(text).map(|collector| collector.to_string());
        assert_eq!(
            read("http://127.0.0.1:4317").as_deref(),
            Ok("http://127.0.0.1:4317")
        );
        assert_eq!(
            read("https://otel.example").as_deref(),
            Ok("https://otel.example:4317")
        );
        assert_eq!(read("http://[::1]:9/").as_deref(), Ok("http://[::1]:9"));
        assert_eq!(read("http://h:4318/v1/traces"), Err(BadCollector::Path));
        for bad in [
            "",
            "h:4317",
            "grpc://h:1",
            "http://user:secret@h:1",
            "http:///",
            "/x",
        ] {
            assert_eq!(read(bad), Err(BadCollector::Form), "{bad}");
        }
    }
}
