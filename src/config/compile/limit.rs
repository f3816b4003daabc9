//! `[limit.NAME]`: the limits.

mod behaviour;
mod cost;
mod key;
pub(super) mod quotas;
mod shared;

use std::{ops::Range, sync::Arc};

use super::{names::check_name, prices::NamedPrices};
use crate::{
    config::{
        CostSettings, LimitSettings, code::Code, diagnostic::PendingDiagnostic, document::Document,
        expanded_text::ExpandedText, keys, section::Section, value::ConfigValue,
    },
    identity::{self, UserSource},
    limit::Algorithm,
};

use behaviour::ExemptTier;
use quotas::QuotaRule;

/// A named limit; `compiled` is `None` if it has an error.
pub(super) struct NamedLimit {
    pub(super) name: String,
    pub(super) span: Range<usize>,
    pub(super) compiled: Option<LimitSettings>,
    exempt_tiers: Vec<ExemptTier>,
}

/// Compiles all limits. Without `has_redis` no limit can be shared.
pub(super) fn compile(
    file: &Section<'_>,
    users: &identity::IdentitySettings,
    prices: &[NamedPrices],
    has_redis: bool,
) -> Vec<NamedLimit> {
    let limit = |(name, table): (ExpandedText<'_>, ConfigValue<'_>)| {
        check_name(&name, "a limit");
        let section = Section::of(&table, table.what.to_string(), &keys::LIMIT);
        let (compiled, exempt_tiers) = section
            .map(|section| limit(section, &name, users, prices, has_redis))
            .unwrap_or_default();
        NamedLimit {
            name: name.value,
            span: name.span,
            compiled,
            exempt_tiers,
        }
    };
    let limits: Vec<_> = file
        .named("limit", &keys::LIMIT)
        .into_iter()
        .map(limit)
        .collect();
    warn_of_unknown_tiers(file.document, &limits, users);
    limits
}

fn limit(
    section: Section<'_>,
    name: &ExpandedText<'_>,
    users: &identity::IdentitySettings,
    prices: &[NamedPrices],
    has_redis: bool,
) -> (Option<LimitSettings>, Vec<ExemptTier>) {
    let hint = "add key = [\"ip\"] for a bucket per client, or key = [] for one bucket for all";
    let key = section
        .require("key", hint)
        .and_then(|value| key::key(&value, users));
    let algorithm = algorithm(&section);
    let cost = cost::read(&section, prices);
    let is_complete = key.is_some() && cost.is_some();
    let cost = cost.flatten();
    let rule = algorithm.map(|algorithm| QuotaRule {
        algorithm,
        has_cost: cost.is_some(),
        overdraft: cost
            .as_ref()
            .and_then(CostSettings::overdraft)
            .filter(|_| algorithm.supports_costs()),
    });
    let currency = cost.as_ref().and_then(|cost| cost.prices.clone());
    let quotas = quotas::quotas(&section, rule, currency.as_deref(), name);
    let is_complete = is_complete && quotas.is_some();
    let (quotas, tiers) = quotas.unwrap_or_default();
    let mut limit = LimitSettings {
        tiers,
        cost: cost.map(Arc::new),
        ..LimitSettings::new(
            &name.value,
            key.unwrap_or_default(),
            algorithm.unwrap_or(Algorithm::TokenBucket),
            quotas,
        )
    };
    let exempt_tiers = behaviour::read(
        &section,
        algorithm.map(|algorithm| algorithm.record().quota),
        &mut limit,
    );
    shared::read(&section, has_redis, &mut limit);
    cost::check(&section, &limit);
    section.finish();
    (is_complete.then_some(limit), exempt_tiers)
}

fn algorithm(section: &Section<'_>) -> Option<Algorithm> {
    section.choice(
        "algorithm",
        &Algorithm::ALL.map(|algorithm| (algorithm.record().name, algorithm)),
    )
}

/// Warns of exempt tiers that no limit and no key names: probably misspelt. Skipped if a header or
/// token supplies tiers, since those are not known here.
fn warn_of_unknown_tiers(
    document: Document<'_>,
    limits: &[NamedLimit],
    users: &identity::IdentitySettings,
) {
    let mut known: Vec<&str> = Vec::new();
    for source in &users.users {
        match source {
            UserSource::Header {
                tier_header: Some(_),
                ..
            } => return,
            UserSource::Jwt(source) if source.claims.tier.is_some() => return,
            UserSource::Header { .. } | UserSource::Jwt(_) | UserSource::ClientCert(_) => {}
            UserSource::ApiKey { keys, .. } => {
                for tier in keys.iter().filter_map(|key| key.tier.as_deref()) {
                    if !known.contains(&tier) {
                        known.push(tier);
                    }
                }
            }
        }
    }
    let compiled = limits.iter().filter_map(|limit| limit.compiled.as_ref());
    known.extend(compiled.flat_map(|limit| limit.tiers.iter().map(|(tier, _)| tier.as_str())));
    for tier in limits.iter().flat_map(|limit| &limit.exempt_tiers) {
        if !known.contains(&tier.name.as_str()) {
            let message = format!("no limit and no user has tier {}", tier.shown);
            let problem = PendingDiagnostic::new(Code::UnknownTier, message)
                .hint("correct its name, or assign the tier to a user");
            document.warn(tier.span.clone(), problem);
        }
    }
}
