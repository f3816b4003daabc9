//! The lease, step by step.

use std::time::Duration;

use super::*;

const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn terms(ahead: bool) -> LeaseTerms {
    LeaseTerms::new(
        LeaseAlgorithm::Bucket,
        100,
        Duration::from_secs(1),
        100,
        ahead,
    )
}

fn reply(need: u64, want: u64, pool: u64) -> Reply {
    Reply {
        need,
        want,
        generation: 6,
        valid_us: 1_000_000,
        pool,
        wait_us: if pool == 0 { 10_000 } else { 0 },
        incarnation: 1,
        disagrees: false,
        demand: 0,
        state: [(100 - pool) * 10_000, 0],
    }
}

fn ones(count: usize) -> Requests {
    Requests::from_iter(std::iter::repeat_n(1, count))
}

#[test]
fn the_first_request_asks_for_itself_only_and_the_next_ones_for_more_and_more() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    assert_eq!(horizon, SECOND / 2);
    let mut wants = Vec::new();
    for turn in 0..5 {
        lease.arrived(turn, horizon, 0, 1);
        let ask = CallReason {
            need: ones(1),
            fill: true,
            ..CallReason::default()
        };
        wants.push(lease.call(turn, &terms, horizon, [0, 0], ask).want);
    }
    assert_eq!(wants, [0, 1, 4, 4, 4], "warm: at least a batch");
}

#[test]
fn a_strict_limit_asks_for_nothing_ahead_and_is_short_only_when_it_is_empty() {
    let (terms, mut lease) = (terms(false), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.arrived(0, horizon, 0, 500);
    let ask = CallReason {
        need: ones(3),
        fill: true,
        ..CallReason::default()
    };
    assert_eq!(lease.call(0, &terms, horizon, [0, 0], ask).want, 0);
    let granted = lease.replied(MS, 0, &terms, (&reply(3, 0, 1), None), (MS, 0.5));
    assert_eq!(granted.pause, None);
    let granted = lease.replied(MS, 0, &terms, (&reply(3, 0, 0), None), (MS, 0.5));
    assert_eq!(granted.pause, None);
    // ten milliseconds: clients receive the reply's wait, and the call was sent one earlier
    assert_eq!(granted.forecast.fits_ns(&terms, 1), MS + 10 * MS);
    let early_ns = granted.forecast.not_before_ns(&terms, 1);
    assert!(
        (10 * MS - MS / 50..=10 * MS).contains(&early_ns),
        "{early_ns}"
    );
}

#[test]
fn a_deadline_counts_from_the_moment_the_call_was_sent_and_is_early() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let granted = lease.replied(
        700 * MS,
        200 * MS,
        &terms,
        (&reply(0, 8, 50), None),
        (MS, 0.5),
    );
    assert_eq!(granted.deadline_ns, 200 * MS + 999 * MS);
    assert_eq!((granted.slot, granted.bank), (0, 8));
}

#[test]
fn what_is_spent_is_reported_once_and_what_goes_back_is_not_reported_as_spent() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.replied(MS, 0, &terms, (&reply(0, 10, 50), None), (MS, 0.5));
    let ask = CallReason {
        back: [2, 0],
        ..CallReason::default()
    };
    let call = lease.call(2 * MS, &terms, horizon, [5, 0], ask);
    let generation = 6;
    assert_eq!(
        call.reports,
        [
            LeaseReport::Spent {
                generation,
                tokens: 3
            },
            LeaseReport::Returned {
                generation,
                tokens: 2
            },
        ]
    );
    let again = lease.call(3 * MS, &terms, horizon, [5, 0], CallReason::default());
    assert_eq!(again.reports, []);
}

#[test]
fn a_token_that_a_request_did_not_use_goes_on_the_books_before_it_goes_back() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.replied(MS, 0, &terms, (&reply(1, 0, 50), None), (MS, 0.5));
    // it was put into the cell
    let call = lease.call(2 * MS, &terms, horizon, [1, 0], CallReason::default());
    let generation = 6;
    assert_eq!(
        call.reports,
        [LeaseReport::Spent {
            generation,
            tokens: -1
        }]
    );
    let ask = CallReason {
        back: [1, 0],
        ..CallReason::default()
    };
    let call = lease.call(3 * MS, &terms, horizon, [0, 0], ask);
    assert_eq!(
        call.reports,
        [LeaseReport::Returned {
            generation,
            tokens: 1
        }]
    );
}

