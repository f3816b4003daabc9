//! Sliding log: the time of every unit admitted in the last window. Exact, and the most
//! memory-hungry algorithm.
//!
//! A key has a ring of (time, cost) entries. An entry counts while it is younger than W; at age W
//! it is gone. A request fits when the sum of the counting entries plus its cost is at most L.
//! Bound: at most L in any half-open interval of length W, without error. A ring has at most L
//! entries ([`MAX_LOG`]) of 16 bytes and grows on demand.
//!
//! **Memory.** A new ring reserves its L entries plus `RING_ENTRIES` for its own overhead. All
//! rings together reserve at most [`ENTRIES_PER_KEY`] for each of the store's `max_keys`. A key
//! with a ring therefore stays exact whatever other keys do. Half of the memory is guaranteed to
//! limits in equal parts; no limit can take all of the rest (module `share`).
//!
//! When there is no room for a ring, fresh keys share one of the limit's `OVERFLOW_RINGS`, selected
//! by hash. Sharing is strict: the keys of one ring together get what one key would. A fresh key
//! examines `LOOK` rings of its lock in turn and drops those whose entries have all expired. Where
//! there is no room it does the same at `LOOK` other locks. That bounded work keeps up with any
//! flood.
//!
//! **Locks.** A key belongs to one of `SHARDS` locks. The lock is held for one look-up and for the
//! entries that expired since the last; no thread holds two.
//!
//! **A clock that steps back.** Time does not go back within a ring: a `now` before the newest
//! entry counts as that entry's time. Waits last as long as the clock needs to catch up. From
//! [`STEP_BACK_NS`] on, the whole ring moves with the clock, so no wait exceeds W.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use super::{
    Key, Quota, QuotaError, Standing,
    algorithm::StateFormat,
    quota::MAX_LOG,
    share::{Occupancy, SharedCapacity},
    word_request::{STEP_BACK_NS, SpentUnits, WordRequest},
};

/// Entries that all rings may reserve, per key of the store's `max_keys`.
pub const ENTRIES_PER_KEY: usize = 16;

/// The least number of entries over all keys, however small the store: ten of the longest logs.
const LEAST_ENTRIES: usize = 100_000;

/// Overhead of a ring beside its entries (map, queue), in entries of 16 bytes.
const RING_ENTRIES: usize = 8;

/// Locks; a power of two.
const SHARDS: usize = 64;

/// Rings that a fresh key examines for one to drop.
const LOOK: usize = 8;

/// Overflow rings of a limit; a power of two.
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

    /// A tier that does not exist is treated as the default tier.
    fn log(&self, tier: usize) -> &Log {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.default)
    }

    pub(super) fn tiers(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    pub(super) fn form(&self, tier: usize) -> StateFormat {
        let window_ns = self.log(tier).window_ns;
        StateFormat::Log { window_ns }
    }
}

impl Logs {
    /// The status of an owner without a ring.
    pub(super) fn standing_unknown(&self, ask: &WordRequest) -> Standing {
        let log = self.log(ask.tier);
        let ring = Ring::new(log, self.longest);
        ring.standing(&ring.view(ask.now_ns), log.limit, ask)
    }
}

impl Logs {
    /// The time after which nothing spent now counts any more.
    pub(super) fn recovery_ns(&self) -> u64 {
        let logs = self.others.iter().chain([&self.default]);
        logs.map(|log| log.window_ns).max().unwrap_or(0)
    }

    /// The part of `spent` that still counts at a later moment.
    pub(super) fn still_spent(&self, spent: SpentUnits, tier: usize, at_ns: u64) -> u64 {
        let log = self.log(tier);
        match at_ns.saturating_sub(spent.at_ns) < log.window_ns {
            true => spent.units.min(log.limit),
            false => 0,
        }
    }
}

/// The owner of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RingOwner {
    /// The limit's single ring for requests without a key.
    Everybody,
    Key(Key),
    /// Keys without a ring of their own whose hash selects this one.
    Overflow(u8),
}

impl RingOwner {
    /// The ring of this key alone.
    pub(super) fn own(key: Option<Key>) -> RingOwner {
        key.map_or(RingOwner::Everybody, RingOwner::Key)
    }

