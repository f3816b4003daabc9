//! Pure arithmetic of token leases: what a gateway requests, banks, reports and returns for one
//! key.
//!
//! ```text
//!            local tokens              call                        reply
//!   requests ─── spend ──▶ low? ──▶ need + want ──▶ the store ──▶ bank until the deadline ──▶ … ──▶ return surplus
//!                 └ none: wait for the reply                      └ pool short: remember the refusal, ask again later
//! ```
//!
//! The store debits its grants at once, so all gateways together never spend more than the limit. A
//! token belongs to a *generation*, a slice of the store's time, and expires with it. So a crashed
//! gateway's tokens return by themselves, and no local token outlives its debit. Each deadline is
//! counted from the moment the call was *sent*, so it is early, never late. The store's clock never
//! leaves the store: replies carry durations.
//!
//! Nothing here reads a clock, holds a lock or knows Redis. Rates are estimates and therefore
//! floats; tokens are integers.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod call;
mod forecast;
mod late;
mod late_units;
mod memory;
mod pace;
mod reply;
mod requests;
mod terms;

pub use call::{CallReason, Granted, LeaseCall, LeaseReport, Origin, Pause, TokenPair};
pub use forecast::Forecast;
use late_units::LateUnits;
pub use memory::Recollection;
use memory::ReplyMemory;
use pace::{Pace, patience_ns};
pub use reply::Reply;
pub use requests::Requests;
pub use terms::{LeaseAlgorithm, LeaseTerms};

/// The smallest batch, once this many arrivals are expected within the horizon.
const LEAST_BATCH: u64 = 4;
const WARM: f64 = 2.0;
/// The store's demand estimate has a memory of one horizon, but at least this.
const DEMAND_MEMORY_NS: u64 = 1_000_000_000;
/// If other gateways have no more than this share of the demand, a gateway counts as the only one.
const OTHERS: f64 = 0.05;
/// Share of the remaining pool that may be leased ahead: half, or all while the pool is short.
const PART: f64 = 0.5;
const PART_SHORT: f64 = 1.0;
/// Most local tokens of one generation: the capacity of a packed word.
pub const MAX_TOKENS: u64 = (1 << 26) - 1;
/// Gateway and store clocks may drift apart by a thousandth.
const VALIDITY: f64 = 0.999;

const NS_PER_S: f64 = 1e9;

/// The store's record against this gateway for one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Book {
    generation: u32,
    /// Tokens recorded as leased: granted ahead, not yet reported spent or returned. Briefly
    /// negative at most: tokens granted to a request and returned to the cell are not recorded
    /// until reported.
    out: i64,
    /// Local tokens at the last look.
    seen: u64,
}

/// The pool according to the last reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pool {
    tokens: u64,
    generation: u32,
    at_ns: u64,
    /// Windows only: the end of the window.
    until_ns: u64,
}

/// The lease of one key.
#[derive(Clone, Debug, Default)]
pub struct Lease {
    /// x: requests per second, with a memory of one horizon.
    rate: f64,
    rate_at_ns: u64,
    /// The last arrival of a request.
    arrived_ns: u64,
    /// Requests since the last call.
    arrivals: u64,
    books: [Book; 2],
    /// Units to return, by grant.
    unused: Vec<(Origin, u64)>,
    /// Admitted without the store and not yet charged; and the part that the call in flight
    /// charges.
    debt: u64,
    debt_sent: u64,
    /// The window of the whole debt, if it is a single known one.
    debt_of: Option<u32>,
    late: LateUnits,
    pace: Pace,
    /// The cost of the cheapest request lately asked for, and its time.
    unit: u64,
    unit_at_ns: u64,
    called_ns: Option<u64>,
    pool: Option<Pool>,
    share: Option<f64>,
    /// This gateway's part of the store's demand estimate, by the same formula, in requests per
    /// second.
    reported: f64,
    memory: ReplyMemory,
    /// The leases that the store had recorded before it lost them.
    forgotten: Vec<(u32, u64)>,
}

