//! `[client_ip]` and `[[user]]`: how tidegate identifies a client.

use std::path::Path;

use super::{
    check_users::Users,
    credential::{INVALID, header_key},
    keys_file,
    limit::NamedLimit,
    names::field_name,
    network::networks,
    tokens,
};
use crate::{
    config::{
        code::Code,
        diagnostic::PendingDiagnostic,
        expanded_text::ExpandedText,
        keys::{self, Keys},
        section::Section,
        value::ConfigValue,
    },
    identity::{AddressSource, CertificateField, IdentitySettings, KeyPart, OnInvalid, UserSource},
};

pub(super) fn compile(file: &Section<'_>, base_dir: &Path) -> Users {
    let section = file.table("client_ip", &keys::CLIENT_IP);
    let proxies = section.texts("trusted_proxies").unwrap_or_default();
    let header = section.get("header").and_then(|value| value.text());
    let address_from = header.as_ref().and_then(address_source);
    let trusted_hops = trusted_hops(&section, address_from.as_ref(), &proxies);
    if let (Some(header), Some(source)) = (&header, &address_from)
        && proxies.is_empty()
        && trusted_hops.is_none()
        && *source != AddressSource::None
    {
        let message = format!(
            "{} is never read: no proxy is trusted to write it",
            header.shown()
        );
        let hint = "list your proxies, for example trusted_proxies = [\"10.0.0.0/8\"], or write header = \"none\"";
        header.warn(PendingDiagnostic::new(Code::HeaderNeverRead, message).hint(hint));
    }
    let settings = IdentitySettings {
        trusted_proxies: networks(&proxies),
        address_from: address_from.unwrap_or_default(),
        trusted_hops,
        ipv4_prefix: prefix(&section, "ipv4_prefix"),
        ipv6_prefix: prefix(&section, "ipv6_prefix"),
        users: Vec::new(),
    };
    section.finish();
    let mut users = Users {
        settings,
        guessable: Vec::new(),
        by_certificate: Vec::new(),
        tiers: Vec::new(),
    };
    for table in file.repeated("user") {
        let found = user(&table, base_dir, &mut users);
        users.settings.users.extend(found);
    }
    users
}

