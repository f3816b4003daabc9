//! Sliding log: the time of every admitted unit of the last window. Exact, and the one that costs memory.
//!
//! A key has a ring of (time, cost). An entry counts while it is younger than W; aged exactly W it is gone. A request fits
//! when the sum of what counts, and its cost, are at most L. Bound: at most L in any half-open interval of length W,
//! without error. A ring has at most L entries ([`MAX_LOG`]) of 16 bytes, and grows as it needs them.
//!
//! **Memory.** A ring sets aside its L entries, and `RING_ENTRIES` for what it costs itself, when it is made; all rings
//! together at most [`ENTRIES_PER_KEY`] for each of the store's `max_keys`. So a key that has a ring can never be
//! denied its exactness by others. Half of the room is in guaranteed parts, one for each limit with a log, and no limit can take
//! all of the rest (module `share`). When there is no room for a ring, fresh keys share one of `OVERFLOW_RINGS` of their limit, by
//! hash, which is strict: those that share one get together what one key would. Whoever brings a fresh key looks at `LOOK` rings of its lock, in turn, and drops
//! those whose entries are all gone, and where there is no room at as many of `LOOK` other locks: a bounded piece of work
//! that keeps up with any flood.
//!
//! **Locks.** A key belongs to one of `SHARDS` locks, held for one look-up and the entries that have aged since the
//! last; nobody holds two.
//!
//! **A clock that steps back.** Within a ring time does not go back: a `now` before the newest entry is taken for the
//! newest entry's time, and waits are as long as that clock needs to catch up. From [`STEP_BACK_NS`] on the whole ring is moved
//! with the clock, so that no wait is longer than W.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use super::{
    Key, Quota, QuotaError, Standing,
    bucket::STEP_BACK_NS,
    quota::MAX_LOG,
    share::{Occupancy, SharedCapacity},
    succession::Spent,
    words::{Ask, Form},
};

/// Timestamps that may be set aside for each of the store's `max_keys`: over all keys `max_keys` times as many.
pub const ENTRIES_PER_KEY: usize = 16;

/// The least number of timestamps over all keys, however small the store: ten of the longest logs.
const LEAST_ENTRIES: usize = 100_000;

/// What a ring costs beside its entries (map, queue), in entries of 16 bytes.
const RING_ENTRIES: usize = 8;

/// Locks; a power of two.
const SHARDS: usize = 64;

/// Rings that a fresh key looks at for one to drop.
const LOOK: usize = 8;

/// Rings of a limit for keys that find no room; a power of two.
const OVERFLOW_RINGS: u8 = 16;

/// One quota per tier, ready to decide over a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Logs {
    default: Log,
    others: Box<[Log]>,
    longest: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Log {
    limit: u64,
    window_ns: u64,
}

impl Logs {
    pub(super) fn new(quotas: &[Quota]) -> Result<Logs, QuotaError> {
        let log = |quota: &Quota| {
            quota.check_rate()?;
            let limit = quota.amount.get();
            if limit > MAX_LOG {
                return Err(QuotaError::LogTooLong);
            }
            let window_ns = quota.period_ns();
            Ok(Log { limit, window_ns })
        };
        let (default, others) = quotas.split_first().ok_or(QuotaError::NoQuota)?;
        let longest = quotas.iter().map(|quota| quota.amount.get()).max();
        Ok(Logs {
            default: log(default)?,
            others: others.iter().map(log).collect::<Result<_, _>>()?,
            longest: longest.map_or(0, |most| usize::try_from(most).unwrap_or(usize::MAX)),
        })
    }

    /// A tier that does not exist is the default tier.
    fn log(&self, tier: usize) -> &Log {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.default)
    }

    pub(super) fn tiers(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    pub(super) fn form(&self, tier: usize) -> Form {
        let window_ns = self.log(tier).window_ns;
        Form::Log { window_ns }
    }
}

impl Logs {
    /// How an owner without a ring stands.
    pub(super) fn standing_unknown(&self, ask: &Ask) -> Standing {
        let log = self.log(ask.tier);
        let ring = Ring::new(log, self.longest);
        ring.standing(&ring.view(ask.now_ns), log.limit, ask)
    }
}

impl Logs {
    /// After so long nothing counts that is spent now.
    pub(super) fn recovery_ns(&self) -> u64 {
        let logs = self.others.iter().chain([&self.default]);
        logs.map(|log| log.window_ns).max().unwrap_or(0)
    }

