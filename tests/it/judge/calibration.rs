//! Calibrates the judge: an exact limiter shows no fault, and each planted fault is found.

use crate::support::{
    judge::{
        Boundaries, Counting, Fault, MILLISECOND, Record, Rule, SECOND, Time, Verdict,
        beyond::beyond,
        exact::{Exact, compare, seconds},
        judge,
        shrink::{lines, shrink},
        slots::{self, most_at_work},
    },
    random::Random,
};

const ALL: [Counting; 4] = [
    Counting::Bucket,
    Counting::FixedWindow,
    Counting::SlidingWindow,
    Counting::SlidingLog,
];

/// The flaw of a limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    TokenTooMany,
    WindowTooShort,
    BoundaryLate,
    ChargeOnRefusal,
    RetryEarly,
    RetryLate,
}

/// Client behaviour: number of requests, rate, costs, and the longest answer time.
#[derive(Clone, Copy)]
struct Load {
    requests: usize,
    pause: Time,
    most_cost: u64,
    most_delay: Time,
}

/// A history of a limiter with overlapping requests: each is decided at a random moment between its
/// start and its end.
fn history(rule: &Rule, flaw: Flaw, load: Load, random: &mut Random) -> Vec<Record> {
    let mut now = 0;
    let mut records: Vec<(Time, Record)> = (0..load.requests)
        .map(|_| {
            now += random.within(0, 2 * load.pause);
            let before = random.within(0, load.most_delay / 2);
            let after = random.within(0, load.most_delay / 2);
            let cost = random.within(1, i64::try_from(load.most_cost).unwrap_or(1));
            let record = Record {
                gateway: 0,
                cost: cost.unsigned_abs(),
                start: now,
                end: now + before + after,
                verdict: Verdict::Refused,
                retry_after: None,
                remaining: None,
            };
            (now + before, record)
        })
        .collect();
    records.sort_by_key(|record| record.0);
    let mut limiter = Exact::new(flawed(rule, flaw));
    for (moment, record) in &mut records {
        match limiter.decide(record.cost, *moment) {
            Ok(()) => record.verdict = Verdict::Admitted,
            Err(wait) => {
                let told = seconds(wait);
                record.retry_after = Some(match flaw {
                    Flaw::RetryEarly => told.saturating_sub(1),
                    Flaw::RetryLate => told + 1,
                    _ => told,
                });
                if flaw == Flaw::ChargeOnRefusal {
                    limiter.charge(1, *moment);
                }
            }
        }
    }
    records.into_iter().map(|(_, record)| record).collect()
}

fn flawed(rule: &Rule, flaw: Flaw) -> Rule {
    let mut rule = *rule;
    match flaw {
        Flaw::TokenTooMany if rule.counting == Counting::Bucket => rule.burst += 1,
        Flaw::TokenTooMany => rule.amount += 1,
        Flaw::WindowTooShort => rule.period -= rule.period / 20,
        Flaw::BoundaryLate if rule.counting == Counting::SlidingLog => rule.period -= MILLISECOND,
        Flaw::BoundaryLate => rule.boundaries.earliest += MILLISECOND,
        _ => {}
    }
    rule
}

/// A random limit, whose windows start at a moment that the judge may know.
fn any_rule(counting: Counting, random: &mut Random) -> Rule {
    let amount = random.within(1, 60).unsigned_abs();
    let period = random.within(300, 4_000) * MILLISECOND;
    let burst = random.within(1, 60).unsigned_abs();
    let boundaries = Boundaries::at(random.within(0, period));
    Rule {
        boundaries,
        ..Rule::new(counting, amount, period, burst)
    }
}

/// The same limit, with less known to the judge.
fn blurred(rule: &Rule, random: &mut Random) -> Rule {
    let earliest = rule.boundaries.earliest;
    let error = random.within(0, MILLISECOND);
    let boundaries = match random.within(0, 2) {
        0 => rule.boundaries,
        1 => Boundaries {
            earliest: earliest - random.within(0, error),
            error,
        },
        _ => Boundaries::unknown(rule.period),
    };
    Rule {
        boundaries,
        ..*rule
    }
}

