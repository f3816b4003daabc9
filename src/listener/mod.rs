//! From bytes to requests: bind, accept, enforce bounds, serve connections.
//!
//! Every worker has its own listening socket for each address (SO_REUSEPORT), so a connection is
//! accepted, served and closed on one thread. A failed accept never ends the loop; a panic costs
//! one connection.

pub mod body_buffers;
pub mod clock;
pub mod connections_per_address;
mod date;
pub mod drain;
pub mod handover;
mod http1;
mod http2;
pub mod inbound;
mod inherited;
mod interim;
mod abuse;
mod idle_connections;
pub mod proxy_protocol;
pub mod request;
pub mod serve;
mod stream;
mod streams;
mod timed_io;
pub mod tls;

use std::{
    cell::RefCell,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::{fs::FileTypeExt as _, net::UnixListener as StdUnixListener},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

pub use abuse::AbuseReason;
pub use drain::{Drain, released_connections};
pub use handover::ClientEnd;
pub use http2::StreamRequestBody;
pub use proxy_protocol::ProxyProtocol;
pub use serve::{Accepted, Handler, Peer};
pub use tls::{Handshakes, ListenerTls};

/// One `[[listen]]` table.
#[derive(Clone, Debug)]
pub struct ListenerSettings {
    /// Where to listen.
    pub address: BindAddress,
    /// Whether to accept HTTP/2 besides HTTP/1.1: by ALPN over TLS, with prior knowledge in
    /// cleartext.
    pub http2: bool,
    /// Whether connections begin with a PROXY header.
    pub proxy_protocol: ProxyProtocol,
    /// Time for a complete request head.
    pub header_timeout: Duration,
    /// Longest silence while a request body arrives.
    pub body_timeout: Duration,
    /// Minimum average pace of a request body in bytes per second, after `body_timeout` of waiting.
    pub min_body_rate: u64,
    /// Longest idle time between requests.
    pub idle_timeout: Duration,
    /// Most bytes of a request head.
    pub max_header_bytes: usize,
    /// Most fields of a request head.
    pub max_header_count: usize,
    /// Most bytes of a request target.
    pub max_uri_bytes: usize,
    /// Most bytes of a request body.
    pub max_body_bytes: u64,
    /// Most concurrent HTTP/2 streams per connection.
    pub max_streams: u32,
    /// Bound on connections per address.
    pub per_address: connections_per_address::AddressLimits,
    /// TLS; `None` for cleartext.
    pub tls: Option<tls::TlsSettings>,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BindAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix domain socket.
    Unix(PathBuf),
    /// Sockets that the service manager opened under this name.
    Systemd(String),
}

/// Whether another process may listen on the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindMode {
    /// No: an address in use is an error.
    Alone,
    /// Another gateway of the same user may, which this one will replace.
    Beside,
}

impl std::fmt::Display for BindAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Systemd(name) => write!(f, "systemd:{name}"),
        }
    }
}

/// A bound address: one listening socket for each worker.
#[derive(Debug)]
pub struct BoundListener {
    /// The actual address: port 0 is resolved.
    pub address: BindAddress,
    /// One per worker.
    pub sockets: Vec<ListeningSocket>,
}

/// A listening socket, not yet registered with a runtime.
#[derive(Debug)]
pub enum ListeningSocket {
    /// TCP, shared with the other workers through SO_REUSEPORT.
    Tcp(std::net::TcpListener),
    /// A Unix socket or an inherited one, duplicated for each worker.
    Unix(StdUnixListener),
}

/// The address of peers on a Unix socket: they have none, and every process that can open the
/// socket is local.
pub const UNIX_PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Length of the accept queue per socket.
const BACKLOG: i32 = 4096;

/// Binds one address for `workers` workers. Fails if the address is in use or may not be bound.
pub fn bind(address: &BindAddress, workers: usize, company: BindMode) -> io::Result<BoundListener> {
    match address {
        BindAddress::Tcp(address) => bind_tcp(*address, workers, company),
        BindAddress::Unix(path) => bind_unix(path, workers),
        BindAddress::Systemd(name) => take_up(name, workers),
    }
}

fn bind_tcp(
    mut address: SocketAddr,
    workers: usize,
    company: BindMode,
) -> io::Result<BoundListener> {
    probe(address, company)?;
    let mut sockets = Vec::with_capacity(workers);
    for _ in 0..workers {
        let listener = shared_listener(address)?;
        address = listener.local_addr()?;
        sockets.push(ListeningSocket::Tcp(listener));
    }
    Ok(BoundListener {
        address: BindAddress::Tcp(address),
        sockets,
    })
}

