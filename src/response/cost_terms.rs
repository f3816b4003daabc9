//! The unit of a limit on costs, and the SDK of its clients.

/// The provider whose SDK clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sdk {
    /// OpenAI.
    OpenAi,
    /// Anthropic.
    Anthropic,
    /// Google Gemini.
    Gemini,
}

/// The tokens that a limit counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountedTokens {
    /// Input and output.
    #[default]
    All,
    /// Only input.
    Input,
    /// Only output.
    Output,
}

/// What a limit on costs tells clients beside its quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostTerms {
    /// The unit, such as `tokens`.
    pub unit: Box<str>,
    /// The tokens that count.
    pub counted: CountedTokens,
    /// The provider of its preset.
    pub sdk: Option<Sdk>,
    /// Whether it is a budget of a calendar period: waiting for it is not worth a retry.
    pub is_budget: bool,
    /// The name of the money whose millionths it counts.
    pub currency: Option<Box<str>>,
}

impl CostTerms {
    /// Whether it counts tokens.
    pub(super) fn is_tokens(&self) -> bool {
        &*self.unit == "tokens"
    }
}
