//! Units that are charged or refunded after an answer, until a call reports them.
//!
//! Charges of one key are summed up, and so are refunds. So however many answers end while a call
//! is in flight, the next call reports them as one number.

use super::{call::LeaseReport, terms::LeaseTerms};

/// Units of one key that await a call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LateUnits {
    /// Charged as far as units are left, and the part in the call in flight.
    pub(super) charge: u64,
    charge_sent: u64,
    /// Buckets: reserved and not used.
    pub(super) refund: u64,
    /// When the first of them came.
    pub(super) refund_ns: u64,
    /// Whether to call although no request waits.
    pub(super) is_due: bool,
}

impl LateUnits {
    pub(super) fn charged(&self) -> u64 {
        self.charge
    }

    pub(super) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Adds what a call reports. Charges are kept until a reply, so a lost call is repeated; a lost
    /// refund is not, because it would be made twice.
    pub(super) fn report(
        &mut self,
        now_ns: u64,
        terms: &LeaseTerms,
        reports: &mut Vec<LeaseReport>,
    ) {
        self.is_due = false;
        self.charge_sent = self.charge;
        if self.charge > 0 {
            let tokens = self.charge;
            reports.push(LeaseReport::Charge { tokens });
        }
        let tokens = std::mem::take(&mut self.refund);
        // after the time to fill, the bucket has refilled what was reserved
        let is_late = now_ns.saturating_sub(self.refund_ns) as f64 > terms.span_ns();
        if tokens > 0 && !is_late {
            reports.push(LeaseReport::Refund { tokens });
        }
    }

    pub(super) fn replied(&mut self) {
        let sent = std::mem::take(&mut self.charge_sent);
        self.charge = self.charge.saturating_sub(sent);
    }
}
