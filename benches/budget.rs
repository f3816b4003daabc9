//! What a shared limit costs: a decision with tokens in hand (time, allocations), and calls to Redis at several loads, beside asking
//! for every request. Starts a redis-server of its own; prints tables.
//!
//! `cargo bench --bench budget`

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
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
        let (budget, keeper) =
            budget::start(&settings, 100_000, &limits, epoch, counters).expect("a thread");
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

/// Four gateways, ten keys of 1000/s each, at a multiple of the limit.
fn at_load(redis: &Redis, ahead: bool, load: f64) {
    const GATEWAYS: usize = 4;
    const KEYS: u64 = 10;
    const PER_SECOND: u64 = 1_000;
    const SECONDS: u64 = 5;
    let (cpu, calls) = redis.used();
    let running: Vec<_> = (0..GATEWAYS)
        .map(|index| {
            let gateway = Gateway::start(&redis.url, PER_SECOND, ahead);
            thread::spawn(move || {
                let gateway = Rc::new(gateway);
                let counts = runtime().block_on(arrivals(
                    &gateway,
                    index as u64,
                    KEYS,
                    load * (PER_SECOND * KEYS) as f64 / GATEWAYS as f64,
                    SECONDS,
                ));
                if let Some(gateway) = Rc::into_inner(gateway) {
                    gateway.keeper.close(Duration::from_secs(1));
                }
                counts
            })
        })
        .collect();
    let mut total = [0_u64; 3];
    for gateway in running {
        let counts = gateway.join().expect("a gateway");
        total
            .iter_mut()
            .zip(counts)
            .for_each(|(total, count)| *total += count);
    }
    let (cpu_now, calls_now) = redis.used();
    let [asked, admitted, waited] = total.map(|count| count as f64);
    println!(
        "{:<7} {load:>4.1}x  {asked:>8} requests  {admitted:>7} admitted  {:>7.4} calls a request  {:>5.1} % waited  {:>7.2} us of Redis a request",
        if ahead { "lease" } else { "strict" },
        (calls_now - calls) as f64 / asked,
        100.0 * waited / asked,
        (cpu_now - cpu) * 1e6 / asked,
    );
    let client = redis::Client::open(redis.url.clone()).expect("a URL");
    let mut connection = client.get_connection().expect("it answers");
    redis::cmd("FLUSHALL")
        .exec(&mut connection)
        .expect("it answers");
}

/// Requests at this rate, each a task of its own: how many, how many were admitted, how many waited.
async fn arrivals(
    gateway: &Rc<Gateway>,
    seed: u64,
    keys: u64,
    rate: f64,
    seconds: u64,
) -> [u64; 3] {
    let waited = Rc::new(Cell::new(0));
    let admitted = Rc::new(Cell::new(0));
    let mut asked = 0;
    let mut tasks = tokio::task::JoinSet::new();
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    while begun.elapsed() < Duration::from_secs(seconds) {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * rate) as u64;
        while asked < due {
            asked += 1;
            let (gateway, waited, admitted) =
                (Rc::clone(gateway), Rc::clone(&waited), Rc::clone(&admitted));
            let key = (asked.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed) % keys + 2;
            tasks.spawn_local(async move {
                if gateway.decide(key, &waited).await {
                    admitted.set(admitted.get() + 1);
                }
            });
        }
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    [asked, admitted.get(), waited.get()]
}

fn runtime() -> tokio::runtime::LocalRuntime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .expect("a runtime")
}

fn main() {
    let redis = Redis::start();
    in_hand(&redis);
    for load in [0.5, 1.2, 3.0] {
        for ahead in [true, false] {
            at_load(&redis, ahead, load);
        }
    }
}
