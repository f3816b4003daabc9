//! The `key` of a limit: which requests share a bucket.

use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, did_you_mean, quote},
        expanded_text::ExpandedText,
        value::ConfigValue,
    },
    identity::{self, KeyPart, UserSource},
};

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

/// A prefix such as `query:`, its constructor, and which names may follow it.
type PrefixedPart = (&'static str, fn(String) -> KeyPart, fn(&str) -> bool);

/// The kinds of part that take a name after the colon.
const NAMED_PARTS: &[PrefixedPart] = &[
    ("query:", KeyPart::Query, |_| true),
    ("cookie:", KeyPart::Cookie, |name| {
        !name.contains(['=', ';'])
    }),
    ("claim:", KeyPart::Claim, |_| true),
    ("param:", KeyPart::Param, |name| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        name.chars().all(allowed)
    }),
    ("body:", KeyPart::Body, |name| {
        name.split('.').all(|name| !name.is_empty())
    }),
];

/// The longest name of a part.
const NAME_MAX_BYTES: usize = 128;

pub(super) fn key(
    value: &ConfigValue<'_>,
    users: &identity::IdentitySettings,
) -> Option<Vec<KeyPart>> {
    let mut parts: Vec<KeyPart> = Vec::new();
    let written = value.array()?;
    let count = written.len();
    for item in written {
        let Some(text) = item.text() else { continue };
        let Some(part) = key_part(&text) else {
            continue;
        };
        if parts.contains(&part) {
            let message = format!("{} is listed twice in {}", text.shown(), value.what);
            text.error(PendingDiagnostic::new(Code::Duplicate, message).hint("remove one of them"));
        }
        let needs_user = matches!(part, KeyPart::User | KeyPart::Tenant | KeyPart::Tier);
        if needs_user && users.users.is_empty() {
            let message = format!(
                "no request has a {}: there is no [[user]] table",
                text.value
            );
            let hint = "a limit is skipped when a part of its key is missing: add [[user]], or use \"user_or_ip\"";
            text.warn(PendingDiagnostic::new(Code::NeverIdentified, message).hint(hint));
        }
        let is_token = |source: &UserSource| matches!(source, UserSource::Jwt(_));
        if matches!(part, KeyPart::Claim(_)) && !users.users.iter().any(is_token) {
            let message = "no request has a claim: no [[user]] table reads tokens";
            let hint =
                "a limit is skipped when a part of its key is missing: add [[user]] from = \"jwt\"";
            text.warn(PendingDiagnostic::new(Code::NeverIdentified, message).hint(hint));
        }
        parts.push(part);
    }
    (parts.len() == count).then_some(parts)
}

fn key_part(text: &ExpandedText<'_>) -> Option<KeyPart> {
    if let Some((_, part)) = PARTS.iter().find(|(name, _)| *name == text.value) {
        return Some(part.clone());
    }
    if let Some(name) = text.value.strip_prefix("header:") {
        return text.parse("a part of a key", |_| {
            http::HeaderName::from_bytes(name.as_bytes())
                .map(KeyPart::Header)
                .map_err(|_| {
                    PendingDiagnostic::new(
                        Code::BadField,
                        format!("{} is not an HTTP field name", quote(name)),
                    )
                    .hint("write header:NAME, for example \"header:x-device-id\"")
                })
        });
    }
    for (prefix, part, may_be) in NAMED_PARTS {
        if let Some(name) = text.value.strip_prefix(prefix) {
            return named_part(text, name, *may_be).map(*part);
        }
    }
    let names = || {
        let plain = PARTS.iter().map(|(name, _)| *name);
        plain.chain([
            "header:NAME",
            "query:NAME",
            "cookie:NAME",
            "claim:NAME",
            "param:NAME",
            "body:FIELD",
        ])
    };
    let known = names().map(quote).collect::<Vec<_>>().join(", ");
    let message = format!("{} is not a key part", text.shown());
    text.error(
        PendingDiagnostic::new(Code::UnknownChoice, message)
            .label(did_you_mean(&text.value, names()))
            .hint(format!("expected one of {known}")),
    );
    None
}

fn named_part(text: &ExpandedText<'_>, name: &str, may_be: fn(&str) -> bool) -> Option<String> {
    text.parse("a part of a key", |_| {
        let plain = !name.is_empty() && name == name.trim() && !name.contains(char::is_control);
        if plain && name.len() <= NAME_MAX_BYTES && may_be(name) {
            return Ok(name.to_owned());
        }
        let message = format!("{} is not a valid name in a key part", quote(name));
        Err(PendingDiagnostic::new(Code::BadField, message)
            .hint("examples: \"query:page\", \"cookie:session\", \"claim:sid\", \"param:id\", \"body:username\" or \"body:user.name\""))
    })
}
