//! Slot leases, step by step, and against a store that loses messages and outlives gateways.

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

fn granted(need: u64, left: u64, wanted_us: u64) -> Reply {
    Reply {
        need,
        pool: left,
        wait_us: wanted_us,
        ..Reply::default()
    }
}

#[test]
fn a_declaration_says_all_that_is_held_and_a_lost_reply_heals_with_the_next() {
    let (terms, mut slot_lease) = (LeaseTerms::slots(10, true), SlotLease::default());
    let first = slot_lease.declare(0, 1, 0, 0, 3);
    assert_eq!((first.held, first.need), (0, 3));
    slot_lease.replied(MS, 0, 1, &granted(3, 7, 0), &terms, 0.5);
    assert_eq!(slot_lease.declare(2 * MS, 2, 0, 0, 2).held, 3);
    // the reply is lost
    assert!(
        slot_lease.is_due(3 * MS, 0, 0),
        "the store's record is unknown"
    );
    assert_eq!(slot_lease.declare(3 * MS, 3, 1, 0, 0).held, 2);
    let late = slot_lease.replied(4 * MS, 2 * MS, 2, &granted(2, 5, 0), &terms, 0.5);
    assert_eq!(
        (late, slot_lease.mine()),
        (None, 2),
        "the third call says that it has two"
    );
}

#[test]
fn slots_may_be_taken_for_two_thirds_of_a_life_and_are_declared_anew_before() {
    let (terms, mut slot_lease) = (LeaseTerms::slots(10, true), SlotLease::default());
    slot_lease.declare(0, 1, 0, 0, 1);
    let slot_reply = slot_lease.replied(50 * MS, 0, 1, &granted(1, 9, 0), &terms, 0.5);
    let good_until_ns = slot_reply.expect("the last call").good_until_ns;
    assert!(good_until_ns < LIFE_NS * 7 / 10);
    let look_ns = slot_lease.look_again_ns(50 * MS, &terms, 2.0, (0, 0));
    assert_eq!(look_ns, 3 * S);
    assert!(!slot_lease.is_due(look_ns - 1, 0, 0) && slot_lease.is_due(look_ns, 0, 0));
}

#[test]
fn a_free_slot_is_kept_for_a_moment_unless_others_want_it() {
    let terms = LeaseTerms::slots(10, true);
    let mut slot_lease = SlotLease::default();
    slot_lease.declare(0, 1, 0, 0, 2);
    slot_lease.replied(MS, 0, 1, &granted(2, 8, 0), &terms, 0.5);
    assert!(!slot_lease.freed(2 * MS, &terms, 2.0, 1), "kept");
    assert_eq!(
        slot_lease.look_again_ns(2 * MS, &terms, 2.0, (1, 0)),
        102 * MS
    );
    // two are free, but only one has been free since the last look
    assert_eq!(slot_lease.surplus(102 * MS, &terms, 2.0, 2), 1);
    slot_lease.declare(110 * MS, 2, 1, 0, 0);
    slot_lease.replied(
        111 * MS,
        110 * MS,
        2,
        &granted(0, 0, 9_000_000),
        &terms,
        0.5,
    );
    assert!(
        slot_lease.freed(112 * MS, &terms, 2.0, 1),
        "a request was refused"
    );
    assert!(
        SlotLease::default().freed(0, &LeaseTerms::slots(10, false), 2.0, 1),
        "strict"
    );
    let few_ns = SlotLease::default().look_again_ns(0, &LeaseTerms::slots(4, true), 2.0, (1, 0));
    assert_eq!(few_ns, 10 * MS, "two for each gateway");
}

#[test]
fn a_refusal_is_remembered_for_a_moment_and_not_at_all_where_every_request_asks() {
    for (terms, expected) in [
        (LeaseTerms::slots(4, true), 21 * MS),
        (LeaseTerms::slots(4, false), 0),
    ] {
        let mut slot_lease = SlotLease::default();
        slot_lease.declare(0, 1, 0, 0, 1);
        let slot_reply = slot_lease.replied(MS, 0, 1, &granted(0, 0, 10), &terms, 0.5);
        assert_eq!(slot_reply.expect("the last call").refuse_until_ns, expected);
    }
}

#[test]
fn it_is_forgotten_when_the_store_knows_that_it_holds_nothing() {
    let (terms, mut slot_lease) = (LeaseTerms::slots(4, true), SlotLease::default());
    slot_lease.declare(0, 1, 0, 0, 1);
    slot_lease.replied(MS, 0, 1, &granted(1, 3, 0), &terms, 0.5);
    assert!(!slot_lease.is_idle(5 * S, 0, 0), "a request holds it");
    slot_lease.declare(6 * S, 2, 1, 0, 0);
    assert!(!slot_lease.is_idle(8 * S, 0, 0), "no reply yet");
    slot_lease.replied(8 * S, 8 * S, 2, &granted(0, 4, 0), &terms, 0.5);
    assert!(
        !slot_lease.is_idle(8 * S, 0, 1),
        "one is under way that no store granted"
    );
    assert!(slot_lease.is_idle(8 * S, 0, 0));
}

/// The script, ported to Rust.
#[derive(Default)]
struct SlotScript {
    by_gateway: Vec<(usize, u64, u64, u64)>,
}

