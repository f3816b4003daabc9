//! Parses quantities: "100/min", "250ms", "1MiB". Whole numbers only; overflow is an error.

use std::{num::NonZeroU64, time::Duration};

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, nearest, quote},
};
use crate::cost::Decimal;

/// A rate: units per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    /// Units.
    pub(super) amount: NonZeroU64,
    /// The time in which `amount` units become available: 1 ms to 31 days.
    pub(super) period: Duration,
    /// Whether the period is a month of the calendar; `period` is then the longest one.
    pub(super) is_month: bool,
}

/// The suffix of a rate per calendar month.
const MONTH: &str = "month";

impl Rate {
    /// Checks the bounds; `text` is the rate as written.
    fn new(
        amount: u64,
        period: Duration,
        is_month: bool,
        text: &str,
    ) -> Result<Rate, PendingDiagnostic> {
        let zero =
            |what: &str| PendingDiagnostic::new(Code::ZeroRate, format!("{} {what}", quote(text)));
        if period.is_zero() {
            return Err(zero("has a period of zero").hint(RATE_HINT));
        }
        let amount = NonZeroU64::new(amount).ok_or_else(|| {
            zero("would reject every request").hint(r#"write at least 1, for example "1/d""#)
        })?;
        if u128::from(amount.get()) > period.as_nanos() {
            let message = format!("{} is faster than one per nanosecond", quote(text));
            return Err(PendingDiagnostic::new(Code::BadRate, message).hint(RATE_HINT));
        }
        Ok(Rate {
            amount,
            period,
            is_month,
        })
    }

    /// The default burst: one second's worth of units, rounded down, but at least 10 or the
    /// rate's amount if that is less. A browser that opens a page then gets past its second
    /// request.
    pub(super) fn default_burst(self) -> NonZeroU64 {
        let second = u128::from(self.amount.get()) * 1_000_000_000 / self.period.as_nanos();
        let least = self.amount.get().min(LEAST_BURST);
        // at most one unit per nanosecond, so it fits
        let second = u64::try_from(second).unwrap_or(u64::MAX);
        NonZeroU64::new(second.max(least)).unwrap_or(NonZeroU64::MIN)
    }

    /// The default burst of a limit on costs: one minute's worth of units, rounded down, or the
    /// rate's amount if its period is longer.
    pub(super) fn default_cost_burst(self) -> NonZeroU64 {
        const MINUTE_NS: u128 = 60_000_000_000;
        let minute = u128::from(self.amount.get()) * MINUTE_NS / self.period.as_nanos();
        let minute = u64::try_from(minute).unwrap_or(u64::MAX);
        NonZeroU64::new(minute.max(self.amount.get())).unwrap_or(self.amount)
    }
}

pub(super) const TIME_UNITS: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1_000),
    ("min", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

pub(super) const SIZE_UNITS: [(&str, u64); 7] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

/// The smallest default burst, unless the rate has fewer units.
const LEAST_BURST: u64 = 10;

/// The longest period of a rate.
const MAX_PERIOD: Duration = Duration::from_secs(31 * 86_400);

/// Parses a duration given to a running gateway: as in the configuration, but `15m` also means
/// minutes.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let minutes = text.strip_suffix('m').map(|count| format!("{count}min"));
    let parsed = duration(minutes.as_deref().unwrap_or(text));
    parsed.map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// Parses `"250ms"`, `"10s"`, `"1min"`, `"1h"`, `"1d"`; zero is allowed.
pub(super) fn duration(text: &str) -> Result<Duration, PendingDiagnostic> {
    const HINT: &str =
        r#"write a whole number and a unit, for example "250ms", "10s", "5min" or "1h""#;
    let bad = |message: String| PendingDiagnostic::new(Code::BadDuration, message).hint(HINT);
    let (count, unit) =
        number(text).ok_or_else(|| bad(format!("{} is not a duration", quote(text))))?;
    let unit = scale(unit, &TIME_UNITS, "time").map_err(|p| PendingDiagnostic {
        code: Code::BadDuration,
        ..p
    })?;
    let count = count.and_then(|count| count.checked_mul(unit));
    count
        .map(Duration::from_millis)
        .ok_or_else(|| bad(format!("{} is too long to be represented", quote(text))))
}

/// Parses a size in bytes: `"64KiB"`, `"10MiB"`, `"1GiB"`, `"512B"`, `"10MB"`.
pub(super) fn size(text: &str) -> Result<u64, PendingDiagnostic> {
    const HINT: &str =
        r#"write a whole number and a unit, for example "512B", "64KiB", "10MiB" or "1GiB""#;
    let bad = |message: String| PendingDiagnostic::new(Code::BadSize, message).hint(HINT);
    let (count, unit) =
        number(text).ok_or_else(|| bad(format!("{} is not a size", quote(text))))?;
    let unit = scale(unit, &SIZE_UNITS, "size").map_err(|p| PendingDiagnostic {
        code: Code::BadSize,
        ..p
    })?;
    let count = count.and_then(|count| count.checked_mul(unit));
    count.ok_or_else(|| bad(format!("{} is too large to be represented", quote(text))))
}

const RATE_HINT: &str =
    r#"write COUNT/UNIT or COUNT/DURATION, for example "100/s", "60/min" or "5/15min""#;

/// Parses `"100/s"`, `"10_000/min"`, `"5/15min"`: at least 1 unit, at most one per nanosecond.
pub(super) fn rate(text: &str) -> Result<Rate, PendingDiagnostic> {
    let bad = |message: String| PendingDiagnostic::new(Code::BadRate, message).hint(RATE_HINT);
    let not_a_rate = || {
        let problem = bad(format!("{} is not a rate", quote(text)));
        match meant_rate(text) {
            Some(meant) => problem.hint(format!("did you mean {}?", quote(&meant))),
            None => problem,
        }
    };
    let (count, per) = text.split_once('/').ok_or_else(not_a_rate)?;
    let (count, "") = number(count).ok_or_else(not_a_rate)? else {
        return Err(not_a_rate());
    };
    if per == MONTH {
        let amount =
            count.ok_or_else(|| bad(format!("{} is too fast to be represented", quote(text))))?;
        return Rate::new(amount, MAX_PERIOD, true, text);
    }
    let (times, unit) = match number(per) {
        Some((times, unit)) => (times, unit),
        None => (Some(1), per),
    };
    let unit = scale(unit, &TIME_UNITS, "time").map_err(|p| PendingDiagnostic {
        code: Code::BadRate,
        ..p
    })?;
    let period = times
        .and_then(|times| times.checked_mul(unit))
        .map(Duration::from_millis);
    let period = period
        .filter(|period| *period <= MAX_PERIOD)
        .ok_or_else(|| {
            bad(format!(
                "the period of {} is longer than 31 days",
                quote(text)
            ))
        })?;
    let amount =
        count.ok_or_else(|| bad(format!("{} is too fast to be represented", quote(text))))?;
    Rate::new(amount, period, false, text)
}

/// Parses money per period: `"500 usd/month"`, `"2.50 usd/d"`. The amount is in millionths.
pub(super) fn money_rate(text: &str, currency: &str) -> Result<Rate, PendingDiagnostic> {
    let bad = || {
        let message = format!("{} is not a rate of {currency}", quote(text));
        let hint = format!("write COUNT {currency}/UNIT, for example \"500 {currency}/month\"");
        PendingDiagnostic::new(Code::BadRate, message).hint(hint)
    };
    let (money, per) = text.split_once('/').ok_or_else(bad)?;
    let count = money.strip_suffix(currency).ok_or_else(bad)?;
    let count = count.strip_suffix(' ').ok_or_else(bad)?;
    let nanos = Decimal::parse(count).ok_or_else(bad)?.nanos();
    if nanos % 1_000 != 0 {
        return Err(bad().hint("money has at most six decimal places"));
    }
    rate(&format!("{}/{per}", nanos / 1_000)).map_err(|problem| match problem.code {
        Code::ZeroRate => problem,
        _ => bad(),
    })
}

/// The rate that was probably meant: `10rps`, `10r/s`, `10 per second`, `1.5/s`.
fn meant_rate(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let (digits, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let count: u64 = digits.parse().ok()?;
    if let Some((fraction, unit)) = rest.strip_prefix('.').and_then(|rest| rest.split_once('/')) {
        let tenths: u64 = fraction.parse().ok().filter(|_| fraction.len() == 1)?;
        let units = count.checked_mul(10)?.checked_add(tenths)?;
        let unit = meant(unit, &TIME_UNITS).or(Some(unit))?;
        let meant = format!("{units}/10{unit}");
        return rate(&meant).is_ok().then_some(meant);
    }
    let per = rest
        .trim()
        .trim_start_matches("requests")
        .trim_start_matches("req");
    let per = per.trim_start_matches('r').trim();
    let unit = per
        .strip_prefix("per")
        .or(per.strip_prefix('p'))
        .or(per.strip_prefix('/'))?;
    let unit = unit.trim();
    let unit = meant(unit, &TIME_UNITS).unwrap_or(unit);
    let meant = format!("{count}/{unit}");
    rate(&meant).is_ok().then_some(meant)
}

/// Formats a duration in the largest unit that is exact.
pub(super) fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    let exact = TIME_UNITS
        .iter()
        .rev()
        .find(|(_, unit)| ms >= u128::from(*unit) && ms.is_multiple_of(u128::from(*unit)));
    exact.map_or("0s".to_owned(), |(name, unit)| {
        format!("{}{name}", ms / u128::from(*unit))
    })
}

/// Formats a size in the largest binary unit that is exact.
pub(super) fn show_size(bytes: u64) -> String {
    let binary = SIZE_UNITS[..4].iter().rev();
    let exact = binary
        .into_iter()
        .find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    exact.map_or("0B".to_owned(), |(name, unit)| {
        format!("{}{name}", bytes / unit)
    })
}

/// Splits leading digits from the rest. `None` without a digit or with a misplaced `_`; the number
/// is `None` if it does not fit 64 bits.
fn number(text: &str) -> Option<(Option<u64>, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '_')
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    if digits.is_empty()
        || digits.starts_with('_')
        || digits.ends_with('_')
        || digits.contains("__")
    {
        return None;
    }
    let value = digits
        .bytes()
        .filter(u8::is_ascii_digit)
        .try_fold(0_u64, |value, digit| {
            value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
        });
    Some((value, rest))
}

