//! Checks that the limit did not reject requests that it should admit, and that `Retry-After` is
//! right.
//!
//! For each rejected request d, the judge computes the longest wait that an exact limiter could
//! have announced. It assumes the worst order: each request that had ended when d was sent was
//! charged at its end, and each concurrent one just before d. If even that wait is zero, the
//! rejection was wrong. If `Retry-After` exceeds it by more than a second and the time of a call to
//! Redis, the header is too late.

use super::{Counting, Fault, Record, Rule, SECOND, Time};

/// Wrong rejections and wrong waits. `calls` are all requests whose calls to Redis a gateway may
/// remember.
pub fn refused(rule: &Rule, history: &[Record], calls: &[Record]) -> Vec<Fault> {
    let mut refused: Vec<usize> = (0..history.len())
        .filter(|&index| history[index].verdict == super::Verdict::Refused)
        .filter(|&index| history[index].cost <= rule.capacity())
        .collect();
    refused.sort_unstable_by_key(|&index| history[index].start);
    let charges = Charges::of(history);
    let mut bucket = BucketSweep::new(rule, &charges);
    let calls = longest_calls(calls);
    let mut faults = Vec::new();
    for &index in &refused {
        let record = &history[index];
        let needed = match rule.counting {
            Counting::Bucket => bucket.wait(record),
            Counting::FixedWindow => fixed_window(rule, &charges, record),
            Counting::SlidingWindow => sliding_window(rule, &charges, record),
            Counting::SlidingLog => sliding_log(rule, &charges, record),
        };
        if needed <= 0 {
            let since = -needed;
            faults.push(Fault::WronglyRefused {
                request: index,
                since,
            });
        }
        let told = record.retry_after.filter(|told| *told > 1);
        let latest = needed.max(0) + rule.slack + calls[usize::from(record.gateway)];
        if told.is_some_and(|told| i64::from(told - 1) * SECOND > latest) {
            faults.push(Fault::TooLate {
                request: index,
                needed,
            });
        }
    }
    faults.extend(too_early(rule, history, &refused, &charges));
    faults
}

/// The duration of each gateway's longest request. A gateway may answer from a Redis reply that
/// took some time to reach it.
fn longest_calls(calls: &[Record]) -> [Time; 256] {
    let mut longest = [0; 256];
    for record in calls {
        let known = &mut longest[usize::from(record.gateway)];
        *known = (record.end - record.start).max(*known);
    }
    longest
}

/// Everything that may have been charged, sorted by start and by end, with sums.
struct Charges {
    /// Start, end, cost.
    by_start: Vec<(Time, Time, u64)>,
    by_end: Vec<(Time, Time, u64)>,
    /// Prefix sums of the cost.
    cost_by_start: Vec<u64>,
    cost_by_end: Vec<u64>,
    /// The earliest start among the charges from each index of `by_end` on.
    earliest_start: Vec<Time>,
}

impl Charges {
    fn of(history: &[Record]) -> Charges {
        let mut by_start: Vec<(Time, Time, u64)> = history
            .iter()
            .filter_map(|record| Some((record.start, record.charged_until()?, record.cost)))
            .collect();
        by_start.sort_unstable();
        let mut by_end = by_start.clone();
        by_end.sort_unstable_by_key(|charge| charge.1);
        let mut earliest_start: Vec<Time> = by_end
            .iter()
            .rev()
            .scan(Time::MAX, |earliest, charge| {
                *earliest = charge.0.min(*earliest);
                Some(*earliest)
            })
            .collect();
        earliest_start.reverse();
        Charges {
            cost_by_start: sums(&by_start),
            cost_by_end: sums(&by_end),
            by_start,
            by_end,
            earliest_start,
        }
    }

    /// The cost of charges that had begun by this time.
    fn begun(&self, by: Time) -> u64 {
        self.cost_by_start[self.by_start.partition_point(|charge| charge.0 <= by)]
    }

    /// The cost of charges that had ended by this time.
    fn ended(&self, by: Time) -> u64 {
        self.cost_by_end[self.by_end.partition_point(|charge| charge.1 <= by)]
    }

    /// The cost of what may have been charged between two times: begun by `to` and not ended by
    /// `from`. (Everything that ended by `from` had begun by `to`, because `from <= to`.)
    fn between(&self, from: Time, to: Time) -> u64 {
        self.begun(to) - self.ended(from)
    }
}

fn sums(charges: &[(Time, Time, u64)]) -> Vec<u64> {
    let running = charges.iter().scan(0, |sum, charge| {
        *sum += charge.2;
        Some(*sum)
    });
    std::iter::once(0).chain(running).collect()
}

/// A bucket that charges everything at its end. Query it in the order of starts.
struct BucketSweep<'a> {
    rule: &'a Rule,
    charges: &'a Charges,
    next: usize,
    /// In units of 1 / `period`.
    level: i128,
    at: Time,
}

