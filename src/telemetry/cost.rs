//! Metric handles of limits on costs.

use metrics::{Counter, Gauge, Histogram};

use super::{metric_table as table, metrics::Metrics};

/// The label of models that the price table does not list.
const OTHER: &str = "other";

impl Metrics {
    /// The handles of one limit on costs. `sources` and `unread` are closed lists; `models` are
    /// names of its price table.
    pub fn cost<'a>(
        &self,
        limit: &str,
        sources: &[&'static str],
        unread: &[&'static str],
        models: impl Iterator<Item = &'a str>,
    ) -> CostMetrics {
        let units = |kind| self.counter(&table::COST_UNITS, &[limit, kind]);
        let model = |name: &str| {
            let counter = self.counter(&table::COST_MODEL_UNITS, &[limit, name]);
            (Box::from(name), counter)
        };
        let by = |metric, names: &[&'static str]| {
            let counter = |&name| (name, self.counter(metric, &[limit, name]));
            names.iter().map(counter).collect()
        };
        CostMetrics {
            reserved: units("reserved"),
            grown: units("grown"),
            refunded: units("refunded"),
            extra: units("extra"),
            forgiven: units("forgiven"),
            settled: units("settled"),
            in_flight: self.gauge(&table::COST_IN_FLIGHT, &[limit]),
            ratio: self.histogram(&table::COST_RATIO, &[limit]),
            cut: self.counter(&table::COST_CUT, &[limit]),
            owed_keys: self.counter(&table::COST_OWED_KEYS, &[limit]),
            by_source: by(&table::COST_SETTLED, sources),
            unread: by(&table::COST_UNREAD, unread),
            by_model: models.filter(|name| *name != OTHER).map(model).collect(),
            other_models: self.counter(&table::COST_MODEL_UNITS, &[limit, OTHER]),
        }
    }
}

/// Metrics of one limit on costs.
#[derive(Clone, Debug)]
pub struct CostMetrics {
    /// Units reserved on arrival.
    pub reserved: Counter,
    /// Units that running answers have reserved beyond that.
    pub grown: Counter,
    /// Units held and not used.
    pub refunded: Counter,
    /// Units used and not held.
    pub extra: Counter,
    /// Units used that the debt bound has dropped.
    pub forgiven: Counter,
    /// Units used.
    pub settled: Counter,
    /// Units held now.
    pub in_flight: Gauge,
    /// Actual cost divided by the first estimate.
    pub ratio: Histogram,
    /// Streams ended because their key had nothing left.
    pub cut: Counter,
    /// Keys that settling has taken below zero.
    pub owed_keys: Counter,
    by_source: Vec<(&'static str, Counter)>,
    unread: Vec<(&'static str, Counter)>,
    by_model: Vec<(Box<str>, Counter)>,
    other_models: Counter,
}

impl CostMetrics {
    /// Counts a settled request.
    pub fn settled_from(&self, source: &str) {
        count(&self.by_source, source);
    }

    /// Counts an answer that was not read.
    pub fn unread(&self, why: &str) {
        count(&self.unread, why);
    }

    /// Counts units of a model of the price table.
    pub fn of_model(&self, model: &str, units: u64) {
        let mut known = self.by_model.iter();
        let counter = known.find(|(name, _)| **name == *model);
        counter
            .map_or(&self.other_models, |(_, counter)| counter)
            .increment(units);
    }
}

fn count(counters: &[(&'static str, Counter)], name: &str) {
    if let Some((_, counter)) = counters.iter().find(|(known, _)| *known == name) {
        counter.increment(1);
    }
}
