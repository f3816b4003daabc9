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
    Held, Key, Limit, MAX_LIMITS, Rule, Standing, Verdict,
    log::{Deed, Rings},
    registry::{Attached, Registry, State, TooManyLimits},
    table::{Address, Cell, Owner, Table},
    words::Ask,
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
    /// Units. 0 is always admitted and changes nothing; more than the tier's capacity is never admitted.
    pub cost: u64,
    /// How long the request may be held until its turn; 0 is not at all. Buckets only, and the same in every charge of one
    /// limit: a bucket that reaches further ahead than its burst, this and 10 s is taken for one from before a step of
    /// the clock.
    pub max_delay_ns: u64,
}

/// The counters of all limits of a process, in memory bounded by `max_keys`.
#[derive(Debug)]
pub struct Store {
    table: Table,
    rings: Rings,
    registry: Registry,
}

impl Store {
    /// A store for at most `max_keys` keys at once over all limits (1 to 10⁹; others are brought within). Takes 21⅓
    /// bytes of address space per key, which the system backs with memory as keys arrive; ends the process where
    /// there is no address space for it. Sliding logs take up to
    /// [`ENTRIES_PER_KEY`](super::log::ENTRIES_PER_KEY) · 16 bytes per key in addition, when they are used.
    pub fn new(max_keys: usize) -> Store {
        Store {
            table: Table::new(max_keys),
            rings: Rings::new(max_keys),
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

    /// Charges a limit for what has happened already (a response whose status counts, a rejection that does), whether or
    /// not there are units left. At worst nothing remains: the debt is bounded by the capacity, so a key waits no longer
    /// than one that has just spent everything. Slots are not charged, as nobody would give them back.
    pub fn charge(&self, now_ns: u64, charge: &Charge<'_>) {
        match &charge.limit.rule {
            Rule::Words(words) => Word::new(charge, words, now_ns).charge_anyway(self),
            Rule::Logs(logs) => _ = self.visit(charge, logs, now_ns, Deed::ChargeAnyway),
        }
    }

    /// Gives back what an admitted request was charged by one of its limits: slots when its work has ended, or a place
    /// in a queue when its client has gone away. Exactly once, with the charge and the `now_ns` that were given to
    /// [`Store::admit`], and what it answered in [`Standing::held`].
    pub fn release(&self, now_ns: u64, charge: &Charge<'_>, held: Held) {
        match (&charge.limit.rule, held) {
            (_, Held::Nowhere) => {}
            (Rule::Words(words), Held::Own | Held::Overflow) => {
                Word::new(charge, words, now_ns).release(self, held);
            }
            (Rule::Logs(logs), Held::Own | Held::Overflow) => {
                self.refund_ring(now_ns, charge, logs, held);
            }
        }
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
            admitted &= self.ask(now_ns, charge, &mut asked);
        }
        if !admitted {
            return stand(&asked, verdict);
        }
        if let Err(lost) = self.charge_all(&mut asked, verdict) {
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
        let mut asked = ArrayVec::<Asked<'_>, MAX_LIMITS>::new();
        for charge in charges {
            let found = match &charge.limit.rule {
                Rule::Words(words) => Asked::Word(self.find(Word::new(charge, words, now_ns))),
                Rule::Logs(logs) => self.ask_ring(now_ns, charge, logs, Deed::Look),
            };
            push(&mut asked, found);
        }
        stand(&asked, verdict);
    }

    /// Asks one limit; false when it denies.
    #[inline(always)]
    fn ask<'s>(
        &'s self,
        now_ns: u64,
        charge: &Charge<'s>,
        asked: &mut ArrayVec<Asked<'s>, MAX_LIMITS>,
    ) -> bool {
        let found = match &charge.limit.rule {
            Rule::Words(words) => self.find(Word::new(charge, words, now_ns)),
            Rule::Logs(logs) => {
                let found = self.ask_ring(now_ns, charge, logs, Deed::Ask);
                let admits = !found.denies();
                push(asked, found);
                return admits;
            }
        };
        let proposed = found.proposed;
        if let Err(kept) = proposed {
            found.place.move_back(found.word, kept);
        }
        if let Place::Overflow(_) = found.place {
            found.state.overflowed.fetch_add(1, Relaxed);
        }
        push(asked, Asked::Word(found));
        proposed.is_ok()
    }

    /// Charges every limit, or gives back what it charged and says which limit others have emptied meanwhile.
    #[inline]
    fn charge_all<'s>(
        &'s self,
        asked: &mut [Asked<'s>],
        verdict: &mut Verdict,
    ) -> Result<(), Lost> {
        for index in 0..asked.len() {
            let result = match asked.get_mut(index) {
                Some(Asked::Word(word)) => match word.charge(self) {
                    Ok(charged) => {
                        push(&mut verdict.standings, word.standing_charged(charged));
                        continue;
                    }
                    Err(kept) => Err(word.words.standing(&word.ask, kept)),
                },
                Some(Asked::Ring(ring)) => self.charge_ring(ring),
                None => continue,
            };
            match result {
                Ok(standing) => push(&mut verdict.standings, standing),
                Err(standing) => {
                    for (charged, standing) in asked.iter().take(index).zip(&verdict.standings) {
                        self.refund(charged, standing.held);
                    }
                    let limit = index;
                    return Err(Lost { limit, standing });
                }
            }
        }
        Ok(())
    }

    /// Gives back what a request has charged that another limit denies.
    #[cold]
    fn refund(&self, charged: &Asked<'_>, held: Held) {
        match charged {
            Asked::Word(word) => word.refund(),
            Asked::Ring(ring) => self.refund_ring(ring.now_ns, &ring.charge, ring.logs, held),
        }
    }

    /// Where a charge's word is, what it is, and what it would become.
    #[inline(always)]
    fn find<'s>(&'s self, mut found: Word<'s>) -> Word<'s> {
        let (place, word) = match &found.address {
            None => (Place::Unkeyed(Cell::own(&found.state.unkeyed.0)), None),
            Some(address) => match self
                .table
                .find(address)
                .and_then(|cell| Some((cell, cell.load()?)))
            {
                Some((cell, word)) => (Place::Slot(cell), Some(word)),
                None => self.find_room(&found, address),
            },
        };
        found.place = place;
        found.word = word.or_else(|| place.cell()?.load()).unwrap_or(0);
        found.proposed = found.words.charge(&found.ask, found.word);
        found
    }

    #[cold]
    fn find_room<'s>(&'s self, found: &Word<'s>, address: &Address) -> (Place<'s>, Option<u64>) {
        match self.table.has_room(address, self.idle(found.ask.now_ns)) {
            true => (Place::Fresh, Some(0)),
            false => (Place::Overflow(Cell::own(&found.state.overflow.0)), None),
        }
    }