impl Lease {
    /// Counts arrivals: `spread` since the last look, `at_once` just now.
    pub fn arrived(&mut self, now_ns: u64, horizon_ns: u64, spread: u64, at_once: u64) {
        let horizon = horizon_ns as f64 / NS_PER_S;
        let passed = now_ns.saturating_sub(self.rate_at_ns) as f64 / NS_PER_S;
        let kept = (-passed / horizon).exp();
        // n arrivals spread evenly over the elapsed time; in the limit of no time, n / H
        let weight = if passed > 0.0 {
            (1.0 - kept) / passed
        } else {
            1.0 / horizon
        };
        self.rate = self.rate * kept + spread as f64 * weight + at_once as f64 / horizon;
        self.rate_at_ns = now_ns;
        let count = spread.saturating_add(at_once);
        if count > 0 {
            self.arrived_ns = now_ns;
            self.arrivals = self.arrivals.saturating_add(count);
        }
    }

    /// A request of this cost finds no local token, so Redis is asked.
    pub fn asked(&mut self, now_ns: u64, horizon_ns: u64, cost: u64) {
        let age_ns = now_ns.saturating_sub(self.unit_at_ns);
        if self.unit == 0 || cost <= self.unit || age_ns > horizon_ns.saturating_mul(2) {
            (self.unit, self.unit_at_ns) = (cost, now_ns);
        }
    }

    /// Learns from the remaining local tokens how many were spent.
    pub fn look(&mut self, now_ns: u64, horizon_ns: u64, hand: TokenPair, refused: u64) {
        let mut spent: u64 = 0;
        for (book, left) in self.books.iter_mut().zip(hand) {
            spent = spent.saturating_add(book.seen.saturating_sub(left));
            book.seen = left;
        }
        self.arrived(now_ns, horizon_ns, spent.saturating_add(refused), 0);
    }

    /// Local tokens of a generation have expired.
    pub fn lapsed(&mut self, slot: usize) {
        if let Some(book) = self.books.get_mut(slot) {
            book.seen = 0;
            book.out = 0;
        }
    }

    /// Admitted without the store: charged with the next call.
    pub fn owe(&mut self, now_ns: u64, tokens: u64) {
        if tokens == 0 {
            return;
        }
        let open = self.pool.filter(|pool| now_ns < pool.until_ns);
        let window = open.map(|pool| pool.generation);
        if self.debt == 0 {
            self.debt_of = window;
        } else if self.debt_of != window {
            self.debt_of = None;
        }
        self.debt = self.debt.saturating_add(tokens);
    }

    /// Units not yet charged by the store.
    pub fn debt(&self) -> u64 {
        self.debt.saturating_add(self.late.charged())
    }

    /// How many tokens this gateway should hold.
    pub fn target(&self, now_ns: u64, terms: &LeaseTerms, horizon_ns: u64) -> u64 {
        if !terms.ahead {
            return 0;
        }
        let horizon = horizon_ns as f64 / NS_PER_S;
        let age = now_ns.saturating_sub(self.rate_at_ns) as f64 / NS_PER_S;
        let rate = self.rate * (-age / horizon).exp();
        // tokens of a window expire with it
        let useful_ns = match self.pool {
            Some(pool) if now_ns < pool.until_ns && terms.algorithm != LeaseAlgorithm::Bucket => {
                horizon_ns.min(pool.until_ns.saturating_sub(now_ns))
            }
            _ => horizon_ns,
        };
        let expected = rate * useful_ns as f64 / NS_PER_S;
        let target = (expected - 0.5).max(0.0) as u64;
        let least = if expected >= WARM && !self.pace.is_short {
            LEAST_BATCH
        } else {
            0
        };
        let target = target.max(least).min(MAX_TOKENS).min(terms.most_ahead());
        let beyond = target.checked_rem(self.unit).unwrap_or(0);
        target.saturating_sub(beyond)
    }

    /// At this many local tokens or fewer, request more before they run out; `None` when a call is
    /// not worthwhile.
    pub fn low_mark(
        &self,
        now_ns: u64,
        terms: &LeaseTerms,
        horizon_ns: u64,
        rtt_ns: u64,
    ) -> Option<u64> {
        let target = self.target(now_ns, terms, horizon_ns);
        if target == 0 {
            return None;
        }
        let expected = self.rate * horizon_ns as f64 / NS_PER_S;
        let used_meanwhile = (1.5 * rtt_ns as f64 / NS_PER_S * self.rate).ceil() as u64;
        let low = if expected < WARM { 0 } else { used_meanwhile };
        // a call should bring at least half of the target
        let half = target.div_euclid(2).max(1);
        Some(low.min(target.saturating_sub(half)))
    }

    /// Whether to refill a cell that is this low now.
    pub fn is_low(
        &self,
        now_ns: u64,
        terms: &LeaseTerms,
        horizon_ns: u64,
        rtt_ns: u64,
        hand: TokenPair,
    ) -> bool {
        self.low_mark(now_ns, terms, horizon_ns, rtt_ns)
            .is_some_and(|low| total(hand) <= low)
    }

