//! The tables of the file as written: they know their position and which keys they may have.
//!
//! Opening a [`Section`] reports every key that is not in its list. Reading a [`ConfigValue`]
//! reports a wrong type. Both continue with a default or `None`, so one pass finds every problem.
//! [`Section::finish`] asserts that no key was accepted and then ignored.

use std::{cell::RefCell, collections::BTreeSet, ops::Range, rc::Rc, time::Duration};

use toml::{Spanned, de::DeTable};

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, did_you_mean, nearest, quote},
    document::Document,
    expanded_text::ExpandedText,
    keys::{self, KeyRecord, Keys, ValueKind},
    limit::Share,
    renamed,
    value::{ConfigValue, ValuePath},
};
use crate::cost::Decimal;

/// One table whose keys were checked against the list of its keys.
pub(super) struct Section<'a> {
    pub(super) document: Document<'a>,
    /// The table as messages name it: `[limit.per_ip]`.
    pub(super) title: Rc<str>,
    /// The table's header, or its name if it is inline.
    pub(super) span: Range<usize>,
    keys: &'static Keys,
    table: Option<&'a DeTable<'a>>,
    unread: RefCell<Vec<&'static str>>,
    /// Keys that a reported key probably meant, or that have the wrong type. Not reported as
    /// missing, too.
    in_doubt: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Section<'a> {
    /// Opens a table and reports every key that it may not have. `None` is a missing table.
    pub(super) fn open(
        document: Document<'a>,
        title: impl Into<Rc<str>>,
        span: Range<usize>,
        keys: &'static Keys,
        table: Option<&'a DeTable<'a>>,
    ) -> Self {
        let unread = RefCell::new(keys.names().collect());
        let section = Self {
            document,
            title: title.into(),
            span,
            keys,
            table,
            unread,
            in_doubt: RefCell::default(),
        };
        for (name, _) in table.into_iter().flat_map(DeTable::iter) {
            section.check_key(name);
        }
        section
    }

    /// Opens a value as a table that may have `keys`. Reports one that is no table.
    pub(super) fn of(
        value: &ConfigValue<'a>,
        title: impl Into<Rc<str>>,
        keys: &'static Keys,
    ) -> Option<Self> {
        let table = value.table()?;
        Some(Self::open(
            value.document,
            title,
            value.name_span(),
            keys,
            Some(table),
        ))
    }

    fn check_key(&self, name: &Spanned<std::borrow::Cow<'a, str>>) {
        let key = name.get_ref().as_ref();
        if self.keys.record(key).is_none() {
            self.document.error(name.span(), self.unknown(key));
        }
    }

    /// The problem for a key that is not in the list: it was renamed, or does not exist.
    fn unknown(&self, key: &str) -> PendingDiagnostic {
        let title = &self.title;
        if let Some(new) = renamed::new_name(self.keys.title, key) {
            self.in_doubt.borrow_mut().insert(new);
            let message = format!("{} in {title} is now {}", quote(key), quote(new));
            return PendingDiagnostic::new(Code::RenamedKey, message)
                .label("the old name")
                .hint(format!("write {new} instead of {key}"));
        }
        let meant = nearest(key, self.keys.names());
        self.in_doubt.borrow_mut().extend(meant);
        let known = self.keys.names();
        let known = known.collect::<Vec<_>>().join(", ");
        let header = meant.and_then(header).filter(|_| self.is_file());
        let hint = header.map_or(format!("known here: {known}"), |header| {
            format!("write {header}")
        });
        let message = format!("unknown key {} in {title}", quote(key));
        PendingDiagnostic::new(Code::UnknownKey, message)
            .label(did_you_mean(key, self.keys.names()))
            .hint(hint)
    }

    /// The value of a key, which must be listed.
    pub(super) fn get(&self, key: &'static str) -> Option<ConfigValue<'a>> {
        debug_assert!(self.keys.record(key).is_some(), "{key} is not listed");
        self.unread.borrow_mut().retain(|unread| *unread != key);
        let (name, value) = self.table?.get_key_value(key)?;
        let what = ValuePath::Key(key, Rc::clone(&self.title));
        let kind = self
            .record(key)
            .map_or(&ValueKind::Boolean, |record| &record.kind);
        Some(ConfigValue::new(
            self.document,
            what,
            name.span(),
            value,
            kind,
        ))
    }

    /// The value of a required key; reports a missing one.
    pub(super) fn require(&self, key: &'static str, hint: &str) -> Option<ConfigValue<'a>> {
        let value = self.get(key);
        if value.is_none() && !self.is_in_doubt(key) {
            let message = format!("{} is missing in {}", quote(key), self.title);
            self.error(PendingDiagnostic::new(Code::MissingKey, message).hint(hint));
        }
        value
    }

    /// Whether a report already says that the key is misspelt or has the wrong type.
    pub(super) fn is_in_doubt(&self, key: &str) -> bool {
        self.in_doubt.borrow().contains(key)
    }

    fn is_file(&self) -> bool {
        self.keys.title == keys::FILE.title
    }

    /// Reports an error about the whole table.
    pub(super) fn error(&self, problem: PendingDiagnostic) {
        self.document.error(self.span.clone(), problem);
    }

    /// Reports a warning about the whole table.
    pub(super) fn warn(&self, problem: PendingDiagnostic) {
        self.document.warn(self.span.clone(), problem);
    }

    /// Asserts that every listed key was read.
    pub(super) fn finish(self) {
        debug_assert!(
            self.unread.borrow().is_empty(),
            "{}: {:?} unread",
            self.title,
            self.unread
        );
    }

    fn record(&self, key: &str) -> Option<&'static KeyRecord> {
        let record = self.keys.record(key);
        debug_assert!(record.is_some(), "{key} has no record in {}", self.title);
        record
    }

    /// The value that `read` finds, else the default of the key's record.
    fn value_or<T>(
        &self,
        key: &'static str,
        read: impl Fn(&ConfigValue<'a>) -> Option<T>,
        default: impl Fn(&KeyRecord) -> Option<T>,
    ) -> Option<T> {
        let value = self.get(key).and_then(|value| read(&value));
        value.or_else(|| {
            let default = self.record(key).and_then(default);
            debug_assert!(default.is_some(), "{key} of {} has no default", self.title);
            default
        })
    }

    /// A duration within the range of its record, else the default.
    pub(super) fn duration(&self, key: &'static str) -> Duration {
        self.value_or(key, ConfigValue::duration, KeyRecord::default_duration)
            .unwrap_or_default()
    }

    /// The same, for a default that depends on another key.
    pub(super) fn duration_or(&self, key: &'static str, default: Duration) -> Duration {
        let value = self.get(key).and_then(|value| value.duration());
        value.unwrap_or(default)
    }

    /// A size within the range of its record, else the default.
    pub(super) fn size(&self, key: &'static str) -> u64 {
        self.value_or(key, ConfigValue::size, KeyRecord::default_size)
            .unwrap_or_default()
    }

    /// A whole number within the range of its record, else the default.
    pub(super) fn integer(&self, key: &'static str) -> u64 {
        self.value_or(key, ConfigValue::integer, KeyRecord::default_integer)
            .unwrap_or_default()
    }

    /// The same, for a default that depends on another key.
    pub(super) fn integer_or(&self, key: &'static str, default: u64) -> u64 {
        let value = self.get(key).and_then(|value| value.integer());
        value.unwrap_or(default)
    }

    /// A share within the range of its record, else the default.
    pub(super) fn share(&self, key: &'static str) -> Share {
        let default =
            |record: &KeyRecord| Share::from_ppm((record.default_share()? * 1e6).round() as u32);
        self.value_or(key, ConfigValue::share, default)
            .unwrap_or_default()
    }

    /// A decimal within the range of its record, else the default.
    pub(super) fn decimal(&self, key: &'static str) -> Decimal {
        self.value_or(key, ConfigValue::decimal, KeyRecord::default_decimal)
            .unwrap_or(Decimal::ZERO)
    }

    pub(super) fn boolean(&self, key: &'static str) -> bool {
        self.value_or(key, ConfigValue::boolean, KeyRecord::default_boolean)
            .unwrap_or_default()
    }

    /// One of `choices`, which are the words of the key's record, else its default.
    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let record = self.record(key)?;
        debug_assert!(
            choices.len() == record.kind.words().len()
                && choices
                    .iter()
                    .all(|(word, _)| record.kind.words().contains(word)),
            "{key} of {} has other words in its record",
            self.title
        );
        match self.get(key) {
            Some(value) => value.text()?.choice(choices, &[], ""),
            None => {
                let default = record.default_word()?;
                let mut choices = choices.iter();
                choices
                    .find(|(word, _)| *word == default)
                    .map(|(_, choice)| *choice)
            }
        }
    }

    /// A list of texts; `None` if the key is missing.
    pub(super) fn texts(&self, key: &'static str) -> Option<Vec<ExpandedText<'a>>> {
        let items = self.get(key)?.array().unwrap_or_default();
        Some(items.iter().filter_map(ConfigValue::text).collect())
    }

    /// A nested table; an empty one if it is missing.
    pub(super) fn table(&self, key: &'static str, keys: &'static Keys) -> Section<'a> {
        let value = self.get(key);
        let span = value
            .as_ref()
            .map_or(self.span.clone(), ConfigValue::name_span);
        let table = value.and_then(|value| value.table());
        Section::open(self.document, keys.title.to_owned(), span, keys, table)
    }

    /// Whether the file has this table.
    pub(super) fn is_there(&self) -> bool {
        self.table.is_some()
    }

    /// The tables of an array of tables (`[[route]]`), in file order.
    pub(super) fn repeated(&self, key: &'static str) -> Vec<ConfigValue<'a>> {
        let Some(value) = self.get(key) else {
            return Vec::new();
        };
        let items = value.items(&ValuePath::from(format!("[[{key}]]")));
        if value.is_array() && items.iter().all(ConfigValue::is_table) {
            return items;
        }
        self.in_doubt.borrow_mut().insert(key);
        let problem = match value.is_table() {
            true => PendingDiagnostic::new(
                Code::WrongType,
                format!("[{key}] needs two brackets, because it may be repeated"),
            ),
            false => value.wrong_type("a list of tables"),
        };
        let problem = problem.hint(format!("write [[{key}]]"));
        self.document.error(value.name_span(), problem);
        Vec::new()
    }

    /// The named tables (`[limit.NAME]`), in file order; each may have `keys`.
    pub(super) fn named(
        &self,
        key: &'static str,
        keys: &'static Keys,
    ) -> Vec<(ExpandedText<'a>, ConfigValue<'a>)> {
        let Some(value) = self.get(key) else {
            return Vec::new();
        };
        let what = |name: &str| format!("[{key}.{}]", quote(name).trim_matches('`'));
        let is_nameless = |(name, value): &(ExpandedText<'_>, ConfigValue<'_>)| {
            !value.is_table() && keys.record(&name.value).is_some()
        };
        let entries = match value.is_table() {
            true => value.entries(what),
            false => Vec::new(),
        };
        if value.is_table() && !entries.iter().any(is_nameless) {
            return entries;
        }
        self.in_doubt.borrow_mut().insert(key);
        let example = EXAMPLE_NAMES.iter().find(|(table, _)| *table == key);
        let example = example.map_or("name", |(_, name)| name);
        let problem = match value.is_table() || value.is_array() {
            true => PendingDiagnostic::new(Code::WrongType, format!("[{key}] needs a name")),
            false => value.wrong_type("a table of tables"),
        };
        let problem = problem.hint(format!("write [{key}.{example}]"));
        self.document.error(value.name_span(), problem);
        entries
            .into_iter()
            .filter(|(_, value)| value.is_table())
            .collect()
    }
}

/// Example table names for hints.
const EXAMPLE_NAMES: &[(&str, &str)] =
    &[("limit", "per_ip"), ("upstream", "web"), ("keys", "acme")];

/// The header of a kind of table that may occur more than once.
fn header(kind: &str) -> Option<&'static str> {
    match kind {
        "limit" => Some("[limit.NAME]"),
        "upstream" => Some("[upstream.NAME]"),
        "keys" => Some("[keys.NAME]"),
        "route" => Some("[[route]]"),
        "listen" => Some("[[listen]]"),
        "user" => Some("[[user]]"),
        _ => None,
    }
}
