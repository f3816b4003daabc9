//! Token bucket (equally: GCRA) as one timestamp per key.
//!
//! The word of a key is its TAT, the theoretical arrival time: the moment at which its bucket will
//! be full again. T is the time in which one unit refills, B is the capacity:
//!
//! ```text
//!            now                    TAT                    now + B·T
//!  ───────────┼──────── debt ────────┼───── room ─────────────┼────────▶ time
//!                                    └─ cost·T ─▶ new TAT
//! ```
//!
//! A request fits when `debt + cost·T ≤ B·T`, and moves TAT to the right by `cost·T`. A TAT in the
//! past means a full bucket and carries no information; 0 is a key never seen. Bound: any interval
//! of length D admits at most `B + D/T` units.
//!
//! **Exactness.** `T = period/amount` need not be whole nanoseconds (7 per minute is 8 571 428
//! 571.43). A limit keeps its TATs in its own unit of time, 1/`scale` ns. The scale is the least
//! common multiple of the reduced denominators `amount / gcd(amount, period_ns)` of its tiers.
//! Every T is then an integer and nothing is rounded. If that multiple exceeds 64, the scale is 64
//! and T is rounded up to the next 1/64 ns. Rounding up is strict, by less than 1/64 ns per unit.
//! At the fastest rate (one per nanosecond) that is at most one unit in 64; at one per microsecond,
//! one in 64,000.
//!
//! **Overflow.** Time is process-relative, so `now · 64` fits 64 bits for 9 years, less the time
//! that the deepest bucket takes to fill ([`MAX_FILL`]). After that the
//! limit denies everything.
//!
//! **Delay.** With `max_delay` a request is admitted early and held until its turn; TAT moves as
//! usual. A token bucket passes its burst at once and holds the excess: it admits while
//! `debt + cost·T ≤ B·T + max_delay` and holds for the part above `B·T`. A leaky bucket is a queue
//! of B places, including the request in service. It holds a request for the whole debt, so
//! requests leave one T apart. It refuses when the queue is full or the turn is later than
//! `max_delay`. Without a delay the leaky bucket polices: it is the token bucket seen from the
//! other side (level = debt/T). A cancelled request moves TAT back. The next request is then held
//! for less, and may leave together with one that is already waiting.
//!
//! **A clock that steps back.** A TAT beyond the reach of the limit's deepest bucket cannot be
//! debt. The next request moves it to `now + B·T`, so the bucket bounds the wait and the step does
//! not. That happens only for steps of at least [`STEP_BACK_NS`]. Below that, the older `now` may
//! come from a thread that read the clock earlier, and moving the TAT would forgive debt. After a
//! smaller step TAT stays, and the limit is strict until the clock catches up.

use std::num::NonZeroU64;

use super::{
    ChargeLocation, Quota, QuotaError, Standing,
    overdraft::{Claimed, Overdraft},
    quota::MAX_FILL,
    word_request::{STEP_BACK_NS, WordRequest},
};

/// The finest unit of time is 1/64 ns.
const MAX_SCALE: NonZeroU64 = NonZeroU64::MIN.saturating_add(63);

/// The largest TAT: one less than `u64::MAX`, which the table reserves.
const MAX_TAT: u64 = u64::MAX - 1;

/// A limit's unit of time, as units per nanosecond: 1 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Scale(NonZeroU64);

impl Scale {
    fn of(quotas: &[Quota]) -> Scale {
        let common = quotas.iter().try_fold(NonZeroU64::MIN, |scale, quota| {
            let denominator = quota.amount.get() / gcd(quota.amount, quota.period_ns());
            let factor = denominator / gcd(scale, denominator);
            scale
                .checked_mul(NonZeroU64::new(factor)?)
                .filter(|&scale| scale <= MAX_SCALE)
        });
        Scale(common.unwrap_or(MAX_SCALE))
    }

    /// A moment in this unit; saturates.
    #[inline]
    fn units(self, now_ns: u64) -> u64 {
        now_ns.saturating_mul(self.0.get())
    }

    /// A span of this unit in whole nanoseconds, rounded up.
    #[inline]
    fn wait_ns(self, units: u64) -> u64 {
        if self.0 == NonZeroU64::MIN {
            return units; // saves a division in the common case
        }
        (units / self.0).saturating_add(u64::from(units % self.0 != 0))
    }

    /// Whether a bucket with this TAT is full.
    #[inline]
    pub(super) fn is_full(self, now_ns: u64, tat: u64) -> bool {
        tat <= self.units(now_ns)
    }
}

