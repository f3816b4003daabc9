//! Divides bounded memory between limits, so that no limit can starve another.
//!
//! Half of the shared memory, `reserve`, is divided into equal guaranteed parts, one per limit. The
//! rest is a pool for any limit that needs more. A limit takes more of the pool only while it holds
//! at most `PULL` times the free part ("dynamic thresholds", Choudhury and Hahne 1998). One limit
//! alone can take `PULL/(PULL+1)` of the pool, two can take `PULL/(2·PULL+1)` each. Some of the
//! pool always remains for the next limit.
//!
//! ```text
//!   │◀──── reserve ────▶│◀──────────── pool ────────────▶│
//!   │  a  │  b  │  c    │ a, beyond its part   │   free  │
//! ```
//!
//! The count covers everything a limit holds, idle or not. A limit that may not grow replaces its
//! own idle keys, and those of limits that hold more of the pool.
//!
//! **Error.** Counts change after the decision, so threads that grow a limit at the same moment
//! exceed its bound by one unit each. A unit may be released before its taker has counted it, so
//! counts are signed and may briefly be negative. A count that saturated at 0 would stay too high
//! for ever.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

/// How many times the free part of the pool one limit may hold.
const PULL: u64 = 4;

/// The memory that limits divide.
#[derive(Debug)]
pub struct SharedCapacity {
    reserve: u64,
    pool: u64,
    /// Units of the pool in use.
    pooled: AtomicI64,
    /// The guaranteed part of each counting limit.
    guaranteed: AtomicU64,
}

/// One limit's holdings of it.
#[derive(Debug, Default)]
pub struct Occupancy {
    held: AtomicI64,
    /// The limit belongs to the running configuration and has a guaranteed part.
    runs: AtomicBool,
}

impl SharedCapacity {
    /// `reserve` units in guaranteed parts, and `pool` units for all.
    pub fn new(reserve: u64, pool: u64) -> SharedCapacity {
        SharedCapacity {
            reserve,
            pool,
            pooled: AtomicI64::new(0),
            guaranteed: AtomicU64::new(reserve),
        }
    }

    /// Room for about `most` units of one limit, and half as many in guaranteed parts.
    pub fn for_keys(most: usize) -> SharedCapacity {
        let most = u64::try_from(most).unwrap_or(u64::MAX);
        SharedCapacity::new(most.div_ceil(2), most)
    }

    /// The units that all limits together may hold.
    pub fn total(&self) -> u64 {
        self.reserve.saturating_add(self.pool)
    }

    /// Divides the guaranteed parts among the running limits. `all` also includes limits that still
    /// hold memory. A limit that is alone has no bound here, because there is no other limit to
    /// protect.
    pub fn divide<'a>(&self, all: impl Iterator<Item = &'a Occupancy> + Clone) {
        let running = all.clone().filter(|one| one.runs.load(Relaxed)).count();
        let running = u64::try_from(running).unwrap_or(u64::MAX);
        let part = match running {
            0 | 1 => u64::MAX,
            _ => self.reserve.checked_div(running).unwrap_or(0).max(1),
        };
        self.guaranteed.store(part, Relaxed);
        let pooled = all.map(|one| self.beyond(one)).fold(0, u64::saturating_add);
        self.pooled.store(signed(pooled), Relaxed);
    }

    /// The guaranteed part of a running limit.
    pub fn guaranteed(&self) -> u64 {
        self.guaranteed.load(Relaxed)
    }

    /// Whether a limit may take `units` more.
    pub fn may_grow(&self, one: &Occupancy, units: u64) -> bool {
        let held = one.held().saturating_add(units);
        let beyond = held.saturating_sub(self.part(one));
        if beyond == 0 {
            return true;
        }
        let taken = beyond.saturating_sub(self.beyond(one));
        let free = self
            .pool
            .saturating_sub(unsigned(self.pooled.load(Relaxed)));
        taken <= free && beyond.saturating_sub(1) < free.saturating_mul(PULL)
    }

    /// Whether a limit may replace an idle unit of another.
    pub fn may_replace(&self, one: &Occupancy, other: &Occupancy) -> bool {
        let beyond = self.beyond(other);
        std::ptr::eq(one, other) || (beyond > 0 && beyond >= self.beyond(one))
    }

    /// Counts units that a limit took.
    pub fn grow(&self, one: &Occupancy, units: u64) {
        self.change(one, signed(units));
    }

    /// Counts units that a limit released.
    pub fn shrink(&self, one: &Occupancy, units: u64) {
        self.change(one, signed(units).saturating_neg());
    }

    /// The changes to the pool telescope: it holds the sum of all holdings beyond the guaranteed
    /// parts.
    fn change(&self, one: &Occupancy, units: i64) {
        let before = one.held.fetch_add(units, Relaxed);
        let part = self.part(one);
        let [before, after] = [before, before.saturating_add(units)]
            .map(|held| signed(unsigned(held).saturating_sub(part)));
        if after != before {
            self.pooled.fetch_add(after.saturating_sub(before), Relaxed);
        }
    }

    fn part(&self, one: &Occupancy) -> u64 {
        match one.runs.load(Relaxed) {
            true => self.guaranteed(),
            false => 0,
        }
    }

    fn beyond(&self, one: &Occupancy) -> u64 {
        one.held().saturating_sub(self.part(one))
    }
}

