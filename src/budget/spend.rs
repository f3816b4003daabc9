//! Decides one request against all of its limits, local and shared: admitted and charged by all, or
//! by none.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use arrayvec::ArrayVec;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Budget,
    key_table::{CellNotice, KeyCell, NoSlot, SlotGuard, SpendOutcome, Tag},
    lease::{self, LeaseAlgorithm},
    lease_manager::{Grant, KeeperOutcome, KeyReply, KeyRequest, Message},
    settings::{SharedKeyName, SharedLimit, WhenDown},
};
use crate::limit::{Charge, Key, MAX_LIMITS, Store, Verdict};

mod late;
mod standing;

pub use late::LateCharge;

/// One request's demand on one shared limit.
#[derive(Clone, Copy, Debug)]
pub struct SharedClaim<'a> {
    /// The limit.
    pub limit: &'a Arc<SharedLimit>,
    /// Index into its quotas; an index out of range counts as 0.
    pub tier: usize,
    /// The key whose bucket is charged; `None` is the limit's single bucket for all.
    pub key: Option<Key>,
    /// Units.
    pub cost: u64,
}

/// The status of every limit, in the order of the input.
#[derive(Debug, Default)]
pub struct Decided<'a> {
    /// For the charges.
    pub local: Verdict<'a>,
    /// For the claims.
    pub shared: Verdict<'a>,
    /// The slots of an admitted request; dropping this returns them.
    pub slot_guard: Vec<SlotGuard>,
    /// The source of each claim's decision.
    pub sources: ArrayVec<DecisionSource, MAX_LIMITS>,
}

/// The source of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecisionSource {
    /// This gateway, with tokens or a refusal that Redis gave it earlier.
    #[default]
    Lease,
    /// A call to Redis.
    Redis,
    /// The limit's `on_redis_down`, because Redis does not answer.
    Fallback,
}

/// Redis does not answer, and this claim's limit admits nothing without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// Index into the claims.
    pub claim: usize,
}

/// The units taken for one claim, and their cell.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    place: Option<usize>,
    what: ClaimState,
    source: DecisionSource,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum ClaimState {
    /// Redis must be asked.
    #[default]
    Undecided,
    /// Local tokens.
    Tokens(lease::TokenPair),
    /// Tokens that the store granted to this request.
    Granted(Grant),
    /// Slots: among the [`Takings::slot_guard`].
    Lent,
    /// Nothing yet: it passes before Redis is asked.
    Slack,
    /// Units of the fallback bucket.
    Alone,
    /// Nothing: the limit is open while Redis does not answer.
    Open,
    /// Refused until then.
    Refused { until_ns: u64 },
    /// Costs more than the capacity.
    Never,
    /// Redis does not answer, and the limit is closed without it.
    Closed,
}

impl ClaimState {
    fn admits(self) -> bool {
        matches!(
            self,
            ClaimState::Tokens(_)
                | ClaimState::Granted(_)
                | ClaimState::Lent
                | ClaimState::Slack
                | ClaimState::Alone
                | ClaimState::Open
        )
    }

    fn is_final(self) -> bool {
        matches!(
            self,
            ClaimState::Refused { .. } | ClaimState::Never | ClaimState::Closed
        )
    }
}

/// The units taken for each claim.
#[derive(Debug, Default)]
struct Takings {
    each: ArrayVec<Taken, MAX_LIMITS>,
    slot_guard: Vec<SlotGuard>,
}

type Pending = ArrayVec<(usize, oneshot::Receiver<KeyReply>), MAX_LIMITS>;

