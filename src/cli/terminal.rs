//! Text of others on the terminal: a gateway's response may contain terminal commands, or
//! characters that reorder or hide the rest of a line.

use std::fmt::Write as _;

/// Escapes control, format and other invisible characters. Keeps line breaks, quotes and
/// backslashes, so text that is already escaped does not change.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '"' | '\'' | '\\' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    shown
}

/// Like [`printable`], on one line.
pub(super) fn printable_line(text: &str) -> String {
    printable(text).replace('\n', "\\n")
}

/// The same for JSON: such characters occur in strings only, and become `\uXXXX`.
pub(super) fn printable_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for character in json.chars() {
        let is_plain = matches!(character, '\n' | '"' | '\'' | '\\');
        if is_plain || character.escape_debug().len() == 1 {
            shown.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            // writing to a String cannot fail
            let _ = write!(shown, "\\u{unit:04x}");
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_visible_is_escaped() {
        let hostile = "a\u{1b}[2J\u{9b}1m\u{202e}\u{2066}\u{ad}\u{feff}\u{7f}\r\té \"b\" \\u{9b}\n";
        assert_eq!(
            printable(hostile),
            "a\\u{1b}[2J\\u{9b}1m\\u{202e}\\u{2066}\\u{ad}\\u{feff}\\u{7f}\\r\\té \"b\" \\u{9b}\n"
        );
        assert_eq!(printable(&printable(hostile)), printable(hostile));
        assert_eq!(printable_line("a\nb"), "a\\nb");
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({"é\u{9b}": "\u{202e}\u{e0001}\u{7f}\n\"\\"});
        let shown = printable_json(&value.to_string());
        assert!(shown.contains(r"\u202e\udb40\udc01\u007f"), "{shown}");
        let again: serde_json::Value = serde_json::from_str(&shown).expect("it is JSON");
        assert_eq!(again, value);
    }
}
