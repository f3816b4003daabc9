//! What this gateway holds of each key: tokens in hand, a remembered refusal, and what it may do alone. Read by every worker
//! without a lock; set up and taken down by the keeper alone.
//!
//! A hand is two cache lines of words. The first decides a request while all is well: tokens of two generations, each packed
//! with its deadline into one word, so that they are spent by compare-and-swap and a deadline never belongs to other tokens.
//! The second decides while Redis does not answer: a bucket of this gateway's share, as one timestamp.
//!
//! **Finding.** Keys are keyed hashes. A key may live in two groups of eight; their tags lie in one cache line each. The
//! keeper is the only one to write a tag. A worker that spent from a hand looks at its tag again: where it has changed, the
//! hand was given to another key meanwhile, and the tokens go back. A quota has a guaranteed part of the hands, and none can take
//! them all ([`SharedCapacity`]). Keys that find no room share the overflow hand of their quota: strict, since together they get what
//! one key would.

use std::{
    alloc::{Layout, handle_alloc_error},
    sync::atomic::{
        AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use zerocopy::FromZeros;

use super::lease::{self, Algorithm, Forecast, MAX_TOKENS, Pause, Terms};
use crate::limit::{
    Key,
    share::{Occupancy, SharedCapacity},
};

mod slots;

pub use slots::Lent;
pub(super) use slots::{NoSlot, Slots};

/// Tags in a group: a cache line.
const WAYS: usize = 8;
/// Bits of a packed word that hold tokens; the rest is the deadline in ms.
const TOKEN_BITS: u32 = 26;
/// 8.7 years after the gateway's start.
const MAX_DEADLINE_MS: u64 = u64::MAX >> TOKEN_BITS;
const NS_PER_MS: u64 = 1_000_000;

/// Which key a hand belongs to, and where it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tag {
    /// Never 0.
    pub(super) tag: u64,
    place: u64,
}

impl Tag {
    /// No key's.
    pub(super) const NONE: Tag = Tag { tag: 0, place: 0 };

    /// The hand of a key under one of its limit's quotas: tiers borrow apart, as the store judges each by its own terms.
    pub(super) fn new(key: Key, tier: usize) -> Tag {
        let low = key.0 as u64;
        let tier = (tier as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Tag {
            tag: (low ^ tier).max(1),
            place: (key.0 >> 64) as u64 ^ tier,
        }
    }
}

/// The words of one hand; two cache lines. All zero is a hand that holds nothing and knows nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hand<'a>(&'a [AtomicU64; WORDS]);

const WORDS: usize = 16;

// 0 and 1: tokens and their deadline, by generation modulo 2
const REFUSE_UNTIL_NS: usize = 2;
/// Requests refused by memory since the keeper last looked.
const REFUSED: usize = 3;
/// Asks to be filled up when so many tokens less one are left; 0 does not.
const LOW: usize = 4;
/// What was left in the pool, when it was last told.
const POOL: usize = 5;
// 6, 7 and 15: what the store will have (see `Forecast`)
const TOLD_NS: usize = 6;
const END_NS: usize = 7;
/// Alone: ns per token, how far ahead of time the timestamp may be, and the timestamp.
const ALONE_INTERVAL_NS: usize = 8;
const ALONE_REACH_NS: usize = 9;
const ALONE_UNTIL_NS: usize = 10;
/// The same for what the store would have granted to this gateway: what it admitted alone beyond that is a debt.
const SHADOW_INTERVAL_NS: usize = 11;
const SHADOW_UNTIL_NS: usize = 12;
/// Admitted alone since the last reply.
const ALONE_ADMITTED: usize = 13;
/// Which Redis keeps it, how long the last call took, and the least cost that a pause is for: see the bits below.
const PACKED: usize = 14;
const FORECAST: usize = 15;

/// Bits of the packed word, from the lowest: the shard, the µs of the call, the rest is the cost.
const SHARD_BITS: u32 = 12;
const DELAY_BITS: u32 = 22;

/// What a hand says to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spent {
    /// Tokens taken from each generation; whether the hand should be filled up now.
    Taken { tokens: lease::Hand, is_low: bool },
    /// Remembered: nothing before then, as clients are told.
    Refused { until_ns: u64 },
    /// The store has to be asked.
    Nothing,
}

/// What a bucket that is kept alone may do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Alone {
    /// Tokens per ns here.
    pub(super) rate: f64,
    /// The most at once, at least 1.
    pub(super) capacity: f64,
    /// Tokens there are now.
    pub(super) level: f64,
    /// This gateway's part of what the store would grant, per ns, and of what it lacks.
    pub(super) shadow_rate: f64,
    pub(super) shadow_missing: f64,
}

