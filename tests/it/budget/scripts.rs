//! The scripts themselves, on a Redis: what they grant, return, remember and forget.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redis::Value;

use crate::support::{Redis, eventually, wait::time_passes};

const BUCKET: &str = concat!(
    include_str!("../../../src/budget/state.lua"),
    include_str!("../../../src/budget/requests.lua"),
    include_str!("../../../src/budget/bucket.lua")
);
const WINDOW: &str = concat!(
    include_str!("../../../src/budget/state.lua"),
    include_str!("../../../src/budget/requests.lua"),
    include_str!("../../../src/budget/window.lua")
);
const LOG: &str = concat!(
    include_str!("../../../src/budget/state.lua"),
    include_str!("../../../src/budget/requests.lua"),
    include_str!("../../../src/budget/log.lua")
);

const KEY: &str = "tidegate:{test:key}";
const HOUR_US: f64 = 3_600e6;

/// The ten numbers of a script's answer.
#[derive(Debug, PartialEq)]
struct Answer {
    need: i64,
    want: i64,
    generation: i64,
    valid_us: i64,
    pool: i64,
    wait_us: i64,
    incarnation: i64,
    demand: i64,
    state: [i64; 2],
}

fn run(redis: &Redis, script: &str, arguments: &[String]) -> Answer {
    let mut command = vec!["EVAL", script, "1", KEY];
    command.extend(arguments.iter().map(String::as_str));
    let numbers: Vec<i64> = redis.run(&command);
    let [
        need,
        want,
        generation,
        valid_us,
        pool,
        wait_us,
        incarnation,
        demand,
        ref state @ ..,
    ] = numbers[..]
    else {
        panic!("{numbers:?}")
    };
    Answer {
        need,
        want,
        generation,
        valid_us,
        pool,
        wait_us,
        incarnation,
        demand,
        state: [0, 1].map(|index| state.get(index).copied().unwrap_or(0)),
    }
}

/// A bucket of this capacity and rate per second, with generations of `tau_us`.
struct Bucket {
    capacity: f64,
    rate: f64,
    tau_us: u64,
}

/// A bucket that hardly refills.
const SLOW: Bucket = Bucket {
    capacity: 100.0,
    rate: 1e-3,
    tau_us: 3_600_000_000,
};

impl Bucket {
    fn arguments(&self, need: u64, want: u64) -> Vec<String> {
        vec![
            self.capacity.to_string(),
            (self.rate / 1e6).to_string(),
            self.tau_us.to_string(),
            need.to_string(),
            want.to_string(),
            "1".into(),
            "0".into(),
            "1".into(),
            "0".into(),
            "1000000".into(),
            // no memory
            "0".into(),
        ]
    }

    fn call(&self, redis: &Redis, need: u64, want: u64, reports: &[(u8, i64, i64)]) -> Answer {
        let mut arguments = self.arguments(need, want);
        for (kind, generation, tokens) in reports {
            arguments.extend([kind.to_string(), generation.to_string(), tokens.to_string()]);
        }
        run(redis, BUCKET, &arguments)
    }

    /// Returns a grant that a request did not use.
    fn unused(&self, redis: &Redis, granted: &Answer) -> Answer {
        let mut arguments = self.arguments(0, 0);
        let moment = 2 * self.tau_us.cast_signed() - granted.valid_us;
        let origin = format!("{} {} {moment}", granted.need, granted.state[1]);
        arguments.extend(["4".to_owned(), granted.generation.to_string(), origin]);
        run(redis, BUCKET, &arguments)
    }
}

/// Moves the moment of the last call, like a clock step.
fn step_clock(redis: &Redis, by_us: f64) {
    let script = "local s = redis.call('GET', KEYS[1])
        local ts = struct.unpack('<d', s, 31)
        redis.call('SET', KEYS[1], string.sub(s, 1, 30) .. struct.pack('<d', ts - ARGV[1]) .. string.sub(s, 39), 'KEEPTTL')
        return redis.status_reply('OK')";
    redis.run::<Value>(&["EVAL", script, "1", KEY, &by_us.to_string()]);
}

