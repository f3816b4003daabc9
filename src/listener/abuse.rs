//! HTTP/2 abuse accounting: rapid reset, and PING, SETTINGS, PRIORITY or WINDOW_UPDATE floods.
//!
//! HTTP/2 lets a client cause much work with few bytes. It can open and reset streams
//! (CVE-2023-44487) or make *us* reset them (CVE-2025-8671), and send PING, SETTINGS, PRIORITY and
//! WINDOW_UPDATE without end. Each of these is legal once. So each connection has an account. It is
//! closed when most of its requests were abandoned before the head of their response was sent, or
//! when its control frames exceed what its requests and our responses explain.
//!
//! DATA with content is not counted: flow control bounds its amount, and the body's own bounds
//! (size, pace) apply. [`check_discarded`] bounds DATA for closed streams. The h2 crate bounds
//! single frames and field blocks (CONTINUATION, field lists, empty DATA). A connection that it
//! closes for that is an [`AbuseReason`] like ours.

use std::{cell::Cell, time::Duration};

use h2::Reason;
use tokio::time::Instant;

use crate::receive_buffer::FrameHead;

/// Abandoned requests that are tolerated at any ratio: users close tabs and retype searches.
pub(super) const MAX_ABANDONED: u32 = 200;
/// Unexplained bytes that a connection may send: 60,000 PINGs.
const GRACE_BYTES: u64 = 1 << 20;
/// Control frames per request besides its head: RST_STREAM, PRIORITY, WINDOW_UPDATE.
const BYTES_PER_REQUEST: u64 = 1024;
/// Control frames per piece of a response: WINDOW_UPDATE for the stream and the connection, and a
/// PING that measures the round trip.
const BYTES_PER_CHUNK: u64 = 64;
/// Many times the keep-alive PINGs of a quiet stream.
const BYTES_PER_SECOND: u64 = 1024;
/// Head bytes that one request explains: `max_header_size` is up to 16 MiB.
const MAX_HEAD_BYTES: u64 = 16 << 20;

/// Bytes of DATA that may be discarded in addition to one window per stream that was answered or
/// reset early. They belong to requests that the h2 crate itself refuses.
const MAX_DISCARDED_BYTES: u64 = 4 << 20;

/// Bounds the DATA for closed streams. A client may have sent a whole window for each before it saw
/// the response. More means that it ignores flow control, which the h2 crate no longer checks on a
/// closed stream.
pub(super) fn check_discarded(bytes: u64, streams: u64, window: u64) -> Result<(), AbuseReason> {
    let explained = streams
        .saturating_mul(window)
        .saturating_add(MAX_DISCARDED_BYTES);
    match bytes <= explained {
        true => Ok(()),
        false => Err(AbuseReason::Frames),
    }
}

/// Why a connection is closed early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbuseReason {
    /// Most of its requests were abandoned.
    #[error("the client abandons most of its requests")]
    Resets,
    /// Control frames that serve no request.
    #[error("the client floods the connection with frames")]
    Frames,
    /// The client reads none of the pending bytes.
    #[error("the client does not read")]
    Stalled,
    /// The client breaks the rules of HTTP/2.
    #[error("the client breaks the rules of HTTP/2")]
    Protocol,
    /// Its address has too many connections.
    #[error("its address has reached max_connections_per_ip")]
    Crowded,
}

impl AbuseReason {
    /// All values of [`label`](Self::label).
    pub const LABELS: [&'static str; 5] = ["resets", "frames", "stalled", "protocol", "crowded"];

    /// Value of the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Resets => "resets",
            Self::Frames => "frames",
            Self::Stalled => "stalled",
            Self::Protocol => "protocol",
            Self::Crowded => "crowded",
        }
    }
}

/// The account of one connection.
#[derive(Debug)]
pub(super) struct AbuseAccount {
    began: Instant,
    arrived_bytes: Cell<u64>,
    useful_bytes: Cell<u64>,
    /// The number of bytes received at which the account is checked again.
    checked_up_to: Cell<u64>,
    /// Field-block bytes that no request explains yet.
    head_bytes: Cell<u64>,
    last_kind: Cell<u8>,
    finished: Cell<u32>,
    abandoned: Cell<u32>,
}

