//! Normalises the values that clients put into queries, cookies, paths and bodies.
//!
//! A client chooses the spelling of a value, and an upstream may accept many. `Alice`, ` alice`,
//! `%61lice` and `ａｌｉｃｅ` are one login name for most. So a value is percent-decoded once and
//! folded. Surrounding white space, case, compatibility forms (NFKD), accents, invisible characters
//! and the script of a digit make no difference. Frameworks and database collations normalise in the
//! same ways: see [`collation`].
//! Two users whose names differ only in these share a bucket, so the limit can be stricter than
//! intended, never looser.
//!
//! Parameter names are folded too. [`may_mean`] tells which of them some upstream reads as the
//! wanted one.
//!
//! Some parsers take the first of several values, others the last. If all of them were part of the
//! key, a client could add a random value each time to get a new bucket. So differing values become
//! the single value [`FieldValue::Unclear`], which adds one bucket in total.

mod collation;

use std::borrow::Cow;

use http::HeaderValue;

use collation::{folded, unaccented};

/// The value of one name in a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum FieldValue {
    /// No value, or only white space.
    #[default]
    Nothing,
    /// One text, folded.
    Text(String),
    /// Different texts, or not readable as text.
    Unclear,
}

impl FieldValue {
    /// Adds one occurrence, decoded but not yet folded. A control character makes it unclear:
    /// parsers end the text there, drop the character or keep it.
    pub(super) fn add(&mut self, value: &str) {
        let folded = folded(value);
        match self {
            _ if folded.contains(is_unclear) => *self = FieldValue::Unclear,
            _ if folded.is_empty() => {}
            FieldValue::Nothing => *self = FieldValue::Text(folded),
            FieldValue::Text(known) if *known == folded => {}
            FieldValue::Text(_) | FieldValue::Unclear => *self = FieldValue::Unclear,
        }
    }

    /// Adds every field of a form that may be the wanted one.
    pub(super) fn add_form(&mut self, form: &[u8], wanted: &str) {
        pairs(form).for_each(|pair| self.add_pair(&pair, wanted));
        if form.contains(&b';') {
            // some parsers treat `;` as a separator
            let split = form.split(|byte| matches!(byte, b'&' | b';'));
            split.for_each(|pair| self.add_pair(&FormField::decode(pair), wanted));
        }
    }

    /// Adds one form field if it may be the wanted one.
    pub(super) fn add_pair(&mut self, pair: &FormField<'_>, wanted: &str) {
        match (pair.name.exact, may_mean(&pair.name.text, wanted)) {
            (true, false) => {}
            (true, true) if pair.value.exact => self.add(&pair.value.text),
            _ => *self = FieldValue::Unclear,
        }
    }
}

/// The query parameters with this name (`application/x-www-form-urlencoded`, WHATWG URL §5.1).
/// Linear in the query.
pub(super) fn in_query(query: &str, name: &str) -> FieldValue {
    let mut given = FieldValue::default();
    given.add_form(query.as_bytes(), name);
    given
}

/// The cookies with this name in all lines (RFC 6265 §4.2.1). Quotes and percent-encoding are
/// removed, as many upstreams do. A backslash or an inner quote makes the value unclear. Neither is
/// allowed in a `cookie-octet` (RFC 6265), and servers differ: Python's `http.cookies` reads
/// `"\141"` as `a`. Linear in the lines.
pub(super) fn in_cookies<'h>(
    lines: impl Iterator<Item = &'h HeaderValue>,
    name: &str,
) -> FieldValue {
    let mut given = FieldValue::default();
    let cookies = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    for cookie in cookies {
        let (found, value) = split_pair(cookie);
        if may_mean(&String::from_utf8_lossy(found), name) {
            let value = value.trim_ascii();
            let unquoted = value
                .strip_prefix(b"\"")
                .and_then(|value| value.strip_suffix(b"\""));
            let value = unquoted.unwrap_or(value);
            if value.iter().any(|byte| matches!(byte, b'\\' | b'"')) {
                given = FieldValue::Unclear;
            }
            given.add(&decode(value, false).text);
        }
    }
    given
}

/// A path parameter, decoded and folded. A path has no unclear values, so control characters and
/// invalid UTF-8 make no difference.
pub(super) fn folded_param(raw: &str) -> String {
    let decoded = decode(raw.as_bytes(), false).text;
    if decoded.contains(is_unclear) {
        return folded(&decoded.replace(is_unclear, ""));
    }
    folded(&decoded)
}

/// Characters that parsers read differently: some end the text there, some drop the character.
fn is_unclear(character: char) -> bool {
    character.is_control() || character == char::REPLACEMENT_CHARACTER
}

/// One form field, decoded.
pub(super) struct FormField<'f> {
    pub(super) name: DecodedText<'f>,
    pub(super) value: DecodedText<'f>,
}

