//! A key whose requests spend tokens: when Redis is asked for more, and how replies are applied.

use std::{collections::VecDeque, sync::Arc};

use super::{
    fallback,
    key::{CallInFlight, KeyCalls, KeyContext, LeasedKey},
    message::{Grant, KeeperOutcome, LateKind, LateMessage, Waiter},
    redis_clients::Event,
    scripts::{arguments, memory_at},
};
use crate::budget::{
    key_table::{KeyCell, SpendOutcome},
    lease::{CallReason, Lease, Origin, Reply, TokenPair},
    slack::{self, Slack},
};

/// A key with a lease of tokens: the lease manager's own state, beside the cell that workers spend
/// from.
pub(super) struct TokenKey {
    calls: KeyCalls,
    lease: Lease,
    slack: Slack,
    /// Until when no background call is made.
    pause_until_ns: u64,
    /// When to make the next background call.
    poll_ns: Option<u64>,
    /// Its contribution to the gauges: tokens, and whether its pool is short.
    counted: u64,
    counted_short: bool,
}

impl LeasedKey for TokenKey {
    fn calls(&self) -> &KeyCalls {
        &self.calls
    }

    fn calls_mut(&mut self) -> &mut KeyCalls {
        &mut self.calls
    }

    fn ask(&mut self, at: &mut KeyContext<'_>, waiter: Waiter) {
        let (now_ns, cell, cost) = (at.now_ns, at.cell(), waiter.cost);
        let horizon_ns = self.horizon_ns(at);
        self.observe(now_ns, cell, horizon_ns);
        if cost <= 1 {
            self.lease.arrived(now_ns, horizon_ns, 0, cost);
        }
        self.lease.asked(now_ns, horizon_ns, cost);
        let spent = self.spend(now_ns, horizon_ns, cell, cost);
        if let SpendOutcome::Taken { tokens, .. } = spent {
            if !at.answer(waiter, KeeperOutcome::Taken(tokens)) {
                cell.put_back(tokens);
            }
        } else if matches!(spent, SpendOutcome::Refused { .. }) {
            self.calls.limit.metrics.refused_by_memory.increment(cost);
            at.answer(waiter, KeeperOutcome::Refused);
        } else if self.passes(now_ns, horizon_ns, at.clients.gateways(), cost) {
            if !at.answer(waiter, KeeperOutcome::Slack) {
                self.slack.refund(cost);
            }
        } else if at.clients.is_open(self.calls.shard) {
            at.answer(waiter, KeeperOutcome::Alone);
        } else if self.calls.flight.is_some() && !self.may_queue(now_ns) {
            self.calls.limit.metrics.refused_by_redis.increment(cost);
            at.answer(waiter, KeeperOutcome::Refused);
        } else {
            self.calls.queue.push_back(waiter);
            if self.calls.flight.is_none() {
                self.call(at, true, [0, 0]);
            }
        }
    }

    fn noticed(&mut self, at: &mut KeyContext<'_>) -> bool {
        let horizon_ns = self.horizon_ns(at);
        self.observe(at.now_ns, at.cell(), horizon_ns);
        self.go_on(at, true);
        true
    }

