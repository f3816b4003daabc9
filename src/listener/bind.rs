//! Binds an address: one listening socket for each worker, shared through SO_REUSEPORT.

use std::{
    io,
    net::SocketAddr,
    os::unix::{fs::FileTypeExt as _, net::UnixListener as StdUnixListener},
    path::{Path, PathBuf},
};

use socket2::{Domain, Protocol, Socket, Type};

use super::inherited;

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

/// Length of the accept queue per socket.
pub(super) const BACKLOG: i32 = 4096;

/// Binds one address for `workers` workers. Fails if the address is in use or may not be bound.
pub fn bind(address: &BindAddress, workers: usize, company: BindMode) -> io::Result<BoundListener> {
    match address {
        BindAddress::Tcp(address) => bind_tcp(*address, workers, company),
        BindAddress::Unix(path) => bind_unix(path, workers),
        BindAddress::Systemd(name) => inherit(name, workers),
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
fn inherit(name: &str, workers: usize) -> io::Result<BoundListener> {
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
