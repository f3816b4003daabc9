//! Data loss in Redis: whichever gateway calls first, and whether a key is missing or merely old,
//! at most a fiftieth of the burst is admitted beyond the limit. The loss is logged once and
//! counted.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use redis::Value;

use super::{FAILOVER, refilled};
use crate::support::{
    Client, Gateway, Redis, Request, eventually,
    redis::{Sentinel, ask_sentinel},
    wait::{time_passes, within},
};

/// Each has a burst of 600 that hardly refills during a test.
const KINDS: [(&str, &str); 7] = [
    ("bucket", "rate = \"600/h\"\nburst = 600"),
    (
        "bucket_strict",
        "rate = \"600/h\"\nburst = 600\nsync = \"strict\"",
    ),
    ("fixed", "rate = \"600/30d\"\nalgorithm = \"fixed_window\""),
    (
        "fixed_strict",
        "rate = \"600/30d\"\nalgorithm = \"fixed_window\"\nsync = \"strict\"",
    ),
    (
        "sliding",
        "rate = \"600/30d\"\nalgorithm = \"sliding_window\"",
    ),
    (
        "sliding_strict",
        "rate = \"600/30d\"\nalgorithm = \"sliding_window\"\nsync = \"strict\"",
    ),
    (
        "log",
        "rate = \"600/d\"\nalgorithm = \"sliding_log\"\nsync = \"strict\"",
    ),
];

/// Maximum excess after a loss: a fiftieth of the burst.
const BEYOND: usize = 12;

/// How long gateways need to detect and report a loss: a heartbeat, and the doubt.
const DOUBT: Duration = Duration::from_millis(3_500);

/// A limit of each kind, each on its own path.
fn config(redis: &str) -> String {
    let limits = KINDS.map(|(name, limit)| {
        format!(
            "[limit.{name}]\nkey = []\nscope = \"global\"\non_redis_down = \"closed\"\n{limit}\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"origin\"\nlimits = [\"{name}\"]\n"
        )
    });
    format!(
        "[redis]\n{redis}\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n{}",
        limits.concat()
    )
}

/// This many gateways that know of each other.
fn gateways(redis: &str, count: usize) -> Vec<Gateway> {
    let start = |_| Gateway::with(&config(redis)).start();
    let gateways: Vec<Gateway> = (0..count).map(start).collect();
    for gateway in &gateways {
        gateway.wait_for_metric("tidegate_lease_gateways", count as f64);
    }
    gateways
}

fn url(redis: &Redis) -> String {
    format!("url = {:?}", redis.url())
}

/// Number of admitted requests; those without Redis are sent again.
fn spend(gateway: &Gateway, kind: &str, requests: usize) -> usize {
    let mut client = gateway.connect();
    let request = Request::get(&format!("/{kind}"));
    let mut admitted = 0;
    for _ in 0..requests {
        let status = within(Duration::from_secs(20), "Redis to answer", || match client
            .send(&request)
            .status
        {
            503 => Err("503".to_owned()),
            status => Ok(status),
        });
        admitted += usize::from(status == 200);
        assert!([200, 429].contains(&status), "{kind}: {status}");
    }
    admitted
}

/// Gateway A has spent 1 of each limit, B the rest, and Redis loses data: A calls first, then B,
/// then both after the doubt.
fn a_loss_costs_little(redis: &mut Redis, before: impl Fn(&Redis), loses: impl Fn(&mut Redis)) {
    let gateways = gateways(&url(redis), 2);
    let [a, b] = &gateways[..] else {
        unreachable!()
    };
    let begun = Instant::now();
    for (kind, _) in KINDS {
        assert_eq!(spend(a, kind, 1), 1, "{kind}");
    }
    before(redis);
    let mut admitted: BTreeMap<&str, usize> = KINDS
        .map(|(kind, _)| (kind, 1 + spend(b, kind, 599)))
        .into();
    loses(redis);
    for _ in 0..2 {
        for gateway in [a, b] {
            for (kind, _) in KINDS {
                *admitted.entry(kind).or_default() += spend(gateway, kind, 60);
            }
        }
        time_passes(DOUBT, "the doubt ends");
    }
    is_within(&admitted, begun);
}

/// At most a fiftieth of the burst beyond it, plus what has refilled.
fn is_within(admitted: &BTreeMap<&str, usize>, begun: Instant) {
    println!("{admitted:?}");
    for (kind, &admitted) in admitted {
        let most = 600 + BEYOND + refilled(begun);
        assert!(
            (560..=most).contains(&admitted),
            "{kind}: {admitted} of 600"
        );
    }
}

fn said_once(gateway: &Gateway, words: &str) {
    eventually("the log to say so", || {
        let log = gateway.stderr();
        match log.matches(words).count() {
            0 => Err(log),
            _ => Ok(()),
        }
    });
}

