//! Normalises paths, so that no spelling of a path evades a limit.
//!
//! The limiter, the router and the upstream must see the same path. So tidegate matches exactly the
//! path that it forwards, after normalising it once, and rejects paths that two parsers could read
//! differently:
//!
//! 1. Bytes outside visible ASCII, `\`, `#` and `?` are rejected. (The query is not part of the
//!    path.)
//! 2. Percent-escapes: rejected are an escape without two hex digits, control characters, `%2F`,
//!    `%5C` and bytes that never occur in UTF-8 (C0, C1, F5 to FF). Unreserved characters (RFC 3986
//!    §2.3) are decoded once. Other escapes get upper-case digits (RFC 3986 §6.2.2).
//! 3. `//` is merged, and `.` and `..` are resolved (RFC 3986 §5.2.4). A path above the root is
//!    rejected, and so is `..;x`, which some servers read as `..`.
//! 4. The result is forwarded. The match key is the result without `;parameters` and without a
//!    trailing slash.
//!
//! Normalisation is idempotent, linear in the path's length, and does not allocate if nothing
//! changes.

use std::borrow::Cow;

/// A normalised path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormalPath<'a> {
    /// The path sent to the upstream: starts with `/`, visible ASCII only.
    pub forward: Cow<'a, str>,
    /// The path that routes and limits match: `forward` without `;parameters` and without a
    /// trailing slash. `/` for the root.
    pub key: Cow<'a, str>,
}

/// A request target in origin form with a normalised path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormalTarget<'a> {
    /// The part before the first `?`.
    pub path: NormalPath<'a>,
    /// The part after the first `?`, unchanged; `None` if there is no `?`.
    pub query: Option<&'a str>,
}

/// Why a path is rejected. Always a client error (400).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The path does not start with `/`. Requests in other forms are handled earlier.
    #[error("the path does not start with a slash")]
    NotOriginForm,
    /// A control character, space, non-ASCII byte, `\`, `#`, or `?` inside a path.
    #[error("the target contains a character that must be percent-encoded")]
    ForbiddenCharacter,
    /// `%` without two hex digits.
    #[error("the path contains a malformed percent-escape")]
    MalformedEscape,
    /// An escaped control character, slash, backslash, or byte that never occurs in UTF-8.
    #[error("the path contains a percent-escape of a character that servers decode differently")]
    ForbiddenEscape,
    /// More `..` than segments before it.
    #[error("the path goes above the root with `..`")]
    AboveRoot,
    /// `/..;x/`: some servers read a dot segment, others a name.
    #[error("the path contains a dot segment with a parameter")]
    DotWithParameter,
}

/// Normalises a path without query.
///
/// Fails if two servers could read the path differently; the request is then answered 400 and not
/// forwarded. Borrows a path that is already normal, otherwise allocates at most twice its length.
pub fn normalise(raw_path: &str) -> Result<NormalPath<'_>, PathError> {
    let found = scan(raw_path.as_bytes())?;
    if found.needs_rewrite {
        let forward = rewrite(raw_path)?;
        let key = match_key(&forward, found.has_parameters).into_owned();
        return Ok(NormalPath {
            forward: Cow::Owned(forward),
            key: Cow::Owned(key),
        });
    }
    Ok(NormalPath {
        forward: Cow::Borrowed(raw_path),
        key: match_key(raw_path, found.has_parameters),
    })
}

/// Normalises a target in origin form. The path is handled by [`normalise`]; the query is only
/// checked for forbidden characters.
pub fn normalise_target(target: &str) -> Result<NormalTarget<'_>, PathError> {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    };
    if query.is_some_and(|query| query.bytes().any(|byte| byte != b'?' && is_forbidden(byte))) {
        return Err(PathError::ForbiddenCharacter);
    }
    Ok(NormalTarget {
        path: normalise(path)?,
        query,
    })
}

/// The result of scanning a path once.
struct Scan {
    /// The path is, or may be, not normal. [`rewrite`] decides.
    needs_rewrite: bool,
    /// The path contains `;`.
    has_parameters: bool,
}

/// Checks every byte and escape, and detects whether the path needs changes.
fn scan(path: &[u8]) -> Result<Scan, PathError> {
    if path.first() != Some(&b'/') {
        return Err(PathError::NotOriginForm);
    }
    let mut found = Scan {
        needs_rewrite: false,
        has_parameters: false,
    };
    let mut previous = 0;
    for (at, &byte) in path.iter().enumerate() {
        match byte {
            b'/' if previous == b'/' => found.needs_rewrite = true,
            b'.' if previous == b'/' => found.needs_rewrite |= may_be_dot_segment(&path[at..]),
            b';' => found.has_parameters = true,
            b'%' => {
                let (digits, value) = escape(&path[at + 1..])?;
                found.needs_rewrite |=
                    is_unreserved(value) || digits.iter().any(u8::is_ascii_lowercase);
            }
            byte if is_forbidden(byte) => return Err(PathError::ForbiddenCharacter),
            _ => {}
        }
        previous = byte;
    }
    Ok(found)
}

