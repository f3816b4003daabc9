//! JSON strings from untrusted bytes.
//!
//! Both callers (access lines and rejection bodies) are on the request path and write into reused
//! buffers. A JSON value tree would allocate for each field.

use bytes::BufMut;

/// Appends `value` as a JSON string with quotes (RFC 8259 §7).
///
/// Bytes that are not UTF-8 become U+FFFD. All control characters are escaped, including DEL and
/// C1, which JSON allows, because they could control a terminal. Writes at most `max_bytes` of the
/// value; a longer one ends in `…`. Allocates only if the buffer grows.
pub fn put_string(out: &mut impl BufMut, value: &[u8], max_bytes: usize) {
    out.put_u8(b'"');
    put_escaped(out, value, max_bytes);
    out.put_u8(b'"');
}

/// Like [`put_string`] without the quotes, to assemble one string from several parts.
pub fn put_escaped(out: &mut impl BufMut, value: &[u8], max_bytes: usize) {
    let (kept, cut) = match value.get(..max_bytes) {
        Some(head) if value.len() > max_bytes => (without_split_char(head), true),
        _ => (value, false),
    };
    // true for nearly every value; the path below costs ten times as much. No branch per byte, so
    // it vectorises
    if kept
        .iter()
        .fold(true, |plain, &byte| plain & is_plain(byte))
    {
        out.put_slice(kept);
    } else {
        put_unusual(out, kept);
    }
    if cut {
        out.put_slice("…".as_bytes());
    }
}

/// Visible ASCII and space, except for characters that JSON escapes.
fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') & (byte != b'"') & (byte != b'\\')
}

fn put_unusual(out: &mut impl BufMut, value: &[u8]) {
    for chunk in value.utf8_chunks() {
        put_valid(out, chunk.valid());
        if !chunk.invalid().is_empty() {
            out.put_slice("\u{fffd}".as_bytes());
        }
    }
}

/// Copies runs of plain characters whole and escapes the others.
fn put_valid(out: &mut impl BufMut, text: &str) {
    let mut copied = 0;
    for (at, c) in text.char_indices() {
        if c != '"' && c != '\\' && !c.is_control() {
            continue;
        }
        out.put_slice(&text.as_bytes()[copied..at]);
        copied = at + c.len_utf8();
        match c {
            '"' => out.put_slice(b"\\\""),
            '\\' => out.put_slice(b"\\\\"),
            '\n' => out.put_slice(b"\\n"),
            '\r' => out.put_slice(b"\\r"),
            '\t' => out.put_slice(b"\\t"),
            control => {
                // every control character is below U+00A0
                const HEX: &[u8; 16] = b"0123456789abcdef";
                let code = u32::from(control) as usize;
                out.put_slice(&[b'\\', b'u', b'0', b'0', HEX[code >> 4 & 15], HEX[code & 15]]);
            }
        }
    }
    out.put_slice(&text.as_bytes()[copied..]);
}

/// Removes an incomplete character (at most three bytes) from the end of `head`.
fn without_split_char(head: &[u8]) -> &[u8] {
    let start = head
        .iter()
        .rposition(|byte| byte & 0b1100_0000 != 0b1000_0000);
    match start {
        Some(start) if head[start] >= 0x80 && std::str::from_utf8(&head[start..]).is_err() => {
            &head[..start]
        }
        _ => head,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn string(value: &[u8], max_bytes: usize) -> String {
        let mut out = Vec::new();
        put_string(&mut out, value, max_bytes);
        String::from_utf8(out).expect("the escaper writes UTF-8")
    }

    #[test]
    fn quotes_backslashes_and_controls_are_escaped() {
        assert_eq!(
            string(b"a\"b\\c\nd\r\t\x00\x1b[2J\x7f", 99),
            r#""a\"b\\c\nd\r\t\u0000\u001b[2J\u007f""#
        );
        assert_eq!(string("\u{9b}2J é".as_bytes(), 99), "\"\\u009b2J é\"");
    }

    #[test]
    fn bytes_that_are_not_text_are_replaced() {
        assert_eq!(string(b"a\xff\xfeb", 99), "\"a\u{fffd}\u{fffd}b\"");
    }

    #[test]
    fn a_long_value_is_cut_between_characters_and_says_so() {
        assert_eq!(string(b"abcdef", 3), "\"abc…\"");
        assert_eq!(string(b"abc", 3), "\"abc\"");
        assert_eq!(string("aéé".as_bytes(), 2), "\"a…\"");
        assert_eq!(string("aéé".as_bytes(), 3), "\"aé…\"");
        assert_eq!(string(b"abc", 0), "\"…\"");
    }

    proptest! {
        #[test]
        fn any_text_survives_the_round_trip(text in ".*") {
            let read: String = serde_json::from_str(&string(text.as_bytes(), usize::MAX)).expect("it is JSON");
            prop_assert_eq!(read, text);
        }

        #[test]
        fn any_bytes_cut_anywhere_are_one_line_of_json(bytes: Vec<u8>, max in 0_usize..40) {
            let written = string(&bytes, max);
            prop_assert!(serde_json::from_str::<String>(&written).is_ok());
            prop_assert!(!written.contains('\n'));
        }
    }
}
