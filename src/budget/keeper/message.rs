//! What workers and the keeper say to each other.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use crate::budget::{
    hand::{Lent, Tag},
    lease,
    settings::{Name, SharedLimit},
};

/// What workers tell the keeper.
#[derive(Debug)]
pub(in crate::budget) enum Message {
    /// A request waits for tokens.
    Ask(Question),
    /// A hand should be filled up, or a slot has come back to it.
    Low(usize, Tag),
    /// Units of a limit that is always asked for were granted by this call and not used.
    Return {
        place: usize,
        tag: Tag,
        origin: lease::Origin,
        tokens: u64,
    },
    /// Units that were let through before Redis was asked were not used.
    Unslacked { place: usize, tag: Tag, tokens: u64 },
    /// Hand everything back, and end.
    Close(Duration),
}

/// A request that waits.
#[derive(Debug)]
pub(in crate::budget) struct Question {
    pub(in crate::budget) limit: Arc<SharedLimit>,
    pub(in crate::budget) tier: usize,
    pub(in crate::budget) tag: Tag,
    pub(in crate::budget) name: Name,
    pub(in crate::budget) cost: u64,
    pub(in crate::budget) answer: oneshot::Sender<Answer>,
}

/// What it is told, and the place of its key's hand.
#[derive(Debug)]
pub(in crate::budget) struct Answer {
    pub(in crate::budget) place: usize,
    pub(in crate::budget) word: Word,
}

#[derive(Debug)]
pub(in crate::budget) enum Word {
    /// It has its tokens: the store granted them to it.
    Granted(Grant),
    /// It has its tokens: out of the hand.
    Taken(lease::Hand),
    /// It has its slots, until it gives them back.
    Lent(Lent),
    /// It passes before Redis is asked.
    Slack,
    /// Refused; the hand knows for how long.
    Refused,
    /// Redis does not answer in time: the limit's own way to go on, for which the hand is prepared.
    Alone,
}

/// Where tokens belong that were granted to requests that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) struct Grant {
    pub(in crate::budget) slot: usize,
    pub(in crate::budget) origin: lease::Origin,
    pub(in crate::budget) deadline_ns: u64,
}

/// A question as the keeper keeps it.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) cost: u64,
    pub(super) answer: oneshot::Sender<Answer>,
}

impl Waiter {
    /// False when it has gone.
    pub(super) fn tell(self, place: usize, word: Word) -> bool {
        self.answer.send(Answer { place, word }).is_ok()
    }
}
