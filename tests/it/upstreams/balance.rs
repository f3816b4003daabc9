//! Load balancing between servers.

use std::thread;

use super::{shares, upstream};
use crate::support::{Gate, Gateway, Origin, Request, eventually};

#[test]
fn servers_take_turns() {
    for balance in [
        "",
        "balance = \"round_robin\"",
        "balance = \"least_requests\"",
    ] {
        let (a, b) = (Origin::ok(), Origin::ok());
        let gateway = Gateway::with(&upstream(&[&a, &b], balance)).start();
        assert_eq!(gateway.statuses(&Request::get("/"), 10), [200; 10]);
        assert_eq!(shares(&[&a, &b]), [5, 5], "{balance}");
        let healthy = r#"tidegate_upstream_healthy{upstream="origin"}"#;
        gateway.wait_for_metric(healthy, 2.0);
    }
}

#[test]
fn a_server_that_is_slow_gets_fewer_requests() {
    let gate = Gate::default();
    let slow = Origin::gated(&gate);
    let fast = Origin::ok();
    let least = upstream(&[&slow, &fast], "balance = \"least_requests\"");
    let gateway = Gateway::with(&least.replace("workers = 1", "workers = 2")).start();
    // of two equal servers, the slow one gets one request, which hangs, or both
    let hanging: Vec<_> = (0..2)
        .map(|_| {
            let mut client = gateway.connect();
            thread::spawn(move || client.send(&Request::get("/")).status)
        })
        .collect();
    slow.wait_for_requests(1);
    // while the fast one has as many in flight, either may get the next
    eventually("only the slow one to have requests in flight", || {
        let (held, done) = (slow.requests().len(), fast.requests().len());
        let in_flight = gateway.metric("tidegate_in_flight");
        let is_calm = held + done == 2 && in_flight < held as f64 + 0.5;
        is_calm
            .then_some(())
            .ok_or_else(|| format!("{held}, {done}, {in_flight}"))
    });
    assert_eq!(gateway.statuses(&Request::get("/"), 50), [200; 50]);
    assert!(
        slow.requests().len() <= 2,
        "the rest went to the other, whichever worker sent it"
    );
    gate.open();
    for hanging in hanging {
        assert_eq!(hanging.join().expect("a client's thread"), 200);
    }
}

#[test]
fn a_hash_sends_a_client_to_one_server_and_clients_to_all() {
    let trusting = "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n[[user]]\nfrom = \"header\"\nheader = \"x-user-id\"\n";
    for (balance, field) in [("hash:ip", "x-forwarded-for"), ("hash:user", "x-user-id")] {
        let (a, b, c) = (Origin::ok(), Origin::ok(), Origin::ok());
        let origins = [&a, &b, &c];
        let keys = format!("balance = {balance:?}\n{trusting}");
        let gateway = Gateway::with(&upstream(&origins, &keys)).start();
        let mut client = gateway.connect();
        for n in 0..30 {
            let request = Request::get("/").header(field, &format!("192.0.2.{n}"));
            let before = shares(&origins);
            for _ in 0..3 {
                assert_eq!(client.send(&request).status, 200);
            }
            let after = shares(&origins);
            let grown: Vec<usize> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
            assert!(
                grown.contains(&3),
                "{balance}: client {n} went to {grown:?}"
            );
        }
        let all = shares(&origins);
        assert!(all.iter().all(|share| *share >= 9), "{balance}: {all:?}");
    }
}

#[test]
fn the_built_in_server_may_be_one_of_several() {
    let origin = Origin::ok();
    let toml = upstream(&[&origin], "").replace("servers = [", "servers = [\"builtin:echo\", ");
    let gateway = Gateway::with(&toml).start();
    let mut client = gateway.connect();
    let texts: Vec<String> = (0..4)
        .map(|_| client.send(&Request::post("/", "hi")).text())
        .collect();
    assert_eq!(
        texts.iter().filter(|text| *text == "ok").count(),
        2,
        "{texts:?}"
    );
    assert_eq!(
        texts
            .iter()
            .filter(|text| text.ends_with("\r\n\r\nhi"))
            .count(),
        2,
        "{texts:?}"
    );
}
