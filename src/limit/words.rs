//! Every algorithm that keeps one 64-bit word per key, behind the same few pure functions over that word.
//!
//! 0 is a key never seen, and `u64::MAX` is no word: the table reserves it. What a word means is its [`Form`]; words
//! of one form stay readable when a limit's amounts change, and those of another are never read.

use super::{
    Algorithm, Quota, QuotaError, Standing,
    bucket::{Buckets, Scale, Shape},
    in_flight::InFlight,
    overdraft::Overdraft,
    window::{Layout, Windows},
};

/// What a request asks of a word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) tier: usize,
    pub(super) now_ns: u64,
    pub(super) cost: u64,
    pub(super) max_delay_ns: u64,
    /// 48 bits of the key's hash, which set its windows apart from other keys'.
    pub(super) spread: u64,
}

/// One quota per tier, ready to decide over a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Words {
    Bucket(Buckets),
    Window(Windows),
    InFlight(InFlight),
}

/// What a limit's words mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// A TAT in this unit of time.
    Tat(Scale),
    /// A window's index and counts.
    Window(Layout),
    /// Slots in use.
    Slots,
    /// None: the limit keeps a log of this many nanoseconds.
    Log { window_ns: u64 },
}

impl Form {
    /// Whether a word carries no information at `now_ns`: a key never seen would stand the same.
    #[inline]
    pub(super) fn is_idle(self, now_ns: u64, spread: u64, word: u64) -> bool {
        match self {
            Form::Tat(scale) => scale.is_full(now_ns, word),
            Form::Window(layout) => layout.is_idle(now_ns, spread, word),
            Form::Slots | Form::Log { .. } => word == 0,
        }
    }
}

impl Words {
    /// `None` for the algorithm that keeps no word. With an `overdraft` requests are charged by
    /// estimates; slots are not.
    pub(super) fn new(
        algorithm: Algorithm,
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Option<Result<Words, QuotaError>> {
        Some(match algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra => {
                Buckets::new(Shape::Burst, quotas, overdraft).map(Words::Bucket)
            }
            Algorithm::LeakyBucket => {
                Buckets::new(Shape::Queue, quotas, overdraft).map(Words::Bucket)
            }
            Algorithm::FixedWindow => Windows::fixed(quotas, overdraft).map(Words::Window),
            Algorithm::SlidingWindow => Windows::sliding(quotas, overdraft).map(Words::Window),
            Algorithm::Concurrency => InFlight::new(quotas).map(Words::InFlight),
            Algorithm::SlidingLog => return None,
        })
    }

    pub(super) fn form(&self, tier: usize) -> Form {
        match self {
            Words::Bucket(buckets) => Form::Tat(buckets.scale()),
            Words::Window(windows) => Form::Window(windows.layout(tier)),
            Words::InFlight(_) => Form::Slots,
        }
    }

    pub(super) fn tiers(&self) -> usize {
        match self {
            Words::Bucket(buckets) => buckets.tiers(),
            Words::Window(windows) => windows.tiers(),
            Words::InFlight(slots) => slots.tiers(),
        }
    }

    /// Whether words of `before` say the same here; `was` is, by tier, the tier of it.
    pub(super) fn continues(&self, before: &Words, was: &[usize]) -> bool {
        let mut pairs = was.iter().enumerate();
        match (self, before) {
            (Words::Bucket(buckets), Words::Bucket(before)) => {
                pairs.all(|(tier, &was)| buckets.continues(tier, before, was))
            }
            (Words::Window(windows), Words::Window(before)) => {
                pairs.all(|(tier, &was)| windows.layout(tier) == before.layout(was))
            }
            (Words::InFlight(_), Words::InFlight(_)) => true,
            _ => false,
        }
    }

    /// After so long nothing counts that is spent now.
    pub(super) fn recovery_ns(&self) -> u64 {
        match self {
            Words::Bucket(buckets) => buckets.recovery_ns(),
            Words::Window(windows) => windows.recovery_ns(),
            Words::InFlight(_) => 0,
        }
    }

    /// The word after a charge, or, where the request is denied, the word to keep: the same, unless the clock stepped
    /// back.
    ///
    /// What is not inlined gets a copy of the question: the original can then stay in registers.
    #[inline(always)]
    pub(super) fn charge(&self, ask: &Ask, word: u64) -> Result<u64, u64> {
        match self {
            Words::Bucket(buckets) => buckets.charge(ask, word),
            Words::Window(windows) => windows.charge(&{ *ask }, word),
            Words::InFlight(slots) => slots.charge(&{ *ask }, word),
        }
    }

    /// The word after a charge that is not asked for but has happened: at worst nothing remains. Slots cannot be
    /// charged like this, as nobody would give them back.
    pub(super) fn charge_anyway(&self, ask: &Ask, word: u64) -> u64 {
        match self {
            Words::Bucket(buckets) => buckets.charge_anyway(ask, word),
            Words::Window(windows) => windows.charge_anyway(ask, word),
            Words::InFlight(_) => word,
        }
    }

    /// The word after a charge that has happened and may go into debt, and the units that the
    /// bound on debt forgives.
    pub(super) fn overdraw(&self, ask: &Ask, word: u64) -> (u64, u64) {
        match self {
            Words::Bucket(buckets) => buckets.overdraw(ask, word),
            Words::Window(windows) => windows.overdraw(ask, word),
            Words::InFlight(_) => (word, ask.cost),
        }
    }

    /// Units that a word owes: what is spent and has not come back.
    pub(super) fn owed(&self, ask: &Ask, word: u64) -> u64 {
        match self {
            Words::Bucket(buckets) => buckets.owed(ask, word),
            Words::Window(windows) => windows.owed(ask, word),
            Words::InFlight(_) => word,
        }
    }

    /// The most units that one estimate takes.
    pub(super) fn largest_claim(&self, tier: usize) -> u64 {
        match self {
            Words::Bucket(buckets) => buckets.largest_claim(tier),
            Words::Window(windows) => windows.largest_claim(tier),
            Words::InFlight(_) => 1,
        }
    }

    /// The word after giving back a charge that was made with this very `ask`.
    pub(super) fn refund(&self, ask: &Ask, word: u64) -> u64 {
        match self {
            Words::Bucket(buckets) => buckets.refund(ask, word),
            Words::Window(windows) => windows.refund(ask, word),
            Words::InFlight(slots) => slots.refund(ask, word),
        }
    }

    /// How a word stands to a request that is not charged.
    pub(super) fn standing(&self, ask: &Ask, word: u64) -> Standing {
        match self {
            Words::Bucket(buckets) => buckets.standing(ask, word),
            Words::Window(windows) => windows.standing(ask, word),
            Words::InFlight(slots) => slots.standing(ask, word),
        }
    }

    /// How a word stands that the request's charge has just made.
    pub(super) fn standing_charged(&self, ask: &Ask, word: u64) -> Standing {
        let after = Ask { cost: 0, ..*ask };
        let delay_ns = match self {
            Words::Bucket(buckets) => buckets.delay_ns(ask, word),
            Words::Window(_) | Words::InFlight(_) => 0,
        };
        Standing {
            delay_ns,
            ..self.standing(&after, word)
        }
    }

    /// Whether a charge that reached another key's word must be taken back: a slot that is never released is lost
    /// for good, while a unit of time comes back by itself.
    #[inline]
    pub(super) fn is_slots(&self) -> bool {
        matches!(self, Words::InFlight(_))
    }
}
