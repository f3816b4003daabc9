//! Chaos: an upstream of three under load, one of whose servers is killed, silent, resetting or trickling. No panic, no
//! leak, right statuses, and the others take over.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::SeqCst},
    },
    thread,
};

use super::upstream;
use crate::support::{
    Gate, Gateway, Origin, Request,
    wait::{eventually, eventually_eq},
};

const WELL: u8 = 0;
const SILENT: u8 = 1;
const RESETTING: u8 = 2;
const TRICKLING: u8 = 3;
const GARBAGE: u8 = 4;
const CUTTING: u8 = 5;

/// An origin whose mood can be changed while it serves.
fn moody(recovered: Gate) -> (Origin, Arc<AtomicU8>) {
    let mood = Arc::new(AtomicU8::new(WELL));
    let now = Arc::clone(&mood);
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        match now.load(SeqCst) {
            SILENT => {
                recovered.wait();
                exchange.close()
            }
            RESETTING => exchange.reset(),
            TRICKLING => {
                let head = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n";
                let body = [b'x'; 40];
                for byte in head.iter().chain(&body) {
                    exchange.write(&[*byte])?;
                }
                Ok(())
            }
            GARBAGE => exchange.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n"),
            CUTTING => {
                exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nxx")?;
                exchange.close()
            }
            _ => exchange.respond(200, &[], b"ok"),
        }
    });
    (origin, mood)
}

const IMPATIENT: &str = "response_timeout = \"300ms\"\nconnect_timeout = \"2s\"\nbody_timeout = \"2s\"\n[upstream.origin.outlier]\nfailures = 3\neject_for = \"500ms\"\n";

/// The statuses of so many requests of each of four clients; `None` where there was no whole answer.
fn load(gateway: &Gateway, each: usize) -> Vec<Option<u16>> {
    let clients: Vec<_> = (0..4)
        .map(|n| {
            let mut client = gateway.connect();
            let address = gateway.address();
            thread::spawn(move || {
                let mut statuses = Vec::new();
                for turn in 0..each {
                    let request = match (n + turn) % 4 {
                        0 => Request::post("/", "a body"),
                        _ => Request::get("/"),
                    };
                    let answer = client.try_send(&request);
                    if answer.is_err() {
                        client = crate::support::Client::connect(address);
                    }
                    statuses.push(answer.ok().map(|response| response.status));
                }
                statuses
            })
        })
        .collect();
    let statuses = clients
        .into_iter()
        .map(|client| client.join().expect("a client's thread"));
    statuses.flatten().collect()
}

#[cfg(target_os = "linux")]
fn descriptors(gateway: &Gateway) -> usize {
    let path = format!("/proc/{}/fd", gateway.pid());
    std::fs::read_dir(path)
        .expect("a running child has descriptors")
        .count()
}

#[test]
fn one_bad_server_of_three_costs_few_requests_and_nothing_is_leaked() {
    let recovered = Gate::default();
    let (bad, mood) = moody(recovered.clone());
    let (two, three) = (Origin::ok(), Origin::ok());
    let toml = upstream(&[&bad, &two, &three], IMPATIENT).replace("workers = 1", "workers = 2");
    let gateway = Gateway::with(&toml.replace(
        "[upstream.origin]",
        "[upstream.origin]\nidle_timeout = \"1s\"",
    ))
    .start();
    assert!(load(&gateway, 50).iter().all(|status| *status == Some(200)));
    let quiet = || {
        // idle connections are swept, so what is left is what was there in the beginning
        gateway.wait_for_metric("tidegate_in_flight", 0.0);
        let connections = format!("tidegate_connections{{listener=\"{}\"}}", gateway.address());
        gateway.wait_for_metric(&connections, 0.0);
    };
    quiet();

    for bad_mood in [SILENT, RESETTING, TRICKLING, GARBAGE, CUTTING] {
        mood.store(bad_mood, SeqCst);
        let statuses = load(&gateway, 50);
        let count =
            |wanted: Option<u16>| statuses.iter().filter(|status| **status == wanted).count();
        let (good, cut) = (count(Some(200)), count(None));
        let expected = match bad_mood {
            SILENT => count(Some(504)),
            RESETTING | GARBAGE => count(Some(502)),
            CUTTING => cut,
            _ => 0,
        };
        assert_eq!(
            good + expected,
            statuses.len(),
            "mood {bad_mood}: {statuses:?}"
        );
        // a cut body ejects nobody, as it came with a head; of the rest a handful is seen before the ejection, and one
        // for each trial
        let most = if bad_mood == CUTTING { 100 } else { 40 };
        assert!(expected <= most, "mood {bad_mood}: {statuses:?}");
        mood.store(WELL, SeqCst);
        eventually("all three in service", || {
            let _ = load(&gateway, 5);
            match gateway.metric(r#"tidegate_upstream_healthy{upstream="origin"}"#) {
                healthy if healthy > 2.5 => Ok(()),
                healthy => Err(healthy.to_string()),
            }
        });
    }
    bad.kill();
    let _ = gateway.metrics();
    let before = descriptors(&gateway);
    assert!(
        load(&gateway, 50).iter().all(|status| *status == Some(200)),
        "a refused connection costs no request"
    );
    bad.revive();
    recovered.open();
    quiet();
    eventually(
        "no more descriptors than in the beginning",
        || match descriptors(&gateway) {
            now if now <= before => Ok(()),
            now => Err(format!("{now}, and {before} before")),
        },
    );
    eventually_eq("panics", 0, || {
        gateway.metric("tidegate_panics_total") as usize
    });
}
