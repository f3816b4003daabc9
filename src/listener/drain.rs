//! The end of a worker's connections: stop accepting, finish what is in flight, give up at the deadline.
//!
//! Connections are not told through a channel that each of them would have to poll on every turn: they leave their
//! waker here once, look at one flag when they run, and are all woken when it changes.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
    task::Waker,
};

use tokio::sync::Notify;

/// The open connections of one worker.
#[derive(Debug, Default)]
pub struct Drain {
    draining: Cell<bool>,
    next: Cell<u64>,
    open: RefCell<HashMap<u64, Option<Waker>>>,
    empty: Notify,
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

    /// Asks every open connection to end after the request in hand.
    pub fn begin(&self) {
        self.draining.set(true);
        let wakers: Vec<Waker> = self
            .open
            .borrow_mut()
            .values_mut()
            .filter_map(Option::take)
            .collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.borrow().len()
    }

    /// Returns when no connection is open.
    pub async fn finished(&self) {
        while self.open() > 0 {
            self.empty.notified().await;
        }
    }
}

/// One open connection.
#[derive(Debug)]
pub(super) struct Ticket {
    id: u64,
    drain: Rc<Drain>,
}

impl Ticket {
    /// Whether the connection should end after the request in hand.
    pub(super) fn should_end(&self) -> bool {
        self.drain.draining.get()
    }

    /// Wakes this task when the connection should end.
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
        if self.drain.draining.get() && self.drain.open() == 0 {
            self.drain.empty.notify_waiters();
        }
    }
}
