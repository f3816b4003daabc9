//! A text of the file with `${NAME}` expanded.
//!
//! A value from the environment may be a secret, so it is never shown.

use std::ops::Range;

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, did_you_mean, not_built, quote},
    document::Document,
    environment,
};

/// A text with `${NAME}` expanded.
pub(super) struct ExpandedText<'a> {
    pub(super) document: Document<'a>,
    pub(super) value: String,
    pub(super) span: Range<usize>,
    raw: &'a str,
    /// Whether it contained `${…}`, so it may be a secret.
    pub(super) from_environment: bool,
}

impl<'a> ExpandedText<'a> {
    /// Expands `${NAME}`. Fails if a variable is not set, or if the reference is malformed.
    pub(super) fn expand(
        document: Document<'a>,
        raw: &'a str,
        span: Range<usize>,
    ) -> Result<Self, PendingDiagnostic> {
        Ok(Self {
            document,
            value: environment::expand(raw, document.env)?,
            span,
            raw,
            from_environment: raw.contains("${"),
        })
    }

    /// A text in which `${NAME}` means itself.
    pub(super) fn plain(document: Document<'a>, raw: &'a str, span: Range<usize>) -> Self {
        Self {
            document,
            raw,
            value: raw.to_owned(),
            span,
            from_environment: false,
        }
    }

    /// The text as written, unexpanded.
    pub(super) fn raw(&self) -> &str {
        self.raw
    }

    /// The text for messages: as written, quoted.
    pub(super) fn shown(&self) -> String {
        quote(self.raw)
    }

    pub(super) fn error(&self, problem: PendingDiagnostic) {
        self.document.error(self.span.clone(), problem);
    }

    pub(super) fn warn(&self, problem: PendingDiagnostic) {
        self.document.warn(self.span.clone(), problem);
    }

    /// Parses, or reports why not. A value from the environment is not repeated.
    pub(super) fn parse<T>(
        &self,
        kind: &str,
        parse: impl Fn(&str) -> Result<T, PendingDiagnostic>,
    ) -> Option<T> {
        parse(&self.value)
            .map_err(|problem| self.error(self.conceal(problem, kind)))
            .ok()
    }

    fn conceal(&self, problem: PendingDiagnostic, kind: &str) -> PendingDiagnostic {
        if !self.from_environment {
            return problem;
        }
        let message = format!("{} is not {kind}", self.shown());
        PendingDiagnostic::new(problem.code, message)
            .hint("correct the environment variable, or the default after `:-`")
    }

    /// One of `built`. A word in `unbuilt` is reported as the missing `feature`.
    pub(super) fn choice<T: Copy>(
        &self,
        built: &[(&str, T)],
        unbuilt: &[&str],
        feature: &str,
    ) -> Option<T> {
        if let Some((_, choice)) = built.iter().find(|(word, _)| *word == self.value) {
            return Some(*choice);
        }
        let words = built.iter().map(|(word, _)| *word);
        let known = words.clone().map(quote).collect::<Vec<_>>().join(", ");
        self.error(if unbuilt.contains(&self.value.as_str()) {
            not_built(self.shown(), feature).hint(format!("built now: {known}"))
        } else {
            PendingDiagnostic::new(
                Code::UnknownChoice,
                format!("unknown value {}", self.shown()),
            )
            .label(format!("expected one of {known}"))
            .hint(if self.from_environment {
                String::new()
            } else {
                did_you_mean(&self.value, words)
            })
        });
        None
    }
}
