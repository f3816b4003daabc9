//! Bounds of the admin listener: slow clients cannot keep others out.
//!
//! A connection *waits* while its client is slow: until the request has arrived, and while the
//! client reads the response. It *works* while this process handles the request. Waiting
//! connections are cheap and many. At the bound, the oldest of the peer with the most connections
//! is closed. Work is bounded per kind of request, so that operators and forward-auth cannot starve
//! each other. A request takes its work permit only once it is complete. Operations and scrapes run
//! one at a time on their own thread, so probes never wait for them. Probes need no permit.
//!
//! ```text
//! accept ──waits──▶ head and body, its turn ──works (a permit)──▶ response ──waits──▶ read, closed
//!          └─ at the bound: the oldest of the peer with the most is closed ─┘
//! ```

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt as _;
use ipnet::IpNet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    net::TcpStream,
    sync::{Notify, Semaphore, SemaphorePermit},
    time::{self, Instant},
};

use crate::identity::Prefixes;

/// Most connections that wait for their clients: 512, fewer if file descriptors are scarce.
pub const WAITING_MAX: usize = 512;
/// The fraction of them that one peer may use, so that others find room without closing any.
const PER_PEER: (usize, usize) = (3, 4);
/// `/check` requests at work per waiting connection.
const CHECKS_PER_WAITING: usize = 2;
/// Most reloads at work.
const RELOADS_MAX: usize = 32;
/// Most bytes of request bodies held at once, over all connections.
const BODIES_MAX_BYTES: usize = 32 << 20;
/// Younger connections are not closed to make room: their requests may still be on the way.
const GRACE: Duration = Duration::from_millis(100);

/// The connections of the admin listener, and its work permits.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    waiting: Mutex<WaitingConnections>,
    /// A connection has ended or begun to work.
    left: Notify,
    waiting_max: usize,
    pub(super) checks: Semaphore,
    pub(super) reloads: Semaphore,
    /// One operation or scrape at a time; the others queue.
    turn: Semaphore,
    /// Of the connections whose clients have closed their side, one may queue.
    last: Semaphore,
    bodies: Semaphore,
}

/// The waiting connections, oldest first.
#[derive(Debug, Default)]
struct WaitingConnections {
    next: u64,
    by_age: BTreeMap<u64, WaitingConnection>,
    by_peer: HashMap<IpNet, usize>,
}

#[derive(Debug)]
struct WaitingConnection {
    peer: IpNet,
    since: Instant,
    close: Arc<Notify>,
}

impl ConnectionTable {
    pub(super) fn new(waiting_max: usize) -> ConnectionTable {
        let waiting_max = waiting_max.clamp(1, WAITING_MAX);
        ConnectionTable {
            waiting: Mutex::default(),
            left: Notify::new(),
            waiting_max,
            checks: Semaphore::new(waiting_max * CHECKS_PER_WAITING),
            reloads: Semaphore::new(RELOADS_MAX),
            turn: Semaphore::new(1),
            last: Semaphore::new(1),
            bodies: Semaphore::new(BODIES_MAX_BYTES),
        }
    }

    /// Admits a connection. At the bound, closes older ones, and calls `closes` for each. If all
    /// are young, waits up to 100 ms until one is not.
    pub(super) async fn enter(self: &Arc<Self>, ip: IpAddr, closes: impl Fn()) -> AdminConnection {
        let peer = Prefixes::default().aggregate(ip);
        loop {
            let left = self.left.notified();
            let oldest = self.table().oldest_in_the_way(peer, self.waiting_max);
            let youth = match oldest {
                None => break,
                Some((place, since)) => match GRACE.checked_sub(since.elapsed()) {
                    None => {
                        self.close(place);
                        closes();
                        continue;
                    }
                    Some(youth) => youth,
                },
            };
            tokio::select! {
                () = left => {}
                () = time::sleep(youth) => {}
            }
        }
        let connection = AdminConnection {
            table: Arc::clone(self),
            peer,
            place: Mutex::default(),
            close: Arc::default(),
            socket: OnceLock::new(),
        };
        connection.wait_for_client();
        connection
    }

    fn close(&self, place: u64) {
        let closed = self.table().remove(place);
        if let Some(closed) = closed {
            closed.close.notify_one();
        }
    }

