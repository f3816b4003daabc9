//! The counters of all limits, and the decision over several of them at once: all are charged, or none.
//!
//! A key in debt is never evicted for a fresh one, so nobody can wash a debt off by flooding the table: a slot
//! is given away only when its bucket is full, which is what a fresh key has too.
//!
//! Each limit has a guaranteed part of the slots, and none can take them all (module `share`). When a fresh key finds no slot, it
//! shares one of `OVERFLOW_BUCKETS` overflow buckets of its limit with the keys whose hash
//! names the same one. That is strict: those that share a bucket get together what one key would, and all keys without a slot get
//! at most 256 times that. A key that gets a slot later begins with what its overflow bucket owes at that moment, so it cannot
//! spend its quota twice.
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
    Finding, Held, Key, Limit, MAX_LIMITS, Rule, Standing, Verdict,
    log::{Deed, Rings},
    registry::{Attached, Registry, State, TooManyLimits},
    share::SharedCapacity,
    table::{Owner, Table},
    words::{Ask, Form, Words},
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
    pub(super) table: Table,
    /// How limits divide the slots of the table.
    slots: SharedCapacity,
    rings: Rings,
    registry: Registry,
}

impl Store {
    /// A store for about `max_keys` keys of one limit, and half as many in the guaranteed parts of all limits (1 to 10⁹; others
    /// are brought within). Takes 32 bytes of address space per key, which the system backs with memory as keys arrive; ends the process where
    /// there is no address space for it. Sliding logs take up to
    /// [`ENTRIES_PER_KEY`](super::log::ENTRIES_PER_KEY) · 16 bytes per key in addition, when they are used.
    pub fn new(max_keys: usize) -> Store {
        Store {
            table: Table::new(max_keys),
            slots: SharedCapacity::for_keys(max_keys),
            rings: Rings::new(max_keys),
            registry: Registry::new(),
        }
    }

    /// Joins a limit to fresh counters.
    pub fn attach(&self, limit: &Limit) -> Result<Arc<Attached>, TooManyLimits> {
        let attached = self.registry.attach(limit, None)?;
        self.run(&attached);
        self.divide();
        Ok(attached)
    }

    /// Keys of a limit that are certain to find room, whatever other limits hold; `None` while it is the only one of its kind.
    pub fn guaranteed_keys(&self, limit: &Attached) -> Option<u64> {
        let part = match &limit.rule {
            Rule::Words(_) => self.slots.guaranteed(),
            Rule::Logs(logs) => self.rings.guaranteed(logs),
        };
        (part < u64::MAX).then_some(part)
    }

    /// A limit has a guaranteed part from the next division on.
    fn run(&self, limit: &Attached) {
        let occupied = limit.occupancy();
        let is_log = matches!(limit.rule, Rule::Logs(_));
        occupied.slots.set_running(!is_log);
        occupied.entries.set_running(is_log);
    }

    fn divide(&self) {
        let all = self.registry.occupied();
        self.slots.divide(all.iter().map(|one| &one.slots));
        self.rings.divide(all.iter().map(|one| &one.entries));
    }

    /// Joins a limit to the counters of the one that it is to follow: nobody gets back what was spent, and nobody waits for
    /// longer than the new quota takes to come back (see the module `succession`). `was` says for each of its tiers which tier
    /// of `before` it was. Changes nothing until [`Store::change_over`].
    pub fn succeed(
        &self,
        limit: &Limit,
        before: &Attached,
        was: &[usize],
    ) -> Result<Arc<Attached>, TooManyLimits> {
        let was: Vec<usize> = (0..limit.tiers())
            .map(|tier| was.get(tier).copied().unwrap_or(0))
            .collect();
        self.registry.attach(limit, Some((before, &was)))
    }

