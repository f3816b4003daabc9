//! The lease manager, the only task that talks to Redis: it holds a lease for every key in use and
//! the requests that wait for one.
//!
//! ```text
//!   workers ── ask, low, return ──▶ bounded queue ──▶ manager ── one call per key ──▶ Redis
//!      ▲                                                │  ▲                            │
//!      └── answer (oneshot) ◀── cells (atomics) ◀───────┘  └──── reply, or none ◀───────┘
//! ```
//!
//! It runs on its own thread, so that administrative work never delays a request. A request that
//! finds no local token waits for the reply to its key's call; requests that arrive meanwhile wait
//! for the same call. When a call exceeds the timeout, its waiters use their fallback; its reply is
//! banked when it comes.
//!
//! Read `message` (the protocol with workers), then `leases` with `entry` (keys and their tokens),
//! `slots` (keys with requests in flight), then `redis_clients` (calls and servers).

mod config;
mod entry;
mod leases;
mod message;
mod slots;
mod redis_clients;

use std::{
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};

use super::{key_table::CellNotice, lease::LeaseAlgorithm, redis::Failure};

use leases::Leases;
use redis_clients::{Event, EventKind, RedisClients};
use slots::ConcurrencyLeases;

pub(super) use config::{LeaseManagerConfig, PATIENCE, QUEUE};
pub(super) use entry::alone;
pub(super) use message::{
    Grant, KeeperOutcome, KeyReply, KeyRequest, LateKind, LateMessage, Message,
};
pub(super) use slots::most_alone;

pub(super) struct LeaseManager {
    clients: RedisClients,
    leases: Leases,
    in_flight: ConcurrencyLeases,
}

