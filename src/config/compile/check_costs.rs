//! Checks of limits on costs that span limits, routes and prices.

use super::{
    limit::NamedLimit,
    prices::NamedPrices,
    written_route::{RouteNames, WrittenRoute},
};
use crate::{
    config::{
        CostSettings, CostSource, LimitSettings, Mode,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        document::Document,
    },
    cost::EstimateKind,
    identity::KeyPart,
    limit::Algorithm,
};

/// The output of a long answer of a language model, for the example in a warning.
const LONG_ANSWER: u64 = 32_000;

/// Warns once per limit on costs that applies to a route without a bound on requests in flight.
pub(super) fn warn_of_unbounded(
    document: Document<'_>,
    routes: &[WrittenRoute],
    names: &RouteNames<'_>,
) {
    for (index, limit) in names.limits.iter().enumerate() {
        let Some(settings) = limit.compiled.as_ref() else {
            continue;
        };
        let Some(cost) = settings.cost.as_ref().filter(|cost| is_open(cost)) else {
            continue;
        };
        let applies = |route: &&WrittenRoute| route.limits.contains(&index);
        let is_bounded = |route: &WrittenRoute| {
            let others = route.limits.iter();
            let mut others = others.filter_map(|index| names.limits.get(*index)?.compiled.as_ref());
            others.any(|other| bounds(other, settings))
        };
        let open = routes
            .iter()
            .filter(applies)
            .find(|route| !is_bounded(route));
        if let Some(route) = open.filter(|_| settings.mode == Mode::Enforce) {
            let message = format!(
                "limit {} does not bound how many answers run at once on route {}",
                quote(&settings.name),
                route.shown
            );
            let problem = PendingDiagnostic::new(Code::UnboundedCost, message)
                .label(excess(settings, cost))
                .hint(
                    "add a limit with the same key, algorithm = \"concurrency\" and for example \
                     limit = 8 to the route",
                );
            document.warn(limit.span.clone(), problem);
        }
    }
}

/// Whether requests are admitted before their cost is known.
fn is_open(cost: &CostSettings) -> bool {
    !cost.source.is_known_on_arrival() && !matches!(cost.source, CostSource::RequestBytes)
}

/// Whether `other` bounds the requests in flight of each key of `limit`: its key has no part that
/// the limit's key lacks.
fn bounds(other: &LimitSettings, limit: &LimitSettings) -> bool {
    let is_part = |part: &KeyPart| {
        limit.key.contains(part) || *part == KeyPart::UserOrIp && limit.key.contains(&KeyPart::User)
    };
    other.algorithm == Algorithm::Concurrency
        && other.mode == Mode::Enforce
        && other.key.iter().all(is_part)
}

/// How many answers a full bucket admits at once, and what they can cost.
fn excess(limit: &LimitSettings, cost: &CostSettings) -> String {
    let capacity = limit.quotas.first().map_or(1, |quota| quota.burst.get());
    let estimate = match cost.rule.estimate {
        EstimateKind::Fixed(units) => units.max(1),
        EstimateKind::Input => 1,
        EstimateKind::Learned | EstimateKind::MaxTokens => cost.rule.first.output,
    };
    let answers = (capacity / estimate).max(1);
    let unit = &cost.unit;
    let at_once = format!("{answers} at once: {capacity} {unit}, {estimate} reserved for each");
    if cost.prices.is_some() || !cost.is_of_tokens() {
        return at_once;
    }
    let total = answers.saturating_mul(LONG_ANSWER);
    format!("{at_once}; with {LONG_ANSWER} used by each it is {total}")
}

/// Warns of price tables that no limit uses.
pub(super) fn warn_of_unused_prices(
    document: Document<'_>,
    prices: &[NamedPrices],
    limits: &[NamedLimit],
) {
    let used = |table: &NamedPrices| {
        let mut costs = limits
            .iter()
            .filter_map(|limit| limit.compiled.as_ref()?.cost.as_ref()?.prices.as_deref());
        costs.any(|name| name == table.name)
    };
    for table in prices.iter().filter(|table| !used(table)) {
        let message = format!("no limit uses the prices {}", quote(&table.name));
        let problem = PendingDiagnostic::new(Code::UnusedPrices, message);
        let hint = "write prices = \"NAME\" in the cost of a limit, or remove the table";
        document.warn(table.span.clone(), problem.hint(hint));
    }
}