    fn table(&self) -> MutexGuard<'_, WaitingConnections> {
        // no code panics with the lock held, so the table is consistent even if poisoned
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitingConnections {
    /// The connection to close before this peer may have another one.
    fn oldest_in_the_way(&self, peer: IpNet, most: usize) -> Option<(u64, Instant)> {
        let (part, whole) = PER_PEER;
        let own = self.by_peer.get(&peer).copied().unwrap_or_default();
        let peer = if own >= (most * part / whole).max(1) {
            peer
        } else if self.by_age.len() >= most {
            let (peer, _) = self.by_peer.iter().max_by_key(|(_, count)| **count)?;
            *peer
        } else {
            return None;
        };
        let mut by_age = self.by_age.iter();
        let (place, waiter) = by_age.find(|(_, waiter)| waiter.peer == peer)?;
        Some((*place, waiter.since))
    }

    fn insert(&mut self, peer: IpNet, close: &Arc<Notify>) -> u64 {
        let place = self.next;
        self.next += 1;
        *self.by_peer.entry(peer).or_default() += 1;
        let waiter = WaitingConnection {
            peer,
            since: Instant::now(),
            close: Arc::clone(close),
        };
        self.by_age.insert(place, waiter);
        place
    }

    fn remove(&mut self, place: u64) -> Option<WaitingConnection> {
        let waiter = self.by_age.remove(&place)?;
        if let Some(count) = self.by_peer.get_mut(&waiter.peer) {
            *count -= 1;
            if *count == 0 {
                self.by_peer.remove(&waiter.peer);
            }
        }
        Some(waiter)
    }
}

/// A connection, in the table as long as it waits.
#[derive(Debug)]
pub(super) struct AdminConnection {
    table: Arc<ConnectionTable>,
    peer: IpNet,
    /// Its key in the table; `None` while it works.
    place: Mutex<Option<u64>>,
    close: Arc<Notify>,
    /// A duplicate of its socket's descriptor.
    socket: OnceLock<OwnedFd>,
}

impl AdminConnection {
    /// Keeps a duplicate of the socket, to detect that the client closes it.
    pub(super) fn watch(&self, stream: &TcpStream) {
        if let Ok(socket) = stream.as_fd().try_clone_to_owned() {
            // set once, after accept
            let _ = self.socket.set(socket);
        }
    }

    /// Whether the client has closed the connection, or only its side (as `nc` does, which still
    /// reads the response).
    fn is_closed_by_client(&self) -> bool {
        let Some(socket) = self.socket.get() else {
            return false;
        };
        let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
        let at_once = Timespec::default();
        poll(&mut polled, Some(&at_once)).is_ok_and(|count| count > 0)
    }

    /// Resolves when this connection must make room.
    pub(super) async fn closed(&self) {
        self.close.notified().await;
    }

    /// Takes a permit for the request's work; the connection is not closed meanwhile. `None` at the
    /// bound.
    pub(super) fn work<'a>(&'a self, of: &'a Semaphore) -> Option<WorkPermit<'a>> {
        of.try_acquire().ok().map(|permit| self.begin(permit))
    }

    /// Runs blocking work on another thread, one request at a time in order of arrival, so that
    /// probes are not delayed. In the queue, the connection may still be closed to make room. A
    /// client that has closed its side has probably left, so at most one of those queues. `None` if
    /// the work did not complete.
    pub(super) async fn in_turn<T>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T>
    where
        T: Send + 'static,
    {
        let mut turn = self.table.turn.acquire().await.ok()?;
        let mut _last = None;
        if self.is_closed_by_client() {
            drop(turn);
            _last = Some(self.table.last.acquire().await.ok()?);
            turn = self.table.turn.acquire().await.ok()?;
        }
        let _permit = self.begin(turn);
        tokio::task::spawn_blocking(work).await.ok()
    }

    fn begin<'a>(&'a self, permit: SemaphorePermit<'a>) -> WorkPermit<'a> {
        self.leave();
        WorkPermit {
            connection: self,
            _permit: permit,
        }
    }

    /// Reads a whole body of up to `most` bytes. The connection waits for its client meanwhile.
    pub(super) async fn body<B>(&self, body: B, most: usize) -> Result<HeldBody<'_>, NoBody>
    where
        B: Body<Data = Bytes>,
    {
        let mut held = HeldBody {
            bytes: Vec::new(),
            permit: None,
        };
        let mut body = std::pin::pin!(body);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| NoBody::Broken)?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if held.bytes.len() + data.len() > most {
                return Err(NoBody::TooLong);
            }
            let count = u32::try_from(data.len()).map_err(|_| NoBody::TooLong)?;
            let bodies = &self.table.bodies;
            let permit = bodies.try_acquire_many(count).map_err(|_| NoBody::NoRoom)?;
            match &mut held.permit {
                Some(held) => held.merge(permit),
                None => held.permit = Some(permit),
            }
            held.bytes.extend_from_slice(&data);
        }
        Ok(held)
    }

    fn wait_for_client(&self) {
        let place = self.table.table().insert(self.peer, &self.close);
        *self.entry() = Some(place);
    }

    fn leave(&self) {
        let place = self.entry().take();
        if let Some(place) = place {
            self.table.table().remove(place);
            self.table.left.notify_one();
        }
    }

    fn entry(&self) -> MutexGuard<'_, Option<u64>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AdminConnection {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Permit to work. When dropped, the connection waits for its client again.
