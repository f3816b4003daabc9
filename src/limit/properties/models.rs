//! The algorithms, each with a slow, obvious model of one key (tests).

use crate::limit::{self, Quota};

pub(super) const ALGORITHMS: [&dyn ModelAlgorithm; 8] = [
    &BucketModel(limit::Algorithm::TokenBucket),
    &BucketModel(limit::Algorithm::Gcra),
    &BucketModel(limit::Algorithm::LeakyBucket),
    &LeakyModel,
    &Queue,
    &WindowModel(limit::Algorithm::FixedWindow),
    &WindowModel(limit::Algorithm::SlidingWindow),
    &WindowModel(limit::Algorithm::SlidingLog),
];

/// How to construct an algorithm, and the model to compare it with.
pub(super) trait ModelAlgorithm {
    fn algorithm(&self) -> limit::Algorithm;

    /// The nearest quota that the algorithm accepts; its burst is the capacity.
    fn fit(&self, quota: Quota) -> Quota {
        quota
    }

    fn max_delay_ns(&self, _quota: Quota) -> u64 {
        0
    }

    fn model(&self, quota: Quota, offset_ns: u64) -> Box<dyn KeyModel>;

    /// Most units that the written quota may admit within a closed interval of this length.
    fn most_within(&self, quota: Quota, span_ns: u128) -> u128;

    /// The longest wait in fill times, not counting what a clock step adds.
    fn most_fills(&self) -> u64 {
        1
    }

    fn is(&self, other: &dyn ModelAlgorithm) -> bool {
        let same_delay = [self.max_delay_ns(ONE), other.max_delay_ns(ONE)];
        self.algorithm() == other.algorithm() && same_delay[0] == same_delay[1]
    }
}

const ONE: Quota = Quota {
    amount: std::num::NonZeroU64::MIN,
    period: std::time::Duration::from_secs(1),
    burst: std::num::NonZeroU64::MIN,
};

/// One key.
pub(super) trait KeyModel {
    fn admits(&self, now_ns: u64, cost: u64) -> bool;
    fn delay_ns(&self, _now_ns: u64, _cost: u64) -> u64 {
        0
    }
    fn charge(&mut self, now_ns: u64, cost: u64);
    fn remaining(&self, now_ns: u64) -> u64;
    fn is_full(&self, now_ns: u64) -> bool;
}

/// Token bucket and GCRA, and the leaky bucket without a delay.
struct BucketModel(limit::Algorithm);

/// Token bucket that holds requests beyond the burst.
struct LeakyModel;

/// Leaky bucket that holds every request until its turn.
struct Queue;

impl ModelAlgorithm for BucketModel {
    fn algorithm(&self) -> limit::Algorithm {
        self.0
    }

    fn model(&self, quota: Quota, _offset_ns: u64) -> Box<dyn KeyModel> {
        Box::new(ModelTokens::new(quota, HoldingRule::Nothing))
    }

    fn most_within(&self, quota: Quota, span_ns: u128) -> u128 {
        u128::from(quota.burst.get()) + earned(quota, span_ns)
    }
}

impl ModelAlgorithm for LeakyModel {
    fn algorithm(&self) -> limit::Algorithm {
        limit::Algorithm::TokenBucket
    }

    /// A few units, and a bit.
    fn max_delay_ns(&self, quota: Quota) -> u64 {
        (quota.period.as_nanos() as u64 / quota.amount).saturating_mul(3) + 7
    }

    fn model(&self, quota: Quota, _offset_ns: u64) -> Box<dyn KeyModel> {
        let delay_ns = self.max_delay_ns(quota);
        Box::new(ModelTokens::new(quota, HoldingRule::Excess { delay_ns }))
    }

    fn most_within(&self, quota: Quota, span_ns: u128) -> u128 {
        let delay_ns = u128::from(self.max_delay_ns(quota));
        u128::from(quota.burst.get()) + earned(quota, span_ns + delay_ns)
    }
}