impl SlotScript {
    fn call(
        &mut self,
        now_ns: u64,
        me: usize,
        limit: u64,
        number: u64,
        said: Declaration,
    ) -> Reply {
        self.by_gateway.retain(|&(_, _, over, _)| now_ns < over);
        let of = self.by_gateway.iter().find(|&&(gateway, ..)| gateway == me);
        let is_late = of.is_some_and(|&(_, _, _, of)| number < of);
        let mut granted = 0;
        if !is_late {
            self.by_gateway.retain(|&(gateway, ..)| gateway != me);
            let others: u64 = self.by_gateway.iter().map(|&(_, held, ..)| held).sum();
            granted = said.need.min(limit.saturating_sub(others + said.held));
            if said.held + granted > 0 {
                let over = now_ns + LIFE_NS;
                self.by_gateway
                    .push((me, said.held + granted, over, number));
            }
        }
        let sum: u64 = self.by_gateway.iter().map(|&(_, held, ..)| held).sum();
        Reply {
            need: granted,
            pool: limit.saturating_sub(sum),
            wait_us: u64::from(granted < said.need) * 10_000_000,
            demand: sum,
            ..Reply::default()
        }
    }
}

/// A model gateway: its slot lease, its free slots, the requests that it admits.
#[derive(Clone, Default)]
struct SlotGateway {
    id: usize,
    slot_lease: SlotLease,
    free: u64,
    good_until_ns: u64,
    in_use: u64,
    /// The call sent, and its reply if it was executed.
    flight: Option<(u64, u64, Option<Reply>)>,
    late: Option<(u64, Declaration)>,
}

#[derive(Clone, Copy, Debug)]
struct SlotStep {
    after_ms: u64,
    gateway: usize,
    arrive: u64,
    leave: u64,
    /// 0 the call is lost, 1 its reply is lost, 2 it arrives after the next call, 3 the gateway
    /// dies; otherwise it succeeds.
    fate: u8,
}

fn step() -> impl Strategy<Value = SlotStep> {
    (0..900_u64, 0..3_usize, 0..6_u64, 0..6_u64, 0..40_u8).prop_map(
        |(after_ms, gateway, arrive, leave, fate)| SlotStep {
            after_ms,
            gateway,
            arrive,
            leave,
            fate,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn gateways_together_never_let_more_requests_in_than_the_limit(
        limit in 1_u64..12,
        steps in prop::collection::vec(step(), 20..200),
    ) {
        let terms = LeaseTerms::slots(limit, true);
        let mut store = SlotScript::default();
        let mut gateways: Vec<SlotGateway> = (0..3).map(|id| SlotGateway { id, ..SlotGateway::default() }).collect();
        let (mut now_ns, mut number) = (0, 0);
        for step in steps {
            // no gateway goes without a declaration for longer than the look interval
            let mut left_ns = step.after_ms * MS;
            while left_ns > 0 {
                let by_ns = left_ns.min(200 * MS);
                (now_ns, left_ns) = (now_ns + by_ns, left_ns - by_ns);
                for gateway in &mut gateways {
                    let back = gateway.slot_lease.surplus(now_ns, &terms, 3.0, gateway.free);
                    if gateway.flight.is_none() && gateway.slot_lease.is_due(now_ns, back, 0) {
                        number += 1;
                        gateway.free -= back;
                        let said = gateway.slot_lease.declare(now_ns, number, back, 0, 0);
                        let reply = store.call(now_ns, gateway.id, limit, number, said);
                        gateway.flight = Some((number, now_ns, Some(reply)));
                    }
                    gateway.hear(now_ns, &terms);
                }
            }
            let gateway = &mut gateways[step.gateway];
            if step.fate == 3 {
                // its requests die with it; the store notices when its lifetime ends
                *gateway = SlotGateway { id: gateway.id + 3, ..SlotGateway::default() };
            }
            let left = step.leave.min(gateway.in_use);
            gateway.in_use -= left;
            gateway.free += left;
            let taken = if now_ns < gateway.good_until_ns { step.arrive.min(gateway.free) } else { 0 };
            gateway.free -= taken;
            gateway.in_use += taken;
            let need = step.arrive - taken;
            if need > 0 && gateway.flight.is_none() {
                number += 1;
                let said = gateway.slot_lease.declare(now_ns, number, 0, 0, need);
                let mut reply = None;
                match step.fate {
                    0 => {}
                    2 => gateway.late = Some((number, said)),
                    _ => reply = Some(store.call(now_ns, gateway.id, limit, number, said)),
                }
                let reply = reply.filter(|_| step.fate != 1);
                gateway.flight = Some((number, now_ns, reply));
                let granted = gateway.hear(now_ns, &terms);
                let served = granted.min(need).min(gateway.free);
                gateway.free -= served;
                gateway.in_use += served;
            }
            let in_use: u64 = gateways.iter().map(|gateway| gateway.in_use).sum();
            prop_assert!(in_use <= limit, "{in_use} of {limit} at {} ms", now_ns / MS);
            // a call that was delayed for long arrives now
            for gateway in &mut gateways {
                if let Some((late, said)) = gateway.late.take_if(|(late, _)| *late < number) {
                    store.call(now_ns, gateway.id, limit, late, said);
                }
            }
        }
        // after all requests end and every gateway has said so, everything is free again
        now_ns += LIFE_NS;
        let all = store.call(now_ns, 99, limit, u64::MAX, Declaration { held: 0, need: limit });
        prop_assert_eq!(all.need, limit);
    }
}

impl SlotGateway {
    /// Applies the reply to its call, if there is one; returns the slots granted.
    fn hear(&mut self, now_ns: u64, terms: &LeaseTerms) -> u64 {
        let Some((number, sent_ns, reply)) = self.flight.take() else {
            return 0;
        };
        let slot_reply = reply.and_then(|reply| {
            self.slot_lease
                .replied(now_ns, sent_ns, number, &reply, terms, 0.5)
        });
        slot_reply.map_or(0, |slot_reply| {
            self.free += slot_reply.granted;
            self.good_until_ns = slot_reply.good_until_ns;
            slot_reply.granted
        })
    }
}
