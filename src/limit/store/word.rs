//! Charging one word: finding it, and competing with concurrent requests for it.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::Store;
use crate::limit::{
    algorithm::WordAlgorithm,
    attached::Attached,
    charge::Charge,
    counters::{LimitCounters, OverflowBucket},
    decision::Finding,
    key::Key,
    standing::ChargeLocation,
    table::{Cell, Insertion, SlotOwner, TableAddress},
    word_request::WordRequest,
};

/// The location of a charge's word.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChargedWord<'s> {
    /// `None`: no slot yet, but there is room for one.
    pub(super) cell: Option<Cell<'s>>,
    /// Reported for a charge made there.
    pub(super) held: ChargeLocation,
}

impl<'s> ChargedWord<'s> {
    #[inline]
    fn new(cell: Cell<'s>, held: ChargeLocation) -> ChargedWord<'s> {
        let cell = Some(cell);
        ChargedWord { cell, held }
    }

    /// Corrects a word from before a clock step, unless another thread has changed it.
    #[inline]
    pub(super) fn move_back(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell
            && old != new
        {
            cell.swap(old, new);
        }
    }
}

/// One request's demand on one limit's word.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordAttempt<'a> {
    words: &'a WordAlgorithm,
    limit: &'a Attached,
    state: &'a LimitCounters,
    ask: WordRequest,
    key: Option<Key>,
    address: Option<TableAddress>,
}

impl<'a> WordAttempt<'a> {
    #[inline(always)]
    pub(super) fn new(
        charge: &Charge<'a>,
        words: &'a WordAlgorithm,
        now_ns: u64,
    ) -> WordAttempt<'a> {
        let limit: &'a Attached = charge.limit;
        let state = limit.state(charge.tier);
        let address = charge.key.map(|key| TableAddress::new(key, state.id));
        let spread = address.map_or(0, |address| address.spread());
        WordAttempt {
            words,
            limit,
            state,
            ask: charge.ask(now_ns, spread),
            key: charge.key,
            address,
        }
    }

    /// The key's own cell and its word, if it has one that is not changing owners.
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

    /// The word after the charge. `Err`: it denies.
    #[inline(always)]
    pub(super) fn proposed(&self, word: u64) -> Result<u64, u64> {
        self.words.charge(&self.ask, word)
    }

    /// The location and value of the word.
    #[inline(always)]
    fn find<'s>(&mut self, store: &'s Store) -> (ChargedWord<'s>, u64)
    where
        'a: 's,
    {
        if let Some((cell, word)) = self.own(store) {
            return (ChargedWord::new(cell, ChargeLocation::Own), word);
        }
        if let Some(address) = self.address
            && let Some(bucket) = overflow(store, self.words, self.state, address, self.ask.now_ns)
        {
            let place = self.share(bucket);
            return (place, bucket.word.load(Acquire));
        }
        let place = ChargedWord {
            cell: None,
            held: ChargeLocation::Own,
        };
        (place, self.first(store))
    }

    /// Continues with the overflow bucket of keys without a slot.
    fn share<'s>(&mut self, bucket: OverflowBucket<'a>) -> ChargedWord<'s>
    where
        'a: 's,
    {
        self.ask.spread = bucket.spread;
        ChargedWord::new(Cell::own(bucket.word), ChargeLocation::Overflow)
    }

    /// The initial word of a key: empty, or what it had spent under previous rules, plus what was
    /// spent in the overflow bucket that it may have shared.
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
        let shared = WordRequest {
            spread: bucket.spread,
            ..self.ask
        };
        let owed = self.words.owed(&shared, bucket.word.load(Acquire));
        // what was spent before the key had a slot counts if it is more
        match owed > self.words.owed(&self.ask, word) {
            true => self.words.spent_now(&self.ask, owed),
            false => word,
        }
    }

    /// The location and value of the word, and the word after the charge. `Err`: it denies.
    #[inline(always)]
    pub(super) fn propose<'s>(
        &mut self,
        store: &'s Store,
    ) -> (ChargedWord<'s>, u64, Result<u64, u64>)
    where
        'a: 's,
    {
        let (place, old) = self.find(store);
        let proposed = self.proposed(old);
        if let Err(kept) = proposed {
            place.move_back(old, kept);
        }
        if place.held == ChargeLocation::Overflow {
            self.state.overflowed.fetch_add(1, Relaxed);
        }
        (place, old, proposed)
    }

    /// The finding for a word that the request has not charged.
    #[inline(always)]
    pub(super) fn finding(&self, word: u64, denied: bool) -> Finding<'a> {
        Finding::found(self.words, self.ask, word, denied)
    }

    /// The finding for a request that is not charged.
    pub(super) fn look(mut self, store: &Store) -> Finding<'a> {
        let (_, word) = self.find(store);
        self.finding(word, self.words.charge(&self.ask, word).is_err())
    }

    /// The finding for the word that the charge produced.
    #[inline(always)]
    pub(super) fn charged(&self, word: u64, held: ChargeLocation) -> Finding<'a> {
        let mut finding = self.finding(word, false);
        finding.charge(word, held);
        finding
    }

    /// Charges the word at that location, whatever its value by now, or denies.
    pub(super) fn charge<'s>(mut self, store: &'s Store, place: ChargedWord<'s>) -> Finding<'a>
    where
        'a: 's,
    {
        match self.settle(store, place, WordAlgorithm::charge) {
            Ok((word, held)) => self.charged(word, held),
            Err(kept) => self.finding(kept, true),
        }
    }

    /// Charges unconditionally.
    pub(super) fn charge_anyway(mut self, store: &Store) {
        let (place, _) = self.find(store);
        if self.ask.cost > 0 && !self.words.is_slots() {
            // never an `Err`, so the loop ends with the charge made
            let next =
                |words: &WordAlgorithm, ask: &WordRequest, word| Ok(words.charge_anyway(ask, word));
            let charged = self.settle(store, place, next);
            debug_assert!(charged.is_ok(), "an unconditional charge cannot be denied");
        }
    }

    /// Charges a past cost and returns how much of it is forgiven.
    pub(super) fn overdraw(mut self, store: &Store) -> u64 {
        if self.ask.cost == 0 || self.words.is_slots() {
            return self.ask.cost;
        }
        let (place, _) = self.find(store);
        let forgiven = std::cell::Cell::new(0);
        // never an `Err`, so the loop ends with the charge made
        let next = |words: &WordAlgorithm, ask: &WordRequest, word| {
            let (word, beyond) = words.overdraw(ask, word);
            forgiven.set(beyond);
            Ok(word)
        };
        let charged = self.settle(store, place, next);
        debug_assert!(charged.is_ok(), "an unconditional charge cannot be denied");
        forgiven.get()
    }

    /// Applies `next` to the word and returns its new value and location: for keys without a slot
    /// and for contended words. `Err`: `next` denies this word.
    fn settle<'s>(
        &mut self,
        store: &'s Store,
        mut place: ChargedWord<'s>,
        next: impl Fn(&WordAlgorithm, &WordRequest, u64) -> Result<u64, u64>,
    ) -> Result<(u64, ChargeLocation), u64>
    where
        'a: 's,
    {
        if place.held == ChargeLocation::Overflow
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
                    return Ok((word, ChargeLocation::Own));
                }
                Insertion::Present(cell) => place = ChargedWord::new(cell, ChargeLocation::Own),
                Insertion::Full => {
                    self.state.overflowed.fetch_add(1, Relaxed);
                    if let Some(bucket) = self.overflow() {
                        place = self.share(bucket);
                    }
                }
            }
        }
    }

    /// The overflow bucket of its key.
    fn overflow(&self) -> Option<OverflowBucket<'a>> {
        self.state.overflow(self.address?.spread())
    }

    /// Refunds a charge. A key that has lost its slot since then has a full bucket anyway.
    pub(super) fn release(mut self, store: &Store, held: ChargeLocation) {
        let cell = match (held, &self.address) {
            (ChargeLocation::Nowhere, _) => None,
            (ChargeLocation::Overflow, _) => {
                self.overflow().and_then(|bucket| self.share(bucket).cell)
            }
            (ChargeLocation::Own, None) => Some(Cell::own(&self.state.unkeyed.0)),
            (ChargeLocation::Own, Some(address)) => store.table.find(address),
        };
        let Some(cell) = cell.filter(|_| self.ask.cost > 0) else {
            return;
        };
        if self.words.is_slots() {
            // the slot is not reassigned while it counts this charge, so it is still this key's
            // even if it seems to be changing owners
            return cell.update(|word| self.words.refund(&self.ask, word));
        }
        while let Some(word) = cell.load() {
            if cell.swap(word, self.words.refund(&self.ask, word)) {
                return;
            }
        }
    }
}

