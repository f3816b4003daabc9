//! Which event a connection waits for, and until when; `TimedIo` enforces the deadline.
//!
//! ```text
//! accept ──head──▶ request ──(handler runs)──▶ response ends ──idle──▶ byte ──head──▶ request …
//!          header_timeout                                  idle_timeout      header_timeout
//! ```
//!
//! An HTTP/1 connection that has been idle for a quarter of a second is parked, which frees its
//! buffers.

use std::{cell::Cell, rc::Rc, time::Duration};

use tokio::time::Instant;

use super::abuse::{AbuseAccount, AbuseReason};
use crate::receive_buffer::FrameHead;

/// The phase of a connection, and when that phase began.
#[derive(Debug)]
pub(super) struct Clock {
    header_timeout: Duration,
    idle_timeout: Duration,
    phase: Cell<Phase>,
    /// When the phase began; `None` until the first wait in it.
    since: Cell<Option<Instant>>,
    in_flight: Cell<u32>,
    frames: Cell<bool>,
    /// The request cannot proceed without the client: more of its body is missing, or it waits in a
    /// queue. A client that closes its side now has left.
    needs_client: Cell<bool>,
    body_left_unread: Cell<bool>,
    /// Whether written bytes are still buffered.
    holds_back: Cell<bool>,
    /// Response to a head that does not arrive in time; empty in HTTP/2, which has none.
    timeout_answer: Cell<&'static [u8]>,
    account: AbuseAccount,
    cut: Cell<Option<AbuseReason>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The connection is open and no byte has arrived.
    Fresh,
    /// Some bytes of a request head have arrived.
    Head,
    /// A response has ended and no byte has arrived since.
    Idle,
    /// Idle for longer than [`PARK_AFTER`].
    Parked,
    /// The HTTP/2 connection must send GOAWAY, or has sent it and is about to end.
    Leaving,
}

/// How long an HTTP/1 connection stays idle before it is parked.
const PARK_AFTER: Duration = Duration::from_millis(250);
/// How long an HTTP/2 client has to acknowledge the end of its connection.
const LEAVE_PATIENCE: Duration = Duration::from_secs(1);

impl Clock {
    pub(super) fn new(header_timeout: Duration, idle_timeout: Duration) -> Self {
        Self {
            header_timeout,
            idle_timeout,
            phase: Cell::new(Phase::Fresh),
            since: Cell::new(None),
            in_flight: Cell::new(0),
            frames: Cell::new(false),
            needs_client: Cell::new(false),
            body_left_unread: Cell::new(false),
            holds_back: Cell::new(false),
            timeout_answer: Cell::new(b""),
            account: AbuseAccount::new(Instant::now()),
            cut: Cell::new(None),
        }
    }

    /// The clock of a connection that was parked and has been idle since `since`.
    pub(super) fn parked(self, since: Instant) -> Self {
        self.phase.set(Phase::Parked);
        self.since.set(Some(since));
        self
    }

