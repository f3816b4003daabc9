//! One request against all of its limits, local and shared: admitted and charged by all, or by none.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use arrayvec::ArrayVec;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Budget,
    hand::{Hand, Spent, Tag},
    keeper::{Answer, Grant, Message, Question, Word},
    lease::{self, Algorithm},
    settings::{Name, SharedLimit, WhenDown},
};
use crate::limit::{Charge, Held, Key, MAX_LIMITS, Standing, Store, Verdict};

/// What one request asks of one shared limit.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// The limit.
    pub limit: &'a Arc<SharedLimit>,
    /// Index into its quotas; one that it does not have counts as 0.
    pub tier: usize,
    /// Whose bucket; `None` is the limit's one bucket for all.
    pub key: Option<Key>,
    /// Units.
    pub cost: u64,
}

/// How every limit stands: each in the order in which it was given.
#[derive(Debug, Default)]
pub struct Decided<'a> {
    /// Of the charges.
    pub local: Verdict<'a>,
    /// Of the claims.
    pub shared: Verdict<'a>,
}

/// Redis does not answer, and the limit of this claim admits nothing without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// Index into the claims.
    pub claim: usize,
}

/// What was taken for one claim, and of which hand.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    place: Option<usize>,
    what: What,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum What {
    /// Redis has to be asked.
    #[default]
    Undecided,
    /// Tokens in hand.
    Hand(lease::Hand),
    /// Tokens that the store granted to this request.
    Granted(Grant),
    /// Units of this gateway's own bucket.
    Alone,
    /// Nothing: the limit is open while Redis does not answer.
    Open,
    /// It is refused until then.
    Refused { until_ns: u64 },
    /// It costs more than there can ever be.
    Never,
    /// Redis does not answer, and the limit is closed without it.
    Closed,
}

impl What {
    fn admits(self) -> bool {
        matches!(
            self,
            What::Hand(_) | What::Granted(_) | What::Alone | What::Open
        )
    }

    fn is_final(self) -> bool {
        matches!(self, What::Refused { .. } | What::Never | What::Closed)
    }
}

type Takings = ArrayVec<Taken, MAX_LIMITS>;
type Pending = ArrayVec<(usize, oneshot::Receiver<Answer>), MAX_LIMITS>;

