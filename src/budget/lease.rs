//! Pure arithmetic of tokens borrowed ahead: what a gateway asks for, banks, reports and gives back, for one key.
//!
//! ```text
//!            tokens in hand            asks                        reply
//!   requests ─── spend ──▶ low? ──▶ need + want ──▶ the store ──▶ bank until the deadline ──▶ … ──▶ surplus goes back
//!                 └ none: wait for the reply                      └ pool short: remember the refusal, ask again later
//! ```
//!
//! The store debits what it grants at once, so gateways together never spend more than the limit. A token belongs to a
//! *generation*, a slice of the store's time, and dies with it: what a crashed gateway held comes back by itself, and
//! nothing that this gateway holds outlives its debit. Each deadline is counted from the moment the call was *sent*, so it is
//! early, never late. The store's clock never leaves the store: replies carry durations.
//!
//! Nothing here reads a clock, holds a lock or knows Redis. Rates are estimates and therefore floats; tokens are whole.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod forecast;
mod memory;
mod pace;
mod requests;
mod terms;

pub use forecast::Forecast;
use memory::Memory;
pub use memory::Recollection;
pub use requests::Requests;
pub use terms::{Algorithm, Terms};

/// The least batch, from this many expected arrivals within the horizon on.
const LEAST_BATCH: u64 = 4;
const WARM: f64 = 2.0;
/// The memory of the store's estimate of the demand is a horizon, and at least this.
const DEMAND_MEMORY_NS: u64 = 1_000_000_000;
/// With no more than this part of the demand at other gateways, a gateway counts as the only one.
const OTHERS: f64 = 0.05;
/// What of the rest of the pool may be taken ahead: half, or all while it is short.
const PART: f64 = 0.5;
const PART_SHORT: f64 = 1.0;
/// The most tokens in one hand of one generation: what a packed word holds.
pub const MAX_TOKENS: u64 = (1 << 26) - 1;
/// Clocks of gateway and store may drift apart by a thousandth.
const VALIDITY: f64 = 0.999;

const NS_PER_S: f64 = 1e9;

/// Tokens in hand, by generation modulo 2.
pub type Hand = [u64; 2];

/// What the store has on its books against this gateway for one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Book {
    generation: u32,
    /// Tokens that it believes to be out: granted ahead, not yet reported spent or given back. Below 0 never for long: what
    /// was granted to a request and went back into the hand is not on the books until it is reported.
    out: i64,
    /// In hand when last looked at.
    seen: u64,
}

/// One entry of a report: what became of tokens of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Spent; below 0, tokens that were granted to a request and went back into the hand.
    Spent {
        /// Of which generation.
        generation: u32,
        /// How many.
        tokens: i64,
    },
    /// Handed back.
    Returned {
        /// Of which generation.
        generation: u32,
        /// How many.
        tokens: u64,
    },
    /// Granted by a bucket to a request that did not use them: as much goes back as the bucket has not refilled behind them.
    Unused {
        /// How many.
        tokens: u64,
        /// Of which grant.
        origin: Origin,
    },
    /// Still out of a generation, which the store forgot with a loss.
    Out {
        /// Of which generation.
        generation: u32,
        /// How many.
        tokens: u64,
    },
    /// Admitted without the store, which has to be told.
    Debt {
        /// How many.
        tokens: u64,
        /// In which window, where that is known: a window that is over is owed nothing.
        window: Option<u32>,
    },
}

/// Which grant units of a request come from, so that they can go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// A bucket's generation, a window's number, a log's call.
    pub generation: u32,
    /// Of a bucket: how much room it had then, and what had come back, as the store packs them.
    pub room: u64,
    /// Of a bucket: the time of the generation that had passed.
    pub moment_us: u64,
}

impl Origin {
    fn of(terms: &Terms, reply: &Reply) -> Origin {
        let [_, room] = reply.state;
        // tokens that are granted ahead are good until the end of the next generation
        let both_us = terms.generation_us().saturating_mul(2);
        let (room, moment_us) = match terms.algorithm {
            Algorithm::Bucket => (room, both_us.saturating_sub(reply.valid_us)),
            _ => (0, 0),
        };
        Origin {
            generation: reply.generation,
            room,
            moment_us,
        }
    }
}