/// Greatest common divisor; nonzero because `a` is.
fn gcd(a: NonZeroU64, b: u64) -> NonZeroU64 {
    let (mut a, mut b) = (a, b);
    while let Some(divisor) = NonZeroU64::new(b) {
        (a, b) = (divisor, a.get() % divisor);
    }
    a
}

/// One tier's bucket, in the limit's unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TierBucket {
    /// T: time in which one unit refills.
    interval: NonZeroU64,
    /// B: capacity in units.
    burst: u64,
    /// B·T: time in which the empty bucket fills.
    fill: u64,
    /// Where requests are charged by estimates: capacity plus largest debt, in units (`reach`) and
    /// as time (`deepest`). Elsewhere `None` and `fill`.
    reach: Option<NonZeroU64>,
    deepest: u64,
}

impl TierBucket {
    fn new(quota: &Quota, scale: Scale, overdraft: Option<Overdraft>) -> Option<TierBucket> {
        let span = u128::from(quota.period_ns()).checked_mul(u128::from(scale.0.get()))?;
        let interval = u64::try_from(span.div_ceil(u128::from(quota.amount.get()))).ok()?;
        let burst = quota.burst.get();
        let fill = interval.checked_mul(burst)?;
        let (reach, deepest) = match overdraft {
            None => (None, fill),
            Some(overdraft) => {
                let longest = u64::try_from(MAX_FILL.as_nanos()).ok()?;
                let deepest = overdraft.reach(fill)?;
                if deepest > scale.units(longest) {
                    return None;
                }
                (NonZeroU64::new(overdraft.reach(burst)?), deepest)
            }
        };
        Some(TierBucket {
            interval: NonZeroU64::new(interval)?,
            burst,
            fill,
            reach,
            deepest,
        })
    }
}

/// How a delayed request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketKind {
    /// The burst passes at once; only the excess is held.
    Burst,
    /// Every request is held until its turn.
    Queue,
}

/// The buckets of one limit, one per tier. All use the same unit of time, so a key keeps its debt
/// when its tier changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Buckets {
    scale: Scale,
    shape: BucketKind,
    /// The largest B·T of the tiers, debt included.
    deepest: u64,
    /// A TAT further ahead than this means that the clock stepped back.
    credible: u64,
    /// The last `now` from which every new TAT is representable.
    last: u64,
    /// The default tier, stored inline so that the usual decision follows no pointer.
    default: TierBucket,
    others: Box<[TierBucket]>,
}