impl Budget {
    /// Decides. `name` says which bucket a claim is about, in words that all gateways share; it is asked only where Redis has
    /// to be. With tokens in hand, or a refusal remembered, nothing is awaited, allocated or locked. More than
    /// [`MAX_LIMITS`] claims are a mistake of the caller; those beyond are not met.
    pub async fn admit<'a>(
        &self,
        now_ns: u64,
        store: &Store,
        local: &[Charge<'a>],
        claims: &[Claim<'_>],
        name: impl Fn(usize) -> Name,
    ) -> Result<Decided<'a>, Unavailable> {
        let mut takings: Takings = claims
            .iter()
            .take(MAX_LIMITS)
            .map(|claim| self.take(now_ns, claim))
            .collect();
        if is_open(&takings) && store.peek(now_ns, local).admitted() {
            let deadline = Instant::now() + self.wait;
            // what is asked for every request comes last: what it grants has to travel back
            for strict in [false, true] {
                if !is_refused(&takings) {
                    let pending = self.ask(now_ns, claims, &mut takings, strict, &name);
                    self.wait(now_ns, deadline, claims, &mut takings, pending)
                        .await;
                }
            }
        }
        let charges = takings.iter().all(|taken| taken.what.admits());
        let local = if charges {
            store.admit(now_ns, local)
        } else {
            store.peek(now_ns, local)
        };
        if !charges || !local.admitted() {
            self.put_back(claims, &takings);
        }
        let closed = |taken: &Taken| taken.what == What::Closed;
        if let Some(claim) = takings.iter().position(closed) {
            return Err(Unavailable { claim });
        }
        let finding =
            |(claim, taken): (&Claim<'_>, &Taken)| self.standing(now_ns, claim, *taken).into();
        let shared = Verdict {
            findings: claims.iter().zip(&takings).map(finding).collect(),
        };
        Ok(Decided { local, shared })
    }

    /// How limits stand, as far as this gateway knows, and charges nothing.
    pub fn peek(&self, now_ns: u64, claims: &[Claim<'_>]) -> Verdict<'static> {
        let finding = |claim: &Claim<'_>| {
            let place = self.hands.find(claim.tag());
            let what = What::Undecided;
            self.standing(now_ns, claim, Taken { place, what }).into()
        };
        Verdict {
            findings: claims.iter().take(MAX_LIMITS).map(finding).collect(),
        }
    }

    /// What the hand of a claim says, where it has one.
    fn take(&self, now_ns: u64, claim: &Claim<'_>) -> Taken {
        let terms = &claim.limit.tier(claim.tier).terms;
        if claim.cost > terms.capacity {
            return What::Never.into();
        }
        let tag = claim.tag();
        let Some(place) = self.hands.find(tag) else {
            // where a hand is not needed to go on alone, nobody has to be asked for one
            let is_down = self.degraded.all.load(Relaxed);
            return match claim.limit.when_down {
                WhenDown::Open | WhenDown::Closed if is_down => self.alone(now_ns, claim, None),
                _ => What::Undecided.into(),
            };
        };
        let hand = self.hands.hand(place);
        let what = match hand.spend(now_ns, claim.cost) {
            Spent::Taken { tokens, is_low } => {
                if !self.hands.is(place, tag) {
                    hand.put_back(tokens);
                    return What::Undecided.into();
                }
                if is_low {
                    // a keeper that is too busy to hear of it hears of the request that finds nothing
                    let _ = self.keeper.try_send(Message::Low(place, tag));
                }
                What::Hand(tokens)
            }
            Spent::Refused { until_ns } => {
                hand.count_refused(claim.cost);
                What::Refused { until_ns }
            }
            Spent::Nothing if self.is_down(hand) => return self.alone(now_ns, claim, Some(place)),
            Spent::Nothing => What::Undecided,
        };
        let place = Some(place);
        Taken { place, what }
    }

    fn is_down(&self, hand: Hand<'_>) -> bool {
        self.degraded
            .servers
            .get(hand.shard())
            .is_some_and(|down| down.load(Relaxed))
    }

    /// The limit's own way to go on without Redis.
    fn alone(&self, now_ns: u64, claim: &Claim<'_>, place: Option<usize>) -> Taken {
        claim.limit.metrics.degraded.increment(1);
        let tier = claim.limit.tier(claim.tier);
        let place = place.unwrap_or_else(|| self.hands.overflow(tier.overflow));
        let what = match claim.limit.when_down {
            WhenDown::Open => What::Open,
            WhenDown::Closed => What::Closed,
            WhenDown::Local { .. } => {
                match self.hands.hand(place).spend_alone(now_ns, claim.cost) {
                    Ok(()) => What::Alone,
                    Err(wait_ns) => What::Refused {
                        until_ns: now_ns.saturating_add(wait_ns),
                    },
                }
            }
        };
        let place = Some(place);
        Taken { place, what }
    }

    /// Asks for what is missing, for limits that are always asked or for the others.
    fn ask(
        &self,
        now_ns: u64,
        claims: &[Claim<'_>],
        takings: &mut Takings,
        strict: bool,
        name: impl Fn(usize) -> Name,
    ) -> Pending {
        let mut pending = Pending::new();
        for (index, (claim, taken)) in claims.iter().zip(takings).enumerate() {
            let is_ahead = claim.limit.tier(claim.tier).terms.ahead;
            if taken.what != What::Undecided || is_ahead == strict {
                continue;
            }
            let (answer, answered) = oneshot::channel();
            let question = Question {
                limit: Arc::clone(claim.limit),
                tier: claim.tier,
                tag: claim.tag(),
                name: name(index),
                cost: claim.cost,
                answer,
            };
            match self.keeper.try_send(Message::Ask(question)) {
                Ok(()) => pending.push((index, answered)),
                Err(_) => *taken = self.alone(now_ns, claim, taken.place),
            }
        }
        pending
    }

    /// Waits for the answers, but not beyond the deadline.
    async fn wait(
        &self,
        now_ns: u64,
        deadline: Instant,
        claims: &[Claim<'_>],
        takings: &mut Takings,
        pending: Pending,
    ) {
        for (index, mut answered) in pending {
            let answer = match tokio::time::timeout_at(deadline, &mut answered).await {
                Ok(answer) => answer.ok(),
                Err(_) => {
                    answered.close();
                    // it may have come between the deadline and now
                    answered.try_recv().ok()
                }
            };
            let (Some(claim), Some(taken)) = (claims.get(index), takings.get_mut(index)) else {
                continue;
            };
            let place = answer.as_ref().map(|answer| answer.place).or(taken.place);
            let what = match answer.map(|answer| answer.word) {
                Some(Word::Granted(grant)) => What::Granted(grant),
                Some(Word::Taken(tokens)) => What::Hand(tokens),
                Some(Word::Refused) => {
                    let hand = place.map(|place| self.hands.hand(place));
                    let until_ns = hand.map_or(0, |hand| hand.refuse_until_ns());
                    What::Refused { until_ns }
                }
                Some(Word::Alone) | None => {
                    *taken = self.alone(now_ns, claim, place);
                    continue;
                }
            };
            *taken = Taken { place, what };
        }
    }

    /// Gives back what was taken for a request that is not admitted.
    fn put_back(&self, claims: &[Claim<'_>], takings: &Takings) {
        for (claim, taken) in claims.iter().zip(takings) {
            let Some(place) = taken.place else { continue };
            let hand = self.hands.hand(place);
            match taken.what {
                What::Hand(tokens) => hand.put_back(tokens),
                What::Granted(grant) if claim.limit.tier(claim.tier).terms.ahead => {
                    hand.bank(grant.slot, grant.deadline_ns, claim.cost);
                }
                What::Granted(grant) => {
                    let unused = Message::Return {
                        place,
                        tag: claim.tag(),
                        generation: grant.generation,
                        tokens: claim.cost,
                    };
                    // a keeper that is too busy loses it: the unit counts as spent
                    let _ = self.keeper.try_send(unused);
                }
                What::Alone => hand.refund_alone(claim.cost),
                _ => {}
            }
        }
    }

    /// How a limit stands. An estimate for clients, and never part of a decision.
    fn standing(&self, now_ns: u64, claim: &Claim<'_>, taken: Taken) -> Standing {
        let terms = &claim.limit.tier(claim.tier).terms;
        let capacity = terms.capacity;
        let hand = taken.place.map(|place| self.hands.hand(place));
        let (pool, pool_at_ns, end_ns) = hand.map_or((capacity, now_ns, 0), |hand| hand.pool());
        let remaining = match (taken.what, hand) {
            (What::Refused { .. } | What::Never, _) => 0,
            (What::Alone, Some(hand)) => hand.left_alone(now_ns),
            (_, Some(hand)) => {
                let (held, _) = hand.held(now_ns);
                let refilled = match terms.algorithm {
                    Algorithm::Bucket => terms.refill(now_ns.saturating_sub(pool_at_ns)) as u64,
                    _ => 0,
                };
                held.iter().sum::<u64>() + pool + refilled
            }
            (_, None) => capacity,
        };
        let remaining = remaining.min(capacity);
        let refill_ns = |tokens: u64| (tokens as f64 * 1e3 / terms.rate).ceil() as u64;
        let window_ns = end_ns.saturating_sub(now_ns);
        let (next_unit_ns, reset_ns) = match terms.algorithm {
            _ if remaining == capacity => (0, 0),
            Algorithm::Bucket => (refill_ns(1), refill_ns(capacity - remaining)),
            Algorithm::Fixed => (window_ns, window_ns),
            // at the latest when this window is no longer looked back at
            Algorithm::Sliding => (window_ns, window_ns + terms.span_us * 1000),
            Algorithm::Log => (terms.span_us * 1000, terms.span_us * 1000),
        };
        let wait_ns = match taken.what {
            What::Refused { until_ns } => {
                let more = refill_ns(claim.cost.saturating_sub(1));
                Some(until_ns.saturating_sub(now_ns).max(1).saturating_add(more))
            }
            _ => None,
        };
        let never = taken.what == What::Never;
        Standing {
            capacity,
            remaining,
            retry_after_ns: wait_ns,
            denied: wait_ns.is_some() || never,
            never,
            next_unit_ns: wait_ns.unwrap_or(next_unit_ns),
            reset_ns: reset_ns.max(wait_ns.unwrap_or(0)),
            delay_ns: 0,
            held: Held::Nowhere,
        }
    }
}

impl Claim<'_> {
    fn tag(&self) -> Tag {
        Tag::new(self.key.unwrap_or(self.limit.unkeyed), self.tier)
    }
}

impl From<What> for Taken {
    fn from(what: What) -> Taken {
        Taken { place: None, what }
    }
}

/// Whether Redis has to be asked for some, and nothing refuses already.
fn is_open(takings: &Takings) -> bool {
    let undecided = |taken: &Taken| taken.what == What::Undecided;
    takings.iter().any(undecided) && !is_refused(takings)
}

fn is_refused(takings: &Takings) -> bool {
    takings.iter().any(|taken| taken.what.is_final())
}
