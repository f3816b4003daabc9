//! The formats in which upstreams report usage, and how their numbers map to disjoint parts.

use super::{
    counters::{Counter, UsageCounters},
    decimal::Decimal,
    paths::UsagePaths,
};

/// The provider's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UsageFormat {
    /// Chat Completions, Completions, Responses, Embeddings, images, audio, and compatible servers.
    OpenAi,
    /// Messages.
    Anthropic,
    /// `generateContent` and `streamGenerateContent`.
    Gemini,
    /// `/api/chat`, `/api/generate`, `/api/embed`.
    Ollama,
    /// Converse. Event frames are not read.
    Bedrock,
}

/// The tokens of one answer. `cached` and `written` are parts of `input`; `reasoning` is a part of
/// `output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// All tokens of the prompt.
    pub input: u64,
    /// Prompt tokens read from the provider's cache.
    pub cached: u64,
    /// Prompt tokens written to the provider's cache.
    pub written: u64,
    /// All tokens of the answer.
    pub output: u64,
    /// Tokens spent on reasoning.
    pub reasoning: u64,
}

/// The usage that an answer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportedUsage {
    /// A language model's tokens.
    Tokens(TokenUsage),
    /// A transcription's seconds.
    Seconds(u64),
    /// The number at a configured path, scaled.
    Units(u64),
}

use Counter::{Cached, Extra, Input, Model, Output, Reasoning, Total, Units};

const OPENAI: &[(&str, Counter)] = &[
    ("usage.prompt_tokens", Input),
    ("usage.completion_tokens", Output),
    ("usage.total_tokens", Total),
    ("usage.prompt_tokens_details.cached_tokens", Cached),
    ("usage.prompt_cache_hit_tokens", Cached),
    (
        "usage.completion_tokens_details.reasoning_tokens",
        Reasoning,
    ),
    ("usage.input_tokens", Input),
    ("usage.output_tokens", Output),
    ("usage.input_tokens_details.cached_tokens", Cached),
    ("usage.output_tokens_details.reasoning_tokens", Reasoning),
    ("response.usage.input_tokens", Input),
    ("response.usage.output_tokens", Output),
    ("response.usage.total_tokens", Total),
    ("response.usage.input_tokens_details.cached_tokens", Cached),
    (
        "response.usage.output_tokens_details.reasoning_tokens",
        Reasoning,
    ),
    ("x_groq.usage.prompt_tokens", Input),
    ("x_groq.usage.completion_tokens", Output),
    ("x_groq.usage.total_tokens", Total),
    ("usage.seconds", Units),
    ("model", Model),
    ("response.model", Model),
];

const ANTHROPIC: &[(&str, Counter)] = &[
    ("usage.input_tokens", Input),
    ("usage.cache_read_input_tokens", Cached),
    ("usage.cache_creation_input_tokens", Extra),
    ("usage.output_tokens", Output),
    ("model", Model),
    ("message.usage.input_tokens", Input),
    ("message.usage.cache_read_input_tokens", Cached),
    ("message.usage.cache_creation_input_tokens", Extra),
    ("message.usage.output_tokens", Output),
    ("message.model", Model),
];

const GEMINI: &[(&str, Counter)] = &[
    ("usageMetadata.promptTokenCount", Input),
    ("usageMetadata.toolUsePromptTokenCount", Extra),
    ("usageMetadata.cachedContentTokenCount", Cached),
    ("usageMetadata.candidatesTokenCount", Output),
    ("usageMetadata.thoughtsTokenCount", Reasoning),
    ("usageMetadata.totalTokenCount", Total),
    ("modelVersion", Model),
];

const OLLAMA: &[(&str, Counter)] = &[
    ("prompt_eval_count", Input),
    ("eval_count", Output),
    ("model", Model),
];

const BEDROCK: &[(&str, Counter)] = &[
    ("usage.inputTokens", Input),
    ("usage.outputTokens", Output),
    ("usage.cacheReadInputTokens", Cached),
    ("usage.cacheWriteInputTokens", Extra),
    ("amazon-bedrock-invocationMetrics.inputTokenCount", Input),
    ("amazon-bedrock-invocationMetrics.outputTokenCount", Output),
    (
        "amazon-bedrock-invocationMetrics.cacheReadInputTokenCount",
        Cached,
    ),
    (
        "amazon-bedrock-invocationMetrics.cacheWriteInputTokenCount",
        Extra,
    ),
];