impl ModelAlgorithm for Queue {
    fn algorithm(&self) -> limit::Algorithm {
        limit::Algorithm::LeakyBucket
    }

    /// Half of the queue, and a bit.
    fn max_delay_ns(&self, quota: Quota) -> u64 {
        let unit = quota.period.as_nanos() / u128::from(quota.amount.get());
        (unit * u128::from(quota.burst.get()) / 2) as u64 + 5
    }

    fn model(&self, quota: Quota, _offset_ns: u64) -> Box<dyn KeyModel> {
        let delay_ns = self.max_delay_ns(quota);
        Box::new(ModelTokens::new(
            quota,
            HoldingRule::Everything { delay_ns },
        ))
    }

    fn most_within(&self, quota: Quota, span_ns: u128) -> u128 {
        u128::from(quota.burst.get()) + earned(quota, span_ns)
    }
}

/// Whole units that refill within a span.
fn earned(quota: Quota, span_ns: u128) -> u128 {
    span_ns * u128::from(quota.amount.get()) / quota.period.as_nanos()
}

/// Which requests are held, and for how long at most.
enum HoldingRule {
    Nothing,
    Excess { delay_ns: u64 },
    Everything { delay_ns: u64 },
}

/// A token bucket that counts in `1/period_ns` of a token; `amount` of them refill in a nanosecond.
struct ModelTokens {
    holding: HoldingRule,
    amount: i128,
    period_ns: i128,
    burst: u64,
    full: i128,
    held: i128,
    last_ns: i128,
}

impl ModelTokens {
    /// Exact where a unit's interval is a multiple of 1/64 ns or coarser; otherwise the interval is
    /// rounded up to it.
    fn new(quota: Quota, holding: HoldingRule) -> ModelTokens {
        let (amount, period_ns) = (
            i128::from(quota.amount.get()),
            quota.period.as_nanos() as i128,
        );
        let gcd = |mut a: i128, mut b: i128| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let (amount, period_ns) = match amount / gcd(amount, period_ns) {
            1..=64 => (amount, period_ns),
            _ => (64, (64 * period_ns + amount - 1) / amount),
        };
        let burst = quota.burst.get();
        let full = i128::from(burst) * period_ns;
        ModelTokens {
            holding,
            amount,
            period_ns,
            burst,
            full,
            held: full,
            last_ns: 0,
        }
    }

    fn held(&self, now_ns: u64) -> i128 {
        self.full
            .min(self.held + (i128::from(now_ns) - self.last_ns) * self.amount)
    }

    /// Fractions of a token missing for a request of this cost.
    fn lacks(&self, now_ns: u64, cost: u64) -> i128 {
        i128::from(cost) * self.period_ns - self.held(now_ns)
    }
}

impl KeyModel for ModelTokens {
    fn admits(&self, now_ns: u64, cost: u64) -> bool {
        let lacks = self.lacks(now_ns, cost);
        let worth = |delay_ns: u64| i128::from(delay_ns) * self.amount;
        match self.holding {
            _ if cost == 0 => true,
            _ if cost > self.burst => false,
            HoldingRule::Nothing => lacks <= 0,
            HoldingRule::Excess { delay_ns } => lacks <= worth(delay_ns),
            HoldingRule::Everything { delay_ns } => {
                lacks <= 0 && self.full - self.held(now_ns) <= worth(delay_ns)
            }
        }
    }

    fn delay_ns(&self, now_ns: u64, cost: u64) -> u64 {
        let held = match self.holding {
            _ if cost == 0 => 0,
            HoldingRule::Nothing => 0,
            HoldingRule::Excess { .. } => self.lacks(now_ns, cost).max(0),
            HoldingRule::Everything { .. } => self.full - self.held(now_ns),
        };
        ((held + self.amount - 1) / self.amount) as u64
    }

