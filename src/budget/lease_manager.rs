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
//! Read `message` (the protocol with workers), then `table` (the keys in use) and `key` (what they
//! have in common), `tokens` and `slots` (the two kinds of leases), then `redis_clients` (calls and
//! servers) and `scripts` (what is called).

mod config;
mod fallback;
mod key;
mod message;
mod redis_clients;
mod scripts;
mod slots;
mod table;
mod tokens;

use std::{
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};

use super::{key_table::CellNotice, redis::Failure};

use redis_clients::{Event, EventKind, RedisClients};
use table::{HandedBack, LeaseTable};

pub(super) use config::{LeaseManagerConfig, PATIENCE, QUEUE};
pub(super) use fallback::{alone, most_alone};
pub(super) use message::{
    Grant, KeeperOutcome, KeyReply, KeyRequest, LateKind, LateMessage, Message,
};

pub(super) struct LeaseManager {
    clients: RedisClients,
    table: LeaseTable,
}

impl LeaseManager {
    /// Runs until it is told to close or all workers' senders of messages are dropped.
    /// `started` receives whether Redis answered the first time.
    pub(super) async fn run(
        config: LeaseManagerConfig,
        notices: mpsc::Sender<CellNotice>,
        (mut messages, mut noticed): (mpsc::Receiver<Message>, mpsc::Receiver<CellNotice>),
        started: SyncSender<Result<(), Failure>>,
    ) {
        let (events, mut happened) = mpsc::channel(QUEUE);
        let mut manager = LeaseManager {
            table: LeaseTable::new(Arc::clone(&config.key_table), notices),
            clients: RedisClients::new(config, events),
        };
        // during an aborted start the receiver is gone
        let _ = started.send(manager.clients.connect().await);
        loop {
            let next_ns = manager.clients.next_ns().min(manager.table.next_ns());
            let wake = manager.clients.moment(next_ns);
            tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Close(timeouts)) => {
                        return manager.close(&mut happened, timeouts).await;
                    }
                    Some(message) => manager.hear(message),
                    None => return,
                },
                // the table and the clients hold senders: there is always another one
                Some(notice) = noticed.recv() => manager.notice(notice),
                Some(event) = happened.recv() => manager.happened(event),
                () = tokio::time::sleep_until(wake) => manager.look_at_due(),
            }
        }
    }

    fn hear(&mut self, message: Message) {
        let now_ns = self.clients.now_ns();
        let (clients, table) = (&mut self.clients, &mut self.table);
        match message {
            Message::Ask(request) => table.ask(clients, now_ns, request),
            Message::Late(late) => table.late(clients, now_ns, &late),
            Message::Return {
                place,
                tag,
                origin,
                tokens,
            } => table.unused(clients, now_ns, (place, tag), (origin, tokens)),
            Message::Unslacked { place, tag, tokens } => table.unslacked(place, tag, tokens),
            // handled by the loop
            Message::Close(_) => {}
        }
    }

    fn notice(&mut self, notice: CellNotice) {
        let now_ns = self.clients.now_ns();
        self.table.notice(&mut self.clients, now_ns, notice);
    }

    fn happened(&mut self, event: Event) {
        let now_ns = self.clients.now_ns();
        let (clients, table) = (&mut self.clients, &mut self.table);
        match event.kind {
            EventKind::Overdue => {
                clients.overdue(now_ns, &event);
                table.give_up(&event);
            }
            EventKind::Ended(Ok(reply)) => {
                clients.answered(now_ns, &event);
                clients.look_at_run(event.shard);
                table.replied(clients, now_ns, &event, &reply);
            }
            EventKind::Ended(Err(failure)) => {
                clients.failed(now_ns, &event, failure);
                table.give_up(&event);
            }
            EventKind::Late(reply) => {
                clients.answered_late(now_ns, &event);
                clients.look_at_run(event.shard);
                table.replied(clients, now_ns, &event, &reply);
            }
            EventKind::Probed(result) => {
                clients.probed(event.shard, result);
                table.tell_news(clients, now_ns, event.shard);
            }
            EventKind::Checked(ref result) => clients.checked(now_ns, &event, result),
            EventKind::Moved => {
                clients.moved();
                table.moved(clients);
            }
            EventKind::Counted { gateways, is_new } => {
                clients.counted(now_ns, event.shard, gateways, is_new);
                table.look_at_disagreements(now_ns);
            }
        }
        while let Some(shard) = clients.take_loss() {
            table.lost(clients, now_ns, shard);
        }
        table.plan_after(clients, now_ns, &event);
    }

    fn look_at_due(&mut self) {
        let now_ns = self.clients.now_ns();
        self.clients.look_at_due(now_ns);
        self.table.look_at_due(&mut self.clients, now_ns);
    }

    /// Returns every token in parallel, and waits for the replies for at most `patience`.
    async fn close(mut self, happened: &mut mpsc::Receiver<Event>, patience: Duration) {
        let deadline = Instant::now() + patience;
        let now_ns = self.clients.now_ns();
        let HandedBack { tokens, slots } = self.table.hand_back(&mut self.clients, now_ns);
        let good_bye = self.clients.count(true);
        while self.table.is_busy() {
            match tokio::time::timeout_at(deadline, happened.recv()).await {
                Ok(Some(event))
                    if matches!(event.kind, EventKind::Ended(_) | EventKind::Late(_)) =>
                {
                    self.table.leave(&event);
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        let _ = tokio::time::timeout_at(deadline, good_bye).await;
        self.table.forget_all();
        if tokens > 0 || slots > 0 {
            tracing::info!(tokens, slots, "returned unused tokens and slots to Redis");
        }
    }
}