impl Buckets {
    /// One bucket per quota; the first is the default. With an `overdraft`, requests are charged by
    /// estimates.
    pub(super) fn new(
        shape: BucketKind,
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Result<Buckets, QuotaError> {
        quotas.iter().try_for_each(Quota::check)?;
        let scale = Scale::of(quotas);
        let bucket =
            |quota| TierBucket::new(quota, scale, overdraft).ok_or(QuotaError::FillTooLong);
        let (default, others) = quotas.split_first().ok_or(QuotaError::NoQuota)?;
        let default = bucket(default)?;
        let others = others
            .iter()
            .map(bucket)
            .collect::<Result<Box<[TierBucket]>, _>>()?;
        let deepest = others
            .iter()
            .fold(default.deepest, |deepest, tier| deepest.max(tier.deepest));
        let credible = deepest.saturating_add(scale.units(STEP_BACK_NS));
        let last = MAX_TAT.saturating_sub(deepest);
        Ok(Buckets {
            scale,
            shape,
            deepest,
            credible,
            last,
            default,
            others,
        })
    }

    pub(super) fn tiers(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    pub(super) fn scale(&self) -> Scale {
        self.scale
    }

    /// Whether a TAT of a tier of `before` means as many units of debt here, within the possible
    /// debt.
    pub(super) fn continues(&self, tier: usize, before: &Buckets, was: usize) -> bool {
        let (here, there) = (self.bucket(tier), before.bucket(was));
        self.scale == before.scale
            && here.interval == there.interval
            && here.burst >= there.burst
            && here.deepest >= there.deepest
    }

    /// How long the deepest bucket takes to refill.
    pub(super) fn recovery_ns(&self) -> u64 {
        self.scale.wait_ns(self.deepest)
    }

    /// Returns the word after a charge. On denial it is the unchanged word, corrected if the clock
    /// stepped back. A cost of 0 always fits and changes nothing.
    #[inline(always)]
    pub(super) fn charge(&self, ask: &WordRequest, tat: u64) -> Result<u64, u64> {
        let bucket = self.bucket(ask.tier);
        let now = self.scale.units(ask.now_ns);
        let span = bucket.interval.get().saturating_mul(ask.cost);
        // fast path: each step is one of the general case below
        let debt = tat.saturating_sub(now);
        let after = debt.saturating_add(span);
        let is_usual = ask.max_delay_ns == 0 && now <= self.last && debt <= self.credible;
        if is_usual && after <= bucket.fill && span > 0 {
            return Ok(now.saturating_add(after));
        }
        self.charge_unusual(&{ *ask }, tat)
    }

    /// Slow path: delayed or denied charges, zero costs, and clock steps.
    #[inline(never)]
    fn charge_unusual(&self, ask: &WordRequest, tat: u64) -> Result<u64, u64> {
        if ask.cost == 0 {
            return Ok(tat);
        }
        let bucket = self.bucket(ask.tier);
        let Some(claimed) = Claimed::new(ask.cost, bucket.burst, bucket.reach) else {
            return Err(tat);
        };
        let now = self.scale.units(ask.now_ns);
        let delay = self.scale.units(ask.max_delay_ns);
        let debt = self.debt(now, tat, delay);
        let with = |units| debt.saturating_add(bucket.interval.get().saturating_mul(units));
        let (needed, after) = (with(claimed.needs), with(claimed.takes));
        if self.excess(bucket, debt, needed, delay) == 0 && after <= MAX_TAT.saturating_sub(now) {
            return Ok(now.saturating_add(after));
        }
        let stepped_back = debt < tat.saturating_sub(now);
        Err(if stepped_back {
            now.saturating_add(debt).min(MAX_TAT)
        } else {
            tat
        })
    }

    /// The word after an unconditional charge. At worst the bucket is empty.
    pub(super) fn charge_anyway(&self, ask: &WordRequest, tat: u64) -> u64 {
        let bucket = self.bucket(ask.tier);
        let now = self.scale.units(ask.now_ns);
        let debt = self.debt(now, tat, self.scale.units(ask.max_delay_ns));
        let after = debt.saturating_add(bucket.interval.get().saturating_mul(ask.cost));
        if now > self.last || ask.cost == 0 {
            return tat;
        }
        now.saturating_add(after.min(bucket.fill).max(debt))
            .min(MAX_TAT)
    }

    /// The word after an unconditional charge that may go into debt, and the units beyond the debt
    /// bound, which are forgiven.
    pub(super) fn overdraw(&self, ask: &WordRequest, tat: u64) -> (u64, u64) {
        let bucket = self.bucket(ask.tier);
        let now = self.scale.units(ask.now_ns);
        let debt = self.debt(now, tat, 0);
        if now > self.last || ask.cost == 0 {
            return (tat, ask.cost);
        }
        let span = bucket.interval.get().saturating_mul(ask.cost);
        let after = debt.saturating_add(span).min(bucket.deepest).max(debt);
        let paid = after.saturating_sub(debt);
        // a partial unit beyond the bound counts as a whole one
        let forgiven = ask.cost.saturating_sub(paid / bucket.interval);
        (now.saturating_add(after).min(MAX_TAT), forgiven)
    }

    /// Units owed, rounded up.
    pub(super) fn owed(&self, ask: &WordRequest, tat: u64) -> u64 {
        let bucket = self.bucket(ask.tier);
        let debt = self.debt(self.scale.units(ask.now_ns), tat, 0);
        let most = bucket.reach.map_or(bucket.burst, NonZeroU64::get);
        debt.div_ceil(bucket.interval.get()).min(most)
    }

    /// The largest charge of one estimate.
    pub(super) fn largest_claim(&self, tier: usize) -> u64 {
        let bucket = self.bucket(tier);
        bucket.reach.map_or(bucket.burst, NonZeroU64::get)
    }

    /// The word after a refund. Exact if the bucket has been in debt ever since the charge; if it
    /// filled in between, the refund forgives part of a later charge.
    pub(super) fn refund(&self, ask: &WordRequest, tat: u64) -> u64 {
        let interval = self.bucket(ask.tier).interval.get();
        tat.saturating_sub(interval.saturating_mul(ask.cost))
    }

    /// Status of a bucket with this word for a request that was not charged.
    #[inline]
    pub(super) fn standing(&self, ask: &WordRequest, tat: u64) -> Standing {
        let bucket = self.bucket(ask.tier);
        let interval = bucket.interval.get();
        let delay = self.scale.units(ask.max_delay_ns);
        let debt = self.debt(self.scale.units(ask.now_ns), tat, delay);
        let claimed = Claimed::new(ask.cost, bucket.burst, bucket.reach);
        let needs = claimed.map_or(ask.cost, |claimed| claimed.needs);
        let after = debt.saturating_add(interval.saturating_mul(needs));
        let late = self.shape == BucketKind::Queue && delay > 0 && debt > delay;
        let room = match late {
            true => 0,
            false => bucket.fill.saturating_sub(debt),
        };
        let excess = self.excess(bucket, debt, after, delay);
        let never = claimed.is_none();
        let denied = ask.cost > 0 && (excess > 0 || never);
        let held = match self.shape {
            _ if denied || ask.cost == 0 || delay == 0 => 0,
            BucketKind::Burst => after.saturating_sub(bucket.fill),
            BucketKind::Queue => debt,
        };
        let next_unit = match debt.checked_sub(bucket.fill) {
            _ if debt == 0 => 0,
            _ if late => debt.saturating_sub(delay.min(bucket.fill.saturating_sub(interval))),
            Some(beyond) => beyond.saturating_add(interval),
            None => interval.saturating_sub(room % bucket.interval),
        };
        Standing {
            capacity: bucket.burst,
            remaining: room / bucket.interval,
            retry_after_ns: (denied && !never).then(|| self.scale.wait_ns(excess)),
            denied,
            never,
            next_unit_ns: self.scale.wait_ns(next_unit),
            reset_ns: self.scale.wait_ns(debt),
            delay_ns: self.scale.wait_ns(held),
            held: ChargeLocation::Nowhere,
        }
    }

    /// How long to hold the request whose charge has just produced this word.
    pub(super) fn delay_ns(&self, ask: &WordRequest, tat: u64) -> u64 {
        if ask.cost == 0 || ask.max_delay_ns == 0 {
            return 0;
        }
        let bucket = self.bucket(ask.tier);
        let after = tat.saturating_sub(self.scale.units(ask.now_ns));
        let held = match self.shape {
            BucketKind::Burst => after.saturating_sub(bucket.fill),
            BucketKind::Queue => {
                after.saturating_sub(bucket.interval.get().saturating_mul(ask.cost))
            }
        };
        self.scale.wait_ns(held)
    }

    /// How much too early a request comes that would move the debt to `after` and may wait for
    /// `delay`.
    #[inline]
    fn excess(&self, bucket: &TierBucket, debt: u64, after: u64, delay: u64) -> u64 {
        match self.shape {
            BucketKind::Burst => after.saturating_sub(bucket.fill.saturating_add(delay)),
            BucketKind::Queue => {
                let full = after.saturating_sub(bucket.fill);
                let late = debt.saturating_sub(delay);
                if delay == 0 { full } else { full.max(late) }
            }
        }
    }

    /// Time until the bucket is full. With a delay, debt may exceed the bucket by that delay.
    #[inline]
    fn debt(&self, now: u64, tat: u64, delay: u64) -> u64 {
        let debt = tat.saturating_sub(now);
        if debt > self.credible.saturating_add(delay) || now > self.last {
            self.deepest.saturating_add(delay)
        } else {
            debt
        }
    }

    /// A tier that does not exist is treated as the default tier.
    #[inline]
    fn bucket(&self, tier: usize) -> &TierBucket {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.default)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn quota(amount: u64, period_ns: u64, burst: u64) -> Quota {
        Quota::new(amount, Duration::from_nanos(period_ns), burst).unwrap()
    }

    fn ask(tier: usize, now_ns: u64, cost: u64) -> WordRequest {
        let (max_delay_ns, spread) = (0, 0);
        WordRequest {
            tier,
            now_ns,
            cost,
            max_delay_ns,
            spread,
        }
    }

    fn scale(rates: &[(u64, u64)]) -> u64 {
        let quotas: Vec<Quota> = rates
            .iter()
            .map(|&(amount, period_ns)| quota(amount, period_ns, 1))
            .collect();
        Scale::of(&quotas).0.get()
    }

    #[test]
    fn scale_is_the_least_that_makes_every_interval_whole() {
        assert_eq!(scale(&[(100, SECOND)]), 1);
        assert_eq!(scale(&[(7, 60 * SECOND)]), 7);
        assert_eq!(scale(&[(14, 60 * SECOND)]), 7);
        assert_eq!(scale(&[(60, 60 * SECOND), (7, SECOND), (9, SECOND)]), 63);
    }

    #[test]
    fn scale_stops_at_64_whatever_the_tiers() {
        assert_eq!(scale(&[(67, SECOND)]), 64);
        assert_eq!(scale(&[(7, SECOND), (11, SECOND)]), 64);
        assert_eq!(scale(&[(999_999_999, SECOND), (999_999_937, SECOND)]), 64);
    }

    #[test]
    fn rounded_interval_is_never_shorter_than_the_exact_one_and_by_less_than_a_unit_of_time_longer()
    {
        for amount in [67, 71, 1_000_003, 999_999_999] {
            let bucket = Buckets::new(BucketKind::Burst, &[quota(amount, SECOND, 1)], None)
                .unwrap()
                .default;
            let (given, exact) = (
                u128::from(bucket.interval.get()) * u128::from(amount),
                u128::from(SECOND) * 64,
            );
            assert!(
                given >= exact && given - exact < u128::from(amount),
                "{amount}/s"
            );
        }
    }

    #[test]
    fn every_quota_within_bounds_has_a_bucket() {
        let day = 86_400 * SECOND;
        for (amount, period_ns, burst) in [
            (1, day, 1_096),
            (71, 31 * day, 2_510),
            (67, SECOND, 6_344_524_800),
            (1_000_000_000, SECOND, u64::MAX >> 8),
        ] {
            assert!(
                Buckets::new(BucketKind::Burst, &[quota(amount, period_ns, burst)], None).is_ok(),
                "{amount} per {period_ns}"
            );
        }
    }

    #[test]
    fn quota_written_by_hand_is_checked() {
        let one = NonZeroU64::MIN;
        let hand = Quota {
            amount: one,
            period: Duration::ZERO,
            burst: one,
        };
        assert_eq!(
            Buckets::new(BucketKind::Burst, &[hand], None),
            Err(QuotaError::PeriodTooShort)
        );
        assert_eq!(
            Buckets::new(BucketKind::Burst, &[], None),
            Err(QuotaError::NoQuota)
        );
    }

    #[test]
    fn key_that_moves_to_a_smaller_tier_and_back_keeps_its_debt() {
        let tiers = Buckets::new(
            BucketKind::Burst,
            &[quota(1, SECOND, 500), quota(1, SECOND, 5)],
            None,
        )
        .unwrap();
        let tat = tiers.charge(&ask(0, SECOND, 500), 0).unwrap();
        assert_eq!(tiers.charge(&ask(1, SECOND, 1), tat), Err(tat));
        assert_eq!(
            tiers.standing(&ask(1, SECOND, 1), tat).retry_after_ns,
            Some(496 * SECOND)
        );
        assert_eq!(tiers.standing(&ask(0, SECOND, 1), tat).remaining, 0);
    }

    #[test]
    fn slower_thread_gives_no_debt_away() {
        let bucket =
            Buckets::new(BucketKind::Burst, &[quota(1_000_000, SECOND, 10)], None).unwrap();
        let tat = bucket.charge(&ask(0, 20 * SECOND, 10), 0).unwrap();
        for behind_ns in [1, SECOND, STEP_BACK_NS] {
            assert_eq!(
                bucket.charge(&ask(0, 20 * SECOND - behind_ns, 1), tat),
                Err(tat)
            );
        }
        let now = 20 * SECOND - STEP_BACK_NS - 1;
        assert_eq!(
            bucket.charge(&ask(0, now, 1), tat),
            Err(now + 10_000),
            "a real step back"
        );
    }

    #[test]
    fn at_the_end_of_time_everything_is_denied() {
        let bucket = Buckets::new(
            BucketKind::Burst,
            &[quota(7, 60 * SECOND, 3), quota(1, SECOND, 9)],
            None,
        )
        .unwrap();
        for now in [
            u64::MAX,
            u64::MAX - 1,
            u64::MAX / 7,
            u64::MAX / 7 - 20 * SECOND,
        ] {
            assert_eq!(bucket.charge(&ask(0, now, 1), 0), Err(0));
            let standing = bucket.standing(&ask(0, now, 1), 0);
            assert!(standing.denied && standing.remaining == 0 && !standing.never);
        }
        assert!(
            bucket
                .charge(&ask(0, u64::MAX / 7 - 26 * SECOND, 3), 0)
                .is_ok(),
            "the last moment that is representable"
        );
    }
}
