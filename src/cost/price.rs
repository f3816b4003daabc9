//! Prices for the parts of usage: weights in units, or prices in money.
//!
//! Money is counted in millionths of its unit. Prices are per million tokens, so a token at
//! `"2.50"` costs 2.5 millionths. Prices and weights are integers of 10⁻⁹. A cost is rounded up
//! once, at the end.

use super::{
    decimal::{Decimal, MAX_VALUE},
    format::TokenUsage,
};

/// Maximum entries in a price table.
pub const MAX_PRICES: usize = 4_096;

/// The price per token of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPrices {
    /// Input neither read from a cache nor written to it.
    pub input: Decimal,
    /// Input read from the provider's cache.
    pub cached: Decimal,
    /// Input written to the provider's cache.
    pub written: Decimal,
    /// Output except reasoning.
    pub output: Decimal,
    /// Reasoning.
    pub reasoning: Decimal,
}

/// Prices as configured. Missing parts default to the price of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartPrices {
    /// See [`TokenPrices`].
    pub input: Option<Decimal>,
    /// Default: `input`.
    pub cached: Option<Decimal>,
    /// Default: `input`.
    pub written: Option<Decimal>,
    /// See [`TokenPrices`].
    pub output: Option<Decimal>,
    /// Default: `output`.
    pub reasoning: Option<Decimal>,
}

impl PartPrices {
    /// Fills in missing parts. `default` applies to input and output.
    pub fn or(self, default: Decimal) -> TokenPrices {
        let input = self.input.unwrap_or(default);
        let output = self.output.unwrap_or(default);
        TokenPrices {
            input,
            cached: self.cached.unwrap_or(input),
            written: self.written.unwrap_or(input),
            output,
            reasoning: self.reasoning.unwrap_or(output),
        }
    }

    /// Fills in missing parts from `base`.
    pub fn over(self, base: PartPrices) -> PartPrices {
        PartPrices {
            input: self.input.or(base.input),
            cached: self.cached.or(base.cached),
            written: self.written.or(base.written),
            output: self.output.or(base.output),
            reasoning: self.reasoning.or(base.reasoning),
        }
    }
}

impl TokenPrices {
    /// Every token counts 1.
    pub const ONE_EACH: TokenPrices = TokenPrices {
        input: Decimal::ONE,
        cached: Decimal::ONE,
        written: Decimal::ONE,
        output: Decimal::ONE,
        reasoning: Decimal::ONE,
    };

    /// The cost of this usage, rounded up and at most [`MAX_VALUE`].
    pub fn cost(&self, usage: &TokenUsage) -> u64 {
        let beside = usage.cached.saturating_add(usage.written);
        let parts = [
            (usage.input.saturating_sub(beside), self.input),
            (usage.cached, self.cached),
            (usage.written, self.written),
            (usage.output.saturating_sub(usage.reasoning), self.output),
            (usage.reasoning, self.reasoning),
        ];
        let nanos = parts.iter().fold(0_u128, |sum, (tokens, price)| {
            // 64 bits times 64 bits fit in 128.
            let cost = u128::from(*tokens) * u128::from(price.nanos());
            sum.saturating_add(cost)
        });
        let units = nanos.div_ceil(u128::from(Decimal::ONE.nanos()));
        u64::try_from(units).unwrap_or(MAX_VALUE).min(MAX_VALUE)
    }
}

/// Prices of long prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongPrompt {
    /// Applies to the whole request from this many input tokens.
    pub from: u64,
    /// The prices then.
    pub prices: TokenPrices,
}

/// The price of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPrice {
    /// The usual prices.
    pub prices: TokenPrices,
    /// The prices of long prompts.
    pub long: Option<LongPrompt>,
}

impl ModelPrice {
    /// The cost of this usage, rounded up.
    pub fn cost(&self, usage: &TokenUsage) -> u64 {
        let prices = match &self.long {
            Some(long) if usage.input >= long.from => &long.prices,
            _ => &self.prices,
        };
        prices.cost(usage)
    }
}

