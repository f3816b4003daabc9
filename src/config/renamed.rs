//! Keys that have a new name. A file with the old one gets a diagnostic that gives the new one.

/// The title of the table, the old name, the new name.
const RENAMED: &[(&str, &str, &str)] = &[("[redis]", "budget", "timeout")];

/// The present name of a key that had another one.
pub(super) fn new_name(title: &str, key: &str) -> Option<&'static str> {
    let renamed = RENAMED
        .iter()
        .find(|(table, old, _)| *table == title && *old == key);
    renamed.map(|(_, _, new)| *new)
}
