//! The TOML as written: tables and values that know where they stand, and report what is wrong with them.
//!
//! A [`Section`] is opened with the list of its keys, and refuses every other one at once; a [`Value`] is read as
//! some type, and reports when it is not one. Both go on with a default or `None`, so that one pass finds every
//! problem. Text goes through `${NAME}` here; what came from the environment is never shown.

use std::{
    cell::RefCell,
    fmt::Display,
    ops::{Range, RangeInclusive},
    time::Duration,
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    code::Code,
    diagnostic::{Problem, Problems, Severity, did_you_mean, quote},
    environment::{self, Lookup},
    keys::{Keys, Status},
    source::Source,
    units,
};

/// One file being read.
#[derive(Clone, Copy)]
pub(super) struct Document<'a> {
    pub(super) source: &'a Source,
    pub(super) problems: &'a Problems,
    pub(super) env: Lookup<'a>,
}

impl Document<'_> {
    pub(super) fn error(&self, span: Range<usize>, problem: Problem) {
        self.problems
            .at(self.source, span, Severity::Error, problem);
    }

    pub(super) fn warn(&self, span: Range<usize>, problem: Problem) {
        self.problems
            .at(self.source, span, Severity::Warning, problem);
    }

    /// The tables of the file; where it is not TOML, what is wrong with it.
    pub(super) fn parse<'t>(&self, text: &'t str) -> Option<DeTable<'t>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut last_line = None;
        for error in &errors {
            let span = error.span().unwrap_or(0..0);
            // what follows on the same line is a consequence
            if last_line.replace(self.source.line(span.start)) != Some(self.source.line(span.start))
            {
                self.error(
                    span.clone(),
                    syntax_problem(error.message(), &text[span.start.min(text.len())..]),
                );
            }
        }
        errors.is_empty().then(|| table.into_inner())
    }
}

/// The parser's words, and a hint where the slip is a common one.
fn syntax_problem(message: &str, rest: &str) -> Problem {
    let hint = if message.contains("duplicate key") {
        "write it once; a table that may be repeated has two brackets, such as [[route]]"
    } else if rest.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        r#"text, durations, sizes and rates stand in quotes, such as "10s""#
    } else {
        ""
    };
    Problem::new(Code::Syntax, format!("this is not TOML: {message}")).hint(hint)
}

/// One table, its keys checked against those that it may have.
pub(super) struct Section<'a> {
    pub(super) document: Document<'a>,
    /// As messages name it: `[limit.per_ip]`.
    pub(super) title: String,
    /// The table's header, or its name where it has none.
    pub(super) span: Range<usize>,
    keys: &'static Keys,
    table: Option<&'a DeTable<'a>>,
    unread: RefCell<Vec<&'static str>>,
}

impl<'a> Section<'a> {
    /// Opens a table and reports every key that it may not have. `None` is a table that is not there.
    pub(super) fn open(
        document: Document<'a>,
        title: String,
        span: Range<usize>,
        keys: &'static Keys,
        table: Option<&'a DeTable<'a>>,
    ) -> Self {
        let built = keys
            .keys
            .iter()
            .filter(|(_, status)| matches!(status, Status::Built));
        let unread = RefCell::new(built.map(|(name, _)| *name).collect());
        let section = Self {
            document,
            title,
            span,
            keys,
            table,
            unread,
        };
        for (name, value) in table.into_iter().flat_map(DeTable::iter) {
            section.check_key(name, value);
        }
        section
    }

    fn check_key(&self, name: &Spanned<std::borrow::Cow<'a, str>>, value: &Spanned<DeValue<'a>>) {
        let key = name.get_ref().as_ref();
        let title = &self.title;
        let problem = match self.keys.status(key) {
            Some(Status::Built) => return,
            Some(Status::Only(only, _)) if is_literally(value.get_ref(), only) => return,
            Some(Status::Only(only, feature)) => {
                not_built(format!("{} in {title}", quote(key)), feature).hint(format!(
                    "write {key} = {only}, or remove the key: that is what happens without it"
                ))
            }
            Some(Status::NotBuilt(feature)) if self.keys.title == "the file" => {
                not_built(format!("[{key}]"), feature).hint("remove the table")
            }
            Some(Status::NotBuilt(feature)) => {
                not_built(format!("{} in {title}", quote(key)), feature).hint("remove the key")
            }
            None => {
                let meant = did_you_mean(key, self.keys.names());
                let known = self.keys.names().collect::<Vec<_>>().join(", ");
                Problem::new(
                    Code::UnknownKey,
                    format!("unknown key {} in {title}", quote(key)),
                )
                .label(meant)
                .hint(format!("known here: {known}"))
            }
        };
        self.document.error(name.span(), problem);
    }

