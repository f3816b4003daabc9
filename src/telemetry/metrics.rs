//! The registry of metrics.
//!
//! Each [`Metrics`] has its own registry, so several gateways can share one process. Handles are
//! resolved when a configuration is compiled (see [`handles`](super::handles)). On the request path,
//! a counter costs one atomic addition and a histogram (`histogram.rs`) two.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::{
    histogram::{Histograms, lock},
    metric_table::{
        ALL, CONFIG_INFO, CONFIG_RELOAD_SUCCESS, CONFIG_RELOAD_TIMESTAMP, DECISION_SECONDS_METRIC,
        LOG_LINES_DROPPED, LOG_LINES_LEFT_OUT, Metric, MetricKind, PANICS,
    },
    process,
};

/// The registry and its data. Clones share it.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<SharedMetrics>,
}

struct SharedMetrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    histograms: Histograms,
    running_config: Mutex<Option<Gauge>>,
    refreshers: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl Metrics {
    /// Creates a registry that describes every metric.
    pub(super) fn new() -> Metrics {
        let builder = PrometheusBuilder::new().with_recommended_naming(true);
        let recorder = builder.build_recorder();
        for metric in ALL {
            let (name, unit, help) = (metric.name.into(), Some(metric.unit), metric.help.into());
            match metric.kind {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram(_) => {}
            }
        }
        let handle = recorder.handle();
        let shared = SharedMetrics {
            recorder,
            handle,
            histograms: Histograms::default(),
            running_config: Mutex::default(),
            refreshers: Mutex::default(),
        };
        Metrics {
            shared: Arc::new(shared),
        }
    }

    /// Whether both share one registry.
    pub(super) fn is(&self, other: &Metrics) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Time that the gateway itself spends on a request. Reading the clock twice costs more than a
    /// decision, so sample it.
    pub fn decision_seconds(&self) -> Histogram {
        self.histogram(&DECISION_SECONDS_METRIC, &[])
    }

    /// Panics; for the panic hook.
    pub fn panics(&self) -> Counter {
        self.counter(&PANICS, &[])
    }

    /// Dropped access lines; for the access log.
    pub fn log_lines_dropped(&self) -> Counter {
        self.counter(&LOG_LINES_DROPPED, &[])
    }

    /// Rejections without a line; for the access log.
    pub fn log_lines_left_out(&self) -> Counter {
        self.counter(&LOG_LINES_LEFT_OUT, &[])
    }

    /// Records that the configuration with this hash runs since `at`.
    pub fn config_loaded(&self, hash: &str, at: SystemTime) {
        let mut running = lock(&self.shared.running_config);
        if let Some(previous) = running.take() {
            previous.set(0.0);
        }
        let info = self.gauge(&CONFIG_INFO, &[hash]);
        info.set(1.0);
        *running = Some(info);
        self.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(1.0);
        let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.gauge(&CONFIG_RELOAD_TIMESTAMP, &[])
            .set(since.as_secs_f64());
    }

    /// Records that an invalid configuration was read and the previous one still runs.
    pub fn config_refused(&self) {
        self.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(0.0);
    }

    /// Calls `refresh` before each [`render`](Self::render), for values that are pulled (keys
    /// held).
    ///
    /// `refresh` must not call `on_render` or `render`.
    pub fn on_render(&self, refresh: impl Fn() + Send + 'static) {
        lock(&self.shared.refreshers).push(Box::new(refresh));
    }

    /// The Prometheus text format, version 0.0.4, sorted by name. Costs a sort of all series.
    pub fn render(&self) -> String {
        for refresh in lock(&self.shared.refreshers).iter() {
            refresh();
        }
        let mut text = self.shared.handle.render();
        self.shared.histograms.render(&mut text);
        process::render(&mut text);
        in_order(&text)
    }

    pub(super) fn counter(&self, metric: &Metric, labels: &[&str]) -> Counter {
        self.shared
            .recorder
            .register_counter(&key(metric, labels), &METADATA)
    }

    pub(super) fn gauge(&self, metric: &Metric, labels: &[&str]) -> Gauge {
        self.shared
            .recorder
            .register_gauge(&key(metric, labels), &METADATA)
    }

    pub(super) fn histogram(&self, metric: &Metric, labels: &[&str]) -> Histogram {
        self.shared.histograms.handle(metric, labels)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Sorts metrics by name and series by label. Histogram buckets keep their order.
fn in_order(text: &str) -> String {
    let mut families: Vec<Vec<&str>> = Vec::new();
    // series cannot be removed: each earlier configuration stays at 0, one per reload
    let is_past = |line: &str| line.starts_with(CONFIG_INFO.name) && line.ends_with(" 0");
    let lines = text.lines().filter(|line| !line.is_empty());
    for line in lines.filter(|line| !is_past(line)) {
        match families.last_mut() {
            Some(family) if !line.starts_with("# HELP ") => family.push(line),
            _ => families.push(vec![line]),
        }
    }
    families.sort();
    let mut ordered = String::with_capacity(text.len());
    for mut family in families {
        let is_histogram =
            |line: &&str| line.starts_with("# TYPE ") && line.ends_with(" histogram");
        if !family.iter().any(is_histogram) {
            family.sort_by_key(|line| (!line.starts_with('#')).then_some(*line));
        }
        for line in family {
            ordered.push_str(line);
            ordered.push('\n');
        }
        ordered.push('\n');
    }
    ordered
}

static METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

fn key(metric: &Metric, labels: &[&str]) -> Key {
    debug_assert_eq!(metric.labels.len(), labels.len(), "{}", metric.name);
    let labels: Vec<Label> = metric
        .labels
        .iter()
        .zip(labels)
        .map(|(name, value)| Label::new(*name, (*value).to_owned()))
        .collect();
    Key::from_parts(metric.name, labels)
}

#[cfg(test)]
mod tests;
