//! The judge: derives faults of a limit from a recorded history.
//!
//! The judge knows only the configuration and what clients saw. The gateway decided each request at
//! an unknown moment between its start (before its first byte was sent) and its end (after the last
//! byte of the response head was read). The judge is *sound*: a fault that it reports is a fault
//! under every possible order of the decisions. It may miss faults.
//!
//! | fault | proof |
//! |---|---|
//! | [`Fault::Beyond`] | requests wholly within one window were admitted, and exceed what any limiter admits there |
//! | [`Fault::WronglyRefused`] | an exact limiter would admit the request even right after every concurrent one |
//! | [`Fault::TooEarly`] | a client waited for `Retry-After`, nothing was spent since the gateway's last call, and it was rejected again |
//! | [`Fault::Forgotten`] | after a rule change, more is admitted than the new quota minus what was surely spent |
//! | [`Fault::TooLate`] | under the worst order, the request was admissible over a second before `Retry-After` |
//!
//! Gateways read whole microseconds of Redis's clock, which runs at its own speed. [`Rule::slack`]
//! is the tolerance of each time span for it. The boundaries of windows are known up to an error
//! ([`Boundaries`]). A local limit begins the windows of each key at a random moment, so they may
//! be unknown. Then the judge divides the period into cells, and reports faults only if every cell
//! has one.

pub mod beyond;
pub mod exact;
pub mod refused;
pub mod shrink;
pub mod slots;
pub mod used;

use std::fmt;

/// Nanoseconds of the monotonic clock that all clients share.
pub type Time = i64;

pub const MILLISECOND: Time = 1_000_000;
pub const SECOND: Time = 1_000_000_000;

/// The algorithm of a limit. `token_bucket`, `gcra` and a `leaky_bucket` without delay are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    Bucket,
    FixedWindow,
    SlidingWindow,
    SlidingLog,
}

/// Window boundaries: every `period` from a moment within `earliest ..= earliest + error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundaries {
    pub earliest: Time,
    pub error: Time,
}

impl Boundaries {
    pub fn at(moment: Time) -> Boundaries {
        Boundaries {
            earliest: moment,
            error: 0,
        }
    }

    pub fn unknown(period: Time) -> Boundaries {
        Boundaries {
            earliest: 0,
            error: period,
        }
    }
}

/// The parts of a limit's configuration that the judge needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub counting: Counting,
    /// Units per `period`; the most that a window admits.
    pub amount: u64,
    pub period: Time,
    /// The capacity of a bucket; equal to `amount` for windows and logs.
    pub burst: u64,
    pub boundaries: Boundaries,
    /// The judge's tolerance for each span of time.
    pub slack: Time,
}

impl Rule {
    /// A limit whose windows may begin at any moment, with an exact clock.
    pub fn new(counting: Counting, amount: u64, period: Time, burst: u64) -> Rule {
        Rule {
            counting,
            amount,
            period,
            burst: if counting == Counting::Bucket {
                burst
            } else {
                amount
            },
            boundaries: Boundaries::unknown(period),
            slack: 0,
        }
    }

    /// The most that one request may cost.
    pub fn capacity(&self) -> u64 {
        self.burst
    }

    /// How long spent units can matter.
    pub fn memory(&self) -> Time {
        match self.counting {
            Counting::Bucket => {
                let fill = i128::from(self.burst) * i128::from(self.period);
                Time::try_from(fill / i128::from(self.amount)).unwrap_or(Time::MAX) + 1
            }
            Counting::FixedWindow | Counting::SlidingLog => self.period,
            Counting::SlidingWindow => 2 * self.period,
        }
    }

    fn has_windows(&self) -> bool {
        matches!(
            self.counting,
            Counting::FixedWindow | Counting::SlidingWindow
        )
    }

    /// The windows, by number, in which a span of time may lie.
    fn windows_of(&self, from: Time, to: Time) -> (i64, i64) {
        let Boundaries { earliest, error } = self.boundaries;
        (
            (from - earliest - error).div_euclid(self.period),
            (to - earliest).div_euclid(self.period),
        )
    }

    /// The only window that surely contains the whole span.
    fn window_of(&self, from: Time, to: Time) -> Option<i64> {
        let (first, last) = self.windows_of(from - self.slack, to + self.slack);
        (first == last).then_some(first)
    }

    /// The earliest moment at which a window may begin.
    fn begins(&self, window: i64) -> Time {
        self.boundaries.earliest + window * self.period
    }

