//! The I/O of the h2 crate for one connection: fair turns, and every frame passed to the abuse
//! accounting.

use std::{
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    super::{clock::Clock, timed_io::TimedIo},
    frame_meter::{FrameHead, FrameMeter},
};
use crate::receive_buffer::ReceiveBuffers;

/// The socket of an HTTP/2 connection.
pub(super) struct FrameIo {
    io: Box<TimedIo>,
    buffers: Rc<ReceiveBuffers>,
    meter: FrameMeter,
    clock: Rc<Clock>,
}

impl FrameIo {
    pub(super) fn new(io: Box<TimedIo>, buffers: Rc<ReceiveBuffers>, clock: Rc<Clock>) -> Self {
        Self {
            io,
            buffers,
            meter: FrameMeter::default(),
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
        if !this.buffers.may_read() {
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        let bytes = &buf.filled()[before..];
        this.buffers.read(bytes.len());
        this.meter.read(bytes, |frame| {
            if frame.kind == FrameHead::DATA {
                this.buffers.data_arrived(u64::from(frame.content_bytes()));
            }
            this.clock.frame(&frame);
        });
        Poll::Ready(match this.clock.cut() {
            Some(cut) if !bytes.is_empty() => Err(io::Error::other(cut)),
            _ => Ok(()),
        })
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
