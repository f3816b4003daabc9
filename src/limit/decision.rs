//! What was decided: how each limit stands to a request, and which of them speaks for all.

use arrayvec::ArrayVec;

use super::MAX_LIMITS;

/// What one limit says to one request. Times are whole nanoseconds from the request's `now`, rounded up: whoever
/// waits that long is not early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The bucket's size in units (the tier's burst).
    pub capacity: u64,
    /// Whole units that would be admitted now, after this decision. A request that any limit denies takes nothing,
    /// so then it is what was there before.
    pub remaining: u64,
    /// When this limit denies: the least wait after which it admits the same request if nothing else arrives.
    /// `None` when it admits, and when no wait helps. For slots, which no clock gives back, the constant
    /// [`RETRY_NS`](super::in_flight::RETRY_NS).
    pub retry_after_ns: Option<u64>,
    /// This limit denies the request.
    pub denied: bool,
    /// The cost is above the capacity, so that no wait helps. Implies `denied`.
    pub never: bool,
    /// The least wait until `remaining` grows; 0 when it is `capacity`, and for slots, of which nobody knows it.
    pub next_unit_ns: u64,
    /// The least wait until the bucket is full; 0 when it is, and for slots.
    pub reset_ns: u64,
    /// How long the request must be held before it is sent on; 0 unless the charge allows a delay.
    pub delay_ns: u64,
    /// Where the charge is, for [`Store::release`](super::Store::release).
    pub held: Held,
}

/// Where the units of an admitted request are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    /// Nowhere: nothing was charged.
    #[default]
    Nowhere,
    /// In the bucket of the charge's own key.
    Own,
    /// In the bucket that keys share for which there is no room.
    Overflow,
}

impl Standing {
    /// Longest wait first: never, then the longest `retry_after_ns`. `None` when this limit admits.
    fn severity(&self) -> Option<u64> {
        // a wait of u64::MAX ns is 584 years, so sharing the value with "never" misleads nobody
        self.denied.then(|| self.retry_after_ns.unwrap_or(u64::MAX))
    }
}

/// One request against all of its limits: admitted by every one of them, or denied and charged to none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// One standing per charge, in the order of the charges.
    pub standings: ArrayVec<Standing, MAX_LIMITS>,
}

/// The limit that a denied request must wait for longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Index of the limit into the charges (and [`Verdict::standings`]).
    pub limit: usize,
    /// After this wait every limit admits the request, if nothing else arrives: each is monotone in time, so the
    /// longest wait is enough. `None`: no wait helps.
    pub retry_after_ns: Option<u64>,
}

impl Verdict {
    /// Every limit admits (also when there is none).
    pub fn admitted(&self) -> bool {
        self.standings.iter().all(|standing| !standing.denied)
    }

    /// How long an admitted request must be held: as long as the limit that holds it longest.
    pub fn delay_ns(&self) -> u64 {
        let delays = self.standings.iter().map(|standing| standing.delay_ns);
        delays.max().unwrap_or(0)
    }

    /// The limit that takes longest; `None` when the request is admitted.
    pub fn denial(&self) -> Option<Denial> {
        let (limit, standing) = self.longest()?;
        Some(Denial {
            limit,
            retry_after_ns: standing.retry_after_ns,
        })
    }

    /// Index of the limit that is worth reporting: on denial the one that takes longest, else the one with the least
    /// share of its capacity left (the first of equals). `None` when there is no limit.
    pub fn binding(&self) -> Option<usize> {
        if let Some((limit, _)) = self.longest() {
            return Some(limit);
        }
        let mut tightest: Option<(usize, &Standing)> = None;
        for (index, standing) in self.standings.iter().enumerate() {
            if tightest.is_none_or(|(_, least)| tighter(standing, least)) {
                tightest = Some((index, standing));
            }
        }
        tightest.map(|(index, _)| index)
    }

    /// The first denying standing with the longest wait.
    fn longest(&self) -> Option<(usize, &Standing)> {
        let mut longest: Option<(usize, &Standing)> = None;
        for (index, standing) in self.standings.iter().enumerate() {
            if standing.denied
                && longest.is_none_or(|(_, other)| standing.severity() > other.severity())
            {
                longest = Some((index, standing));
            }
        }
        longest
    }
}

/// Whether `a` has a smaller share of its capacity left than `b`: `a.remaining / a.capacity < b.remaining / b.capacity`.
fn tighter(a: &Standing, b: &Standing) -> bool {
    let share = |of: &Standing, other: &Standing| {
        u128::from(of.remaining).saturating_mul(u128::from(other.capacity))
    };
    share(a, b) < share(b, a)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(remaining: u64, capacity: u64) -> Standing {
        let (retry_after_ns, denied, never) = (None, false, false);
        Standing {
            capacity,
            remaining,
            retry_after_ns,
            denied,
            never,
            next_unit_ns: 1,
            reset_ns: 1,
            delay_ns: 0,
            held: Held::Nowhere,
        }
    }

    fn denies(retry_after_ns: Option<u64>) -> Standing {
        Standing {
            retry_after_ns,
            denied: true,
            never: retry_after_ns.is_none(),
            ..admits(0, 10)
        }
    }

    fn verdict(standings: &[Standing]) -> Verdict {
        Verdict {
            standings: standings.iter().copied().collect(),
        }
    }

    #[test]
    fn no_limit_admits_and_binds_nothing() {
        let verdict = Verdict::default();
        assert!(verdict.admitted());
        assert_eq!((verdict.denial(), verdict.binding()), (None, None));
    }

    #[test]
    fn the_least_share_binds_not_the_least_count() {
        assert_eq!(
            verdict(&[admits(5, 10), admits(40, 100), admits(3, 3)]).binding(),
            Some(1)
        );
        assert_eq!(
            verdict(&[admits(5, 10), admits(50, 100)]).binding(),
            Some(0)
        );
        assert_eq!(
            verdict(&[admits(u64::MAX, u64::MAX), admits(u64::MAX - 1, u64::MAX)]).binding(),
            Some(1)
        );
    }

    #[test]
    fn the_longest_wait_speaks_for_a_denial() {
        let denied = verdict(&[
            denies(Some(3)),
            admits(0, 1),
            denies(Some(7)),
            denies(Some(7)),
        ]);
        assert!(!denied.admitted());
        assert_eq!(
            denied.denial(),
            Some(Denial {
                limit: 2,
                retry_after_ns: Some(7)
            })
        );
        assert_eq!(denied.binding(), Some(2));
    }

    #[test]
    fn never_is_longer_than_any_wait() {
        let denied = verdict(&[denies(Some(3)), denies(None), denies(Some(9))]);
        assert_eq!(
            denied.denial(),
            Some(Denial {
                limit: 1,
                retry_after_ns: None
            })
        );
    }
}
