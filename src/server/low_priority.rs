//! Runs slow work that no request waits for on a low-priority thread, so the workers go first.
//! Reading a large configuration takes a few hundred milliseconds of CPU, and as many MiB of
//! memory, which are returned afterwards.

use std::{io, thread};

use tokio::sync::oneshot;

/// A busy worker gets far more CPU time than this thread; on an idle core the thread gets all of
/// it.
const NICER: i32 = 10;

/// Runs `work` on such a thread and waits for it. Fails if the thread cannot start, or if `work`
/// panics, which is logged.
pub(super) async fn run_at_low_priority<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, told) = oneshot::channel();
    thread::Builder::new()
        .name("aside".to_owned())
        .spawn(move || {
            // on Linux this affects only this thread; if it fails, run at normal
            // priority
            let _ = rustix::process::nice(NICER);
            // the caller may have stopped waiting
            let _ = done.send(work());
        })?;
    told.await
        .map_err(|_| io::Error::other("the thread ended early: the log says why"))
}

/// Returns freed memory to the system. glibc's allocator otherwise keeps it for later use; other
/// allocators return it on their own. Takes some milliseconds, during which an allocation may wait
/// while one arena is trimmed.
pub(super) fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    {
        #[expect(unsafe_code, reason = "only the C library can trim its heap")]
        unsafe extern "C" {
            /// `malloc_trim(3)`: safe with any argument, at any time, from any thread.
            safe fn malloc_trim(kept_bytes: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

/// Detects the end of a wave of connections. Their buffers are then free, but fragmented between
/// live allocations and unused until the next wave.
#[derive(Debug, Default)]
pub(super) struct IdleWave {
    /// Total connections parked, at the last call.
    seen: u64,
    /// The same total when memory was last returned.
    given_back_at: u64,
}

impl IdleWave {
    /// Call about once a second with the total number of connections ever parked.
    pub(super) fn is_over(&mut self, parked: u64) -> bool {
        /// Each held about 40 KiB; fewer connections are not worth a trim.
        const WORTH_IT: u64 = 500;
        /// With this many more per second, the wave goes on.
        const RIPPLE: u64 = 50;
        let since = parked - self.seen;
        self.seen = parked;
        let is_over = since < RIPPLE && parked - self.given_back_at >= WORTH_IT;
        if is_over {
            self.given_back_at = parked;
        }
        is_over
    }
}

/// Detects when much memory for request bodies was in use and is free again.
#[derive(Debug, Default)]
pub(super) struct HighWater {
    most: usize,
}

impl HighWater {
    /// Call about once a second with the peak bytes since the last call, and the bytes in use
    /// now.
    pub(super) fn has_fallen(&mut self, peak: usize, now: usize) -> bool {
        /// A lower peak is not worth a trim.
        const WORTH_IT: usize = 4 << 20;
        self.most = self.most.max(peak);
        let has_fallen = self.most >= WORTH_IT && now <= self.most / 4;
        if has_fallen {
            self.most = now;
        }
        has_fallen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_is_over_when_it_was_high_and_has_passed_and_then_once() {
        let mut wave = IdleWave::default();
        let mut look = |parked| wave.is_over(parked);
        assert!(!look(40), "too few");
        assert!(!look(10_000), "it continues");
        assert!(!look(10_050), "still");
        assert!(look(10_060), "it is over");
        assert!(!look(10_060), "nothing new");
        assert!(!look(10_100) && !look(10_140), "a trickle");
        assert!(!look(11_000));
        assert!(look(11_000));
    }

    #[test]
    fn memory_of_bodies_has_fallen_once_when_it_was_high_and_most_is_free() {
        let mut water = HighWater::default();
        assert!(!water.has_fallen(1 << 20, 0), "too little");
        assert!(!water.has_fallen(8 << 20, 4 << 20), "still in use");
        assert!(!water.has_fallen(4 << 20, 3 << 20), "still");
        assert!(water.has_fallen(3 << 20, 1 << 20));
        assert!(!water.has_fallen(1 << 20, 0), "nothing new");
    }

    #[test]
    fn what_is_done_aside_comes_back_and_its_panic_ends_nothing_else() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime");
        assert_eq!(runtime.block_on(run_at_low_priority(|| 7)).ok(), Some(7));
        let failed = runtime.block_on(run_at_low_priority(|| -> u8 {
            std::panic::resume_unwind(Box::new(()))
        }));
        assert!(failed.is_err_and(|error| error.to_string().contains("ended early")));
    }
}
