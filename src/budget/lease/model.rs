//! Several gateways and a store in virtual time, under every order of arrivals, delays and losses
//! that proptest finds: together they never admit more than the limit.
//!
//! The store is `bucket.lua` in Rust (`tests/it` tests the scripts themselves against a Redis).
//! Gateways follow the lease manager: one call at a time per key, requests that arrive meanwhile
//! wait for it, and local tokens are spent first. A judge runs an exact bucket beside them; its
//! deficit at an admission is what was admitted too early.

use std::time::Duration;

use proptest::prelude::*;

use super::{
    CallReason, Forecast, Granted, Lease, LeaseAlgorithm, LeaseCall, LeaseReport, LeaseTerms,
    Reply, Requests, TokenPair,
};

const MS: u64 = 1_000_000;

/// `bucket.lua`.
struct BucketScript {
    level: f64,
    at_ns: u64,
    generation: u32,
    out: [f64; 2],
}

impl BucketScript {
    fn new(terms: &LeaseTerms) -> BucketScript {
        BucketScript {
            level: terms.capacity as f64,
            at_ns: 0,
            generation: 0,
            out: [0.0; 2],
        }
    }

    fn call(&mut self, now_ns: u64, terms: &LeaseTerms, call: &LeaseCall) -> Reply {
        let (capacity, tau_us) = (terms.capacity as f64, terms.generation_us());
        let generation = (now_ns / 1000 / tau_us) as u32;
        match generation - self.generation {
            0 => {}
            1 => self.out = [0.0, self.out[0]],
            _ => self.out = [0.0; 2],
        }
        self.generation = generation;
        // refill before applying reports: the time of the reported spending is unknown, and the
        // bucket may have been full until just now
        let top = capacity - self.out[0] - self.out[1];
        if self.level < top {
            self.level = (self.level + terms.refill(now_ns - self.at_ns)).min(top);
        }
        self.at_ns = now_ns;
        let mut back = 0.0;
        for report in &call.reports {
            let (of, tokens, returned) = match *report {
                LeaseReport::Spent { generation, tokens } => (generation, tokens as f64, false),
                LeaseReport::Returned { generation, tokens } => (generation, tokens as f64, true),
                // this store loses nothing, and every request uses its grant
                LeaseReport::Out { .. }
                | LeaseReport::Unused { .. }
                | LeaseReport::Charge { .. }
                | LeaseReport::Refund { .. } => continue,
                LeaseReport::Debt { tokens, .. } => {
                    self.level = (self.level - tokens as f64).max(-capacity);
                    continue;
                }
            };
            let age = generation.wrapping_sub(of) as usize;
            if let Some(out) = self.out.get_mut(age) {
                let known = tokens.min(*out);
                *out -= known;
                back += if returned { known } else { 0.0 };
            }
        }
        self.level = (self.level + back).min(capacity);
        let whole = self.level.floor().max(0.0);
        let need = call.need.grant(whole as u64).0 as f64;
        let rest = whole - need;
        let since = (call.since_us as f64 * terms.rate).min(capacity);
        let want = (call.part * rest)
            .max(since)
            .min(call.want as f64)
            .min(rest);
        let want = (want / call.unit as f64).floor() * call.unit as f64;
        self.level -= need + want;
        self.out[0] += want;
        let wait_us = if self.level < 1.0 {
            (1.0 - self.level) / terms.rate + 1.0
        } else {
            0.0
        };
        Reply {
            need: need as u64,
            want: want as u64,
            generation,
            valid_us: u64::from(generation + 2) * tau_us - now_ns / 1000,
            pool: (whole - need - want) as u64,
            wait_us: wait_us as u64,
            incarnation: 1,
            disagrees: false,
            demand: 0,
            state: [((capacity - self.level) / terms.rate) as u64 + 1, 0],
        }
    }
}

/// An exact bucket for comparison.
struct Judge {
    level: f64,
    at_ns: u64,
    worst: f64,
    admitted: u64,
}

impl Judge {
    fn admit(&mut self, now_ns: u64, terms: &LeaseTerms) {
        let refilled = self.level + terms.refill(now_ns - self.at_ns);
        self.level = refilled.min(terms.capacity as f64) - 1.0;
        self.at_ns = now_ns;
        self.worst = self.worst.min(self.level);
        self.admitted += 1;
    }
}

