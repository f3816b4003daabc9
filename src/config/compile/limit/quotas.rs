//! `rate`, `burst` and `limit` of a limit: the default quota and those of tiers.

use std::num::NonZeroU64;

use super::super::names::check_name;
use crate::{
    config::{
        LimitSettings,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
        units::{Rate, show_duration},
        value::ConfigValue,
    },
    limit::{Algorithm, Limit, Overdraft, Quota, QuotaShape},
};

/// Tier names, each with the index of its quota.
type Tiers = Vec<(String, usize)>;

/// Reads the default quota, then one per tier that `rate` or `burst` names. If the algorithm is
/// invalid, only checks the values.
pub(super) fn quotas(
    section: &Section<'_>,
    rule: Option<QuotaRule>,
    currency: Option<&str>,
    name: &ExpandedText<'_>,
) -> Option<(Vec<Quota>, Tiers)> {
    let Some(rule) = rule else {
        section
            .get("rate")
            .and_then(|value| rates(&value, currency));
        section.get("burst").and_then(|value| bursts(&value));
        section.get("limit").and_then(|value| in_flight(&value));
        return None;
    };
    let shape = rule.algorithm.record().quota;
    refuse_foreign_keys(section, shape);
    let quotas = match shape {
        QuotaShape::InFlight => {
            let limit = section.require("limit", "add limit = 20");
            in_flight(&limit?)
        }
        QuotaShape::Bucket | QuotaShape::Window => {
            let rates = section
                .require("rate", "add rate = \"100/s\"")
                .and_then(|value| rates(&value, currency));
            let bursts = section
                .get("burst")
                .filter(|_| shape == QuotaShape::Bucket)
                .map_or(Some(ByTier::default()), |value| bursts(&value));
            join(rates?, bursts?, |rate, burst| {
                rule.quota(rate, burst)
                    .map_err(|problem| name.error(problem.of(&name.shown())))
                    .ok()
            })
        }
    }?;
    let tiers = quotas.tiers.iter().enumerate();
    let tiers = tiers.map(|(index, (tier, _))| (tier.clone(), index + 1));
    let tiers = tiers.collect();
    let all = quotas.default.into_iter();
    Some((
        all.chain(quotas.tiers.into_iter().map(|(_, quota)| quota))
            .collect(),
        tiers,
    ))
}

/// Reports keys that the algorithm does not use.
fn refuse_foreign_keys(section: &Section<'_>, shape: QuotaShape) {
    let refuse = |key, message: &str, hint: &str| {
        if let Some(value) = section.get(key) {
            let problem = PendingDiagnostic::new(Code::Contradiction, message).hint(hint);
            section.document.error(value.name_span(), problem);
        }
    };
    match shape {
        QuotaShape::InFlight => {
            refuse(
                "rate",
                "a limit on requests in flight has no rate",
                "write limit = 20, or another algorithm",
            );
            refuse(
                "burst",
                "a limit on requests in flight has no burst",
                "write limit = 20, or another algorithm",
            );
        }
        QuotaShape::Window => {
            refuse(
                "burst",
                "a window has no burst: it admits its whole rate at any time within the window",
                "remove burst, or write algorithm = \"token_bucket\"",
            );
            refuse_limit(&refuse);
        }
        QuotaShape::Bucket => refuse_limit(&refuse),
    }
}

