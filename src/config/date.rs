//! Converts a TOML date and time (RFC 3339) to a point in time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::{OffsetDateTime, PrimitiveDateTime};
use toml::value::{Date, Datetime, Offset, Time};

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, quote},
};

/// Parses a point in time as the configuration writes it: RFC 3339, or a date.
pub fn parse_moment(text: &str) -> Result<SystemTime, String> {
    let written = text.parse().map_err(|_| {
        format!(
            "{} is not a date or time: write for example 2027-01-31T18:00:00Z",
            quote(text)
        )
    })?;
    instant(&written).map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// Converts to a point in time. A date alone means midnight UTC. A time without an offset is
/// rejected, since each time zone reads it differently; so is a time without a date.
pub(super) fn instant(written: &Datetime) -> Result<SystemTime, PendingDiagnostic> {
    const HINT: &str = "write for example 2027-01-31 (midnight UTC) or 2027-01-31T18:00:00+01:00";
    let bad = |message: &str| PendingDiagnostic::new(Code::BadDate, message).hint(HINT);
    let date = written
        .date
        .ok_or_else(|| bad(&format!("`{written}` has no date")))?;
    let offset_minutes = match (written.time, written.offset) {
        (None, _) | (_, Some(Offset::Z)) => 0,
        (_, Some(Offset::Custom { minutes })) => i64::from(minutes),
        (Some(_), None) => {
            let message = format!("`{written}` has no time zone");
            return Err(bad(&message).label("add Z for UTC"));
        }
    };
    let time = written.time.unwrap_or(Time {
        hour: 0,
        minute: 0,
        second: None,
        nanosecond: None,
    });
    calendar(date, time)
        .and_then(|moment| moment.checked_sub(time::Duration::minutes(offset_minutes)))
        .and_then(since_1970)
        .ok_or_else(|| bad(&format!("`{written}` cannot be represented")))
}

/// The date and time in UTC; `None` if the calendar has no such day.
fn calendar(date: Date, time: Time) -> Option<PrimitiveDateTime> {
    let month = time::Month::try_from(date.month).ok()?;
    let day = time::Date::from_calendar_date(date.year.into(), month, date.day).ok()?;
    // TOML allows a leap second, which the calendar does not count
    let second = time.second.unwrap_or_default().min(59);
    let nanosecond = time.nanosecond.unwrap_or_default();
    day.with_hms_nano(time.hour, time.minute, second, nanosecond)
        .ok()
}

fn since_1970(moment: PrimitiveDateTime) -> Option<SystemTime> {
    let distance = moment.assume_utc() - OffsetDateTime::UNIX_EPOCH;
    match Duration::try_from(distance.abs()) {
        Ok(after) if !distance.is_negative() => UNIX_EPOCH.checked_add(after),
        Ok(before) => UNIX_EPOCH.checked_sub(before),
        Err(_) => None,
    }
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
        // expected values from `date --utc --date … +%s`
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
}