    /// The value of a key that is built.
    pub(super) fn get(&self, key: &'static str) -> Option<Value<'a>> {
        debug_assert!(
            matches!(self.keys.status(key), Some(Status::Built)),
            "{key} is not listed as built"
        );
        self.unread.borrow_mut().retain(|unread| *unread != key);
        let (name, value) = self.table?.get_key_value(key)?;
        Some(Value {
            document: self.document,
            what: format!("{} in {}", quote(key), self.title),
            name_span: name.span(),
            value,
        })
    }

    /// The value of a key without which the table means nothing; reports when it is missing.
    pub(super) fn require(&self, key: &'static str, hint: &str) -> Option<Value<'a>> {
        let value = self.get(key);
        if value.is_none() {
            let message = format!("{} is missing in {}", quote(key), self.title);
            self.error(Problem::new(Code::MissingKey, message).hint(hint));
        }
        value
    }

    /// Reports an error of the table as a whole.
    pub(super) fn error(&self, problem: Problem) {
        self.document.error(self.span.clone(), problem);
    }

    /// Nothing that is listed as built was ignored.
    pub(super) fn finish(self) {
        debug_assert!(
            self.unread.borrow().is_empty(),
            "{}: {:?} unread",
            self.title,
            self.unread
        );
    }

    pub(super) fn duration(
        &self,
        key: &'static str,
        default: Duration,
        bounds: RangeInclusive<Duration>,
    ) -> Duration {
        let value = self.get(key).and_then(|value| value.duration(bounds));
        value.unwrap_or(default)
    }

    pub(super) fn size(&self, key: &'static str, default: u64, bounds: RangeInclusive<u64>) -> u64 {
        self.get(key)
            .and_then(|value| value.size(bounds))
            .unwrap_or(default)
    }

    pub(super) fn integer(
        &self,
        key: &'static str,
        default: u64,
        bounds: RangeInclusive<u64>,
    ) -> u64 {
        self.get(key)
            .and_then(|value| value.integer(bounds))
            .unwrap_or(default)
    }

    pub(super) fn boolean(&self, key: &'static str, default: bool) -> bool {
        self.get(key)
            .and_then(|value| value.boolean())
            .unwrap_or(default)
    }

    /// A word among `choices`; the first is the default.
    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        match self.get(key) {
            Some(value) => value.text()?.choice(choices, &[], ""),
            None => choices.first().map(|(_, choice)| *choice),
        }
    }

    /// A list of texts; `None` when the key is missing.
    pub(super) fn texts(&self, key: &'static str) -> Option<Vec<Text<'a>>> {
        let items = self.get(key)?.array().unwrap_or_default();
        Some(items.iter().filter_map(Value::text).collect())
    }

    /// A table of this one; an empty one where it is missing.
    pub(super) fn table(&self, key: &'static str, keys: &'static Keys) -> Section<'a> {
        let value = self.get(key);
        let span = value
            .as_ref()
            .map_or(self.span.clone(), |value| value.name_span.clone());
        let table = value.and_then(|value| value.table());
        Section::open(self.document, keys.title.to_owned(), span, keys, table)
    }

    /// The tables of a repeated one (`[[route]]`), in the order of the file.
    pub(super) fn repeated(&self, key: &'static str) -> Vec<Value<'a>> {
        let Some(value) = self.get(key) else {
            return Vec::new();
        };
        let Some(items) = value.value.get_ref().as_array() else {
            let message = format!("[{key}] may be repeated, so it has two brackets");
            let problem = Problem::new(Code::WrongType, message).hint(format!("write [[{key}]]"));
            self.document.error(value.name_span, problem);
            return Vec::new();
        };
        let item = |item| Value {
            document: self.document,
            what: format!("[[{key}]]"),
            name_span: Spanned::span(item),
            value: item,
        };
        items.iter().map(item).collect()
    }

    /// The named tables of this one (`[limit.NAME]`), in the order of the file.
    pub(super) fn named(&self, key: &'static str) -> Vec<(Text<'a>, Value<'a>)> {
        let Some(entries) = self.get(key).and_then(|value| value.table()) else {
            return Vec::new();
        };
        let mut named: Vec<_> = entries
            .iter()
            .map(|(name, value)| {
                let text = Text::plain(self.document, name.get_ref().to_string(), name.span());
                let what = format!("[{key}.{}]", quote(name.get_ref()).trim_matches('`'));
                (
                    text,
                    Value {
                        document: self.document,
                        what,
                        name_span: name.span(),
                        value,
                    },
                )
            })
            .collect();
        named.sort_by_key(|(name, _)| name.span.start);
        named
    }
}

/// One value and the place where it stands.
pub(super) struct Value<'a> {
    pub(super) document: Document<'a>,
    /// As messages name it: "`rate` in [limit.per_ip]".
    pub(super) what: String,
    name_span: Range<usize>,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Value<'a> {
    pub(super) fn span(&self) -> Range<usize> {
        self.value.span()
    }

    /// Where its name stands.
    pub(super) fn name_span(&self) -> Range<usize> {
        self.name_span.clone()
    }

    pub(super) fn error(&self, problem: Problem) {
        self.document.error(self.span(), problem);
    }

    fn wrong_type(&self, expected: &str) -> Problem {
        let found = self.value.get_ref().type_str();
        Problem::new(
            Code::WrongType,
            format!("{} is {expected}, not a TOML {found}", self.what),
        )
        .label(format!("expected {expected}"))
    }

    pub(super) fn is_string(&self) -> bool {
        self.value.get_ref().is_str()
    }

    pub(super) fn is_table(&self) -> bool {
        self.value.get_ref().is_table()
    }

    pub(super) fn text(&self) -> Option<Text<'a>> {
        self.text_like("a text in quotes", "")
    }

