//! The language rules of the documentation that a machine can check: the length of sentences and lines, words that have a
//! better replacement, sentences with a "what" or "who" clause as their subject, and tables without an introduction.
//!
//! Code blocks, code spans, link targets and their definitions, and HTML comments are not prose. A table row is exempt from the line length, and a
//! semicolon ends a sentence in it. `<!-- prose: allow long -->` above a block exempts its sentences from the word limit.

use std::fmt;

use crate::pages;

const MAX_WORDS: usize = 25;
const MAX_COLUMNS: usize = 100;
const ALLOW_LONG: &str = "<!-- prose: allow long -->";
/// How many blocks may carry [`ALLOW_LONG`].
const MAX_ALLOWED: usize = 3;

/// Words and phrases, each with its replacement. A phrase matches whole words, in any case.
const WORDS: &[(&str, &str)] = &[
    ("anybody", "anyone, or name the client"),
    ("are to", "must"),
    ("are told", "receive"),
    ("dear", "expensive"),
    ("easily", "leave it out"),
    ("easy", "leave it out"),
    ("gives up", "closes"),
    ("give up", "close"),
    ("hear of", "receive"),
    ("hears", "receives"),
    ("hears of", "receives"),
    ("in hand", "available"),
    ("in vain", "without success"),
    ("is to", "must"),
    ("is told", "receives"),
    ("just", "leave it out"),
    ("look on", "observe"),
    ("looks on", "observes"),
    ("looked on", "observed"),
    ("meets", "applies to"),
    ("mend", "fix"),
    ("mended", "fixed"),
    ("mends", "fixes"),
    ("nobody", "no client, no one"),
    ("of its own", "its own, or separate"),
    ("of their own", "their own, or separate"),
    ("ruled", "overridden"),
    ("ruling", "runtime override"),
    ("rulings", "runtime overrides"),
    ("simply", "leave it out"),
    ("so many", "name the count"),
    ("somebody", "someone, or name the client"),
    ("thereof", "name the thing"),
    ("turn away", "reject"),
    ("turned away", "rejected"),
    ("turns away", "rejects"),
    ("whoever", "name the client or the operator"),
    ("whom", "name the client or the operator"),
];

/// A sentence does not start with one of these, unless it is a question.
const STARTS: &[&str] = &["what", "who", "whoever", "whom", "whose"];

struct Fault {
    page: String,
    line: usize,
    problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.page, self.line, self.problem)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum BlockKind {
    Heading,
    Text,
    Cell,
}

/// A paragraph, a list item, a heading or a table cell: its words, each with its line.
struct Block {
    kind: BlockKind,
    allow_long: bool,
    words: Vec<(usize, String)>,
}

#[derive(Default)]
struct Page {
    blocks: Vec<Block>,
    /// Line and columns of lines that are too long.
    long_lines: Vec<(usize, usize)>,
    /// First lines of tables that directly follow a heading.
    bare_tables: Vec<usize>,
    allowed: usize,
}

