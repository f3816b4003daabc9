//! A fixed window that gateways borrow from, in virtual time, while the demand moves from one gateway to the next: how much of what an
//! exact window admits is admitted, and that it is never more.

use std::time::Duration;

use super::{Algorithm, Ask, Call, Forecast, Hand, Lease, Reply, Report, Requests, Terms};

const MS: u64 = 1_000_000;
const RTT_NS: u64 = MS;

/// The bottom of `window.lua`, for a fixed window.
#[derive(Default)]
struct Store {
    window: u64,
    count: u64,
    demand: f64,
    at_ns: u64,
}

impl Store {
    fn call(&mut self, now_ns: u64, terms: &Terms, call: &Call) -> Reply {
        let span_ns = terms.span_us * 1000;
        let window = now_ns / span_ns;
        if window != self.window {
            (self.window, self.count) = (window, 0);
        }
        for report in &call.reports {
            if let Report::Returned { generation, tokens } = report
                && u64::from(*generation) == window
            {
                self.count -= tokens;
            }
        }
        let passed_us = ((now_ns - self.at_ns) / 1000) as f64;
        let memory = call.memory_us as f64;
        self.demand =
            self.demand * (-passed_us / memory).exp() + call.arrivals as f64 * 1e6 / memory;
        self.at_ns = now_ns;
        let whole = terms.capacity.saturating_sub(self.count);
        let (need, _) = call.need.grant(whole);
        let rest = (whole - need) as f64;
        let share = if self.demand > call.rate {
            call.rate / self.demand
        } else {
            1.0
        };
        let want = (call.part * rest * share).min(call.want as f64).min(rest) as u64;
        let want = want - want % call.unit;
        self.count += need + want;
        Reply {
            need,
            want,
            generation: window as u32,
            valid_us: (span_ns - now_ns % span_ns) / 1000,
            pool: whole - need - want,
            demand: (self.demand * 1e3) as u64,
            ..Reply::default()
        }
    }
}

/// As the keeper goes about it.
#[derive(Default)]
struct Gateway {
    lease: Lease,
    hand: [(u64, u64); 2],
    queue: u64,
    refused: u64,
    flight: Option<(u64, u64, Call)>,
    low: u64,
    pause_ns: u64,
    poll_ns: Option<u64>,
    look_ns: u64,
    forecast: Forecast,
    calls: u64,
}

impl Gateway {
    fn held(&self, now_ns: u64) -> Hand {
        self.hand
            .map(|(tokens, until)| if now_ns < until { tokens } else { 0 })
    }

    fn look(&mut self, now_ns: u64, horizon_ns: u64) {
        for slot in 0..2 {
            if self.hand[slot].1 != 0 && self.hand[slot].1 <= now_ns {
                self.hand[slot] = (0, 0);
                self.lease.lapsed(slot);
            }
        }
        let refused = std::mem::take(&mut self.refused);
        self.lease
            .look(now_ns, horizon_ns, self.held(now_ns), refused);
    }

    /// Whether it is admitted at once.
    fn arrives(&mut self, now_ns: u64, terms: &Terms, horizon_ns: u64) -> bool {
        let held = self.held(now_ns);
        if let Some(slot) = held.iter().position(|&tokens| tokens > 0) {
            self.hand[slot].0 -= 1;
            if held[0] + held[1] - 1 < self.low {
                self.low = 0;
                self.look(now_ns, horizon_ns);
                self.go_on(now_ns, terms, horizon_ns, true);
            }
            return true;
        }
        if now_ns < self.pause_ns {
            self.refused += 1;
            return false;
        }
        self.look(now_ns, horizon_ns);
        self.lease.arrived(now_ns, horizon_ns, 0, 1);
        self.lease.asked(now_ns, horizon_ns, 1);
        if self.flight.is_none() || self.lease.may_queue(now_ns, terms, self.queue) {
            self.queue += 1;
            self.go_on(now_ns, terms, horizon_ns, false);
        }
        false
    }

    fn call(&mut self, now_ns: u64, terms: &Terms, horizon_ns: u64, fill: bool, back: Hand) {
        self.low = 0;
        self.poll_ns = None;
        self.calls += 1;
        let waiting = std::mem::take(&mut self.queue);
        let ask = Ask {
            need: Requests::from_iter(std::iter::repeat_n(1, waiting as usize)),
            back,
            fill,
        };
        let held = self.held(now_ns);
        let call = self.lease.call(now_ns, terms, horizon_ns, held, ask);
        self.flight = Some((now_ns, waiting, call));
    }

    fn go_on(&mut self, now_ns: u64, terms: &Terms, horizon_ns: u64, has_spent: bool) {
        if self.flight.is_some() {
            return;
        }
        if self.queue > 0 {
            return self.call(now_ns, terms, horizon_ns, true, [0, 0]);
        }
        if now_ns < self.pause_ns {
            let polls = self.lease.polls(now_ns, terms, self.pause_ns);
            self.poll_ns = polls.then_some(self.pause_ns);
            return;
        }
        let held = self.held(now_ns);
        if has_spent && self.lease.is_low(now_ns, terms, horizon_ns, RTT_NS, held) {
            return self.call(now_ns, terms, horizon_ns, true, [0, 0]);
        }
        let mark = self.lease.low_mark(now_ns, terms, horizon_ns, RTT_NS);
        self.low = mark.map_or(0, |mark| mark + 1);
    }

