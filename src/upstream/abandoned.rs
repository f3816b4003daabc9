//! Abandoned exchanges: the client is gone, but the server may still be working on the request.
//!
//! A request that holds slots (of a concurrency limit, or of `[overload]`) holds them for the
//! server's work, not for the client's wait. Otherwise a client that resets each request could keep
//! the server arbitrarily busy. So its exchange stays open until the server's work visibly ends:
//!
//! ```text
//! request sent, no response yet     ──▶ wait for the response, discard it  (HTTP/1.1 and HTTP/2)
//! response begun, length known      ──▶ discard the rest
//! response begun, length not known  ──▶ HTTP/1.1: send FIN, await FIN   HTTP/2: discard the rest
//! request not sent in full          ──▶ HTTP/1.1: send FIN, await FIN   HTTP/2: reset, wait
//!
//! the server sends too much, or for too long ──▶ reset, then wait as long again
//! ```
//!
//! A server that has not begun its response receives no FIN. Many servers close the connection at
//! once on a FIN but continue to work unseen. Work is also unseen after a RST_STREAM. A server that
//! streams fails at its next write after a reset, so the time it has taken so far is assumed to
//! cover that write. [`abandoned_timeout`](super::UpstreamSettings::abandoned_timeout) bounds each
//! wait. Then the connection is closed, or the stream reset.
//!
//! The limits that grant the slots bound the number of these exchanges. A request without slots is
//! closed at once.

use std::{
    cell::RefCell,
    future::poll_fn,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::client::ResponseFuture;
use http::header::CONTENT_LENGTH;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Empty};
use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, ReadBuf},
    time::Instant,
};

use super::{
    ResponseBody, SpareHeaderMap, Tunnel,
    framing::{self, Framing, MAX_INTERIM, ResponseHead},
    http2::StreamPermit,
    pool::ServerConnection,
};
use crate::receive_buffer::ReceiveBuffer;

/// Keeps abandoned exchanges of requests that hold slots.
#[derive(Debug, Default)]
pub struct AbandonedExchanges(RefCell<Vec<AbandonedExchange>>);

impl AbandonedExchanges {
    /// Keeps an exchange until its slots are released.
    pub fn keep(&self, abandoned: AbandonedExchange) {
        self.0.borrow_mut().push(abandoned);
    }

    /// Takes the kept exchanges.
    pub fn take(&mut self) -> Vec<AbandonedExchange> {
        std::mem::take(self.0.get_mut())
    }
}

/// An exchange whose response nothing waits for. Dropping it closes its connection or resets its
/// stream.
#[derive(Debug)]
pub struct AbandonedExchange {
    work: AbandonedWork,
    deadline: Instant,
}

#[derive(Debug)]
enum AbandonedWork {
    /// HTTP/1.1: request sent in full, response not begun.
    Unanswered {
        connection: Box<ServerConnection>,
        to_head: bool,
    },
    /// HTTP/1.1: the rest of a response.
    Response(Box<ResponseBody<Empty<Bytes>>>),
    /// HTTP/1.1: the exchange cannot be completed.
    Closing(Box<ServerConnection>),
    /// HTTP/2: request sent in full, response not begun.
    Pending(ResponseFuture, StreamPermit),
    /// HTTP/2: the rest of a response; whether its length is known.
    Stream(ReceiveBuffer, StreamPermit, bool),
    /// HTTP/2: the stream was reset, so the server's work is unseen.
    Reset,
}

impl AbandonedExchange {
    fn new(work: AbandonedWork, timeout: Duration) -> Self {
        Self {
            work,
            deadline: Instant::now() + timeout,
        }
    }

    /// Request sent in full, response not begun. `to_head`: the method was HEAD.
    pub(super) fn unanswered(connection: Box<ServerConnection>, to_head: bool) -> Self {
        let timeout = connection.settings().abandoned_timeout;
        let work = AbandonedWork::Unanswered {
            connection,
            to_head,
        };
        Self::new(work, timeout)
    }

    /// The rest of a response of known length.
    fn response(rest: ResponseBody<Empty<Bytes>>, timeout: Duration) -> Self {
        Self::new(AbandonedWork::Response(Box::new(rest)), timeout)
    }

