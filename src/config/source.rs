//! The text of a configuration file, and how to show a line of it without its secrets.
//!
//! A diagnostic shows a line, and a line may hold a secret: an API key pasted in place of its
//! digest, or a password in a URL. The value after a telling name (`token = …`) is masked, even if
//! the key does not exist. So are the user name, the password and the query of a URL. Messages
//! quote values, so [`without_credentials`] masks those in messages too.

use std::{borrow::Cow, ops::Range};

/// Longer lines are not shown; the diagnostic gives only their position.
pub const MAX_LINE_BYTES: usize = 4096;

/// A location in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// The line, with secrets masked; `None` when it is too long to show.
    pub text: Option<String>,
    /// The byte range of `text` to underline.
    pub marked: Range<usize>,
}

/// A named text with its lines.
#[derive(Debug)]
pub(super) struct SourceText {
    name: String,
    text: String,
    line_starts: Vec<usize>,
}

impl SourceText {
    pub(super) fn new(name: &str, text: String) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let line_starts = std::iter::once(0)
            .chain(breaks.map(|(at, _)| at + 1))
            .collect();
        Self {
            name: name.to_owned(),
            text,
            line_starts,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The line of a byte, from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= at)
    }

    /// The location of `span` with its line. A span over several lines is marked to the end of
    /// the first.
    pub(super) fn place(&self, span: Range<usize>) -> SourceLocation {
        let start = self.text.floor_char_boundary(span.start);
        let line = self.line(start);
        let line_start = self.line_starts[line - 1];
        let rest = &self.text[line_start..];
        let text = rest.split('\n').next().unwrap_or(rest);
        let text = text.strip_suffix('\r').unwrap_or(text);
        let marked_start = (start - line_start).min(text.len());
        let end = self
            .text
            .floor_char_boundary(span.end)
            .saturating_sub(line_start);
        let marked_end = end.clamp(marked_start, text.len());
        SourceLocation {
            line,
            column: text[..marked_start].chars().count() + 1,
            text: (text.len() <= MAX_LINE_BYTES).then(|| redact(text)),
            marked: marked_start..marked_end,
        }
    }
}

/// Substrings of key names whose values are never shown.
const SECRET_NAMES: &[&str] = &[
    "secret", "token", "password", "passwd", "sha256", "api_key", "apikey", "private",
];

/// Masks the secrets of a line; byte positions stay the same.
fn redact(line: &str) -> String {
    let mut shown = line.to_owned();
    for (at, _) in line.match_indices('=') {
        let name = line[..at].trim_end().trim_end_matches(['"', '\'']);
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        let name = &name[name.trim_end_matches(is_name).len()..];
        let name = name.to_ascii_lowercase();
        if SECRET_NAMES.iter().any(|secret| name.contains(secret)) && !name.ends_with("_file") {
            mask(&mut shown, value_after(line, at + 1));
        }
    }
    for secret in secrets_of_urls(line) {
        mask(&mut shown, secret);
    }
    shown
}

/// Replaces the user name, the password and the query of every URL in a message by `***`.
pub(super) fn without_credentials(text: &str) -> Cow<'_, str> {
    let mut shown = String::new();
    let mut copied = 0;
    for secret in secrets_of_urls(text) {
        shown.push_str(&text[copied..secret.start]);
        shown.push_str("***");
        copied = secret.end;
    }
    if copied == 0 {
        return text.into();
    }
    shown.push_str(&text[copied..]);
    shown.into()
}

/// Where URLs have user names, passwords and queries, in order.
fn secrets_of_urls(text: &str) -> Vec<Range<usize>> {
    let mut found = credentials_in(text);
    found.extend(queries_in(text));
    found.sort_by_key(|range| range.start);
    found.dedup_by(|next, last| {
        let overlaps = next.start <= last.end;
        if overlaps {
            last.end = last.end.max(next.end);
        }
        overlaps
    });
    found
}

