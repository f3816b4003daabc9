//! Keys in bounded memory: a set-associative table of (tag, word) slots, lock-free for present
//! keys.
//!
//! **Layout.** A group is one cache line: four tags, then four words. A tag is 48 bits of the key's
//! hash and the 16-bit id of its limit (never 0, so the tag 0 marks an unowned slot). A key may
//! live in any of the [`CHOICES`] groups that its hash selects. It goes into the first group until
//! only one slot is left there, then into the emptiest. Unowned slots are taken before idle ones,
//! so a returning key still finds its own.
//! The table has twice as many slots as `max_keys`. A fresh key finds all its slots held:
//!
//! - once in 10¹¹ with keys in debt in 45 % of the slots (one limit at its bound, see `share`),
//! - once in 10⁸ at 55 %,
//! - once in 700 at 75 % (all limits at their bounds).
//!
//! Of all keys that arrived until then, it is one in 20,000 (simulated with 2 million slots). A
//! look-up reads 1.0 lines at 45 %, and 1.4 at 75 %.
//!
//! **Which slots a limit may take** is the caller's decision. A limit that may hold no more slots
//! replaces its own idle keys. If none is among the fresh key's slots, [`Table::vacate`] searches
//! [`SWEEP`] other groups and vacates one.
//!
//! **Foreign matches.** Two keys of one limit are confused when their 48 bits agree and they share
//! a group. The chance per look-up is at most 16 · 2⁻⁴⁸: once in 2·10¹³ look-ups of fresh keys. The
//! two then share a bucket, which is strict, never generous. Keys are keyed hashes, so an attacker
//! cannot construct a match.
//!
//! **Memory.** All slots are allocated at once. The system zeroes them and backs them with memory
//! only when they are touched: a table for 10 million keys is made in microseconds.
//!
//! **Protocol.** A word changes by compare-and-swap only. A tag changes only while its word is
//! [`RESERVED`]:
//!
//! ```text
//!   taker:    word: w ─CAS→ RESERVED      tag := new      word := first word
//!   updater:  find tag → read word → tag still the same? → CAS word
//! ```
//!
//! The updater's second look at the tag proves that the word it read was its own key's, because the
//! next key's word is published after its tag. If the slot is reassigned after that, the
//! compare-and-swap fails, unless the word has returned to the same value under another key. Within
//! one limit it cannot: a slot is reassigned when its TAT is at most `now`, and every later word is
//! later than that `now`. There are two exceptions: a refund can bring the word back to `now`
//! itself, and words of limits with different units of time may be equal by chance. In both cases
//! two 64-bit nanosecond clocks must agree while a thread is between two instructions. One charge
//! then goes to the wrong key.
//!
//! A key has only one slot: inserting takes the lock that the key's hash selects and searches again
//! before taking a slot. The compare-and-swap decides between takers of one slot under different
//! locks. No thread holds two locks, or waits while its own word is RESERVED, so any thread may
//! wait for a RESERVED word.

use std::{
    ops::Range,
    sync::{
        PoisonError,
        atomic::Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use super::{
    Key,
    sync::{AtomicU64, Mutex, yield_now, zeroed},
};

/// The largest number of keys for a table.
pub(super) const MAX_KEYS: usize = 1_000_000_000;

/// Groups in which a key may live.
const CHOICES: u32 = 4;
/// Slots in a group.
const WAYS: usize = 4;
/// Words in a group: a cache line.
const LINE: usize = 8;
/// Maximum number of insertion locks; a table of few groups has one for each.
const LOCKS: usize = 1024;
/// Groups in which a limit that may not grow searches for an idle key of its own.
const SWEEP: u32 = 8;
/// The tag of an unowned slot.
const UNUSED: u64 = 0;
/// The word of a slot that is changing owners.
const RESERVED: u64 = u64::MAX;
/// The word of a vacated slot. No idle key has it, so no late update can match it.
const VACATED: u64 = u64::MAX - 1;

/// The possible locations of a key, and its tag.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableAddress {
    tag: u64,
    start: u32,
    stride: u32,
}

impl TableAddress {
    /// The address of a key of the limit `id`. A good hash needs no mixing; two multiplications
    /// make the table independent of how its halves were filled.
    #[inline]
    pub(super) fn new(key: Key, id: u16) -> TableAddress {
        let high = (key.0 >> 64) as u64;
        let low = key.0 as u64;
        let place = (low ^ u64::from(id).wrapping_mul(0xD6E8_FEB8_6659_FD93))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let look = (high ^ low.rotate_left(32)).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
        TableAddress {
            tag: (look & !0xFFFF) | u64::from(id),
            start: (place >> 32) as u32,
            stride: place as u32 | 1,
        }
    }

    /// The 48 bits of the key's hash that are in its tag.
    #[inline]
    pub(super) fn spread(&self) -> u64 {
        spread_of(self.tag)
    }
}

/// A word that a request charges: a slot of the table, or a cell that its key cannot lose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'a> {
    word: &'a AtomicU64,
    /// The slot's tag, and its value while the slot belongs to the key.
    tag: Option<&'a AtomicU64>,
    expected: u64,
}

