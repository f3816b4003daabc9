//! The transport of a connection: a TCP or Unix socket, or TLS over one.

use std::{
    io, mem, net,
    os::{
        fd::{AsRawFd, RawFd},
        unix,
    },
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::server::TlsStream;

/// One type for all, so that the code above it is compiled once.
#[derive(Debug)]
pub(super) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
    /// Boxed: a TLS session is large and would be moved often.
    Tls(Box<TlsStream<ClientStream>>),
    /// Deregistered from the runtime, which holds no memory for it.
    Parked(ParkedSocket),
    /// Deregistering or registering failed: closed.
    Gone,
}

/// A socket that is not registered with a runtime.
#[derive(Debug)]
pub(super) enum ParkedSocket {
    Tcp(net::TcpStream),
    Unix(unix::net::UnixStream),
}

impl ClientStream {
    /// The socket below TLS, if any.
    pub(super) fn socket_mut(&mut self) -> &mut Self {
        match self {
            Self::Tls(session) => session.get_mut().0.socket_mut(),
            socket => socket,
        }
    }

    /// Deregisters the socket from the runtime, which keeps some hundred bytes for each. Until
    /// `wake`, it can only be closed or polled by its descriptor.
    pub(super) fn rest(&mut self) -> io::Result<()> {
        if let Self::Tls(session) = self {
            return session.get_mut().0.rest();
        }
        *self = match mem::replace(self, Self::Gone) {
            Self::Tcp(socket) => Self::Parked(ParkedSocket::Tcp(socket.into_std()?)),
            Self::Unix(socket) => Self::Parked(ParkedSocket::Unix(socket.into_std()?)),
            other => other,
        };
        Ok(())
    }

    /// Registers the socket with the runtime of this thread again.
    pub(super) fn wake(&mut self) -> io::Result<()> {
        if let Self::Tls(session) = self {
            return session.get_mut().0.wake();
        }
        *self = match mem::replace(self, Self::Gone) {
            Self::Parked(ParkedSocket::Tcp(socket)) => Self::Tcp(TcpStream::from_std(socket)?),
            Self::Parked(ParkedSocket::Unix(socket)) => Self::Unix(UnixStream::from_std(socket)?),
            other => other,
        };
        Ok(())
    }
}

impl AsRawFd for ClientStream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Tcp(socket) => socket.as_raw_fd(),
            Self::Unix(socket) => socket.as_raw_fd(),
            Self::Tls(session) => session.get_ref().0.as_raw_fd(),
            Self::Parked(ParkedSocket::Tcp(socket)) => socket.as_raw_fd(),
            Self::Parked(ParkedSocket::Unix(socket)) => socket.as_raw_fd(),
            Self::Gone => -1,
        }
    }
}

macro_rules! each {
    ($stream:expr, $method:ident($($argument:expr),*)) => {
        match $stream.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).$method($($argument),*),
            Self::Unix(socket) => Pin::new(socket).$method($($argument),*),
            Self::Tls(session) => Pin::new(session).$method($($argument),*),
            Self::Parked(_) | Self::Gone => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    };
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, poll_read(cx, buf))
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, poll_write_vectored(cx, bufs))
    }

    /// All kinds write several slices in one call.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, poll_shutdown(cx))
    }
}