/// A call in flight: what happens to it, and when.
struct ModelCall {
    sent_ns: u64,
    /// When it reaches the store; `None` if it is lost on the way.
    there_ns: Option<u64>,
    back_ns: u64,
    /// The reply is lost.
    is_lost: bool,
    call: LeaseCall,
    waiting: u64,
    reply: Option<Reply>,
}

#[derive(Default)]
struct ModelGateway {
    lease: Lease,
    /// Tokens and deadline by slot.
    hand: [(u64, u64); 2],
    waiting: u64,
    flight: Option<ModelCall>,
    pause_until_ns: u64,
    forecast: Forecast,
}

impl ModelGateway {
    fn held(&self, now_ns: u64) -> TokenPair {
        self.hand
            .map(|(tokens, deadline)| if now_ns < deadline { tokens } else { 0 })
    }

    /// Like the lease manager's look at a cell: drops expired tokens.
    fn look(&mut self, now_ns: u64, horizon_ns: u64) {
        for slot in 0..2 {
            if self.hand[slot].1 != 0 && self.hand[slot].1 <= now_ns {
                self.hand[slot] = (0, 0);
                self.lease.lapsed(slot);
            }
        }
        self.lease.look(now_ns, horizon_ns, self.held(now_ns), 0);
    }

    fn arrives(&mut self, now_ns: u64, terms: &LeaseTerms, judge: &mut Judge) {
        let held = self.held(now_ns);
        let oldest = match (held[0] > 0, held[1] > 0) {
            (true, true) => usize::from(self.hand[1].1 < self.hand[0].1),
            (true, false) => 0,
            (false, true) => 1,
            (false, false) => {
                let early_ns = self.forecast.not_before_ns(terms, 1);
                if now_ns >= self.pause_until_ns.max(early_ns) {
                    let horizon_ns = terms.horizon_ns(MS);
                    self.look(now_ns, horizon_ns);
                    self.lease.arrived(now_ns, horizon_ns, 0, 1);
                    self.lease.asked(now_ns, horizon_ns, 1);
                    self.waiting += 1;
                }
                return;
            }
        };
        self.hand[oldest].0 -= 1;
        judge.admit(now_ns, terms);
    }

    fn takes(&mut self, now_ns: u64, flight: &ModelCall, terms: &LeaseTerms, judge: &mut Judge) {
        let Some(reply) = flight.reply.filter(|_| !flight.is_lost) else {
            return;
        };
        self.look(now_ns, terms.horizon_ns(MS));
        let refused = (reply.need < flight.waiting).then_some(1);
        let granted: Granted =
            self.lease
                .replied(now_ns, flight.sent_ns, terms, (&reply, refused), (MS, 0.5));
        if granted.replaces {
            self.hand[granted.slot] = (0, 0);
        }
        let (tokens, until) = &mut self.hand[granted.slot];
        *until = if *until == 0 {
            granted.deadline_ns
        } else {
            (*until).min(granted.deadline_ns)
        };
        *tokens += granted.bank;
        for _ in 0..reply.need.min(flight.waiting) {
            judge.admit(now_ns, terms);
        }
        self.forecast = granted.forecast;
        self.pause_until_ns = granted.pause.map_or(0, |pause| pause.until_ns);
        let early_ns = self.forecast.not_before_ns(terms, 1);
        if now_ns < self.pause_until_ns.max(early_ns) {
            self.waiting = 0;
        }
    }
}

/// One event, `after_ms` after the previous one.
#[derive(Clone, Copy, Debug)]
struct ModelStep {
    after_ms: u64,
    gateway: usize,
    arrivals: u64,
    delay_ms: u64,
    /// 0 to 99: below 4 the call is lost, below 8 the reply.
    fate: u8,
    /// Below 3, the gateway crashes and restarts.
    crash: u8,
}

fn step() -> impl Strategy<Value = ModelStep> {
    (
        0..40_u64,
        0..4_usize,
        0..40_u64,
        0..6_u64,
        0..100_u8,
        0..200_u8,
    )
        .prop_map(
            |(after_ms, gateway, arrivals, delay_ms, fate, crash)| ModelStep {
                after_ms,
                gateway,
                arrivals,
                delay_ms,
                fate,
                crash,
            },
        )
}

