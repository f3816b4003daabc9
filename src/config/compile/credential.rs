//! What the kinds of `[[user]]` have in common: the field that holds a credential, and what happens
//! to one that does not verify.

use http::HeaderName;

use super::names::field_name;
use crate::{config::section::Section, identity::OnInvalid};

/// How to treat a credential that does not verify.
pub(super) const INVALID: &[(&str, OnInvalid)] = &[
    ("reject", OnInvalid::Reject),
    ("anonymous", OnInvalid::Anonymous),
];

pub(super) fn header_key(
    section: &Section<'_>,
    key: &'static str,
    default: &'static str,
) -> Option<HeaderName> {
    match section.get(key) {
        Some(value) => field_name(&value.text()?),
        None => Some(HeaderName::from_static(default)),
    }
}
