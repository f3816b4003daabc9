//! One gateway in this process: the workers' decisions, and the thread that talks to Redis behind
//! them.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tidegate::{
    budget::{
        self, Budget, DecisionSource, LeaseManagerThread, RedisServer, RedisSettings, RedisTarget,
        SharedClaim, SharedKeyName, SharedLimit, WhenDown,
        lease::{LeaseAlgorithm, LeaseTerms},
    },
    limit::{Key, Store},
    telemetry::Metrics,
};
use tokio::time::Instant;

/// A limit on each of some keys, and its fallback without Redis.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub amount: u64,
    pub period: Duration,
    pub burst: u64,
    pub ahead: bool,
    pub when_down: WhenDown,
    /// How long a request waits for Redis.
    pub timeout: Duration,
}

impl Limit {
    /// `amount` per second with an equal burst, with leases; half of it without Redis.
    pub fn per_second(amount: u64) -> Limit {
        Limit {
            amount,
            period: Duration::from_secs(1),
            burst: amount,
            ahead: true,
            when_down: WhenDown::Local { fraction: 0.5 },
            timeout: Duration::from_millis(50),
        }
    }

    pub fn strict(self) -> Limit {
        Limit {
            ahead: false,
            ..self
        }
    }

    pub fn when_down(self, when_down: WhenDown) -> Limit {
        Limit { when_down, ..self }
    }

    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.amount as f64 / self.period.as_secs_f64()
    }
}

/// How a request was decided.
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    pub answer: Answer,
    /// It had to wait.
    pub waited: bool,
    /// Redis did not answer in time.
    pub alone: bool,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Admitted,
    Refused,
    /// The limit admits nothing without Redis.
    Unavailable,
}

pub struct Gateway {
    budget: Budget,
    keeper: LeaseManagerThread,
    limit: Arc<SharedLimit>,
    store: Store,
    epoch: Instant,
}

impl Gateway {
    pub fn start(target: &RedisTarget, limit: Limit) -> Gateway {
        let metrics = Metrics::install();
        let (amount, period) = (limit.amount, limit.period);
        let terms = LeaseTerms::new(
            LeaseAlgorithm::Bucket,
            amount,
            period,
            limit.burst,
            limit.ahead,
        );
        let lease = metrics.lease("bench", limit.when_down.as_str());
        let shared = SharedLimit::new("bench", vec![terms], limit.when_down, 0, lease);
        let shared = Arc::new(shared);
        let settings = RedisSettings {
            target: target.clone(),
            key_prefix: "bench".to_owned(),
            timeout: limit.timeout,
            connect_timeout: Duration::from_millis(50),
            region_share: 1.0,
        };
        let epoch = Instant::now();
        let counters = metrics.budget(&budget::FAILURES, &budget::LOSSES);
        let limits = [Arc::clone(&shared)];
        let nobody = budget::OverrideReader::new(|_, _| Vec::new());
        let (budget, keeper) =
            budget::start(&settings, 100_000, &limits, epoch, counters, nobody).expect("a thread");
        Gateway {
            budget,
            keeper,
            limit: shared,
            store: Store::new(1),
            epoch,
        }
    }

    /// Decides on a request with this key.
    pub async fn decide(&self, key: u64) -> Decision {
        let spread = u128::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_0C65_1B8D_1E2B);
        let claims = [SharedClaim {
            limit: &self.limit,
            tier: 0,
            key: Some(Key(spread)),
            cost: 1,
        }];
        let name = |_| SharedKeyName(u128::from(key).to_le_bytes());
        let now_ns = self.epoch.elapsed().as_nanos() as u64;
        let mut decision = pin!(self.budget.admit(now_ns, &self.store, &[], &claims, name));
        let first = decision
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        let (decided, waited) = match first {
            Poll::Ready(decided) => (decided, false),
            Poll::Pending => (decision.await, true),
        };
        let (answer, alone) = match decided {
            Ok(decided) => {
                let alone = decided.sources.contains(&DecisionSource::Fallback);
                match decided.shared.admitted() {
                    true => (Answer::Admitted, alone),
                    false => (Answer::Refused, alone),
                }
            }
            Err(_) => (Answer::Unavailable, true),
        };
        Decision {
            answer,
            waited,
            alone,
        }
    }

    /// Shuts down as on SIGTERM: returns its tokens.
    pub fn close(self) {
        self.keeper.close(Duration::from_secs(1));
    }
}

/// One server.
pub fn at(url: &str) -> RedisTarget {
    RedisTarget::One(RedisServer::parse(url).expect("a URL"))
}
