//! Relays a connection that has left HTTP: unchanged bytes both ways, until both sides have ended.
//!
//! A half-close by one side is forwarded to the other, which may continue to send. Backpressure:
//! each direction buffers at most one read. A tunnel without traffic for `body_timeout` is closed.
//! Its server connection is never reused.

use std::{
    future::{Future as _, poll_fn},
    io,
    mem::MaybeUninit,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::pool::ServerConnection;

/// Size of a read, and the most bytes buffered per direction.
const READ_BYTES: usize = 16 * 1024;

/// The server side of a connection that has left HTTP.
#[derive(Debug)]
pub struct Tunnel {
    pub(super) connection: Box<ServerConnection>,
    max_silence: Duration,
}

/// How a tunnel ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// One side failed.
    #[error("broken off: {0}")]
    Broken(#[from] io::Error),
    /// Neither side sent anything for this long.
    #[error("no traffic for {0:?}")]
    Silent(Duration),
}

impl Tunnel {
    pub(super) fn new(connection: Box<ServerConnection>, max_silence: Duration) -> Self {
        Self {
            connection,
            max_silence,
        }
    }

    /// Relays until both sides have ended; calls `sent` with each number of bytes written to the
    /// client.
    pub async fn relay<C>(
        &mut self,
        mut client: C,
        mut sent: impl FnMut(usize),
    ) -> Result<(), Ended>
    where
        C: AsyncRead + AsyncWrite + Unpin,
    {
        let ServerConnection { stream, inbox, .. } = &mut *self.connection;
        // a server may send data right after its 101
        let mut down = TunnelDirection::holding(std::mem::take(inbox));
        let mut up = TunnelDirection::holding(BytesMut::new());
        let mut last_moved = Instant::now();
        let mut silence = pin!(tokio::time::sleep(self.max_silence));
        poll_fn(|cx| {
            let before = (down.moved, up.moved);
            let down_ended = down.poll(stream, &mut client, cx)?.is_ready();
            let up_ended = up.poll(&mut client, stream, cx)?.is_ready();
            if down.moved > before.0 {
                sent(down.moved - before.0);
            }
            if down_ended && up_ended {
                return Poll::Ready(Ok(()));
            }
            if (down.moved, up.moved) != before {
                last_moved = Instant::now();
            }
            let deadline = last_moved + self.max_silence;
            loop {
                ready!(silence.as_mut().poll(cx));
                if silence.deadline() >= deadline {
                    return Poll::Ready(Err(Ended::Silent(self.max_silence)));
                }
                silence.as_mut().reset(deadline);
            }
        })
        .await
    }
}

/// One direction.
#[derive(Debug)]
struct TunnelDirection {
    /// Read and not yet written to the other side.
    unsent: BytesMut,
    stage: TunnelStage,
    /// Bytes written to the other side.
    moved: usize,
}

#[derive(Debug)]
enum TunnelStage {
    Open,
    /// The reading side has ended; the end must be forwarded.
    Ending,
    Ended,
}

impl TunnelDirection {
    fn holding(unsent: BytesMut) -> Self {
        Self {
            unsent,
            stage: TunnelStage::Open,
            moved: 0,
        }
    }

    /// Ready when the direction has ended.
    fn poll(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            while !self.unsent.is_empty() {
                let wrote = ready!(write(to, &self.unsent, cx))?;
                self.unsent.advance(wrote);
                self.moved += wrote;
            }
            match self.stage {
                TunnelStage::Open => ready!(self.poll_read(from, to, cx))?,
                TunnelStage::Ending => {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx))?;
                    self.stage = TunnelStage::Ended;
                }
                TunnelStage::Ended => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Reads once, and writes as much as the other side accepts. An idle tunnel holds no buffer.
    fn poll_read(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let mut room = [MaybeUninit::uninit(); READ_BYTES];
        let mut read = ReadBuf::uninit(&mut room);
        if Pin::new(from).poll_read(cx, &mut read)?.is_pending() {
            ready!(Pin::new(to).poll_flush(cx))?;
            return Poll::Pending;
        }
        let mut rest = read.filled();
        if rest.is_empty() {
            self.stage = TunnelStage::Ending;
        }
        while !rest.is_empty() {
            let Poll::Ready(wrote) = write(to, rest, cx)? else {
                self.unsent = BytesMut::from(rest);
                break;
            };
            rest = &rest[wrote..];
            self.moved += wrote;
        }
        Poll::Ready(Ok(()))
    }
}

fn write(
    to: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    match ready!(Pin::new(to).poll_write(cx, bytes))? {
        0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
        wrote => Poll::Ready(Ok(wrote)),
    }
}
