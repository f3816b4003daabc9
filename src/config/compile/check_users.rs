//! Checks that span users, limits and listeners.

use std::ops::Range;

use crate::{
    config::{
        LimitSettings, SourceLocation,
        code::Code,
        diagnostic::{Diagnostic, PendingDiagnostic, Severity, did_you_mean, quote},
        document::Document,
    },
    identity::{IdentitySettings, KeyPart},
    listener,
};

/// The compiled identity settings, and the facts to compare with the limits.
pub(super) struct Users {
    pub(super) settings: IdentitySettings,
    /// `[[user]]` tables that answer 401 to an unknown key.
    pub(super) guessable: Vec<Range<usize>>,
    /// `[[user]]` tables that identify users by client certificate.
    pub(super) by_certificate: Vec<Range<usize>>,
    /// The tiers in keys files, each at its first location.
    pub(super) tiers: Vec<WrittenTier>,
}

/// A tier in a keys file.
pub(super) struct WrittenTier {
    pub(super) name: String,
    /// The name as messages show it.
    pub(super) shown: String,
    pub(super) file: String,
    pub(super) place: SourceLocation,
}

/// Warns of API keys that can be guessed without limit, and of tiers that no limit names.
pub(super) fn check(document: Document<'_>, users: &Users, limits: &[&LimitSettings]) {
    let mut parts = limits.iter().flat_map(|limit| &limit.key);
    if !parts.clone().any(KeyPart::has_address) {
        for span in &users.guessable {
            let message = "API keys can be guessed without limit: no limit counts by address";
            let hint = "a request with an unknown key has no user: add a limit with key = [\"ip\"] to [gateway] limits";
            document.warn(
                span.clone(),
                PendingDiagnostic::new(Code::UnlimitedGuessing, message).hint(hint),
            );
        }
    }
    if !parts.any(|part| *part == KeyPart::Tier) {
        warn_of_tiers(document, &users.tiers, limits);
    }
}

/// Warns of `client_cert` users when no listener asks for a client certificate.
pub(super) fn check_certificates(
    document: Document<'_>,
    users: &Users,
    listeners: &[(listener::ListenerSettings, Range<usize>)],
) {
    let asks = |settings: &listener::ListenerSettings| {
        let tls = settings.tls.as_ref();
        tls.is_some_and(|tls| tls.files.client_ca.is_some())
    };
    if listeners.iter().any(|(settings, _)| asks(settings)) || document.problems.errors() > 0 {
        return;
    }
    for span in &users.by_certificate {
        let message =
            "this table never identifies a user: no listener asks clients for a certificate";
        let problem = PendingDiagnostic::new(Code::NeverIdentified, message);
        document.warn(
            span.clone(),
            problem.hint("add client_ca = \"clients-ca.pem\" to [listen.tls]"),
        );
    }
}

fn warn_of_tiers(document: Document<'_>, tiers: &[WrittenTier], limits: &[&LimitSettings]) {
    let mut named: Vec<&str> = limits
        .iter()
        .flat_map(|limit| {
            let with_quota = limit.tiers.iter().map(|(tier, _)| tier);
            with_quota.chain(&limit.exempt.tiers).map(String::as_str)
        })
        .collect();
    named.sort_unstable();
    named.dedup();
    let known = match named.as_slice() {
        [] => "no limit names a tier: write rate = { default = \"60/min\", NAME = \"600/min\" }"
            .to_owned(),
        named => {
            let named: Vec<String> = named.iter().map(|name| quote(name)).collect();
            format!("limits name {}", named.join(", "))
        }
    };
    let unknown = |tier: &&WrittenTier| tier.name != "default" && !named.contains(&&*tier.name);
    for tier in tiers.iter().filter(unknown) {
        document.problems.push(Diagnostic {
            code: Code::TierWithoutQuota,
            severity: Severity::Warning,
            message: format!(
                "no limit names tier {}: its users get the default",
                tier.shown
            ),
            file: tier.file.clone(),
            place: Some(tier.place.clone()),
            label: did_you_mean(&tier.name, named.iter().copied()),
            hint: known.clone(),
        });
    }
}
