//! The `key` of a limit: which requests share a bucket.

use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, did_you_mean, quote},
        expanded_text::ExpandedText,
        value::ConfigValue,
    },
    identity::{self, KeyPart, PartNeeds, UserSource},
};

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
        let needs = part.record().needs;
        if needs == PartNeeds::User && users.users.is_empty() {
            let message = format!(
                "no request has a {}: there is no [[user]] table",
                text.value
            );
            let hint = "a limit is skipped when a part of its key is missing: add [[user]], or use \"user_or_ip\"";
            text.warn(PendingDiagnostic::new(Code::NeverIdentified, message).hint(hint));
        }
        let is_token = |source: &UserSource| matches!(source, UserSource::Jwt(_));
        if needs == PartNeeds::Token && !users.users.iter().any(is_token) {
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
    let mut plain = KeyPart::PLAIN.into_iter();
    if let Some(part) = plain.find(|part| part.record().spelling == text.value) {
        return Some(part);
    }
    for named in KeyPart::NAMED {
        if let Some(name) = text.value.strip_prefix(named.prefix) {
            return text.parse("a part of a key", |_| {
                (named.make)(name).ok_or_else(|| {
                    let message = format!("{} is not {}", quote(name), named.rule);
                    PendingDiagnostic::new(Code::BadField, message).hint(named.hint)
                })
            });
        }
    }
    let plain = KeyPart::PLAIN.map(|part| part.record().spelling.to_owned());
    let named = KeyPart::NAMED.map(|named| format!("{}{}", named.prefix, named.placeholder));
    let names = || plain.iter().chain(&named).map(String::as_str);
    let known = names().map(quote).collect::<Vec<_>>().join(", ");
    let message = format!("{} is not a key part", text.shown());
    text.error(
        PendingDiagnostic::new(Code::UnknownChoice, message)
            .label(did_you_mean(&text.value, names()))
            .hint(format!("expected one of {known}")),
    );
    None
}
