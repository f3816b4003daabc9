//! Diagnostics: what is wrong with a configuration, where, and how to fix it, as text or JSON.
//!
//! A diagnostic copies and redacts the one line that it shows, so a report outlives the text.
//! Reports are bounded ([`MAX_SHOWN`]), and so is a shown line (`MAX_LINE_BYTES`).

use std::{borrow::Cow, cell::RefCell, fmt, ops::Range};

use annotate_snippets::{
    AnnotationKind, Group, Level, Origin, Renderer, Snippet, normalize_untrusted_str,
};
use serde_json::{Value, json};

use super::{
    code::Code,
    source::{SourceLocation, SourceText, without_credentials},
};

/// How many problems of each severity a report keeps; the rest are only counted.
pub const MAX_SHOWN: usize = 100;

/// Whether the configuration can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It cannot.
    Error,
    /// It can, but probably does not do what its author meant.
    Warning,
}

impl Severity {
    /// `error` or `warning`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The stable code.
    pub code: Code,
    /// Whether it prevents the configuration from being used.
    pub severity: Severity,
    /// What is wrong, in one sentence.
    pub message: String,
    /// The file, as the command line or the configuration names it.
    pub file: String,
    /// Where in the file; `None` for the whole file.
    pub place: Option<SourceLocation>,
    /// What is wrong at that location, in a few words; may be empty.
    pub label: String,
    /// How to fix it; may be empty.
    pub hint: String,
}

/// The problems of one configuration, sorted by file and line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiagnosticReport {
    /// At most [`MAX_SHOWN`] of each severity.
    pub diagnostics: Vec<Diagnostic>,
    errors: usize,
    warnings: usize,
}

impl DiagnosticReport {
    /// A report with one error about the whole file.
    pub(super) fn of_file(code: Code, file: &str, message: String, hint: &str) -> Self {
        let problems = Problems::default();
        problems.push(Diagnostic {
            code,
            severity: Severity::Error,
            message,
            file: file.to_owned(),
            place: None,
            label: String::new(),
            hint: hint.to_owned(),
        });
        problems.into_report()
    }

    /// How many errors were found, shown or not.
    pub fn errors(&self) -> usize {
        self.errors
    }

    /// How many warnings were found, shown or not.
    pub fn warnings(&self) -> usize {
        self.warnings
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.errors == 0 && self.warnings == 0
    }

    /// `2 errors, 1 warning`; empty when nothing was found.
    pub fn summary(&self) -> String {
        let counted = [(self.errors, "error"), (self.warnings, "warning")];
        let parts = counted.iter().filter(|(n, _)| *n > 0);
        parts
            .map(|(n, noun)| count(*n, noun))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Every problem as text, without the summary. Each ends with a line break.
    pub fn text(&self, colour: bool) -> String {
        let renderer = if colour {
            Renderer::styled()
        } else {
            Renderer::plain()
        };
        let mut text = String::new();
        for diagnostic in &self.diagnostics {
            text.push_str(&diagnostic.render(&renderer));
            text.push('\n');
        }
        let hidden = self.errors + self.warnings - self.diagnostics.len();
        if hidden > 0 {
            text.push_str(&format!("{} not shown\n", count(hidden, "more problem")));
        }
        text
    }

    /// The whole report as one JSON object.
    pub fn json(&self) -> Value {
        json!({
            "errors": self.errors,
            "warnings": self.warnings,
            "diagnostics": self.diagnostics.iter().map(Diagnostic::json).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for DiagnosticReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(false))?;
        f.write_str(&self.summary())
    }
}

impl std::error::Error for DiagnosticReport {}

/// Makes untrusted text safe to print to a terminal.
fn shown(text: &str) -> String {
    normalize_untrusted_str(&without_commands(text))
}

/// Replaces the C1 controls (U+0080 to U+009F), which start terminal commands as ESC does. The
/// replacement has the same length in bytes, so the marked range stays right. The renderer replaces
/// all other controls.
fn without_commands(text: &str) -> Cow<'_, str> {
    const IN_THEIR_PLACE: &str = "\u{b7}";
    let is_command = |c: char| matches!(c, '\u{80}'..='\u{9f}');
    match text.contains(is_command) {
        true => text.replace(is_command, IN_THEIR_PLACE).into(),
        false => text.into(),
    }
}

impl Diagnostic {
    fn render(&self, renderer: &Renderer) -> String {
        let level = match self.severity {
            Severity::Error => Level::ERROR,
            Severity::Warning => Level::WARNING,
        };
        let title = level
            .primary_title(shown(&self.message))
            .id(self.code.as_str());
        let mut group = Group::with_title(title);
        let origin = Origin::path(shown(&self.file));
        group = match &self.place {
            Some(SourceLocation {
                line,
                text: Some(text),
                marked,
                ..
            }) => {
                let label = (!self.label.is_empty()).then(|| shown(&self.label));
                let annotation = AnnotationKind::Primary.span(marked.clone()).label(label);
                let snippet = Snippet::source(without_commands(text)).line_start(*line);
                group.element(snippet.path(shown(&self.file)).annotation(annotation))
            }
            Some(place) => group.element(origin.line(place.line).char_column(place.column)),
            None => group.element(origin),
        };
        if !self.hint.is_empty() {
            group = group.element(Level::HELP.message(shown(&self.hint)));
        }
        renderer.render(&[group])
    }

