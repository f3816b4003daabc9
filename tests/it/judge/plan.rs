//! Random limit configurations, and random arrival patterns of requests.

use std::{fmt::Write, time::Duration};

use super::{
    clients::{Lone, Planned},
    workplace::WORKS_MS,
};
use crate::support::{
    far_redis::Distance,
    judge::{Boundaries, Counting, MILLISECOND, Rule, SECOND, Time},
    random::Random,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    Local,
    Lease,
    Strict,
}

/// The arrival pattern of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// At a constant rate, to the gateways in turn.
    Steady,
    /// At random moments, to random gateways.
    Poisson,
    /// Bursts a millisecond before and after each boundary.
    Edges,
    /// Nine of ten go to one gateway.
    HotGateway,
    /// All go to one gateway for a while, then to another.
    MovingHotSpot,
    /// All go to one gateway.
    OneGateway,
    /// At random moments; the first gateway receives most, the second half as many, and so on.
    Zipf,
    /// One client that honours `Retry-After`, at one gateway.
    Lone,
}

/// One limit and its load.
#[derive(Clone, Debug)]
pub struct Configuration {
    pub algorithm: &'static str,
    pub scope: Scope,
    pub amount: u64,
    pub period_ms: u64,
    pub burst: u64,
    /// The costs of its routes.
    pub costs: Vec<u64>,
    /// The numbers of the gateways that receive requests.
    pub gateways: Vec<usize>,
    pub arrivals: Arrivals,
    /// The demand as a multiple of the limit.
    pub load: f64,
    /// Most requests per second: two cores serve those of all configurations.
    pub most_requests: f64,
    pub on_redis_down: &'static str,
}

pub const ALGORITHMS: [&str; 6] = [
    "token_bucket",
    "gcra",
    "leaky_bucket",
    "fixed_window",
    "sliding_window",
    "sliding_log",
];

impl Configuration {
    pub fn random(random: &mut Random, gateways: usize) -> Configuration {
        // one in eight also limits requests in flight
        let slots = random.is(0.125);
        let algorithm = if slots {
            "concurrency"
        } else {
            *random.pick(&ALGORITHMS)
        };
        let scope = *random.pick(&[Scope::Local, Scope::Lease, Scope::Strict, Scope::Lease]);
        let mut arrivals = *random.pick(&[
            Arrivals::Steady,
            Arrivals::Poisson,
            Arrivals::Edges,
            Arrivals::HotGateway,
            Arrivals::MovingHotSpot,
            Arrivals::Lone,
            Arrivals::Lone,
        ]);
        if slots && matches!(arrivals, Arrivals::Lone | Arrivals::Edges) {
            arrivals = Arrivals::Poisson;
        }
        let amount = random.within(1, if slots { 12 } else { 60 }).unsigned_abs();
        let period_ms = random.within(500, 3_000).unsigned_abs();
        // a bucket that fills within a few seconds
        let fills = random.within(1, 3_000).unsigned_abs();
        let burst = (amount * fills / period_ms).max(1);
        let mut first = random.within(0, 1_000).unsigned_abs() as usize % gateways;
        let count = match (scope, arrivals) {
            (Scope::Local, _) | (_, Arrivals::Lone) => 1,
            _ => 1 + random.next() as usize % gateways,
        };
        let chosen = (0..count).map(|_| {
            first = (first + 1) % gateways;
            first
        });
        let mut configuration = Configuration {
            algorithm,
            scope,
            amount,
            period_ms,
            burst,
            costs: Vec::new(),
            gateways: chosen.collect(),
            arrivals,
            load: *random.pick(&[0.5, 1.0, 1.5, 3.0]),
            most_requests: 60.0,
            on_redis_down: "closed",
        };
        if slots {
            configuration.burst = amount;
        }
        let capacity = configuration.rule().capacity();
        let costs = match random.within(0, 3) {
            0 | 1 => vec![1],
            2 => vec![random.within(1, capacity.cast_signed()).unsigned_abs()],
            _ => vec![
                1,
                1,
                random.within(1, capacity.cast_signed()).unsigned_abs(),
                capacity,
            ],
        };
        configuration.costs = costs;
        configuration
    }

