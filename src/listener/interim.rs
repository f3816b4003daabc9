//! Interim responses, mainly 103 (Early Hints), on their way to an HTTP/1.1 client.
//!
//! hyper cannot send them, so they are written to the socket beside it. That is safe only while
//! hyper flushes: its buffer is then empty, and the bytes sent so far end with a complete message.
//! If hyper writes first, the interim responses are dropped, since a hint is worthless after the
//! response.
//!
//! HTTP/2 clients get none: frames of many streams interleave, so no such moment exists.

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BufMut as _, BytesMut};
use http::{HeaderMap, StatusCode};
use tokio::io::AsyncWrite;

/// Bytes that may wait to be written; more are dropped.
const MAX_BYTES: usize = 64 * 1024;

/// The unsent interim responses of one connection.
#[derive(Debug, Default)]
pub(super) struct Interim {
    unsent: RefCell<BytesMut>,
    /// Whether part of the first one has been sent. Then its rest must come next.
    begun: Cell<bool>,
}

impl Interim {
    /// Queues one for the next flush. `false` if there is no room.
    pub(super) fn push(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        let mut unsent = self.unsent.borrow_mut();
        let fields: usize = headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + 4)
            .sum();
        if unsent.len() + fields + 64 > MAX_BYTES {
            return false;
        }
        unsent.put_slice(b"HTTP/1.1 ");
        unsent.put_slice(status.as_str().as_bytes());
        unsent.put_u8(b' ');
        unsent.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
        unsent.put_slice(b"\r\n");
        for (name, value) in headers {
            unsent.put_slice(name.as_str().as_bytes());
            unsent.put_slice(b": ");
            unsent.put_slice(value.as_bytes());
            unsent.put_slice(b"\r\n");
        }
        unsent.put_slice(b"\r\n");
        true
    }

    /// Called when hyper has nothing more to write: sends the queue. Ready when it is empty.
    pub(super) fn poll_send(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let mut unsent = self.unsent.borrow_mut();
        while !unsent.is_empty() {
            let wrote = ready!(Pin::new(&mut *io).poll_write(cx, &unsent))?;
            if wrote == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.advance(wrote);
            self.begun.set(true);
        }
        if self.begun.replace(false) {
            // free the memory: the connection may go idle
            *unsent = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Called before hyper writes: finishes an interim response that is partly sent, and drops the
    /// rest.
    pub(super) fn poll_make_way(
        &self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if self.begun.get() {
            return self.poll_send(io, cx);
        }
        if !self.unsent.borrow().is_empty() {
            self.unsent.take();
        }
        Poll::Ready(Ok(()))
    }
}