/// The bucket to charge for a key without a slot; `None` if there is room for a slot.
#[cold]
#[inline(never)]
fn overflow<'a>(
    store: &Store,
    words: &WordAlgorithm,
    state: &'a LimitCounters,
    address: TableAddress,
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

/// Whether this key's overflow bucket counts requests in flight. They may be this key's, and
/// released slots cannot move to another word, so the key goes on sharing.
fn shares_slots(words: &WordAlgorithm, state: &LimitCounters, address: TableAddress) -> bool {
    let bucket = state.overflow_used(address.spread());
    words.is_slots() && bucket.is_some_and(|bucket| bucket.word.load(Acquire) > 0)
}

/// Whether a limit holds as much as it may: it then replaces an idle key with a fresh one.
fn may_exchange(store: &Store, state: &LimitCounters) -> bool {
    !store.slots.may_grow(&state.occupancy.slots, 1)
}

/// Gives a key its slot. A limit that holds as much as it may vacates an idle key's slot elsewhere,
/// if it finds one.
fn insert<'s>(
    store: &'s Store,
    state: &LimitCounters,
    address: &TableAddress,
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
    let any = |owner: Option<SlotOwner>, word| owner.is_none() || takes(owner, word);
    store.table.insert(address, word, any)
}

/// Changes the word from `old` to `new`. Slots in flight must go to this key's word, but the slot
/// may have been reassigned since the load and have reached the same count. While this charge is
/// counted, the slot stays with that owner. So the tag reveals the mistake, and the charge is taken
/// back.
#[inline(always)]
pub(super) fn swap(cell: Cell<'_>, words: &WordAlgorithm, cost: u64, old: u64, new: u64) -> bool {
    if !cell.swap(old, new) {
        return false;
    }
    if words.is_slots() && !cell.is_kept() {
        cell.update(|word| word.saturating_sub(cost));
        return false;
    }
    true
}
