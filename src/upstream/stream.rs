//! The transport of a connection to a server: TCP, TLS or Unix socket.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::client::TlsStream;

/// A socket to a server.
#[derive(Debug)]
pub(super) enum ServerStream {
    Tcp(TcpStream),
    Unix(UnixStream),
    /// Boxed: much larger than the other variants.
    Tls(Box<TlsStream<TcpStream>>),
}

impl ServerStream {
    /// Makes the close a reset, so that the server's next write fails. If that is impossible, the
    /// close is a regular one.
    pub(super) fn reset(&self) {
        let reset = match self {
            Self::Tcp(socket) => socket.set_zero_linger(),
            Self::Tls(session) => session.get_ref().0.set_zero_linger(),
            // closing it already makes the peer's writes fail
            Self::Unix(_) => Ok(()),
        };
        if let Err(error) = reset {
            tracing::debug!(%error, "cannot reset a connection; closing it normally");
        }
    }
}

macro_rules! on_stream {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            ServerStream::Tcp($inner) => $call,
            ServerStream::Unix($inner) => $call,
            ServerStream::Tls($inner) => $call,
        }
    };
}

impl AsyncRead for ServerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_stream!(self, inner => Pin::new(inner).poll_read(cx, buf))
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        on_stream!(self, inner => Pin::new(inner).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_stream!(self, inner => Pin::new(inner).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, inner => Pin::new(inner).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, inner => Pin::new(inner).poll_shutdown(cx))
    }
}
