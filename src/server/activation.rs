//! Makes a configuration active, at the start and at each reload, all or nothing.
//!
//! ```text
//! bind new addresses ─▶ prepare: plan, Redis, certificates ─▶ activate: every worker switches
//!          └───────────────────────┴─▶ on error, nothing has changed
//! ```
//!
//! Before [`Activation::activate`], new sockets are only bound and counters only looked up. After
//! that nothing can fail. Each worker switches between two requests. At the start there is no
//! previous configuration and the workers have no listeners; everything else is the same.

use std::{
    io,
    sync::{Arc, mpsc as std_mpsc},
    thread,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    task,
    time::Instant,
};

use super::{
    background_tasks::{self, BackgroundTask, TaskSet},
    certificates::Certificates,
    descriptors,
    idle_memory::give_memory_back,
    low_priority::run_at_low_priority,
    start_error::StartError,
    worker::{AssignedListener, NewListener, Stop, WorkerCommand, WorkerConfig},
};
use crate::{
    config::Snapshot,
    gateway::{ActiveConfig, Process},
    listener::{
        self, BindAddress, BindMode, BoundListener, ListenerTls,
        connections_per_address::ConnectionsPerAddress,
    },
};

/// The active configuration, its listeners, and the workers that run it.
pub(super) struct Activation {
    process: Arc<Process>,
    /// `None` before the first activation.
    active: Option<Arc<ActiveConfig>>,
    /// The open listeners, in the order of the active configuration.
    listening: Vec<Listening>,
    /// The command channel of each worker.
    workers: Vec<mpsc::Sender<WorkerCommand>>,
    worker_count: usize,
    /// Connection permits of all workers, `max_connections` in total.
    connections: Arc<Semaphore>,
    max_connections: usize,
    background: TaskSet,
}

/// An open listener.
#[derive(Clone, Debug)]
struct Listening {
    /// The address in the configuration; port 0 means any.
    configured: BindAddress,
    /// The bound address.
    real: BindAddress,
    /// `Some` if connections use TLS.
    tls: Option<Arc<ListenerTls>>,
}

/// A listener of the next configuration: kept, with its index in the active one, or newly bound.
pub(super) enum ListenerChange {
    Kept(usize),
    New(BoundListener),
}

/// A configuration that is ready to become active.
pub(super) struct PreparedConfig {
    active: Arc<ActiveConfig>,
    listeners: Vec<ListenerChange>,
    /// By listener.
    tls: Vec<Option<Arc<ListenerTls>>>,
    background: Vec<BackgroundTask>,
}

/// How long to wait for the workers to switch: longer than any request keeps a worker busy.
const ADOPTION: Duration = Duration::from_secs(10);

impl Activation {
    /// Creates an activation without an active configuration.
    pub(super) fn new(process: Arc<Process>, worker_count: usize) -> Self {
        Self {
            process,
            active: None,
            listening: Vec::new(),
            workers: Vec::with_capacity(worker_count),
            worker_count,
            connections: Arc::new(Semaphore::new(0)),
            max_connections: 0,
            background: TaskSet::default(),
        }
    }

    /// The bound addresses of the active configuration, in its order.
    pub(super) fn addresses(&self) -> Vec<BindAddress> {
        let listening = self.listening.iter();
        listening.map(|listener| listener.real.clone()).collect()
    }

    /// Binds the addresses of the next configuration. An address that is already open keeps its
    /// socket.
    pub(super) fn bind(
        &self,
        listeners: &[listener::ListenerSettings],
        company: BindMode,
    ) -> Result<Vec<ListenerChange>, StartError> {
        let mut kept = vec![false; self.listening.len()];
        let mut places = Vec::with_capacity(listeners.len());
        for settings in listeners {
            let same =
                |at: &usize| self.listening[*at].configured == settings.address && !kept[*at];
            if let Some(at) = (0..kept.len()).find(same) {
                kept[at] = true;
                places.push(ListenerChange::Kept(at));
                continue;
            }
            let bound = listener::bind(&settings.address, self.worker_count, company);
            let bound = bound.map_err(|error| StartError::Bind {
                address: settings.address.to_string(),
                error,
            });
            places.push(ListenerChange::New(bound?));
        }
        Ok(places)
    }

    /// Prepares the next configuration. Waits for Redis and for key sets, each within its
    /// timeout.
    pub(super) async fn prepare(
        &self,
        snapshot: Snapshot,
        listeners: Vec<ListenerChange>,
    ) -> Result<PreparedConfig, StartError> {
        let snapshot = Arc::new(snapshot);
        let (process, next) = (Arc::clone(&self.process), Arc::clone(&snapshot));
        let previous = self.active.clone();
        let prepare = move || ActiveConfig::prepare(&process, next, previous.as_deref());
        let mut active = match &self.active {
            // building a large plan takes long, so it must not slow the workers down
            Some(_) => run_at_low_priority(prepare).await??,
            None => prepare()?,
        };
        let previous = self.active.clone();
        // Redis may be slow, and this thread also handles signals
        let connected = task::spawn_blocking(move || {
            let connected = active.connect(previous.as_deref());
            connected.map(|()| active)
        });
        let active = Arc::new(connected.await.map_err(io::Error::from)??);
        let before: Vec<_> = listeners.iter().map(|place| self.tls_of(place)).collect();
        let metrics = self.process.metrics();
        let certificates = Certificates::apply(&snapshot.listeners, &before, metrics)?;
        let tls = certificates.listeners().collect();
        let background = background_tasks::of(&active, self.active.as_deref(), certificates).await;
        Ok(PreparedConfig {
            active,
            listeners,
            tls,
            background,
        })
    }