impl<'a> Cell<'a> {
    /// A word that cannot be reassigned.
    #[inline]
    pub(super) fn own(word: &'a AtomicU64) -> Cell<'a> {
        let (tag, expected) = (None, 0);
        Cell {
            word,
            tag,
            expected,
        }
    }

    #[inline]
    fn slot((tag, word): TableSlot<'a>, expected: u64) -> Cell<'a> {
        let tag = Some(tag);
        Cell {
            word,
            tag,
            expected,
        }
    }

    /// The word; `None` when the slot belongs, or may belong, to another key by now.
    #[inline]
    pub(super) fn load(&self) -> Option<u64> {
        let word = self.word.load(Acquire);
        (word != RESERVED && self.is_kept()).then_some(word)
    }

    /// Resets the word to that of an unseen key, if the slot still belongs to the key.
    pub(super) fn clear(&self) {
        while let Some(word) = self.load() {
            if self.swap(word, 0) {
                return;
            }
        }
    }

    /// Whether the slot still belongs to the key.
    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.tag
            .is_none_or(|tag| tag.load(Acquire) == self.expected)
    }

    /// Replaces the word whatever its value, once the slot is not changing owners.
    pub(super) fn update(&self, next: impl Fn(u64) -> u64) {
        loop {
            let word = self.word.load(Acquire);
            if word == RESERVED {
                yield_now();
            } else if self.swap(word, next(word)) {
                return;
            }
        }
    }

    /// Replaces a loaded word; false if it has changed since.
    #[inline]
    pub(super) fn swap(&self, old: u64, new: u64) -> bool {
        self.word
            .compare_exchange(old, new, AcqRel, Acquire)
            .is_ok()
    }
}

/// A slot's owner, as far as its tag identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotOwner {
    /// The id of the limit.
    pub(super) limit: u16,
    /// As [`TableAddress::spread`].
    pub(super) spread: u64,
}

impl SlotOwner {
    /// `None` for an unowned slot.
    fn of(tag: u64) -> Option<SlotOwner> {
        (tag != UNUSED).then(|| SlotOwner {
            limit: limit_of(tag),
            spread: spread_of(tag),
        })
    }
}

/// The outcome of inserting a key.
#[derive(Debug)]
pub(super) enum Insertion<'a> {
    /// Another thread has inserted it.
    Present(Cell<'a>),
    /// It took a slot from this limit's key (`None`: an unowned slot).
    Placed(Option<u16>),
    /// Keys in debt hold all its slots.
    Full,
}

#[derive(Debug)]
pub(super) struct Table {
    words: Box<[AtomicU64]>,
    /// Index of the first word that begins a cache line.
    first: usize,
    groups: u32,
    locks: Box<[Mutex<()>]>,
}

type Group = [AtomicU64; LINE];

impl Table {
    /// A table for 1 to [`MAX_KEYS`] keys; other values are clamped. Aborts the process when there
    /// is no address space, as every allocation does.
    pub(super) fn new(max_keys: usize) -> Table {
        let keys = max_keys.clamp(1, MAX_KEYS);
        let groups = keys.saturating_mul(2).div_ceil(WAYS);
        let length = groups.saturating_add(1).saturating_mul(LINE);
        let words = zeroed(length);
        let first = words.as_ptr().align_offset(64).min(LINE);
        let locks = std::iter::repeat_with(Mutex::default)
            .take(groups.min(LOCKS))
            .collect();
        Table {
            words,
            first,
            groups: u32::try_from(groups).unwrap_or(u32::MAX),
            locks,
        }
    }

