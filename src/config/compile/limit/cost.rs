//! `[limit.NAME.cost]`: what requests of a limit cost.

use std::sync::Arc;

use http::HeaderName;

use super::super::{
    names::check_name,
    prices::{self, NamedPrices},
};
use crate::{
    config::{
        CostPreset, CostSettings, CostSource, LimitSettings, ModelSource, Over,
        code::Code,
        diagnostic::{PendingDiagnostic, did_you_mean, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
        value::ConfigValue,
    },
    cost::{
        CostRule, CostUnits, Decimal, EstimateKind, FailureCost, FirstRatios, PartPrices,
        PriceTable, UnreportedCost, UsageFormat, UsageSchema,
    },
    limit::Overdraft,
};

/// A price table with its name.
type Money = (Arc<str>, Arc<PriceTable>);

const PRESETS: [(&str, CostPreset); 5] = [
    ("openai", CostPreset::OpenAi),
    ("anthropic", CostPreset::Anthropic),
    ("gemini", CostPreset::Gemini),
    ("ollama", CostPreset::Ollama),
    ("graphql", CostPreset::GraphQl),
];

/// The path at which the `graphql` preset reads the cost.
const GRAPHQL_FIELD: &str = "extensions.cost.actualQueryCost";

/// Keys without effect if the cost is known on arrival.
const SETTLING_KEYS: [&str; 9] = [
    "hide",
    "grow",
    "max_debt",
    "on_abort",
    "on_error",
    "on_silence",
    "unreported",
    "ask_usage",
    "cut",
];

/// Reads `cost` of a limit. `None` if it is invalid; `Some(None)` if the limit counts requests.
pub(super) fn read(limit: &Section<'_>, prices: &[NamedPrices]) -> Option<Option<CostSettings>> {
    let Some(value) = limit.get("cost") else {
        return Some(None);
    };
    let title = format!("{}.cost]", limit.title.trim_end_matches(']'));
    if !value.is_string() && !value.is_table() {
        let problem = value.wrong_type("a preset or a table");
        value.error(problem.hint("write cost = \"openai\", or a table"));
        return None;
    }
    if value.is_table() {
        let section = Section::of(&value, title, &keys::COST)?;
        let preset = match section.get("preset") {
            Some(value) => Some(value.text()?.choice(&PRESETS, &[], "")?),
            None => None,
        };
        let settings = CostSection { section, preset }.settings(prices);
        return settings.map(Some);
    }
    let preset = value.text()?.choice(&PRESETS, &[], "")?;
    let document = limit.document;
    let section = Section::open(document, title, value.span(), &keys::COST, None);
    section.get("preset");
    let preset = Some(preset);
    CostSection { section, preset }.settings(prices).map(Some)
}

/// Reports settings of the limit that cannot be beside a cost.
pub(super) fn check(section: &Section<'_>, limit: &LimitSettings) {
    let Some(cost) = &limit.cost else { return };
    let is_global = section
        .get("scope")
        .is_some_and(|scope| scope.text().is_some_and(|text| text.value == "global"));
    let refuse = |is_wrong: bool, key: &'static str, message: &str, hint: &str| {
        if let Some(value) = section.get(key).filter(|_| is_wrong) {
            let problem = PendingDiagnostic::new(Code::UnfitCost, message).hint(hint);
            section.document.error(value.name_span(), problem);
        }
    };
    refuse(
        !limit.algorithm.supports_costs(),
        "algorithm",
        "this algorithm counts requests one by one and cannot charge costs",
        "write algorithm = \"token_bucket\", or remove the cost",
    );
    refuse(
        limit.over != Over::Reject,
        "over",
        "a limit on costs cannot delay requests: their cost is not known yet",
        "write over = \"reject\"",
    );
    refuse(
        limit.charge_rejected,
        "charge_rejected",
        "a rejected request has no cost to charge",
        "remove charge_rejected",
    );
    refuse(
        is_global && cost.overdraft().is_some_and(|debt| debt != Overdraft::ONE),
        "scope",
        "gateways that share a limit on costs all keep a debt of one capacity",
        "remove max_debt, or write scope = \"local\"",
    );
}

/// The table with its preset. Without a table, every key has its default.
struct CostSection<'a> {
    section: Section<'a>,
    preset: Option<CostPreset>,
}