    /// The overflow ring of this key.
    pub(super) fn overflow(key: Option<Key>) -> RingOwner {
        let low = key.map_or(0, |key| key.0 as u8);
        RingOwner::Overflow(low & (OVERFLOW_RINGS - 1))
    }
}

/// An operation on a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingOperation {
    /// Reads it.
    Look,
    /// Only drops entries that no longer count.
    Ask,
    /// Charges it if the cost fits.
    Charge,
    /// Charges it up to its limit.
    ChargeAnyway,
    /// Takes back the newest units. They may be another request's from the same instant.
    Refund,
}

/// The rings of all limits.
#[derive(Debug)]
pub(super) struct Rings {
    shards: Box<[Mutex<RingShard>]>,
    set_aside: AtomicUsize,
    most: usize,
    /// How limits divide the memory.
    capacity: SharedCapacity,
    /// The next shard to be swept for other shards.
    turn: AtomicUsize,
}

/// How a visit changed a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingChange {
    /// Not at all.
    None,
    Made,
    Dropped,
}

/// A ring is identified by its limit's id and its owner.
type RingName = (u16, RingOwner);

#[derive(Debug, Default)]
struct RingShard {
    rings: HashMap<RingName, Ring>,
    /// The sweep order of the rings.
    turns: VecDeque<RingName>,
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

    /// Divides the guaranteed parts among the limits.
    pub(super) fn divide<'a>(&self, all: impl Iterator<Item = &'a Occupancy> + Clone) {
        self.capacity.divide(all);
    }

    /// Keys of a limit that certainly find room; `u64::MAX` while no other limit has a log.
    pub(super) fn guaranteed(&self, logs: &Logs) -> u64 {
        match self.capacity.guaranteed() {
            u64::MAX => u64::MAX,
            entries => {
                let ring = logs.longest.saturating_add(RING_ENTRIES) as u64;
                entries.checked_div(ring).unwrap_or(0)
            }
        }
    }

    /// Applies an operation to a ring and returns the ring's status: after the charge if one was
    /// made. Only a charge creates a ring. `None`: the owner has no ring and there is no room for
    /// one. `inherited` is what an owner without a ring has already spent. `count` receives the
    /// limit of every ring created (true) or dropped (false), and returns its occupancy.
    pub(super) fn visit<'s>(
        &self,
        name: RingName,
        logs: &Logs,
        ask: &WordRequest,
        deed: RingOperation,
        inherited: Option<SpentUnits>,
        count: impl Fn(u16, RingChange) -> Option<&'s Occupancy>,
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

    /// The status of a ring, if there is one; changes nothing.
    pub(super) fn look(
        &self,
        (id, owner): RingName,
        logs: &Logs,
        ask: &WordRequest,
    ) -> Option<Standing> {
        let shard = self.shards.get(shard_of(id, owner))?;
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = shard.rings.get(&(id, owner))?;
        let limit = logs.log(ask.tier).limit.min(ring.room as u64);
        Some(ring.standing(&ring.view(ask.now_ns), limit, ask))
    }

    /// Drops the entries of a ring. The ring itself stays until it is swept.
    pub(super) fn clear(&self, (id, owner): RingName) {
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
        (id, owner): RingName,
        logs: &Logs,
        ask: &WordRequest,
        deed: RingOperation,
        inherited: Option<SpentUnits>,
        count: &impl Fn(u16, RingChange) -> Option<&'s Occupancy>,
    ) -> Option<Standing> {
        let log = logs.log(ask.tier);
        let shard = self.shards.get(shard_of(id, owner))?;
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ring) = shard.rings.get_mut(&(id, owner)) {
            // the limit was raised: reserve more if there is room
            let more = logs.longest.saturating_sub(ring.room);
            let holder = (more > 0).then(|| count(id, RingChange::None)).flatten();
            if more > 0 && (!owner.is_key() || self.set_aside(holder, more)) {
                ring.room = logs.longest;
            }
            return Some(ring.perform(log, ask, deed));
        }
        let needed = logs.longest.saturating_add(RING_ENTRIES);
        if owner.is_key() {
            self.sweep(&mut shard, ask.now_ns, count);
            let held = self.set_aside.load(Relaxed).saturating_add(needed);
            if held > self.most || !self.may_grow(count(id, RingChange::None), needed) {
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
                if !self.set_aside(count(id, RingChange::None), needed) {
                    return None;
                }
                shard.turns.push_back((id, owner));
                count(id, RingChange::Made);
            }
            shard.rings.insert((id, owner), ring);
        }
        Some(standing)
    }

    /// Examines the next few rings and drops those whose entries have all expired.
    fn sweep<'s>(
        &self,
        shard: &mut RingShard,
        now_ns: u64,
        count: &impl Fn(u16, RingChange) -> Option<&'s Occupancy>,
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
                if let Some(holder) = count(name.0, RingChange::Dropped) {
                    self.capacity.shrink(holder, room as u64);
                }
            }
        }
    }

    /// Reserves entries if they are free and their limit may take them.
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