/// A text with its escapes decoded.
pub(super) struct DecodedText<'t> {
    pub(super) text: Cow<'t, str>,
    /// All escapes are well-formed and the bytes are UTF-8, so every parser reads the same text.
    pub(super) exact: bool,
}

impl<'f> FormField<'f> {
    fn decode(pair: &'f [u8]) -> Self {
        let (name, value) = split_pair(pair);
        FormField {
            name: decode(name, true),
            value: decode(value, true),
        }
    }
}

/// The fields of a form.
pub(super) fn pairs(form: &[u8]) -> impl Iterator<Item = FormField<'_>> {
    form.split(|byte| *byte == b'&').map(FormField::decode)
}

/// Whether two names are equal when folded.
pub(super) fn same(one: &str, other: &str) -> bool {
    match one.is_ascii() && other.is_ascii() {
        true => one.trim().eq_ignore_ascii_case(other.trim()),
        false => folded(one) == folded(other),
    }
}

/// Whether some parser reads the name of a form field, parameter or cookie as the wanted one.
///
/// PHP turns `user.name`, `user name` and `user[name` into `user_name`, and ends a name at NUL. In
/// PHP, Rack and qs, brackets index an array: `name[]` and `name[x]` are inside `name`. Rack and qs
/// read `[name]` as `name`. So case is ignored, and any run of characters other than letters and
/// digits is one separator. Separators at the ends are dropped, and a bracket or a control
/// character may end the name. Linear in the name.
pub(super) fn may_mean(found: &str, wanted: &str) -> bool {
    let (found, wanted) = (unaccented(found), unaccented(wanted));
    let mut rest = words(&wanted).peekable();
    let (mut begun, mut gap) = (false, false);
    for character in found.chars() {
        if !character.is_alphanumeric() {
            gap = begun;
            let ends = matches!(character, '[' | ']') || character.is_control();
            if begun && ends && rest.peek().is_none() {
                return true;
            }
            continue;
        }
        if gap && rest.next() != Some(SEPARATOR) {
            return false;
        }
        (begun, gap) = (true, false);
        if !character
            .to_lowercase()
            .all(|lower| rest.next() == Some(lower))
        {
            return false;
        }
    }
    rest.peek().is_none()
}

/// Separates the words of a name.
const SEPARATOR: char = '_';

/// The words of a name, in lower case, joined by [`SEPARATOR`].
fn words(name: &str) -> impl Iterator<Item = char> {
    let words = name.split(|c: char| !c.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty()).enumerate();
    words.flat_map(|(index, word)| {
        let separator = (index > 0).then_some(SEPARATOR);
        separator
            .into_iter()
            .chain(word.chars().flat_map(char::to_lowercase))
    })
}

fn split_pair(pair: &[u8]) -> (&[u8], &[u8]) {
    match pair.iter().position(|byte| *byte == b'=') {
        Some(equals) => (&pair[..equals], &pair[equals + 1..]),
        None => (pair, &[]),
    }
}

/// Percent-decodes once. A `%` without two hexadecimal digits is kept, and invalid UTF-8 becomes
/// U+FFFD.
fn decode(text: &[u8], plus_is_space: bool) -> DecodedText<'_> {
    let is_escape = |byte: &u8| *byte == b'%' || *byte == b'+' && plus_is_space;
    if !text.iter().any(is_escape) {
        let text = String::from_utf8_lossy(text);
        let exact = matches!(text, Cow::Borrowed(_));
        return DecodedText { text, exact };
    }
    let mut out = Vec::with_capacity(text.len());
    let mut exact = true;
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (b'%', [high, low, after @ ..]) if let Some(decoded) = hex(*high, *low) => {
                out.push(decoded);
                rest = after;
            }
            (b'+', _) if plus_is_space => out.push(b' '),
            _ => {
                exact &= *byte != b'%';
                out.push(*byte);
            }
        }
    }
    match String::from_utf8(out) {
        Ok(text) => DecodedText {
            text: Cow::Owned(text),
            exact,
        },
        Err(invalid) => DecodedText {
            text: Cow::Owned(String::from_utf8_lossy(invalid.as_bytes()).into_owned()),
            exact: false,
        },
    }
}

