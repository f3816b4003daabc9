//! One allowance shared by all gateways, kept in Redis: with next to no Redis on the path of a request.
//!
//! Read in this order: [`lease`] (the arithmetic of tokens borrowed ahead), `slack` (what passes before anybody
//! is asked), `holding` (the same of slots, for requests in flight),
//! `hand` (what workers decide with), `keeper` (the task that asks Redis), `breaker` (when to stop asking), `redis` (one
//! connection), `cluster` (which server keeps a key), and the scripts beside them.
//!
//! **All or none.** A request meets local and shared limits. Refusals that are remembered come first, then tokens in hand are
//! taken, then Redis is asked for what is missing, in parallel and for every limit by itself, so that the limits of one request
//! may be anywhere in a cluster. Whatever refuses, the tokens taken go back into the hand, where they serve the next request:
//! what would be a transaction over several servers is two additions in memory. Limits that are asked for every request come
//! last, since what they grant has to travel back.
//!
//! **Without Redis** a request waits for the budget at most, and for nothing once the breaker is open: the limit's
//! `on_redis_down` decides.

pub mod lease;

mod board;
mod breaker;
mod cluster;
mod hand;
mod holding;
mod keeper;
mod redis;
mod settings;
mod slack;
mod spend;

use std::{
    io,
    sync::{Arc, atomic::AtomicBool, mpsc::sync_channel},
    thread,
    time::Duration,
};

use tokio::{runtime::LocalOptions, sync::mpsc, time::Instant};

pub use board::{Board, Notice, Posted, Reader};
pub use hand::Lent;
pub use redis::{Server, Target, Tls};
pub use settings::{FAILURES, LOSSES, Name, Settings, SharedLimit, Sync, WhenDown};
pub use spend::{Claim, Decided, Source, Unavailable};

use cluster::MAX_SHARDS;
use hand::Hands;
use keeper::{Duty, Keeper, Message, PATIENCE, QUEUE};
use lease::Algorithm;
use redis::Patience;

use crate::telemetry::handles::BudgetMetrics;

/// What every worker spends from.
#[derive(Debug)]
pub struct Budget {
    hands: Arc<Hands>,
    keeper: mpsc::Sender<Message>,
    degraded: Arc<Degraded>,
    board: Board,
    wait: Duration,
}

impl Budget {
    /// Where all gateways read what operators have ruled at one.
    pub fn board(&self) -> &Board {
        &self.board
    }
}

/// Which servers are given up at the moment. Written by the keeper, read by workers.
#[derive(Debug)]
struct Degraded {
    all: AtomicBool,
    servers: [AtomicBool; MAX_SHARDS],
}

impl Default for Degraded {
    fn default() -> Degraded {
        Degraded {
            all: AtomicBool::new(false),
            servers: [const { AtomicBool::new(false) }; MAX_SHARDS],
        }
    }
}

/// The thread that talks to Redis.
#[derive(Debug)]
pub struct KeeperThread {
    keeper: mpsc::Sender<Message>,
    thread: thread::JoinHandle<()>,
}

/// Starts the thread that talks to Redis, and waits until Redis has answered or not: a gateway starts without, too. `epoch` is
/// the origin of the time that requests are decided with.
pub fn start(
    settings: &Settings,
    max_keys: usize,
    limits: &[Arc<SharedLimit>],
    epoch: Instant,
    metrics: BudgetMetrics,
    reader: Reader,
) -> io::Result<(Budget, KeeperThread)> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
    let id = random
        .iter()
        .skip(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let seed = random
        .iter()
        .take(8)
        .fold(0, |seed, &byte| seed << 8 | u64::from(byte));
    let hands = Arc::new(hands(max_keys, limits));
    let degraded: Arc<Degraded> = Arc::default();
    let patience = Patience {
        connect: settings.connect_timeout,
        response: settings.timeout * PATIENCE,
    };
    let (keeper, messages) = mpsc::channel(QUEUE);
    let (board, posts) = Board::new();
    let reading = board::Duty {
        target: settings.target.clone(),
        patience,
        prefix: settings.key_prefix.clone(),
        reader,
    };
    let own = keeper.downgrade();
    let target = settings.target.clone();
    let (hands_of, degraded_of) = (Arc::clone(&hands), Arc::clone(&degraded));
    let (prefix, timeout) = (settings.key_prefix.clone(), settings.timeout);
    let (started, has_started) = sync_channel(1);
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default());
        let Ok(runtime) = runtime else { return };
        let duty = Duty {
            hands: hands_of,
            degraded: degraded_of,
            target,
            patience,
            prefix,
            timeout,
            epoch,
            metrics,
            id,
            seed,
        };
        runtime.block_on(async {
            tokio::task::spawn_local(board::serve(reading, posts));
            Keeper::run(duty, own, messages, started).await;
        });
    };
    let thread = thread::Builder::new().name("budget".into()).spawn(work)?;
    let first = has_started
        .recv()
        .map_err(|_| io::Error::other("the thread that talks to Redis has no runtime"))?;
    if first.is_ok() {
        tracing::info!(
            redis = settings.target.address(),
            "shared limits are kept in Redis"
        );
    }
    let budget = Budget {
        hands,
        keeper: keeper.clone(),
        degraded,
        board,
        wait: settings.timeout,
    };
    Ok((budget, KeeperThread { keeper, thread }))
}

/// Room for every key, and for each quota a hand of those that find none.
fn hands(max_keys: usize, limits: &[Arc<SharedLimit>]) -> Hands {
    let quotas = limits.iter().map(|limit| limit.quotas()).sum();
    let hands = Hands::new(max_keys, quotas);
    for limit in limits {
        for tier in &limit.tiers {
            let place = hands.overflow(tier.overflow);
            if limit.algorithm() == Algorithm::Slots {
                if let Some(most) = keeper::most_alone(&tier.terms, limit.when_down, 1.0) {
                    hands.slots(place).prepare_alone(most);
                }
            } else if let Some(alone) = keeper::alone(&tier.terms, limit.when_down, 1.0, None) {
                hands.hand(place).prepare_alone(0, &alone);
            }
        }
    }
    hands
}

impl KeeperThread {
    /// Hands back every token that was borrowed ahead, and ends. Takes no longer than `patience`, or a little.
    pub fn close(self, patience: Duration) {
        // a keeper that has ended has nothing to hand back
        if self.keeper.blocking_send(Message::Close(patience)).is_ok() {
            let _ = self.thread.join();
        }
    }
}
