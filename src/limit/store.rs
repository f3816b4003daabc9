//! The counters of all limits, and the decision over several of them at once: all are charged, or none.
//!
//! A key in debt is never evicted for a fresh one, so nobody can wash a debt off by flooding the table: a slot
//! is given away only when its bucket is full, which is what a fresh key has too. When every slot that a fresh key
//! could have is held by a debtor, the key shares one overflow bucket with the others of its limit in the same
//! situation. That is strict: together they get what one key would.
//!
//! **All or none.** First every limit is asked, and nothing is written; if one denies, that is the verdict. Then
//! every limit is charged. When a concurrent request has taken the last unit in between, what was charged is given back
//! and the request is denied. While it holds a unit that it will not keep, another request may be denied for it: two
//! requests that race for the last units of two limits, in opposite orders, can both be denied, never both admitted
//! beyond a limit. (A refund is exact while the bucket has been in debt since the charge; a thread that is suspended
//! between charge and refund for longer than it takes the bucket to fill forgives at most one request's cost.)
//!
//! For a key that is in the table a decision takes no lock, allocates nothing and makes no system call.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use arrayvec::ArrayVec;

use super::{
    Key, Limit, MAX_LIMITS, Standing, Verdict,
    registry::{Attached, Registry, TooManyLimits},
    table::{Address, Cell, Insertion, Table},
};

/// What one request asks of one limit.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// The limit, as attached to the store that decides.
    pub limit: &'a Attached,
    /// Index into the limit's quotas; an index that it does not have counts as 0, the default tier.
    pub tier: usize,
    /// Whose bucket; `None` is the limit's one bucket for all.
    pub key: Option<Key>,
    /// Units. 0 is always admitted and changes nothing; more than the tier's burst is never admitted.
    pub cost: u64,
}

/// The counters of all limits of a process, in memory bounded by `max_keys`.
#[derive(Debug)]
pub struct Store {
    table: Table,
    registry: Registry,
}

impl Store {
    /// A store for at most `max_keys` keys at once over all limits (1 to 10⁹; others are brought within). Takes 21⅓
    /// bytes of address space per key, which the system backs with memory as keys arrive; ends the process where
    /// there is no address space for it.
    pub fn new(max_keys: usize) -> Store {
        Store {
            table: Table::new(max_keys),
            registry: Registry::new(),
        }
    }

    /// Joins a limit to its counters: those of the limit of this name that was attached before, if there was one
    /// (unless the rate has changed so that its timestamps cannot be kept, see the module `registry`), else new ones.
    pub fn attach(&self, limit: &Limit) -> Result<Arc<Attached>, TooManyLimits> {
        self.registry.attach(limit)
    }