/// Without this probe a second process would silently share the port: SO_REUSEPORT allows it.
fn probe(address: SocketAddr, company: BindMode) -> io::Result<()> {
    match company {
        BindMode::Alone => std::net::TcpListener::bind(address).map(drop),
        BindMode::Beside => Ok(()),
    }
}

/// Another socket on an address that is shared through SO_REUSEPORT.
fn shared_listener(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// A single listening socket, for pages that no worker serves.
pub fn bind_one(address: SocketAddr, company: BindMode) -> io::Result<std::net::TcpListener> {
    probe(address, company)?;
    shared_listener(address)
}

/// The inherited sockets of this name. Workers share them if there are fewer sockets than workers.
fn take_up(name: &str, workers: usize) -> io::Result<BoundListener> {
    let handed_over = inherited::named(name)?;
    let local = handed_over[0].local_addr()?;
    let address = match (local.as_socket(), local.as_pathname()) {
        (Some(address), _) => BindAddress::Tcp(address),
        (None, Some(path)) => BindAddress::Unix(path.to_owned()),
        (None, None) => BindAddress::Systemd(name.to_owned()),
    };
    if handed_over.len() > workers {
        let why = format!(
            "{} sockets have this name, but there are {workers} workers; each socket needs its own",
            handed_over.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let each = handed_over.iter().cycle().take(workers);
    let sockets = each.map(|socket| {
        let socket = socket.try_clone()?;
        Ok(match address {
            BindAddress::Tcp(_) => ListeningSocket::Tcp(socket.into()),
            BindAddress::Unix(_) | BindAddress::Systemd(_) => ListeningSocket::Unix(socket.into()),
        })
    });
    Ok(BoundListener {
        sockets: sockets.collect::<io::Result<_>>()?,
        address,
    })
}

fn bind_unix(path: &Path, workers: usize) -> io::Result<BoundListener> {
    if let Ok(there) = std::fs::symlink_metadata(path) {
        if !there.file_type().is_socket() {
            let why = "the path exists and is not a socket; remove it or choose another path";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        // a socket without a listener was left by a process that was killed
        match std::os::unix::net::UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?
            }
            _ => return Err(io::ErrorKind::AddrInUse.into()),
        }
    }
    let listener = StdUnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    let sockets = (0..workers)
        .map(|_| listener.try_clone().map(ListeningSocket::Unix))
        .collect::<io::Result<_>>()?;
    Ok(BoundListener {
        address: BindAddress::Unix(path.to_owned()),
        sockets,
    })
}

/// Receives connection events for metrics and logs. Each call is cheap and cannot fail.
pub trait Observer {
    /// Kept while a connection is open.
    type Open: 'static;
    /// A connection was accepted.
    fn opened(&self) -> Self::Open;
    /// An accept failed; the loop continues.
    fn accept_failed(&self, error: &io::Error);
    /// A connection was closed early because of its client's behavior.
    fn cut(&self, why: AbuseReason);
    /// A connection was closed unserved: its address has too many.
    fn crowded(&self, ip: IpAddr);
    /// A connection was closed unserved: its PROXY header was rejected.
    fn not_believed(&self, peer: IpAddr, fault: proxy_protocol::ProxyProtocolFault);
}

/// One listening socket on one worker.
#[derive(Debug)]
pub struct Listener {
    /// Apply to connections accepted from now on.
    terms: RefCell<ConnectionTerms>,
    drain: Rc<Drain>,
}

/// The settings of a connection.
#[derive(Clone, Debug)]
struct ConnectionTerms {
    settings: Rc<ListenerSettings>,
    /// For connections with TLS.
    handshakes: Option<Rc<Handshakes>>,
    /// Counts the connections per address.
    connections_per_address: Arc<connections_per_address::ConnectionsPerAddress>,
}

impl Listener {
    /// Does not accept yet.
    pub fn new(
        settings: ListenerSettings,
        handshakes: Option<Rc<Handshakes>>,
        connections_per_address: Arc<connections_per_address::ConnectionsPerAddress>,
    ) -> Rc<Self> {
        let settings = Rc::new(settings);
        Rc::new(Self {
            terms: RefCell::new(ConnectionTerms {
                settings,
                handshakes,
                connections_per_address,
            }),
            drain: Rc::default(),
        })
    }

    /// Changes the settings of connections accepted from now on.
    pub fn change(&self, settings: ListenerSettings, handshakes: Option<Rc<Handshakes>>) {
        let settings = Rc::new(settings);
        let mut terms = self.terms.borrow_mut();
        terms.settings = settings;
        terms.handshakes = handshakes;
    }

    /// The connections accepted here, and their shutdown.
    pub fn drain(&self) -> &Drain {
        &self.drain
    }

    /// Accepts until the listener closes, then serves the connections still queued. Pauses while no
    /// permit is free.
    pub async fn accept<H: Handler, O: Observer + 'static>(
        self: Rc<Self>,
        socket: ListeningSocket,
        handler: Rc<H>,
        observer: Rc<O>,
        connections: Arc<Semaphore>,
    ) -> io::Result<()> {
        let failed = |error: &io::Error| observer.accept_failed(error);
        let acceptor = Acceptor::register(socket).inspect_err(failed)?;
        let (lot, watch) = idle_connections::IdleConnections::new().inspect_err(failed)?;
        let house = Rc::new(serve::ConnectionContext {
            handler,
            observer,
            lot,
        });
        tokio::task::spawn_local(watch_over(Rc::clone(&house), watch, Rc::clone(&self)));
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.drain.begun() => break,
                accepted = acceptor.accept() => accepted,
            };
            let accepted = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    house.observer.accept_failed(&error);
                    pause_after(&error).await;
                    continue;
                }
            };
            // never closed: the semaphore lives as long as the process
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
                return Ok(());
            };
            self.serve(accepted, &house, Some(permit));
        }
        // closing the socket would reset the connections in its queue
        for accepted in acceptor.rest()? {
            self.serve(accepted, &house, None);
        }
        Ok(())
    }

    fn serve<H: Handler, O: Observer + 'static>(
        &self,
        accepted: Accepted,
        house: &Rc<serve::ConnectionContext<H, O>>,
        permit: Option<OwnedSemaphorePermit>,
    ) {
        let held =
            serve::ConnectionResources::new(self.drain.enter(), permit, house.observer.opened());
        let terms = self.terms.borrow().clone();
        let serving = serve::connection(accepted, terms, Rc::clone(house), held);
        // a panic costs only this connection, which drops its resources; the panic hook has counted
        // and logged it
        tokio::task::spawn_local(serving);
    }
}