    /// Only the end of the server's connection can be observed.
    pub(super) fn closing(connection: Box<ServerConnection>) -> Self {
        let timeout = connection.settings().abandoned_timeout;
        Self::new(AbandonedWork::Closing(connection), timeout)
    }

    /// Request sent in full, response not begun.
    pub(super) fn pending(response: ResponseFuture, place: StreamPermit) -> Self {
        let timeout = place.settings().abandoned_timeout;
        Self::new(AbandonedWork::Pending(response, place), timeout)
    }

    /// The rest of a response.
    pub(super) fn stream(stream: ReceiveBuffer, place: StreamPermit, has_length: bool) -> Self {
        let timeout = place.settings().abandoned_timeout;
        Self::new(AbandonedWork::Stream(stream, place, has_length), timeout)
    }

    /// The stream is reset: the caller drops its last handle.
    pub(super) fn reset(place: &StreamPermit) -> Self {
        Self::new(AbandonedWork::Reset, place.settings().abandoned_timeout)
    }

    /// Returns when the server's work has visibly ended, or `abandoned_timeout` after the start.
    pub async fn ended(self) {
        let Self { work, deadline } = self;
        match tokio::time::timeout_at(deadline, work.ended()).await {
            Ok(Ending::Seen) => {}
            Ok(Ending::Reset(began)) => {
                let taken = began.elapsed().max(LEAST_AFTER_RESET);
                tokio::time::sleep_until(deadline.min(Instant::now() + taken)).await;
            }
            Err(_) => tracing::debug!("an abandoned exchange has not ended in time; closing it"),
        }
    }
}

impl<B> ResponseBody<B> {
    /// The rest of an unfinished exchange; `None` if it has visibly ended.
    pub fn abandon(mut self) -> Option<AbandonedExchange> {
        let connection = self.connection.take()?;
        let is_whole = self.sending.is_none() && !self.refused_body && !self.gave_up;
        let framing = std::mem::replace(&mut self.framing, Framing::Empty);
        Some(match framing {
            Framing::Length(left) if is_whole && left <= MAX_DISCARDED_BYTES => {
                let timeout = connection.settings().abandoned_timeout;
                let rest = ResponseBody::rest(framing, connection, self.reusable);
                AbandonedExchange::response(rest, timeout)
            }
            _ => AbandonedExchange::closing(connection),
        })
    }
}

impl Tunnel {
    /// The rest of a broken tunnel: the server may not have closed its side.
    pub fn abandon(self) -> AbandonedExchange {
        AbandonedExchange::closing(self.connection)
    }
}

/// Response bytes discarded before the server is stopped.
const MAX_DISCARDED_BYTES: u64 = 1024 * 1024;
/// A server that sends for longer is streaming, or has not noticed our FIN.
const MAX_DISCARDING: Duration = Duration::from_secs(1);
/// Minimum wait after a reset.
const LEAST_AFTER_RESET: Duration = Duration::from_millis(100);

/// How an abandoned exchange ends.
enum Ending {
    /// The server ended it.
    Seen,
    /// We reset it, because the server kept sending; when discarding began.
    Reset(Instant),
}

/// Response bytes discarded in one exchange.
struct Discarded {
    began: Instant,
    bytes: u64,
    /// Whether the response has a known end.
    has_length: bool,
}

impl Discarded {
    fn begin(has_length: bool) -> Self {
        Self {
            began: Instant::now(),
            bytes: 0,
            has_length,
        }
    }

    /// Whether the bound is reached.
    fn add(&mut self, bytes: usize) -> bool {
        self.bytes += bytes as u64;
        self.bytes > MAX_DISCARDED_BYTES
            || !self.has_length && self.began.elapsed() > MAX_DISCARDING
    }
}