    /// Decides a request against all of its limits at `now_ns`, nanoseconds since the process began by a monotonic
    /// clock, read at most 10 s ago ([`STEP_BACK_NS`](super::bucket::STEP_BACK_NS)). On admission every limit is
    /// charged, otherwise none is.
    ///
    /// More than [`MAX_LIMITS`] charges are a mistake of the caller; such a request is denied.
    #[inline]
    pub fn admit(&self, now_ns: u64, charges: &[Charge<'_>]) -> Verdict {
        let mut verdict = Verdict::default();
        self.decide(now_ns, charges, &mut verdict);
        verdict
    }

    /// What [`Store::admit`] would say, without charging anything: on admission `remaining` is what is there before
    /// the charge.
    pub fn peek(&self, now_ns: u64, charges: &[Charge<'_>]) -> Verdict {
        let mut verdict = Verdict::default();
        self.look(now_ns, charges, &mut verdict);
        verdict
    }

    /// Fills in the verdict where the caller of `admit` has it; returned from here it would be copied, which costs a
    /// quarter of a decision.
    #[inline(never)]
    fn decide<'s>(&'s self, now_ns: u64, charges: &[Charge<'s>], verdict: &mut Verdict) {
        if charges.len() > MAX_LIMITS {
            return refuse(now_ns, charges, verdict);
        }
        let mut asked = ArrayVec::<Asked<'_>, MAX_LIMITS>::new();
        let mut admitted = true;
        for charge in charges {
            let found = self.ask(now_ns, charge);
            if let Err(kept) = found.proposed {
                admitted = false;
                found.place.move_back(found.word, kept);
            }
            if let Place::Overflow(_) = found.place {
                charge.limit.state.overflowed.fetch_add(1, Relaxed);
            }
            push(&mut asked, found);
        }
        if !admitted {
            return stand(now_ns, charges, &asked, verdict);
        }
        if let Err(lost) = self.charge_all(now_ns, charges, &mut asked, verdict) {
            verdict.standings.clear();
            self.look(now_ns, charges, verdict);
            if let Some(standing) = verdict.standings.get_mut(lost.limit) {
                *standing = lost.standing;
            }
        }
    }

    fn look(&self, now_ns: u64, charges: &[Charge<'_>], verdict: &mut Verdict) {
        if charges.len() > MAX_LIMITS {
            return refuse(now_ns, charges, verdict);
        }
        let asked: ArrayVec<Asked<'_>, MAX_LIMITS> = charges
            .iter()
            .map(|charge| self.ask(now_ns, charge))
            .collect();
        stand(now_ns, charges, &asked, verdict);
    }

    /// Charges every limit, or gives back what it charged and says which limit others have emptied meanwhile.
    #[inline]
    fn charge_all<'s>(
        &'s self,
        now_ns: u64,
        charges: &[Charge<'s>],
        asked: &mut [Asked<'s>],
        verdict: &mut Verdict,
    ) -> Result<(), Lost> {
        for (index, charge) in charges.iter().enumerate() {
            let Some(found) = asked.get_mut(index) else {
                continue;
            };
            match self.charge(now_ns, charge, found) {
                Ok(word) => push(
                    &mut verdict.standings,
                    charge.standing_charged(now_ns, word),
                ),
                Err(word) => {
                    let charged = charges.iter().zip(asked.iter()).take(index);
                    charged.for_each(|(charge, charged)| charge.refund(charged.place));
                    return Err(Lost {
                        limit: index,
                        standing: charge.standing(now_ns, word),
                    });
                }
            }
        }
        Ok(())
    }

    /// Charges one limit, and says what its word is now (where it is, if it was nowhere, is noted in `asked`). `Err`: a
    /// concurrent request was faster, and the bucket, with this word, denies.
    #[inline]
    fn charge<'s>(
        &'s self,
        now_ns: u64,
        charge: &Charge<'s>,
        asked: &mut Asked<'s>,
    ) -> Result<u64, u64> {
        if charge.cost == 0 {
            return Ok(asked.word);
        }
        // loaded again: this very request may have given the slot, if idle, to its key of another limit
        if let Some(cell) = asked.place.cell()
            && let Ok(proposed) = asked.proposed
            && cell.load() == Some(asked.word)
            && cell.swap(asked.word, proposed)
        {
            return Ok(proposed);
        }
        self.charge_contended(now_ns, charge, &mut asked.place)
    }

    /// The same for a key without a slot, and for a word that others are changing.
    #[cold]
    fn charge_contended<'s>(
        &'s self,
        now_ns: u64,
        charge: &Charge<'s>,
        place: &mut Place<'s>,
    ) -> Result<u64, u64> {
        loop {
            if let Some(cell) = place.cell()
                && let Some(result) = charge.settle(now_ns, cell)
            {
                return result;
            }
            let Some(address) = charge.address() else {
                continue;
            };
            let word = charge.propose(now_ns, 0)?;
            match self.table.insert(&address, word, self.idle(now_ns)) {
                Insertion::Placed(cell, previous) => {
                    self.count(charge.limit, previous);
                    *place = Place::Slot(cell);
                    return Ok(word);
                }
                Insertion::Present(cell) => *place = Place::Slot(cell),
                Insertion::Full => {
                    charge.limit.state.overflowed.fetch_add(1, Relaxed);
                    *place = Place::Overflow(Cell::own(&charge.limit.state.overflow.0));
                }
            }
        }
    }

    /// Where a charge's word is, what it is, and what it would become.
    #[inline(always)]
    fn ask<'s>(&'s self, now_ns: u64, charge: &Charge<'s>) -> Asked<'s> {
        let (place, word) = match charge.address() {
            None => (
                Place::Unkeyed(Cell::own(&charge.limit.state.unkeyed.0)),
                None,
            ),
            Some(address) => match self
                .table
                .find(&address)
                .and_then(|cell| Some((cell, cell.load()?)))
            {
                Some((cell, word)) => (Place::Slot(cell), Some(word)),
                None => self.ask_unknown(now_ns, charge, &address),
            },
        };
        let word = word.or_else(|| place.cell()?.load()).unwrap_or(0);
        Asked {
            place,
            word,
            proposed: charge.propose(now_ns, word),
        }
    }

    #[cold]
    fn ask_unknown<'s>(
        &'s self,
        now_ns: u64,
        charge: &Charge<'s>,
        address: &Address,
    ) -> (Place<'s>, Option<u64>) {
        match self.table.has_room(address, self.idle(now_ns)) {
            true => (Place::Fresh, Some(0)),
            false => (
                Place::Overflow(Cell::own(&charge.limit.state.overflow.0)),
                None,
            ),
        }
    }

    /// Whether a limit's word carries no information at `now_ns`.
    fn idle(&self, now_ns: u64) -> impl Fn(u16, u64) -> bool + '_ {
        move |id, word| {
            self.registry
                .by_id(id)
                .is_some_and(|state| state.scale.is_full(now_ns, word))
        }
    }

