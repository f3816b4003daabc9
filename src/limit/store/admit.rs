//! The decision over several limits at once: all are charged, or none.
//!
//! **All or none.** First every limit is evaluated without writing; if one denies, that is the
//! verdict. Then every limit is charged. If a concurrent request has taken the last unit meanwhile,
//! the charges are refunded and the request is denied. While they are in place, another request may
//! be denied because of them. Two requests that race for the last units of two limits, in opposite
//! orders, can both be denied, but never both admitted beyond a limit. (A refund is exact while the
//! bucket has been in debt since the charge. A thread suspended between charge and refund until the
//! bucket fills forgives at most one request's cost.)
//!
//! For a key in the table a decision takes no lock, allocates nothing and makes no system call.

use arrayvec::ArrayVec;

use super::{
    Store,
    word::{self, ChargedWord, WordAttempt},
};
use crate::limit::{
    algorithm::WordAlgorithm,
    charge::Charge,
    decision::{Finding, Verdict},
    key::MAX_LIMITS,
    log::RingOperation,
    rule::Rule,
    standing::{ChargeLocation, Standing},
};

impl Store {
    /// Decides a request against all of its limits. `now_ns` is nanoseconds since process start by
    /// a monotonic clock, read at most 10 s ago ([`STEP_BACK_NS`](crate::limit::STEP_BACK_NS)). On
    /// admission every limit is charged, otherwise none.
    ///
    /// More than [`MAX_LIMITS`] charges are the caller's mistake; the request is denied.
    pub fn admit<'a>(&self, now_ns: u64, charges: &[Charge<'a>]) -> Verdict<'a> {
        let mut verdict = Verdict::default();
        self.admit_into(now_ns, charges, &mut verdict);
        verdict
    }

    /// As [`Store::admit`], but writes the verdict in place: returning it would copy room for
    /// [`MAX_LIMITS`] findings.
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

    /// The verdict of [`Store::admit`] without charging; on admission `remaining` is the value
    /// before the charge.
    pub fn peek<'a>(&self, now_ns: u64, charges: &[Charge<'a>]) -> Verdict<'a> {
        let mut verdict = Verdict::default();
        self.look(now_ns, charges, &mut verdict);
        verdict
    }

    /// Charges a limit for a past event (a response or rejection that counts), whether or not units
    /// are left. The debt is bounded by the capacity, so a key never waits longer than one that has
    /// just spent everything. Slots are not charged, because no request would return them.
    pub fn charge(&self, now_ns: u64, charge: &Charge<'_>) {
        match &charge.limit.rule {
            Rule::Words(words) => WordAttempt::new(charge, words, now_ns).charge_anyway(self),
            Rule::Logs(logs) => _ = self.visit(charge, logs, now_ns, RingOperation::ChargeAnyway),
        }
    }

    /// Charges a limit of estimates for the units that a request cost beyond its reservation, even
    /// if they are missing. Debt is bounded; returns the units beyond the bound, which are
    /// forgiven. To refund, call [`Store::release`] with the moment of the charge.
    pub fn overdraw(&self, now_ns: u64, charge: &Charge<'_>) -> u64 {
        match &charge.limit.rule {
            Rule::Words(words) => WordAttempt::new(charge, words, now_ns).overdraw(self),
            Rule::Logs(_) => charge.cost,
        }
    }

    /// Returns an admitted request's charge to one limit: slots when the request ends, or a queue
    /// position when its client disconnects. Call exactly once, with the charge and `now_ns` given
    /// to [`Store::admit`], and the resulting [`Standing::held`].
    pub fn release(&self, now_ns: u64, charge: &Charge<'_>, held: ChargeLocation) {
        match (&charge.limit.rule, held) {
            (_, ChargeLocation::Nowhere) => {}
            (Rule::Words(words), ChargeLocation::Own | ChargeLocation::Overflow) => {
                WordAttempt::new(charge, words, now_ns).release(self, held);
            }
            (Rule::Logs(logs), ChargeLocation::Own | ChargeLocation::Overflow) => {
                self.refund_ring(now_ns, charge, logs, held);
            }
        }
    }

    /// A single limit charges at once, without a separate proposal.
    ///
    /// Any unusual case starts over out of line, so this path keeps no state for it.
    #[inline(always)]
    fn admit_one<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        words: &'a WordAlgorithm,
        verdict: &mut Verdict<'a>,
    ) {
        let asked = WordAttempt::new(charge, words, now_ns);
        let findings = &mut verdict.findings;
        if let Some((cell, old)) = asked.own(self) {
            let proposed = asked.proposed(old);
            match proposed {
                Ok(new) if new != old && word::swap(cell, words, charge.cost, old, new) => {
                    return push(findings, asked.charged(new, ChargeLocation::Own));
                }
                Ok(kept) | Err(kept) if kept == old => {
                    return push(findings, asked.finding(old, proposed.is_err()));
                }
                _ => {}
            }
        }
        push(findings, self.admit_unusual(now_ns, charge, words));
    }

    /// Slow path: a key without a slot, a contended word, or a clock that stepped back.
    #[cold]
    #[inline(never)]
    fn admit_unusual<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        words: &'a WordAlgorithm,
    ) -> Finding<'a> {
        let mut asked = WordAttempt::new(charge, words, now_ns);
        let (place, old, proposed) = asked.propose(self);
        match proposed {
            Ok(_) if charge.cost > 0 => asked.charge(self, place),
            _ => asked.finding(old, proposed.is_err()),
        }
    }

    /// Evaluates every limit, and charges all of them if all admit.
    ///
    /// Each request stays in registers and is written once, into its finding and its proposal.
    /// Copying either, or lending it to a function that is not inlined, costs more than the
    /// decision.
    fn admit_all<'a>(&self, now_ns: u64, charges: &[Charge<'a>], verdict: &mut Verdict<'a>) {
        let findings = &mut verdict.findings;
        let mut proposals = ArrayVec::<Proposal<'_>, MAX_LIMITS>::new();
        let mut admitted = true;
        for charge in charges {
            let words = match &charge.limit.rule {
                Rule::Words(words) => words,
                Rule::Logs(logs) => {
                    let finding = self.ask_ring(now_ns, charge, logs, RingOperation::Ask);
                    admitted &= !finding.denied();
                    push(findings, finding);
                    push(&mut proposals, Proposal::default());
                    continue;
                }
            };
            let mut asked = WordAttempt::new(charge, words, now_ns);
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

    /// The finding of every limit for a request that is not charged.
    fn look<'a>(&self, now_ns: u64, charges: &[Charge<'a>], verdict: &mut Verdict<'a>) {
        if charges.len() > MAX_LIMITS {
            return refuse(now_ns, charges, verdict);
        }
        for charge in charges {
            let finding = match &charge.limit.rule {
                Rule::Words(words) => WordAttempt::new(charge, words, now_ns).look(self),
                Rule::Logs(logs) => self.ask_ring(now_ns, charge, logs, RingOperation::Look),
            };
            push(&mut verdict.findings, finding);
        }
    }

    /// Charges every limit as proposed or, if another request took the units meanwhile, none.
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

    /// Slow path: charges a ring, a key without a slot, or a contended word.
    #[cold]
    fn charge_late<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        place: ChargedWord<'_>,
    ) -> Finding<'a> {
        match &charge.limit.rule {
            Rule::Words(words) => WordAttempt::new(charge, words, now_ns).charge(self, place),
            Rule::Logs(logs) => self.charge_ring(now_ns, charge, logs),
        }
    }

    /// The limit at `lost` admitted when it was evaluated but denied when it was charged. Refunds
    /// the limits charged before it, and reports the status without this request.
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
}

/// The write that a limit proposes for a request that every limit admits.
#[derive(Debug, Default)]
struct Proposal<'s> {
    /// The location of the word.
    place: ChargedWord<'s>,
    /// Its old value.
    old: u64,
    /// Its new value.
    new: u64,
}

impl Proposal<'_> {
    /// Writes the new value; false if the word has no slot yet or has changed.
    #[inline(always)]
    fn accept(&self, charge: &Charge<'_>) -> bool {
        let (Some(cell), Rule::Words(words)) = (self.place.cell, &charge.limit.rule) else {
            return false;
        };
        // reload: this same request may have reassigned the slot, if idle, to its key of another
        // limit
        cell.load() == Some(self.old) && word::swap(cell, words, charge.cost, self.old, self.new)
    }
}

/// `push` where the length is known to be in bounds. An infallible push keeps the item in
/// registers, because no error has to carry it (a fifth of a decision's cost).
#[inline]
fn push<T>(list: &mut ArrayVec<T, MAX_LIMITS>, item: T) {
    if list.len() < MAX_LIMITS {
        list.push(item);
    }
}

/// Denies a request with too many charges, whatever its limits allow.
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