    /// What counts at a later moment of what was spent.
    pub(super) fn still_spent(&self, spent: Spent, tier: usize, at_ns: u64) -> u64 {
        let log = self.log(tier);
        match at_ns.saturating_sub(spent.at_ns) < log.window_ns {
            true => spent.units.min(log.limit),
            false => 0,
        }
    }
}

/// Whose ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// The limit's one ring for all.
    Everybody,
    Key(Key),
    /// Keys for which there is no room, and whose hash says this.
    Overflow(u8),
}

impl Owner {
    /// What a key shares for which there is no room.
    pub(super) fn overflow(key: Option<Key>) -> Owner {
        let low = key.map_or(0, |key| key.0 as u8);
        Owner::Overflow(low & (OVERFLOW_RINGS - 1))
    }
}

/// What a request does with a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// Nothing.
    Look,
    /// Nothing but forget what no longer counts.
    Ask,
    /// Charges it, if that fits.
    Charge,
    /// Charges it up to its limit.
    ChargeAnyway,
    /// Takes the newest units back: not always the very ones, but those of a request within the same instant.
    Refund,
}

/// The rings of all limits.
#[derive(Debug)]
pub(super) struct Rings {
    shards: Box<[Mutex<Shard>]>,
    set_aside: AtomicUsize,
    most: usize,
    /// How limits divide it.
    capacity: SharedCapacity,
    /// Whose turn it is to be swept for others.
    turn: AtomicUsize,
}

/// What becomes of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing yet.
    None,
    Made,
    Dropped,
}

/// A ring is known by the id of its limit and its owner.
type Name = (u16, Owner);

#[derive(Debug, Default)]
struct Shard {
    rings: HashMap<Name, Ring>,
    /// The rings that may be dropped, to be looked at in turn.
    turns: VecDeque<Name>,
}

impl Rings {
    /// Rings for a store of this many keys.
    pub(super) fn new(max_keys: usize) -> Rings {
        let shards = std::iter::repeat_with(Mutex::default).take(SHARDS);
        let most = max_keys.saturating_mul(ENTRIES_PER_KEY).max(LEAST_ENTRIES);
        let reserve = (most / 2) as u64;
        Rings {
            shards: shards.collect(),
            set_aside: AtomicUsize::new(0),
            most,
            capacity: SharedCapacity::new(reserve, (most as u64).saturating_sub(reserve)),
            turn: AtomicUsize::new(0),
        }
    }

