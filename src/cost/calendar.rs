//! Calendar periods: hours, days and months of the wall clock at a fixed UTC offset. Also formats
//! durations for SDKs.
//!
//! There is no time zone database: a zone is an offset from UTC. The caller reads the clock and
//! never returns to a finished period: period indices only grow.

use std::fmt::Write;

const MINUTE_S: i64 = 60;
const HOUR_S: i64 = 60 * MINUTE_S;
const DAY_S: i64 = 24 * HOUR_S;

/// The length of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CalendarUnit {
    /// Starts at hh:00.
    Hour,
    /// Starts at midnight.
    Day,
    /// Starts at midnight of the first day.
    Month,
}

/// A period length with its UTC offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Calendar {
    unit: CalendarUnit,
    offset_s: i32,
}

/// One period. `end_s` is exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CalendarPeriod {
    /// Hours, days or months since 1970-01-01 00:00 at the calendar's offset. Negative before that.
    pub index: i64,
    /// First second, since the epoch.
    pub begin_s: i64,
    /// First second after the period, since the epoch.
    pub end_s: i64,
}

impl Calendar {
    /// The largest offset, 14 hours, as in the easternmost time zone.
    const MAX_OFFSET_S: i64 = 14 * HOUR_S;

    /// Creates periods at this offset from UTC; east is positive. `None` beyond 14 hours.
    pub fn new(unit: CalendarUnit, offset_s: i32) -> Option<Calendar> {
        let is_fit = i64::from(offset_s).abs() <= Calendar::MAX_OFFSET_S;
        is_fit.then_some(Calendar { unit, offset_s })
    }

    /// Parses `"+02:00"`, `"-03:30"` or `"Z"` to seconds east of UTC.
    pub fn parse_offset(text: &str) -> Option<i32> {
        let (sign, rest) = match text.as_bytes().first()? {
            b'Z' if text.len() == 1 => return Some(0),
            b'+' => (1, text.get(1..)?),
            b'-' => (-1, text.get(1..)?),
            _ => return None,
        };
        let (hours, minutes) = rest.split_once(':')?;
        let number = |digits: &str| {
            let is_two = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
            is_two.then(|| digits.parse::<i32>().ok())?
        };
        let (hours, minutes) = (number(hours)?, number(minutes)?);
        let offset = hours * 3_600 + minutes * 60;
        let is_fit = minutes < 60 && i64::from(offset) <= Calendar::MAX_OFFSET_S;
        is_fit.then_some(sign * offset)
    }

    /// The period that contains a time, given in seconds since the epoch.
    pub fn period(&self, unix_s: i64) -> CalendarPeriod {
        let local = unix_s.saturating_add(i64::from(self.offset_s));
        match self.unit {
            CalendarUnit::Hour => self.even(local.div_euclid(HOUR_S), HOUR_S),
            CalendarUnit::Day => self.even(local.div_euclid(DAY_S), DAY_S),
            CalendarUnit::Month => {
                let (year, month, _) = civil(local.div_euclid(DAY_S));
                self.month(year * 12 + i64::from(month) - 1 - 1_970 * 12)
            }
        }
    }

    /// The period with this index.
    pub fn of_index(&self, index: i64) -> CalendarPeriod {
        match self.unit {
            CalendarUnit::Hour => self.even(index, HOUR_S),
            CalendarUnit::Day => self.even(index, DAY_S),
            CalendarUnit::Month => self.month(index),
        }
    }

    /// The period's name: `2026-11`, `2026-11-22`, `2026-11-22T13`.
    pub fn name(&self, period: &CalendarPeriod) -> String {
        let local = period.begin_s.saturating_add(i64::from(self.offset_s));
        let (year, month, day) = civil(local.div_euclid(DAY_S));
        let mut name = format!("{year:04}-{month:02}");
        // Writing to a `String` cannot fail.
        _ = match self.unit {
            CalendarUnit::Month => Ok(()),
            CalendarUnit::Day => write!(name, "-{day:02}"),
            CalendarUnit::Hour => {
                write!(name, "-{day:02}T{:02}", local.rem_euclid(DAY_S) / HOUR_S)
            }
        };
        name
    }

    /// The longest possible period, in seconds.
    pub fn longest_s(&self) -> u64 {
        match self.unit {
            CalendarUnit::Hour => 3_600,
            CalendarUnit::Day => 86_400,
            CalendarUnit::Month => 31 * 86_400,
        }
    }

    fn even(&self, index: i64, length_s: i64) -> CalendarPeriod {
        let begin_s = index
            .saturating_mul(length_s)
            .saturating_sub(i64::from(self.offset_s));
        CalendarPeriod {
            index,
            begin_s,
            end_s: begin_s.saturating_add(length_s),
        }
    }

    fn month(&self, index: i64) -> CalendarPeriod {
        let begin = |index: i64| {
            let year = index.div_euclid(12).saturating_add(1_970);
            let month = index.rem_euclid(12) + 1;
            days(year, month, 1)
                .saturating_mul(DAY_S)
                .saturating_sub(i64::from(self.offset_s))
        };
        CalendarPeriod {
            index,
            begin_s: begin(index),
            end_s: begin(index.saturating_add(1)),
        }
    }
}

/// Days since 1970-01-01 of a date in the proleptic Gregorian calendar. (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms": years begin in March, an era has 400 years.)
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let of_era = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    era.saturating_mul(146_097) + of_era - 719_468
}

