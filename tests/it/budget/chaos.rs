//! Faults of Redis under load: no request fails or waits longer than allowed, admissions stay
//! within bounds, and gateways return to Redis by themselves.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use redis::Value;

use super::{
    FAILOVER,
    servers::{from, per_ip},
    waiting,
};
use crate::support::{
    Client, Gateway, Redis, Request, eventually,
    redis::{Cluster, Sentinel},
    wait::{time_passes, within},
};

fn shared(redis: &Redis, limit: &str) -> Gateway {
    shared_by(&format!("url = \"{}\"", redis.url()), limit)
}

fn shared_by(redis: &str, limit: &str) -> Gateway {
    waiting("200ms", redis, limit)
}

/// Continuous load, two requests at once to each gateway.
struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Seen>>,
    begun: Instant,
}

/// The answers to clients.
#[derive(Default)]
struct Seen {
    statuses: BTreeMap<u16, usize>,
    /// By client address.
    admitted: BTreeMap<u8, usize>,
    slowest: Duration,
    lasted: Duration,
}

impl Load {
    /// From `addresses` client addresses.
    fn start(gateways: &[Gateway], addresses: u8) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let send = |(number, gateway): (usize, &Gateway)| {
            let (address, stop) = (gateway.address(), Arc::clone(&stop));
            thread::spawn(move || {
                let (mut client, mut seen) = (Client::connect(address), Seen::default());
                for turn in number.. {
                    if stop.load(Relaxed) {
                        break;
                    }
                    let who = u8::try_from(turn % usize::from(addresses)).unwrap_or(0);
                    let sent = Instant::now();
                    let status = client.send(&from(who)).status;
                    seen.slowest = seen.slowest.max(sent.elapsed());
                    *seen.statuses.entry(status).or_default() += 1;
                    *seen.admitted.entry(who).or_default() += usize::from(status == 200);
                    time_passes(Duration::from_micros(500), "a client paces itself");
                }
                seen
            })
        };
        let twice = gateways.iter().chain(gateways).enumerate();
        let clients = twice.map(send).collect();
        Load {
            stop,
            clients,
            begun: Instant::now(),
        }
    }

    /// Stops the load. No request failed, and none was slower than the 200 ms timeout plus the
    /// delays of a busy machine.
    fn end(self) -> Seen {
        self.stop.store(true, Relaxed);
        let mut all = Seen::default();
        for client in self.clients {
            let seen = client.join().expect("a client");
            for (status, count) in seen.statuses {
                *all.statuses.entry(status).or_default() += count;
            }
            for (who, count) in seen.admitted {
                *all.admitted.entry(who).or_default() += count;
            }
            all.slowest = all.slowest.max(seen.slowest);
        }
        all.lasted = self.begun.elapsed();
        let other = all
            .statuses
            .keys()
            .find(|status| ![200, 429].contains(status));
        assert_eq!(other, None, "{:?}", all.statuses);
        let slowest = all.slowest;
        // an unabandoned call lasts for twenty timeouts: 4 s
        assert!(
            slowest < Duration::from_millis(2_500),
            "one took {slowest:?}"
        );
        println!("statuses {:?}, the slowest {slowest:?}", all.statuses);
        all
    }
}

impl Seen {
    fn admitted(&self) -> f64 {
        self.statuses.get(&200).copied().unwrap_or(0) as f64
    }
}

fn ok_calls(gateway: &Gateway) -> f64 {
    gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}")
}

/// Waits until every gateway has served some requests.
fn until_under_load(gateways: &[Gateway]) {
    for gateway in gateways {
        eventually("load", || match gateway.metric("tidegate_requests_total") {
            served if served >= 200.0 => Ok(()),
            served => Err(served.to_string()),
        });
    }
}

/// Waits until every gateway uses Redis again and none uses its fallback.
fn until_used_again(gateways: &[Gateway]) {
    let back = Instant::now();
    for gateway in gateways {
        let before = ok_calls(gateway);
        within(FAILOVER, "calls to be answered again", || {
            match ok_calls(gateway) {
                now if now > before => Ok(()),
                now => Err(format!("{now}")),
            }
        });
        gateway.wait_for_metric("tidegate_degraded", 0.0);
    }
    println!("used again after {:?}", back.elapsed());
}