#[test]
fn a_flushed_redis_is_told_what_every_gateway_remembers() {
    let mut redis = Redis::start();
    a_loss_costs_little(
        &mut redis,
        |_| {},
        |redis| _ = redis.run::<Value>(&["FLUSHALL"]),
    );
}

#[test]
fn a_redis_that_restarts_empty_is_told_what_every_gateway_remembers() {
    let mut redis = Redis::start();
    a_loss_costs_little(&mut redis, |_| {}, Redis::restart);
}

#[test]
fn a_redis_that_restarts_from_an_old_snapshot_is_told_what_came_after_it() {
    let mut redis = Redis::start();
    let save = |redis: &Redis| _ = redis.run::<Value>(&["SAVE"]);
    a_loss_costs_little(&mut redis, save, Redis::restart);
}

#[test]
fn keys_that_are_evicted_are_told_by_every_gateway_that_asks() {
    under_load(|redis| evict(redis), |_| {});
}

#[test]
fn keys_that_are_evicted_when_their_gateway_is_silent_cost_one_burst_once() {
    let redis = Redis::start();
    let gateways = gateways(&url(&redis), 2);
    let [silent, asked] = &gateways[..] else {
        unreachable!()
    };
    let begun = Instant::now();
    for (kind, _) in KINDS {
        assert!(spend(silent, kind, 600) >= 560, "{kind}");
    }
    evict(&redis);
    // this gateway cannot know that the key is not new
    for (kind, _) in KINDS {
        let admitted = spend(asked, kind, 620);
        assert!(
            admitted <= 600 + refilled(begun),
            "{kind}: {admitted} of 600"
        );
    }
    for _ in 0..2 {
        for gateway in [silent, asked] {
            for (kind, _) in KINDS {
                let admitted = spend(gateway, kind, 60);
                assert!(
                    admitted <= BEYOND + refilled(begun),
                    "{kind}: {admitted} more"
                );
            }
        }
        time_passes(DOUBT, "the doubt ends");
    }
}

fn evict(redis: &Redis) {
    for key in redis.keys() {
        if !key.ends_with(":gateways") {
            redis.run::<Value>(&["DEL", &key]);
        }
    }
}

#[test]
fn a_gateway_without_requests_tells_a_flushed_redis_what_it_knows() {
    let redis = Redis::start();
    let gateways = gateways(&url(&redis), 2);
    let begun = Instant::now();
    let mut admitted: BTreeMap<&str, usize> = KINDS
        .map(|(kind, _)| {
            (
                kind,
                spend(&gateways[0], kind, 1) + spend(&gateways[1], kind, 599),
            )
        })
        .into();
    redis.run::<Value>(&["FLUSHALL"]);
    // the second gateway receives no more requests
    let until = Instant::now() + DOUBT * 2;
    while Instant::now() < until {
        for (kind, _) in KINDS {
            *admitted.entry(kind).or_default() += spend(&gateways[0], kind, 20);
        }
        time_passes(Duration::from_millis(100), "a client paces itself");
    }
    is_within(&admitted, begun);
    said_once(&gateways[1], "Redis may have lost counters");
    said_once(&gateways[0], "Redis lost the counter of a key");
    let emptied = gateways[1].metric("tidegate_redis_losses_total{kind=\"emptied\"}");
    assert!(emptied >= 1.0, "{emptied}");
    let keys = gateways[0].metric("tidegate_redis_losses_total{kind=\"key\"}");
    assert!(keys >= KINDS.len() as f64, "{keys}");
}

#[test]
fn a_key_that_is_refused_after_a_loss_is_asked_for_again_within_seconds() {
    let redis = Redis::start();
    let gateways = gateways(&url(&redis), 2);
    for (kind, _) in KINDS {
        assert_eq!(spend(&gateways[0], kind, 1), 1, "{kind}");
    }
    redis.run::<()>(&["FLUSHALL"]);
    let admitted = KINDS.map(|(kind, _)| spend(&gateways[0], kind, 30));
    assert!(admitted.iter().sum::<usize>() < 7 * 30, "none is refused");
    // not only when a window ends, which takes days here
    for (kind, _) in KINDS {
        eventually(kind, || match spend(&gateways[0], kind, 1) {
            0 => Err("it is refused".to_owned()),
            _ => Ok(()),
        });
    }
}

#[test]
fn one_gateway_alone_goes_on_from_what_it_remembers_without_a_pause() {
    let redis = Redis::start();
    let gateways = gateways(&url(&redis), 1);
    let begun = Instant::now();
    for (kind, _) in KINDS {
        assert_eq!(spend(&gateways[0], kind, 300), 300);
    }
    redis.run::<Value>(&["FLUSHALL"]);
    for (kind, _) in KINDS {
        let mut rest = spend(&gateways[0], kind, 330);
        // a lease pauses while the pool is short, then requests the last few
        eventually(kind, || match rest {
            295.. => Ok(()),
            _ => {
                rest += spend(&gateways[0], kind, 1);
                Err(format!("{rest} admitted"))
            }
        });
        assert!(rest <= 300 + refilled(begun), "{kind}: {rest}");
    }
}

