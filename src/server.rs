//! Wires listeners, gateway and admin; owns start order, readiness and drain.
//!
//! ```text
//! bind every address ─▶ fetch token keys ─▶ start workers (one thread and runtime each) ─▶ ready
//!   ─▶ signal ─▶ not ready, stop accepting ─▶ connections closed, or drain_timeout
//!   ─▶ access lines written ─▶ exit 0
//! ```
//!
//! `notify` tells the service manager each state, if there is one. The calling thread becomes the
//! control plane: signals, reloads, the admin listener, health checks of servers, metrics upkeep.
//! No request touches it.

mod activation;
mod idle_memory;
mod low_priority;
mod certificates;
mod descriptors;
mod background_tasks;
mod notify;
mod reload;
mod start_error;
mod watcher;
mod worker;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, thread, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot, watch},
};

use crate::{
    admin::{AdminPages, Readiness, ReadinessState, Reload},
    config::Snapshot,
    gateway::{ActiveConfigHandle, OverflowSeen, Process},
    listener::{self, BindAddress, BindMode},
    telemetry::{self, Metrics, resident_bytes},
};

pub use start_error::StartError;

use activation::Activation;
use idle_memory::{IdleMemory, MemoryUse, give_memory_back};
use low_priority::run_at_low_priority;
use reload::Reloader;
use worker::Stop;

/// The signal after another gateway took over: it already serves the same addresses, including the
/// admin one.
const REPLACED: &str = "SIGUSR1";

/// How often the control thread runs its upkeep.
const UPKEEP: Duration = Duration::from_secs(1);

/// The length of the reload queue; further callers wait for room in it.
const RELOADS: usize = 4;

/// A running gateway.
#[derive(Debug)]
pub struct Running {
    /// The bound addresses, in configuration order.
    pub listeners: Vec<BindAddress>,
    /// The bound admin address.
    pub admin: SocketAddr,
    /// Worker threads.
    pub workers: usize,
    control: tokio::runtime::Runtime,
    threads: Vec<thread::JoinHandle<()>>,
    current: Arc<ActiveConfigHandle>,
    readiness: Readiness,
    stop: watch::Sender<Stop>,
    signals: Signals,
    reloads: mpsc::Sender<Reload>,
    admin_open: watch::Sender<bool>,
}

/// Activates the first configuration as a reload would, and returns once all workers and the admin
/// listener accept. Reloads read `file`.
pub fn start(
    snapshot: Snapshot,
    file: Option<PathBuf>,
    metrics: Metrics,
    company: BindMode,
) -> Result<Running, StartError> {
    let workers = snapshot.server.worker_threads();
    telemetry::log::install_panic_hook(metrics.panics());
    let process = Process::start(&snapshot, metrics)?;
    let mut activation = Activation::new(process, workers);
    // a port that is taken is the likeliest error: it comes before anything that waits
    let listeners = activation.bind(&snapshot.listeners, company)?;
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let in_control = control.enter();
    let admin_socket = bind_admin(snapshot.admin.address, company)?;
    let signals = Signals::install()?;
    drop(in_control);
    let admin_address = admin_socket.local_addr()?;

    let first = control.block_on(activation.prepare(snapshot, listeners))?;
    let (stop, stopping) = watch::channel(Stop::No);
    let threads = activation.start_workers(&first, &stopping)?;
    let current = ActiveConfigHandle::new(control.block_on(activation.activate(first)));
    let listeners = activation.addresses();

    let readiness = Readiness::default();
    let (reloads, asked) = mpsc::channel(RELOADS);
    if let Some(file) = &file {
        let (file, current) = (file.clone(), Arc::clone(&current));
        control.spawn(watcher::watch(file, current, reloads.clone()));
    }
    let reloader = Reloader {
        file,
        current: Arc::clone(&current),
        activation,
    };
    control.spawn(reloader.serve(asked));
    let admin = AdminPages::new(
        Arc::clone(&current),
        admin_address.ip(),
        readiness.clone(),
        reloads.clone(),
        descriptors::for_admin(),
    );
    let (admin_open, mut is_open) = watch::channel(true);
    let closed = async move {
        // also ends if the sender is dropped
        let _ = is_open.wait_for(|open| !open).await;
    };
    control.spawn(admin.serve(admin_socket, closed));
    readiness.set(ReadinessState::Ready);
    Ok(Running {
        listeners,
        admin: admin_address,
        workers,
        control,
        threads,
        current,
        readiness,
        stop,
        signals,
        reloads,
        admin_open,
    })
}