/// Runs the steps and returns the judge.
fn run(terms: &LeaseTerms, steps: &[ModelStep]) -> Judge {
    let mut store = BucketScript::new(terms);
    let mut judge = Judge {
        level: terms.capacity as f64,
        at_ns: 0,
        worst: 0.0,
        admitted: 0,
    };
    let mut gateways: [ModelGateway; 4] = Default::default();
    let mut now_ns = 0;
    for step in steps {
        let until_ns = now_ns + step.after_ms * MS;
        while now_ns < until_ns {
            now_ns += MS;
            for gateway in &mut gateways {
                if let Some(flight) = &mut gateway.flight
                    && flight.there_ns.is_some_and(|there| there <= now_ns)
                {
                    flight.there_ns = None;
                    flight.reply = Some(store.call(now_ns, terms, &flight.call));
                }
                if let Some(flight) = gateway.flight.take_if(|flight| flight.back_ns <= now_ns) {
                    gateway.takes(now_ns, &flight, terms, &mut judge);
                }
            }
        }
        let gateway = &mut gateways[step.gateway];
        if step.crash < 3 {
            *gateway = ModelGateway::default();
        }
        for _ in 0..step.arrivals {
            gateway.arrives(now_ns, terms, &mut judge);
        }
        if gateway.flight.is_none() {
            let horizon_ns = terms.horizon_ns(MS);
            gateway.look(now_ns, horizon_ns);
            let held = gateway.held(now_ns);
            let surplus = gateway.lease.surplus(now_ns, terms, horizon_ns, held);
            for ((tokens, _), back) in gateway.hand.iter_mut().zip(surplus) {
                *tokens = tokens.saturating_sub(back);
            }
            let need = std::mem::take(&mut gateway.waiting);
            let held = gateway.held(now_ns);
            let is_low = gateway.lease.is_low(now_ns, terms, horizon_ns, MS, held);
            if need > 0 || surplus != [0, 0] || is_low && now_ns >= gateway.pause_until_ns {
                let ask = CallReason {
                    need: Requests::from_iter(std::iter::repeat_n(1, need as usize)),
                    back: surplus,
                    fill: true,
                };
                let call = gateway.lease.call(now_ns, terms, horizon_ns, held, ask);
                let there_ns = now_ns + step.delay_ms * MS;
                gateway.flight = Some(ModelCall {
                    sent_ns: now_ns,
                    there_ns: (step.fate >= 4).then_some(there_ns),
                    back_ns: there_ns + step.delay_ms * MS + MS,
                    is_lost: step.fate < 8,
                    call,
                    waiting: need,
                    reply: None,
                });
            }
        }
    }
    judge
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn gateways_together_never_admit_more_than_the_limit(
        rate in 1_u64..2_000,
        burst in 1_u64..2_000,
        steps in prop::collection::vec(step(), 50..400),
    ) {
        let terms = LeaseTerms::new(LeaseAlgorithm::Bucket, rate, Duration::from_secs(1), burst, true);
        let judge = run(&terms, &steps);
        // a waiter is admitted at most 6 ms after its grant, and tokens are whole
        let tolerance = terms.refill(6 * MS) + 1.0;
        prop_assert!(judge.worst >= -tolerance, "{} tokens too many of {}", -judge.worst, judge.admitted);
    }

    #[test]
    fn asking_for_every_request_never_admits_more_either(
        rate in 1_u64..2_000,
        burst in 1_u64..2_000,
        steps in prop::collection::vec(step(), 50..400),
    ) {
        let terms = LeaseTerms::new(LeaseAlgorithm::Bucket, rate, Duration::from_secs(1), burst, false);
        let judge = run(&terms, &steps);
        let tolerance = terms.refill(6 * MS) + 1.0;
        prop_assert!(judge.worst >= -tolerance, "{} tokens too many of {}", -judge.worst, judge.admitted);
    }
}

#[test]
fn under_overload_without_losses_nearly_all_of_the_limit_is_admitted() {
    let terms = LeaseTerms::new(
        LeaseAlgorithm::Bucket,
        1_000,
        Duration::from_secs(1),
        1_000,
        true,
    );
    // 4 gateways, 12 requests each every 4 ms: three times the limit, for ten seconds
    let steps: Vec<ModelStep> = (0..10_000)
        .map(|turn| ModelStep {
            after_ms: 1,
            gateway: turn % 4,
            arrivals: 12,
            delay_ms: 1,
            fate: 99,
            crash: 199,
        })
        .collect();
    let judge = run(&terms, &steps);
    let exact = 1_000 + 10 * 1_000;
    assert!(
        judge.admitted as f64 >= 0.96 * f64::from(exact),
        "{} of {exact}",
        judge.admitted
    );
    assert!(judge.worst >= -5.0, "{} too many", -judge.worst);
}
