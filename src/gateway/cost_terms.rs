//! What clients are told about a limit on costs.

use crate::{
    config::{CostPreset, LimitSettings},
    cost::{CostUnits, Decimal},
    response::{CostTerms, CountedTokens, Sdk},
};

/// The unit of a limit and the SDK of its clients; `None` if it counts requests.
pub(super) fn of(limit: &LimitSettings) -> Option<CostTerms> {
    let cost = limit.cost.as_ref()?;
    let counted = match &cost.rule.units {
        CostUnits::Tokens(weights) if weights.output == Decimal::ZERO => CountedTokens::Input,
        CostUnits::Tokens(weights) if weights.input == Decimal::ZERO => CountedTokens::Output,
        _ => CountedTokens::All,
    };
    let sdk = match cost.preset {
        Some(CostPreset::OpenAi) => Some(Sdk::OpenAi),
        Some(CostPreset::Anthropic) => Some(Sdk::Anthropic),
        Some(CostPreset::Gemini) => Some(Sdk::Gemini),
        Some(CostPreset::Ollama | CostPreset::GraphQl) | None => None,
    };
    Some(CostTerms {
        unit: (*cost.unit).into(),
        counted,
        sdk,
        is_budget: false,
        currency: cost.prices.as_deref().map(Into::into),
    })
}
