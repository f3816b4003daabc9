//! `[[override]]`: exceptions to a limit for one user, tenant, network or key, with an optional end
//! date. Each becomes part of its limit.

use std::{collections::HashMap, time::SystemTime};

use ipnet::IpNet;

use super::{
    limit::{
        NamedLimit,
        quotas::{self, QuotaRule},
    },
    network::parse_network,
    route::find_limit,
};
use crate::{
    config::{
        ConfigOverride, Effect, LimitSettings, OverrideTarget,
        code::Code,
        diagnostic::{PendingDiagnostic, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
        value::ConfigValue,
    },
    identity::{KeyPart, Prefixes},
    limit::QuotaShape,
};

/// Adds each exception to its limit.
pub(super) fn compile(file: &Section<'_>, prefixes: Prefixes, limits: &mut [NamedLimit]) {
    let now = SystemTime::now();
    let mut earlier = HashMap::new();
    let is_over = |until: Option<SystemTime>| until.is_some_and(|until| until <= now);
    for table in file.repeated("override") {
        let Some(section) = Section::of(&table, "[[override]]".to_owned(), &keys::OVERRIDE) else {
            continue;
        };
        let limit = section
            .require("limit", "add limit = \"NAME\", the limit to override")
            .and_then(|value| find_limit(&value.text()?, limits));
        let found = target(&section);
        let effect = effect(&section);
        let until = section.get("until").and_then(|value| until(&value, now));
        let note = section.get("note").and_then(|value| value.text());
        section.finish();
        let (Some(index), Some((target, named)), Some(effect)) = (limit, found, effect) else {
            continue;
        };
        let line = named.document.source.line(named.span.start);
        if !is_over(until)
            && let Some(first) = earlier.insert((index, format!("{target:?}")), line)
        {
            let message = format!("the limit already has an exception for {}", named.shown());
            let hint = format!("the other is on line {first}: remove one of them");
            named.error(PendingDiagnostic::new(Code::Duplicate, message).hint(hint));
        }
        let Some(limit) = limits[index].compiled.as_mut() else {
            continue;
        };
        check_target(limit, prefixes, &target, &named);
        let Some(effect) = effect.apply(limit) else {
            continue;
        };
        // an expired exception has no effect, so it may stay beside a newer one for the
        // same subject
        if is_over(until) {
            if let Effect::Quota(last) = effect {
                limit.quotas.truncate(last);
            }
            continue;
        }
        limit.overrides.push(ConfigOverride {
            target,
            effect,
            until,
            note: note.map(|note| note.value),
        });
    }
}

/// Reads the one key that names the subject, and its text.
fn target<'a>(section: &Section<'a>) -> Option<(OverrideTarget, ExpandedText<'a>)> {
    let written = ["user", "tenant", "ip", "key"].map(|key| (key, section.get(key)));
    let mut written = written
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    let Some((key, value)) = written.next() else {
        let message = "this exception names no user, tenant, address or key";
        section.error(
            PendingDiagnostic::new(Code::MissingKey, message)
                .hint("add user = \"NAME\", tenant = \"NAME\", ip = \"192.0.2.0/24\" or key = \"ip=192.0.2.7/32, route=export\""),
        );
        return None;
    };
    if let Some((other, value)) = written.next() {
        refuse_second(&value, key, other);
    }
    let text = value.text()?;
    let target = match key {
        "user" => OverrideTarget::User(text.value.clone()),
        "tenant" => OverrideTarget::Tenant(text.value.clone()),
        "ip" => OverrideTarget::Ip(text.parse("a network", parse_network)?),
        _ => OverrideTarget::Key(text.value.clone()),
    };
    Some((target, text))
}

fn refuse_second(value: &ConfigValue<'_>, first: &str, second: &str) {
    let message = format!(
        "{} and {} cannot be in the same exception",
        quote(first),
        quote(second)
    );
    let problem =
        PendingDiagnostic::new(Code::Contradiction, message).hint("write two [[override]] tables");
    value.document.error(value.name_span(), problem);
}

