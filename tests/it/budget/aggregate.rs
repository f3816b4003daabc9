//! Acceptance test for shared limits: under heavy overload the gateways together admit the limit,
//! and a client below its limit is never refused. `scripts/load enforce` measures the same with k6.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::support::{Client, Gateway, Redis, Request, wait::time_passes};

const RATE: f64 = 100.0;
const BURST: f64 = 50.0;

/// Three gateways with a limit per user, of this scope.
fn three(redis: &Redis, scope: &str) -> Vec<Gateway> {
    let toml = format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"per_user\"]\n\
         [limit.per_user]\nkey = [\"header:x-user\"]\nrate = \"{RATE}/s\"\nburst = {BURST}\nscope = \"{scope}\"\n",
        redis.url()
    );
    (0..3).map(|_| Gateway::with(&toml).start()).collect()
}

/// One user's requests and their outcome.
struct Asked {
    /// When each request was sent.
    sent: Vec<Duration>,
    admitted: f64,
    lasted: Duration,
}

impl Asked {
    /// Requests that one bucket would admit at these times.
    fn of_one_bucket(&self) -> f64 {
        let (mut tokens, mut before, mut admitted) = (BURST, Duration::ZERO, 0.0);
        for &now in &self.sent {
            tokens = BURST.min(tokens + (now - before).as_secs_f64() * RATE);
            before = now;
            if tokens >= 1.0 {
                tokens -= 1.0;
                admitted += 1.0;
            }
        }
        admitted
    }

    /// The limit over the duration of the run.
    fn limit(&self) -> f64 {
        RATE * self.lasted.as_secs_f64() + BURST
    }

    /// Whether at most the limit was admitted, and nearly all of it.
    fn is_exact(&self) -> bool {
        self.admitted <= self.limit() * 1.01 && self.admitted >= self.of_one_bucket() * 0.97
    }

    fn told(&self) -> String {
        format!(
            "{} of {} were admitted within {:?}; the limit is {:.0}, and one bucket admits {:.0}",
            self.admitted,
            self.sent.len(),
            self.lasted,
            self.limit(),
            self.of_one_bucket()
        )
    }
}

/// Sends requests to the gateways in turn, at this rate for this long. Requests start on schedule,
/// whether or not others have been answered, but never more than `CONNECTIONS` at once.
fn asks(user: &'static str, gateways: &[Gateway], per_second: u32, time: Duration) -> Running {
    const CONNECTIONS: usize = 8;
    let (begun, next) = (Instant::now(), Arc::new(AtomicU32::new(0)));
    let last = per_second * u32::try_from(time.as_secs()).expect("a few seconds");
    let clients = (0..CONNECTIONS)
        .map(|_| {
            let next = Arc::clone(&next);
            let mut clients: Vec<Client> = gateways.iter().map(Gateway::connect).collect();
            thread::spawn(move || {
                let request = Request::get("/").header("x-user", user);
                let mut answers = Vec::new();
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= last {
                        return answers;
                    }
                    let due = begun + Duration::from_secs(1) * number / per_second;
                    time_passes(
                        due.saturating_duration_since(Instant::now()),
                        "a request is sent on schedule",
                    );
                    let sent = begun.elapsed();
                    let turn = number as usize % clients.len();
                    answers.push((sent, clients[turn].send(&request).status));
                }
            })
        })
        .collect();
    Running { begun, clients }
}

struct Running {
    begun: Instant,
    clients: Vec<thread::JoinHandle<Vec<(Duration, u16)>>>,
}

impl Running {
    fn end(self) -> Asked {
        let answers = self
            .clients
            .into_iter()
            .flat_map(|client| client.join().expect("a client"));
        let mut answers: Vec<(Duration, u16)> = answers.collect();
        answers.sort_unstable();
        let other = answers
            .iter()
            .find(|(_, status)| ![200, 429].contains(status));
        assert_eq!(other, None);
        Asked {
            admitted: answers.iter().filter(|(_, status)| *status == 200).count() as f64,
            sent: answers.iter().map(|(sent, _)| *sent).collect(),
            lasted: self.begun.elapsed(),
        }
    }
}

#[test]
fn three_gateways_that_are_asked_for_three_times_a_limit_admit_the_limit_and_a_quiet_client_all_it_asks()
 {
    let redis = Redis::start();
    let gateways = three(&redis, "global");
    let time = Duration::from_secs(8);
    let noisy = asks("noisy", &gateways, 300, time);
    let quiet = asks("quiet", &gateways, 25, time);
    let (noisy, quiet) = (noisy.end(), quiet.end());
    for gateway in &gateways {
        assert!(gateway.metric("tidegate_redis_calls_total{outcome=\"ok\"}") > 0.0);
        assert_eq!(gateway.metric("tidegate_degraded"), 0.0);
    }
    println!("noisy: {}\nquiet: {}", noisy.told(), quiet.told());
    assert!(noisy.is_exact(), "{}", noisy.told());
    assert_eq!(quiet.admitted, quiet.sent.len() as f64, "{}", quiet.told());
}

#[test]
fn gateways_that_count_for_themselves_would_be_found_out() {
    let redis = Redis::start();
    let gateways = three(&redis, "local");
    let noisy = asks("noisy", &gateways, 300, Duration::from_secs(3)).end();
    assert!(!noisy.is_exact(), "{}", noisy.told());
}
