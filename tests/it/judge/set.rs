//! A set of gateways and limits: it receives requests, an event happens, and the judge evaluates
//! what clients saw.

use std::{collections::BTreeMap, env, net::SocketAddr, sync::Arc, thread, time::Duration};

use super::{
    clients::{self, Clock, Histories, Planned},
    plan::{Configuration, Scope, distance},
    verdicts::Judged,
    workplace::Workplace,
};
use crate::support::{
    Gateway, Redis,
    far_redis::{Distance, FarRedis},
    judge::{
        Counting, Fault, MILLISECOND, Record, Rule, SECOND, Time, Verdict,
        exact::{Comparison, compare},
        judge, judge_admitted, judge_refused,
        shrink::{lines, shrink},
        slots::{self, AtWork},
        used::surely_used,
    },
    random::Random,
    wait::time_passes,
};

/// Configurations per set.
pub const EACH: usize = 25;

/// Duration of the load on a set.
const LASTS: Time = 6 * SECOND;

/// How long a slot may take to return: the gateway notices the end of an answer late, and tells
/// Redis.
const LINGERS: Time = 300 * MILLISECOND;

/// The event that happens to a set half-way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Nothing,
    /// Another rate and burst, at all gateways.
    Reload,
    /// Also another algorithm and window.
    Exchange,
    Flush,
    /// Kills one gateway.
    Kill,
    /// Shuts one gateway down gracefully.
    Terminate,
    /// Redis hangs for half a second.
    Pause,
    /// Redis is killed and restarts empty.
    Restart,
}

const EVENTS: [Event; 9] = [
    Event::Nothing,
    Event::Reload,
    Event::Nothing,
    Event::Exchange,
    Event::Flush,
    Event::Kill,
    Event::Terminate,
    Event::Pause,
    Event::Restart,
];

/// Gateways and their limits.
pub struct Set {
    seed: u64,
    random: Random,
    event: Event,
    distances: Vec<Distance>,
    limits: Vec<Configuration>,
    /// The configurations after a reload.
    changed: Vec<Configuration>,
}

/// When the event began and ended.
type Span = (Time, Time);

impl Set {
    pub fn new(seed: u64) -> Set {
        let mut random = Random::new(seed);
        let named = env::var("TIDEGATE_JUDGE_EVENT").ok();
        let is_named = |event: &&Event| Some(format!("{event:?}")) == named;
        let in_turn = EVENTS[seed as usize % EVENTS.len()];
        let event = EVENTS.iter().find(is_named).copied().unwrap_or(in_turn);
        let gateways = match event {
            Event::Nothing => 8,
            Event::Kill | Event::Terminate => 3,
            _ => random.within(2, 5).unsigned_abs() as usize,
        };
        let limits: Vec<Configuration> = (0..EACH)
            .map(|_| Configuration::random(&mut random, gateways))
            .collect();
        let changed = limits
            .iter()
            .map(|limit| match event {
                Event::Exchange => limit.exchanged(&mut random),
                _ => limit.changed(&mut random),
            })
            .collect();
        Set {
            seed,
            event,
            distances: (0..gateways).map(|_| distance(&mut random)).collect(),
            changed,
            limits,
            random,
        }
    }

    fn toml(&self, url: &str, origin: &Workplace, limits: &[Configuration]) -> String {
        let timeout = if self.event == Event::Pause {
            "200ms"
        } else {
            "1s"
        };
        let mut toml = format!(
            "[server]\nworkers = {}\n\
             [redis]\nurl = \"{url}\"\ntimeout = \"{timeout}\"\nconnect_timeout = \"2s\"\n\
             [upstream.origin]\nservers = [\"builtin:echo\"]\n\
             [upstream.workplace]\nservers = [\"{}\"]\n",
            1 + self.seed % 2,
            origin.url()
        );
        for (number, limit) in limits.iter().enumerate() {
            limit.write(number, &mut toml);
        }
        toml
    }