impl BucketSweep<'_> {
    fn new<'a>(rule: &'a Rule, charges: &'a Charges) -> BucketSweep<'a> {
        BucketSweep {
            rule,
            charges,
            next: 0,
            level: i128::from(rule.burst) * i128::from(rule.period),
            at: Time::MIN / 4,
        }
    }

    fn after(&self, time: Time) -> i128 {
        let full = i128::from(self.rule.burst) * i128::from(self.rule.period);
        let refilled = i128::from(self.rule.amount) * i128::from(time - self.at);
        full.min(self.level + refilled)
    }

    fn wait(&mut self, record: &Record) -> Time {
        let period = i128::from(self.rule.period);
        while let Some(&(_, end, cost)) = self.charges.by_end.get(self.next) {
            if end > record.start {
                break;
            }
            self.level = self.after(end) - i128::from(cost) * period;
            self.at = end;
            self.next += 1;
        }
        let concurrent = self.charges.between(record.start, record.end);
        let level = self.after(record.start - self.rule.slack) - i128::from(concurrent) * period;
        let missing = i128::from(record.cost) * period - level;
        let amount = i128::from(self.rule.amount);
        let wait = if missing <= 0 {
            missing / amount
        } else {
            (missing + amount - 1) / amount
        };
        Time::try_from(wait).unwrap_or(Time::MAX / 4)
    }
}

/// The longest wait over the windows in which the request may have been decided.
fn over_windows(rule: &Rule, record: &Record, wait: impl Fn(i64) -> Time) -> Time {
    let (first, last) = rule.windows_of(record.start - rule.slack, record.end + rule.slack);
    (first..=last).map(wait).max().unwrap_or(0)
}

fn fixed_window(rule: &Rule, charges: &Charges, record: &Record) -> Time {
    over_windows(rule, record, |window| {
        let spent = charges.between(rule.begins(window) - rule.slack - 1, record.end);
        if spent + record.cost <= rule.amount {
            0
        } else {
            rule.ends(window) - record.start
        }
    })
}

fn sliding_window(rule: &Rule, charges: &Charges, record: &Record) -> Time {
    let (period, slack) = (i128::from(rule.period), rule.slack);
    over_windows(rule, record, |window| {
        let current = charges.between(rule.begins(window) - slack - 1, record.end);
        let previous = charges.between(
            rule.begins(window - 1) - slack - 1,
            // the previous window's charges were made before this window began
            (rule.ends(window - 1) + slack).min(record.end),
        );
        let target = i128::from(rule.amount) - i128::from(record.cost);
        // the latest position in the window at which count · left / period <= room
        let faded = |count: u64, room: i128| match i128::from(count) {
            0 => 0,
            count => (period - (room * period / count).min(period)).max(0),
        };
        let latest_begin = rule.ends(window - 1);
        let room = target - i128::from(current);
        let from_begin = if room >= 0 {
            faded(previous, room)
        } else {
            period + faded(current, target)
        };
        let admissible = i128::from(latest_begin) + from_begin;
        let wait = admissible - i128::from(record.start - slack);
        // the window begins after the request at the latest, so there is no wait
        let wait = if room >= 0 && from_begin == 0 {
            0
        } else {
            wait
        };
        Time::try_from(wait).unwrap_or(Time::MAX / 4)
    })
}

fn sliding_log(rule: &Rule, charges: &Charges, record: &Record) -> Time {
    let room = rule.amount - record.cost;
    let from = record.start - rule.period - rule.slack;
    let mut left = charges.between(from, record.end);
    if left <= room {
        return 0;
    }
    // concurrent requests last: they may have been charged just before
    let first = charges.by_end.partition_point(|charge| charge.1 <= from);
    for &(start, end, cost) in &charges.by_end[first..] {
        if start > record.end {
            continue;
        }
        left -= cost;
        if left <= room {
            let charged = end.min(record.end);
            return (charged + rule.period + rule.slack - record.start).max(1);
        }
    }
    Time::MAX / 4
}

/// Whether another gateway charged the limit after the last request that this one admitted. A
/// gateway rejects from the last reply of Redis, and does not know of later charges elsewhere.
fn is_outdated(history: &[Record], refused: &Record) -> bool {
    let earlier = |record: &&Record| record.charged() && record.start < refused.start;
    let own = history.iter().filter(earlier);
    let own = own.filter(|record| record.gateway == refused.gateway);
    let known = own.map(|record| record.start).max().unwrap_or(Time::MIN);
    let mut others = history.iter().filter(earlier);
    others.any(|record| record.gateway != refused.gateway && record.end > known)
}

/// Requests that were rejected again after `Retry-After`, although nothing was spent meanwhile.
fn too_early(rule: &Rule, history: &[Record], refused: &[usize], charges: &Charges) -> Vec<Fault> {
    let mut faults = Vec::new();
    for &index in refused {
        let record = &history[index];
        let Some(seconds) = record.retry_after else {
            continue;
        };
        let due = record.end + i64::from(seconds) * SECOND + rule.slack;
        let later = charges
            .by_end
            .partition_point(|charge| charge.1 < record.start);
        let spent_from = charges.earliest_start.get(later).copied();
        let spent_from = spent_from.unwrap_or(Time::MAX);
        let from = refused.partition_point(|&other| history[other].start < due);
        let again = refused[from..]
            .iter()
            .copied()
            .take_while(|&other| history[other].start < spent_from)
            .find(|&other| {
                let again = &history[other];
                again.end < spent_from && again.cost <= record.cost
            });
        if let Some(again) = again
            && !is_outdated(history, record)
        {
            faults.push(Fault::TooEarly {
                refused: index,
                again,
            });
        }
    }
    faults
}
