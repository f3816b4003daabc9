//! `[prices.NAME]`: one table per model.

use super::record::{
    DefaultValue::{Note, Required},
    KeyRecord, Keys,
    ValueKind::{self, ByName, Decimal, Integer, Table},
};
use crate::cost::decimal::MAX_VALUE;

const ONE: u64 = 1_000_000_000;

/// A price per million tokens.
const PRICE: ValueKind = Decimal(0, ONE * 1_000_000);

/// `[prices.NAME.MODEL]`.
pub(in crate::config) static MODEL_PRICE: Keys = Keys {
    title: "[prices.NAME.MODEL]",
    keys: &[
        KeyRecord::new("input", PRICE, Required, "per million input tokens"),
        KeyRecord::new("output", PRICE, Required, "per million output tokens"),
        KeyRecord::new(
            "cached",
            PRICE,
            Note("as `input`"),
            "per million input tokens read from the provider's cache",
        ),
        KeyRecord::new(
            "written",
            PRICE,
            Note("as `input`"),
            "per million input tokens written to the provider's cache",
        ),
        KeyRecord::new(
            "reasoning",
            PRICE,
            Note("as `output`"),
            "per million output tokens spent on reasoning",
        ),
        KeyRecord::new(
            "long",
            Table(&LONG_PROMPT),
            Note("none"),
            "the prices of requests with a long prompt: `from`, the number of input tokens from \
             which they apply, and any of the prices above",
        ),
    ],
};

/// `long` of a model's price.
pub(in crate::config) static LONG_PROMPT: Keys = Keys {
    title: "[prices.NAME.MODEL.long]",
    keys: &[
        KeyRecord::new(
            "from",
            Integer(1, MAX_VALUE),
            Required,
            "input tokens from which these prices apply",
        ),
        KeyRecord::new("input", PRICE, Note("as usual"), "per million input tokens"),
        KeyRecord::new(
            "output",
            PRICE,
            Note("as usual"),
            "per million output tokens",
        ),
        KeyRecord::new(
            "cached",
            PRICE,
            Note("as usual"),
            "per million cached tokens",
        ),
        KeyRecord::new(
            "written",
            PRICE,
            Note("as usual"),
            "per million written tokens",
        ),
        KeyRecord::new(
            "reasoning",
            PRICE,
            Note("as usual"),
            "per million reasoning tokens",
        ),
    ],
};

/// The prices of one model.
static MODEL: ValueKind = Table(&MODEL_PRICE);

/// Models with their prices.
static MODELS: ValueKind = ByName(&MODEL);

/// Price tables by name.
pub(super) const PRICES: ValueKind = ByName(&MODELS);
