//! Fixed window and sliding window (two counters): a window's index and its counts in one word.
//!
//! Time is cut into windows of length W, at a separate offset `o` for each key, so that keys do not
//! all reset together. The word holds the index of the latest window in which the key was charged,
//! and the count of that window (`cur`). For the sliding window it also holds the count of the
//! window before (`prev`).
//!
//! ```text
//!   fixed     │ index                    │ cur       │         used = cur
//!   sliding   │ index      │ prev        │ cur       │         used = ⌊prev · left / W⌋ + cur
//!
//!   ├───────── prev ─────────┼─── cur ───┬─── left ──┤         left = W − position
//!                                       now
//! ```
//!
//! A request fits when `used + cost ≤ L`. A word whose windows are over, or whose estimate is 0,
//! carries no information.
//!
//! **Fixed window: error.** One window never admits more than L, so an interval of length D admits
//! at most `L·(⌊D/W⌋ + 2)`. Two bursts that straddle a boundary pass 2L at once.
//!
//! **Sliding window: error.** The estimate assumes that the previous window's requests were evenly
//! spread. Any interval of length D admits at most `L + ⌈L·D/W⌉` units. Proof: with P and C units
//! in the two windows and the last one at position x ≤ D, `C ≤ L − ⌊P·(W−x)/W⌋`, so
//! `P + C ≤ L + ⌈P·x/W⌉`. Every whole window between adds at most L. So two bursts around a
//! boundary get L and not 2L. The most in any W is 2L: spend L at the end of a window, then take
//! each unit of the next as it is freed. The window may also refuse what an exact log admits: by at
//! most P, when all of P came at the start of its window.
//!
//! **Why the estimate is rounded down.** For a cost of 1 that is the published rule
//! (`estimate < L`). `remaining` is then a whole number of units that really are admitted, and a
//! key with prev = L gets its first unit after W/L and not at once. Rounding up would refuse up to
//! one unit more. It would also keep every key that sent a single request in memory for another
//! whole window.
//!
//! **Bits.** The index is as wide as 9 years of uptime need at this W; the counts share the rest.
//! The widths do not depend on the amounts, so a new amount keeps the counts. The largest amounts
//! that fit:
//!
//! ```text
//!              1 ms    100 ms     1 s       1 min      1 h        1 day
//!   fixed      2²⁵     2³²        2³⁵       2⁴¹        2⁴⁷        2⁵²      (less one)
//!   sliding    4 095   65 535     131 071   1 048 575  8 388 607  67 108 863
//! ```
//!
//! Past the last index the limit denies everything.
//!
//! **A clock that steps back.** A closed window is not reopened: a `now` before the word's window
//! counts as its first moment. Waits are as long as the clock needs to catch up. From
//! [`STEP_BACK_NS`] on, if the word is more than one window ahead, its counts move to the window
//! after `now`'s. That bounds the wait by two windows, and stepping the clock to and fro gains
//! nothing.

use std::{num::NonZeroU64, time::Duration};

use super::{
    Key, Quota, QuotaError, Standing,
    overdraft::{Claimed, Overdraft},
    table::TableAddress,
    word_request::{STEP_BACK_NS, WordRequest},
};

/// The uptime for which every index fits: 9 years.
const UPTIME_NS: u64 = 9 * 366 * 24 * 3_600 * 1_000_000_000;

impl Key {
    /// The offset of this key's windows from an even division of process time, for a window limit
    /// of this length. It is less than a window and spreads the resets of different keys. Requests
    /// without a key have no offset.
    pub fn window_offset(self, window: Duration) -> Duration {
        let window_ns = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        let spread = TableAddress::new(self, 0).spread();
        Duration::from_nanos(offset_ns(window_ns, spread))
    }
}

/// The layout of a word (index and counts), and the window that an index names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    kind: WindowKind,
    window_ns: NonZeroU64,
    /// Width of one count.
    bits: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum WindowKind {
    Fixed,
    Sliding,
}

/// A word's meaning at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WindowView {
    index: u64,
    prev: u64,
    cur: u64,
    /// Nanoseconds since the window began.
    position: u64,
    /// Nanoseconds until the window begins; nonzero only if the clock was behind.
    ahead: u64,
    /// The clock stepped back so far that the counts moved.
    moved: bool,
}