    /// Starts the worker threads, without listeners.
    pub(super) fn start_workers(
        &mut self,
        first: &PreparedConfig,
        stopping: &watch::Receiver<Stop>,
    ) -> io::Result<Vec<thread::JoinHandle<()>>> {
        let crowd = Arc::new(ConnectionsPerAddress::default());
        let mut threads = Vec::with_capacity(self.worker_count);
        let (up, started) = std_mpsc::sync_channel(self.worker_count);
        for index in 0..self.worker_count {
            let (commands, inbox) = mpsc::channel(1);
            self.workers.push(commands);
            let duty = WorkerConfig {
                active: Arc::clone(&first.active),
                connections: Arc::clone(&self.connections),
                crowd: Arc::clone(&crowd),
                commands: inbox,
                stopping: stopping.clone(),
                up: up.clone(),
            };
            let thread = thread::Builder::new().name(format!("worker-{index}"));
            threads.push(thread.spawn(move || duty.work())?);
        }
        drop(up);
        for _ in 0..self.worker_count {
            started
                .recv()
                .map_err(|_| io::Error::other("a worker ended before it accepted"))??;
        }
        Ok(threads)
    }

    /// Activates the next configuration and returns once every worker has switched to it.
    pub(super) async fn activate(&mut self, next: PreparedConfig) -> Arc<ActiveConfig> {
        let active = next.active;
        self.resize(active.snapshot().server.max_connections);
        let previous = self.active.replace(Arc::clone(&active));
        if let Some(previous) = &previous {
            active.take_over(previous);
        }
        self.switch_workers(&active, next.listeners, &next.tls)
            .await;
        self.background.replace(next.background);
        let hash = &active.snapshot().hash;
        let metrics = self.process.metrics();
        metrics.config_loaded(hash, SystemTime::now());
        if let Some(previous) = previous {
            retire(previous, Arc::clone(&active));
        }
        active
    }

    /// The TLS of a kept listener.
    fn tls_of(&self, place: &ListenerChange) -> Option<Arc<ListenerTls>> {
        match place {
            ListenerChange::Kept(at) => self.listening[*at].tls.clone(),
            ListenerChange::New(_) => None,
        }
    }

    /// Changes the bound on open connections. Connections above a lower bound are not closed.
    fn resize(&mut self, wanted: usize) {
        descriptors::warn_if_few(wanted);
        let after = descriptors::for_connections(wanted).min(Semaphore::MAX_PERMITS);
        let before = std::mem::replace(&mut self.max_connections, after);
        self.connections.add_permits(after.saturating_sub(before));
        let fewer = u32::try_from(before.saturating_sub(after)).unwrap_or(u32::MAX);
        if fewer > 0 {
            let connections = Arc::clone(&self.connections);
            tokio::spawn(async move {
                if let Ok(gone) = connections.acquire_many_owned(fewer).await {
                    gone.forget();
                }
            });
        }
    }

    /// Sends the configuration to every worker and waits until all have switched to it.
    async fn switch_workers(
        &mut self,
        active: &Arc<ActiveConfig>,
        mut places: Vec<ListenerChange>,
        tls: &[Option<Arc<ListenerTls>>],
    ) {
        let listeners = &active.snapshot().listeners;
        let mut adopted = Vec::with_capacity(self.workers.len());
        for worker in &self.workers {
            let next = listeners.iter().zip(&mut places).zip(tls);
            let assigned = next.filter_map(|((settings, place), tls)| {
                let (settings, tls) = (settings.clone(), tls.clone());
                Some(match place {
                    ListenerChange::Kept(at) => AssignedListener::Kept(*at, settings, tls),
                    ListenerChange::New(bound) => AssignedListener::New(NewListener {
                        settings,
                        label: bound.address.to_string(),
                        tls,
                        socket: bound.sockets.pop()?,
                    }),
                })
            });
            let (done, told) = oneshot::channel();
            let command = WorkerCommand {
                active: Arc::clone(active),
                listeners: assigned.collect(),
                done,
            };
            // fails only if the worker has ended, which the drain reports
            if worker.send(command).await.is_ok() {
                adopted.push(told);
            }
        }
        let next = listeners.iter().zip(places).zip(tls);
        let listening = next.map(|((settings, place), tls)| Listening {
            configured: settings.address.clone(),
            real: match place {
                ListenerChange::Kept(at) => self.listening[at].real.clone(),
                ListenerChange::New(bound) => bound.address,
            },
            tls: tls.clone(),
        });
        self.listening = listening.collect();
        let all = async {
            for told in adopted {
                let _ = told.await;
            }
        };
        if tokio::time::timeout(ADOPTION, all).await.is_err() {
            tracing::warn!(
                "a worker has not switched to the new configuration yet; it will when it is idle"
            );
        }
    }
}

/// Frees what only the previous configuration needed, once its last request ends or `drain_timeout`
/// passes. Frees the rest when its last request ends, on a low-priority thread: freeing it on a
/// worker would delay other requests.
fn retire(previous: Arc<ActiveConfig>, after: Arc<ActiveConfig>) {
    const LOOK: Duration = Duration::from_millis(100);
    let patience = previous.snapshot().server.drain_timeout;
    tokio::spawn(async move {
        let deadline = Instant::now() + patience;
        while Arc::strong_count(&previous) > 1 && Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
        }
        let retired = Arc::clone(&previous);
        // waits for Redis for at most a second
        let _ = run_at_low_priority(move || retired.retire(&after)).await;
        while Arc::strong_count(&previous) > 1 {
            tokio::time::sleep(LOOK).await;
        }
        let _ = run_at_low_priority(move || {
            drop(previous);
            give_memory_back();
        })
        .await;
    });
}
