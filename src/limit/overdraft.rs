//! Estimates: what a limit charges a request whose cost is known only at its end, and how far below
//! zero it may go.
//!
//! With capacity C and a largest debt of d capacities, an estimate of e needs min(e, C) units and
//! charges e, at most (1 + d)·C. So an estimate above the capacity needs a full bucket and is held
//! in full: no estimate makes a request impossible. When the true cost is known, an excess is
//! refunded. A shortfall is charged even if the units are missing, down to −d·C; debt beyond that
//! is forgiven.

use std::num::NonZeroU64;

/// The largest debt, as a share of the capacity in millionths: 0 to 10 capacities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Overdraft(u64);

impl Overdraft {
    /// One capacity.
    pub const ONE: Overdraft = Overdraft(WHOLE);

    /// A share of the capacity in millionths; `None` above ten capacities.
    pub fn from_ppm(ppm: u64) -> Option<Overdraft> {
        (ppm <= MAX_PPM).then_some(Overdraft(ppm))
    }

    /// A capacity plus its largest debt, rounded down; `None` where that does not fit 64 bits.
    pub(super) fn reach(self, capacity: u64) -> Option<u64> {
        let ppm = u128::from(WHOLE.saturating_add(self.0));
        let scaled = u128::from(capacity).saturating_mul(ppm);
        u64::try_from(scaled.checked_div(u128::from(WHOLE))?).ok()
    }

    /// The largest capacity whose reach is at most this.
    pub(super) fn largest_capacity(self, reach: u64) -> u64 {
        let ppm = u128::from(WHOLE.saturating_add(self.0));
        let whole = u128::from(reach)
            .saturating_add(1)
            .saturating_mul(u128::from(WHOLE));
        let capacity = whole.div_ceil(ppm).saturating_sub(1);
        u64::try_from(capacity).unwrap_or(u64::MAX)
    }
}

const WHOLE: u64 = 1_000_000;
const MAX_PPM: u64 = 10 * WHOLE;

/// The units that a claim of `cost` requires, and the units that it charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claimed {
    pub(super) needs: u64,
    pub(super) takes: u64,
}

impl Claimed {
    /// A claim on a counter with this `capacity` and, including its debt, this `reach`. `None`: it
    /// never fits.
    #[inline]
    pub(super) fn new(cost: u64, capacity: u64, reach: Option<NonZeroU64>) -> Option<Claimed> {
        if cost <= capacity {
            return Some(Claimed {
                needs: cost,
                takes: cost,
            });
        }
        reach.map(|reach| Claimed {
            needs: capacity,
            takes: cost.min(reach.get()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reach_is_the_capacity_and_the_largest_debt() {
        for (ppm, capacity, reach) in [
            (0, 1_000, 1_000),
            (1_000_000, 1_000, 2_000),
            (500_000, 3, 4),
            (10_000_000, 7, 77),
        ] {
            let overdraft = Overdraft::from_ppm(ppm).unwrap();
            assert_eq!(overdraft.reach(capacity), Some(reach));
            let largest = overdraft.largest_capacity(reach);
            assert!(largest >= capacity && overdraft.reach(largest) == Some(reach));
            assert!(overdraft.reach(largest + 1) > Some(reach));
        }
        assert_eq!(Overdraft::from_ppm(10_000_001), None);
        assert_eq!(Overdraft::ONE.reach(u64::MAX), None);
        assert_eq!(Overdraft::ONE.largest_capacity(1_048_575), 524_287);
    }
}
