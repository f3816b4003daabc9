//! Models gateways that overload one store: how much of its time their bounds and breakers leave
//! useful.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{Allowed, Breaker};

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
const BUDGET: u64 = 5 * MS;
const TRAVEL: u64 = 250 * US;
const SECONDS: u64 = 20;
/// Calls per second that all gateways want to make.
const ASKED: f64 = 20_500.0;

/// The next event of one gateway.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ModelEvent {
    Asks,
    Replied { taken: u64 },
    Overdue,
    EndsLate,
    Probes,
    Probed,
}

/// Gateways, and the store's single queue.
struct BreakerModel {
    random: u64,
    breakers: Vec<Breaker>,
    next: BinaryHeap<Reverse<(u64, ModelEvent, usize)>>,
    service: u64,
    busy_until: u64,
    useful: u64,
}

impl BreakerModel {
    /// A store with the capacity for this share of the calls.
    fn new(gateways: usize, part: f64) -> BreakerModel {
        let mut model = BreakerModel {
            random: 0x9E37_79B9_7F4A_7C15,
            breakers: (0..gateways).map(|_| Breaker::new()).collect(),
            next: BinaryHeap::new(),
            service: (1e9 / (ASKED * part)) as u64,
            busy_until: 0,
            useful: 0,
        };
        for gateway in 0..gateways {
            model.asks_again(0, gateway);
        }
        model
    }

    /// The share of the store's time spent on replies that are in time.
    fn useful(mut self) -> f64 {
        let end = SECONDS * 1_000 * MS;
        while let Some(Reverse((now, what, gateway))) = self.next.pop()
            && now < end
        {
            self.happens(now, what, gateway);
        }
        (self.useful * self.service) as f64 / end as f64
    }

    fn happens(&mut self, now: u64, what: ModelEvent, gateway: usize) {
        let jitter = self.random();
        let was_open = self.breakers[gateway].is_open();
        let breaker = &mut self.breakers[gateway];
        match what {
            ModelEvent::Asks => {
                if breaker.enter(now, BUDGET, jitter) == Allowed::Yes {
                    self.calls(now, gateway);
                }
                self.asks_again(now, gateway);
            }
            ModelEvent::Replied { taken } => {
                breaker.ended();
                breaker.replied(taken, BUDGET);
            }
            ModelEvent::Overdue => breaker.timed_out(now, BUDGET, jitter),
            ModelEvent::EndsLate => breaker.ended(),
            ModelEvent::Probes => {
                breaker.probing();
                let answered = self.busy_until.max(now) + 2 * TRAVEL;
                self.plan(answered, ModelEvent::Probed, gateway);
            }
            ModelEvent::Probed => breaker.probed(now, true, jitter),
        }
        let breaker = &self.breakers[gateway];
        if let Some(due) = breaker.probe_due_ns().filter(|_| !was_open) {
            self.plan(due, ModelEvent::Probes, gateway);
        }
    }

    fn calls(&mut self, now: u64, gateway: usize) {
        self.busy_until = self.busy_until.max(now + TRAVEL) + self.service;
        let ends = self.busy_until + TRAVEL;
        let taken = ends - now;
        if taken <= BUDGET {
            self.useful += 1;
            self.plan(ends, ModelEvent::Replied { taken }, gateway);
        } else {
            self.plan(now + BUDGET, ModelEvent::Overdue, gateway);
            self.plan(ends, ModelEvent::EndsLate, gateway);
        }
    }

    /// Schedules the next call at a random moment (Poisson).
    fn asks_again(&mut self, now: u64, gateway: usize) {
        let rate = ASKED / self.breakers.len() as f64;
        let gap = -(1.0 - self.random()).ln() / rate;
        self.plan(now + (gap * 1e9) as u64, ModelEvent::Asks, gateway);
    }

    fn plan(&mut self, at: u64, what: ModelEvent, gateway: usize) {
        self.next.push(Reverse((at, what, gateway)));
    }

    /// Random, 0 to 1 (xorshift64*).
    fn random(&mut self) -> f64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let bits = self.random.wrapping_mul(0x2545_F491_4F6C_DD1D);
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[test]
fn a_store_that_is_asked_for_more_than_it_can_do_spends_its_time_on_replies_that_come_in_time() {
    for gateways in [4, 16, 64] {
        for part in [1.0, 0.9, 0.8, 0.6, 0.5] {
            let useful = BreakerModel::new(gateways, part).useful();
            println!("{gateways} gateways, {part} of what they ask: {useful:.3}");
            assert!(useful >= 0.9, "{gateways} gateways, {part}: {useful:.3}");
        }
    }
}

#[test]
fn a_store_that_can_do_what_it_is_asked_is_left_alone() {
    let useful = BreakerModel::new(64, 1.4).useful();
    assert!((0.70..=0.73).contains(&useful), "{useful:.3} of 1 / 1.4");
}
