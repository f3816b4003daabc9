//! Wires listeners, gateway and admin; owns start order, readiness and drain.
//!
//! ```text
//! bind every address ─▶ keys of tokens ─▶ workers (one thread and one runtime each) ─▶ ready ─▶ … ─▶ signal
//!                                                                                                     │
//!                         exit 0 ◀─ access lines written ◀─ connections gone or drain_timeout ◀─ not ready, accept no more
//! ```
//!
//! The calling thread becomes the control plane: signals, the admin listener, checks of upstream
//! servers, upkeep of the metrics. A request never
//! touches it.

mod certificates;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    rc::Rc,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::LocalOptions,
    signal::unix::{Signal, SignalKind, signal},
    sync::{Semaphore, watch},
};

use crate::{
    admin::{Admin, Readiness, State},
    config::Snapshot,
    gateway::{OverflowSeen, Shared, Worker},
    issuer::Issuer,
    listener::{
        self, Address, Bound, Cut, Drain, Handshakes, ListeningSocket, Observer, ProxyProtocol,
        Tls, proxy_protocol::Fault,
    },
    telemetry::{
        self, Metrics,
        handles::{Held, IdentityMetrics, ListenerMetrics},
        log::Throttle,
    },
};

use certificates::Certificates;

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address could not be bound.
    #[error("cannot listen on {address}: {error}{}", hint(error))]
    Bind {
        /// The address as configured.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] listener::tls::SetupError),
    /// The configuration cannot be put to work.
    #[error(transparent)]
    Gateway(#[from] crate::gateway::PlanError),
    /// The system refused a thread, a runtime or a signal handler.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// What to look at first.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; `ss -ltnp` shows who has it, or choose another in the configuration"
        }
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need a privilege (CAP_NET_BIND_SERVICE)"
        }
        io::ErrorKind::AddrNotAvailable => "; no interface of this machine has that address",
        _ => "",
    }
}

/// How often histograms are folded: each sample waits in memory until then.
const METRICS_UPKEEP: Duration = Duration::from_secs(1);
/// How often idle upstream connections are looked at.
const SWEEP: Duration = Duration::from_secs(5);

/// A gateway that answers requests.
#[derive(Debug)]
pub struct Running {
    /// Where it really listens, in the order of the configuration.
    pub listeners: Vec<Address>,
    /// Where the admin pages really are.
    pub admin: SocketAddr,
    /// Worker threads.
    pub workers: usize,
    control: tokio::runtime::Runtime,
    threads: Vec<thread::JoinHandle<()>>,
    shared: Arc<Shared>,
    readiness: Readiness,
    stop: watch::Sender<Stop>,
    signals: Signals,
    drain_timeout: Duration,
    certificates: Certificates,
}

/// What workers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    No,
    /// Accept no more; finish what is in flight.
    Drain,
    /// Leave what is still in flight.
    Now,
}

/// Binds, starts the workers and the admin listener, and returns when all of them accept.
pub fn start(snapshot: Snapshot, metrics: Metrics) -> Result<Running, StartError> {
    let workers = snapshot
        .server
        .workers
        .or_else(|| thread::available_parallelism().ok())
        .map_or(1, NonZeroUsize::get);
    let mut bound = Vec::with_capacity(snapshot.listeners.len());
    for settings in &snapshot.listeners {
        let address = &settings.address;
        bound.push(
            listener::bind(address, workers).map_err(|error| StartError::Bind {
                address: address.to_string(),
                error,
            })?,
        );
    }
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let in_control = control.enter();
    let admin_socket = bind_admin(snapshot.admin.address)?;
    let signals = Signals::install()?;
    drop(in_control);

    let addresses: Vec<Address> = bound.iter().map(|bound| bound.address.clone()).collect();
    let admin_address = admin_socket.local_addr()?;
    let drain_timeout = snapshot.server.drain_timeout;
    let max_connections = snapshot.server.max_connections;
    let listeners = snapshot.listeners.clone();
    let certificates = Certificates::take_up(&listeners, &metrics)?;
    metrics.config_loaded(&snapshot.hash, SystemTime::now());
    telemetry::log::install_panic_hook(metrics.panics());
    let shared = Arc::new(Shared::new(Arc::new(snapshot), metrics)?);

    let issuers = first_keys(&control, &shared);
    let readiness = Readiness::default();
    let (stop, stopping) = watch::channel(Stop::No);
    let connections = Arc::new(Semaphore::new(max_connections.min(Semaphore::MAX_PERMITS)));
    let mut threads = Vec::with_capacity(workers);
    let (up, started) = mpsc::sync_channel(workers);
    for (index, sockets) in deal(bound, workers).into_iter().enumerate() {
        let duty = Duty {
            listeners: listeners
                .iter()
                .zip(&addresses)
                .zip(certificates.listeners())
                .zip(sockets)
                .map(|(((settings, address), tls), socket)| Entrance {
                    settings: settings.clone(),
                    label: address.to_string(),
                    tls,
                    socket,
                })
                .collect(),
            shared: Arc::clone(&shared),
            connections: Arc::clone(&connections),
            stopping: stopping.clone(),
            drain_timeout,
            up: up.clone(),
        };
        threads.push(
            thread::Builder::new()
                .name(format!("worker-{index}"))
                .spawn(move || duty.work())?,
        );
    }
    drop(up);
    for _ in 0..workers {
        started
            .recv()
            .map_err(|_| io::Error::other("a worker ended before it accepted"))??;
    }
    let admin = Admin::new(
        Arc::clone(shared.snapshot()),
        shared.metrics().clone(),
        readiness.clone(),
    );
    for issuer in issuers {
        control.spawn(issuer.keep_fresh());
    }
    control.spawn(admin.serve(admin_socket, std::future::pending()));
    readiness.set(State::Ready);
    Ok(Running {
        listeners: addresses,
        admin: admin_address,
        workers,
        control,
        threads,
        shared,
        readiness,
        stop,
        signals,
        drain_timeout,
        certificates,
    })
}

