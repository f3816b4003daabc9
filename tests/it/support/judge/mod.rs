//! The judge of a limit: what a recorded history proves about it.
//!
//! The judge knows the configuration and what clients saw, nothing else. The gateway decided each request at one unknown
//! moment between its start (before the first byte was sent) and its end (after the last byte of the head was read). The
//! judge is *sound*: a fault that it reports is a fault under every order in which the requests may have been decided. It
//! may miss faults.
//!
//! | fault | proof |
//! |---|---|
//! | [`Fault::Beyond`] | requests that lie wholly in one window were admitted, and together they exceed what any limiter may admit there |
//! | [`Fault::WronglyRefused`] | an exact limiter would have admitted the request even if every concurrent request had been decided just before it |
//! | [`Fault::TooEarly`] | a client waited for `Retry-After`, nobody spent anything meanwhile, and it was refused again |
//! | [`Fault::Forgotten`] | after a change of the rule more is admitted than is left of the new quota, less what was surely spent before |
//! | [`Fault::TooLate`] | under the worst order the request was admissible more than a second before the time in `Retry-After` |
//!
//! Gateways read whole microseconds of Redis's clock, which runs at its own speed: [`Rule::slack`] is the part of each time
//! span that the judge forgives for it. The boundaries of windows are known up to an error ([`Boundaries`]). Where they are
//! not known at all (a local limit begins the windows of each key at a random moment), the judge cuts the period into cells.
//! It reports faults only where every cell has one.

pub mod beyond;
pub mod exact;
pub mod refused;
pub mod shrink;
pub mod slots;
pub mod used;

use std::fmt;

/// Nanoseconds of the one monotonic clock that all clients share.
pub type Time = i64;

pub const MILLISECOND: Time = 1_000_000;
pub const SECOND: Time = 1_000_000_000;

/// How a limit counts. `token_bucket`, `gcra` and a `leaky_bucket` that holds nothing back are one algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    Bucket,
    FixedWindow,
    SlidingWindow,
    SlidingLog,
}

/// Where windows begin: every `period` from a moment on that lies in `earliest ..= earliest + error`.
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

/// The configuration of a limit, as far as the judge needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub counting: Counting,
    /// Units for each `period`; the most that a window admits.
    pub amount: u64,
    pub period: Time,
    /// The most that a bucket holds; equal to `amount` for windows and logs.
    pub burst: u64,
    pub boundaries: Boundaries,
    /// What the judge forgives of each span of time.
    pub slack: Time,
}

impl Rule {
    /// A limit whose windows may begin at any moment, judged by an exact clock.
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

    /// The most that a single request may cost.
    pub fn capacity(&self) -> u64 {
        self.burst
    }

    /// How long what was spent can matter.
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

    /// The windows in which a moment may lie, by number.
    fn windows_of(&self, from: Time, to: Time) -> (i64, i64) {
        let Boundaries { earliest, error } = self.boundaries;
        (
            (from - earliest - error).div_euclid(self.period),
            (to - earliest).div_euclid(self.period),
        )
    }

    /// The one window in which all of a span lies.
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
    /// Reset, timed out, or answered by something else than the limit: it may have been charged or not.
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

    /// The latest moment at which it can have been charged; `None` where it was not.
    fn charged_until(&self) -> Option<Time> {
        match self.verdict {
            Verdict::Admitted => Some(self.end),
            Verdict::Refused => None,
            // nobody knows when the gateway stopped working on it
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

/// What is wrong, with indices into the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// So many units too many were admitted within a span.
    Beyond {
        excess: u64,
        from: Time,
        to: Time,
        requests: Vec<usize>,
    },
    /// Under the worst order the request was admissible for so long before it was sent.
    WronglyRefused { request: usize, since: Time },
    /// `again` came when `refused` was told to return.
    TooEarly { refused: usize, again: usize },
    /// The request was admissible after this time at the latest.
    TooLate { request: usize, needed: Time },
    /// A change of the rule forgot some of what was surely spent before.
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

    /// Units that are too many.
    pub fn excess(&self) -> u64 {
        match self {
            Fault::Beyond { excess, .. } | Fault::Forgotten { excess, .. } => *excess,
            _ => 0,
        }
    }

    /// Whether more was admitted than the limit says; all other faults are at the expense of clients.
    pub fn is_beyond(&self) -> bool {
        matches!(self, Fault::Beyond { .. })
    }
}

/// Cells are not cut further than to this part of a period.
const FINEST_CELL: Time = 256;

/// Everything that the history of one key proves against its limit. The order of the records does not matter.
pub fn judge(rule: &Rule, history: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| {
        let mut faults: Vec<Fault> = beyond::beyond(rule, history).into_iter().collect();
        faults.extend(refused::refused(rule, history));
        faults
    })
}

/// Only what was admitted beyond the limit: for a history whose refusals have reasons that are not in it.
pub fn judge_admitted(rule: &Rule, history: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| {
        beyond::beyond(rule, history).into_iter().collect()
    })
}

/// Only what was refused: for a history with charges that the limit did not make.
pub fn judge_refused(rule: &Rule, history: &[Record]) -> Vec<Fault> {
    in_cells(rule, &|rule| refused::refused(rule, history))
}

/// The faults with those boundaries that explain the history best.
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
