//! This gateway's state of each key. Workers read it without a lock; only the lease manager adds and
//! removes keys.
//!
//! **Finding.** Keys are keyed hashes. A key may live in two groups of eight; each group's tags
//! fill one cache line. Only the lease manager writes tags. A worker that spent from a cell reads
//! its tag again: if it changed, the cell was reassigned meanwhile, and the tokens go back. Each
//! quota has a guaranteed part of the cells, and none can take them all ([`SharedCapacity`]). Keys
//! without a cell share the overflow cell of their quota. Sharing is strict: together they get what
//! one key would.
//!
//! `cell` has the state of a key, `slots` that of a limit on requests in flight, and `guard` the
//! slots of an admitted request.

use std::{
    alloc::{Layout, handle_alloc_error},
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Release},
    },
};

use zerocopy::FromZeros;

use crate::limit::share::{Occupancy, SharedCapacity};

mod cell;
mod guard;
mod slots;
mod tag;

pub(super) use cell::{FallbackBucket, KeyCell, SpendOutcome};
pub use guard::SlotGuard;
pub(super) use slots::{NoSlot, SlotCell};
pub(super) use tag::{CellNotice, Tag};

use cell::WORDS;

/// Tags in a group: a cache line.
const WAYS: usize = 8;

/// All cells of a process.
#[derive(Debug)]
pub(super) struct KeyTable {
    tags: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
    /// Words before the first cell, so that cells are aligned to cache lines.
    skip: usize,
    groups: u64,
    /// Start of the overflow cells, one per quota of each limit.
    overflow: usize,
    /// How quotas divide the cells, and each quota's holdings.
    capacity: SharedCapacity,
    occupied: Box<[Occupancy]>,
}

impl KeyTable {
    /// Room for about `max_keys` keys of one quota, half as many in guaranteed parts of all quotas,
    /// and `overflow` permanent cells, one per quota. Uses only address space until it is touched.
    pub(super) fn new(max_keys: usize, overflow: usize) -> KeyTable {
        let slots = max_keys.saturating_mul(2);
        let occupied: Box<[Occupancy]> = std::iter::repeat_with(Occupancy::default)
            .take(overflow)
            .collect();
        occupied.iter().for_each(|quota| quota.set_running(true));
        let capacity = SharedCapacity::for_keys(max_keys);
        capacity.divide(occupied.iter());
        let groups = slots.div_ceil(WAYS).max(1);
        let words = zeroed((groups * WAYS + overflow + 1) * WORDS);
        KeyTable {
            tags: zeroed(groups * WAYS),
            skip: words.as_ptr().align_offset(64).min(WORDS),
            words,
            groups: groups as u64,
            overflow: groups * WAYS,
            capacity,
            occupied,
        }
    }

    /// The index of a key's cell; `None` if it has none.
    pub(super) fn find(&self, tag: Tag) -> Option<usize> {
        self.choices(tag)
            .into_iter()
            .flatten()
            .find(|&place| self.tags[place].load(Acquire) == tag.tag)
    }

    /// The cell at an index returned by this table.
    pub(super) fn cell(&self, place: usize) -> KeyCell<'_> {
        let (key_table, _) = self.words[self.skip..].as_chunks();
        KeyCell(&key_table[place])
    }

    /// The same, for a limit on requests in flight.
    pub(super) fn slots(&self, place: usize) -> SlotCell<'_> {
        SlotCell(self.cell(place).0)
    }

    /// Whether the cell at this index (still) belongs to this key. Overflow cells belong to every
    /// key.
    pub(super) fn is(&self, place: usize, tag: Tag) -> bool {
        self.tags
            .get(place)
            .is_none_or(|word| word.load(Acquire) == tag.tag)
    }

    /// Whether the cell belongs to one key, and is not an overflow cell.
    pub(super) fn has_key(&self, place: usize) -> bool {
        place < self.overflow
    }

    /// The index of an overflow cell.
    pub(super) fn overflow(&self, index: usize) -> usize {
        self.overflow + index
    }

    /// Lease manager only: returns a key's existing cell or assigns a free one in the emptier of
    /// its groups; `None` if there is no room.
    pub(super) fn claim(&self, tag: Tag, quota: usize) -> Option<usize> {
        if let Some(own) = self.find(tag) {
            return Some(own);
        }
        let holder = self.occupied.get(quota)?;
        if !self.capacity.may_grow(holder, 1) {
            return None;
        }
        let is_free = |place: &usize| self.tags[*place].load(Acquire) == 0;
        let [first, second] = self.choices(tag);
        let free = |group: &std::ops::Range<usize>| group.clone().filter(is_free).count();
        let mut emptier = match free(&first) < free(&second) {
            true => second,
            false => first,
        };
        let place = emptier.find(is_free)?;
        self.capacity.grow(holder, 1);
        self.cell(place).clear();
        self.tags[place].store(tag.tag, Release);
        Some(place)
    }

    /// Lease manager only: takes a cell away from its key.
    pub(super) fn release(&self, place: usize, quota: usize) {
        if let Some(tag) = self.tags.get(place) {
            tag.store(0, Release);
            self.cell(place).clear();
            if let Some(holder) = self.occupied.get(quota) {
                self.capacity.shrink(holder, 1);
            }
        }
    }

    fn choices(&self, tag: Tag) -> [std::ops::Range<usize>; 2] {
        let spread = tag.place.wrapping_mul(0xD6E8_FEB8_6659_FD93);
        let group = |hash: u64| {
            let start = ((u128::from(hash) * u128::from(self.groups)) >> 64) as usize * WAYS;
            start..start + WAYS
        };
        [group(tag.place), group(spread)]
    }
}

fn zeroed(length: usize) -> Box<[AtomicU64]> {
    FromZeros::new_box_zeroed_with_elems(length).unwrap_or_else(|_| {
        handle_alloc_error(Layout::array::<AtomicU64>(length).unwrap_or(Layout::new::<u64>()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Key;

    fn tag(key: u128) -> Tag {
        Tag::new(Key(key << 64 | key), 0)
    }

    #[test]
    fn a_full_table_gives_no_more_hands_and_a_released_one_is_empty() {
        let key_table = KeyTable::new(4, 1);
        let places: Vec<usize> = (1..=8)
            .filter_map(|key| key_table.claim(tag(key), 0))
            .collect();
        assert_eq!(places.len(), 8);
        assert_eq!(key_table.claim(tag(9), 0), None);
        key_table.cell(places[0]).bank(0, 1_000_000_000, 1);
        key_table.release(places[0], 0);
        assert_eq!(key_table.find(tag(1)), None);
        let place = key_table.claim(tag(9), 0).expect("room again");
        assert_eq!(key_table.cell(place).held(1), ([0, 0], [false, false]));
    }

    #[test]
    fn a_quota_that_takes_all_it_may_leaves_room_for_the_others() {
        let key_table = KeyTable::new(10_000, 3);
        let claim = |key: u64, quota| {
            let mixed = u128::from(key + 1).wrapping_mul(0xDA94_2042_E4DD_58B5_9E37_79B9_7F4A_7C15);
            key_table.claim(Tag::new(Key(mixed ^ (mixed >> 61)), quota), quota)
        };
        let taken = (0..40_000).filter(|&key| claim(key, 0).is_some()).count();
        assert!((9_000..10_000).contains(&taken), "{taken}");
        for quota in [1, 2] {
            let taken = (0..1_600).filter(|&key| claim(key << 20, quota).is_some());
            assert_eq!(taken.count(), 1_600);
        }
    }
}
