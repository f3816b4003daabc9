//! Changes of a shared limit: usage survives any change of its algorithm, in a reload and in a
//! rollout, and gateways that disagree report it.

use redis::Value;

use super::shared;
use crate::support::{Gateway, Redis, Request, eventually, wait::eventually_eq};

fn passed(gateway: &Gateway, requests: usize) -> usize {
    let statuses = gateway.statuses(&Request::get("/"), requests);
    assert!(
        statuses.iter().all(|status| [200, 429].contains(status)),
        "{statuses:?}"
    );
    statuses.iter().filter(|&&status| status == 200).count()
}

const STRICT: &str = "\nsync = \"strict\"";

/// Algorithms, windows and amounts; periods too long to end during a test. The test fills in the
/// amount.
const FORMS: [&str; 7] = [
    "burst = {}\nrate = \"{}/d\"",
    "burst = {}\nrate = \"{}/2d\"",
    "algorithm = \"fixed_window\"\nrate = \"{}/30d\"",
    "algorithm = \"fixed_window\"\nrate = \"{}/15d\"",
    "algorithm = \"sliding_window\"\nrate = \"{}/30d\"",
    "algorithm = \"sliding_log\"\nrate = \"{}/d\"",
    "algorithm = \"sliding_log\"\nrate = \"{}/12h\"",
];

fn of(form: &str, amount: u64) -> String {
    form.replace("{}", &amount.to_string())
}

#[test]
fn sixty_of_a_hundred_spent_are_sixty_of_two_hundred_and_all_of_fifty_whatever_it_becomes() {
    let redis = Redis::start();
    for before in FORMS {
        for after in FORMS {
            for (amount, left) in [(200, 140), (50, 0)] {
                redis.run::<Value>(&["FLUSHALL"]);
                let mut first = shared(&redis, &format!("{}{STRICT}", of(before, 100)));
                assert_eq!(passed(&first, 60), 60);
                first.signal("TERM");
                assert!(first.wait().success());
                let second = shared(&redis, &format!("{}{STRICT}", of(after, amount)));
                let rest = passed(&second, 145);
                assert_eq!(rest, left, "{before} 100 -> {after} {amount}");
            }
        }
    }
}

#[test]
fn in_a_rollout_old_and_new_gateways_count_what_both_admit() {
    let redis = Redis::start();
    for (before, after) in FORMS
        .iter()
        .flat_map(|before| FORMS.map(|after| (*before, after)))
        .filter(|(before, after)| before != after)
    {
        redis.run::<Value>(&["FLUSHALL"]);
        let old = shared(&redis, &format!("{}{STRICT}", of(before, 100)));
        let new = shared(&redis, &format!("{}{STRICT}", of(after, 100)));
        let mut all = 0;
        for _ in 0..6 {
            all += passed(&old, 10) + passed(&new, 10);
        }
        assert!((99..=101).contains(&all), "{before} beside {after}: {all}");
    }
}

#[test]
fn a_reload_that_lowers_the_burst_locks_nobody_out() {
    for sync in ["lease", "strict"] {
        let redis = Redis::start();
        let toml = |limit: &str| {
            format!(
                "[redis]\nurl = {:?}\ntimeout = \"1s\"\n[gateway]\nlimits = [\"shared\"]\n\
                 [limit.shared]\nkey = []\nscope = \"global\"\nsync = \"{sync}\"\n{limit}\n",
                redis.url()
            )
        };
        let gateway = Gateway::with(&toml("rate = \"60/min\"\nburst = 600")).start();
        // a lease may withhold the last few for a moment
        assert!(passed(&gateway, 600) >= 560);
        gateway.reconfigure(&toml("rate = \"60/min\"\nburst = 10"));
        let refused = gateway.statuses(&Request::get("/"), 12);
        assert!(refused.contains(&429), "{refused:?}");
        let response = gateway.get("/");
        if response.status == 429 {
            let wait = response.retry_after().expect("it says when to return");
            assert!(wait <= 2, "{sync}: Retry-After: {wait}");
        }
    }
}

#[test]
fn of_two_bursts_side_by_side_each_gateway_waits_for_its_own() {
    let redis = Redis::start();
    let large = shared(&redis, &format!("rate = \"60/min\"\nburst = 600{STRICT}"));
    let small = shared(&redis, &format!("rate = \"60/min\"\nburst = 10{STRICT}"));
    assert_eq!(passed(&large, 600), 600);
    let response = small.get("/");
    assert_eq!(response.status, 429);
    assert!(response.retry_after().is_some_and(|wait| wait <= 2));
    // the clamp applies to the small limit; the large one still has to wait for its own debt
    assert!(passed(&large, 50) <= 20);
}