/// The value of a unit; the caller sets the code of the problem.
fn scale(unit: &str, units: &[(&str, u64)], kind: &str) -> Result<u64, PendingDiagnostic> {
    if let Some((_, worth)) = units.iter().find(|(name, _)| *name == unit) {
        return Ok(*worth);
    }
    let names = units
        .iter()
        .map(|(name, _)| *name)
        .collect::<Vec<_>>()
        .join(", ");
    let again = |message: &str, hint: &str| {
        Err(PendingDiagnostic::new(Code::BadDuration, message).hint(hint))
    };
    if unit.starts_with('.') {
        return again(
            "only whole numbers are accepted",
            "use a smaller unit: 1500ms instead of 1.5s",
        );
    }
    if unit.contains(|c: char| c.is_ascii_digit()) {
        return again(
            "only one unit is accepted",
            "use the smaller unit alone: 90min instead of 1h30min",
        );
    }
    let message = match unit {
        "" => format!("a {kind} unit is missing"),
        _ => format!("unknown {kind} unit {}", quote(unit)),
    };
    let hint = meant(unit, units).map(|name| format!("did you mean {}?", quote(name)));
    let problem = PendingDiagnostic::new(Code::BadDuration, message)
        .label(format!("expected one of {names}"));
    Err(problem.hint(hint.unwrap_or_default()))
}

