//! Connection pool of one worker for one server; each connection carries one exchange at a time.
//!
//! The newest idle connection is reused first, so that the few that a quiet worker needs stay warm
//! and the rest expire. Bounds: `max_connections` open at once (further requests wait up to
//! `connect_timeout`), and `idle_timeout` for an unused connection.

use std::{
    cell::{Cell, RefCell},
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncRead as _, ReadBuf},
    sync::Notify,
    time::{Instant, Sleep},
};

use super::{
    ServerAddress, UpstreamError, UpstreamSettings, UpstreamState, endpoint::ServerEndpoint,
    http2::H2Pool, stream::ServerStream,
};

/// The connections of one worker to one server.
#[derive(Debug)]
pub struct ServerPool {
    upstream_state: Arc<UpstreamState>,
    /// Index of the server in the upstream.
    server: usize,
    /// The server's own name, for `host = "server"`.
    authority: String,
    open: Cell<usize>,
    idle: RefCell<Vec<(Box<ServerConnection>, Instant)>>,
    /// For a server that speaks HTTP/2.
    lines: H2Pool,
    /// Set when the upstream is removed: returned connections are closed.
    retired: Cell<bool>,
    freed: Notify,
}

impl ServerPool {
    pub(super) fn new(upstream_state: Arc<UpstreamState>, server: usize) -> Self {
        Self {
            authority: upstream_state.settings().servers[server].authority(),
            upstream_state,
            server,
            open: Cell::new(0),
            idle: RefCell::default(),
            lines: H2Pool::default(),
            retired: Cell::new(false),
            freed: Notify::new(),
        }
    }

    /// The server.
    pub fn server(&self) -> &ServerAddress {
        &self.settings().servers[self.server]
    }

    /// The server's own name for `Host`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    pub(super) fn settings(&self) -> &UpstreamSettings {
        self.upstream_state.settings()
    }

    pub(super) fn lines(&self) -> &H2Pool {
        &self.lines
    }

    /// Whether another connection may be opened.
    pub(super) fn has_room(&self) -> bool {
        self.open.get() < self.settings().max_connections
    }

    /// A usable idle connection, or a new one. Advances `now` if it had to wait.
    pub(super) async fn take(
        self: &Rc<Self>,
        now: &mut Instant,
    ) -> Result<Box<ServerConnection>, UpstreamError> {
        let outstanding = Outstanding::at(self);
        let mut connection = match poll_fn(|cx| Poll::Ready(self.take_idle(*now, cx))).await {
            Some(idle) => idle,
            None => {
                // rare and large, so boxed: every request's future reserves room for the case above
                // only
                let opened = Box::pin(self.open_or_wait(*now)).await?;
                *now = Instant::now();
                opened
            }
        };
        connection.outstanding = Some(outstanding);
        Ok(connection)
    }

    /// A new connection, or the next one returned.
    async fn open_or_wait(
        self: &Rc<Self>,
        now: Instant,
    ) -> Result<Box<ServerConnection>, UpstreamError> {
        let give_up = now + self.settings().connect_timeout;
        loop {
            if self.has_room() {
                return self.connect(give_up).await;
            }
            let freed = tokio::time::timeout_at(give_up, self.freed.notified());
            if freed.await.is_err() {
                return Err(UpstreamError::Busy(self.settings().max_connections));
            }
            let now = Instant::now();
            if let Some(idle) = poll_fn(|cx| Poll::Ready(self.take_idle(now, cx))).await {
                return Ok(idle);
            }
        }
    }

    /// A new connection, for the second try after a reused one was dead.
    pub(super) async fn take_fresh(
        self: &Rc<Self>,
    ) -> Result<Box<ServerConnection>, UpstreamError> {
        // the other idle connections are at least as old as the one that failed
        self.idle.borrow_mut().clear();
        let give_up = Instant::now() + self.settings().connect_timeout;
        let outstanding = Outstanding::at(self);
        let mut connection = self.connect(give_up).await?;
        connection.outstanding = Some(outstanding);
        Ok(connection)
    }

    fn take_idle(&self, now: Instant, cx: &mut Context<'_>) -> Option<Box<ServerConnection>> {
        let idle_timeout = self.settings().idle_timeout;
        loop {
            let (mut connection, since) = self.idle.borrow_mut().pop()?;
            let idle = now.saturating_duration_since(since);
            if idle < idle_timeout && connection.is_quiet(cx) {
                connection.reused = true;
                return Some(connection);
            }
        }
    }

    /// Opens a new connection, even if there are idle ones.
    pub(super) async fn connect(
        self: &Rc<Self>,
        give_up: Instant,
    ) -> Result<Box<ServerConnection>, UpstreamError> {
        let slot = PoolPermit::open(self);
        let endpoint = self.endpoint();
        // read before the addresses, so that a change meanwhile is noticed
        let generation = endpoint.generation();
        let (stream, address) = endpoint.connect(give_up).await?;
        Ok(Box::new(ServerConnection {
            stream,
            address,
            generation,
            inbox: BytesMut::new(),
            outbox: BytesMut::new(),
            timer: Box::pin(tokio::time::sleep_until(give_up)),
            reused: false,
            outstanding: None,
            slot,
        }))
    }

    /// Returns a connection whose exchange ended cleanly, at about `now`.
    pub(super) fn put_back(mut connection: Box<ServerConnection>, now: Instant) {
        connection.outstanding = None;
        let pool = Rc::clone(&connection.slot.pool);
        if !pool.retired.get() && pool.still_leads_there(&mut connection) {
            pool.idle.borrow_mut().push((connection, now));
            pool.freed.notify_one();
        }
    }

    /// Whether the server still has the address of this connection.
    fn still_leads_there(&self, connection: &mut ServerConnection) -> bool {
        let endpoint = self.endpoint();
        let generation = endpoint.generation();
        if connection.generation == generation {
            return true;
        }
        connection.generation = generation;
        self.is_at(connection.address)
    }

    /// Whether the server still has this address.
    fn is_at(&self, address: Option<SocketAddr>) -> bool {
        address.is_none_or(|address| self.endpoint().has(address))
    }

    fn endpoint(&self) -> &ServerEndpoint {
        self.upstream_state.endpoint(self.server)
    }

    /// Closes idle connections, now and when they return.
    pub(super) fn retire(&self) {
        self.retired.set(true);
        self.idle.borrow_mut().clear();
        self.lines.retire();
    }

    pub(super) fn sweep(&self, now: Instant) {
        let idle_timeout = self.settings().idle_timeout;
        self.lines
            .sweep(idle_timeout, now, |address| self.is_at(address));
        let keep = |since: &Instant| now.saturating_duration_since(*since) < idle_timeout;
        self.idle
            .borrow_mut()
            .retain_mut(|(connection, since)| keep(since) && self.still_leads_there(connection));
    }
}

