//! One value of the file, read as some type. Problems are reported at the position of the value.

use std::{
    fmt::{self, Display},
    ops::{Range, RangeInclusive},
    rc::Rc,
    time::{Duration, SystemTime},
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    code::Code,
    date,
    diagnostic::{PendingDiagnostic, quote},
    document::Document,
    expanded_text::ExpandedText,
    keys::ValueKind,
    limit::Share,
    units,
};
use crate::cost::Decimal;

/// How messages name a value. Formatted lazily, because large files have many values and few
/// messages.
#[derive(Clone)]
pub(super) enum ValuePath {
    /// `[limit.per_ip]`
    Named(Rc<str>),
    /// "`rate` in [limit.per_ip]": a key and its table.
    Key(&'static str, Rc<str>),
    /// `an item of hosts in [[route]]`.
    ItemOf(Rc<ValuePath>),
}

impl Display for ValuePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Key(key, title) => write!(f, "{} in {title}", quote(key)),
            Self::ItemOf(list) => write!(f, "an item of {list}"),
        }
    }
}

impl From<String> for ValuePath {
    fn from(name: String) -> ValuePath {
        ValuePath::Named(name.into())
    }
}

/// One value and its position.
pub(super) struct ConfigValue<'a> {
    pub(super) document: Document<'a>,
    pub(super) what: ValuePath,
    name_span: Range<usize>,
    value: &'a Spanned<DeValue<'a>>,
    /// Its type and range.
    kind: &'static ValueKind,
}

impl<'a> ConfigValue<'a> {
    pub(super) fn new(
        document: Document<'a>,
        what: ValuePath,
        name_span: Range<usize>,
        value: &'a Spanned<DeValue<'a>>,
        kind: &'static ValueKind,
    ) -> Self {
        Self {
            document,
            what,
            name_span,
            value,
            kind,
        }
    }

    pub(super) fn span(&self) -> Range<usize> {
        self.value.span()
    }

    /// The position of its name.
    pub(super) fn name_span(&self) -> Range<usize> {
        self.name_span.clone()
    }

    pub(super) fn error(&self, problem: PendingDiagnostic) {
        self.document.error(self.span(), problem);
    }

    pub(super) fn warn(&self, problem: PendingDiagnostic) {
        self.document.warn(self.span(), problem);
    }

    pub(super) fn wrong_type(&self, expected: &str) -> PendingDiagnostic {
        let found = match self.value.get_ref() {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a number with a fraction",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        PendingDiagnostic::new(
            Code::WrongType,
            format!("{} must be {expected}, not {found}", self.what),
        )
        .label(format!("expected {expected}"))
    }

    pub(super) fn is_string(&self) -> bool {
        self.value.get_ref().is_str()
    }

    pub(super) fn is_array(&self) -> bool {
        self.value.get_ref().is_array()
    }

    pub(super) fn is_table(&self) -> bool {
        self.value.get_ref().is_table()
    }

