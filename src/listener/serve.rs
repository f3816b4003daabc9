//! One connection: which HTTP it speaks, then its requests, one handler call each.

use std::{
    cell::RefCell,
    convert::Infallible,
    fmt,
    future::{Future, poll_fn},
    net::IpAddr,
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header::CONNECTION};
use http_body::Body;
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};

use super::{
    Observer, Settings,
    clock::Clock,
    drain::Ticket,
    handover::{ClientEnd, Takeover},
    interim::Interim,
    proxy_protocol::{self, Received},
    stream::Stream,
    streams::{Current, Streams, Tracked},
    timed_io::TimedIo,
    tls::Handshakes,
};
use crate::identity::Certificate;

/// Turns a request into a response; one for each worker.
pub trait Handler: 'static {
    /// The body of its responses.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static;

    /// Answers one request. Dropped when the client is gone.
    fn handle(
        self: Rc<Self>,
        request: Request<Incoming>,
        from: Rc<Peer>,
    ) -> impl Future<Output = Response<Self::Body>>;

    /// What an HTTP/1.1 client is told whose request head did not arrive in time, byte for byte.
    fn head_timeout_answer(&self) -> &'static [u8];
}

/// Which HTTP a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// The other end of a connection, and the bounds that it is held to.
pub struct Peer {
    /// The address of the other end: the socket's, or the one that a PROXY header names.
    pub ip: IpAddr,
    /// The listener's settings.
    pub listener: Rc<Settings>,
    /// The certificate that the client has proved to hold.
    pub certificate: Option<Certificate>,
    clock: Rc<Clock>,
    interim: Rc<Interim>,
    takeover: RefCell<Option<Takeover>>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("ip", &self.ip)
            .finish_non_exhaustive()
    }
}

impl Peer {
    fn new(ip: IpAddr, listener: Rc<Settings>, certificate: Option<Certificate>) -> Self {
        let clock = Clock::new(listener.header_timeout, listener.idle_timeout);
        Self {
            ip,
            listener,
            certificate,
            clock: Rc::new(clock),
            interim: Rc::default(),
            takeover: RefCell::default(),
        }
    }

    /// One that nobody is connected to, for explaining what would become of its requests.
    pub fn described(ip: IpAddr, listener: Rc<Settings>) -> Self {
        Self::new(ip, listener, None)
    }

    /// `http` or `https`: how the client reached us.
    pub fn scheme(&self) -> &'static str {
        match self.listener.tls {
            Some(_) => "https",
            None => "http",
        }
    }

    /// The answer is a 101: when it has left, the connection is no longer HTTP's. HTTP/1.1 only.
    pub fn hand_over(&self, to: Takeover) {
        self.takeover.replace(Some(to));
    }

    /// An interim response of whoever is asked, to be passed on before the answer. `false` where there is no room for it.
    /// HTTP/1.1 only: older clients know of none, and the HTTP/2 library cannot send them.
    pub fn pass_on_interim(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        self.interim.push(status, headers)
    }

    /// Whether a client that closes its side of the connection now has left: more of its request is awaited, or it awaits
    /// its turn. Otherwise it may only have nothing more to say, and its answer is waited for, if not for long. HTTP/1 only.
    pub fn needs_client(&self, needs: bool) {
        self.clock.needs_client(needs);
    }

    /// Bytes of a request's body have arrived.
    pub(super) fn body_arrived(&self, bytes: usize) {
        self.clock.body_passed(bytes);
    }

    /// The request is answered before its body was read: where the connection closes behind the answer, it does so that
    /// the client can still read it. HTTP/1 only; HTTP/2 ends the stream.
    pub fn leave_body_unread(&self) {
        self.clock.leave_body_unread();
    }
}

/// A connection that was accepted and not yet served.
#[derive(Debug)]
pub struct Accepted {
    stream: Stream,
    peer: IpAddr,
}

impl Accepted {
    pub(super) fn tcp(stream: TcpStream, peer: IpAddr) -> Self {
        Self {
            stream: Stream::Tcp(stream),
            peer,
        }
    }

    pub(super) fn unix(stream: UnixStream, peer: IpAddr) -> Self {
        Self {
            stream: Stream::Unix(stream),
            peer,
        }
    }