impl Layout {
    fn new(kind: WindowKind, window_ns: NonZeroU64) -> Layout {
        let last = (UPTIME_NS / window_ns).saturating_add(4);
        let free = last.leading_zeros();
        let bits = match kind {
            WindowKind::Fixed => free,
            WindowKind::Sliding => free / 2,
        };
        Layout {
            kind,
            window_ns,
            bits,
        }
    }

    /// The largest representable count.
    fn most(self) -> u64 {
        low_bits(self.bits)
    }

    fn count_bits(self) -> u32 {
        match self.kind {
            WindowKind::Fixed => self.bits,
            WindowKind::Sliding => self.bits.saturating_mul(2),
        }
    }

    /// The last index whose successor is representable and whose word is not `u64::MAX`.
    fn last_index(self) -> u64 {
        (u64::MAX >> self.count_bits()).saturating_sub(2)
    }

    #[inline]
    fn pack(self, index: u64, prev: u64, cur: u64) -> u64 {
        let counts = match self.kind {
            WindowKind::Fixed => cur,
            WindowKind::Sliding => (prev << self.bits) | cur,
        };
        (index << self.count_bits()) | counts
    }

    #[inline]
    fn unpack(self, word: u64) -> (u64, u64, u64) {
        let prev = match self.kind {
            WindowKind::Fixed => 0,
            WindowKind::Sliding => (word >> self.bits) & self.most(),
        };
        (word >> self.count_bits(), prev, word & self.most())
    }

    /// The window of a moment and the position in it. Index 0 is the window that contains the
    /// start of the process.
    #[inline]
    fn locate(self, now_ns: u64, spread: u64) -> (u64, u64) {
        let window = self.window_ns.get();
        let shift = window.saturating_sub(offset_ns(window, spread));
        let phase = now_ns.saturating_add(shift);
        (phase / self.window_ns, phase % self.window_ns)
    }

    #[inline]
    fn view(self, now_ns: u64, spread: u64, word: u64) -> WindowView {
        let (now, position) = self.locate(now_ns, spread);
        let (index, prev, cur) = self.unpack(word);
        let here = WindowView {
            index: now,
            prev,
            cur,
            position,
            ahead: 0,
            moved: false,
        };
        if now > self.last_index() {
            // beyond the representable range: full for good
            let cur = u64::MAX;
            return WindowView { cur, ..here };
        }
        let Some(behind) = now.checked_sub(index) else {
            return self.view_ahead(here, index);
        };
        match (behind, self.kind) {
            (0, _) => here,
            (1, WindowKind::Sliding) => WindowView {
                prev: cur,
                cur: 0,
                ..here
            },
            _ => WindowView {
                prev: 0,
                cur: 0,
                ..here
            },
        }
    }

    /// Decodes a word whose window begins after `now`.
    #[cold]
    fn view_ahead(self, here: WindowView, index: u64) -> WindowView {
        let window = self.window_ns.get();
        let ahead = |index: u64| {
            let windows = index.saturating_sub(here.index);
            windows.saturating_mul(window).saturating_sub(here.position)
        };
        let next = here.index.saturating_add(1);
        let moved = index > next && ahead(index) > STEP_BACK_NS;
        let index = if moved { next } else { index };
        WindowView {
            index,
            position: 0,
            ahead: ahead(index),
            moved,
            ..here
        }
    }

    #[inline]
    fn used(self, view: &WindowView) -> u64 {
        let left = self.window_ns.get().saturating_sub(view.position);
        share(view.prev, left, self.window_ns).saturating_add(view.cur)
    }

    /// The least wait until at most `target` units are used; `target` is below the present usage.
    fn wait_ns(self, view: &WindowView, target: u64) -> u64 {
        let window = self.window_ns.get();
        let wait = match (target.checked_sub(view.cur), self.kind) {
            (Some(spare), _) => self
                .faded_at(view.prev, spare)
                .saturating_sub(view.position),
            (None, WindowKind::Fixed) => window.saturating_sub(view.position),
            (None, WindowKind::Sliding) => window
                .saturating_sub(view.position)
                .saturating_add(self.faded_at(view.cur, target)),
        };
        view.ahead.saturating_add(wait)
    }

