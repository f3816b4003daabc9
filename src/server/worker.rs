//! One worker thread: its sockets, the service that answers requests, and the commands that it
//! receives.

use std::{
    io,
    net::IpAddr,
    rc::Rc,
    sync::{Arc, mpsc as std_mpsc},
};

use tokio::{
    runtime::LocalOptions,
    sync::{Semaphore, mpsc, oneshot, watch},
    task::{JoinHandle, JoinSet},
};

use super::SWEEP;
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
    pub(super) shared: Arc<ActiveConfig>,
    /// All listeners from now on; the worker closes those that are not in this list.
    pub(super) entrances: Vec<Assigned>,
    /// Signalled once the worker serves new requests with this configuration.
    pub(super) done: oneshot::Sender<()>,
}

/// A listener of the next configuration.
pub(super) enum Assigned {
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
    pub(super) shared: Arc<ActiveConfig>,
    pub(super) connections: Arc<Semaphore>,
    pub(super) crowd: Arc<ConnectionsPerAddress>,
    pub(super) orders: mpsc::Receiver<WorkerCommand>,
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
        let mut house = WorkerState {
            station: Rc::new(WorkerService::new(Arc::clone(&self.shared))),
            shared: self.shared,
            connections: self.connections,
            crowd: self.crowd,
            open: Vec::new(),
            leaving: JoinSet::new(),
        };
        let station = Rc::clone(&house.station);
        let upkeep = tokio::task::spawn_local(async move {
            let mut ticks = tokio::time::interval(SWEEP);
            loop {
                station.sweep(ticks.tick().await);
            }
        });
        // the receiver is gone only if another worker could not start
        let _ = self.up.send(Ok(()));
        loop {
            tokio::select! {
                // the sender lives until every worker has ended
                _ = self.stopping.wait_for(|stop| *stop != Stop::No) => break,
                Some(order) = self.orders.recv() => house.obey(order),
                Some(_) = house.leaving.join_next() => {}
            }
        }
        upkeep.abort();
        house.leave(self.stopping).await;
    }
}

/// The state of a running worker.
struct WorkerState {
    station: Rc<WorkerService>,
    shared: Arc<ActiveConfig>,
    connections: Arc<Semaphore>,
    crowd: Arc<ConnectionsPerAddress>,
    open: Vec<AcceptTask>,
    /// Listeners that are closing, until their last connection ends.
    leaving: JoinSet<()>,
}

/// A listener and its accept task.
struct AcceptTask {
    entrance: Rc<Listener>,
    accepting: JoinHandle<io::Result<()>>,
}

impl WorkerState {
    fn admit(&self, opening: NewListener) -> AcceptTask {
        let metrics = self.shared.process().metrics();
        let observer = ConnectionMetrics::new(metrics, opening.label, &opening.settings);
        let handshakes = self.handshakes(opening.tls);
        let entrance = Listener::new(opening.settings, handshakes, Arc::clone(&self.crowd));
        let accept = Rc::clone(&entrance).accept(
            opening.socket,
            Rc::clone(&self.station),
            Rc::new(observer),
            Arc::clone(&self.connections),
        );
        AcceptTask {
            entrance,
            accepting: tokio::task::spawn_local(accept),
        }
    }

    fn handshakes(&self, tls: Option<Arc<ListenerTls>>) -> Option<Rc<Handshakes>> {
        let metrics = self.shared.process().metrics();
        tls.map(|tls| Rc::new(Handshakes::new(tls, metrics.handshakes())))
    }

    fn obey(&mut self, order: WorkerCommand) {
        self.shared = order.shared;
        self.station.adopt(Arc::clone(&self.shared));
        let mut before: Vec<Option<AcceptTask>> = self.open.drain(..).map(Some).collect();
        for assigned in order.entrances {
            let door = match assigned {
                Assigned::New(opening) => Some(self.admit(opening)),
                Assigned::Kept(place, settings, tls) => {
                    let door = before.get_mut(place).and_then(Option::take);
                    if let Some(door) = &door {
                        door.entrance.change(settings, self.handshakes(tls));
                    }
                    door
                }
            };
            self.open.extend(door);
        }
        before
            .into_iter()
            .flatten()
            .for_each(|door| self.close(door));
        // the caller may have stopped waiting
        let _ = order.done.send(());
    }

    /// Closes a listener. Its connections end after their current requests, or at the deadline.
    fn close(&mut self, door: AcceptTask) {
        let patience = self.shared.snapshot().server.drain_timeout;
        self.leaving.spawn_local(async move {
            let drain = door.entrance.drain();
            let ended = async {
                let _ = tokio::join!(door.accepting, drain.finish());
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
        for door in std::mem::take(&mut self.open) {
            self.close(door);
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
                "cut a connection short: {why}"
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

    fn not_believed(&self, peer: IpAddr, fault: ProxyProtocolFault) {
        if let Some(suppressed) = self.announcing.speak() {
            tracing::warn!(listener = self.label, %peer, suppressed, "closed a connection: {fault}");
        }
        self.announced.rejected(fault.label());
    }
}
