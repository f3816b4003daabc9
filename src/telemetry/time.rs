//! Times as RFC 3339 text.

use std::time::{SystemTime, UNIX_EPOCH};

use ::time::{Duration as Span, OffsetDateTime};

/// `2026-11-20`, in UTC.
pub fn date(at: SystemTime) -> String {
    let text = rfc3339_millis(at);
    text[..10].iter().map(|&byte| char::from(byte)).collect()
}

/// Like `rfc3339_millis`, as a String.
pub fn moment(at: SystemTime) -> String {
    rfc3339_millis(at)
        .iter()
        .map(|&byte| char::from(byte))
        .collect()
}

/// `2026-11-20T08:15:30.123Z`. Times before 1970 are shown as 1970, those after 9999 as the end of
/// 9999.
pub(super) fn rfc3339_millis(at: SystemTime) -> [u8; 24] {
    // 9999-12-31T23:59:59.999Z
    const LAST_MS: u128 = 253_402_300_799_999;
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = since.as_millis().min(LAST_MS) as i64;
    let moment = OffsetDateTime::UNIX_EPOCH + Span::milliseconds(ms);
    let (year, month, day) = moment.to_calendar_date();
    let (hour, minute, second, milli) = moment.to_hms_milli();
    let mut text = *b"0000-00-00T00:00:00.000Z";
    put(&mut text[0..4], year.unsigned_abs());
    put(&mut text[5..7], u8::from(month).into());
    put(&mut text[8..10], day.into());
    put(&mut text[11..13], hour.into());
    put(&mut text[14..16], minute.into());
    put(&mut text[17..19], second.into());
    put(&mut text[20..23], milli.into());
    text
}

fn put(digits: &mut [u8], mut value: u32) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64, millis: u64) -> String {
        let time = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis);
        String::from_utf8(rfc3339_millis(time).to_vec()).expect("it is ASCII")
    }

    #[test]
    fn known_moments_are_written_as_everybody_writes_them() {
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 1), "2000-02-28T23:59:59.001Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199, 999), "2024-02-29T23:59:59.999Z");
        assert_eq!(at(4_102_444_800, 0), "2100-01-01T00:00:00.000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn moments_out_of_range_are_clamped() {
        assert_eq!(at(253_402_300_800, 0), "9999-12-31T23:59:59.999Z");
        let before = rfc3339_millis(UNIX_EPOCH - Duration::from_secs(1));
        assert_eq!(&before, b"1970-01-01T00:00:00.000Z");
    }
}
