//! The units that one request holds of one limit, from its arrival until its cost is known.
//!
//! ```text
//!  reserve e ──▶ held ──▶ grow: the answer has used more ──▶ settle with the actual cost a
//!                                                             a > held: the difference is charged as an extra
//!                                                             a < held: it is refunded to where it was charged
//! ```
//!
//! Only numbers: the gateway's guard charges and refunds what is said here. A refund takes back the
//! last growth first, at the moment at which that was charged, and then the estimate, at the moment
//! of its arrival: windows count both in the right one. Units that the bound on debt forgave were
//! never charged and are not given back.

use super::decimal::Decimal;

/// Units held of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostReservation {
    held: u64,
    /// Of it, what was never charged.
    forgiven: u64,
    charged_ns: u64,
    /// The last growth, of what is held.
    grown: u64,
    grown_ns: u64,
}

/// Units that go back, and when they were charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refund {
    /// How many; 0 is nothing to do.
    pub units: u64,
    /// The `now_ns` of their charge.
    pub charged_ns: u64,
}

/// The charge or refunds that settle a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// To be charged now.
    pub extra: u64,
    /// Held and not used. More than the sum of `refunds` where part of it was forgiven.
    pub refunded: u64,
    /// To be given back.
    pub refunds: [Refund; 2],
    /// Forgiven while the reservation grew, and used. What the bound on debt drops of `extra` comes
    /// on top.
    pub forgiven: u64,
}

impl CostReservation {
    /// Holds what was charged when the request was admitted.
    pub fn new(units: u64, now_ns: u64) -> CostReservation {
        CostReservation {
            held: units,
            forgiven: 0,
            charged_ns: now_ns,
            grown: 0,
            grown_ns: now_ns,
        }
    }

    /// Units that are held now.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Units to charge because the answer has used `seen` so far: 0 while that is held, else what
    /// is missing and a share of all that is seen. A share of 0 does not grow.
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

    /// These units have been charged; the bound on debt dropped `forgiven` of them.
    pub fn grow(&mut self, units: u64, forgiven: u64, now_ns: u64) {
        self.held = self.held.saturating_add(units);
        self.forgiven = self.forgiven.saturating_add(forgiven);
        (self.grown, self.grown_ns) = (units.saturating_sub(forgiven), now_ns);
    }

    /// What is to be done now that the cost is known. A reservation is settled once: it is
    /// consumed.
    pub fn settle(self, actual: u64) -> Settlement {
        let refunded = self.held.saturating_sub(actual);
        // what was never charged is the last that was held
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
