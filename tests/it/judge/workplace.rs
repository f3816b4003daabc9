//! An origin that works on each request for a while, and records the start and end of the work.

use std::{
    io,
    net::{SocketAddr, TcpListener as Listener},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

use super::clients::Clock;
use crate::support::{
    judge::{Time, slots::AtWork},
    random::Random,
    wait::{lock, time_passes_in_task},
};

/// Working time per request in milliseconds: minimum and maximum.
pub const WORKS_MS: (i64, i64) = (10, 150);

/// The number of a limit, and a request to which it applied.
type Done = (usize, AtWork);

/// Runs until dropped.
pub struct Workplace {
    address: SocketAddr,
    done: Arc<Mutex<Vec<Done>>>,
    _stop: oneshot::Sender<()>,
}

impl Workplace {
    pub fn start(clock: &Arc<Clock>, seed: u64) -> Workplace {
        let listener = Listener::bind("127.0.0.1:0").expect("a free port on loopback");
        let address = listener.local_addr().expect("a bound listener");
        let done = Arc::<Mutex<Vec<Done>>>::default();
        let (stop, stopped) = oneshot::channel::<()>();
        let (clock, written) = (Arc::clone(clock), Arc::clone(&done));
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                listener.set_nonblocking(true).expect("a socket");
                let listener = TcpListener::from_std(listener).expect("a socket");
                let mut random = Random::new(seed);
                let accept = async {
                    while let Ok((stream, _)) = listener.accept().await {
                        let (clock, done) = (Arc::clone(&clock), Arc::clone(&written));
                        let random = Random::new(random.next());
                        tokio::spawn(async move {
                            // killing a gateway breaks its connections
                            let _ = serve(stream, &clock, random, &done).await;
                        });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
            });
        });
        Workplace {
            address,
            done,
            _stop: stop,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The recorded work for a limit.
    pub fn of(&self, limit: usize) -> Vec<AtWork> {
        let done = lock(&self.done);
        let own = done.iter().filter(|done| done.0 == limit);
        own.map(|done| done.1).collect()
    }
}

async fn serve(
    mut stream: TcpStream,
    clock: &Clock,
    mut random: Random,
    done: &Mutex<Vec<Done>>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        head.extend_from_slice(&buffer[..length]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let begun: Time = clock.now();
        let text = String::from_utf8_lossy(&head).into_owned();
        head.clear();
        let works = random.within(WORKS_MS.0, WORKS_MS.1).unsigned_abs();
        time_passes_in_task(Duration::from_millis(works), "the origin works").await;
        if let Some((limit, slots)) = asked(&text) {
            lock(done).push((limit, (begun, clock.now(), slots)));
        }
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        stream.write_all(answer).await?;
    }
}

/// The limit and the cost in `GET /c7/k3 HTTP/1.1`.
fn asked(head: &str) -> Option<(usize, u64)> {
    let path = head.split(' ').nth(1)?;
    let (limit, cost) = path.strip_prefix("/c")?.split_once("/k")?;
    Some((limit.parse().ok()?, cost.parse().ok()?))
}