impl AbandonedWork {
    async fn ended(self) -> Ending {
        match self {
            Self::Unanswered {
                connection,
                to_head,
            } => answered(connection, to_head).await,
            Self::Response(body) => discard(*body).await,
            Self::Closing(connection) => closed(connection).await,
            Self::Pending(response, place) => match response.await {
                Ok(response) => {
                    let has_length = response.headers().contains_key(CONTENT_LENGTH);
                    discard_stream(place.receive(response.into_body()), has_length).await
                }
                Err(_) => Ending::Seen,
            },
            Self::Stream(stream, _place, has_length) => discard_stream(stream, has_length).await,
            Self::Reset => std::future::pending().await,
        }
    }
}

/// Waits for the response and discards it. A cleanly finished connection returns to its pool.
async fn answered(mut connection: Box<ServerConnection>, to_head: bool) -> Ending {
    let mut interim = 0;
    let head = poll_fn(|cx| poll_head(&mut connection, to_head, &mut interim, cx)).await;
    match head {
        Some(head) if matches!(head.framing, Framing::Switched) => closed(connection).await,
        Some(head) => {
            connection.reused = true;
            let rest = ResponseBody::rest(head.framing, connection, head.keep_alive);
            discard(rest).await
        }
        // it has closed, or sends an invalid response
        None => closed(connection).await,
    }
}

/// The head of the final response; `None` if there will be none.
fn poll_head(
    connection: &mut ServerConnection,
    to_head: bool,
    interim: &mut u8,
    cx: &mut Context<'_>,
) -> Poll<Option<ResponseHead>> {
    let spare = SpareHeaderMap::default();
    loop {
        while !connection.inbox.is_empty() {
            match framing::take_head(&mut connection.inbox, to_head, &spare) {
                Ok(None) => break,
                Ok(Some(head)) if head.status.as_u16() == 101 => {
                    let framing = Framing::Switched;
                    return Poll::Ready(Some(ResponseHead { framing, ..head }));
                }
                Ok(Some(head)) if head.status.is_informational() && *interim < MAX_INTERIM => {
                    *interim += 1;
                }
                Ok(Some(head)) if head.status.is_informational() => return Poll::Ready(None),
                Ok(Some(head)) => return Poll::Ready(Some(head)),
                Err(_) => return Poll::Ready(None),
            }
        }
        match ready!(connection.poll_fill(cx)) {
            Ok(0) | Err(_) => return Poll::Ready(None),
            Ok(_) => {}
        }
    }
}

async fn discard(mut body: ResponseBody<Empty<Bytes>>) -> Ending {
    let mut discarded = Discarded::begin(body.size_hint().exact().is_some());
    while let Some(Ok(frame)) = body.frame().await {
        if discarded.add(frame.data_ref().map_or(0, Bytes::len)) {
            if let Some(connection) = body.into_connection() {
                connection.stream.reset();
            }
            return Ending::Reset(discarded.began);
        }
    }
    Ending::Seen
}

async fn discard_stream(stream: ReceiveBuffer, has_length: bool) -> Ending {
    let mut discarded = Discarded::begin(has_length);
    while let Some(Ok(data)) = poll_fn(|cx| stream.poll_data(cx)).await {
        if discarded.add(data.len()) {
            return Ending::Reset(discarded.began);
        }
    }
    let _ = poll_fn(|cx| stream.poll_trailers(cx)).await;
    Ending::Seen
}

/// Closes our side of the connection, and waits until the server closes its own.
async fn closed(mut connection: Box<ServerConnection>) -> Ending {
    let stream = &mut connection.stream;
    // if the shutdown fails the socket is gone, and the next read fails
    let _ = poll_fn(|cx| Pin::new(&mut *stream).poll_shutdown(cx)).await;
    let mut discarded = Discarded::begin(false);
    let is_seen = poll_fn(|cx| {
        loop {
            let mut room = [MaybeUninit::uninit(); 8 * 1024];
            let mut read = ReadBuf::uninit(&mut room);
            match ready!(Pin::new(&mut *stream).poll_read(cx, &mut read)) {
                Ok(()) if read.filled().is_empty() => return Poll::Ready(true),
                Ok(()) if discarded.add(read.filled().len()) => return Poll::Ready(false),
                Ok(()) => {}
                Err(_) => return Poll::Ready(true),
            }
        }
    })
    .await;
    if is_seen {
        return Ending::Seen;
    }
    connection.stream.reset();
    Ending::Reset(discarded.began)
}
