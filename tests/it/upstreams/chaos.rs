//! Chaos: an upstream under load whose servers are killed, paused, silent, resetting, trickling,
//! truncating or sending garbage. No panic, correct statuses, and failover to the other servers.
//! Afterwards all resources are back at their initial level: descriptors, connections, tunnels,
//! requests in flight and at servers, and every slot of a `concurrency` limit. Every task of the
//! gateway belongs to a connection or request, so no task leaks either.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::SeqCst},
    },
    thread,
};

use super::upstream;
use crate::support::{Gate, Gateway, Origin, Request, http2, wait::eventually};

const WELL: u8 = 0;
const SILENT: u8 = 1;
const RESETTING: u8 = 2;
const TRICKLING: u8 = 3;
const GARBAGE: u8 = 4;
const CUTTING: u8 = 5;
const HALF_WAY: u8 = 6;

/// An origin whose failure mode can be changed at run time.
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
            HALF_WAY => {
                exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")?;
                recovered.wait();
                exchange.write(b"ok")
            }
            CUTTING => {
                exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nxx")?;
                exchange.close()
            }
            _ => exchange.respond(200, &[], b"ok"),
        }
    });
    (origin, mood)
}

/// A good server on a loaded machine answers within the timeout.
const IMPATIENT: &str = "response_timeout = \"1s\"\nconnect_timeout = \"2s\"\nidle_timeout = \"1s\"\n[upstream.origin.outlier]\nfailures = 3\neject_for = \"500ms\"\n";

/// More than the load of a test, including requests whose slots stay held while a silent server may
/// still work.
const SLOTS: usize = 160;

fn slots() -> String {
    format!(
        "[limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = {SLOTS}\n[gateway]\nlimits = [\"slots\"]\n"
    )
}

/// Statuses of `each` requests from four clients each, and of as many over one HTTP/2 connection;
/// `None` for an incomplete response.
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
    let over_http2 = http2::send_all(gateway.address(), &vec![Request::get("/"); each]);
    let over_http2 = over_http2
        .into_iter()
        .map(|answer| answer.ok().map(|response| response.status));
    let statuses = clients
        .into_iter()
        .map(|client| client.join().expect("a client's thread"));
    statuses.flatten().chain(over_http2).collect()
}

#[cfg(target_os = "linux")]
fn descriptors(gateway: &Gateway) -> usize {
    let path = format!("/proc/{}/fd", gateway.pid());
    std::fs::read_dir(path)
        .expect("a running child has descriptors")
        .count()
}

/// Waits until nothing is in flight and no connection is open on either side: idle ones are swept.
fn quiet(gateway: &Gateway, descriptors_at_most: usize) {
    for gauge in [
        "tidegate_in_flight".to_owned(),
        "tidegate_upgraded_connections".to_owned(),
        format!("tidegate_connections{{listener=\"{}\"}}", gateway.address()),
    ] {
        gateway.wait_for_metric(&gauge, 0.0);
    }
    eventually(
        "no more descriptors than in the beginning",
        || match descriptors(gateway) {
            now if now <= descriptors_at_most => Ok(()),
            now => Err(format!("{now}, and {descriptors_at_most} before")),
        },
    );
    assert_eq!(gateway.metric("tidegate_panics_total"), 0.0);
}

