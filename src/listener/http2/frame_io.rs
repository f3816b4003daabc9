//! The I/O of the h2 crate for one connection: fair turns, and every frame passed to the abuse
//! accounting.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::{clock::Clock, timed_io::TimedIo};
use crate::receive_buffer::{ReceiveBuffers, TurnReader};

/// The socket of an HTTP/2 connection.
pub(super) struct FrameIo {
    io: Box<TimedIo>,
    buffers: Rc<ReceiveBuffers>,
    reader: TurnReader,
    clock: Rc<Clock>,
}

impl FrameIo {
    pub(super) fn new(io: Box<TimedIo>, buffers: Rc<ReceiveBuffers>, clock: Rc<Clock>) -> Self {
        Self {
            io,
            buffers,
            reader: TurnReader::of_client(),
            clock,
        }
    }
}

impl AsyncRead for FrameIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // the connection's task sends GOAWAY; nothing more is read
        if this.clock.cut().is_some() {
            return Poll::Pending;
        }
        let io = &mut this.io;
        let read = |buf: &mut ReadBuf<'_>| Pin::new(io).poll_read(cx, buf);
        let read = this.reader.poll_read(&this.buffers, buf, read, |frame| {
            this.clock.frame(frame);
        });
        ready!(read)?;
        match this.clock.cut() {
            Some(_) => Poll::Pending,
            None => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for FrameIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
