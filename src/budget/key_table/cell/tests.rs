//! Tests of a cell: tokens, refusals, and the fallback bucket.

use std::time::Duration;

use super::*;
use crate::{
    budget::key_table::{KeyTable, Tag},
    limit::Key,
};

const SECOND: u64 = 1_000_000_000;

fn key_table() -> KeyTable {
    KeyTable::new(64, 1)
}

/// A bucket of ten, refilled by one a second.
fn spend(cell: KeyCell<'_>, now_ns: u64, cost: u64) -> SpendOutcome {
    let terms = LeaseTerms::new(
        LeaseAlgorithm::Bucket,
        10,
        Duration::from_secs(10),
        10,
        true,
    );
    cell.spend(now_ns, cost, &terms)
}

fn tag(key: u128) -> Tag {
    Tag::new(Key(key << 64 | key), 0)
}

#[test]
fn older_tokens_are_spent_first_and_none_after_its_deadline() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    cell.bank(0, 20 * SECOND, 2);
    cell.bank(1, 10 * SECOND, 2);
    let taken = |spent| match spent {
        SpendOutcome::Taken { tokens, .. } => tokens,
        other => panic!("{other:?}"),
    };
    assert_eq!(taken(spend(cell, SECOND, 1)), [0, 1]);
    assert_eq!(taken(spend(cell, SECOND, 2)), [1, 1], "from both");
    assert_eq!(spend(cell, 20 * SECOND, 1), SpendOutcome::Nothing, "lapsed");
    assert_eq!(cell.held(20 * SECOND), ([0, 0], [true, true]));
}

#[test]
fn tokens_of_a_refused_request_serve_the_next_one() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    cell.bank(0, 20 * SECOND, 1);
    let SpendOutcome::Taken { tokens, .. } = spend(cell, SECOND, 1) else {
        panic!("there was a token")
    };
    assert_eq!(spend(cell, SECOND, 1), SpendOutcome::Nothing);
    cell.put_back(tokens);
    assert!(matches!(spend(cell, SECOND, 1), SpendOutcome::Taken { .. }));
}

#[test]
fn one_request_only_says_that_the_hand_is_low() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    cell.bank(0, 20 * SECOND, 4);
    cell.set_low(Some(2));
    let says: Vec<bool> = (0..4)
        .map(|_| {
            matches!(
                spend(cell, SECOND, 1),
                SpendOutcome::Taken { is_low: true, .. }
            )
        })
        .collect();
    assert_eq!(says, [false, true, false, false]);
}

#[test]
fn a_refusal_is_remembered_to_its_end() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    let pause = |least| {
        let until_ns = 5;
        Some(Pause { until_ns, least })
    };
    cell.know(0, &Forecast::default(), pause(0));
    assert_eq!(spend(cell, 4, 1), SpendOutcome::Refused { until_ns: 5 });
    assert_eq!(spend(cell, 5, 1), SpendOutcome::Nothing);
    cell.set_shard(3);
    cell.know(0, &Forecast::default(), pause(7));
    assert_eq!(
        spend(cell, 4, 6),
        SpendOutcome::Nothing,
        "a cheaper one may fit"
    );
    assert_eq!(spend(cell, 4, 7), SpendOutcome::Refused { until_ns: 5 });
    assert_eq!(cell.shard(), 3);
}

#[test]
fn a_request_is_refused_until_its_cost_has_filled_and_told_so() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    // three of ten are available, one a second refills
    let forecast = Forecast {
        told_ns: SECOND,
        delay_ns: SECOND / 100,
        state: 8 * SECOND,
        ..Forecast::default()
    };
    cell.know(3, &forecast, None);
    assert_eq!(cell.forecast(), forecast);
    assert_eq!(spend(cell, SECOND, 3), SpendOutcome::Nothing);
    let until_ns = 5 * SECOND;
    assert_eq!(spend(cell, SECOND, 7), SpendOutcome::Refused { until_ns });
    assert_eq!(spend(cell, 5 * SECOND, 7), SpendOutcome::Nothing);
    cell.bank(0, 20 * SECOND, 2);
    let until_ns = 3 * SECOND;
    assert_eq!(spend(cell, SECOND, 7), SpendOutcome::Refused { until_ns });
}

#[test]
fn alone_it_spends_its_level_then_its_rate_and_owes_what_the_store_would_not_have_granted() {
    let key_table = key_table();
    let cell = key_table.cell(key_table.claim(tag(7), 0).unwrap());
    let alone = FallbackBucket {
        rate: 1e-9,
        capacity: 5.0,
        level: 3.0,
        shadow_rate: 2e-9,
        shadow_missing: 0.0,
    };
    cell.prepare_alone(SECOND, &alone);
    let admitted = (0..10).filter(|_| cell.spend_alone(SECOND, 1).is_ok());
    assert_eq!(admitted.count(), 3);
    assert_eq!(cell.spend_alone(SECOND, 1), Err(SECOND), "one a second");
    assert_eq!(cell.spend_alone(2 * SECOND, 1), Ok(()));
    let (admitted, missing) = cell.alone(2 * SECOND);
    assert_eq!(admitted, 4);
    // 3 at the first second, of which 2 have refilled, and 1 at the second
    assert!((missing - 2.0).abs() < 0.01, "{missing}");
}