#[test]
fn those_who_wait_come_before_what_is_taken_ahead() {
    let redis = Redis::start();
    let answer = SLOW.call(&redis, 98, 50, &[]);
    assert_eq!((answer.need, answer.want, answer.pool), (98, 2, 0));
    let incarnation = answer.incarnation;
    assert!(incarnation > 0);
    let answer = SLOW.call(&redis, 5, 5, &[]);
    assert_eq!(
        (answer.need, answer.want, answer.pool, answer.incarnation),
        (0, 0, 0, incarnation)
    );
    // a thousand seconds per token
    assert!(
        (990_000_000..=1_000_000_001).contains(&answer.wait_us),
        "{answer:?}"
    );
}

#[test]
fn what_goes_back_is_there_again_but_never_more_than_was_out() {
    let redis = Redis::start();
    let lent = SLOW.call(&redis, 0, 60, &[]);
    assert_eq!(lent.want, 60);
    let answer = SLOW.call(
        &redis,
        0,
        0,
        &[(0, lent.generation, 20), (1, lent.generation, 10)],
    );
    assert_eq!(answer.pool, 50);
    let answer = SLOW.call(&redis, 0, 0, &[(1, lent.generation, 1_000)]);
    assert_eq!(answer.pool, 80, "thirty were still out");
    let answer = SLOW.call(
        &redis,
        0,
        0,
        &[(1, lent.generation, 1_000), (1, lent.generation - 5, 1_000)],
    );
    assert_eq!(answer.pool, 80, "nothing was");
}

#[test]
fn a_token_that_was_granted_by_name_goes_on_the_books_and_back() {
    let redis = Redis::start();
    let granted = SLOW.call(&redis, 3, 0, &[]);
    let generation = granted.generation;
    let answer = SLOW.call(&redis, 0, 0, &[(0, generation, -3), (1, generation, 3)]);
    assert_eq!(answer.pool, 100);
}

#[test]
fn a_grant_that_no_request_used_goes_back_whole() {
    let redis = Redis::start();
    let granted = SLOW.call(&redis, 30, 0, &[]);
    let other = SLOW.call(&redis, 20, 0, &[]);
    assert_eq!((granted.need, other.need), (30, 20));
    // one 64th may be lost
    let pool = SLOW.unused(&redis, &granted).pool;
    assert!((79..=80).contains(&pool), "{pool}");
    let pool = SLOW.unused(&redis, &other).pool;
    assert!((99..=100).contains(&pool), "{pool}");
}

#[test]
fn a_grant_that_no_request_used_goes_back_only_as_far_as_nothing_refilled_behind_it() {
    let redis = Redis::start();
    // a unit per 10 ms
    let fast = Bucket {
        capacity: 8.0,
        rate: 100.0,
        tau_us: 2_000_000,
    };
    let late = [(); 4].map(|()| fast.call(&redis, 1, 0, &[]));
    // two of the four return at once; a unit is missing behind each of the others until the bucket
    // is full
    for granted in &late[..2] {
        assert!(fast.unused(&redis, granted).pool <= 8);
    }
    time_passes(Duration::from_millis(60), "the bucket refills");
    // the bucket refills from the call that empties it
    let begun = Instant::now();
    assert_eq!(fast.call(&redis, 8, 0, &[]).need, 8, "it is full");
    for granted in &late[2..] {
        let pool = fast.unused(&redis, granted).pool;
        let most = begun.elapsed().as_millis() / 10 + 1;
        assert!(
            pool <= i64::try_from(most).expect("few"),
            "{pool} of {most}"
        );
    }
}