/// The unit that was probably meant.
fn meant<'a>(unit: &str, units: &[(&'a str, u64)]) -> Option<&'a str> {
    let lower = unit.to_ascii_lowercase();
    let habit = match lower.as_str() {
        "m" | "mins" | "minute" | "minutes" => "min",
        "sec" | "secs" | "second" | "seconds" => "s",
        "hr" | "hrs" | "hour" | "hours" => "h",
        "day" | "days" => "d",
        "msec" | "millis" | "milliseconds" => "ms",
        "k" | "kb" => "KiB",
        "mb" => "MiB",
        "g" | "gb" => "GiB",
        "bytes" | "byte" => "B",
        _ => "",
    };
    let known = |name: &str| {
        units
            .iter()
            .map(|(unit, _)| *unit)
            .find(|unit| *unit == name)
    };
    known(habit)
        .or_else(|| {
            units
                .iter()
                .map(|(name, _)| *name)
                .find(|name| name.eq_ignore_ascii_case(unit))
        })
        .or_else(|| nearest(unit, units.iter().map(|(name, _)| *name)).filter(|_| unit.len() > 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per(amount: u64, period: Duration) -> Result<Rate, PendingDiagnostic> {
        Ok(Rate {
            amount: NonZeroU64::new(amount).expect("not zero"),
            period,
            is_month: false,
        })
    }

    #[test]
    fn durations_are_a_whole_number_and_a_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("75s"), Ok(Duration::from_secs(75)));
        assert_eq!(duration("1min"), Ok(Duration::from_secs(60)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3_600)));
        assert_eq!(duration("1d"), Ok(Duration::from_secs(86_400)));
        assert_eq!(duration("1_000s"), Ok(Duration::from_secs(1_000)));
        for bad in [
            "", "s", "10", "10 s", "1.5s", "-1s", "+1s", "1h30min", "_1s", "1_s", "1__0s", "10S",
            "१s",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        let long = duration("18446744073709551615d").expect_err("it does not fit");
        assert!(long.message.contains("too long"), "{}", long.message);
        assert!(duration("99999999999999999999s").is_err());
    }

    #[test]
    fn sizes_are_binary_or_decimal_by_their_unit() {
        assert_eq!(size("0B"), Ok(0));
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size("10MiB"), Ok(10 << 20));
        assert_eq!(size("1GB"), Ok(1_000_000_000));
        for bad in ["64", "64K", "64KB", "64 KiB", "1.5MiB", "20000000000GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(
            size("64KB").expect_err("ambiguous").hint,
            "did you mean `KiB`?"
        );
    }

    #[test]
    fn rates_are_a_count_per_unit_or_per_duration() {
        assert_eq!(rate("100/s"), per(100, Duration::from_secs(1)));
        assert_eq!(rate("10_000/min"), per(10_000, Duration::from_secs(60)));
        assert_eq!(rate("5/15min"), per(5, Duration::from_secs(900)));
        assert_eq!(rate("1/31d"), per(1, MAX_PERIOD));
        assert_eq!(rate("1000000/ms"), per(1_000_000, Duration::from_millis(1)));
        for bad in [
            "100",
            "/s",
            "100/",
            "s/100",
            "1.5/s",
            "-1/s",
            "1/s/s",
            "1 / s",
            "1/fortnight",
            "1/32d",
        ] {
            assert_eq!(rate(bad).expect_err(bad).code, Code::BadRate, "{bad}");
        }
        assert_eq!(
            rate("1000001/ms").expect_err("too fast").code,
            Code::BadRate
        );
        assert_eq!(
            rate("18446744073709551616/s").expect_err("too fast").code,
            Code::BadRate
        );
        assert_eq!(rate("0/s").expect_err("zero").code, Code::ZeroRate);
        assert_eq!(rate("5/0s").expect_err("zero").code, Code::ZeroRate);
    }

    #[test]
    fn rates_in_other_words_are_understood_and_refused() {
        let hint = |text| rate(text).expect_err(text).hint;
        for (text, meant) in [
            ("10rps", "10/s"),
            ("10rpm", "10/min"),
            ("10r/s", "10/s"),
            ("10r/m", "10/min"),
            ("10 req/sec", "10/s"),
            ("10 per second", "10/s"),
            ("10 / s", "10/s"),
            ("1.5/s", "15/10s"),
            ("0.5/min", "5/10min"),
        ] {
            assert_eq!(hint(text), format!("did you mean `{meant}`?"), "{text}");
        }
        for text in [
            "",
            "10",
            "s",
            "1.25/s",
            "10 apples",
            "99999999999999999999rps",
        ] {
            assert!(hint(text).starts_with("write COUNT/UNIT"), "{text}");
        }
    }

    #[test]
    fn a_burst_that_is_not_written_is_a_second_of_the_rate_but_friendly_to_a_page() {
        let burst = |text| rate(text).expect("it is a rate").default_burst().get();
        assert_eq!(
            [
                burst("100/s"),
                burst("60/min"),
                burst("5/min"),
                burst("1/s"),
                burst("1/ms"),
                burst("1000000/ms"),
            ],
            [100, 10, 5, 1, 1_000, 1_000_000_000]
        );
    }

    #[test]
    fn quantities_are_shown_as_they_would_be_written() {
        assert_eq!(show_duration(Duration::from_secs(90)), "90s");
        assert_eq!(show_duration(Duration::from_secs(3_600)), "1h");
        assert_eq!(show_duration(Duration::ZERO), "0s");
        assert_eq!(show_size(65_536), "64KiB");
        assert_eq!(show_size(1_000), "1000B");
        assert_eq!(show_size(0), "0B");
    }
}
