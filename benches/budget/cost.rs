//! The cost of one call for Redis, and the cost of a decision without a call.

use std::time::Instant;

use redis::Value;
use tokio::runtime::LocalOptions;

use crate::{
    counting,
    gateway::{Answer, Gateway, Limit, at},
    loads::used,
    support::redis::Redis,
    verdict::{Bound::AtMost, Verdicts},
};

/// Item 6: with local tokens, and with a remembered refusal.
pub fn hand(verdicts: &mut Verdicts) {
    const DECISIONS: u32 = 5_000_000;
    let redis = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .expect("a runtime");
    let plenty = Limit::per_second(100_000_000);
    let spent = Limit {
        amount: 1,
        period: std::time::Duration::from_secs(3_600),
        burst: 1,
        ..plenty.strict()
    };
    for (what, limit) in [("local tokens", plenty), ("a remembered refusal", spent)] {
        let gateway = Gateway::start(&at(&redis.url()), limit);
        runtime.block_on(async {
            // until it has enough tokens, or has been refused
            for _ in 0..DECISIONS {
                gateway.decide(1).await;
            }
            let (begun, mut allocated) = (Instant::now(), 0);
            let (mut waited, mut admitted) = (0_u32, 0_u32);
            for _ in 0..DECISIONS {
                let before = counting::allocations();
                let decision = gateway.decide(1).await;
                if decision.waited {
                    waited += 1;
                } else {
                    allocated += counting::allocations() - before;
                }
                admitted += u32::from(decision.answer == Answer::Admitted);
            }
            let taken = begun.elapsed().as_nanos() as f64 / f64::from(DECISIONS);
            println!(
                "{what}: {taken:.0} ns a decision; of {DECISIONS}, {admitted} were admitted, {waited} found no token and waited"
            );
            let what = format!("{what}: allocations");
            verdicts.add(6, what, allocated as f64, AtMost(0.0));
        });
        gateway.close();
        redis.run::<Value>(&["FLUSHALL"]);
    }
}

/// Item 5: the cost of a call compared with INCR, and the memory of a key.
pub fn script(verdicts: &mut Verdicts) {
    let redis = Redis::start();
    let client = redis::Client::open(redis.url()).expect("a URL");
    let mut connection = client.get_connection().expect("it answers");
    let mut load = |script: &str| -> String {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(script);
        load.query(&mut connection).expect("it loads")
    };
    let bucket = load(concat!(
        include_str!("../../src/budget/state.lua"),
        include_str!("../../src/budget/requests.lua"),
        include_str!("../../src/budget/bucket.lua")
    ));
    let slots = load(concat!(
        include_str!("../../src/budget/requests.lua"),
        include_str!("../../src/budget/slots.lua")
    ));
    let key = |number: usize| format!("tidegate:{{per_user:{:022}}}", number % 1_000);
    let lease = "1000 0.001 1000000 1 40 0.5 41 812.513 51234 1000000 987 0 1795281 38";
    let held = "0123456789abcdef 1000 3 1 10000000 1";
    let incr = |number: usize| {
        let mut call = redis::cmd("INCR");
        call.arg(format!("n:{}", number % 1_000));
        call
    };
    let of_bucket = |number: usize| call(&bucket, &key(number), lease);
    let of_slots = |number: usize| call(&slots, &format!("{}s", key(number)), held);
    for (pipeline, most) in [(1, 2.0), (16, 8.0)] {
        let mut micros = |make: &dyn Fn(usize) -> redis::Cmd| {
            least_micros(&redis, &mut connection, pipeline, make)
        };
        let base = micros(&incr);
        let (lease, held) = (micros(&of_bucket) / base, micros(&of_slots) / base);
        println!("pipeline {pipeline}: INCR {base:.2} us, a declaration of slots {held:.1} x");
        let what = format!("a lease with a report in pipelines of {pipeline}: INCRs");
        verdicts.add(5, what, lease, AtMost(most));
    }
    let bytes = |key: &str| -> f64 { redis.run(&["MEMORY", "USAGE", key]) };
    let reply: Vec<i64> = of_bucket(1).query(&mut connection).expect("it answers");
    // ":" and CRLF for each number, and the head of the list
    let numbers = reply.iter().map(|number| number.to_string().len() + 3);
    let travels = of_bucket(1).get_packed_command().len() + 4 + numbers.sum::<usize>();
    let name = key(1).len();
    println!("a call with a name of {name} bytes and its reply: {travels} bytes");
    verdicts.add(
        5,
        "bytes of a bucket in Redis",
        bytes(&key(1)),
        AtMost(200.0),
    );
    verdicts.add(
        5,
        "bytes of a call and its reply, name of 21 bytes",
        (travels + 21 - name) as f64,
        AtMost(300.0),
    );
    println!(
        "slots of one gateway take {} bytes",
        bytes(&format!("{}s", key(1)))
    );
}

fn call(sha: &str, key: &str, arguments: &str) -> redis::Cmd {
    let mut call = redis::cmd("EVALSHA");
    call.arg(sha).arg(1).arg(key);
    arguments
        .split(' ')
        .for_each(|argument| _ = call.arg(argument));
    call
}

/// Redis CPU per call: the minimum of some runs.
fn least_micros(
    redis: &Redis,
    connection: &mut redis::Connection,
    pipeline: usize,
    make: &dyn Fn(usize) -> redis::Cmd,
) -> f64 {
    const CALLS: usize = 60_000;
    let mut least = f64::MAX;
    for _ in 0..5 {
        let (before, _) = used(redis);
        for batch in 0..CALLS / pipeline {
            let mut pipe = redis::pipe();
            (0..pipeline).for_each(|at| _ = pipe.add_command(make(batch * pipeline + at)));
            pipe.exec(connection).expect("it answers");
        }
        least = f64::min(least, (used(redis).0 - before) * 1e6 / CALLS as f64);
    }
    least
}