#[test]
fn what_is_out_on_lease_counts_as_content_for_two_generations() {
    let redis = Redis::start();
    // fills in a hundredth of a second
    let fast = Bucket {
        capacity: 100.0,
        rate: 10_000.0,
        tau_us: 2_000_000,
    };
    let lent = fast.call(&redis, 0, 60, &[]);
    assert_eq!(lent.want, 60);
    time_passes(Duration::from_millis(30), "the bucket refills");
    assert_eq!(
        fast.call(&redis, 0, 0, &[]).pool,
        40,
        "leased tokens are no second burst"
    );
    assert!((2_000_000..=4_000_000).contains(&lent.valid_us), "{lent:?}");
    time_passes(
        Duration::from_micros(u64::try_from(lent.valid_us).expect("a duration"))
            + Duration::from_millis(30),
        "the leased tokens lapse",
    );
    let answer = fast.call(&redis, 0, 0, &[(1, lent.generation, 60)]);
    assert_eq!(answer.pool, 100, "they have lapsed");
}

#[test]
fn a_debt_is_bounded_by_the_capacity() {
    let redis = Redis::start();
    let answer = SLOW.call(&redis, 1, 0, &[(2, 0, 1_000_000)]);
    assert_eq!((answer.need, answer.pool), (0, 0));
    // a hundred below zero, and one more
    assert!(
        (100_900_000_000..=101_000_000_001).contains(&answer.wait_us),
        "{answer:?}"
    );
}

#[test]
fn after_the_wait_exactly_one_fits() {
    let redis = Redis::start();
    let bucket = Bucket {
        capacity: 2.0,
        rate: 0.5,
        tau_us: 500_000,
    };
    bucket.call(&redis, 2, 0, &[]);
    let refused = bucket.call(&redis, 2, 0, &[]);
    assert_eq!(refused.need, 0);
    time_passes(
        Duration::from_micros(u64::try_from(refused.wait_us).expect("a wait")),
        "the unit refills",
    );
    assert_eq!(bucket.call(&redis, 2, 0, &[]).need, 1);
}

#[test]
fn a_step_of_the_clock_gives_at_most_one_capacity_and_takes_nothing() {
    let redis = Redis::start();
    SLOW.call(&redis, 100, 0, &[]);
    // the last call now lies in the future: the clock went back
    step_clock(&redis, -HOUR_US);
    assert_eq!(SLOW.call(&redis, 0, 0, &[]).pool, 0);
    step_clock(&redis, HOUR_US * 1_000.0);
    assert_eq!(SLOW.call(&redis, 0, 0, &[]).pool, 100);
}

#[test]
fn a_bucket_lives_until_it_is_full_and_its_leases_are_dead() {
    let redis = Redis::start();
    let bucket = Bucket {
        capacity: 100.0,
        rate: 10.0,
        tau_us: 1_000_000,
    };
    bucket.call(&redis, 50, 0, &[]);
    let left: i64 = redis.run(&["PTTL", KEY]);
    assert!(
        (6_000..=8_000).contains(&left),
        "5 s to fill, two generations of 1 s, and a second more: {left}"
    );
    let bytes: i64 = redis.run(&["MEMORY", "USAGE", KEY]);
    assert!(bytes <= 200, "{bytes} bytes");
}

#[test]
fn a_changed_capacity_keeps_what_was_spent() {
    let redis = Redis::start();
    SLOW.call(&redis, 30, 0, &[]);
    let larger = Bucket {
        capacity: 200.0,
        ..SLOW
    };
    assert_eq!(larger.call(&redis, 0, 0, &[]).pool, 170);
    let smaller = Bucket {
        capacity: 20.0,
        ..SLOW
    };
    assert_eq!(smaller.call(&redis, 0, 0, &[]).pool, 0);
}

fn window(
    redis: &Redis,
    slides: bool,
    limit: u64,
    window_us: u64,
    need: u64,
    want: u64,
    reports: &[(u8, i64, i64)],
) -> Answer {
    let mut arguments: Vec<String> = vec![
        limit.to_string(),
        window_us.to_string(),
        u8::from(slides).to_string(),
        need.to_string(),
        want.to_string(),
        "1".into(),
        "0".into(),
        "1".into(),
        "0".into(),
        "1000000".into(),
        "0".into(),
    ];
    for (kind, generation, tokens) in reports {
        arguments.extend([kind.to_string(), generation.to_string(), tokens.to_string()]);
    }
    run(redis, WINDOW, &arguments)
}