#[test]
fn one_gateway_alone_restores_what_redis_lost_before_the_next_request() {
    let redis = Redis::start();
    let gateways = gateways(&url(&redis), 1);
    let begun = Instant::now();
    for (kind, _) in KINDS {
        assert_eq!(spend(&gateways[0], kind, 300), 300);
    }
    redis.run::<Value>(&["FLUSHALL"]);
    // no request notices the loss: the next heartbeat does
    let lost = "tidegate_redis_losses_total{kind=\"key\"}";
    gateways[0].wait_for_metric(lost, KINDS.len() as f64);
    for (kind, _) in KINDS {
        let rest = spend(&gateways[0], kind, 330);
        assert!(rest <= 300 + refilled(begun), "{kind}: {rest}");
    }
}

#[test]
fn a_replica_that_takes_over_without_the_last_grants_is_told_of_them() {
    let mut sentinel = Sentinel::start();
    let nodes = sentinel.address;
    let redis = format!("sentinel = {{ master = \"mymaster\", nodes = [\"{nodes}\"] }}");
    let gateways = gateways(&redis, 2);
    let begun = Instant::now();
    for (kind, _) in KINDS {
        assert_eq!(spend(&gateways[0], kind, 1), 1);
    }
    eventually("the replica to have it all", || {
        let (here, there) = (sentinel.master.keys().len(), sentinel.replica.keys().len());
        (here == there)
            .then_some(())
            .ok_or_else(|| there.to_string())
    });
    // it does not receive later writes
    sentinel.replica.pause();
    let mut admitted: BTreeMap<&str, usize> = KINDS
        .map(|(kind, _)| (kind, 1 + spend(&gateways[1], kind, 599)))
        .into();
    sentinel.master.kill();
    sentinel.replica.resume();
    within(FAILOVER, "the Sentinel to name the replica", || {
        let (_, port): (String, u16) =
            ask_sentinel(nodes, &["GET-MASTER-ADDR-BY-NAME", "mymaster"])?;
        let is_replica = port == sentinel.replica.port();
        is_replica.then_some(()).ok_or_else(|| port.to_string())
    });
    for _ in 0..2 {
        for gateway in &gateways {
            for (kind, _) in KINDS {
                *admitted.entry(kind).or_default() += spend(gateway, kind, 60);
            }
        }
        time_passes(DOUBT, "the doubt ends");
    }
    is_within(&admitted, begun);
}

/// Three gateways at three times the limit, of each kind, while Redis loses data: the excess, by
/// kind.
fn under_load(loses: impl Fn(&mut Redis), before: impl Fn(&Redis)) {
    let mut redis = Redis::start();
    let gateways = gateways(&url(&redis), 3);
    let stop = Arc::new(AtomicBool::new(false));
    let begun = Instant::now();
    let clients: Vec<_> = gateways
        .iter()
        .flat_map(|gateway| KINDS.map(|(kind, _)| (gateway.address(), kind)))
        .map(|(address, kind)| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                let mut client = Client::connect(address);
                let request = Request::get(&format!("/{kind}"));
                let mut admitted = 0;
                while !stop.load(Relaxed) {
                    admitted += usize::from(client.send(&request).status == 200);
                    time_passes(Duration::from_millis(2), "a client paces itself");
                }
                (kind, admitted)
            })
        })
        .collect();
    let spent = |each: usize| {
        eventually("a part of the burst to be spent", || {
            let admitted = |gateway: &Gateway| {
                gateway.metric("tidegate_decisions_total{outcome=\"admitted\"}")
            };
            match gateways.iter().map(admitted).sum::<f64>() {
                all if all >= (each * KINDS.len()) as f64 => Ok(()),
                all => Err(all.to_string()),
            }
        });
    };
    spent(200);
    before(&redis);
    spent(400);
    loses(&mut redis);
    time_passes(Duration::from_secs(6), "the load goes on after the loss");
    stop.store(true, Relaxed);
    let mut admitted = BTreeMap::new();
    for client in clients {
        let (kind, count) = client.join().expect("a client");
        *admitted.entry(kind).or_insert(0) += count;
    }
    is_within(&admitted, begun);
}

#[test]
fn under_three_times_the_load_a_flush_admits_a_fiftieth_beyond_at_most() {
    under_load(|redis| _ = redis.run::<Value>(&["FLUSHALL"]), |_| {});
}

#[test]
fn under_three_times_the_load_a_restart_from_a_snapshot_admits_a_fiftieth_beyond_at_most() {
    let save = |redis: &Redis| _ = redis.run::<Value>(&["SAVE"]);
    under_load(Redis::restart, save);
}

#[test]
fn under_three_times_the_load_a_restart_without_data_admits_a_fiftieth_beyond_at_most() {
    under_load(Redis::restart, |_| {});
}