#[test]
fn an_exact_limiter_shows_no_fault_in_ten_thousand_histories() {
    let (mut requests, mut refused) = (0, 0);
    for seed in 0..10_000 {
        let mut random = Random::new(seed);
        let counting = *random.pick(&ALL);
        let rule = any_rule(counting, &mut random);
        let load = Load {
            requests: 100,
            pause: rule.period / random.within(1, 120),
            most_cost: 1 + random.next() % rule.capacity().min(7),
            most_delay: random.within(1, 100) * MILLISECOND,
        };
        let history = history(&rule, Flaw::None, load, &mut random);
        let known = blurred(&rule, &mut random);
        let faults = judge(&known, &history);
        if let Some(fault) = faults.first() {
            let least = shrink(&known, &history, fault);
            panic!("seed {seed}: {known:?}: {fault:?}\n{}", lines(&least));
        }
        requests += history.len();
        refused += history.iter().filter(|record| !record.charged()).count();
    }
    // the histories must exercise the limit
    assert!(
        refused * 5 > requests && refused * 5 < requests * 4,
        "{refused} of {requests} refused"
    );
}

/// Looks for this kind of fault in histories of a flawed limiter; returns the seeds without one.
fn found(counting: Counting, flaw: Flaw, is_it: impl Fn(&Fault) -> bool) -> Vec<u64> {
    let missed = |seed: &u64| {
        let mut random = Random::new(*seed);
        let amount = random.within(10, 40).unsigned_abs();
        let period = random.within(2_500, 4_000) * MILLISECOND;
        let rule = Rule {
            boundaries: Boundaries::at(random.within(0, period)),
            ..Rule::new(counting, amount, period, amount)
        };
        let load = Load {
            requests: 4_000,
            pause: period / 500,
            most_cost: 2,
            most_delay: MILLISECOND / 10,
        };
        let mut history = history(&rule, flaw, load, &mut random);
        if flaw == Flaw::RetryEarly {
            history = lone_client(&rule, flaw);
        }
        !judge(&rule, &history).iter().any(&is_it)
    };
    (0..20).filter(missed).collect()
}

/// One client that spends the whole limit, then returns when it is told to.
fn lone_client(rule: &Rule, flaw: Flaw) -> Vec<Record> {
    let mut limiter = Exact::new(*rule);
    let (mut now, mut history) = (0, Vec::new());
    while history.len() < 200 {
        let mut record = Record {
            gateway: 0,
            cost: rule.capacity().min(7),
            start: now,
            end: now + 1_000,
            verdict: Verdict::Admitted,
            retry_after: None,
            remaining: None,
        };
        now += 2_000;
        if let Err(wait) = limiter.decide(record.cost, record.start) {
            record.verdict = Verdict::Refused;
            let early = u32::from(flaw == Flaw::RetryEarly);
            let told = seconds(wait).saturating_sub(early);
            record.retry_after = Some(told);
            now = record.end + i64::from(told) * SECOND;
        }
        history.push(record);
    }
    history
}

#[test]
fn a_token_too_many_is_found() {
    for counting in ALL {
        let missed = found(counting, Flaw::TokenTooMany, Fault::is_beyond);
        assert!(missed.is_empty(), "{counting:?}: not with seeds {missed:?}");
    }
}

#[test]
fn a_window_that_is_too_short_is_found() {
    for counting in ALL {
        let missed = found(counting, Flaw::WindowTooShort, Fault::is_beyond);
        assert!(missed.is_empty(), "{counting:?}: not with seeds {missed:?}");
    }
}

#[test]
fn a_boundary_that_is_off_by_a_millisecond_is_found() {
    for counting in [Counting::FixedWindow, Counting::SlidingLog] {
        // two bursts, one on each side of the boundary
        let rule = Rule {
            boundaries: Boundaries::at(0),
            ..Rule::new(counting, 10, SECOND, 10)
        };
        let mut limiter = Exact::new(flawed(&rule, Flaw::BoundaryLate));
        let from = |start: Time| (0..10).map(move |n| start + n * 10_000);
        let moments = from(SECOND + 100_000).chain(from(2 * SECOND - 500_000));
        let moments = moments.chain(from(2 * SECOND + 500_000));
        let history: Vec<Record> = moments
            .map(|moment| {
                let verdict = match limiter.decide(1, moment) {
                    Ok(()) => Verdict::Admitted,
                    Err(_) => Verdict::Refused,
                };
                Record {
                    gateway: 0,
                    cost: 1,
                    start: moment - 1_000,
                    end: moment + 1_000,
                    verdict,
                    retry_after: None,
                    remaining: None,
                }
            })
            .collect();
        let faults = judge(&rule, &history);
        assert!(!faults.is_empty(), "{counting:?}\n{}", lines(&history));
    }
}

#[test]
fn a_charge_for_a_refusal_is_found() {
    for counting in ALL {
        let is_it = |fault: &Fault| matches!(fault, Fault::WronglyRefused { .. });
        let missed = found(counting, Flaw::ChargeOnRefusal, is_it);
        assert!(missed.is_empty(), "{counting:?}: not with seeds {missed:?}");
    }
}

