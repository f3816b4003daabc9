//! One key with a lease: the lease manager's own state, beside the cell that workers spend from.

use std::{collections::VecDeque, rc::Rc, sync::Arc};

use super::message::{Grant, KeeperOutcome, Waiter};
use crate::budget::{
    key_table::{FallbackBucket, KeyCell, SpendOutcome, Tag},
    lease::{Lease, LeaseAlgorithm, LeaseCall, LeaseReport, LeaseTerms, Reply, Requests},
    settings::{SharedLimit, WhenDown},
    slack::{self, Slack},
};

/// One key in use.
pub(super) struct KeyEntry {
    pub(super) limit: Arc<SharedLimit>,
    pub(super) tier: usize,
    pub(super) tag: Tag,
    pub(super) key: Rc<str>,
    pub(super) shard: usize,
    /// The key's name in older versions, for the first call.
    pub(super) former_key: Option<Rc<str>>,
    pub(super) lease: Lease,
    pub(super) slack: Slack,
    /// Whether it is queued for a call without a request.
    pub(super) is_to_tell: bool,
    /// Requests that wait for the next call.
    pub(super) queue: VecDeque<Waiter>,
    pub(super) flight: Option<CallInFlight>,
    /// Until when no background call is made.
    pub(super) pause_until_ns: u64,
    /// When to make the next background call.
    pub(super) poll_ns: Option<u64>,
    /// The next time to look at it.
    pub(super) look_ns: u64,
    /// Its contribution to the gauges: tokens, and whether its pool is short.
    pub(super) counted: u64,
    pub(super) counted_short: bool,
}

/// A call in flight.
pub(super) struct CallInFlight {
    pub(super) id: u64,
    pub(super) waiters: VecDeque<Waiter>,
    /// The units requested for its waiters.
    pub(super) need: Requests,
}

impl CallInFlight {
    /// The call is overdue: sends its waiters to their fallback, and also those of the next call.
    pub(super) fn give_up(self, queue: &mut VecDeque<Waiter>, place: usize) {
        for waiter in self.waiters.into_iter().chain(queue.drain(..)) {
            waiter.tell(place, KeeperOutcome::Alone);
        }
    }
}

impl KeyEntry {
    pub(super) fn terms(&self) -> LeaseTerms {
        self.limit.tier(self.tier).terms
    }

    /// Whether one more request may wait for a call in flight.
    pub(super) fn may_queue(&self, now_ns: u64) -> bool {
        let in_flight = self.flight.iter().flat_map(|flight| &flight.waiters);
        let waiting = in_flight.chain(&self.queue).map(|waiter| waiter.cost).sum();
        self.lease.may_queue(now_ns, &self.terms(), waiting)
    }

    /// Learns from the cell what workers did.
    pub(super) fn look(&mut self, now_ns: u64, cell: KeyCell<'_>, horizon_ns: u64) {
        let (held, lapsed) = cell.held(now_ns);
        for (slot, has_lapsed) in lapsed.into_iter().enumerate() {
            if has_lapsed {
                self.limit.metrics.lapsed.increment(cell.empty(slot));
                self.lease.lapsed(slot);
            }
        }
        let refused = cell.take_refused();
        self.limit.metrics.refused_by_memory.increment(refused);
        self.lease.look(now_ns, horizon_ns, held, refused);
    }