    fn text_like(&self, expected: &str, hint: &str) -> Option<Text<'a>> {
        let Some(raw) = self.value.get_ref().as_str() else {
            self.error(self.wrong_type(expected).hint(hint));
            return None;
        };
        match environment::expand(raw, self.document.env) {
            Ok(value) => Some(Text {
                document: self.document,
                from_environment: raw.contains("${"),
                raw: raw.to_owned(),
                value,
                span: self.span(),
            }),
            Err(problem) => {
                self.error(problem);
                None
            }
        }
    }

    pub(super) fn duration(&self, bounds: RangeInclusive<Duration>) -> Option<Duration> {
        let text = self.text_like(
            "a duration",
            r#"durations are texts with a unit, such as "10s""#,
        )?;
        let value = text.parse("a duration", units::duration)?;
        self.within(value, bounds, units::show_duration)
    }

    pub(super) fn size(&self, bounds: RangeInclusive<u64>) -> Option<u64> {
        let text = self.text_like("a size", r#"sizes are texts with a unit, such as "64KiB""#)?;
        let value = text.parse("a size", units::size)?;
        self.within(value, bounds, units::show_size)
    }

    pub(super) fn rate(&self) -> Option<units::Rate> {
        let text = self.text_like("a rate", r#"rates are texts such as "100/s" or "5/15min""#)?;
        text.parse("a rate", units::rate)
    }

    pub(super) fn integer(&self, bounds: RangeInclusive<u64>) -> Option<u64> {
        let Some(written) = self.value.get_ref().as_integer() else {
            self.error(self.wrong_type("a whole number"));
            return None;
        };
        let parsed = i128::from_str_radix(written.as_str(), written.radix());
        // no bound reaches past 64 bits, so what does not fit there is out of bounds too
        let value = parsed.ok().and_then(|value| u64::try_from(value).ok());
        match value {
            Some(value) => self.within(value, bounds, |value| value.to_string()),
            None => {
                self.error(out_of_range(
                    &self.what,
                    &quote(written.as_str()),
                    bounds.start(),
                    bounds.end(),
                ));
                None
            }
        }
    }

    pub(super) fn boolean(&self) -> Option<bool> {
        let value = self.value.get_ref().as_bool();
        if value.is_none() {
            self.error(
                self.wrong_type("true or false")
                    .hint("write it without quotes"),
            );
        }
        value
    }

    pub(super) fn array(&self) -> Option<Vec<Value<'a>>> {
        let Some(items) = self.value.get_ref().as_array() else {
            self.error(
                self.wrong_type("a list")
                    .hint("write a list in brackets, even for one item"),
            );
            return None;
        };
        let item = |value| Value {
            document: self.document,
            what: format!("an item of {}", self.what),
            name_span: Spanned::span(value),
            value,
        };
        Some(items.iter().map(item).collect())
    }

    pub(super) fn table(&self) -> Option<&'a DeTable<'a>> {
        let table = self.value.get_ref().as_table();
        if table.is_none() {
            self.error(self.wrong_type("a table"));
        }
        table
    }

    /// The entries of a table that is read by name, in the order of the file.
    pub(super) fn entries(&self) -> Vec<(Text<'a>, Value<'a>)> {
        let mut entries: Vec<_> = self
            .table()
            .into_iter()
            .flat_map(DeTable::iter)
            .map(|(name, value)| {
                let text = Text::plain(self.document, name.get_ref().to_string(), name.span());
                let what = format!("{} of {}", quote(name.get_ref()), self.what);
                (
                    text,
                    Value {
                        document: self.document,
                        what,
                        name_span: name.span(),
                        value,
                    },
                )
            })
            .collect();
        entries.sort_by_key(|(name, _)| name.span.start);
        entries
    }

    /// This value as a table with these keys.
    pub(super) fn section(&self, title: String, keys: &'static Keys) -> Option<Section<'a>> {
        let table = self.table()?;
        Some(Section::open(
            self.document,
            title,
            self.name_span(),
            keys,
            Some(table),
        ))
    }

    fn within<T: PartialOrd + Copy>(
        &self,
        value: T,
        bounds: RangeInclusive<T>,
        show: impl Fn(T) -> String,
    ) -> Option<T> {
        if bounds.contains(&value) {
            return Some(value);
        }
        let (from, to) = (show(*bounds.start()), show(*bounds.end()));
        self.error(out_of_range(&self.what, &show(value), &from, &to));
        None
    }
}

fn out_of_range(what: &str, value: &str, from: &impl Display, to: &impl Display) -> Problem {
    Problem::new(Code::OutOfRange, format!("{what} is out of range: {value}"))
        .label(format!("expected {from} to {to}"))
}

/// A feature that does not exist yet.
pub(super) fn not_built(what: String, feature: &str) -> Problem {
    Problem::new(
        Code::NotBuilt,
        format!("{what} is not built yet: {feature}"),
    )
    .label("not built yet")
}

/// Text after `${NAME}` was replaced.
pub(super) struct Text<'a> {
    pub(super) document: Document<'a>,
    pub(super) value: String,
    pub(super) span: Range<usize>,
    raw: String,
    from_environment: bool,
}