/// Whether a segment that starts with a dot may be `.` or `..`, alone or with a parameter. Escaped
/// dots and `%3b` are rewritten in any case.
fn may_be_dot_segment(from_dot: &[u8]) -> bool {
    let dots = from_dot.iter().take_while(|&&byte| byte == b'.').count();
    let after = &from_dot[dots..];
    dots <= 2 && (matches!(after.first(), None | Some(b'/' | b';')) || after.starts_with(b"%3B"))
}

/// Reads the two digits after `%` and their value.
fn escape(bytes: &[u8]) -> Result<([u8; 2], u8), PathError> {
    let [high, low, ..] = *bytes else {
        return Err(PathError::MalformedEscape);
    };
    let (Some(high_value), Some(low_value)) = (hex(high), hex(low)) else {
        return Err(PathError::MalformedEscape);
    };
    match high_value << 4 | low_value {
        0x00..=0x1f | 0x7f | b'/' | b'\\' | 0xc0 | 0xc1 | 0xf5..=0xff => {
            Err(PathError::ForbiddenEscape)
        }
        value => Ok(([high, low], value)),
    }
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// RFC 3986 §2.3.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

fn is_forbidden(byte: u8) -> bool {
    matches!(byte, 0x00..=0x20 | 0x7f..=0xff | b'\\' | b'#' | b'?')
}

/// Writes the normal form of a path that [`scan`] accepted, segment by segment. A `..` removes the
/// last segment, so every byte is written once and removed at most once.
fn rewrite(path: &str) -> Result<String, PathError> {
    let mut out = String::with_capacity(path.len());
    // the path starts with a slash, so the first piece is empty
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let start = out.len();
        out.push('/');
        push_decoded(segment, &mut out)?;
        match DecodedSegment::of(&out[start + 1..]) {
            DecodedSegment::Name => continue,
            DecodedSegment::DotWithParameter => return Err(PathError::DotWithParameter),
            DecodedSegment::Nothing => out.truncate(start),
            DecodedSegment::Parent => {
                out.truncate(start);
                let parent = out.rfind('/').ok_or(PathError::AboveRoot)?;
                out.truncate(parent);
            }
        }
        if segments.peek().is_none() {
            out.push('/');
        }
    }
    Ok(out)
}

/// Decodes unreserved characters and writes other escapes in upper case.
fn push_decoded(segment: &str, out: &mut String) -> Result<(), PathError> {
    let mut pieces = segment.split('%');
    out.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        let (digits, value) = escape(piece.as_bytes())?;
        if is_unreserved(value) {
            out.push(char::from(value));
        } else {
            out.push('%');
            out.extend(digits.map(|digit| char::from(digit.to_ascii_uppercase())));
        }
        // the two digits are ASCII, so byte 2 is a character boundary
        out.push_str(&piece[2..]);
    }
    Ok(())
}

/// The kind of a decoded segment.
enum DecodedSegment {
    Name,
    /// Empty, or `.`.
    Nothing,
    Parent,
    DotWithParameter,
}

impl DecodedSegment {
    fn of(decoded: &str) -> DecodedSegment {
        if !decoded.starts_with('.') {
            return if decoded.is_empty() {
                DecodedSegment::Nothing
            } else {
                DecodedSegment::Name
            };
        }
        let dots = decoded.len() - decoded.trim_start_matches('.').len();
        let after = &decoded[dots..];
        match dots {
            1 if after.is_empty() => DecodedSegment::Nothing,
            2 if after.is_empty() => DecodedSegment::Parent,
            1 | 2 if after.starts_with(';') || after.starts_with("%3B") => {
                DecodedSegment::DotWithParameter
            }
            _ => DecodedSegment::Name,
        }
    }
}

