//! What one limit has to do with one request: whether it applies, and what it decided.

use std::{sync::Arc, time::SystemTime};

use smallvec::SmallVec;

use super::{
    plan::{LimitPlan, LimitRule},
    rulings::Boost,
};
use crate::{
    budget::{Claim, Source},
    config::Mode,
    limit::{Charge, Finding, Held, Key, Standing, Standings},
};

/// Whether a limit of the route applies to a request.
#[derive(Clone, Debug)]
pub(super) enum Applicability<'a> {
    /// It is off in the configuration.
    Off,
    /// An operator has switched it off.
    SwitchedOff,
    /// The client guesses at credentials: only limits on addresses and those of the whole gateway apply.
    NotForGuesses,
    /// An override exempts the client: its index among the limit's. `None` is the limit's own `exempt`.
    Exempt(Option<usize>),
    /// A part of its key has no value, and `missing = "skip"`.
    NoKey,
    /// A part of its key has no value, and `missing = "reject"`: 400.
    MissingKey,
    /// Its key needs the body, and another limit rejects the request before that is read.
    NotRead,
    /// An operator has granted the key units, which are spent first.
    Granted(Arc<Boost>),
    /// It counts the request.
    Applies(AppliedLimit<'a>),
}

/// A limit that counts a request, in one of its buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct AppliedLimit<'a> {
    pub(super) limit: &'a LimitPlan,
    /// Units that the request takes.
    cost: u64,
    key: Key,
    /// Without a key there is one bucket for all.
    is_keyed: bool,
    /// Whether it may deny the request, or only observes it (`shadow`, `tag`).
    pub(super) is_enforced: bool,
    tier: u32,
    /// The override that decides, by its index among the limit's.
    by_override: Option<u32>,
    /// It is closed to this client.
    pub(super) block: Option<Block>,
}

/// A limit that is closed: an override with `block`, or a ban by an operator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) until: Option<SystemTime>,
}

/// A limit that applies, and what it decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitOutcome<'a> {
    pub(super) applied: AppliedLimit<'a>,
    /// `None` until it is asked.
    pub(super) finding: Option<Finding<'a>>,
    /// Who decided a shared limit; `None` where the limit is this gateway's own.
    pub(super) source: Option<Source>,
}

/// The limits that apply to one request, each with its outcome: those that are enforced first, each kind in the order of the
/// route. In place for four limits; kept while the request is in flight, so it is small.
#[derive(Debug, Default)]
pub(super) struct LimitOutcomes<'a> {
    list: SmallVec<[LimitOutcome<'a>; 4]>,
    enforced: usize,
}

impl<'a> AppliedLimit<'a> {
    pub(super) fn new(
        limit: &'a LimitPlan,
        (tier, key): (usize, Option<Key>),
        cost: u64,
        by_override: Option<usize>,
        block: Option<Block>,
    ) -> Self {
        // a configuration has fewer quotas and overrides than this
        let narrow = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        Self {
            limit,
            cost,
            key: key.unwrap_or(Key(0)),
            is_keyed: key.is_some(),
            is_enforced: true,
            tier: narrow(tier),
            by_override: by_override.map(narrow),
            block,
        }
    }

    pub(super) fn key(&self) -> Option<Key> {
        self.is_keyed.then_some(self.key)
    }

    /// The index of its quota.
    pub(super) fn tier(&self) -> usize {
        self.tier as usize
    }

    pub(super) fn cost(&self) -> u64 {
        self.cost
    }

    /// The override that decides, by its index among the limit's.
    pub(super) fn by_override(&self) -> Option<usize> {
        self.by_override.map(|index| index as usize)
    }