    pub(super) fn text(&self) -> Option<ExpandedText<'a>> {
        self.text_like("text in quotes", "")
    }

    fn text_like(&self, expected: &str, hint: &str) -> Option<ExpandedText<'a>> {
        let Some(raw) = self.value.get_ref().as_str() else {
            self.error(self.wrong_type(expected).hint(hint));
            return None;
        };
        ExpandedText::expand(self.document, raw, self.span())
            .map_err(|problem| self.error(problem))
            .ok()
    }

    /// A duration within the range of its record.
    pub(super) fn duration(&self) -> Option<Duration> {
        let bounds = self.bounds(ValueKind::durations)?;
        let text = self.text_like(
            "a duration",
            r#"a duration is text with a unit, for example "10s""#,
        )?;
        let value = text.parse("a duration", units::duration)?;
        self.within(value, bounds, units::show_duration)
    }

    /// A size within the range of its record.
    pub(super) fn size(&self) -> Option<u64> {
        let bounds = self.bounds(ValueKind::sizes)?;
        let text = self.text_like(
            "a size",
            r#"a size is text with a unit, for example "64KiB""#,
        )?;
        let value = text.parse("a size", units::size)?;
        self.within(value, bounds, units::show_size)
    }

    /// A rate; of money if a `currency` is given.
    pub(super) fn rate(&self, currency: Option<&str>) -> Option<units::Rate> {
        let text = self.text_like(
            "a rate",
            r#"a rate is text, for example "100/s" or "5/15min""#,
        )?;
        text.parse("a rate", |text| match currency {
            Some(currency) => units::money_rate(text, currency),
            None => units::rate(text),
        })
    }

    /// A whole number within the range of its record.
    pub(super) fn integer(&self) -> Option<u64> {
        let bounds = self.bounds(ValueKind::integers)?;
        let Some(written) = self.value.get_ref().as_integer() else {
            self.error(
                self.wrong_type("a whole number")
                    .hint(self.without_quotes()),
            );
            return None;
        };
        let parsed = i128::from_str_radix(written.as_str(), written.radix());
        // every bound fits 64 bits, so a larger number is out of bounds, too
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

    /// The range of its record.
    fn bounds<T>(
        &self,
        range: impl Fn(&ValueKind) -> Option<RangeInclusive<T>>,
    ) -> Option<RangeInclusive<T>> {
        let bounds = range(self.kind);
        debug_assert!(
            bounds.is_some(),
            "{} has another type in its record",
            self.what
        );
        bounds
    }

    /// A number within the range of its record, whole or with a point.
    pub(super) fn share(&self) -> Option<Share> {
        let bounds = self.bounds(ValueKind::shares)?;
        let number = match self.value.get_ref() {
            DeValue::Float(written) => written.as_str().parse::<f64>().ok(),
            DeValue::Integer(written) if written.radix() == 10 => written.as_str().parse().ok(),
            _ => None,
        };
        let Some(number) = number else {
            self.error(
                self.wrong_type("a number from 0 to 1")
                    .hint("write it without quotes, for example 0.8"),
            );
            return None;
        };
        let ppm = (number * 1e6).round();
        // within these bounds the cast is exact; NaN is not within them
        let share = (0.0..=1e6).contains(&ppm).then_some(ppm as u32);
        let share = share.filter(|share| bounds.contains(share));
        let share = share.and_then(Share::from_ppm);
        if share.is_none() {
            let message = format!("{} is out of range: {number}", self.what);
            let most = f64::from(*bounds.end()) / 1e6;
            let expected = match bounds.start() {
                0 => format!("expected 0 to {most}"),
                _ => format!("expected more than 0, at most {most}"),
            };
            self.error(PendingDiagnostic::new(Code::OutOfRange, message).label(expected));
        }
        share
    }

    /// A decimal within the range of its record: a number, or text.
    pub(super) fn decimal(&self) -> Option<Decimal> {
        let bounds = self.bounds(ValueKind::decimals)?;
        let hint = "write digits with at most nine decimal places, for example 0.25 or \"2.50\"";
        let bad = |text: &str| {
            let message = format!("{} is not a decimal number", quote(text));
            PendingDiagnostic::new(Code::BadDecimal, message).hint(hint)
        };
        let written = match self.value.get_ref() {
            DeValue::Float(written) => written.as_str(),
            DeValue::Integer(written) if written.radix() == 10 => written.as_str(),
            _ => {
                let text = self.text_like("a number, or text with one", hint)?;
                let parse = |value: &str| Decimal::parse(value).ok_or_else(|| bad(value));
                let value = text.parse("a decimal number", parse)?;
                return self
                    .within(value.nanos(), bounds, show_nanos)
                    .map(Decimal::from_nanos);
            }
        };
        let Some(value) = Decimal::parse(written) else {
            let (from, to) = (show_nanos(*bounds.start()), show_nanos(*bounds.end()));
            let is_number = written.parse::<f64>().is_ok_and(|number| number < 0.0);
            self.error(match is_number {
                true => out_of_range(&self.what, &quote(written), &from, &to),
                false => bad(written),
            });
            return None;
        };
        self.within(value.nanos(), bounds, show_nanos)
            .map(Decimal::from_nanos)
    }

    /// A date, or a date and time with its offset.
    pub(super) fn date(&self) -> Option<SystemTime> {
        let Some(written) = self.value.get_ref().as_datetime() else {
            let hint = "write it without quotes, for example 2027-01-31 or 2027-01-31T18:00:00Z";
            self.error(self.wrong_type("a date").hint(hint));
            return None;
        };
        date::instant(written)
            .map_err(|problem| self.error(problem))
            .ok()
    }

    pub(super) fn boolean(&self) -> Option<bool> {
        let value = self.value.get_ref().as_bool();
        if value.is_none() {
            self.error(self.wrong_type("true or false").hint(self.without_quotes()));
        }
        value
    }

    fn without_quotes(&self) -> &'static str {
        match self.value.get_ref().as_str() {
            Some(text) if text.contains("${") => {
                "environment variables can only supply text: write numbers, true and false literally"
            }
            Some(_) => "write it without quotes",
            None => "",
        }
    }

    pub(super) fn array(&self) -> Option<Vec<ConfigValue<'a>>> {
        if !self.is_array() {
            let problem = self.wrong_type("a list");
            self.error(problem.hint("write a list in brackets, even for one item"));
            return None;
        }
        Some(self.items(&ValuePath::ItemOf(Rc::new(self.what.clone()))))
    }

    /// The items of a list, each named `what` in messages; none if it is not a list.
    pub(super) fn items(&self, what: &ValuePath) -> Vec<ConfigValue<'a>> {
        let items = self
            .value
            .get_ref()
            .as_array()
            .into_iter()
            .flat_map(|items| items.iter());
        items
            .map(|item| {
                ConfigValue::new(
                    self.document,
                    what.clone(),
                    item.span(),
                    item,
                    self.kind.inner(),
                )
            })
            .collect()
    }

    pub(super) fn table(&self) -> Option<&'a DeTable<'a>> {
        let table = self.value.get_ref().as_table();
        if table.is_none() {
            self.error(self.wrong_type("a table"));
        }
        table
    }

    /// The entries of a table whose keys are names, in file order.
    pub(super) fn entries(
        &self,
        what: impl Fn(&str) -> String,
    ) -> Vec<(ExpandedText<'a>, ConfigValue<'a>)> {
        let entries = self.table().into_iter().flat_map(DeTable::iter);
        let mut entries: Vec<_> = entries
            .map(|(name, value)| {
                let text = ExpandedText::plain(self.document, name.get_ref(), name.span());
                (
                    text,
                    ConfigValue::new(
                        self.document,
                        what(name.get_ref()).into(),
                        name.span(),
                        value,
                        self.kind.inner(),
                    ),
                )
            })
            .collect();
        entries.sort_by_key(|(name, _)| name.span.start);
        entries
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

/// A decimal in units of 10⁻⁹, as a file writes it.
fn show_nanos(nanos: u64) -> String {
    Decimal::from_nanos(nanos).to_string()
}

fn out_of_range(
    what: &ValuePath,
    value: &str,
    from: &impl Display,
    to: &impl Display,
) -> PendingDiagnostic {
    PendingDiagnostic::new(Code::OutOfRange, format!("{what} is out of range: {value}"))
        .label(format!("expected {from} to {to}"))
}
