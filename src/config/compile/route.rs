//! `[gateway]` and `[[route]]`: which limits apply to a request, and which upstream serves it.

use super::{
    check_routes,
    limit::NamedLimit,
    names::{check_name, is_first},
    overload,
    upstream::NamedUpstream,
    written_route::{RouteNames, WrittenRoute},
};
use crate::{
    config::{
        RouteSettings,
        code::Code,
        diagnostic::{PendingDiagnostic, did_you_mean, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
        value::ConfigValue,
    },
    limit::MAX_LIMITS,
    route::Pattern,
};

/// A minimal route to paste into a file without one.
const EXAMPLE: &str = "add: [[route]] and below it name = \"everything\", path = \"/{*rest}\"";

/// Compiles the limits of `[gateway]`, and the routes.
pub(super) fn compile(
    file: &Section<'_>,
    upstreams: &[NamedUpstream],
    limits: &[NamedLimit],
    status_path: Option<&str>,
) -> Option<(Vec<usize>, Vec<RouteSettings>)> {
    let gateway = file.table("gateway", &keys::GATEWAY);
    let mut names = RouteNames {
        upstreams,
        limits,
        everywhere: Vec::new(),
        limits_in_doubt: file.is_in_doubt("limit"),
        upstreams_in_doubt: file.is_in_doubt("upstream"),
    };
    let everywhere = limit_list(&gateway, "limits", &names);
    names.everywhere = everywhere.into_iter().map(|(index, _)| index).collect();
    check_count(&gateway, &names.everywhere, "without a route");
    gateway.finish();
    let tables = file.repeated("route");
    if tables.is_empty() && !file.is_in_doubt("route") {
        let upstream = upstreams
            .first()
            .map_or("origin", |upstream| &upstream.name);
        let message = "there is no route: every request would get a 404";
        file.error(
            PendingDiagnostic::new(Code::MissingKey, message)
                .hint(format!("{EXAMPLE}, upstream = \"{upstream}\"")),
        );
    }
    let routes: Vec<WrittenRoute> = tables
        .iter()
        .filter_map(|table| route(table, &names))
        .collect();
    check_routes::check(file.document, &routes, &names);
    check_routes::check_status_path(file.document, &routes, status_path);
    let complete = routes.len() == tables.len();
    let routes = routes
        .into_iter()
        .map(WrittenRoute::finish)
        .collect::<Option<_>>()?;
    complete.then_some((names.everywhere, routes))
}

fn route(table: &ConfigValue<'_>, names: &RouteNames<'_>) -> Option<WrittenRoute> {
    let section = Section::of(table, "[[route]]".to_owned(), &keys::ROUTE)?;
    let name = section.require("name", "add name = \"login\": logs and metrics use it");
    let name = name
        .and_then(|value| value.text())
        .filter(|name| check_name(name, "a route"));
    let path = section
        .require("path", "add path = \"/{*rest}\" for every path")
        .and_then(|value| value.text());
    let mut is_secret = path.as_ref().is_some_and(|path| path.from_environment);
    let mut host_spans = Vec::new();
    let hosts = list(&section, "hosts", |text| {
        is_secret |= text.from_environment;
        host_spans.push(text.span.clone());
        Some(text.value.to_ascii_lowercase())
    });
    let methods = list(&section, "methods", method);
    let upstream = section.require(
        "upstream",
        "add upstream = \"NAME\", the name of an [upstream.NAME] table",
    );
    let cost = section.get("cost");
    let max_body = section.get("max_body_size");
    let written = WrittenRoute {
        path_span: path
            .as_ref()
            .map_or(section.span.clone(), |path| path.span.clone()),
        pattern: path.and_then(|path| {
            Some(Pattern {
                hosts: hosts?,
                path: path.value,
                methods: methods?,
            })
        }),
        upstream: upstream.and_then(|value| find_upstream(&value.text()?, names)),
        limits: limits_of(&section, names),
        cost_span: cost
            .as_ref()
            .map_or(section.span.clone(), ConfigValue::span),
        cost: cost.map_or(Some(1), |value| value.integer()),
        max_body_bytes: max_body.map_or(Some(None), |value| value.size().map(Some)),
        priority: section.choice("priority", overload::PRIORITIES),
        shown: name
            .as_ref()
            .map_or("without a name".to_owned(), ExpandedText::shown),
        name: name.map(|name| (name.value, name.span)),
        is_secret,
        host_spans,
    };
    section.finish();
    Some(written)
}

fn find_upstream(text: &ExpandedText<'_>, names: &RouteNames<'_>) -> Option<usize> {
    let upstreams = names.upstreams;
    let found = upstreams
        .iter()
        .position(|upstream| upstream.name == text.value);
    let is_server = ["http://", "https://", "unix:", "builtin:"]
        .iter()
        .any(|scheme| text.value.starts_with(scheme));
    if found.is_none() && is_server {
        let message = format!(
            "{} is a server; `upstream` takes the NAME of an [upstream.NAME] table",
            text.shown()
        );
        let hint = format!(
            "add [upstream.web] with servers = [\"{}\"], and write upstream = \"web\" here",
            text.shown().trim_matches('`')
        );
        text.error(PendingDiagnostic::new(Code::UnknownUpstream, message).hint(hint));
    } else if found.is_none() && !names.upstreams_in_doubt {
        let known = upstreams.iter().map(|upstream| upstream.name.as_str());
        let message = format!("there is no upstream {}", text.shown());
        let problem = PendingDiagnostic::new(Code::UnknownUpstream, message)
            .label(did_you_mean(&text.value, known.clone()));
        text.error(problem.hint(defined("upstream", known)));
    }
    found
}

fn defined<'a>(kind: &str, known: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 10;
    let mut names: Vec<_> = known.take(SHOWN + 1).map(quote).collect();
    if names.len() > SHOWN {
        names[SHOWN] = "…".to_owned();
    }
    match names.as_slice() {
        [] => format!("none is defined: add [{kind}.NAME]"),
        names => format!("defined: {}", names.join(", ")),
    }
}

