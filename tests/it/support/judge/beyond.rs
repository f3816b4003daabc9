//! Checks every window for requests that were admitted beyond the limit.

use super::{Counting, Fault, Record, Rule, Time};

/// The worst excess.
pub fn beyond(rule: &Rule, history: &[Record]) -> Option<Fault> {
    let admitted: Vec<&Record> = history.iter().filter(|record| record.charged()).collect();
    if admitted.is_empty() {
        return None;
    }
    let (excess, from, to) = match rule.counting {
        Counting::Bucket => bucket(rule, &admitted),
        Counting::FixedWindow => fixed_window(rule, &admitted),
        Counting::SlidingWindow => sliding_window(rule, &admitted),
        Counting::SlidingLog => sliding_log(rule, &admitted),
    }?;
    let inside = |record: &Record| record.charged() && from <= record.start && record.end <= to;
    let requests = (0..history.len()).filter(|&index| inside(&history[index]));
    Some(Fault::Beyond {
        excess,
        from,
        to,
        requests: requests.collect(),
    })
}

/// An excess and its span.
type Excess = (u64, Time, Time);

fn worse(worst: &mut Option<Excess>, excess: i128, from: Time, to: Time) {
    let excess = u64::try_from(excess).unwrap_or(0);
    if excess > worst.map_or(0, |(worst, ..)| worst) {
        *worst = Some((excess, from, to));
    }
}

/// For all t1 < t2, the requests within t1..t2 cost at most `burst + rate · (t2 − t1)`. The sweep
/// visits the ends in order. For each start t1 the tree stores `rate · t1` plus the cost of all
/// requests since. Its maximum is the worst window that ends here.
fn bucket(rule: &Rule, admitted: &[&Record]) -> Option<Excess> {
    let (amount, period) = (i128::from(rule.amount), i128::from(rule.period));
    let allowed = i128::from(rule.burst) * period + amount * i128::from(rule.slack);
    let mut starts: Vec<Time> = admitted.iter().map(|record| record.start).collect();
    starts.sort_unstable();
    let mut by_end = admitted.to_vec();
    by_end.sort_unstable_by_key(|record| record.end);
    let mut tree = Maxima::new(starts.iter().map(|&start| amount * i128::from(start)));
    let mut worst = None;
    for record in by_end {
        let own = starts.partition_point(|&start| start <= record.start);
        tree.add(own, i128::from(record.cost) * period);
        let begun = starts.partition_point(|&start| start <= record.end);
        let (most, index) = tree.most(begun);
        let excess = most - amount * i128::from(record.end) - allowed;
        // a fraction of a unit is an excess too
        worse(
            &mut worst,
            (excess + period - 1).div_euclid(period),
            starts[index],
            record.end,
        );
    }
    worst
}

/// A segment tree of maxima that can add to a prefix of its numbers.
struct Maxima {
    leaves: usize,
    /// For each node: its maximum, the index of it, and the number added to everything below.
    nodes: Vec<(i128, usize, i128)>,
}

/// Less than any sum, and far from overflow.
const NEVER: i128 = i128::MIN / 4;

impl Maxima {
    fn new(numbers: impl ExactSizeIterator<Item = i128>) -> Maxima {
        let leaves = numbers.len().next_power_of_two();
        let mut nodes = vec![(NEVER, 0, 0); 2 * leaves];
        for (index, number) in numbers.enumerate() {
            nodes[leaves + index] = (number, index, 0);
        }
        let mut tree = Maxima { leaves, nodes };
        for node in (1..leaves).rev() {
            tree.refresh(node);
        }
        tree
    }

    fn refresh(&mut self, node: usize) {
        let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        let (most, at, _) = if left.0 >= right.0 { left } else { right };
        let added = self.nodes[node].2;
        self.nodes[node] = (most + added, at, added);
    }

    /// Adds to the first `count` numbers.
    fn add(&mut self, count: usize, number: i128) {
        self.add_below(1, 0, self.leaves, count, number);
    }

    fn add_below(&mut self, node: usize, from: usize, to: usize, count: usize, number: i128) {
        if count <= from {
            return;
        }
        if to <= count {
            self.nodes[node].0 += number;
            self.nodes[node].2 += number;
            return;
        }
        let middle = usize::midpoint(from, to);
        self.add_below(2 * node, from, middle, count, number);
        self.add_below(2 * node + 1, middle, to, count, number);
        self.refresh(node);
    }