    fn replied(
        &mut self,
        at: &mut KeyContext<'_>,
        event: &Event,
        reply: &Reply,
        flight: Option<CallInFlight>,
    ) {
        let (rtt_ns, jitter) = (at.clients.rtt_ns(event.shard), at.clients.jitter());
        let (now_ns, cell, gateways) = (at.now_ns, at.cell(), at.clients.gateways());
        let terms = self.calls.terms();
        let horizon_ns = terms.horizon_ns(rtt_ns);
        self.observe(now_ns, cell, horizon_ns);
        self.settle_alone(now_ns, cell, gateways);
        let whole = reply
            .need
            .saturating_add(reply.want)
            .saturating_add(reply.pool);
        let refused = flight
            .as_ref()
            .and_then(|flight| flight.need.grant(whole).1);
        let replied = (reply, refused);
        let granted = self
            .lease
            .replied(now_ns, event.sent_ns, &terms, replied, (rtt_ns, jitter));
        if granted.is_lost {
            at.clients.lost_key(event.shard);
        }
        if reply.disagrees {
            self.note_disagreement(at);
        }
        let metrics = &self.calls.limit.metrics;
        if granted.replaces {
            metrics.lapsed.increment(cell.empty(granted.slot));
        }
        if granted.bank > 0 {
            cell.bank(granted.slot, granted.deadline_ns, granted.bank);
        }
        metrics.granted_ahead.increment(granted.bank);
        metrics.granted.increment(reply.need);
        self.prepare_alone(now_ns, cell, gateways);
        cell.know(reply.pool, &granted.forecast, granted.pause);
        let pause = granted.pause.filter(|pause| pause.least == 0);
        self.pause_until_ns = pause.map_or(0, |pause| pause.until_ns);

        let waiters = flight.map(|flight| flight.waiters).unwrap_or_default();
        let grant = Grant {
            slot: granted.slot,
            origin: granted.origin,
            deadline_ns: granted.deadline_ns,
        };
        let unused = self.serve(
            now_ns,
            horizon_ns,
            (at.place, cell),
            waiters,
            (reply, grant),
        );
        if unused > 0 && terms.banks_grants() {
            cell.bank(grant.slot, grant.deadline_ns, unused);
        } else if unused > 0 {
            self.lease.unused(granted.origin, unused);
        }
        self.go_on(at, false);
    }

    fn lost(&mut self, at: &mut KeyContext<'_>) {
        if self.remembers(at.now_ns) {
            // reporting a queued key twice is harmless
            at.backlog.telling.push_back(at.place);
        }
    }

    fn tell(&mut self, at: &mut KeyContext<'_>) {
        self.call(at, false, [0, 0]);
    }

    fn look(&mut self, at: &mut KeyContext<'_>, may_remember: bool) -> bool {
        let (now_ns, cell) = (at.now_ns, at.cell());
        let terms = self.calls.terms();
        let horizon_ns = self.horizon_ns(at);
        self.observe(now_ns, cell, horizon_ns);
        if self.calls.flight.is_some() {
            return true;
        }
        if self.poll_ns.take_if(|due| *due <= now_ns).is_some() {
            if self.lease.is_wanted() {
                self.call(at, true, [0, 0]);
            }
            return true;
        }
        let (held, _) = cell.held(now_ns);
        let shard = self.calls.shard;
        let (is_open, has_room) = (at.clients.is_open(shard), at.clients.has_room(shard));
        let surplus = self.lease.surplus(now_ns, &terms, horizon_ns, held);
        let back = cell.withdraw(if has_room { surplus } else { [0, 0] });
        let (alone, _) = cell.alone(now_ns);
        let owes = self.lease.debt() > 0 || alone > 0;
        // a busy key's debt goes with its next call
        let settles = owes && has_room && self.lease.is_quiet(now_ns, horizon_ns);
        let is_kept = may_remember && self.remembers(now_ns);
        let is_idle =
            held == [0, 0] && !is_kept && self.is_idle(now_ns, horizon_ns, at.clients.gateways());
        let gives_back = has_room && self.lease.has_news();
        if back != [0, 0] || settles || gives_back {
            self.call(at, false, back);
            return true;
        }
        // without Redis a forgotten key would start again with a burst that it has already had
        !(is_idle && !owes && !is_open)
    }

    fn next_look_ns(&mut self, at: &mut KeyContext<'_>) -> u64 {
        let (now_ns, horizon_ns) = (at.now_ns, self.horizon_ns(at));
        let (held, _) = at.cell().held(now_ns);
        let held: u64 = held.iter().sum();
        self.show(held);
        let next = match held {
            0 => now_ns.saturating_add(horizon_ns.saturating_mul(2)),
            _ => self.lease.look_again_ns(now_ns, horizon_ns),
        };
        next.min(self.poll_ns.unwrap_or(u64::MAX))
    }