impl Page {
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut open: Vec<(usize, String)> = Vec::new();
        let (mut fenced, mut allow_long) = (false, false);
        for (at, line) in text.lines().enumerate().map(|(at, line)| (at + 1, line)) {
            let trimmed = line.trim_start();
            let fence = trimmed.starts_with("```");
            let code = fenced || fence || (open.is_empty() && line.starts_with("    "));
            let heading = !code && trimmed.starts_with('#');
            let table = !code && trimmed.starts_with('|');
            let comment = !code && trimmed.starts_with("<!--");
            let item = !code && list_item(trimmed).is_some();
            if code || heading || table || comment || item || trimmed.is_empty() {
                page.close(&mut open, BlockKind::Text, &mut allow_long);
            }
            fenced ^= fence;
            if code || trimmed.is_empty() {
                continue;
            }
            if trimmed.starts_with('[') && trimmed.contains("]: http") {
                continue;
            }
            if comment {
                allow_long = trimmed == ALLOW_LONG;
                page.allowed += usize::from(allow_long);
                continue;
            }
            if table {
                let before = page.blocks.last();
                if before.is_some_and(|block| block.kind == BlockKind::Heading) {
                    page.bare_tables.push(at);
                }
                for cell in cells(trimmed) {
                    open.push((at, cell));
                    page.close(&mut open, BlockKind::Cell, &mut false);
                }
                continue;
            }
            // a line that is one link or one code span cannot be wrapped
            if line.chars().count() > MAX_COLUMNS && trimmed.contains(' ') {
                page.long_lines.push((at, line.chars().count()));
            }
            let text = list_item(trimmed).unwrap_or(trimmed);
            open.push((at, text.trim_start_matches('#').to_owned()));
            if heading {
                page.close(&mut open, BlockKind::Heading, &mut allow_long);
            }
        }
        page.close(&mut open, BlockKind::Text, &mut allow_long);
        page
    }

    /// Ends the block that is open, if there is one.
    fn close(&mut self, open: &mut Vec<(usize, String)>, kind: BlockKind, allow_long: &mut bool) {
        if !open.is_empty() {
            let words = words(open);
            self.blocks.push(Block {
                kind,
                allow_long: *allow_long,
                words,
            });
            open.clear();
            *allow_long = false;
        }
    }

    fn faults(&self, name: &str) -> Vec<Fault> {
        let fault = |line: usize, problem: String| Fault {
            page: name.to_owned(),
            line,
            problem,
        };
        let mut faults: Vec<Fault> = self
            .long_lines
            .iter()
            .map(|&(line, columns)| {
                fault(line, format!("{columns} columns, of {MAX_COLUMNS} at most"))
            })
            .collect();
        let bare = self.bare_tables.iter();
        faults.extend(bare.map(|&line| {
            let problem = "a sentence before the table says which question it answers";
            fault(line, problem.to_owned())
        }));
        for block in &self.blocks {
            faults.extend(replaced(block).map(|(line, problem)| fault(line, problem)));
            if block.kind == BlockKind::Heading {
                continue;
            }
            for sentence in sentences(block) {
                let Some((line, first)) = sentence.first() else {
                    continue;
                };
                let length = sentence.iter().filter(|(_, word)| counts(word)).count();
                let opening: Vec<&str> = sentence
                    .iter()
                    .take(6)
                    .map(|(_, word)| word.as_str())
                    .collect();
                if length > MAX_WORDS && !block.allow_long {
                    let opening = opening.join(" ");
                    faults.push(fault(*line, format!("{length} words: {opening} …")));
                }
                let question = sentence.last().is_some_and(|(_, word)| word.ends_with('?'));
                if STARTS.contains(&plain(first).as_str()) && !question && length > 3 {
                    let problem = format!("starts with {first:?}: name the subject");
                    faults.push(fault(*line, problem));
                }
            }
        }
        faults.sort_by_key(|fault| fault.line);
        faults
    }
}

/// The text behind the marker of a list item.
fn list_item(line: &str) -> Option<&str> {
    let digits = line.chars().take_while(char::is_ascii_digit).count();
    if digits > 0 {
        return line.get(digits..)?.strip_prefix(". ");
    }
    line.strip_prefix("- ").or_else(|| line.strip_prefix("* "))
}

/// The cells of a table row; none for the rule below the head. A `\|` is part of its cell.
fn cells(row: &str) -> Vec<String> {
    if row.chars().all(|c| "|-: ".contains(c)) {
        return Vec::new();
    }
    let row = row.replace("\\|", "¦");
    row.split('|')
        .map(|cell| cell.trim().to_owned())
        .filter(|cell| !cell.is_empty())
        .collect()
}

/// The words of some lines. A code span becomes one backquote, a link its text.
fn words(lines: &[(usize, String)]) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut in_code, mut in_target) = (false, false);
    for (at, line) in lines {
        let mut word = String::new();
        let mut previous = ' ';
        for c in line.chars().chain([' ']) {
            if c == '`' {
                if !in_code {
                    word.push('`');
                }
                in_code = !in_code;
            } else if in_target {
                in_target = c != ')';
            } else if in_code {
            } else if c == '(' && previous == ']' {
                in_target = true;
            } else if c.is_whitespace() {
                if !word.is_empty() {
                    found.push((*at, std::mem::take(&mut word)));
                }
            } else if !"[]*".contains(c) {
                word.push(c);
            }
            previous = c;
        }
        if !word.is_empty() {
            found.push((*at, word));
        }
    }
    found
}