/// The effect as written, before its limit is known.
#[expect(clippy::large_enum_variant, reason = "only one value exists at a time")]
enum WrittenOverride<'a> {
    Quota {
        rate: ConfigValue<'a>,
        burst: Option<ConfigValue<'a>>,
    },
    Exempt,
    Block,
}

fn effect<'a>(section: &Section<'a>) -> Option<WrittenOverride<'a>> {
    let (rate, burst) = (section.get("rate"), section.get("burst"));
    let is_true = |key| {
        section
            .get(key)
            .filter(|value| value.boolean() == Some(true))
    };
    let (exempt, block) = (is_true("exempt"), is_true("block"));
    if let (Some(burst), None) = (&burst, &rate) {
        let problem = PendingDiagnostic::new(Code::Contradiction, "`burst` needs a `rate`");
        let problem = problem.hint("add rate = \"100/s\", or remove burst");
        burst.document.error(burst.name_span(), problem);
    }
    match (rate, exempt, block) {
        (Some(_), Some(second), _) => refuse_second(&second, "rate", "exempt"),
        (Some(_), None, Some(second)) => refuse_second(&second, "rate", "block"),
        (None, Some(_), Some(second)) => refuse_second(&second, "exempt", "block"),
        (Some(rate), None, None) => return Some(WrittenOverride::Quota { rate, burst }),
        (None, Some(_), None) => return Some(WrittenOverride::Exempt),
        (None, None, Some(_)) => return Some(WrittenOverride::Block),
        (None, None, None) => {
            let message = "this exception changes nothing: it has no rate, exempt or block";
            let hint = "add rate = \"100/s\", exempt = true or block = true";
            section.error(PendingDiagnostic::new(Code::MissingKey, message).hint(hint));
        }
    }
    None
}

impl WrittenOverride<'_> {
    /// Resolves the effect on `limit`. A rate adds a quota to the limit.
    fn apply(&self, limit: &mut LimitSettings) -> Option<Effect> {
        let (rate, burst) = match self {
            WrittenOverride::Exempt => return Some(Effect::Exempt),
            WrittenOverride::Block => return Some(Effect::Block),
            WrittenOverride::Quota { rate, burst } => (rate, burst),
        };
        let shape = limit.algorithm.record().quota;
        let (name, unfit) = (quote(&limit.name), Code::UnfitOverride);
        if shape == QuotaShape::InFlight {
            let message = format!("limit {name} counts requests in flight: it has no rate");
            let hint = "write exempt = true or block = true, or give the user a tier of the limit";
            rate.document.error(
                rate.name_span(),
                PendingDiagnostic::new(unfit, message).hint(hint),
            );
            return None;
        }
        if let (QuotaShape::Window, Some(burst)) = (shape, burst) {
            let message = format!("limit {name} has no burst: its algorithm counts in windows");
            let problem = PendingDiagnostic::new(unfit, message).hint("remove burst");
            burst.document.error(burst.name_span(), problem);
            return None;
        }
        let currency = limit.cost.as_ref().and_then(|cost| cost.prices.as_deref());
        let read = rate.rate(currency)?;
        let rule = QuotaRule::of(limit);
        let burst = match burst {
            Some(value) => quotas::burst(value)?,
            // a higher rate must not lower the burst below the default quota's
            None => limit.quotas.first()?.burst.max(rule.default_burst(read)),
        };
        match rule.quota(read, Some(burst)) {
            Ok(quota) => {
                limit.quotas.push(quota);
                Some(Effect::Quota(limit.quotas.len() - 1))
            }
            Err(problem) => {
                rate.error(problem.of(&name));
                None
            }
        }
    }
}

