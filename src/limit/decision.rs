//! What was decided: how each limit stands to a request, and which of them speaks for all.

use std::ops::Deref;

use arrayvec::ArrayVec;

use super::{
    MAX_LIMITS,
    words::{Ask, Words},
};

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
    /// How a limit stands that counts what was `used` of late, to a request that is not charged. `wait_ns` is the least wait until
    /// at most so many units count, which are fewer than now.
    #[inline]
    pub(super) fn of_count(
        used: u64,
        limit: u64,
        cost: u64,
        wait_ns: impl Fn(u64) -> u64,
    ) -> Standing {
        let never = cost > limit;
        let denied = cost > 0 && used.saturating_add(cost) > limit;
        let fewer = used.min(limit).checked_sub(1);
        Standing {
            capacity: limit,
            remaining: limit.saturating_sub(used),
            retry_after_ns: (denied && !never).then(|| wait_ns(limit.saturating_sub(cost))),
            denied,
            never,
            next_unit_ns: fewer.map_or(0, &wait_ns),
            reset_ns: if used == 0 { 0 } else { wait_ns(0) },
            delay_ns: 0,
            held: Held::Nowhere,
        }
    }

    /// Longest wait first: never, then the longest `retry_after_ns`. `None` when this limit admits.
    fn severity(&self) -> Option<u64> {
        // a wait of u64::MAX ns is 584 years, so sharing the value with "never" misleads nobody
        self.denied.then(|| self.retry_after_ns.unwrap_or(u64::MAX))
    }
}

/// One request against all of its limits: admitted by every one of them, or denied and charged to none.
#[derive(Clone, Debug, Default)]
pub struct Verdict<'a> {
    /// One finding per charge, in the order of the charges.
    pub findings: ArrayVec<Finding<'a>, MAX_LIMITS>,
}

/// What one limit decided, and what it takes to say more: a [`Standing`] costs several divisions, most of which nobody
/// asks for.
#[derive(Clone, Copy, Debug)]
pub struct Finding<'a> {
    basis: Basis<'a>,
    denied: bool,
    held: Held,
}

/// What a finding's standing is worked out from.
#[derive(Clone, Copy, Debug)]
enum Basis<'a> {
    /// A key's word as the request left it.
    Word {
        words: &'a Words,
        ask: Ask,
        word: u64,
    },
    /// What had to be said at once.
    Said(Standing),
}

impl<'a> Finding<'a> {
    /// A word that the request has not charged.
    #[inline(always)]
    pub(super) fn found(words: &'a Words, ask: Ask, word: u64, denied: bool) -> Finding<'a> {
        Finding {
            basis: Basis::Word { words, ask, word },
            denied,
            held: Held::Nowhere,
        }
    }

    /// The request's charge has made it this word.
    #[inline(always)]
    pub(super) fn charge(&mut self, new: u64, held: Held) {
        if let Basis::Word { word, .. } = &mut self.basis {
            *word = new;
            self.held = held;
        }
    }

    /// This limit denies the request.
    #[inline]
    pub fn denied(&self) -> bool {
        self.denied
    }

    /// As [`Standing::held`].
    #[inline]
    pub fn held(&self) -> Held {
        self.held
    }

    /// As [`Standing::delay_ns`]; costs nothing where no delay is allowed.
    pub fn delay_ns(&self) -> u64 {
        match &self.basis {
            Basis::Word { ask, .. } if ask.max_delay_ns == 0 => 0,
            _ => self.standing().delay_ns,
        }
    }

    /// All that can be said.
    pub fn standing(&self) -> Standing {
        let standing = match &self.basis {
            Basis::Said(standing) => *standing,
            Basis::Word { words, ask, word } if self.held == Held::Nowhere => {
                words.standing(ask, *word)
            }
            Basis::Word { words, ask, word } => words.standing_charged(ask, *word),
        };
        Standing {
            denied: self.denied,
            held: self.held,
            ..standing
        }
    }
}

/// What is known already.
impl From<Standing> for Finding<'_> {
    fn from(standing: Standing) -> Self {
        Finding {
            basis: Basis::Said(standing),
            denied: standing.denied,
            held: standing.held,
        }
    }
}

impl<'a> Verdict<'a> {
    /// Every limit admits (also when there is none).
    #[inline]
    pub fn admitted(&self) -> bool {
        self.findings.iter().all(|finding| !finding.denied)
    }

    /// How long an admitted request must be held: as long as the limit that holds it longest.
    pub fn delay_ns(&self) -> u64 {
        let delays = self.findings.iter().map(Finding::delay_ns);
        delays.max().unwrap_or(0)
    }

    /// What each limit says. It is worked out here, so ask once.
    pub fn standings(&self) -> Standings {
        self.findings.iter().collect()
    }
}

impl<'f, 'a: 'f> FromIterator<&'f Finding<'a>> for Standings {
    /// More than [`MAX_LIMITS`] findings are a mistake of the caller.
    fn from_iter<I: IntoIterator<Item = &'f Finding<'a>>>(findings: I) -> Standings {
        Standings(findings.into_iter().map(Finding::standing).collect())
    }
}

/// One standing per charge, in the order of the charges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standings(ArrayVec<Standing, MAX_LIMITS>);

impl Deref for Standings {
    type Target = [Standing];

    fn deref(&self) -> &[Standing] {
        &self.0
    }
}

/// The limit that a denied request must wait for longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Index of the limit into the charges.
    pub limit: usize,
    /// After this wait every limit admits the request, if nothing else arrives: each is monotone in time, so the
    /// longest wait is enough. `None`: no wait helps.
    pub retry_after_ns: Option<u64>,
}

impl Standings {
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
        for (index, standing) in self.iter().enumerate() {
            if tightest.is_none_or(|(_, least)| tighter(standing, least)) {
                tightest = Some((index, standing));
            }
        }
        tightest.map(|(index, _)| index)
    }

    /// The first denying standing with the longest wait.
    fn longest(&self) -> Option<(usize, &Standing)> {
        let mut longest: Option<(usize, &Standing)> = None;
        for (index, standing) in self.iter().enumerate() {
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

    fn told(standings: &[Standing]) -> Standings {
        let findings = standings.iter().copied().map(Finding::from).collect();
        let verdict = Verdict { findings };
        let denied = standings.iter().any(|standing| standing.denied);
        assert_eq!(verdict.admitted(), !denied);
        verdict.standings()
    }

    #[test]
    fn no_limit_admits_and_binds_nothing() {
        let told = told(&[]);
        assert_eq!((told.denial(), told.binding()), (None, None));
    }

    #[test]
    fn the_least_share_binds_not_the_least_count() {
        assert_eq!(
            told(&[admits(5, 10), admits(40, 100), admits(3, 3)]).binding(),
            Some(1)
        );
        assert_eq!(told(&[admits(5, 10), admits(50, 100)]).binding(), Some(0));
        assert_eq!(
            told(&[admits(u64::MAX, u64::MAX), admits(u64::MAX - 1, u64::MAX)]).binding(),
            Some(1)
        );
    }

    #[test]
    fn the_longest_wait_speaks_for_a_denial() {
        let denied = told(&[
            denies(Some(3)),
            admits(0, 1),
            denies(Some(7)),
            denies(Some(7)),
        ]);
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
        let denied = told(&[denies(Some(3)), denies(None), denies(Some(9))]);
        assert_eq!(
            denied.denial(),
            Some(Denial {
                limit: 1,
                retry_after_ns: None
            })
        );
    }
}