    /// Local tokens went to a request that had been counted before.
    pub fn took(&mut self, tokens: TokenPair) {
        for (book, tokens) in self.books.iter_mut().zip(tokens) {
            book.seen = book.seen.saturating_sub(tokens);
        }
    }

    /// Units granted to a request that did not use them and that no other may use: they return with
    /// the next call.
    pub fn unused(&mut self, origin: Origin, tokens: u64) {
        self.memory.returned(origin.generation, tokens);
        match self.unused.last_mut() {
            Some((known, count)) if *known == origin => *count = count.saturating_add(tokens),
            _ => self.unused.push((origin, tokens)),
        }
    }

    /// Whether to call even if no request waits: units go back, or a log has lost entries.
    pub fn has_news(&self) -> bool {
        !self.unused.is_empty() || self.late.is_due() || self.memory.tells()
    }

    /// Whether a store that lost the key would need a report.
    pub fn remembers(&self, now_ns: u64, terms: &LeaseTerms) -> bool {
        self.memory.matters(now_ns, terms)
    }

    /// Begins a call. `hand` is the local tokens now.
    pub fn call(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        horizon_ns: u64,
        hand: TokenPair,
        ask: CallReason,
    ) -> LeaseCall {
        let target = self.target(now_ns, terms, horizon_ns);
        let unit = self.unit.max(1);
        let missing = target.saturating_sub(total(hand));
        let missing = missing.saturating_sub(missing.checked_rem(unit).unwrap_or(0));
        let since_ns = self.called_ns.map(|called| now_ns.saturating_sub(called));
        let reports = self.reports(now_ns, terms, hand, ask.back);
        self.called_ns = Some(now_ns);
        let memory_ns = horizon_ns.max(DEMAND_MEMORY_NS);
        let arrivals = std::mem::take(&mut self.arrivals);
        let kept = (-(since_ns.unwrap_or(0) as f64) / memory_ns as f64).exp();
        self.reported = self.reported * kept + arrivals as f64 * NS_PER_S / memory_ns as f64;
        LeaseCall {
            need: ask.need,
            want: if ask.fill { missing } else { 0 },
            unit,
            part: if self.pace.is_short { PART_SHORT } else { PART },
            arrivals,
            rate: self.rate,
            since_us: since_ns.map_or(0, |ns| ns.div_euclid(1000).max(1)),
            memory_us: memory_ns.div_euclid(1000),
            memory: self.memory.recollection(now_ns, terms),
            reports,
        }
    }

    /// Takes the reports since the last call. Each is sent once: a lost call is never repeated, and
    /// its reports lapse.
    fn reports(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        hand: TokenPair,
        back: TokenPair,
    ) -> Vec<LeaseReport> {
        let mut reports = Vec::new();
        let is_bucket = terms.algorithm == LeaseAlgorithm::Bucket;
        let forgotten = std::mem::take(&mut self.forgotten).into_iter();
        reports
            .extend(forgotten.map(|(generation, tokens)| LeaseReport::Out { generation, tokens }));
        for ((book, left), tokens) in self.books.iter_mut().zip(hand).zip(back) {
            let generation = book.generation;
            let kept = i64::try_from(left).unwrap_or(i64::MAX);
            let given = i64::try_from(tokens).unwrap_or(i64::MAX);
            let spent = book.out.saturating_sub(kept).saturating_sub(given);
            // windows do not refill behind leases, so they need no report of spending
            if spent != 0 && is_bucket {
                let tokens = spent;
                reports.push(LeaseReport::Spent { generation, tokens });
            }
            if tokens > 0 {
                reports.push(LeaseReport::Returned { generation, tokens });
            }
            book.out = kept;
            book.seen = left;
        }
        reports.extend(self.unused.drain(..).map(|(origin, tokens)| {
            let generation = origin.generation;
            match is_bucket {
                true => LeaseReport::Unused { tokens, origin },
                false => LeaseReport::Returned { generation, tokens },
            }
        }));
        self.debt_sent = self.debt;
        if self.debt > 0 {
            let tokens = self.debt;
            let window = self.debt_of.filter(|_| !is_bucket);
            reports.push(LeaseReport::Debt { tokens, window });
        }
        self.late.report(now_ns, terms, &mut reports);
        reports
    }