impl Budget {
    /// Decides a request. `name` returns the bucket name of a claim, common to all gateways; it is
    /// called only when Redis must be asked. With local tokens or a remembered refusal, nothing is
    /// awaited, allocated or locked. More than [`MAX_LIMITS`] claims are the caller's mistake; the
    /// rest are ignored.
    pub async fn admit<'a>(
        &self,
        now_ns: u64,
        store: &Store,
        local: &[Charge<'a>],
        claims: &[SharedClaim<'_>],
        name: impl Fn(usize) -> SharedKeyName,
    ) -> Result<Decided<'a>, Unavailable> {
        let mut takings = Takings::default();
        for claim in claims.iter().take(MAX_LIMITS) {
            let taken = self.take(now_ns, claim, &mut takings.slot_guard);
            takings.each.push(taken);
        }
        if takings.is_open() && store.peek(now_ns, local).admitted() {
            let deadline = Instant::now() + self.wait;
            // strict limits come last, because returning their grants takes a call
            for strict in [false, true] {
                if !takings.is_refused() {
                    let pending = self.ask(now_ns, claims, &mut takings, strict, &name);
                    self.wait(now_ns, deadline, claims, &mut takings, pending)
                        .await;
                }
            }
        }
        let charges = takings.each.iter().all(|taken| taken.what.admits());
        let local = if charges {
            store.admit(now_ns, local)
        } else {
            store.peek(now_ns, local)
        };
        if !charges || !local.admitted() {
            self.put_back(claims, &takings.each);
            takings.slot_guard.clear();
        }
        let closed = |taken: &Taken| taken.what == ClaimState::Closed;
        if let Some(claim) = takings.each.iter().position(closed) {
            return Err(Unavailable { claim });
        }
        let finding = |(claim, taken): (&SharedClaim<'_>, &Taken)| {
            self.standing(now_ns, claim, *taken).into()
        };
        let shared = Verdict {
            findings: claims.iter().zip(&takings.each).map(finding).collect(),
        };
        let sources = takings.each.iter().map(|taken| taken.source).collect();
        let slot_guard = takings.slot_guard;
        Ok(Decided {
            local,
            shared,
            slot_guard,
            sources,
        })
    }

