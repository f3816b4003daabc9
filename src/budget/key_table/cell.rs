//! One key's state: local tokens, a remembered refusal, and the fallback bucket.
//!
//! A cell is two cache lines of words. The first decides requests in normal operation: tokens of
//! two generations, each packed into one word with its deadline. Packing lets compare-and-swap
//! spend them, and a deadline never applies to other tokens. The second decides while Redis does
//! not answer: a bucket of this gateway's share, as one timestamp.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crate::budget::lease::{self, Forecast, LeaseAlgorithm, LeaseTerms, MAX_TOKENS, Pause};

/// Bits of a packed word for tokens; the rest is the deadline in ms.
const TOKEN_BITS: u32 = 26;
/// 8.7 years after the gateway's start.
const MAX_DEADLINE_MS: u64 = u64::MAX >> TOKEN_BITS;
const NS_PER_MS: u64 = 1_000_000;

/// The words of one cell; two cache lines. All zero means no tokens and no knowledge.
#[derive(Clone, Copy, Debug)]
pub(in crate::budget) struct KeyCell<'a>(pub(super) &'a [AtomicU64; WORDS]);

pub(super) const WORDS: usize = 16;

// 0 and 1: tokens and their deadline, by generation modulo 2
pub(super) const REFUSE_UNTIL_NS: usize = 2;
/// Requests refused from memory since the lease manager last looked.
pub(super) const REFUSED: usize = 3;
/// Low-water mark + 1; when tokens fall to it, request a refill. 0 disables.
const LOW: usize = 4;
/// Tokens left in the pool according to the last reply.
const POOL: usize = 5;
// 6, 7 and 15: the store's future content (see `Forecast`)
const TOLD_NS: usize = 6;
const END_NS: usize = 7;
/// Fallback GCRA bucket used while Redis is down: emission interval in ns, burst tolerance, TAT.
const ALONE_INTERVAL_NS: usize = 8;
const ALONE_REACH_NS: usize = 9;
const ALONE_UNTIL_NS: usize = 10;
/// Reference bucket: what the store would have granted this gateway. Admissions beyond it are a
/// debt.
const SHADOW_INTERVAL_NS: usize = 11;
const SHADOW_UNTIL_NS: usize = 12;
/// Admitted by the fallback bucket since the last reply.
const ALONE_ADMITTED: usize = 13;
/// The Redis server, the duration of the last call, and the least cost that a pause applies to;
/// packed as below.
const PACKED: usize = 14;
const FORECAST: usize = 15;

/// Bits of the packed word, lowest first: the shard, the call's µs, then the cost.
const SHARD_BITS: u32 = 12;
const DELAY_BITS: u32 = 22;

/// A cell's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) enum SpendOutcome {
    /// Tokens taken from each generation; whether to refill the cell now.
    Taken {
        tokens: lease::TokenPair,
        is_low: bool,
    },
    /// Remembered: nothing before then, as reported to clients.
    Refused { until_ns: u64 },
    /// Redis must be asked.
    Nothing,
}

/// The parameters of the fallback bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::budget) struct FallbackBucket {
    /// Tokens per ns for this gateway.
    pub(in crate::budget) rate: f64,
    /// The burst, at least 1.
    pub(in crate::budget) capacity: f64,
    /// Tokens available now.
    pub(in crate::budget) level: f64,
    /// This gateway's share of the store's grants per ns, and of its deficit.
    pub(in crate::budget) shadow_rate: f64,
    pub(in crate::budget) shadow_missing: f64,
}

