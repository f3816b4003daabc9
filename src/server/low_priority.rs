//! Runs slow work that no request waits for on a low-priority thread, so the workers go first.
//! Reading a large configuration takes a few hundred milliseconds of CPU.

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

#[cfg(test)]
mod tests {
    use super::*;

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
