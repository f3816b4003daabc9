//! The algorithms: one record for each, and the interface of those with one 64-bit word per key.
//!
//! To add an algorithm, write its functions in a file of its own, and add a variant and a record
//! here. Configuration, policies and logs follow from the record.
//!
//! 0 is a key never seen; `u64::MAX` is not a word, because the table reserves it. A word's meaning
//! is its [`StateFormat`]. Words of one format stay readable when a limit's amounts change; words of
//! another format are never read.

use super::{
    Quota, QuotaError, Standing,
    bucket::{BucketKind, Buckets, Scale},
    overdraft::Overdraft,
    slot_counters::SlotCounters,
    window::{Layout, Windows},
    word_request::{SpentUnits, WordRequest},
};

/// How a limit counts. See `docs/algorithms.md` for what a client sees of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Token bucket, kept as one timestamp per key: `amount` per `period`, at most `burst` at once.
    TokenBucket,
    /// Another name for the token bucket.
    Gcra,
    /// Token bucket without a delay; with one, a queue of `burst` places including the request in
    /// service.
    LeakyBucket,
    /// At most `amount` in each `period`; the count resets at the end of each. Ignores the burst.
    FixedWindow,
    /// About `amount` at most in any `period`, from two counters. Ignores the burst.
    SlidingWindow,
    /// At most `amount` in any `period`, exactly, from a log of at most 10,000. Ignores the burst.
    SlidingLog,
    /// At most this many in flight ([`Quota::slots`]); return them with
    /// [`Store::release`](super::Store::release).
    Concurrency,
}

/// The properties of an algorithm outside of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmRecord {
    /// The name in the configuration, in logs and in the admin API.
    pub name: &'static str,
    /// The keys that set its quotas.
    pub quota: QuotaShape,
    /// How spent units return.
    pub refill: Refill,
    /// How gateways that share a limit count it.
    pub shared: SharedMethod,
}

/// The configuration keys that set a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaShape {
    /// `rate` and `burst`.
    Bucket,
    /// `rate` only.
    Window,
    /// `limit` only: requests in flight.
    InFlight,
}

/// How spent units return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// Unit by unit: a bucket or a sliding window.
    Gradual,
    /// All at one moment: a window that restarts, or the oldest entry leaving a log.
    AtOnce,
    /// When the request ends.
    OnRelease,
}

/// How gateways that share a limit count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SharedMethod {
    /// Token bucket: refills continuously.
    Bucket,
    /// Fixed window.
    Fixed,
    /// Sliding window from two counters.
    Sliding,
    /// Sliding log: exact, no leases.
    Log,
    /// Requests in flight: slots instead of tokens, which return on release.
    Slots,
}

impl Algorithm {
    /// Every algorithm, in the order of the documentation.
    pub const ALL: [Algorithm; 7] = [
        Algorithm::TokenBucket,
        Algorithm::Gcra,
        Algorithm::LeakyBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::SlidingLog,
        Algorithm::Concurrency,
    ];

    /// The names of all algorithms.
    pub const NAMES: [&'static str; Algorithm::ALL.len()] = {
        let mut names = [""; Algorithm::ALL.len()];
        let mut index = 0;
        while index < names.len() {
            names[index] = Algorithm::ALL[index].record().name;
            index += 1;
        }
        names
    };

    /// The properties of the algorithm.
    pub const fn record(self) -> AlgorithmRecord {
        use QuotaShape::{Bucket, InFlight, Window};
        use Refill::{AtOnce, Gradual, OnRelease};
        use SharedMethod as Shared;
        let (name, quota, refill, shared) = match self {
            Algorithm::TokenBucket => ("token_bucket", Bucket, Gradual, Shared::Bucket),
            Algorithm::Gcra => ("gcra", Bucket, Gradual, Shared::Bucket),
            Algorithm::LeakyBucket => ("leaky_bucket", Bucket, Gradual, Shared::Bucket),
            Algorithm::FixedWindow => ("fixed_window", Window, AtOnce, Shared::Fixed),
            Algorithm::SlidingWindow => ("sliding_window", Window, Gradual, Shared::Sliding),
            Algorithm::SlidingLog => ("sliding_log", Window, AtOnce, Shared::Log),
            Algorithm::Concurrency => ("concurrency", InFlight, OnRelease, Shared::Slots),
        };
        AlgorithmRecord {
            name,
            quota,
            refill,
            shared,
        }
    }