impl KeyCell<'_> {
    /// Takes tokens, or returns why not.
    pub(in crate::budget) fn spend(
        &self,
        now_ns: u64,
        cost: u64,
        terms: &LeaseTerms,
    ) -> SpendOutcome {
        let now_ms = now_ns / NS_PER_MS;
        let held = loop {
            let words = [self.0[0].load(Acquire), self.0[1].load(Acquire)];
            let [even, odd] = words.map(|word| good(word, now_ms));
            let held = even + odd;
            if held < cost {
                break held;
            }
            // older first, because it expires first
            let first = usize::from(deadline_ms(words[1]) < deadline_ms(words[0]));
            let order = if even == 0 || odd == 0 {
                usize::from(even == 0)
            } else {
                first
            };
            let from_first = cost.min(if order == 0 { even } else { odd });
            if !self.take(order, words[order], from_first) {
                continue;
            }
            let from_second = cost - from_first;
            if from_second > 0 && !self.take(1 - order, words[1 - order], from_second) {
                self.put_back_slot(order, deadline_ms(words[order]), from_first);
                continue;
            }
            let mut tokens = [0, 0];
            tokens[order] = from_first;
            tokens[1 - order] = from_second;
            let is_low = self.is_low(held - cost);
            return SpendOutcome::Taken { tokens, is_low };
        };
        let pause_ns = self.0[REFUSE_UNTIL_NS].load(Acquire);
        let is_paused = now_ns < pause_ns && cost >= self.paused_from();
        let forecast = self.forecast();
        // local tokens go back with the call and then count for the request
        let is_early = || now_ns < forecast.not_before_ns(terms, cost.saturating_sub(held));
        // a window with leases may receive returned tokens at any time
        let is_told = !terms.ahead || terms.algorithm == LeaseAlgorithm::Bucket;
        if is_paused || is_told && is_early() {
            SpendOutcome::Refused {
                until_ns: self.fits_ns(now_ns, cost, terms),
            }
        } else {
            SpendOutcome::Nothing
        }
    }

    /// When a request of this cost that is refused now may be admitted, as reported to clients:
    /// always later than now.
    pub(in crate::budget) fn fits_ns(&self, now_ns: u64, cost: u64, terms: &LeaseTerms) -> u64 {
        let (held, _) = self.held(now_ns);
        let missing = cost.saturating_sub(held.iter().sum());
        let fits_ns = self.forecast().fits_ns(terms, missing);
        let pause_ns = self.0[REFUSE_UNTIL_NS].load(Acquire);
        let pause_ns = if cost >= self.paused_from() {
            pause_ns
        } else {
            0
        };
        fits_ns.max(pause_ns).max(now_ns.saturating_add(1))
    }

    /// Counts a request that was refused from memory: it is still demand.
    pub(in crate::budget) fn count_refused(&self, cost: u64) {
        self.0[REFUSED].fetch_add(cost, Relaxed);
    }

    /// Returns tokens that [`KeyCell::spend`] took at `now_ns`; expired ones are lost.
    pub(in crate::budget) fn put_back(&self, tokens: lease::TokenPair) {
        for (slot, tokens) in tokens.into_iter().enumerate() {
            if tokens > 0 {
                let deadline = deadline_ms(self.0[slot].load(Acquire));
                self.put_back_slot(slot, deadline, tokens);
            }
        }
    }

    /// Adds tokens valid until `deadline_ns`; they replace older ones of the slot.
    pub(in crate::budget) fn bank(&self, slot: usize, deadline_ns: u64, tokens: u64) {
        let deadline = (deadline_ns / NS_PER_MS).min(MAX_DEADLINE_MS);
        let mut word = self.0[slot].load(Acquire);
        loop {
            // deadlines of one generation differ by travel times: the earliest applies to all
            let (held, until) = match deadline_ms(word) {
                0 => (0, deadline),
                known => (word & MAX_TOKENS, known.min(deadline)),
            };
            let next = pack(held.saturating_add(tokens).min(MAX_TOKENS), until);
            match self.0[slot].compare_exchange_weak(word, next, AcqRel, Acquire) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Empties a slot whose tokens have expired or go back.
    pub(in crate::budget) fn empty(&self, slot: usize) -> u64 {
        self.0[slot].swap(0, AcqRel) & MAX_TOKENS
    }

    /// Takes up to `most` tokens of each slot to return them to the store.
    pub(in crate::budget) fn withdraw(&self, most: lease::TokenPair) -> lease::TokenPair {
        let mut taken = [0, 0];
        for (slot, most) in most.into_iter().enumerate() {
            let mut word = self.0[slot].load(Acquire);
            loop {
                let tokens = (word & MAX_TOKENS).min(most);
                match self.0[slot].compare_exchange_weak(word, word - tokens, AcqRel, Acquire) {
                    Ok(_) => {
                        taken[slot] = tokens;
                        break;
                    }
                    Err(now) => word = now,
                }
            }
        }
        taken
    }

    /// Tokens by slot, and which slots hold expired ones.
    pub(in crate::budget) fn held(&self, now_ns: u64) -> (lease::TokenPair, [bool; 2]) {
        let now_ms = now_ns / NS_PER_MS;
        let words = [self.0[0].load(Acquire), self.0[1].load(Acquire)];
        let lapsed = words.map(|word| word != 0 && deadline_ms(word) <= now_ms);
        (words.map(|word| good(word, now_ms)), lapsed)
    }

    /// Requests refused from memory since the last call.
    pub(in crate::budget) fn take_refused(&self) -> u64 {
        self.0[REFUSED].swap(0, Relaxed)
    }

    /// Sets the low-water mark: the next request that leaves at most this many tokens asks for
    /// more, once.
    pub(in crate::budget) fn set_low(&self, mark: Option<u64>) {
        self.0[LOW].store(mark.map_or(0, |mark| mark + 1), Relaxed);
    }

    /// Lease manager only: stores a reply. `pool` is what is left.
    pub(in crate::budget) fn know(&self, pool: u64, forecast: &Forecast, pause: Option<Pause>) {
        self.0[POOL].store(pool, Relaxed);
        self.0[TOLD_NS].store(forecast.told_ns, Relaxed);
        self.0[END_NS].store(forecast.end_ns, Relaxed);
        self.0[FORECAST].store(forecast.state, Relaxed);
        let least = pause.map_or(0, |pause| pause.least);
        let delay_us = (forecast.delay_ns / 1000).min(u64::MAX >> (u64::BITS - DELAY_BITS));
        let least = least.min(u64::MAX >> (SHARD_BITS + DELAY_BITS));
        let packed = (least << DELAY_BITS | delay_us) << SHARD_BITS | self.shard() as u64;
        self.0[PACKED].store(packed, Relaxed);
        let until_ns = pause.map_or(0, |pause| pause.until_ns);
        self.0[REFUSE_UNTIL_NS].store(until_ns, Release);
    }

    /// The store's future content.
    pub(in crate::budget) fn forecast(&self) -> Forecast {
        let [told_ns, end_ns, state, packed] =
            [TOLD_NS, END_NS, FORECAST, PACKED].map(|word| self.0[word].load(Relaxed));
        let delay_us = packed >> SHARD_BITS & (u64::MAX >> (u64::BITS - DELAY_BITS));
        Forecast {
            told_ns,
            delay_ns: delay_us * 1000,
            end_ns,
            state,
        }
    }

    /// The least cost that the pause applies to.
    fn paused_from(&self) -> u64 {
        self.0[PACKED].load(Relaxed) >> (SHARD_BITS + DELAY_BITS)
    }

    /// Tokens left in the pool according to the last reply.
    pub(in crate::budget) fn pool(&self) -> u64 {
        self.0[POOL].load(Relaxed)
    }

    pub(in crate::budget) fn shard(&self) -> usize {
        (self.0[PACKED].load(Relaxed) & (u64::MAX >> (u64::BITS - SHARD_BITS))) as usize
    }

    /// Lease manager only.
    pub(in crate::budget) fn set_shard(&self, shard: usize) {
        let others = self.0[PACKED].load(Relaxed) >> SHARD_BITS << SHARD_BITS;
        self.0[PACKED].store(others | shard as u64, Relaxed);
    }

    /// Sets up the fallback bucket.
    pub(in crate::budget) fn prepare_alone(&self, now_ns: u64, alone: &FallbackBucket) {
        // rounded up, so the share is never exceeded
        let interval = (1.0 / alone.rate).ceil().clamp(1.0, 1e18);
        let missing = (alone.capacity - alone.level).max(0.0);
        self.0[ALONE_INTERVAL_NS].store(interval as u64, Relaxed);
        self.0[ALONE_REACH_NS].store((alone.capacity * interval).min(1e18) as u64, Relaxed);
        self.0[ALONE_UNTIL_NS].store(now_ns.saturating_add((missing * interval) as u64), Relaxed);
        let interval = (1.0 / alone.shadow_rate).clamp(1.0, 1e18);
        self.0[SHADOW_INTERVAL_NS].store(interval as u64, Relaxed);
        let missing = (alone.shadow_missing.max(0.0) * interval) as u64;
        self.0[SHADOW_UNTIL_NS].store(now_ns.saturating_add(missing), Relaxed);
        self.0[ALONE_ADMITTED].store(0, Release);
    }

    /// Decides without the store: admits, or returns the wait until it would.
    pub(in crate::budget) fn spend_alone(&self, now_ns: u64, cost: u64) -> Result<(), u64> {
        let interval = self.0[ALONE_INTERVAL_NS].load(Relaxed);
        let reach = self.0[ALONE_REACH_NS].load(Relaxed);
        if interval == 0 {
            // not set up: a moment ago the cell was another key's
            return Err(1);
        }
        let price = interval.saturating_mul(cost);
        let mut until = self.0[ALONE_UNTIL_NS].load(Acquire);
        loop {
            let next = until.max(now_ns).saturating_add(price);
            let ahead = next - now_ns;
            if ahead > reach {
                return Err(ahead - reach);
            }
            match self.0[ALONE_UNTIL_NS].compare_exchange_weak(until, next, AcqRel, Acquire) {
                Ok(_) => break,
                Err(now) => until = now,
            }
        }
        self.0[ALONE_ADMITTED].fetch_add(cost, Relaxed);
        let price = self.0[SHADOW_INTERVAL_NS]
            .load(Relaxed)
            .saturating_mul(cost);
        let charge = |until: u64| Some(until.max(now_ns).saturating_add(price));
        // the update always returns a value
        let _ = self.0[SHADOW_UNTIL_NS].fetch_update(AcqRel, Acquire, charge);
        Ok(())
    }

    /// Takes up to `most` tokens; whether to refill the cell now.
    pub(in crate::budget) fn spend_part(
        &self,
        now_ns: u64,
        most: u64,
        terms: &LeaseTerms,
    ) -> SpendOutcome {
        let (held, _) = self.held(now_ns);
        let part = most.min(held.iter().sum());
        match part {
            0 => SpendOutcome::Nothing,
            part => self.spend(now_ns, part, terms),
        }
    }

    /// Lowers what is known of the store by units that are about to be charged, until its next
    /// reply.
    pub(in crate::budget) fn expect(&self, now_ns: u64, units: u64, terms: &LeaseTerms) {
        let lower = |state: u64| Some(self.forecast().less(state, now_ns, units, terms));
        // the update always returns a value
        let _ = self.0[FORECAST].fetch_update(AcqRel, Acquire, lower);
        let _ = self.0[POOL].fetch_update(AcqRel, Acquire, |pool| Some(pool.saturating_sub(units)));
    }

    /// Charges the fallback bucket for a past event, as far as it has units.
    pub(in crate::budget) fn charge_alone(&self, now_ns: u64, units: u64) {
        let part = units.min(self.left_alone(now_ns));
        // a concurrent request may have taken them
        let _ = self.spend_alone(now_ns, part);
    }

    /// Returns what the fallback bucket charged, because another limit refuses the request.
    pub(in crate::budget) fn refund_alone(&self, cost: u64) {
        let pairs = [
            (&self.0[ALONE_UNTIL_NS], &self.0[ALONE_INTERVAL_NS]),
            (&self.0[SHADOW_UNTIL_NS], &self.0[SHADOW_INTERVAL_NS]),
        ];
        for (until, interval) in pairs {
            let price = interval.load(Relaxed).saturating_mul(cost);
            let refund = |until: u64| Some(until.saturating_sub(price));
            let _ = until.fetch_update(AcqRel, Acquire, refund);
        }
        let _ = self.0[ALONE_ADMITTED]
            .fetch_update(AcqRel, Acquire, |count| Some(count.saturating_sub(cost)));
    }

    /// Whole tokens in the fallback bucket.
    pub(in crate::budget) fn left_alone(&self, now_ns: u64) -> u64 {
        let ahead = self.0[ALONE_UNTIL_NS].load(Relaxed).saturating_sub(now_ns);
        let room = self.0[ALONE_REACH_NS].load(Relaxed).saturating_sub(ahead);
        room.checked_div(self.0[ALONE_INTERVAL_NS].load(Relaxed))
            .unwrap_or(0)
    }

    /// The time until the fallback bucket has units for a request; 0 if it has them.
    pub(in crate::budget) fn wait_alone_ns(&self, now_ns: u64, cost: u64) -> u64 {
        let interval = self.0[ALONE_INTERVAL_NS].load(Relaxed);
        let reach = self.0[ALONE_REACH_NS].load(Relaxed);
        if interval == 0 {
            // not set up: a moment ago the cell was another key's
            return 1;
        }
        let until = self.0[ALONE_UNTIL_NS].load(Relaxed).max(now_ns);
        let next = until.saturating_add(interval.saturating_mul(cost));
        next.saturating_sub(now_ns).saturating_sub(reach)
    }

    /// Tokens admitted by the fallback bucket, and the deficit of the reference bucket.
    pub(in crate::budget) fn alone(&self, now_ns: u64) -> (u64, f64) {
        let ahead = self.0[SHADOW_UNTIL_NS].load(Acquire).saturating_sub(now_ns);
        let interval = self.0[SHADOW_INTERVAL_NS].load(Relaxed).max(1);
        let admitted = self.0[ALONE_ADMITTED].load(Acquire);
        (admitted, ahead as f64 / interval as f64)
    }

    /// Fallback debt was reported to Redis; reset the reference bucket to Redis's own deficit.
    pub(in crate::budget) fn settled_alone(&self, now_ns: u64, missing: f64) {
        let interval = self.0[SHADOW_INTERVAL_NS].load(Relaxed) as f64;
        let until = now_ns.saturating_add((missing.max(0.0) * interval) as u64);
        self.0[SHADOW_UNTIL_NS].store(until, Relaxed);
        self.0[ALONE_ADMITTED].store(0, Release);
    }

    /// Clears the cell.
    pub(super) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Release));
    }

    fn take(&self, slot: usize, word: u64, tokens: u64) -> bool {
        self.0[slot]
            .compare_exchange(word, word - tokens, AcqRel, Acquire)
            .is_ok()
    }

    fn put_back_slot(&self, slot: usize, deadline: u64, tokens: u64) {
        let mut word = self.0[slot].load(Acquire);
        while deadline != 0 && deadline_ms(word) == deadline {
            let next = pack(((word & MAX_TOKENS) + tokens).min(MAX_TOKENS), deadline);
            match self.0[slot].compare_exchange_weak(word, next, AcqRel, Acquire) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Whether this request is the one that asks for more.
    fn is_low(&self, left: u64) -> bool {
        let mark = self.0[LOW].load(Relaxed);
        left < mark && self.0[LOW].swap(0, AcqRel) != 0
    }
}

fn pack(tokens: u64, deadline_ms: u64) -> u64 {
    deadline_ms << TOKEN_BITS | tokens
}

fn deadline_ms(word: u64) -> u64 {
    word >> TOKEN_BITS
}

/// Unexpired tokens of a word.
fn good(word: u64, now_ms: u64) -> u64 {
    if deadline_ms(word) > now_ms {
        word & MAX_TOKENS
    } else {
        0
    }
}

#[cfg(test)]
mod tests;
