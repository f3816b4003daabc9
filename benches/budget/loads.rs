//! The cost and accuracy of leases in normal operation, compared with a call for every request.

use redis::Value;

use crate::{
    gateway::{Limit, at},
    load::{Run, Told},
    support::redis::Redis,
    verdict::{
        Bound::{AtLeast, AtMost},
        Verdicts,
    },
};

/// The cost of a run for Redis.
struct Cost {
    /// Calls per request.
    calls: f64,
    /// CPU per request, in µs.
    micros: f64,
}

/// Seconds of CPU and script calls so far.
pub fn used(redis: &Redis) -> (f64, f64) {
    let info: String = redis.run(&["INFO", "everything"]);
    let after = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<f64>().ok());
    let cpu = ["used_cpu_user:", "used_cpu_sys:"].map(|name| number(after(name)).unwrap_or(0.0));
    let calls = after("cmdstat_evalsha:calls=").and_then(|rest| rest.split(',').next());
    (cpu.iter().sum(), number(calls).unwrap_or(0.0))
}

fn measured(redis: &Redis, run: Run) -> (Told, Cost) {
    let (cpu, calls) = used(redis);
    let told = run.go(&at(&redis.url()), |_| {});
    let (cpu_now, calls_now) = used(redis);
    let asked = told.asked();
    let cost = Cost {
        calls: (calls_now - calls) / asked,
        micros: (cpu_now - cpu) * 1e6 / asked,
    };
    println!(
        "{:<7} {:>4.1}x  {asked:>7} requests  {:>6} admitted  {:.4} calls a request  {:>4.1} % waited  {:>6.3} us of Redis a request  {} decided without Redis, clients woke up to {:.0} ms late",
        if run.limit.ahead { "lease" } else { "strict" },
        run.load,
        told.admitted(),
        cost.calls,
        100.0 * told.waited() / asked,
        cost.micros,
        told.alone(),
        told.late * 1e3,
    );
    redis.run::<Value>(&["FLUSHALL"]);
    (told, cost)
}

/// Runs the same requests with and without leases.
fn beside_strict(redis: &Redis, run: Run) -> (Told, Cost, f64) {
    let (told, cost) = measured(redis, run);
    let limit = run.limit.strict();
    let (strict, strict_cost) = measured(redis, Run { limit, ..run });
    println!(
        "               {:.1} % of what strict admits; {:.1} us of Redis a request, strict {:.1}",
        100.0 * told.admitted() / strict.admitted(),
        cost.micros,
        strict_cost.micros
    );
    let share = 100.0 * told.admitted() / strict.admitted();
    (told, cost, share)
}

fn run(gateways: usize, keys: u64, per_second: u64, load: f64) -> Run {
    Run {
        gateways,
        keys,
        limit: Limit::per_second(per_second),
        load,
        seconds: 10,
        deaths: None,
    }
}

/// Item 2.
pub fn four(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    println!("4 gateways, 10 keys of 1000/s, burst of one second, 10 s");
    for (load, most) in [(0.5, 0.03), (1.2, 0.07), (3.0, 0.04)] {
        let run = run(4, 10, 1_000, load);
        let (told, cost, share) = beside_strict(&redis, run);
        let of = |what: &str| format!("4 gateways, 10 keys of 1000/s, {load} x: {what}");
        let beyond = told.beyond(&run.limit, 0.0..f64::MAX);
        verdicts.add(2, of("beyond"), beyond, AtMost(0.0));
        verdicts.add(2, of("% of strict"), share, AtLeast(97.5));
        verdicts.add(2, of("calls a request"), cost.calls, AtMost(most));
    }
}

/// Item 3.
pub fn eight(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    println!("8 gateways, 50 keys of 100/s, burst of one second, 10 s");
    for (load, most, waits) in [(0.8, 0.36, 4.0), (1.2, 0.70, 32.0), (5.0, 0.52, 30.0)] {
        let run = run(8, 50, 100, load);
        let (told, cost, share) = beside_strict(&redis, run);
        let of = |what: &str| format!("8 gateways, 50 keys of 100/s, {load} x: {what}");
        let beyond = told.beyond(&run.limit, 0.0..f64::MAX);
        verdicts.add(3, of("beyond"), beyond, AtMost(0.0));
        if load < 1.0 {
            let refused = told.asked() - told.admitted();
            let exact = told.asked() - told.exact(&run.limit, 0.0..f64::MAX);
            verdicts.add(
                3,
                of("refused, and not by one bucket"),
                refused - exact,
                AtMost(0.0),
            );
        }
        verdicts.add(3, of("calls a request"), cost.calls, AtMost(most));
        let waited = 100.0 * told.waited() / told.asked();
        verdicts.add(3, of("% waited"), waited, AtMost(waits));
        println!("               {share:.1} % of what strict admits");
        when_they_waited(&told);
    }
}

fn when_they_waited(told: &Told) {
    let part = |second: u32| {
        let came = |request: &&crate::load::Request| request.came as u32 == second;
        let all = told.requests.iter().filter(came);
        let waited = all
            .clone()
            .filter(|request| request.decision.waited)
            .count();
        format!("{:.1}", 100.0 * waited as f64 / all.count().max(1) as f64)
    };
    let parts: Vec<String> = (0..10).map(part).collect();
    println!("               % waited by second: {}", parts.join(" "));
}

/// Item 4: few hot keys below their limit.
pub fn hot(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    println!(
        "2 gateways, 10 keys of 20000/s: 160000 requests/s with leases, 16000 asked one by one"
    );
    let (_, lease) = measured(&redis, run(2, 10, 20_000, 0.8));
    let few = run(2, 10, 20_000, 0.08);
    let limit = few.limit.strict();
    let (_, strict) = measured(&redis, Run { limit, ..few });
    let of = "160,000 requests/s over 10 keys: strict's CPU in Redis, times less";
    verdicts.add(4, of, strict.micros / lease.micros, AtLeast(50.0));
}
