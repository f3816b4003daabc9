//! One key with a lease: what the keeper knows of it beside the hand that workers spend from.

use std::{collections::VecDeque, rc::Rc, sync::Arc};

use super::message::{Grant, Waiter, Word};
use crate::budget::{
    hand::{Alone, Hand, Spent, Tag},
    lease::{self, Algorithm, Call, Lease, Report, Terms},
    settings::{SharedLimit, WhenDown},
    slack::{self, Slack},
};

/// One key in use.
pub(super) struct Entry {
    pub(super) limit: Arc<SharedLimit>,
    pub(super) tier: usize,
    pub(super) tag: Tag,
    pub(super) key: Rc<str>,
    pub(super) shard: usize,
    /// Where gateways kept it before, for the first call.
    pub(super) former_key: Option<Rc<str>>,
    pub(super) lease: Lease,
    pub(super) slack: Slack,
    /// Requests that wait for the next call.
    pub(super) queue: VecDeque<Waiter>,
    pub(super) flight: Option<Flight>,
    pub(super) refuse_until_ns: u64,
    /// When to ask again by itself.
    pub(super) poll_ns: Option<u64>,
    /// When it is looked at next.
    pub(super) look_ns: u64,
    /// What the gauges count of it: tokens, and whether its pool is short.
    pub(super) counted: u64,
    pub(super) counted_short: bool,
}

/// A call under way.
pub(super) struct Flight {
    pub(super) id: u64,
    pub(super) waiters: VecDeque<Waiter>,
}

impl Flight {
    /// Nobody waits for it any more: they go on alone, and whoever waits for the next call with them.
    pub(super) fn give_up(self, queue: &mut VecDeque<Waiter>, place: usize) {
        for waiter in self.waiters.into_iter().chain(queue.drain(..)) {
            waiter.tell(place, Word::Alone);
        }
    }
}

impl Entry {
    pub(super) fn terms(&self) -> Terms {
        self.limit.tier(self.tier).terms
    }

    pub(super) fn waiting(&self) -> u64 {
        let in_flight = self.flight.iter().flat_map(|flight| &flight.waiters);
        in_flight.chain(&self.queue).map(|waiter| waiter.cost).sum()
    }

    /// Learns from the hand what workers did.
    pub(super) fn look(&mut self, now_ns: u64, hand: Hand<'_>, horizon_ns: u64) {
        let (held, lapsed) = hand.held(now_ns);
        for (slot, has_lapsed) in lapsed.into_iter().enumerate() {
            if has_lapsed {
                self.limit.metrics.lapsed.increment(hand.empty(slot));
                self.lease.lapsed(slot);
            }
        }
        let refused = hand.take_refused();
        self.limit.metrics.refused_by_memory.increment(refused);
        self.lease.look(now_ns, horizon_ns, held, refused);
    }

    /// Answers those who wait: first with what was granted to them, then from the hand; refuses the rest while the pool is
    /// short, and lets them wait for the next call otherwise. Returns what was granted and nobody waits for.
    pub(super) fn serve(
        &mut self,
        now_ns: u64,
        place: usize,
        hand: Hand<'_>,
        waiters: VecDeque<Waiter>,
        mut granted: u64,
        grant: Grant,
    ) -> u64 {
        for waiter in waiters {
            let cost = waiter.cost;
            if waiter.answer.is_closed() {
                // it has gone on alone, or away
            } else if cost <= granted {
                if waiter.tell(place, Word::Granted(grant)) {
                    granted -= cost;
                }
            } else if let Some(tokens) = self.spend(now_ns, hand, cost) {
                if !waiter.tell(place, Word::Taken(tokens)) {
                    hand.put_back(tokens);
                }
            } else if now_ns < self.refuse_until_ns {
                self.limit.metrics.refused_by_redis.increment(cost);
                waiter.tell(place, Word::Refused);
            } else {
                self.queue.push_back(waiter);
            }
        }
        granted
    }

    /// Takes tokens out of the hand for a request that waits. It was counted when it came.
    pub(super) fn spend(&mut self, now_ns: u64, hand: Hand<'_>, cost: u64) -> Option<lease::Hand> {
        match hand.spend(now_ns, cost) {
            Spent::Taken { tokens, .. } => {
                self.lease.took(tokens);
                Some(tokens)
            }
            Spent::Refused { .. } | Spent::Nothing => None,
        }
    }

    /// Whether a request passes before Redis is asked: nothing was asked for its key lately, and there is slack.
    pub(super) fn passes(
        &mut self,
        now_ns: u64,
        horizon_ns: u64,
        gateways: f64,
        cost: u64,
    ) -> bool {
        let terms = self.terms();
        let room = slack::room(self.limit.slack, &terms, gateways);
        let passes = room > 0
            && self.lease.is_cold(now_ns, &terms, horizon_ns)
            && self.slack.spend(now_ns, &terms, room, cost);
        if passes {
            self.limit.metrics.slack.increment(cost);
        }
        passes
    }

    /// Charges what passed before Redis was asked, which it is now.
    pub(super) fn charge_slack(&mut self, now_ns: u64, gateways: f64) {
        let terms = self.terms();
        let room = slack::room(self.limit.slack, &terms, gateways);
        let debt = self.slack.charge(now_ns, &terms, room);
        self.limit.metrics.debt.increment(debt);
        self.lease.owe(debt);
    }