/// Tries once to fetch each published key set, all at the same time, so that the first tokens find keys. Bounded by the time of one
/// fetch; what cannot be fetched now is tried again while requests are served.
fn first_keys(control: &tokio::runtime::Runtime, shared: &Shared) -> Vec<Issuer> {
    let fetches: Vec<_> = shared
        .published_keys()
        .map(|(url, keys)| {
            let mut issuer = Issuer::new(url, keys, shared.metrics());
            control.spawn(async move {
                issuer.fetch().await;
                issuer
            })
        })
        .collect();
    control.block_on(async {
        let mut issuers = Vec::with_capacity(fetches.len());
        for fetch in fetches {
            issuers.extend(fetch.await.ok());
        }
        issuers
    })
}

/// Hands every worker its socket of each address.
fn deal(bound: Vec<Bound>, workers: usize) -> Vec<Vec<ListeningSocket>> {
    let mut hands: Vec<Vec<ListeningSocket>> = (0..workers)
        .map(|_| Vec::with_capacity(bound.len()))
        .collect();
    for address in bound {
        for (hand, socket) in hands.iter_mut().zip(address.sockets) {
            hand.push(socket);
        }
    }
    hands
}

fn bind_admin(address: SocketAddr) -> Result<tokio::net::TcpListener, StartError> {
    let bound = std::net::TcpListener::bind(address).and_then(|socket| {
        socket.set_nonblocking(true)?;
        tokio::net::TcpListener::from_std(socket)
    });
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
}

impl Signals {
    fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next signal that asks the process to end.
    async fn next(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => tracing::warn!(
                    "SIGHUP: a running gateway does not read its configuration again yet; restart it for a new one"
                ),
            }
        }
    }
}

impl Running {
    /// The running configuration.
    pub fn snapshot(&self) -> &Snapshot {
        self.shared.snapshot()
    }

    /// Serves until SIGTERM or SIGINT, then drains. A second signal ends the drain at once.
    pub fn serve(mut self) {
        self.control.spawn(Arc::clone(&self.shared).keep_watch());
        let shared = Arc::clone(&self.shared);
        self.control.spawn(async move {
            let mut overflow = OverflowSeen::default();
            let mut ticks = tokio::time::interval(METRICS_UPKEEP);
            loop {
                ticks.tick().await;
                shared.metrics().run_upkeep();
                shared.warn_of_overflow(&mut overflow);
            }
        });
        self.control.spawn(self.certificates.watch());
        let name = self.control.block_on(self.signals.next());
        tracing::info!(signal = name, drain_timeout = ?self.drain_timeout, "draining: accepting no more, finishing what is in flight");
        self.readiness.set(State::Draining);
        self.stop.send_replace(Stop::Drain);
        let threads = std::mem::take(&mut self.threads);
        let (stop, signals) = (&self.stop, &mut self.signals);
        self.control.block_on(async {
            let joined = tokio::task::spawn_blocking(move || threads.into_iter().for_each(|worker| drop(worker.join())));
            tokio::select! {
                _ = joined => {}
                name = signals.next() => {
                    tracing::warn!(signal = name, "a second signal: leaving what is still in flight");
                    stop.send_replace(Stop::Now);
                }
            }
        });
        self.shared.close();
        tracing::info!("stopped");
        // the blocking join may still wait for a worker that is being told to leave
        self.control.shutdown_timeout(Duration::from_secs(1));
    }
}