    /// The largest of the first `count` numbers, and its index.
    fn most(&self, count: usize) -> (i128, usize) {
        self.most_below(1, 0, self.leaves, count)
    }

    fn most_below(&self, node: usize, from: usize, to: usize, count: usize) -> (i128, usize) {
        if count <= from {
            return (NEVER, 0);
        }
        let (most, at, added) = self.nodes[node];
        if to <= count {
            return (most, at);
        }
        let middle = usize::midpoint(from, to);
        let left = self.most_below(2 * node, from, middle, count);
        let right = self.most_below(2 * node + 1, middle, to, count);
        let (most, at) = if left.0 >= right.0 { left } else { right };
        (most + added, at)
    }
}

/// The requests that surely lie in one window cost at most `amount`. Requests at a boundary count
/// in no window.
fn fixed_window(rule: &Rule, admitted: &[&Record]) -> Option<Excess> {
    let mut worst = None;
    for (window, inside) in by_window(rule, admitted) {
        let sum: i128 = inside.iter().map(|record| i128::from(record.cost)).sum();
        let excess = sum - i128::from(rule.amount);
        worse(&mut worst, excess, rule.begins(window), rule.ends(window));
    }
    worst
}

/// The requests that surely lie in one window, grouped by window and sorted by end.
fn by_window<'a>(rule: &Rule, admitted: &[&'a Record]) -> Vec<(i64, Vec<&'a Record>)> {
    let mut inside: Vec<(i64, &Record)> = admitted
        .iter()
        .filter_map(|record| Some((rule.window_of(record.start, record.end)?, *record)))
        .collect();
    inside.sort_unstable_by_key(|(window, record)| (*window, record.end));
    let same = inside.chunk_by(|one, other| one.0 == other.0);
    same.map(|chunk| {
        (
            chunk[0].0,
            chunk.iter().map(|(_, record)| *record).collect(),
        )
    })
    .collect()
}

/// Among a window's requests that ended by some time, one was decided last. Its estimate was at
/// most `amount`. It was at least the sum of those requests plus the previous window's part that
/// still counts at that time.
fn sliding_window(rule: &Rule, admitted: &[&Record]) -> Option<Excess> {
    let (amount, period) = (i128::from(rule.amount), i128::from(rule.period));
    let mut worst = None;
    let mut before = (i64::MIN, 0);
    for (window, inside) in by_window(rule, admitted) {
        let previous = if before.0 == window - 1 { before.1 } else { 0 };
        let mut sum = 0;
        for record in inside {
            sum += i128::from(record.cost);
            // assume the earliest begin of the window, where the least of the previous one counts
            let into = i128::from(record.end + rule.slack - rule.begins(window));
            let left = (period - into).max(0);
            let excess = previous * left / period + sum - amount;
            worse(&mut worst, excess, rule.begins(window - 1), record.end);
        }
        before = (window, sum);
    }
    worst
}

/// For every t, the requests that lie within t..t + period cost at most `amount`. The sweep visits
/// the starts from the last one on; a Fenwick tree sums by end.
fn sliding_log(rule: &Rule, admitted: &[&Record]) -> Option<Excess> {
    let mut ends: Vec<Time> = admitted.iter().map(|record| record.end).collect();
    ends.sort_unstable();
    let mut by_start = admitted.to_vec();
    by_start.sort_unstable_by_key(|record| std::cmp::Reverse(record.start));
    let mut sums = vec![0_i128; ends.len() + 1];
    let mut worst = None;
    for record in by_start {
        let mut at = ends.partition_point(|&end| end < record.end) + 1;
        while at < sums.len() {
            sums[at] += i128::from(record.cost);
            at += at & at.wrapping_neg();
        }
        let until = record.start + rule.period - rule.slack;
        let mut at = ends.partition_point(|&end| end < until);
        let mut sum = 0;
        while at > 0 {
            sum += sums[at];
            at -= at & at.wrapping_neg();
        }
        let excess = sum - i128::from(rule.amount);
        worse(&mut worst, excess, record.start, until);
    }
    worst
}
