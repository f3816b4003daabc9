//! What a connection is read from and written to: a socket of either kind, or TLS over one.

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

/// One type for all, so that what is built on top of it is compiled once.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    /// A session is large, and is boxed once so that it is not moved about.
    Tls(Box<TlsStream<Stream>>),
    /// Nothing waits for it here, and the runtime holds nothing for it.
    Resting(Resting),
    /// It could not be put to rest, or woken: closed.
    Gone,
}

/// A socket that no runtime knows.
#[derive(Debug)]
pub(super) enum Resting {
    Tcp(net::TcpStream),
    Unix(unix::net::UnixStream),
}

impl Stream {
    /// Below TLS, where there is any.
    pub(super) fn socket_mut(&mut self) -> &mut Self {
        match self {
            Self::Tls(session) => session.get_mut().0.socket_mut(),
            socket => socket,
        }
    }

    /// Takes the socket from the runtime, which keeps some hundred bytes for each that it waits for. Until it is woken, it
    /// can only be closed, or waited for by its descriptor.
    pub(super) fn rest(&mut self) -> io::Result<()> {
        if let Self::Tls(session) = self {
            return session.get_mut().0.rest();
        }
        *self = match mem::replace(self, Self::Gone) {
            Self::Tcp(socket) => Self::Resting(Resting::Tcp(socket.into_std()?)),
            Self::Unix(socket) => Self::Resting(Resting::Unix(socket.into_std()?)),
            other => other,
        };
        Ok(())
    }

    /// Gives it back to the runtime of this thread.
    pub(super) fn wake(&mut self) -> io::Result<()> {
        if let Self::Tls(session) = self {
            return session.get_mut().0.wake();
        }
        *self = match mem::replace(self, Self::Gone) {
            Self::Resting(Resting::Tcp(socket)) => Self::Tcp(TcpStream::from_std(socket)?),
            Self::Resting(Resting::Unix(socket)) => Self::Unix(UnixStream::from_std(socket)?),
            other => other,
        };
        Ok(())
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Tcp(socket) => socket.as_raw_fd(),
            Self::Unix(socket) => socket.as_raw_fd(),
            Self::Tls(session) => session.get_ref().0.as_raw_fd(),
            Self::Resting(Resting::Tcp(socket)) => socket.as_raw_fd(),
            Self::Resting(Resting::Unix(socket)) => socket.as_raw_fd(),
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
            Self::Resting(_) | Self::Gone => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
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

    /// All kinds write many slices with one call.
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
