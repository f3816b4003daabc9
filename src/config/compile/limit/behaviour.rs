//! What a limit does besides counting: its mode, its exemptions, and what clients see. Keys that
//! contradict each other are rejected, each pair with its own message.

use std::ops::Range;

use http::StatusCode;

use crate::{
    config::{
        Exempt, LimitSettings, Mode, Over, Slow,
        code::Code,
        compile::{
            names::{check_name, is_first},
            network::parse_network,
        },
        diagnostic::PendingDiagnostic,
        expanded_text::ExpandedText,
        keys,
        section::Section,
        value::ConfigValue,
    },
    identity::Missing,
    limit::QuotaShape,
};

/// A tier that a limit exempts, and where the file says so.
pub(super) struct ExemptTier {
    pub(super) name: String,
    pub(super) shown: String,
    pub(super) span: Range<usize>,
}

/// Reads everything but key and quotas into `limit`. An invalid value is reported and keeps its
/// default. `shape` is `None` if the algorithm is invalid.
pub(super) fn read(
    section: &Section<'_>,
    shape: Option<QuotaShape>,
    limit: &mut LimitSettings,
) -> Vec<ExemptTier> {
    limit.over = over(section, shape);
    limit.mode = section
        .choice(
            "mode",
            &[
                ("enforce", Mode::Enforce),
                ("shadow", Mode::Shadow),
                ("tag", Mode::Tag),
                ("off", Mode::Off),
            ],
        )
        .unwrap_or(Mode::Enforce);
    limit.enforce_percent = enforce_percent(section, limit);
    limit.missing = section
        .choice(
            "missing",
            &[
                ("skip", Missing::Skip),
                ("shared", Missing::Shared),
                ("reject", Missing::Reject),
            ],
        )
        .unwrap_or_default();
    limit.charge_rejected = section.boolean("charge_rejected");
    if limit.charge_rejected && shape == Some(QuotaShape::InFlight) {
        contradiction(
            section,
            "charge_rejected",
            "a rejected request is not in flight: there is nothing to charge",
            "remove charge_rejected, or write another algorithm",
        );
    }
    limit.count_status = count_status(section, shape, limit.over);
    limit.disclose = section.boolean("disclose");
    limit.warn_at = section.get("warn_at").and_then(|value| value.share());
    if limit.warn_at.is_some() && !limit.disclose {
        contradiction(
            section,
            "warn_at",
            "a limit with disclose = false cannot warn clients",
            "remove warn_at, or disclose = false",
        );
    }
    limit.slow = slow(section);
    limit.retry_jitter = section.share("retry_jitter");
    let (exempt, tiers) = exempt(section);
    limit.exempt = exempt;
    tiers
}

/// Reports a contradiction at `key`, if the file sets it.
pub(super) fn contradiction(section: &Section<'_>, key: &'static str, message: &str, hint: &str) {
    if let Some(value) = section.get(key) {
        let problem = PendingDiagnostic::new(Code::Contradiction, message).hint(hint);
        section.document.error(value.name_span(), problem);
    }
}

fn over(section: &Section<'_>, shape: Option<QuotaShape>) -> Over {
    let delays = section.choice("over", &[("reject", false), ("delay", true)]);
    let max_delay = section.get("max_delay");
    let (delays, max_delay) = match (delays, max_delay) {
        (Some(true), None) => {
            let message = format!("`max_delay` is missing in {}", section.title);
            let hint = "add max_delay = \"500ms\": the longest time that a request may wait";
            section.error(PendingDiagnostic::new(Code::MissingKey, message).hint(hint));
            (true, None)
        }
        (Some(false), Some(_)) => {
            contradiction(
                section,
                "max_delay",
                "`max_delay` has no effect: this limit rejects instead of delaying",
                "write over = \"delay\", or remove max_delay",
            );
            (false, None)
        }
        (delays, value) => (
            delays.unwrap_or(false),
            value.and_then(|value| value.duration()),
        ),
    };
    let cannot_delay = match shape {
        None | Some(QuotaShape::Bucket) => None,
        Some(QuotaShape::InFlight) => {
            Some("a concurrency limit cannot delay: the end of a request in flight is unknown")
        }
        Some(QuotaShape::Window) => Some(
            "a window limit cannot delay: a new window would release all waiting requests at once",
        ),
    };
    if let Some(message) = cannot_delay.filter(|_| delays) {
        contradiction(
            section,
            "over",
            message,
            "write algorithm = \"leaky_bucket\" or \"token_bucket\", or over = \"reject\"",
        );
    }
    match max_delay {
        Some(max_delay) if delays => Over::Delay { max_delay },
        _ => Over::Reject,
    }
}

