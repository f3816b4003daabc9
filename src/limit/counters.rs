//! The counters of one limit in one format, and the buckets that keys without a slot share.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{algorithm::StateFormat, share::Occupancy};

/// Overflow buckets per limit; a power of two, at most 2¹⁶.
pub(super) const OVERFLOW_BUCKETS: usize = 256;

/// A word alone on its cache line, for cells that every request of a limit may touch.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct CacheLine(pub(super) AtomicU64);

/// The counters of one limit.
#[derive(Debug)]
pub(super) struct LimitCounters {
    pub(super) id: u16,
    pub(super) form: StateFormat,
    /// The bucket for charges without a key.
    pub(super) unkeyed: CacheLine,
    /// The buckets that keys without a slot share, by hash; allocated on first use.
    overflow: OnceLock<Box<[AtomicU64]>>,
    /// The memory that the limit holds, under this rule and previous ones.
    pub(super) occupancy: Arc<Occupied>,
    pub(super) keys: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) overflowed: AtomicU64,
    /// When another rule replaced it, and until when it still matters; both `u64::MAX` while it is
    /// in use.
    pub(super) succeeded_ns: AtomicU64,
    pub(super) until_ns: AtomicU64,
}

/// How much of each kind of memory one limit holds.
#[derive(Debug, Default)]
pub(super) struct Occupied {
    /// Slots of the table.
    pub(super) slots: Occupancy,
    /// Entries of sliding logs.
    pub(super) entries: Occupancy,
}

/// One of the buckets for keys without a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverflowBucket<'a> {
    pub(super) word: &'a AtomicU64,
    /// Stands in for the key's hash: all keys of the bucket share its windows.
    pub(super) spread: u64,
}

/// Index of the overflow bucket for keys with this hash.
pub(super) fn overflow_index(spread: u64) -> usize {
    (spread as usize) & (OVERFLOW_BUCKETS - 1)
}

impl LimitCounters {
    /// Fresh counters under this id.
    pub(super) fn new(id: u16, form: StateFormat, occupancy: Arc<Occupied>) -> LimitCounters {
        LimitCounters {
            id,
            form,
            unkeyed: CacheLine::default(),
            overflow: OnceLock::new(),
            occupancy,
            keys: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            succeeded_ns: AtomicU64::new(u64::MAX),
            until_ns: AtomicU64::new(u64::MAX),
        }
    }

    /// The overflow bucket for keys with this hash; allocates the buckets if needed.
    #[cold]
    pub(super) fn overflow(&self, spread: u64) -> Option<OverflowBucket<'_>> {
        let new = || std::iter::repeat_with(AtomicU64::default);
        let buckets = self
            .overflow
            .get_or_init(|| new().take(OVERFLOW_BUCKETS).collect());
        overflow_bucket(buckets, overflow_index(spread))
    }

    /// As above, but `None` if no key has needed one yet.
    #[inline]
    pub(super) fn overflow_used(&self, spread: u64) -> Option<OverflowBucket<'_>> {
        overflow_bucket(self.overflow.get()?, overflow_index(spread))
    }
}

fn overflow_bucket(buckets: &[AtomicU64], index: usize) -> Option<OverflowBucket<'_>> {
    let spread = (index as u64) << 40;
    let word = buckets.get(index)?;
    Some(OverflowBucket { word, spread })
}

impl LimitCounters {
    /// Freezes these counters at `now_ns`; they matter until `until_ns`.
    pub(super) fn retire(&self, now_ns: u64, until_ns: u64) {
        self.succeeded_ns.store(now_ns, Relaxed);
        self.until_ns.store(until_ns, Relaxed);
    }

    /// Whether a word carries no information: a key without a word would have the same status.
    pub(super) fn is_idle(&self, now_ns: u64, spread: u64, word: u64) -> bool {
        let then_ns = now_ns.min(self.succeeded_ns.load(Relaxed));
        self.form.is_idle(then_ns, spread, word) || self.until_ns.load(Relaxed) <= now_ns
    }
}