    /// From `now_ns` on the limits of `after` count, and those of `before` no longer: what none of `after` goes on with is
    /// forgotten. To be called once, before the first decision by `after`.
    pub fn change_over<'a>(
        &self,
        now_ns: u64,
        before: impl Iterator<Item = &'a Attached>,
        after: impl Iterator<Item = &'a Attached> + Clone,
    ) {
        for limit in after.clone() {
            limit.take_over(self, now_ns);
        }
        for occupied in self.registry.occupied() {
            let mut runs = after.clone();
            match runs.find(|limit| Arc::ptr_eq(limit.occupancy(), &occupied)) {
                Some(limit) => self.run(limit),
                None => {
                    occupied.slots.set_running(false);
                    occupied.entries.set_running(false);
                }
            }
        }
        self.divide();
        for limit in before {
            for state in limit.states() {
                let goes_on = |after: &Attached| after.remembers(state.id);
                if state.form != Form::Slots && !after.clone().any(goes_on) {
                    state.retire(now_ns, now_ns);
                }
            }
        }
    }

    /// Decides a request against all of its limits at `now_ns`, nanoseconds since the process began by a monotonic
    /// clock, read at most 10 s ago ([`STEP_BACK_NS`](super::bucket::STEP_BACK_NS)). On admission every limit is
    /// charged, otherwise none is.
    ///
    /// More than [`MAX_LIMITS`] charges are a mistake of the caller; such a request is denied.
    pub fn admit<'a>(&self, now_ns: u64, charges: &[Charge<'a>]) -> Verdict<'a> {
        let mut verdict = Verdict::default();
        self.admit_into(now_ns, charges, &mut verdict);
        verdict
    }

    /// [`Store::admit`], with the verdict written where it is to stay: a returned one is copied, room for
    /// [`MAX_LIMITS`] findings at a time.
    pub fn admit_into<'a>(&self, now_ns: u64, charges: &[Charge<'a>], verdict: &mut Verdict<'a>) {
        verdict.findings.clear();
        match charges {
            [charge] if let Rule::Words(words) = &charge.limit.rule => {
                self.admit_one(now_ns, charge, words, verdict);
            }
            _ if charges.len() <= MAX_LIMITS => self.admit_all(now_ns, charges, verdict),
            _ => refuse(now_ns, charges, verdict),
        }
    }

    /// What [`Store::admit`] would say, without charging anything: on admission `remaining` is what is there before
    /// the charge.
    pub fn peek<'a>(&self, now_ns: u64, charges: &[Charge<'a>]) -> Verdict<'a> {
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

    /// Charges a limit of estimates for the units that a request has cost beyond those it holds,
    /// whether or not they are there. Debt is bounded; returns the units that the bound forgives.
    /// A refund is a [`Store::release`] of the units, with the moment at which they were charged.
    pub fn overdraw(&self, now_ns: u64, charge: &Charge<'_>) -> u64 {
        match &charge.limit.rule {
            Rule::Words(words) => Word::new(charge, words, now_ns).overdraw(self),
            Rule::Logs(_) => charge.cost,
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

    /// Forgets what a key has spent of a limit, under the rules before, too. Requests in flight go on counting: they are given
    /// back by those that hold them.
    pub fn forget(&self, limit: &Attached, key: Option<Key>) {
        limit.forget(self, key);
    }

    /// One limit alone charges at once what it would propose among others.
    ///
    /// Whatever is not the usual case begins again out of line: nothing of it is kept ready here.
    #[inline(always)]
    fn admit_one<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        words: &'a Words,
        verdict: &mut Verdict<'a>,
    ) {
        let asked = Word::new(charge, words, now_ns);
        let findings = &mut verdict.findings;
        if let Some((cell, old)) = asked.own(self) {
            let proposed = asked.proposed(old);
            match proposed {
                Ok(new) if new != old && word::swap(cell, words, charge.cost, old, new) => {
                    return push(findings, asked.charged(new, Held::Own));
                }
                Ok(kept) | Err(kept) if kept == old => {
                    return push(findings, asked.finding(old, proposed.is_err()));
                }
                _ => {}
            }
        }
        push(findings, self.admit_unusual(now_ns, charge, words));
    }

    /// A key without a slot, a word that others are changing, or a clock that stepped back.
    #[cold]
    #[inline(never)]
    fn admit_unusual<'a>(&self, now_ns: u64, charge: &Charge<'a>, words: &'a Words) -> Finding<'a> {
        let mut asked = Word::new(charge, words, now_ns);
        let (place, old, proposed) = asked.propose(self);
        match proposed {
            Ok(_) if charge.cost > 0 => asked.charge(self, place),
            _ => asked.finding(old, proposed.is_err()),
        }
    }

    /// Asks every limit, and charges them if all admit.
    ///
    /// What is asked of one limit is kept in registers and written once, into its finding and its proposal: copying
    /// either, or lending it to a function that is not inlined, costs more than the decision.
    fn admit_all<'a>(&self, now_ns: u64, charges: &[Charge<'a>], verdict: &mut Verdict<'a>) {
        let findings = &mut verdict.findings;
        let mut proposals = ArrayVec::<Proposal<'_>, MAX_LIMITS>::new();
        let mut admitted = true;
        for charge in charges {
            let words = match &charge.limit.rule {
                Rule::Words(words) => words,
                Rule::Logs(logs) => {
                    let finding = self.ask_ring(now_ns, charge, logs, Deed::Ask);
                    admitted &= !finding.denied();
                    push(findings, finding);
                    push(&mut proposals, Proposal::default());
                    continue;
                }
            };
            let mut asked = Word::new(charge, words, now_ns);
            let (place, old, proposed) = asked.propose(self);
            admitted &= proposed.is_ok();
            push(findings, asked.finding(old, proposed.is_err()));
            let new = proposed.unwrap_or(old);
            push(&mut proposals, Proposal { place, old, new });
        }
        if admitted {
            self.charge_all(now_ns, charges, &proposals, verdict);
        }
    }

    /// What every limit finds, of a request that is not charged.
    fn look<'a>(&self, now_ns: u64, charges: &[Charge<'a>], verdict: &mut Verdict<'a>) {
        if charges.len() > MAX_LIMITS {
            return refuse(now_ns, charges, verdict);
        }
        for charge in charges {
            let finding = match &charge.limit.rule {
                Rule::Words(words) => Word::new(charge, words, now_ns).look(self),
                Rule::Logs(logs) => self.ask_ring(now_ns, charge, logs, Deed::Look),
            };
            push(&mut verdict.findings, finding);
        }
    }

    /// Charges every limit what it proposed, or, where others have emptied one meanwhile, none.
    #[inline(always)]
    fn charge_all<'a>(
        &self,
        now_ns: u64,
        charges: &[Charge<'a>],
        proposals: &[Proposal<'_>],
        verdict: &mut Verdict<'a>,
    ) {
        let asked = charges.iter().zip(proposals).zip(&mut verdict.findings);
        for (index, ((charge, proposal), finding)) in asked.enumerate() {
            if charge.cost == 0 {
                continue;
            }
            if proposal.accept(charge) {
                finding.charge(proposal.new, proposal.place.held);
                continue;
            }
            *finding = self.charge_late(now_ns, charge, proposal.place);
            if finding.denied() {
                return self.give_back(now_ns, charges, index, verdict);
            }
        }
    }

    /// Charges a ring, a key without a slot, or a word that others are changing.
    #[cold]
    fn charge_late<'a>(&self, now_ns: u64, charge: &Charge<'a>, place: Place<'_>) -> Finding<'a> {
        match &charge.limit.rule {
            Rule::Words(words) => Word::new(charge, words, now_ns).charge(self, place),
            Rule::Logs(logs) => self.charge_ring(now_ns, charge, logs),
        }
    }

    /// The limit at `lost` admitted when it was asked and, when it was charged, did no longer: what those before it were
    /// charged goes back, and the request is told how it stands without.
    #[cold]
    fn give_back<'a>(
        &self,
        now_ns: u64,
        charges: &[Charge<'a>],
        lost: usize,
        verdict: &mut Verdict<'a>,
    ) {
        let mut findings = std::mem::take(&mut verdict.findings);
        for (charge, finding) in charges.iter().zip(&findings).take(lost) {
            self.release(now_ns, charge, finding.held());
        }
        self.look(now_ns, charges, verdict);
        if let Some((told, lost)) = verdict.findings.get_mut(lost).zip(findings.get_mut(lost)) {
            std::mem::swap(told, lost);
        }
    }

    /// Which slots a fresh key of these counters may take: one that nobody has, where its limit may grow, and one whose word
    /// carries no information at `now_ns`.
    fn takes<'s>(
        &'s self,
        state: &'s State,
        now_ns: u64,
    ) -> impl Fn(Option<Owner>, u64) -> bool + 's {
        let occupied = &state.occupancy;
        let may_grow = self.slots.may_grow(&occupied.slots, 1);
        move |owner, word| {
            let Some(owner) = owner else { return may_grow };
            self.registry.by_id(owner.limit).is_some_and(|state| {
                state.is_idle(now_ns, owner.spread, word)
                    && (may_grow
                        || self
                            .slots
                            .may_replace(&occupied.slots, &state.occupancy.slots))
            })
        }
    }

    /// The limit's own slots whose words carry no information.
    fn gives<'s>(
        &'s self,
        state: &'s State,
        now_ns: u64,
    ) -> impl Fn(Option<Owner>, u64) -> bool + 's {
        let occupied = &state.occupancy;
        move |owner, word| {
            let Some(owner) = owner else { return false };
            self.registry.by_id(owner.limit).is_some_and(|state| {
                Arc::ptr_eq(&state.occupancy, occupied) && state.is_idle(now_ns, owner.spread, word)
            })
        }
    }

    fn count(&self, limit: &State, previous: Option<u16>) {
        limit.keys.fetch_add(1, Relaxed);
        self.slots.grow(&limit.occupancy.slots, 1);
        if let Some(previous) = previous {
            self.count_gone(previous);
        }
    }

    fn count_gone(&self, id: u16) {
        if let Some(state) = self.registry.by_id(id) {
            state.keys.fetch_sub(1, Relaxed);
            state.evictions.fetch_add(1, Relaxed);
            self.slots.shrink(&state.occupancy.slots, 1);
        }
    }
}