    /// Whether the quota has a burst beside the rate.
    pub fn has_burst(self) -> bool {
        self.record().quota == QuotaShape::Bucket
    }

    /// Whether it can charge costs that are known only afterwards: a log and slots in flight count
    /// requests one by one.
    pub fn supports_costs(self) -> bool {
        !matches!(
            self.record().shared,
            SharedMethod::Log | SharedMethod::Slots
        )
    }

    /// Whether a request holds its charge until it ends.
    pub fn holds_slots(self) -> bool {
        self.record().refill == Refill::OnRelease
    }
}

/// One quota per tier, ready to decide over a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WordAlgorithm {
    Bucket(Buckets),
    Window(Windows),
    InFlight(SlotCounters),
}

/// The meaning of a limit's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum StateFormat {
    /// A TAT in this unit of time.
    Tat(Scale),
    /// A window's index and counts.
    Window(Layout),
    /// Slots in use.
    Slots,
    /// No word: the limit keeps a log of this many nanoseconds.
    Log { window_ns: u64 },
}

impl StateFormat {
    /// Whether a word carries no information at `now_ns`: an unseen key would have the same status.
    #[inline]
    pub(super) fn is_idle(self, now_ns: u64, spread: u64, word: u64) -> bool {
        match self {
            StateFormat::Tat(scale) => scale.is_full(now_ns, word),
            StateFormat::Window(layout) => layout.is_idle(now_ns, spread, word),
            StateFormat::Slots | StateFormat::Log { .. } => word == 0,
        }
    }
}

impl WordAlgorithm {
    /// `None` for the algorithm without a word. With an `overdraft`, requests are charged by
    /// estimates; slots are not.
    pub(super) fn new(
        algorithm: Algorithm,
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Option<Result<WordAlgorithm, QuotaError>> {
        Some(match algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra => {
                Buckets::new(BucketKind::Burst, quotas, overdraft).map(WordAlgorithm::Bucket)
            }
            Algorithm::LeakyBucket => {
                Buckets::new(BucketKind::Queue, quotas, overdraft).map(WordAlgorithm::Bucket)
            }
            Algorithm::FixedWindow => Windows::fixed(quotas, overdraft).map(WordAlgorithm::Window),
            Algorithm::SlidingWindow => {
                Windows::sliding(quotas, overdraft).map(WordAlgorithm::Window)
            }
            Algorithm::Concurrency => SlotCounters::new(quotas).map(WordAlgorithm::InFlight),
            Algorithm::SlidingLog => return None,
        })
    }

    pub(super) fn form(&self, tier: usize) -> StateFormat {
        match self {
            WordAlgorithm::Bucket(buckets) => StateFormat::Tat(buckets.scale()),
            WordAlgorithm::Window(windows) => StateFormat::Window(windows.layout(tier)),
            WordAlgorithm::InFlight(_) => StateFormat::Slots,
        }
    }