    /// The first position at which a previous window with this count weighs at most `target`:
    /// `⌊prev·left/W⌋ ≤ target` is `left ≤ ⌈(target+1)·W/prev⌉ − 1`.
    fn faded_at(self, prev: u64, target: u64) -> u64 {
        if prev <= target {
            return 0;
        }
        let window = u128::from(self.window_ns.get());
        let scaled = u128::from(target).saturating_add(1).saturating_mul(window);
        let left = scaled.div_ceil(u128::from(prev.max(1))).saturating_sub(1);
        u64::try_from(window.saturating_sub(left)).unwrap_or(u64::MAX)
    }

    /// Whether an unseen key would have the same status.
    pub(super) fn is_idle(self, now_ns: u64, spread: u64, word: u64) -> bool {
        self.used(&self.view(now_ns, spread, word)) == 0
    }
}

/// `⌊count · left / window⌋`.
#[inline]
fn share(count: u64, left: u64, window: NonZeroU64) -> u64 {
    if count == 0 {
        return 0;
    }
    match count.checked_mul(left) {
        Some(product) => product / window,
        None => {
            let product = u128::from(count).saturating_mul(u128::from(left));
            let window = u128::from(window.get());
            u64::try_from(product.checked_div(window).unwrap_or(0)).unwrap_or(u64::MAX)
        }
    }
}

/// The offset of a key's windows from an even division of time, in nanoseconds: less than
/// `window_ns`.
#[inline]
pub(super) fn offset_ns(window_ns: u64, spread: u64) -> u64 {
    ((u128::from(window_ns).saturating_mul(u128::from(spread))) >> 48) as u64
}

fn low_bits(bits: u32) -> u64 {
    u64::MAX
        .checked_shr(u64::BITS.saturating_sub(bits))
        .unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WindowWord {
    layout: Layout,
    limit: u64,
    /// Capacity plus largest debt, where requests are charged by estimates.
    reach: Option<NonZeroU64>,
}

/// The windows of one limit: one per tier. Tiers with different window lengths count separately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Windows {
    default: WindowWord,
    others: Box<[WindowWord]>,
}

