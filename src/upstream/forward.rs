//! One exchange with a server: the request goes out, the response head comes back.
//!
//! It runs inline in the request's task. The head and the first bytes of the body leave in one write; after that the
//! body is sent as the client delivers it and the server takes it, while the response is awaited: a server may answer
//! before it has read the request.
//!
//! A kept connection may have been closed by the server in the very moment of its reuse. Then, and only then, the
//! request is sent once more, on a fresh connection, and only if that is safe (RFC 9110 §9.2.2): nothing of a response
//! was received, the method is idempotent and no body was begun.

use std::{
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{Method, Response, StatusCode};
use http_body::{Body, Frame};
use tokio::{io::AsyncWrite, time::Instant};

use super::{
    HostHeader, ResponseBody, Server, Upstream, UpstreamError,
    framing::{self, ResponseHead},
    headers::{self, BodyFraming, Outbound},
    pool::{Connection, ServerPool},
};

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

/// Where the request goes: a server that takes it over a connection, or the built-in one.
#[derive(Debug)]
pub enum Destination<'u> {
    /// A server behind a connection.
    Remote(&'u Rc<ServerPool>),
    /// `builtin:echo`.
    Echo,
}

impl Upstream {
    /// The server whose turn it is.
    pub fn destination(&self) -> Destination<'_> {
        let pool = self.next_server();
        match pool.server() {
            Server::Echo => Destination::Echo,
            Server::Http { .. } | Server::Unix(_) => Destination::Remote(pool),
        }
    }

    /// What the server is told as `Host`.
    pub fn host_for<'a>(&'a self, pool: &'a ServerPool, asked: &'a str) -> &'a [u8] {
        match &self.settings().host {
            // only an HTTP/1.0 client asks for no host; HTTP/1.1 must name one
            HostHeader::Preserve if asked.is_empty() => pool.authority().as_bytes(),
            HostHeader::Preserve => asked.as_bytes(),
            HostHeader::Server => pool.authority().as_bytes(),
            HostHeader::Literal(value) => value.as_bytes(),
        }
    }
}

/// Sends the request to one server of the upstream and returns its response, the body still to be read.
pub async fn forward<B>(
    upstream: &Upstream,
    pool: &Rc<ServerPool>,
    request: &Outbound<'_>,
    body: B,
) -> Result<Response<ResponseBody<B>>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let framing = body_framing(request.method, &body);
    let mut body =
        (framing != BodyFraming::None && framing != BodyFraming::Length(0)).then_some(body);
    let retryable = body.is_none() && is_idempotent(request.method);
    let mut connection = pool.take().await?;
    loop {
        connection.outbox.clear();
        headers::write_head(
            &mut connection.outbox,
            request,
            upstream.host_for(pool, request.host),
            framing,
        );
        let sending = Sending::new(body.take(), framing);
        let reused = connection.reused;
        match exchange(connection, sending, upstream, request.method).await {
            Err(Failed::Upstream(UpstreamError::Closed(_))) if reused && retryable => {
                connection = pool.take_fresh().await?
            }
            outcome => return outcome,
        }
    }
}