impl<'a> Text<'a> {
    fn plain(document: Document<'a>, value: String, span: Range<usize>) -> Self {
        Self {
            document,
            raw: value.clone(),
            value,
            span,
            from_environment: false,
        }
    }

    /// The text as it may be shown: as it was written.
    pub(super) fn shown(&self) -> String {
        quote(&self.raw)
    }

    pub(super) fn error(&self, problem: Problem) {
        self.document.error(self.span.clone(), problem);
    }

    /// Parses, or reports why not; says nothing of the value when it comes from the environment.
    pub(super) fn parse<T>(
        &self,
        kind: &str,
        parse: impl Fn(&str) -> Result<T, Problem>,
    ) -> Option<T> {
        parse(&self.value)
            .map_err(|problem| self.error(self.conceal(problem, kind)))
            .ok()
    }

    fn conceal(&self, problem: Problem, kind: &str) -> Problem {
        if !self.from_environment {
            return problem;
        }
        let message = format!("{} does not hold {kind}", self.shown());
        Problem::new(problem.code, message)
            .hint("correct the environment variable, or the default after `:-`")
    }

    /// A word among `built`; one among `unbuilt` is refused as the `feature` that it is.
    pub(super) fn choice<T: Copy>(
        &self,
        built: &[(&str, T)],
        unbuilt: &[&str],
        feature: &str,
    ) -> Option<T> {
        if let Some((_, choice)) = built.iter().find(|(word, _)| *word == self.value) {
            return Some(*choice);
        }
        let words = built.iter().map(|(word, _)| *word);
        let known = words.clone().map(quote).collect::<Vec<_>>().join(", ");
        self.error(if unbuilt.contains(&self.value.as_str()) {
            not_built(self.shown(), feature).hint(format!("built now: {known}"))
        } else {
            Problem::new(
                Code::UnknownChoice,
                format!("unknown value {}", self.shown()),
            )
            .label(format!("expected one of {known}"))
            .hint(if self.from_environment {
                String::new()
            } else {
                did_you_mean(&self.value, words)
            })
        });
        None
    }
}

/// Whether a value is what `literal` says in TOML.
fn is_literally(value: &DeValue<'_>, literal: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    match value {
        DeValue::String(text) => {
            literal.strip_prefix('"').and_then(|l| l.strip_suffix('"')) == Some(text)
        }
        DeValue::Boolean(value) => literal == if *value { "true" } else { "false" },
        DeValue::Integer(written) => {
            written.radix() == 10 && number(written.as_str()) == number(literal)
        }
        DeValue::Float(written) => {
            number(written.as_str()).is_some_and(|written| Some(written) == number(literal))
        }
        DeValue::Array(items) => literal == "[]" && items.is_empty(),
        DeValue::Table(_) | DeValue::Datetime(_) => false,
    }
}
