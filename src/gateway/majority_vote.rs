//! Detects a key with nearly all of a limit's traffic. Such an address is probably a proxy's.
//!
//! Samples keys in two phases. A Boyer-Moore majority vote elects a candidate: it finds any key
//! with more than half of a sequence. Then the candidate's share of the next samples is counted.
//! This takes a few words per limit and worker, and no table that a flood of keys could fill.

use crate::limit::Key;

/// Samples in the election phase.
const ELECTION: u32 = 64;

/// Samples in the counting phase. 256 give the share to within a few percent.
const COUNT: u32 = 256;

/// Dominant above 80 % of the samples.
const DOMINANT: u32 = COUNT * 4 / 5;

/// The detector for one limit on one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MajorityVote {
    candidate: u128,
    /// Electing: the candidate's lead. Counting: its occurrences.
    votes: u32,
    /// Samples in this round.
    seen: u32,
}

impl MajorityVote {
    /// Adds a sample. After a round with a dominant key, returns true once: at that key's next
    /// sample.
    pub(super) fn vote(&mut self, Key(key): Key) -> bool {
        let is_candidate = self.candidate == key;
        if self.seen < ELECTION {
            self.seen += 1;
            match self.votes {
                0 => (self.candidate, self.votes) = (key, 1),
                votes if is_candidate => self.votes = votes + 1,
                votes => self.votes = votes - 1,
            }
            if self.seen == ELECTION {
                self.votes = 0;
            }
            return false;
        }
        if self.seen < ELECTION + COUNT {
            self.seen += 1;
            self.votes += u32::from(is_candidate);
            return false;
        }
        let is_dominant = self.votes > DOMINANT;
        if is_candidate || !is_dominant {
            *self = Self::default();
        }
        is_candidate && is_dominant
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Counts how often a sequence yields a dominant key.
    fn found(keys: impl IntoIterator<Item = u128>) -> usize {
        let mut majority = MajorityVote::default();
        keys.into_iter()
            .filter(|key| majority.vote(Key(*key)))
            .count()
    }

    /// Both phases, plus the sample that reports.
    const ROUND: usize = (ELECTION + COUNT + 1) as usize;

    #[test]
    fn a_key_of_nearly_all_is_found_in_every_round() {
        assert_eq!(found(std::iter::repeat_n(7, ROUND)), 1);
        assert_eq!(found(std::iter::repeat_n(7, ROUND - 1)), 0);
        // A round ends at the key's next sample. If another key intervenes, it is one sample
        // longer.
        let nine_of_ten = (0..3 * (ROUND as u128 + 1)).map(|n| if n % 10 == 0 { n } else { 0 });
        assert_eq!(found(nine_of_ten), 3);
    }

    #[test]
    fn a_key_of_three_quarters_is_not_found() {
        let three_of_four = (0..10 * ROUND as u128).map(|n| if n % 4 == 0 { n } else { 0 });
        assert_eq!(found(three_of_four), 0);
    }

    proptest! {
        #[test]
        fn keys_that_all_differ_are_never_dominant(first in any::<u64>()) {
            prop_assert_eq!(found((0..4 * ROUND as u128).map(|n| n + u128::from(first))), 0);
        }

        #[test]
        fn what_is_found_has_more_than_its_share(keys in prop::collection::vec(prop_oneof![9 => Just(0u128), 1 => 0u128..3], ROUND)) {
            if found(keys.iter().copied()) > 0 {
                let counted = &keys[ELECTION as usize..ROUND - 1];
                let most = (0..3).map(|key| counted.iter().filter(|other| **other == key).count()).max();
                prop_assert!(most > Some(DOMINANT as usize));
            }
        }
    }
}