    /// The same limit with another algorithm and period; the capacity may change, too.
    pub fn exchanged(&self, random: &mut Random) -> Configuration {
        let mut exchanged = self.changed(random);
        if self.counts_slots() {
            return exchanged;
        }
        exchanged.algorithm = *random.pick(&ALGORITHMS);
        exchanged.period_ms = random.within(500, 3_000).unsigned_abs();
        let dearest = self.costs.iter().copied().max().unwrap_or(1);
        exchanged.amount = exchanged.amount.max(dearest);
        exchanged.burst = exchanged.burst.max(dearest);
        exchanged
    }

    /// Whether it counts requests in flight.
    pub fn counts_slots(&self) -> bool {
        self.algorithm == "concurrency"
    }

    pub fn counting(&self) -> Counting {
        match self.algorithm {
            "fixed_window" => Counting::FixedWindow,
            "sliding_window" => Counting::SlidingWindow,
            "sliding_log" => Counting::SlidingLog,
            _ => Counting::Bucket,
        }
    }

    /// The judge's knowledge of it, except Redis's clock.
    pub fn rule(&self) -> Rule {
        let period = self.period_ms.cast_signed() * MILLISECOND;
        Rule::new(self.counting(), self.amount, period, self.burst)
    }

    /// The same limit with another amount and burst: what a reload may change.
    pub fn changed(&self, random: &mut Random) -> Configuration {
        let dearest = self.costs.iter().copied().max().unwrap_or(1);
        let other = |random: &mut Random, number: u64| {
            let number = number.cast_signed();
            random.within(number / 3, 2 * number).unsigned_abs().max(1)
        };
        let mut changed = self.clone();
        changed.amount = other(random, self.amount);
        changed.burst = other(random, self.burst);
        // no route may cost more than its limit's capacity
        match self.counting() {
            Counting::Bucket if !self.counts_slots() => changed.burst = changed.burst.max(dearest),
            _ => changed.amount = changed.amount.max(dearest),
        }
        changed
    }

    /// Writes its tables of a gateway's configuration.
    pub fn write(&self, number: usize, to: &mut String) {
        let Configuration {
            algorithm,
            amount,
            period_ms,
            ..
        } = self;
        let _ = write!(
            to,
            "[limit.c{number}]\nkey = [\"header:x-key\"]\nalgorithm = \"{algorithm}\"\n"
        );
        let _ = match self.counts_slots() {
            true => writeln!(to, "limit = {amount}"),
            false => writeln!(to, "rate = \"{amount}/{period_ms}ms\""),
        };
        if self.counting() == Counting::Bucket && !self.counts_slots() {
            let _ = writeln!(to, "burst = {}", self.burst);
        }
        if self.scope != Scope::Local {
            let strict = self.scope == Scope::Strict || *algorithm == "sliding_log";
            let sync = if strict { "strict" } else { "lease" };
            let _ = writeln!(
                to,
                "scope = \"global\"\nsync = \"{sync}\"\non_redis_down = \"{}\"",
                self.on_redis_down
            );
        }
        let mut costs = self.costs.clone();
        costs.sort_unstable();
        costs.dedup();
        let upstream = if self.counts_slots() {
            "workplace"
        } else {
            "origin"
        };
        for cost in costs {
            let _ = write!(
                to,
                "[[route]]\nname = \"c{number}k{cost}\"\npath = \"/c{number}/k{cost}\"\n\
                 upstream = \"{upstream}\"\nlimits = [\"c{number}\"]\ncost = {cost}\n"
            );
        }
    }

    /// Whether gateways enforce it exactly, so that no request may be refused wrongly.
    pub fn is_exact(&self) -> bool {
        self.scope != Scope::Lease || self.algorithm == "sliding_log"
    }

    /// The class under which it is judged, in one line.
    pub fn class(&self) -> String {
        let scope = match (self.scope, self.algorithm) {
            (Scope::Lease, "sliding_log") => Scope::Strict,
            (scope, _) => scope,
        };
        let count = if self.gateways.len() == 1 {
            "one gateway"
        } else {
            "gateways"
        };
        if self.counts_slots() {
            return format!("Concurrency {scope:?} {count}");
        }
        format!("{:?} {scope:?} {count}", self.counting())
    }