fn hex(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    u8::try_from(digit(high)? << 4 | digit(low)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> FieldValue {
        FieldValue::Text(text.to_owned())
    }

    fn cookies(lines: &[&'static str], name: &str) -> FieldValue {
        let lines: Vec<_> = lines
            .iter()
            .map(|line| HeaderValue::from_static(line))
            .collect();
        in_cookies(lines.iter(), name)
    }

    #[test]
    fn spellings_of_one_value_are_one_value() {
        for query in [
            "user=alice",
            "%75ser=alice",
            "user=%61lice",
            "user=ALICE",
            "USER=alice",
            "user=+alice%20",
            "a=1&user=alice&b=2",
            "user=alice&user=Alice",
            "user=alice&user",
            "user=&user=alice",
            "u%C5%BFer=alice",
            "user[]=alice",
            "user[0]=alice",
            "%5Buser%5D=alice",
            "user%00x=alice",
            "x=1;user=alice",
            "user=%EF%BD%81lice",
            "user=%C3%A1lice",
            "user=al%C2%ADice%E2%80%8B",
        ] {
            assert_eq!(in_query(query, "user"), text("alice"), "{query}");
        }
        assert_eq!(in_query("user=%CE%A3%CF%82", "user"), text("σσ"));
    }

    #[test]
    fn differing_values_are_one_value_whatever_they_are() {
        let one = in_query("user=alice&user=x1", "user");
        assert_eq!(one, FieldValue::Unclear);
        assert_eq!(in_query("user=x2&user=alice&user=alice", "user"), one);
        assert_eq!(cookies(&["user=a; user=b"], "user"), one);
        assert_eq!(cookies(&["user=a", "user=b"], "user"), one);
    }

    #[test]
    fn what_says_nothing_is_no_value() {
        for query in [
            "",
            "user",
            "user=",
            "user=%20",
            "users=a",
            "user_2=a",
            "user.x=a",
            "user2[]=a",
            "x[user]=a",
            "%00user2=a",
            "&&=",
            "a=user",
            "[=a",
        ] {
            assert_eq!(in_query(query, "user"), FieldValue::Nothing, "{query}");
        }
    }

    #[test]
    fn escapes_are_decoded_once() {
        assert_eq!(in_query("a=%2561", "a"), text("%61"));
        assert_eq!(in_query("a=b%2Bc+d", "a"), text("b+c d"));
    }

    #[test]
    fn what_parsers_decode_differently_is_one_value_for_all() {
        for query in [
            "a=%6",
            "a=%zz%",
            "a=%u0061",
            "a=%ff",
            "a=%c1%a1",
            "a=b%00c",
            "a=%00b",
            "%u0061=b",
            "%ffa=b",
            "a=b;a=c",
            "a=b;c",
            "a[x]=b&a[y]=c",
        ] {
            assert_eq!(in_query(query, "a"), FieldValue::Unclear, "{query}");
        }
        assert_eq!(in_query("a=b&c=%ff&d=%zz", "a"), text("b"));
    }

    #[test]
    fn names_that_some_parser_takes_for_one_are_one() {
        for found in [
            "user_name",
            "user.name",
            "user name",
            "user[name",
            "user[name]",
            "User-Name",
            " user_name",
            "[user_name]",
            "user_name[]",
            "user_name\0x",
            "user__name",
            "_user_name",
            "uſer_name",
        ] {
            assert!(may_mean(found, "user_name"), "{found}");
        }
        for found in [
            "username",
            "user",
            "user_name_2",
            "user_name2",
            "xuser_name",
            "name",
            "",
            "[]",
            "user[x][name]",
        ] {
            assert!(!may_mean(found, "user_name"), "{found}");
        }
        assert!(may_mean("user[name]", "user.name"));
        assert!(!may_mean("user_name", "username"));
        assert!(may_mean("名前[]", "名前"));
        assert!(
            !may_mean("session.sig", "session"),
            "a signature beside a cookie"
        );
    }

    #[test]
    fn a_name_that_is_long_takes_linear_time() {
        let long = "u[".repeat(1_000_000);
        assert!(!may_mean(&long, "user_name"));
        assert!(!may_mean(&"[".repeat(1_000_000), "u"));
    }

    #[test]
    fn a_cookie_is_its_value_without_quotes() {
        for line in [
            "sid=ab",
            "x=1; sid=ab",
            "sid=\"ab\"",
            " sid = ab ;",
            "SID=%61b",
        ] {
            assert_eq!(cookies(&[line], "sid"), text("ab"), "{line}");
        }
        assert_eq!(cookies(&["sid=a+b"], "sid"), text("a+b"));
        for line in [
            r#"sid="\141b""#,
            r#"sid="a\b""#,
            r#"sid=\141b"#,
            r#"sid="ab"#,
            r#"sid=a"b"#,
            r#"sid="";sid=ab\"#,
        ] {
            assert_eq!(cookies(&[line], "sid"), FieldValue::Unclear, "{line}");
        }
        assert_eq!(cookies(&["xsid=ab; x=sid"], "sid"), FieldValue::Nothing);
    }

    #[test]
    fn a_parameter_of_a_path_is_decoded_and_folded() {
        assert_eq!(folded_param("Alice%40Example"), "alice@example");
        assert_eq!(folded_param("alice%C2%80%DC%B0"), "alice");
        assert_eq!(folded_param("alice%ff"), "alice");
    }

    proptest! {
        #[test]
        fn no_query_and_no_cookie_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let query = String::from_utf8_lossy(&bytes);
            in_query(&query, "a");
            if let Ok(line) = HeaderValue::from_bytes(&bytes) {
                in_cookies([line].iter(), "a");
            }
        }
    }
}
