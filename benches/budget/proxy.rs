//! A proxy between gateways and a Redis: it loses some of their messages, or behaves like an
//! overloaded server.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tidegate::budget::RedisTarget;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf},
    runtime::LocalOptions,
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::gateway::at;

/// Runs until dropped.
pub struct Proxy {
    address: SocketAddr,
    line: Arc<Mutex<Line>>,
    _stop: oneshot::Sender<()>,
}

/// The single queue in which calls are served one after the other.
struct Line {
    /// Service time of each call.
    service: Duration,
    /// A reply later than this is useless.
    patience: Duration,
    busy_until: Instant,
    served: Served,
    /// Loses one of this many calls, and one of as many replies.
    lost: Option<u64>,
    random: u64,
}

/// Service statistics so far.
#[derive(Clone, Copy, Default)]
pub struct Served {
    pub calls: u64,
    /// Calls whose reply came in time.
    pub useful: u64,
    /// Time without calls to serve.
    pub idle: Duration,
}

/// The outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Served {
        at: Instant,
    },
    /// The connection breaks before the call or its reply arrives; other calls in flight are lost
    /// with it.
    CallLost,
    ReplyLost,
}

impl Proxy {
    /// Loses one of `one_of` calls, and one of as many replies.
    pub fn losing(to: SocketAddr, one_of: u64) -> Proxy {
        Proxy::start(to, Duration::ZERO, Duration::MAX, Some(one_of))
    }

    /// Serves one call at a time, each for `service`; callers wait for `patience`.
    pub fn slow(to: SocketAddr, service: Duration, patience: Duration) -> Proxy {
        Proxy::start(to, service, patience, None)
    }

    fn start(to: SocketAddr, service: Duration, patience: Duration, lost: Option<u64>) -> Proxy {
        let line = Arc::new(Mutex::new(Line {
            service,
            patience,
            busy_until: Instant::now(),
            served: Served::default(),
            lost,
            random: 0x9E37_79B9_7F4A_7C15,
        }));
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = socket.local_addr().expect("it is bound");
        let (stop, stopped) = oneshot::channel();
        let serving = Arc::clone(&line);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build_local(LocalOptions::default())
                .expect("a runtime");
            runtime.block_on(async {
                socket.set_nonblocking(true).expect("a socket");
                let socket = TcpListener::from_std(socket).expect("a socket");
                let accept = async {
                    while let Ok((client, _)) = socket.accept().await {
                        let line = Arc::clone(&serving);
                        tokio::task::spawn_local(async move {
                            // broken connections are its purpose
                            let _ = carry(client, to, &line).await;
                        });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
            });
        });
        Proxy {
            address,
            line,
            _stop: stop,
        }
    }

    pub fn target(&self) -> RedisTarget {
        at(&format!("redis://{}", self.address))
    }

    pub fn served(&self) -> Served {
        lock(&self.line).served
    }

    /// Serves nothing for this long.
    pub fn hang(&self, time: Duration) {
        let mut line = lock(&self.line);
        line.busy_until = line.busy_until.max(Instant::now()) + time;
    }
}

impl Line {
    fn fate(&mut self, command: &[u8]) -> Fate {
        let now = Instant::now();
        if !command.windows(7).any(|word| word == b"EVALSHA") {
            return Fate::Served {
                at: now.max(self.busy_until),
            };
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        match self.lost.map(|one_of| self.random % one_of) {
            Some(0) => return Fate::CallLost,
            Some(1) => return Fate::ReplyLost,
            _ => {}
        }
        let begins = now.max(self.busy_until);
        self.served.idle += begins - self.busy_until;
        self.busy_until = begins + self.service;
        self.served.calls += 1;
        self.served.useful += u64::from(self.busy_until - now <= self.patience);
        Fate::Served {
            at: self.busy_until,
        }
    }
}

/// Forwards one connection, in both directions.
async fn carry(client: TcpStream, to: SocketAddr, line: &Mutex<Line>) -> io::Result<()> {
    client.set_nodelay(true)?;
    let server = TcpStream::connect(to).await?;
    server.set_nodelay(true)?;
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let back = tokio::task::spawn_local(async move {
        let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
    });
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(100_000);
    let forth = tokio::task::spawn_local(async move {
        while let Some((at, command)) = queued.recv().await {
            tokio::time::sleep_until(at).await;
            to_server.write_all(&command).await?;
        }
        // long enough for the last calls to be executed
        tokio::time::sleep(Duration::from_millis(50)).await;
        io::Result::Ok(())
    });
    let mut from_client = BufReader::new(from_client);
    while let Ok(command) = read_command(&mut from_client).await {
        let fate = lock(line).fate(&command);
        match fate {
            Fate::Served { at } => _ = queue.send((at, command)).await,
            Fate::CallLost => break,
            Fate::ReplyLost => {
                back.abort();
                _ = queue.send((Instant::now(), command)).await;
                break;
            }
        }
    }
    back.abort();
    drop((from_client, queue));
    let _ = forth.await;
    Ok(())
}

/// Reads one command in its wire form: an array of strings.
async fn read_command(from: &mut BufReader<OwnedReadHalf>) -> io::Result<Vec<u8>> {
    let mut command = Vec::new();
    for _ in 0..read_number(from, &mut command).await? {
        let length = read_number(from, &mut command).await?;
        let begins = command.len();
        command.resize(begins + length + 2, 0);
        from.read_exact(&mut command[begins..]).await?;
    }
    Ok(command)
}

async fn read_number(
    from: &mut BufReader<OwnedReadHalf>,
    command: &mut Vec<u8>,
) -> io::Result<usize> {
    let begins = command.len();
    from.read_until(b'\n', command).await?;
    let digits = command[begins..]
        .iter()
        .filter(|byte| byte.is_ascii_digit());
    let mut digits = digits.peekable();
    if digits.peek().is_none() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(digits.fold(0, |number, digit| number * 10 + usize::from(digit - b'0')))
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}