fn refuse_limit(refuse: &impl Fn(&'static str, &str, &str)) {
    refuse(
        "limit",
        "`limit` bounds requests in flight, which this algorithm does not count",
        "write rate = \"100/s\" instead, or algorithm = \"concurrency\"",
    );
}

/// Why a rate and a burst do not form a valid quota.
pub(in crate::config::compile) struct Unfit {
    code: Code,
    error: String,
    rate: Rate,
    burst: Option<NonZeroU64>,
}

impl Unfit {
    /// The problem to report for the limit `shown`.
    pub(in crate::config::compile) fn of(self, shown: &str) -> PendingDiagnostic {
        let (rate, period) = (self.rate.amount, show_duration(self.rate.period));
        let message = format!("limit {shown} is out of range: {}", self.error);
        PendingDiagnostic::new(self.code, message).hint(match self.burst {
            Some(burst) => format!("its burst is {burst}, its rate {rate} per {period}"),
            None => format!("its rate is {rate} per {period}"),
        })
    }
}

/// How a limit turns a rate and a burst into a quota.
#[derive(Clone, Copy)]
pub(in crate::config::compile) struct QuotaRule {
    pub(super) algorithm: Algorithm,
    /// Whether it charges costs.
    pub(super) has_cost: bool,
    /// The debt bound of estimates.
    pub(super) overdraft: Option<Overdraft>,
}

impl QuotaRule {
    pub(in crate::config::compile) fn of(limit: &LimitSettings) -> QuotaRule {
        QuotaRule {
            algorithm: limit.algorithm,
            has_cost: limit.cost.is_some(),
            overdraft: limit.cost.as_ref().and_then(|cost| cost.overdraft()),
        }
    }

    /// The burst of a rate without one.
    pub(in crate::config::compile) fn default_burst(self, rate: Rate) -> NonZeroU64 {
        match self.has_cost {
            true => rate.default_cost_burst(),
            false => rate.default_burst(),
        }
    }

    /// Builds a quota from a rate, and from a burst if the algorithm has one.
    pub(in crate::config::compile) fn quota(
        self,
        rate: Rate,
        burst: Option<NonZeroU64>,
    ) -> Result<Quota, Unfit> {
        let burst = (self.algorithm.record().quota == QuotaShape::Bucket)
            .then(|| burst.unwrap_or_else(|| self.default_burst(rate)));
        let held = burst.unwrap_or(rate.amount).get();
        let unfit = |code, error: String| Unfit {
            code,
            error,
            rate,
            burst,
        };
        if rate.is_month {
            let message = "a month has no fixed length: write 30d instead".to_owned();
            return Err(unfit(Code::BadRate, message));
        }
        if held > keys::MAX_BURST {
            let message = format!(
                "the largest quota that a response field can carry is {}",
                keys::MAX_BURST
            );
            return Err(unfit(Code::OutOfRange, message));
        }
        let quota = Quota::new(rate.amount.get(), rate.period, held)
            .and_then(|quota| Limit::new("", self.algorithm, &[quota]).map(|_| quota))
            .map_err(|error| unfit(Code::OutOfRange, error.to_string()))?;
        let with_debt = match self.overdraft {
            Some(debt) => Limit::of_estimates("", self.algorithm, &[quota], debt).map(|_| ()),
            None => Ok(()),
        };
        with_debt.map(|()| quota).map_err(|error| {
            let message = format!("with its debt, {error}");
            unfit(Code::UnfitCost, message)
        })
    }
}

/// A default value and values for tiers, in file order.
struct ByTier<T> {
    default: Option<T>,
    tiers: Vec<(String, T)>,
}

impl<T> Default for ByTier<T> {
    fn default() -> Self {
        Self {
            default: None,
            tiers: Vec::new(),
        }
    }
}

impl<T: Copy> ByTier<T> {
    fn of(&self, tier: &str) -> Option<T> {
        self.tiers
            .iter()
            .find(|(name, _)| name == tier)
            .map(|(_, value)| *value)
            .or(self.default)
    }
}

/// Reads a value, or a table of values by tier in which `default` covers all other clients.
fn by_tier<T>(
    value: &ConfigValue<'_>,
    read: impl Fn(&ConfigValue<'_>) -> Option<T>,
) -> Option<ByTier<T>> {
    if !value.is_table() {
        return Some(ByTier {
            default: Some(read(value)?),
            tiers: Vec::new(),
        });
    }
    let mut by_tier = ByTier::default();
    let entries = value.entries(|tier| format!("{} of {}", quote(tier), value.what));
    let count = entries.len();
    for (tier, value) in entries {
        check_name(&tier, "a tier");
        let Some(read) = read(&value) else { continue };
        match tier.value.as_str() {
            "default" => by_tier.default = Some(read),
            _ => by_tier.tiers.push((tier.value, read)),
        }
    }
    let complete = by_tier.tiers.len() + usize::from(by_tier.default.is_some()) == count;
    complete.then_some(by_tier)
}

/// Builds the default quota and one for each tier in either table. `None` if one is invalid.
fn join(
    rates: ByTier<Rate>,
    bursts: ByTier<NonZeroU64>,
    quota: impl Fn(Rate, Option<NonZeroU64>) -> Option<Quota>,
) -> Option<ByTier<Quota>> {
    let default = quota(rates.default?, bursts.default)?;
    let mut tiers: Vec<(String, Quota)> = Vec::new();
    let of_rates = rates.tiers.iter().map(|(tier, _)| tier);
    for tier in of_rates.chain(bursts.tiers.iter().map(|(tier, _)| tier)) {
        if !tiers.iter().any(|(known, _)| known == tier) {
            tiers.push((tier.clone(), quota(rates.of(tier)?, bursts.of(tier))?));
        }
    }
    Some(ByTier {
        default: Some(default),
        tiers,
    })
}

fn rates(value: &ConfigValue<'_>, currency: Option<&str>) -> Option<ByTier<Rate>> {
    let rates = by_tier(value, |value| value.rate(currency))?;
    require_default(value, &rates, "\"100/s\"");
    Some(rates)
}

fn bursts(value: &ConfigValue<'_>) -> Option<ByTier<NonZeroU64>> {
    by_tier(value, burst)
}

/// The size of one bucket.
pub(in crate::config::compile) fn burst(value: &ConfigValue<'_>) -> Option<NonZeroU64> {
    NonZeroU64::new(value.integer()?)
}

/// Reads `limit`, the bound on requests in flight.
fn in_flight(value: &ConfigValue<'_>) -> Option<ByTier<Quota>> {
    let quotas = by_tier(value, |value| Quota::slots(value.integer()?).ok())?;
    require_default(value, &quotas, "20");
    quotas.default.is_some().then_some(quotas)
}

fn require_default<T>(value: &ConfigValue<'_>, by_tier: &ByTier<T>, example: &str) {
    if by_tier.default.is_none() {
        let message = format!("{} has no `default`", value.what);
        let hint = format!(
            "add default = {example}: it applies to clients without a tier and to tiers without a value"
        );
        value.error(PendingDiagnostic::new(Code::MissingKey, message).hint(hint));
    }
}
