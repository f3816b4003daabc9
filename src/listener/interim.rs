//! Interim responses, 103 (Early Hints) above all, on their way to an HTTP/1.1 client.
//!
//! The HTTP library cannot send them, so they are written past it, at the one moment at which that is safe: when it
//! flushes, it holds nothing back, and what has left so far ends with a whole message. What the library writes before that
//! moment comes overtakes them; then they are dropped, since a hint is worth nothing behind the answer.
//!
//! HTTP/2 clients get none: there is no such moment between the frames of many streams.

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BufMut as _, BytesMut};
use http::{HeaderMap, StatusCode};
use tokio::io::AsyncWrite;

/// Bytes that wait to be written; what does not fit is dropped.
const MAX_BYTES: usize = 64 * 1024;

/// The interim responses of one connection that have not left yet.
#[derive(Debug, Default)]
pub(super) struct Interim {
    unsent: RefCell<BytesMut>,
    /// Whether a part of the first has left already: then the rest of it has to come next.
    begun: Cell<bool>,
}

impl Interim {
    /// Takes one up, to be written at the next flush. `false` where there is no room for it.
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

    /// The library has nothing more to write: writes what waits. Ready when nothing does.
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
            // an idle connection holds no room for it
            *unsent = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }

    /// The library is about to write: what has begun to leave is finished first, the rest is dropped.
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