    /// Its requests between two times; `boundaries` are those of its windows.
    pub fn requests(
        &self,
        number: usize,
        (from, to): (Time, Time),
        boundaries: Boundaries,
        random: &mut Random,
    ) -> (Vec<Planned>, Option<Lone>) {
        if self.arrivals == Arrivals::Lone {
            let lone = Lone {
                limit: number,
                gateway: self.gateways[0],
                costs: self.costs.clone(),
                pause: random.within(1, 30) * MILLISECOND,
                until: to,
            };
            return (Vec::new(), Some(lone));
        }
        let mean = self.costs.iter().sum::<u64>() as f64 / self.costs.len() as f64;
        let period_ms = match self.counts_slots() {
            true => (WORKS_MS.0 + WORKS_MS.1) as f64 / 2.0,
            false => self.period_ms as f64,
        };
        let units = self.load * self.amount as f64 * 1_000.0 / period_ms;
        let rate = (units / mean).clamp(2.0, self.most_requests);
        let times = match self.arrivals {
            Arrivals::Edges => self.edges((from, to), boundaries, rate, random),
            arrivals => moments((from, to), rate, arrivals == Arrivals::Steady, random),
        };
        let moves = random.within(300, 1_000) * MILLISECOND;
        let request = |(turn, at): (usize, Time)| {
            let gateway = match self.arrivals {
                Arrivals::Steady => self.gateways[turn % self.gateways.len()],
                Arrivals::OneGateway => self.gateways[0],
                Arrivals::HotGateway if random.is(0.9) => self.gateways[0],
                Arrivals::Zipf => self.by_rank(random),
                Arrivals::MovingHotSpot => {
                    let spot = usize::try_from(at / moves).unwrap_or(0);
                    self.gateways[spot % self.gateways.len()]
                }
                _ => *random.pick(&self.gateways),
            };
            Planned {
                at,
                limit: number,
                gateway,
                cost: *random.pick(&self.costs),
            }
        };
        (times.into_iter().enumerate().map(request).collect(), None)
    }

    fn by_rank(&self, random: &mut Random) -> usize {
        let weight = |rank: usize| 1.0 / (rank + 1) as f64;
        let mut drawn = random.part() * (0..self.gateways.len()).map(weight).sum::<f64>();
        for (rank, &gateway) in self.gateways.iter().enumerate() {
            drawn -= weight(rank);
            if drawn < 0.0 {
                return gateway;
            }
        }
        self.gateways[0]
    }

    /// Half of a period's requests a millisecond before each boundary, half after.
    fn edges(
        &self,
        (from, to): (Time, Time),
        boundaries: Boundaries,
        rate: f64,
        random: &mut Random,
    ) -> Vec<Time> {
        let period = self.period_ms.cast_signed() * MILLISECOND;
        let each = (rate * period as f64 / SECOND as f64 / 2.0).ceil() as usize;
        let first = (from - boundaries.earliest).div_euclid(period) + 1;
        let edges = (first..).map(|window| boundaries.earliest + window * period);
        let mut times = Vec::new();
        for edge in edges.take_while(|&edge| edge < to) {
            for _ in 0..each {
                times.push(edge - random.within(100_000, 2 * MILLISECOND));
                times.push(edge + random.within(0, 2 * MILLISECOND));
            }
        }
        times.sort_unstable();
        times
    }
}

fn moments((from, to): (Time, Time), rate: f64, even: bool, random: &mut Random) -> Vec<Time> {
    let mut at = from;
    let next = || {
        let pause = if even { 1.0 / rate } else { random.pause(rate) };
        at += (pause * SECOND as f64) as Time;
        (at < to).then_some(at)
    };
    std::iter::from_fn(next).collect()
}

/// A gateway's distance from Redis: half of the delay in each direction, with jitter.
pub fn distance(random: &mut Random) -> Distance {
    let most = *random.pick(&[0, 1, 5, 20, 50]);
    let least = random.within(0, most * 1_000);
    let half = |micros: i64| Duration::from_micros(micros.unsigned_abs() / 2);
    Distance {
        least: half(least),
        most: half(most * 1_000),
    }
}