impl RingOwner {
    fn is_key(self) -> bool {
        matches!(self, RingOwner::Key(_))
    }
}

fn shard_of(id: u16, owner: RingOwner) -> usize {
    let hash = match owner {
        RingOwner::Key(key) => (key.0 as u64) ^ ((key.0 >> 64) as u64).rotate_left(32),
        RingOwner::Everybody => u64::from(id),
        RingOwner::Overflow(index) => u64::from(id) ^ u64::from(index) << 16,
    };
    (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % SHARDS
}

/// A ring as it is at one moment.
#[derive(Debug)]
struct RingView {
    /// How far the clock stepped back; 0 if it did not.
    back: u64,
    /// Entries that no longer count.
    gone: usize,
    /// The sum of the entries that count.
    used: u64,
}

/// One owner's entries.
#[derive(Debug)]
struct Ring {
    /// (time, units); oldest first.
    entries: VecDeque<(u64, u32)>,
    /// The sum of the units.
    used: u64,
    window_ns: u64,
    /// Entries reserved.
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

    fn perform(&mut self, log: &Log, ask: &WordRequest, deed: RingOperation) -> Standing {
        let limit = log.limit.min(self.room as u64);
        let view = self.view(ask.now_ns);
        if deed == RingOperation::Look {
            return self.standing(&view, limit, ask);
        }
        self.age(&view);
        let free = limit.saturating_sub(self.used);
        match deed {
            RingOperation::Charge if ask.cost <= free => {
                self.add(ask.now_ns, ask.cost);
                let after = WordRequest { cost: 0, ..*ask };
                return self.standing(&self.view(ask.now_ns), limit, &after);
            }
            RingOperation::Look | RingOperation::Ask | RingOperation::Charge => {}
            RingOperation::ChargeAnyway => self.add(ask.now_ns, ask.cost.min(free)),
            RingOperation::Refund => self.remove(ask.cost),
        }
        self.standing(&self.view(ask.now_ns), limit, ask)
    }

    fn view(&self, now_ns: u64) -> RingView {
        let back = self.newest_ns().saturating_sub(now_ns);
        let back = if back > STEP_BACK_NS { back } else { 0 };
        let mut view = RingView {
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

    /// How much longer an entry counts. Uses differences: a sum would saturate at the end of time,
    /// and end too early.
    fn counts_for_ns(&self, at: u64, back: u64, now_ns: u64) -> u64 {
        let at = at.saturating_sub(back);
        let age = now_ns.saturating_sub(at);
        self.window_ns
            .saturating_sub(age)
            .saturating_add(at.saturating_sub(now_ns))
    }

    /// Drops the entries that no longer count.
    fn age(&mut self, view: &RingView) {
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
                    // doubles, within the reservation
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

    fn standing(&self, view: &RingView, limit: u64, ask: &WordRequest) -> Standing {
        let wait_ns = |target| self.wait_ns(view, ask.now_ns, target);
        Standing::of_count(view.used, limit, ask.cost, wait_ns)
    }

    /// The least wait until at most `target` units count; `target` is below the present count.
    fn wait_ns(&self, view: &RingView, now_ns: u64, target: u64) -> u64 {
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

    /// Whether all entries have expired. An entry from the future may come from a slow clock.
    fn is_idle(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.newest_ns()) >= self.window_ns
    }
}
