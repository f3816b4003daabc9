//! What the admin pages of one gateway share.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    connections::ConnectionTable, health::Readiness, reload::Reload, status_history::StatusHistory,
};
use crate::{
    gateway::{ActiveConfigHandle, check::ForwardAuth},
    telemetry::{Metrics, handles::ListenerMetrics},
};

/// Metric label of connections closed to make room.
pub(super) const CROWDED: &str = "crowded";

pub(super) const TIMEOUTS: Timeouts = Timeouts {
    head: Duration::from_secs(5),
    connection: Duration::from_secs(30),
};

/// Timeouts of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// For the request head.
    pub(super) head: Duration,
    /// From accept to the last byte of the response.
    pub(super) connection: Duration,
}

/// The admin pages of one gateway.
#[derive(Clone, Debug)]
pub struct AdminPages {
    pub(super) inner: Arc<Inner>,
    pub(super) reloads: mpsc::Sender<Reload>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) current: Arc<ActiveConfigHandle>,
    pub(super) metrics: Metrics,
    /// Whether it listens on a loopback address.
    pub(super) on_loopback: bool,
    pub(super) readiness: Readiness,
    pub(super) listener: ListenerMetrics,
    pub(super) timeouts: Timeouts,
    pub(super) history: StatusHistory,
    pub(super) desk: OnceLock<Option<ForwardAuth>>,
    pub(super) connections: Arc<ConnectionTable>,
    /// Whether the log already reports an untrusted peer at `/check`.
    pub(super) told_of_stranger: AtomicBool,
    /// Whether the log already reports that `/check` was overloaded.
    pub(super) told_of_busy: AtomicBool,
    /// Whether the log already reports an identity header from a proxy that is not trusted to
    /// verify it.
    pub(super) told_of_identity: AtomicBool,
}

impl AdminPages {
    /// Admin pages of the running gateway, on a listener at `address`. Reload requests go to
    /// `reloads`. At most `waiting` connections wait for their clients, and never more than
    /// [`WAITING_MAX`](super::WAITING_MAX).
    pub fn new(
        current: Arc<ActiveConfigHandle>,
        address: IpAddr,
        readiness: Readiness,
        reloads: mpsc::Sender<Reload>,
        waiting: usize,
    ) -> AdminPages {
        AdminPages::with_timeouts(current, address, readiness, reloads, waiting, TIMEOUTS)
    }

    pub(super) fn with_timeouts(
        current: Arc<ActiveConfigHandle>,
        address: IpAddr,
        readiness: Readiness,
        reloads: mpsc::Sender<Reload>,
        waiting: usize,
        timeouts: Timeouts,
    ) -> AdminPages {
        let metrics = current.active().process().metrics().clone();
        let listener = metrics.listener("admin", &[CROWDED]);
        let inner = Inner {
            current,
            metrics,
            on_loopback: address.is_loopback(),
            readiness,
            listener,
            timeouts,
            history: StatusHistory::default(),
            desk: OnceLock::new(),
            connections: Arc::new(ConnectionTable::new(waiting)),
            told_of_stranger: AtomicBool::new(false),
            told_of_busy: AtomicBool::new(false),
            told_of_identity: AtomicBool::new(false),
        };
        AdminPages {
            inner: Arc::new(inner),
            reloads,
        }
    }
}
