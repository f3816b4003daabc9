//! `[limit.NAME]`: how much is allowed.

use std::{num::NonZeroU64, ops::Range};

use super::check_name;
use crate::{
    config::{
        Limit,
        code::Code,
        diagnostic::{Problem, did_you_mean, quote},
        file::{Section, not_built},
        keys,
        units::{Rate, show_duration},
        value::{Text, Value},
    },
    identity::{self, KeyPart},
    limit::{Algorithm, Quota, QuotaError},
};

/// The largest bucket: what a structured-field integer can say (RFC 9651 §3.3.1).
const MAX_BURST: u64 = 999_999_999_999_999;

/// A limit that was named; compiled where that was possible.
pub(super) struct NamedLimit {
    pub(super) name: String,
    pub(super) span: Range<usize>,
    pub(super) compiled: Option<Limit>,
}

pub(super) fn compile(file: &Section<'_>, users: &identity::Settings) -> Vec<NamedLimit> {
    let limit = |(name, table): (Text<'_>, Value<'_>)| {
        check_name(&name, "a limit");
        let section = table.section(table.what.clone(), &keys::LIMIT);
        let compiled = section.and_then(|section| limit(section, &name, users));
        NamedLimit {
            name: name.value,
            span: name.span,
            compiled,
        }
    };
    file.named("limit", &keys::LIMIT)
        .into_iter()
        .map(limit)
        .collect()
}

fn limit(section: Section<'_>, name: &Text<'_>, users: &identity::Settings) -> Option<Limit> {
    let hint = "add key = [\"ip\"] for a bucket per client, or key = [] for one bucket for all";
    let key = section
        .require("key", hint)
        .and_then(|value| key(&value, users));
    let algorithm = algorithm(&section);
    let rates = section
        .require("rate", "add rate = \"100/s\"")
        .and_then(|value| rates(&value));
    let bursts = section
        .get("burst")
        .map_or(Some(ByTier::default()), |value| bursts(&value));
    section.finish();
    let (quotas, tiers) = quotas(rates?, bursts?, name)?;
    Some(Limit {
        name: name.value.clone(),
        key: key?,
        algorithm: algorithm?,
        quotas,
        tiers,
    })
}

fn algorithm(section: &Section<'_>) -> Option<Algorithm> {
    let Some(value) = section.get("algorithm") else {
        return Some(Algorithm::TokenBucket);
    };
    value.text()?.choice(
        &[
            ("token_bucket", Algorithm::TokenBucket),
            ("gcra", Algorithm::TokenBucket),
        ],
        &[
            "sliding_window",
            "sliding_log",
            "fixed_window",
            "leaky_bucket",
            "concurrency",
        ],
        "algorithms other than the token bucket",
    )
}

const PARTS: &[(&str, KeyPart)] = &[
    ("ip", KeyPart::Ip),
    ("user", KeyPart::User),
    ("user_or_ip", KeyPart::UserOrIp),
    ("tenant", KeyPart::Tenant),
    ("tier", KeyPart::Tier),
    ("method", KeyPart::Method),
    ("host", KeyPart::Host),
    ("route", KeyPart::Route),
    ("path", KeyPart::Path),
    ("user_agent", KeyPart::UserAgent),
];

const UNBUILT_PARTS: &[&str] = &["query:", "cookie:", "claim:", "param:", "body:"];

fn key(value: &Value<'_>, users: &identity::Settings) -> Option<Vec<KeyPart>> {
    let mut parts: Vec<KeyPart> = Vec::new();
    let written = value.array()?;
    let count = written.len();
    for item in written {
        let Some(text) = item.text() else { continue };
        let Some(part) = key_part(&text) else {
            continue;
        };
        if parts.contains(&part) {
            let message = format!("{} stands twice in {}", text.shown(), value.what);
            text.error(Problem::new(Code::Duplicate, message).hint("remove one of them"));
        }
        let needs_user = matches!(part, KeyPart::User | KeyPart::Tenant | KeyPart::Tier);
        if needs_user && users.users.is_empty() {
            let message = format!(
                "no request has a {}: there is no [[user]] table",
                text.value
            );
            let hint = "the limit is skipped where a part of its key is missing: add [[user]], or use \"user_or_ip\"";
            text.document.warn(
                text.span.clone(),
                Problem::new(Code::NeverIdentified, message).hint(hint),
            );
        }
        parts.push(part);
    }
    (parts.len() == count).then_some(parts)
}

