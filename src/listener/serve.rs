//! One connection: which HTTP it speaks, then its requests, one handler call each.

use std::{
    cell::RefCell,
    fmt,
    future::{Future, poll_fn},
    net::IpAddr,
    pin::Pin,
    rc::Rc,
    task::Poll,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};

use super::{
    Observer, Settings, Terms,
    clock::Clock,
    crowd::Place,
    drain::Ticket,
    handover::Takeover,
    http1, http2,
    interim::Interim,
    proxy_protocol::{self, Received},
    stream::Stream,
    timed_io::TimedIo,
};
use crate::identity::Certificate;

/// Turns a request into a response; one for each worker.
pub trait Handler: 'static {
    /// The body of its responses.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static;

    /// Answers one request; `finish` makes of the answer what is sent. Dropped when the client is gone.
    ///
    /// The future is large. One around it, which finishes what this one answers, would be moved with it once more.
    fn handle<R, F: FnOnce(Response<Self::Body>) -> R>(
        self: Rc<Self>,
        request: Request<Incoming>,
        from: Rc<Peer>,
        finish: F,
    ) -> impl Future<Output = R>;

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
    pub(super) clock: Rc<Clock>,
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

    /// Whoever the connection was handed over to.
    pub(super) fn take_over(&self) -> Option<Takeover> {
        self.takeover.take()
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

/// Serves one connection to its end, and keeps what it holds until then.
///
/// There are many idle connections, so what each holds is counted: this future is what a connection keeps in its task, and
/// whatever belongs to its beginning, or to what it speaks, is boxed and goes when it is over.
pub(super) fn connection<H: Handler, O: Observer>(
    accepted: Accepted,
    terms: Terms,
    handler: Rc<H>,
    observer: Rc<O>,
    ticket: Ticket,
    held: impl Sized,
) -> impl Future<Output = ()> {
    let beginning = Box::pin(begin(
        accepted,
        terms,
        handler,
        Rc::clone(&observer),
        ticket,
    ));
    async move {
        let _held = held;
        let Some(Begun {
            conversation,
            clock,
            _place,
        }) = beginning.await
        else {
            return;
        };
        let ended = conversation.await;
        if let Some(cut) = clock.cut() {
            observer.cut(cut);
        }
        if let Err(error) = ended {
            // a client that leaves or talks nonsense is its own business
            tracing::debug!(%error, "connection ended early");
        }
    }
}

/// A connection that is known to be somebody's, and ready to be spoken on.
struct Begun {
    conversation: Pin<Box<dyn Future<Output = hyper::Result<()>>>>,
    clock: Rc<Clock>,
    _place: Option<Place>,
}

/// Whose connection it is, whether there is room for it, and the handshake; `None` where it ends with that.
async fn begin<H: Handler, O: Observer>(
    mut accepted: Accepted,
    terms: Terms,
    handler: Rc<H>,
    observer: Rc<O>,
    ticket: Ticket,
) -> Option<Begun> {
    let ticket = Rc::new(ticket);
    let Terms {
        settings,
        handshakes,
        crowd,
    } = terms;
    let ip = match accepted.announced(&settings, &ticket).await {
        Ok(Received::From(ip)) => ip,
        Ok(Received::Nothing) => return None,
        Err(fault) => {
            observer.not_believed(accepted.peer, fault);
            return None;
        }
    };
    // peers on a Unix socket look alike
    let place = if matches!(accepted.stream, Stream::Tcp(_)) || ip != accepted.peer {
        let place = crowd.enter(ip, &settings.per_address);
        if place.is_none() {
            observer.crowded(ip);
            return None;
        }
        place
    } else {
        None
    };
    let stream = accepted.stream;
    let Some(handshakes) = handshakes else {
        let peer = Rc::new(Peer::new(ip, settings, None));
        return Some(Begun {
            clock: Rc::clone(&peer.clock),
            conversation: Box::pin(speak(stream, None, peer, handler, ticket)),
            _place: place,
        });
    };
    let patience = settings.header_timeout;
    let (stream, secured) = Box::pin(handshakes.accept(stream, patience)).await?;
    let peer = Rc::new(Peer::new(ip, settings, secured.certificate));
    Some(Begun {
        clock: Rc::clone(&peer.clock),
        conversation: Box::pin(speak(stream, Some(secured.protocol), peer, handler, ticket)),
        _place: place,
    })
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
    let (clock, interim) = (Rc::clone(&peer.clock), Rc::clone(&peer.interim));
    let mut io = Box::new(TimedIo::new(io, clock, interim));
    let http2 = match agreed {
        Some(protocol) => protocol == Protocol::Http2,
        None => peer.listener.http2 && begins_with_preface(&mut io, &ticket).await,
    };
    match http2 {
        true => Box::pin(http2::serve(io, peer, handler, ticket)).await,
        false => http1::serve(io, peer, handler, ticket).await,
    }
}

/// Polls a connection to its end; asks it to end when it is time, and in HTTP/2 when it has been idle for too long (RFC 9113
/// §6.8). `None` where it has not ended, but is to be parked.
pub(super) async fn run<C>(
    mut connection: Pin<&mut C>,
    ticket: &Ticket,
    clock: &Clock,
    is_time: impl Fn(&Ticket) -> bool,
    graceful_shutdown: impl Fn(Pin<&mut C>),
) -> Option<C::Output>
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
        let mut outcome = connection.as_mut().poll(cx);
        if outcome.is_pending() && !asked && clock.is_leaving() {
            asked = true;
            graceful_shutdown(connection.as_mut());
            outcome = connection.as_mut().poll(cx);
        }
        if outcome.is_pending() && !asked && clock.is_parked() {
            return Poll::Ready(None);
        }
        outcome.map(Some)
    })
    .await
}

/// Reads just enough to tell HTTP/2 from HTTP/1, and gives it back. Bounded by the header timeout.
async fn begins_with_preface<S: AsyncRead + AsyncWrite + Unpin>(
    io: &mut TimedIo<S>,
    ticket: &Ticket,
) -> bool {
    let mut seen = BytesMut::new();
    while seen.len() < PREFACE.len() && PREFACE.starts_with(&seen) {
        let is_first = seen.is_empty();
        match poll_fn(|cx| io.poll_read_some(ticket, is_first, &mut seen, cx)).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let http2 = seen.starts_with(PREFACE);
    io.unread(seen.freeze());
    http2
}
