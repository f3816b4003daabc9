//! All of a route's limits, or none: which of them a request meets, and what they say.
//!
//! ```text
//! each limit ─▶ off? exempt? excepted? ─▶ its key ─┬─▶ acts:      decided together, charged together or not at all
//!                                                  ├─▶ counts later (count_status): asked now, charged by the answer
//!                                                  └─▶ looks on (shadow, tag): decided alone, once the others admit
//! ```

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use arrayvec::ArrayVec;

use super::{
    Worker,
    decide::DecisionEffect,
    decision_context::{DecisionContext, PerLimit, RequestAttributes},
    observer::DecisionObserver,
    plan::{LimitPlan, LimitRule, RoutePlan},
    refusals::LACKS_KEY,
    rulings::{Boost, KeyRuling},
    slots::{Slot, Slots},
};
use crate::{
    config::{Effect, Mode, Share},
    identity::{Client, Keyed, Subject},
    limit::{Charge, Finding, Held, Kept, Key, MAX_LIMITS, Standing, Verdict},
    response::Refusal,
};

/// One limit as a request meets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Met<'a> {
    pub(super) limit: &'a LimitPlan,
    pub(super) tier: usize,
    key: Option<Key>,
    /// An exception closes the limit to this client.
    pub(super) blocked: Option<Blocked>,
}

/// What a limit has to do with a request, for showing one's reasoning.
#[derive(Clone, Copy, Debug)]
pub(super) enum Noted<'a> {
    /// Nothing: it is off.
    Off,
    /// Nothing: an operator has switched it off.
    SwitchedOff,
    /// Nothing: an operator has given the key so much, of which this is left.
    Boosted { left: u64 },
    /// An operator has banned the key.
    Banned,
    /// Nothing: whoever guesses credentials meets only what counts addresses, and what everybody meets.
    NotForGuesses,
    /// Nothing: an exception, one of its overrides if that was noted before.
    Exempt,
    /// Nothing: a part of its key has no value.
    NoKey,
    /// A part of its key has no value: 400.
    Unkeyed,
    /// Nothing: its key needs the body, and another limit rejects the request before that is read.
    NotRead,
    /// One of its overrides holds instead of its quota.
    Overridden(usize),
    /// It counts the request by this quota, and acts or looks on.
    Met { tier: usize, acts: bool },
    /// It has looked on, and found this.
    LookedOn(Finding<'a>),
}

/// What a limit makes of a client's request.
#[derive(Debug)]
pub(super) enum Concern {
    /// Nothing: an exception.
    Exempt,
    /// Nothing, while the key has something left of this.
    Boosted(Arc<Boost>),
    /// Nothing: a part of its key has no value.
    NoKey,
    /// A part of its key has no value: 400.
    Unkeyed,
    /// It counts it.
    Counted {
        tier: usize,
        /// `None` is one bucket for all.
        key: Option<Key>,
        /// An exception closes the limit to this client.
        blocked: Option<Blocked>,
    },
}

/// An exception that admits nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    until: Option<SystemTime>,
}

/// The limits that a request meets, in the order of the route.
#[derive(Debug, Default)]
struct Meeting<'a> {
    acting: PerLimit<Met<'a>>,
    looking_on: PerLimit<Met<'a>>,
    /// What it is given besides by operators, and the units taken.
    boosts: Vec<(Arc<Boost>, u64)>,
}

/// What a limit has to do with a request before it is asked.
#[derive(Debug)]
pub(super) struct Stance<'a> {
    /// The override that decided.
    place: Option<usize>,
    pub(super) what: What<'a>,
}

