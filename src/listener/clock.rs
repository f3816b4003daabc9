//! What a connection waits for, since when and for how long; `TimedIo` acts on it.
//!
//! ```text
//! accept ──head──▶ request ──(handler's business)──▶ response ends ──idle──▶ first byte ──head──▶ request …
//!        header_timeout                                       idle_timeout           header_timeout
//! ```
//!
//! A connection that has been idle for a while is parked: whoever speaks HTTP/1 on it gives up what it holds for it.

use std::{cell::Cell, rc::Rc, time::Duration};

use tokio::time::Instant;

use super::{
    http2::FrameHead,
    ledger::{Cut, Ledger},
};

/// What a connection waits for, and since when.
#[derive(Debug)]
pub(super) struct Clock {
    header_timeout: Duration,
    idle_timeout: Duration,
    phase: Cell<Phase>,
    /// When the phase began; `None` until somebody has to wait in it.
    since: Cell<Option<Instant>>,
    in_flight: Cell<u32>,
    frames: Cell<bool>,
    /// Nothing goes on without the client: more of its request is awaited, or it awaits its turn. One that closes its side
    /// then has left.
    needs_client: Cell<bool>,
    body_left_unread: Cell<bool>,
    /// Whether something was written that has not left yet.
    holds_back: Cell<bool>,
    /// What is written when a head does not arrive in time; HTTP/2 has no such answer.
    timeout_answer: Cell<&'static [u8]>,
    ledger: Ledger,
    cut: Cell<Option<Cut>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A connection is open and nothing has arrived.
    Fresh,
    /// Some bytes of a request head have arrived.
    Head,
    /// A response ended and nothing has arrived since.
    Idle,
    /// The same, for longer than [`PARK_AFTER`].
    Parked,
    /// HTTP/2 was told to end (GOAWAY) and is about to.
    Leaving,
}

/// How long an HTTP/1 connection is idle before it is parked.
const PARK_AFTER: Duration = Duration::from_millis(250);
/// How long an HTTP/2 client may take to acknowledge that its connection ends.
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
            ledger: Ledger::new(Instant::now()),
            cut: Cell::new(None),
        }
    }

    /// Of a connection that was parked, and fell idle then.
    pub(super) fn parked(self, since: Instant) -> Self {
        self.phase.set(Phase::Parked);
        self.since.set(Some(since));
        self
    }

    /// When it fell idle, if it is to be parked.
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

    /// A request is in the handler's hands until the guard is dropped; meanwhile nothing is awaited from the client.
    pub(super) fn request(self: &Rc<Self>) -> InFlight {
        self.in_flight.set(self.in_flight.get() + 1);
        self.body_left_unread.set(false);
        self.ledger.request();
        InFlight {
            clock: Rc::clone(self),
            finished: Cell::new(false),
        }
    }

    /// Between HTTP/2 requests bytes may be anything, such as a PING: only a request ends the wait for one.
    pub(super) fn bytes_are_frames(&self) {
        self.frames.set(true);
    }

    /// The answer does not wait for the rest of the request, so more of it may arrive while the connection closes.
    pub(super) fn leave_body_unread(&self) {
        self.body_left_unread.set(true);
    }

    pub(super) fn body_is_left_unread(&self) -> bool {
        self.body_left_unread.get()
    }

    /// Whether a client that closes its side now has left.
    pub(super) fn needs_client(&self, needs: bool) {
        self.needs_client.set(needs);
    }

    /// The client has sent all that it will (it may have closed its side, as `nc` does), and an answer is on its way: until the
    /// last of it has left, which is later than its end where the client takes it slowly.
    pub(super) fn answers_a_whole_request(&self) -> bool {
        let is_under_way = self.in_flight.get() > 0 || self.holds_back.get();
        is_under_way && !self.frames.get() && !self.needs_client.get()
    }

    /// A piece of an answer was given to be sent.
    pub(super) fn answer_passed(&self, bytes: usize) {
        self.ledger.answer(bytes as u64);
    }

    /// A frame of HTTP/2 arrives.
    pub(super) fn frame(&self, frame: &FrameHead) {
        let taken = self.ledger.frame(frame, Instant::now);
        self.settle(taken);
    }

    /// Bytes of HTTP/1 arrived, and something of a request among them. HTTP/2 begins a request when its head is whole.
    pub(super) fn bytes_arrived(&self) {
        if !self.frames.get() && self.phase.get() != Phase::Head {
            self.phase.set(Phase::Head);
            self.since.set(None);
        }
    }

    /// Ends the connection at the next chance.
    pub(super) fn settle(&self, outcome: Result<(), Cut>) {
        if let Err(cut) = outcome {
            self.cut.set(Some(cut));
        }
    }

    /// The h2 crate has given up the connection.
    pub(super) fn lost(&self, error: &h2::Error) {
        self.cut.set(self.why_cut(error));
    }

    /// Why the connection is cut short, if it is: by us, or by the h2 crate.
    pub(super) fn why_cut(&self, error: &h2::Error) -> Option<Cut> {
        self.cut.get().or_else(|| self.ledger.ended_by(error))
    }

    /// Why the connection is cut short, if it is.
    pub(super) fn cut(&self) -> Option<Cut> {
        self.cut.get()
    }

    /// An HTTP/2 connection with nothing under way is to be told to end, once; then its client has a moment to
    /// acknowledge it.
    pub(super) fn leave(&self) -> bool {
        let may = self.frames.get() && self.in_flight.get() == 0;
        if !may || self.phase.get() == Phase::Leaving {
            return false;
        }
        self.phase.set(Phase::Leaving);
        self.since.set(None);
        true
    }

    /// Whether an HTTP/2 connection is to be told to end.
    pub(super) fn is_leaving(&self) -> bool {
        self.phase.get() == Phase::Leaving
    }

    /// How long after a connection has fallen idle it is to be looked at.
    pub(super) fn first_idle_look(&self) -> Duration {
        match self.parks() {
            true => PARK_AFTER,
            false => self.idle_timeout,
        }
    }

    /// An HTTP/1 connection has been idle for so long that it is to be parked.
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

    /// Whether it is to be parked, and nothing that it holds is lost by that.
    pub(super) fn is_parked(&self) -> bool {
        self.phase.get() == Phase::Parked && !self.holds_back.get() && self.in_flight.get() == 0
    }

    /// Whether something was written that has not left yet; says whether that was so before.
    pub(super) fn holds_back(&self, holds: bool) -> bool {
        self.holds_back.replace(holds)
    }

    /// Whether something was written that has not left yet.
    pub(super) fn is_holding_back(&self) -> bool {
        self.holds_back.get()
    }

    /// Until when the wait that begins or goes on now may last; `None` while a request is in the handler's hands.
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

/// One request in the handler's hands, until its response body has ended.
#[derive(Debug)]
pub(super) struct InFlight {
    clock: Rc<Clock>,
    finished: Cell<bool>,
}

impl InFlight {
    pub(super) fn clock(&self) -> &Rc<Clock> {
        &self.clock
    }

    /// It was answered: in full, or as far as we can.
    pub(super) fn finished(&self) {
        self.finished.set(true);
    }
}

impl Drop for InFlight {
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
            true => clock.ledger.finished(),
            false => clock.settle(clock.ledger.abandoned()),
        }
    }
}
