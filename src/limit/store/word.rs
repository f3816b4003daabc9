//! The charge of one word: where the word is, and how a request gets in ahead of, or behind, others.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{Charge, Store};
use crate::limit::{
    Finding, Held, Key,
    registry::{Attached, OverflowBucket, State},
    table::{Address, Cell, Insertion, Owner},
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
    fn find<'s>(&mut self, store: &'s Store) -> (Place<'s>, u64)
    where
        'a: 's,
    {
        if let Some((cell, word)) = self.own(store) {
            return (Place::new(cell, Held::Own), word);
        }
        if let Some(address) = self.address
            && let Some(bucket) = overflow(store, self.words, self.state, address, self.ask.now_ns)
        {
            let place = self.share(bucket);
            return (place, bucket.word.load(Acquire));
        }
        let place = Place {
            cell: None,
            held: Held::Own,
        };
        (place, self.first(store))
    }

    /// From here on it asks of the bucket that keys without a slot share.
    fn share<'s>(&mut self, bucket: OverflowBucket<'a>) -> Place<'s>
    where
        'a: 's,
    {
        self.ask.spread = bucket.spread;
        Place::new(Cell::own(bucket.word), Held::Overflow)
    }

    /// What a key begins with that has no word: nothing, or what it had spent by the rules before; and what was spent in the
    /// bucket that it may have shared until now.
    #[inline]
    fn first(&self, store: &Store) -> u64 {
        let word = self
            .limit
            .first_word(store, self.words, self.key, &self.ask);
        let bucket = self
            .address
            .and_then(|address| self.state.overflow_used(address.spread()));
        let Some(bucket) = bucket.filter(|_| !self.words.is_slots()) else {
            return word;
        };
        let shared = Ask {
            spread: bucket.spread,
            ..self.ask
        };
        let owed = self.words.owed(&shared, bucket.word.load(Acquire));
        // what was spent before there was no room counts, too, where that is more
        match owed > self.words.owed(&self.ask, word) {
            true => self.words.spent_now(&self.ask, owed),
            false => word,
        }
    }

    /// Where the word is, what it is, and what the charge would make of it. `Err`: it denies.
    #[inline(always)]
    pub(super) fn propose<'s>(&mut self, store: &'s Store) -> (Place<'s>, u64, Result<u64, u64>)
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
    pub(super) fn look(mut self, store: &Store) -> Finding<'a> {
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
    pub(super) fn charge<'s>(mut self, store: &'s Store, place: Place<'s>) -> Finding<'a>
    where
        'a: 's,
    {
        match self.settle(store, place, Words::charge) {
            Ok((word, held)) => self.charged(word, held),
            Err(kept) => self.finding(kept, true),
        }
    }

    /// Charges without asking.
    pub(super) fn charge_anyway(mut self, store: &Store) {
        let (place, _) = self.find(store);
        if self.ask.cost > 0 && !self.words.is_slots() {
            // never an `Err`, so it ends with the charge made
            let next = |words: &Words, ask: &Ask, word| Ok(words.charge_anyway(ask, word));
            let charged = self.settle(store, place, next);
            debug_assert!(charged.is_ok(), "nothing denies it");
        }
    }

    /// Charges what has happened, and says how much of it is forgiven.
    pub(super) fn overdraw(mut self, store: &Store) -> u64 {
        if self.ask.cost == 0 || self.words.is_slots() {
            return self.ask.cost;
        }
        let (place, _) = self.find(store);
        let forgiven = std::cell::Cell::new(0);
        // never an `Err`, so it ends with the charge made
        let next = |words: &Words, ask: &Ask, word| {
            let (word, beyond) = words.overdraw(ask, word);
            forgiven.set(beyond);
            Ok(word)
        };
        let charged = self.settle(store, place, next);
        debug_assert!(charged.is_ok(), "nothing denies it");
        forgiven.get()
    }

    /// Changes the word to what comes `next`, and says what and where it is now: for a key without a slot, and for a word
    /// that others are changing. `Err`: with this word nothing comes next.
    fn settle<'s>(
        &mut self,
        store: &'s Store,
        mut place: Place<'s>,
        next: impl Fn(&Words, &Ask, u64) -> Result<u64, u64>,
    ) -> Result<(u64, Held), u64>
    where
        'a: 's,
    {
        if place.held == Held::Overflow
            && let Some(bucket) = self.overflow()
        {
            place = self.share(bucket);
        }
        loop {
            if let Some(cell) = place.cell {
                while let Some(old) = cell.load() {
                    let new = next(self.words, &self.ask, old)?;
                    if swap(cell, self.words, self.ask.cost, old, new) {
                        return Ok((new, place.held));
                    }
                }
            }
            let Some(address) = self.address else {
                continue;
            };
            let word = next(self.words, &self.ask, self.first(store))?;
            match insert(store, self.state, &address, word, self.ask.now_ns) {
                Insertion::Placed(previous) => {
                    store.count(self.state, previous);
                    return Ok((word, Held::Own));
                }
                Insertion::Present(cell) => place = Place::new(cell, Held::Own),
                Insertion::Full => {
                    self.state.overflowed.fetch_add(1, Relaxed);
                    if let Some(bucket) = self.overflow() {
                        place = self.share(bucket);
                    }
                }
            }
        }
    }

    /// The bucket that its key shares while it has no slot.
    fn overflow(&self) -> Option<OverflowBucket<'a>> {
        self.state.overflow(self.address?.spread())
    }

    /// Gives back a charge. A key that has lost its slot since has a full bucket anyway.
    pub(super) fn release(mut self, store: &Store, held: Held) {
        let cell = match (held, &self.address) {
            (Held::Nowhere, _) => None,
            (Held::Overflow, _) => self.overflow().and_then(|bucket| self.share(bucket).cell),
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

/// The bucket that is charged for a key without a slot; `None` if there is room for it.
#[cold]
#[inline(never)]
fn overflow<'a>(
    store: &Store,
    words: &Words,
    state: &'a State,
    address: Address,
    now_ns: u64,
) -> Option<OverflowBucket<'a>> {
    if shares_slots(words, state, address) {
        return state.overflow(address.spread());
    }
    let has_room = store.table.has_room(&address, store.takes(state, now_ns))
        || may_exchange(store, state)
            && store.table.can_vacate(&address, store.gives(state, now_ns));
    if has_room {
        return None;
    }
    state.overflow(address.spread())
}