impl<'a> CostSection<'a> {
    fn settings(self, prices: &[NamedPrices]) -> Option<CostSettings> {
        let section = &self.section;
        let scale = section.decimal("scale");
        let source = self.source(scale);
        let prices = self.prices(prices);
        let unit = self.unit(source.as_ref(), prices.as_ref().and_then(Option::as_ref));
        let max_debt = Overdraft::from_ppm(section.decimal("max_debt").nanos() / 1_000);
        let cut_empty = section.choice("cut", &[("off", false), ("empty", true)]);
        let (model, hide) = (self.model(), section.boolean("hide"));
        let ask_usage = section.boolean("ask_usage");
        let money = prices.as_ref().and_then(Option::as_ref);
        let table = money.map(|(_, table)| Arc::clone(table));
        let rule = self.rule(source.as_ref(), unit.as_deref(), table);
        let settings = CostSettings {
            preset: self.preset,
            source: source?,
            scale,
            model: model?,
            hide,
            prices: prices?.map(|(name, _)| name),
            unit: unit?,
            max_debt: max_debt?,
            ask_usage,
            cut_empty: cut_empty?,
            reads_request: false,
            rule: rule?,
        };
        self.check_source(&settings);
        if let Some(value) = section
            .get("max_debt")
            .filter(|_| max_debt < Some(Overdraft::ONE))
        {
            let message = "a debt of less than one capacity forgives what sustained load owes";
            let problem = PendingDiagnostic::new(Code::ForgivingDebt, message);
            value.warn(problem.hint("write max_debt = 1, or remove the key"));
        }
        let reads_request = match (&settings.source, settings.rule.estimate) {
            (CostSource::RequestJson(_), _) => true,
            (_, EstimateKind::Fixed(_)) => ask_usage || settings.prices.is_some(),
            _ => ask_usage || settings.is_of_tokens(),
        };
        self.section.finish();
        Some(CostSettings {
            reads_request,
            ..settings
        })
    }

    fn rule(
        &self,
        source: Option<&CostSource>,
        unit: Option<&str>,
        prices: Option<Arc<PriceTable>>,
    ) -> Option<CostRule> {
        let section = &self.section;
        let format = self.preset.and_then(CostPreset::format);
        let weights = self.weights();
        let units = match source {
            Some(CostSource::ResponseJson(schema)) if schema.format().is_some() => {
                match (prices, unit) {
                    (Some(prices), _) => CostUnits::Money(prices),
                    (None, Some("s")) => CostUnits::Seconds,
                    (None, _) => CostUnits::Tokens(weights.or(Decimal::ONE)),
                }
            }
            _ => CostUnits::Whole,
        };
        let estimate = self.estimate();
        let on_abort = section.choice("on_abort", &[("counted", false), ("reserved", true)]);
        let (on_error, on_silence) = (self.failure("on_error"), self.failure("on_silence"));
        let unreported = self.unreported();
        Some(CostRule {
            units,
            first: FirstRatios {
                output: section.integer("first"),
                tokens_per_event: format.map(UsageFormat::first_tokens_per_event),
            },
            grow: Decimal::from_nanos(u64::from(section.share("grow").ppm()) * 1_000),
            max: section.integer("max"),
            estimate: estimate?,
            reserved_on_abort: on_abort?,
            on_error: on_error?,
            on_silence: on_silence?,
            unreported: unreported?,
        })
    }

    /// Reads `from` and `field`.
    fn source(&self, scale: Decimal) -> Option<CostSource> {
        let section = &self.section;
        let field = section.get("field");
        let from = match section.get("from") {
            Some(value) => Some(value.text()?),
            None => None,
        };
        let word = match (&from, self.preset) {
            (Some(from), _) => from.value.as_str(),
            (None, Some(_)) => "response_json",
            (None, None) => {
                let hint = "add preset = \"openai\", or from = \"response_json\" with a field";
                section.require("from", hint);
                return None;
            }
        };
        let source = match word {
            "fixed" => CostSource::Fixed,
            "request_bytes" => CostSource::RequestBytes,
            "response_bytes" => CostSource::ResponseBytes,
            "bytes" => CostSource::Bytes,
            "upstream_time" => CostSource::UpstreamTime,
            "request_json" => {
                let hint = "add field = \"usage.cost\", the path of the number";
                let path = section.require("field", hint)?.text()?;
                path.parse("a path", |value| schema(value, scale))?;
                CostSource::RequestJson(path.value.into())
            }
            "response_json" => CostSource::ResponseJson(Arc::new(self.schema(scale)?)),
            _ => return self.field_source(&from?),
        };
        let reads_json = matches!(
            source,
            CostSource::RequestJson(_) | CostSource::ResponseJson(_)
        );
        if let Some(field) = field.filter(|_| !reads_json) {
            self.has_no_effect(&field, "write from = \"response_json\", or remove field");
        }
        Some(source)
    }