/// Reads a list that is missing (anything matches) or has items.
fn list<T>(
    section: &Section<'_>,
    key: &'static str,
    mut read: impl FnMut(&ExpandedText<'_>) -> Option<T>,
) -> Option<Vec<T>> {
    let Some(value) = section.get(key) else {
        return Some(Vec::new());
    };
    let items = value.array()?;
    if items.is_empty() {
        let problem = PendingDiagnostic::new(
            Code::OutOfRange,
            format!("{} is empty: nothing would match", value.what),
        );
        value.error(problem.hint("remove the key: without it, anything matches"));
        return None;
    }
    let mut earlier = Vec::new();
    let read: Vec<Option<T>> = items
        .iter()
        .map(|item| {
            let text = item.text()?;
            let item = read(&text).filter(|_| is_first(&text, &earlier, &value.what));
            earlier.push(text.value);
            item
        })
        .collect();
    read.into_iter().collect()
}

fn method(text: &ExpandedText<'_>) -> Option<http::Method> {
    text.parse("an HTTP method", |value| {
        let method = http::Method::from_bytes(value.as_bytes()).ok();
        method
            .filter(|_| !value.contains(|c: char| c.is_ascii_lowercase()))
            .ok_or_else(|| {
                PendingDiagnostic::new(
                    Code::BadField,
                    format!("{} is not an HTTP method", quote(value)),
                )
                .hint("write methods in capitals, for example \"GET\" or \"POST\"")
            })
    })
}

/// Reads a list of limit names as indexes, each with its text.
fn limit_list<'a>(
    section: &Section<'a>,
    key: &'static str,
    names: &RouteNames<'_>,
) -> Vec<(usize, ExpandedText<'a>)> {
    let mut earlier = Vec::new();
    let mut found = Vec::new();
    for text in section.texts(key).unwrap_or_default() {
        let first = is_first(
            &text,
            &earlier,
            format!("{} of {}", quote(key), section.title),
        );
        earlier.push(text.value.clone());
        let known = names.limits.iter().any(|limit| limit.name == text.value);
        if !known && names.limits_in_doubt {
            continue;
        }
        if let Some(index) = find_limit(&text, names.limits)
            && first
        {
            found.push((index, text));
        }
    }
    found
}

/// The index of the limit with this name; reports an unknown one.
pub(super) fn find_limit(text: &ExpandedText<'_>, limits: &[NamedLimit]) -> Option<usize> {
    let known = || limits.iter().map(|limit| limit.name.as_str());
    let found = known().position(|name| name == text.value);
    if found.is_none() {
        let message = format!("there is no limit {}", text.shown());
        let problem = PendingDiagnostic::new(Code::UnknownLimit, message)
            .label(did_you_mean(&text.value, known()));
        text.error(problem.hint(defined("limit", known())));
    }
    found
}

/// The gateway's limits plus the route's own, minus those that it skips.
fn limits_of(section: &Section<'_>, names: &RouteNames<'_>) -> Vec<usize> {
    let own = limit_list(section, "limits", names);
    let skipped = limit_list(section, "skip_limits", names);
    for (index, text) in &skipped {
        if own.iter().any(|(own, _)| own == index) {
            let message = format!(
                "{} is in both limits and skip_limits of the route",
                text.shown()
            );
            text.error(
                PendingDiagnostic::new(Code::Contradiction, message)
                    .hint("remove it from limits or from skip_limits"),
            );
        } else if !names.everywhere.contains(index) {
            let message = format!(
                "skipping {} has no effect: it does not apply to the route",
                text.shown()
            );
            let hint = "skip_limits can only skip limits that [gateway] limits names";
            text.warn(PendingDiagnostic::new(Code::SkipsNothing, message).hint(hint));
        }
    }
    let mut met = names.everywhere.clone();
    met.retain(|index| !skipped.iter().any(|(skipped, _)| skipped == index));
    for (index, _) in own {
        if !met.contains(&index) {
            met.push(index);
        }
    }
    check_count(section, &met, "of this route");
    met
}

fn check_count(section: &Section<'_>, met: &[usize], whose: &str) {
    if met.len() > MAX_LIMITS {
        let message = format!(
            "{} limits apply to a request {whose}, more than {MAX_LIMITS}",
            met.len()
        );
        let hint = "all limits of a request are decided at once: name fewer, or use skip_limits";
        section.error(PendingDiagnostic::new(Code::TooManyLimits, message).hint(hint));
    }
}
