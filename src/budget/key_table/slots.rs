//! This gateway's slots of one key: free ones for the next request, and those that requests hold.
//!
//! No slot is lent twice: a free slot is taken by compare-and-swap, and dropping the request's
//! `SlotGuard` returns it however the request ended. Free slots may be taken until shortly before the
//! lease manager's last declaration expires.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use super::cell::{REFUSE_UNTIL_NS, REFUSED, WORDS};

/// The words of one cell of slots. All zero means no slots and no knowledge.
#[derive(Clone, Copy, Debug)]
pub(in crate::budget) struct SlotCell<'a>(pub(super) &'a [AtomicU64; WORDS]);

/// Granted, and held by no request.
const FREE: usize = 0;
/// Until when free slots may be taken.
const GOOD_UNTIL_NS: usize = 1;
// 2 and 3 are REFUSE_UNTIL_NS and REFUSED
/// Whether to notify the lease manager of the next returned slot.
const LISTENS: usize = 4;
/// Slots free elsewhere at the last reply.
const ELSEWHERE: usize = 5;
/// Granted by the store and not given back, whether free or in use.
const MINE: usize = 8;
/// Without Redis: the most requests in flight here, and those admitted beyond the granted slots.
const ALONE_MOST: usize = 9;
const ALONE_USED: usize = 10;

/// Why a request gets no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) enum NoSlot {
    /// Remembered: not before then, unless a slot is returned here.
    Refused { until_ns: u64 },
    /// Redis must be asked.
    Unknown,
}