/// The match key of a normal path.
fn match_key(forward: &str, has_parameters: bool) -> Cow<'_, str> {
    if !has_parameters {
        // a normal path ends with at most one slash
        let key = forward.strip_suffix('/').unwrap_or(forward);
        return Cow::Borrowed(if key.is_empty() { "/" } else { key });
    }
    let mut key = String::with_capacity(forward.len());
    for segment in forward.split('/') {
        let bare = segment.split(';').next().unwrap_or_default();
        if !bare.is_empty() {
            key.push('/');
            key.push_str(bare);
        }
    }
    if key.is_empty() {
        key.push('/');
    }
    Cow::Owned(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn forward_and_key(path: &str) -> (String, String) {
        let normal = normalise(path).expect("the path is acceptable");
        (normal.forward.into_owned(), normal.key.into_owned())
    }

    #[test]
    fn normal_path_is_borrowed() {
        for path in [
            "/",
            "/login",
            "/login/",
            "/a:b",
            "/a%3Ab",
            "/.well-known/x",
            "/a/...",
            "/a/..b",
            "/caf%C3%A9",
        ] {
            let normal = normalise(path).expect("the path is acceptable");
            assert!(matches!(normal.forward, Cow::Borrowed(_)), "{path}");
            assert!(matches!(normal.key, Cow::Borrowed(_)), "{path}");
            assert_eq!(normal.forward, path);
        }
    }

    #[test]
    fn parameters_change_the_key_but_not_what_is_forwarded() {
        let normal = normalise("/a;x=1/;y/b;z/").expect("the path is acceptable");
        assert!(matches!(normal.forward, Cow::Borrowed("/a;x=1/;y/b;z/")));
        assert_eq!(normal.key, "/a/b");
        assert_eq!(forward_and_key("/;x").1, "/");
    }

    #[test]
    fn every_spelling_of_a_path_has_one_key() {
        for path in [
            "/login",
            "/login/",
            "//login",
            "/./login",
            "/x/../login",
            "/%6cogin",
            "/login;v=1",
            "/login/.",
            "/;a/login//",
        ] {
            assert_eq!(forward_and_key(path).1, "/login", "{path}");
        }
    }

    #[test]
    fn each_refusal_has_its_reason() {
        for (path, error) in [
            ("login", PathError::NotOriginForm),
            ("", PathError::NotOriginForm),
            ("*", PathError::NotOriginForm),
            ("/a b", PathError::ForbiddenCharacter),
            ("/a\\b", PathError::ForbiddenCharacter),
            ("/é", PathError::ForbiddenCharacter),
            ("/a?b", PathError::ForbiddenCharacter),
            ("/a%2", PathError::MalformedEscape),
            ("/a%2/b", PathError::MalformedEscape),
            ("/a%2f", PathError::ForbiddenEscape),
            ("/a%00", PathError::ForbiddenEscape),
            ("/a/../..", PathError::AboveRoot),
            ("/..", PathError::AboveRoot),
            ("/a/..;/b", PathError::DotWithParameter),
            ("/a/%2e%2E%3bx/b", PathError::DotWithParameter),
            ("/a/.;", PathError::DotWithParameter),
        ] {
            assert_eq!(normalise(path), Err(error), "{path}");
        }
    }

    #[test]
    fn query_is_checked_and_kept() {
        let target = normalise_target("//a?b=%6c&c=/../d?e").expect("the target is acceptable");
        assert_eq!(
            (&*target.path.forward, target.query),
            ("/a", Some("b=%6c&c=/../d?e"))
        );
        assert_eq!(
            normalise_target("/a?b#c"),
            Err(PathError::ForbiddenCharacter)
        );
        assert_eq!(normalise_target("/a?").expect("acceptable").query, Some(""));
        assert_eq!(normalise_target("/a").expect("acceptable").query, None);
    }

    /// Paths assembled from the pieces that matter.
    fn tricky_path() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "/", "//", ".", "..", "a", "bc", ";", "%3b", "%3B", "%2e", "%2E", "%6c", "%41", "%20",
            "%25", "%c3%a9", "%2f", "%", "%zz", "~",
        ]);
        prop::collection::vec(piece, 0..12).prop_map(|pieces| format!("/{}", pieces.concat()))
    }

    fn check_normal_form(path: &str) -> Result<(), TestCaseError> {
        let Ok(normal) = normalise(path) else {
            return Ok(());
        };
        let again = normalise(&normal.forward).expect("a normal path is acceptable");
        prop_assert_eq!(&again, &normal);
        prop_assert!(
            matches!(again.forward, Cow::Borrowed(_)),
            "{} is normal but was copied",
            normal.forward
        );
        let key = normalise(&normal.key).expect("a key is a path");
        prop_assert_eq!(&key.forward, &normal.key);
        prop_assert_eq!(&key.key, &normal.key);
        prop_assert!(normal.forward.len() <= path.len().max(1));
        prop_assert!(normal.forward.starts_with('/') && !normal.forward.contains("//"));
        prop_assert!(
            !normal
                .key
                .split('/')
                .any(|segment| matches!(segment, "." | ".."))
        );
        Ok(())
    }

    proptest! {
        #[test]
        fn normal_form_is_a_fixed_point(path in tricky_path()) {
            check_normal_form(&path)?;
        }

        #[test]
        fn no_text_panics(text in "\\PC*", bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            check_normal_form(&text)?;
            let text = String::from_utf8_lossy(&bytes);
            check_normal_form(&text)?;
            let _ = normalise_target(&text);
        }
    }
}