    fn hand_back(&mut self, at: &mut KeyContext<'_>) -> u64 {
        let cell = at.cell();
        let horizon_ns = self.horizon_ns(at);
        self.observe(at.now_ns, cell, horizon_ns);
        self.calls.flight = None;
        let back = cell.withdraw([u64::MAX; 2]);
        let count: u64 = back.iter().sum();
        if count > 0 || self.lease.debt() > 0 {
            self.call(at, false, back);
        }
        count
    }

    fn hide(&self) {
        let metrics = &self.calls.limit.metrics;
        metrics.keys.decrement(1.0);
        metrics.in_hand.decrement(self.counted as f64);
        let short = f64::from(u8::from(self.counted_short));
        metrics.short_keys.decrement(short);
    }

    fn unused(&mut self, at: &mut KeyContext<'_>, origin: Origin, tokens: u64) {
        self.lease.unused(origin, tokens);
        self.go_on(at, false);
    }

    fn unslacked(&mut self, tokens: u64) {
        self.slack.refund(tokens);
    }

    fn late(&mut self, at: &mut KeyContext<'_>, late: &LateMessage) {
        let (now_ns, terms) = (at.now_ns, self.calls.terms());
        match late.kind {
            LateKind::Charge => self.lease.charge_late(late.units),
            LateKind::Debt => self.lease.owe_late(now_ns, &terms, late.units),
            LateKind::Refund { charged_ns } => {
                self.lease
                    .refund_late(now_ns, &terms, late.units, charged_ns);
            }
        }
        self.go_on(at, false);
    }

    fn has_news(&self) -> bool {
        self.lease.has_news()
    }
}

impl TokenKey {
    /// A key in use for the first time.
    pub(super) fn new(at: &KeyContext<'_>, calls: KeyCalls) -> TokenKey {
        let key = TokenKey {
            calls,
            lease: Lease::default(),
            slack: Slack::default(),
            pause_until_ns: 0,
            poll_ns: None,
            counted: 0,
            counted_short: false,
        };
        key.prepare_alone(at.now_ns, at.cell(), at.clients.gateways());
        key
    }

    fn horizon_ns(&self, at: &KeyContext<'_>) -> u64 {
        let rtt_ns = at.clients.rtt_ns(self.calls.shard);
        self.calls.terms().horizon_ns(rtt_ns)
    }

    /// Calls Redis for the waiters; `fill` also requests tokens ahead. Returns the tokens `back`,
    /// which were withdrawn from the cell.
    fn call(&mut self, at: &mut KeyContext<'_>, fill: bool, back: TokenPair) {
        let (now_ns, cell) = (at.now_ns, at.cell());
        if !self.calls.may_call(at) {
            cell.put_back(back);
            return;
        }
        let gateways = at.clients.gateways();
        let terms = self.calls.terms();
        let horizon_ns = self.horizon_ns(at);
        // this call makes low-water notifications unnecessary
        cell.set_low(None);
        self.settle_alone(now_ns, cell, gateways);
        self.charge_slack(now_ns, gateways);
        let (waiters, need) = self.calls.begin();
        let (held, _) = cell.held(now_ns);
        let (held, back) = if waiters.is_empty() {
            (held, back)
        } else {
            // too few for the waiters: return them so that the store can grant both together
            let more = cell.withdraw(held);
            let add = |slot: usize| back[slot].saturating_add(more[slot]);
            (cell.held(now_ns).0, [add(0), add(1)])
        };
        let reason = CallReason {
            need: need.clone(),
            back,
            fill,
        };
        let call = self.lease.call(now_ns, &terms, horizon_ns, held, reason);
        let returned: u64 = back.iter().sum();
        self.calls.limit.metrics.returned.increment(returned);
        let id = at.clients.number();
        self.poll_ns = None;
        let arguments = arguments(&terms, &call, (at.clients.id(), id), gateways);
        let flight = CallInFlight { id, waiters, need };
        let memory_at = Some(memory_at(terms.algorithm));
        self.calls.send(at, flight, arguments, memory_at);
    }