/// Where URLs have queries, which may hold an access key: from `?` to the quote that ends the URL,
/// or to white space if it is not quoted.
fn queries_in(text: &str) -> impl Iterator<Item = Range<usize>> {
    text.match_indices("://").filter_map(|(at, _)| {
        let is_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        let before = text[..at].trim_end_matches(is_scheme);
        let quote = before.chars().next_back();
        let rest = &text[at..];
        let end = match quote.filter(|quote| matches!(quote, '"' | '\'' | '`')) {
            Some(quote) => {
                let mut is_escaped = false;
                rest.find(|c| {
                    let ends = c == quote && !is_escaped;
                    is_escaped = c == '\\' && quote == '"' && !is_escaped;
                    ends
                })
            }
            None => rest.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`')),
        };
        let end = end.unwrap_or(rest.len());
        let query = rest[..end].find('?')? + 1;
        (query < end).then_some(at + query..at + end)
    })
}

/// Where URLs have user names and passwords: between `://` and the last `@` before a quote, since a
/// password may have any character that its author forgot to escape. Some keys take
/// `USER:PASSWORD@HOST` without a scheme; that text itself, which hints show, is no secret.
fn credentials_in(text: &str) -> Vec<Range<usize>> {
    const SCHEME_END: &str = "://";
    let mut found = Vec::new();
    let mut start = 0;
    for part in text.split_inclusive(['"', '\'', '`']) {
        let before = part.rsplit_once('@').map_or("", |(before, _)| before);
        let word = before.rsplit(char::is_whitespace).next().unwrap_or(before);
        let secret = match before.split_once(SCHEME_END) {
            Some((_, secret)) => secret,
            None if word.contains(':') => word,
            None => "",
        };
        if !matches!(secret, "" | "USER:PASSWORD") {
            let end = start + before.len();
            found.push(end - secret.len()..end);
        }
        start += part.len();
    }
    found
}

/// The value after `from`: the quoted text, or everything up to a separator.
fn value_after(line: &str, from: usize) -> Range<usize> {
    let rest = &line[from..];
    let from = from + (rest.len() - rest.trim_start().len());
    let value = &line[from..];
    match value.chars().next() {
        Some(quote @ ('"' | '\'')) => {
            let inner = &value[1..];
            from + 1..from + 1 + inner.rfind(quote).unwrap_or(inner.len())
        }
        _ => from..from + value.find([',', '}', '#']).unwrap_or(value.len()),
    }
}

/// Overwrites with `*`, except for an environment reference, which is not secret.
fn mask(text: &mut String, range: Range<usize>) {
    let value = &text[range.clone()];
    if !(value.starts_with("${") && value.ends_with('}') && !value.contains(":-")) {
        text.replace_range(range.clone(), &"*".repeat(range.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_masked_wherever_it_stands_on_the_line() {
        for line in [
            r#"sha256 = "hunter2""#,
            r#"x = { user = "a", token='hunter2' }"#,
            r#""api_key" = "hunter2"#,
            r#"admin.password = hunter2 # note"#,
            r#"url = "redis://user:hunter2@host:1""#,
            r#"url = "redis://user:slash/hunter2@host:1""#,
            r#"nodes = ["a:1", "user:hunter2@host:1"]"#,
            r#"urls = ["http://h:1", "http://u:a@hunter2 @h", "http://:hunter2@[::1]"]"#,
            r#"secret = "a = \"hunter2\"""#,
            r#"token = "${TOKEN:-hunter2}""#,
            r#"jwks_url = "https://id.example/keys?key=hunter2""#,
            r#"jwks_url = "https://id.example/keys?a=\"hunter2&b=hunter2" # note"#,
            r#"jwks_url = 'https://u:p@id.example/keys?mail=a@hunter2'"#,
            r#"urls = ["https://a/?hunter2", "http://b?x=hunter2"]"#,
        ] {
            let shown = redact(line);
            assert!(!shown.contains("hunter2"), "{shown}");
            assert_eq!(shown.len(), line.len());
        }
    }

    #[test]
    fn a_message_names_a_url_without_its_credentials() {
        for (message, shown) in [
            (
                "`http://u:hunter2@h:1/x` is not a server",
                "`http://***@h:1/x` is not a server",
            ),
            ("at redis://:hun/ter2@h:1", "at redis://***@h:1"),
            ("`u:hunter2@h` or `http://h`", "`***@h` or `http://h`"),
            (
                "`alice@example.com` has no key",
                "`alice@example.com` has no key",
            ),
            (
                "write rediss://USER:PASSWORD@HOST",
                "write rediss://USER:PASSWORD@HOST",
            ),
            ("not\u{a0}u:hunter2@h", "not\u{a0}***@h"),
            (
                "cannot read https://id/keys?key=hunter2 now",
                "cannot read https://id/keys?*** now",
            ),
            ("`https://id/keys?key=hunter 2`?", "`https://id/keys?***`?"),
            ("`http://h:1` `@x` `x://@h`", "`http://h:1` `@x` `x://@h`"),
        ] {
            assert_eq!(without_credentials(message), shown);
            assert_eq!(without_credentials(shown), shown, "again");
        }
    }

    #[test]
    fn what_is_no_secret_stays_readable() {
        for line in [
            r#"token_file = "admin.token""#,
            r#"from = "api_key""#,
            r#"token = "${ADMIN_TOKEN}""#,
            r#"user = "alice@example.com""#,
        ] {
            assert_eq!(redact(line), line);
        }
    }

    #[test]
    fn a_place_counts_characters_and_stays_on_its_line() {
        let source = SourceText::new("f", "é = 1\r\nß = \"x\ny\"\n".to_owned());
        let start = source.text().find('"').expect("it is there");
        let place = source.place(start..source.text().len());
        assert_eq!((place.line, place.column), (2, 5));
        assert_eq!(place.text.as_deref(), Some("ß = \"x"));
        assert_eq!(place.marked, 5..7);
        let past = source.place(10_000..10_001);
        assert_eq!((past.line, past.column), (4, 1));
    }
}
