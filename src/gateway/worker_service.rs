//! Receives the requests of one worker thread. A request is served to its end with the
//! configuration that was current when it arrived.
//!
//! A reload sends every worker the new configuration through its thread's mailbox. A request then
//! pays only one thread-local reference count for it: no lock, no atomic operation.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use http::{Request, Response};
use tokio::time::Instant;

use super::{active_config::ActiveConfig, body::Body, worker::Worker};
use crate::listener::{Handler, Peer, inbound::RequestBody};

/// The request service of one worker thread.
#[derive(Debug)]
pub struct WorkerService {
    worker: RefCell<Rc<Worker>>,
}

impl WorkerService {
    /// Starts with this configuration.
    pub fn new(active: Arc<ActiveConfig>) -> Self {
        Self {
            worker: RefCell::new(Rc::new(Worker::new(active, None))),
        }
    }

    /// Serves requests that arrive from now on with the new configuration.
    pub fn switch_to(&self, active: Arc<ActiveConfig>) {
        let previous = self.current();
        self.worker
            .replace(Rc::new(Worker::new(active, Some(&previous))));
    }

    /// Closes upstream connections that have been idle for too long.
    pub fn sweep(&self, now: Instant) {
        self.current().sweep(now);
    }

    fn current(&self) -> Rc<Worker> {
        Rc::clone(&self.worker.borrow())
    }
}

impl Handler for WorkerService {
    type Body = Body;

    fn handle<R, F: FnOnce(Response<Body>) -> R>(
        self: Rc<Self>,
        request: Request<RequestBody>,
        from: Rc<Peer>,
        finish: F,
    ) -> impl Future<Output = R> {
        self.current().serve(request, from, finish)
    }

    fn head_timeout_answer(&self) -> &'static [u8] {
        crate::response::HEAD_TIMEOUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of the future that a function returns.
    fn size_of_future<A, B, C, D, F: Future>(_: fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_request_under_way_is_small_enough_to_be_moved() {
        // The whole future is copied into its task when a request begins, used or not.
        let size = size_of_future(<WorkerService as Handler>::handle::<(), fn(Response<Body>)>);
        assert!(size <= 3_472, "{size} bytes");
    }
}