const DAY_US: u64 = 86_400_000_000;

/// A limit in some form: spends `need`, leases `want`, and returns units of earlier answers.
type Form = fn(&Redis, limit: u64, need: u64, want: u64, back: &[(u8, i64, i64)]) -> Answer;

const FORMS: [(&str, Form); 3] = [
    ("bucket", |redis, limit, need, want, back| {
        let bucket = Bucket {
            capacity: limit as f64,
            ..SLOW
        };
        bucket.call(redis, need, want, back)
    }),
    ("fixed window", |redis, limit, need, want, back| {
        window(redis, false, limit, 30 * DAY_US, need, want, back)
    }),
    ("sliding window", |redis, limit, need, want, back| {
        window(redis, true, limit, 60 * DAY_US, need, want, back)
    }),
];

#[test]
fn what_other_terms_borrowed_comes_back_and_what_they_spent_does_not() {
    for (before, old) in FORMS {
        for (after, new) in FORMS {
            // nine are spent and six leased when the limit changes
            for (limit, left) in [(8, 0), (9, 0), (10, 1), (12, 3), (50, 41)] {
                let redis = Redis::start();
                let answer = old(&redis, 20, 9, 6, &[]);
                assert_eq!((answer.need, answer.want), (9, 6));
                assert!(new(&redis, limit, 0, 0, &[]).pool <= left);
                old(&redis, 20, 0, 0, &[(1, answer.generation, 6)]);
                let pool = new(&redis, limit, 0, 0, &[]).pool;
                assert_eq!(pool, left, "{before} of 20 -> {after} of {limit}");
            }
        }
    }
}

#[test]
fn what_was_borrowed_in_a_window_that_is_over_does_not_come_back_to_the_next_one() {
    const SECOND_US: u64 = 1_000_000;
    for (before, old) in FORMS {
        let redis = Redis::start();
        let new = |need| window(&redis, false, 10, SECOND_US, need, 0, &[]);
        let answer = old(&redis, 20, 2, 6, &[]);
        let first = new(0).generation;
        let second = eventually("the next window", || match new(10) {
            answer if answer.generation != first => Ok(answer),
            _ => Err(first.to_string()),
        });
        assert_eq!(second.need, 10);
        old(&redis, 20, 0, 0, &[(1, answer.generation, 6)]);
        let third = new(10);
        let is_same = third.generation == second.generation;
        assert!(third.need == 0 || !is_same, "{before}: {third:?}");
    }
}

/// Moves the last call of every bucket in the state into the past, as if this time had passed.
fn pass_time(redis: &Redis, seconds: u64) {
    let script = "local s = redis.call('GET', KEYS[1])
        local at = 11
        local form = string.sub(s, 1, 1)
        while form == 'B' or form == 'F' or form == 'S' do
            if form == 'B' then
                local ts = struct.unpack('<d', s, at + 20)
                s = string.sub(s, 1, at + 19) .. struct.pack('<d', ts - ARGV[1] * 1e6) .. string.sub(s, at + 28)
            end
            form, at = string.sub(s, at + 48, at + 48), at + 53
        end
        redis.call('SET', KEYS[1], s, 'KEEPTTL')
        return redis.status_reply('OK')";
    redis.run::<Value>(&["EVAL", script, "1", KEY, &seconds.to_string()]);
}

/// One token per second. No generation begins or ends in the minutes around the test.
fn quick() -> Bucket {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.expect("it is after 1970").as_secs();
    let is_far = |tau: &u64| (200..tau - 200).contains(&(now % tau));
    let tau = (3_000..4_200).step_by(100).find(is_far);
    Bucket {
        capacity: 20.0,
        rate: 1.0,
        tau_us: tau.expect("the ends of twelve lengths are not all near") * 1_000_000,
    }
}

