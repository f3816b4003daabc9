//! The units that one request reserves in one limit, from arrival until its cost is known.
//!
//! ```text
//! reserve e ──▶ held ──▶ grow: the answer has used more ──▶ settle with the actual cost a
//!                                                             a > held: charge the difference
//!                                                             a < held: refund the difference
//! ```
//!
//! This module only computes; the gateway's guard charges and refunds. A refund first takes back
//! the last growth at the time of its charge, then the estimate at the time of arrival. Windows
//! thus refund the right period. Units forgiven by the debt bound were never charged and are not
//! refunded.

use super::decimal::Decimal;

/// The units held in one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostReservation {
    held: u64,
    /// The part of `held` that was never charged.
    forgiven: u64,
    charged_ns: u64,
    /// The last growth, included in `held`.
    grown: u64,
    grown_ns: u64,
}

/// Units to refund, with the time of their charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refund {
    /// 0 means no refund.
    pub units: u64,
    /// The `now_ns` of their charge.
    pub charged_ns: u64,
}

/// The extra charge or the refunds that settle a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// Units to charge now.
    pub extra: u64,
    /// Held but unused. Exceeds the sum of `refunds` if a part was forgiven.
    pub refunded: u64,
    /// Refunds to make.
    pub refunds: [Refund; 2],
    /// Units used but forgiven while the reservation grew. Forgiven parts of `extra` come on top.
    pub forgiven: u64,
}

impl CostReservation {
    /// Holds the units charged at admission.
    pub fn new(units: u64, now_ns: u64) -> CostReservation {
        CostReservation {
            held: units,
            forgiven: 0,
            charged_ns: now_ns,
            grown: 0,
            grown_ns: now_ns,
        }
    }

    /// Units held now.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Units to charge now that the answer has used `seen`. 0 while `held` covers it. Else the
    /// shortfall plus `share` of `seen`; a share of 0 disables growth.
    pub fn growth(&self, seen: u64, share: Decimal) -> u64 {
        if seen <= self.held || share == Decimal::ZERO {
            return 0;
        }
        let whole = u128::from(Decimal::ONE.nanos());
        let factor = whole + u128::from(share.nanos());
        let wanted = (u128::from(seen) * factor).div_ceil(whole);
        u64::try_from(wanted)
            .unwrap_or(u64::MAX)
            .saturating_sub(self.held)
    }

    /// Records a growth charge, of which the debt bound forgave `forgiven` units.
    pub fn grow(&mut self, units: u64, forgiven: u64, now_ns: u64) {
        self.held = self.held.saturating_add(units);
        self.forgiven = self.forgiven.saturating_add(forgiven);
        (self.grown, self.grown_ns) = (units.saturating_sub(forgiven), now_ns);
    }

    /// Computes the settlement once the cost is known. Consumes the reservation, so it settles
    /// once.
    pub fn settle(self, actual: u64) -> Settlement {
        let refunded = self.held.saturating_sub(actual);
        // Forgiven units were the last to be held, so drop them first.
        let dropped = refunded.min(self.forgiven);
        let back = refunded - dropped;
        let of_growth = back.min(self.grown);
        Settlement {
            extra: actual.saturating_sub(self.held),
            refunded,
            refunds: [
                Refund {
                    units: of_growth,
                    charged_ns: self.grown_ns,
                },
                Refund {
                    units: back - of_growth,
                    charged_ns: self.charged_ns,
                },
            ],
            forgiven: self.forgiven - dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn quarter() -> Decimal {
        Decimal::parse("0.25").expect("a share")
    }

    #[test]
    fn less_comes_back_and_more_is_charged() {
        let held = CostReservation::new(600, 7);
        let refund = |units, charged_ns| Refund { units, charged_ns };
        let settled = held.settle(100);
        assert_eq!((settled.extra, settled.refunded), (0, 500));
        assert_eq!(settled.refunds, [refund(0, 7), refund(500, 7)]);
        assert_eq!(
            held.settle(600),
            Settlement {
                refunds: [refund(0, 7); 2],
                ..Settlement::default()
            }
        );
        assert_eq!(held.settle(1_000).extra, 400);
    }

    #[test]
    fn a_stream_holds_a_quarter_more_than_it_has_used() {
        let mut held = CostReservation::new(100, 0);
        assert_eq!(held.growth(100, quarter()), 0);
        assert_eq!(
            held.growth(101, quarter()),
            27,
            "101 and a quarter is 126.25"
        );
        assert_eq!(held.growth(1_000, Decimal::ZERO), 0);
        let mut steps = 0;
        for seen in 1..=3_000 {
            let units = held.growth(seen, quarter());
            if units > 0 {
                held.grow(units, 0, seen);
                steps += 1;
            }
            assert!(held.held() >= seen);
        }
        assert!(steps <= 16, "{steps} steps for a factor of 30");
    }

    #[test]
    fn the_last_growth_goes_back_first_and_to_its_own_time() {
        let mut held = CostReservation::new(100, 1);
        held.grow(27, 0, 50);
        let [growth, estimate] = held.settle(90).refunds;
        assert_eq!((growth.units, growth.charged_ns), (27, 50));
        assert_eq!((estimate.units, estimate.charged_ns), (10, 1));
    }

    #[test]
    fn what_was_forgiven_is_not_given_back() {
        let mut held = CostReservation::new(100, 1);
        held.grow(50, 30, 2);
        let settled = held.settle(110);
        assert_eq!((settled.refunded, settled.forgiven), (40, 0));
        assert_eq!(settled.refunds.map(|refund| refund.units), [10, 0]);
        assert_eq!(held.settle(140).forgiven, 20);
        assert_eq!(
            held.settle(200),
            Settlement {
                extra: 50,
                forgiven: 30,
                ..held.settle(150)
            }
        );
    }

    #[test]
    fn a_reservation_is_small() {
        assert!(size_of::<CostReservation>() <= 40);
    }

    proptest! {
        #[test]
        fn reserved_and_grown_and_extra_less_refunded_is_settled(
            estimate in 0..10_000_u64,
            growths in vec((0..10_000_u64, 0..100_u8), 0..20),
            actual in 0..20_000_u64,
        ) {
            let mut held = CostReservation::new(estimate, 0);
            let (mut grown, mut charged) = (0, estimate);
            for (now_ns, (seen, dropped)) in (1..).zip(growths) {
                let units = held.growth(seen, quarter());
                if units > 0 {
                    let forgiven = units * u64::from(dropped) / 100;
                    held.grow(units, forgiven, now_ns);
                    grown += units;
                    charged += units - forgiven;
                }
            }
            let settled = held.settle(actual);
            prop_assert_eq!(estimate + grown + settled.extra - settled.refunded, actual);
            let back: u64 = settled.refunds.iter().map(|refund| refund.units).sum();
            prop_assert_eq!(charged + settled.extra - back + settled.forgiven, actual);
        }
    }
}