impl SlotCell<'_> {
    /// Takes free slots, or returns why not.
    pub(in crate::budget) fn take(&self, now_ns: u64, cost: u64) -> Result<(), NoSlot> {
        let less = |free: u64| free.checked_sub(cost);
        if now_ns < self.0[GOOD_UNTIL_NS].load(Acquire)
            && self.0[FREE].fetch_update(AcqRel, Acquire, less).is_ok()
        {
            return Ok(());
        }
        let until_ns = self.0[REFUSE_UNTIL_NS].load(Acquire);
        if now_ns < until_ns {
            self.0[REFUSED].fetch_add(cost, Relaxed);
            return Err(NoSlot::Refused { until_ns });
        }
        Err(NoSlot::Unknown)
    }

    /// Takes slots without a grant, up to the fallback maximum of requests in flight.
    pub(in crate::budget) fn take_alone(&self, cost: u64) -> bool {
        let most = self.0[ALONE_MOST].load(Acquire);
        let (mine, free) = (self.0[MINE].load(Acquire), self.0[FREE].load(Acquire));
        let granted = mine.saturating_sub(free);
        let more = |used: u64| {
            let after = used.saturating_add(cost);
            (granted.saturating_add(after) <= most).then_some(after)
        };
        self.0[ALONE_USED]
            .fetch_update(AcqRel, Acquire, more)
            .is_ok()
    }

    /// The store granted `slots` more. All free slots may be taken until `good_until_ns`.
    pub(in crate::budget) fn add(&self, slots: u64, good_until_ns: u64) {
        self.0[GOOD_UNTIL_NS].store(good_until_ns, Release);
        self.0[FREE].fetch_add(slots, AcqRel);
    }

    /// Takes up to `most` free slots to give them back to the store.
    pub(in crate::budget) fn withdraw(&self, most: u64) -> u64 {
        let mut taken = 0;
        let less = |free: u64| {
            taken = free.min(most);
            Some(free - taken)
        };
        // the update always returns a value
        let _ = self.0[FREE].fetch_update(AcqRel, Acquire, less);
        taken
    }

    pub(in crate::budget) fn free(&self) -> u64 {
        self.0[FREE].load(Acquire)
    }

    /// Slots in use that were admitted without the store.
    pub(in crate::budget) fn used_alone(&self) -> u64 {
        self.0[ALONE_USED].load(Acquire)
    }

    pub(in crate::budget) fn elsewhere(&self) -> u64 {
        self.0[ELSEWHERE].load(Relaxed)
    }

    /// Stores what the lease manager learned from a reply.
    pub(in crate::budget) fn know(&self, mine: u64, elsewhere: u64, refuse_until_ns: u64) {
        self.0[MINE].store(mine, Release);
        self.0[ELSEWHERE].store(elsewhere, Relaxed);
        self.0[REFUSE_UNTIL_NS].store(refuse_until_ns, Release);
    }

    /// Clears a remembered refusal, because a slot may be granted now.
    pub(in crate::budget) fn forget_refusal(&self) {
        self.0[REFUSE_UNTIL_NS].store(0, Release);
    }

    /// Sets the most requests in flight here without a store.
    pub(in crate::budget) fn prepare_alone(&self, most: u64) {
        self.0[ALONE_MOST].store(most, Release);
    }

    /// Notifies the lease manager of the next returned slot, once.
    pub(in crate::budget) fn listen(&self) {
        self.0[LISTENS].store(1, Release);
    }

    pub(super) fn come_back(&self, cost: u64, alone: bool) -> bool {
        let less = |used: u64| Some(used.saturating_sub(cost));
        if alone {
            // the update always returns a value
            let _ = self.0[ALONE_USED].fetch_update(AcqRel, Acquire, less);
        } else {
            self.0[FREE].fetch_add(cost, AcqRel);
        }
        self.0[LISTENS].load(Acquire) != 0 && self.0[LISTENS].swap(0, AcqRel) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        budget::key_table::{KeyTable, Tag},
        limit::Key,
    };

    fn with<T>(check: impl Fn(SlotCell<'_>) -> T) -> T {
        let key_table = KeyTable::new(64, 1);
        let place = key_table
            .claim(Tag::new(Key(7), 0), 0)
            .expect("there is room");
        check(key_table.slots(place))
    }

    #[test]
    fn free_slots_are_taken_until_the_declaration_is_about_to_be_over() {
        with(|slots| {
            assert_eq!(slots.take(1, 1), Err(NoSlot::Unknown));
            slots.add(3, 10);
            assert_eq!(
                (slots.take(9, 2), slots.take(9, 2)),
                (Ok(()), Err(NoSlot::Unknown))
            );
            assert_eq!(
                slots.take(10, 1),
                Err(NoSlot::Unknown),
                "their declaration may have expired"
            );
            slots.add(0, 20);
            assert_eq!(slots.take(10, 1), Ok(()));
        });
    }

    #[test]
    fn a_refusal_is_remembered_but_a_slot_that_comes_back_is_lent_again() {
        with(|slots| {
            slots.add(1, 100);
            slots.know(1, 0, 50);
            assert_eq!(slots.take(1, 1), Ok(()));
            assert_eq!(slots.take(1, 1), Err(NoSlot::Refused { until_ns: 50 }));
            slots.come_back(1, false);
            assert_eq!(slots.take(1, 1), Ok(()));
        });
    }

    #[test]
    fn alone_what_was_granted_counts_too() {
        with(|slots| {
            slots.add(3, 100);
            slots.know(3, 0, 0);
            slots.prepare_alone(4);
            assert_eq!(slots.take(1, 3), Ok(()));
            assert_eq!((slots.take_alone(1), slots.take_alone(1)), (true, false));
            slots.come_back(3, false);
            assert!(slots.take_alone(3));
            slots.come_back(1, true);
            assert_eq!(slots.used_alone(), 3);
        });
    }

    #[test]
    fn the_keeper_hears_of_the_first_slot_that_comes_back() {
        with(|slots| {
            slots.add(3, 100);
            assert_eq!(slots.take(1, 3), Ok(()));
            slots.listen();
            let told: Vec<bool> = (0..3).map(|_| slots.come_back(1, false)).collect();
            assert_eq!(told, [true, false, false]);
        });
    }
}
