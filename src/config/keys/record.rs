//! The record of one key: its type, range, default and documentation. The reader, the tables of
//! docs/config.md and the JSON schema all use it.

use std::{ops::RangeInclusive, time::Duration};

use crate::{config::units, cost::Decimal};

/// An hour and a day in milliseconds.
pub(super) const HOUR: u64 = 3_600_000;
pub(super) const DAY: u64 = 24 * HOUR;

/// Any text.
pub(in crate::config) const TEXT: ValueKind = ValueKind::Text("text");

/// The type of a value, with its range. Ranges include both ends.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) enum ValueKind {
    /// `true` or `false`.
    Boolean,
    /// A whole number.
    Integer(u64, u64),
    /// A number from 0 to 1; the range is in millionths.
    Share(u32, u32),
    /// A decimal, as a number or as text; the range is in units of 10⁻⁹.
    Decimal(u64, u64),
    /// A duration; the range is in milliseconds.
    Duration(u64, u64),
    /// A size; the range is in bytes.
    Size(u64, u64),
    /// A rate.
    Rate,
    /// A date, or a date and time with its offset.
    Date,
    /// A text; the documentation calls it so.
    Text(&'static str),
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A list; how the documentation calls it, and its items.
    List(&'static str, &'static ValueKind),
    /// A value, or a table of them by tier.
    ByTier(&'static ValueKind),
    /// A value of one of these types.
    OneOf(&'static [ValueKind]),
    /// A table.
    Table(&'static Keys),
    /// A list of tables, each with one of these sets of keys.
    Tables(&'static [&'static Keys]),
    /// A table whose entries have free names, with the kind of its values.
    ByName(&'static ValueKind),
    /// Tables with names.
    Named(&'static Keys),
}

/// The default of a key.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) enum DefaultValue {
    /// The key must be there.
    Required,
    /// As a file writes it.
    Value(&'static str),
    /// No single value; the text for the documentation.
    Note(&'static str),
}

/// One key of a table.
#[derive(Debug)]
pub(in crate::config) struct KeyRecord {
    pub(in crate::config) name: &'static str,
    pub(in crate::config) kind: ValueKind,
    pub(in crate::config) default: DefaultValue,
    /// Its meaning, in Markdown, for a row of docs/config.md.
    pub(in crate::config) doc: &'static str,
    /// The type in the documentation, if it is not the kind's own text.
    type_name: Option<&'static str>,
}

impl KeyRecord {
    pub(super) const fn new(
        name: &'static str,
        kind: ValueKind,
        default: DefaultValue,
        doc: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            default,
            doc,
            type_name: None,
        }
    }

    /// Describes the type by `text` in the documentation.
    pub(super) const fn said(mut self, text: &'static str) -> Self {
        self.type_name = Some(text);
        self
    }

    /// The default as a file writes it.
    pub(in crate::config) fn default_text(&self) -> Option<&'static str> {
        match self.default {
            DefaultValue::Value(text) => Some(text),
            DefaultValue::Required | DefaultValue::Note(_) => None,
        }
    }

    /// The default without quotes, if it is a text.
    pub(in crate::config) fn default_word(&self) -> Option<&'static str> {
        self.default_text()?.strip_prefix('"')?.strip_suffix('"')
    }

    pub(in crate::config) fn default_duration(&self) -> Option<Duration> {
        units::duration(self.default_word()?).ok()
    }

    pub(in crate::config) fn default_size(&self) -> Option<u64> {
        units::size(self.default_word()?).ok()
    }

    pub(in crate::config) fn default_integer(&self) -> Option<u64> {
        self.default_text()?.replace('_', "").parse().ok()
    }

    pub(in crate::config) fn default_share(&self) -> Option<f64> {
        self.default_text()?.parse().ok()
    }

    pub(in crate::config) fn default_decimal(&self) -> Option<Decimal> {
        Decimal::parse(self.default_text()?)
    }

    pub(in crate::config) fn default_boolean(&self) -> Option<bool> {
        self.default_text()?.parse().ok()
    }

    /// The type as docs/config.md writes it.
    pub(in crate::config) fn type_text(&self) -> String {
        self.type_name
            .map_or_else(|| self.kind.name(), str::to_owned)
    }

    /// The row of the key in docs/config.md.
    #[cfg(test)]
    pub(super) fn row(&self) -> String {
        let kind = self.type_text();
        let default = match self.default {
            DefaultValue::Required => "required".to_owned(),
            DefaultValue::Value(text) => format!("`{text}`"),
            DefaultValue::Note(text) => text.to_owned(),
        };
        let row = format!("| `{}` | {kind} | {default} | {} |", self.name, self.doc);
        row.replace("|  |", "| |")
    }
}

impl ValueKind {
    /// The range of a whole number.
    pub(in crate::config) fn integers(&self) -> Option<RangeInclusive<u64>> {
        match self {
            Self::Integer(least, most) => Some(*least..=*most),
            Self::ByTier(kind) => kind.integers(),
            Self::OneOf(kinds) => kinds.iter().find_map(ValueKind::integers),
            _ => None,
        }
    }

    /// The range of a share, in millionths.
    pub(in crate::config) fn shares(&self) -> Option<RangeInclusive<u32>> {
        match self {
            Self::Share(least, most) => Some(*least..=*most),
            _ => None,
        }
    }

    /// The range of a decimal, in units of 10⁻⁹.
    pub(in crate::config) fn decimals(&self) -> Option<RangeInclusive<u64>> {
        match self {
            Self::Decimal(least, most) => Some(*least..=*most),
            _ => None,
        }
    }

    /// The range of a duration.
    pub(in crate::config) fn durations(&self) -> Option<RangeInclusive<Duration>> {
        match self {
            Self::Duration(least, most) => {
                Some(Duration::from_millis(*least)..=Duration::from_millis(*most))
            }
            _ => None,
        }
    }

    /// The range of a size.
    pub(in crate::config) fn sizes(&self) -> Option<RangeInclusive<u64>> {
        match self {
            Self::Size(least, most) => Some(*least..=*most),
            _ => None,
        }
    }

    /// The words of a choice.
    pub(in crate::config) fn words(&self) -> &'static [&'static str] {
        match self {
            Self::Choice(words) => words,
            Self::List(_, kind) => kind.words(),
            Self::OneOf(kinds) => {
                let words = kinds.iter().map(ValueKind::words);
                words
                    .into_iter()
                    .find(|words| !words.is_empty())
                    .unwrap_or_default()
            }
            _ => &[],
        }
    }

    /// The kind of an item of a list, or of an entry of a table.
    pub(in crate::config) fn inner(&'static self) -> &'static ValueKind {
        match self {
            Self::List(_, kind) | Self::ByTier(kind) | Self::ByName(kind) => kind,
            Self::OneOf(kinds) => {
                let list = kinds.iter().find(|kind| matches!(kind, Self::List(..)));
                list.map_or(self, ValueKind::inner)
            }
            _ => self,
        }
    }

    /// The type as docs/config.md writes it.
    fn name(&self) -> String {
        match self {
            Self::Boolean => "boolean".to_owned(),
            Self::Integer(least, most) => format!("{} to {}", grouped(*least), grouped(*most)),
            Self::Share(1, 1_000_000) => "more than 0, up to 1".to_owned(),
            Self::Share(least, most) => {
                let [least, most] = [least, most].map(|ppm| f64::from(*ppm) / 1e6);
                format!("{least} to {most}")
            }
            Self::Decimal(least, most) => {
                let [least, most] = [least, most].map(|nanos| Decimal::from_nanos(*nanos));
                format!("decimal, {least} to {most}")
            }
            Self::Duration(least, most) => {
                let [least, most] = [least, most].map(|ms| match ms {
                    0 => "0".to_owned(),
                    ms => units::show_duration(Duration::from_millis(*ms)),
                });
                format!("duration, {least} to {most}")
            }
            Self::Size(0, u64::MAX) => "size".to_owned(),
            Self::Size(least, most) => {
                format!(
                    "size, {} to {}",
                    units::show_size(*least),
                    units::show_size(*most)
                )
            }
            Self::Rate => "rate".to_owned(),
            Self::Date => "date".to_owned(),
            Self::Text(name) | Self::List(name, _) => (*name).to_owned(),
            Self::Choice(words) => {
                let words: Vec<String> = words.iter().map(|word| format!("`\"{word}\"`")).collect();
                any_of(&words)
            }
            Self::ByTier(kind) => format!("{}, or a table of them by tier", kind.name()),
            Self::OneOf(kinds) => {
                let names: Vec<String> = kinds.iter().map(ValueKind::name).collect();
                match names.as_slice() {
                    [first, last] if last.starts_with("a ") => format!("{first}, or {last}"),
                    [first, last] if last.contains(" or ") => format!("{first}, {last}"),
                    names => any_of(names),
                }
            }
            Self::Table(_) => "table".to_owned(),
            Self::Tables(_) => "list of tables".to_owned(),
            Self::Named(_) | Self::ByName(_) => "tables with names".to_owned(),
        }
    }
}

/// `a, b or c`.
fn any_of(names: &[String]) -> String {
    match names {
        [names @ .., last] if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        names => names.concat(),
    }
}

/// A number with commas: `1,000,000`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// The keys of one table.
#[derive(Debug)]
pub(in crate::config) struct Keys {
    /// The header as a file writes it.
    pub(in crate::config) title: &'static str,
    /// The keys, in the order of the documentation.
    pub(in crate::config) keys: &'static [KeyRecord],
}

impl Keys {
    pub(in crate::config) fn record(&self, key: &str) -> Option<&'static KeyRecord> {
        self.keys.iter().find(|record| record.name == key)
    }

    pub(in crate::config) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().map(|record| record.name)
    }
}
