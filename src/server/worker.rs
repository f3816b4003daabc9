//! One worker thread: its sockets, the service that answers requests, and the commands that it
//! receives.

use std::{
    io,
    net::IpAddr,
    rc::Rc,
    sync::{Arc, mpsc as std_mpsc},
    time::Duration,
};

use tokio::{
    runtime::LocalOptions,
    sync::{Semaphore, mpsc, oneshot, watch},
    task::{JoinHandle, JoinSet},
};

use crate::{
    gateway::{ActiveConfig, WorkerService},
    listener::{
        self, AbuseReason, Handshakes, Listener, ListenerTls, ListeningSocket, Observer,
        ProxyProtocol, connections_per_address::ConnectionsPerAddress,
        proxy_protocol::ProxyProtocolFault,
    },
    telemetry::{
        Metrics,
        handles::{GaugeGuard, IdentityMetrics, ListenerMetrics},
        log::Throttle,
    },
};

/// How often a worker checks its idle upstream connections.
const SWEEP: Duration = Duration::from_secs(5);

/// The shutdown state that workers watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    No,
    /// Stop accepting; finish requests in flight.
    Drain,
    /// Abort requests in flight.
    Now,
}

/// A configuration for a worker to switch to.
pub(super) struct WorkerCommand {
    pub(super) active: Arc<ActiveConfig>,
    /// All listeners from now on; the worker closes those that are not in this list.
    pub(super) listeners: Vec<AssignedListener>,
    /// Signalled once the worker serves new requests with this configuration.
    pub(super) done: oneshot::Sender<()>,
}

/// A listener of the next configuration.
pub(super) enum AssignedListener {
    /// The listener with this index now, with new settings.
    Kept(usize, listener::ListenerSettings, Option<Arc<ListenerTls>>),
    /// A new listener.
    New(NewListener),
}

/// A socket for a worker to accept on.
pub(super) struct NewListener {
    pub(super) settings: listener::ListenerSettings,
    /// The address as metrics and logs show it.
    pub(super) label: String,
    pub(super) tls: Option<Arc<ListenerTls>>,
    pub(super) socket: ListeningSocket,
}

/// Everything that a worker thread starts with.
pub(super) struct WorkerConfig {
    pub(super) active: Arc<ActiveConfig>,
    pub(super) connections: Arc<Semaphore>,
    pub(super) crowd: Arc<ConnectionsPerAddress>,
    pub(super) commands: mpsc::Receiver<WorkerCommand>,
    pub(super) stopping: watch::Receiver<Stop>,
    pub(super) up: std_mpsc::SyncSender<io::Result<()>>,
}

impl WorkerConfig {
    pub(super) fn work(self) {
        match tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
        {
            Ok(runtime) => runtime.block_on(self.accept_until_stopped()),
            // the receiver is gone if another worker failed first
            Err(error) => drop(self.up.send(Err(error))),
        }
    }

    async fn accept_until_stopped(mut self) {
        let mut worker = WorkerState {
            service: Rc::new(WorkerService::new(Arc::clone(&self.active))),
            active: self.active,
            connections: self.connections,
            crowd: self.crowd,
            open: Vec::new(),
            leaving: JoinSet::new(),
        };
        let service = Rc::clone(&worker.service);
        let upkeep = tokio::task::spawn_local(async move {
            let mut ticks = tokio::time::interval(SWEEP);
            loop {
                service.sweep(ticks.tick().await);
            }
        });
        // the receiver is gone only if another worker could not start
        let _ = self.up.send(Ok(()));
        loop {
            tokio::select! {
                // the sender lives until every worker has ended
                _ = self.stopping.wait_for(|stop| *stop != Stop::No) => break,
                Some(command) = self.commands.recv() => worker.execute(command),
                Some(_) = worker.leaving.join_next() => {}
            }
        }
        upkeep.abort();
        worker.leave(self.stopping).await;
    }
}

/// The state of a running worker.
struct WorkerState {
    service: Rc<WorkerService>,
    active: Arc<ActiveConfig>,
    connections: Arc<Semaphore>,
    crowd: Arc<ConnectionsPerAddress>,
    open: Vec<AcceptTask>,
    /// Listeners that are closing, until their last connection ends.
    leaving: JoinSet<()>,
}

/// A listener and its accept task.
struct AcceptTask {
    listener: Rc<Listener>,
    accepting: JoinHandle<io::Result<()>>,
}

impl WorkerState {
    fn admit(&self, opening: NewListener) -> AcceptTask {
        let metrics = self.active.process().metrics();
        let observer = ConnectionMetrics::new(metrics, opening.label, &opening.settings);
        let handshakes = self.handshakes(opening.tls);
        let listener = Listener::new(opening.settings, handshakes, Arc::clone(&self.crowd));
        let accept = Rc::clone(&listener).accept(
            opening.socket,
            Rc::clone(&self.service),
            Rc::new(observer),
            Arc::clone(&self.connections),
        );
        AcceptTask {
            listener,
            accepting: tokio::task::spawn_local(accept),
        }
    }