#[derive(Debug)]
pub(super) enum What<'a> {
    /// Nothing, for this reason.
    Nothing(Noted<'a>),
    /// A part of its key has no value: 400.
    Unkeyed,
    /// The key may spend of this first.
    Boost(Arc<Boost>),
    /// It is asked; whether it acts.
    Met(Met<'a>, bool),
}

impl<'a> Stance<'a> {
    pub(super) fn noted(&self, limit: &'a LimitPlan, observer: &mut impl DecisionObserver<'a>) {
        if let Some(place) = self.place {
            observer.limit(limit, Noted::Overridden(place));
        }
        match &self.what {
            What::Nothing(why) => observer.limit(limit, *why),
            What::Unkeyed => observer.limit(limit, Noted::Unkeyed),
            What::Boost(boost) => observer.limit(limit, Noted::Boosted { left: boost.left() }),
            What::Met(met, acts) => {
                if met.blocked.is_some() && self.place.is_none() {
                    observer.limit(limit, Noted::Banned);
                }
                let (tier, acts) = (met.tier, *acts);
                observer.limit(limit, Noted::Met { tier, acts });
            }
        }
    }
}

impl Worker {
    /// Decides. Whoever guesses credentials meets only the limits that everybody meets and those that count addresses:
    /// guessing is limited, and cannot spend what the route's users share. What each limit has to do with it goes to `note`.
    /// Waits only for limits that gateways share.
    pub(super) async fn admit<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        guesses: bool,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<(), Refusal> {
        let route: &'a RoutePlan = decision.route;
        let mut meeting = Meeting::default();
        self.meet(decision, route, guesses, &mut meeting, effect, observer)?;
        let now_ns = self.shared.process.nanoseconds(decision.decided_at);
        match &self.shared.budget {
            Some(budget) if meeting.acting.iter().any(Met::is_shared) => {
                let together = self.ask_together(budget, decision, now_ns, &meeting.acting, effect);
                let together = Box::pin(together).await?;
                decision.verdict = together.verdict.keep();
                decision.sources = together.sources;
                decision.slots.lend(together.lent);
            }
            _ => decision.verdict = self.ask(now_ns, route, &meeting.acting, effect),
        }
        if decision.verdict.admitted() {
            self.hold(decision, now_ns, route, &meeting.acting);
            let looking_on = &meeting.looking_on;
            let looked = self.look_on(decision, now_ns, route, looking_on, effect, observer);
            if let Err(refusal) = looked.await {
                // refused at once: what it holds is given back
                decision.delay = Duration::ZERO;
                decision.slots = Slots::default();
                return Err(refusal);
            }
        } else {
            let boosts = meeting.boosts.drain(..);
            boosts.for_each(|(boost, units)| boost.give_back(units));
        }
        if !decision.verdict.admitted() {
            self.charge_rejected(decision, now_ns, route, &meeting.acting, effect);
        }
        decision.met = meeting.acting;
        Ok(())
    }

    /// Charges a rejection to the limits that count those; the client is told how they stand after that.
    pub(super) fn charge_rejected<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        route: &RoutePlan,
        acting: &[Met<'a>],
        effect: DecisionEffect,
    ) {
        if !effect.charges() {
            return;
        }
        let store = &self.shared.process.store;
        for (index, met) in acting.iter().enumerate() {
            if !met.limit.rule.settings.charge_rejected {
                continue;
            }
            let charge = met.charge(route);
            store.charge(now_ns, &charge);
            let after = store.peek(now_ns, &[charge]).findings.pop();
            // an exception that closes the limit says for itself how long it does
            if let Some(after) = after.filter(|_| met.blocked.is_none()) {
                decision.verdict.replace(index, after);
            }
        }
    }

    /// Finds out which limits concern the request, and which of their buckets.
    fn meet<'a>(
        &self,
        decision: &DecisionContext<'a>,
        route: &'a RoutePlan,
        guesses: bool,
        meeting: &mut Meeting<'a>,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<(), Refusal> {
        let Some(asked) = &decision.attributes else {
            return Ok(());
        };
        let samples_keys = self.samples_keys();
        decision.with_subject(&self.shared.plan.table, asked, |subject| {
            for limit in &route.limits {
                let stance = self.stance(asked, limit, guesses, subject);
                stance.noted(limit, observer);
                match stance.what {
                    What::Nothing(Noted::Exempt) => limit.decisions.exempt.increment(1),
                    What::Nothing(_) => {}
                    What::Unkeyed => return Err(LACKS_KEY),
                    What::Boost(boost) => {
                        limit.decisions.exempt.increment(1);
                        if effect.charges() && boost.take(route.cost) {
                            meeting.boosts.push((boost, route.cost));
                        }
                    }
                    What::Met(met, acts) => {
                        if let Some(key) = met.key.filter(|_| samples_keys) {
                            let readable = || self.readable(&limit.rule, subject);
                            self.suspect_key(&limit.rule, key, readable);
                        }
                        match acts {
                            true => meeting.acting.push(met),
                            false => meeting.looking_on.push(met),
                        }
                    }
                }
            }
            Ok(())
        })
    }

    /// Whether a limit counts a client's request, and how; with it the place of the override that decides, where one does.
    #[inline]
    pub(super) fn concern(
        &self,
        rule: &LimitRule,
        client: &Client<'_>,
        subject: &Subject<'_>,
    ) -> (Option<usize>, Concern) {
        let (hasher, prefixes) = (&self.shared.process.hasher, self.shared.plan.prefixes);
        let mut tier = rule.tier(client);
        let mut blocked = None;
        let readable = || rule.key.readable(hasher, prefixes, subject);
        let exception = rule.exceptions.find(client, readable);
        let place = exception.and_then(|exception| exception.place);
        match exception.map(|exception| (exception.effect, exception.until)) {
            Some((Effect::Quota(quota), _)) => tier = quota,
            Some((Effect::Block, until)) => blocked = Some(Blocked { until }),
            Some((Effect::Exempt, _)) => return (place, Concern::Exempt),
            None => {}
        }
        let key = match rule.key.is_empty() {
            // one bucket for all
            true => None,
            false => match rule
                .key
                .key(rule.settings.missing, hasher, prefixes, subject)
            {
                Keyed::Bucket(key) => Some(key),
                Keyed::Skip => return (place, Concern::NoKey),
                Keyed::Missing(_) => return (place, Concern::Unkeyed),
            },
        };
        match self.ruled(rule, subject) {
            Some(KeyRuling {
                banned: Some(until),
                ..
            }) => blocked = Some(Blocked { until }),
            Some(KeyRuling {
                boost: Some(boost), ..
            }) => return (place, Concern::Boosted(boost)),
            _ => {}
        }
        (place, Concern::Counted { tier, key, blocked })
    }

    /// What operators have decided about the key of a request.
    #[inline]
    fn ruled(&self, rule: &LimitRule, subject: &Subject<'_>) -> Option<KeyRuling> {
        let on_keys = rule.rulings.in_force().on_keys();
        on_keys.then(|| rule.rulings.on_key(&self.readable(rule, subject)))?
    }

    /// What a limit of its route has to do with a request before it is asked. Changes nothing.
    #[inline]
    pub(super) fn stance<'a>(
        &self,
        asked: &RequestAttributes<'_>,
        limit: &'a LimitPlan,
        guesses: bool,
        subject: &Subject<'_>,
    ) -> Stance<'a> {
        let rule = &*limit.rule;
        let mode = rule.mode();
        let concerned = !guesses || limit.everywhere || rule.key.has_address();
        let (place, what) = match mode {
            Mode::Off if rule.settings.mode == Mode::Off => (None, What::Nothing(Noted::Off)),
            Mode::Off => (None, What::Nothing(Noted::SwitchedOff)),
            _ if !concerned => (None, What::Nothing(Noted::NotForGuesses)),
            _ => {
                let (place, concern) = self.concern(rule, &asked.client, subject);
                let what = match concern {
                    Concern::Exempt => What::Nothing(Noted::Exempt),
                    Concern::NoKey => What::Nothing(Noted::NoKey),
                    Concern::Unkeyed => What::Unkeyed,
                    Concern::Boosted(boost) => What::Boost(boost),
                    Concern::Counted { tier, key, blocked } => {
                        What::Met(Met::new(limit, tier, key, blocked), rule.acts_on(mode, key))
                    }
                };
                (place, what)
            }
        };
        Stance { place, what }
    }

    fn readable(&self, rule: &LimitRule, subject: &Subject<'_>) -> String {
        rule.key.readable(
            &self.shared.process.hasher,
            self.shared.plan.prefixes,
            subject,
        )
    }

    /// The verdict of the limits that act. On admission those that count now are charged, unless it only looks.
    pub(super) fn ask<'a>(
        &self,
        now_ns: u64,
        route: &RoutePlan,
        acting: &[Met<'a>],
        effect: DecisionEffect,
    ) -> Kept<'a> {
        let mut verdict = Verdict::default();
        let store = &self.shared.process.store;
        let charges = |later: bool| {
            let chosen = acting.iter().filter(move |met| met.counts_later() == later);
            chosen.map(|met| met.charge(route))
        };
        // not collected, which would move it with all of its room
        let mut now = ArrayVec::<Charge<'a>, MAX_LIMITS>::new();
        now.extend(charges(false));
        if now.len() == acting.len()
            && effect.charges()
            && acting.iter().all(|met| met.blocked.is_none())
        {
            store.admit_into(now_ns, &now, &mut verdict);
            return verdict.keep();
        }
        let later: ArrayVec<Charge<'a>, MAX_LIMITS> = charges(true).collect();
        let later = store.peek(now_ns, &later);
        let blocked = acting.iter().any(|met| met.blocked.is_some());
        let stopped = !effect.charges() || blocked || !later.admitted();
        let now = if stopped {
            store.peek(now_ns, &now)
        } else {
            store.admit(now_ns, &now)
        };
        let (mut now, mut later) = (now.findings.into_iter(), later.findings.into_iter());
        let in_order = acting.iter().filter_map(|met| {
            let finding = if met.counts_later() {
                later.next()
            } else {
                now.next()
            }?;
            Some(
                met.blocked
                    .map_or(finding, |blocked| blocked.finding(&finding)),
            )
        });
        verdict.findings = in_order.collect();
        verdict.keep()
    }

    /// What an admitted request takes with it: slots, places in a queue, its delay.
    fn hold<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        route: &RoutePlan,
        acting: &[Met<'a>],
    ) {
        let mut slowed = Duration::ZERO;
        let mut turn = Duration::ZERO;
        for (met, finding) in acting.iter().zip(decision.verdict.iter()) {
            let rule = &met.limit.rule;
            let settings = &rule.settings;
            let is_reached = |share: Share| {
                let standing = finding.standing();
                let used = standing.capacity.saturating_sub(standing.remaining);
                share.is_reached(used, standing.capacity)
            };
            if settings.warn_at.is_some_and(is_reached) {
                rule.metrics.near_limit.increment(1);
                if settings.disclose && decision.warning.is_none() {
                    decision.warning = Some(&rule.name);
                }
            }
            let slow = settings.slow.filter(|slow| is_reached(slow.at));
            let slow = slow.map_or(Duration::ZERO, |slow| slow.by);
            let delay_ns = finding.delay_ns();
            if delay_ns > 0 || !slow.is_zero() {
                let wait = Duration::from_nanos(delay_ns);
                rule.metrics.delayed_seconds.record(wait + slow);
                slowed = slowed.max(slow);
                turn = turn.max(wait);
            }
            let held = finding.held();
            if held != Held::Nowhere && (rule.holds_slots || delay_ns > 0) {
                decision
                    .slots
                    .add(&self.shared, Slot::of(met, route, now_ns, held));
            }
        }
        decision.delay = turn + slowed;
    }

    /// Limits in shadow count what they would have done; tags are for the upstream to read.
    async fn look_on<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        now_ns: u64,
        route: &RoutePlan,
        looking_on: &[Met<'a>],
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<(), Refusal> {
        for met in looking_on {
            let rule = &met.limit.rule;
            let found = match &self.shared.budget {
                Some(budget) if met.is_shared() => {
                    let met = std::slice::from_ref(met);
                    let together =
                        Box::pin(self.ask_together(budget, decision, now_ns, met, effect));
                    let together = together.await?;
                    decision.slots.lend(together.lent);
                    together.verdict.findings.first().copied()
                }
                _ => self.found(now_ns, route, met, effect),
            };
            let Some(finding) = found else {
                continue;
            };
            let closed = met.blocked.map(|blocked| blocked.finding(&finding));
            observer.limit(met.limit, Noted::LookedOn(closed.unwrap_or(finding)));
            let decisions = &met.limit.decisions;
            if finding.denied() || met.blocked.is_some() {
                if rule.mode() == Mode::Tag {
                    decisions.tagged.increment(1);
                    decision.tags.push(&rule.name);
                } else {
                    decisions.shadow_rejected.increment(1);
                }
            } else {
                decisions.admitted.increment(1);
            }
            if rule.holds_slots && finding.held() != Held::Nowhere {
                decision
                    .slots
                    .add(&self.shared, Slot::of(met, route, now_ns, finding.held()));
            }
            if met.counts_later() {
                decision.counting.push(*met);
            }
        }
        Ok(())
    }

    /// What a limit of this process that looks on finds.
    fn found<'a>(
        &self,
        now_ns: u64,
        route: &RoutePlan,
        met: &Met<'a>,
        effect: DecisionEffect,
    ) -> Option<Finding<'a>> {
        let charges = [met.charge(route)];
        let verdict = match met.counts_later() || !effect.charges() {
            true => self.shared.process.store.peek(now_ns, &charges),
            false => self.shared.process.store.admit(now_ns, &charges),
        };
        verdict.findings.first().copied()
    }

    /// Charges the limits that count answers by their status.
    pub(super) fn count_answer(&self, decision: &DecisionContext<'_>, status: http::StatusCode) {
        let later = decision
            .met
            .iter()
            .chain(&decision.counting)
            .filter(|met| met.counts_later());
        let mut now_ns = None;
        for met in later.filter(|met| met.limit.rule.settings.count_status.contains(&status)) {
            let now_ns = *now_ns.get_or_insert_with(|| {
                self.shared.process.nanoseconds(tokio::time::Instant::now())
            });
            self.shared
                .process
                .store
                .charge(now_ns, &met.charge(decision.route));
        }
    }
}

