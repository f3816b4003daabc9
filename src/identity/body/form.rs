//! URL-encoded forms: `a=b&c=d`.

use super::{
    super::text::{FieldValue, pairs},
    names::{is_prototype, is_utf8_form},
};

/// Reads fields from a form. `None` if parsers disagree about the form as a whole. Characters that
/// browsers escape may start JSON labelled as a form, or separate fields. A name with a broken
/// escape may be any name.
pub(super) fn read(bytes: &[u8], fields: &mut [(String, FieldValue)]) -> Option<()> {
    let form = bytes.trim_ascii_end();
    if !form.iter().all(is_plain) {
        return None;
    }
    for pair in pairs(form) {
        let name = &*pair.name.text;
        if !pair.name.exact || is_prototype(name) || !is_utf8_form(name, &pair.value.text) {
            return None;
        }
        for (wanted, given) in &mut *fields {
            given.add_pair(&pair, wanted);
        }
    }
    Some(())
}

/// Whether a byte may occur in a form: no control byte, separator, or start of JSON or XML.
fn is_plain(byte: &u8) -> bool {
    !byte.is_ascii_control() && !b";{}<>\\".contains(byte)
}
