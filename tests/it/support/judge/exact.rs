//! One exact limiter that decides requests in sequence: the reference for several gateways
//! together.

use std::collections::VecDeque;

use super::{Counting, Record, Rule, SECOND, Time};

/// An exact limiter of one key. Windows begin at the earliest time of the rule's boundaries.
#[derive(Clone, Debug)]
pub struct Exact {
    rule: Rule,
    /// The level of a bucket, in units of 1 / `period`.
    level: i128,
    at: Time,
    window: i64,
    previous: u64,
    current: u64,
    log: VecDeque<(Time, u64)>,
}

impl Exact {
    /// A limiter with its full quota.
    pub fn new(rule: Rule) -> Exact {
        Exact {
            rule,
            level: i128::from(rule.burst) * i128::from(rule.period),
            at: Time::MIN / 4,
            window: i64::MIN / 4,
            previous: 0,
            current: 0,
            log: VecDeque::new(),
        }
    }

    /// Charges the request, or returns how long it must wait.
    pub fn decide(&mut self, cost: u64, now: Time) -> Result<(), Time> {
        self.advance(now);
        let wait = self.wait(cost, now);
        if wait <= 0 {
            self.charge(cost, now);
            Ok(())
        } else {
            Err(wait)
        }
    }

    /// Charges unconditionally; the level stops at zero.
    pub fn charge(&mut self, cost: u64, now: Time) {
        self.advance(now);
        match self.rule.counting {
            Counting::Bucket => {
                let after = self.level - i128::from(cost) * i128::from(self.rule.period);
                self.level = after.max(0);
            }
            Counting::FixedWindow | Counting::SlidingWindow => {
                self.current = (self.current + cost).min(self.rule.amount.max(self.current));
            }
            Counting::SlidingLog => self.log.push_back((now, cost)),
        }
    }

    fn advance(&mut self, now: Time) {
        let rule = &self.rule;
        match rule.counting {
            Counting::Bucket => {
                let full = i128::from(rule.burst) * i128::from(rule.period);
                let refilled = i128::from(rule.amount) * i128::from(now - self.at);
                self.level = full.min(self.level + refilled);
                self.at = now;
            }
            Counting::FixedWindow | Counting::SlidingWindow => {
                let window = (now - rule.boundaries.earliest).div_euclid(rule.period);
                match window - self.window {
                    0 => {}
                    1 => (self.previous, self.current) = (self.current, 0),
                    _ => (self.previous, self.current) = (0, 0),
                }
                self.window = window;
            }
            Counting::SlidingLog => {
                while self
                    .log
                    .front()
                    .is_some_and(|unit| unit.0 + rule.period <= now)
                {
                    self.log.pop_front();
                }
            }
        }
    }

    fn wait(&self, cost: u64, now: Time) -> Time {
        let rule = &self.rule;
        let period = i128::from(rule.period);
        match rule.counting {
            Counting::Bucket => {
                let missing = i128::from(cost) * period - self.level;
                let amount = i128::from(rule.amount);
                Time::try_from((missing + amount - 1).div_euclid(amount)).unwrap_or(Time::MAX)
            }
            Counting::FixedWindow if self.current + cost <= rule.amount => 0,
            Counting::FixedWindow => rule.period - self.position(now),
            Counting::SlidingWindow => {
                let position = i128::from(self.position(now));
                let target = rule.amount - cost;
                let wait = match target.checked_sub(self.current) {
                    Some(room) => faded(self.previous, room, period) - position,
                    None => period - position + faded(self.current, target, period),
                };
                Time::try_from(wait).unwrap_or(Time::MAX)
            }
            Counting::SlidingLog => {
                let mut used: u64 = self.log.iter().map(|unit| unit.1).sum();
                let mut wait = 0;
                for &(charged, units) in &self.log {
                    if used + cost <= rule.amount {
                        break;
                    }
                    used -= units;
                    wait = charged + rule.period - now;
                }
                wait
            }
        }
    }

    fn position(&self, now: Time) -> Time {
        (now - self.rule.boundaries.earliest).rem_euclid(self.rule.period)
    }
}

/// The first position in the next window at which a window with this count weighs at most `room`,
/// rounded down.
fn faded(count: u64, room: u64, period: i128) -> i128 {
    if count <= room {
        return 0;
    }
    let (count, room) = (i128::from(count), i128::from(room));
    let left = ((room + 1) * period + count - 1) / count - 1;
    period - left
}

/// The `Retry-After` seconds of a wait.
pub fn seconds(wait: Time) -> u32 {
    u32::try_from((wait + SECOND - 1) / SECOND).unwrap_or(u32::MAX)
}

/// Units that gateways admitted, and units that one exact limiter admits for the same requests, by
/// their starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Comparison {
    pub admitted: u64,
    pub exact: u64,
}

impl Comparison {
    /// The share in per cent, of units rather than requests.
    pub fn share(&self) -> f64 {
        if self.exact == 0 {
            return 100.0;
        }
        100.0 * self.admitted as f64 / self.exact as f64
    }

    pub fn add(&mut self, other: Comparison) {
        self.admitted += other.admitted;
        self.exact += other.exact;
    }
}

/// Compares the history with one exact limiter.
pub fn compare(rule: &Rule, history: &[Record]) -> Comparison {
    let mut by_start: Vec<&Record> = history.iter().collect();
    by_start.sort_unstable_by_key(|record| record.start);
    let mut limiter = Exact::new(*rule);
    let mut sums = Comparison::default();
    for record in by_start {
        if record.charged() {
            sums.admitted += record.cost;
        }
        if limiter.decide(record.cost, record.start).is_ok() {
            sums.exact += record.cost;
        }
    }
    sums
}