    /// The numbers to read from an answer's JSON.
    fn schema(&self, scale: Decimal) -> Option<UsageSchema> {
        if let Some(value) = self.section.get("field") {
            let path = value.text()?;
            return path.parse("a path", |value| schema(value, scale));
        }
        match (self.preset, self.preset.and_then(CostPreset::format)) {
            (_, Some(format)) => Some(UsageSchema::of_format(format)),
            (Some(_), None) => UsageSchema::of_field(GRAPHQL_FIELD, scale),
            (None, None) => {
                let hint = "add field = \"usage.total_tokens\", the path of the number";
                self.section.require("field", hint);
                None
            }
        }
    }

    /// `request_header:NAME` and the like.
    fn field_source(&self, from: &ExpandedText<'_>) -> Option<CostSource> {
        type OfField = fn(HeaderName) -> CostSource;
        const KINDS: [(&str, OfField); 3] = [
            ("request_header:", CostSource::RequestHeader),
            ("response_header:", CostSource::ResponseHeader),
            ("response_trailer:", CostSource::ResponseTrailer),
        ];
        for (prefix, source) in KINDS {
            if let Some(name) = from.value.strip_prefix(prefix) {
                return from.parse("a source", |_| header(name)).map(source);
            }
        }
        let known = SOURCES.map(quote).join(", ");
        let message = format!("{} is not a source of costs", from.shown());
        from.error(
            PendingDiagnostic::new(Code::UnknownChoice, message)
                .label(did_you_mean(&from.value, SOURCES))
                .hint(format!("expected one of {known}")),
        );
        None
    }

    fn model(&self) -> Option<ModelSource> {
        let Some(value) = self.section.get("model") else {
            return Some(ModelSource::Body);
        };
        let text = value.text()?;
        text.parse("a place of the model", |value| {
            let bad = || {
                let message = format!("{} is not a place of a model's name", quote(value));
                PendingDiagnostic::new(Code::UnknownChoice, message)
                    .hint("write \"body\", \"param:NAME\" or \"header:NAME\"")
            };
            match value.split_once(':') {
                None if value == "body" => Ok(ModelSource::Body),
                Some(("param", name)) if !name.is_empty() => {
                    Ok(ModelSource::Param(name.to_owned()))
                }
                Some(("header", name)) => header(name).map(ModelSource::Header),
                _ => Err(bad()),
            }
        })
    }

    /// The price table and its name. `None` if it is unknown; `Some(None)` without prices.
    fn prices(&self, known: &[NamedPrices]) -> Option<Option<Money>> {
        let Some(value) = self.section.get("prices") else {
            return Some(None);
        };
        for key in ["count", "unit"] {
            if let Some(value) = self.section.get(key) {
                self.has_no_effect(
                    &value,
                    "prices give the unit and the weights: remove the key",
                );
            }
        }
        let text = value.text()?;
        let table = prices::find(&text, known)?;
        Some(Some((text.value.into(), table)))
    }

    fn unit(&self, source: Option<&CostSource>, money: Option<&Money>) -> Option<Arc<str>> {
        if let Some((currency, _)) = money {
            return Some(format!("micro-{currency}").into());
        }
        if let Some(value) = self.section.get("unit") {
            let text = value.text()?;
            return check_name(&text, "a unit").then(|| text.value.into());
        }
        let unit = match source {
            Some(CostSource::ResponseJson(schema)) if schema.format().is_some() => "tokens",
            Some(CostSource::ResponseJson(_)) if self.preset.is_some() => "points",
            Some(CostSource::RequestBytes | CostSource::ResponseBytes | CostSource::Bytes) => {
                "content-bytes"
            }
            Some(CostSource::UpstreamTime) => "ms",
            _ => "units",
        };
        Some(unit.into())
    }

