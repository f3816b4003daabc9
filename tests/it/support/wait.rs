//! Waits for conditions. Where a test is about time, [`time_passes`] says why it must pass.

use std::{
    fmt::Debug,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The longest that a test waits for something immediate; generous, for busy machines.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The longest that an origin waits at a gate: less than a gateway waits for a response.
const GATE_PATIENCE: Duration = Duration::from_secs(20);
/// Time between two polls of a condition.
const POLL: Duration = Duration::from_millis(5);

/// Polls until `ask` succeeds. If patience ends, fails the test with `what` and the last error.
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    within(PATIENCE, what, ask)
}

/// Like [`eventually`], with another patience.
pub fn within<T>(patience: Duration, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(last) if Instant::now() > deadline => {
                panic!("{what}: not within {patience:?}; last: {last}")
            }
            Err(_) => time_passes(POLL, "the next poll is due"),
        }
    }
}

/// Polls until the result equals `expected`.
pub fn eventually_eq<T: PartialEq + Debug>(what: &str, expected: T, mut ask: impl FnMut() -> T) {
    eventually(what, || {
        let answer = ask();
        if answer == expected {
            Ok(())
        } else {
            Err(format!("{answer:?}, not {expected:?}"))
        }
    });
}

/// Lets real time pass, for a test that is about time: `why` says what happens meanwhile. If there
/// is a state to wait for, use [`eventually`].
#[expect(
    clippy::disallowed_methods,
    reason = "no async runtime runs on this thread"
)]
pub fn time_passes(time: Duration, why: &str) {
    assert!(!why.is_empty(), "a test says why time must pass");
    std::thread::sleep(time);
}

/// [`time_passes`] in an async test.
pub async fn time_passes_in_task(time: Duration, why: &str) {
    assert!(!why.is_empty(), "a test says why time must pass");
    tokio::time::sleep(time).await;
}

/// Waits in an async test until `holds`. The test fails when patience ends.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(POLL).await;
    }
}

/// Blocks until the test opens it, so that an origin can be slow without a clock.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets every present and later waiter through.
    pub fn open(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    pub fn is_open(&self) -> bool {
        *lock(&self.0.0)
    }

    /// Waits until the gate is open, but not for longer than a gateway does. Then the test fails
    /// elsewhere, but nothing hangs.
    pub fn wait(&self) {
        let (open, opened) = &*self.0;
        let waited = opened.wait_timeout_while(lock(open), GATE_PATIENCE, |open| !*open);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Locks; ignores poisoning, so that the original panic is the one that is reported.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
