//! Clients that record what they see: one thread, persistent connections, and one clock for all.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    task::LocalSet,
};

use crate::support::{
    judge::{Boundaries, Record, SECOND, Time, Verdict},
    wait::{lock, time_passes, time_passes_in_task},
};

/// The clock of all records: nanoseconds since its creation.
pub struct Clock {
    zero: Instant,
    /// How far Redis's wall clock is ahead: the smallest and the largest observed value.
    ahead: Mutex<(Time, Time)>,
}

impl Clock {
    pub fn start() -> Clock {
        let clock = Clock {
            zero: Instant::now(),
            ahead: Mutex::new((Time::MAX, Time::MIN)),
        };
        clock.look();
        clock
    }

    pub fn now(&self) -> Time {
        Time::try_from(self.zero.elapsed().as_nanos()).unwrap_or(Time::MAX)
    }

    /// Compares with the wall clock. The quickest of several reads is the most precise.
    pub fn look(&self) {
        let looks = (0..20).map(|_| {
            let before = self.now();
            let wall = SystemTime::now().duration_since(UNIX_EPOCH);
            let after = self.now();
            let wall = wall.map_or(0, |wall| wall.as_nanos());
            let wall = Time::try_from(wall).unwrap_or(Time::MAX);
            (wall - after, wall - before)
        });
        let sharpest = looks.min_by_key(|(least, most)| most - least);
        let (least, most) = sharpest.unwrap_or_default();
        let mut ahead = lock(&self.ahead);
        *ahead = (ahead.0.min(least), ahead.1.max(most));
    }

    /// The boundaries of Redis's windows.
    pub fn boundaries(&self, period: Time) -> Boundaries {
        let (least, most) = *lock(&self.ahead);
        Boundaries {
            earliest: (-most).rem_euclid(period),
            error: most - least,
        }
    }

    /// How far the two clocks may have drifted apart, plus the microsecond to which Redis rounds.
    pub fn slack(&self) -> Time {
        let (least, most) = *lock(&self.ahead);
        most - least + 2_000
    }
}

/// A scheduled request.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub at: Time,
    pub limit: usize,
    pub gateway: usize,
    pub cost: u64,
}

/// A client alone on its key: it spends the whole limit, and returns when it is told to.
#[derive(Clone, Debug)]
pub struct Lone {
    pub limit: usize,
    pub gateway: usize,
    pub costs: Vec<u64>,
    /// Pause between requests while they are admitted.
    pub pause: Time,
    pub until: Time,
}

/// The records of all clients, by limit.
pub type Histories = HashMap<usize, Vec<Record>>;

/// Most requests queued for the clients' thread.
const QUEUE: usize = 100_000;

/// Longest wait for an answer; later ones count as missing.
const PATIENCE: Duration = Duration::from_secs(8);

/// Sends the scheduled requests to these gateways, in order of time.
pub fn run(
    clock: &Arc<Clock>,
    gateways: &[SocketAddr],
    mut planned: Vec<Planned>,
    lone: Vec<Lone>,
) -> Histories {
    planned.sort_by_key(|planned| planned.at);
    let (queue, queued) = mpsc::channel(QUEUE);
    let shared = (Arc::clone(clock), gateways.to_vec());
    let clients = thread::spawn(move || answer_all(shared.0, shared.1, queued, lone));
    for planned in planned {
        let ahead = planned.at - clock.now();
        if ahead > 0 {
            time_passes(
                Duration::from_nanos(ahead.unsigned_abs()),
                "a request is sent on schedule",
            );
        }
        queue.blocking_send(planned).expect("the clients run");
    }
    drop(queue);
    clients.join().expect("the clients end")
}

/// The shared state of all tasks on the clients' thread.
struct Shared {
    clock: Arc<Clock>,
    gateways: Vec<SocketAddr>,
    idle: Vec<RefCell<Vec<TcpStream>>>,
    histories: RefCell<Histories>,
    under_way: Cell<usize>,
}