fn enforce_percent(section: &Section<'_>, limit: &LimitSettings) -> u8 {
    let percent = section.integer("enforce_percent");
    let percent = u8::try_from(percent).unwrap_or(100);
    if percent < 100 && limit.mode != Mode::Enforce {
        contradiction(
            section,
            "enforce_percent",
            "`enforce_percent` needs mode = \"enforce\"",
            "write mode = \"enforce\", or remove enforce_percent",
        );
    } else if percent < 100 && limit.key.is_empty() {
        contradiction(
            section,
            "enforce_percent",
            "`enforce_percent` selects keys, and this limit has one bucket for all requests",
            "give the limit a key, or write mode = \"shadow\"",
        );
    }
    percent
}

fn count_status(section: &Section<'_>, shape: Option<QuotaShape>, over: Over) -> Vec<StatusCode> {
    let Some(value) = section.get("count_status") else {
        return Vec::new();
    };
    let mut statuses = Vec::new();
    for item in value.array().unwrap_or_default() {
        let status = item.integer();
        let status = status.and_then(|status| u16::try_from(status).ok());
        let Some(Ok(status)) = status.map(StatusCode::from_u16) else {
            continue;
        };
        if statuses.contains(&status) {
            let message = format!("`{}` is listed twice in {}", status.as_u16(), value.what);
            item.error(PendingDiagnostic::new(Code::Duplicate, message).hint("remove one of them"));
        }
        statuses.push(status);
    }
    if statuses.is_empty() {
        return statuses;
    }
    let hint = "remove count_status, or move it to a separate limit";
    if shape == Some(QuotaShape::InFlight) {
        let message =
            "a concurrency limit cannot use `count_status`: a request in flight has no status yet";
        contradiction(section, "count_status", message, hint);
    } else if over != Over::Reject {
        let message = "a limit with `count_status` cannot delay requests: it counts only once the response is there";
        contradiction(section, "count_status", message, hint);
    }
    statuses
}

fn slow(section: &Section<'_>) -> Option<Slow> {
    let at = section.get("slow_at");
    let by = section.get("slow_by");
    match (&at, &by) {
        (Some(_), None) => contradiction(
            section,
            "slow_at",
            "`slow_at` needs `slow_by`, the delay to add",
            "add slow_by = \"50ms\"",
        ),
        (None, Some(_)) => contradiction(
            section,
            "slow_by",
            "`slow_by` needs `slow_at`, the usage at which slowing starts",
            "add slow_at = 0.9",
        ),
        _ => {}
    }
    let at = at.and_then(|value| value.share());
    let by = by.and_then(|value| value.duration());
    Some(Slow { at: at?, by: by? })
}

fn exempt(section: &Section<'_>) -> (Exempt, Vec<ExemptTier>) {
    let title = format!("{}.exempt]", section.title.trim_end_matches(']'));
    let Some(exempt) = section
        .get("exempt")
        .and_then(|value| Section::of(&value, title, &keys::EXEMPT))
    else {
        return (Exempt::default(), Vec::new());
    };
    let ips = once(&exempt, "ips");
    let ips = ips.filter_map(|text| text.parse("a network", parse_network));
    let ips = ips.collect();
    let users = once(&exempt, "users").map(|text| text.value).collect();
    let tiers: Vec<_> = once(&exempt, "tiers")
        .filter(|tier| check_name(tier, "a tier"))
        .map(|tier| ExemptTier {
            shown: tier.shown(),
            name: tier.value,
            span: tier.span,
        })
        .collect();
    exempt.finish();
    let names = tiers.iter().map(|tier| tier.name.clone()).collect();
    let exempt = Exempt {
        ips,
        users,
        tiers: names,
    };
    (exempt, tiers)
}

/// The texts of a list without duplicates, which are reported.
fn once<'a>(section: &Section<'a>, key: &'static str) -> impl Iterator<Item = ExpandedText<'a>> {
    let what = section
        .get(key)
        .map(|value: ConfigValue<'_>| value.what.to_string());
    let mut earlier = Vec::new();
    let texts = section.texts(key).unwrap_or_default().into_iter();
    texts.filter(move |text| {
        let first = is_first(text, &earlier, what.as_deref().unwrap_or_default());
        earlier.push(text.value.clone());
        first
    })
}