impl<'a> Met<'a> {
    pub(super) fn new(
        limit: &'a LimitPlan,
        tier: usize,
        key: Option<Key>,
        blocked: Option<Blocked>,
    ) -> Self {
        Self {
            limit,
            tier,
            key,
            blocked,
        }
    }

    pub(super) fn charge(&self, route: &RoutePlan) -> Charge<'a> {
        self.charge_of(route.cost)
    }

    pub(super) fn charge_of(&self, cost: u64) -> Charge<'a> {
        let limit: &'a LimitPlan = self.limit;
        Charge {
            limit: &limit.rule.buckets,
            tier: self.tier,
            key: self.key,
            cost,
            max_delay_ns: limit.rule.max_delay_ns,
        }
    }

    /// Whether only the answer tells if it is charged.
    pub(super) fn counts_later(&self) -> bool {
        !self.limit.rule.settings.count_status.is_empty()
    }

    /// Whether other gateways keep it, too.
    pub(super) fn is_shared(&self) -> bool {
        self.limit.rule.shared.is_some()
    }

    pub(super) fn key(&self) -> Option<Key> {
        self.key
    }
}

impl Blocked {
    /// What a closed limit says.
    pub(super) fn finding<'a>(self, open: &Finding<'a>) -> Finding<'a> {
        let left = self
            .until
            .map(|until| until.duration_since(SystemTime::now()).unwrap_or_default());
        let retry_after_ns = left.map(|left| u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
        let closed = Standing {
            remaining: 0,
            denied: true,
            never: retry_after_ns.is_none(),
            retry_after_ns,
            next_unit_ns: retry_after_ns.unwrap_or(0),
            reset_ns: retry_after_ns.unwrap_or(0),
            delay_ns: 0,
            held: Held::Nowhere,
            ..open.standing()
        };
        closed.into()
    }
}

impl LimitRule {
    /// How it acts now: as configured, if no operator has said otherwise.
    pub(super) fn mode(&self) -> Mode {
        self.rulings.in_force().mode().unwrap_or(self.settings.mode)
    }

    /// Whether it acts on this key, or only looks on. Sticky: a key is always on the same side.
    pub(super) fn acts_on(&self, mode: Mode, key: Option<Key>) -> bool {
        match (mode, key) {
            (Mode::Enforce, Some(key)) if self.settings.enforce_percent < 100 => {
                key.0 % 100 < u128::from(self.settings.enforce_percent)
            }
            (mode, _) => mode == Mode::Enforce,
        }
    }
}
