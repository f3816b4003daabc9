//! Redis with Sentinel, and as a cluster.

use std::collections::BTreeMap;

use redis::Value;

use super::{FAILOVER, burst, shared_by, waiting};
use crate::support::{
    Gateway, Request,
    redis::{Cluster, Sentinel},
    wait::within,
};

/// A strict limit that no test exhausts.
const ASKED: &str = "rate = \"1000000/s\"\nsync = \"strict\"\non_redis_down = \"open\"";

fn all_pass(gateway: &Gateway, requests: usize) {
    let statuses = gateway.statuses(&Request::get("/"), requests);
    assert!(statuses.iter().all(|&status| status == 200), "{statuses:?}");
}

/// Waits until calls succeed again and no limit uses its fallback.
fn until_answered(gateway: &Gateway) {
    let before = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
    within(FAILOVER, "calls to be answered again", || {
        all_pass(gateway, 5);
        let now = gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}");
        if now > before {
            Ok(())
        } else {
            Err(format!("{now}"))
        }
    });
    gateway.wait_for_metric("tidegate_degraded", 0.0);
}

#[test]
fn a_replica_that_sentinel_promotes_takes_over() {
    let mut sentinel = Sentinel::start();
    let redis = format!(
        "sentinel = {{ master = \"mymaster\", nodes = [\"127.0.0.1:1\", \"{}\"] }}",
        sentinel.address
    );
    let gateway = waiting("200ms", &redis, ASKED);
    all_pass(&gateway, 20);
    assert!(gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}") >= 1.0);
    let keys = sentinel.master.keys();
    assert!(keys.iter().any(|key| key.contains("{shared:")), "{keys:?}");
    sentinel.master.kill();
    until_answered(&gateway);
    let role: Vec<Value> = sentinel.replica.run(&["ROLE"]);
    assert_eq!(role.first(), Some(&Value::BulkString(b"master".to_vec())));
}

