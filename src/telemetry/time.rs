//! A moment as RFC 3339 text, without a calendar library.

use std::time::{SystemTime, UNIX_EPOCH};

/// `2026-11-20`, in UTC.
pub fn date(at: SystemTime) -> String {
    let text = rfc3339_millis(at);
    text[..10].iter().map(|&byte| char::from(byte)).collect()
}

/// As `rfc3339_millis`, for whoever wants a text.
pub fn moment(at: SystemTime) -> String {
    rfc3339_millis(at)
        .iter()
        .map(|&byte| char::from(byte))
        .collect()
}

/// `2026-11-20T08:15:30.123Z`; moments before 1970 are shown as 1970, after 9999 as the end of 9999.
pub(super) fn rfc3339_millis(at: SystemTime) -> [u8; 24] {
    // 9999-12-31T23:59:59.999Z
    const LAST_MS: u128 = 253_402_300_799_999;
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    // LAST_MS fits u64
    let ms = since.as_millis().min(LAST_MS) as u64;
    let (days, ms_of_day) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = civil(days);
    let mut text = *b"0000-00-00T00:00:00.000Z";
    put(&mut text[0..4], year);
    put(&mut text[5..7], month);
    put(&mut text[8..10], day);
    put(&mut text[11..13], ms_of_day / 3_600_000);
    put(&mut text[14..16], ms_of_day / 60_000 % 60);
    put(&mut text[17..19], ms_of_day / 1000 % 60);
    put(&mut text[20..23], ms_of_day % 1000);
    text
}

fn put(digits: &mut [u8], mut value: u64) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

/// Days since 1970-01-01 to (year, month, day): Howard Hinnant's `civil_from_days`, for days that are not negative.
///
/// Years are counted from 1 March, so that the leap day is the last of its year and months follow one formula.
fn civil(days: u64) -> (u64, u64, u64) {
    let since_0000_03_01 = days + 719_468;
    let era = since_0000_03_01 / 146_097;
    let day_of_era = since_0000_03_01 % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
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