impl Occupancy {
    /// Units held.
    pub fn held(&self) -> u64 {
        unsigned(self.held.load(Relaxed))
    }

    /// Sets whether the limit runs; call [`SharedCapacity::divide`] afterwards.
    pub fn set_running(&self, runs: bool) {
        self.runs.store(runs, Relaxed);
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

fn unsigned(units: i64) -> u64 {
    u64::try_from(units).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits<const N: usize>(capacity: &SharedCapacity) -> [Occupancy; N] {
        let all = [(); N].map(|()| Occupancy::default());
        all.iter().for_each(|one| one.set_running(true));
        capacity.divide(all.iter());
        all
    }

    fn fill(capacity: &SharedCapacity, one: &Occupancy) -> u64 {
        while capacity.may_grow(one, 1) {
            capacity.grow(one, 1);
        }
        one.held()
    }

    #[test]
    fn every_limit_gets_its_part_whatever_the_others_took_first() {
        let capacity = SharedCapacity::for_keys(1_000);
        let [a, b, c, d, e] = &limits::<5>(&capacity);
        assert_eq!(capacity.guaranteed(), 100);
        assert_eq!(fill(&capacity, a), 100 + 800, "four fifths of the pool");
        assert_eq!(fill(&capacity, b), 100 + 160, "four fifths of what is left");
        let rest = [c, d, e].map(|one| fill(&capacity, one));
        assert!(rest.iter().all(|&held| held >= 100), "{rest:?}");
        let all = [a, b, c, d, e].map(Occupancy::held);
        assert!(all.iter().sum::<u64>() <= capacity.total());
    }

    #[test]
    fn what_is_given_up_goes_back_to_the_pool_and_a_limit_that_is_gone_has_no_part() {
        let capacity = SharedCapacity::for_keys(1_000);
        let [a, b] = &limits::<2>(&capacity);
        fill(&capacity, a);
        capacity.shrink(a, a.held());
        assert_eq!(fill(&capacity, b), 250 + 800);
        b.set_running(false);
        capacity.divide([a, b].into_iter());
        assert!(capacity.may_replace(a, b) && !capacity.may_replace(b, a));
        assert!(capacity.may_grow(a, capacity.total()), "alone");
    }

    #[test]
    fn a_unit_that_is_given_up_before_it_is_counted_leaves_no_trace() {
        let capacity = SharedCapacity::for_keys(100);
        let [a, b] = &limits::<2>(&capacity);
        capacity.shrink(a, 1);
        capacity.grow(a, 1);
        assert_eq!(a.held(), 0);
        assert_eq!(fill(&capacity, b), 25 + 80);
    }
}
