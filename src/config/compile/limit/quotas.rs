//! `rate`, `burst` and `limit` of a limit: how much, for everybody and by tier.

use std::num::NonZeroU64;

use super::super::check_name;
use crate::{
    config::{
        code::Code,
        diagnostic::{Problem, quote},
        file::Section,
        units::{Rate, show_duration},
        value::{Text, Value},
    },
    limit::{Algorithm, Limit, Quota, quota::MAX_SLOTS},
};

/// The largest bucket: what a structured-field integer can say (RFC 9651 §3.3.1).
const MAX_BURST: u64 = 999_999_999_999_999;

/// What an algorithm counts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config::compile) enum Shape {
    /// A rate and a burst.
    Bucket,
    /// A rate only.
    Window,
    /// Neither.
    InFlight,
}

impl Shape {
    pub(in crate::config::compile) fn of(algorithm: Algorithm) -> Shape {
        match algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket => Shape::Bucket,
            Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => {
                Shape::Window
            }
            Algorithm::Concurrency => Shape::InFlight,
        }
    }
}

/// Names of tiers, each with its quota's index.
type Tiers = Vec<(String, usize)>;

/// One quota per tier that is named anywhere, the first is the default. What an unknown algorithm would want is only read.
pub(super) fn quotas(
    section: &Section<'_>,
    algorithm: Option<Algorithm>,
    name: &Text<'_>,
) -> Option<(Vec<Quota>, Tiers)> {
    let Some(algorithm) = algorithm else {
        section.get("rate").and_then(|value| rates(&value));
        section.get("burst").and_then(|value| bursts(&value));
        section.get("limit").and_then(|value| in_flight(&value));
        return None;
    };
    let shape = Shape::of(algorithm);
    refuse_foreign_keys(section, shape);
    let quotas = match shape {
        Shape::InFlight => {
            let limit = section.require("limit", "add limit = 20");
            in_flight(&limit?)
        }
        Shape::Bucket | Shape::Window => {
            let rates = section
                .require("rate", "add rate = \"100/s\"")
                .and_then(|value| rates(&value));
            let bursts = section
                .get("burst")
                .filter(|_| shape == Shape::Bucket)
                .map_or(Some(ByTier::default()), |value| bursts(&value));
            join(rates?, bursts?, |rate, burst| {
                quota(algorithm, rate, burst)
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

/// Keys that mean nothing to the algorithm.
fn refuse_foreign_keys(section: &Section<'_>, shape: Shape) {
    let refuse = |key, message: &str, hint: &str| {
        if let Some(value) = section.get(key) {
            let problem = Problem::new(Code::Contradiction, message).hint(hint);
            section.document.error(value.name_span(), problem);
        }
    };
    match shape {
        Shape::InFlight => {
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
        Shape::Window => {
            refuse(
                "burst",
                "a window admits what its rate says, at any time within it: it has no burst",
                "remove burst, or write algorithm = \"token_bucket\"",
            );
            refuse_limit(&refuse);
        }
        Shape::Bucket => refuse_limit(&refuse),
    }
}

fn refuse_limit(refuse: &impl Fn(&'static str, &str, &str)) {
    refuse(
        "limit",
        "`limit` counts requests in flight, which this algorithm does not",
        "write rate = \"100/s\" instead, or algorithm = \"concurrency\"",
    );
}

/// Why a rate and a burst make no quota.
pub(in crate::config::compile) struct Unfit {
    error: String,
    rate: Rate,
    burst: Option<NonZeroU64>,
}

impl Unfit {
    /// As a problem of the limit that is called `shown`.
    pub(in crate::config::compile) fn of(self, shown: &str) -> Problem {
        let (rate, period) = (self.rate.amount, show_duration(self.rate.period));
        let message = format!("limit {shown} cannot be kept: {}", self.error);
        Problem::new(Code::OutOfRange, message).hint(match self.burst {
            Some(burst) => format!("its burst is {burst}, its rate {rate} per {period}"),
            None => format!("its rate is {rate} per {period}"),
        })
    }
}

/// The quota of a rate, and of a burst where the algorithm has one.
pub(in crate::config::compile) fn quota(
    algorithm: Algorithm,
    rate: Rate,
    burst: Option<NonZeroU64>,
) -> Result<Quota, Unfit> {
    let burst = (Shape::of(algorithm) == Shape::Bucket)
        .then(|| burst.unwrap_or_else(|| rate.default_burst()));
    let held = burst.unwrap_or(rate.amount).get();
    let unfit = |error: String| Unfit { error, rate, burst };
    if held > MAX_BURST {
        let message = format!("the most that clients can be told of is {MAX_BURST}");
        return Err(unfit(message));
    }
    Quota::new(rate.amount.get(), rate.period, held)
        .and_then(|quota| Limit::new("", algorithm, &[quota]).map(|_| quota))
        .map_err(|error| unfit(error.to_string()))
}

/// A value for everybody and for some tiers, in the order of the file.
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

/// A value, or a table of them by tier, in which `default` is for everybody else.
fn by_tier<T>(value: &Value<'_>, read: impl Fn(&Value<'_>) -> Option<T>) -> Option<ByTier<T>> {
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

/// One quota for everybody and for each tier that either table names; `None` when one cannot be kept.
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

fn rates(value: &Value<'_>) -> Option<ByTier<Rate>> {
    let rates = by_tier(value, |value| value.rate())?;
    require_default(value, &rates, "\"100/s\"");
    Some(rates)
}

fn bursts(value: &Value<'_>) -> Option<ByTier<NonZeroU64>> {
    by_tier(value, burst)
}

/// The size of one bucket.
pub(in crate::config::compile) fn burst(value: &Value<'_>) -> Option<NonZeroU64> {
    NonZeroU64::new(value.integer(1..=MAX_BURST)?)
}

/// Requests in flight.
fn in_flight(value: &Value<'_>) -> Option<ByTier<Quota>> {
    let quotas = by_tier(value, |value| {
        Quota::slots(value.integer(1..=MAX_SLOTS)?).ok()
    })?;
    require_default(value, &quotas, "20");
    quotas.default.is_some().then_some(quotas)
}

fn require_default<T>(value: &Value<'_>, by_tier: &ByTier<T>, example: &str) {
    if by_tier.default.is_none() {
        let message = format!("{} has no `default`", value.what);
        let hint = format!(
            "add default = {example}: it is for clients without a tier, and for tiers without a value"
        );
        value.error(Problem::new(Code::MissingKey, message).hint(hint));
    }
}