impl Hand<'_> {
    /// Takes tokens, or says why not.
    pub(super) fn spend(&self, now_ns: u64, cost: u64, terms: &Terms) -> Spent {
        let now_ms = now_ns / NS_PER_MS;
        let held = loop {
            let words = [self.0[0].load(Acquire), self.0[1].load(Acquire)];
            let [even, odd] = words.map(|word| good(word, now_ms));
            let held = even + odd;
            if held < cost {
                break held;
            }
            // older first: it lapses first
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
            return Spent::Taken { tokens, is_low };
        };
        let pause_ns = self.0[REFUSE_UNTIL_NS].load(Acquire);
        let is_paused = now_ns < pause_ns && cost >= self.paused_from();
        let forecast = self.forecast();
        // what is in hand goes back with the call, and counts for the request then
        let is_early = || now_ns < forecast.not_before_ns(terms, cost.saturating_sub(held));
        // into a window that gateways borrow from, others may hand something back at any time
        let is_told = !terms.ahead || terms.algorithm == Algorithm::Bucket;
        if is_paused || is_told && is_early() {
            Spent::Refused {
                until_ns: self.fits_ns(now_ns, cost, terms),
            }
        } else {
            Spent::Nothing
        }
    }

    /// When a request of this cost that is refused now may be admitted, as clients are told: always later than now.
    pub(super) fn fits_ns(&self, now_ns: u64, cost: u64, terms: &Terms) -> u64 {
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

    /// Counts a request that was refused by memory: it is demand all the same.
    pub(super) fn count_refused(&self, cost: u64) {
        self.0[REFUSED].fetch_add(cost, Relaxed);
    }

    /// Gives tokens back that [`Hand::spend`] took at `now_ns`; those whose deadline has passed are lost.
    pub(super) fn put_back(&self, tokens: lease::Hand) {
        for (slot, tokens) in tokens.into_iter().enumerate() {
            if tokens > 0 {
                let deadline = deadline_ms(self.0[slot].load(Acquire));
                self.put_back_slot(slot, deadline, tokens);
            }
        }
    }

    /// Puts tokens into the hand that are good until `deadline_ns`, in place of older ones of the slot.
    pub(super) fn bank(&self, slot: usize, deadline_ns: u64, tokens: u64) {
        let deadline = (deadline_ns / NS_PER_MS).min(MAX_DEADLINE_MS);
        let mut word = self.0[slot].load(Acquire);
        loop {
            // of one generation, the deadlines of several calls differ by their travelling times: the earliest holds for all
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

    /// Empties a slot: its tokens have lapsed, or go back.
    pub(super) fn empty(&self, slot: usize) -> u64 {
        self.0[slot].swap(0, AcqRel) & MAX_TOKENS
    }

    /// Takes up to so many tokens of each slot, to give them back to the store.
    pub(super) fn withdraw(&self, most: lease::Hand) -> lease::Hand {
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

    /// Tokens by slot, and which slots hold some whose deadline has passed.
    pub(super) fn held(&self, now_ns: u64) -> (lease::Hand, [bool; 2]) {
        let now_ms = now_ns / NS_PER_MS;
        let words = [self.0[0].load(Acquire), self.0[1].load(Acquire)];
        let lapsed = words.map(|word| word != 0 && deadline_ms(word) <= now_ms);
        (words.map(|word| good(word, now_ms)), lapsed)
    }

    /// Requests refused by memory since the last time.
    pub(super) fn take_refused(&self) -> u64 {
        self.0[REFUSED].swap(0, Relaxed)
    }

    /// From so many tokens down, the next request that spends asks for more, once.
    pub(super) fn set_low(&self, mark: Option<u64>) {
        self.0[LOW].store(mark.map_or(0, |mark| mark + 1), Relaxed);
    }

    /// The keeper's: what a reply tells. `pool` is what is left.
    pub(super) fn know(&self, pool: u64, forecast: &Forecast, pause: Option<Pause>) {
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

    /// What the store will have, and when.
    pub(super) fn forecast(&self) -> Forecast {
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

    /// The least cost that a pause is for.
    fn paused_from(&self) -> u64 {
        self.0[PACKED].load(Relaxed) >> (SHARD_BITS + DELAY_BITS)
    }

    /// What was left in the pool, when it was told.
    pub(super) fn pool(&self) -> u64 {
        self.0[POOL].load(Relaxed)
    }

    pub(super) fn shard(&self) -> usize {
        (self.0[PACKED].load(Relaxed) & (u64::MAX >> (u64::BITS - SHARD_BITS))) as usize
    }

    /// The keeper's.
    pub(super) fn set_shard(&self, shard: usize) {
        let others = self.0[PACKED].load(Relaxed) >> SHARD_BITS << SHARD_BITS;
        self.0[PACKED].store(others | shard as u64, Relaxed);
    }

    /// Prepares for a time without the store: what may be spent then.
    pub(super) fn prepare_alone(&self, now_ns: u64, alone: &Alone) {
        // rounded up: never more than the share
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

    /// Decides without the store: admitted, or the wait until it would be.
    pub(super) fn spend_alone(&self, now_ns: u64, cost: u64) -> Result<(), u64> {
        let interval = self.0[ALONE_INTERVAL_NS].load(Relaxed);
        let reach = self.0[ALONE_REACH_NS].load(Relaxed);
        if interval == 0 {
            // nobody has prepared it: it was another key's a moment ago
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
        // the update always has a value
        let _ = self.0[SHADOW_UNTIL_NS].fetch_update(AcqRel, Acquire, charge);
        Ok(())
    }

    /// Gives back what was spent alone: another limit refuses the request.
    pub(super) fn refund_alone(&self, cost: u64) {
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

    /// Whole tokens that could be spent alone now.
    pub(super) fn left_alone(&self, now_ns: u64) -> u64 {
        let ahead = self.0[ALONE_UNTIL_NS].load(Relaxed).saturating_sub(now_ns);
        let room = self.0[ALONE_REACH_NS].load(Relaxed).saturating_sub(ahead);
        room.checked_div(self.0[ALONE_INTERVAL_NS].load(Relaxed))
            .unwrap_or(0)
    }

    /// How many tokens were admitted alone, and how many the shadow lacks now.
    pub(super) fn alone(&self, now_ns: u64) -> (u64, f64) {
        let ahead = self.0[SHADOW_UNTIL_NS].load(Acquire).saturating_sub(now_ns);
        let interval = self.0[SHADOW_INTERVAL_NS].load(Relaxed).max(1);
        let admitted = self.0[ALONE_ADMITTED].load(Acquire);
        (admitted, ahead as f64 / interval as f64)
    }

    /// What was admitted alone is known to be owed: the shadow now lacks only what the store would have, too.
    pub(super) fn settled_alone(&self, now_ns: u64, missing: f64) {
        let interval = self.0[SHADOW_INTERVAL_NS].load(Relaxed) as f64;
        let until = now_ns.saturating_add((missing.max(0.0) * interval) as u64);
        self.0[SHADOW_UNTIL_NS].store(until, Relaxed);
        self.0[ALONE_ADMITTED].store(0, Release);
    }

    /// Forgets everything.
    fn clear(&self) {
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

/// Tokens of a word that are still good.
fn good(word: u64, now_ms: u64) -> u64 {
    if deadline_ms(word) > now_ms {
        word & MAX_TOKENS
    } else {
        0
    }
}

/// All hands of a process.
#[derive(Debug)]
pub(super) struct Hands {
    tags: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
    /// Words before the first hand, so that hands begin with a cache line.
    skip: usize,
    groups: u64,
    /// Where the overflow hands begin, one for each quota of each limit.
    overflow: usize,
    /// How quotas divide the hands, and what each holds.
    capacity: SharedCapacity,
    occupied: Box<[Occupancy]>,
}

impl Hands {
    /// Room for about `max_keys` keys of one quota and half as many in guaranteed parts of all, and `overflow` hands that are
    /// always there, one for each quota. Address space only, until it is touched.
    pub(super) fn new(max_keys: usize, overflow: usize) -> Hands {
        let slots = max_keys.saturating_mul(2);
        let occupied: Box<[Occupancy]> = std::iter::repeat_with(Occupancy::default)
            .take(overflow)
            .collect();
        occupied.iter().for_each(|quota| quota.set_running(true));
        let capacity = SharedCapacity::for_keys(max_keys);
        capacity.divide(occupied.iter());
        let groups = slots.div_ceil(WAYS).max(1);
        let words = zeroed((groups * WAYS + overflow + 1) * WORDS);
        Hands {
            tags: zeroed(groups * WAYS),
            skip: words.as_ptr().align_offset(64).min(WORDS),
            words,
            groups: groups as u64,
            overflow: groups * WAYS,
            capacity,
            occupied,
        }
    }

    /// The place of a key's hand; `None` where it has none.
    pub(super) fn find(&self, tag: Tag) -> Option<usize> {
        self.choices(tag)
            .into_iter()
            .flatten()
            .find(|&place| self.tags[place].load(Acquire) == tag.tag)
    }

    /// The hand at a place that this table gave out.
    pub(super) fn hand(&self, place: usize) -> Hand<'_> {
        let (hands, _) = self.words[self.skip..].as_chunks();
        Hand(&hands[place])
    }

    /// The same of a limit on requests in flight.
    pub(super) fn slots(&self, place: usize) -> Slots<'_> {
        Slots(self.hand(place).0)
    }

    /// Whether a place is (still) this key's. Overflow hands are everybody's.
    pub(super) fn is(&self, place: usize, tag: Tag) -> bool {
        self.tags
            .get(place)
            .is_none_or(|word| word.load(Acquire) == tag.tag)
    }

    /// Whether the hand at a place is one key's, and not an overflow hand.
    pub(super) fn has_key(&self, place: usize) -> bool {
        place < self.overflow
    }

    /// The place of an overflow hand.
    pub(super) fn overflow(&self, index: usize) -> usize {
        self.overflow + index
    }

    /// The keeper's: gives a key of a quota a hand, its own or a free one in the emptier of its groups; `None` when there is no
    /// room.
    pub(super) fn claim(&self, tag: Tag, quota: usize) -> Option<usize> {
        if let Some(own) = self.find(tag) {
            return Some(own);
        }
        let holder = self.occupied.get(quota)?;
        if !self.capacity.may_grow(holder, 1) {
            return None;
        }
        let is_free = |place: &usize| self.tags[*place].load(Acquire) == 0;
        let [first, second] = self.choices(tag);
        let free = |group: &std::ops::Range<usize>| group.clone().filter(is_free).count();
        let mut emptier = match free(&first) < free(&second) {
            true => second,
            false => first,
        };
        let place = emptier.find(is_free)?;
        self.capacity.grow(holder, 1);
        self.hand(place).clear();
        self.tags[place].store(tag.tag, Release);
        Some(place)
    }

    /// The keeper's: takes a hand away from its key.
    pub(super) fn release(&self, place: usize, quota: usize) {
        if let Some(tag) = self.tags.get(place) {
            tag.store(0, Release);
            self.hand(place).clear();
            if let Some(holder) = self.occupied.get(quota) {
                self.capacity.shrink(holder, 1);
            }
        }
    }

    fn choices(&self, tag: Tag) -> [std::ops::Range<usize>; 2] {
        let spread = tag.place.wrapping_mul(0xD6E8_FEB8_6659_FD93);
        let group = |hash: u64| {
            let start = ((u128::from(hash) * u128::from(self.groups)) >> 64) as usize * WAYS;
            start..start + WAYS
        };
        [group(tag.place), group(spread)]
    }
}

fn zeroed(length: usize) -> Box<[AtomicU64]> {
    FromZeros::new_box_zeroed_with_elems(length).unwrap_or_else(|_| {
        handle_alloc_error(Layout::array::<AtomicU64>(length).unwrap_or(Layout::new::<u64>()))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn hands() -> Hands {
        Hands::new(64, 1)
    }

    /// Ten, one a second.
    fn spend(hand: Hand<'_>, now_ns: u64, cost: u64) -> Spent {
        let terms = Terms::new(Algorithm::Bucket, 10, Duration::from_secs(10), 10, true);
        hand.spend(now_ns, cost, &terms)
    }

    fn tag(key: u128) -> Tag {
        Tag::new(Key(key << 64 | key), 0)
    }

    #[test]
    fn older_tokens_are_spent_first_and_none_after_its_deadline() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        hand.bank(0, 20 * SECOND, 2);
        hand.bank(1, 10 * SECOND, 2);
        let taken = |spent| match spent {
            Spent::Taken { tokens, .. } => tokens,
            other => panic!("{other:?}"),
        };
        assert_eq!(taken(spend(hand, SECOND, 1)), [0, 1]);
        assert_eq!(taken(spend(hand, SECOND, 2)), [1, 1], "from both");
        assert_eq!(spend(hand, 20 * SECOND, 1), Spent::Nothing, "lapsed");
        assert_eq!(hand.held(20 * SECOND), ([0, 0], [true, true]));
    }

    #[test]
    fn tokens_of_a_refused_request_serve_the_next_one() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        hand.bank(0, 20 * SECOND, 1);
        let Spent::Taken { tokens, .. } = spend(hand, SECOND, 1) else {
            panic!("there was a token")
        };
        assert_eq!(spend(hand, SECOND, 1), Spent::Nothing);
        hand.put_back(tokens);
        assert!(matches!(spend(hand, SECOND, 1), Spent::Taken { .. }));
    }

    #[test]
    fn one_request_only_says_that_the_hand_is_low() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        hand.bank(0, 20 * SECOND, 4);
        hand.set_low(Some(2));
        let says: Vec<bool> = (0..4)
            .map(|_| matches!(spend(hand, SECOND, 1), Spent::Taken { is_low: true, .. }))
            .collect();
        assert_eq!(says, [false, true, false, false]);
    }

    #[test]
    fn a_refusal_is_remembered_to_its_end() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        let pause = |least| {
            let until_ns = 5;
            Some(Pause { until_ns, least })
        };
        hand.know(0, &Forecast::default(), pause(0));
        assert_eq!(spend(hand, 4, 1), Spent::Refused { until_ns: 5 });
        assert_eq!(spend(hand, 5, 1), Spent::Nothing);
        hand.set_shard(3);
        hand.know(0, &Forecast::default(), pause(7));
        assert_eq!(spend(hand, 4, 6), Spent::Nothing, "a cheaper one may fit");
        assert_eq!(spend(hand, 4, 7), Spent::Refused { until_ns: 5 });
        assert_eq!(hand.shard(), 3);
    }

    #[test]
    fn a_request_is_refused_until_its_cost_has_filled_and_told_so() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        // three of ten are there, one a second
        let forecast = Forecast {
            told_ns: SECOND,
            delay_ns: SECOND / 100,
            state: 8 * SECOND,
            ..Forecast::default()
        };
        hand.know(3, &forecast, None);
        assert_eq!(hand.forecast(), forecast);
        assert_eq!(spend(hand, SECOND, 3), Spent::Nothing);
        let until_ns = 5 * SECOND;
        assert_eq!(spend(hand, SECOND, 7), Spent::Refused { until_ns });
        assert_eq!(spend(hand, 5 * SECOND, 7), Spent::Nothing);
        hand.bank(0, 20 * SECOND, 2);
        let until_ns = 3 * SECOND;
        assert_eq!(spend(hand, SECOND, 7), Spent::Refused { until_ns });
    }

    #[test]
    fn alone_it_spends_its_level_then_its_rate_and_owes_what_the_store_would_not_have_granted() {
        let hands = hands();
        let hand = hands.hand(hands.claim(tag(7), 0).unwrap());
        let alone = Alone {
            rate: 1e-9,
            capacity: 5.0,
            level: 3.0,
            shadow_rate: 2e-9,
            shadow_missing: 0.0,
        };
        hand.prepare_alone(SECOND, &alone);
        let admitted = (0..10).filter(|_| hand.spend_alone(SECOND, 1).is_ok());
        assert_eq!(admitted.count(), 3);
        assert_eq!(hand.spend_alone(SECOND, 1), Err(SECOND), "one a second");
        assert_eq!(hand.spend_alone(2 * SECOND, 1), Ok(()));
        let (admitted, missing) = hand.alone(2 * SECOND);
        assert_eq!(admitted, 4);
        // 3 at the first second, of which 2 have come back, and 1 at the second
        assert!((missing - 2.0).abs() < 0.01, "{missing}");
    }

    #[test]
    fn a_full_table_gives_no_more_hands_and_a_released_one_is_empty() {
        let hands = Hands::new(4, 1);
        let places: Vec<usize> = (1..=8).filter_map(|key| hands.claim(tag(key), 0)).collect();
        assert_eq!(places.len(), 8);
        assert_eq!(hands.claim(tag(9), 0), None);
        hands.hand(places[0]).bank(0, SECOND, 1);
        hands.release(places[0], 0);
        assert_eq!(hands.find(tag(1)), None);
        let place = hands.claim(tag(9), 0).expect("room again");
        assert_eq!(spend(hands.hand(place), 1, 1), Spent::Nothing);
    }

    #[test]
    fn a_quota_that_takes_all_it_may_leaves_room_for_the_others() {
        let hands = Hands::new(10_000, 3);
        let claim = |key: u64, quota| {
            let mixed = u128::from(key + 1).wrapping_mul(0xDA94_2042_E4DD_58B5_9E37_79B9_7F4A_7C15);
            hands.claim(Tag::new(Key(mixed ^ (mixed >> 61)), quota), quota)
        };
        let taken = (0..40_000).filter(|&key| claim(key, 0).is_some()).count();
        assert!((9_000..10_000).contains(&taken), "{taken}");
        for quota in [1, 2] {
            let taken = (0..1_600).filter(|&key| claim(key << 20, quota).is_some());
            assert_eq!(taken.count(), 1_600);
        }
    }
}