    fn tick(&mut self, now_ns: u64, terms: &Terms, store: &mut Store) -> u64 {
        let horizon_ns = terms.horizon_ns(RTT_NS);
        let mut admitted = 0;
        if let Some((sent_ns, waiting, call)) =
            self.flight.take_if(|flight| flight.0 + RTT_NS <= now_ns)
        {
            let reply = store.call(now_ns - RTT_NS / 2, terms, &call);
            self.look(now_ns, horizon_ns);
            let refused = (reply.need < waiting).then_some(1);
            let granted =
                self.lease
                    .replied(now_ns, sent_ns, terms, (&reply, refused), (RTT_NS, 0.5));
            if granted.replaces {
                self.hand[granted.slot] = (0, 0);
            }
            self.hand[granted.slot].0 += granted.bank;
            self.hand[granted.slot].1 = granted.deadline_ns;
            self.pause_ns = granted.pause.map_or(0, |pause| pause.until_ns);
            self.forecast = granted.forecast;
            admitted += reply.need;
            if now_ns < self.pause_ns {
                self.queue = 0;
            }
            self.go_on(now_ns, terms, horizon_ns, false);
            self.look_ns = self
                .look_ns
                .min(self.lease.look_again_ns(now_ns, horizon_ns));
        }
        if self.flight.is_none() && self.poll_ns.take_if(|due| *due <= now_ns).is_some() {
            self.look(now_ns, horizon_ns);
            if self.lease.is_wanted() {
                self.call(now_ns, terms, horizon_ns, true, [0, 0]);
            }
        }
        if self.look_ns <= now_ns {
            self.look(now_ns, horizon_ns);
            self.look_ns = self.lease.look_again_ns(now_ns, horizon_ns);
            let held = self.held(now_ns);
            let back = self.lease.surplus(now_ns, terms, horizon_ns, held);
            if self.flight.is_none() && back != [0, 0] {
                for (slot, back) in back.into_iter().enumerate() {
                    self.hand[slot].0 -= back;
                }
                self.call(now_ns, terms, horizon_ns, false, back);
            }
        }
        admitted
    }
}

/// What is admitted of what an exact window admits, and calls per request, over twenty windows. Demand is so many times the limit and
/// stays at one gateway for `stay_ms`.
fn run(terms: &Terms, times: f64, stay_ms: u64) -> (f64, f64) {
    let mut store = Store::default();
    let mut gateways: [Gateway; 4] = Default::default();
    let horizon_ns = terms.horizon_ns(RTT_NS);
    let window_ms = terms.span_us / 1000;
    let per_ms = times * terms.capacity as f64 / window_ms as f64;
    let (mut random, mut due, mut requests) = (7_u64, 0.0, 0_u64);
    let (mut admitted, mut exact, mut exact_in_window) = (0, 0, 0);
    let mut in_window = vec![0; 22];
    for ms in 0..20 * window_ms {
        let now_ns = ms * MS;
        if ms % window_ms == 0 {
            exact_in_window = 0;
        }
        for gateway in &mut gateways {
            let granted = gateway.tick(now_ns, terms, &mut store);
            // where the call was executed
            in_window[store.window as usize] += granted;
            admitted += granted;
        }
        due += per_ms;
        let hot = (ms / stay_ms) as usize % gateways.len();
        while due >= 1.0 {
            due -= 1.0;
            requests += 1;
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // a tenth comes anywhere
            let number = (random >> 33) as usize;
            let to = if number.is_multiple_of(10) {
                number / 10 % gateways.len()
            } else {
                hot
            };
            let passed = u64::from(gateways[to].arrives(now_ns, terms, horizon_ns));
            in_window[(ms / window_ms) as usize] += passed;
            admitted += passed;
            exact_in_window += 1;
            exact += u64::from(exact_in_window <= terms.capacity);
        }
    }
    let most = in_window.into_iter().max().unwrap_or(0);
    assert!(most <= terms.capacity, "{most} in one window");
    let calls: u64 = gateways.iter().map(|gateway| gateway.calls).sum();
    (
        admitted as f64 / exact as f64,
        calls as f64 / requests as f64,
    )
}

#[test]
fn a_hot_spot_that_moves_leaves_little_of_a_fixed_window_unused() {
    let mut worst = 1.0_f64;
    for (amount, window_ms, stay_ms) in [
        (100, 1_000, 300),
        (100, 1_000, 1_000),
        (300, 3_000, 500),
        (1_000, 1_000, 250),
        (1_000, 10_000, 2_000),
        (100, 2_000, 700),
    ] {
        let period = Duration::from_millis(window_ms);
        let terms = Terms::new(Algorithm::Fixed, amount, period, amount, true);
        for times in [0.5, 0.8, 1.0, 1.5, 2.0, 3.0] {
            let (part, calls) = run(&terms, times, stay_ms);
            println!(
                "{amount} per {window_ms} ms, {stay_ms} ms each, {times} x: {part:.3}, {calls:.3} calls"
            );
            worst = worst.min(part);
        }
    }
    assert!(worst >= 0.95, "{worst:.3}");
}
