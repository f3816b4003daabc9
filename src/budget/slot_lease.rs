//! Pure arithmetic of slot leases: how many requests of one key this gateway may have in flight,
//! and what it declares to the store.
//!
//! ```text
//!   request ─ free local slot? ─ yes ─▶ in use until the response ends ─▶ free, kept for a moment ─▶ given back
//!                     └ no ─▶ declare slots held and wanted ─▶ granted | refused
//! ```
//!
//! A declaration states everything that this gateway holds, so the next one repairs a lost call or
//! reply. It has a lifetime, after which a dead gateway's slots are free. A gateway that could not
//! declare for two thirds of it admits no requests on the slots that it believes to hold. Its
//! requests in flight continue; only they can exceed the limit then.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use super::lease::{LeaseTerms, Reply};

/// Lifetime of a declaration in the store.
pub(super) const LIFE_NS: u64 = 10_000_000_000;
/// How long free slots may be taken after a declaration, and how often it is renewed.
const GOOD_NS: u64 = LIFE_NS / 3 * 2;
const RENEW_NS: u64 = 3_000_000_000;
/// How long a free slot is kept for the next request: normally, and when there are few per gateway.
const KEEP_NS: u64 = 100_000_000;
const KEEP_FEW_NS: u64 = 10_000_000;
const FEW: f64 = 2.0;
/// The longest time for which a refusal is remembered: no one can predict when a slot becomes free.
const PAUSE_NS: u64 = 20_000_000;
/// How long a key without slots is remembered.
const IDLE_NS: u64 = 1_000_000_000;

/// The content of one declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Declaration {
    /// In use, and kept free.
    pub(super) held: u64,
    /// More slots, for waiting requests.
    pub(super) need: u64,
}

/// The effect of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotReply {
    pub(super) granted: u64,
    /// Until when free slots may be taken.
    pub(super) good_until_ns: u64,
    /// Until when requests without a free slot are refused; 0 if they are not.
    pub(super) refuse_until_ns: u64,
}

/// The slots of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotLease {
    /// Granted and not given back.
    mine: u64,
    /// Free slots at the last look.
    seen_free: u64,
    /// The last call: its number, time and declaration.
    number: u64,
    called_ns: u64,
    sent: u64,
    /// The slots that the store has recorded; `None` while unknown.
    declared: Option<u64>,
    /// Until when other gateways want slots freed here.
    wanted_until_ns: u64,
    /// This gateway's share of all slots in use.
    share: Option<f64>,
}

impl SlotLease {
    pub(super) fn mine(&self) -> u64 {
        self.mine
    }

    /// This gateway's share of all usage, 0 to 1; `None` before its first use.
    pub(super) fn share(&self) -> Option<f64> {
        self.share
    }

    /// Begins a call. `back` free slots were withdrawn to go back; requests use `alone` slots that
    /// no store granted.
    pub(super) fn declare(
        &mut self,
        now_ns: u64,
        number: u64,
        back: u64,
        alone: u64,
        need: u64,
    ) -> Declaration {
        self.mine = self.mine.saturating_sub(back);
        let held = self.mine.saturating_add(alone);
        (self.number, self.called_ns, self.sent) = (number, now_ns, held);
        self.declared = None;
        Declaration { held, need }
    }

