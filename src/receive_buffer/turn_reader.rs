//! Reads a connection in turns: at most so many bytes and frames before the h2 crate's buffers are
//! emptied.

use std::{
    io,
    task::{Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tokio::io::ReadBuf;

use super::{FrameHead, ReceiveBuffers, frame_meter::FrameMeter};

/// The reading side of one connection.
#[derive(Debug)]
pub struct TurnReader {
    meter: FrameMeter,
    /// Bytes that were read but belong to later turns: at most one read of the h2 crate.
    held: Bytes,
}

/// Held bytes that are passed on at a time. They contain many small frames, so a turn takes few.
const HELD_PIECE_BYTES: usize = 4 * 1024;

impl TurnReader {
    /// Reads the bytes of a client.
    pub fn of_client() -> Self {
        Self {
            meter: FrameMeter::of_client(),
            held: Bytes::new(),
        }
    }

    /// Reads the bytes of a server.
    pub fn of_server() -> Self {
        Self {
            meter: FrameMeter::of_server(),
            held: Bytes::new(),
        }
    }

    /// Passes on as many bytes as this turn allows, from `read` or left by earlier turns, and calls
    /// `show` for each of their frames. Pending at the end of the turn: then
    /// [`ReceiveBuffers::end_turn`] wakes the task.
    pub fn poll_read(
        &mut self,
        buffers: &ReceiveBuffers,
        buf: &mut ReadBuf<'_>,
        read: impl FnOnce(&mut ReadBuf<'_>) -> Poll<io::Result<()>>,
        mut show: impl FnMut(&FrameHead),
    ) -> Poll<io::Result<()>> {
        if !buffers.may_read() {
            return Poll::Pending;
        }
        let before = buf.filled().len();
        if self.held.is_empty() {
            ready!(read(buf))?;
        } else {
            let piece = self.held.len().min(HELD_PIECE_BYTES).min(buf.remaining());
            buf.put_slice(&self.held[..piece]);
        }
        let bytes = &buf.filled()[before..];
        let passed = self.meter.read(bytes, |frame| {
            buffers.frame_arrived(frame);
            show(frame);
            buffers.may_read()
        });
        buffers.read(passed);
        if !self.held.is_empty() {
            self.held.advance(passed);
        } else if passed < bytes.len() {
            self.held = Bytes::copy_from_slice(&bytes[passed..]);
        }
        buf.set_filled(before + passed);
        Poll::Ready(Ok(()))
    }
}
