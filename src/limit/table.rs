//! Keys in bounded memory: a set-associative table of (tag, word) slots, lock-free for keys that are there.
//!
//! **Layout.** A group is one cache line: four tags, then four words. A tag is 48 bits of the key's hash and the 16-bit
//! id of its limit (never 0, so the tag 0 is a slot that nobody has). A key may live in any of the [`CHOICES`]
//! groups that its hash names; it goes into the first one until only one slot is left there, then into the emptiest.
//! Slots that nobody has are taken before idle ones, so that a key which comes back still finds its own.
//! There are twice as many slots as `max_keys`. With debtors in 45 % of them (one limit at its bound, see the module `share`) one
//! fresh key in 10¹¹ finds all its slots held, at 55 % one in 10⁸, at 75 % (all limits at their bounds) one in 700; of all the keys
//! that came until then one in 20,000 (simulated with 2 million slots). A look-up reads 1.0 lines at 45 %, and 1.4 at 75 %.
//!
//! **Which slots a limit may take** is the caller's to say. A limit that may hold no more of them replaces its own idle keys. Where
//! none is among the slots of the fresh key, [`Table::vacate`] looks for one in [`SWEEP`] other groups and gives it up.
//!
//! **Foreign matches.** Two keys of one limit are taken for one another when their 48 bits agree and they share a
//! group: for one look-up by chance at most 16 · 2⁻⁴⁸, that is once in 2·10¹³ look-ups of fresh keys. They then share
//! a bucket, which is strict, never generous. Keys are keyed hashes, so nobody can aim at it.
//!
//! **Memory.** All slots are allocated at once, zeroed by the system and therefore only backed by memory once they
//! are touched: a table for 10 million keys is made in microseconds.
//!
//! **Protocol.** A word changes by compare-and-swap only. A tag changes only while its word is [`RESERVED`]:
//!
//! ```text
//!   taker:    word: w ─CAS→ RESERVED      tag := new      word := first word
//!   updater:  find tag → read word → tag still the same? → CAS word
//! ```
//!
//! The updater's second look at the tag proves that the word it read was its own key's, since a word of the next key
//! is published after the next tag. If the slot is taken after that, the compare-and-swap fails, unless the word has come
//! back to the same value under another key. It cannot within one limit: a slot is given away when its TAT is at most
//! `now`, and every word written afterwards is later than that `now`. (A refund can bring it back to `now` itself,
//! and between limits with different units of time words may be equal by chance: in both cases two 64-bit
//! nanosecond clocks must agree while a thread is between two instructions, and then one charge goes to the wrong key.)
//!
//! Only one slot per key: whoever inserts holds the lock that the key's hash names and looks again before it takes
//! a slot. Takers of the same slot under different locks are decided by the compare-and-swap. Nobody holds two
//! locks or waits while a word is RESERVED, so whoever meets a RESERVED word may wait for it.

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

/// The most keys that a table can be made for.
pub(super) const MAX_KEYS: usize = 1_000_000_000;

/// Groups in which a key may live.
const CHOICES: u32 = 4;
/// Slots in a group.
const WAYS: usize = 4;
/// Words in a group: a cache line.
const LINE: usize = 8;
/// Locks for inserting, at most; a table of few groups has one for each.
const LOCKS: usize = 1024;
/// Groups in which a limit that may not grow looks for an idle key of its own.
const SWEEP: u32 = 8;
/// The tag of a slot that nobody has.
const UNUSED: u64 = 0;
/// The word of a slot that is changing hands.
const RESERVED: u64 = u64::MAX;
/// The word of a slot that was given up: not that of any idle key, so no update that is late can reach it.
const VACATED: u64 = u64::MAX - 1;

/// Where a key may be, and what it looks like there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    tag: u64,
    start: u32,
    stride: u32,
}