    /// The latest moment at which a window may end.
    fn ends(&self, window: i64) -> Time {
        self.begins(window + 1) + self.boundaries.error
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    Admitted,
    Refused,
    /// Reset, timed out, or not answered by the limit: charged or not, the judge cannot know.
    Neither,
}

/// One request as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub gateway: u8,
    pub cost: u64,
    pub start: Time,
    pub end: Time,
    pub verdict: Verdict,
    /// Seconds.
    pub retry_after: Option<u32>,
    pub remaining: Option<u64>,
}

impl Record {
    pub fn charged(&self) -> bool {
        self.verdict == Verdict::Admitted
    }

    /// The latest moment at which it may have been charged; `None` if it was not.
    fn charged_until(&self) -> Option<Time> {
        match self.verdict {
            Verdict::Admitted => Some(self.end),
            Verdict::Refused => None,
            // it is unknown when the gateway stopped working on it
            Verdict::Neither => Some(Time::MAX / 4),
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Time| time as f64 / 1e6;
        write!(
            to,
            "{:10.3}..{:10.3} ms  gateway {}  cost {:4}  {:?}",
            ms(self.start),
            ms(self.end),
            self.gateway,
            self.cost,
            self.verdict
        )?;
        if let Some(seconds) = self.retry_after {
            write!(to, ", Retry-After {seconds}")?;
        }
        if let Some(units) = self.remaining {
            write!(to, ", r={units}")?;
        }
        Ok(())
    }
}

/// A fault, with indices into the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A span in which `excess` units too many were admitted.
    Beyond {
        excess: u64,
        from: Time,
        to: Time,
        requests: Vec<usize>,
    },
    /// Even under the worst order, the request was admissible for this long before it was sent.
    WronglyRefused { request: usize, since: Time },
    /// `again` was sent when the `Retry-After` of `refused` allowed it, and was rejected.
    TooEarly { refused: usize, again: usize },
    /// The request was admissible after `needed` at the latest.
    TooLate { request: usize, needed: Time },
    /// A change of the rule forgot units that were surely spent before.
    Forgotten { used: u64, excess: u64 },
}

impl Fault {
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Beyond { .. } => "beyond the limit",
            Fault::WronglyRefused { .. } => "wrongly refused",
            Fault::TooEarly { .. } => "Retry-After too early",
            Fault::TooLate { .. } => "Retry-After too late",
            Fault::Forgotten { .. } => "forgotten by a change",
        }
    }

    /// The number of units admitted beyond the limit.
    pub fn excess(&self) -> u64 {
        match self {
            Fault::Beyond { excess, .. } | Fault::Forgotten { excess, .. } => *excess,
            _ => 0,
        }
    }

    /// Whether more was admitted than the limit allows. All other faults hurt clients.
    pub fn is_beyond(&self) -> bool {
        matches!(self, Fault::Beyond { .. })
    }
}

/// The smallest cell is this fraction of a period.
const FINEST_CELL: Time = 256;

/// All faults that the history of one key proves. The order of the records does not matter.
pub fn judge(rule: &Rule, history: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| {
        let mut faults: Vec<Fault> = beyond::beyond(rule, history).into_iter().collect();
        faults.extend(refused::refused(rule, history, history));
        faults
    })
}

/// Only excess: for a history with rejections that it cannot explain.
pub fn judge_admitted(rule: &Rule, history: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| {
        beyond::beyond(rule, history).into_iter().collect()
    })
}

/// Only rejections: for a history with charges that the limit did not make. `calls` are all requests
/// whose calls to Redis a gateway may remember.
pub fn judge_refused(rule: &Rule, history: &[Record], calls: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| refused::refused(rule, history, calls))
}

/// The faults under the boundaries that explain the history best.
fn in_cells(rule: &Rule, judge: &dyn Fn(&Rule) -> Vec<Fault>) -> Vec<Fault> {
    let Boundaries { earliest, error } = rule.boundaries;
    if !rule.has_windows() || error <= rule.period / FINEST_CELL {
        return judge(rule);
    }
    let half = error / 2;
    let mut fewest: Option<Vec<Fault>> = None;
    for (earliest, error) in [(earliest, half), (earliest + half, error - half)] {
        let boundaries = Boundaries { earliest, error };
        let cell = Rule {
            boundaries,
            ..*rule
        };
        let faults = in_cells(&cell, judge);
        if faults.is_empty() {
            return faults;
        }
        if fewest.as_ref().is_none_or(|few| faults.len() < few.len()) {
            fewest = Some(faults);
        }
    }
    fewest.unwrap_or_default()
}