/// Why a call is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The requests that wait.
    pub need: Requests,
    /// What was just taken out of the hand to be given back.
    pub back: Hand,
    /// Whether to ask for tokens ahead, too.
    pub fill: bool,
}

/// What one call asks.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The requests that wait.
    pub need: Requests,
    /// Ahead, at most: a multiple of `unit`.
    pub want: u64,
    /// What the cheapest request costs that they are for: fewer tokens serve nobody.
    pub unit: u64,
    /// The part of the pool's rest that may be taken ahead.
    pub part: f64,
    /// Requests since the last call.
    pub arrivals: u64,
    /// Requests per second here.
    pub rate: f64,
    /// Since the last call; 0 for the first.
    pub since_us: u64,
    /// The memory of the store's estimate of demand.
    pub memory_us: u64,
    /// What was last seen of the key, for a store that has lost something.
    pub memory: Recollection,
    /// What became of tokens since the last call.
    pub reports: Vec<Report>,
}

/// What the store answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reply {
    /// Granted to those who wait.
    pub need: u64,
    /// Granted ahead.
    pub want: u64,
    /// Of this generation.
    pub generation: u32,
    /// How long what was granted ahead stays good.
    pub valid_us: u64,
    /// Whole tokens left.
    pub pool: u64,
    /// Until the first refused request fits, or, where none was refused, until there is a token; 0 if there is.
    pub wait_us: u64,
    /// Which incarnation of the key's state this is: another one after a loss.
    pub incarnation: u16,
    /// Gateways with other terms count the same key.
    pub disagrees: bool,
    /// All gateways' requests per 1000 s.
    pub demand: u64,
    /// Of a bucket, µs until it is full, and its room (see [`Origin`]); of a window, the counts of this one and of the one before.
    pub state: [u64; 2],
}

/// What a reply means for the hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Generation modulo 2.
    pub slot: usize,
    /// Until when tokens of it are good, in this gateway's nanoseconds.
    pub deadline_ns: u64,
    /// Tokens to put into the hand.
    pub bank: u64,
    /// The hand may hold tokens of an older generation in this slot: they have lapsed.
    pub replaces: bool,
    /// The store has lost something of the key since the reply before.
    pub is_lost: bool,
    /// Which grant units that go back come from.
    pub origin: Origin,
    /// What the store will have, and when.
    pub forecast: Forecast,
    /// For how long it is left alone although requests might fit.
    pub pause: Option<Pause>,
}

/// A pause between two calls: requests that cost `least` or more are refused meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// When it ends.
    pub until_ns: u64,
    /// Cheaper requests are asked for.
    pub least: u64,
}

/// The pool as the store last told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pool {
    tokens: u64,
    generation: u32,
    at_ns: u64,
    /// When the window ends, for windows.
    until_ns: u64,
}

/// The lease of one key.
#[derive(Clone, Debug, Default)]
pub struct Lease {
    /// x: requests per second, with a memory of one horizon.
    rate: f64,
    rate_at_ns: u64,
    /// When a request last came.
    arrived_ns: u64,
    /// Since the last call.
    arrivals: u64,
    books: [Book; 2],
    /// By grant: what is to go back.
    unused: Vec<(Origin, u64)>,
    /// Admitted without the store, not yet charged; and how much of it the call in flight charges.
    debt: u64,
    debt_sent: u64,
    /// The window in which all of it was admitted, where it was one and is known.
    debt_of: Option<u32>,
    short: bool,
    pause_ns: u64,
    last_got: u64,
    /// When a reply last brought something.
    got_ns: u64,
    /// What the cheapest request cost that was asked for lately, and when that was.
    unit: u64,
    unit_at_ns: u64,
    called_ns: Option<u64>,
    pool: Option<Pool>,
    share: Option<f64>,
    /// What of the store's estimate of the demand this gateway has reported, by the same formula, in requests per second.
    reported: f64,
    /// Hardly anybody asks for the key at another gateway.
    is_sole: bool,
    memory: Memory,
    /// What the store had on its books before it lost them.
    forgotten: Vec<(u32, u64)>,
}