    /// Whether a limit's word carries no information at `now_ns`.
    fn idle(&self, now_ns: u64) -> impl Fn(Owner, u64) -> bool + '_ {
        move |owner, word| {
            self.registry
                .by_id(owner.limit)
                .is_some_and(|state| state.form.is_idle(now_ns, owner.spread, word))
        }
    }

    fn count(&self, limit: &State, previous: Option<u16>) {
        limit.keys.fetch_add(1, Relaxed);
        if let Some(state) = previous.and_then(|id| self.registry.by_id(id)) {
            state.keys.fetch_sub(1, Relaxed);
            state.evictions.fetch_add(1, Relaxed);
        }
    }
}

/// A limit that admitted when it was asked and, when it was charged, did no longer.
#[derive(Debug)]
struct Lost {
    limit: usize,
    standing: Standing,
}

/// One limit as a request found it.
#[derive(Debug)]
enum Asked<'s> {
    Word(Word<'s>),
    Ring(Ring<'s>),
}

impl Asked<'_> {
    fn denies(&self) -> bool {
        match self {
            Asked::Word(word) => word.proposed.is_err(),
            Asked::Ring(ring) => ring.standing.denied,
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
fn stand(asked: &[Asked<'_>], verdict: &mut Verdict) {
    for asked in asked {
        let standing = match asked {
            Asked::Word(word) => word.words.standing(&word.ask, word.word),
            Asked::Ring(ring) => ring.standing,
        };
        push(&mut verdict.standings, standing);
    }
}

/// Denies a request with too many charges, whatever its limits say.
#[cold]
fn refuse(now_ns: u64, charges: &[Charge<'_>], verdict: &mut Verdict) {
    for charge in charges.iter().take(MAX_LIMITS) {
        let standing = match &charge.limit.rule {
            Rule::Words(words) => words.standing(&charge.ask(now_ns, 0), 0),
            Rule::Logs(logs) => logs.standing_unknown(&charge.ask(now_ns, 0)),
        };
        verdict.standings.push(Standing {
            denied: true,
            never: true,
            retry_after_ns: None,
            ..standing
        });
    }
}

impl Charge<'_> {
    #[inline]
    fn ask(&self, now_ns: u64, spread: u64) -> Ask {
        Ask {
            tier: self.tier,
            now_ns,
            cost: self.cost,
            max_delay_ns: self.max_delay_ns,
            spread,
        }
    }
}

mod ring;
mod word;

use ring::Ring;
use word::{Place, Word};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod every_algorithm;