    /// The slot of a key, if it has one.
    #[inline(always)]
    pub(super) fn find(&self, address: &TableAddress) -> Option<Cell<'_>> {
        let first = self.choices(address).next()?;
        let slot = match find_in(first, address.tag) {
            Some(slot) => slot,
            None => self.find_beyond_first(*address)?,
        };
        Some(Cell::slot(slot, address.tag))
    }

    #[inline(never)]
    fn find_beyond_first(&self, address: TableAddress) -> Option<TableSlot<'_>> {
        let mut others = self.choices(&address).skip(1);
        others.find_map(|group| find_in(group, address.tag))
    }

    /// Whether a key without a slot could get one. `takes` decides by a slot's owner (`None`:
    /// unowned) and word whether it may be taken.
    pub(super) fn has_room(
        &self,
        address: &TableAddress,
        takes: impl Fn(Option<SlotOwner>, u64) -> bool,
    ) -> bool {
        self.choices(address)
            .any(|group| slots(group).any(|slot| free(slot, &takes).is_some()))
    }

    /// Whether [`Table::vacate`] would find a slot.
    pub(super) fn can_vacate(
        &self,
        address: &TableAddress,
        gives: impl Fn(Option<SlotOwner>, u64) -> bool,
    ) -> bool {
        self.sweep(address)
            .any(|group| slots(group).any(|slot| free(slot, &gives).is_some()))
    }

    /// Vacates one slot near the key's that `gives` accepts, and returns its former limit. `None`
    /// when there is no such slot.
    pub(super) fn vacate(
        &self,
        address: &TableAddress,
        gives: impl Fn(Option<SlotOwner>, u64) -> bool,
    ) -> Option<u16> {
        let mut near = self.sweep(address).flat_map(slots);
        let previous = near.find_map(|slot| take(slot, UNUSED, VACATED, &gives));
        previous.map(limit_of)
    }

    /// Gives a key a slot with `word` in it, unless it has one by now.
    pub(super) fn insert(
        &self,
        address: &TableAddress,
        word: u64,
        takes: impl Fn(Option<SlotOwner>, u64) -> bool,
    ) -> Insertion<'_> {
        let turn = (address.start as usize).checked_rem(self.locks.len());
        let lock = turn.and_then(|turn| self.locks.get(turn));
        let _guard = lock.map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        for group in self.choices(address) {
            let slot = find_in(group, address.tag);
            if let Some(cell) = slot.and_then(|slot| settle(Cell::slot(slot, address.tag))) {
                return Insertion::Present(cell);
            }
        }
        while let Some(slot) = self.vacancy(address, &takes) {
            if let Some(previous) = take(slot, address.tag, word, &takes) {
                return Insertion::Placed((previous != UNUSED).then(|| limit_of(previous)));
            }
        }
        Insertion::Full
    }

    /// The slot that a fresh key should take: an unowned one, otherwise one that may be reassigned.
    fn vacancy(
        &self,
        address: &TableAddress,
        takes: &impl Fn(Option<SlotOwner>, u64) -> bool,
    ) -> Option<TableSlot<'_>> {
        let unused =
            |slot: &TableSlot<'_>| slot.0.load(Relaxed) == UNUSED && free(*slot, takes).is_some();
        let any = |slot: &TableSlot<'_>| free(*slot, takes).is_some();
        if let Some(group) = self.roomiest(address, unused) {
            return slots(group).find(unused);
        }
        let group = self.roomiest(address, any)?;
        // rotates among candidates, so that no idle key keeps its slot for ever
        let turn = address.stride as usize / 2 % WAYS;
        slots(group).cycle().skip(turn).take(WAYS).find(any)
    }

    /// The group that a fresh key should go into: the first while it has two vacancies, otherwise
    /// the one with the most.
    fn roomiest<'a>(
        &'a self,
        address: &TableAddress,
        vacant: impl Fn(&TableSlot<'a>) -> bool,
    ) -> Option<&'a Group> {
        let mut best: Option<(usize, &Group)> = None;
        for (choice, group) in self.choices(address).enumerate() {
            let room = slots(group).filter(&vacant).count();
            if choice == 0 && room >= 2 {
                return Some(group);
            }
            if room > best.map_or(0, |(most, _)| most) {
                best = Some((room, group));
            }
        }
        best.map(|(_, group)| group)
    }

    /// The groups of a key, the preferred one first.
    #[inline]
    fn choices(&self, address: &TableAddress) -> impl Iterator<Item = &Group> {
        self.groups_of(address, 0..CHOICES)
    }

    /// The groups in which a key's limit searches for a slot to vacate.
    fn sweep(&self, address: &TableAddress) -> impl Iterator<Item = &Group> {
        self.groups_of(address, CHOICES..CHOICES.saturating_add(SWEEP))
    }

    #[inline]
    fn groups_of(&self, address: &TableAddress, range: Range<u32>) -> impl Iterator<Item = &Group> {
        let (start, stride, count) = (address.start, address.stride, u64::from(self.groups));
        range.filter_map(move |choice| {
            let hash = start.wrapping_add(stride.wrapping_mul(choice));
            let group = (u64::from(hash).wrapping_mul(count) >> 32) as usize;
            let begin = self.first.wrapping_add(group.wrapping_mul(LINE));
            let words = self.words.get(begin..)?;
            words.first_chunk()
        })
    }
}