const RATE: f64 = 50.0;
const BURST: f64 = 500.0;
const LIMIT: &str = "rate = \"50/s\"\nburst = 500";

/// Applies a fault to the Redis of two gateways that share a limit, at several times the limit.
fn befalls(what: impl FnOnce(&mut Redis)) {
    let mut redis = Redis::start();
    let gateways: Vec<Gateway> = (0..2).map(|_| shared(&redis, LIMIT)).collect();
    let load = Load::start(&gateways, 1);
    eventually("the burst to be spent", || {
        let denied = gateways[0].metric("tidegate_decisions_total{outcome=\"rejected\"}");
        if denied > 0.0 {
            Ok(())
        } else {
            Err(String::new())
        }
    });
    what(&mut redis);
    until_used_again(&gateways);
    time_passes(Duration::from_millis(500), "the load goes on with Redis");
    let seen = load.end();
    let exact = BURST + RATE * seen.lasted.as_secs_f64();
    let admitted = seen.admitted();
    println!("{admitted} admitted, {exact:.0} by one bucket");
    // at most a tenth of the burst, whatever the fault
    assert!(
        admitted <= exact + 0.1 * BURST,
        "{admitted} instead of {exact}"
    );
    assert!(admitted >= 0.7 * exact, "{admitted} instead of {exact}");
}

#[test]
fn a_redis_that_is_killed_and_starts_empty_fails_no_request_and_gives_no_second_burst() {
    befalls(|redis| {
        redis.kill();
        time_passes(Duration::from_millis(150), "Redis is away");
        redis.restart();
    });
}

#[test]
fn a_redis_that_is_away_for_seconds_fails_no_request() {
    befalls(|redis| {
        redis.kill();
        time_passes(Duration::from_secs(3), "Redis is away");
        redis.restart();
    });
}

#[test]
fn a_redis_that_stands_still_for_a_second_fails_no_request() {
    befalls(|redis| {
        redis.pause();
        time_passes(Duration::from_secs(1), "Redis stands still");
        redis.resume();
    });
}

#[test]
fn a_redis_whose_data_is_flushed_again_and_again_gives_no_second_burst() {
    befalls(|redis| {
        for _ in 0..3 {
            redis.run::<Value>(&["FLUSHALL"]);
            time_passes(
                Duration::from_millis(200),
                "gateways call between two flushes",
            );
        }
    });
}

#[test]
fn a_redis_whose_scripts_are_flushed_and_whose_memory_is_full_fails_no_request() {
    befalls(|redis| {
        for _ in 0..5 {
            redis.run::<Value>(&["SCRIPT", "FLUSH"]);
            time_passes(
                Duration::from_millis(50),
                "gateways call between two flushes",
            );
        }
        redis.run::<Value>(&["CONFIG", "SET", "maxmemory", "1"]);
        time_passes(
            Duration::from_millis(500),
            "gateways call while memory is full",
        );
        redis.run::<Value>(&["CONFIG", "SET", "maxmemory", "0"]);
    });
}

#[test]
fn a_full_redis_that_evicts_what_is_nearest_to_its_end_admits_no_more() {
    let redis = Redis::start();
    let limit = "rate = \"40/d\"\nburst = 40\nsync = \"strict\"";
    let gateway = shared(&redis, limit);
    let held = gateway.statuses(&Request::get("/"), 40);
    assert!(held.iter().all(|&status| status == 200));
    redis.run::<Value>(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]);
    // short-lived keys are evicted first, and the spent bucket, which lives for a day, stays; there
    // are enough of them for another gateway's connections and scripts
    for name in 0..2_000 {
        let value = "x".repeat(1_000);
        redis.run::<Value>(&["SET", &format!("other:{name}"), &value, "PX", "60000"]);
    }
    let used: String = redis.run(&["INFO", "memory"]);
    let used = used
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used
        .and_then(|text| text.trim().parse().ok())
        .expect("a number");
    redis.run::<Value>(&["CONFIG", "SET", "maxmemory", &(used - 100_000).to_string()]);
    eventually("something to be evicted", || {
        redis.run::<Value>(&["SET", "another", "1", "PX", "60000"]);
        let keys = redis.keys().len();
        if keys < 1_980 {
            Ok(())
        } else {
            Err(format!("{keys} keys"))
        }
    });
    assert!(redis.keys().iter().any(|key| key.contains("{shared:")));
    let second = shared(&redis, limit);
    assert_eq!(second.get("/").status, 429);
}