/// One entry of a price table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PriceEntry {
    /// As configured, including a trailing `*`.
    name: Box<str>,
    price: ModelPrice,
}

/// Prices by model: the exact name wins, then the longest prefix before a `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceTable {
    /// Never empty.
    entries: Vec<PriceEntry>,
    /// Index of the most expensive entry.
    dearest: usize,
}

/// The entry of a price table that applies to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PricedModel<'a> {
    /// The entry's name; `other` for an unlisted model.
    pub name: &'a str,
    /// The entry's price; an unlisted model gets the most expensive one.
    pub price: &'a ModelPrice,
    /// Whether the table lists the model.
    pub is_listed: bool,
}

/// The label and key of unlisted models.
pub const OTHER_MODEL: &str = "other";

impl PriceTable {
    /// `None` if there are no entries, more than [`MAX_PRICES`], or two with one name.
    pub fn new(entries: Vec<(String, ModelPrice)>) -> Option<PriceTable> {
        let mut entries: Vec<PriceEntry> = entries
            .into_iter()
            .map(|(name, price)| PriceEntry {
                name: name.into(),
                price,
            })
            .collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let is_twice = entries.windows(2).any(|pair| match pair {
            [one, other] => one.name == other.name,
            _ => false,
        });
        if is_twice || entries.len() > MAX_PRICES {
            return None;
        }
        let rank = |entry: &PriceEntry| {
            let prices = entry
                .price
                .long
                .map_or(entry.price.prices, |long| long.prices);
            let prices = [prices, entry.price.prices];
            let most = |of: fn(&TokenPrices) -> u64| prices.iter().map(of).max().unwrap_or(0);
            (most(|p| p.output.nanos()), most(|p| p.input.nanos()))
        };
        let dearest = entries
            .iter()
            .enumerate()
            .max_by_key(|(_, entry)| rank(entry));
        let (dearest, _) = dearest?;
        Some(PriceTable { entries, dearest })
    }