/// Whether requests in flight are counted by the bucket that this key would share. They may be its own, so it goes on sharing:
/// what others give back cannot be moved into a slot.
fn shares_slots(words: &Words, state: &State, address: Address) -> bool {
    let bucket = state.overflow_used(address.spread());
    words.is_slots() && bucket.is_some_and(|bucket| bucket.word.load(Acquire) > 0)
}

/// Whether a limit holds as much as it may: for a fresh key it gives up an idle one.
fn may_exchange(store: &Store, state: &State) -> bool {
    !store.slots.may_grow(&state.occupancy.slots, 1)
}

/// Gives a key its slot. A limit that holds as much as it may gives up an idle key elsewhere, if it finds one.
fn insert<'s>(
    store: &'s Store,
    state: &State,
    address: &Address,
    word: u64,
    now_ns: u64,
) -> Insertion<'s> {
    let takes = store.takes(state, now_ns);
    let inserted = store.table.insert(address, word, &takes);
    if !matches!(inserted, Insertion::Full) || !may_exchange(store, state) {
        return inserted;
    }
    let Some(previous) = store.table.vacate(address, store.gives(state, now_ns)) else {
        return inserted;
    };
    store.count_gone(previous);
    let any = |owner: Option<Owner>, word| owner.is_none() || takes(owner, word);
    store.table.insert(address, word, any)
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