#[test]
fn a_replica_that_is_promoted_under_load_fails_no_request() {
    let mut sentinel = Sentinel::start();
    let redis = format!(
        "sentinel = {{ master = \"mymaster\", nodes = [\"{}\"] }}",
        sentinel.address
    );
    let gateways: Vec<Gateway> = (0..2).map(|_| shared_by(&redis, LIMIT)).collect();
    let load = Load::start(&gateways, 1);
    until_under_load(&gateways);
    sentinel.master.kill();
    until_used_again(&gateways);
    let seen = load.end();
    let exact = BURST + RATE * seen.lasted.as_secs_f64();
    assert!(
        seen.admitted() <= exact + 0.1 * BURST,
        "{} of {exact}",
        seen.admitted()
    );
}

#[test]
fn a_master_of_a_cluster_that_dies_under_load_fails_no_request_and_costs_its_own_keys_only() {
    let mut cluster = Cluster::start(1);
    let limit = "rate = \"400/h\"\nburst = 400";
    let gateways = [per_ip(&cluster, limit), per_ip(&cluster, limit)];
    let load = Load::start(&gateways, 20);
    until_under_load(&gateways);
    cluster.masters[0].kill();
    within(FAILOVER, "the replica to take over", || {
        let keys = cluster.replicas[0].keys().len();
        let role: Vec<Value> = cluster.replicas[0].run(&["ROLE"]);
        if role.first() == Some(&Value::BulkString(b"master".to_vec())) {
            Ok(())
        } else {
            Err(format!("{keys} keys"))
        }
    });
    for gateway in &gateways {
        gateway.wait_for_metric("tidegate_degraded", 0.0);
    }
    let seen = load.end();
    let most = seen.admitted.values().max().copied().unwrap_or(0);
    assert!(most <= 440, "{most} of 400: {:?}", seen.admitted);
}

#[test]
fn two_and_a_half_thousand_slots_that_move_under_load_fail_no_request_and_change_no_count() {
    let cluster = Cluster::start(0);
    let limit = "rate = \"60/d\"\nburst = 60\nsync = \"strict\"\non_redis_down = \"closed\"";
    let gateways = [per_ip(&cluster, limit), per_ip(&cluster, limit)];
    let load = Load::start(&gateways, 30);
    for part in 0..5_u16 {
        let slots = part * 500..(part + 1) * 500;
        cluster.begin_to_move(slots.clone(), 0, 1);
        cluster.finish_to_move(slots, 0, 1);
    }
    let all_spent = || {
        gateways
            .iter()
            .all(|gateway| (0..30).all(|who| gateway.send(&from(who)).status == 429))
    };
    eventually("everything to be spent", || {
        all_spent().then_some(()).ok_or_else(String::new)
    });
    let seen = load.end();
    let most = seen.admitted.values().max().copied().unwrap_or(0);
    assert!(most <= 60, "{:?}", seen.admitted);
    assert_eq!(gateways[0].metric("tidegate_degraded_decisions_total"), 0.0);
}

#[test]
fn gateways_that_are_killed_under_load_lose_what_they_held_and_double_nothing() {
    let redis = Redis::start();
    let limit = "rate = \"600/d\"\nburst = 600";
    let mut dying: Vec<Gateway> = (0..2).map(|_| shared(&redis, limit)).collect();
    let living: Vec<Gateway> = (0..2).map(|_| shared(&redis, limit)).collect();
    let before: usize = dying
        .iter()
        .map(|gateway| super::admitted(&super::burst(std::slice::from_ref(gateway), 100, 2)))
        .sum();
    for gateway in &mut dying {
        gateway.signal("KILL");
        gateway.wait();
    }
    let load = Load::start(&living, 1);
    let denied =
        |gateway: &Gateway| gateway.metric("tidegate_decisions_total{outcome=\"rejected\"}");
    eventually("the rest to be spent", || {
        if living.iter().all(|gateway| denied(gateway) > 50.0) {
            Ok(())
        } else {
            Err(String::new())
        }
    });
    let seen = load.end();
    let all = before as f64 + seen.admitted();
    // leases of the dead gateways are lost until they expire: at most what each had requested
    assert!((400.0..=600.0).contains(&all), "{all} of 600");
}