#[test]
fn a_bucket_that_refilled_behind_borrowed_tokens_does_not_grant_them_again_when_they_come_back() {
    for (before, old) in FORMS {
        let redis = Redis::start();
        let borrowed = old(&redis, 20, 0, 6, &[]);
        assert_eq!(borrowed.want, 6);
        assert_eq!(quick().call(&redis, 0, 0, &[]).pool, 14, "{before}");
        pass_time(&redis, 60);
        let first = quick().call(&redis, 20, 0, &[]).need;
        old(&redis, 20, 0, 0, &[(1, borrowed.generation, 6)]);
        let second = quick().call(&redis, 20, 0, &[]).need;
        assert_eq!(first + second, 20, "{before}: {first} and {second}");
    }
}

#[test]
fn borrowed_tokens_are_still_counted_by_a_bucket_that_a_change_creates_later() {
    let new = Bucket {
        capacity: 59.0,
        ..quick()
    };
    let redis = Redis::start();
    let borrowed = quick().call(&redis, 0, 6, &[]);
    pass_time(&redis, 60);
    assert_eq!(new.call(&redis, 59, 0, &[]).need, 53);
    quick().call(&redis, 0, 0, &[(1, borrowed.generation, 6)]);
    assert_eq!(new.call(&redis, 59, 0, &[]).need, 6);
}

#[test]
fn a_bucket_does_not_refill_behind_its_own_leases_when_other_terms_are_used() {
    for (other, call) in FORMS {
        let redis = Redis::start();
        call(&redis, 21, 0, 0, &[]);
        let borrowed = quick().call(&redis, 0, 6, &[]);
        assert_eq!(borrowed.want, 6);
        pass_time(&redis, 60);
        call(&redis, 21, 0, 0, &[]);
        let first = quick().call(&redis, 20, 0, &[]).need;
        assert_eq!(first, 14, "{other}");
        let returned = [(1, borrowed.generation, 6)];
        assert_eq!(quick().call(&redis, 20, 0, &returned).need, 6, "{other}");
    }
}

#[test]
fn units_that_a_smaller_limit_had_no_room_to_count_do_not_come_back_to_it() {
    let large = Bucket {
        capacity: 60.0,
        ..quick()
    };
    for (after, new) in FORMS {
        let redis = Redis::start();
        let borrowed = large.call(&redis, 40, 20, &[]);
        assert_eq!((borrowed.need, borrowed.want), (40, 20));
        assert_eq!(new(&redis, 33, 33, 0, &[]).need, 0);
        // the old bucket refills, the new one hardly does
        pass_time(&redis, 60);
        large.call(&redis, 0, 0, &[(1, borrowed.generation, 20)]);
        assert_eq!(new(&redis, 33, 33, 0, &[]).need, 0, "{after}");
    }
}

#[test]
fn tokens_borrowed_before_a_window_do_not_come_back_to_it_in_place_of_later_ones() {
    const SECOND_US: u64 = 1_000_000;
    let redis = Redis::start();
    let new = |need| window(&redis, false, 10, SECOND_US, need, 0, &[]);
    let borrowed = quick().call(&redis, 0, 6, &[]);
    let first = new(0).generation;
    let second = eventually("the next window", || match new(0).generation {
        second if second != first => Ok(second),
        _ => Err(first.to_string()),
    });
    // these eight are spent in the second window; the bucket has forgotten them when six return
    assert_eq!(quick().call(&redis, 8, 0, &[]).need, 8);
    pass_time(&redis, 60);
    quick().call(&redis, 0, 0, &[(1, borrowed.generation, 6)]);
    let answer = new(10);
    assert!(
        answer.need == 2 || answer.generation != second,
        "{answer:?}"
    );
}

#[test]
fn what_an_answer_did_not_cost_comes_back_but_not_on_top_of_a_full_bucket() {
    let redis = Redis::start();
    let reserved = SLOW.call(&redis, 80, 10, &[]);
    assert_eq!((reserved.need, reserved.want, reserved.pool), (80, 10, 10));
    assert_eq!(SLOW.call(&redis, 0, 0, &[(5, -1, 50)]).pool, 60);
    // ten are leased: they are content
    assert_eq!(SLOW.call(&redis, 0, 0, &[(5, -1, 500)]).pool, 90);
}