    /// Divides the guaranteed parts.
    pub(super) fn divide<'a>(&self, all: impl Iterator<Item = &'a Occupancy> + Clone) {
        self.capacity.divide(all);
    }

    /// Keys of a limit that are certain to find room; `u64::MAX` while no other limit has a log.
    pub(super) fn guaranteed(&self, logs: &Logs) -> u64 {
        match self.capacity.guaranteed() {
            u64::MAX => u64::MAX,
            entries => {
                let ring = logs.longest.saturating_add(RING_ENTRIES) as u64;
                entries.checked_div(ring).unwrap_or(0)
            }
        }
    }

    /// Does something with a ring, and says how it stood to the request (where the request was charged: how it stands
    /// now). `None`: the owner has no ring and there is no room for one. It gets one only when it is charged.
    /// `inherited` is what an owner without a ring has spent all the same; `count` is told the limit of every ring that is made
    /// (true) or dropped (false), and gives what it holds.
    pub(super) fn visit<'s>(
        &self,
        name: Name,
        logs: &Logs,
        ask: &Ask,
        deed: Deed,
        inherited: Option<Spent>,
        count: impl Fn(u16, Change) -> Option<&'s Occupancy>,
    ) -> Option<Standing> {
        let first = self.visit_now(name, logs, ask, deed, inherited, &count);
        first.or_else(|| {
            for _ in 0..LOOK {
                let turn = self.turn.fetch_add(1, Relaxed) % SHARDS;
                if let Some(shard) = self.shards.get(turn) {
                    let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
                    self.sweep(&mut shard, ask.now_ns, &count);
                }
            }
            self.visit_now(name, logs, ask, deed, inherited, &count)
        })
    }

    /// How a ring stands, if there is one; changes nothing.
    pub(super) fn look(&self, (id, owner): Name, logs: &Logs, ask: &Ask) -> Option<Standing> {
        let shard = self.shards.get(shard_of(id, owner))?;
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = shard.rings.get(&(id, owner))?;
        let limit = logs.log(ask.tier).limit.min(ring.room as u64);
        Some(ring.standing(&ring.view(ask.now_ns), limit, ask))
    }

    /// Forgets the entries of a ring, which stays until it is swept.
    pub(super) fn clear(&self, (id, owner): Name) {
        let shard = self.shards.get(shard_of(id, owner));
        let Some(mut shard) =
            shard.map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner))
        else {
            return;
        };
        if let Some(ring) = shard.rings.get_mut(&(id, owner)) {
            ring.entries.clear();
            ring.used = 0;
        }
    }

    fn visit_now<'s>(
        &self,
        (id, owner): Name,
        logs: &Logs,
        ask: &Ask,
        deed: Deed,
        inherited: Option<Spent>,
        count: &impl Fn(u16, Change) -> Option<&'s Occupancy>,
    ) -> Option<Standing> {
        let log = logs.log(ask.tier);
        let shard = self.shards.get(shard_of(id, owner))?;
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ring) = shard.rings.get_mut(&(id, owner)) {
            // where the limit was raised: more room, if there is any
            let more = logs.longest.saturating_sub(ring.room);
            let holder = (more > 0).then(|| count(id, Change::None)).flatten();
            if more > 0 && (!owner.is_key() || self.set_aside(holder, more)) {
                ring.room = logs.longest;
            }
            return Some(ring.perform(log, ask, deed));
        }
        let needed = logs.longest.saturating_add(RING_ENTRIES);
        if owner.is_key() {
            self.sweep(&mut shard, ask.now_ns, count);
            let held = self.set_aside.load(Relaxed).saturating_add(needed);
            if held > self.most || !self.may_grow(count(id, Change::None), needed) {
                return None;
            }
        }
        let mut ring = Ring::new(log, logs.longest);
        if let Some(spent) = inherited {
            ring.add(spent.at_ns, spent.units.min(log.limit));
        }
        let standing = ring.perform(log, ask, deed);
        if ring.used > 0 {
            if owner.is_key() {
                if !self.set_aside(count(id, Change::None), needed) {
                    return None;
                }
                shard.turns.push_back((id, owner));
                count(id, Change::Made);
            }
            shard.rings.insert((id, owner), ring);
        }
        Some(standing)
    }

    /// Drops those of the next few rings whose entries are all gone.
    fn sweep<'s>(
        &self,
        shard: &mut Shard,
        now_ns: u64,
        count: &impl Fn(u16, Change) -> Option<&'s Occupancy>,
    ) {
        for _ in 0..LOOK.min(shard.turns.len()) {
            let Some(name) = shard.turns.pop_front() else {
                return;
            };
            let idle = shard.rings.get(&name).map(|ring| ring.is_idle(now_ns));
            if idle == Some(false) {
                shard.turns.push_back(name);
            } else if let Some(ring) = shard.rings.remove(&name) {
                let room = ring.room.saturating_add(RING_ENTRIES);
                self.set_aside.fetch_sub(room, Relaxed);
                if let Some(holder) = count(name.0, Change::Dropped) {
                    self.capacity.shrink(holder, room as u64);
                }
            }
        }
    }

    /// Sets entries aside, if there are so many and their limit may have them.
    fn set_aside(&self, holder: Option<&Occupancy>, entries: usize) -> bool {
        let after = |held: usize| held.checked_add(entries).filter(|&held| held <= self.most);
        if !self.may_grow(holder, entries)
            || self
                .set_aside
                .fetch_update(Relaxed, Relaxed, after)
                .is_err()
        {
            return false;
        }
        if let Some(holder) = holder {
            self.capacity.grow(holder, entries as u64);
        }
        true
    }

    fn may_grow(&self, holder: Option<&Occupancy>, entries: usize) -> bool {
        holder.is_some_and(|holder| self.capacity.may_grow(holder, entries as u64))
    }
}

impl Owner {
    fn is_key(self) -> bool {
        matches!(self, Owner::Key(_))
    }
}

