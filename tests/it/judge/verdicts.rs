//! The judge's verdict on each configuration, the documented exceptions, and summary figures.

use std::{collections::BTreeMap, env};

use super::{
    plan::{Configuration, Scope},
    set::{Event, Shown},
};
use crate::support::{
    far_redis::Distance,
    judge::{Fault, exact::Comparison},
};

/// One configuration and its verdict.
pub struct Judged {
    pub seed: u64,
    pub event: Event,
    pub number: usize,
    pub limit: Configuration,
    pub changed: Configuration,
    pub delays: Vec<Distance>,
    pub requests: usize,
    pub refused: usize,
    pub compared: Comparison,
    pub faults: Vec<Shown>,
}

impl Judged {
    /// Whether tokens are leased, before the event or after it.
    fn is_leased(&self) -> bool {
        !self.limit.is_exact() || self.event == Event::Exchange && !self.changed.is_exact()
    }

    fn describe(&self, (fault, history): &Shown) -> String {
        let change = if matches!(self.event, Event::Reload | Event::Exchange) {
            format!(
                " -> {} {}/{}ms burst {}",
                self.changed.algorithm,
                self.changed.amount,
                self.changed.period_ms,
                self.changed.burst
            )
        } else {
            String::new()
        };
        let mut fault = fault.clone();
        if let Fault::Beyond { requests, .. } = &mut fault {
            requests.clear();
        }
        format!(
            "── seed {} limit {} {:?}: {:?}{change}, delays {:?}\n{fault:?}\n{history}",
            self.seed, self.number, self.event, self.limit, self.delays
        )
    }
}

/// Faults that do not fail the run, and why.
struct Exception {
    why: &'static str,
    covers: fn(&Judged, &Fault) -> bool,
}

/// Documented exceptions first, then known defects that are not fixed yet.
const EXCEPTIONS: &[Exception] = &[
    Exception {
        why: "docs/decisions/0003: another gateway may hold the last tokens of a nearly spent limit",
        covers: |judged, fault| judged.is_leased() && fault.excess() == 0,
    },
    Exception {
        why: "docs/decisions/0003: usage that Redis lost is admitted again if no gateway remembers it",
        covers: |judged, fault| {
            let lost = matches!(judged.event, Event::Flush | Event::Restart);
            lost && judged.limit.scope != Scope::Local && fault.is_beyond()
        },
    },
    Exception {
        why: "docs/shared-limits.md: after a loss Redis grants little until every gateway has reported its memory",
        covers: |judged, fault| {
            let lost = matches!(judged.event, Event::Flush | Event::Restart);
            lost && judged.limit.scope != Scope::Local && fault.excess() == 0
        },
    },
];

/// Figures of many sets.
#[derive(Default)]
pub struct Summary {
    configurations: usize,
    requests: usize,
    refused: usize,
    /// Requests to leased limits, and those refused wrongly.
    leases: (usize, usize),
    /// By event, class and kind of fault: configurations that show it, faults.
    kinds: BTreeMap<String, (usize, usize)>,
    /// By class: configurations, requests, refused, and the comparison.
    classes: BTreeMap<String, (usize, usize, usize, Comparison)>,
    /// Faults covered by an exception.
    excused: BTreeMap<&'static str, usize>,
    pub broken: Vec<String>,
}

impl Summary {
    pub fn add(&mut self, set: &[Judged]) {
        for judged in set {
            self.configurations += 1;
            self.requests += judged.requests;
            self.refused += judged.refused;
            let class = self.classes.entry(judged.limit.class()).or_default();
            class.0 += 1;
            class.1 += judged.requests;
            class.2 += judged.refused;
            if judged.is_leased() {
                let wrong = |shown: &&Shown| matches!(shown.0, Fault::WronglyRefused { .. });
                self.leases.0 += judged.requests;
                self.leases.1 += judged.faults.iter().filter(wrong).count();
            }
            if judged.event == Event::Nothing {
                class.3.add(judged.compared);
            }
            let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
            for shown in &judged.faults {
                let count = kinds.entry(shown.0.name()).or_default();
                *count += 1;
                if *count == 1 && env::var("TIDEGATE_JUDGE_VERBOSE").is_ok() {
                    println!("{}", judged.describe(shown));
                }
                let exception = EXCEPTIONS
                    .iter()
                    .find(|exception| (exception.covers)(judged, &shown.0));
                match exception {
                    Some(exception) => *self.excused.entry(exception.why).or_default() += 1,
                    None if *count == 1 => self.broken.push(judged.describe(shown)),
                    None => {}
                }
            }
            for (kind, count) in kinds {
                let name = format!("{:?} | {} | {kind}", judged.event, judged.limit.class());
                let sums = self.kinds.entry(name).or_default();
                sums.0 += 1;
                sums.1 += count;
            }
        }
    }

    pub fn leases_refused_wrongly(&self) -> f64 {
        self.leases.1 as f64 / self.leases.0.max(1) as f64
    }

    pub fn print(&self) {
        println!(
            "{} configurations, {} requests, {} of them refused",
            self.configurations, self.requests, self.refused
        );
        for (class, (count, requests, refused, compared)) in &self.classes {
            println!(
                "{class}: {count} configurations, {requests} requests, {refused} refused, {:.1} % of exact",
                compared.share()
            );
        }
        for (kind, (configurations, faults)) in &self.kinds {
            println!("{kind}: {faults} in {configurations} configurations");
        }
        for (why, faults) in &self.excused {
            println!("{faults} faults are excused: {why}");
        }
    }
}