    /// The entry for a model.
    pub fn find(&self, model: Option<&str>) -> PricedModel<'_> {
        let found = model.and_then(|model| self.exact(model).or_else(|| self.by_prefix(model)));
        match found {
            Some(entry) => PricedModel {
                name: &entry.name,
                price: &entry.price,
                is_listed: true,
            },
            None => PricedModel {
                name: OTHER_MODEL,
                price: &self.most_expensive().price,
                is_listed: false,
            },
        }
    }

    /// Names of the entries, for labels.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| &*entry.name)
    }

    fn most_expensive(&self) -> &PriceEntry {
        &self.entries[self.dearest]
    }

    fn exact(&self, model: &str) -> Option<&PriceEntry> {
        // A model named by an upstream or client must not match as a pattern.
        if model.ends_with('*') {
            return None;
        }
        let at = self
            .entries
            .binary_search_by(|entry| (*entry.name).cmp(model));
        self.entries.get(at.ok()?)
    }

    fn by_prefix(&self, model: &str) -> Option<&PriceEntry> {
        let patterns = self.entries.iter().filter_map(|entry| {
            let prefix = entry.name.strip_suffix('*')?;
            model.starts_with(prefix).then_some((prefix.len(), entry))
        });
        patterns
            .max_by_key(|(length, _)| *length)
            .map(|(_, entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn decimal(text: &str) -> Decimal {
        Decimal::parse(text).expect(text)
    }

    fn price(input: &str, output: &str) -> ModelPrice {
        let prices = PartPrices {
            input: Some(decimal(input)),
            output: Some(decimal(output)),
            ..PartPrices::default()
        };
        ModelPrice {
            prices: prices.or(Decimal::ZERO),
            long: None,
        }
    }

    #[test]
    fn the_prices_of_the_vectors_are_exact() {
        let text = include_str!("../../tests/vectors/cost_vectors.json");
        let vectors: Value = serde_json::from_str(text).expect("it is JSON");
        let cases = vectors["price"].as_array().expect("a list");
        assert_eq!(cases.len(), 6);
        for case in cases {
            let part = |name: &str| case["prices"][name].as_str().map(decimal);
            let prices = PartPrices {
                input: part("input"),
                cached: part("cached"),
                written: part("written"),
                output: part("output"),
                reasoning: part("reasoning"),
            };
            let count = |name: &str| case["usage"][name].as_u64().expect("a count");
            let usage = TokenUsage {
                input: count("input"),
                cached: count("cached"),
                written: count("written"),
                output: count("output"),
                reasoning: count("reasoning"),
            };
            let cost = prices.or(Decimal::ZERO).cost(&usage);
            assert_eq!(Some(cost), case["micro"].as_u64(), "{}", case["id"]);
        }
    }

    #[test]
    fn a_model_has_its_own_price_or_that_of_the_longest_prefix_or_the_highest() {
        let table = PriceTable::new(vec![
            ("gpt-4o".to_owned(), price("2.50", "10")),
            ("gpt-4o-mini*".to_owned(), price("0.15", "0.60")),
            ("gpt-*".to_owned(), price("5", "20")),
            ("big".to_owned(), price("14", "75")),
            ("bigger".to_owned(), price("15", "75")),
        ])
        .expect("a table");
        for (model, name, output) in [
            ("gpt-4o", "gpt-4o", "10"),
            ("gpt-4o-mini-2024-07-18", "gpt-4o-mini*", "0.60"),
            ("gpt-4o-2024-08-06", "gpt-*", "20"),
            ("gpt-*", "gpt-*", "20"),
            ("GPT-4o", "other", "75"),
            ("", "other", "75"),
        ] {
            let found = table.find(Some(model));
            assert_eq!(found.name, name, "{model}");
            assert_eq!(found.price.prices.output, decimal(output), "{model}");
            assert_eq!(found.is_listed, name != "other");
        }
        let unknown = table.find(None);
        assert_eq!(
            unknown.price.prices.input,
            decimal("15"),
            "of equals, the dearer input"
        );
    }

    #[test]
    fn a_long_prompt_costs_more_from_its_first_token() {
        let base = PartPrices {
            input: Some(decimal("3")),
            cached: Some(decimal("0.30")),
            output: Some(decimal("15")),
            ..PartPrices::default()
        };
        let long = PartPrices {
            input: Some(decimal("6")),
            output: Some(decimal("22.50")),
            ..PartPrices::default()
        };
        let prices = long.over(base).or(Decimal::ZERO);
        let model = ModelPrice {
            prices: base.or(Decimal::ZERO),
            long: Some(LongPrompt {
                from: 200_000,
                prices,
            }),
        };
        let usage = |input| TokenUsage {
            input,
            output: 10,
            ..TokenUsage::default()
        };
        assert_eq!(model.cost(&usage(199_999)), 199_999 * 3 + 150);
        assert_eq!(model.cost(&usage(200_000)), 200_000 * 6 + 225);
        assert_eq!(prices.cached, decimal("0.30"), "as in the base");
        assert_eq!(prices.written, decimal("6"), "as the long input");
    }

    #[test]
    fn huge_usage_at_huge_prices_costs_the_largest_value() {
        let usage = TokenUsage {
            input: u64::MAX,
            output: u64::MAX,
            ..TokenUsage::default()
        };
        let dear = PartPrices::default().or(Decimal::from_nanos(u64::MAX));
        assert_eq!(dear.cost(&usage), MAX_VALUE);
        assert_eq!(TokenPrices::ONE_EACH.cost(&TokenUsage::default()), 0);
    }

    #[test]
    fn a_table_has_entries_each_with_its_own_name() {
        let entry = |name: &str| (name.to_owned(), price("1", "1"));
        assert!(PriceTable::new(Vec::new()).is_none());
        assert!(PriceTable::new(vec![entry("a"), entry("a")]).is_none());
        assert!(PriceTable::new(vec![entry("a"), entry("a*")]).is_some());
    }
}