/// Sends, and waits for the head of the final response. Interim responses end here (103 cannot be passed on).
async fn exchange<B>(
    mut connection: Connection,
    sending: Sending<B>,
    upstream: &Upstream,
    method: &Method,
) -> Result<Response<ResponseBody<B>>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let timeout = upstream.settings().response_timeout;
    let mut sending = Some(sending);
    let mut deadline = Instant::now() + timeout;
    let (mut waited, mut refused_body, mut interim) = (false, false, 0);
    let head = poll_fn(|cx| {
        if let Some(rest) = &mut sending {
            let before = rest.progress;
            match rest.poll(&mut connection, cx) {
                Poll::Ready(Ok(())) => {
                    if waited {
                        deadline = Instant::now() + timeout;
                    }
                    sending = None;
                }
                Poll::Ready(Err(SendError::Body(error))) => {
                    return Poll::Ready(Err(Failed::RequestBody(error)));
                }
                Poll::Ready(Err(SendError::Write(error))) => {
                    // the server may have answered before it stopped reading: look for that answer first
                    tracing::debug!(%error, "the server stopped reading the request");
                    sending = None;
                    refused_body = true;
                }
                Poll::Pending => {
                    waited = true;
                    if rest.progress != before {
                        deadline = Instant::now() + timeout;
                    }
                }
            }
        }
        match poll_head(&mut connection, method == Method::HEAD, &mut interim, cx) {
            Poll::Ready(head) => Poll::Ready(head.map_err(Failed::Upstream)),
            // a client that is slow with its body is not the server's fault: the listener watches that
            Poll::Pending if sending.as_ref().is_some_and(|rest| rest.waits_for_client) => {
                Poll::Pending
            }
            Poll::Pending => connection
                .poll_deadline(cx, deadline)
                .map(|()| Err(UpstreamError::Timeout(timeout).into())),
        }
    })
    .await?;
    connection.reused = true;
    let keep_alive = head.keep_alive && !refused_body;
    let mut response = Response::new(ResponseBody::new(
        head.framing,
        connection,
        sending,
        keep_alive,
        upstream.settings().body_timeout,
    ));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    Ok(response)
}

/// Interim responses (100, 103, …) that may precede the final one; they end here.
const MAX_INTERIM: u8 = 32;

fn poll_head(
    connection: &mut Connection,
    to_head: bool,
    interim: &mut u8,
    cx: &mut Context<'_>,
) -> Poll<Result<ResponseHead, UpstreamError>> {
    loop {
        if !connection.inbox.is_empty()
            && let Some(head) = framing::take_head(&mut connection.inbox, to_head)?
        {
            if head.status == StatusCode::SWITCHING_PROTOCOLS {
                return Poll::Ready(Err(UpstreamError::Protocol(
                    "it switches protocols unasked",
                )));
            }
            if !head.status.is_informational() {
                return Poll::Ready(Ok(head));
            }
            *interim += 1;
            if *interim > MAX_INTERIM {
                return Poll::Ready(Err(UpstreamError::Protocol("too many interim responses")));
            }
            continue;
        }
        let lost = match ready!(connection.poll_fill(cx)) {
            Ok(0) => io::ErrorKind::UnexpectedEof.into(),
            Ok(_) => continue,
            Err(error) => error,
        };
        return Poll::Ready(Err(if connection.inbox.is_empty() {
            UpstreamError::Closed(lost)
        } else {
            UpstreamError::Protocol("the head is cut short")
        }));
    }
}

/// RFC 9110 §9.2.2.
fn is_idempotent(method: &Method) -> bool {
    matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE | Method::TRACE
    )
}

fn body_framing<B: Body>(method: &Method, body: &B) -> BodyFraming {
    match body.size_hint().exact() {
        Some(0) if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => {
            BodyFraming::Length(0)
        }
        Some(0) => BodyFraming::None,
        Some(length) => BodyFraming::Length(length),
        None => BodyFraming::Chunked,
    }
}

/// Why the request could not be sent in full.
#[derive(Debug)]
pub(super) enum SendError<E> {
    /// The server no longer takes it.
    Write(io::Error),
    /// The client no longer delivers it.
    Body(E),
}

/// A request on its way to the server: the connection's outbox, then the body as it comes.
#[derive(Debug)]
pub(super) struct Sending<B> {
    body: Option<B>,
    chunked: bool,
    /// How much of the outbox is written; the outbox itself is kept until it is reused.
    written: usize,
    /// Body bytes that leave behind the outbox without being copied into it.
    chunk: Bytes,
    /// Whether `chunk` must be followed by the CR LF that ends a chunk's data.
    owes_line_end: bool,
    /// Whether all that the client delivered was written, and more is to come.
    waits_for_client: bool,
    /// Bytes written so far, to tell a slow server from a stalled one.
    progress: u64,
}

