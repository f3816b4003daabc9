//! Histograms: counts in fixed buckets.
//!
//! The metrics library stores every sample of a histogram until the samples are merged. Here a
//! sample costs two atomic additions and a search among fewer than twenty bounds, and memory does
//! not grow with traffic.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use metrics::{Histogram, HistogramFn};
use metrics_exporter_prometheus::formatting::{
    sanitize_label_value, write_help_line, write_type_line,
};

use super::metric_table::{Metric, MetricKind};

/// Every histogram, by metric name and rendered labels.
#[derive(Debug, Default)]
pub(super) struct Histograms(Mutex<BTreeMap<&'static str, HistogramFamily>>);

#[derive(Debug)]
struct HistogramFamily {
    help: &'static str,
    series: BTreeMap<String, Arc<Distribution>>,
}

#[derive(Debug)]
struct Distribution {
    bounds: &'static [f64],
    /// Samples up to each bound and above the previous one, then those above all bounds.
    counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

impl Distribution {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }
}

impl HistogramFn for Distribution {
    fn record(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Relaxed);
        let add = |sum| Some((f64::from_bits(sum) + value).to_bits());
        // the closure always returns `Some`, so this cannot fail
        let _ = self.sum.fetch_update(Relaxed, Relaxed, add);
    }
}

impl Histograms {
    /// The histogram with these labels. The same labels return the same histogram.
    pub(super) fn handle(&self, metric: &Metric, labels: &[&str]) -> Histogram {
        let MetricKind::Histogram(bounds) = metric.kind else {
            return Histogram::noop();
        };
        debug_assert_eq!(metric.labels.len(), labels.len(), "{}", metric.name);
        let named = metric.labels.iter().zip(labels);
        let labels: Vec<String> = named
            .map(|(name, value)| format!("{name}=\"{}\"", sanitize_label_value(value)))
            .collect();
        let mut families = lock(&self.0);
        let family = families
            .entry(metric.name)
            .or_insert_with(|| HistogramFamily {
                help: metric.help,
                series: BTreeMap::new(),
            });
        let series = family.series.entry(labels.join(","));
        let distribution = series.or_insert_with(|| Arc::new(Distribution::new(bounds)));
        Histogram::from_arc(Arc::clone(distribution))
    }

    /// Appends every histogram in the Prometheus text format.
    pub(super) fn render(&self, text: &mut String) {
        for (name, family) in &*lock(&self.0) {
            write_help_line(text, name, None, None, family.help);
            write_type_line(text, name, None, None, "histogram");
            for (labels, distribution) in &family.series {
                // writing to a String cannot fail
                let _ = write_series(text, name, labels, distribution);
            }
        }
    }
}

fn write_series(
    text: &mut String,
    name: &str,
    labels: &str,
    distribution: &Distribution,
) -> std::fmt::Result {
    let comma = if labels.is_empty() { "" } else { "," };
    let braced = match labels {
        "" => String::new(),
        labels => format!("{{{labels}}}"),
    };
    let mut count = 0;
    let bounds = distribution.bounds.iter().map(f64::to_string);
    let bounds = bounds.chain(["+Inf".to_owned()]);
    for (bound, bucket) in bounds.zip(&distribution.counts) {
        count += bucket.load(Relaxed);
        writeln!(
            text,
            "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}"
        )?;
    }
    let sum = f64::from_bits(distribution.sum.load(Relaxed));
    writeln!(text, "{name}_sum{braced} {sum}")?;
    writeln!(text, "{name}_count{braced} {count}")
}

/// The guarded data is consistent between statements, so a panic elsewhere does not damage it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use metrics::Unit;

    use super::*;

    const METRIC: Metric = Metric {
        name: "a_seconds",
        kind: MetricKind::Histogram(&[0.5, 1.0]),
        unit: Unit::Seconds,
        labels: &["route"],
        help: "What it is.",
    };

    #[test]
    fn a_value_on_a_bound_is_within_it_and_buckets_add_up() {
        let histograms = Histograms::default();
        for value in [0.25, 0.5, 0.75, 7.0] {
            histograms.handle(&METRIC, &["a\"b\\c"]).record(value);
        }
        let mut text = String::new();
        histograms.render(&mut text);
        let expected = r#"# HELP a_seconds What it is.
# TYPE a_seconds histogram
a_seconds_bucket{route="a\"b\\c",le="0.5"} 2
a_seconds_bucket{route="a\"b\\c",le="1"} 3
a_seconds_bucket{route="a\"b\\c",le="+Inf"} 4
a_seconds_sum{route="a\"b\\c"} 8.5
a_seconds_count{route="a\"b\\c"} 4
"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn samples_of_several_threads_are_all_counted() {
        let histograms = Histograms::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let handle = histograms.handle(&METRIC, &["r"]);
                scope.spawn(move || (0..1_000).for_each(|_| handle.record(0.25)));
            }
        });
        let mut text = String::new();
        histograms.render(&mut text);
        assert!(text.contains("a_seconds_sum{route=\"r\"} 1000\n"), "{text}");
        assert!(
            text.contains("a_seconds_count{route=\"r\"} 4000\n"),
            "{text}"
        );
    }
}
