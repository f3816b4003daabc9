//! The cost of a limit: its source, its estimate, and how it is settled.

use std::sync::Arc;

use http::HeaderName;

use crate::{
    cost::{CostRule, CostUnits, Decimal, UsageFormat, UsageSchema},
    limit::Overdraft,
};

/// `[limit.NAME.cost]`.
#[derive(Clone, Debug)]
pub struct CostSettings {
    /// The preset; clients get its response fields and its error body.
    pub preset: Option<CostPreset>,
    /// The source of the cost.
    pub source: CostSource,
    /// The factor of a number in a header, a trailer or JSON.
    pub scale: Decimal,
    /// The place of the model's name in a request.
    pub model: ModelSource,
    /// Whether clients do not see the fields that contain the cost.
    pub hide: bool,
    /// The name of the price table if the cost is money; the unit is then its millionth.
    pub prices: Option<Arc<str>>,
    /// The name of the unit, such as `tokens` or `micro-usd`.
    pub unit: Arc<str>,
    /// The estimate and the final cost.
    pub rule: CostRule,
    /// The largest debt of a key.
    pub max_debt: Overdraft,
    /// Whether tidegate asks the upstream to report the usage of streams.
    pub ask_usage: bool,
    /// Whether a stream ends when its key has nothing left.
    pub cut_empty: bool,
    /// Whether the estimate needs the body of the request.
    pub reads_request: bool,
}

impl CostSettings {
    /// The debt bound; `None` if the cost is known on arrival, so that nothing is settled.
    pub fn overdraft(&self) -> Option<Overdraft> {
        (!self.source.is_known_on_arrival()).then_some(self.max_debt)
    }

    /// Whether the cost is in tokens, or in money at prices per token.
    pub fn is_of_tokens(&self) -> bool {
        matches!(self.rule.units, CostUnits::Tokens(_) | CostUnits::Money(_))
    }
}

/// A set of defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CostPreset {
    /// The OpenAI API, and servers that are compatible with it.
    OpenAi,
    /// The Anthropic Messages API.
    Anthropic,
    /// The Gemini API.
    Gemini,
    /// The Ollama API.
    Ollama,
    /// GraphQL servers that report `extensions.cost.actualQueryCost`.
    GraphQl,
}

impl CostPreset {
    /// The name in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            CostPreset::OpenAi => "openai",
            CostPreset::Anthropic => "anthropic",
            CostPreset::Gemini => "gemini",
            CostPreset::Ollama => "ollama",
            CostPreset::GraphQl => "graphql",
        }
    }

    /// The format in which its answers report tokens.
    pub fn format(self) -> Option<UsageFormat> {
        match self {
            CostPreset::OpenAi => Some(UsageFormat::OpenAi),
            CostPreset::Anthropic => Some(UsageFormat::Anthropic),
            CostPreset::Gemini => Some(UsageFormat::Gemini),
            CostPreset::Ollama => Some(UsageFormat::Ollama),
            CostPreset::GraphQl => None,
        }
    }
}

/// The source of a cost.
#[derive(Clone, Debug)]
pub enum CostSource {
    /// The `cost` of the route.
    Fixed,
    /// A field of the request, from trusted proxies.
    RequestHeader(HeaderName),
    /// A number in the body of the request, at this path.
    RequestJson(Box<str>),
    /// A field of the answer.
    ResponseHeader(HeaderName),
    /// A trailer of the answer.
    ResponseTrailer(HeaderName),
    /// JSON, lines of JSON, or an event stream.
    ResponseJson(Arc<UsageSchema>),
    /// Content bytes of the request.
    RequestBytes,
    /// Content bytes of the answer.
    ResponseBytes,
    /// Content bytes in both directions.
    Bytes,
    /// Milliseconds from sending the request to the last byte of the answer.
    UpstreamTime,
}

impl CostSource {
    /// Whether the cost is charged on arrival and never settled.
    pub fn is_known_on_arrival(&self) -> bool {
        matches!(
            self,
            CostSource::Fixed | CostSource::RequestHeader(_) | CostSource::RequestJson(_)
        )
    }

    /// Whether tidegate reads the body of the answer.
    pub fn reads_answer(&self) -> bool {
        matches!(self, CostSource::ResponseJson(_))
    }
}

/// The place of the model's name in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The field `model` of the JSON body.
    Body,
    /// A path parameter, up to its first colon.
    Param(String),
    /// A field of the request.
    Header(HeaderName),
}