    fn json(&self) -> Value {
        json!({
            "code": self.code.as_str(),
            "severity": self.severity.as_str(),
            "message": self.message,
            "file": self.file,
            "line": self.place.as_ref().map(|place| place.line),
            "column": self.place.as_ref().map(|place| place.column),
            "source": self.place.as_ref().and_then(|place| place.text.as_deref()),
            "label": self.label,
            "hint": self.hint,
        })
    }
}

/// Collects problems while a configuration is read. Every reader shares one.
#[derive(Debug, Default)]
pub(super) struct Problems(RefCell<DiagnosticReport>);

impl Problems {
    /// Adds a problem, and masks the credentials of URLs in its texts.
    pub(super) fn push(&self, mut diagnostic: Diagnostic) {
        let Diagnostic {
            message,
            label,
            hint,
            ..
        } = &mut diagnostic;
        for text in [message, label, hint] {
            if let Cow::Owned(shown) = without_credentials(text) {
                *text = shown;
            }
        }
        let mut report = self.0.borrow_mut();
        let found = match diagnostic.severity {
            Severity::Error => &mut report.errors,
            Severity::Warning => &mut report.warnings,
        };
        *found += 1;
        if *found <= MAX_SHOWN {
            report.diagnostics.push(diagnostic);
        }
    }

    /// Reports a problem at `span` of `source`; `0..0` means the whole file.
    pub(super) fn at(
        &self,
        source: &SourceText,
        span: Range<usize>,
        severity: Severity,
        problem: PendingDiagnostic,
    ) {
        self.push(Diagnostic {
            code: problem.code,
            severity,
            message: problem.message,
            file: source.name().to_owned(),
            place: (span != (0..0)).then(|| source.place(span)),
            label: problem.label,
            hint: problem.hint,
        });
    }

    pub(super) fn errors(&self) -> usize {
        self.0.borrow().errors
    }

    pub(super) fn into_report(self) -> DiagnosticReport {
        let mut report = self.0.into_inner();
        let position = |d: &Diagnostic| d.place.as_ref().map(|place| (place.line, place.column));
        report
            .diagnostics
            .sort_by_cached_key(|d| (d.file.clone(), position(d)));
        report
    }
}

/// A diagnostic without its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingDiagnostic {
    pub(super) code: Code,
    pub(super) message: String,
    pub(super) label: String,
    pub(super) hint: String,
}

impl PendingDiagnostic {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        let (label, hint) = (String::new(), String::new());
        Self {
            code,
            message: message.into(),
            label,
            hint,
        }
    }

    pub(super) fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

/// `1 route`, `2 routes`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    if n == 1 {
        format!("1 {noun}")
    } else {
        format!("{n} {noun}s")
    }
}

/// Quotes untrusted text in backticks: escaped, and cut after 60 characters. Credentials of a URL
/// are masked before: the cut could remove the `@` that ends them.
pub(super) fn quote(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    let text = &*without_credentials(text);
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'\\';
    if text.len() <= MAX_CHARS && text.bytes().all(is_plain) {
        // fast path: nearly every name is plain, and large files have many
        return format!("`{text}`");
    }
    let mut shown: String = text
        .chars()
        .take(MAX_CHARS)
        .flat_map(char::escape_debug)
        .collect();
    shown = shown.replace("\\\"", "\"").replace("\\'", "'");
    if text.chars().nth(MAX_CHARS).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

/// Words that other programs use, with tidegate's word.
const HABITS: &[(&str, &str)] = &[
    ("client_ip", "ip"),
    ("remote_addr", "ip"),
    ("remote_address", "ip"),
    ("ip_address", "ip"),
    ("address", "ip"),
    ("api_key", "user"),
    ("listeners", "listen"),
    ("backend", "upstream"),
    ("backends", "upstream"),
];

/// The known word nearest to `written`, if it is near enough to be a typo.
pub(super) fn nearest<'a>(
    written: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    const MAX_BYTES: usize = 64; // the comparison is quadratic
    if written.is_empty() || written.len() > MAX_BYTES {
        return None;
    }
    let known: Vec<&str> = known.into_iter().collect();
    let habit = HABITS.iter().find(|(theirs, _)| *theirs == written);
    if let Some((_, ours)) = habit.filter(|(_, ours)| known.contains(ours)) {
        return Some(ours);
    }
    let near = known
        .into_iter()
        .filter(|word| word.len() <= MAX_BYTES)
        .filter_map(|word| {
            let distance = strsim::damerau_levenshtein(written, word);
            let longest = written.len().max(word.len());
            // a typo changes one character, or one in three of a longer word; or it
            // drops part of the name
            let slip = distance <= 1.max(longest / 3) && distance < longest;
            let part = written.len().min(word.len()) >= 4
                && (word.contains(written) || written.contains(word));
            (slip || part).then_some((distance, word))
        });
    near.min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

/// The problem for a feature that does not exist yet.
pub(super) fn not_built(what: String, feature: &str) -> PendingDiagnostic {
    PendingDiagnostic::new(
        Code::NotBuilt,
        format!("{what} is not built yet: {feature}"),
    )
    .label("not built yet")
}

/// "did you mean `x`?" or nothing.
pub(super) fn did_you_mean<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(written, known)
        .map(|word| format!("did you mean {}?", quote(word)))
        .unwrap_or_default()
}