/// A limit per client, so that its keys spread over the cluster.
pub fn per_ip(cluster: &Cluster, limit: &str) -> Gateway {
    Gateway::with(&format!(
        "[redis]\ncluster = [{:?}]\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
         [gateway]\nlimits = [\"per_ip\"]\n\
         [limit.per_ip]\nkey = [\"ip\"]\nscope = \"global\"\n{limit}\n",
        cluster.seed()
    ))
    .start()
}

pub fn from(client: u8) -> Request {
    Request::get("/").header("x-forwarded-for", &format!("203.0.113.{client}"))
}

#[test]
fn a_cluster_keeps_every_key_where_it_belongs_and_the_limits_of_one_request_may_be_anywhere() {
    let cluster = Cluster::start(0);
    let gateways = [
        per_ip(&cluster, "rate = \"4/d\"\nburst = 4"),
        per_ip(&cluster, "rate = \"4/d\"\nburst = 4"),
    ];
    for client in 0..30 {
        let mut statuses: Vec<u16> = Vec::new();
        for _ in 0..3 {
            statuses.extend(
                gateways
                    .iter()
                    .map(|gateway| gateway.send(&from(client)).status),
            );
        }
        let passed = statuses.iter().filter(|&&status| status == 200).count();
        assert_eq!(passed, 4, "{statuses:?}");
    }
    for node in &cluster.masters {
        assert!(
            !node.keys().is_empty(),
            "a server of the cluster keeps nothing"
        );
    }
    assert_eq!(gateways[0].metric("tidegate_degraded_decisions_total"), 0.0);
}

#[test]
fn slots_that_move_under_load_fail_no_request_and_change_no_count() {
    let cluster = Cluster::start(0);
    let gateways = [per_ip(
        &cluster,
        "rate = \"40/d\"\nburst = 40\nsync = \"strict\"\non_redis_down = \"closed\"",
    )];
    let mut passed: BTreeMap<u8, usize> = BTreeMap::new();
    let mut send = |times: usize| {
        for client in 0..30 {
            for status in gateways[0].statuses(&from(client), times) {
                assert!([200, 429].contains(&status), "client {client}: {status}");
                *passed.entry(client).or_default() += usize::from(status == 200);
            }
        }
    };
    send(5);
    // in five parts, with requests between them and while slots are migrating
    for part in 0..5_u16 {
        let slots = part * 500..(part + 1) * 500;
        cluster.begin_to_move(slots.clone(), 0, 1);
        send(2);
        cluster.finish_to_move(slots, 0, 1);
        send(2);
    }
    send(30);
    let wrong: Vec<_> = passed.iter().filter(|(_, passed)| **passed != 40).collect();
    assert!(wrong.is_empty(), "{wrong:?} instead of 40 for each client");
    assert_eq!(gateways[0].metric("tidegate_degraded_decisions_total"), 0.0);
}

#[test]
fn a_master_of_a_cluster_that_is_killed_costs_its_own_keys_only_until_its_replica_takes_over() {
    let mut cluster = Cluster::start(1);
    let gateway = per_ip(&cluster, ASKED);
    let all = |gateway: &Gateway| {
        for client in 0..30 {
            assert_eq!(gateway.send(&from(client)).status, 200);
        }
    };
    all(&gateway);
    cluster.masters[0].kill();
    all(&gateway);
    within(FAILOVER, "the replica to take over", || {
        all(&gateway);
        let alone = gateway.metric("tidegate_degraded_decisions_total");
        all(&gateway);
        let more = gateway.metric("tidegate_degraded_decisions_total") - alone;
        if more < 0.5 {
            Ok(())
        } else {
            Err(format!("{more} decisions alone"))
        }
    });
    assert!(!cluster.replicas[0].keys().is_empty());
    gateway.wait_for_metric("tidegate_degraded", 0.0);
}

#[test]
fn three_gateways_share_a_burst_through_a_cluster() {
    let cluster = Cluster::start(0);
    let redis = format!("cluster = [{:?}]", cluster.seed());
    let gateways: Vec<Gateway> = (0..3).map(|_| shared_by(&redis, super::HOURLY)).collect();
    let statuses = burst(&gateways, 300, 6);
    let admitted = statuses.get(&200).copied().unwrap_or(0);
    assert!((540..=600).contains(&admitted), "{statuses:?}");
}

#[test]
fn limits_of_one_request_in_different_slots_are_charged_all_or_none() {
    let cluster = Cluster::start(0);
    for sync in ["lease", "strict"] {
        let toml = format!(
            "[redis]\ncluster = [{:?}]\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
             [client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
             [gateway]\nlimits = [\"all_{sync}\", \"per_{sync}\"]\n\
             [limit.all_{sync}]\nkey = []\nrate = \"500/d\"\nburst = 500\nscope = \"global\"\nsync = \"{sync}\"\n\
             [limit.per_{sync}]\nkey = [\"ip\"]\nrate = \"60/d\"\nburst = 60\nscope = \"global\"\nsync = \"{sync}\"\n",
            cluster.seed()
        );
        let gateways: Vec<Gateway> = (0..2).map(|_| Gateway::with(&toml).start()).collect();
        let mut passed = [0_usize; 8];
        let mut clients: Vec<_> = gateways.iter().map(Gateway::connect).collect();
        // ten thousand, most of which their client's limit refuses
        for turn in 0..10_000 {
            let who = turn % 8;
            let client = &mut clients[turn / 8 % 2];
            let status = client
                .send(&from(u8::try_from(who).expect("a client")))
                .status;
            assert!([200, 429].contains(&status), "{status}");
            passed[who] += usize::from(status == 200);
        }
        let all: usize = passed.iter().sum();
        // eight times sixty are fewer than five hundred: each client gets its whole limit
        assert_eq!(passed, [60; 8], "{sync}");
        assert_eq!(all, 480, "{sync}");
        let rest = from(100);
        let more = clients[0].send(&rest).status;
        assert_eq!(more, 200, "{sync}: twenty are left of what all share");
    }
}