#[test]
fn a_window_that_becomes_smaller_is_full_no_longer_than_after_all_of_it_was_spent() {
    let redis = Redis::start();
    let large = format!("algorithm = \"sliding_window\"\nrate = \"600/10s\"{STRICT}");
    let small = format!("algorithm = \"sliding_window\"\nrate = \"10/10s\"{STRICT}");
    let large = shared(&redis, &large);
    assert!(passed(&large, 600) >= 590);
    let response = shared(&redis, &small).get("/");
    assert_eq!(response.status, 429);
    // the rest of this window, and a tenth of the next
    assert!(response.retry_after().is_some_and(|wait| wait <= 12));
}

/// The format of older versions: sixty spent of a hundred.
const OLDER: [(&str, &str); 3] = [
    (
        "rate = \"100/d\"\nburst = 100",
        "redis.call('SET', KEYS[1], struct.pack('<ddI4I4I4f', 60, now, 0, 0, 0, 0), 'PX', 60000)",
    ),
    (
        "rate = \"100/30d\"\nalgorithm = \"fixed_window\"",
        "redis.call('SET', KEYS[1], struct.pack('<ddddf', math.floor(now / 2592e9), 60, 0, now, 0), 'PX', 60000)",
    ),
    (
        "rate = \"100/d\"\nalgorithm = \"sliding_log\"",
        "for i = 1, 60 do redis.call('ZADD', KEYS[1], now, 'a:1:' .. i) end",
    ),
];

#[test]
fn states_of_older_gateways_are_taken_over() {
    for (limit, write) in OLDER {
        let redis = Redis::start();
        redis.run::<Value>(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        let limit = format!("{limit}{STRICT}");
        // the first call for a key passes its old name
        assert_eq!(passed(&shared(&redis, &limit), 1), 1);
        let key = redis
            .keys()
            .into_iter()
            .find(|key| key.contains("{shared:"));
        let key = key.expect("the limit has a key");
        let former = former_key(&redis.run(&["SLOWLOG", "GET", "100"]), &key);
        redis.run::<Value>(&["FLUSHALL"]);
        let write =
            format!("local t = redis.call('TIME') local now = t[1] * 1000000 + t[2] {write}");
        redis.run::<Value>(&["EVAL", &write, "1", &former]);
        assert_eq!(passed(&shared(&redis, &limit), 50), 40, "{limit}");
    }
}

/// The second key of the script calls in these commands.
fn former_key(commands: &Value, key: &str) -> String {
    fn words(value: &Value) -> Vec<String> {
        match value {
            Value::Array(values) => values.iter().flat_map(words).collect(),
            Value::BulkString(bytes) => vec![String::from_utf8_lossy(bytes).into_owned()],
            _ => Vec::new(),
        }
    }
    let found = words(commands)
        .into_iter()
        .find(|word| word.starts_with("tidegate:{shared:") && word != key);
    found.expect("a call names where the key was kept")
}

#[test]
fn gateways_that_disagree_about_a_limit_say_so() {
    let redis = Redis::start();
    let one = shared(
        &redis,
        &format!("rate = \"100000/d\"\nburst = 100000{STRICT}"),
    );
    let other = shared(
        &redis,
        &format!("rate = \"200000/d\"\nburst = 100000{STRICT}"),
    );
    eventually("one of them to say so", || {
        passed(&one, 1);
        passed(&other, 1);
        let log = one.stderr();
        let says =
            log.contains("different settings for this shared limit") && log.contains("shared");
        if says { Ok(()) } else { Err(log) }
    });
    one.wait_for_metric("tidegate_lease_disagreement{limit=\"shared\"}", 1.0);
    let shown = one.look("/api/v1/limits/shared");
    assert_eq!(shown["gateways_disagree"], true, "{shown}");
}

/// The nice values of the threads with this name.
fn nice_values(gateway: &Gateway, thread: &str) -> Vec<String> {
    let tasks = format!("/proc/{}/task", gateway.pid());
    let tasks = std::fs::read_dir(tasks).expect("the gateway runs");
    tasks
        .filter_map(|task| {
            let folder = task.ok()?.path();
            let name = std::fs::read_to_string(folder.join("comm")).ok()?;
            let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
            // proc_pid_stat(5): field 19; the name before it may contain anything and ends with `)`
            let nice = stat.rsplit_once(") ")?.1.split(' ').nth(16)?;
            (name.trim() == thread).then(|| nice.to_owned())
        })
        .collect()
}

#[test]
fn a_reload_that_changes_shared_limits_does_not_slow_down_the_thread_that_talks_to_redis() {
    let redis = Redis::start();
    let with = |rate: &str| {
        let url = redis.url();
        format!(
            "[redis]\nurl = {url:?}\n[gateway]\nlimits = [\"shared\"]\n\
             [limit.shared]\nkey = []\nscope = \"global\"\nrate = \"{rate}\"\n"
        )
    };
    let gateway = Gateway::with(&with("100/h")).start();
    let before = nice_values(&gateway, "budget");
    assert_eq!(before.len(), 1, "{before:?}");
    gateway.reconfigure(&with("200/h"));
    eventually_eq(
        "one connection to Redis, as important as before",
        before,
        || nice_values(&gateway, "budget"),
    );
}