    fn count(&self, limit: &Attached, previous: Option<u16>) {
        limit.state.keys.fetch_add(1, Relaxed);
        if let Some(state) = previous.and_then(|id| self.registry.by_id(id)) {
            state.keys.fetch_sub(1, Relaxed);
            state.evictions.fetch_add(1, Relaxed);
        }
    }
}

/// Where a charge's word is.
#[derive(Clone, Copy, Debug)]
enum Place<'s> {
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
    fn cell(&self) -> Option<Cell<'s>> {
        match *self {
            Place::Unkeyed(cell) | Place::Slot(cell) | Place::Overflow(cell) => Some(cell),
            Place::Fresh => None,
        }
    }

    /// Corrects a word from before the clock stepped back, unless somebody else has changed it.
    #[inline]
    fn move_back(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell()
            && old != new
        {
            cell.swap(old, new);
        }
    }
}

/// A limit that admitted when it was asked and, when it was charged, did no longer.
#[derive(Debug)]
struct Lost {
    limit: usize,
    standing: Standing,
}

/// One limit's bucket as a request found it.
#[derive(Debug)]
struct Asked<'s> {
    place: Place<'s>,
    word: u64,
    proposed: Result<u64, u64>,
}

impl Charge<'_> {
    #[inline]
    fn address(&self) -> Option<Address> {
        self.key.map(|key| Address::new(key, self.limit.state.id))
    }

    #[inline]
    fn propose(&self, now_ns: u64, word: u64) -> Result<u64, u64> {
        self.limit
            .buckets
            .charge(self.tier, now_ns, word, self.cost)
    }

    #[inline]
    fn standing(&self, now_ns: u64, word: u64) -> Standing {
        self.limit
            .buckets
            .standing(self.tier, now_ns, word, self.cost)
    }

    #[inline]
    fn standing_charged(&self, now_ns: u64, word: u64) -> Standing {
        self.limit.buckets.standing(self.tier, now_ns, word, 0)
    }

    /// Charges a cell that others are charging too; `None` when the key has lost it.
    fn settle(&self, now_ns: u64, cell: Cell<'_>) -> Option<Result<u64, u64>> {
        loop {
            let word = cell.load()?;
            match self.propose(now_ns, word) {
                Ok(next) if cell.swap(word, next) => return Some(Ok(next)),
                Ok(_) => {}
                Err(word) => return Some(Err(word)),
            }
        }
    }

    /// Gives a charge back. A key that has lost its slot since has a full bucket anyway.
    #[cold]
    fn refund(&self, place: Place<'_>) {
        let Some(cell) = place.cell() else { return };
        while let Some(word) = cell.load() {
            if cell.swap(word, self.limit.buckets.refund(self.tier, word, self.cost)) {
                return;
            }
        }
    }
}

/// `push` where the length is known to be in bounds. Saying so keeps the item in registers, because there is no error
/// that would have to carry it (a fifth of a decision).
#[inline]
fn push<T>(list: &mut ArrayVec<T, MAX_LIMITS>, item: T) {
    if list.len() < MAX_LIMITS {
        list.push(item);
    }
}

/// How every limit stands to a request that is not charged.
fn stand(now_ns: u64, charges: &[Charge<'_>], asked: &[Asked<'_>], verdict: &mut Verdict) {
    for (charge, asked) in charges.iter().zip(asked) {
        push(&mut verdict.standings, charge.standing(now_ns, asked.word));
    }
}

/// Denies a request with too many charges, whatever its limits say.
#[cold]
fn refuse(now_ns: u64, charges: &[Charge<'_>], verdict: &mut Verdict) {
    for charge in charges.iter().take(MAX_LIMITS) {
        let standing = charge.standing(now_ns, 0);
        verdict.standings.push(Standing {
            denied: true,
            never: true,
            retry_after_ns: None,
            ..standing
        });
    }
}

#[cfg(test)]
mod tests;