/// A slot: its tag and its word.
type TableSlot<'a> = (&'a AtomicU64, &'a AtomicU64);

fn slots(group: &Group) -> impl Iterator<Item = TableSlot<'_>> + Clone {
    let (tags, words) = group.split_at(WAYS);
    tags.iter().zip(words)
}

fn spread_of(tag: u64) -> u64 {
    tag >> 16
}

fn limit_of(tag: u64) -> u16 {
    (tag & 0xFFFF) as u16
}

/// Branch-free in the slot's position: a branch would mispredict three times in four.
#[inline(always)]
fn find_in(group: &Group, expected: u64) -> Option<TableSlot<'_>> {
    let (tags, words) = group.split_at(WAYS);
    let mut matches = 0_usize;
    for (way, tag) in tags.iter().enumerate() {
        matches |= usize::from(tag.load(Acquire) == expected) << way;
    }
    let way = matches.trailing_zeros() as usize;
    tags.get(way).zip(words.get(way))
}

/// Waits until the slot is not changing owners; `None` when it went to another key. The caller must
/// hold the key's lock: no other thread can then be inserting the key.
fn settle(cell: Cell<'_>) -> Option<Cell<'_>> {
    while cell.word.load(Acquire) == RESERVED && cell.is_kept() {
        yield_now();
    }
    cell.load().map(|_| cell)
}

/// The word of a slot that may be reassigned.
fn free(
    (tag, word): TableSlot<'_>,
    takes: &impl Fn(Option<SlotOwner>, u64) -> bool,
) -> Option<u64> {
    let owner = tag.load(Acquire);
    let seen = word.load(Acquire);
    let stable = seen != RESERVED && tag.load(Acquire) == owner;
    (stable && takes(SlotOwner::of(owner), seen)).then_some(seen)
}

/// Takes a free slot and returns its former tag; `None` when it is not free or another thread was
/// faster.
fn take(
    slot: TableSlot<'_>,
    new_tag: u64,
    new_word: u64,
    takes: &impl Fn(Option<SlotOwner>, u64) -> bool,
) -> Option<u64> {
    let seen = free(slot, takes)?;
    let (tag, word) = slot;
    word.compare_exchange(seen, RESERVED, AcqRel, Relaxed)
        .ok()?;
    let owner = tag.load(Acquire);
    if !takes(SlotOwner::of(owner), seen) {
        // since the check it went to another limit's key, whose word happens to be equal
        word.store(seen, Release);
        return None;
    }
    tag.store(new_tag, Release);
    word.store(new_word, Release);
    Some(owner)
}
