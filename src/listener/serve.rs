//! One connection: detects the HTTP version, then calls the handler for each request.

use std::{
    future::poll_fn,
    io,
    net::IpAddr,
    os::fd::{AsRawFd, RawFd},
    rc::Rc,
    sync::Arc,
};

use bytes::BytesMut;
use tokio::{
    net::{TcpStream, UnixStream},
    sync::OwnedSemaphorePermit,
    time::Instant,
};

use super::{
    clock::Clock,
    connections_per_address::{ConnectionPermit, ConnectionsPerAddress},
    drain::ConnectionGuard,
    handler::Handler,
    http1, http2,
    idle_connections::IdleConnections,
    inbound::ReadError,
    observer::Observer,
    peer::Peer,
    protocol::Protocol,
    proxy_protocol::{self, Received},
    settings::ListenerSettings,
    stream::ClientStream,
    timed_io::TimedIo,
    tls::Handshakes,
};
use crate::identity::ClientCertificate;

/// The settings of a connection.
#[derive(Clone, Debug)]
pub(super) struct ConnectionTerms {
    pub(super) settings: Rc<ListenerSettings>,
    /// For connections with TLS.
    pub(super) handshakes: Option<Rc<Handshakes>>,
    /// Counts the connections per address.
    pub(super) connections_per_address: Arc<ConnectionsPerAddress>,
}

/// An accepted connection, not yet served.
#[derive(Debug)]
pub(super) struct AcceptedConnection {
    stream: ClientStream,
    peer: IpAddr,
}

impl AcceptedConnection {
    pub(super) fn tcp(stream: TcpStream, peer: IpAddr) -> Self {
        Self {
            stream: ClientStream::Tcp(stream),
            peer,
        }
    }

    pub(super) fn unix(stream: UnixStream, peer: IpAddr) -> Self {
        Self {
            stream: ClientStream::Unix(stream),
            peer,
        }
    }

    /// The client's address, from the PROXY header if one is required.
    async fn announced(
        &mut self,
        settings: &ListenerSettings,
        ticket: &ConnectionGuard,
    ) -> Result<Received, proxy_protocol::ProxyProtocolFault> {
        let (required, patience) = (&settings.proxy_protocol, settings.header_timeout);
        let peer = self.peer;
        proxy_protocol::receive(required, peer, &mut self.stream, patience, ticket).await
    }
}

/// Context of all connections of one listener.
pub(super) struct ConnectionContext<H, O: Observer> {
    pub(super) handler: Rc<H>,
    pub(super) observer: Rc<O>,
    /// The idle connections.
    pub(super) lot: IdleConnections<ParkedConnection<O::Open>>,
}

/// Resources of a connection from accept to close.
pub(super) struct ConnectionResources<K> {
    ticket: ConnectionGuard,
    /// Counts it among the connections of its address.
    place: Option<ConnectionPermit>,
    _permit: Option<OwnedSemaphorePermit>,
    _open: K,
}

impl<K> ConnectionResources<K> {
    pub(super) fn new(
        ticket: ConnectionGuard,
        permit: Option<OwnedSemaphorePermit>,
        open: K,
    ) -> Self {
        Self {
            ticket,
            place: None,
            _permit: permit,
            _open: open,
        }
    }
}

/// An idle connection: all its remaining state.
pub(super) struct ParkedConnection<K> {
    stream: ClientStream,
    since: Instant,
    ip: IpAddr,
    listener: Rc<ListenerSettings>,
    certificate: Option<Rc<ClientCertificate>>,
    held: ConnectionResources<K>,
}

impl<K> AsRawFd for ParkedConnection<K> {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// Serves a connection from its first byte.
///
/// Many connections send nothing for a while, so their size matters. State of the handshake or of
/// one protocol is boxed: allocated when needed, freed when done.
pub(super) async fn connection<H: Handler, O: Observer>(
    accepted: AcceptedConnection,
    terms: ConnectionTerms,
    house: Rc<ConnectionContext<H, O>>,
    held: ConnectionResources<O::Open>,
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

/// Resumes a parked connection: it is readable or due.
pub(super) async fn again<H: Handler, O: Observer>(
    parked: ParkedConnection<O::Open>,
    house: Rc<ConnectionContext<H, O>>,
) {
    let ParkedConnection {
        mut stream,
        since,
        ip,
        listener,
        certificate,
        held,
    } = parked;
    // do not read first: tokio assumes that a new socket is blocked, so the response would wait a
    // turn
    if let Err(error) = stream.wake() {
        tracing::debug!(%error, "cannot resume an idle connection; closing it");
        return;
    }
    let clock = Clock::new(listener.header_timeout, listener.idle_timeout).parked(since);
    let peer = Rc::new(Peer::new(ip, listener, certificate, clock));
    let io = timed(stream, &peer);
    speak(io, Protocol::Http1, peer, house, held).await;
}

/// Reads the client's address, counts the connection, and runs the handshake; `None` if any of
/// these closes it.
async fn begin<O: Observer>(
    mut accepted: AcceptedConnection,
    terms: ConnectionTerms,
    observer: &O,
    mut held: ConnectionResources<O::Open>,
) -> Option<(
    ClientStream,
    Option<Protocol>,
    Rc<Peer>,
    ConnectionResources<O::Open>,
)> {
    let ConnectionTerms {
        settings,
        handshakes,
        connections_per_address: crowd,
    } = terms;
    let ip = match accepted.announced(&settings, &held.ticket).await {
        Ok(Received::From(ip)) => ip,
        Ok(Received::Nothing) => return None,
        Err(fault) => {
            observer.proxy_protocol_failed(accepted.peer, fault);
            return None;
        }
    };
    // peers on a Unix socket all have one address
    if matches!(accepted.stream, ClientStream::Tcp(_)) || ip != accepted.peer {
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

fn timed(stream: ClientStream, peer: &Peer) -> Box<TimedIo> {
    let (clock, interim) = (Rc::clone(&peer.clock), Rc::clone(&peer.interim));
    Box::new(TimedIo::new(stream, clock, interim))
}

/// Serves requests until the connection ends or is parked.
async fn speak<H: Handler, O: Observer>(
    io: Box<TimedIo>,
    protocol: Protocol,
    peer: Rc<Peer>,
    house: Rc<ConnectionContext<H, O>>,
    held: ConnectionResources<O::Open>,
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
            // a client that leaves or sends garbage is no error of ours
            tracing::debug!(%error, "connection ended early");
            Ok(())
        }
    };
    if let Err(error) = parked {
        // closing is harmless: the idle timeout would have closed it soon
        tracing::debug!(%error, "cannot park an idle connection; closing it");
    }
}

fn park<H, O: Observer>(
    mut stream: ClientStream,
    peer: &Peer,
    house: &ConnectionContext<H, O>,
    held: ConnectionResources<O::Open>,
) -> io::Result<()> {
    let since = peer.clock.idle_since().unwrap_or_else(Instant::now);
    let until = since + peer.clock.idle_timeout();
    stream.rest()?;
    held.ticket.drop_waker();
    let parked = ParkedConnection {
        stream,
        since,
        ip: peer.ip,
        listener: Rc::clone(&peer.listener),
        certificate: peer.certificate.clone(),
        held,
    };
    house.lot.park(parked, until)
}

/// The HTTP/2 client preface (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Reads just enough to tell HTTP/2 from HTTP/1, and unreads it. Bounded by the header timeout.
async fn first_protocol(io: &mut TimedIo, ticket: &ConnectionGuard) -> Protocol {
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
