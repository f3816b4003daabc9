//! `[prices.NAME]`: the price of each model's tokens.

use std::{ops::Range, sync::Arc};

use super::names::check_name;
use crate::{
    config::{
        code::Code,
        diagnostic::{PendingDiagnostic, did_you_mean, quote},
        expanded_text::ExpandedText,
        keys,
        section::Section,
        value::ConfigValue,
    },
    cost::{
        Decimal, LongPrompt, MAX_MODEL_BYTES, ModelPrice, PartPrices, PriceTable,
        price::{MAX_PRICES, OTHER_MODEL},
    },
};

/// A price table with its name and position.
pub(super) struct NamedPrices {
    pub(super) name: String,
    pub(super) span: Range<usize>,
    pub(super) table: Option<Arc<PriceTable>>,
}

/// Compiles all price tables.
pub(super) fn compile(file: &Section<'_>) -> Vec<NamedPrices> {
    let Some(value) = file.get("prices") else {
        return Vec::new();
    };
    let named = |(name, models): (ExpandedText<'_>, ConfigValue<'_>)| {
        check_name(&name, "a price table");
        NamedPrices {
            table: table(&models).map(Arc::new),
            name: name.value,
            span: name.span,
        }
    };
    let tables = value.entries(|name| format!("[prices.{name}]"));
    tables.into_iter().map(named).collect()
}

/// The table that a text names; reports an unknown one.
pub(super) fn find(text: &ExpandedText<'_>, prices: &[NamedPrices]) -> Option<Arc<PriceTable>> {
    if let Some(found) = prices.iter().find(|prices| prices.name == text.value) {
        return found.table.clone();
    }
    let names = prices.iter().map(|prices| prices.name.as_str());
    let message = format!("there are no prices {}", text.shown());
    let label = match text.from_environment {
        true => String::new(),
        false => did_you_mean(&text.value, names),
    };
    let problem = PendingDiagnostic::new(Code::UnknownPrices, message).label(label);
    text.error(problem.hint("add [prices.NAME] with a line for each model"));
    None
}

fn table(models: &ConfigValue<'_>) -> Option<PriceTable> {
    let entries = models.entries(|model| format!("{} in {}", quote(model), models.what));
    let count = entries.len();
    let mut priced = Vec::new();
    for (model, value) in entries {
        let is_fit = is_model_name(&model);
        if let Some(price) = price(&value).filter(|_| is_fit) {
            priced.push((model.value, price));
        }
    }
    if count == 0 || count > MAX_PRICES {
        let message = format!("{} must have 1 to {MAX_PRICES} models", models.what);
        let hint = "write for example \"gpt-4o\" = { input = \"2.50\", output = \"10.00\" }";
        models.error(PendingDiagnostic::new(Code::OutOfRange, message).hint(hint));
    }
    (priced.len() == count).then(|| PriceTable::new(priced))?
}

/// Checks the name of a model: clients may see it, and it labels metrics.
fn is_model_name(name: &ExpandedText<'_>) -> bool {
    let text = name.value.strip_suffix('*').unwrap_or(&name.value);
    let is_plain = text
        .chars()
        .all(|c| c.is_ascii_graphic() && !"*\"\\,".contains(c));
    let is_fit = is_plain && name.value.len() <= MAX_MODEL_BYTES && !name.value.is_empty();
    let is_fit = is_fit && name.value != OTHER_MODEL;
    if !is_fit {
        let message = format!("{} cannot be the name of a model", name.shown());
        let hint = format!(
            "use 1 to {MAX_MODEL_BYTES} printable characters, with `*` only at the end; \
             `{OTHER_MODEL}` means all models without a price"
        );
        name.error(PendingDiagnostic::new(Code::BadName, message).hint(hint));
    }
    is_fit
}

fn price(value: &ConfigValue<'_>) -> Option<ModelPrice> {
    let section = Section::of(value, value.what.to_string(), &keys::MODEL_PRICE)?;
    let hint = "add its price per million tokens, for example \"2.50\"";
    section.require("input", hint);
    section.require("output", hint);
    let base = parts(&section);
    let long = section.get("long");
    section.finish();
    let long = match &long {
        Some(value) => Some(long_prompt(value, base)?),
        None => None,
    };
    (base.input.is_some() && base.output.is_some()).then(|| ModelPrice {
        prices: base.or(Decimal::ZERO),
        long,
    })
}

fn long_prompt(value: &ConfigValue<'_>, base: PartPrices) -> Option<LongPrompt> {
    let section = Section::of(value, value.what.to_string(), &keys::LONG_PROMPT)?;
    let hint = "add from = 200_000, the number of input tokens from which the prices apply";
    let from = section.require("from", hint);
    let prices = parts(&section).over(base).or(Decimal::ZERO);
    section.finish();
    let from = from?.integer()?;
    Some(LongPrompt { from, prices })
}

fn parts(section: &Section<'_>) -> PartPrices {
    let price = |key| {
        section
            .get(key)
            .and_then(|value: ConfigValue<'_>| value.decimal())
    };
    PartPrices {
        input: price("input"),
        cached: price("cached"),
        written: price("written"),
        output: price("output"),
        reasoning: price("reasoning"),
    }
}
