//! `[limit.NAME.cost]`.

use super::record::{
    DefaultValue::{Note, Value},
    KeyRecord, Keys,
    ValueKind::{self, Boolean, Choice, Decimal, Integer, OneOf, Share, Table, Text},
};
use crate::cost::decimal::MAX_VALUE;

const ONE: u64 = 1_000_000_000;

/// The presets.
pub(in crate::config) const PRESETS: &[&str] =
    &["openai", "anthropic", "gemini", "ollama", "graphql"];

/// What a failed exchange costs.
const FAILURE: ValueKind = Choice(&["refund", "input", "reserved"]);

/// `[limit.NAME.cost]`.
pub(in crate::config) static COST: Keys = Keys {
    title: "[limit.NAME.cost]",
    keys: &[
        KeyRecord::new(
            "preset",
            Choice(PRESETS),
            Note("none"),
            "defaults for the other keys, and the response fields and the error body of that \
             provider. Any key beside it wins over it",
        ),
        KeyRecord::new(
            "from",
            Text("[source](costs.md#sources)"),
            Note("required without `preset`"),
            "where the cost is found",
        ),
        KeyRecord::new(
            "field",
            Text("dotted path"),
            Note("required by `request_json` and, without `preset`, by `response_json`"),
            "the path of the number in JSON, such as `usage.total_tokens`. It cannot pass through \
             a list",
        ),
        KeyRecord::new(
            "model",
            Text("`\"body\"`, `\"param:NAME\"` or `\"header:NAME\"`"),
            Value("\"body\""),
            "where the request names its model. Of a path parameter, the part before the first \
             colon",
        ),
        KeyRecord::new(
            "hide",
            Boolean,
            Value("false"),
            "do not pass on the response fields that contain the cost",
        ),
        KeyRecord::new(
            "scale",
            Decimal(1, ONE * 1_000_000_000),
            Value("1"),
            "the number found is multiplied by this and rounded up: `1_000_000` reads dollars as \
             micro-dollars",
        ),
        KeyRecord::new(
            "unit",
            Text("name"),
            Note("by `from` and `preset`, else `\"units\"`"),
            "the name of the unit, for people and for `qu` of `RateLimit-Policy`",
        ),
        KeyRecord::new(
            "count",
            Table(&COUNT),
            Note("every token counts 1"),
            "the weights of `input`, `cached`, `written`, `output` and `reasoning` tokens. \
             `cached` and `written` default to `input`, `reasoning` to `output`",
        ),
        KeyRecord::new(
            "prices",
            Text("name"),
            Note("none"),
            "the table [`[prices.NAME]`](#pricesnamemodel): the cost is money, in millionths, and \
             the rate is written as money",
        ),
        KeyRecord::new(
            "estimate",
            OneOf(&[
                Choice(&["learned", "max_tokens", "input"]),
                Integer(0, MAX_VALUE),
            ]),
            Value("\"learned\""),
            "the [units to reserve](costs.md#the-estimate) when a request arrives",
        )
        .said("`\"learned\"`, `\"max_tokens\"`, `\"input\"`, or units from 0 up"),
        KeyRecord::new(
            "first",
            Integer(1, MAX_VALUE),
            Value("1_000"),
            "the output that is assumed of a model until 20 answers were seen",
        ),
        KeyRecord::new(
            "grow",
            Share(0, 1_000_000),
            Value("0.25"),
            "when a stream has used more than is reserved, reserve this share more than it has \
             used; 0 waits for its end",
        ),
        KeyRecord::new(
            "max_debt",
            Decimal(0, 10 * ONE),
            Value("1"),
            "how far below zero settling may take a key, in capacities. Units beyond that are \
             forgiven, and counted",
        ),
        KeyRecord::new(
            "on_abort",
            Choice(&["counted", "reserved"]),
            Value("\"counted\""),
            "the cost when the client leaves during the answer: what was counted so far, or at \
             least what was reserved",
        ),
        KeyRecord::new(
            "on_error",
            FAILURE,
            Value("\"refund\""),
            "the cost of an answer of 400 or above that reports no usage",
        ),
        KeyRecord::new(
            "on_silence",
            FAILURE,
            Value("\"input\""),
            "the cost when the request was sent and no answer came",
        ),
        KeyRecord::new(
            "unreported",
            OneOf(&[Choice(&["counted", "reserved"]), Integer(0, MAX_VALUE)]),
            Value("\"counted\""),
            "the cost of a whole answer below 400 that reports no usage",
        )
        .said("`\"counted\"`, `\"reserved\"`, or units from 0 up"),
        KeyRecord::new(
            "ask_usage",
            Boolean,
            Value("false"),
            "for `openai`: add `stream_options.include_usage` to requests for a stream that do \
             not set `stream_options`",
        ),
        KeyRecord::new(
            "cut",
            Choice(&["off", "empty"]),
            Value("\"off\""),
            "`empty` ends a running stream when its key has nothing left",
        ),
        KeyRecord::new(
            "max",
            Integer(1, MAX_VALUE),
            Value("1_000_000_000"),
            "the largest cost that is believed. A larger one counts as this, and as \
             `implausible` in the metrics",
        ),
    ],
};

const WEIGHT: ValueKind = Decimal(0, ONE * 1_000_000_000);

/// `count` of `[limit.NAME.cost]`.
pub(in crate::config) static COUNT: Keys = Keys {
    title: "[limit.NAME.cost.count]",
    keys: &[
        KeyRecord::new("input", WEIGHT, Value("1"), "the weight of an input token"),
        KeyRecord::new(
            "cached",
            WEIGHT,
            Note("as `input`"),
            "the weight of an input token read from the provider's cache",
        ),
        KeyRecord::new(
            "written",
            WEIGHT,
            Note("as `input`"),
            "the weight of an input token written to the provider's cache",
        ),
        KeyRecord::new(
            "output",
            WEIGHT,
            Value("1"),
            "the weight of an output token",
        ),
        KeyRecord::new(
            "reasoning",
            WEIGHT,
            Note("as `output`"),
            "the weight of an output token spent on reasoning",
        ),
    ],
};

/// The shorthand: a preset, or the table.
pub(super) const COST_OR_PRESET: ValueKind = OneOf(&[Choice(PRESETS), Table(&COST)]);
