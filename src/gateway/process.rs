//! State that survives reloads: counters, secrets, logs, runtime overrides and the limiter's clock.
//! One per process; every active configuration uses it
//! ([`ActiveConfig`](super::active_config::ActiveConfig)).

use std::{
    io::{self, IsTerminal as _},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use metrics::{Counter, Histogram};
use tokio::time::Instant;

use super::{decision_log::DecisionLogs, log_once::LogOnce, runtime_overrides::RuntimeOverrides};
use crate::{
    config::Snapshot,
    identity::KeyHasher,
    limit::Store,
    listener::body_buffers::BodyBuffers,
    telemetry::{
        AccessLines, Metrics,
        access::{AccessLog, LineCap, Style},
        trace::Spans,
    },
};

/// The state of a gateway that survives reloads. Requests take no lock in it.
///
/// The first configuration fixes `max_keys`, the number of workers, the span collector and the
/// access-line format for the life of the process.
#[derive(Debug)]
pub struct Process {
    pub(super) store: Arc<Store>,
    pub(super) hasher: KeyHasher,
    /// The hash key of the workers' token caches.
    pub(super) token_secret: [u8; 32],
    /// Bounds the memory for request bodies that workers read ahead.
    pub(super) body_buffers: Arc<BodyBuffers>,
    pub(super) decision_seconds: Histogram,
    /// Our name in `Via`, random per process: it distinguishes a loop from two gateways in a row.
    pub(super) pseudonym: String,
    pub(super) runtime_overrides: Arc<RuntimeOverrides>,
    pub(super) decision_logs: DecisionLogs,
    /// Logs one warning about a proxy that `trusted_proxies` does not list.
    pub(super) unnamed_proxy: Arc<LogOnce>,
    metrics: Metrics,
    /// Started by the first configuration with access lines. Each worker writes through a clone.
    access: OnceLock<Mutex<AccessLog>>,
    rejected_lines: LineCap,
    rejected_left_out: Counter,
    spans: Option<Spans>,
    /// Time zero of the limiter.
    epoch: Instant,
    /// The wall clock at `epoch`, in nanoseconds since 1970.
    epoch_wall_ns: AtomicU64,
}

/// Bytes of access lines that may queue for standard output.
const ACCESS_QUEUE_BYTES: usize = 4 * 1024 * 1024;

/// A larger deviation from the expected wall clock means that somebody set the clock.
const CLOCK_WAS_SET_NS: u64 = 500_000_000;

impl Process {
    /// Creates the state for this first configuration, and starts the span exporter. Fails if the
    /// system has no entropy or cannot start a thread.
    pub fn start(first: &Snapshot, metrics: Metrics) -> io::Result<Arc<Self>> {
        let spans = (first.trace.collector.clone())
            .map(|collector| Spans::start(collector, metrics.spans()))
            .transpose()?;
        let epoch = Instant::now();
        Ok(Arc::new(Self {
            store: Arc::new(Store::new(first.server.max_keys)),
            hasher: KeyHasher::new(secret()?),
            token_secret: secret()?,
            body_buffers: BodyBuffers::new(first.server.max_body_buffer),
            decision_seconds: metrics.decision_seconds(),
            pseudonym: pseudonym(),
            runtime_overrides: Arc::default(),
            decision_logs: DecisionLogs::new(first.server.worker_threads()),
            unnamed_proxy: Arc::default(),
            access: OnceLock::new(),
            rejected_lines: LineCap::default(),
            rejected_left_out: metrics.log_lines_left_out(),
            spans,
            metrics,
            epoch,
            epoch_wall_ns: (wall_ns().saturating_sub(since_ns(epoch))).into(),
        }))
    }

    /// A copy with the same counters and overrides, but separate metrics, logs and decision log.
    /// Used to try what this process would decide.
    pub(super) fn observer(&self) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(&self.store),
            hasher: self.hasher,
            token_secret: self.token_secret,
            body_buffers: Arc::clone(&self.body_buffers),
            decision_seconds: Histogram::noop(),
            pseudonym: self.pseudonym.clone(),
            runtime_overrides: Arc::clone(&self.runtime_overrides),
            decision_logs: DecisionLogs::new(1),
            unnamed_proxy: Arc::clone(&self.unnamed_proxy),
            access: OnceLock::new(),
            rejected_lines: LineCap::default(),
            rejected_left_out: Counter::noop(),
            spans: None,
            metrics: Metrics::install(),
            epoch: self.epoch,
            epoch_wall_ns: self.epoch_wall_ns.load(Relaxed).into(),
        })
    }

    /// Starts the access log if this configuration is the first with access lines.
    pub(super) fn start_access_log(&self, snapshot: &Snapshot) -> io::Result<()> {
        if snapshot.log.access == AccessLines::Off || self.access.get().is_some() {
            return Ok(());
        }
        let style = match snapshot.log.format.is_json(io::stdout().is_terminal()) {
            true => Style::Json,
            false => Style::Text,
        };
        let dropped = self.metrics.log_lines_dropped();
        let log = AccessLog::start(style, Box::new(io::stdout()), ACCESS_QUEUE_BYTES, dropped)?;
        // Configurations are prepared one at a time, so nobody else has set it meanwhile.
        let _ = self.access.set(Mutex::new(log));
        Ok(())
    }

    /// The metrics registry.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The memory for bodies read ahead.
    pub fn body_buffers(&self) -> &BodyBuffers {
        &self.body_buffers
    }

    /// The runtime overrides.
    pub fn runtime_overrides(&self) -> &RuntimeOverrides {
        &self.runtime_overrides
    }

    /// The workers' decision logs.
    pub fn decision_logs(&self) -> &DecisionLogs {
        &self.decision_logs
    }

    /// The span exporter, if spans are on.
    pub(super) fn spans(&self) -> Option<&Spans> {
        self.spans.as_ref()
    }

    /// An access-line writer for one worker.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        let access = self.access.get()?;
        let access = access.lock().unwrap_or_else(PoisonError::into_inner);
        Some(access.clone())
    }

    /// Admits at most `most` lines about rejections per second. `Some(n)`: write this one, and
    /// report `n` suppressed before it.
    pub(super) fn admit_rejected_line(&self, at: Instant, most: u32) -> Option<u64> {
        let second = self.nanoseconds(at) / 1_000_000_000;
        let admitted = self.rejected_lines.admit(second, most);
        if admitted.is_none() {
            self.rejected_left_out.increment(1);
        }
        admitted
    }

    /// Converts an instant to the limiter's time.
    pub(super) fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Time zero of the limiter.
    pub(super) fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Converts an instant to a date. All workers agree on it, and it ignores slewing of the system
    /// clock, so a window always ends at the same second.
    pub(super) fn wall_clock(&self, at: Instant) -> SystemTime {
        let epoch_ns = self.epoch_wall_ns.load(Relaxed);
        let since_ns = epoch_ns.saturating_add(self.nanoseconds(at));
        SystemTime::UNIX_EPOCH + Duration::from_nanos(since_ns)
    }

    /// Adopts a wall clock that was set. Call it about once a second, outside the workers.
    pub fn follow_wall_clock(&self) {
        let seen = wall_ns().saturating_sub(since_ns(self.epoch));
        if seen.abs_diff(self.epoch_wall_ns.load(Relaxed)) > CLOCK_WAS_SET_NS {
            self.epoch_wall_ns.store(seen, Relaxed);
        }
    }

    /// Flushes access lines and spans, each within `patience`. Blocks: call it outside any runtime,
    /// after the last worker has stopped.
    pub(super) fn close(&self, patience: Duration) {
        if let Some(spans) = &self.spans {
            spans.close(patience);
        }
        if let Some(access) = self.access.get() {
            let access = access.lock().unwrap_or_else(PoisonError::into_inner);
            access.close(patience);
        }
    }
}

fn wall_ns() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn since_ns(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn secret<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut secret = [0; BYTES];
    getrandom::fill(&mut secret).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(secret)
}

fn pseudonym() -> String {
    let mut id = [0; 4];
    // Without entropy two processes may share a name, and a chain of both would look like a loop.
    if getrandom::fill(&mut id).is_err() {
        id = std::process::id().to_le_bytes();
    }
    format!("tidegate-{:08x}", u32::from_le_bytes(id))
}