    /// Whose connection it is, as far as that is said before anything else.
    async fn announced(
        &mut self,
        settings: &Settings,
        ticket: &Ticket,
    ) -> Result<Received, proxy_protocol::Fault> {
        let (required, patience) = (&settings.proxy_protocol, settings.header_timeout);
        let peer = self.peer;
        proxy_protocol::receive(required, peer, &mut self.stream, patience, ticket).await
    }
}

/// Serves one connection to its end.
pub(super) async fn connection<H: Handler, O: Observer>(
    mut accepted: Accepted,
    settings: Rc<Settings>,
    handshakes: Option<Rc<Handshakes>>,
    handler: Rc<H>,
    observer: Rc<O>,
    ticket: Ticket,
) {
    let ticket = Rc::new(ticket);
    let ip = match accepted.announced(&settings, &ticket).await {
        Ok(Received::From(ip)) => ip,
        Ok(Received::Nothing) => return,
        Err(fault) => return observer.not_believed(accepted.peer, fault),
    };
    let stream = accepted.stream;
    let clock;
    let ended = if let Some(handshakes) = handshakes {
        let Some((stream, secured)) = handshakes.accept(stream, settings.header_timeout).await
        else {
            return;
        };
        let peer = Rc::new(Peer::new(ip, settings, secured.certificate));
        clock = Rc::clone(&peer.clock);
        speak(stream, Some(secured.protocol), peer, handler, ticket).await
    } else {
        let peer = Rc::new(Peer::new(ip, settings, None));
        clock = Rc::clone(&peer.clock);
        speak(stream, None, peer, handler, ticket).await
    };
    if let Some(cut) = clock.cut() {
        observer.cut(cut);
    }
    if let Err(error) = ended {
        // a client that leaves or talks nonsense is its own business
        tracing::debug!(%error, "connection ended early");
    }
}

/// What an HTTP/2 client sends first (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// `agreed` is what the handshake settled; without one, the first bytes tell.
async fn speak<S, H>(
    io: S,
    agreed: Option<Protocol>,
    peer: Rc<Peer>,
    handler: Rc<H>,
    ticket: Rc<Ticket>,
) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    H: Handler,
{
    let settings = &peer.listener;
    let clock = Rc::clone(&peer.clock);
    let mut io = TimedIo::new(io, Rc::clone(&clock), Rc::clone(&peer.interim));
    let current = Rc::new(Current::default());
    let http2 = match agreed {
        Some(protocol) => protocol == Protocol::Http2,
        None => settings.http2 && begins_with_preface(&mut io, &ticket).await,
    };
    match http2 {
        true => clock.bytes_are_frames(),
        false => clock.answer_timeout_with(handler.head_timeout_answer()),
    }
    let streams = Streams::new(Rc::clone(&clock), Rc::clone(&current));
    let (http1, http2) = (
        http1_builder(settings),
        http2.then(|| http2_builder(settings, streams)),
    );
    let io = TokioIo::new(io);
    let closing = Rc::clone(&ticket);
    let is_http1 = http2.is_none();
    let to = Rc::clone(&peer);
    let service = service_fn(move |request: Request<Incoming>| {
        let in_flight = to.clock.request();
        // hyper keeps room for this future while the connection is idle: a pointer, not the whole path of a request
        let response = Box::pin(Rc::clone(&handler).handle(request, Rc::clone(&to)));
        let current = Rc::clone(&current);
        let closing = Rc::clone(&closing);
        async move {
            let mut response = response.await;
            if is_http1 && closing.is_closing() && !response.status().is_informational() {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(CONNECTION, close);
            }
            let waiting = current.stream();
            Ok::<_, Infallible>(response.map(|body| Tracked::new(body, in_flight, waiting)))
        }
    });
    if let Some(http2) = http2 {
        let connection = http2.serve_connection(io, service);
        // GOAWAY leaves no request unanswered that is under way (RFC 9113 §6.8), so it is sent at once
        let end = http2::Connection::graceful_shutdown;
        let is_time = Ticket::is_closing;
        run(pin!(connection), &ticket, &clock, is_time, end).await
    } else {
        let mut connection = http1.serve_connection(io, service);
        let end = http1::Connection::graceful_shutdown;
        let is_time = Ticket::should_end;
        run(Pin::new(&mut connection), &ticket, &clock, is_time, end).await?;
        let left = connection.into_parts();
        after_http(left.io.into_inner(), left.read_buf, &peer).await;
        Ok(())
    }
}

