//! The relation of one limit to one request: whether it applies, and its outcome.

use std::{sync::Arc, time::SystemTime};

use smallvec::SmallVec;

use super::{
    plan::{LimitPlan, LimitRule},
    runtime_overrides::QuotaGrant,
};
use crate::{
    budget::{DecisionSource, SharedClaim},
    config::Mode,
    limit::{Charge, ChargeLocation, Finding, Key, Standing, Standings},
};

/// Whether a limit of the route applies to a request.
#[derive(Clone, Debug)]
pub(super) enum Applicability<'a> {
    /// Off in the configuration.
    Off,
    /// Switched off by a runtime override.
    SwitchedOff,
    /// The client guesses credentials: only limits by address and global limits apply.
    NotForGuesses,
    /// An override exempts the client. Holds its index in the limit; `None` is the limit's own
    /// `exempt`.
    Exempt(Option<usize>),
    /// A key part has no value, and `missing = "skip"`.
    NoKey,
    /// A key part has no value, and `missing = "reject"`: 400.
    MissingKey,
    /// The key needs the body, and another limit rejects the request before the body is read.
    NotRead,
    /// A runtime override granted the key extra units, which are spent first.
    Granted(Arc<QuotaGrant>),
    /// The limit counts the request.
    Applies(AppliedLimit<'a>),
}

/// A limit that counts a request, with the bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct AppliedLimit<'a> {
    pub(super) limit: &'a LimitPlan,
    /// Units to charge.
    cost: u64,
    key: Key,
    /// False: one bucket for all requests.
    is_keyed: bool,
    /// Whether the limit may deny the request, or only observes it (`shadow`, `tag`).
    pub(super) is_enforced: bool,
    tier: u32,
    /// Index of the matching override in the limit.
    by_override: Option<u32>,
    /// Set if the client is blocked.
    pub(super) block: Option<Block>,
}

/// A block: an override with `block`, or a runtime ban.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) until: Option<SystemTime>,
}

/// An applying limit with its outcome.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitOutcome<'a> {
    pub(super) applied: AppliedLimit<'a>,
    /// `None` until the limit is asked.
    pub(super) finding: Option<Finding<'a>>,
    /// Where a shared limit was decided; `None` for a local limit.
    pub(super) source: Option<DecisionSource>,
}

/// The limits that apply to one request, with their outcomes. Enforced limits come first; both
/// groups keep the route's order. Inline up to four limits. Lives as long as the request, so it is
/// small.
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
        // Configurations have fewer quotas and overrides than u32::MAX.
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

    /// Index of the quota.
    pub(super) fn tier(&self) -> usize {
        self.tier as usize
    }

    pub(super) fn cost(&self) -> u64 {
        self.cost
    }

    /// Index of the matching override in the limit.
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

    /// The same charge as a claim on a shared limit; `None` if the limit is local.
    pub(super) fn claim(&self) -> Option<SharedClaim<'a>> {
        let limit: &'a LimitPlan = self.limit;
        Some(SharedClaim {
            limit: limit.rule.shared.as_ref()?,
            tier: self.tier(),
            key: self.key(),
            cost: self.cost.saturating_sub(self.beyond_capacity()),
        })
    }

    /// Whether the answer's status decides if the request is charged.
    pub(super) fn counts_later(&self) -> bool {
        let rule = &self.limit.rule;
        let reserves = rule.cost.as_ref().is_some_and(|cost| cost.reserves());
        !rule.settings.count_status.is_empty() && !reserves
    }

    /// The units of an estimate above the capacity of a shared limit. They are owed, because a
    /// gateway cannot borrow them.
    pub(super) fn beyond_capacity(&self) -> u64 {
        let rule = &self.limit.rule;
        let reserves = rule.cost.as_ref().is_some_and(|cost| cost.reserves());
        match &rule.shared {
            Some(shared) if reserves => self.cost.saturating_sub(shared.capacity(self.tier())),
            _ => 0,
        }
    }

    /// Whether other gateways share the limit.
    pub(super) fn is_shared(&self) -> bool {
        self.limit.rule.shared.is_some()
    }

    /// The finding, or a denial if the client is blocked.
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
            held: ChargeLocation::Nowhere,
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

    /// The limits that may deny the request.
    pub(super) fn enforced(&self) -> &[LimitOutcome<'a>] {
        &self.list[..self.enforced]
    }

    pub(super) fn enforced_mut(&mut self) -> &mut [LimitOutcome<'a>] {
        &mut self.list[..self.enforced]
    }

    /// The limits in `shadow` or `tag` mode.
    pub(super) fn observed_mut(&mut self) -> &mut [LimitOutcome<'a>] {
        &mut self.list[self.enforced..]
    }

    pub(super) fn all(&self) -> &[LimitOutcome<'a>] {
        &self.list
    }

    /// The outcome of a limit, if it was asked.
    pub(super) fn of(&self, limit: &LimitPlan) -> Option<&LimitOutcome<'a>> {
        let mut asked = self.list.iter().filter(|one| one.finding.is_some());
        asked.find(|one| std::ptr::eq(one.applied.limit, limit))
    }

    /// True if no limit denies the request.
    pub(super) fn admitted(&self) -> bool {
        !self.enforced().iter().any(LimitOutcome::denies)
    }

    /// The standings of the enforced limits, in order. Computed on each call.
    pub(super) fn standings(&self) -> Standings {
        let findings = self.enforced().iter();
        findings.filter_map(|one| one.finding.as_ref()).collect()
    }
}

impl LimitRule {
    /// The current mode: a runtime override's, or the configured one.
    pub(super) fn mode(&self) -> Mode {
        self.runtime_overrides
            .in_force()
            .mode()
            .unwrap_or(self.settings.mode)
    }

    /// Whether the limit enforces for this key. Stable: a key is always on the same side of
    /// `enforce_percent`.
    pub(super) fn enforces(&self, mode: Mode, key: Option<Key>) -> bool {
        match (mode, key) {
            (Mode::Enforce, Some(key)) if self.settings.enforce_percent < 100 => {
                key.0 % 100 < u128::from(self.settings.enforce_percent)
            }
            (mode, _) => mode == Mode::Enforce,
        }
    }
}
