//! One file of a configuration while it is read: its text, and where its problems are collected.

use std::{collections::BTreeSet, ops::Range};

use toml::de::DeTable;

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, Problems, Severity},
    environment::Lookup,
    read::ConfigFiles,
    source::SourceText,
};

/// One file being read.
#[derive(Clone, Copy)]
pub(super) struct Document<'a> {
    pub(super) source: &'a SourceText,
    pub(super) problems: &'a Problems,
    pub(super) files: &'a ConfigFiles,
    pub(super) env: Lookup<'a>,
}

impl Document<'_> {
    pub(super) fn error(&self, span: Range<usize>, problem: PendingDiagnostic) {
        self.problems
            .at(self.source, span, Severity::Error, problem);
    }

    pub(super) fn warn(&self, span: Range<usize>, problem: PendingDiagnostic) {
        self.problems
            .at(self.source, span, Severity::Warning, problem);
    }

    /// Parses the text; reports syntax errors, one per line.
    pub(super) fn parse<'t>(&self, text: &'t str) -> Option<DeTable<'t>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut lines = BTreeSet::new();
        for error in &errors {
            let span = error.span().unwrap_or(0..0);
            // further errors on the same line are consequences of the first
            if lines.insert(self.source.line(span.start)) {
                let (before, rest) = text.split_at_checked(span.start).unwrap_or((text, ""));
                self.error(span, syntax_problem(error.message(), before, rest));
            }
        }
        errors.is_empty().then(|| table.into_inner())
    }
}

/// The parser's message, with a hint for common mistakes.
fn syntax_problem(message: &str, before: &str, rest: &str) -> PendingDiagnostic {
    let hint = if before.ends_with('$') && rest.starts_with('{') {
        "environment variables can only supply text in quotes: \"${NAME}\"; write numbers, true and false literally"
    } else if message.contains("duplicate key") {
        "write it once; a table that may be repeated has two brackets, for example [[route]]"
    } else if message.contains("quoted") && rest.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        r#"put text, durations, sizes and rates in quotes, for example "10s""#
    } else if message.contains("quoted") && rest.lines().next().unwrap_or_default().is_empty() {
        "write a value after `=`"
    } else if message.contains("unclosed array") {
        "close the list with `]`, and each text in it with its opening quotation mark"
    } else if message.contains("basic string") || message.contains("literal string") {
        "close the text with its opening quotation mark, on the same line"
    } else {
        ""
    };
    PendingDiagnostic::new(Code::Syntax, format!("this is not TOML: {message}")).hint(hint)
}
