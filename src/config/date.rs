//! A date and time of TOML (RFC 3339) as a point in time, without a calendar library.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use toml::value::{Date, Datetime, Offset, Time};

use super::{code::Code, diagnostic::Problem};

/// The point in time. A date alone is its first moment in UTC; a time without an offset is refused, since it is a different
/// moment in every place, and so is a time without a date.
pub(super) fn instant(written: &Datetime) -> Result<SystemTime, Problem> {
    const HINT: &str = "write such as 2027-01-31 (midnight UTC) or 2027-01-31T18:00:00+01:00";
    let bad = |message: &str| Problem::new(Code::BadDate, message).hint(HINT);
    let date = written
        .date
        .ok_or_else(|| bad(&format!("`{written}` has no date")))?;
    let offset_minutes = match (written.time, written.offset) {
        (None, _) | (_, Some(Offset::Z)) => 0,
        (_, Some(Offset::Custom { minutes })) => i64::from(minutes),
        (Some(_), None) => {
            let message = format!("`{written}` does not say in which time zone it is");
            return Err(bad(&message).label("add Z for UTC"));
        }
    };
    let time = written.time.unwrap_or(Time {
        hour: 0,
        minute: 0,
        second: None,
        nanosecond: None,
    });
    let minutes = i64::from(time.hour) * 60 + i64::from(time.minute) - offset_minutes;
    let seconds =
        days_since_1970(date) * 86_400 + minutes * 60 + i64::from(time.second.unwrap_or_default());
    let distance = Duration::from_secs(seconds.unsigned_abs());
    let instant = match seconds {
        0.. => UNIX_EPOCH.checked_add(distance),
        _ => UNIX_EPOCH.checked_sub(distance),
    };
    let nanoseconds = Duration::from_nanos(u64::from(time.nanosecond.unwrap_or_default()));
    instant
        .and_then(|instant| instant.checked_add(nanoseconds))
        .ok_or_else(|| bad(&format!("`{written}` cannot be represented")))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar. Years begin in March, so that the day that comes and goes is
/// their last: `153 · m / 5` days lie before the m-th month (31 30 31 30 31, twice, then 31 28).
fn days_since_1970(date: Date) -> i64 {
    let (year, month) = (i64::from(date.year), i64::from(date.month));
    let (year, month) = match month {
        3.. => (year, month - 3),
        _ => (year - 1, month + 9),
    };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let day_of_year = (153 * month + 2) / 5 + i64::from(date.day) - 1;
    // from 0000-03-01 to 1970-01-01
    year * 365 + leap_days + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(text: &str) -> Result<i64, String> {
        let written = text.parse().expect("it is TOML");
        let instant = instant(&written).map_err(|problem| problem.message)?;
        Ok(match instant.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).expect("it fits"),
            Err(before) => -i64::try_from(before.duration().as_secs()).expect("it fits"),
        })
    }

    #[test]
    fn dates_and_times_are_points_in_time() {
        // each as `date --utc --date … +%s` prints it
        for (text, expected) in [
            ("1970-01-01", 0),
            ("1970-01-01T00:00:00Z", 0),
            ("1969-12-31T23:59:59Z", -1),
            ("2000-02-29T12:00:00Z", 951_825_600),
            ("2000-03-01", 951_868_800),
            ("2027-01-31T00:00:00Z", 1_801_353_600),
            ("2027-01-31T01:00:00+01:00", 1_801_353_600),
            ("2027-01-30T19:00:00-05:00", 1_801_353_600),
            ("2100-03-01", 4_107_542_400),
            ("0000-01-01", -62_167_219_200),
            ("9999-12-31T23:59:59Z", 253_402_300_799),
        ] {
            assert_eq!(seconds(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_time_without_its_zone_or_its_date_is_refused() {
        for text in ["2027-01-31T00:00:00", "12:00:00"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut last = None;
        for year in 1899..=2401 {
            for month in 1..=12 {
                let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
                let days = [
                    31,
                    28 + u8::from(leap),
                    31,
                    30,
                    31,
                    30,
                    31,
                    31,
                    30,
                    31,
                    30,
                    31,
                ];
                for day in 1..=days[usize::from(month) - 1] {
                    let number = days_since_1970(Date { year, month, day });
                    assert!(
                        last.is_none_or(|last| number == last + 1),
                        "{year}-{month}-{day}"
                    );
                    last = Some(number);
                }
            }
        }
    }
}