    /// The next action for a key without a call in flight. Only a request that spends triggers a
    /// refill: retrying after an empty reply would loop for ever.
    fn go_on(&mut self, at: &mut KeyContext<'_>, has_spent: bool) {
        if self.calls.flight.is_some() {
            return;
        }
        let (now_ns, shard) = (at.now_ns, self.calls.shard);
        let gives_back = self.lease.has_news() && at.clients.has_room(shard);
        if !self.calls.queue.is_empty() || gives_back {
            return self.call(at, true, [0, 0]);
        }
        if self.lease.has_news() && !at.clients.is_open(shard) {
            // as soon as there is room
            if !std::mem::replace(&mut self.calls.is_to_tell, true) {
                at.backlog.telling.push_back(at.place);
            }
            at.backlog.tell_soon(now_ns);
        }
        let cell = at.cell();
        let rtt_ns = at.clients.rtt_ns(shard);
        let terms = self.calls.terms();
        let horizon_ns = terms.horizon_ns(rtt_ns);
        if now_ns < self.pause_until_ns {
            let polls = self.lease.polls(now_ns, &terms, self.pause_until_ns);
            self.poll_ns = polls.then_some(self.pause_until_ns);
            return;
        }
        let (held, _) = cell.held(now_ns);
        let is_low = || {
            let lease = &self.lease;
            lease.is_low(now_ns, &terms, horizon_ns, rtt_ns, held)
        };
        if has_spent && is_low() {
            return self.call(at, true, [0, 0]);
        }
        cell.set_low(self.lease.low_mark(now_ns, &terms, horizon_ns, rtt_ns));
    }

    /// Gateways with other terms count the same key.
    fn note_disagreement(&self, at: &mut KeyContext<'_>) {
        let limit = &self.calls.limit;
        let was_known = limit.disagreement.lasts(at.now_ns);
        limit.disagreement.seen(at.now_ns);
        if !was_known && limit.disagreement.lasts(at.now_ns) {
            at.clients.disagree(limit);
            at.backlog.disagreeing.push(Arc::clone(limit));
        }
    }

    /// Whether one more request may wait for a call in flight.
    fn may_queue(&self, now_ns: u64) -> bool {
        let in_flight = self.calls.flight.iter().flat_map(|flight| &flight.waiters);
        let waiting = in_flight
            .chain(&self.calls.queue)
            .map(|waiter| waiter.cost)
            .sum();
        self.lease.may_queue(now_ns, &self.calls.terms(), waiting)
    }

    /// Learns from the cell what workers did.
    fn observe(&mut self, now_ns: u64, cell: KeyCell<'_>, horizon_ns: u64) {
        let (held, lapsed) = cell.held(now_ns);
        for (slot, has_lapsed) in lapsed.into_iter().enumerate() {
            if has_lapsed {
                self.calls.limit.metrics.lapsed.increment(cell.empty(slot));
                self.lease.lapsed(slot);
            }
        }
        let refused = cell.take_refused();
        self.calls
            .limit
            .metrics
            .refused_by_memory
            .increment(refused);
        self.lease.look(now_ns, horizon_ns, held, refused);
    }