impl Lease {
    /// Requests have come: `spread` of them some time since the last look, `at_once` just now.
    pub fn arrived(&mut self, now_ns: u64, horizon_ns: u64, spread: u64, at_once: u64) {
        let horizon = horizon_ns as f64 / NS_PER_S;
        let passed = now_ns.saturating_sub(self.rate_at_ns) as f64 / NS_PER_S;
        let kept = (-passed / horizon).exp();
        // n arrivals spread evenly over the time that has passed; in the limit of no time, n / H
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

    /// A request of this cost finds no token in the hand, and is asked for.
    pub fn asked(&mut self, now_ns: u64, horizon_ns: u64, cost: u64) {
        let age_ns = now_ns.saturating_sub(self.unit_at_ns);
        if self.unit == 0 || cost <= self.unit || age_ns > horizon_ns.saturating_mul(2) {
            (self.unit, self.unit_at_ns) = (cost, now_ns);
        }
    }

    /// Looks at what is left in the hand, and learns from it what was spent.
    pub fn look(&mut self, now_ns: u64, horizon_ns: u64, hand: Hand, refused: u64) {
        let mut spent: u64 = 0;
        for (book, left) in self.books.iter_mut().zip(hand) {
            spent = spent.saturating_add(book.seen.saturating_sub(left));
            book.seen = left;
        }
        self.arrived(now_ns, horizon_ns, spent.saturating_add(refused), 0);
    }

    /// Tokens of a generation have passed their deadline in the hand.
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

    /// What is owed to the store.
    pub fn debt(&self) -> u64 {
        self.debt
    }

    /// How many tokens this gateway would like to hold.
    pub fn target(&self, now_ns: u64, terms: &Terms, horizon_ns: u64) -> u64 {
        if !terms.ahead {
            return 0;
        }
        let horizon = horizon_ns as f64 / NS_PER_S;
        let age = now_ns.saturating_sub(self.rate_at_ns) as f64 / NS_PER_S;
        let rate = self.rate * (-age / horizon).exp();
        // tokens of a window die with it
        let useful_ns = match self.pool {
            Some(pool) if now_ns < pool.until_ns && terms.algorithm != Algorithm::Bucket => {
                horizon_ns.min(pool.until_ns.saturating_sub(now_ns))
            }
            _ => horizon_ns,
        };
        let expected = rate * useful_ns as f64 / NS_PER_S;
        let target = (expected - 0.5).max(0.0) as u64;
        let least = if expected >= WARM && !self.short {
            LEAST_BATCH
        } else {
            0
        };
        let target = target.max(least).min(MAX_TOKENS).min(terms.most_ahead());
        let beyond = target.checked_rem(self.unit).unwrap_or(0);
        target.saturating_sub(beyond)
    }

    /// At so many tokens in hand or fewer, more should be asked for before they run out; `None` when nothing is worth
    /// asking for.
    pub fn low_mark(
        &self,
        now_ns: u64,
        terms: &Terms,
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
        // a call is worth at least half of the target
        let half = target.div_euclid(2).max(1);
        Some(low.min(target.saturating_sub(half)))
    }

    /// Whether a hand this low should be filled up now.
    pub fn is_low(
        &self,
        now_ns: u64,
        terms: &Terms,
        horizon_ns: u64,
        rtt_ns: u64,
        hand: Hand,
    ) -> bool {
        self.low_mark(now_ns, terms, horizon_ns, rtt_ns)
            .is_some_and(|low| total(hand) <= low)
    }

    /// Tokens were taken out of the hand for a request that had been counted before.
    pub fn took(&mut self, tokens: Hand) {
        for (book, tokens) in self.books.iter_mut().zip(tokens) {
            book.seen = book.seen.saturating_sub(tokens);
        }
    }

    /// Units were granted to a request that did not use them, and nobody else may: they go back with the next call.
    pub fn unused(&mut self, origin: Origin, tokens: u64) {
        self.memory.returned(origin.generation, tokens);
        match self.unused.last_mut() {
            Some((known, count)) if *known == origin => *count = count.saturating_add(tokens),
            _ => self.unused.push((origin, tokens)),
        }
    }

    /// Whether the store should be told something even if nobody waits: units go back, or a log has lost them.
    pub fn has_news(&self) -> bool {
        !self.unused.is_empty() || self.memory.tells()
    }

    /// Whether a store that has lost the key would have to be told of it.
    pub fn remembers(&self, now_ns: u64, terms: &Terms) -> bool {
        self.memory.matters(now_ns, terms)
    }

    /// Begins a call. `hand` is what is in hand now.
    pub fn call(
        &mut self,
        now_ns: u64,
        terms: &Terms,
        horizon_ns: u64,
        hand: Hand,
        ask: Ask,
    ) -> Call {
        let target = self.target(now_ns, terms, horizon_ns);
        let unit = self.unit.max(1);
        let missing = target.saturating_sub(total(hand));
        let missing = missing.saturating_sub(missing.checked_rem(unit).unwrap_or(0));
        let since_ns = self.called_ns.map(|called| now_ns.saturating_sub(called));
        let reports = self.reports(terms, hand, ask.back);
        self.called_ns = Some(now_ns);
        let memory_ns = horizon_ns.max(DEMAND_MEMORY_NS);
        let arrivals = std::mem::take(&mut self.arrivals);
        let kept = (-(since_ns.unwrap_or(0) as f64) / memory_ns as f64).exp();
        self.reported = self.reported * kept + arrivals as f64 * NS_PER_S / memory_ns as f64;
        Call {
            need: ask.need,
            want: if ask.fill { missing } else { 0 },
            unit,
            part: if self.short { PART_SHORT } else { PART },
            arrivals,
            rate: self.rate,
            since_us: since_ns.map_or(0, |ns| ns.div_euclid(1000).max(1)),
            memory_us: memory_ns.div_euclid(1000),
            memory: self.memory.recollection(now_ns, terms),
            reports,
        }
    }

    /// What became of tokens since the last call. Said once: a call that is lost is never repeated, and what it would have
    /// said lapses.
    fn reports(&mut self, terms: &Terms, hand: Hand, back: Hand) -> Vec<Report> {
        let mut reports = Vec::new();
        let is_bucket = terms.algorithm == Algorithm::Bucket;
        let forgotten = std::mem::take(&mut self.forgotten).into_iter();
        reports.extend(forgotten.map(|(generation, tokens)| Report::Out { generation, tokens }));
        for ((book, left), tokens) in self.books.iter_mut().zip(hand).zip(back) {
            let generation = book.generation;
            let kept = i64::try_from(left).unwrap_or(i64::MAX);
            let given = i64::try_from(tokens).unwrap_or(i64::MAX);
            let spent = book.out.saturating_sub(kept).saturating_sub(given);
            // windows refill behind nothing: they need not know what is spent
            if spent != 0 && is_bucket {
                let tokens = spent;
                reports.push(Report::Spent { generation, tokens });
            }
            if tokens > 0 {
                reports.push(Report::Returned { generation, tokens });
            }
            book.out = kept;
            book.seen = left;
        }
        reports.extend(self.unused.drain(..).map(|(origin, tokens)| {
            let generation = origin.generation;
            match is_bucket {
                true => Report::Unused { tokens, origin },
                false => Report::Returned { generation, tokens },
            }
        }));
        self.debt_sent = self.debt;
        if self.debt > 0 {
            let tokens = self.debt;
            let window = self.debt_of.filter(|_| !is_bucket);
            reports.push(Report::Debt { tokens, window });
        }
        reports
    }

    /// A reply to a call that was sent at `sent_ns`. `refused` is what the first refused request costs; `jitter` is random, 0
    /// to 1.
    pub fn replied(
        &mut self,
        now_ns: u64,
        sent_ns: u64,
        terms: &Terms,
        (reply, refused): (&Reply, Option<u64>),
        (rtt_ns, jitter): (u64, f64),
    ) -> Granted {
        self.debt = self
            .debt
            .saturating_sub(std::mem::take(&mut self.debt_sent));
        let is_late = self.memory.knows_later(sent_ns);
        let is_lost = self.memory.saw(now_ns, sent_ns, terms, reply);
        if is_lost && terms.algorithm == Algorithm::Bucket {
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
        // a log does not know the demand: the gateways are taken to be alike
        if reply.demand > 0 {
            let demand = reply.demand as f64 / 1e3;
            let share = (self.rate / demand).min(1.0);
            self.share = Some(self.share.map_or(share, |known| 0.7 * known + 0.3 * share));
        }
        let demand = reply.demand as f64 / 1e3;
        self.is_sole = demand - self.reported <= OTHERS * demand;

        let slot = slot_of(reply.generation);
        let mut replaces = false;
        let mut bank = reply.want.min(MAX_TOKENS);
        if let Some(book) = self.books.get_mut(slot) {
            if is_late && book.generation != reply.generation {
                // a later call was answered before: these tokens are about to die, and must not take the place of good ones
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
        self.last_got = reply.need.saturating_add(reply.want);
        if self.last_got > 0 {
            self.got_ns = now_ns;
        }
        let forecast = Forecast::new(now_ns, sent_ns, terms, reply, refused);
        self.short = (reply.pool as f64) < self.short_below(terms);
        let pause = self.pace(now_ns, terms, &forecast, refused, (rtt_ns, jitter));
        Granted {
            slot,
            deadline_ns,
            bank,
            replaces,
            // a log that has lost something is told first, and asked again
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

    /// Whether somebody came since the last call.
    pub fn is_wanted(&self) -> bool {
        self.arrivals > 0
    }

    /// What should go back of this hand, oldest generation first.
    pub fn surplus(&self, now_ns: u64, terms: &Terms, horizon_ns: u64, hand: Hand) -> Hand {
        let held = total(hand);
        let target = self.target(now_ns, terms, horizon_ns);
        let idle_ns = now_ns.saturating_sub(self.arrived_ns);
        let scarce = self.short
            || self
                .pool
                .is_none_or(|pool| pool.tokens < terms.capacity.div_euclid(2));
        let least = if scarce {
            1
        } else {
            2.max(terms.capacity.div_euclid(100))
        };
        // nobody here wants them, and others may be refused for it
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

    /// Whether nothing would be lost by forgetting this key: nobody has come for two horizons, and nothing is owed.
    pub fn is_idle(&self, now_ns: u64, horizon_ns: u64) -> bool {
        self.debt == 0 && self.is_quiet(now_ns, horizon_ns.saturating_mul(2))
    }

    /// Whether nobody has come for so long.
    pub fn is_quiet(&self, now_ns: u64, time_ns: u64) -> bool {
        now_ns.saturating_sub(self.arrived_ns) >= time_ns
    }

    /// Whether nothing was asked for this key for so long that it is as good as new here: the limit's span, at least two horizons.
    pub fn is_cold(&self, now_ns: u64, terms: &Terms, horizon_ns: u64) -> bool {
        let quiet_ns = (terms.span_ns() as u64).max(horizon_ns.saturating_mul(2));
        self.called_ns
            .is_none_or(|called| now_ns.saturating_sub(called) >= quiet_ns)
    }

    /// Whether the pool was short when it was last asked.
    pub fn is_short(&self) -> bool {
        self.short
    }

    /// This gateway's part of all demand, 0 to 1; `None` before the first reply.
    pub fn share(&self) -> Option<f64> {
        self.share
    }

    /// The pool as it was last told, aged by what refills; `None` before the first reply.
    pub fn pool(&self, now_ns: u64, terms: &Terms) -> Option<f64> {
        let pool = self.pool?;
        let capacity = terms.capacity as f64;
        let age_ns = now_ns.saturating_sub(pool.at_ns);
        Some(match terms.algorithm {
            Algorithm::Fixed if now_ns < pool.until_ns => pool.tokens as f64,
            Algorithm::Fixed => capacity,
            _ => (pool.tokens as f64 + terms.refill(age_ns)).min(capacity),
        })
    }

    /// The slots of a hand, the older generation first.
    fn oldest_first(&self) -> [usize; 2] {
        let [even, odd] = self.books.map(|book| book.generation);
        // modulo 2³²: the one that is less than half a circle behind is older
        match odd.wrapping_sub(even) < u32::MAX.div_euclid(2) {
            true => [0, 1],
            false => [1, 0],
        }
    }
}

/// Where tokens of a generation are in a hand: two live at a time, one after the other.
pub fn slot_of(generation: u32) -> usize {
    usize::from(generation & 1 == 1)
}

fn total(hand: Hand) -> u64 {
    let [even, odd] = hand;
    even.saturating_add(odd)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod windows;
