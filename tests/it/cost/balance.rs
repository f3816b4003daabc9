//! Every unit is accounted for, however answers end.

use std::{
    io::Read as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use serde_json::json;

use super::{ask, balance, in_flight, limited, provider, settled_from, units};
use crate::support::{Client, Gateway, Origin, eventually, wait::time_passes};

const LIMIT: &str = "rate = \"100000000/min\"\n\
                     cost = { preset = \"openai\", estimate = 50 }";

/// An exchange that ends in one of several ways, after about this many bytes.
fn break_off(gateway: &Gateway, case: usize, bytes: usize) {
    let ends = ["whole", "close", "reset", "whole"][case % 4];
    let plan = json!({"events": bytes / 60, "ends": ends, "completion": 80});
    let mut client = Client::connect(gateway.address());
    if case % 4 == 3 {
        // the client leaves
        client.write(&ask(&plan).to_bytes()).expect("a request");
        let mut left = vec![0; bytes];
        let _ = client.stream_mut().read(&mut left);
        return;
    }
    let _ = client.try_send(&ask(&plan));
}

#[test]
fn five_hundred_broken_answers_of_each_kind_leave_nothing_held() {
    let origin = provider();
    let gateway = limited(&origin, LIMIT);
    let random = AtomicUsize::new(7);
    let count = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while count.fetch_add(1, Relaxed) < 2_000 {
                    let step = random.fetch_add(0x9E37_79B9, Relaxed);
                    let mixed = step.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
                    break_off(&gateway, step, mixed % 6_000);
                }
            });
        }
    });
    balance(&gateway);
    assert!(settled_from(&gateway, "aborted") > 300);
    assert!(settled_from(&gateway, "reported") > 300);
    assert!(units(&gateway, "refunded") > 0 && units(&gateway, "grown") > 0);
}

#[test]
fn reloads_in_mid_stream_lose_no_unit_and_no_request() {
    let origin = provider();
    let gateway = limited(&origin, LIMIT);
    let toml = std::fs::read_to_string(gateway.folder().join("gateway.toml")).expect("its file");
    let ended = AtomicBool::new(false);
    let requests: usize = thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = gateway.connect();
                    let plan = json!({"events": 40, "pace_ms": 5, "completion": 60});
                    let mut requests = 0;
                    while !ended.load(Relaxed) {
                        assert_eq!(client.send(&ask(&plan)).status, 200);
                        requests += 1;
                    }
                    requests
                })
            })
            .collect();
        for round in 0..60 {
            // each reload changes the file a little
            gateway.rewrite(&format!("{toml}\n# {round}\n"));
            assert_eq!(gateway.reload().status, 200);
            time_passes(Duration::from_millis(50), "streams go on between reloads");
        }
        ended.store(true, Relaxed);
        clients
            .into_iter()
            .map(|client| client.join().expect("a client"))
            .sum()
    });
    balance(&gateway);
    assert_eq!(units(&gateway, "settled"), sum_of(&gateway, requests));
    assert_eq!(settled_from(&gateway, "reported"), requests as u64);
}

/// What the provider has reported.
fn sum_of(_: &Gateway, requests: usize) -> u64 {
    60 * requests as u64
}

#[test]
fn a_drain_settles_every_stream_before_the_process_ends() {
    let origin = provider();
    let mut gateway = limited_for(&origin, "[server]\nworkers = 2\ndrain_timeout = \"1s\"\n");
    let stream = ask(&json!({"events": 10_000, "pace_ms": 5}));
    let mut clients: Vec<Client> = (0..5).map(|_| gateway.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.begin(&stream).status, 200);
    }
    eventually("five streams to be in flight", || {
        match in_flight(&gateway) {
            held if held >= 250.0 => Ok(()),
            held => Err(format!("{held} units are held")),
        }
    });
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    let output = gateway.output();
    let lines = output
        .lines()
        .filter(|line| line.contains("\"cost_source\":\"aborted\""));
    assert_eq!(lines.count(), 5, "{output}");
}

fn limited_for(origin: &Origin, more: &str) -> Gateway {
    let toml = format!(
        "{more}[gateway]\nlimits = [\"tokens\"]\n[log]\naccess = \"all\"\nformat = \"json\"\n\
         [limit.tokens]\nkey = []\n{LIMIT}\n"
    );
    Gateway::with(&toml).upstream(origin).start()
}
