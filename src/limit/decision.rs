//! The outcome of a decision: the status of each limit, and the limit that determines the answer.

use std::ops::Deref;

use arrayvec::ArrayVec;

use super::{
    algorithm::WordAlgorithm,
    key::MAX_LIMITS,
    standing::{ChargeLocation, Standing},
    word_request::WordRequest,
};

/// The decision over all limits of one request: every limit admits and is charged, or none is
/// charged.
#[derive(Clone, Debug, Default)]
pub struct Verdict<'a> {
    /// One finding per charge, in the order of the charges.
    pub findings: ArrayVec<Finding<'a>, MAX_LIMITS>,
}

/// One limit's outcome. The full [`Standing`] costs several divisions and is rarely needed, so it
/// is computed on demand.
#[derive(Clone, Copy, Debug)]
pub struct Finding<'a> {
    basis: Basis<'a>,
    denied: bool,
    held: ChargeLocation,
}

/// The data from which the standing is computed.
#[derive(Clone, Copy, Debug)]
enum Basis<'a> {
    /// A key's word after the request.
    Word {
        words: &'a WordAlgorithm,
        ask: WordRequest,
        word: u64,
    },
    /// The standing itself, where it had to be computed at once.
    Said(Standing),
}

impl<'a> Finding<'a> {
    /// An outcome for a word that the request has not charged.
    #[inline(always)]
    pub(super) fn found(
        words: &'a WordAlgorithm,
        ask: WordRequest,
        word: u64,
        denied: bool,
    ) -> Finding<'a> {
        Finding {
            basis: Basis::Word { words, ask, word },
            denied,
            held: ChargeLocation::Nowhere,
        }
    }

    /// An outcome for the word that the request's charge produced.
    #[inline(always)]
    pub(super) fn charge(&mut self, new: u64, held: ChargeLocation) {
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
    pub fn held(&self) -> ChargeLocation {
        self.held
    }

    /// As [`Standing::delay_ns`]; free where no delay is allowed.
    pub fn delay_ns(&self) -> u64 {
        match &self.basis {
            Basis::Word { ask, .. } if ask.max_delay_ns == 0 => 0,
            _ => self.standing().delay_ns,
        }
    }

    /// Computes the full status.
    pub fn standing(&self) -> Standing {
        let standing = match &self.basis {
            Basis::Said(standing) => *standing,
            Basis::Word { words, ask, word } if self.held == ChargeLocation::Nowhere => {
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

    /// How long to hold an admitted request: the longest delay of any limit.
    pub fn delay_ns(&self) -> u64 {
        let delays = self.findings.iter().map(Finding::delay_ns);
        delays.max().unwrap_or(0)
    }

    /// The status of each limit. Computed on every call, so call once.
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

/// The limit with the longest wait for a denied request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Index of the limit into the charges.
    pub limit: usize,
    /// Every limit admits after this wait if nothing else arrives: each is monotone in time, so the
    /// longest wait suffices. `None`: no wait helps.
    pub retry_after_ns: Option<u64>,
}

impl Standings {
    /// The limit with the longest wait; `None` when the request is admitted.
    pub fn denial(&self) -> Option<Denial> {
        let (limit, standing) = self.longest()?;
        Some(Denial {
            limit,
            retry_after_ns: standing.retry_after_ns,
        })
    }

    /// Index of the limit to report. On denial it is the one with the longest wait, otherwise the
    /// one with the smallest share of its capacity left (first of equals). `None` without limits.
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

/// Whether `a` has a smaller share of its capacity left than `b`: `a.remaining / a.capacity <
/// b.remaining / b.capacity`.
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
            held: ChargeLocation::Nowhere,
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