impl Address {
    /// The address of a key of the limit `id`. A good hash needs no mixing; two multiplications make the table
    /// indifferent to how its halves were filled.
    #[inline]
    pub(super) fn new(key: Key, id: u16) -> Address {
        let high = (key.0 >> 64) as u64;
        let low = key.0 as u64;
        let place = (low ^ u64::from(id).wrapping_mul(0xD6E8_FEB8_6659_FD93))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let look = (high ^ low.rotate_left(32)).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
        Address {
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

/// A word that a request charges: a slot of the table, or a cell that no key can lose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'a> {
    word: &'a AtomicU64,
    /// The slot's tag, and what it is while the slot is the key's.
    tag: Option<&'a AtomicU64>,
    expected: u64,
}

impl<'a> Cell<'a> {
    /// A word that belongs to nobody else.
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
    fn slot((tag, word): Slot<'a>, expected: u64) -> Cell<'a> {
        let tag = Some(tag);
        Cell {
            word,
            tag,
            expected,
        }
    }

    /// The word; `None` when the slot is, or may be, another key's by now.
    #[inline]
    pub(super) fn load(&self) -> Option<u64> {
        let word = self.word.load(Acquire);
        (word != RESERVED && self.is_kept()).then_some(word)
    }

    /// Makes the word that of a key never seen, if the slot is still the key's.
    pub(super) fn clear(&self) {
        while let Some(word) = self.load() {
            if self.swap(word, 0) {
                return;
            }
        }
    }

    /// Whether the slot is still the key's.
    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.tag
            .is_none_or(|tag| tag.load(Acquire) == self.expected)
    }

    /// Replaces the word whatever it is, once the slot is not changing hands.
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

    /// Replaces a word that was loaded; false when it has changed since.
    #[inline]
    pub(super) fn swap(&self, old: u64, new: u64) -> bool {
        self.word
            .compare_exchange(old, new, AcqRel, Acquire)
            .is_ok()
    }
}

/// Whose slot it is, as far as its tag tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// The id of the limit.
    pub(super) limit: u16,
    /// As [`Address::spread`].
    pub(super) spread: u64,
}

impl Owner {
    /// `None` for a slot that nobody has.
    fn of(tag: u64) -> Option<Owner> {
        (tag != UNUSED).then(|| Owner {
            limit: limit_of(tag),
            spread: spread_of(tag),
        })
    }
}

/// What became of a key that was not in the table.
#[derive(Debug)]
pub(super) enum Insertion<'a> {
    /// It has been inserted by somebody else.
    Present(Cell<'a>),
    /// It holds the slot that this limit's key gave up (`None`: that nobody had).
    Placed(Option<u16>),
    /// All its slots are held by keys in debt.
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
    /// A table for 1 to [`MAX_KEYS`] keys (others are brought within). Ends the process when there is no address space
    /// for it, as every allocation does.
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
    pub(super) fn find(&self, address: &Address) -> Option<Cell<'_>> {
        let first = self.choices(address).next()?;
        let slot = match find_in(first, address.tag) {
            Some(slot) => slot,
            None => self.find_beyond_first(*address)?,
        };
        Some(Cell::slot(slot, address.tag))
    }