    /// Whether a Redis that has lost this key should be told of it at once.
    pub(super) fn remembers(&self, now_ns: u64) -> bool {
        self.lease.remembers(now_ns, &self.terms())
    }

    /// Whether nothing would be lost by forgetting this key.
    pub(super) fn is_idle(&self, now_ns: u64, horizon_ns: u64, gateways: f64) -> bool {
        let terms = self.terms();
        let room = slack::room(self.limit.slack, &terms, gateways);
        self.lease.is_idle(now_ns, horizon_ns) && self.slack.is_whole(now_ns, &terms, room)
    }

    /// Brings the gauges up to date.
    pub(super) fn show(&mut self, held: u64) {
        let metrics = &self.limit.metrics;
        metrics.in_hand.increment(held as f64 - self.counted as f64);
        let is_short = self.lease.is_short();
        let [now, before] = [is_short, self.counted_short].map(|short| f64::from(u8::from(short)));
        metrics.short_keys.increment(now - before);
        (self.counted, self.counted_short) = (held, is_short);
    }

    /// The gauges count it no more.
    pub(super) fn hide(&self) {
        let metrics = &self.limit.metrics;
        metrics.keys.decrement(1.0);
        metrics.in_hand.decrement(self.counted as f64);
        let short = f64::from(u8::from(self.counted_short));
        metrics.short_keys.decrement(short);
    }

    /// Charges what was admitted alone and the store could not know.
    pub(super) fn settle_alone(&mut self, now_ns: u64, hand: Hand<'_>, gateways: f64) {
        let (admitted, missing) = hand.alone(now_ns);
        if admitted == 0 {
            return;
        }
        let terms = self.terms();
        let share = self.lease.share().unwrap_or(1.0 / gateways);
        let capacity = terms.capacity as f64;
        let level = self.lease.pool(now_ns, &terms).unwrap_or(capacity);
        let expected = share * (capacity - level);
        let debt = (missing - expected).ceil().clamp(0.0, admitted as f64) as u64;
        self.limit.metrics.debt.increment(debt);
        self.lease.owe(debt);
        hand.settled_alone(now_ns, expected);
    }

    /// Prepares the hand for a time without the store: this gateway's share of what is left, in part.
    pub(super) fn prepare_alone(&self, now_ns: u64, hand: Hand<'_>, gateways: f64) {
        let terms = self.terms();
        // a share of nothing would never be used again
        let share = self.lease.share().unwrap_or(1.0 / gateways).max(1e-3);
        let pool = self.lease.pool(now_ns, &terms);
        if let Some(alone) = alone(&terms, self.limit.when_down, share, pool) {
            hand.prepare_alone(now_ns, &alone);
        }
    }
}

/// What a gateway with this share of the demand may do alone, where the pool was last known to hold so much.
pub(in crate::budget) fn alone(
    terms: &Terms,
    when_down: WhenDown,
    share: f64,
    pool: Option<f64>,
) -> Option<Alone> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let capacity = terms.capacity as f64;
    let pool = pool.unwrap_or(capacity);
    let part = fraction * share;
    Some(Alone {
        rate: part * terms.rate / 1e3,
        capacity: (part * capacity).max(1.0),
        level: (part * pool).max(pool.min(1.0)),
        shadow_rate: share * terms.rate / 1e3,
        shadow_missing: share * (capacity - pool),
    })
}

/// Which argument says what this gateway remembers.
pub(super) fn memory_at(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::Log => 5,
        _ => 10,
    }
}

/// The arguments of a call, as its script reads them: numbers as decimal text, but for the memory.
pub(super) fn arguments(
    terms: &Terms,
    call: &Call,
    (id, number): (&str, u64),
    gateways: f64,
) -> Vec<Vec<u8>> {
    let memory = call.memory.bytes(terms.algorithm, gateways);
    let mut arguments = match terms.algorithm {
        Algorithm::Log => vec![
            terms.capacity.to_string().into(),
            terms.span_us.to_string().into(),
            call.need.to_string().into(),
            id.into(),
            (number & u64::from(u32::MAX)).to_string().into(),
            memory,
        ],
        algorithm => {
            let [second, third] = match algorithm {
                Algorithm::Bucket => [terms.rate.to_string(), terms.generation_us().to_string()],
                _ => {
                    let slides = u8::from(algorithm == Algorithm::Sliding);
                    [terms.span_us.to_string(), slides.to_string()]
                }
            };
            vec![
                terms.capacity.to_string().into(),
                second.into(),
                third.into(),
                call.need.to_string().into(),
                call.want.to_string().into(),
                call.part.to_string().into(),
                call.arrivals.to_string().into(),
                // an estimate, and every byte travels
                format!("{:.3}", call.rate).into(),
                call.since_us.to_string().into(),
                call.memory_us.to_string().into(),
                memory,
            ]
        }
    };
    for report in &call.reports {
        let (kind, generation, tokens) = match report {
            Report::Spent { generation, tokens } => (0, *generation, tokens.to_string()),
            Report::Returned { generation, tokens } => (1, *generation, tokens.to_string()),
            Report::Debt { tokens } => (2, 0, tokens.to_string()),
            Report::Out { generation, tokens } => (3, *generation, tokens.to_string()),
        };
        let words = [kind.to_string(), generation.to_string(), tokens];
        arguments.extend(words.map(String::into_bytes));
    }
    arguments
}