/// A request that asked for an upgrade keeps hyper from closing the connection: it goes to whoever takes it over, or is
/// closed here. During a drain it may go on until `drain_timeout`.
async fn after_http<S>(mut io: TimedIo<S>, unread: Bytes, peer: &Peer)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    match peer.takeover.take() {
        Some(takeover) => {
            let _in_flight = peer.clock.request();
            peer.clock.needs_client(true);
            io.unread(unread);
            takeover(ClientEnd::new(io)).await;
        }
        // what the client had to be told was written before
        None => drop(poll_fn(|cx| Pin::new(&mut io).poll_shutdown(cx)).await),
    }
}

fn http1_builder(settings: &Settings) -> http1::Builder {
    /// Room for heads that are over our bounds by little, so that they are answered by us and not cut off.
    const HEADROOM: usize = 32 * 1024;
    let mut builder = http1::Builder::new();
    // the head's timeout is `Clock`'s
    builder
        .half_close(false)
        .header_read_timeout(None)
        .max_buf_size(settings.max_header_bytes + settings.max_uri_bytes + HEADROOM);
    if settings.max_header_count > HYPER_MAX_HEADERS {
        builder.max_headers(settings.max_header_count);
    }
    builder
}

/// What hyper parses without a heap allocation for each request. Fewer is our own check.
const HYPER_MAX_HEADERS: usize = 100;

fn http2_builder(settings: &Settings, streams: Streams) -> http2::Builder<Streams> {
    /// Bytes of an answer that wait for a client's window, for each stream.
    const MAX_WAITING_BYTES: usize = 64 * 1024;
    let mut builder = http2::Builder::new(streams);
    builder
        .max_concurrent_streams(settings.max_streams)
        .max_header_list_size(u32::try_from(settings.max_header_bytes).unwrap_or(u32::MAX))
        .max_send_buf_size(MAX_WAITING_BYTES);
    builder
}

/// Polls a connection to its end; asks it to end when it is time, and in HTTP/2 when it has been idle for too long (RFC 9113
/// §6.8).
async fn run<C>(
    mut connection: Pin<&mut C>,
    ticket: &Ticket,
    clock: &Clock,
    is_time: impl Fn(&Ticket) -> bool,
    graceful_shutdown: impl Fn(Pin<&mut C>),
) -> C::Output
where
    C: Future,
{
    let mut registered = false;
    let mut asked = false;
    poll_fn(move |cx| {
        if !asked && is_time(ticket) {
            asked = true;
            clock.leave();
            graceful_shutdown(connection.as_mut());
        }
        // once, and again for the second stage of the drain: the first has taken the waker
        if !registered || !asked && ticket.is_closing() {
            ticket.wake_with(cx.waker());
            registered = true;
        }
        let outcome = connection.as_mut().poll(cx);
        if outcome.is_pending() && !asked && clock.is_leaving() {
            asked = true;
            graceful_shutdown(connection.as_mut());
            return connection.as_mut().poll(cx);
        }
        outcome
    })
    .await
}

/// Reads just enough to tell HTTP/2 from HTTP/1, and gives it back. Bounded by the header timeout.
async fn begins_with_preface<S: AsyncRead + AsyncWrite + Unpin>(
    io: &mut TimedIo<S>,
    ticket: &Ticket,
) -> bool {
    let mut seen = BytesMut::with_capacity(PREFACE.len());
    while seen.len() < PREFACE.len() && PREFACE.starts_with(&seen) {
        let mut some = [0; PREFACE.len()];
        let wanted = PREFACE.len() - seen.len();
        let read = poll_fn(|cx| {
            ticket.wake_with(cx.waker());
            if ticket.should_end() && seen.is_empty() {
                return Poll::Ready(Ok(0));
            }
            let mut buf = ReadBuf::new(&mut some[..wanted]);
            Pin::new(&mut *io)
                .poll_read(cx, &mut buf)
                .map_ok(|()| buf.filled().len())
        });
        match read.await {
            Ok(0) | Err(_) => break,
            Ok(count) => seen.extend_from_slice(&some[..count]),
        }
    }
    let http2 = seen == PREFACE;
    io.unread(seen.freeze());
    http2
}