    fn charge(&mut self, now_ns: u64, cost: u64) {
        self.held = -self.lacks(now_ns, cost);
        self.last_ns = i128::from(now_ns);
    }

    fn remaining(&self, now_ns: u64) -> u64 {
        let late = match self.holding {
            HoldingRule::Everything { .. } => !self.admits(now_ns, 1),
            HoldingRule::Nothing | HoldingRule::Excess { .. } => false,
        };
        let whole = (self.held(now_ns) / self.period_ns).max(0) as u64;
        if late { 0 } else { whole }
    }

    fn is_full(&self, now_ns: u64) -> bool {
        self.held(now_ns) == self.full
    }
}

/// Fixed window, sliding window, sliding log.
struct WindowModel(limit::Algorithm);

impl ModelAlgorithm for WindowModel {
    fn algorithm(&self) -> limit::Algorithm {
        self.0
    }

    fn fit(&self, quota: Quota) -> Quota {
        let most = match self.0 {
            limit::Algorithm::SlidingLog => 10_000,
            _ => 4_095,
        };
        let amount = (quota.amount.get() - 1) % most + 1;
        Quota::new(amount, quota.period, amount).unwrap()
    }

    fn model(&self, quota: Quota, offset_ns: u64) -> Box<dyn KeyModel> {
        Box::new(AdmittedHistory {
            algorithm: self.0,
            limit: quota.amount.get(),
            window_ns: quota.period.as_nanos() as i128,
            offset_ns: i128::from(offset_ns),
            admitted: Vec::new(),
        })
    }

    fn most_within(&self, quota: Quota, span_ns: u128) -> u128 {
        let (limit, window_ns) = (u128::from(quota.amount.get()), quota.period.as_nanos());
        match self.0 {
            limit::Algorithm::FixedWindow => limit * (span_ns / window_ns + 2),
            limit::Algorithm::SlidingWindow => limit + (limit * span_ns).div_ceil(window_ns),
            _ => limit * (span_ns / window_ns + 1),
        }
    }

    /// A clock step leaves the counts in the window after the present one, and they count in the
    /// one after that.
    fn most_fills(&self) -> u64 {
        3
    }
}

/// Everything ever admitted.
struct AdmittedHistory {
    algorithm: limit::Algorithm,
    limit: u64,
    window_ns: i128,
    offset_ns: i128,
    admitted: Vec<(i128, u64)>,
}

impl AdmittedHistory {
    fn used(&self, now_ns: u64) -> u64 {
        let now_ns = i128::from(now_ns);
        let index = |at_ns: i128| (at_ns - self.offset_ns).div_euclid(self.window_ns);
        let left = self.window_ns - (now_ns - self.offset_ns).rem_euclid(self.window_ns);
        let sum = |counts: &dyn Fn(i128) -> bool| -> i128 {
            let counted = self.admitted.iter().filter(|(at_ns, _)| counts(*at_ns));
            counted.map(|(_, cost)| i128::from(*cost)).sum()
        };
        let cur = sum(&|at_ns| index(at_ns) == index(now_ns));
        let prev = sum(&|at_ns| index(at_ns) + 1 == index(now_ns));
        let used = match self.algorithm {
            limit::Algorithm::FixedWindow => cur,
            limit::Algorithm::SlidingWindow => prev * left / self.window_ns + cur,
            _ => sum(&|at_ns| at_ns > now_ns - self.window_ns),
        };
        used as u64
    }
}

impl KeyModel for AdmittedHistory {
    fn admits(&self, now_ns: u64, cost: u64) -> bool {
        cost == 0 || self.used(now_ns).saturating_add(cost) <= self.limit
    }

    fn charge(&mut self, now_ns: u64, cost: u64) {
        self.admitted.push((i128::from(now_ns), cost));
    }

    fn remaining(&self, now_ns: u64) -> u64 {
        self.limit - self.used(now_ns)
    }

    fn is_full(&self, now_ns: u64) -> bool {
        self.used(now_ns) == 0
    }
}