/// Resumes parked connections when they are readable or due, until the last has ended.
async fn watch_over<H: Handler, O: Observer + 'static>(
    house: Rc<serve::ConnectionContext<H, O>>,
    watch: idle_connections::IdlePoller,
    entrance: Rc<Listener>,
) {
    let again = |parked| {
        tokio::task::spawn_local(serve::again(parked, Rc::clone(&house)));
    };
    house.lot.watch(watch, entrance.drain.ended(), again).await;
}

/// Backs off after errors that an immediate retry would repeat: out of descriptors or memory.
async fn pause_after(error: &io::Error) {
    // ECONNABORTED, EPROTO: only that connection failed, the next may succeed (accept(2))
    const ONE_CONNECTION: [i32; 2] = [103, 71];
    if !error
        .raw_os_error()
        .is_some_and(|code| ONE_CONNECTION.contains(&code))
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

enum Acceptor {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener),
}

impl Acceptor {
    /// Closes the socket and returns the connections still in its queue.
    fn rest(self) -> io::Result<Vec<Accepted>> {
        // bounded by the queue length, or a flood would keep the process from ending
        let mut rest = Vec::new();
        match self {
            Self::Tcp(listener) => {
                let listener = listener.into_std()?;
                while let Some((stream, peer)) = waiting(listener.accept(), rest.len()) {
                    stream.set_nonblocking(true)?;
                    let stream = TcpStream::from_std(stream)?;
                    no_delay(&stream);
                    rest.push(Accepted::tcp(stream, peer.ip()));
                }
            }
            Self::Unix(listener) => {
                let listener = listener.into_std()?;
                while let Some((stream, _)) = waiting(listener.accept(), rest.len()) {
                    stream.set_nonblocking(true)?;
                    let stream = UnixStream::from_std(stream)?;
                    rest.push(Accepted::unix(stream, IpAddr::V4(Ipv4Addr::LOCALHOST)));
                }
            }
        }
        Ok(rest)
    }

    fn register(socket: ListeningSocket) -> io::Result<Self> {
        Ok(match socket {
            ListeningSocket::Tcp(socket) => Self::Tcp(tokio::net::TcpListener::from_std(socket)?),
            ListeningSocket::Unix(socket) => {
                Self::Unix(tokio::net::UnixListener::from_std(socket)?)
            }
        })
    }

    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                no_delay(&stream);
                Ok(Accepted::tcp(stream, peer.ip()))
            }
            Self::Unix(listener) => Ok(Accepted::unix(listener.accept().await?.0, UNIX_PEER)),
        }
    }
}

/// The next connection in a queue; `None` when it is empty, or after one queue length.
fn waiting<T>(accepted: io::Result<T>, so_far: usize) -> Option<T> {
    accepted.ok().filter(|_| so_far < BACKLOG as usize)
}

fn no_delay(stream: &TcpStream) {
    // fails only if the connection is already gone, and then the first read fails
    let _ = stream.set_nodelay(true);
}
