//! Charges and refunds after an answer. No request waits for them.
//!
//! Units come from the tokens that this gateway holds for the key, or go back to the store; the rest
//! is a message to the lease manager, whose queue is bounded. It sums up what comes while a call of
//! the key is in flight.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{Budget, ClaimState, DecisionSource, SharedClaim, Taken, Unavailable};
use crate::{
    budget::{
        key_table::{CellNotice, KeyCell, SpendOutcome},
        lease::LeaseAlgorithm,
        lease_manager::{LateKind, LateMessage, Message},
        settings::{SharedKeyName, WhenDown},
    },
    limit::{MAX_LIMITS, Verdict},
};

/// What happens to units of a shared limit after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateCharge {
    /// Charged for a past event, as far as they are left.
    Event,
    /// Charged even if they are missing: at most one capacity is owed.
    Extra,
    /// Refunded: a request reserved them and did not use them.
    Refund {
        /// Where the reservation was decided.
        source: DecisionSource,
        /// The `now_ns` of the reservation.
        charged_ns: u64,
    },
}

impl Budget {
    /// Charges or refunds the units of a claim. Returns the units that are lost because the lease
    /// manager's queue is full.
    pub fn settle(
        &self,
        now_ns: u64,
        claim: &SharedClaim<'_>,
        name: SharedKeyName,
        charge: LateCharge,
    ) -> u64 {
        let terms = &claim.limit.tier(claim.tier).terms;
        if claim.cost == 0 || terms.algorithm == LeaseAlgorithm::Slots {
            return 0;
        }
        let (units, kind) = match charge {
            LateCharge::Refund {
                source: DecisionSource::Fallback,
                ..
            } => {
                self.refund_alone(claim);
                return 0;
            }
            LateCharge::Refund { charged_ns, .. } => (claim.cost, LateKind::Refund { charged_ns }),
            LateCharge::Event | LateCharge::Extra => {
                let Some(units) = self.charge_here(now_ns, claim) else {
                    return 0;
                };
                let is_extra = charge == LateCharge::Extra;
                let kind = if is_extra {
                    LateKind::Debt
                } else {
                    LateKind::Charge
                };
                (units, kind)
            }
        };
        if units == 0 {
            return 0;
        }
        let message = LateMessage {
            limit: Arc::clone(claim.limit),
            tier: claim.tier,
            tag: claim.tag(),
            name,
            units,
            kind,
        };
        let sent = self.manager.try_send(Message::Late(message));
        sent.map_or(units, |()| 0)
    }

    /// Charges what can be charged without Redis: the tokens in hand or, while Redis does not
    /// answer, the fallback. Returns the units that are left to charge; `None` if it is done.
    fn charge_here(&self, now_ns: u64, claim: &SharedClaim<'_>) -> Option<u64> {
        let tier = claim.limit.tier(claim.tier);
        let tag = claim.tag();
        let found = self.key_table.find(tag);
        let place = found.unwrap_or_else(|| self.key_table.overflow(tier.overflow));
        let cell = self.key_table.cell(place);
        let is_down = match found {
            Some(_) => self.is_down(cell),
            None => self.degraded.all.load(Relaxed),
        };
        if is_down {
            if let WhenDown::Local { .. } = claim.limit.when_down {
                cell.charge_alone(now_ns, claim.cost);
            }
            return None;
        }
        if found.is_none() {
            return Some(claim.cost);
        }
        let spent = cell.spend_part(now_ns, claim.cost, &tier.terms);
        let left = match spent {
            SpendOutcome::Taken { tokens, .. } if !self.key_table.is(place, tag) => {
                cell.put_back(tokens);
                return Some(claim.cost);
            }
            SpendOutcome::Taken { tokens, is_low } => {
                if is_low {
                    // if the lease manager's queue is full, the next request without tokens
                    // notifies it
                    let _ = self.notices.try_send(CellNotice { place, tag });
                }
                claim.cost.saturating_sub(tokens.iter().sum())
            }
            SpendOutcome::Refused { .. } | SpendOutcome::Nothing => claim.cost,
        };
        cell.expect(now_ns, left, &tier.terms);
        Some(left)
    }

    fn refund_alone(&self, claim: &SharedClaim<'_>) {
        if let WhenDown::Local { .. } = claim.limit.when_down {
            let overflow = claim.limit.tier(claim.tier).overflow;
            let place = self.key_table.find(claim.tag());
            let place = place.unwrap_or_else(|| self.key_table.overflow(overflow));
            self.key_table.cell(place).refund_alone(claim.cost);
        }
    }

    /// Whether each limit has units left for a request that it charges after the answer, as far as
    /// this gateway knows. Takes nothing.
    pub fn look(
        &self,
        now_ns: u64,
        claims: &[SharedClaim<'_>],
    ) -> Result<Verdict<'static>, Unavailable> {
        let mut verdict = Verdict::default();
        for (index, claim) in claims.iter().take(MAX_LIMITS).enumerate() {
            let taken = self.would_take(now_ns, claim);
            if taken.what == ClaimState::Closed {
                return Err(Unavailable { claim: index });
            }
            let standing = self.standing(now_ns, claim, taken);
            verdict.findings.push(standing.into());
        }
        Ok(verdict)
    }

    fn would_take(&self, now_ns: u64, claim: &SharedClaim<'_>) -> Taken {
        let tier = claim.limit.tier(claim.tier);
        if claim.cost > tier.terms.capacity {
            return ClaimState::Never.into();
        }
        let found = self.key_table.find(claim.tag());
        let place = found.unwrap_or_else(|| self.key_table.overflow(tier.overflow));
        let cell = self.key_table.cell(place);
        let is_down = match found {
            Some(_) => self.is_down(cell),
            None => self.degraded.all.load(Relaxed),
        };
        if is_down {
            let what = match claim.limit.when_down {
                WhenDown::Open => ClaimState::Open,
                WhenDown::Closed => ClaimState::Closed,
                WhenDown::Local { .. } => match cell.wait_alone_ns(now_ns, claim.cost) {
                    0 => ClaimState::Alone,
                    wait_ns => ClaimState::Refused {
                        until_ns: now_ns.saturating_add(wait_ns),
                    },
                },
            };
            return Taken::of(Some(place), what, DecisionSource::Fallback);
        }
        let what = match found {
            Some(_) => refused(now_ns, claim, cell),
            None => ClaimState::Undecided,
        };
        Taken::of(found, what, DecisionSource::Lease)
    }
}

/// A refusal, if the last reply says so.
fn refused(now_ns: u64, claim: &SharedClaim<'_>, cell: KeyCell<'_>) -> ClaimState {
    let terms = &claim.limit.tier(claim.tier).terms;
    let held: u64 = cell.held(now_ns).0.iter().sum();
    let forecast = cell.forecast();
    let is_spent = match terms.algorithm {
        LeaseAlgorithm::Log => cell.pool() < claim.cost && now_ns < forecast.end_ns,
        _ => now_ns < forecast.fits_ns(terms, claim.cost.saturating_sub(held)),
    };
    if !is_spent {
        return ClaimState::Undecided;
    }
    let until_ns = match terms.algorithm {
        LeaseAlgorithm::Log => forecast.end_ns,
        _ => cell.fits_ns(now_ns, claim.cost, terms),
    };
    ClaimState::Refused { until_ns }
}
