//! What an HTTP/2 client has sent, against what it was good for.
//!
//! HTTP/2 lets a client make much work with few bytes: streams that are opened and reset (CVE-2023-44487), streams that it
//! makes *us* reset (CVE-2025-8671), PING, SETTINGS, PRIORITY and WINDOW_UPDATE without end. Each of them is legal once. So
//! a connection has an account: it is cut when most of its requests were abandoned, or when it brings more frames than
//! its requests, their bodies and our answers explain. The h2 crate bounds what can be seen in one frame or field block
//! (CONTINUATION, field lists, empty and tiny DATA).

use std::{cell::Cell, time::Duration};

use tokio::time::Instant;

/// Requests that may be abandoned before it matters what else the client does: tabs are closed, searches retyped.
const MAX_ABANDONED: u32 = 200;
/// Bytes of frames for nothing: 60,000 PINGs.
const GRACE_BYTES: u64 = 1 << 20;
/// Bytes that come with a request and are not read: its head, and a body that is refused, up to the stream's first window.
const BYTES_PER_REQUEST: u64 = 80 * 1024;
/// Keep-alive PINGs on a quiet stream, many times over.
const BYTES_PER_SECOND: u64 = 1024;

/// Why a connection is cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cut {
    /// Most of its requests were abandoned.
    #[error("the client abandons most of its requests")]
    Resets,
    /// Frames that serve no request.
    #[error("the client floods the connection with frames")]
    Frames,
    /// The client takes nothing of what there is to write.
    #[error("the client does not read")]
    Stalled,
    /// Its address has as many connections as it may.
    #[error("its address has as many connections as max_connections_per_ip allows")]
    Crowded,
}

impl Cut {
    /// Every word of [`label`](Self::label).
    pub const LABELS: [&'static str; 4] = ["resets", "frames", "stalled", "crowded"];

    /// A word for the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Resets => "resets",
            Self::Frames => "frames",
            Self::Stalled => "stalled",
            Self::Crowded => "crowded",
        }
    }
}

/// The account of one connection.
#[derive(Debug)]
pub(super) struct Ledger {
    began: Instant,
    arrived_bytes: Cell<u64>,
    useful_bytes: Cell<u64>,
    /// How many bytes may have arrived before the account is looked at again.
    checked_up_to: Cell<u64>,
    finished: Cell<u32>,
    abandoned: Cell<u32>,
}

impl Ledger {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            arrived_bytes: Cell::new(0),
            useful_bytes: Cell::new(0),
            checked_up_to: Cell::new(GRACE_BYTES),
            finished: Cell::new(0),
            abandoned: Cell::new(0),
        }
    }

    /// A request began.
    pub(super) fn request(&self) {
        self.useful(BYTES_PER_REQUEST);
    }

    /// Bytes of a body, in either direction.
    pub(super) fn useful(&self, bytes: u64) {
        let useful = self.useful_bytes.get().saturating_add(bytes);
        self.useful_bytes.set(useful);
    }

    /// Bytes arrived. Looks at the clock only when there are more than were explained so far.
    pub(super) fn arrived(&self, bytes: usize, now: impl FnOnce() -> Instant) -> Result<(), Cut> {
        let arrived = self.arrived_bytes.get().saturating_add(bytes as u64);
        self.arrived_bytes.set(arrived);
        if arrived <= self.checked_up_to.get() {
            return Ok(());
        }
        let explained = self.explained(now().saturating_duration_since(self.began));
        self.checked_up_to.set(explained);
        match arrived <= explained {
            true => Ok(()),
            false => Err(Cut::Frames),
        }
    }

    fn explained(&self, since: Duration) -> u64 {
        GRACE_BYTES
            .saturating_add(self.useful_bytes.get())
            .saturating_add(since.as_secs().saturating_mul(BYTES_PER_SECOND))
    }

    /// A request has been answered in full.
    pub(super) fn finished(&self) {
        self.finished.set(self.finished.get().saturating_add(1));
    }

    /// A request ended before its answer did, whoever reset it.
    pub(super) fn abandoned(&self) -> Result<(), Cut> {
        let abandoned = self.abandoned.get().saturating_add(1);
        self.abandoned.set(abandoned);
        match abandoned > MAX_ABANDONED && abandoned > self.finished.get() {
            true => Err(Cut::Resets),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> (Ledger, Instant) {
        let now = Instant::now();
        (Ledger::new(now), now)
    }

    #[test]
    fn abandoned_requests_are_forgiven_while_as_many_are_finished() {
        let (ledger, _) = ledger();
        for _ in 0..10_000 {
            ledger.finished();
            assert_eq!(ledger.abandoned(), Ok(()));
        }
        assert_eq!(ledger.abandoned(), Err(Cut::Resets));
    }

    #[test]
    fn a_few_abandoned_requests_are_forgiven_anyway() {
        let (ledger, _) = ledger();
        for _ in 0..MAX_ABANDONED {
            assert_eq!(ledger.abandoned(), Ok(()));
        }
        assert_eq!(ledger.abandoned(), Err(Cut::Resets));
    }

    #[test]
    fn frames_are_explained_by_requests_bodies_and_time() {
        let (ledger, began) = ledger();
        let grace = usize::try_from(GRACE_BYTES).expect("it fits");
        assert_eq!(ledger.arrived(grace, || began), Ok(()));
        assert_eq!(ledger.arrived(1, || began), Err(Cut::Frames));
        ledger.request();
        assert_eq!(ledger.arrived(80 * 1024 - 1, || began), Ok(()));
        assert_eq!(ledger.arrived(1, || began), Err(Cut::Frames));
        ledger.useful(100);
        assert_eq!(ledger.arrived(99, || began), Ok(()));
        let later = began + Duration::from_secs(10);
        assert_eq!(ledger.arrived(10 * 1024, || later), Ok(()));
        assert_eq!(ledger.arrived(2, || later), Err(Cut::Frames));
    }
}