impl Windows {
    pub(super) fn fixed(
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Result<Windows, QuotaError> {
        Windows::new(WindowKind::Fixed, quotas, overdraft)
    }

    pub(super) fn sliding(
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Result<Windows, QuotaError> {
        Windows::new(WindowKind::Sliding, quotas, overdraft)
    }

    fn new(
        kind: WindowKind,
        quotas: &[Quota],
        overdraft: Option<Overdraft>,
    ) -> Result<Windows, QuotaError> {
        let window = |quota: &Quota| {
            quota.check_rate()?;
            let window_ns = NonZeroU64::new(quota.period_ns()).ok_or(QuotaError::PeriodTooShort)?;
            let layout = Layout::new(kind, window_ns);
            let limit = quota.amount.get();
            let most = overdraft.map_or(layout.most(), |overdraft| {
                overdraft.largest_capacity(layout.most())
            });
            if limit > most {
                return Err(QuotaError::WindowTooFull { most });
            }
            let reach = overdraft.and_then(|overdraft| overdraft.reach(limit));
            Ok(WindowWord {
                layout,
                limit,
                reach: reach.and_then(NonZeroU64::new),
            })
        };
        let (default, others) = quotas.split_first().ok_or(QuotaError::NoQuota)?;
        Ok(Windows {
            default: window(default)?,
            others: others.iter().map(window).collect::<Result<_, _>>()?,
        })
    }

    /// A tier that does not exist is treated as the default tier.
    #[inline]
    fn window(&self, tier: usize) -> &WindowWord {
        let other = tier.checked_sub(1).and_then(|index| self.others.get(index));
        other.unwrap_or(&self.default)
    }

    pub(super) fn tiers(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    pub(super) fn layout(&self, tier: usize) -> Layout {
        self.window(tier).layout
    }

    /// Two of the longest windows: the one of the charge and, for the sliding window, the next.
    pub(super) fn recovery_ns(&self) -> u64 {
        let windows = (0..self.tiers()).map(|tier| self.layout(tier).window_ns.get());
        windows.max().unwrap_or(0).saturating_mul(2)
    }

    /// The word after a charge; on denial, the word to keep. A cost of 0 always fits and changes
    /// nothing.
    #[inline(never)]
    pub(super) fn charge(&self, ask: &WordRequest, word: u64) -> Result<u64, u64> {
        if ask.cost == 0 {
            return Ok(word);
        }
        let window = self.window(ask.tier);
        let WindowWord { layout, limit, .. } = *window;
        let view = layout.view(ask.now_ns, ask.spread, word);
        if let Some(claimed) = Claimed::new(ask.cost, limit, window.reach)
            && layout.used(&view).saturating_add(claimed.needs) <= limit
        {
            let cur = view.cur.saturating_add(claimed.takes);
            return Ok(layout.pack(view.index, view.prev, cur));
        }
        Err(if view.moved {
            layout.pack(view.index, view.prev, view.cur)
        } else {
            word
        })
    }

    /// The word after an unconditional charge; at worst nothing remains.
    pub(super) fn charge_anyway(&self, ask: &WordRequest, word: u64) -> u64 {
        let WindowWord { layout, limit, .. } = *self.window(ask.tier);
        let view = layout.view(ask.now_ns, ask.spread, word);
        if ask.cost == 0 || view.index > layout.last_index() {
            return word;
        }
        let cur = view.cur.saturating_add(ask.cost).min(limit).max(view.cur);
        layout.pack(view.index, view.prev, cur)
    }

    /// The word after an unconditional charge that may go into debt, and the units beyond the debt
    /// bound, which are forgiven. Charges the present window.
    pub(super) fn overdraw(&self, ask: &WordRequest, word: u64) -> (u64, u64) {
        let layout = self.layout(ask.tier);
        let view = layout.view(ask.now_ns, ask.spread, word);
        if ask.cost == 0 || view.index > layout.last_index() {
            return (word, ask.cost);
        }
        let most = self.largest_claim(ask.tier).max(view.cur);
        let cur = view.cur.saturating_add(ask.cost).min(most);
        let paid = cur.saturating_sub(view.cur);
        let word = layout.pack(view.index, view.prev, cur);
        (word, ask.cost.saturating_sub(paid))
    }

    /// Units that count now.
    pub(super) fn owed(&self, ask: &WordRequest, word: u64) -> u64 {
        let layout = self.layout(ask.tier);
        let used = layout.used(&layout.view(ask.now_ns, ask.spread, word));
        used.min(self.largest_claim(ask.tier))
    }

    /// The largest charge of one estimate.
    pub(super) fn largest_claim(&self, tier: usize) -> u64 {
        let window = self.window(tier);
        window.reach.map_or(window.limit, NonZeroU64::get)
    }

    /// The word after a refund of a charge made with this `ask`; exact whichever count holds it by
    /// now.
    pub(super) fn refund(&self, ask: &WordRequest, word: u64) -> u64 {
        let layout = self.layout(ask.tier);
        let (charged, _) = layout.locate(ask.now_ns, ask.spread);
        let (index, prev, cur) = layout.unpack(word);
        match index.checked_sub(charged) {
            Some(0) => layout.pack(index, prev, cur.saturating_sub(ask.cost)),
            Some(1) => layout.pack(index, prev.saturating_sub(ask.cost), cur),
            _ => word,
        }
    }

    /// Status of a window with this word for a request that was not charged.
    #[inline]
    pub(super) fn standing(&self, ask: &WordRequest, word: u64) -> Standing {
        let window = self.window(ask.tier);
        let WindowWord { layout, limit, .. } = *window;
        let view = layout.view(ask.now_ns, ask.spread, word);
        let wait_ns = |target| layout.wait_ns(&view, target);
        let claimed = Claimed::new(ask.cost, limit, window.reach);
        let needs = claimed.map_or(ask.cost, |claimed| claimed.needs);
        Standing::of_count(layout.used(&view), limit, needs, wait_ns)
    }
}