/// A permit among `max_connections`.
#[derive(Debug)]
struct PoolPermit {
    pool: Rc<ServerPool>,
}

impl PoolPermit {
    fn open(pool: &Rc<ServerPool>) -> Self {
        pool.open.set(pool.open.get() + 1);
        Self {
            pool: Rc::clone(pool),
        }
    }
}

impl Drop for PoolPermit {
    fn drop(&mut self) {
        self.pool.open.set(self.pool.open.get() - 1);
        self.pool.freed.notify_one();
    }
}

/// A request in flight at a server, from the choice of the server to the end of its response.
#[derive(Debug)]
pub(super) struct Outstanding {
    pool: Rc<ServerPool>,
}

impl Outstanding {
    pub(super) fn at(pool: &Rc<ServerPool>) -> Self {
        pool.upstream_state.begin(pool.server);
        Self {
            pool: Rc::clone(pool),
        }
    }
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        self.pool.upstream_state.end(self.pool.server);
    }
}

/// A connection to a server, with its buffers.
#[derive(Debug)]
pub(super) struct ServerConnection {
    pub(super) stream: ServerStream,
    /// Its remote address, if TCP.
    pub(super) address: Option<SocketAddr>,
    /// Generation of the server's addresses when this one was last known to be among them.
    generation: u64,
    /// Bytes received and not yet consumed.
    pub(super) inbox: BytesMut,
    /// The head of the request in flight, kept for a retry until the response begins.
    pub(super) outbox: BytesMut,
    /// Re-armed lazily: one timer for the life of the connection instead of one per request.
    pub(super) timer: Pin<Box<Sleep>>,
    /// Whether an exchange has used it before. Only then may a failure mean that the server had
    /// already closed it.
    pub(super) reused: bool,
    /// While in use.
    outstanding: Option<Outstanding>,
    slot: PoolPermit,
}

impl ServerConnection {
    pub(super) fn settings(&self) -> &UpstreamSettings {
        self.slot.pool.settings()
    }

    /// Whether an idle connection is open and has no unexpected bytes. Costs no system call while
    /// it is quiet.
    ///
    /// This sees what the runtime has seen. Bytes that arrive after its last poll and before the
    /// next request are taken for that request's response. HTTP/1.1 cannot tell them apart, and
    /// asking the kernel each time would only narrow the gap. A second response that arrives
    /// together with the first is always detected.
    fn is_quiet(&mut self, cx: &mut Context<'_>) -> bool {
        let mut byte = [0];
        let mut probe = ReadBuf::new(&mut byte);
        let read = Pin::new(&mut self.stream).poll_read(cx, &mut probe);
        read.is_pending()
    }

    /// Ready when `deadline` has passed.
    pub(super) fn poll_deadline(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        loop {
            if self.timer.deadline() > deadline {
                self.timer.as_mut().reset(deadline);
            }
            std::task::ready!(self.timer.as_mut().poll(cx));
            if self.timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Reads once into the inbox; `Ok(0)` is the end. The buffer grows with the size of the
    /// server's writes.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        const LEAST: usize = 8 * 1024;
        const MOST: usize = 64 * 1024;
        if self.inbox.capacity() - self.inbox.len() < LEAST / 4 {
            let room = if self.inbox.len() >= LEAST {
                MOST
            } else {
                LEAST
            };
            self.inbox.reserve(room);
        }
        let pinned = std::pin::pin!(tokio::io::AsyncReadExt::read_buf(
            &mut self.stream,
            &mut self.inbox
        ));
        pinned.poll(cx)
    }
}
