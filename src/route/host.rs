//! Normalises hosts and matches them against patterns.
//!
//! The normal form is lower-case, without a port and without the final dot of a fully qualified
//! name: `API.Example.COM.:8080` becomes `api.example.com`.

use std::borrow::Cow;

/// The longest DNS name (RFC 1035 §2.3.4), as text without the final dot.
const NAME_MAX_BYTES: usize = 253;

/// Normalises the value of `Host` or `:authority`. Never fails and is idempotent: an invalid host
/// becomes text that no pattern matches. Allocates only to lower-case letters.
pub fn normalise(host: &str) -> Cow<'_, str> {
    if is_normal(host) {
        return Cow::Borrowed(host);
    }
    let place = |wanted: u8| host.bytes().position(|byte| byte == wanted);
    let port = match host.starts_with('[').then(|| place(b']')).flatten() {
        // colons inside brackets belong to an IPv6 literal
        Some(bracket) => Some(bracket + 1).filter(|&end| host[end..].starts_with(':')),
        None => place(b':'),
    };
    let name = &host[..port.unwrap_or(host.len())];
    let name = name.trim_end_matches('.');
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    }
}

/// Whether the host is certainly in normal form, as nearly every host is. The loop has no branch
/// per byte, so it can be vectorised.
fn is_normal(host: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() | byte.is_ascii_digit() | (byte == b'-');
    let bytes = host.as_bytes();
    let all_plain = bytes.iter().fold(true, |plain, &byte| {
        plain & (is_plain(byte) | (byte == b'.'))
    });
    all_plain && !host.ends_with('.')
}

/// The host to look up. A host too long to be a name becomes empty, so its length costs nothing.
pub(super) fn for_lookup(host: &str) -> &str {
    match host.len() <= NAME_MAX_BYTES {
        true => host,
        false => "",
    }
}

/// A validated entry of [`Pattern::hosts`](super::Pattern::hosts).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HostPattern {
    Exact(Box<str>),
    /// The text after `*.`; matches one or more labels in front of it.
    Below(Box<str>),
}

impl HostPattern {
    /// On failure, returns the problem and how to fix it.
    pub(super) fn parse(text: &str) -> Result<HostPattern, (String, String)> {
        let lower = text.to_ascii_lowercase();
        let wrong = |problem: &str, hint: String| Err((format!("host `{text}` {problem}"), hint));
        if text == "*" {
            return wrong("is not a name", "omit `hosts` to match any host".to_owned());
        }
        if text.contains("://") || text.contains('/') {
            return wrong(
                "is a URL, not a name",
                "write only the name, such as `api.example.com`".to_owned(),
            );
        }
        let normal = normalise(&lower);
        let (below, name) = match normal.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, &*normal),
        };
        if name.contains('*') {
            let hint = "write `*.example.com`, or list the names".to_owned();
            return wrong("has a `*` that is not the whole first label", hint);
        }
        if !is_name(name) && (below || !is_ipv6_literal(name)) {
            let hint = "use labels of letters, digits, `-` and `_`, such as `api.example.com`";
            return wrong("is not a host name", hint.to_owned());
        }
        if *normal != lower {
            let hint = format!("write `{normal}`: matching ignores ports and final dots");
            return wrong("has a port or a final dot", hint);
        }
        let name = name.into();
        Ok(if below {
            HostPattern::Below(name)
        } else {
            HostPattern::Exact(name)
        })
    }
}

fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    name.len() <= NAME_MAX_BYTES && name.split('.').all(is_label)
}

fn is_ipv6_literal(name: &str) -> bool {
    name.strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok())
}

/// The parent names of `host`, longest first: `b.example.com`, `example.com`, `com` for
/// `a.b.example.com`.
pub(super) fn parents(host: &str) -> impl Iterator<Item = &str> {
    host.match_indices('.')
        .filter(|&(at, _)| at > 0)
        .map(|(at, _)| &host[at + 1..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn host_has_one_spelling() {
        for (host, normal) in [
            ("a.example", "a.example"),
            ("A.Example:8080", "a.example"),
            ("a.example.", "a.example"),
            ("a.example.:80", "a.example"),
            ("a.example:", "a.example"),
            ("[::1]", "[::1]"),
            ("[2001:DB8::1]:80", "[2001:db8::1]"),
            ("", ""),
            (":", ""),
        ] {
            assert_eq!(normalise(host), normal, "{host}");
        }
        assert!(matches!(normalise("a.example:80"), Cow::Borrowed(_)));
    }

    #[test]
    fn pattern_that_could_never_match_is_refused_with_a_hint() {
        for (text, hint) in [
            ("*", "omit `hosts`"),
            ("https://a.example", "only the name"),
            ("a.example:80", "write `a.example`"),
            ("a.example.", "write `a.example`"),
            ("a.*.example", "`*.example.com`"),
            ("*a.example", "`*.example.com`"),
            ("", "labels"),
            ("a..example", "labels"),
            ("a b", "labels"),
            ("[::1", "labels"),
            ("*.[::1]", "labels"),
        ] {
            let (_, given) = HostPattern::parse(text).expect_err(text);
            assert!(given.contains(hint), "{text}: {given}");
        }
        assert_eq!(
            HostPattern::parse("*.Example.com"),
            Ok(HostPattern::Below("example.com".into()))
        );
        assert_eq!(
            HostPattern::parse("[::1]"),
            Ok(HostPattern::Exact("[::1]".into()))
        );
    }

    #[test]
    fn parents_come_longest_first() {
        assert_eq!(
            parents("a.b.example.com").collect::<Vec<_>>(),
            ["b.example.com", "example.com", "com"]
        );
        assert_eq!(parents(".example").count(), 0);
    }

    #[test]
    fn longest_name_is_looked_for_and_a_longer_one_is_not() {
        let longest = "a.".repeat(126) + "b";
        assert_eq!(for_lookup(&longest), longest);
        assert_eq!(for_lookup(&format!("{longest}c")), "");
        assert_eq!(for_lookup(&"a.".repeat(10_000)), "");
    }

    proptest! {
        #[test]
        fn normal_host_is_its_own_normal_form(host in "[a-zA-Z.:\\[\\]0-9]{0,12}|\\PC*") {
            let normal = normalise(&host);
            prop_assert_eq!(normalise(&normal), normal.clone());
        }
    }
}