    fn weights(&self) -> PartPrices {
        let title = format!("{}.count]", self.section.title.trim_end_matches(']'));
        let count = self.section.get("count");
        let Some(count) = count.and_then(|value| Section::of(&value, title, &keys::COUNT)) else {
            return PartPrices::default();
        };
        let weight = |key| {
            count
                .get(key)
                .and_then(|value: ConfigValue<'_>| value.decimal())
        };
        let weights = PartPrices {
            input: weight("input"),
            cached: weight("cached"),
            written: weight("written"),
            output: weight("output"),
            reasoning: weight("reasoning"),
        };
        count.finish();
        weights
    }

    fn estimate(&self) -> Option<EstimateKind> {
        const WORDS: [(&str, EstimateKind); 3] = [
            ("learned", EstimateKind::Learned),
            ("max_tokens", EstimateKind::MaxTokens),
            ("input", EstimateKind::Input),
        ];
        self.word_or_number(
            "estimate",
            &WORDS,
            EstimateKind::Learned,
            EstimateKind::Fixed,
        )
    }

    fn unreported(&self) -> Option<UnreportedCost> {
        const WORDS: [(&str, UnreportedCost); 2] = [
            ("counted", UnreportedCost::Counted),
            ("reserved", UnreportedCost::Reserved),
        ];
        let fixed = UnreportedCost::Fixed;
        self.word_or_number("unreported", &WORDS, UnreportedCost::Counted, fixed)
    }

    fn word_or_number<T: Copy>(
        &self,
        key: &'static str,
        words: &[(&str, T)],
        default: T,
        of_number: fn(u64) -> T,
    ) -> Option<T> {
        match self.section.get(key) {
            None => Some(default),
            Some(value) if value.is_string() => value.text()?.choice(words, &[], ""),
            Some(value) => value.integer().map(of_number),
        }
    }

    fn failure(&self, key: &'static str) -> Option<FailureCost> {
        let words = [
            ("refund", FailureCost::Refund),
            ("input", FailureCost::Input),
            ("reserved", FailureCost::Reserved),
        ];
        self.section.choice(key, &words)
    }

    /// Reports keys that have no effect on a cost from this source.
    fn check_source(&self, cost: &CostSettings) {
        let refuse = |keys: &[&'static str], hint: &str| {
            for value in keys.iter().filter_map(|key| self.section.get(key)) {
                self.has_no_effect(&value, hint);
            }
        };
        if cost.source.is_known_on_arrival() {
            refuse(
                &SETTLING_KEYS,
                "the cost is known on arrival and is not settled: remove the key",
            );
        }
        if matches!(cost.source, CostSource::Fixed) {
            let keys = ["estimate", "first", "model", "max"];
            refuse(&keys, "the cost is that of the route: remove the key");
        }
        let reads_number = match &cost.source {
            CostSource::ResponseJson(schema) => schema.format().is_none(),
            CostSource::RequestHeader(_)
            | CostSource::RequestJson(_)
            | CostSource::ResponseHeader(_)
            | CostSource::ResponseTrailer(_) => true,
            _ => false,
        };
        if !reads_number {
            refuse(
                &["scale"],
                "it applies to one number from a field or from JSON",
            );
        }
        if !cost.is_of_tokens() {
            let hint = "only presets of language models report tokens";
            refuse(&["count", "prices"], hint);
        }
        if cost.preset != Some(CostPreset::OpenAi) || !cost.source.reads_answer() {
            refuse(&["ask_usage"], "it is for preset = \"openai\"");
        }
        if !cost.source.reads_answer() {
            refuse(
                &["cut"],
                "only event streams whose usage is read can be cut",
            );
        }
        let needs_tokens = matches!(
            cost.rule.estimate,
            EstimateKind::MaxTokens | EstimateKind::Input
        );
        if needs_tokens && !cost.is_of_tokens() {
            refuse(
                &["estimate"],
                "this cost is not in tokens: write \"learned\" or a number",
            );
        }
    }

    fn has_no_effect(&self, value: &ConfigValue<'a>, hint: &str) {
        let message = format!("{} has no effect on this cost", value.what);
        let problem = PendingDiagnostic::new(Code::UnfitCost, message).hint(hint);
        value.document.error(value.name_span(), problem);
    }
}

/// The sources that `from` can name.
const SOURCES: [&str; 10] = [
    "response_json",
    "response_header:NAME",
    "response_trailer:NAME",
    "request_json",
    "request_header:NAME",
    "request_bytes",
    "response_bytes",
    "bytes",
    "upstream_time",
    "fixed",
];

fn schema(path: &str, scale: Decimal) -> Result<UsageSchema, PendingDiagnostic> {
    UsageSchema::of_field(path, scale).ok_or_else(|| {
        let message = format!("{} is not a path in JSON", quote(path));
        PendingDiagnostic::new(Code::BadField, message)
            .hint("write names with points between them, for example \"usage.total_tokens\"")
    })
}

fn header(name: &str) -> Result<HeaderName, PendingDiagnostic> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
        let message = format!("{} is not an HTTP field name", quote(name));
        PendingDiagnostic::new(Code::BadField, message)
            .hint("use letters, digits and `-`, as in response_header:x-cost")
    })
}
