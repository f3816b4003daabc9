//! Names of fields that change how a body is read.

/// Whether the form's encoding is UTF-8. Some parsers read it from the `_charset_` field.
pub(super) fn is_utf8_form(name: &str, value: &str) -> bool {
    !name.trim().eq_ignore_ascii_case("_charset_") || value.trim().eq_ignore_ascii_case("utf-8")
}

/// Whether a field may change other fields: JavaScript objects inherit from their prototype.
pub(super) fn is_prototype(name: &str) -> bool {
    name.contains("__proto__")
}