#[test]
fn a_debt_is_charged_until_a_reply_confirms_it() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.owe(0, 4);
    for _ in 0..2 {
        let call = lease.call(MS, &terms, horizon, [0, 0], CallReason::default());
        assert_eq!(
            call.reports,
            [LeaseReport::Debt {
                tokens: 4,
                window: None
            }]
        );
    }
    lease.owe(0, 1);
    lease.replied(MS, 0, &terms, (&reply(0, 0, 50), None), (MS, 0.5));
    assert_eq!(lease.debt(), 1);
}

#[test]
fn a_short_pool_is_asked_in_pauses_that_grow_while_they_bring_little() {
    let (terms, mut lease) = (terms(true), Lease::default());
    // other gateways have demand, too
    let shared = |need, want| Reply {
        demand: 80_000,
        ..reply(need, want, 1)
    };
    let mut pauses = Vec::new();
    for turn in 0..4 {
        let granted = lease.replied(turn, turn, &terms, (&shared(1, 0), None), (MS, 0.5));
        pauses.push(granted.pause.expect("short").until_ns - turn);
    }
    assert_eq!(pauses, [MS, 2 * MS, 4 * MS, 8 * MS]);
    let granted = lease.replied(9, 9, &terms, (&shared(0, 20), None), (MS, 0.5));
    assert_eq!(granted.pause.map(|pause| pause.until_ns), Some(9 + 4 * MS));
}

#[test]
fn the_only_gateway_asks_for_each_unit_when_it_is_there() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    let told = |lease: &mut Lease, pool, demand, full_us| {
        lease.arrived(0, horizon, 0, 10);
        lease.call(0, &terms, horizon, [0, 0], CallReason::default());
        let told = Reply {
            demand,
            state: [full_us, 0],
            ..reply(1, 0, pool)
        };
        let granted = lease.replied(0, 0, &terms, (&told, None), (MS, 0.5));
        granted.pause.map(|pause| pause.until_ns)
    };
    // all ten requests of a second are its own
    assert_eq!(told(&mut lease, 1, 10_000, 990_000), None, "one is left");
    // the next unit refills in 10 ms; a refusal is remembered for a thousandth less
    let until_ns = told(&mut lease, 0, 20_000, 1_000_000).expect("none is left");
    assert!((9 * MS..=10 * MS).contains(&until_ns), "{until_ns}");
    assert!(
        lease.may_queue(0, &terms, 100),
        "requests that come meanwhile may wait"
    );
    assert!(
        told(&mut lease, 1, 60_000, 990_000).is_some(),
        "half come elsewhere"
    );
    assert!(!lease.may_queue(0, &terms, 100));
}

