//! The end of a window: calls in flight at that moment carry nothing of the old window into the new
//! one.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, SystemTime},
};

use super::{admitted, burst, shared_at};
use crate::support::{
    Gateway, Redis, Request,
    far_redis::{Distance, FarRedis},
    wait::time_passes,
};

/// Window length in these tests.
const WINDOW: Duration = Duration::from_secs(2);

/// A Redis at this distance in each direction.
fn far(redis: &Redis, distance: Duration) -> FarRedis {
    let distance = Distance {
        least: distance,
        most: distance,
    };
    FarRedis::start(([127, 0, 0, 1], redis.port()).into(), &[distance], 1)
}

/// Waits for an offset into the next window: windows start at multiples of their length since 1970,
/// by Redis's clock.
fn next_window(offset: Duration) {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a clock later than 1970");
    let into = Duration::from_nanos(u64::try_from(now.as_nanos() % WINDOW.as_nanos()).unwrap_or(0));
    time_passes(WINDOW - into + offset, "the next window begins");
}

/// Waits for an offset into the current window.
fn later_in_window(offset: Duration) {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a clock later than 1970");
    let into = Duration::from_nanos(u64::try_from(now.as_nanos() % WINDOW.as_nanos()).unwrap_or(0));
    time_passes(offset.saturating_sub(into), "the window proceeds");
}

/// Spends 95 of 100 in a window, lets one request cross its end, and returns how many of 100 the
/// next window admits.
fn after_a_call_across_the_end(algorithm: &str, sync: &str) -> usize {
    let redis = Redis::start();
    let far = far(&redis, Duration::from_millis(20));
    let limit = format!("rate = \"100/2s\"\nalgorithm = \"{algorithm}\"\nsync = \"{sync}\"");
    let gateways = [shared_at(&far.url(0), &limit)];
    // warm-up: connections and scripts
    gateways[0].get("/");
    next_window(Duration::from_millis(20));
    assert_eq!(
        admitted(&burst(&gateways, 95, 19)),
        95,
        "{algorithm} {sync}"
    );
    later_in_window(WINDOW - Duration::from_millis(10));
    gateways[0].get("/");
    later_in_window(Duration::from_millis(100));
    admitted(&burst(&gateways, 100, 25))
}

#[test]
fn a_call_that_is_under_way_when_a_fixed_window_ends_takes_nothing_of_the_next_one() {
    for sync in ["strict", "lease"] {
        let passed = after_a_call_across_the_end("fixed_window", sync);
        println!("{sync}: {passed} of 100");
        assert!((95..=100).contains(&passed), "{sync}: {passed} of 100");
    }
}

#[test]
fn a_grant_of_the_old_window_is_not_given_to_a_request_of_the_new_one() {
    let redis = Redis::start();
    let far = far(&redis, Duration::from_millis(300));
    let limit = "rate = \"1/2s\"\nalgorithm = \"fixed_window\"\nsync = \"strict\"";
    let gateway = shared_at(&far.url(0), limit);
    // warm-up: the first call sends the script, too
    gateway.get("/");
    gateway.get("/");
    next_window(WINDOW - Duration::from_millis(400));
    // its call is executed 100 ms before the end of the window and answered 200 ms after it; the
    // client has left by then
    let mut gone = gateway.connect();
    gone.write(&Request::get("/").to_bytes())
        .expect("it is sent");
    later_in_window(WINDOW - Duration::from_millis(200));
    drop(gone);
    time_passes(
        Duration::from_millis(280),
        "the window ends while the call is under way",
    );
    let statuses = thread::scope(|scope| {
        let send = || gateway.get("/").status;
        let second = [scope.spawn(send), scope.spawn(send), scope.spawn(send)];
        second.map(|client| client.join().expect("a client"))
    });
    let passed = statuses.iter().filter(|&&status| status == 200).count();
    assert_eq!(passed, 1, "one in each window: {statuses:?}");
}

#[test]
fn requests_that_come_while_the_first_call_after_a_refusal_is_under_way_wait_with_it() {
    for algorithm in ["gcra", "sliding_window", "fixed_window"] {
        let redis = Redis::start();
        let far = far(&redis, Duration::from_millis(20));
        let burst = if algorithm == "gcra" { "burst = 9" } else { "" };
        let limit =
            format!("rate = \"9/1s\"\nalgorithm = \"{algorithm}\"\nsync = \"strict\"\n{burst}");
        let gateway = [shared_at(&far.url(0), &limit)];
        let statuses = gateway[0].statuses(&Request::get("/"), 20);
        assert!(statuses.contains(&429), "{algorithm}: {statuses:?}");
        // wait for a full window
        time_passes(WINDOW + Duration::from_millis(100), "a whole window passes");
        let passed = admitted(&burst_of(&gateway, 9));
        assert_eq!(passed, 9, "{algorithm}: nine were left for nine requests");
    }
}

/// One request on each of `requests` connections, all at once.
fn burst_of(gateways: &[Gateway], requests: usize) -> BTreeMap<u16, usize> {
    burst(gateways, requests, requests)
}
