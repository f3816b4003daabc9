//! A proxy that makes Redis seem far away: messages in both directions arrive in order, after
//! random delays.

use std::{
    io,
    net::{SocketAddr, TcpListener as Listener},
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{random::Random, wait::time_passes_in_task};

/// The range of the delay of one message in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    pub least: Duration,
    pub most: Duration,
}

impl Distance {
    fn some(&self, random: &mut Random) -> Duration {
        let spread = self.most.saturating_sub(self.least);
        self.least + spread.mul_f64(random.part())
    }
}

/// One proxy in front of Redis for each distance; stops on drop.
pub struct FarRedis {
    addresses: Vec<SocketAddr>,
    _stop: oneshot::Sender<()>,
}

/// The most messages in flight on one connection.
const UNDER_WAY: usize = 10_000;

impl FarRedis {
    pub fn start(to: SocketAddr, distances: &[Distance], seed: u64) -> FarRedis {
        let open = |_| Listener::bind("127.0.0.1:0").expect("a free port on loopback");
        let listeners: Vec<Listener> = distances.iter().map(open).collect();
        let bound = |listener: &Listener| listener.local_addr().expect("a bound listener");
        let addresses = listeners.iter().map(bound).collect();
        let (stop, stopped) = oneshot::channel::<()>();
        let ways: Vec<(Listener, Distance)> =
            listeners.into_iter().zip(distances.to_vec()).collect();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                for (number, (listener, distance)) in ways.into_iter().enumerate() {
                    listener.set_nonblocking(true).expect("a socket");
                    let listener = TcpListener::from_std(listener).expect("a socket");
                    tokio::spawn(accept(listener, to, distance, seed + number as u64));
                }
                let _ = stopped.await;
            });
        });
        FarRedis {
            addresses,
            _stop: stop,
        }
    }

    pub fn url(&self, way: usize) -> String {
        format!("redis://{}", self.addresses[way])
    }
}

async fn accept(listener: TcpListener, to: SocketAddr, distance: Distance, seed: u64) {
    let mut random = Random::new(seed);
    while let Ok((client, _)) = listener.accept().await {
        // the client sees an absent server as a closed connection
        let Ok(server) = TcpStream::connect(to).await else {
            continue;
        };
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let forth = Random::new(random.next());
        let back = Random::new(random.next());
        tokio::spawn(async move {
            // the end of one direction ends both
            tokio::select! {
                _ = carry(from_client, to_server, distance, forth) => {}
                _ = carry(from_server, to_client, distance, back) => {}
            }
        });
    }
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    distance: Distance,
    mut random: Random,
) -> io::Result<()> {
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY);
    let receive = async move {
        let (mut buffer, mut last) = (vec![0; 64 * 1024], Instant::now());
        loop {
            let length = from.read(&mut buffer).await?;
            if length == 0 {
                return io::Result::Ok(());
            }
            last = last.max(Instant::now() + distance.some(&mut random));
            let message = (last, buffer[..length].to_vec());
            if queue.send(message).await.is_err() {
                return Ok(());
            }
        }
    };
    let deliver = async move {
        while let Some((at, bytes)) = queued.recv().await {
            let ahead = at.saturating_duration_since(Instant::now());
            time_passes_in_task(ahead, "the message is on its way").await;
            to.write_all(&bytes).await?;
        }
        io::Result::Ok(())
    };
    let (received, delivered) = tokio::join!(receive, deliver);
    received.and(delivered)
}
