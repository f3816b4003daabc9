//! Waiting for something, never for the clock alone.

use std::{
    fmt::Debug,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The longest that a test waits for something that should happen at once; generous, for busy machines.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Asks until the answer is `Some`; fails the test, saying `what` and the last answer, when patience ends.
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    within(PATIENCE, what, ask)
}

/// The same with another patience.
pub fn within<T>(patience: Duration, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(last) if Instant::now() > deadline => {
                panic!("{what}: not within {patience:?}; last: {last}")
            }
            Err(_) => pause(Duration::from_millis(5)),
        }
    }
}

/// Asks until the answer equals `expected`.
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

/// Lets real time pass: between two questions, or because time itself is what the test is about.
#[expect(
    clippy::disallowed_methods,
    reason = "no worker runs here; the only sleep of the tests"
)]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// A door that is shut until the test opens it: the way to make an origin slow without a clock.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets everybody through, now and later.
    pub fn open(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    pub fn is_open(&self) -> bool {
        *lock(&self.0.0)
    }

    /// Waits until the gate is open, or patience ends (then the test fails elsewhere, but nothing hangs).
    pub fn wait(&self) {
        let (open, opened) = &*self.0;
        let waited = opened.wait_timeout_while(lock(open), PATIENCE, |open| !*open);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Locks; a test that panicked elsewhere does not hide behind a poisoned lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
