//! Exact decimals for numbers in answers, prices, weights and scales. Without binary fractions,
//! 55.2 rounds up to 56 and 140 stays 140.

use std::fmt;

/// Numbers with more characters are ignored.
pub const MAX_NUMBER_CHARS: usize = 40;

/// The largest value of a counter: the largest integer of a structured field (RFC 9651 §3.3.1).
pub const MAX_VALUE: u64 = 999_999_999_999_999;

/// Decimal places that a configured decimal may have.
const MAX_PLACES: u8 = 9;

/// A decimal of at least 0 with at most nine decimal places, as in configurations: `2.50`, `0.075`,
/// `1_000_000`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Decimal {
    /// In units of 10⁻⁹.
    nanos: u64,
}

impl Decimal {
    /// 0.
    pub const ZERO: Decimal = Decimal { nanos: 0 };

    /// 1.
    pub const ONE: Decimal = Decimal { nanos: NANOS };

    /// Parses digits with at most one point; `_` may separate digits. `None` for any other text,
    /// more than nine places, or values above 18,446,744,073.
    pub fn parse(text: &str) -> Option<Decimal> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let whole = digits(whole)?;
        let places = u8::try_from(fraction.len()).ok()?;
        if places > MAX_PLACES || fraction.contains('_') {
            return None;
        }
        let fraction =
            digits(fraction)?.checked_mul(10_u64.checked_pow(u32::from(MAX_PLACES - places))?)?;
        let nanos = whole.checked_mul(NANOS)?.checked_add(fraction)?;
        Some(Decimal { nanos })
    }

    /// The value in units of 10⁻⁹.
    pub fn nanos(self) -> u64 {
        self.nanos
    }

    /// From units of 10⁻⁹.
    pub const fn from_nanos(nanos: u64) -> Decimal {
        Decimal { nanos }
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.nanos / NANOS, self.nanos % NANOS);
        if fraction == 0 {
            return write!(f, "{whole}");
        }
        let fraction = format!("{fraction:09}");
        write!(f, "{whole}.{}", fraction.trim_end_matches('0'))
    }
}

impl fmt::Debug for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const NANOS: u64 = 1_000_000_000;