    pub(super) fn charge(&self) -> Charge<'a> {
        let limit: &'a LimitPlan = self.limit;
        Charge {
            limit: &limit.rule.buckets,
            tier: self.tier(),
            key: self.key(),
            cost: self.cost,
            max_delay_ns: limit.rule.max_delay_ns,
        }
    }

    /// The same for a limit that gateways share.
    pub(super) fn claim(&self) -> Option<Claim<'a>> {
        let limit: &'a LimitPlan = self.limit;
        Some(Claim {
            limit: limit.rule.shared.as_ref()?,
            tier: self.tier(),
            key: self.key(),
            cost: self.cost,
        })
    }

    /// Whether the status of the answer tells if it is charged.
    pub(super) fn counts_later(&self) -> bool {
        !self.limit.rule.settings.count_status.is_empty()
    }

    /// Whether other gateways keep it, too.
    pub(super) fn is_shared(&self) -> bool {
        self.limit.rule.shared.is_some()
    }

    /// Its finding, unless it is closed to the client.
    pub(super) fn closed_or(&self, finding: Finding<'a>) -> Finding<'a> {
        match self.block {
            Some(block) => block.finding(&finding),
            None => finding,
        }
    }
}

impl Block {
    fn finding<'a>(self, open: &Finding<'a>) -> Finding<'a> {
        let left = self
            .until
            .map(|until| until.duration_since(SystemTime::now()).unwrap_or_default());
        let retry_after_ns = left.map(|left| u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
        let closed = Standing {
            remaining: 0,
            denied: true,
            never: retry_after_ns.is_none(),
            retry_after_ns,
            next_unit_ns: retry_after_ns.unwrap_or(0),
            reset_ns: retry_after_ns.unwrap_or(0),
            delay_ns: 0,
            held: Held::Nowhere,
            ..open.standing()
        };
        closed.into()
    }
}

impl LimitOutcome<'_> {
    pub(super) fn denies(&self) -> bool {
        self.finding.as_ref().is_some_and(Finding::denied)
    }
}

impl<'a> LimitOutcomes<'a> {
    pub(super) fn push(&mut self, applied: AppliedLimit<'a>) {
        let outcome = LimitOutcome {
            applied,
            finding: None,
            source: None,
        };
        if applied.is_enforced {
            self.list.insert(self.enforced, outcome);
            self.enforced += 1;
        } else {
            self.list.push(outcome);
        }
    }

    /// Those that may deny the request.
    pub(super) fn enforced(&self) -> &[LimitOutcome<'a>] {
        &self.list[..self.enforced]
    }

    pub(super) fn enforced_mut(&mut self) -> &mut [LimitOutcome<'a>] {
        &mut self.list[..self.enforced]
    }

    /// Those in shadow, and those that only tag.
    pub(super) fn observed_mut(&mut self) -> &mut [LimitOutcome<'a>] {
        &mut self.list[self.enforced..]
    }

    pub(super) fn all(&self) -> &[LimitOutcome<'a>] {
        &self.list
    }

    /// What a limit of the route decided, if it was asked.
    pub(super) fn of(&self, limit: &LimitPlan) -> Option<&LimitOutcome<'a>> {
        let mut asked = self.list.iter().filter(|one| one.finding.is_some());
        asked.find(|one| std::ptr::eq(one.applied.limit, limit))
    }

    /// No limit denies the request.
    pub(super) fn admitted(&self) -> bool {
        !self.enforced().iter().any(LimitOutcome::denies)
    }

    /// How the limits that are enforced stand, in their order. It is worked out here, so ask once.
    pub(super) fn standings(&self) -> Standings {
        let findings = self.enforced().iter();
        findings.filter_map(|one| one.finding.as_ref()).collect()
    }
}

impl LimitRule {
    /// Its mode now: as configured, if no operator has changed it.
    pub(super) fn mode(&self) -> Mode {
        self.rulings.in_force().mode().unwrap_or(self.settings.mode)
    }

    /// Whether it is enforced for this key, or only observes it. Sticky: a key is always on the same side.
    pub(super) fn enforces(&self, mode: Mode, key: Option<Key>) -> bool {
        match (mode, key) {
            (Mode::Enforce, Some(key)) if self.settings.enforce_percent < 100 => {
                key.0 % 100 < u128::from(self.settings.enforce_percent)
            }
            (mode, _) => mode == Mode::Enforce,
        }
    }
}