fn shard_of(id: u16, owner: Owner) -> usize {
    let hash = match owner {
        Owner::Key(key) => (key.0 as u64) ^ ((key.0 >> 64) as u64).rotate_left(32),
        Owner::Everybody => u64::from(id),
        Owner::Overflow(index) => u64::from(id) ^ u64::from(index) << 16,
    };
    (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % SHARDS
}

/// A ring as it is at one moment.
#[derive(Debug)]
struct View {
    /// How far the clock stepped back; 0 if it did not.
    back: u64,
    /// Entries that no longer count.
    gone: usize,
    /// The sum of those that do.
    used: u64,
}

/// One owner's entries.
#[derive(Debug)]
struct Ring {
    /// When, and how many units; oldest first.
    entries: VecDeque<(u64, u32)>,
    /// The sum of the units.
    used: u64,
    window_ns: u64,
    /// Entries set aside.
    room: usize,
}

impl Ring {
    fn new(log: &Log, room: usize) -> Ring {
        Ring {
            entries: VecDeque::new(),
            used: 0,
            window_ns: log.window_ns,
            room,
        }
    }

    fn perform(&mut self, log: &Log, ask: &Ask, deed: Deed) -> Standing {
        let limit = log.limit.min(self.room as u64);
        let view = self.view(ask.now_ns);
        if deed == Deed::Look {
            return self.standing(&view, limit, ask);
        }
        self.age(&view);
        let free = limit.saturating_sub(self.used);
        match deed {
            Deed::Charge if ask.cost <= free => {
                self.add(ask.now_ns, ask.cost);
                let after = Ask { cost: 0, ..*ask };
                return self.standing(&self.view(ask.now_ns), limit, &after);
            }
            Deed::Look | Deed::Ask | Deed::Charge => {}
            Deed::ChargeAnyway => self.add(ask.now_ns, ask.cost.min(free)),
            Deed::Refund => self.remove(ask.cost),
        }
        self.standing(&self.view(ask.now_ns), limit, ask)
    }

    /// What counts at a moment.
    fn view(&self, now_ns: u64) -> View {
        let back = self.newest_ns().saturating_sub(now_ns);
        let back = if back > STEP_BACK_NS { back } else { 0 };
        let mut view = View {
            back,
            gone: 0,
            used: self.used,
        };
        for &(at, units) in &self.entries {
            if self.counts_for_ns(at, back, now_ns) > 0 {
                break;
            }
            view.gone = view.gone.saturating_add(1);
            view.used = view.used.saturating_sub(u64::from(units));
        }
        view
    }

    /// How much longer an entry counts. By differences: a sum would end at the end of time, and too early.
    fn counts_for_ns(&self, at: u64, back: u64, now_ns: u64) -> u64 {
        let at = at.saturating_sub(back);
        let age = now_ns.saturating_sub(at);
        self.window_ns
            .saturating_sub(age)
            .saturating_add(at.saturating_sub(now_ns))
    }

    /// Forgets what no longer counts.
    fn age(&mut self, view: &View) {
        self.entries.drain(..view.gone);
        self.used = view.used;
        if view.back > 0 {
            for (at, _) in &mut self.entries {
                *at = at.saturating_sub(view.back);
            }
        }
    }

    fn add(&mut self, now_ns: u64, units: u64) {
        let at = now_ns.max(self.newest_ns());
        let Ok(units) = u32::try_from(units) else {
            return;
        };
        if units == 0 {
            return;
        }
        self.used = self.used.saturating_add(u64::from(units));
        match self.entries.back_mut() {
            Some((newest, same)) if *newest == at => *same = same.saturating_add(units),
            _ => {
                if self.entries.len() == self.entries.capacity() {
                    // doubled, but not beyond what is set aside
                    let spare = self.room.saturating_sub(self.entries.len());
                    let more = self.entries.len().clamp(4, spare.max(4));
                    self.entries.reserve_exact(more);
                }
                self.entries.push_back((at, units));
            }
        }
    }

    fn remove(&mut self, units: u64) {
        let mut left = units.min(self.used);
        self.used = self.used.saturating_sub(left);
        while let Some((_, newest)) = self.entries.back_mut()
            && left > 0
        {
            let taken = left.min(u64::from(*newest));
            *newest = newest.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX));
            left = left.saturating_sub(taken);
            if *newest == 0 {
                self.entries.pop_back();
            }
        }
    }

    fn standing(&self, view: &View, limit: u64, ask: &Ask) -> Standing {
        let wait_ns = |target| self.wait_ns(view, ask.now_ns, target);
        Standing::of_count(view.used, limit, ask.cost, wait_ns)
    }

    /// The least wait until at most `target` units count, which are fewer than now.
    fn wait_ns(&self, view: &View, now_ns: u64, target: u64) -> u64 {
        let mut used = view.used;
        let last = self.entries.iter().skip(view.gone).find(|(_, units)| {
            used = used.saturating_sub(u64::from(*units));
            used <= target
        });
        last.map_or(0, |(at, _)| self.counts_for_ns(*at, view.back, now_ns))
    }

    fn newest_ns(&self) -> u64 {
        self.entries.back().map_or(0, |(at, _)| *at)
    }

    /// All entries are gone. One that seems to come from the future may be a slow clock's.
    fn is_idle(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.newest_ns()) >= self.window_ns
    }
}
