//! Handover of a client connection that leaves HTTP after a 101.

use std::{
    fmt,
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Runs the connection after it has left HTTP, until it ends.
pub type Takeover = Box<dyn FnOnce(ClientEnd) -> Pin<Box<dyn Future<Output = ()>>>>;

/// The client side of a connection that has left HTTP. It still closes itself if the client reads
/// none of the pending bytes for `idle_timeout`.
pub struct ClientEnd(Box<dyn ByteStream>);

trait ByteStream: AsyncRead + AsyncWrite + Unpin {}

impl<S: AsyncRead + AsyncWrite + Unpin> ByteStream for S {}

impl ClientEnd {
    pub(super) fn new(stream: impl AsyncRead + AsyncWrite + Unpin + 'static) -> Self {
        Self(Box::new(stream))
    }
}

impl fmt::Debug for ClientEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientEnd").finish_non_exhaustive()
    }
}

impl AsyncRead for ClientEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientEnd {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
