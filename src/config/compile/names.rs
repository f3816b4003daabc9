//! Checks the names that an author gives, and lists of them.

use std::fmt::Display;

use crate::config::{
    code::Code,
    diagnostic::{PendingDiagnostic, quote},
    expanded_text::ExpandedText,
};

/// Checks the name of a limit, route, upstream or tier: clients see it, and it labels metrics.
pub(super) fn check_name(name: &ExpandedText<'_>, kind: &str) -> bool {
    const MAX_BYTES: usize = 64;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let good = (1..=MAX_BYTES).contains(&name.value.len()) && name.value.chars().all(allowed);
    if !good {
        let message = format!("{} cannot be the name of {kind}", name.shown());
        let hint = format!("use 1 to {MAX_BYTES} characters of A-Z a-z 0-9 _ . -");
        name.error(PendingDiagnostic::new(Code::BadName, message).hint(hint));
    }
    good
}

/// Returns whether `item` is new in its list; reports a duplicate.
pub(super) fn is_first(item: &ExpandedText<'_>, earlier: &[String], list: impl Display) -> bool {
    let first = !earlier.contains(&item.value);
    if !first {
        let message = format!("{} is listed twice in {list}", item.shown());
        item.error(PendingDiagnostic::new(Code::Duplicate, message).hint("remove one of them"));
    }
    first
}

/// Parses a field name; reports an invalid one.
pub(super) fn field_name(text: &ExpandedText<'_>) -> Option<http::HeaderName> {
    text.parse("the name of an HTTP field", |value| {
        http::HeaderName::from_bytes(value.as_bytes()).map_err(|_| {
            let message = format!("{} is not an HTTP field name", quote(value));
            PendingDiagnostic::new(Code::BadField, message)
                .hint("use letters, digits and `-`, as in x-api-key")
        })
    })
}
