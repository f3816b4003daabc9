//! One connection: which HTTP it speaks, then its requests, one handler call each.

use std::{
    cell::RefCell,
    fmt,
    future::{Future, poll_fn},
    io,
    net::IpAddr,
    os::fd::{AsRawFd, RawFd},
    pin::Pin,
    rc::Rc,
    task::Poll,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body;
use tokio::{
    net::{TcpStream, UnixStream},
    sync::OwnedSemaphorePermit,
    time::Instant,
};

use super::{
    Observer, Settings, Terms,
    clock::Clock,
    crowd::Place,
    drain::Ticket,
    handover::Takeover,
    http1, http2,
    inbound::{ReadError, RequestBody},
    interim::Interim,
    ledger::Cut,
    lot::Lot,
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
        request: Request<RequestBody>,
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
    pub certificate: Option<Rc<Certificate>>,
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
    fn new(
        ip: IpAddr,
        listener: Rc<Settings>,
        certificate: Option<Rc<Certificate>>,
        clock: Clock,
    ) -> Self {
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
    pub fn described(
        ip: IpAddr,
        listener: Rc<Settings>,
        certificate: Option<Rc<Certificate>>,
    ) -> Self {
        let clock = Clock::new(listener.header_timeout, listener.idle_timeout);
        Self::new(ip, listener, certificate, clock)
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

    /// Whether an HTTP/2 stream has failed because its connection is cut short, and why.
    pub(super) fn why_cut(&self, error: &h2::Error) -> Option<Cut> {
        self.clock.why_cut(error)
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

/// What the connections of one entrance are served with.
pub(super) struct House<H, O: Observer> {
    pub(super) handler: Rc<H>,
    pub(super) observer: Rc<O>,
    /// Where they wait when they are idle.
    pub(super) lot: Lot<Parked<O::Open>>,
}

/// What a connection holds from its acceptance to its end.
pub(super) struct Held<K> {
    ticket: Ticket,
    /// Among the connections of its address.
    place: Option<Place>,
    _permit: Option<OwnedSemaphorePermit>,
    _open: K,
}

impl<K> Held<K> {
    pub(super) fn new(ticket: Ticket, permit: Option<OwnedSemaphorePermit>, open: K) -> Self {
        Self {
            ticket,
            place: None,
            _permit: permit,
            _open: open,
        }
    }
}

/// A connection that is idle: all that there is of it.
pub(super) struct Parked<K> {
    stream: Stream,
    since: Instant,
    ip: IpAddr,
    listener: Rc<Settings>,
    certificate: Option<Rc<Certificate>>,
    held: Held<K>,
}

impl<K> AsRawFd for Parked<K> {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// Serves a connection from its first byte.
///
/// Many send nothing for a while, so what each holds is counted: what belongs to the beginning, or to what is spoken, is boxed,
/// and not there before it begins or when it is over.
pub(super) async fn connection<H: Handler, O: Observer>(
    accepted: Accepted,
    terms: Terms,
    house: Rc<House<H, O>>,
    held: Held<O::Open>,
) {
    let begun = Box::pin(begin(accepted, terms, &*house.observer, held)).await;
    let Some((stream, agreed, peer, held)) = begun else {
        return;
    };
    let mut io = timed(stream, &peer);
    let protocol = match agreed {
        Some(protocol) => protocol,
        None if peer.listener.http2 => first_protocol(&mut io, &held.ticket).await,
        None => Protocol::Http1,
    };
    Box::pin(speak(io, protocol, peer, house, held)).await;
}

/// Goes on with a connection that was parked: there is something to read, or it is time to end.
pub(super) async fn again<H: Handler, O: Observer>(
    parked: Parked<O::Open>,
    house: Rc<House<H, O>>,
) {
    let Parked {
        mut stream,
        since,
        ip,
        listener,
        certificate,
        held,
    } = parked;
    // nothing is read before: what the runtime has not seen yet it takes for blocked, and an answer would wait for a turn
    if let Err(error) = stream.wake() {
        tracing::debug!(%error, "an idle connection is lost");
        return;
    }
    let clock = Clock::new(listener.header_timeout, listener.idle_timeout).parked(since);
    let peer = Rc::new(Peer::new(ip, listener, certificate, clock));
    let io = timed(stream, &peer);
    speak(io, Protocol::Http1, peer, house, held).await;
}

/// Whose connection it is, whether there is room for it, and the handshake with what it agrees on; `None` where it ends with that.
async fn begin<O: Observer>(
    mut accepted: Accepted,
    terms: Terms,
    observer: &O,
    mut held: Held<O::Open>,
) -> Option<(Stream, Option<Protocol>, Rc<Peer>, Held<O::Open>)> {
    let Terms {
        settings,
        handshakes,
        crowd,
    } = terms;
    let ip = match accepted.announced(&settings, &held.ticket).await {
        Ok(Received::From(ip)) => ip,
        Ok(Received::Nothing) => return None,
        Err(fault) => {
            observer.not_believed(accepted.peer, fault);
            return None;
        }
    };
    // peers on a Unix socket look alike
    if matches!(accepted.stream, Stream::Tcp(_)) || ip != accepted.peer {
        held.place = crowd.enter(ip, &settings.per_address);
        if held.place.is_none() {
            observer.crowded(ip);
            return None;
        }
    }
    let (stream, agreed, certificate) = match handshakes {
        None => (accepted.stream, None, None),
        Some(handshakes) => {
            let handshake = handshakes.accept(accepted.stream, settings.header_timeout);
            let (stream, secured) = Box::pin(handshake).await?;
            (stream, Some(secured.protocol), secured.certificate)
        }
    };
    let clock = Clock::new(settings.header_timeout, settings.idle_timeout);
    let peer = Rc::new(Peer::new(ip, settings, certificate, clock));
    Some((stream, agreed, peer, held))
}

fn timed(stream: Stream, peer: &Peer) -> Box<TimedIo> {
    let (clock, interim) = (Rc::clone(&peer.clock), Rc::clone(&peer.interim));
    Box::new(TimedIo::new(stream, clock, interim))
}

/// Serves requests until the connection ends, or is parked.
async fn speak<H: Handler, O: Observer>(
    io: Box<TimedIo>,
    protocol: Protocol,
    peer: Rc<Peer>,
    house: Rc<House<H, O>>,
    held: Held<O::Open>,
) {
    let (handler, ticket) = (&house.handler, &held.ticket);
    let served = match protocol {
        Protocol::Http1 => http1::serve(io, &peer, handler, ticket)
            .await
            .map_err(ReadError::from),
        Protocol::Http2 => {
            let (peer, handler) = (Rc::clone(&peer), Rc::clone(handler));
            let served = Box::pin(http2::serve(io, peer, handler, ticket)).await;
            served.map(|()| None).map_err(ReadError::from)
        }
    };
    if let Some(cut) = peer.clock.cut() {
        house.observer.cut(cut);
    }
    let parked = match served {
        Ok(Some(idle)) => park(idle.into_stream(), &peer, &house, held),
        Ok(None) => Ok(()),
        Err(error) => {
            // a client that leaves or talks nonsense is its own business
            tracing::debug!(%error, "connection ended early");
            Ok(())
        }
    };
    if let Err(error) = parked {
        // its next request would have found it closed a little later
        tracing::debug!(%error, "an idle connection cannot be parked, and is closed");
    }
}

fn park<H, O: Observer>(
    mut stream: Stream,
    peer: &Peer,
    house: &House<H, O>,
    held: Held<O::Open>,
) -> io::Result<()> {
    let since = peer.clock.idle_since().unwrap_or_else(Instant::now);
    let until = since + peer.clock.idle_timeout();
    stream.rest()?;
    held.ticket.wakes_nobody();
    let parked = Parked {
        stream,
        since,
        ip: peer.ip,
        listener: Rc::clone(&peer.listener),
        certificate: peer.certificate.clone(),
        held,
    };
    house.lot.park(parked, until)
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

/// What an HTTP/2 client sends first (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Reads just enough to tell HTTP/2 from HTTP/1, and gives it back. Bounded by the header timeout.
async fn first_protocol(io: &mut TimedIo, ticket: &Ticket) -> Protocol {
    let mut seen = BytesMut::new();
    while seen.len() < PREFACE.len() && PREFACE.starts_with(&seen) {
        let is_first = seen.is_empty();
        match poll_fn(|cx| io.poll_read_some(ticket, is_first, &mut seen, cx)).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let protocol = match seen.starts_with(PREFACE) {
        true => Protocol::Http2,
        false => Protocol::Http1,
    };
    io.unread(seen.freeze());
    protocol
}