fn key_part(text: &Text<'_>) -> Option<KeyPart> {
    if let Some((_, part)) = PARTS.iter().find(|(name, _)| *name == text.value) {
        return Some(part.clone());
    }
    if let Some(name) = text.value.strip_prefix("header:") {
        return text.parse("a part of a key", |_| {
            http::HeaderName::from_bytes(name.as_bytes())
                .map(KeyPart::Header)
                .map_err(|_| {
                    Problem::new(
                        Code::BadField,
                        format!("{} is not the name of an HTTP field", quote(name)),
                    )
                    .hint("write header:NAME, such as \"header:x-device-id\"")
                })
        });
    }
    let names = || PARTS.iter().map(|(name, _)| *name).chain(["header:NAME"]);
    let known = names().map(quote).collect::<Vec<_>>().join(", ");
    text.error(
        if UNBUILT_PARTS
            .iter()
            .any(|prefix| text.value.starts_with(prefix))
        {
            not_built(
                text.shown(),
                "keys from a query, cookie, claim, path or body",
            )
            .hint(format!("built now: {known}"))
        } else {
            Problem::new(
                Code::UnknownChoice,
                format!("{} is not a part of a key", text.shown()),
            )
            .label(did_you_mean(&text.value, names()))
            .hint(format!("expected one of {known}"))
        },
    );
    None
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

fn rates(value: &Value<'_>) -> Option<ByTier<Rate>> {
    let rates = by_tier(value, |value| value.rate())?;
    if rates.default.is_none() {
        let message = format!("{} has no `default`", value.what);
        let hint = "add default = \"100/s\": it is for clients without a tier, and for tiers without a rate";
        value.error(Problem::new(Code::MissingKey, message).hint(hint));
    }
    Some(rates)
}

fn bursts(value: &Value<'_>) -> Option<ByTier<NonZeroU64>> {
    by_tier(value, |value| {
        NonZeroU64::new(value.integer(1..=MAX_BURST)?)
    })
}

/// Names of tiers, each with its quota's index.
type Tiers = Vec<(String, usize)>;

/// One quota per tier that is named anywhere; the first is the default.
fn quotas(
    rates: ByTier<Rate>,
    bursts: ByTier<NonZeroU64>,
    name: &Text<'_>,
) -> Option<(Vec<Quota>, Tiers)> {
    let quota = |rate: Rate, burst: Option<NonZeroU64>| {
        let burst = burst.unwrap_or_else(|| rate.default_burst());
        let quota = Quota::new(rate.amount.get(), rate.period, burst.get());
        let refused = |error: QuotaError| {
            let message = format!("limit {} cannot be kept: {error}", name.shown());
            let hint = format!(
                "its burst is {burst}, its rate {} per {}",
                rate.amount,
                show_duration(rate.period)
            );
            name.error(Problem::new(Code::OutOfRange, message).hint(hint));
        };
        quota.map_err(refused).ok()
    };
    let mut quotas = vec![quota(rates.default?, bursts.default)?];
    let mut tiers = Tiers::new();
    let of_rates = rates.tiers.iter().map(|(tier, _)| tier);
    for tier in of_rates.chain(bursts.tiers.iter().map(|(tier, _)| tier)) {
        if !tiers.iter().any(|(known, _)| known == tier) {
            tiers.push((tier.clone(), quotas.len()));
            quotas.push(quota(rates.of(tier)?, bursts.of(tier))?);
        }
    }
    Some((quotas, tiers))
}
