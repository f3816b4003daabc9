//! Lines on their way to a sink that may be slow: bounded, and nobody who writes ever waits for the sink.
//!
//! One thread per queue hands lines over. A line that finds no room is dropped and counted: a pipe that nobody reads
//! costs lines, never requests.

use std::{
    fmt,
    io::Write,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use metrics::Counter;

/// How long the writer lets lines gather before it takes them.
const LINGER: Duration = Duration::from_millis(5);

/// A queue of lines; clones feed the same thread.
#[derive(Clone)]
pub struct LineQueue {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Lines are waiting, or the queue was closed.
    filled: Condvar,
    /// The writer has ended.
    ended: Condvar,
    max_bytes: usize,
    dropped: Counter,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    closed: bool,
    ended: bool,
}

impl LineQueue {
    /// Starts the writing thread. `max_bytes` bounds the lines that wait for `sink`; `dropped` counts those lost. Fails
    /// when the system has no thread to give.
    pub fn start(
        name: &str,
        sink: Box<dyn Write + Send>,
        max_bytes: usize,
        dropped: Counter,
    ) -> std::io::Result<LineQueue> {
        let shared = Arc::new(Shared {
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
                // also when the sink panics: nobody may wait for a thread that is gone
                let _ended = EndOnDrop(&drained);
                drained.drain_into(sink);
            })?;
        Ok(LineQueue { shared })
    }

    /// Queues one line, with its line end.
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

    /// Lets the writer finish what is queued and end; lines pushed later are dropped and counted. Waits at most `limit`, and
    /// says whether everything was handed to the sink.
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

impl Shared {
    fn drain_into(&self, mut sink: Box<dyn Write + Send>) {
        let mut batch = Vec::new();
        while self.take(&mut batch) {
            if sink.write_all(&batch).and_then(|()| sink.flush()).is_err() {
                // the sink may come back (a pipe's reader restarts); how much of the batch arrived is unknown
                let lines = batch.iter().filter(|byte| **byte == b'\n').count();
                self.dropped.increment(lines as u64);
            }
            batch.clear();
        }
    }

    /// Waits for lines and exchanges the queue for `batch`, which is empty; false when closed and drained.
    fn take(&self, batch: &mut Vec<u8>) -> bool {
        let idle = |state: &mut State| state.waiting.is_empty() && !state.closed;
        let filled = self.filled.wait_while(self.lock(), idle);
        let state = filled.unwrap_or_else(PoisonError::into_inner);
        let gathered = self
            .filled
            .wait_timeout_while(state, LINGER, |state| !state.closed);
        let (mut state, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut state.waiting, batch);
        !batch.is_empty()
    }

    /// A panic while the lock is held leaves at worst half a line behind.
    fn lock(&self) -> MutexGuard<'_, State> {
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

struct EndOnDrop<'a>(&'a Shared);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.ended = true;
        drop(state);
        self.0.ended.notify_all();
    }
}
