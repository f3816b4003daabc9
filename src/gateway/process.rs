//! What outlives a reload: counters, secrets, logs, runtime overrides and the limiter's clock. One for each process;
//! every configuration that becomes active uses it ([`Shared`](super::shared::Shared)).

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

use super::{log_once::LogOnce, notebook::Notebooks, rulings::Rulings};
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

/// The part of a gateway that a reload keeps. Nothing in it is locked on a request's path.
///
/// The first configuration decides what is fixed for the life of the process: `max_keys`, the number of workers, where
/// spans go, and the format of access lines.
#[derive(Debug)]
pub struct Process {
    pub(super) store: Arc<Store>,
    pub(super) hasher: KeyHasher,
    /// Key of the hash under which workers cache tokens.
    pub(super) token_secret: [u8; 32],
    /// Bounds the request bodies that all workers read ahead.
    pub(super) body_buffers: Arc<BodyBuffers>,
    pub(super) decision_seconds: Histogram,
    /// Our name in `Via`, different in each process: a loop is told from two gateways in a row.
    pub(super) pseudonym: String,
    pub(super) rulings: Arc<Rulings>,
    pub(super) notebooks: Notebooks,
    /// Warns once of a proxy that the configuration does not trust.
    pub(super) unnamed_proxy: Arc<LogOnce>,
    metrics: Metrics,
    /// Started by the first configuration that wants access lines. Workers write through clones.
    access: OnceLock<Mutex<AccessLog>>,
    rejected_lines: LineCap,
    rejected_left_out: Counter,
    spans: Option<Spans>,
    /// The origin of the limiter's time.
    epoch: Instant,
    /// The wall clock at that moment, in nanoseconds since 1970.
    epoch_wall_ns: AtomicU64,
}

/// Bytes of access lines that may wait for standard output.
const ACCESS_QUEUE_BYTES: usize = 4 * 1024 * 1024;

/// A wall clock that differs by more than this from the expected time was set.
const CLOCK_WAS_SET_NS: u64 = 500_000_000;

impl Process {
    /// A process that will run this configuration first. Starts the sender of spans. Fails where the system has no entropy or
    /// no thread to give.
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
            rulings: Arc::default(),
            notebooks: Notebooks::new(first.server.worker_threads()),
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

    /// A process with the same counters and overrides that counts, logs and remembers apart: to try what this one would decide.
    pub(super) fn observer(&self) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(&self.store),
            hasher: self.hasher,
            token_secret: self.token_secret,
            body_buffers: Arc::clone(&self.body_buffers),
            decision_seconds: Histogram::noop(),
            pseudonym: self.pseudonym.clone(),
            rulings: Arc::clone(&self.rulings),
            notebooks: Notebooks::new(1),
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

    /// Starts the access log where this configuration is the first to want one.
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
        // configurations are prepared one after the other, so nobody else has started one meanwhile
        let _ = self.access.set(Mutex::new(log));
        Ok(())
    }

    /// The registry of this gateway's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The memory for bodies that are read ahead.
    pub fn body_buffers(&self) -> &BodyBuffers {
        &self.body_buffers
    }

    /// What operators have changed at run time.
    pub fn rulings(&self) -> &Rulings {
        &self.rulings
    }

    /// What workers remember of their decisions.
    pub fn notebooks(&self) -> &Notebooks {
        &self.notebooks
    }

    /// Where spans go, if anywhere.
    pub(super) fn spans(&self) -> Option<&Spans> {
        self.spans.as_ref()
    }

    /// A writer of access lines for one worker.
    pub(super) fn access_log(&self) -> Option<AccessLog> {
        let access = self.access.get()?;
        let access = access.lock().unwrap_or_else(PoisonError::into_inner);
        Some(access.clone())
    }

    /// Whether a rejection gets a line, of at most `most` each second; if so, how many got none before it.
    pub(super) fn admit_rejected_line(&self, at: Instant, most: u32) -> Option<u64> {
        let second = self.nanoseconds(at) / 1_000_000_000;
        let admitted = self.rejected_lines.admit(second, most);
        if admitted.is_none() {
            self.rejected_left_out.increment(1);
        }
        admitted
    }

    /// A moment in the limiter's time.
    pub(super) fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }

    /// The origin of the limiter's time.
    pub(super) fn epoch(&self) -> Instant {
        self.epoch
    }

    /// A moment as a date. The same for every worker, and steady while the system's clock is slewed: the end of one window is
    /// always the same second.
    pub(super) fn wall_clock(&self, at: Instant) -> SystemTime {
        let epoch_ns = self.epoch_wall_ns.load(Relaxed);
        let since_ns = epoch_ns.saturating_add(self.nanoseconds(at));
        SystemTime::UNIX_EPOCH + Duration::from_nanos(since_ns)
    }

    /// Follows a wall clock that was set. Call it every second or so, off the workers.
    pub fn follow_wall_clock(&self) {
        let seen = wall_ns().saturating_sub(since_ns(self.epoch));
        if seen.abs_diff(self.epoch_wall_ns.load(Relaxed)) > CLOCK_WAS_SET_NS {
            self.epoch_wall_ns.store(seen, Relaxed);
        }
    }

    /// Writes the access lines and sends the spans that wait; gives each at most `patience`. Call it when no worker serves
    /// any more, and on no runtime.
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
    // without entropy two processes may share a name: a chain of both would then be taken for a loop
    if getrandom::fill(&mut id).is_err() {
        id = std::process::id().to_le_bytes();
    }
    format!("tidegate-{:08x}", u32::from_le_bytes(id))
}
