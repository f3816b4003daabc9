//! Checks that span routes, limits and upstreams.

use std::collections::HashMap;

use super::{
    check_costs,
    written_route::{RouteNames, WrittenRoute},
};
use crate::{
    config::{
        LimitSettings, Mode,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        document::Document,
    },
    identity::KeyPart,
    limit::QuotaShape,
    route::{Part, Pattern, RouteTable},
};

/// Reports conflicting routes, requests that no limit could admit, and unused limits and upstreams.
pub(super) fn check(document: Document<'_>, routes: &[WrittenRoute], names: &RouteNames<'_>) {
    check_names(document, routes);
    check_patterns(document, routes);
    for route in routes {
        let met = route
            .limits
            .iter()
            .filter_map(|index| names.limits.get(*index)?.compiled.as_ref());
        for limit in met {
            check_cost(document, route, limit);
        }
    }
    // after an error, a limit that looks unused may only be misspelt
    if document.problems.errors() == 0 {
        warn_of_unused(document, routes, names);
        check_costs::warn_of_unbounded(document, routes, names);
    }
}

/// Reports a route that no request can reach because its only path is the quota status page.
pub(super) fn check_status_path(
    document: Document<'_>,
    routes: &[WrittenRoute],
    status_path: Option<&str>,
) {
    for route in routes {
        let path = route.pattern.as_ref().map(|pattern| pattern.path.as_str());
        if status_path.is_some() && path == status_path && !route.is_secret {
            let message = "tidegate answers this path itself: it is the quota status page";
            let hint =
                "set status_path in [response] to another path, or to \"\" to turn the page off";
            let problem = PendingDiagnostic::new(Code::RouteConflict, message).hint(hint);
            document.error(route.path_span.clone(), problem);
        }
    }
}

fn check_names(document: Document<'_>, routes: &[WrittenRoute]) {
    let mut lines = HashMap::new();
    for route in routes {
        let Some((name, span)) = &route.name else {
            continue;
        };
        if let Some(first) = lines.insert(name, document.source.line(span.start)) {
            let message = format!("two routes have the name {}", route.shown);
            let hint = format!("the other is on line {first}: rename one of them");
            document.error(
                span.clone(),
                PendingDiagnostic::new(Code::Duplicate, message).hint(hint),
            );
        }
    }
}

fn check_patterns<'r>(document: Document<'_>, routes: &'r [WrittenRoute]) {
    let with_pattern = |route: &'r WrittenRoute| Some((route, route.pattern.as_ref()?));
    let readable: Vec<(&WrittenRoute, &Pattern)> = routes.iter().filter_map(with_pattern).collect();
    let patterns: Vec<Pattern> = readable
        .iter()
        .map(|(_, pattern)| (*pattern).clone())
        .collect();
    for error in RouteTable::build(&patterns).err().unwrap_or_default() {
        let Some((route, _)) = readable.get(error.index) else {
            continue;
        };
        let other = error
            .other
            .and_then(|other| readable.get(other))
            .map(|(other, _)| *other);
        let label = other.map(|other| {
            let line = document.source.line(other.path_span.start);
            format!("the earlier route is {} on line {line}", other.shown)
        });
        let problem = if route.is_secret || other.is_some_and(|other| other.is_secret) {
            let message =
                "this route's path or hosts, which come from the environment, cannot be used";
            let hint = "write them in the file to see why";
            PendingDiagnostic::new(Code::RouteConflict, message).hint(hint)
        } else {
            PendingDiagnostic::new(Code::RouteConflict, error.problem).hint(error.hint)
        };
        let problem = problem.label(label.unwrap_or_default());
        let span = match error.part {
            Part::Host(place) => route.host_spans.get(place),
            Part::Path | Part::Method(_) => None,
        };
        document.error(span.unwrap_or(&route.path_span).clone(), problem);
    }
}

/// Checks that the limit can admit one request of the route: an error if no tier can, a warning if
/// some cannot.
fn check_cost(document: Document<'_>, route: &WrittenRoute, limit: &LimitSettings) {
    let Some(cost) = route.cost.filter(|_| limit.charges_route_cost()) else {
        return;
    };
    let burst = |index: usize| limit.quotas.get(index).map_or(0, |quota| quota.burst.get());
    let tiers = limit
        .tiers
        .iter()
        .map(|(tier, index)| (tier.as_str(), *index));
    let all = std::iter::once(("default", 0)).chain(tiers);
    let small: Vec<(&str, usize)> = all.filter(|(_, index)| burst(*index) < cost).collect();
    let Some((tier, index)) = small.first() else {
        return;
    };
    let (name, shown) = (quote(&limit.name), &route.shown);
    let held = match limit.algorithm.record().quota {
        QuotaShape::Bucket => "burst",
        QuotaShape::Window => "count of the rate",
        QuotaShape::InFlight => "limit",
    };
    let hint = format!("raise the {held} of {name} to at least {cost}, or lower the cost");
    let label = format!("a request costs {cost}, the {held} is {}", burst(*index));
    if small.len() == limit.tiers.len() + 1 {
        let message = format!("limit {name} can never admit a request of route {shown}");
        document.error(
            route.cost_span.clone(),
            PendingDiagnostic::new(Code::CostOverQuota, message)
                .label(label)
                .hint(hint),
        );
    } else {
        let message = format!(
            "limit {name} can never admit a request of route {shown} for tier {}",
            quote(tier)
        );
        document.warn(
            route.cost_span.clone(),
            PendingDiagnostic::new(Code::CostOverBurst, message)
                .label(label)
                .hint(hint),
        );
    }
}