    /// When the connection became idle; `None` unless it must be parked.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let parked = self.phase.get() == Phase::Parked;
        self.since.get().filter(|_| parked)
    }

    pub(super) fn idle_timeout(&self) -> Duration {
        self.idle_timeout
    }

    pub(super) fn timeout_answer(&self) -> &'static [u8] {
        match self.phase.get() {
            Phase::Head => self.timeout_answer.get(),
            _ => b"",
        }
    }

    pub(super) fn answer_timeout_with(&self, answer: &'static [u8]) {
        self.timeout_answer.set(answer);
    }

    /// Marks a request as in the handler until the guard is dropped. No client deadline runs
    /// meanwhile.
    pub(super) fn request(self: &Rc<Self>) -> RequestInFlight {
        self.in_flight.set(self.in_flight.get() + 1);
        self.body_left_unread.set(false);
        self.account.request();
        RequestInFlight {
            clock: Rc::clone(self),
            finished: Cell::new(false),
        }
    }

    /// HTTP/2: bytes between requests may be any frame, such as a PING. Only a new request ends the
    /// idle wait.
    pub(super) fn bytes_are_frames(&self) {
        self.frames.set(true);
    }

    /// The response does not wait for the rest of the request, so more of it may arrive while the
    /// connection closes.
    pub(super) fn leave_body_unread(&self) {
        self.body_left_unread.set(true);
    }

    pub(super) fn body_is_left_unread(&self) -> bool {
        self.body_left_unread.get()
    }

    /// Sets whether a client that closes its side now has left.
    pub(super) fn needs_client(&self, needs: bool) {
        self.needs_client.set(needs);
    }

    /// Whether the whole request has arrived and its response is still on the way. The client may
    /// already have closed its side, as `nc` does. Ends when the last byte has been written, which
    /// is later than the end of the response if the client reads slowly.
    pub(super) fn answers_a_whole_request(&self) -> bool {
        let is_under_way = self.in_flight.get() > 0 || self.holds_back.get();
        is_under_way && !self.frames.get() && !self.needs_client.get()
    }

    /// A piece of a response was queued for sending.
    pub(super) fn answer_passed(&self, bytes: usize) {
        self.account.answer(bytes as u64);
    }

    /// An HTTP/2 frame arrived.
    pub(super) fn frame(&self, frame: &FrameHead) {
        let taken = self.account.frame(frame, Instant::now);
        self.settle(taken);
    }

    /// HTTP/1 bytes arrived, part of a request among them. In HTTP/2 a request begins when its head
    /// is complete.
    pub(super) fn bytes_arrived(&self) {
        if !self.frames.get() && self.phase.get() != Phase::Head {
            self.phase.set(Phase::Head);
            self.since.set(None);
        }
    }

    /// Closes the connection at the next opportunity if `outcome` is an error.
    pub(super) fn settle(&self, outcome: Result<(), AbuseReason>) {
        if let Err(cut) = outcome {
            self.cut.set(Some(cut));
        }
    }

    /// The h2 crate has closed the connection.
    pub(super) fn lost(&self, error: &h2::Error) {
        self.cut.set(self.why_cut(error));
    }

    /// Why the connection is being closed early, by us or by the h2 crate; `None` if it is not.
    pub(super) fn why_cut(&self, error: &h2::Error) -> Option<AbuseReason> {
        self.cut.get().or_else(|| self.account.ended_by(error))
    }

    /// Why the connection is being closed early; `None` if it is not.
    pub(super) fn cut(&self) -> Option<AbuseReason> {
        self.cut.get()
    }

    /// Starts the end of an HTTP/2 connection with no request in flight. `true` the first time. The
    /// client then has [`LEAVE_PATIENCE`] to acknowledge.
    pub(super) fn leave(&self) -> bool {
        let may = self.frames.get() && self.in_flight.get() == 0;
        if !may || self.phase.get() == Phase::Leaving {
            return false;
        }
        self.phase.set(Phase::Leaving);
        self.since.set(None);
        true
    }

    /// Whether an HTTP/2 connection must send GOAWAY.
    pub(super) fn is_leaving(&self) -> bool {
        self.phase.get() == Phase::Leaving
    }

    /// How long after a connection becomes idle its timer must fire first.
    pub(super) fn first_idle_look(&self) -> Duration {
        match self.parks() {
            true => PARK_AFTER,
            false => self.idle_timeout,
        }
    }

    /// Marks an HTTP/1 connection for parking if it has been idle for long enough.
    pub(super) fn park(&self) -> bool {
        let may = self.phase.get() == Phase::Idle && self.parks();
        if may {
            self.phase.set(Phase::Parked);
        }
        may
    }

    fn parks(&self) -> bool {
        !self.frames.get() && self.idle_timeout > PARK_AFTER
    }

    /// Whether the connection should be parked now and holds no unwritten bytes.
    pub(super) fn is_parked(&self) -> bool {
        self.phase.get() == Phase::Parked && !self.holds_back.get() && self.in_flight.get() == 0
    }

    /// Records whether written bytes are still buffered; returns the previous value.
    pub(super) fn holds_back(&self, holds: bool) -> bool {
        self.holds_back.replace(holds)
    }

    /// Whether written bytes are still buffered.
    pub(super) fn is_holding_back(&self) -> bool {
        self.holds_back.get()
    }

    /// Deadline of the current or beginning wait; `None` while the handler has a request.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.in_flight.get() > 0 {
            return None;
        }
        let since = self.since.get().unwrap_or_else(Instant::now);
        self.since.set(Some(since));
        Some(since + self.patience())
    }

    fn patience(&self) -> Duration {
        match self.phase.get() {
            Phase::Idle => self.first_idle_look(),
            Phase::Parked => self.idle_timeout,
            Phase::Fresh | Phase::Head => self.header_timeout,
            Phase::Leaving => LEAVE_PATIENCE,
        }
    }
}

/// One request in the handler, until its response body has ended.
#[derive(Debug)]
pub(super) struct RequestInFlight {
    clock: Rc<Clock>,
    finished: Cell<bool>,
}

impl RequestInFlight {
    pub(super) fn clock(&self) -> &Rc<Clock> {
        &self.clock
    }

    /// The request was answered: in full, or as far as the origin or the client wanted.
    pub(super) fn finished(&self) {
        self.finished.set(true);
    }
}

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        let clock = &self.clock;
        let left = clock.in_flight.get() - 1;
        clock.in_flight.set(left);
        if left == 0 {
            clock.needs_client.set(false);
            clock.phase.set(Phase::Idle);
            clock.since.set(Some(Instant::now()));
        }
        match self.finished.get() {
            true => clock.account.finished(),
            false => clock.settle(clock.account.abandoned()),
        }
    }
}
