//! The charge of one ring of a sliding log.

use std::sync::atomic::Ordering::Relaxed;

use super::{Asked, Charge, Store};
use crate::limit::{
    Held, Standing,
    log::{Deed, Logs, Owner},
};

/// One limit's ring as a request found it.
#[derive(Debug)]
pub(super) struct Ring<'s> {
    pub(super) charge: Charge<'s>,
    pub(super) logs: &'s Logs,
    pub(super) now_ns: u64,
    pub(super) standing: Standing,
}

impl Store {
    #[cold]
    pub(super) fn ask_ring<'s>(
        &'s self,
        now_ns: u64,
        charge: &Charge<'s>,
        logs: &'s Logs,
        deed: Deed,
    ) -> Asked<'s> {
        Asked::Ring(Ring {
            charge: *charge,
            logs,
            now_ns,
            standing: self.visit(charge, logs, now_ns, deed).0,
        })
    }

    /// Charges a ring. `Err`: a concurrent request was faster, and the ring denies.
    pub(super) fn charge_ring(&self, ring: &Ring<'_>) -> Result<Standing, Standing> {
        let (standing, held) = self.visit(&ring.charge, ring.logs, ring.now_ns, Deed::Charge);
        if standing.denied {
            return Err(standing);
        }
        let held = if ring.charge.cost == 0 {
            Held::Nowhere
        } else {
            held
        };
        Ok(Standing { held, ..standing })
    }

    pub(super) fn refund_ring(&self, now_ns: u64, charge: &Charge<'_>, logs: &Logs, held: Held) {
        let owner = match held {
            Held::Nowhere => return,
            Held::Own => owner(charge),
            Held::Overflow => Owner::Overflow,
        };
        self.visit_owner(charge, logs, now_ns, owner, Deed::Refund);
    }

    /// Does something with the charge's ring, or with the one that its key shares with others; says which.
    pub(super) fn visit(
        &self,
        charge: &Charge<'_>,
        logs: &Logs,
        now_ns: u64,
        deed: Deed,
    ) -> (Standing, Held) {
        let own = self.visit_owner(charge, logs, now_ns, owner(charge), deed);
        if let Some(standing) = own {
            return (standing, Held::Own);
        }
        if deed == Deed::Ask || deed == Deed::ChargeAnyway {
            let state = charge.limit.state(charge.tier);
            state.overflowed.fetch_add(1, Relaxed);
        }
        let shared = self.visit_owner(charge, logs, now_ns, Owner::Overflow, deed);
        let unknown = || logs.standing_unknown(&charge.ask(now_ns, 0));
        (shared.unwrap_or_else(unknown), Held::Overflow)
    }

    fn visit_owner(
        &self,
        charge: &Charge<'_>,
        logs: &Logs,
        now_ns: u64,
        owner: Owner,
        deed: Deed,
    ) -> Option<Standing> {
        let id = charge.limit.state(charge.tier).id;
        let ask = charge.ask(now_ns, 0);
        self.rings
            .visit((id, owner), logs, &ask, deed, |limit, made| {
                let Some(state) = self.registry.by_id(limit) else {
                    return;
                };
                if made {
                    state.keys.fetch_add(1, Relaxed);
                } else {
                    state.keys.fetch_sub(1, Relaxed);
                    state.evictions.fetch_add(1, Relaxed);
                }
            })
    }
}

fn owner(charge: &Charge<'_>) -> Owner {
    charge.key.map_or(Owner::Everybody, Owner::Key)
}
