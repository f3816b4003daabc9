//! A bounded queue of lines for a sink that may be slow. Callers never wait for the sink.
//!
//! Each queue has one writer thread. If the queue is full, the line is dropped and counted: a pipe
//! without a reader costs lines, never requests.

use std::{
    fmt,
    io::Write,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use metrics::Counter;

/// How long the writer lets lines gather.
const LINGER: Duration = Duration::from_millis(5);

/// A queue of lines. Clones share one writer thread.
#[derive(Clone)]
pub struct LineQueue {
    shared: Arc<SharedQueue>,
}

struct SharedQueue {
    state: Mutex<QueueState>,
    /// Signalled when lines are waiting or the queue is closed.
    filled: Condvar,
    /// Signalled when the writer has ended.
    ended: Condvar,
    max_bytes: usize,
    dropped: Counter,
}

#[derive(Default)]
struct QueueState {
    waiting: Vec<u8>,
    closed: bool,
    ended: bool,
}

impl LineQueue {
    /// Starts the writer thread. `max_bytes` bounds the lines that wait for `sink`; `dropped`
    /// counts lost lines. Fails if the system cannot start a thread.
    pub fn start(
        name: &str,
        sink: Box<dyn Write + Send>,
        max_bytes: usize,
        dropped: Counter,
    ) -> std::io::Result<LineQueue> {
        let shared = Arc::new(SharedQueue {
            state: Mutex::default(),
            filled: Condvar::new(),
            ended: Condvar::new(),
            max_bytes,
            dropped,
        });
        let drained = Arc::clone(&shared);
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // signals the end also if the sink panics, so that `close` does not wait for a dead
                // thread
                let _ended = EndOnDrop(&drained);
                drained.drain_into(sink);
            })?;
        Ok(LineQueue { shared })
    }

    /// Queues one line, which must end with a line feed.
    pub fn push(&self, line: &[u8]) {
        let mut state = self.shared.lock();
        if state.closed || state.waiting.len().saturating_add(line.len()) > self.shared.max_bytes {
            drop(state);
            return self.lost_one();
        }
        let was_empty = state.waiting.is_empty();
        state.waiting.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.shared.filled.notify_one();
        }
    }

    /// Counts a line that cannot be queued.
    pub fn lost_one(&self) {
        self.shared.dropped.increment(1);
    }

    /// Lets the writer drain the queue and stop. Later lines are dropped and counted. Waits at most
    /// `limit`. Returns whether every line was handed to the sink.
    pub fn close(&self, limit: Duration) -> bool {
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.filled.notify_one();
        let waited = self
            .shared
            .ended
            .wait_timeout_while(state, limit, |state| !state.ended);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.ended
    }
}

impl SharedQueue {
    fn drain_into(&self, mut sink: Box<dyn Write + Send>) {
        let mut batch = Vec::new();
        while self.take(&mut batch) {
            if sink.write_all(&batch).and_then(|()| sink.flush()).is_err() {
                // the sink may recover (a pipe's reader restarts); it is unknown how much of the
                // batch arrived
                let lines = batch.iter().filter(|byte| **byte == b'\n').count();
                self.dropped.increment(lines as u64);
            }
            batch.clear();
        }
    }

    /// Waits for lines and swaps the queue with the empty `batch`. Returns false if closed and
    /// drained.
    fn take(&self, batch: &mut Vec<u8>) -> bool {
        let idle = |state: &mut QueueState| state.waiting.is_empty() && !state.closed;
        let filled = self.filled.wait_while(self.lock(), idle);
        let state = filled.unwrap_or_else(PoisonError::into_inner);
        let gathered = self
            .filled
            .wait_timeout_while(state, LINGER, |state| !state.closed);
        let (mut state, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut state.waiting, batch);
        !batch.is_empty()
    }

    /// A panic while the lock is held leaves at most half a line.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LineQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineQueue")
            .field("max_bytes", &self.shared.max_bytes)
            .finish_non_exhaustive()
    }
}

struct EndOnDrop<'a>(&'a SharedQueue);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.ended = true;
        drop(state);
        self.0.ended.notify_all();
    }
}