    /// Applies the reply to a call sent at `sent_ns`. `refused` is the cost of the first refused
    /// request; `jitter` is random, 0 to 1.
    pub fn replied(
        &mut self,
        now_ns: u64,
        sent_ns: u64,
        terms: &LeaseTerms,
        (reply, refused): (&Reply, Option<u64>),
        (rtt_ns, jitter): (u64, f64),
    ) -> Granted {
        self.debt = self
            .debt
            .saturating_sub(std::mem::take(&mut self.debt_sent));
        self.late.replied();
        let is_late = self.memory.knows_later(sent_ns);
        let is_lost = self.memory.saw(now_ns, sent_ns, terms, reply);
        if is_lost && terms.algorithm == LeaseAlgorithm::Bucket {
            let out = self.books.iter().filter_map(|book| {
                let tokens = u64::try_from(book.out).ok().filter(|&tokens| tokens > 0)?;
                Some((book.generation, tokens))
            });
            self.forgotten = out.collect();
        }
        let valid_ns = (reply.valid_us as f64 * 1e3 * VALIDITY) as u64;
        let deadline_ns = sent_ns.saturating_add(valid_ns);
        self.pool = Some(Pool {
            tokens: reply.pool,
            generation: reply.generation,
            at_ns: now_ns,
            until_ns: deadline_ns,
        });
        // a log does not know the demand: assume that all gateways have the same
        if reply.demand > 0 {
            let demand = reply.demand as f64 / 1e3;
            let share = (self.rate / demand).min(1.0);
            self.share = Some(self.share.map_or(share, |known| 0.7 * known + 0.3 * share));
        }
        let demand = reply.demand as f64 / 1e3;
        self.pace.is_sole = demand - self.reported <= OTHERS * demand;

        let slot = slot_of(reply.generation);
        let mut replaces = false;
        let mut bank = reply.want.min(MAX_TOKENS);
        if let Some(book) = self.books.get_mut(slot) {
            if is_late && book.generation != reply.generation {
                // a later call was answered before: these tokens are about to expire and must not
                // replace better ones
                bank = 0;
            } else if book.generation != reply.generation {
                replaces = true;
                *book = Book {
                    generation: reply.generation,
                    ..Book::default()
                };
            }
            let out = i64::try_from(bank).unwrap_or(i64::MAX);
            book.out = book.out.saturating_add(out);
            book.seen = book.seen.saturating_add(bank);
        }
        self.pace.last_got = reply.need.saturating_add(reply.want);
        if self.pace.last_got > 0 {
            self.pace.got_ns = now_ns;
        }
        let forecast = Forecast::new(now_ns, sent_ns, terms, reply, refused);
        self.pace.is_short = (reply.pool as f64) < self.pace.short_below(terms);
        let pause = self
            .pace
            .pause(now_ns, terms, &forecast, refused, (rtt_ns, jitter));
        Granted {
            slot,
            deadline_ns,
            bank,
            replaces,
            // a log that has lost entries first receives them, then is asked again
            forecast: if self.memory.tells() {
                Forecast::default()
            } else {
                forecast
            },
            pause: pause.filter(|_| !self.memory.tells()),
            is_lost,
            origin: Origin::of(terms, reply),
        }
    }

    /// Whether to ask again when a refusal ends without waiting for a request: requests keep
    /// arriving.
    pub fn polls(&self, now_ns: u64, terms: &LeaseTerms, until_ns: u64) -> bool {
        let pause_ns = until_ns.saturating_sub(now_ns);
        // the next window belongs to gateways that ask for it: the demand may have moved
        let is_next = terms.algorithm == LeaseAlgorithm::Fixed
            && self.pool.is_none_or(|pool| until_ns >= pool.until_ns);
        terms.ahead && !is_next && self.rate * pause_ns as f64 / NS_PER_S >= 2.0
    }

    /// Whether one more request may wait for a call in flight. While the pool is short and
    /// contended, the number is at most what the last call brought.
    pub fn may_queue(&self, now_ns: u64, terms: &LeaseTerms, waiting: u64) -> bool {
        // for a strict limit only the store knows what was returned
        let is_short = || {
            let pool = self.pool(now_ns, terms);
            pool.is_some_and(|pool| pool < self.pace.short_below(terms))
        };
        !terms.ahead || self.pace.is_sole || waiting < self.pace.last_got.max(1) || !is_short()
    }