    /// Runs it, and judges what clients saw.
    pub fn run(mut self) -> Vec<Judged> {
        let mut redis = Redis::start();
        let address = SocketAddr::from(([127, 0, 0, 1], redis.port()));
        let far = FarRedis::start(address, &self.distances, self.seed);
        let clock = Arc::new(Clock::start());
        let origin = Workplace::start(&clock, self.seed);
        let start = |number: usize| {
            Gateway::with(&self.toml(&far.url(number), &origin, &self.limits)).start()
        };
        let mut gateways: Vec<Gateway> = (0..self.distances.len()).map(start).collect();
        let begins = clock.now() + 100 * MILLISECOND;
        let span = (begins, begins + LASTS);
        let (mut planned, mut lone) = (Vec::new(), Vec::new());
        for (number, limit) in self.limits.iter().enumerate() {
            let boundaries = clock.boundaries(limit.rule().period);
            let (some, alone) = limit.requests(number, span, boundaries, &mut self.random);
            planned.extend::<Vec<Planned>>(some);
            lone.extend(alone);
        }
        let addresses: Vec<SocketAddr> = gateways.iter().map(Gateway::address).collect();
        let clients = {
            let clock = Arc::clone(&clock);
            thread::spawn(move || clients::run(&clock, &addresses, planned, lone))
        };
        time_passes(
            Duration::from_nanos((LASTS / 2).unsigned_abs()),
            "half of the requests are sent",
        );
        let event = self.befall(&clock, &mut gateways, &mut redis, (&far, &origin));
        let histories = clients.join().expect("the clients end");
        clock.look();
        self.judge(&clock, &origin, &histories, event)
    }

    fn befall(
        &mut self,
        clock: &Clock,
        gateways: &mut [Gateway],
        redis: &mut Redis,
        (far, origin): (&FarRedis, &Workplace),
    ) -> Span {
        let begun = clock.now();
        match self.event {
            Event::Nothing => {}
            Event::Reload | Event::Exchange => thread::scope(|scope| {
                for (number, gateway) in gateways.iter().enumerate() {
                    let toml = self.toml(&far.url(number), origin, &self.changed);
                    scope.spawn(move || gateway.reconfigure(&toml));
                }
            }),
            Event::Flush => redis.run::<()>(&["FLUSHALL"]),
            Event::Kill => gateways[1].signal("KILL"),
            Event::Terminate => gateways[1].signal("TERM"),
            Event::Pause => {
                redis.pause();
                time_passes(Duration::from_millis(500), "Redis stands still");
                redis.resume();
            }
            Event::Restart => redis.restart(),
        }
        (begun, clock.now())
    }

    fn judge(
        &self,
        clock: &Clock,
        origin: &Workplace,
        histories: &Histories,
        event: Span,
    ) -> Vec<Judged> {
        let mut all = Vec::new();
        for (number, limit) in self.limits.iter().enumerate() {
            let history = histories.get(&number).map_or(&[][..], Vec::as_slice);
            let rule = known(limit, clock);
            let faults = match self.event {
                _ if limit.counts_slots() => {
                    self.judge_slots(number, &origin.of(number), history, event)
                }
                Event::Nothing | Event::Kill | Event::Terminate | Event::Pause => {
                    shown(&rule, history, judge(&rule, history))
                }
                Event::Flush | Event::Restart => across(&rule, &rule, history, event),
                Event::Reload | Event::Exchange => {
                    let changed = known(&self.changed[number], clock);
                    let mut faults = across(&rule, &changed, history, event);
                    let (begun, over) = event;
                    let mut later = history.to_vec();
                    later.retain(|record| record.start > over);
                    let change = match limit.scope {
                        Scope::Local => event,
                        _ => (begun, first_admitted(&later).unwrap_or(over)),
                    };
                    let used = surely_used(&rule, history, change);
                    faults.extend(carried((&rule, &changed), later, used, change));
                    faults
                }
            };
            all.push(Judged {
                seed: self.seed,
                event: self.event,
                number,
                limit: limit.clone(),
                changed: self.changed[number].clone(),
                delays: limit
                    .gateways
                    .iter()
                    .map(|&at| self.distances[at])
                    .collect(),
                requests: history.len(),
                refused: history
                    .iter()
                    .filter(|record| record.verdict == Verdict::Refused)
                    .count(),
                compared: match limit.counts_slots() {
                    true => Comparison::default(),
                    false => compare(&rule, history),
                },
                faults,
            });
        }
        all
    }

