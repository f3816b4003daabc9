//! Charging one ring of a sliding log.

use std::sync::atomic::Ordering::Relaxed;

use super::Store;
use crate::limit::{
    charge::Charge,
    decision::Finding,
    log::{Logs, RingChange, RingOperation, RingOwner},
    standing::{ChargeLocation, Standing},
    word_request::SpentUnits,
};

impl Store {
    #[cold]
    pub(super) fn ask_ring<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        logs: &Logs,
        deed: RingOperation,
    ) -> Finding<'a> {
        self.visit(charge, logs, now_ns, deed).0.into()
    }

    /// Charges a ring. If a concurrent request took the units first, the ring denies.
    pub(super) fn charge_ring<'a>(
        &self,
        now_ns: u64,
        charge: &Charge<'a>,
        logs: &Logs,
    ) -> Finding<'a> {
        let (standing, held) = self.visit(charge, logs, now_ns, RingOperation::Charge);
        let held = if standing.denied {
            ChargeLocation::Nowhere
        } else {
            held
        };
        Standing { held, ..standing }.into()
    }

    pub(super) fn refund_ring(
        &self,
        now_ns: u64,
        charge: &Charge<'_>,
        logs: &Logs,
        held: ChargeLocation,
    ) {
        let owner = match held {
            ChargeLocation::Nowhere => return,
            ChargeLocation::Own => owner(charge),
            ChargeLocation::Overflow => RingOwner::overflow(charge.key),
        };
        self.visit_owner(charge, logs, now_ns, owner, RingOperation::Refund);
    }

    /// Applies an operation to the charge's ring, or to its key's overflow ring, and returns which
    /// one it was.
    pub(super) fn visit(
        &self,
        charge: &Charge<'_>,
        logs: &Logs,
        now_ns: u64,
        deed: RingOperation,
    ) -> (Standing, ChargeLocation) {
        let own = self.visit_owner(charge, logs, now_ns, owner(charge), deed);
        if let Some(standing) = own {
            return (standing, ChargeLocation::Own);
        }
        if deed == RingOperation::Ask || deed == RingOperation::ChargeAnyway {
            let state = charge.limit.state(charge.tier);
            state.overflowed.fetch_add(1, Relaxed);
        }
        let shared = self.visit_owner(charge, logs, now_ns, RingOwner::overflow(charge.key), deed);
        let unknown = || logs.standing_unknown(&charge.ask(now_ns, 0));
        (shared.unwrap_or_else(unknown), ChargeLocation::Overflow)
    }

    fn visit_owner(
        &self,
        charge: &Charge<'_>,
        logs: &Logs,
        now_ns: u64,
        owner: RingOwner,
        deed: RingOperation,
    ) -> Option<Standing> {
        let limit = charge.limit;
        let id = limit.state(charge.tier).id;
        let ask = charge.ask(now_ns, 0);
        // looked up before taking the lock: no thread holds two
        let inherited = match owner {
            RingOwner::Overflow(_) => None,
            _ => self.owed_by_fresh_key(charge, logs, now_ns),
        };
        self.rings
            .visit((id, owner), logs, &ask, deed, inherited, |id, change| {
                let state = self.registry.by_id(id)?;
                match change {
                    RingChange::None => {}
                    RingChange::Made => _ = state.keys.fetch_add(1, Relaxed),
                    RingChange::Dropped => {
                        state.keys.fetch_sub(1, Relaxed);
                        state.evictions.fetch_add(1, Relaxed);
                    }
                }
                Some(&state.occupancy.entries)
            })
    }

    /// Usage of a key without a ring: under previous rules, or in the overflow ring
    /// that it may have shared.
    fn owed_by_fresh_key(
        &self,
        charge: &Charge<'_>,
        logs: &Logs,
        now_ns: u64,
    ) -> Option<SpentUnits> {
        let (limit, tier) = (charge.limit, charge.tier);
        let before = match limit.past.is_empty() {
            true => None,
            false => limit.inheritance(self, charge.key, tier, now_ns),
        };
        let state = limit.state(tier);
        if charge.key.is_none() || state.overflowed.load(Relaxed) == 0 {
            return before;
        }
        let name = (state.id, RingOwner::overflow(charge.key));
        let shared = self.rings.look(name, logs, &charge.ask(now_ns, 0));
        let owed = shared.map_or(0, |shared| shared.capacity.saturating_sub(shared.remaining));
        match before {
            Some(before) if before.units >= owed => Some(before),
            _ => (owed > 0).then_some(SpentUnits {
                at_ns: now_ns,
                units: owed,
            }),
        }
    }
}

fn owner(charge: &Charge<'_>) -> RingOwner {
    RingOwner::own(charge.key)
}
