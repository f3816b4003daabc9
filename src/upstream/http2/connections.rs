//! The HTTP/2 connections of one worker to one server.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::{sync::Notify, time::Instant};

use crate::receive_buffer::ReceiveBuffers;

/// The connections that accept new exchanges.
#[derive(Debug, Default)]
pub(in crate::upstream) struct H2Pool {
    pub(super) open: RefCell<Vec<Rc<H2Connection>>>,
    /// Whether a connection is being opened. Others wait for it instead of opening their own.
    pub(super) opening: Cell<bool>,
    pub(super) changed: Notify,
}

/// One connection.
#[derive(Debug)]
pub(super) struct H2Connection {
    /// Its remote address, if TCP.
    pub(super) address: Option<SocketAddr>,
    pub(super) sender: SendRequest<Bytes>,
    pub(super) buffers: Rc<ReceiveBuffers>,
    pub(super) streams: Cell<usize>,
    pub(super) idle_since: Cell<Instant>,
}

impl H2Connection {
    fn has_room(&self) -> bool {
        self.streams.get() < self.sender.current_max_send_streams()
    }

    /// Whether neither side has ended the connection, or is about to.
    fn takes_more(&self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        !matches!(self.sender.clone().poll_ready(&mut cx), Poll::Ready(Err(_)))
    }
}

impl H2Pool {
    pub(super) fn with_room(&self) -> Option<Rc<H2Connection>> {
        let mut open = self.open.borrow_mut();
        loop {
            let at = open.iter().position(|line| line.has_room())?;
            if open[at].takes_more() {
                return Some(Rc::clone(&open[at]));
            }
            open.remove(at);
        }
    }

    pub(super) fn forget(&self, line: &Rc<H2Connection>) {
        self.open
            .borrow_mut()
            .retain(|open| !Rc::ptr_eq(open, line));
        self.changed.notify_waiters();
    }

    /// Drops connections that have been idle for too long, or whose address the server no longer
    /// has. A connection ends with its last permit.
    pub(in crate::upstream) fn sweep(
        &self,
        idle_timeout: Duration,
        now: Instant,
        is_at: impl Fn(Option<SocketAddr>) -> bool,
    ) {
        self.open.borrow_mut().retain(|line| {
            let idle = now.saturating_duration_since(line.idle_since.get());
            (line.streams.get() > 0 || idle < idle_timeout) && is_at(line.address)
        });
    }

    /// Drops all connections; exchanges in flight may end.
    pub(in crate::upstream) fn retire(&self) {
        self.open.borrow_mut().clear();
    }
}

/// Marks that a connection is being opened, until dropped.
pub(super) struct PendingConnection<'a>(&'a H2Pool);

impl<'a> PendingConnection<'a> {
    pub(super) fn begin(lines: &'a H2Pool) -> Self {
        lines.opening.set(true);
        Self(lines)
    }
}

impl Drop for PendingConnection<'_> {
    fn drop(&mut self) {
        self.0.opening.set(false);
        self.0.changed.notify_waiters();
    }
}
