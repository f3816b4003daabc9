//! Creates the metrics of a process.

use super::{
    metric_table::{BUILD_INFO, CONFIG_RELOAD_SUCCESS, CONFIG_RELOAD_TIMESTAMP},
    metrics::Metrics,
};

/// Set by the release build.
const COMMIT: &str = match option_env!("TIDEGATE_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

impl Metrics {
    /// Creates a registry that describes every metric. Metrics without a configured label are
    /// present at zero.
    pub fn install() -> Metrics {
        let metrics = Metrics::new();
        metrics
            .gauge(&BUILD_INFO, &[env!("CARGO_PKG_VERSION"), COMMIT])
            .set(1.0);
        metrics.gauge(&CONFIG_RELOAD_SUCCESS, &[]).set(0.0);
        metrics.gauge(&CONFIG_RELOAD_TIMESTAMP, &[]).set(0.0);
        metrics.panics().increment(0);
        metrics.log_lines_dropped().increment(0);
        metrics.log_lines_left_out().increment(0);
        metrics.body_buffers(0, 0);
        for priority in ["critical", "normal", "low"] {
            metrics.shed(priority).increment(0);
        }
        let _ = metrics.spans();
        let _ = metrics.decision_seconds();
        let _ = metrics.handshakes();
        let _ = metrics.budget(&[], &[]);
        metrics
    }
}
