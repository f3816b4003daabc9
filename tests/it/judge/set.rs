//! A set of gateways and limits: requests come to it, an event befalls it, and the judge reads what clients saw.

use std::{collections::BTreeMap, env, net::SocketAddr, sync::Arc, thread, time::Duration};

use super::{
    clients::{self, Clock, Histories, Planned},
    plan::{Configuration, Scope, distance},
    verdicts::Judged,
};
use crate::support::{
    Gateway, Redis,
    far_redis::{Distance, FarRedis},
    judge::{
        Fault, MILLISECOND, Record, Rule, SECOND, Time, Verdict,
        exact::compare,
        judge,
        shrink::{lines, shrink},
    },
    random::Random,
    wait::pause,
};

/// Configurations of one set.
pub const EACH: usize = 25;

/// How long requests come to a set.
const LASTS: Time = 6 * SECOND;

/// What befalls a set half-way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Nothing,
    /// Another rate and burst, at all gateways.
    Reload,
    Flush,
    /// One gateway, at once.
    Kill,
    /// One gateway, in order.
    Terminate,
    /// Redis stands still for half a second.
    Pause,
    /// Redis is killed, and back empty.
    Restart,
}

const EVENTS: [Event; 8] = [
    Event::Nothing,
    Event::Reload,
    Event::Nothing,
    Event::Flush,
    Event::Kill,
    Event::Terminate,
    Event::Pause,
    Event::Restart,
];

/// Some gateways and their limits.
pub struct Set {
    seed: u64,
    random: Random,
    event: Event,
    distances: Vec<Distance>,
    limits: Vec<Configuration>,
    /// The same after a reload.
    changed: Vec<Configuration>,
}

/// When the event began and when it was over.
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
            .map(|limit| limit.changed(&mut random))
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

    fn toml(&self, url: &str, limits: &[Configuration]) -> String {
        let budget = if self.event == Event::Pause {
            "200ms"
        } else {
            "1s"
        };
        let mut toml = format!(
            "[server]\nworkers = {}\n\
             [redis]\nurl = \"{url}\"\nbudget = \"{budget}\"\nconnect_timeout = \"2s\"\n",
            1 + self.seed % 2
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
        let start =
            |number: usize| Gateway::with(&self.toml(&far.url(number), &self.limits)).start();
        let mut gateways: Vec<Gateway> = (0..self.distances.len()).map(start).collect();
        let clock = Arc::new(Clock::start());
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
        pause(Duration::from_nanos((LASTS / 2).unsigned_abs()));
        let event = self.befall(&clock, &mut gateways, &mut redis, &far);
        let histories = clients.join().expect("the clients end");
        clock.look();
        self.judge(&clock, &histories, event)
    }

    fn befall(
        &mut self,
        clock: &Clock,
        gateways: &mut [Gateway],
        redis: &mut Redis,
        far: &FarRedis,
    ) -> Span {
        let begun = clock.now();
        match self.event {
            Event::Nothing => {}
            Event::Reload => thread::scope(|scope| {
                for (number, gateway) in gateways.iter().enumerate() {
                    let toml = self.toml(&far.url(number), &self.changed);
                    scope.spawn(move || gateway.reconfigure(&toml));
                }
            }),
            Event::Flush => redis.run::<()>(&["FLUSHALL"]),
            Event::Kill => gateways[1].signal("KILL"),
            Event::Terminate => gateways[1].signal("TERM"),
            Event::Pause => {
                redis.pause();
                pause(Duration::from_millis(500));
                redis.resume();
            }
            Event::Restart => redis.restart(),
        }
        (begun, clock.now())
    }

    fn judge(&self, clock: &Clock, histories: &Histories, event: Span) -> Vec<Judged> {
        let mut all = Vec::new();
        for (number, limit) in self.limits.iter().enumerate() {
            let history = histories.get(&number).map_or(&[][..], Vec::as_slice);
            let rule = known(limit, clock);
            let faults = match self.event {
                Event::Nothing | Event::Kill | Event::Terminate | Event::Pause => {
                    shown(&rule, history)
                }
                Event::Flush | Event::Restart => across(&rule, &rule, history, event),
                Event::Reload => {
                    let changed = known(&self.changed[number], clock);
                    across(&rule, &changed, history, event)
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
                compared: compare(&rule, history),
                faults,
            });
        }
        all
    }
}

/// A limit as the judge knows it: Redis's windows are aligned to its clock, those of a gateway begin at any moment.
pub fn known(limit: &Configuration, clock: &Clock) -> Rule {
    let mut rule = limit.rule();
    if limit.scope != Scope::Local {
        rule.boundaries = clock.boundaries(rule.period);
        rule.slack = clock.slack();
    }
    rule
}

/// A fault, and the least history that shows it.
pub type Shown = (Fault, String);

fn shown(rule: &Rule, history: &[Record]) -> Vec<Shown> {
    let faults = judge(rule, history);
    let show = |fault: Fault| {
        let least = shrink(rule, history, &fault);
        let text = lines(&least);
        (fault, text)
    };
    faults.into_iter().map(show).collect()
}

/// The time before an event is judged by one rule, and the time after it by another. At worst everything was spent when
/// the new rule was first asked.
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
    let mut faults = shown(before, &earlier);
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
    let is_beyond = |shown: &Shown| shown.0.is_beyond();
    faults.extend(shown(after, &later).into_iter().filter(is_beyond));
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
    faults.extend(
        shown(after, &spent)
            .into_iter()
            .filter(|shown| !is_beyond(shown)),
    );
    faults
}