fn answer_all(
    clock: Arc<Clock>,
    gateways: Vec<SocketAddr>,
    mut queued: mpsc::Receiver<Planned>,
    lone: Vec<Lone>,
) -> Histories {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let shared = Rc::new(Shared {
        clock,
        idle: gateways.iter().map(|_| RefCell::default()).collect(),
        gateways,
        histories: RefCell::default(),
        under_way: Cell::new(0),
    });
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let lone: Vec<_> = lone
            .into_iter()
            .map(|lone| tokio::task::spawn_local(be_alone(Rc::clone(&shared), lone)))
            .collect();
        while let Some(planned) = queued.recv().await {
            let shared = Rc::clone(&shared);
            shared.under_way.set(shared.under_way.get() + 1);
            tokio::task::spawn_local(async move {
                ask(&shared, planned.limit, planned.gateway, planned.cost).await;
                shared.under_way.set(shared.under_way.get() - 1);
            });
        }
        for client in lone {
            client.await.expect("a client that is alone");
        }
        // each ends by itself: `PATIENCE`
        while shared.under_way.get() > 0 {
            time_passes_in_task(Duration::from_millis(5), "the next poll is due").await;
        }
    });
    shared.histories.take()
}

async fn be_alone(shared: Rc<Shared>, lone: Lone) {
    for turn in 0.. {
        let now = shared.clock.now();
        if now >= lone.until {
            return;
        }
        let cost = lone.costs[turn % lone.costs.len()];
        let record = ask(&shared, lone.limit, lone.gateway, cost).await;
        let told = record.and_then(|record| Some((record.end, record.retry_after?)));
        let wait = match told {
            // where the header is exact, allow a microsecond
            Some((end, seconds)) => end + i64::from(seconds) * SECOND - shared.clock.now(),
            None => lone.pause,
        };
        let wait = Duration::from_nanos(wait.max(0).unsigned_abs());
        time_passes_in_task(wait, "Retry-After passes").await;
    }
}

/// Sends one request and records the outcome. There is no record if the gateway is unreachable.
async fn ask(shared: &Shared, limit: usize, gateway: usize, cost: u64) -> Option<Record> {
    let kept = shared.idle[gateway].borrow_mut().pop();
    let mut stream = match kept {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(shared.gateways[gateway]).await.ok()?;
            let _ = stream.set_nodelay(true);
            stream
        }
    };
    let request = format!("GET /c{limit}/k{cost} HTTP/1.1\r\nHost: judge\r\nX-Key: one\r\n\r\n");
    let mut record = Record {
        gateway: u8::try_from(gateway).unwrap_or(u8::MAX),
        cost,
        start: shared.clock.now(),
        end: 0,
        verdict: Verdict::Neither,
        retry_after: None,
        remaining: None,
    };
    let answering = answer(shared, &mut stream, &request, &mut record);
    let answered = tokio::time::timeout(PATIENCE, answering).await;
    let answered = answered.is_ok_and(|answered| answered.is_ok());
    if answered {
        shared.idle[gateway].borrow_mut().push(stream);
    } else {
        record.end = record.end.max(shared.clock.now());
    }
    let mut histories = shared.histories.borrow_mut();
    histories.entry(limit).or_default().push(record);
    Some(record)
}

async fn answer(
    shared: &Shared,
    stream: &mut TcpStream,
    request: &str,
    record: &mut Record,
) -> io::Result<()> {
    stream.write_all(request.as_bytes()).await?;
    let (mut buffer, mut length) = ([0; 4096], 0);
    let head = loop {
        let more = stream.read(&mut buffer[length..]).await?;
        if more == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        length += more;
        let whole = buffer[..length]
            .windows(4)
            .position(|end| end == b"\r\n\r\n");
        if let Some(head) = whole {
            record.end = shared.clock.now();
            break head + 4;
        }
    };
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    let body = read_head(&text, record);
    let mut rest = body.saturating_sub(length - head);
    while rest > 0 {
        let most = rest.min(buffer.len());
        match stream.read(&mut buffer[..most]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => rest -= more,
        }
    }
    Ok(())
}

/// Parses the rate limit fields of a response head; returns the body length.
fn read_head(text: &str, record: &mut Record) -> usize {
    let mut length = 0;
    record.verdict = match text.get(9..12) {
        Some("200") => Verdict::Admitted,
        Some("429") => Verdict::Refused,
        _ => Verdict::Neither,
    };
    for line in text.lines() {
        let Some((name, value)) = line.split_once(": ") else {
            continue;
        };
        let number = |name: &str| {
            let mut items = value.split(';').filter_map(|item| item.split_once('='));
            items.find(|item| item.0 == name)?.1.parse().ok()
        };
        match name {
            "content-length" => length = value.parse().unwrap_or(0),
            "retry-after" => record.retry_after = value.parse().ok(),
            "ratelimit" => record.remaining = number("r"),
            _ => {}
        }
    }
    length
}