/// What a limit would do with a request that every limit admits.
#[derive(Debug, Default)]
struct Proposal<'s> {
    /// Where the word is.
    place: Place<'s>,
    /// What it was.
    old: u64,
    /// What it would become.
    new: u64,
}

impl Proposal<'_> {
    /// Makes it so; false when the word has no place yet, or is not what it was.
    #[inline(always)]
    fn accept(&self, charge: &Charge<'_>) -> bool {
        let (Some(cell), Rule::Words(words)) = (self.place.cell, &charge.limit.rule) else {
            return false;
        };
        // loaded again: this very request may have given the slot, if idle, to its key of another limit
        cell.load() == Some(self.old) && word::swap(cell, words, charge.cost, self.old, self.new)
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

/// Denies a request with too many charges, whatever its limits say.
#[cold]
fn refuse(now_ns: u64, charges: &[Charge<'_>], verdict: &mut Verdict<'_>) {
    for charge in charges.iter().take(MAX_LIMITS) {
        let standing = match &charge.limit.rule {
            Rule::Words(words) => words.standing(&charge.ask(now_ns, 0), 0),
            Rule::Logs(logs) => logs.standing_unknown(&charge.ask(now_ns, 0)),
        };
        let denied = Standing {
            denied: true,
            never: true,
            retry_after_ns: None,
            ..standing
        };
        verdict.findings.push(denied.into());
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

use word::{Place, Word};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod every_algorithm;
#[cfg(test)]
mod settling;