#[derive(Debug)]
pub(super) struct WorkPermit<'a> {
    connection: &'a AdminConnection,
    _permit: SemaphorePermit<'a>,
}

impl Drop for WorkPermit<'_> {
    fn drop(&mut self) {
        self.connection.wait_for_client();
    }
}

/// A complete body, and its share of the body memory.
#[derive(Debug)]
pub(super) struct HeldBody<'a> {
    pub(super) bytes: Vec<u8>,
    permit: Option<SemaphorePermit<'a>>,
}

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoBody {
    /// It exceeds the bound of this request.
    TooLong,
    /// It broke off.
    Broken,
    /// Other bodies use all the body memory.
    NoRoom,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    async fn enter(table: &Arc<ConnectionTable>, from: &str) -> AdminConnection {
        table.enter(ip(from), || ()).await
    }

    fn is_closed(connection: &AdminConnection) -> bool {
        connection.entry().is_some_and(|place| {
            let table = connection.table.table();
            !table.by_age.contains_key(&place)
        })
    }

    #[tokio::test]
    async fn the_oldest_of_the_peer_with_the_most_makes_room() {
        let table = Arc::new(ConnectionTable::new(4));
        let other = enter(&table, "192.0.2.9").await;
        let crowd = [
            enter(&table, "192.0.2.1").await,
            enter(&table, "192.0.2.1").await,
            enter(&table, "192.0.2.1").await,
        ];
        let next = enter(&table, "192.0.2.2").await;
        let closed = crowd.each_ref().map(is_closed);
        assert_eq!(closed, [true, false, false]);
        assert!(!is_closed(&other) && !is_closed(&next));
        crowd[0].closed().await;
    }

    #[tokio::test]
    async fn a_peer_at_its_bound_closes_its_own_only() {
        let table = Arc::new(ConnectionTable::new(4));
        let other = enter(&table, "192.0.2.9").await;
        let mut crowd = Vec::new();
        for _ in 0..9 {
            crowd.push(enter(&table, "2001:db8::1").await);
            crowd.push(enter(&table, "2001:db8::2").await);
        }
        let open = crowd.iter().filter(|connection| !is_closed(connection));
        assert_eq!(open.count(), 3, "a home is one peer");
        assert!(!is_closed(&other));
        assert_eq!(table.table().by_age.len(), 4);
    }

    #[tokio::test]
    async fn a_young_connection_is_not_closed_for_a_younger_one() {
        let table = Arc::new(ConnectionTable::new(1));
        let first = enter(&table, "192.0.2.1").await;
        let start = Instant::now();
        let _second = enter(&table, "192.0.2.2").await;
        assert!(is_closed(&first) && start.elapsed() >= GRACE);
        let start = Instant::now();
        let _third = {
            let leaves = async {
                time::sleep(GRACE / 2).await;
                drop(_second);
            };
            tokio::join!(enter(&table, "192.0.2.3"), leaves).0
        };
        assert!(
            start.elapsed() < GRACE,
            "one that leaves makes room at once"
        );
    }

    #[tokio::test]
    async fn what_works_is_not_closed_and_waits_again_afterwards() {
        let table = Arc::new(ConnectionTable::new(1));
        let busy = enter(&table, "192.0.2.1").await;
        {
            let _permit = busy.work(&table.reloads).expect("there is room");
            let _next = enter(&table, "192.0.2.1").await;
            assert!(busy.entry().is_none() && !is_closed(&busy));
        }
        assert!(busy.entry().is_some());
        let permits: Vec<_> = (0..3).map(|_| busy.work(&table.checks)).collect();
        let granted: Vec<_> = permits.iter().map(Option::is_some).collect();
        assert_eq!(granted, [true, true, false]);
    }

    #[tokio::test]
    async fn bodies_have_a_bound_each_and_all_together() {
        let table = Arc::new(ConnectionTable::new(4));
        let connection = enter(&table, "192.0.2.1").await;
        let body = |bytes: usize| http_body_util::Full::new(Bytes::from(vec![b'a'; bytes]));
        let short = connection.body(body(10), 10).await.expect("it fits");
        assert_eq!(short.bytes.len(), 10);
        let too_long = connection.body(body(11), 10).await;
        assert_eq!(too_long.err(), Some(NoBody::TooLong));
        let all = connection.body(body(BODIES_MAX_BYTES), usize::MAX).await;
        assert_eq!(all.err(), Some(NoBody::NoRoom));
        drop(short);
        let all = connection.body(body(BODIES_MAX_BYTES), usize::MAX).await;
        assert!(all.is_ok(), "memory comes back");
    }
}
