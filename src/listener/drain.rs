//! Graceful shutdown of one listener's connections on one worker: stop accepting, finish requests
//! in flight, close the rest at the deadline.
//!
//! ```text
//!   open ─▶ closing: accepts no more; sends GOAWAY (HTTP/2), `Connection: close` (HTTP/1.1)
//!        ─▶ ended:   LAST_CALL later; idle connections are closed
//! ```
//!
//! A client may send a request on an idle HTTP/1.1 connection at the moment when it closes. It
//! cannot know whether the request was received. So idle connections stay open for LAST_CALL, and
//! the next request is still answered.
//!
//! A connection registers its waker here once and checks a flag when it runs; a change wakes all of
//! them. A channel would cost each connection a poll on every turn. Parked connections have no task
//! to wake: the table of idle connections wakes them at the end.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::Waker,
    time::Duration,
};

use tokio::sync::Notify;

/// How long an idle connection may still send a request after the listener closes.
const LAST_CALL: Duration = Duration::from_secs(1);

/// Connections that freed their buffers since the process began.
static RELEASED: AtomicU64 = AtomicU64::new(0);

/// How many connections have freed their buffers so far: they were parked, or closed. A connection
/// counts each time.
pub fn released_connections() -> u64 {
    RELEASED.load(Relaxed)
}

/// The open connections of one listener on one worker.
#[derive(Debug, Default)]
pub struct Drain {
    stage: Cell<DrainStage>,
    next: Cell<u64>,
    open: RefCell<HashMap<u64, Option<Waker>>>,
    empty: Notify,
    changed: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum DrainStage {
    #[default]
    Open,
    Closing,
    Ended,
}

impl Drain {
    /// Counts a connection as open until the ticket is dropped.
    pub(super) fn enter(self: &Rc<Self>) -> ConnectionGuard {
        let id = self.next.get();
        self.next.set(id + 1);
        self.open.borrow_mut().insert(id, None);
        ConnectionGuard {
            id,
            drain: Rc::clone(self),
        }
    }

    /// Closes the listener, and returns when all its connections have ended.
    pub async fn finish(&self) {
        self.begin();
        let last_call = tokio::time::sleep(LAST_CALL);
        tokio::select! {
            () = last_call => self.end(),
            () = self.finished() => {}
        }
        self.finished().await;
    }

    /// Closes the listener: it accepts no more, and every connection announces its end.
    pub fn begin(&self) {
        self.enter_stage(DrainStage::Closing);
    }

    /// Number of open connections.
    pub fn open(&self) -> usize {
        self.open.borrow().len()
    }

    /// Returns when the listener closes.
    pub(super) async fn begun(&self) {
        while self.stage.get() == DrainStage::Open {
            self.changed.notified().await;
        }
    }

    /// Closes idle connections now.
    pub fn end(&self) {
        self.enter_stage(DrainStage::Ended);
    }

    /// Returns when idle connections must end.
    pub(super) async fn ended(&self) {
        while self.stage.get() != DrainStage::Ended {
            self.changed.notified().await;
        }
    }

    async fn finished(&self) {
        while self.open() > 0 {
            self.empty.notified().await;
        }
    }

    fn enter_stage(&self, stage: DrainStage) {
        self.stage.set(stage.max(self.stage.get()));
        let wakers: Vec<Waker> = self
            .open
            .borrow_mut()
            .values_mut()
            .filter_map(Option::take)
            .collect();
        wakers.into_iter().for_each(Waker::wake);
        self.changed.notify_waiters();
    }
}

/// One open connection.
#[derive(Debug)]
pub(super) struct ConnectionGuard {
    id: u64,
    drain: Rc<Drain>,
}

impl ConnectionGuard {
    /// Whether the connection should announce its end to the client.
    pub(super) fn is_closing(&self) -> bool {
        self.drain.stage.get() != DrainStage::Open
    }

    /// Whether the connection should end after the current request.
    pub(super) fn should_end(&self) -> bool {
        self.drain.stage.get() == DrainStage::Ended
    }

    /// Drops the waker: a parked connection has no task.
    pub(super) fn drop_waker(&self) {
        RELEASED.fetch_add(1, Relaxed);
        self.drain.open.borrow_mut().insert(self.id, None);
    }

    /// Wakes this task when either flag changes.
    pub(super) fn wake_with(&self, waker: &Waker) {
        self.drain
            .open
            .borrow_mut()
            .insert(self.id, Some(waker.clone()));
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        RELEASED.fetch_add(1, Relaxed);
        self.drain.open.borrow_mut().remove(&self.id);
        if self.drain.stage.get() != DrainStage::Open && self.drain.open() == 0 {
            self.drain.empty.notify_waiters();
        }
    }
}