#[test]
fn a_store_that_may_have_lost_a_key_is_told_what_was_seen_of_it() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    let call = lease.call(0, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!(call.memory.incarnation, 0, "nothing was seen");
    let seen = Reply {
        // 800 ms until it is full: eighty are spent
        state: [800_000, 0],
        ..reply(0, 0, 20)
    };
    lease.replied(0, 0, &terms, (&seen, None), (MS, 0.5));
    let call = lease.call(SECOND / 2, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!(call.memory.incarnation, 1);
    assert_eq!(
        call.memory.spent, 30.0,
        "eighty, less half a second's refill"
    );
    let call = lease.call(10 * SECOND, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!(call.memory.spent, -1.0, "it may be gone by itself");
}

#[test]
fn a_window_is_remembered_with_its_number_and_its_counts() {
    let terms = LeaseTerms::new(
        LeaseAlgorithm::Sliding,
        100,
        Duration::from_secs(1),
        100,
        true,
    );
    let mut lease = Lease::default();
    let horizon = terms.horizon_ns(MS);
    let seen = Reply {
        state: [80, 60],
        ..reply(0, 0, 20)
    };
    lease.replied(0, 0, &terms, (&seen, None), (MS, 0.5));
    let call = lease.call(SECOND / 2, &terms, horizon, [0, 0], CallReason::default());
    let memory = &call.memory;
    assert_eq!(
        (memory.window, memory.spent, memory.before),
        (6, 80.0, 60.0)
    );
    let call = lease.call(3 * SECOND, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!(call.memory.spent, -1.0, "both windows are over");
}

#[test]
fn after_a_loss_the_store_learns_what_is_still_out_and_a_log_its_entries() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.replied(0, 0, &terms, (&reply(0, 20, 50), None), (MS, 0.5));
    let another = Reply {
        incarnation: 2,
        ..reply(0, 0, 50)
    };
    assert!(
        lease
            .replied(MS, MS, &terms, (&another, None), (MS, 0.5))
            .is_lost
    );
    let call = lease.call(2 * MS, &terms, horizon, [20, 0], CallReason::default());
    let (generation, tokens) = (6, 20);
    assert_eq!(call.reports, [LeaseReport::Out { generation, tokens }]);
    assert!(
        !lease
            .replied(3 * MS, 3 * MS, &terms, (&another, None), (MS, 0.5))
            .is_lost
    );

    let terms = LeaseTerms::new(LeaseAlgorithm::Log, 5, Duration::from_secs(60), 5, false);
    let mut lease = Lease::default();
    lease.replied(0, 0, &terms, (&reply(3, 0, 2), None), (MS, 0.5));
    let call = lease.call(SECOND, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!((call.memory.spent, call.memory.entries.len()), (3.0, 0));
    let granted = lease.replied(
        SECOND,
        SECOND - MS,
        &terms,
        // the call was for no request: the whole limit is left in the empty log
        (&Reply { pool: 5, ..another }, None),
        (MS, 0.5),
    );
    assert_eq!(
        granted.pause, None,
        "it first receives the entries, then is asked again"
    );
    assert!(lease.has_news());
    // a call that was overdue when the loss was noticed reported nothing
    lease.replied(
        SECOND + MS,
        SECOND - MS / 2,
        &terms,
        (&Reply { pool: 0, ..another }, None),
        (MS, 0.5),
    );
    assert!(lease.has_news());
    let call = lease.call(2 * SECOND, &terms, horizon, [0, 0], CallReason::default());
    assert_eq!(call.memory.entries, [(6, 3, 2_000_000)]);
    lease.replied(
        3 * SECOND,
        3 * SECOND,
        &terms,
        (&Reply { pool: 0, ..another }, None),
        (MS, 0.5),
    );
    assert!(!lease.has_news());
}

#[test]
fn what_nobody_wants_goes_back_and_at_once_while_others_are_refused() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.arrived(0, horizon, 0, 20);
    lease.replied(0, 0, &terms, (&reply(0, 20, 90), None), (MS, 0.5));
    assert_eq!(lease.surplus(1, &terms, horizon, [20, 0]), [0, 0], "wanted");
    let later = 3 * horizon;
    assert_eq!(lease.surplus(later, &terms, horizon, [20, 0]), [20, 0]);

    let mut short = Lease::default();
    short.arrived(0, horizon, 0, 200);
    short.replied(0, 0, &terms, (&reply(0, 20, 1), None), (MS, 0.5));
    assert_eq!(short.surplus(1, &terms, horizon, [20, 0]), [0, 0]);
    assert_eq!(short.surplus(horizon, &terms, horizon, [20, 0]), [20, 0]);
}

#[test]
fn the_share_follows_the_demand_of_all() {
    let (terms, mut lease) = (terms(true), Lease::default());
    let horizon = terms.horizon_ns(MS);
    lease.arrived(0, horizon, 0, 10);
    let all = Reply {
        demand: 80_000,
        ..reply(0, 0, 50)
    };
    lease.replied(0, 0, &terms, (&all, None), (MS, 0.5));
    // 10 in half a second, of 80 a second
    assert_eq!(lease.share(), Some(0.25));
}
