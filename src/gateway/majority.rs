//! Whether one key holds nearly all of a limit's traffic: the sign of an address that is really a proxy's.
//!
//! Of some requests the key is looked at. First a candidate is found by a majority vote (Boyer and Moore: of any sequence in which
//! one key has more than half, it is that key), then its share of the next samples is counted. A few words for each limit and
//! worker, no table of keys, and nothing that a flood of keys could fill.

use crate::limit::Key;

/// Samples that elect a candidate.
const ELECTION: u32 = 64;

/// Samples of which the candidate's share is taken. With 256 a share is right to a few percent.
const COUNT: u32 = 256;

/// More than 80 % of them.
const DOMINANT: u32 = COUNT * 4 / 5;

/// One limit's keys, as one worker sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Majority {
    candidate: u128,
    /// While electing, the candidate's lead; then how often it was seen.
    votes: u32,
    /// Samples so far.
    seen: u32,
}

impl Majority {
    /// Notes a sample; true once after each count in which one key was dominant, when that key comes next.
    pub(super) fn note(&mut self, Key(key): Key) -> bool {
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

    /// How often a sequence of keys is found dominated.
    fn found(keys: impl IntoIterator<Item = u128>) -> usize {
        let mut majority = Majority::default();
        keys.into_iter()
            .filter(|key| majority.note(Key(*key)))
            .count()
    }

    /// And one sample more.
    const ROUND: usize = (ELECTION + COUNT + 1) as usize;

    #[test]
    fn a_key_of_nearly_all_is_found_in_every_round() {
        assert_eq!(found(std::iter::repeat_n(7, ROUND)), 1);
        assert_eq!(found(std::iter::repeat_n(7, ROUND - 1)), 0);
        // a round ends with the next sample of the key: after one more than a round's, where another comes between
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