/// Body bytes up to this size are copied behind the head or the chunk size, so that both leave in one plain write.
const COPIED: usize = 2 * 1024;

impl<B> Sending<B> {
    fn new(body: Option<B>, framing: BodyFraming) -> Self {
        Self {
            body,
            chunked: framing == BodyFraming::Chunked,
            written: 0,
            chunk: Bytes::new(),
            owes_line_end: false,
            waits_for_client: false,
            progress: 0,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Sending<B> {
    /// Ready when everything is sent.
    pub(super) fn poll(
        &mut self,
        connection: &mut Connection,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), SendError<B::Error>>> {
        loop {
            self.waits_for_client = false;
            // gather what is there before the first write, so that head and body leave together
            let gathered = if self.chunk.is_empty() {
                self.gather(&mut connection.outbox, cx)?
            } else {
                Poll::Ready(())
            };
            let unsent = connection.outbox.len() - self.written;
            if unsent == 0 && self.chunk.is_empty() {
                if self.body.is_none() {
                    return Poll::Ready(Ok(()));
                }
                self.waits_for_client = gathered.is_pending();
                ready!(gathered);
                continue;
            }
            let stream = Pin::new(&mut connection.stream);
            let head = &connection.outbox[self.written..];
            let wrote = if self.chunk.is_empty() {
                stream.poll_write(cx, head)
            } else {
                stream.poll_write_vectored(cx, &[IoSlice::new(head), IoSlice::new(&self.chunk)])
            };
            let wrote = match ready!(wrote) {
                Ok(0) => {
                    return Poll::Ready(Err(SendError::Write(io::ErrorKind::WriteZero.into())));
                }
                Ok(wrote) => wrote,
                Err(error) => return Poll::Ready(Err(SendError::Write(error))),
            };
            self.progress += wrote as u64;
            let of_head = wrote.min(unsent);
            self.written += of_head;
            self.chunk.advance(wrote - of_head);
        }
    }

    /// Takes body frames until one is large enough to leave on its own, the body ends, or nothing is there.
    fn gather(
        &mut self,
        outbox: &mut BytesMut,
        cx: &mut Context<'_>,
    ) -> Result<Poll<()>, SendError<B::Error>> {
        while let Some(body) = &mut self.body {
            if self.written == outbox.len() {
                outbox.clear();
                self.written = 0;
            }
            if std::mem::take(&mut self.owes_line_end) {
                outbox.put_slice(b"\r\n");
            }
            match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(Some(Err(error))) => return Err(SendError::Body(error)),
                Poll::Ready(None) => self.end(outbox, None),
                Poll::Ready(Some(Ok(frame))) => self.take_frame(outbox, frame),
            }
            if !self.chunk.is_empty() || outbox.len() >= 4 * COPIED {
                break;
            }
        }
        Ok(Poll::Ready(()))
    }

    fn take_frame(&mut self, outbox: &mut BytesMut, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.chunked {
                    use std::fmt::Write as _;
                    write!(outbox, "{:x}\r\n", data.len()).expect("BytesMut grows as needed");
                }
                if data.len() <= COPIED {
                    outbox.put_slice(&data);
                    if self.chunked {
                        outbox.put_slice(b"\r\n");
                    }
                } else {
                    self.chunk = data;
                    self.owes_line_end = self.chunked;
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    self.end(outbox, Some(trailers));
                }
            }
        }
    }

    fn end(&mut self, outbox: &mut BytesMut, trailers: Option<http::HeaderMap>) {
        self.body = None;
        if !self.chunked {
            return;
        }
        outbox.put_slice(b"0\r\n");
        for (name, value) in trailers.iter().flatten() {
            if headers::may_be_trailer(name) {
                outbox.put_slice(name.as_str().as_bytes());
                outbox.put_slice(b": ");
                outbox.put_slice(value.as_bytes());
                outbox.put_slice(b"\r\n");
            }
        }
        outbox.put_slice(b"\r\n");
    }
}