/// Cuts after `.`, `?` and `!`, and in a table cell after `;`.
fn sentences(block: &Block) -> Vec<&[(usize, String)]> {
    let mut found = Vec::new();
    let mut start = 0;
    for (at, (_, word)) in block.words.iter().enumerate() {
        let word = word.trim_end_matches([')', '"', '”', '_']);
        let abbreviated = matches!(plain(word).as_str(), "e.g" | "i.e" | "etc" | "vs");
        if (word.ends_with(['.', '?', '!']) && !abbreviated)
            || (word.ends_with(';') && block.kind == BlockKind::Cell)
        {
            found.extend(block.words.get(start..=at));
            start = at + 1;
        }
    }
    found.extend(block.words.get(start..));
    found
}

/// Whether it is a word, and not a dash or another sign.
fn counts(word: &str) -> bool {
    word.contains(|c: char| c.is_alphanumeric() || c == '`')
}

/// A word in lower case, without the punctuation around it.
fn plain(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric())
        .to_lowercase()
}

fn replaced(block: &Block) -> impl Iterator<Item = (usize, String)> {
    let plain: Vec<String> = block.words.iter().map(|(_, word)| plain(word)).collect();
    block
        .words
        .iter()
        .enumerate()
        .flat_map(move |(at, (line, _))| {
            let matching = WORDS.iter().filter(|(phrase, _)| {
                phrase
                    .split(' ')
                    .enumerate()
                    .all(|(offset, word)| plain.get(at + offset).is_some_and(|found| found == word))
            });
            let found: Vec<_> = matching
                .map(|(phrase, better)| (*line, format!("{phrase:?}: {better}")))
                .collect();
            found
        })
}

#[test]
fn every_page_keeps_the_language_rules() {
    let pages = pages();
    assert!(pages.len() > 15, "only {} pages were seen", pages.len());
    let (mut sentences_seen, mut allowed, mut faults) = (0, 0, Vec::new());
    for (name, text) in &pages {
        let page = Page::parse(text);
        let blocks = page
            .blocks
            .iter()
            .filter(|block| block.kind != BlockKind::Heading);
        sentences_seen += blocks.map(|block| sentences(block).len()).sum::<usize>();
        allowed += page.allowed;
        faults.extend(page.faults(name));
    }
    let shown: String = faults.iter().map(|fault| format!("{fault}\n")).collect();
    let seen = format!("{} faults in {sentences_seen} sentences", faults.len());
    assert!(faults.is_empty(), "{shown}{seen} of {} pages", pages.len());
    assert!(
        allowed <= MAX_ALLOWED,
        "{ALLOW_LONG} is used {allowed} times"
    );
}

#[test]
fn each_kind_of_fault_is_found() {
    let found = |text: &str| {
        let faults = Page::parse(text).faults("page");
        faults
            .iter()
            .map(|fault| (fault.line, fault.problem.clone()))
            .collect::<Vec<_>>()
    };
    let long = "word ".repeat(MAX_WORDS + 1);
    let [(3, problem)] = &found(&format!("Short one.\n\nword {}word.", "word\n".repeat(25)))[..]
    else {
        panic!("one sentence is too long")
    };
    assert_eq!(problem, "27 words: word word word word word word …");
    assert_eq!(
        found(&format!("{ALLOW_LONG}\n{}", long.replace(' ', "\n"))),
        []
    );
    assert_eq!(
        found(&format!("```text\n{long}{long}\n```\n\n    {long}{long}")),
        []
    );
    assert_eq!(found(&"word. Word ".repeat(9)), []);
    let row = format!("| {} | `{long}` |", "Word. ".repeat(30));
    assert_eq!(found(&row), []);
    assert_eq!(found(&format!("| a |\n|---|\n| {long} |")).len(), 1);
    let columns = format!("{} {}.", "a".repeat(50), "b".repeat(50));
    assert_eq!(
        found(&columns),
        [(1, "102 columns, of 100 at most".to_owned())]
    );
    assert_eq!(
        found(&format!("<https://example.com/{}>", "a".repeat(90))),
        []
    );
    assert_eq!(
        found(&format!("[name]: https://example.com/{}", "a".repeat(90))),
        []
    );
    assert_eq!(found("# Title\n\n| a |\n|---|\n| b |").len(), 1);
    assert_eq!(found("- Here. What is left is dropped.").len(), 1);
    assert_eq!(
        found("# What is left is dropped\n\nWhat does it cost? `who` ask."),
        []
    );
    let replaced = [(2, "\"turned away\": reject".replace("reject", "rejected"))];
    assert_eq!(
        found("Every client is\nTurned\naway, `turned away` [away](turned away)."),
        replaced
    );
}
