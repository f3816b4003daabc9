//! What clients write into queries, cookies, paths and bodies, in the one form in which it is counted.
//!
//! A client chooses how it spells a value, and an upstream may take many spellings for one: `Alice`, ` alice` and `%61lice`
//! are the same login name for most. So a value is percent-decoded once, freed of white space around it, and folded without
//! regard to case. Two users whose names differ in nothing else are merged: the safe side for a limit, which then is
//! stricter than meant and never looser. Names of parameters are compared in the same way, since some upstreams do so.
//!
//! A value given more than once says different things to different parsers: some take the first, some the last. Were all of them
//! part of the key, a client could repeat the true value beside a random one and have a new bucket each time. So
//! differing values are one value, [`Given::Unclear`], the same for everybody: it gives one bucket more, and no further one.

use std::borrow::Cow;

use http::HeaderValue;

/// What a request says about one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Given {
    /// Nothing, or only white space.
    #[default]
    Nothing,
    /// One text, folded.
    Text(String),
    /// Different texts, or something that is no text.
    Unclear,
}

impl Given {
    /// Takes in one occurrence, decoded and not yet folded.
    pub(super) fn add(&mut self, value: &str) {
        let folded: String = folded(value).collect();
        match self {
            _ if folded.is_empty() => {}
            Given::Nothing => *self = Given::Text(folded),
            Given::Text(known) if *known == folded => {}
            Given::Text(_) | Given::Unclear => *self = Given::Unclear,
        }
    }
}

/// A query's parameters of this name (`application/x-www-form-urlencoded`, WHATWG URL §5.1). Linear in the query.
pub(super) fn in_query(query: &str, name: &str) -> Given {
    let mut given = Given::default();
    for (found, value) in pairs(query.as_bytes()) {
        if same(&found, name) {
            given.add(&value);
        }
    }
    given
}

/// The cookies of this name in all lines (RFC 6265 §4.2.1). Quotes around a value and percent-encoding are taken off,
/// as many upstreams do. A value with a backslash or another quote is unclear: neither may stand in a cookie (RFC 6265
/// `cookie-octet`), and some servers (Python's `http.cookies`) take `"\141"` for `a`, others as it is. Linear in the lines.
pub(super) fn in_cookies<'h>(lines: impl Iterator<Item = &'h HeaderValue>, name: &str) -> Given {
    let mut given = Given::default();
    let cookies = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    for cookie in cookies {
        let (found, value) = split_pair(cookie);
        if same(&String::from_utf8_lossy(found), name) {
            let value = value.trim_ascii();
            let unquoted = value
                .strip_prefix(b"\"")
                .and_then(|value| value.strip_suffix(b"\""));
            let value = unquoted.unwrap_or(value);
            if value.iter().any(|byte| matches!(byte, b'\\' | b'"')) {
                given = Given::Unclear;
            }
            given.add(&decode(value, false));
        }
    }
    given
}

/// A parameter of a path, folded.
pub(super) fn folded_param(raw: &str) -> String {
    folded(&decode(raw.as_bytes(), false)).collect()
}

/// The names and values of a form, decoded.
pub(super) fn pairs(form: &[u8]) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form.split(|byte| *byte == b'&').map(|pair| {
        let (name, value) = split_pair(pair);
        (decode(name, true), decode(value, true))
    })
}

/// Whether two names are one when folded.
pub(super) fn same(one: &str, other: &str) -> bool {
    folded(one).eq(folded(other))
}

/// A text without white space around it and without regard to case. Character by character: what stands beside a character
/// changes nothing, so `ς` is `σ`. Upper case comes first because some lower-case letters share one: `ſ` is `s`.
pub(super) fn folded(text: &str) -> impl Iterator<Item = char> {
    text.trim()
        .chars()
        .flat_map(char::to_uppercase)
        .flat_map(char::to_lowercase)
}

fn split_pair(pair: &[u8]) -> (&[u8], &[u8]) {
    match pair.iter().position(|byte| *byte == b'=') {
        Some(equals) => (&pair[..equals], &pair[equals + 1..]),
        None => (pair, &[]),
    }
}

/// Percent-decodes once; `%` without two digits stands for itself, and what is then no UTF-8 becomes U+FFFD.
fn decode(text: &[u8], plus_is_space: bool) -> Cow<'_, str> {
    if !text
        .iter()
        .any(|byte| *byte == b'%' || *byte == b'+' && plus_is_space)
    {
        return String::from_utf8_lossy(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (b'%', [high, low, after @ ..]) if let Some(decoded) = hex(*high, *low) => {
                out.push(decoded);
                rest = after;
            }
            (b'+', _) if plus_is_space => out.push(b' '),
            _ => out.push(*byte),
        }
    }
    Cow::Owned(String::from_utf8_lossy(&out).into_owned())
}

fn hex(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    u8::try_from(digit(high)? << 4 | digit(low)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Given {
        Given::Text(text.to_owned())
    }

    fn cookies(lines: &[&'static str], name: &str) -> Given {
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
        ] {
            assert_eq!(in_query(query, "user"), text("alice"), "{query}");
        }
        assert_eq!(in_query("user=%CE%A3%CF%82", "user"), text("σσ"));
    }

    #[test]
    fn differing_values_are_one_value_whatever_they_are() {
        let one = in_query("user=alice&user=x1", "user");
        assert_eq!(one, Given::Unclear);
        assert_eq!(in_query("user=x2&user=alice&user=alice", "user"), one);
        assert_eq!(cookies(&["user=a; user=b"], "user"), one);
        assert_eq!(cookies(&["user=a", "user=b"], "user"), one);
    }

    #[test]
    fn what_says_nothing_is_no_value() {
        for query in [
            "", "user", "user=", "user=%20", "users=a", "user%=a", "&&=", "a=user",
        ] {
            assert_eq!(in_query(query, "user"), Given::Nothing, "{query}");
        }
    }

    #[test]
    fn escapes_are_decoded_once() {
        assert_eq!(in_query("a=%2561", "a"), text("%61"));
        assert_eq!(in_query("a=%6", "a"), text("%6"));
        assert_eq!(in_query("a=%zz%", "a"), text("%zz%"));
        assert_eq!(in_query("a=%ff", "a"), text("\u{fffd}"));
        assert_eq!(in_query("a=b%2Bc+d", "a"), text("b+c d"));
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
            assert_eq!(cookies(&[line], "sid"), Given::Unclear, "{line}");
        }
        assert_eq!(cookies(&["xsid=ab; x=sid"], "sid"), Given::Nothing);
    }

    #[test]
    fn a_parameter_of_a_path_is_decoded_and_folded() {
        assert_eq!(folded_param("Alice%40Example"), "alice@example");
    }

    proptest! {
        #[test]
        fn folding_twice_is_folding_once(value in ".{0,20}") {
            let once: String = folded(&value).collect();
            let twice: String = folded(&once).collect();
            prop_assert_eq!(once, twice);
        }

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