#[test]
fn what_is_charged_after_an_answer_leaves_no_debt() {
    for (name, run) in FORMS {
        let redis = Redis::start();
        assert_eq!(run(&redis, 100, 40, 0, &[]).need, 40, "{name}");
        assert_eq!(run(&redis, 100, 0, 0, &[(6, -1, 10)]).pool, 50, "{name}");
        assert_eq!(run(&redis, 100, 0, 0, &[(6, -1, 1_000)]).pool, 0, "{name}");
        // one that owes already owes no more
        let owing = run(&redis, 100, 0, 0, &[(2, -1, 50)]);
        let charged = run(&redis, 100, 0, 0, &[(6, -1, 10)]);
        let later = charged.wait_us - owing.wait_us;
        assert!(later <= 0, "{name}: {later} us later");
    }
}

#[test]
fn a_window_grants_its_limit_and_takes_back_what_was_not_used() {
    for slides in [false, true] {
        let redis = Redis::start();
        let answer = window(&redis, slides, 10, DAY_US, 6, 3, &[]);
        assert_eq!((answer.need, answer.want, answer.pool), (6, 3, 1));
        let answer = window(
            &redis,
            slides,
            10,
            DAY_US,
            5,
            0,
            &[(1, answer.generation, 2)],
        );
        assert_eq!((answer.need, answer.pool), (3, 0));
        assert!(answer.wait_us > 0);
        let left: i64 = redis.run(&["PTTL", KEY]);
        assert!((1..=2 * 86_400_001).contains(&left), "{left}");
    }
}

#[test]
fn a_new_window_is_open_and_a_sliding_one_looks_back() {
    let redis = Redis::start();
    let second = 3_000_000;
    let full = |slides| {
        // at the start of a window, so that the calls below are in the next one
        loop {
            let answer = window(&redis, slides, 10, second, 10, 0, &[]);
            if answer.valid_us > 2_400_000 && answer.need == 10 {
                return answer;
            }
            time_passes(
                Duration::from_micros(u64::try_from(answer.valid_us).expect("a duration"))
                    + Duration::from_millis(1),
                "the window ends",
            );
        }
    };
    let answer = full(false);
    time_passes(
        Duration::from_micros(u64::try_from(answer.wait_us).expect("a wait")),
        "the window ends",
    );
    assert_eq!(window(&redis, false, 10, second, 3, 0, &[]).need, 3);

    redis.run::<Value>(&["DEL", KEY]);
    let answer = full(true);
    time_passes(
        Duration::from_micros(u64::try_from(answer.valid_us).expect("a duration"))
            + Duration::from_millis(500),
        "the window ends",
    );
    let answer = window(&redis, true, 10, second, 10, 0, &[]);
    assert!(
        (1..=9).contains(&answer.need),
        "a part of the last window still counts: {answer:?}"
    );
}

/// Moves the window's number by this many windows.
fn step_window(redis: &Redis, windows: f64) {
    let script = "local s = redis.call('GET', KEYS[1])
        local wid = struct.unpack('<I6', s, 21)
        redis.call('SET', KEYS[1], string.sub(s, 1, 20) .. struct.pack('<I6', wid + ARGV[1]) .. string.sub(s, 27), 'KEEPTTL')
        return redis.status_reply('OK')";
    redis.run::<Value>(&["EVAL", script, "1", KEY, &windows.to_string()]);
}

#[test]
fn a_clock_that_steps_back_gives_nothing_of_a_window_and_one_that_steps_forward_opens_the_next() {
    // spends 8 of 10; then the clock moves by this many windows
    for (slides, windows, left) in [
        // back by less than one: the open window continues
        (false, -1, 2),
        (true, -1, 2),
        // back by more: the counts stay, as of just now
        (false, -24, 2),
        (true, -24, 2),
        // forward by one, by many: over
        (false, 1, 10),
        (false, 24, 10),
        (true, 24, 10),
    ] {
        let redis = Redis::start();
        assert_eq!(window(&redis, slides, 10, DAY_US, 8, 0, &[]).need, 8);
        step_window(&redis, -f64::from(windows));
        let answer = window(&redis, slides, 10, DAY_US, 0, 0, &[]);
        assert_eq!(answer.pool, left, "{slides} {windows}: {answer:?}");
        let ttl: i64 = redis.run(&["PTTL", KEY]);
        assert!(
            (1..=3 * 86_400_000).contains(&ttl),
            "{slides} {windows}: {ttl}"
        );
    }
}

