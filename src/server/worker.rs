//! One worker thread: the sockets that it accepts on, the station that answers, and the orders that it takes.

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
    gateway::{Shared, Station},
    listener::{
        self, Cut, Entrance, Handshakes, ListeningSocket, Observer, ProxyProtocol, Tls,
        crowd::Crowd, proxy_protocol::Fault,
    },
    telemetry::{
        Metrics,
        handles::{Held, IdentityMetrics, ListenerMetrics},
        log::Throttle,
    },
};

/// What workers are told at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    No,
    /// Accept no more; finish what is in flight.
    Drain,
    /// Leave what is still in flight.
    Now,
}

/// A configuration that a worker is to take up.
pub(super) struct Order {
    pub(super) shared: Arc<Shared>,
    /// Where it is to listen from now on; entrances that are not among them close.
    pub(super) entrances: Vec<Assigned>,
    /// Told when requests that arrive from then on are served with it.
    pub(super) done: oneshot::Sender<()>,
}

/// A listener of the next configuration.
pub(super) enum Assigned {
    /// The one that has this place now, with these settings from now on.
    Kept(usize, listener::Settings, Option<Arc<Tls>>),
    /// A new one.
    New(Opening),
}

/// A socket that a worker is to accept on.
pub(super) struct Opening {
    pub(super) settings: listener::Settings,
    /// The address as metrics and logs show it.
    pub(super) label: String,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) socket: ListeningSocket,
}

/// What one worker thread does, and with what.
pub(super) struct Duty {
    pub(super) shared: Arc<Shared>,
    pub(super) connections: Arc<Semaphore>,
    pub(super) crowd: Arc<Crowd>,
    pub(super) orders: mpsc::Receiver<Order>,
    pub(super) stopping: watch::Receiver<Stop>,
    pub(super) up: std_mpsc::SyncSender<io::Result<()>>,
}

impl Duty {
    pub(super) fn work(self) {
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
        let mut house = House {
            station: Rc::new(Station::new(Arc::clone(&self.shared))),
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
        // the server has given up only if another worker could not start
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

/// What a worker keeps while it works.
struct House {
    station: Rc<Station>,
    shared: Arc<Shared>,
    connections: Arc<Semaphore>,
    crowd: Arc<Crowd>,
    open: Vec<Door>,
    /// Entrances that are closing, until their last connection has ended.
    leaving: JoinSet<()>,
}

/// An entrance, and the task that accepts on it.
struct Door {
    entrance: Rc<Entrance>,
    accepting: JoinHandle<io::Result<()>>,
}

impl House {
    fn admit(&self, opening: Opening) -> Door {
        let metrics = self.shared.process().metrics();
        let observer = ConnectionMetrics::new(metrics, opening.label, &opening.settings);
        let handshakes = self.handshakes(opening.tls);
        let entrance = Entrance::new(opening.settings, handshakes, Arc::clone(&self.crowd));
        let accept = Rc::clone(&entrance).accept(
            opening.socket,
            Rc::clone(&self.station),
            Rc::new(observer),
            Arc::clone(&self.connections),
        );
        Door {
            entrance,
            accepting: tokio::task::spawn_local(accept),
        }
    }

    fn handshakes(&self, tls: Option<Arc<Tls>>) -> Option<Rc<Handshakes>> {
        let metrics = self.shared.process().metrics();
        tls.map(|tls| Rc::new(Handshakes::new(tls, metrics.handshakes())))
    }

    fn obey(&mut self, order: Order) {
        self.shared = order.shared;
        self.station.adopt(Arc::clone(&self.shared));
        let mut before: Vec<Option<Door>> = self.open.drain(..).map(Some).collect();
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
        // whoever asked may have given up waiting
        let _ = order.done.send(());
    }

    /// Closes an entrance; its connections end after what they have in hand, or at the deadline.
    fn close(&mut self, door: Door) {
        let patience = self.shared.snapshot().server.drain_timeout;
        self.leaving.spawn_local(async move {
            let drain = door.entrance.drain();
            let ended = async {
                let _ = tokio::join!(door.accepting, drain.finish());
                // those that were still waiting to be accepted
                drain.finish().await;
            };
            if tokio::time::timeout(patience, ended).await.is_err() {
                tracing::warn!(
                    connections = drain.open(),
                    "drain_timeout has passed: leaving what is still in flight"
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

/// Counts what happens on one listener.
struct ConnectionMetrics {
    accepting: Throttle,
    announcing: Throttle,
    cutting: Throttle,
    crowding: Throttle,
    metrics: ListenerMetrics,
    /// Where connections begin with a PROXY header.
    announced: IdentityMetrics,
    label: String,
}

impl ConnectionMetrics {
    fn new(metrics: &Metrics, label: String, settings: &listener::Settings) -> Self {
        let faults: &[_] = match settings.proxy_protocol {
            ProxyProtocol::Off => &[],
            ProxyProtocol::Required(_) => &Fault::LABELS,
        };
        Self {
            accepting: Throttle::default(),
            announcing: Throttle::default(),
            cutting: Throttle::default(),
            crowding: Throttle::default(),
            metrics: metrics.listener(&label, &Cut::LABELS),
            announced: metrics.identity("proxy_protocol", faults),
            label,
        }
    }
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

    fn crowded(&self, ip: IpAddr) {
        if let Some(unsaid) = self.crowding.speak() {
            let why = Cut::Crowded;
            tracing::warn!(listener = self.label, client_ip = %ip, unsaid, "closed a connection: {why}");
        }
        self.metrics.cut(Cut::Crowded.label());
    }

    fn not_believed(&self, peer: IpAddr, fault: Fault) {
        if let Some(unsaid) = self.announcing.speak() {
            tracing::warn!(listener = self.label, %peer, unsaid, "closed a connection: {fault}");
        }
        self.announced.rejected(fault.label());
    }
}
