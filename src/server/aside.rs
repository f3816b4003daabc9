//! Work that takes long and that nobody's request waits for: on a thread that lets the workers go first. Reading a large
//! configuration takes a few hundred milliseconds of a core and as many MiB of memory, which goes back to the system behind it.

use std::{io, thread};

use tokio::sync::oneshot;

/// Much less of a core than a worker gets that wants it, too; all of it where none does.
const NICER: i32 = 10;

/// Does it, and waits for it. Fails where the system has no thread for it, or it panics, which was then logged.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, told) = oneshot::channel();
    thread::Builder::new()
        .name("aside".to_owned())
        .spawn(move || {
            // on Linux this is the thread's alone; where it is refused, the work is done all the same
            let _ = rustix::process::nice(NICER);
            // whoever asked may have given up waiting
            let _ = done.send(work());
        })?;
    told.await
        .map_err(|_| io::Error::other("it ended early: the log says why"))
}

/// Gives memory back to the system that was needed for a moment. The allocator of glibc keeps it otherwise, up to the next
/// time that it is needed; others give it back by themselves. Takes some milliseconds, in which an allocation may have to wait
/// for as long as one arena takes.
pub(super) fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    {
        #[expect(unsafe_code, reason = "only the C library can do it")]
        unsafe extern "C" {
            /// `malloc_trim(3)`: any number is a fine argument, and it may be called at any time, from any thread.
            safe fn malloc_trim(kept_bytes: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

/// Tells when a wave of connections has fallen silent: their buffers are free then, in pieces between what is still held, and of
/// use to nobody until the next wave.
#[derive(Debug, Default)]
pub(super) struct Wave {
    /// Connections parked, when this was last looked at.
    seen: u64,
    /// When memory was last given back.
    given_back_at: u64,
}

impl Wave {
    /// To be asked every second or so, with the number of connections that were ever parked.
    pub(super) fn is_over(&mut self, parked: u64) -> bool {
        /// Each has held some 40 KiB: less is not worth it.
        const WORTH_IT: u64 = 500;
        /// More within a second, and it goes on.
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

/// Tells when much memory was in use for request bodies and no longer is.
#[derive(Debug, Default)]
pub(super) struct HighWater {
    most: usize,
}

impl HighWater {
    /// To be asked every second or so, with the most bytes in use since the last time, and those in use now.
    pub(super) fn has_fallen(&mut self, peak: usize, now: usize) -> bool {
        /// Less is not worth it.
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
        let mut wave = Wave::default();
        let mut look = |parked| wave.is_over(parked);
        assert!(!look(40), "too few");
        assert!(!look(10_000), "it goes on");
        assert!(!look(10_050), "still");
        assert!(look(10_060), "it has passed");
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
        assert_eq!(runtime.block_on(aside(|| 7)).ok(), Some(7));
        let failed = runtime.block_on(aside(|| -> u8 { std::panic::resume_unwind(Box::new(())) }));
        assert!(failed.is_err_and(|error| error.to_string().contains("ended early")));
    }
}
