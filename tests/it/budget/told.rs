//! The values that a shared limit reports to clients.

use super::shared;
use crate::support::{Redis, Request};

#[test]
fn a_gateway_that_is_rarely_asked_tells_what_is_left_for_all() {
    for limit in [
        "rate = \"600/10min\"\nburst = 600",
        "algorithm = \"fixed_window\"\nrate = \"600/30d\"",
        "algorithm = \"sliding_window\"\nrate = \"600/30d\"",
        "algorithm = \"sliding_log\"\nrate = \"600/d\"",
    ] {
        let redis = Redis::start();
        let [busy, quiet] = [0, 1].map(|_| shared(&redis, limit));
        assert_eq!(busy.statuses(&Request::get("/"), 200), [200; 200]);
        let told = quiet.get("/").remaining("shared");
        // 399, less the busy gateway's leases of at most half of it; its share of the demand would
        // be two
        assert!((195..=405).contains(&told), "{limit}: r={told}");
        let again = quiet.get("/").remaining("shared");
        assert!(
            (told - 8..=told).contains(&again),
            "{limit}: r={told}, then {again}"
        );
    }
}
