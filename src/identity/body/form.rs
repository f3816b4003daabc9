//! Forms as they are written into a query: `a=b&c=d`.

use super::{
    super::text::{Given, pairs},
    is_prototype, is_utf8_form,
};

/// Reads fields from a form. `None` where parsers differ about the form as a whole: what
/// browsers escape may begin a JSON text that is labelled as a form, or separate fields; a name with a broken escape may be any.
pub(super) fn read(bytes: &[u8], fields: &mut [(String, Given)]) -> Option<()> {
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

/// What stands in forms: everything but what begins JSON or XML, separates fields somewhere, or is no text.
fn is_plain(byte: &u8) -> bool {
    !byte.is_ascii_control() && !b";{}<>\\".contains(byte)
}
