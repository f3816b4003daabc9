//! Warnings that a process logs once.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The metric label that counts requests of suspicious peers.
pub(super) const UNNAMED_PROXY: &str = "unnamed_proxy";

/// Remembers whether a warning has been logged.
#[derive(Debug, Default)]
pub(super) struct LogOnce(AtomicBool);

impl LogOnce {
    pub(super) fn is_first(&self) -> bool {
        !self.0.load(Relaxed) && !self.0.swap(true, Relaxed)
    }
}