    /// When to look again at a cell with tokens.
    pub fn look_again_ns(&self, now_ns: u64, horizon_ns: u64) -> u64 {
        now_ns.saturating_add(self.patience_ns(horizon_ns).min(horizon_ns))
    }

    fn patience_ns(&self, horizon_ns: u64) -> u64 {
        let quiet_ns = self.rate_at_ns.saturating_sub(self.arrived_ns);
        patience_ns(self.rate, quiet_ns, self.pace.is_short, horizon_ns)
    }

    /// Whether requests arrived since the last call.
    pub fn is_wanted(&self) -> bool {
        self.arrivals > 0
    }

    /// The local tokens to return, oldest generation first.
    pub fn surplus(
        &self,
        now_ns: u64,
        terms: &LeaseTerms,
        horizon_ns: u64,
        hand: TokenPair,
    ) -> TokenPair {
        let held = total(hand);
        let target = self.target(now_ns, terms, horizon_ns);
        let idle_ns = now_ns.saturating_sub(self.arrived_ns);
        let scarce = self.pace.is_short
            || self
                .pool
                .is_none_or(|pool| pool.tokens < terms.capacity.div_euclid(2));
        let least = if scarce {
            1
        } else {
            2.max(terms.capacity.div_euclid(100))
        };
        // no demand here, while others may be refused
        let hoarded = idle_ns >= self.patience_ns(horizon_ns);
        let surplus = if hoarded || !terms.ahead {
            held
        } else {
            held.saturating_sub(target)
        };
        let is_much = held > target.saturating_mul(2).saturating_add(1);
        let is_idle = target < 1 && idle_ns >= horizon_ns;
        if surplus < least || !(hoarded || !terms.ahead || is_much || is_idle) {
            return [0, 0];
        }
        let mut back = [0, 0];
        let mut rest = surplus;
        for slot in self.oldest_first() {
            if let (Some(back), Some(left)) = (back.get_mut(slot), hand.get(slot)) {
                *back = rest.min(*left);
                rest = rest.saturating_sub(*back);
            }
        }
        back
    }

    /// Whether this key can be forgotten without loss: no request for two horizons, and no debt.
    pub fn is_idle(&self, now_ns: u64, horizon_ns: u64) -> bool {
        self.debt() == 0 && self.is_quiet(now_ns, horizon_ns.saturating_mul(2))
    }

    /// Whether no request arrived for `time_ns`.
    pub fn is_quiet(&self, now_ns: u64, time_ns: u64) -> bool {
        now_ns.saturating_sub(self.arrived_ns) >= time_ns
    }

    /// Whether the key was idle long enough to count as new here: the limit's span, at least two
    /// horizons.
    pub fn is_cold(&self, now_ns: u64, terms: &LeaseTerms, horizon_ns: u64) -> bool {
        let quiet_ns = (terms.span_ns() as u64).max(horizon_ns.saturating_mul(2));
        self.called_ns
            .is_none_or(|called| now_ns.saturating_sub(called) >= quiet_ns)
    }

    /// Whether the pool was short at the last reply.
    pub fn is_short(&self) -> bool {
        self.pace.is_short
    }

    /// This gateway's share of all demand, 0 to 1; `None` before the first reply.
    pub fn share(&self) -> Option<f64> {
        self.share
    }

    /// The pool at the last reply, plus what refilled since; `None` before the first reply.
    pub fn pool(&self, now_ns: u64, terms: &LeaseTerms) -> Option<f64> {
        let pool = self.pool?;
        let capacity = terms.capacity as f64;
        let age_ns = now_ns.saturating_sub(pool.at_ns);
        Some(match terms.algorithm {
            LeaseAlgorithm::Fixed if now_ns < pool.until_ns => pool.tokens as f64,
            LeaseAlgorithm::Fixed => capacity,
            _ => (pool.tokens as f64 + terms.refill(age_ns)).min(capacity),
        })
    }

    /// The slots of a cell, the older generation first.
    fn oldest_first(&self) -> [usize; 2] {
        let [even, odd] = self.books.map(|book| book.generation);
        // modulo 2³²: the generation less than half a circle behind is older
        match odd.wrapping_sub(even) < u32::MAX.div_euclid(2) {
            true => [0, 1],
            false => [1, 0],
        }
    }
}

/// The slot of a generation's tokens: two generations are valid at a time.
pub fn slot_of(generation: u32) -> usize {
    usize::from(generation & 1 == 1)
}

fn total(hand: TokenPair) -> u64 {
    let [even, odd] = hand;
    even.saturating_add(odd)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod windows;
