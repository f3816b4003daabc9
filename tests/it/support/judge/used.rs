//! Units that a limit has surely counted at some time, under any order of the requests.

use super::{Counting, Record, Rule, Time};

/// The least number of units that are spent at a time within `from..=to`, by requests that had
/// ended by `from`.
pub fn surely_used(rule: &Rule, history: &[Record], (from, to): (Time, Time)) -> u64 {
    let ended = history
        .iter()
        .filter(|record| record.charged() && record.end <= from);
    match rule.counting {
        Counting::Bucket => bucket(rule, ended.collect(), to),
        Counting::SlidingLog => {
            let since = to - rule.period + rule.slack;
            let counts = ended.filter(|record| record.start > since);
            counts.map(|record| record.cost).sum()
        }
        Counting::FixedWindow | Counting::SlidingWindow => {
            let Some(window) = rule.window_of(from, to) else {
                return 0;
            };
            let sum = |window: i64| -> u64 {
                let inside = ended
                    .clone()
                    .filter(|record| rule.window_of(record.start, record.end) == Some(window));
                inside.map(|record| record.cost).sum()
            };
            let current = sum(window);
            if rule.counting == Counting::FixedWindow {
                return current;
            }
            let left = (rule.begins(window + 1) - to - rule.slack).max(0);
            let previous = i128::from(sum(window - 1)) * i128::from(left) / i128::from(rule.period);
            current + u64::try_from(previous).unwrap_or(0)
        }
    }
}

/// Charges each request at its begin, because earlier charges refill sooner.
fn bucket(rule: &Rule, mut charged: Vec<&Record>, at: Time) -> u64 {
    charged.sort_unstable_by_key(|record| record.start);
    let (amount, period) = (i128::from(rule.amount), i128::from(rule.period));
    let (mut used, mut last) = (0_i128, 0);
    for record in charged {
        used = (used - amount * i128::from(record.start - last)).max(0);
        used += i128::from(record.cost) * period;
        last = record.start;
    }
    used -= amount * i128::from(at + rule.slack - last);
    u64::try_from(used.max(0) / period).unwrap_or(0)
}