impl LeaseManager {
    /// Runs until it is told to close or all workers' senders of messages are dropped.
    /// `started` receives whether Redis answered the first time.
    pub(super) async fn run(
        config: LeaseManagerConfig,
        notices: mpsc::WeakSender<CellNotice>,
        (mut messages, mut noticed): (mpsc::Receiver<Message>, mpsc::Receiver<CellNotice>),
        started: SyncSender<Result<(), Failure>>,
    ) {
        let (events, mut happened) = mpsc::channel(QUEUE);
        let mut manager = LeaseManager {
            leases: Leases::new(Arc::clone(&config.key_table)),
            in_flight: ConcurrencyLeases::new(Arc::clone(&config.key_table), notices),
            clients: RedisClients::new(config, events),
        };
        // during an aborted start the receiver is gone
        let _ = started.send(manager.clients.connect().await);
        loop {
            let keys_ns = manager.leases.next_ns().min(manager.in_flight.next_ns());
            let wake = manager
                .clients
                .moment(manager.clients.next_ns().min(keys_ns));
            tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Close(timeouts)) => {
                        return manager.close(&mut happened, timeouts).await;
                    }
                    Some(message) => manager.hear(message),
                    None => return,
                },
                Some(notice) = noticed.recv() => manager.notice(notice),
                // the wire holds a sender: there is always another event
                Some(event) = happened.recv() => manager.happened(event),
                () = tokio::time::sleep_until(wake) => manager.look_at_due(),
            }
        }
    }

    fn hear(&mut self, message: Message) {
        let now_ns = self.clients.now_ns();
        let (clients, leases, in_flight) =
            (&mut self.clients, &mut self.leases, &mut self.in_flight);
        match message {
            Message::Ask(question) => match question.limit.algorithm() {
                LeaseAlgorithm::Slots => in_flight.ask(clients, now_ns, question),
                _ => leases.ask(clients, now_ns, question),
            },
            Message::Late(late) => leases.late(clients, now_ns, &late),
            Message::Return {
                place,
                tag,
                origin,
                tokens,
            } if leases.has(place, tag) => {
                leases.unused(clients, now_ns, place, origin, tokens);
            }
            Message::Unslacked { place, tag, tokens } if leases.has(place, tag) => {
                leases.unslacked(place, tokens);
            }
            // the key was forgotten meanwhile
            Message::Return { .. } | Message::Unslacked { .. } | Message::Close(_) => {}
        }
    }

    fn notice(&mut self, CellNotice { place, tag }: CellNotice) {
        let now_ns = self.clients.now_ns();
        // otherwise the key was forgotten meanwhile
        if self.leases.has(place, tag) {
            self.leases.fill(&mut self.clients, now_ns, place);
        } else if self.in_flight.has(place, tag) {
            self.in_flight.freed(&mut self.clients, now_ns, place);
        }
    }

    fn happened(&mut self, event: Event) {
        let now_ns = self.clients.now_ns();
        let (clients, leases, in_flight) =
            (&mut self.clients, &mut self.leases, &mut self.in_flight);
        match event.kind {
            EventKind::Overdue => {
                clients.overdue(now_ns, &event);
                leases.give_up(&event);
                in_flight.give_up(&event);
            }
            EventKind::Ended(Ok(reply)) => {
                clients.answered(now_ns, &event);
                clients.look_at_run(event.shard);
                leases.replied(clients, now_ns, &event, &reply);
                in_flight.replied(clients, now_ns, &event, &reply);
            }
            EventKind::Ended(Err(failure)) => {
                clients.failed(now_ns, &event, failure);
                leases.give_up(&event);
                in_flight.give_up(&event);
            }
            EventKind::Late(reply) => {
                clients.answered_late(now_ns, &event);
                clients.look_at_run(event.shard);
                leases.replied(clients, now_ns, &event, &reply);
                in_flight.replied(clients, now_ns, &event, &reply);
            }
            EventKind::Probed(result) => {
                clients.probed(event.shard, result);
                leases.tell_news(clients, now_ns, event.shard);
            }
            EventKind::Checked(ref result) => clients.checked(now_ns, &event, result),
            EventKind::Moved => {
                clients.moved();
                leases.moved(clients);
                in_flight.moved(clients);
            }
            EventKind::Counted { gateways, is_new } => {
                clients.counted(now_ns, event.shard, gateways, is_new);
                leases.look_at_disagreements(now_ns);
            }
        }
        while let Some(shard) = clients.take_loss() {
            leases.lost(now_ns, shard);
            in_flight.lost(clients, now_ns, shard);
        }
        if leases.has(event.place, event.tag) {
            leases.settle(clients, now_ns, event.place);
        } else if in_flight.has(event.place, event.tag) {
            in_flight.settle(clients, now_ns, event.place);
        }
    }

    fn look_at_due(&mut self) {
        let now_ns = self.clients.now_ns();
        self.clients.look_at_due(now_ns);
        self.leases.look_at_due(&mut self.clients, now_ns);
        self.in_flight.look_at_due(&mut self.clients, now_ns);
    }

    /// Returns every token in parallel, and waits for the replies for at most `patience`.
    async fn close(mut self, happened: &mut mpsc::Receiver<Event>, timeouts: Duration) {
        let deadline = Instant::now() + timeouts;
        let now_ns = self.clients.now_ns();
        let tokens = self.leases.hand_back(&mut self.clients, now_ns);
        let slots = self.in_flight.hand_back(&mut self.clients, now_ns);
        let good_bye = self.clients.count(true);
        while self.leases.is_busy() || self.in_flight.is_busy() {
            match tokio::time::timeout_at(deadline, happened.recv()).await {
                Ok(Some(event))
                    if matches!(event.kind, EventKind::Ended(_) | EventKind::Late(_)) =>
                {
                    self.leases.leave(&event);
                    self.in_flight.leave(&event);
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        let _ = tokio::time::timeout_at(deadline, good_bye).await;
        self.leases.forget_all();
        self.in_flight.forget_all();
        if tokens > 0 || slots > 0 {
            tracing::info!(tokens, slots, "returned unused tokens and slots to Redis");
        }
    }
}
