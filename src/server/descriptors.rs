//! File descriptors: as many as the system lets the process have, and how many of them clients may take.
//!
//! Services are often started with 1024 and may have far more (the soft and the hard limit of `ulimit -n`), for the sake of
//! programs that use `select(2)`. This one does not, so it takes all that it may have. A share of them is never given to clients:
//! a gateway without a descriptor for its upstreams accepts everybody and serves nobody.

use std::sync::{Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// One in so many is left to connections to upstreams, files and the admin page.
const KEPT: usize = 4;

/// How many connections of clients there may be at once, where so many are wanted.
pub(super) fn for_connections(wanted: usize) -> usize {
    raise().map_or(wanted, |all| wanted.min(room(all)))
}

/// What was said last: how many connections were wanted, of how many descriptors.
static SAID: Mutex<Option<(usize, usize)>> = Mutex::new(None);

/// Says so where there may not be as many connections as are wanted; once for each change, and not at each reload.
pub(super) fn warn_if_few(wanted: usize) {
    let few = raise().filter(|all| wanted > room(*all));
    let now = few.map(|all| (wanted, all));
    let before = std::mem::replace(
        &mut *SAID.lock().unwrap_or_else(PoisonError::into_inner),
        now,
    );
    if let Some(all) = few.filter(|_| now != before) {
        tracing::warn!(
            "the system allows {all} file descriptors, too few for max_connections = {wanted}: beyond {} connections, \
             accepting pauses. Raise `ulimit -Hn`, in a systemd unit `LimitNOFILE=`",
            room(all)
        );
    }
}

/// How many connections of the admin listener may wait for their clients: a small part of the share that is kept.
pub(super) fn for_admin() -> usize {
    const PART: usize = 24;
    const LEAST: usize = 16;
    let most = crate::admin::WAITING_MAX;
    raise().map_or(most, |all| (all / PART).clamp(LEAST, most))
}

fn room(all: usize) -> usize {
    all - all / KEPT
}

/// Takes as many as there may be, and says how many; `None` where there is no bound.
fn raise() -> Option<usize> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // no privilege is needed to do this, but a sandbox may still forbid the call
        Err(_) => limit.current,
    };
    current.and_then(|most| usize::try_from(most).ok())
}