/// Year, month and day of days since 1970-01-01.
fn civil(days: i64) -> (i64, u8, u8) {
    let days = days.saturating_add(719_468);
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    (year, month as u8, day as u8)
}

/// Formats a duration as OpenAI's fields do and Go parses it: `0s`, `120ms`, `1.5s`, `6m0s`,
/// `23h18m29.144s`.
pub fn go_duration(ms: u64) -> String {
    if (1..1_000).contains(&ms) {
        return format!("{ms}ms");
    }
    let (seconds, ms) = (ms / 1_000, ms % 1_000);
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    let mut text = String::new();
    if hours > 0 {
        text.push_str(&format!("{hours}h"));
    }
    if hours > 0 || minutes > 0 {
        text.push_str(&format!("{minutes}m"));
    }
    text.push_str(&seconds.to_string());
    if ms > 0 {
        text.push_str(format!(".{ms:03}").trim_end_matches('0'));
    }
    text.push('s');
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// 2026-11-22 13:14:15 UTC.
    const NOON: i64 = 1_795_353_255;

    fn calendar(unit: CalendarUnit, offset: &str) -> Calendar {
        let offset = Calendar::parse_offset(offset).expect(offset);
        Calendar::new(unit, offset).expect("a calendar")
    }

    #[test]
    fn periods_are_named_and_bounded_as_the_calendar_has_them() {
        use CalendarUnit::{Day, Hour, Month};
        for (unit, offset, at, name, begin_s, end_s) in [
            (
                Hour,
                "Z",
                NOON,
                "2026-11-22T13",
                1_795_352_400,
                1_795_356_000,
            ),
            (Day, "Z", NOON, "2026-11-22", 1_795_305_600, 1_795_392_000),
            (Month, "Z", NOON, "2026-11", 1_793_491_200, 1_796_083_200),
            (
                Month,
                "Z",
                1_796_083_199,
                "2026-11",
                1_793_491_200,
                1_796_083_200,
            ),
            (
                Month,
                "Z",
                1_796_083_200,
                "2026-12",
                1_796_083_200,
                1_798_761_600,
            ),
            // Two hours east of UTC, the month begins two hours earlier.
            (
                Month,
                "+02:00",
                1_796_076_000,
                "2026-12",
                1_796_076_000,
                1_798_754_400,
            ),
            (
                Month,
                "-03:30",
                1_796_083_200,
                "2026-11",
                1_793_503_800,
                1_796_095_800,
            ),
            // February of a leap year
            (
                Month,
                "Z",
                1_709_164_800,
                "2024-02",
                1_706_745_600,
                1_709_251_200,
            ),
            (Month, "Z", 0, "1970-01", 0, 31 * 86_400),
            (Day, "Z", -1, "1969-12-31", -86_400, 0),
        ] {
            let calendar = calendar(unit, offset);
            let period = calendar.period(at);
            assert_eq!((period.begin_s, period.end_s), (begin_s, end_s), "{name}");
            assert_eq!(calendar.name(&period), name);
            assert_eq!(calendar.of_index(period.index), period);
        }
    }

    #[test]
    fn an_offset_is_hours_and_minutes() {
        for (text, offset) in [
            ("Z", 0),
            ("+02:00", 7_200),
            ("-03:30", -12_600),
            ("+14:00", 50_400),
        ] {
            assert_eq!(Calendar::parse_offset(text), Some(offset));
        }
        for text in [
            "", "z", "UTC", "02:00", "+2:00", "+02:60", "+14:01", "-99:00", "+0200", "+02:0x",
            "+٠2:00",
        ] {
            assert_eq!(Calendar::parse_offset(text), None, "{text}");
        }
        assert_eq!(Calendar::new(CalendarUnit::Day, 50_401), None);
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        let text = include_str!("../../tests/vectors/cost_vectors.json");
        let vectors: Value = serde_json::from_str(text).expect("it is JSON");
        let cases = vectors["duration"].as_array().expect("a list");
        assert_eq!(cases.len(), 12);
        for case in cases {
            let ms = case["ms"].as_u64().expect("a number");
            assert_eq!(Some(go_duration(ms).as_str()), case["text"].as_str());
        }
    }

    proptest! {
        #[test]
        fn periods_follow_each_other_without_gap_or_overlap(
            at in -5_000_000_000_i64..50_000_000_000,
            offset in -50_400..=50_400_i32,
        ) {
            for unit in [CalendarUnit::Hour, CalendarUnit::Day, CalendarUnit::Month] {
                let calendar = Calendar::new(unit, offset).expect("a calendar");
                let period = calendar.period(at);
                prop_assert!((period.begin_s..period.end_s).contains(&at));
                prop_assert!((period.end_s - period.begin_s) as u64 <= calendar.longest_s());
                prop_assert_eq!(calendar.period(period.end_s - 1), period);
                let next = calendar.period(period.end_s);
                prop_assert_eq!((next.index, next.begin_s), (period.index + 1, period.end_s));
            }
        }

        #[test]
        fn every_moment_of_any_clock_has_a_period(at: i64) {
            for unit in [CalendarUnit::Hour, CalendarUnit::Day, CalendarUnit::Month] {
                let calendar = Calendar::new(unit, 0).expect("a calendar");
                let period = calendar.period(at);
                _ = calendar.name(&period);
            }
        }
    }
}
