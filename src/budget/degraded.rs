//! The servers that are down, as workers see them.

use std::sync::atomic::AtomicBool;

use super::cluster::MAX_SHARDS;

/// Which servers are down at the moment. Written by the lease manager, read by workers.
#[derive(Debug)]
pub(super) struct Degraded {
    pub(super) all: AtomicBool,
    pub(super) servers: [AtomicBool; MAX_SHARDS],
}

impl Default for Degraded {
    fn default() -> Degraded {
        Degraded {
            all: AtomicBool::new(false),
            servers: [const { AtomicBool::new(false) }; MAX_SHARDS],
        }
    }
}