fn bind_admin(
    address: SocketAddr,
    company: BindMode,
) -> Result<tokio::net::TcpListener, StartError> {
    let bound = listener::bind_one(address, company);
    let bound = bound.and_then(tokio::net::TcpListener::from_std);
    bound.map_err(|error| StartError::Bind {
        address: format!("{address} (admin)"),
        error,
    })
}

#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    replaced: Signal,
}

impl Signals {
    fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            replaced: signal(SignalKind::user_defined1())?,
        })
    }

    /// Waits for the next signal that ends the process. SIGHUP triggers a reload meanwhile.
    async fn end(&mut self, reloads: &mpsc::Sender<Reload>) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.replaced.recv() => return REPLACED,
                _ = self.hangup.recv() => {
                    let (answer, _) = oneshot::channel();
                    let why = "SIGHUP".to_owned();
                    // the result is logged; if the queue is full, a waiting
                    // reload reads the same file
                    let _ = reloads.try_send(Reload { why, answer });
                }
            }
        }
    }
}

impl Running {
    /// The running configuration.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(self.current.active().snapshot())
    }

    /// Serves until SIGTERM or SIGINT, then drains. A second signal ends the drain at once.
    pub fn serve(mut self) {
        let current = Arc::clone(&self.current);
        self.control.spawn(async move {
            let mut overflow = OverflowSeen::default();
            let mut memory = IdleMemory::new(resident_bytes());
            let mut ticks = tokio::time::interval(UPKEEP);
            loop {
                ticks.tick().await;
                let active = current.active();
                active.process().runtime_overrides().refresh();
                active.warn_of_overflow(&mut overflow);
                active.process().follow_wall_clock();
                let buffers = active.process().body_buffers();
                let now = MemoryUse {
                    released_connections: listener::released_connections(),
                    body_peak: buffers.take_peak(),
                    body_bytes: buffers.used(),
                };
                if memory.is_due(now, resident_bytes) {
                    // on failure the memory stays allocated for later use
                    let _ = run_at_low_priority(give_memory_back).await;
                    memory.trimmed(resident_bytes());
                }
            }
        });
        notify::notify(notify::READY);
        let name = self.control.block_on(self.signals.end(&self.reloads));
        self.readiness.set(ReadinessState::Draining);
        notify::notify(notify::STOPPING);
        if name == REPLACED {
            // the other gateway answers the next request to this address
            self.admin_open.send_replace(false);
        } else {
            self.delay_drain(name);
        }
        let drain_timeout = self.snapshot().server.drain_timeout;
        tracing::info!(
            signal = name,
            ?drain_timeout,
            "draining: no longer accepting, finishing requests in flight"
        );
        self.stop.send_replace(Stop::Drain);
        let threads = std::mem::take(&mut self.threads);
        let (stop, signals, reloads) = (&self.stop, &mut self.signals, &self.reloads);
        self.control.block_on(async {
            let joined = tokio::task::spawn_blocking(move || {
                threads.into_iter().for_each(|worker| drop(worker.join()))
            });
            tokio::select! {
                _ = joined => {}
                name = signals.end(reloads) => {
                    tracing::warn!(signal = name, "second signal: aborting requests in flight");
                    stop.send_replace(Stop::Now);
                }
            }
        });
        self.current.active().close();
        tracing::info!("stopped");
        // the blocking join may still wait for a worker that is stopping
        self.control.shutdown_timeout(Duration::from_secs(1));
    }

    /// Keeps serving for `drain_delay` while not ready, so load balancers stop sending in time.
    /// Another signal ends the delay.
    fn delay_drain(&mut self, signal: &'static str) {
        let delay = self.snapshot().server.drain_delay;
        if delay.is_zero() {
            return;
        }
        tracing::info!(
            signal,
            drain_delay = ?delay,
            "no longer ready, still accepting until load balancers stop sending"
        );
        let (signals, reloads) = (&mut self.signals, &self.reloads);
        self.control.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                _ = signals.end(reloads) => {}
            }
        });
    }
}