impl AbuseAccount {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            arrived_bytes: Cell::new(0),
            useful_bytes: Cell::new(0),
            checked_up_to: Cell::new(GRACE_BYTES),
            head_bytes: Cell::new(0),
            last_kind: Cell::new(FrameHead::DATA),
            finished: Cell::new(0),
            abandoned: Cell::new(0),
        }
    }

    /// A request began, which explains its head.
    pub(super) fn request(&self) {
        let head = self.head_bytes.get().min(MAX_HEAD_BYTES);
        self.head_bytes.set(self.head_bytes.get() - head);
        self.useful(head + BYTES_PER_REQUEST);
    }

    /// A piece of a response was queued for sending.
    pub(super) fn answer(&self, bytes: u64) {
        self.useful(bytes.saturating_add(BYTES_PER_CHUNK));
    }

    fn useful(&self, bytes: u64) {
        let useful = self.useful_bytes.get().saturating_add(bytes);
        self.useful_bytes.set(useful);
    }

    /// A frame arrived.
    pub(super) fn frame(
        &self,
        frame: &FrameHead,
        now: impl FnOnce() -> Instant,
    ) -> Result<(), AbuseReason> {
        self.last_kind.set(frame.kind);
        let ends = frame.flags & FrameHead::END_STREAM != 0;
        match frame.kind {
            FrameHead::DATA if frame.content_bytes() > 0 || ends => return Ok(()),
            FrameHead::HEADERS | FrameHead::CONTINUATION => {
                let heads = self.head_bytes.get().saturating_add(frame.wire_bytes());
                self.head_bytes.set(heads);
            }
            _ => {}
        }
        self.arrived(frame.wire_bytes(), now)
    }

    /// Why the h2 crate closed the connection; `None` if it did not.
    pub(super) fn ended_by(&self, error: &h2::Error) -> Option<AbuseReason> {
        if !error.is_library() || !error.is_go_away() {
            return None;
        }
        Some(match (error.reason(), self.last_kind.get()) {
            (Some(Reason::NO_ERROR) | None, _) => return None,
            (
                Some(Reason::ENHANCE_YOUR_CALM),
                FrameHead::HEADERS | FrameHead::RST_STREAM | FrameHead::WINDOW_UPDATE,
            ) => AbuseReason::Resets,
            (Some(Reason::ENHANCE_YOUR_CALM), _) => AbuseReason::Frames,
            _ => AbuseReason::Protocol,
        })
    }

    /// Records bytes that need an explanation. Reads the clock only when they exceed the bytes
    /// explained so far.
    fn arrived(&self, bytes: u64, now: impl FnOnce() -> Instant) -> Result<(), AbuseReason> {
        let arrived = self.arrived_bytes.get().saturating_add(bytes);
        self.arrived_bytes.set(arrived);
        if arrived <= self.checked_up_to.get() {
            return Ok(());
        }
        let explained = self.explained(now().saturating_duration_since(self.began));
        self.checked_up_to.set(explained);
        match arrived <= explained {
            true => Ok(()),
            false => Err(AbuseReason::Frames),
        }
    }

    fn explained(&self, since: Duration) -> u64 {
        GRACE_BYTES
            .saturating_add(self.useful_bytes.get())
            .saturating_add(since.as_secs().saturating_mul(BYTES_PER_SECOND))
    }

    /// A request was answered: the head of its response was sent, even if the rest was not wanted.
    pub(super) fn finished(&self) {
        self.finished.set(self.finished.get().saturating_add(1));
    }

    /// A request ended before the head of its response, reset by either side.
    pub(super) fn abandoned(&self) -> Result<(), AbuseReason> {
        let abandoned = self.abandoned.get().saturating_add(1);
        self.abandoned.set(abandoned);
        match abandoned > MAX_ABANDONED && abandoned > self.finished.get() {
            true => Err(AbuseReason::Resets),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> (AbuseAccount, Instant) {
        let now = Instant::now();
        (AbuseAccount::new(now), now)
    }

    #[test]
    fn abandoned_requests_are_forgiven_while_as_many_are_finished() {
        let (account, _) = account();
        for _ in 0..10_000 {
            account.finished();
            assert_eq!(account.abandoned(), Ok(()));
        }
        assert_eq!(account.abandoned(), Err(AbuseReason::Resets));
    }

    #[test]
    fn a_few_abandoned_requests_are_forgiven_anyway() {
        let (account, _) = account();
        for _ in 0..MAX_ABANDONED {
            assert_eq!(account.abandoned(), Ok(()));
        }
        assert_eq!(account.abandoned(), Err(AbuseReason::Resets));
    }

    const PING: FrameHead = FrameHead {
        length: 8,
        padding: 0,
        kind: 6,
        flags: 0,
        stream: 0,
    };

    /// How many of these frames are accepted.
    fn taken(account: &AbuseAccount, frame: FrameHead, now: Instant) -> u64 {
        (0..10_000_000)
            .take_while(|_| account.frame(&frame, || now).is_ok())
            .count() as u64
    }

    #[test]
    fn frames_of_control_are_explained_by_requests_answers_and_time() {
        let (account, began) = account();
        assert_eq!(taken(&account, PING, began), GRACE_BYTES / 17);
        account.request();
        assert_eq!(taken(&account, PING, began), BYTES_PER_REQUEST / 17);
        account.answer(1700 - BYTES_PER_CHUNK);
        assert_eq!(taken(&account, PING, began), 99);
        let later = began + Duration::from_secs(10);
        assert_eq!(taken(&account, PING, later), 10 * 1024 / 17 - 1);
    }

    #[test]
    fn data_needs_no_explanation_unless_it_is_empty() {
        let (account, began) = account();
        let data = |length, flags| FrameHead {
            length,
            padding: 0,
            kind: FrameHead::DATA,
            flags,
            stream: 1,
        };
        assert_eq!(taken(&account, data(1, 0), began), 10_000_000);
        assert_eq!(
            taken(&account, data(0, FrameHead::END_STREAM), began),
            10_000_000
        );
        assert_eq!(taken(&account, data(0, 0), began), GRACE_BYTES / 9);
    }

    #[test]
    fn a_head_is_explained_by_the_request_that_it_begins() {
        let (account, began) = account();
        let head = FrameHead {
            length: 16_384,
            padding: 0,
            kind: FrameHead::HEADERS,
            flags: 4,
            stream: 1,
        };
        for _ in 0..10_000 {
            assert_eq!(account.frame(&head, || began), Ok(()));
            account.request();
        }
        let unexplained = taken(&account, head, began);
        assert!(
            unexplained < 10_000,
            "{unexplained} refused or malformed ones"
        );
    }
}
