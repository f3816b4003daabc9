//! Opens HTTP/2 connections of one worker to one server, and grants the stream permits on them.
//!
//! A connection accepts no new exchanges after the server's GOAWAY. Nor does it after a request got
//! no response within `response_timeout`, since it may be dead. Exchanges in flight may end on it.
//! A connection without exchanges for `idle_timeout` is closed.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use h2::{
    Reason, RecvStream,
    client::{self, SendRequest},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{
    super::{
        UpstreamError, UpstreamSettings,
        framing::MAX_HEAD_BYTES,
        pool::{Outstanding, ServerConnection, ServerPool},
    },
    CONNECTION_WINDOW, MAX_SEND_BUFFER_BYTES, STREAM_WINDOW,
    connections::{H2Connection, H2Pool, PendingConnection},
};
use crate::receive_buffer::{
    DATA_FRAME_BUDGET, MAX_REMEMBERED_RESETS, RESET_MEMORY, ReceiveBuffer, ReceiveBuffers,
    TurnReader,
};

/// Permit for one exchange on a connection, until dropped.
#[derive(Debug)]
pub(in crate::upstream) struct StreamPermit {
    pool: Rc<ServerPool>,
    line: Rc<H2Connection>,
    /// Whether the connection existed before. Only then may a failure mean that the server had
    /// already closed it.
    pub(in crate::upstream) reused: bool,
    _outstanding: Outstanding,
}

impl StreamPermit {
    fn on(
        line: Rc<H2Connection>,
        pool: &Rc<ServerPool>,
        reused: bool,
        outstanding: Outstanding,
    ) -> Self {
        line.streams.set(line.streams.get() + 1);
        Self {
            pool: Rc::clone(pool),
            line,
            reused,
            _outstanding: outstanding,
        }
    }

    pub(super) fn sender(&self) -> SendRequest<Bytes> {
        self.line.sender.clone()
    }

    /// The buffer that receives the response.
    pub(in crate::upstream) fn receive(&self, stream: RecvStream) -> ReceiveBuffer {
        self.line.buffers.open(stream)
    }

    pub(in crate::upstream) fn settings(&self) -> &UpstreamSettings {
        self.pool.settings()
    }

    /// The connection may be dead: excludes it from further exchanges.
    pub(super) fn mark_suspect(&self) {
        self.pool.lines().forget(&self.line);
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.line.streams.set(self.line.streams.get() - 1);
        self.line.idle_since.set(Instant::now());
        self.pool.lines().changed.notify_one();
    }
}

impl H2Pool {
    /// Takes a permit on a connection, and opens one if none has room. Waits up to
    /// `connect_timeout`.
    pub(in crate::upstream) async fn take(
        pool: &Rc<ServerPool>,
    ) -> Result<StreamPermit, UpstreamError> {
        let lines = pool.lines();
        let settings = pool.settings();
        let give_up = Instant::now() + settings.connect_timeout;
        let outstanding = Outstanding::at(pool);
        loop {
            // register before the check, so that no change is missed
            let changed = lines.changed.notified();
            if let Some(line) = lines.with_room() {
                return Ok(StreamPermit::on(line, pool, true, outstanding));
            }
            if !lines.opening.get() && pool.has_room() {
                let line = lines.open_one(pool, give_up).await?;
                return Ok(StreamPermit::on(line, pool, false, outstanding));
            }
            if tokio::time::timeout_at(give_up, changed).await.is_err() {
                return Err(UpstreamError::Busy(settings.max_connections));
            }
        }
    }

    async fn open_one(
        &self,
        pool: &Rc<ServerPool>,
        give_up: Instant,
    ) -> Result<Rc<H2Connection>, UpstreamError> {
        let _opening = PendingConnection::begin(self);
        let connection = pool.connect(give_up).await?;
        let address = connection.address;
        let buffers = Rc::new(ReceiveBuffers::default());
        let carrier = ConnectionIo {
            connection,
            buffers: Rc::clone(&buffers),
            reader: TurnReader::of_server(),
        };
        let handshake = h2::client::Builder::new()
            // until the server's SETTINGS state its limit
            .initial_max_send_streams(0)
            .enable_push(false)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_HEAD_BYTES as u32)
            .max_send_buffer_size(MAX_SEND_BUFFER_BYTES)
            .data_frame_budget(DATA_FRAME_BUDGET)
            .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
            .reset_stream_duration(RESET_MEMORY)
            .handshake(carrier);
        let greeted = async {
            let (sender, connection) = handshake.await?;
            let mut driven = DrivenConnection {
                connection,
                buffers: Rc::clone(&buffers),
            };
            wait_for_settings(&mut driven).await?;
            Ok::<_, h2::Error>((sender, driven))
        };
        let (sender, connection) = match tokio::time::timeout_at(give_up, greeted).await {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(error)) => {
                let error = format!("it does not speak HTTP/2: {error}");
                return Err(UpstreamError::Connect(io::Error::other(error)));
            }
            Err(_) => return Err(UpstreamError::Connect(io::ErrorKind::TimedOut.into())),
        };
        let line = Rc::new(H2Connection {
            address,
            sender,
            buffers,
            streams: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
        });
        self.open.borrow_mut().push(Rc::clone(&line));
        let (pool, carried) = (Rc::clone(pool), Rc::downgrade(&line));
        tokio::task::spawn_local(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, server = %pool.server(), "an HTTP/2 connection ended");
            }
            if let Some(line) = carried.upgrade() {
                pool.lines().forget(&line);
            }
        });
        Ok(line)
    }
}

/// Waits for the server's SETTINGS. Without them the stream limit is unknown, so requests could be
/// refused for exceeding it. A server that does not speak HTTP/2 is also detected before a request
/// is sent.
async fn wait_for_settings(driven: &mut DrivenConnection) -> Result<(), h2::Error> {
    poll_fn(|cx| {
        if let Poll::Ready(ended) = Pin::new(&mut *driven).poll(cx) {
            return Poll::Ready(ended.and(Err(Reason::NO_ERROR.into())));
        }
        match driven.connection.max_concurrent_send_streams() {
            0 => Poll::Pending,
            _ => Poll::Ready(Ok(())),
        }
    })
    .await
}

/// A connection and its driver task, which polls it in fair turns.
struct DrivenConnection {
    connection: client::Connection<ConnectionIo, Bytes>,
    buffers: Rc<ReceiveBuffers>,
}

impl Future for DrivenConnection {
    type Output = Result<(), h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = Pin::new(&mut self.connection).poll(cx);
        if outcome.is_pending() {
            self.buffers.end_turn(cx);
        }
        outcome
    }
}

/// The I/O of the h2 crate, with the connection's permit among `max_connections`.
struct ConnectionIo {
    connection: Box<ServerConnection>,
    buffers: Rc<ReceiveBuffers>,
    reader: TurnReader,
}

impl AsyncRead for ConnectionIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let stream = &mut this.connection.stream;
        let read = |buf: &mut ReadBuf<'_>| Pin::new(stream).poll_read(cx, buf);
        this.reader.poll_read(&this.buffers, buf, read, |_| {})
    }
}

impl AsyncWrite for ConnectionIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.stream).poll_shutdown(cx)
    }
}
