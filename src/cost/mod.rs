//! The cost of requests whose cost only the answer reveals. Independent of runtime and network.
//!
//! [`UsageMeter`] reads the reported usage from pieces of the answer's body as they pass.

pub mod calendar;
pub mod decimal;
pub mod format;
pub mod json;
pub mod learned;
pub mod meter;
pub mod price;
pub mod request;
pub mod reservation;
pub mod rule;
pub mod stated;

mod counters;
mod events;
mod paths;

pub use calendar::{Calendar, CalendarPeriod, CalendarUnit};
pub use counters::MAX_MODEL_BYTES;
pub use decimal::Decimal;
pub use format::{ReportedUsage, TokenUsage, UsageFormat, UsageSchema};
pub use learned::{AnswerSample, FirstRatios, LearnedRatios, ModelRatios};
pub use meter::{UnreadBody, UsageMeter};
pub use price::{LongPrompt, ModelPrice, PartPrices, PriceTable, TokenPrices};
pub use request::CostInputs;
pub use reservation::{CostReservation, Refund, Settlement};
pub use rule::{
    ActualCost, AnswerEnding, AnswerFacts, CostBasis, CostEstimate, CostRule, CostUnits,
    EstimateKind, FailureCost, UnreportedCost,
};
pub use stated::number_at;

#[cfg(test)]
mod tests;