impl UsageFormat {
    /// Assumed output tokens per event, until answers have been measured.
    pub fn first_tokens_per_event(self) -> u32 {
        match self {
            UsageFormat::OpenAi | UsageFormat::Ollama | UsageFormat::Bedrock => 1,
            UsageFormat::Anthropic => 4,
            UsageFormat::Gemini => 25,
        }
    }

    fn paths(self) -> (&'static [(&'static str, Counter)], Option<&'static str>) {
        match self {
            UsageFormat::OpenAi => (OPENAI, Some("\"usage\"")),
            UsageFormat::Anthropic => (ANTHROPIC, Some("\"usage\"")),
            UsageFormat::Gemini => (GEMINI, Some("\"usageMetadata\"")),
            UsageFormat::Ollama => (OLLAMA, Some("eval_count\"")),
            UsageFormat::Bedrock => (BEDROCK, None),
        }
    }
}

/// The numbers to read from answers: a format's, or one configured number. Created once, shared by
/// all answers.
#[derive(Clone, Debug)]
pub struct UsageSchema {
    format: Option<UsageFormat>,
    pub(super) paths: UsagePaths,
}

impl UsageSchema {
    /// Reads the tokens of a known format.
    pub fn of_format(format: UsageFormat) -> UsageSchema {
        let (paths, needle) = format.paths();
        let paths = UsagePaths::new(paths, needle, Decimal::ONE);
        UsageSchema {
            format: Some(format),
            paths: paths.expect("the paths above are valid; a test checks them"),
        }
    }

    /// Reads the number at a dotted path, times `scale`. `None` if the path has a quote, a
    /// backslash, or an empty or too long name.
    pub fn of_field(path: &str, scale: Decimal) -> Option<UsageSchema> {
        let last = path.rsplit('.').next().unwrap_or(path);
        let needle = format!("\"{last}\"");
        let paths = UsagePaths::new(&[(path, Units)], Some(&needle), scale)?;
        Some(UsageSchema {
            format: None,
            paths,
        })
    }

    /// The format; `None` if a single field is read.
    pub fn format(&self) -> Option<UsageFormat> {
        self.format
    }

    pub(super) fn usage(&self, told: &UsageCounters) -> Option<ReportedUsage> {
        let get = |counter| told.get(counter).unwrap_or(0);
        if !told.any() {
            return None;
        }
        let Some(format) = self.format else {
            return told.get(Units).map(ReportedUsage::Units);
        };
        let (input, cached, written, output) = match format {
            UsageFormat::Anthropic | UsageFormat::Bedrock => {
                let beside = get(Cached).saturating_add(get(Extra));
                let input = get(Input).saturating_add(beside);
                (input, get(Cached), get(Extra), get(Output))
            }
            UsageFormat::Gemini => {
                let input = get(Input).saturating_add(get(Extra));
                let output = get(Output).saturating_add(get(Reasoning));
                (input, get(Cached), 0, output)
            }
            UsageFormat::OpenAi | UsageFormat::Ollama => (get(Input), get(Cached), 0, get(Output)),
        };
        if let Some(seconds) = told.get(Units)
            && input == 0
            && output == 0
        {
            return Some(ReportedUsage::Seconds(seconds));
        }
        let output = output.max(get(Total).saturating_sub(input));
        Some(ReportedUsage::Tokens(TokenUsage {
            input,
            cached: cached.min(input),
            written,
            output,
            reasoning: get(Reasoning).min(output),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_of_every_format_are_fit() {
        for format in [
            UsageFormat::OpenAi,
            UsageFormat::Anthropic,
            UsageFormat::Gemini,
            UsageFormat::Ollama,
            UsageFormat::Bedrock,
        ] {
            assert_eq!(UsageSchema::of_format(format).format(), Some(format));
        }
    }

    #[test]
    fn a_field_is_a_path_of_names_that_can_be_compared() {
        for fit in ["cost", "usage.total_tokens", "a.b.c.d", "größe"] {
            assert!(UsageSchema::of_field(fit, Decimal::ONE).is_some(), "{fit}");
        }
        let (long, deep) = ("n".repeat(65), ["n"; 17].join("."));
        for unfit in [
            "", ".", "a.", ".a", "a..b", "a\"b", "a\\b", "a\nb", &long, &deep,
        ] {
            assert!(
                UsageSchema::of_field(unfit, Decimal::ONE).is_none(),
                "{unfit:?}"
            );
        }
    }
}