/// How many proxies in front append to the list header. Only `x-forwarded-for` and `forwarded` are
/// lists.
fn trusted_hops(
    section: &Section<'_>,
    address_from: Option<&AddressSource>,
    proxies: &[ExpandedText<'_>],
) -> Option<u8> {
    let written = section.get("trusted_hops")?;
    let hops = section.integer_or("trusted_hops", 1);
    let warn = |code, message, hint| {
        written.warn(PendingDiagnostic::new(code, message).hint(hint));
    };
    match address_from {
        Some(AddressSource::None | AddressSource::Single(_)) => {
            let message =
                "`trusted_hops` counts the elements of a list, and `header` is not a list";
            let hint = "remove it, or write header = \"x-forwarded-for\" or \"forwarded\"";
            written.error(PendingDiagnostic::new(Code::Contradiction, message).hint(hint));
        }
        _ if proxies.is_empty() => warn(
            Code::TrustsEverybody,
            "`trusted_hops` without `trusted_proxies` treats every peer as a proxy",
            "a client that bypasses your proxies can choose the address that limits count by: list the proxies' networks, or let only the proxies connect",
        ),
        _ => {}
    }
    u8::try_from(hops).ok()
}

fn prefix(section: &Section<'_>, key: &'static str) -> u8 {
    u8::try_from(section.integer(key)).unwrap_or(u8::MAX)
}

fn address_source(text: &ExpandedText<'_>) -> Option<AddressSource> {
    match text.value.to_ascii_lowercase().as_str() {
        "x-forwarded-for" => Some(AddressSource::XForwardedFor),
        "none" => Some(AddressSource::None),
        "forwarded" => Some(AddressSource::Forwarded),
        _ => field_name(text).map(AddressSource::Single),
    }
}

const KINDS: &str =
    "add from = \"api_key\", from = \"jwt\", from = \"header\" or from = \"client_cert\"";

/// Reads one `[[user]]` table. Its `from` comes first because it decides which other keys are
/// valid.
fn user(table: &ConfigValue<'_>, base_dir: &Path, users: &mut Users) -> Option<UserSource> {
    let kinds: &[(&str, &'static Keys)] = &[
        ("api_key", &keys::USER_API_KEY),
        ("jwt", &keys::USER_JWT),
        ("header", &keys::USER_HEADER),
        ("client_cert", &keys::USER_CLIENT_CERT),
    ];
    let Some(from) = table.table()?.get("from") else {
        let problem = PendingDiagnostic::new(Code::MissingKey, "`from` is missing in [[user]]");
        table.error(problem.hint(KINDS));
        return None;
    };
    let what = "`from` in [[user]]".to_owned();
    let kind =
        ConfigValue::new(table.document, what.into(), from.span(), from, &keys::TEXT).text()?;
    let keys = kind.choice(kinds, &[], "")?;
    let section = Section::of(table, keys.title.to_owned(), keys)?;
    section.get("from");
    let source = match kind.value.as_str() {
        "api_key" => api_key(&section, base_dir, users),
        "jwt" => {
            tokens::token_source(&section, base_dir).map(|source| UserSource::Jwt(Box::new(source)))
        }
        "client_cert" => client_cert(&section, users),
        _ => header(&section, &users.settings),
    };
    section.finish();
    source
}

fn api_key(section: &Section<'_>, base_dir: &Path, users: &mut Users) -> Option<UserSource> {
    let header = header_key(section, "header", "x-api-key");
    let invalid = section.choice("invalid", INVALID);
    let path = section.require(
        "keys_file",
        "add keys_file = \"keys.toml\", and write [keys.NAME] tables into it",
    );
    if invalid == Some(OnInvalid::Reject) {
        users.guessable.push(section.span.clone());
    }
    let keys = keys_file::load(&path?.text()?, base_dir, &mut users.tiers);
    Some(UserSource::ApiKey {
        header: header?,
        keys: keys?,
        invalid: invalid?,
    })
}

fn client_cert(section: &Section<'_>, users: &mut Users) -> Option<UserSource> {
    users.by_certificate.push(section.span.clone());
    let fields = CertificateField::ALL.map(|field| (field.name(), field));
    section.choice("field", &fields).map(UserSource::ClientCert)
}

fn header(section: &Section<'_>, settings: &IdentitySettings) -> Option<UserSource> {
    if settings.trusted_proxies.is_empty() && settings.trusted_hops.is_none() {
        let message = "this table never identifies a user: only trusted proxies may send its header, and there are none";
        let problem = PendingDiagnostic::new(Code::NeverIdentified, message);
        section.warn(problem.hint("list them: [client_ip] trusted_proxies = [\"127.0.0.1\"]"));
    }
    let header = header_key(section, "header", "x-user-id");
    let tier_header = section
        .get("tier_header")
        .map(|value| value.text().and_then(|text| field_name(&text)));
    Some(UserSource::Header {
        header: header?,
        tier_header: tier_header.map_or(Some(None), |name| name.map(Some))?,
    })
}

/// Tells each token source which claims to read: those that limits are keyed by.
pub(super) fn read_claims(settings: &mut IdentitySettings, limits: &[NamedLimit]) {
    let compiled = limits.iter().filter_map(|limit| limit.compiled.as_ref());
    let mut wanted: Vec<&String> = compiled
        .flat_map(|limit| &limit.key)
        .filter_map(|part| match part {
            KeyPart::Claim(name) => Some(name),
            _ => None,
        })
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    for source in &mut settings.users {
        if let UserSource::Jwt(tokens) = source {
            tokens.claims.others = wanted.iter().copied().cloned().collect();
        }
    }
}
