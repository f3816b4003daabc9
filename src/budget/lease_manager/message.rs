//! Messages between workers and the lease manager.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use crate::budget::{
    key_table::{SlotGuard, Tag},
    lease,
    settings::{SharedKeyName, SharedLimit},
};

/// Messages to the lease manager.
#[derive(Debug)]
pub(in crate::budget) enum Message {
    /// A request waits for tokens.
    Ask(KeyRequest),
    /// Units of a strict limit were granted by this call and not used.
    Return {
        place: usize,
        tag: Tag,
        origin: lease::Origin,
        tokens: u64,
    },
    /// Units admitted by slack were not used.
    Unslacked { place: usize, tag: Tag, tokens: u64 },
    /// Units are charged or refunded after an answer.
    Late(LateMessage),
    /// Return everything and stop.
    Close(Duration),
}

/// Units of a key to charge or refund; nobody waits for it.
#[derive(Debug)]
pub(in crate::budget) struct LateMessage {
    pub(in crate::budget) limit: Arc<SharedLimit>,
    pub(in crate::budget) tier: usize,
    pub(in crate::budget) tag: Tag,
    pub(in crate::budget) name: SharedKeyName,
    pub(in crate::budget) units: u64,
    pub(in crate::budget) kind: LateKind,
}

/// What happens to units after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) enum LateKind {
    /// Charged as far as they are left.
    Charge,
    /// Charged even if they are missing.
    Debt,
    /// Refunded; they were charged at this moment.
    Refund { charged_ns: u64 },
}

/// A waiting request.
#[derive(Debug)]
pub(in crate::budget) struct KeyRequest {
    pub(in crate::budget) limit: Arc<SharedLimit>,
    pub(in crate::budget) tier: usize,
    pub(in crate::budget) tag: Tag,
    pub(in crate::budget) name: SharedKeyName,
    pub(in crate::budget) cost: u64,
    pub(in crate::budget) answer: oneshot::Sender<KeyReply>,
}

/// The answer, and the index of its key's cell.
#[derive(Debug)]
pub(in crate::budget) struct KeyReply {
    pub(in crate::budget) place: usize,
    pub(in crate::budget) word: KeeperOutcome,
}

#[derive(Debug)]
pub(in crate::budget) enum KeeperOutcome {
    /// The store granted tokens to this request.
    Granted(Grant),
    /// It received local tokens.
    Taken(lease::TokenPair),
    /// It received slots, until it drops the guard.
    Lent(SlotGuard),
    /// It passes before Redis is asked.
    Slack,
    /// Refused; the cell knows for how long.
    Refused,
    /// Redis does not answer in time: apply the limit's fallback, for which the cell is set up.
    Alone,
}

/// Where to return tokens that were granted to waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) struct Grant {
    pub(in crate::budget) slot: usize,
    pub(in crate::budget) origin: lease::Origin,
    pub(in crate::budget) deadline_ns: u64,
}

/// A request as the lease manager stores it.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) cost: u64,
    pub(super) answer: oneshot::Sender<KeyReply>,
}

impl Waiter {
    /// False if the request is gone.
    pub(super) fn tell(self, place: usize, word: KeeperOutcome) -> bool {
        self.answer.send(KeyReply { place, word }).is_ok()
    }
}