/// Checks that the limit's key contains the kind of subject that the exception names.
fn check_target(
    limit: &LimitSettings,
    prefixes: Prefixes,
    target: &OverrideTarget,
    named: &ExpandedText<'_>,
) {
    let has = |parts: &[KeyPart]| limit.key.iter().any(|part| parts.contains(part));
    let (fits, part) = match target {
        OverrideTarget::User(_) => (has(&[KeyPart::User, KeyPart::UserOrIp]), "user"),
        OverrideTarget::Tenant(_) => (has(&[KeyPart::Tenant]), "tenant"),
        OverrideTarget::Ip(_) => (has(&[KeyPart::Ip, KeyPart::UserOrIp]), "ip"),
        OverrideTarget::Key(_) => {
            named.parse("a key of the limit", |key| {
                check_key(limit, prefixes, key).map_err(|(message, hint)| {
                    let (key, name) = (quote(key), quote(&limit.name));
                    let message = format!("{key} is not a key of limit {name}: {message}");
                    PendingDiagnostic::new(Code::UnfitOverride, message).hint(hint)
                })
            });
            return;
        }
    };
    if !fits {
        let key: Vec<String> = limit.key.iter().map(|part| format!("\"{part}\"")).collect();
        let message = format!("limit {} does not count by {part}", quote(&limit.name));
        let hint = format!(
            "its key is [{}]: an exception is for a part of it",
            key.join(", ")
        );
        named.error(PendingDiagnostic::new(Code::UnfitOverride, message).hint(hint));
    }
}

/// Checks that the limit can produce this key. The error is a message and a hint.
fn check_key(limit: &LimitSettings, prefixes: Prefixes, key: &str) -> Result<(), (String, String)> {
    let as_logged = || "copy the key from a log line".to_owned();
    if limit.key.is_empty() {
        let message = "it has one bucket for all".to_owned();
        let hint = "write key = \"all\"".to_owned();
        return if key == "all" {
            Ok(())
        } else {
            Err((message, hint))
        };
    }
    if let Some(part) = limit.key.iter().find(|part| part.record().is_secret) {
        let hint = "name the user, tenant or ip instead".to_owned();
        let message = format!("\"{part}\" is hashed with a new secret at each start");
        return Err((message, hint));
    }
    let values: Vec<&str> = key.split(", ").collect();
    let form = |part: &KeyPart| {
        let names = part.value_names().into_iter();
        names
            .map(|name| format!("{name}=…"))
            .collect::<Vec<_>>()
            .join(" or ")
    };
    let form: Vec<String> = limit.key.iter().map(form).collect();
    let wrong_form = || {
        (
            format!("its keys have the form {}", form.join(", ")),
            as_logged(),
        )
    };
    if values.len() != limit.key.len() {
        return Err(wrong_form());
    }
    for (value, part) in values.iter().zip(&limit.key) {
        let (name, value) = value.split_once('=').ok_or_else(wrong_form)?;
        if !part.value_names().iter().any(|known| known == name) {
            return Err(wrong_form());
        }
        if name == "ip" {
            check_address(prefixes, value)?;
        }
    }
    Ok(())
}

/// Checks the address in a key: a network, truncated to the prefix by which addresses are counted.
fn check_address(prefixes: Prefixes, value: &str) -> Result<(), (String, String)> {
    let Ok(network) = parse_network(value) else {
        let message = format!("{} is not a network", quote(value));
        return Err((message, "write for example ip=192.0.2.7/32".to_owned()));
    };
    let counted: IpNet = prefixes.aggregate(network.addr());
    if counted.to_string() == value {
        return Ok(());
    }
    let message = format!("{} counts as part of {counted}", quote(value));
    Err((message, format!("write ip={counted}")))
}

fn until(value: &ConfigValue<'_>, now: SystemTime) -> Option<SystemTime> {
    let until = value.date()?;
    if until <= now {
        let message = "this exception has expired: it has no effect";
        let problem = PendingDiagnostic::new(Code::Expired, message);
        let hint = "remove it, or set a later date";
        value.warn(problem.hint(hint));
    }
    Some(until)
}