    #[inline(never)]
    fn find_beyond_first(&self, address: Address) -> Option<Slot<'_>> {
        let mut others = self.choices(&address).skip(1);
        others.find_map(|group| find_in(group, address.tag))
    }

    /// Whether a key that has no slot could be given one. `takes` says whether it may have the slot of that owner (`None`:
    /// nobody's) with that word in it.
    pub(super) fn has_room(
        &self,
        address: &Address,
        takes: impl Fn(Option<Owner>, u64) -> bool,
    ) -> bool {
        self.choices(address)
            .any(|group| slots(group).any(|slot| free(slot, &takes).is_some()))
    }

    /// Whether [`Table::vacate`] would find a slot.
    pub(super) fn can_vacate(
        &self,
        address: &Address,
        gives: impl Fn(Option<Owner>, u64) -> bool,
    ) -> bool {
        self.sweep(address)
            .any(|group| slots(group).any(|slot| free(slot, &gives).is_some()))
    }

    /// Gives up one slot that `gives` names, near those of the key, and says which limit's it was: nobody has it then. `None`
    /// when there is none.
    pub(super) fn vacate(
        &self,
        address: &Address,
        gives: impl Fn(Option<Owner>, u64) -> bool,
    ) -> Option<u16> {
        let mut near = self.sweep(address).flat_map(slots);
        let previous = near.find_map(|slot| take(slot, UNUSED, VACATED, &gives));
        previous.map(limit_of)
    }

    /// Gives a key its slot, with `word` in it, unless it has one by now.
    pub(super) fn insert(
        &self,
        address: &Address,
        word: u64,
        takes: impl Fn(Option<Owner>, u64) -> bool,
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

    /// The slot that a fresh key should take: one that nobody has, else one that may be given away.
    fn vacancy(
        &self,
        address: &Address,
        takes: &impl Fn(Option<Owner>, u64) -> bool,
    ) -> Option<Slot<'_>> {
        let unused =
            |slot: &Slot<'_>| slot.0.load(Relaxed) == UNUSED && free(*slot, takes).is_some();
        let any = |slot: &Slot<'_>| free(*slot, takes).is_some();
        if let Some(group) = self.roomiest(address, unused) {
            return slots(group).find(unused);
        }
        let group = self.roomiest(address, any)?;
        // not always the same one of several, else the others would keep keys that nobody asks for
        let turn = address.stride as usize / 2 % WAYS;
        slots(group).cycle().skip(turn).take(WAYS).find(any)
    }

    /// The group with a vacancy that a fresh key should go into: the first while it has two, else the one with the
    /// most.
    fn roomiest<'a>(
        &'a self,
        address: &Address,
        vacant: impl Fn(&Slot<'a>) -> bool,
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
    fn choices(&self, address: &Address) -> impl Iterator<Item = &Group> {
        self.groups_of(address, 0..CHOICES)
    }

    /// The groups in which a key's limit looks for something to give up.
    fn sweep(&self, address: &Address) -> impl Iterator<Item = &Group> {
        self.groups_of(address, CHOICES..CHOICES.saturating_add(SWEEP))
    }

    #[inline]
    fn groups_of(&self, address: &Address, range: Range<u32>) -> impl Iterator<Item = &Group> {
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
type Slot<'a> = (&'a AtomicU64, &'a AtomicU64);

fn slots(group: &Group) -> impl Iterator<Item = Slot<'_>> + Clone {
    let (tags, words) = group.split_at(WAYS);
    tags.iter().zip(words)
}

fn spread_of(tag: u64) -> u64 {
    tag >> 16
}

fn limit_of(tag: u64) -> u16 {
    (tag & 0xFFFF) as u16
}

/// No branch on which of the slots it is: that would be guessed wrong three times in four.
#[inline(always)]
fn find_in(group: &Group, expected: u64) -> Option<Slot<'_>> {
    let (tags, words) = group.split_at(WAYS);
    let mut matches = 0_usize;
    for (way, tag) in tags.iter().enumerate() {
        matches |= usize::from(tag.load(Acquire) == expected) << way;
    }
    let way = matches.trailing_zeros() as usize;
    tags.get(way).zip(words.get(way))
}

/// Waits until the slot is not changing hands; `None` when it went to another key. Only for whoever holds the
/// key's lock: then nobody can be inserting the key.
fn settle(cell: Cell<'_>) -> Option<Cell<'_>> {
    while cell.word.load(Acquire) == RESERVED && cell.is_kept() {
        yield_now();
    }
    cell.load().map(|_| cell)
}

/// The word of a slot that may be given to another key.
fn free((tag, word): Slot<'_>, takes: &impl Fn(Option<Owner>, u64) -> bool) -> Option<u64> {
    let owner = tag.load(Acquire);
    let seen = word.load(Acquire);
    let stable = seen != RESERVED && tag.load(Acquire) == owner;
    (stable && takes(Owner::of(owner), seen)).then_some(seen)
}

/// Takes a slot that is free and says whose it was (its tag); `None` when it is not free or somebody was faster.
fn take(
    slot: Slot<'_>,
    new_tag: u64,
    new_word: u64,
    takes: &impl Fn(Option<Owner>, u64) -> bool,
) -> Option<u64> {
    let seen = free(slot, takes)?;
    let (tag, word) = slot;
    word.compare_exchange(seen, RESERVED, AcqRel, Relaxed)
        .ok()?;
    let owner = tag.load(Acquire);
    if !takes(Owner::of(owner), seen) {
        // it went to another limit's key, whose word happens to be equal, since it was seen to be free
        word.store(seen, Release);
        return None;
    }
    tag.store(new_tag, Release);
    word.store(new_word, Release);
    Some(owner)
}