    fn handshakes(&self, tls: Option<Arc<ListenerTls>>) -> Option<Rc<Handshakes>> {
        let metrics = self.active.process().metrics();
        tls.map(|tls| Rc::new(Handshakes::new(tls, metrics.handshakes())))
    }

    fn execute(&mut self, command: WorkerCommand) {
        self.active = command.active;
        self.service.switch_to(Arc::clone(&self.active));
        let mut before: Vec<Option<AcceptTask>> = self.open.drain(..).map(Some).collect();
        for assigned in command.listeners {
            let listener_task = match assigned {
                AssignedListener::New(opening) => Some(self.admit(opening)),
                AssignedListener::Kept(place, settings, tls) => {
                    let listener_task = before.get_mut(place).and_then(Option::take);
                    if let Some(listener_task) = &listener_task {
                        listener_task
                            .listener
                            .change(settings, self.handshakes(tls));
                    }
                    listener_task
                }
            };
            self.open.extend(listener_task);
        }
        before
            .into_iter()
            .flatten()
            .for_each(|listener_task| self.close(listener_task));
        // the caller may have stopped waiting
        let _ = command.done.send(());
    }

    /// Closes a listener. Its connections end after their current requests, or at the deadline.
    fn close(&mut self, listener_task: AcceptTask) {
        let patience = self.active.snapshot().server.drain_timeout;
        self.leaving.spawn_local(async move {
            let drain = listener_task.listener.drain();
            let ended = async {
                let _ = tokio::join!(listener_task.accepting, drain.finish());
                // connections that were still in the accept queue
                drain.finish().await;
            };
            if tokio::time::timeout(patience, ended).await.is_err() {
                tracing::warn!(
                    connections = drain.open(),
                    "drain_timeout has passed: aborting requests in flight"
                );
            }
            drain.end();
        });
    }

    async fn leave(mut self, mut stopping: watch::Receiver<Stop>) {
        for listener_task in std::mem::take(&mut self.open) {
            self.close(listener_task);
        }
        let finished = async { while self.leaving.join_next().await.is_some() {} };
        tokio::select! {
            () = finished => {}
            _ = stopping.wait_for(|stop| *stop == Stop::Now) => {}
        }
    }
}

/// The metrics and log lines of one listener.
struct ConnectionMetrics {
    accepting: Throttle,
    announcing: Throttle,
    cutting: Throttle,
    crowding: Throttle,
    metrics: ListenerMetrics,
    /// Faults in PROXY headers.
    announced: IdentityMetrics,
    label: String,
}

impl ConnectionMetrics {
    fn new(metrics: &Metrics, label: String, settings: &listener::ListenerSettings) -> Self {
        let faults: &[_] = match settings.proxy_protocol {
            ProxyProtocol::Off => &[],
            ProxyProtocol::Required(_) => &ProxyProtocolFault::LABELS,
        };
        Self {
            accepting: Throttle::default(),
            announcing: Throttle::default(),
            cutting: Throttle::default(),
            crowding: Throttle::default(),
            metrics: metrics.listener(&label, &AbuseReason::LABELS),
            announced: metrics.identity("proxy_protocol", faults),
            label,
        }
    }
}

impl Observer for ConnectionMetrics {
    type Open = GaugeGuard;

    fn opened(&self) -> GaugeGuard {
        self.metrics.open()
    }

    fn accept_failed(&self, error: &io::Error) {
        if let Some(suppressed) = self.accepting.speak() {
            tracing::warn!(listener = self.label, suppressed, %error, "cannot accept a connection; still accepting");
        }
        self.metrics.accept_failed(error);
    }

    fn cut(&self, why: AbuseReason) {
        if let Some(suppressed) = self.cutting.speak() {
            tracing::warn!(
                listener = self.label,
                suppressed,
                "closed a connection early: {why}"
            );
        }
        self.metrics.cut(why.label());
    }

    fn crowded(&self, ip: IpAddr) {
        if let Some(suppressed) = self.crowding.speak() {
            let why = AbuseReason::Crowded;
            tracing::warn!(listener = self.label, client_ip = %ip, suppressed, "closed a connection: {why}");
        }
        self.metrics.cut(AbuseReason::Crowded.label());
    }

    fn proxy_protocol_failed(&self, peer: IpAddr, fault: ProxyProtocolFault) {
        if let Some(suppressed) = self.announcing.speak() {
            tracing::warn!(listener = self.label, %peer, suppressed, "closed a connection: {fault}");
        }
        self.announced.rejected(fault.label());
    }
}
