//! The charge of one word: where the word is, and how a request gets in ahead of, or behind, others.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{Charge, Store};
use crate::limit::{
    Held, Standing,
    registry::State,
    table::{Address, Cell, Insertion},
    words::{Ask, Words},
};

/// Where a charge's word is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'s> {
    /// In the limit: one bucket for all.
    Unkeyed(Cell<'s>),
    /// In the key's slot.
    Slot(Cell<'s>),
    /// Nowhere yet; there is room for it.
    Fresh,
    /// In the limit: the bucket that keys share for which there is no room.
    Overflow(Cell<'s>),
}

impl<'s> Place<'s> {
    #[inline]
    pub(super) fn cell(&self) -> Option<Cell<'s>> {
        match *self {
            Place::Unkeyed(cell) | Place::Slot(cell) | Place::Overflow(cell) => Some(cell),
            Place::Fresh => None,
        }
    }

    /// Corrects a word from before the clock stepped back, unless somebody else has changed it.
    #[inline]
    pub(super) fn move_back(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell()
            && old != new
        {
            cell.swap(old, new);
        }
    }
}

/// One limit's word as a request found it.
#[derive(Debug)]
pub(super) struct Word<'s> {
    pub(super) words: &'s Words,
    pub(super) state: &'s Arc<State>,
    pub(super) ask: Ask,
    pub(super) address: Option<Address>,
    pub(super) place: Place<'s>,
    pub(super) word: u64,
    pub(super) proposed: Result<u64, u64>,
}

impl<'s> Word<'s> {
    /// What a charge asks, with the word not looked for yet.
    #[inline]
    pub(super) fn new(charge: &Charge<'s>, words: &'s Words, now_ns: u64) -> Word<'s> {
        let state = charge.limit.state(charge.tier);
        let address = charge.key.map(|key| Address::new(key, state.id));
        let spread = address.map_or(0, |address| address.spread());
        Word {
            words,
            state,
            ask: charge.ask(now_ns, spread),
            address,
            place: Place::Fresh,
            word: 0,
            proposed: Err(0),
        }
    }

    /// Charges the word that was found, and says what it is now. `Err`: a concurrent request was faster, and the
    /// bucket, with this word, denies.
    #[inline]
    pub(super) fn charge(&mut self, store: &'s Store) -> Result<u64, u64> {
        if self.ask.cost == 0 {
            return Ok(self.word);
        }
        // loaded again: this very request may have given the slot, if idle, to its key of another limit
        if let Some(cell) = self.place.cell()
            && let Ok(proposed) = self.proposed
            && cell.load() == Some(self.word)
            && self.swap(cell, self.word, proposed)
        {
            return Ok(proposed);
        }
        let words = self.words;
        self.settle(store, |ask, word| words.charge(ask, word))
    }

    /// The same for a key without a slot, and for a word that others are changing.
    #[cold]
    fn settle(
        &mut self,
        store: &'s Store,
        next: impl Fn(&Ask, u64) -> Result<u64, u64>,
    ) -> Result<u64, u64> {
        loop {
            if let Some(cell) = self.place.cell() {
                while let Some(word) = cell.load() {
                    let next = next(&self.ask, word)?;
                    if self.swap(cell, word, next) {
                        return Ok(next);
                    }
                }
            }
            let Some(address) = &self.address else {
                continue;
            };
            let word = next(&self.ask, 0)?;
            let idle = store.idle(self.ask.now_ns);
            match store.table.insert(address, word, idle) {
                Insertion::Placed(cell, previous) => {
                    store.count(self.state, previous);
                    self.place = Place::Slot(cell);
                    return Ok(word);
                }
                Insertion::Present(cell) => self.place = Place::Slot(cell),
                Insertion::Full => {
                    self.state.overflowed.fetch_add(1, Relaxed);
                    self.place = Place::Overflow(Cell::own(&self.state.overflow.0));
                }
            }
        }
    }

    /// Changes the word from `old` to `new`. Where slots are counted it must be this key's word: the slot may have gone
    /// to another key, and come to the same count, since the word was loaded. As long as this charge is in it, it does not go on
    /// to a third, so the tag tells, and the charge is taken out again.
    #[inline]
    fn swap(&self, cell: Cell<'_>, old: u64, new: u64) -> bool {
        if !cell.swap(old, new) {
            return false;
        }
        if self.words.is_slots() && !cell.is_kept() {
            cell.update(|word| self.words.refund(&self.ask, word));
            return false;
        }
        true
    }

    /// Charges without asking.
    pub(super) fn charge_anyway(self, store: &'s Store) {
        let mut found = store.find(self);
        let words = found.words;
        if found.ask.cost > 0 && !words.is_slots() {
            // never an `Err`, so it ends with the charge made
            let charged = found.settle(store, |ask, word| Ok(words.charge_anyway(ask, word)));
            debug_assert!(charged.is_ok(), "nothing denies it");
        }
    }

    /// Gives a charge back. A key that has lost its slot since has a full bucket anyway.
    #[cold]
    pub(super) fn refund(&self) {
        if let Some(cell) = self.place.cell() {
            self.refund_at(cell);
        }
    }

    fn refund_at(&self, cell: Cell<'_>) {
        if self.ask.cost == 0 {
            return;
        }
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

    /// Gives back a charge that was made in an earlier call.
    pub(super) fn release(&self, store: &'s Store, held: Held) {
        let cell = match (held, &self.address) {
            (Held::Nowhere, _) => None,
            (Held::Overflow, _) => Some(Cell::own(&self.state.overflow.0)),
            (Held::Own, None) => Some(Cell::own(&self.state.unkeyed.0)),
            (Held::Own, Some(address)) => store.table.find(address),
        };
        if let Some(cell) = cell {
            self.refund_at(cell);
        }
    }

    /// How the word stands that this charge has just made.
    #[inline]
    pub(super) fn standing_charged(&self, word: u64) -> Standing {
        let held = match self.place {
            Place::Overflow(_) => Held::Overflow,
            Place::Unkeyed(_) | Place::Slot(_) | Place::Fresh => Held::Own,
        };
        self.words.standing_charged(&self.ask, held, word)
    }
}
