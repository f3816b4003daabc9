//! The output that a guide shows below a command, compared with the real one.

use std::fmt;

#[derive(Debug, Default)]
pub(super) struct Expected(Option<Vec<String>>);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.as_deref().unwrap_or_default().join("\n"))
    }
}

impl Expected {
    pub(super) fn anything() -> Self {
        Self(None)
    }

    pub(super) fn push(&mut self, line: &str) {
        self.0.get_or_insert_default().push(line.to_owned());
    }

    /// Whether the output is the whole of what the page shows. A page that shows none accepts any.
    pub(super) fn is(&self, output: &str) -> bool {
        let Some(lines) = &self.0 else { return true };
        let lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
        let output = masked(output.trim_end());
        let found: Vec<&str> = output.lines().map(str::trim_end).collect();
        whole(&lines, &found)
    }

    /// Whether the output contains these lines in this order, possibly with others between them.
    pub(super) fn is_in(&self, output: &str) -> bool {
        let output = masked(output);
        let mut found = output.lines().map(str::trim_end);
        let mut lines = self.0.iter().flatten().filter(|line| line.trim() != "…");
        lines.all(|line| found.any(|found| same(line.trim_end(), found)))
    }
}

fn whole(lines: &[&str], found: &[&str]) -> bool {
    match (lines, found) {
        ([], found) => found.is_empty(),
        (["…", rest @ ..], _) => (0..=found.len()).any(|at| whole(rest, &found[at..])),
        ([line, rest @ ..], [first, others @ ..]) => same(line, first) && whole(rest, others),
        (_, []) => false,
    }
}

/// Compares two lines; `…` stands for any text.
fn same(line: &str, found: &str) -> bool {
    let line = masked(line);
    let mut parts = line.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = found.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, between)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in between {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Replaces request ids and times, which differ each time.
fn masked(text: &str) -> String {
    let id = regex_lite::Regex::new(r"\b[0-9a-f]{32}\b").expect("it is a valid expression");
    let time = regex_lite::Regex::new(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
        .expect("it is a valid expression");
    let date = regex_lite::Regex::new(r"\w{3}, \d\d \w{3} 20\d\d \d\d:\d\d:\d\d GMT")
        .expect("it is a valid expression");
    let text = id.replace_all(text, "ID");
    let text = time.replace_all(&text, "TIME");
    date.replace_all(&text, "DATE").into_owned()
}

#[test]
fn an_output_matches_with_its_gaps_and_nothing_else() {
    let expected = |text: &str| Expected(Some(text.lines().map(str::to_owned).collect()));
    assert!(expected("a … d\nx").is("a b c d\nx\n"));
    assert!(!expected("a … d\nx").is("a b c d"));
    assert!(!expected("a").is("a\nb") && !expected("a").is("ab") && !expected("").is("b"));
    assert!(expected("a\n…").is("a") && expected("a\n…\nz").is("a\nb\nc\nz\n"));
    assert!(
        expected("id 0123456789abcdef0123456789abcdef").is("id ffffffffffffffffffffffffffffffff")
    );
    assert!(!expected("id 0123456789abcdef0123456789abcdef").is("id ffff"));
    assert!(expected("b\nd").is_in("a\nb\nc\nd") && !expected("d\nb").is_in("a\nb\nc\nd"));
    assert!(Expected::anything().is("a"));
}