/// Parses at least one digit, with single `_` between digits.
fn digits(text: &str) -> Option<u64> {
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") || text.is_empty() {
        return None;
    }
    let mut bytes = text.bytes().filter(|&byte| byte != b'_');
    bytes.try_fold(0_u64, |value, byte| {
        let digit = char::from(byte).to_digit(10)?;
        value.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Multiplies a JSON number by `scale`, and rounds up to a whole number of at most [`MAX_VALUE`].
/// `None` for negative numbers, numbers longer than [`MAX_NUMBER_CHARS`] and anything else.
pub fn scaled_up(text: &[u8], scale: Decimal) -> Option<u64> {
    let number = Notation::parse(text)?;
    let mut product = Product {
        digits: [0; Product::DIGITS],
    };
    product.multiply(number.digits(), scale.nanos);
    // The product is in units of 10^(exponent − 9).
    let exponent = number.exponent.checked_sub(9)?;
    Some(product.rounded_up(exponent))
}

/// A number's digits without the point, and their power of ten.
struct Notation {
    digits: [u8; MAX_NUMBER_CHARS],
    count: usize,
    exponent: i32,
}

impl Notation {
    fn digits(&self) -> &[u8] {
        self.digits.get(..self.count).unwrap_or_default()
    }

    /// Parses `12`, `12.5`, `1.2e3` or `1E-3`.
    fn parse(text: &[u8]) -> Option<Notation> {
        if text.len() > MAX_NUMBER_CHARS {
            return None;
        }
        let mut number = Notation {
            digits: [0; MAX_NUMBER_CHARS],
            count: 0,
            exponent: 0,
        };
        let at = text.iter().position(|byte| matches!(byte, b'e' | b'E'));
        let (mantissa, exponent) = match at {
            Some(at) => (text.get(..at)?, Some(text.get(at + 1..)?)),
            None => (text, None),
        };
        let mut point = false;
        for byte in mantissa {
            match byte {
                b'0'..=b'9' => {
                    *number.digits.get_mut(number.count)? = byte - b'0';
                    number.count += 1;
                    number.exponent -= i32::from(point);
                }
                // A digit must precede the point.
                b'.' if !point && number.count > 0 => point = true,
                _ => return None,
            }
        }
        if number.count == 0 || mantissa.last() == Some(&b'.') {
            return None;
        }
        if let Some(exponent) = exponent {
            number.exponent = number.exponent.checked_add(power(exponent)?)?;
        }
        Some(number)
    }
}

/// Parses an exponent. Huge ones are capped.
fn power(text: &[u8]) -> Option<i32> {
    const HUGE: i32 = 1_000_000;
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let magnitude = digits.iter().fold(0_i32, |value, byte| {
        (value * 10 + i32::from(byte - b'0')).min(HUGE)
    });
    Some(if negative { -magnitude } else { magnitude })
}

/// The product of a 40-digit and a 20-digit number, digit by digit.
struct Product {
    /// Least significant digit first.
    digits: [u8; Product::DIGITS],
}

impl Product {
    const DIGITS: usize = MAX_NUMBER_CHARS + 20;

    fn multiply(&mut self, digits: &[u8], factor: u64) {
        let mut carry = 0_u128;
        let mut digits = digits.iter().rev();
        for place in &mut self.digits {
            let digit = digits.next().copied().unwrap_or(0);
            carry += u128::from(digit) * u128::from(factor);
            *place = (carry % 10) as u8;
            carry /= 10;
        }
    }

    /// The value in units of 10^`exponent`, rounded up.
    fn rounded_up(&self, exponent: i32) -> u64 {
        let mut value = 0_u64;
        let mut fraction = false;
        let places = (0..Product::DIGITS as i32).rev();
        for (place, &digit) in places.zip(self.digits.iter().rev()) {
            if digit == 0 {
                if place + exponent >= 0 {
                    value = value.saturating_mul(10);
                }
                continue;
            }
            match place + exponent {
                power if power < 0 => fraction = true,
                _ => value = value.saturating_mul(10).saturating_add(u64::from(digit)),
            }
        }
        // Shift in zeros for positive exponents.
        for _ in 0..exponent.clamp(0, 20) {
            value = value.saturating_mul(10);
        }
        value.saturating_add(u64::from(fraction)).min(MAX_VALUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<u64> {
        scaled_up(text.as_bytes(), Decimal::ONE)
    }

    #[test]
    fn numbers_are_rounded_up_in_decimal() {
        let million = Decimal::parse("1_000_000").expect("it is a decimal");
        for (text, plain, scaled) in [
            ("0", 0, 0),
            ("46", 46, 46_000_000),
            ("0.00014", 1, 140),
            ("5.52e-05", 1, 56),
            ("1.2e3", 1_200, 1_200_000_000),
            ("1.2E+3", 1_200, 1_200_000_000),
            ("0.3", 1, 300_000),
            ("100.000", 100, 100_000_000),
            ("100.0000001", 101, 100_000_001),
            ("999999999999999", MAX_VALUE, MAX_VALUE),
            ("99999999999999999999999999", MAX_VALUE, MAX_VALUE),
            ("1e999999999999", MAX_VALUE, MAX_VALUE),
            ("1e-999999999999", 1, 1),
            ("0e999999999999", 0, 0),
            ("0000000000000000000000000000000000000007", 7, 7_000_000),
        ] {
            assert_eq!(read(text), Some(plain), "{text}");
            assert_eq!(scaled_up(text.as_bytes(), million), Some(scaled), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_of_at_least_zero_is_nothing() {
        let long = "1".repeat(MAX_NUMBER_CHARS + 1);
        for text in [
            "", "-", "-1", "-0", "+1", ".5", "5.", "1.2.3", "1e", "1e+", "1e1.5", "1-2", "e5",
            "1ee5", &long,
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn decimals_are_kept_exactly() {
        for (text, nanos, shown) in [
            ("2.50", 2_500_000_000, "2.5"),
            ("0.075", 75_000_000, "0.075"),
            ("0", 0, "0"),
            ("1_000_000", 1_000_000_000_000_000, "1000000"),
            ("0.000000001", 1, "0.000000001"),
        ] {
            let decimal = Decimal::parse(text).expect(text);
            assert_eq!(
                (decimal.nanos(), decimal.to_string().as_str()),
                (nanos, shown)
            );
        }
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "-1",
            "+1",
            "1e3",
            "1.0000000001",
            "1__0",
            "_1",
            "1.1_0",
            "18446744074",
            "٣",
        ] {
            assert_eq!(Decimal::parse(text), None, "{text}");
        }
    }
}