/// Warns of a limit keyed by a path parameter that none of its routes has: it never applies.
fn warn_of_foreign_params(
    document: Document<'_>,
    routes: &[WrittenRoute],
    names: &RouteNames<'_>,
    index: usize,
) {
    let limit = &names.limits[index];
    let key = limit.compiled.iter().flat_map(|compiled| &compiled.key);
    let param = |part: &KeyPart| match part {
        KeyPart::Param(name) => Some([format!("{{{name}}}"), format!("{{*{name}}}")]),
        _ => None,
    };
    for [plain, rest] in key.filter_map(param) {
        let has = |route: &WrittenRoute| {
            let path = route.pattern.as_ref().map(|pattern| pattern.path.as_str());
            let mut segments = path.unwrap_or_default().split('/');
            route.limits.contains(&index) && segments.any(|text| text == plain || text == rest)
        };
        if !routes.iter().any(has) {
            let message = format!(
                "no route with limit {} has {} in its path",
                quote(&limit.name),
                quote(&plain)
            );
            let problem = PendingDiagnostic::new(Code::NeverIdentified, message);
            let hint =
                "add the limit to a route such as path = \"/users/{id}\", or correct its key";
            document.warn(limit.span.clone(), problem.hint(hint));
        }
    }
}

/// Warns of a limit keyed only by values that clients choose: each new value gets a fresh bucket.
/// No warning if another limit counts the same requests by address.
fn warn_of_chosen_key(
    document: Document<'_>,
    routes: &[WrittenRoute],
    names: &RouteNames<'_>,
    index: usize,
) {
    let limit = &names.limits[index];
    let Some(compiled) = &limit.compiled else {
        return;
    };
    if compiled.mode == Mode::Off
        || !compiled.key.iter().any(KeyPart::is_chosen)
        || compiled.key.iter().any(KeyPart::is_verified)
    {
        return;
    }
    let counts_addresses = |other: &usize| {
        let other = names.limits.get(*other);
        let other = other.and_then(|other| other.compiled.as_ref());
        other.is_some_and(|other| {
            let mut parts = other.key.iter();
            other.mode == Mode::Enforce
                && other.count_status.is_empty()
                && parts.any(KeyPart::has_address)
                && !other.key.iter().any(KeyPart::is_chosen)
        })
    };
    if names.everywhere.iter().any(counts_addresses) {
        return;
    }
    let is_open = |route: &WrittenRoute| {
        route.limits.contains(&index) && !route.limits.iter().any(counts_addresses)
    };
    if !names.everywhere.contains(&index) && !routes.iter().any(is_open) {
        return;
    }
    let message = format!(
        "limit {} is keyed only by values that clients choose: each new value gets a new bucket",
        quote(&limit.name)
    );
    let hint =
        "add \"ip\" or \"user\" to its key, or add a limit with key = [\"ip\"] to the same routes";
    let problem = PendingDiagnostic::new(Code::ChosenKey, message);
    document.warn(limit.span.clone(), problem.hint(hint));
}

fn warn_of_unused(document: Document<'_>, routes: &[WrittenRoute], names: &RouteNames<'_>) {
    for (index, limit) in names.limits.iter().enumerate() {
        let is_met = |route: &WrittenRoute| route.limits.contains(&index);
        if !names.everywhere.contains(&index) && !routes.iter().any(is_met) {
            let problem = PendingDiagnostic::new(
                Code::UnusedLimit,
                format!("limit {} applies to no route", quote(&limit.name)),
            );
            document.warn(
                limit.span.clone(),
                problem.hint("add it to [gateway] limits or to the limits of a route"),
            );
        } else {
            warn_of_foreign_params(document, routes, names, index);
            warn_of_chosen_key(document, routes, names, index);
        }
    }
    for (index, upstream) in names.upstreams.iter().enumerate() {
        if !routes.iter().any(|route| route.upstream == Some(index)) {
            let problem = PendingDiagnostic::new(
                Code::UnusedUpstream,
                format!("no route uses upstream {}", quote(&upstream.name)),
            );
            document.warn(
                upstream.span.clone(),
                problem.hint("set it as the upstream of a route, or remove it"),
            );
        }
    }
}