    /// Answers the call's waiters with what the store granted to each. Requests that came meanwhile
    /// get local tokens or a remembered refusal; the rest wait for the next call. Returns units
    /// granted to requests that are gone. A later request does not get them: it may have begun in a
    /// later window.
    fn serve(
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
        for waiter in std::mem::take(&mut self.calls.queue) {
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
                self.calls.queue.push_back(waiter)
            }
            SpendOutcome::Nothing | SpendOutcome::Refused { .. } => {
                self.calls
                    .limit
                    .metrics
                    .refused_by_redis
                    .increment(waiter.cost);
                waiter.tell(place, KeeperOutcome::Refused);
            }
        }
    }

    /// Takes local tokens for a waiter.
    fn spend(
        &mut self,
        now_ns: u64,
        horizon_ns: u64,
        cell: KeyCell<'_>,
        cost: u64,
    ) -> SpendOutcome {
        let spent = cell.spend(now_ns, cost, &self.calls.terms());
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

    /// Whether a request passes before Redis is asked: the key is cold, and there is slack.
    fn passes(&mut self, now_ns: u64, horizon_ns: u64, gateways: f64, cost: u64) -> bool {
        let terms = self.calls.terms();
        let room = slack::room(self.calls.limit.slack, &terms, gateways);
        let passes = room > 0
            && self.lease.is_cold(now_ns, &terms, horizon_ns)
            && self.slack.spend(now_ns, &terms, room, cost);
        if passes {
            self.calls.limit.metrics.slack.increment(cost);
        }
        passes
    }

    /// Charges what slack admitted, now that Redis is asked.
    fn charge_slack(&mut self, now_ns: u64, gateways: f64) {
        let terms = self.calls.terms();
        let room = slack::room(self.calls.limit.slack, &terms, gateways);
        let debt = self.slack.charge(now_ns, &terms, room);
        self.calls.limit.metrics.debt.increment(debt);
        self.lease.owe(now_ns, debt);
    }

    /// Whether to report this key at once to a Redis that has lost it.
    fn remembers(&self, now_ns: u64) -> bool {
        self.lease.remembers(now_ns, &self.calls.terms())
    }

    /// Whether this key can be forgotten without loss.
    fn is_idle(&self, now_ns: u64, horizon_ns: u64, gateways: f64) -> bool {
        let terms = self.calls.terms();
        let room = slack::room(self.calls.limit.slack, &terms, gateways);
        self.lease.is_idle(now_ns, horizon_ns) && self.slack.is_whole(now_ns, &terms, room)
    }

    /// Updates the gauges.
    fn show(&mut self, held: u64) {
        let metrics = &self.calls.limit.metrics;
        metrics.in_hand.increment(held as f64 - self.counted as f64);
        let is_short = self.lease.is_short();
        let [now, before] = [is_short, self.counted_short].map(|short| f64::from(u8::from(short)));
        metrics.short_keys.increment(now - before);
        (self.counted, self.counted_short) = (held, is_short);
    }

    /// Charges fallback admissions that the store could not know.
    fn settle_alone(&mut self, now_ns: u64, cell: KeyCell<'_>, gateways: f64) {
        let (admitted, missing) = cell.alone(now_ns);
        if admitted == 0 {
            return;
        }
        let terms = self.calls.terms();
        let share = self.lease.share().unwrap_or(1.0 / gateways);
        let capacity = terms.capacity as f64;
        let level = self.lease.pool(now_ns, &terms).unwrap_or(capacity);
        let expected = share * (capacity - level);
        let debt = (missing - expected).ceil().clamp(0.0, admitted as f64) as u64;
        self.calls.limit.metrics.debt.increment(debt);
        self.lease.owe(now_ns, debt);
        cell.settled_alone(now_ns, expected);
    }

    /// Sets up the fallback bucket: this gateway's share of what is left, times the configured
    /// fraction.
    fn prepare_alone(&self, now_ns: u64, cell: KeyCell<'_>, gateways: f64) {
        let terms = self.calls.terms();
        // a share of 0 would never be used again
        let share = self.lease.share().unwrap_or(1.0 / gateways).max(1e-3);
        let pool = self.lease.pool(now_ns, &terms);
        if let Some(alone) = fallback::alone(&terms, self.calls.limit.when_down, share, pool) {
            cell.prepare_alone(now_ns, &alone);
        }
    }
}