    /// The status of the limits as far as this gateway knows; charges nothing.
    pub fn peek(&self, now_ns: u64, claims: &[SharedClaim<'_>]) -> Verdict<'static> {
        let finding = |claim: &SharedClaim<'_>| {
            let place = self.key_table.find(claim.tag());
            let what = ClaimState::Undecided;
            self.standing(now_ns, claim, Taken::of(place, what, DecisionSource::Lease))
                .into()
        };
        Verdict {
            findings: claims.iter().take(MAX_LIMITS).map(finding).collect(),
        }
    }

    /// Takes from the cell of a claim, if it has one.
    fn take(&self, now_ns: u64, claim: &SharedClaim<'_>, slot_guard: &mut Vec<SlotGuard>) -> Taken {
        let terms = &claim.limit.tier(claim.tier).terms;
        if claim.cost > terms.capacity {
            return ClaimState::Never.into();
        }
        let tag = claim.tag();
        let Some(place) = self.key_table.find(tag) else {
            // if the fallback needs no cell, there is nothing to ask for
            let is_down = self.degraded.all.load(Relaxed);
            return match claim.limit.when_down {
                WhenDown::Open | WhenDown::Closed if is_down => {
                    self.alone(now_ns, claim, None, slot_guard)
                }
                _ => ClaimState::Undecided.into(),
            };
        };
        if terms.algorithm == LeaseAlgorithm::Slots {
            return self.take_slots(now_ns, claim, place, slot_guard);
        }
        let cell = self.key_table.cell(place);
        let what = match cell.spend(now_ns, claim.cost, terms) {
            SpendOutcome::Taken { tokens, is_low } => {
                if !self.key_table.is(place, tag) {
                    cell.put_back(tokens);
                    return ClaimState::Undecided.into();
                }
                if is_low {
                    // if the lease manager's queue is full, the next request without tokens
                    // notifies it
                    let _ = self.notices.try_send(CellNotice { place, tag });
                }
                ClaimState::Tokens(tokens)
            }
            SpendOutcome::Refused { until_ns } => {
                // a request that costs more than a unit does not count as demand: a few of them
                // would claim everything
                if claim.cost == 1 {
                    cell.count_refused(1);
                } else {
                    claim.limit.metrics.refused_by_memory.increment(claim.cost);
                }
                ClaimState::Refused { until_ns }
            }
            SpendOutcome::Nothing if self.is_down(cell) => {
                return self.alone(now_ns, claim, Some(place), slot_guard);
            }
            SpendOutcome::Nothing => ClaimState::Undecided,
        };
        Taken::of(Some(place), what, DecisionSource::Lease)
    }

    /// The same for a limit on requests in flight.
    fn take_slots(
        &self,
        now_ns: u64,
        claim: &SharedClaim<'_>,
        place: usize,
        slot_guard: &mut Vec<SlotGuard>,
    ) -> Taken {
        let what = match self.key_table.slots(place).take(now_ns, claim.cost) {
            Ok(()) => {
                let taken = self.lend(claim, place, false);
                if !self.key_table.is(place, claim.tag()) {
                    return ClaimState::Undecided.into();
                }
                slot_guard.push(taken);
                ClaimState::Lent
            }
            Err(NoSlot::Refused { until_ns }) => ClaimState::Refused { until_ns },
            Err(NoSlot::Unknown) if self.is_down(self.key_table.cell(place)) => {
                return self.alone(now_ns, claim, Some(place), slot_guard);
            }
            Err(NoSlot::Unknown) => ClaimState::Undecided,
        };
        Taken::of(Some(place), what, DecisionSource::Lease)
    }

    /// Guards taken slots for as long as the request holds them.
    fn lend(&self, claim: &SharedClaim<'_>, place: usize, alone: bool) -> SlotGuard {
        let at = (&self.key_table, &self.notices);
        SlotGuard::new(at, (place, claim.tag()), claim.cost, alone)
    }

    fn is_down(&self, cell: KeyCell<'_>) -> bool {
        self.degraded
            .servers
            .get(cell.shard())
            .is_some_and(|down| down.load(Relaxed))
    }

    /// Applies the limit's `on_redis_down`.
    fn alone(
        &self,
        now_ns: u64,
        claim: &SharedClaim<'_>,
        place: Option<usize>,
        slot_guard: &mut Vec<SlotGuard>,
    ) -> Taken {
        claim.limit.metrics.degraded.increment(1);
        let tier = claim.limit.tier(claim.tier);
        let place = place.unwrap_or_else(|| self.key_table.overflow(tier.overflow));
        let what = match claim.limit.when_down {
            WhenDown::Open => ClaimState::Open,
            WhenDown::Closed => ClaimState::Closed,
            WhenDown::Local { .. } if tier.terms.algorithm == LeaseAlgorithm::Slots => {
                if self.key_table.slots(place).take_alone(claim.cost) {
                    slot_guard.push(self.lend(claim, place, true));
                    ClaimState::Lent
                } else {
                    // a returned slot is free at once
                    ClaimState::Refused { until_ns: now_ns }
                }
            }
            WhenDown::Local { .. } => {
                match self.key_table.cell(place).spend_alone(now_ns, claim.cost) {
                    Ok(()) => ClaimState::Alone,
                    Err(wait_ns) => ClaimState::Refused {
                        until_ns: now_ns.saturating_add(wait_ns),
                    },
                }
            }
        };
        if !what.admits() {
            claim.limit.metrics.degraded_rejected.increment(1);
        }
        Taken::of(Some(place), what, DecisionSource::Fallback)
    }

    /// Sends the missing claims to Redis: either those of strict limits or all others.
    fn ask(
        &self,
        now_ns: u64,
        claims: &[SharedClaim<'_>],
        takings: &mut Takings,
        strict: bool,
        name: impl Fn(usize) -> SharedKeyName,
    ) -> Pending {
        let mut pending = Pending::new();
        let Takings { each, slot_guard } = takings;
        for (index, (claim, taken)) in claims.iter().zip(each).enumerate() {
            let is_ahead = claim.limit.tier(claim.tier).terms.ahead;
            if taken.what != ClaimState::Undecided || is_ahead == strict {
                continue;
            }
            let (answer, answered) = oneshot::channel();
            let question = KeyRequest {
                limit: Arc::clone(claim.limit),
                tier: claim.tier,
                tag: claim.tag(),
                name: name(index),
                cost: claim.cost,
                answer,
            };
            match self.manager.try_send(Message::Ask(question)) {
                Ok(()) => pending.push((index, answered)),
                Err(_) => *taken = self.alone(now_ns, claim, taken.place, slot_guard),
            }
        }
        pending
    }

    /// Waits for the answers, at most until the deadline.
    async fn wait(
        &self,
        now_ns: u64,
        deadline: Instant,
        claims: &[SharedClaim<'_>],
        takings: &mut Takings,
        pending: Pending,
    ) {
        let asked = deadline - self.wait;
        for (index, mut answered) in pending {
            let answer = match tokio::time::timeout_at(deadline, &mut answered).await {
                Ok(answer) => answer.ok(),
                Err(_) => {
                    answered.close();
                    // it may have arrived between the deadline and now
                    answered.try_recv().ok()
                }
            };
            let Takings { each, slot_guard } = takings;
            let (Some(claim), Some(taken)) = (claims.get(index), each.get_mut(index)) else {
                continue;
            };
            claim.limit.metrics.waited.record(asked.elapsed());
            let place = answer.as_ref().map(|answer| answer.place).or(taken.place);
            let what = match answer.map(|answer| answer.word) {
                Some(KeeperOutcome::Granted(grant)) => ClaimState::Granted(grant),
                Some(KeeperOutcome::Taken(tokens)) => ClaimState::Tokens(tokens),
                Some(KeeperOutcome::Lent(slots)) => {
                    slot_guard.push(slots);
                    ClaimState::Lent
                }
                Some(KeeperOutcome::Slack) => {
                    *taken = Taken::of(place, ClaimState::Slack, DecisionSource::Lease);
                    continue;
                }
                Some(KeeperOutcome::Refused) => {
                    let terms = &claim.limit.tier(claim.tier).terms;
                    let fits_ns = |place| {
                        self.key_table
                            .cell(place)
                            .fits_ns(now_ns, claim.cost, terms)
                    };
                    let until_ns = place.map_or(0, fits_ns);
                    ClaimState::Refused { until_ns }
                }
                Some(KeeperOutcome::Alone) | None => {
                    *taken = self.alone(now_ns, claim, place, slot_guard);
                    continue;
                }
            };
            *taken = Taken::of(place, what, DecisionSource::Redis);
        }
    }

    /// Returns what was taken for a request that is not admitted.
    fn put_back(&self, claims: &[SharedClaim<'_>], takings: &[Taken]) {
        for (claim, taken) in claims.iter().zip(takings) {
            let Some(place) = taken.place else { continue };
            let cell = self.key_table.cell(place);
            match taken.what {
                ClaimState::Tokens(tokens) => cell.put_back(tokens),
                ClaimState::Granted(grant) if claim.limit.tier(claim.tier).terms.banks_grants() => {
                    cell.bank(grant.slot, grant.deadline_ns, claim.cost);
                }
                ClaimState::Granted(grant) => {
                    let unused = Message::Return {
                        place,
                        tag: claim.tag(),
                        origin: grant.origin,
                        tokens: claim.cost,
                    };
                    // if the lease manager's queue is full, the unit is lost and counts as spent
                    let _ = self.manager.try_send(unused);
                }
                ClaimState::Slack => {
                    let unused = Message::Unslacked {
                        place,
                        tag: claim.tag(),
                        tokens: claim.cost,
                    };
                    // if the lease manager's queue is full, the unit counts as admitted slack
                    let _ = self.manager.try_send(unused);
                }
                ClaimState::Alone => cell.refund_alone(claim.cost),
                _ => {}
            }
        }
    }
}

impl SharedClaim<'_> {
    fn tag(&self) -> Tag {
        Tag::new(self.key.unwrap_or(self.limit.unkeyed), self.tier)
    }
}

impl From<ClaimState> for Taken {
    fn from(what: ClaimState) -> Taken {
        Taken::of(None, what, DecisionSource::Lease)
    }
}

impl Taken {
    fn of(place: Option<usize>, what: ClaimState, source: DecisionSource) -> Taken {
        Taken {
            place,
            what,
            source,
        }
    }
}

impl Takings {
    /// Whether Redis must be asked for some claim, and none is refused already.
    fn is_open(&self) -> bool {
        let undecided = |taken: &Taken| taken.what == ClaimState::Undecided;
        self.each.iter().any(undecided) && !self.is_refused()
    }

    fn is_refused(&self) -> bool {
        self.each.iter().any(|taken| taken.what.is_final())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
        time::Duration,
    };

    use tokio::sync::mpsc;

    use super::*;
    use crate::{
        budget::{
            degraded::Degraded,
            key_table::KeyTable,
            lease::{Forecast, LeaseTerms, Pause},
        },
        telemetry::Metrics,
    };

    const SECOND: u64 = 1_000_000_000;

    /// A budget whose lease manager never answers, and a limit in it.
    fn unanswered(terms: LeaseTerms) -> (Budget, Arc<SharedLimit>, mpsc::Receiver<Message>) {
        let metrics = Metrics::install().lease("all", "local");
        let when_down = WhenDown::Closed;
        let limit = Arc::new(SharedLimit::new("all", vec![terms], when_down, 0, metrics));
        let (manager, messages) = mpsc::channel(8);
        let budget = Budget {
            key_table: Arc::new(KeyTable::new(64, 1)),
            manager,
            notices: mpsc::channel(8).0,
            degraded: Arc::<Degraded>::default(),
            override_sync: crate::budget::OverrideSync::new().0,
            wait: Duration::from_secs(1),
        };
        (budget, limit, messages)
    }

    /// Whether it is admitted; `None` if the decision has to wait.
    fn decided_at_once(budget: &Budget, limit: &Arc<SharedLimit>) -> Option<bool> {
        let store = Store::new(1);
        let claims = [SharedClaim {
            limit,
            tier: 0,
            key: Some(Key(7)),
            cost: 1,
        }];
        let decision = budget.admit(SECOND, &store, &[], &claims, |_| SharedKeyName::default());
        match pin!(decision).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(decided) => Some(decided.expect("it is not closed").shared.admitted()),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn with_tokens_in_hand_or_a_refusal_remembered_nothing_is_awaited_and_nobody_asked() {
        let terms = LeaseTerms::new(LeaseAlgorithm::Bucket, 5, Duration::from_secs(1), 5, true);
        let (budget, limit, mut messages) = unanswered(terms);
        let place = budget
            .key_table
            .claim(Tag::new(Key(7), 0), 0)
            .expect("there is room");
        let cell = budget.key_table.cell(place);
        cell.bank(0, 2 * SECOND, 2);
        let said: Vec<_> = (0..2).map(|_| decided_at_once(&budget, &limit)).collect();
        assert_eq!(said, [Some(true), Some(true)]);
        let pause = Pause {
            until_ns: 2 * SECOND,
            least: 0,
        };
        cell.know(0, &Forecast::default(), Some(pause));
        assert_eq!(decided_at_once(&budget, &limit), Some(false));
        assert!(messages.try_recv().is_err(), "no message was sent");
        cell.know(0, &Forecast::default(), None);
        assert_eq!(
            decided_at_once(&budget, &limit),
            None,
            "now Redis has to be"
        );
        assert!(matches!(messages.try_recv(), Ok(Message::Ask(_))));
    }

    #[tokio::test]
    async fn a_slot_whose_request_goes_away_while_it_is_decided_comes_back() {
        let (budget, limit, mut messages) = unanswered(LeaseTerms::slots(1, true));
        let place = budget
            .key_table
            .claim(Tag::new(Key(7), 0), 0)
            .expect("there is room");
        let store = Store::new(1);
        let claims = [SharedClaim {
            limit: &limit,
            tier: 0,
            key: Some(Key(7)),
            cost: 1,
        }];
        {
            let decision = budget.admit(SECOND, &store, &[], &claims, |_| SharedKeyName::default());
            let mut decision = pin!(decision);
            let first = decision
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()));
            assert!(first.is_pending());
            let Ok(Message::Ask(question)) = messages.try_recv() else {
                panic!("it asks")
            };
            let at = (&budget.key_table, &budget.notices);
            let slot_guard = SlotGuard::new(at, (place, question.tag), 1, false);
            let word = KeeperOutcome::Lent(slot_guard);
            assert!(question.answer.send(KeyReply { place, word }).is_ok());
            // the client leaves before the answer arrives
        }
        assert_eq!(budget.key_table.slots(place).free(), 1);
    }
}
