//! The end of a listener's connections on one worker: stop accepting, finish what is in flight, give up at the deadline.
//!
//! ```text
//!   open ─▶ closing: accept no more; HTTP/2 is told GOAWAY, every HTTP/1.1 answer says `Connection: close`
//!        ─▶ ended:   idle connections are closed, LAST_CALL later
//! ```
//!
//! Whoever keeps an HTTP/1.1 connection open may be sending a request at the very moment at which it is closed, and cannot
//! know whether it was received. So idle connections are not closed at once: the next request is still answered.
//!
//! Connections are not told through a channel that each of them would have to poll on every turn: they leave their
//! waker here once, look at one flag when they run, and are all woken when it changes. Those that are parked have no task to
//! be woken: the lot wakes them at the end.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
    task::Waker,
    time::Duration,
};

use tokio::sync::Notify;

/// How long an idle connection may still send a request once the listener closes.
const LAST_CALL: Duration = Duration::from_secs(1);

/// The open connections of one listener on one worker.
#[derive(Debug, Default)]
pub struct Drain {
    stage: Cell<Stage>,
    next: Cell<u64>,
    open: RefCell<HashMap<u64, Option<Waker>>>,
    empty: Notify,
    changed: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    #[default]
    Open,
    Closing,
    Ended,
}

impl Drain {
    /// A connection is open until the ticket is dropped.
    pub(super) fn enter(self: &Rc<Self>) -> Ticket {
        let id = self.next.get();
        self.next.set(id + 1);
        self.open.borrow_mut().insert(id, None);
        Ticket {
            id,
            drain: Rc::clone(self),
        }
    }

    /// Closes the listener, and returns when its connections have ended.
    pub async fn finish(&self) {
        self.begin();
        let last_call = tokio::time::sleep(LAST_CALL);
        tokio::select! {
            () = last_call => self.end(),
            () = self.finished() => {}
        }
        self.finished().await;
    }

    /// Closes the listener: nothing is accepted from now on, and every connection learns that it is about to end.
    pub fn begin(&self) {
        self.enter_stage(Stage::Closing);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.borrow().len()
    }

    /// Returns when the listener closes.
    pub(super) async fn begun(&self) {
        while self.stage.get() == Stage::Open {
            self.changed.notified().await;
        }
    }

    /// Ends what is idle, now.
    pub fn end(&self) {
        self.enter_stage(Stage::Ended);
    }

    /// Returns when idle connections are to end.
    pub(super) async fn ended(&self) {
        while self.stage.get() != Stage::Ended {
            self.changed.notified().await;
        }
    }

    async fn finished(&self) {
        while self.open() > 0 {
            self.empty.notified().await;
        }
    }

    fn enter_stage(&self, stage: Stage) {
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
pub(super) struct Ticket {
    id: u64,
    drain: Rc<Drain>,
}

impl Ticket {
    /// Whether the other end should learn that the connection is about to end.
    pub(super) fn is_closing(&self) -> bool {
        self.drain.stage.get() != Stage::Open
    }

    /// Whether the connection should end after the request in hand.
    pub(super) fn should_end(&self) -> bool {
        self.drain.stage.get() == Stage::Ended
    }

    /// There is no task to be woken for it: it is parked.
    pub(super) fn wakes_nobody(&self) {
        self.drain.open.borrow_mut().insert(self.id, None);
    }

    /// Wakes this task when either of them changes.
    pub(super) fn wake_with(&self, waker: &Waker) {
        self.drain
            .open
            .borrow_mut()
            .insert(self.id, Some(waker.clone()));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.drain.open.borrow_mut().remove(&self.id);
        if self.drain.stage.get() != Stage::Open && self.drain.open() == 0 {
            self.drain.empty.notify_waiters();
        }
    }
}