    pub(super) fn tiers(&self) -> usize {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.tiers(),
            WordAlgorithm::Window(windows) => windows.tiers(),
            WordAlgorithm::InFlight(slots) => slots.tiers(),
        }
    }

    /// Whether words of `before` mean the same here; `was` maps each tier to its tier in `before`.
    pub(super) fn continues(&self, before: &WordAlgorithm, was: &[usize]) -> bool {
        let mut pairs = was.iter().enumerate();
        match (self, before) {
            (WordAlgorithm::Bucket(buckets), WordAlgorithm::Bucket(before)) => {
                pairs.all(|(tier, &was)| buckets.continues(tier, before, was))
            }
            (WordAlgorithm::Window(windows), WordAlgorithm::Window(before)) => {
                pairs.all(|(tier, &was)| windows.layout(tier) == before.layout(was))
            }
            (WordAlgorithm::InFlight(_), WordAlgorithm::InFlight(_)) => true,
            _ => false,
        }
    }

    /// The time after which nothing spent now counts any more.
    pub(super) fn recovery_ns(&self) -> u64 {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.recovery_ns(),
            WordAlgorithm::Window(windows) => windows.recovery_ns(),
            WordAlgorithm::InFlight(_) => 0,
        }
    }

    /// The word after a charge. On denial it is the unchanged word, corrected if the clock stepped
    /// back.
    ///
    /// Non-inlined callees take a copy of `ask` so the original stays in registers.
    #[inline(always)]
    pub(super) fn charge(&self, ask: &WordRequest, word: u64) -> Result<u64, u64> {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.charge(ask, word),
            WordAlgorithm::Window(windows) => windows.charge(&{ *ask }, word),
            WordAlgorithm::InFlight(slots) => slots.charge(&{ *ask }, word),
        }
    }

    /// The word after an unconditional charge; at worst nothing remains. Slots cannot be charged
    /// this way, because no request would return them.
    pub(super) fn charge_anyway(&self, ask: &WordRequest, word: u64) -> u64 {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.charge_anyway(ask, word),
            WordAlgorithm::Window(windows) => windows.charge_anyway(ask, word),
            WordAlgorithm::InFlight(_) => word,
        }
    }

    /// The word after an unconditional charge that may go into debt, and the units beyond the debt
    /// bound, which are forgiven.
    pub(super) fn overdraw(&self, ask: &WordRequest, word: u64) -> (u64, u64) {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.overdraw(ask, word),
            WordAlgorithm::Window(windows) => windows.overdraw(ask, word),
            WordAlgorithm::InFlight(_) => (word, ask.cost),
        }
    }

    /// Units that a word owes: spent and not yet refilled.
    pub(super) fn owed(&self, ask: &WordRequest, word: u64) -> u64 {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.owed(ask, word),
            WordAlgorithm::Window(windows) => windows.owed(ask, word),
            WordAlgorithm::InFlight(_) => word,
        }
    }

    /// The largest charge of one estimate.
    pub(super) fn largest_claim(&self, tier: usize) -> u64 {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.largest_claim(tier),
            WordAlgorithm::Window(windows) => windows.largest_claim(tier),
            WordAlgorithm::InFlight(_) => 1,
        }
    }

    /// The word after a refund of a charge made with this same `ask`.
    pub(super) fn refund(&self, ask: &WordRequest, word: u64) -> u64 {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.refund(ask, word),
            WordAlgorithm::Window(windows) => windows.refund(ask, word),
            WordAlgorithm::InFlight(slots) => slots.refund(ask, word),
        }
    }

    /// Status of a word for a request that was not charged.
    pub(super) fn standing(&self, ask: &WordRequest, word: u64) -> Standing {
        match self {
            WordAlgorithm::Bucket(buckets) => buckets.standing(ask, word),
            WordAlgorithm::Window(windows) => windows.standing(ask, word),
            WordAlgorithm::InFlight(slots) => slots.standing(ask, word),
        }
    }

    /// Status of the word that the request's charge has just produced.
    pub(super) fn standing_charged(&self, ask: &WordRequest, word: u64) -> Standing {
        let after = WordRequest { cost: 0, ..*ask };
        let delay_ns = match self {
            WordAlgorithm::Bucket(buckets) => buckets.delay_ns(ask, word),
            WordAlgorithm::Window(_) | WordAlgorithm::InFlight(_) => 0,
        };
        Standing {
            delay_ns,
            ..self.standing(&after, word)
        }
    }

    /// Whether a charge that reached another key's word must be taken back. A slot that is never
    /// released is lost for good, while a unit of time refills by itself.
    #[inline]
    pub(super) fn is_slots(&self) -> bool {
        matches!(self, WordAlgorithm::InFlight(_))
    }
}

impl WordAlgorithm {
    /// The word of a key that has spent these units just now and nothing else.
    pub(super) fn spent_now(&self, ask: &WordRequest, units: u64) -> u64 {
        let at_ns = ask.now_ns;
        self.spent(SpentUnits { at_ns, units }, ask.tier, ask.spread)
    }

    /// The word of a key that has spent this and nothing else.
    pub(super) fn spent(&self, spent: SpentUnits, tier: usize, spread: u64) -> u64 {
        let ask = WordRequest {
            cost: spent.units,
            ..WordRequest::zero_cost(tier, spent.at_ns, spread)
        };
        self.overdraw(&ask, 0).0
    }
}
