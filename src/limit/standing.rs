//! The status of one limit for one request.

/// Status of one limit for one request. Times are whole nanoseconds from the request's `now`,
/// rounded up so that a client that waits for them is never early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The bucket's size in units (the tier's burst).
    pub capacity: u64,
    /// Whole units that would be admitted after this decision. If any limit denies, nothing is
    /// charged and this is the value before the request.
    pub remaining: u64,
    /// On denial: the least wait after which this limit admits the same request if nothing else
    /// arrives. `None` when it admits, or when no wait helps. Slots do not return with time, so a
    /// concurrency limit reports the constant [`RETRY_NS`](super::slot_counters::RETRY_NS).
    pub retry_after_ns: Option<u64>,
    /// This limit denies the request.
    pub denied: bool,
    /// The cost exceeds the capacity, so no wait helps. Implies `denied`.
    pub never: bool,
    /// The least wait until `remaining` grows; 0 when it equals `capacity`, and for slots.
    pub next_unit_ns: u64,
    /// The least wait until the bucket is full; 0 when it is full, and for slots.
    pub reset_ns: u64,
    /// How long to hold the request before it is forwarded; 0 unless the charge allows a delay.
    pub delay_ns: u64,
    /// Which bucket was charged; pass it to [`Store::release`](super::Store::release).
    pub held: ChargeLocation,
}

/// Where an admitted request's units were charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChargeLocation {
    /// Nowhere: nothing was charged.
    #[default]
    Nowhere,
    /// In the bucket of the charge's own key.
    Own,
    /// In the overflow bucket that keys without a slot share.
    Overflow,
}

impl Standing {
    /// Status of a counting limit, with `used` units counted, for a request that is not charged.
    /// `wait_ns(n)` is the least wait until at most `n` units count, with `n` below `used`.
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
            held: ChargeLocation::Nowhere,
        }
    }

    /// Orders denials: never, then the longest `retry_after_ns`. `None` when this limit admits.
    pub(super) fn severity(&self) -> Option<u64> {
        // a wait of u64::MAX ns is 584 years, so it can share its value with "never"
        self.denied.then(|| self.retry_after_ns.unwrap_or(u64::MAX))
    }
}