    /// Slots are counted at the origin. After a reload only requests that began later count.
    fn judge_slots(
        &self,
        number: usize,
        at_work: &[AtWork],
        history: &[Record],
        (begun, over): Span,
    ) -> Vec<Shown> {
        let (before, after) = (&self.limits[number], &self.changed[number]);
        let mut faults = Vec::new();
        let reloaded = matches!(self.event, Event::Reload | Event::Exchange);
        if reloaded {
            let (mut early, mut late) = (at_work.to_vec(), at_work.to_vec());
            early.retain(|work| work.1 < begun);
            // a request from before the change is decided by the old rule when Redis answers
            late.retain(|work| work.0 > over + LINGERS);
            faults.extend(slots::beyond(before.amount, &early));
            faults.extend(slots::beyond(after.amount, &late));
        } else {
            faults.extend(slots::beyond(before.amount, at_work));
        }
        // a killed gateway's slots stay taken for ten seconds
        let until = if self.event == Event::Nothing {
            Time::MAX
        } else {
            begun
        };
        let mut early = history.to_vec();
        early.retain(|record| match record.verdict {
            Verdict::Refused => record.end < until,
            _ => record.start < until,
        });
        faults.extend(slots::refused(before.amount, &early, LINGERS));
        let text = |fault: &Fault| match fault {
            Fault::WronglyRefused { request, .. } => {
                let refused = early[*request];
                let mut near = early.clone();
                near.retain(|record| {
                    record.end + LINGERS >= refused.start && record.start <= refused.end
                });
                near.sort_unstable_by_key(|record| record.start);
                lines(&near)
            }
            _ => String::new(),
        };
        let shown = faults.into_iter().map(|fault| {
            let text = text(&fault);
            (fault, text)
        });
        shown.collect()
    }
}

/// A limit as the judge knows it: Redis's windows are aligned to its clock, a gateway's start at
/// any moment.
pub fn known(limit: &Configuration, clock: &Clock) -> Rule {
    let mut rule = limit.rule();
    if limit.scope != Scope::Local {
        rule.boundaries = clock.boundaries(rule.period);
        rule.slack = clock.slack();
    }
    rule
}

/// A fault, and the shortest history that shows it.
pub type Shown = (Fault, String);

fn shown(rule: &Rule, history: &[Record], faults: Vec<Fault>) -> Vec<Shown> {
    let show = |fault: Fault| {
        let least = shrink(rule, history, &fault);
        let text = lines(&least);
        (fault, text)
    };
    faults.into_iter().map(show).collect()
}

/// Redis learns of a change at the next call for a key; until then the key counts by the old rule.
/// That call was made at or before the admission of the first request after the change.
fn first_admitted(later: &[Record]) -> Option<Time> {
    let admitted = later.iter().filter(|record| record.charged());
    admitted.map(|record| record.end).min()
}

/// Usage under one rule counts under the next, as if it had been spent at the change.
fn carried(
    (before, after): (&Rule, &Rule),
    mut later: Vec<Record>,
    used: u64,
    change: Span,
) -> Vec<Shown> {
    // counters that continue keep their times of spending
    let goes_on = match (before.counting, after.counting) {
        (Counting::SlidingLog, Counting::SlidingLog) => true,
        (Counting::SlidingWindow, Counting::SlidingWindow) => before.period == after.period,
        _ => false,
    };
    if goes_on {
        return Vec::new();
    }
    let used = used.min(after.capacity());
    if let Some(any) = later.first().copied() {
        later.push(Record {
            cost: used,
            start: change.0,
            end: change.1,
            verdict: Verdict::Admitted,
            ..any
        });
    }
    let faults = shown(after, &later, judge_admitted(after, &later));
    faults
        .into_iter()
        .map(|(fault, text)| {
            (
                Fault::Forgotten {
                    used,
                    excess: fault.excess(),
                },
                text,
            )
        })
        .collect()
}

/// Judges the time before an event by one rule, and the time after it by another. At worst the
/// whole capacity was spent when the new rule was first used.
fn across(before: &Rule, after: &Rule, history: &[Record], (begun, over): Span) -> Vec<Shown> {
    let earlier: Vec<Record> = history
        .iter()
        .filter(|record| record.start < begun)
        .map(|record| Record {
            verdict: if record.end < begun {
                record.verdict
            } else {
                Verdict::Neither
            },
            ..*record
        })
        .collect();
    let mut faults = shown(before, &earlier, judge(before, &earlier));
    let later: Vec<Record> = history
        .iter()
        .filter(|record| record.start > over)
        .copied()
        .collect();
    let mut first = BTreeMap::new();
    for record in &later {
        let end = first.entry(record.gateway).or_insert(record.end);
        *end = record.end.min(*end);
    }
    let asked = first.values().copied().max().unwrap_or(over);
    faults.extend(shown(after, &later, judge_admitted(after, &later)));
    let mut spent: Vec<Record> = history
        .iter()
        .filter(|record| record.end > asked)
        .copied()
        .collect();
    if let Some(any) = spent.first().copied() {
        spent.push(Record {
            cost: after.capacity(),
            start: asked,
            end: asked,
            verdict: Verdict::Admitted,
            ..any
        });
        spent.retain(|record| record.start >= asked || record.verdict != Verdict::Refused);
    }
    faults.extend(shown(after, &spent, judge_refused(after, &spent, history)));
    faults
}
