//! Names for the parts of an explanation.

use crate::{
    config::Effect,
    identity::{Client, ClientCertificate, CredentialOutcome, KeySource, UserSource},
};

/// A user source in the configuration's words.
pub(super) fn source(source: &UserSource) -> String {
    match source {
        UserSource::ApiKey { header, .. } => format!("api_key in {header}"),
        UserSource::Jwt(tokens) => match &tokens.keys {
            KeySource::Fixed(_) => format!("jwt in {}", tokens.header),
            KeySource::Url(_) => format!(
                "jwt in {} (explain does not fetch its published keys)",
                tokens.header
            ),
        },
        UserSource::Header { header, .. } => format!("header {header}"),
        UserSource::ClientCert(field) => format!("client certificate, {}", field.name()),
    }
}

pub(super) fn outcome_text(
    outcome: CredentialOutcome,
    source: Option<&UserSource>,
    certificate: Option<&ClientCertificate>,
) -> String {
    match outcome {
        CredentialOutcome::Nothing if matches!(source, Some(UserSource::ClientCert(_))) => {
            match certificate {
                Some(_) => "the certificate has no such field".to_owned(),
                None => "the client sends no certificate".to_owned(),
            }
        }
        CredentialOutcome::Nothing => "the request has none".to_owned(),
        CredentialOutcome::NotFromHere => {
            "not read: only trusted proxies may send it, and the peer is not one".to_owned()
        }
        CredentialOutcome::Ignored(fault) => {
            format!("invalid ({fault}), so treated as absent (invalid = \"anonymous\")")
        }
        CredentialOutcome::Rejected(fault) => format!("does not verify ({fault}): 401"),
        CredentialOutcome::Found => "names the user".to_owned(),
    }
}

/// `100/s, burst 200`.
pub(super) fn allowance(settings: &crate::config::LimitSettings, tier: usize) -> String {
    let quota = &settings.quotas[tier];
    match settings.algorithm.has_burst() {
        true => format!("{quota}, burst {}", quota.burst),
        false => quota.to_string(),
    }
}

/// Why this quota applies.
pub(super) fn chosen_by(
    settings: &crate::config::LimitSettings,
    tier: usize,
    client: Option<&Client<'_>>,
) -> String {
    let named = settings.tiers.iter().any(|(_, index)| *index > 0);
    match client.and_then(|client| client.tier) {
        Some(name) if tier > 0 => format!("tier {name}"),
        Some(name) if named => format!("default: tier {name} has no quota of its own here"),
        None if named => "default: the client has no tier".to_owned(),
        _ => String::new(),
    }
}

/// The override at this index of the limit.
pub(super) fn exception(settings: &crate::config::LimitSettings, place: usize) -> String {
    let Some(exception) = settings.overrides.get(place) else {
        return "an override".to_owned();
    };
    let what = match exception.effect {
        Effect::Quota(_) => "another rate",
        Effect::Exempt => "no limit",
        Effect::Block => "nothing is admitted",
    };
    let note = exception.note.as_deref().map(|note| format!(" ({note})"));
    format!(
        "an [[override]] for {}: {what}{}",
        exception.target,
        note.unwrap_or_default()
    )
}