    /// Answers the call's waiters with what the store granted to each. Requests that came meanwhile
    /// get local tokens or a remembered refusal; the rest wait for the next call. Returns units
    /// granted to requests that are gone. A later request does not get them: it may have begun in a
    /// later window.
    pub(super) fn serve(
        &mut self,
        now_ns: u64,
        horizon_ns: u64,
        cell: (usize, KeyCell<'_>),
        waiters: VecDeque<Waiter>,
        (reply, grant): (&Reply, Grant),
    ) -> u64 {
        let (place, _) = cell;
        // the pool before the grants: the store granted in this order
        let mut whole = reply
            .need
            .saturating_add(reply.want)
            .saturating_add(reply.pool);
        let (mut granted, mut unclaimed) = (reply.need, 0);
        for waiter in waiters {
            let cost = waiter.cost;
            if cost > whole.min(granted) {
                self.serve_from_hand(now_ns, horizon_ns, cell, waiter, true);
                continue;
            }
            (whole, granted) = (whole - cost, granted - cost);
            if waiter.tell(place, KeeperOutcome::Granted(grant)) {
                self.admitted(now_ns, horizon_ns, cost);
            } else {
                unclaimed += cost;
            }
        }
        for waiter in std::mem::take(&mut self.queue) {
            self.serve_from_hand(now_ns, horizon_ns, cell, waiter, false);
        }
        granted + unclaimed
    }

    /// Answers a waiter with local tokens or a refusal; one that no call has asked for yet may keep
    /// waiting.
    fn serve_from_hand(
        &mut self,
        now_ns: u64,
        horizon_ns: u64,
        (place, cell): (usize, KeyCell<'_>),
        waiter: Waiter,
        was_asked: bool,
    ) {
        if waiter.answer.is_closed() {
            // the request used its fallback or was cancelled
            return;
        }
        match self.spend(now_ns, horizon_ns, cell, waiter.cost) {
            SpendOutcome::Taken { tokens, .. } => {
                if !waiter.tell(place, KeeperOutcome::Taken(tokens)) {
                    cell.put_back(tokens);
                }
            }
            // if the store must first receive reports, it is asked again then
            SpendOutcome::Nothing if !was_asked || self.lease.has_news() => {
                self.queue.push_back(waiter)
            }
            SpendOutcome::Nothing | SpendOutcome::Refused { .. } => {
                self.limit.metrics.refused_by_redis.increment(waiter.cost);
                waiter.tell(place, KeeperOutcome::Refused);
            }
        }
    }

    /// Takes local tokens for a waiter.
    pub(super) fn spend(
        &mut self,
        now_ns: u64,
        horizon_ns: u64,
        cell: KeyCell<'_>,
        cost: u64,
    ) -> SpendOutcome {
        let spent = cell.spend(now_ns, cost, &self.terms());
        if let SpendOutcome::Taken { tokens, .. } = spent {
            self.lease.took(tokens);
            self.admitted(now_ns, horizon_ns, cost);
        }
        spent
    }

    /// A waiter has its units. A request that costs more than a unit counts as demand only now. If
    /// refused ones counted, a few of them would claim all tokens ahead, and cheap requests at
    /// other gateways would find none.
    fn admitted(&mut self, now_ns: u64, horizon_ns: u64, cost: u64) {
        if cost > 1 {
            self.lease.arrived(now_ns, horizon_ns, 0, cost);
        }
    }

    /// Takes from the queue the requests for the next call.
    pub(super) fn begin(&mut self) -> (VecDeque<Waiter>, Requests) {
        Requests::begin(&mut self.queue, |waiter| waiter.cost)
    }

    /// Whether a request passes before Redis is asked: the key is cold, and there is slack.
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

    /// Charges what slack admitted, now that Redis is asked.
    pub(super) fn charge_slack(&mut self, now_ns: u64, gateways: f64) {
        let terms = self.terms();
        let room = slack::room(self.limit.slack, &terms, gateways);
        let debt = self.slack.charge(now_ns, &terms, room);
        self.limit.metrics.debt.increment(debt);
        self.lease.owe(now_ns, debt);
    }

    /// Whether to report this key at once to a Redis that has lost it.
    pub(super) fn remembers(&self, now_ns: u64) -> bool {
        self.lease.remembers(now_ns, &self.terms())
    }

    /// Whether this key can be forgotten without loss.
    pub(super) fn is_idle(&self, now_ns: u64, horizon_ns: u64, gateways: f64) -> bool {
        let terms = self.terms();
        let room = slack::room(self.limit.slack, &terms, gateways);
        self.lease.is_idle(now_ns, horizon_ns) && self.slack.is_whole(now_ns, &terms, room)
    }

    /// Updates the gauges.
    pub(super) fn show(&mut self, held: u64) {
        let metrics = &self.limit.metrics;
        metrics.in_hand.increment(held as f64 - self.counted as f64);
        let is_short = self.lease.is_short();
        let [now, before] = [is_short, self.counted_short].map(|short| f64::from(u8::from(short)));
        metrics.short_keys.increment(now - before);
        (self.counted, self.counted_short) = (held, is_short);
    }

    /// Removes its contribution from the gauges.
    pub(super) fn hide(&self) {
        let metrics = &self.limit.metrics;
        metrics.keys.decrement(1.0);
        metrics.in_hand.decrement(self.counted as f64);
        let short = f64::from(u8::from(self.counted_short));
        metrics.short_keys.decrement(short);
    }

    /// Charges fallback admissions that the store could not know.
    pub(super) fn settle_alone(&mut self, now_ns: u64, cell: KeyCell<'_>, gateways: f64) {
        let (admitted, missing) = cell.alone(now_ns);
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
        self.lease.owe(now_ns, debt);
        cell.settled_alone(now_ns, expected);
    }

    /// Sets up the fallback bucket: this gateway's share of what is left, times the configured
    /// fraction.
    pub(super) fn prepare_alone(&self, now_ns: u64, cell: KeyCell<'_>, gateways: f64) {
        let terms = self.terms();
        // a share of 0 would never be used again
        let share = self.lease.share().unwrap_or(1.0 / gateways).max(1e-3);
        let pool = self.lease.pool(now_ns, &terms);
        if let Some(alone) = alone(&terms, self.limit.when_down, share, pool) {
            cell.prepare_alone(now_ns, &alone);
        }
    }
}

/// The fallback parameters of a gateway with this share of the demand, given the pool's last known
/// content.
pub(in crate::budget) fn alone(
    terms: &LeaseTerms,
    when_down: WhenDown,
    share: f64,
    pool: Option<f64>,
) -> Option<FallbackBucket> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let capacity = terms.capacity as f64;
    let pool = pool.unwrap_or(capacity);
    let part = fraction * share;
    Some(FallbackBucket {
        rate: part * terms.rate / 1e3,
        capacity: (part * capacity).max(1.0),
        level: (part * pool).max(pool.min(1.0)),
        shadow_rate: share * terms.rate / 1e3,
        shadow_missing: share * (capacity - pool),
    })
}

/// The index of the argument with this gateway's memory.
pub(super) fn memory_at(algorithm: LeaseAlgorithm) -> usize {
    match algorithm {
        LeaseAlgorithm::Log => 5,
        _ => 10,
    }
}

/// The script arguments of a call: decimal text, except for the memory.
pub(super) fn arguments(
    terms: &LeaseTerms,
    call: &LeaseCall,
    (id, number): (&str, u64),
    gateways: f64,
) -> Vec<Vec<u8>> {
    let memory = call.memory.bytes(terms.algorithm, gateways);
    let mut arguments = match terms.algorithm {
        LeaseAlgorithm::Log => vec![
            terms.capacity.to_string().into(),
            terms.span_us.to_string().into(),
            call.need.to_string().into(),
            id.into(),
            (number & u64::from(u32::MAX)).to_string().into(),
            memory,
        ],
        algorithm => {
            let [second, third] = match algorithm {
                LeaseAlgorithm::Bucket => {
                    [terms.rate.to_string(), terms.generation_us().to_string()]
                }
                _ => {
                    let slides = u8::from(algorithm == LeaseAlgorithm::Sliding);
                    [terms.span_us.to_string(), slides.to_string()]
                }
            };
            vec![
                terms.capacity.to_string().into(),
                second.into(),
                third.into(),
                call.need.to_string().into(),
                match call.unit {
                    1 => call.want.to_string().into(),
                    unit => format!("{unit}*{}", call.want / unit.max(1)).into(),
                },
                call.part.to_string().into(),
                call.arrivals.to_string().into(),
                // an estimate; fewer digits save bytes
                format!("{:.3}", call.rate).into(),
                call.since_us.to_string().into(),
                call.memory_us.to_string().into(),
                memory,
            ]
        }
    };
    for report in &call.reports {
        let (kind, generation, tokens) = match report {
            LeaseReport::Spent { generation, tokens } => {
                (0, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Returned { generation, tokens } => {
                (1, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Debt { tokens, window } => {
                (2, window.map_or(-1, i64::from), tokens.to_string())
            }
            LeaseReport::Refund { tokens } => (5, -1, tokens.to_string()),
            LeaseReport::Charge { tokens } => (6, -1, tokens.to_string()),
            LeaseReport::Out { generation, tokens } => {
                (3, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Unused { tokens, origin } => (
                4,
                i64::from(origin.generation),
                format!("{tokens} {} {}", origin.room, origin.moment_us),
            ),
        };
        let words = [kind.to_string(), generation.to_string(), tokens];
        arguments.extend(words.map(String::into_bytes));
    }
    arguments
}