#[test]
fn a_retry_after_that_is_a_second_early_or_late_is_found() {
    for counting in ALL {
        let is_early = |fault: &Fault| matches!(fault, Fault::TooEarly { .. });
        let missed = found(counting, Flaw::RetryEarly, is_early);
        assert!(missed.is_empty(), "{counting:?}: not with seeds {missed:?}");
        let is_late = |fault: &Fault| matches!(fault, Fault::TooLate { .. });
        let missed = found(counting, Flaw::RetryLate, is_late);
        assert!(missed.is_empty(), "{counting:?}: not with seeds {missed:?}");
    }
}

#[test]
fn a_client_that_returns_when_it_is_told_shows_no_fault() {
    for counting in ALL {
        let rule = Rule {
            boundaries: Boundaries::at(123),
            ..Rule::new(counting, 10, 2_728 * MILLISECOND, 10)
        };
        let history = lone_client(&rule, Flaw::None);
        let faults = judge(&rule, &history);
        assert!(
            faults.is_empty(),
            "{counting:?}: {faults:?}\n{}",
            lines(&history)
        );
    }
}

#[test]
fn an_excess_of_a_thousand_requests_shrinks_to_those_that_show_it() {
    let rule = Rule::new(Counting::SlidingLog, 5, SECOND, 5);
    let load = Load {
        requests: 1_000,
        pause: 20 * MILLISECOND,
        most_cost: 1,
        most_delay: MILLISECOND,
    };
    let history = history(&rule, Flaw::TokenTooMany, load, &mut Random::new(1));
    let faults = judge(&rule, &history);
    let fault = faults.iter().find(|fault| fault.is_beyond());
    let least = shrink(&rule, &history, fault.expect("six in a second"));
    assert_eq!(least.len(), 6, "{}", lines(&least));
}

#[test]
fn the_worst_excess_of_a_bucket_is_that_of_all_windows() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let rule = any_rule(Counting::Bucket, &mut random);
        let load = Load {
            requests: 60,
            pause: rule.period / random.within(20, 120),
            most_cost: rule.burst.min(3),
            most_delay: random.within(1, 100) * MILLISECOND,
        };
        let history = history(&rule, Flaw::TokenTooMany, load, &mut random);
        let admitted = || history.iter().filter(|record| record.charged());
        let mut worst = 0;
        for from in admitted().map(|record| record.start) {
            for to in admitted().map(|record| record.end).filter(|&to| to > from) {
                let inside = admitted().filter(|record| from <= record.start && record.end <= to);
                let cost: u64 = inside.map(|record| record.cost).sum();
                let refilled = rule.amount as f64 * (to - from) as f64 / rule.period as f64;
                let excess = cost as f64 - rule.burst as f64 - refilled;
                worst = worst.max(excess.ceil() as u64);
            }
        }
        let found = beyond(&rule, &history).map_or(0, |fault| fault.excess());
        assert_eq!(found, worst, "seed {seed}");
    }
}

#[test]
fn slots_in_use_at_the_origin_are_counted_at_their_highest() {
    let at_work = [(0, 10, 1), (5, 20, 2), (10, 15, 1), (20, 30, 3)];
    assert_eq!(most_at_work(&at_work), (3, 5));
    assert_eq!(most_at_work(&[(0, 10, 1), (9, 20, 3)]), (4, 9));
    assert!(slots::beyond(3, &at_work).is_none());
    assert!(slots::beyond(2, &at_work).is_some());
}

#[test]
fn who_is_refused_while_a_slot_is_free_is_found() {
    let record = |start: Time, end: Time, verdict: Verdict| Record {
        gateway: 0,
        cost: 1,
        start,
        end,
        verdict,
        retry_after: None,
        remaining: None,
    };
    let busy = [
        record(0, 100, Verdict::Admitted),
        record(10, 100, Verdict::Admitted),
        record(50, 60, Verdict::Refused),
        record(105, 106, Verdict::Refused),
        record(200, 201, Verdict::Refused),
    ];
    assert!(slots::refused(3, &busy[..2], 10).is_empty());
    let faults = slots::refused(2, &busy, 10);
    let wrong = Fault::WronglyRefused {
        request: 4,
        since: 0,
    };
    assert_eq!(faults, [wrong]);
}

#[test]
fn an_exact_limiter_admits_all_that_an_exact_limiter_admits() {
    for counting in ALL {
        let mut random = Random::new(7);
        let rule = any_rule(counting, &mut random);
        let load = Load {
            requests: 1_000,
            pause: rule.period / 100,
            most_cost: 1,
            most_delay: 0,
        };
        let history = history(&rule, Flaw::None, load, &mut random);
        let same = compare(&rule, &history);
        assert_eq!(same.admitted, same.exact, "{counting:?}");
    }
}
