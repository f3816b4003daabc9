//! The charge of one word: where the word is, and how a request gets in ahead of, or behind, others.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Charge, Store};
use crate::limit::{
    Finding, Held, Key,
    registry::{Attached, State},
    table::{Address, Cell, Insertion},
    words::{Ask, Words},
};

/// Where a charge's word is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place<'s> {
    /// `None`: nowhere yet, but there is room for it.
    pub(super) cell: Option<Cell<'s>>,
    /// What is told of a charge that is made there.
    pub(super) held: Held,
}

impl<'s> Place<'s> {
    #[inline]
    fn new(cell: Cell<'s>, held: Held) -> Place<'s> {
        let cell = Some(cell);
        Place { cell, held }
    }

    /// Corrects a word from before the clock stepped back, unless somebody else has changed it.
    #[inline]
    pub(super) fn move_back(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell
            && old != new
        {
            cell.swap(old, new);
        }
    }
}

/// One limit's word, as a request asks for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word<'a> {
    words: &'a Words,
    limit: &'a Attached,
    state: &'a State,
    ask: Ask,
    key: Option<Key>,
    address: Option<Address>,
}

impl<'a> Word<'a> {
    #[inline(always)]
    pub(super) fn new(charge: &Charge<'a>, words: &'a Words, now_ns: u64) -> Word<'a> {
        let limit: &'a Attached = charge.limit;
        let state = limit.state(charge.tier);
        let address = charge.key.map(|key| Address::new(key, state.id));
        let spread = address.map_or(0, |address| address.spread());
        Word {
            words,
            limit,
            state,
            ask: charge.ask(now_ns, spread),
            key: charge.key,
            address,
        }
    }

    /// The key's own cell and its word, where it has one that is not changing hands.
    #[inline(always)]
    pub(super) fn own<'s>(&self, store: &'s Store) -> Option<(Cell<'s>, u64)>
    where
        'a: 's,
    {
        let cell = match &self.address {
            None => Cell::own(&self.state.unkeyed.0),
            Some(address) => store.table.find(address)?,
        };
        Some((cell, cell.load()?))
    }

    /// What the charge would make of this word. `Err`: it denies.
    #[inline(always)]
    pub(super) fn proposed(&self, word: u64) -> Result<u64, u64> {
        self.words.charge(&self.ask, word)
    }

    /// Where the word is, and what it is.
    #[inline(always)]
    fn find<'s>(&self, store: &'s Store) -> (Place<'s>, u64)
    where
        'a: 's,
    {
        if let Some((cell, word)) = self.own(store) {
            return (Place::new(cell, Held::Own), word);
        }
        match self
            .address
            .and_then(|address| overflow(store, self.state, address, self.ask.now_ns))
        {
            None => (
                Place {
                    cell: None,
                    held: Held::Own,
                },
                self.first(store),
            ),
            Some(word) => {
                let cell = Cell::own(word);
                (Place::new(cell, Held::Overflow), cell.load().unwrap_or(0))
            }
        }
    }

    /// What a key begins with that has no word: nothing, or what it had spent by the rules before.
    #[inline]
    fn first(&self, store: &Store) -> u64 {
        self.limit
            .first_word(store, self.words, self.key, &self.ask)
    }

    /// Where the word is, what it is, and what the charge would make of it. `Err`: it denies.
    #[inline(always)]
    pub(super) fn propose<'s>(&self, store: &'s Store) -> (Place<'s>, u64, Result<u64, u64>)
    where
        'a: 's,
    {
        let (place, old) = self.find(store);
        let proposed = self.proposed(old);
        if let Err(kept) = proposed {
            place.move_back(old, kept);
        }
        if place.held == Held::Overflow {
            self.state.overflowed.fetch_add(1, Relaxed);
        }
        (place, old, proposed)
    }

    /// What is told of a word that the request has not charged.
    #[inline(always)]
    pub(super) fn finding(&self, word: u64, denied: bool) -> Finding<'a> {
        Finding::found(self.words, self.ask, word, denied)
    }

    /// What is told of a request that only asks.
    pub(super) fn look(&self, store: &Store) -> Finding<'a> {
        let (_, word) = self.find(store);
        self.finding(word, self.words.charge(&self.ask, word).is_err())
    }

    /// What is told of the word that the charge has made.
    #[inline(always)]
    pub(super) fn charged(&self, word: u64, held: Held) -> Finding<'a> {
        let mut finding = self.finding(word, false);
        finding.charge(word, held);
        finding
    }

    /// Charges the word at that place, whatever it is by now, or denies.
    pub(super) fn charge<'s>(&self, store: &'s Store, place: Place<'s>) -> Finding<'a>
    where
        'a: 's,
    {
        match self.settle(store, place, |word| self.words.charge(&self.ask, word)) {
            Ok((word, held)) => self.charged(word, held),
            Err(kept) => self.finding(kept, true),
        }
    }

    /// Charges without asking.
    pub(super) fn charge_anyway(&self, store: &Store) {
        let (place, _) = self.find(store);
        if self.ask.cost > 0 && !self.words.is_slots() {
            // never an `Err`, so it ends with the charge made
            let next = |word| Ok(self.words.charge_anyway(&self.ask, word));
            let charged = self.settle(store, place, next);
            debug_assert!(charged.is_ok(), "nothing denies it");
        }
    }

    /// Changes the word to what comes `next`, and says what and where it is now: for a key without a slot, and for a word
    /// that others are changing. `Err`: with this word nothing comes next.
    fn settle<'s>(
        &self,
        store: &'s Store,
        mut place: Place<'s>,
        next: impl Fn(u64) -> Result<u64, u64>,
    ) -> Result<(u64, Held), u64>
    where
        'a: 's,
    {
        loop {
            if let Some(cell) = place.cell {
                while let Some(old) = cell.load() {
                    let new = next(old)?;
                    if swap(cell, self.words, self.ask.cost, old, new) {
                        return Ok((new, place.held));
                    }
                }
            }
            let Some(address) = &self.address else {
                continue;
            };
            let word = next(self.first(store))?;
            let idle = store.idle(self.ask.now_ns);
            match store.table.insert(address, word, idle) {
                Insertion::Placed(previous) => {
                    store.count(self.state, previous);
                    return Ok((word, Held::Own));
                }
                Insertion::Present(cell) => place = Place::new(cell, Held::Own),
                Insertion::Full => {
                    self.state.overflowed.fetch_add(1, Relaxed);
                    let shared = Cell::own(&self.state.overflow.0);
                    place = Place::new(shared, Held::Overflow);
                }
            }
        }
    }

    /// Gives back a charge. A key that has lost its slot since has a full bucket anyway.
    pub(super) fn release(&self, store: &Store, held: Held) {
        let cell = match (held, &self.address) {
            (Held::Nowhere, _) => None,
            (Held::Overflow, _) => Some(Cell::own(&self.state.overflow.0)),
            (Held::Own, None) => Some(Cell::own(&self.state.unkeyed.0)),
            (Held::Own, Some(address)) => store.table.find(address),
        };
        let Some(cell) = cell.filter(|_| self.ask.cost > 0) else {
            return;
        };
        if self.words.is_slots() {
            // it is not given away while it counts this charge, so it is this key's even while it seems to change hands
            return cell.update(|word| self.words.refund(&self.ask, word));
        }
        while let Some(word) = cell.load() {
            if cell.swap(word, self.words.refund(&self.ask, word)) {
                return;
            }
        }
    }
}

/// The word that is charged for a key without a slot; `None` if there is room for it.
#[cold]
#[inline(never)]
fn overflow<'a>(
    store: &Store,
    state: &'a State,
    address: Address,
    now_ns: u64,
) -> Option<&'a AtomicU64> {
    let full = !store.table.has_room(&address, store.idle(now_ns));
    full.then_some(&state.overflow.0)
}

/// Changes the word from `old` to `new`. Where slots are counted it must be this key's word: the slot may have gone
/// to another key, and come to the same count, since the word was loaded. As long as this charge is in it, it does not go on
/// to a third, so the tag tells, and the charge is taken out again.
#[inline(always)]
pub(super) fn swap(cell: Cell<'_>, words: &Words, cost: u64, old: u64, new: u64) -> bool {
    if !cell.swap(old, new) {
        return false;
    }
    if words.is_slots() && !cell.is_kept() {
        cell.update(|word| word.saturating_sub(cost));
        return false;
    }
    true
}
