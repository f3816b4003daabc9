//! Accepts connections on one worker. A failed accept never ends the loop, and a panic costs one
//! connection.

use std::{
    cell::RefCell,
    io,
    net::{IpAddr, Ipv4Addr},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use super::{
    bind::{BACKLOG, ListeningSocket},
    connections_per_address,
    drain::Drain,
    handler::Handler,
    idle_connections,
    observer::Observer,
    serve::{self, AcceptedConnection, ConnectionTerms},
    settings::ListenerSettings,
    tls::Handshakes,
};

/// The address of peers on a Unix socket: they have none, and every process that can open the
/// socket is local.
pub const UNIX_PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// One listening socket on one worker.
#[derive(Debug)]
pub struct Listener {
    /// Apply to connections accepted from now on.
    terms: RefCell<ConnectionTerms>,
    drain: Rc<Drain>,
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
        tokio::task::spawn_local(resume_parked(Rc::clone(&house), watch, Rc::clone(&self)));
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
        accepted: AcceptedConnection,
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
async fn resume_parked<H: Handler, O: Observer + 'static>(
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
    fn rest(self) -> io::Result<Vec<AcceptedConnection>> {
        // bounded by the queue length, or a flood would keep the process from ending
        let mut rest = Vec::new();
        match self {
            Self::Tcp(listener) => {
                let listener = listener.into_std()?;
                while let Some((stream, peer)) = waiting(listener.accept(), rest.len()) {
                    stream.set_nonblocking(true)?;
                    let stream = TcpStream::from_std(stream)?;
                    no_delay(&stream);
                    rest.push(AcceptedConnection::tcp(stream, peer.ip()));
                }
            }
            Self::Unix(listener) => {
                let listener = listener.into_std()?;
                while let Some((stream, _)) = waiting(listener.accept(), rest.len()) {
                    stream.set_nonblocking(true)?;
                    let stream = UnixStream::from_std(stream)?;
                    rest.push(AcceptedConnection::unix(
                        stream,
                        IpAddr::V4(Ipv4Addr::LOCALHOST),
                    ));
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

    async fn accept(&self) -> io::Result<AcceptedConnection> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                no_delay(&stream);
                Ok(AcceptedConnection::tcp(stream, peer.ip()))
            }
            Self::Unix(listener) => Ok(AcceptedConnection::unix(
                listener.accept().await?.0,
                UNIX_PEER,
            )),
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