    /// Applies the reply to the call with this number, sent at `sent_ns`; `None` if a later call
    /// has declared since. `jitter` is random, 0 to 1.
    pub(super) fn replied(
        &mut self,
        now_ns: u64,
        sent_ns: u64,
        number: u64,
        reply: &Reply,
        terms: &LeaseTerms,
        jitter: f64,
    ) -> Option<SlotReply> {
        if number != self.number {
            return None;
        }
        let granted = reply.need.min(terms.capacity);
        self.mine = self.mine.saturating_add(granted);
        let declared = self.sent.saturating_add(granted);
        self.declared = Some(declared);
        self.wanted_until_ns = match reply.wait_us {
            0 => 0,
            us => now_ns.saturating_add(us.saturating_mul(1000).min(LIFE_NS)),
        };
        if declared > 0 {
            let share = declared as f64 / reply.demand.max(declared) as f64;
            self.share = Some(self.share.map_or(share, |known| 0.7 * known + 0.3 * share));
        }
        let refuse_until_ns = match (reply.pool, terms.ahead) {
            (0, true) => {
                let pause_ns = (PAUSE_NS as f64 * (0.75 + 0.5 * jitter)) as u64;
                now_ns.saturating_add(pause_ns)
            }
            // not even until now: requests being decided began slightly earlier
            _ => 0,
        };
        Some(SlotReply {
            granted,
            good_until_ns: sent_ns.saturating_add(GOOD_NS),
            refuse_until_ns,
        })
    }

    /// How long a free slot is kept.
    fn keep_ns(&self, now_ns: u64, terms: &LeaseTerms, gateways: f64) -> u64 {
        if !terms.ahead || now_ns < self.wanted_until_ns {
            0
        } else if terms.capacity as f64 <= FEW * gateways {
            KEEP_FEW_NS
        } else {
            KEEP_NS
        }
    }

    /// A slot was returned, so `free` are free: whether they should go back to the store at once.
    pub(super) fn freed(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        gateways: f64,
        free: u64,
    ) -> bool {
        self.seen_free = free;
        self.keeps_nothing(now_ns, terms, gateways)
    }

    /// Whether freed slots go back at once: the limit is strict, or other gateways want them.
    pub(super) fn keeps_nothing(&self, now_ns: u64, terms: &LeaseTerms, gateways: f64) -> bool {
        self.keep_ns(now_ns, terms, gateways) == 0
    }

    /// Looks at the free slots and returns how many should go back: those free since the last look.
    pub(super) fn surplus(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        gateways: f64,
        free: u64,
    ) -> u64 {
        let seen = std::mem::replace(&mut self.seen_free, free);
        match self.keep_ns(now_ns, terms, gateways) {
            0 => free,
            _ => seen.min(free),
        }
    }

    /// Whether to declare: the store's record is too high, unknown, or about to expire.
    pub(super) fn is_due(&self, now_ns: u64, back: u64, alone: u64) -> bool {
        let held = self.mine.saturating_sub(back).saturating_add(alone);
        let is_old = now_ns.saturating_sub(self.called_ns) >= RENEW_NS;
        self.declared != Some(held) || held > 0 && is_old
    }

    /// When to look again: soon while there are slots to give back or records to correct, otherwise
    /// when the declaration must be renewed.
    pub(super) fn look_again_ns(
        &self,
        now_ns: u64,
        terms: &LeaseTerms,
        gateways: f64,
        (free, alone): (u64, u64),
    ) -> u64 {
        let is_off = self.declared != Some(self.mine.saturating_add(alone));
        let renew_ns = self.called_ns.max(now_ns.saturating_sub(RENEW_NS));
        let renew_ns = renew_ns.saturating_add(RENEW_NS);
        if free > 0 || is_off {
            let keep_ns = self.keep_ns(now_ns, terms, gateways);
            return renew_ns.min(now_ns.saturating_add(keep_ns.max(KEEP_FEW_NS)));
        }
        if self.mine.saturating_add(alone) > 0 {
            return renew_ns;
        }
        now_ns.saturating_add(IDLE_NS)
    }

    /// Whether this key can be forgotten: it holds nothing, the store knows that, and no request
    /// came for a while.
    pub(super) fn is_idle(&self, now_ns: u64, asked_ns: u64, alone: u64) -> bool {
        let quiet_ns = now_ns.saturating_sub(asked_ns.max(self.called_ns));
        let holds = self.mine.saturating_add(alone);
        // an unconfirmed declaration expires after its lifetime
        let is_told = self.declared == Some(0) || quiet_ns >= LIFE_NS;
        holds == 0 && is_told && quiet_ns >= IDLE_NS
    }
}

#[cfg(test)]
mod tests;
