//! What a shared limit costs: a decision with tokens in hand (time, allocations), what a call costs Redis, and how many calls there
//! are at several loads, beside asking for every request. A judge says how many requests were admitted that one bucket would not
//! have. Starts a redis-server of its own; prints tables.
//!
//! `cargo bench --bench budget`, or `-- hand`, `script`, `hot`, `four`, `eight`, `away` for one of them

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::{Cell, RefCell},
    net::TcpListener,
    pin::pin,
    process::{Child, Command, Stdio},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use tidegate::{
    budget::{
        self, Budget, Claim, KeeperThread, Name, Server, Settings, SharedLimit, Target, WhenDown,
        lease::{Algorithm, Terms},
    },
    limit::{Key, Store},
    telemetry::Metrics,
};
use tokio::{runtime::LocalOptions, time::Instant};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[expect(
    unsafe_code,
    reason = "an allocator is unsafe by nature; this one only counts"
)]
// SAFETY: every call is passed on unchanged
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A server that ends with the bench.
struct Redis {
    child: Child,
    url: String,
}

impl Redis {
    fn start() -> Redis {
        let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let port = socket.local_addr().expect("it is bound").port();
        drop(socket);
        let child = Command::new("redis-server")
            .args([
                "--port",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let url = format!("redis://127.0.0.1:{port}");
        let client = redis::Client::open(url.clone()).expect("a URL");
        while client.get_connection().is_err() {
            thread::yield_now();
        }
        Redis { child, url }
    }

    /// Seconds of CPU, and scripts run, so far.
    fn used(&self) -> (f64, u64) {
        let client = redis::Client::open(self.url.clone()).expect("a URL");
        let mut connection = client.get_connection().expect("it answers");
        let info: String = redis::cmd("INFO")
            .arg("everything")
            .query(&mut connection)
            .expect("it answers");
        let after = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let number = |name: &str| {
            after(name)
                .and_then(|text| text.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        let calls =
            after("cmdstat_evalsha:calls=").and_then(|rest| rest.split(',').next()?.parse().ok());
        (
            number("used_cpu_user:") + number("used_cpu_sys:"),
            calls.unwrap_or(0),
        )
    }

    fn command(&self, words: &[&str]) {
        let client = redis::Client::open(self.url.clone()).expect("a URL");
        let mut connection = client.get_connection().expect("it answers");
        let mut command = redis::cmd(words[0]);
        command
            .arg(&words[1..])
            .exec(&mut connection)
            .expect("it answers");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One gateway's part: what workers decide with, and the thread behind it.
struct Gateway {
    budget: Budget,
    keeper: KeeperThread,
    limit: Arc<SharedLimit>,
    store: Store,
    epoch: Instant,
}

impl Gateway {
    fn start(url: &str, per_second: u64, ahead: bool) -> Gateway {
        let metrics = Metrics::install();
        let second = Duration::from_secs(1);
        let terms = Terms::new(Algorithm::Bucket, per_second, second, per_second, ahead);
        let when_down = WhenDown::Local { fraction: 0.5 };
        let lease = metrics.lease("bench", "local");
        let limit = Arc::new(SharedLimit::new("bench", vec![terms], when_down, 0, lease));
        let settings = Settings {
            target: Target::One(Server::parse(url).expect("a URL")),
            key_prefix: format!("bench-{per_second}-{ahead}"),
            budget: Duration::from_millis(50),
            connect_timeout: second,
            region_share: 1.0,
        };
        let epoch = Instant::now();
        let counters = metrics.budget(&budget::FAILURES);
        let limits = [Arc::clone(&limit)];
        let nobody = budget::Reader::new(|_, _| Vec::new());
        let (budget, keeper) =
            budget::start(&settings, 100_000, &limits, epoch, counters, nobody).expect("a thread");
        Gateway {
            budget,
            keeper,
            limit,
            store: Store::new(1),
            epoch,
        }
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Whether a request with this key is admitted; whether it had to wait.
    async fn decide(&self, key: u64, waited: &Cell<u64>) -> bool {
        let claims = [Claim {
            limit: &self.limit,
            tier: 0,
            key: Some(Key(
                u128::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_0C65_1B8D_1E2B)
            )),
            cost: 1,
        }];
        let name = |_| Name(u128::from(key).to_le_bytes());
        let mut decision = pin!(
            self.budget
                .admit(self.now_ns(), &self.store, &[], &claims, name)
        );
        let first = decision
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        let decided = match first {
            Poll::Ready(decided) => decided,
            Poll::Pending => {
                waited.set(waited.get() + 1);
                decision.await
            }
        };
        decided.is_ok_and(|decided| decided.shared.admitted())
    }
}

/// Decisions with tokens in hand, on one thread.
fn in_hand(redis: &Redis) {
    const DECISIONS: u64 = 5_000_000;
    let gateway = Gateway::start(&redis.url, 100_000_000, true);
    let runtime = runtime();
    runtime.block_on(async {
        let waited = Cell::new(0);
        // until it holds enough
        for _ in 0..DECISIONS {
            gateway.decide(1, &waited).await;
        }
        let (_, calls) = redis.used();
        waited.set(0);
        let (begun, allocated) = (Instant::now(), ALLOCATIONS.load(Relaxed));
        let mut admitted = 0_u64;
        for _ in 0..DECISIONS {
            admitted += u64::from(gateway.decide(1, &waited).await);
        }
        let (taken, allocated) = (begun.elapsed(), ALLOCATIONS.load(Relaxed) - allocated);
        let (_, more) = redis.used();
        println!(
            "tokens in hand: {:.0} ns a decision, {:.2} million a second; of {DECISIONS}: {admitted} admitted, {} waited, {} calls, {allocated} allocations (the keeper's included)",
            taken.as_nanos() as f64 / DECISIONS as f64,
            DECISIONS as f64 / taken.as_secs_f64() / 1e6,
            waited.get(),
            more - calls,
        );
    });
    gateway.keeper.close(Duration::from_secs(1));
}

/// Gateways that share keys, each key limited to so many a second with a burst of one second.
#[derive(Clone, Copy)]
struct Run {
    gateways: usize,
    keys: u64,
    per_second: u64,
    /// Multiples of the limit that arrive, over all gateways.
    load: f64,
    ahead: bool,
}

const SECONDS: u64 = 10;

/// What clients were told.
#[derive(Default)]
struct Told {
    asked: u64,
    waited: u64,
    /// Which key, and when.
    admitted: Vec<(u64, Duration)>,
    slowest: Duration,
}

/// Runs it, and what became of all requests.
fn all_arrive(redis: &Redis, run: Run) -> Told {
    let rate = run.load * (run.per_second * run.keys) as f64 / run.gateways as f64;
    let begun = Instant::now();
    let running: Vec<_> = (0..run.gateways)
        .map(|index| {
            let gateway = Gateway::start(&redis.url, run.per_second, run.ahead);
            thread::spawn(move || {
                let gateway = Rc::new(gateway);
                let told =
                    runtime().block_on(arrivals(&gateway, index as u64, run.keys, rate, begun));
                if let Some(gateway) = Rc::into_inner(gateway) {
                    gateway.keeper.close(Duration::from_secs(1));
                }
                told
            })
        })
        .collect();
    let mut all = Told::default();
    for gateway in running {
        let told = gateway.join().expect("a gateway");
        all.asked += told.asked;
        all.waited += told.waited;
        all.admitted.extend(told.admitted);
        all.slowest = all.slowest.max(told.slowest);
    }
    all
}

/// Runs it, prints a line, and returns how many were admitted and what Redis needed for a request, in µs.
fn at_load(redis: &Redis, run: Run, judged: bool) -> (f64, f64) {
    let (cpu, calls) = redis.used();
    let mut all = all_arrive(redis, run);
    let (cpu_now, calls_now) = redis.used();
    let (asked, admitted) = (all.asked as f64, all.admitted.len() as f64);
    let micros = (cpu_now - cpu) * 1e6 / asked;
    let beyond = match judged {
        true => beyond(&mut all.admitted, run.per_second as f64).to_string(),
        false => "-".to_owned(),
    };
    println!(
        "{:<7} {:>4.1}x  {asked:>8} requests  {admitted:>8} admitted  {beyond:>4} beyond  {:>7.4} calls a request  {:>5.1} % waited  {micros:>7.3} us of Redis a request",
        if run.ahead { "lease" } else { "strict" },
        run.load,
        (calls_now - calls) as f64 / asked,
        100.0 * all.waited as f64 / asked,
    );
    redis.command(&["FLUSHALL"]);
    (admitted, micros)
}

/// How many of these do not fit one bucket, to which they are shown in their order: later than they were decided by the time that a
/// reply and its request's turn take, so 20 ms and one token are forgiven.
fn beyond(admitted: &mut [(u64, Duration)], rate: f64) -> u64 {
    admitted.sort_unstable();
    let (mut key, mut level, mut at) = (u64::MAX, rate, 0.0);
    let mut beyond = 0;
    for &(of, when) in admitted.iter() {
        let now = when.as_secs_f64();
        if of != key {
            (key, level, at) = (of, rate, now);
        }
        level = (level + (now - at) * rate).min(rate);
        at = now;
        if level - 1.0 < -(1.0 + 0.02 * rate) {
            beyond += 1;
        } else {
            level -= 1.0;
        }
    }
    beyond
}

/// Requests at this rate, each a task of its own.
async fn arrivals(gateway: &Rc<Gateway>, seed: u64, keys: u64, rate: f64, epoch: Instant) -> Told {
    let waited = Rc::new(Cell::new(0));
    let admitted = Rc::new(RefCell::new(Vec::new()));
    let slowest = Rc::new(Cell::new(Duration::ZERO));
    let mut asked = 0;
    let mut tasks = tokio::task::JoinSet::new();
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    while begun.elapsed() < Duration::from_secs(SECONDS) {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * rate) as u64;
        while asked < due {
            asked += 1;
            let (gateway, waited, admitted) =
                (Rc::clone(gateway), Rc::clone(&waited), Rc::clone(&admitted));
            let key = (asked.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed) % keys + 2;
            let slowest = Rc::clone(&slowest);
            tasks.spawn_local(async move {
                let came = Instant::now();
                if gateway.decide(key, &waited).await {
                    admitted.borrow_mut().push((key, epoch.elapsed()));
                }
                slowest.set(slowest.get().max(came.elapsed()));
            });
        }
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    Told {
        asked,
        waited: waited.get(),
        admitted: admitted.take(),
        slowest: slowest.get(),
    }
}

/// The same load with leases and without, at several multiples of the limit.
fn beside_strict(redis: &Redis, gateways: usize, keys: u64, per_second: u64, loads: &[f64]) {
    println!(
        "{gateways} gateways, {keys} keys of {per_second}/s, burst of one second, {SECONDS} s"
    );
    for &load in loads {
        let run = |ahead| Run {
            gateways,
            keys,
            per_second,
            load,
            ahead,
        };
        let (lease, cpu) = at_load(redis, run(true), true);
        let (strict, strict_cpu) = at_load(redis, run(false), true);
        println!(
            "        {load:>4.1}x  {:.1} % of what strict admits, 1/{:.0} of its CPU in Redis",
            100.0 * lease / strict,
            strict_cpu / cpu
        );
    }
}

/// Redis stands still for the second half: what is admitted without it.
fn away(redis: &Redis) {
    println!(
        "4 gateways, 10 keys of 1000/s, Redis stopped from 5 s on, local_fraction 0.5, budget 50 ms"
    );
    for load in [0.5, 3.0] {
        let run = Run {
            gateways: 4,
            keys: 10,
            per_second: 1_000,
            load,
            ahead: true,
        };
        let pid = redis.child.id().to_string();
        let signal = move |name: &str| {
            let sent = Command::new("kill").args([name, &pid]).status();
            assert!(sent.is_ok_and(|status| status.success()));
        };
        let stopper = thread::spawn(move || {
            thread::park_timeout(Duration::from_secs(5));
            signal("-STOP");
            // the gateways try to hand back before they end
            thread::park_timeout(Duration::from_millis(SECONDS * 1_000 - 4_500));
            signal("-CONT");
        });
        let mut all = all_arrive(redis, run);
        stopper.join().expect("it ends");
        let without =
            |(_, when): &&(u64, Duration)| (6.0..SECONDS as f64).contains(&when.as_secs_f64());
        let admitted = all.admitted.iter().filter(without).count() as f64;
        let exact = load.min(1.0) * 10_000.0 * (SECONDS - 6) as f64;
        println!(
            "        {load:.1}x  {:.1} % of what one bucket admits, {} beyond, the slowest decision {:?}",
            100.0 * admitted / exact,
            beyond(&mut all.admitted, 1_000.0),
            all.slowest,
        );
        redis.command(&["FLUSHALL"]);
    }
}

/// Few hot keys far below their limit: what Redis does for a request.
fn hot_keys(redis: &Redis) {
    println!(
        "2 gateways, 10 keys of 20000/s, 160000 requests/s with leases, 16000 asked one by one"
    );
    let run = |load, ahead| Run {
        gateways: 2,
        keys: 10,
        per_second: 20_000,
        load,
        ahead,
    };
    let (_, lease) = at_load(redis, run(0.8, true), false);
    let (_, strict) = at_load(redis, run(0.08, false), false);
    println!("        1/{:.0} of the CPU in Redis", strict / lease);
}

/// What one call costs in Redis, beside INCR, and what a key takes.
fn script_cost(redis: &Redis) {
    const CALLS: usize = 20_000;
    let bucket = redis::Script::new(include_str!("../src/budget/bucket.lua"));
    let slots = redis::Script::new(include_str!("../src/budget/slots.lua"));
    let key = |number: usize| format!("tidegate:{{per_user:{:022}}}", number % 1_000);
    let call = |sha: &str, key: &str, arguments: &str| {
        let mut call = redis::cmd("EVALSHA");
        call.arg(sha).arg(1).arg(key);
        arguments
            .split(' ')
            .for_each(|argument| _ = call.arg(argument));
        call
    };
    let lease = "1000 0.001 1000000 1 40 0.5 41 812.5137 51234 1000000 987 0 1795281 38";
    let held = "0123456789abcdef 1000 3 1 10000000 1";
    for pipeline in [1, 16] {
        let mut incr = 0.0;
        for (name, make) in [
            (
                "INCR",
                &(|number: usize| {
                    let mut call = redis::cmd("INCR");
                    call.arg(format!("n:{}", number % 1_000));
                    call
                }) as &dyn Fn(usize) -> redis::Cmd,
            ),
            ("bucket, lease with a report", &|number: usize| {
                call(bucket.get_hash(), &key(number), lease)
            }),
            ("slots", &|number: usize| {
                call(slots.get_hash(), &format!("{}s", key(number)), held)
            }),
        ] {
            let client = redis::Client::open(redis.url.clone()).expect("a URL");
            let mut connection = client.get_connection().expect("it answers");
            for script in [&bucket, &slots] {
                script
                    .prepare_invoke()
                    .load(&mut connection)
                    .expect("it loads");
            }
            let mut best = f64::MAX;
            for _ in 0..3 {
                let (before, _) = redis.used();
                for batch in 0..CALLS / pipeline {
                    let mut pipe = redis::pipe();
                    (0..pipeline).for_each(|at| _ = pipe.add_command(make(batch * pipeline + at)));
                    pipe.exec(&mut connection).expect("it answers");
                }
                best = f64::min(best, (redis.used().0 - before) * 1e6 / CALLS as f64);
            }
            if name == "INCR" {
                incr = best;
            }
            println!(
                "pipeline {pipeline:>2}: {name:<28} {best:>6.2} us of Redis, {:.1} x INCR",
                best / incr
            );
        }
    }
    let packed = call(bucket.get_hash(), &key(1), lease)
        .get_packed_command()
        .len();
    let bytes = |key: &str| -> u64 {
        let client = redis::Client::open(redis.url.clone()).expect("a URL");
        let mut connection = client.get_connection().expect("it answers");
        redis::cmd("MEMORY")
            .arg("USAGE")
            .arg(key)
            .query(&mut connection)
            .expect("it is there")
    };
    println!(
        "a call of {packed} bytes; a bucket takes {} bytes, slots of one gateway {}",
        bytes(&key(1)),
        bytes(&format!("{}s", key(1))),
    );
    redis.command(&["FLUSHALL"]);
}

fn runtime() -> tokio::runtime::LocalRuntime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .expect("a runtime")
}

fn main() {
    let redis = Redis::start();
    // `cargo bench --bench budget -- hot` runs that part only
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|name| !name.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| part == name);
    if is_wanted("hand") {
        in_hand(&redis);
    }
    if is_wanted("script") {
        script_cost(&redis);
    }
    if is_wanted("hot") {
        hot_keys(&redis);
    }
    if is_wanted("four") {
        beside_strict(&redis, 4, 10, 1_000, &[0.5, 1.2, 3.0]);
    }
    if is_wanted("away") {
        away(&redis);
    }
    if is_wanted("eight") {
        beside_strict(&redis, 8, 50, 100, &[0.8, 1.2, 5.0]);
    }
}
