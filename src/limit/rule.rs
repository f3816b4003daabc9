//! A limit as configured: its name, its algorithm and a quota for each tier.

use super::{
    algorithm::{Algorithm, StateFormat, WordAlgorithm},
    key::Key,
    log::Logs,
    overdraft::Overdraft,
    quota::{Quota, QuotaError},
    table::TableAddress,
    word_request::{SpentUnits, WordRequest},
};

/// One rule: a name, and a quota per tier. Pure; the counters are in a [`Store`](super::Store).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(super) name: Box<str>,
    pub(super) rule: Rule,
}

/// The representation of a limit's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// One word per key, in the table.
    Words(WordAlgorithm),
    /// A ring per key, in a separate store.
    Logs(Logs),
}

impl Limit {
    /// A limit that counts by `algorithm`. `quotas` has one entry per tier, the first is the
    /// default.
    pub fn new(name: &str, algorithm: Algorithm, quotas: &[Quota]) -> Result<Limit, QuotaError> {
        let rule = match WordAlgorithm::new(algorithm, quotas, None) {
            Some(words) => Rule::Words(words?),
            None => Rule::Logs(Logs::new(quotas)?),
        };
        let name = name.into();
        Ok(Limit { name, rule })
    }

    /// A limit on costs that are known only afterwards. It is charged by estimates (module
    /// `overdraft`) and settled with [`Store::overdraw`](super::Store::overdraw) and
    /// [`Store::release`](super::Store::release). Sliding logs and
    /// slots in flight do not support estimates.
    pub fn of_estimates(
        name: &str,
        algorithm: Algorithm,
        quotas: &[Quota],
        overdraft: Overdraft,
    ) -> Result<Limit, QuotaError> {
        match WordAlgorithm::new(algorithm, quotas, Some(overdraft)) {
            Some(words) if algorithm.supports_costs() => Ok(Limit {
                name: name.into(),
                rule: Rule::Words(words?),
            }),
            _ => Err(QuotaError::NoEstimates),
        }
    }

    /// The name by which a [`Store`](super::Store) finds the counters again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format of this tier's counters.
    pub(super) fn form(&self, tier: usize) -> StateFormat {
        match &self.rule {
            Rule::Words(words) => words.form(tier),
            Rule::Logs(logs) => logs.form(tier),
        }
    }

    pub(super) fn tiers(&self) -> usize {
        match &self.rule {
            Rule::Words(words) => words.tiers(),
            Rule::Logs(logs) => logs.tiers(),
        }
    }
}

impl Rule {
    /// Whether counters of `before` mean the same under this rule.
    pub(super) fn continues(&self, before: &Rule, tiers: &[usize]) -> bool {
        match (self, before) {
            (Rule::Words(words), Rule::Words(before)) => words.continues(before, tiers),
            (Rule::Logs(logs), Rule::Logs(before)) => {
                let mut pairs = tiers.iter().enumerate();
                pairs.all(|(tier, &was)| logs.form(tier) == before.form(was))
            }
            _ => false,
        }
    }

    /// The time after which nothing spent now counts any more.
    pub(super) fn recovery_ns(&self) -> u64 {
        match self {
            Rule::Words(words) => words.recovery_ns(),
            Rule::Logs(logs) => logs.recovery_ns(),
        }
    }

    /// The part of `spent` that still counts at a later moment, if nothing else was spent.
    pub(super) fn still_spent(
        &self,
        spent: SpentUnits,
        key: Option<Key>,
        tier: usize,
        at_ns: u64,
    ) -> u64 {
        match self {
            Rule::Words(words) => {
                let spread = key.map_or(0, |key| TableAddress::new(key, 0).spread());
                let word = words.spent(spent, tier, spread);
                words.owed(&WordRequest::zero_cost(tier, at_ns, spread), word)
            }
            Rule::Logs(logs) => logs.still_spent(spent, tier, at_ns),
        }
    }
}