#[test]
fn after_the_wait_of_a_window_one_fits() {
    for slides in [false, true] {
        let redis = Redis::start();
        let three = 3_000_000;
        let mut refused = window(&redis, slides, 4, three, 4, 0, &[]);
        // if the window ended meanwhile, it is full now
        while refused.wait_us == 0 {
            refused = window(&redis, slides, 4, three, 4, 0, &[]);
        }
        let wait = u64::try_from(refused.wait_us).expect("a wait");
        assert!((1..=2 * three).contains(&wait), "{slides}: {wait}");
        time_passes(Duration::from_micros(wait), "a unit returns to the window");
        let fits = window(&redis, slides, 4, three, 1, 0, &[]);
        assert_eq!(fits.need, 1, "{slides}: {refused:?}, {fits:?}");
    }
}

fn log(
    redis: &Redis,
    limit: u64,
    window_us: u64,
    need: u64,
    gateway: &str,
    number: u64,
    reports: &[(u8, i64, i64)],
) -> Answer {
    let mut arguments: Vec<String> = vec![
        limit.to_string(),
        window_us.to_string(),
        need.to_string(),
        gateway.into(),
        number.to_string(),
        // no memory
        "0".into(),
    ];
    for (kind, generation, tokens) in reports {
        arguments.extend([kind.to_string(), generation.to_string(), tokens.to_string()]);
    }
    run(redis, LOG, &arguments)
}

#[test]
fn a_log_is_exact_and_gives_back_by_the_number_of_the_call() {
    let redis = Redis::start();
    assert_eq!(log(&redis, 5, DAY_US, 3, "a", 1, &[]).need, 3);
    let answer = log(&redis, 5, DAY_US, 3, "b", 1, &[]);
    assert_eq!((answer.need, answer.pool), (2, 0));
    assert!(answer.wait_us > 86_000_000_000, "{answer:?}");
    let answer = log(&redis, 5, DAY_US, 0, "a", 2, &[(1, 1, 2)]);
    assert_eq!(answer.pool, 2, "two of the three of the first call");
    let answer = log(&redis, 5, DAY_US, 0, "a", 3, &[(1, 1, 5)]);
    assert_eq!(
        answer.pool, 3,
        "and the third, but nothing of another gateway"
    );
    redis.run::<Value>(&["DEL", KEY]);
    assert_eq!(log(&redis, 5, 1_000, 5, "a", 3, &[]).need, 5);
    time_passes(Duration::from_millis(5), "the entries leave the log");
    assert_eq!(
        log(&redis, 5, 1_000, 5, "a", 4, &[]).need,
        5,
        "all have left the window"
    );
    let left: i64 = redis.run(&["PTTL", KEY]);
    assert!(
        (900..=1_001).contains(&left),
        "a second more than it counts: {left}"
    );
}

/// One call for these requests and for tokens ahead.
fn asking(redis: &Redis, script: &str, first: [&str; 3], need: &str, want: &str) -> Answer {
    let mut arguments: Vec<String> = first.map(String::from).into();
    // the memory says that a new key is full
    arguments.extend([need, want, "1", "0", "1", "0", "1000000", first[0]].map(String::from));
    run(redis, script, &arguments)
}