/// A listener, as one worker serves it.
struct Entrance {
    settings: listener::Settings,
    label: String,
    tls: Option<Arc<Tls>>,
    socket: ListeningSocket,
}

/// What one worker thread does, and with what.
struct Duty {
    listeners: Vec<Entrance>,
    shared: Arc<Shared>,
    connections: Arc<Semaphore>,
    stopping: watch::Receiver<Stop>,
    drain_timeout: Duration,
    up: mpsc::SyncSender<io::Result<()>>,
}

impl Duty {
    fn work(self) {
        match tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
        {
            Ok(runtime) => runtime.block_on(self.accept_until_stopped()),
            // nobody waits any more if another worker failed first
            Err(error) => drop(self.up.send(Err(error))),
        }
    }

    async fn accept_until_stopped(mut self) {
        let worker = Rc::new(Worker::new(Arc::clone(&self.shared)));
        let drain = Rc::new(Drain::default());
        let mut accepting = Vec::with_capacity(self.listeners.len());
        for entrance in self.listeners {
            let metrics = self.shared.metrics();
            let announced = match entrance.settings.proxy_protocol {
                ProxyProtocol::Off => None,
                ProxyProtocol::Required(_) => {
                    Some(metrics.identity("proxy_protocol", &Fault::LABELS))
                }
            };
            let observer = Rc::new(ConnectionMetrics {
                accepting: Throttle::default(),
                announcing: Throttle::default(),
                cutting: Throttle::default(),
                metrics: metrics.listener(&entrance.label, &Cut::LABELS),
                announced,
                label: entrance.label,
            });
            let handshakes = entrance
                .tls
                .map(|tls| Rc::new(Handshakes::new(tls, metrics.handshakes())));
            let (worker, connections, drain) = (
                Rc::clone(&worker),
                Arc::clone(&self.connections),
                Rc::clone(&drain),
            );
            accepting.push(tokio::task::spawn_local(listener::accept(
                entrance.socket,
                Rc::new(entrance.settings),
                handshakes,
                worker,
                observer,
                connections,
                drain,
            )));
        }
        let upkeep = tokio::task::spawn_local(async move {
            let mut ticks = tokio::time::interval(SWEEP);
            loop {
                worker.sweep(ticks.tick().await);
            }
        });
        // the server has given up only if another worker could not start
        let _ = self.up.send(Ok(()));

        // the sender lives until every worker has ended
        let _ = self.stopping.wait_for(|stop| *stop != Stop::No).await;
        accepting.iter().for_each(tokio::task::JoinHandle::abort);
        upkeep.abort();
        drain.begin();
        tokio::select! {
            () = drain.finished() => {}
            () = tokio::time::sleep(self.drain_timeout) => {
                tracing::warn!(connections = drain.open(), "drain_timeout has passed: leaving what is still in flight");
            }
            _ = self.stopping.wait_for(|stop| *stop == Stop::Now) => {}
        }
    }
}

/// Counts what happens on one listener.
struct ConnectionMetrics {
    accepting: Throttle,
    announcing: Throttle,
    cutting: Throttle,
    metrics: ListenerMetrics,
    /// Where connections begin with a PROXY header.
    announced: Option<IdentityMetrics>,
    label: String,
}

impl Observer for ConnectionMetrics {
    type Open = Held;

    fn opened(&self) -> Held {
        self.metrics.open()
    }

    fn accept_failed(&self, error: &io::Error) {
        if let Some(unsaid) = self.accepting.speak() {
            tracing::warn!(listener = self.label, unsaid, %error, "cannot accept a connection; still accepting");
        }
        self.metrics.accept_failed(error);
    }

    fn cut(&self, why: Cut) {
        if let Some(unsaid) = self.cutting.speak() {
            tracing::warn!(
                listener = self.label,
                unsaid,
                "cut a connection short: {why}"
            );
        }
        self.metrics.cut(why.label());
    }

    fn not_believed(&self, peer: IpAddr, fault: Fault) {
        if let Some(unsaid) = self.announcing.speak() {
            tracing::warn!(listener = self.label, %peer, unsaid, "closed a connection: {fault}");
        }
        if let Some(announced) = &self.announced {
            announced.rejected(fault.label());
        }
    }
}
