//! File descriptors: raises the limit to the maximum, and reserves a share that clients cannot use.
//!
//! Services often start with a soft limit (`ulimit -n`) of 1024, for programs that use `select(2)`,
//! and a far higher hard limit. tidegate does not use `select`, so it raises the soft limit to the
//! hard one. A gateway without descriptors for its upstreams would accept every client and serve
//! none, hence the reserve.

use std::sync::{Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// One in `KEPT` descriptors is reserved for upstream connections, files and the admin listener.
const KEPT: usize = 4;

/// How many client connections the descriptors allow, at most `wanted`.
pub(super) fn for_connections(wanted: usize) -> usize {
    raise().map_or(wanted, |all| wanted.min(room(all)))
}

/// The last warning: connections wanted, and descriptors available.
static SAID: Mutex<Option<(usize, usize)>> = Mutex::new(None);

/// Warns if the descriptors do not suffice for `wanted` connections. Warns once per change, not at
/// every reload.
pub(super) fn warn_if_few(wanted: usize) {
    let few = raise().filter(|all| wanted > room(*all));
    let now = few.map(|all| (wanted, all));
    let before = std::mem::replace(
        &mut *SAID.lock().unwrap_or_else(PoisonError::into_inner),
        now,
    );
    if let Some(all) = few.filter(|_| now != before) {
        tracing::warn!(
            "the system allows {all} file descriptors, too few for max_connections = {wanted}: above {} connections, \
             accepting pauses; raise `ulimit -Hn`, or `LimitNOFILE=` in a systemd unit",
            room(all)
        );
    }
}

/// How many admin connections may wait for their clients: a small part of the reserve.
pub(super) fn for_admin() -> usize {
    const PART: usize = 24;
    const LEAST: usize = 16;
    let most = crate::admin::WAITING_MAX;
    raise().map_or(most, |all| (all / PART).clamp(LEAST, most))
}

fn room(all: usize) -> usize {
    all - all / KEPT
}

/// Raises the soft limit to the hard one and returns it; `None` if unlimited.
fn raise() -> Option<usize> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // this needs no privilege, but a sandbox may forbid the call
        Err(_) => limit.current,
    };
    current.and_then(|most| usize::try_from(most).ok())
}