#[test]
fn a_request_that_does_not_fit_takes_nothing_and_those_behind_it_are_granted() {
    let bucket = (BUCKET, ["30", "0.000000001", "3600000000"]);
    let window = (WINDOW, ["30", "86400000000", "0"]);
    let sliding = (WINDOW, ["30", "86400000000", "1"]);
    for (script, first) in [bucket, window, sliding] {
        let redis = Redis::start();
        let answer = asking(&redis, script, first, "5*1 20*2 1*3", "0");
        assert_eq!((answer.need, answer.pool), (28, 2), "{first:?}: {answer:?}");
        assert!(
            answer.wait_us > 0,
            "until the second of 20 fits: {answer:?}"
        );
        let answer = asking(&redis, script, first, "20*1", "20*1");
        assert_eq!(
            (answer.need, answer.want, answer.pool),
            (0, 0, 2),
            "{first:?}"
        );
        let answer = asking(&redis, script, first, "0", "2*3");
        assert_eq!(
            (answer.want, answer.pool),
            (2, 0),
            "{first:?}: whole ones only"
        );
    }
    let redis = Redis::start();
    let arguments = ["30", "86400000000", "5*1 20*2 1*3", "a", "1", "0"].map(String::from);
    let answer = run(&redis, LOG, &arguments);
    assert_eq!((answer.need, answer.pool), (28, 2), "{answer:?}");
}

#[test]
fn after_the_wait_of_a_costly_request_it_fits_and_not_before() {
    for (script, first, log) in [
        (BUCKET, ["10", "0.000005", "2000000"], false),
        (WINDOW, ["10", "1500000", "0"], false),
        (WINDOW, ["10", "1500000", "1"], false),
        (LOG, ["10", "1500000", ""], true),
    ] {
        let redis = Redis::start();
        let ask = |need: &str, number: &str| match log {
            true => {
                let arguments = [first[0], first[1], need, "a", number, "0"].map(String::from);
                run(&redis, script, &arguments)
            }
            false => asking(&redis, script, first, need, "0"),
        };
        ask("1*2", "1");
        time_passes(Duration::from_millis(200), "the window proceeds");
        ask("6*1", "2");
        let refused = ask("7*1", "3");
        if refused.need > 0 {
            // the window ended meanwhile
            continue;
        }
        let wait = u64::try_from(refused.wait_us).expect("a wait");
        time_passes(Duration::from_micros(wait), "the request fits");
        let fits = ask("7*1", "4");
        assert_eq!(fits.need, 7, "{first:?}: {refused:?}, {fits:?}");
        assert!((1..=3_000_000).contains(&wait), "{first:?}: {wait}");
    }
}

#[test]
fn a_clock_that_steps_back_locks_a_log_for_one_window_at_most_and_gives_nothing() {
    let redis = Redis::start();
    assert_eq!(log(&redis, 5, 1_000_000, 5, "a", 1, &[]).need, 5);
    // the entries seem to be an hour in the future: the clock went back
    let script = "local all = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
        for i = 1, #all, 2 do redis.call('ZADD', KEYS[1], all[i + 1] + ARGV[1], all[i]) end
        return redis.status_reply('OK')";
    redis.run::<Value>(&["EVAL", script, "1", KEY, &HOUR_US.to_string()]);
    let answer = log(&redis, 5, 1_000_000, 1, "a", 2, &[]);
    assert_eq!(answer.need, 0, "nothing is given: {answer:?}");
    assert!((1..=1_000_000).contains(&answer.wait_us), "{answer:?}");
    time_passes(
        Duration::from_micros(u64::try_from(answer.wait_us).expect("a wait")),
        "the log opens again",
    );
    assert_eq!(log(&redis, 5, 1_000_000, 5, "a", 3, &[]).need, 5);
}

#[test]
fn a_clock_that_steps_back_leaves_on_the_books_of_a_bucket_what_is_out_on_lease() {
    let redis = Redis::start();
    // fills in a hundredth of a second
    let fast = Bucket {
        capacity: 100.0,
        rate: 10_000.0,
        tau_us: 2_000_000,
    };
    assert_eq!(fast.call(&redis, 0, 60, &[]).want, 60);
    step_clock(&redis, -HOUR_US);
    fast.call(&redis, 0, 0, &[]);
    time_passes(Duration::from_millis(30), "the bucket refills");
    assert_eq!(fast.call(&redis, 0, 0, &[]).pool, 40);
}