#[test]
fn one_bad_server_of_three_costs_few_requests_and_nothing_is_leaked() {
    let recovered = Gate::default();
    let (bad, mood) = moody(recovered.clone());
    let half_way = Gate::default();
    let (two, mood_of_two) = moody(half_way.clone());
    let (three, mood_of_three) = moody(half_way.clone());
    let toml = upstream(&[&bad, &two, &three], IMPATIENT).replace("workers = 1", "workers = 2");
    let gateway = Gateway::with(&(slots() + &toml)).start();
    let _ = gateway.metrics();
    let before = descriptors(&gateway);
    assert!(load(&gateway, 30).iter().all(|status| *status == Some(200)));
    quiet(&gateway, before);

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
        // a truncated body ejects no server, as it follows a head; of the other failures, some are
        // in flight before the ejection, and each trial adds one
        let most = if bad_mood == CUTTING { 150 } else { 75 };
        assert!(expected <= most, "mood {bad_mood}: {statuses:?}");
        mood.store(WELL, SeqCst);
        all_in_service(&gateway, 3.0);
    }
    bad.kill();
    assert!(
        load(&gateway, 50).iter().all(|status| *status == Some(200)),
        "a refused connection costs no request"
    );
    bad.revive();
    recovered.open();
    quiet(&gateway, before);

    all_in_service(&gateway, 3.0);
    bad.kill();
    mood_of_two.store(HALF_WAY, SeqCst);
    mood_of_three.store(HALF_WAY, SeqCst);
    every_slot_is_back(&gateway, &half_way);
    quiet(&gateway, before);
}

fn all_in_service(gateway: &Gateway, servers: f64) {
    eventually("all in service", || {
        let _ = load(gateway, 5);
        match gateway.metric(r#"tidegate_upstream_healthy{upstream="origin"}"#) {
            healthy if healthy > servers - 0.5 => Ok(()),
            healthy => Err(healthy.to_string()),
        }
    });
}

/// Takes all slots at once, with requests that wait for the gate in the middle of their responses.
fn every_slot_is_back(gateway: &Gateway, half_way: &Gate) {
    let address = gateway.address();
    let holders: Vec<_> = (0..2)
        .map(|_| {
            let requests = vec![Request::get("/"); SLOTS / 2];
            thread::spawn(move || http2::send_all(address, &requests))
        })
        .collect();
    gateway.wait_for_metric("tidegate_in_flight", SLOTS as f64);
    assert_eq!(
        gateway.get("/").status,
        429,
        "one more than there are slots"
    );
    half_way.open();
    for holder in holders {
        for answer in holder.join().expect("a client's thread") {
            assert_eq!(answer.expect("a whole answer").status, 200);
        }
    }
}

/// The only server is a separate process, which signals pause and kill.
#[test]
fn a_server_that_is_paused_and_killed_costs_its_own_requests_and_nothing_is_leaked() {
    let mut server = Gateway::with("").start();
    let gateway = Gateway::with(&format!(
        "{}[server]\nworkers = 2\n[upstream.origin]\nservers = [\"{{origin}}\"]\nretries = 0\n{IMPATIENT}",
        slots()
    ))
    .upstream_at(&format!("http://{}", server.address()))
    .start();
    let _ = gateway.metrics();
    let before = descriptors(&gateway);
    assert!(load(&gateway, 20).iter().all(|status| *status == Some(200)));

    server.signal("STOP");
    eventually("every thread of it to stand still", || {
        let states = thread_states(server.pid());
        let is_still = states.iter().all(|state| state == "T");
        is_still.then_some(()).ok_or(format!("{states:?}"))
    });
    let statuses = load(&gateway, 10);
    assert!(statuses.iter().all(|s| *s == Some(504)), "{statuses:?}");
    server.signal("CONT");
    eventually("it is itself again", || {
        let statuses = load(&gateway, 5);
        let well = statuses.iter().all(|status| *status == Some(200));
        well.then_some(()).ok_or(format!("{statuses:?}"))
    });

    server.signal("KILL");
    server.wait();
    let statuses = load(&gateway, 20);
    let is_refusal = |status: &Option<u16>| matches!(status, Some(502 | 503));
    assert!(statuses.iter().all(is_refusal), "{statuses:?}");
    quiet(&gateway, before);
}

/// Thread states; `T` is stopped by a signal (proc(5): the third field, after a name in
/// parentheses).
fn thread_states(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let state = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit(") ").next().unwrap_or_default();
        fields.chars().take(1).collect()
    };
    tasks.flatten().map(state).collect()
}
