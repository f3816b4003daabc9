//! A request body as it arrives: bounds on size, silence and pace, buffered only if a limit is
//! keyed by one of its fields.
//!
//! A client that sends one byte just before each timeout could hold a connection to the origin
//! forever. So the total time spent waiting for a body is bounded: by `body_timeout` plus the time
//! that the received bytes take at `min_body_rate`. Time in which the origin does not read is not
//! counted.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderName;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use ipnet::IpNet;
use tokio::time::{Instant, Sleep};

use super::{
    Peer,
    abuse::AbuseReason,
    body_buffers::{BodyBuffer, BodyBuffers},
    http2::StreamRequestBody,
};
use crate::identity::ManagedFields;

/// Why a request body ended early.
#[derive(Debug, thiserror::Error)]
pub enum InboundError {
    /// The body exceeds its size bound; 413.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(u64),
    /// No bytes arrived for too long; 408.
    #[error("the request body paused for more than {0:?}")]
    Silent(Duration),
    /// The body arrives too slowly; 408.
    #[error("the request body arrives at less than {0} bytes a second")]
    TooSlow(u64),
    /// A buffered body was not complete in time; 408.
    #[error("the request body was not complete within {0:?}")]
    Late(Duration),
    /// Other buffered bodies use all the memory available; 503.
    #[error("buffered request bodies use all of max_body_buffer")]
    NoRoom,
    /// The framing is invalid, or an HTTP/1 client is gone; 400 if the client is still connected.
    #[error("the request body cannot be read: {0}")]
    Broken(ReadError),
    /// The client cancelled the request or left. HTTP/2 only.
    #[error("the client has left: {0}")]
    Left(h2::Error),
    /// The whole connection was closed early for abuse.
    #[error("{0}")]
    Cut(AbuseReason),
}

/// Why a request body cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// HTTP/1.
    #[error(transparent)]
    Http1(#[from] hyper::Error),
    /// HTTP/2.
    #[error(transparent)]
    Http2(#[from] h2::Error),
}

/// A request body before the gateway applies its bounds.
#[derive(Debug)]
pub enum RequestBody {
    /// HTTP/1.
    Http1(Incoming),
    /// An HTTP/2 stream.
    Http2(StreamRequestBody),
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = ReadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ReadError>>> {
        match &mut *self {
            Self::Http1(body) => Pin::new(body).poll_frame(cx).map_err(ReadError::from),
            Self::Http2(body) => Pin::new(body).poll_frame(cx).map_err(ReadError::from),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(body) => body.size_hint(),
            Self::Http2(body) => body.size_hint(),
        }
    }
}

/// A request body and its bounds.
#[derive(Debug)]
pub struct InboundBody {
    body: RequestBody,
    max_bytes: u64,
    seen_bytes: u64,
    from: Rc<Peer>,
    /// Total time spent waiting for this body.
    waited: Duration,
    /// When the current silence began.
    silent_since: Option<Instant>,
    /// Created only if the body has to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
    /// Another task ends the request on silence.
    may_pause: bool,
    /// The bound on its pace does not apply.
    may_trickle: bool,
    /// Bytes read ahead, to be passed on first.
    ahead: Option<Bytes>,
    /// A frame read after `ahead`: trailers, or the piece that exceeded the buffer bound.
    behind: Option<Box<Frame<Bytes>>>,
    /// gRPC: bounds each message instead of the whole body.
    messages: Option<Messages>,
    /// Fields to remove from its trailers.
    managed: Option<Arc<ManagedFields>>,
    /// For a limit on its bytes.
    count: Option<Rc<Cell<u64>>>,
}

/// Tracks the messages of a gRPC call by their prefixes: one byte of flags, four of length.
#[derive(Debug, Default)]
struct Messages {
    prefix: [u8; 5],
    prefix_bytes: usize,
    /// Bytes still to arrive of the current message.
    left: u64,
}

impl Messages {
    /// Size of the largest message that begins in these bytes, including its prefix; 0 if none
    /// does.
    fn largest_in(&mut self, mut bytes: &[u8]) -> u64 {
        let mut largest = 0;
        loop {
            let skipped =
                usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
            self.left -= skipped as u64;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return largest;
            }
            let taken = (self.prefix.len() - self.prefix_bytes).min(bytes.len());
            self.prefix[self.prefix_bytes..][..taken].copy_from_slice(&bytes[..taken]);
            self.prefix_bytes += taken;
            bytes = &bytes[taken..];
            if self.prefix_bytes == self.prefix.len() {
                let [_, length @ ..] = self.prefix;
                self.left = u64::from(u32::from_be_bytes(length));
                self.prefix_bytes = 0;
                largest = largest.max(self.left + self.prefix.len() as u64);
            }
        }
    }
}

impl InboundBody {
    /// Applies the bounds of the listener that accepted the connection.
    pub fn new(body: RequestBody, from: &Rc<Peer>) -> Self {
        Self {
            body,
            max_bytes: from.listener.max_body_bytes,
            seen_bytes: 0,
            from: Rc::clone(from),
            waited: Duration::ZERO,
            silent_since: None,
            timer: None,
            may_pause: false,
            may_trickle: false,
            messages: None,
            managed: None,
            count: None,
            ahead: None,
            behind: None,
        }
    }

    /// Lifts the pace bound, but not the silence bound: a stream of messages whose pace the client
    /// sets.
    pub fn may_trickle(&mut self) {
        self.may_trickle = true;
    }

    /// For gRPC upstreams: applies the size bound to each message instead of to their sum.
    pub fn bound_messages(&mut self) {
        self.messages = Some(Messages::default());
    }

    /// Removes from its trailers every field that a server could read as one of the gateway's own
    /// or as a credential.
    pub fn remove_from_trailers(&mut self, managed: &Arc<ManagedFields>) {
        if !self.is_end_stream() {
            self.managed = Some(Arc::clone(managed));
        }
    }

    /// Changes the bound on its length.
    pub fn set_max_bytes(&mut self, max_bytes: u64) {
        self.max_bytes = max_bytes;
    }

    /// Lifts the silence bound from here on. The response has begun, and its forwarder ends both
    /// when neither side sends.
    pub fn may_pause(&mut self) {
        self.may_pause = true;
    }

    /// Whether it is known that nothing more arrives.
    pub fn has_ended(&self) -> bool {
        self.is_end_stream()
    }

    /// Whether its announced length exceeds the bound.
    pub fn is_too_large(&self) -> bool {
        self.messages.is_none() && self.size_hint().lower() > self.max_bytes
    }

    /// Reads the whole body into memory, to be inspected and then passed on unchanged. `None` if it
    /// exceeds `most` bytes; the bytes read are still passed on. `body_timeout` bounds the total
    /// time, since no other timeout bounds how long the memory is held. All buffered bodies share
    /// `buffers`, of which one client address may use a part.
    pub async fn read_ahead(
        &mut self,
        most: usize,
        buffers: &Arc<BodyBuffers>,
        client: IpNet,
    ) -> Result<Option<Bytes>, InboundError> {
        if self.is_too_large() {
            return Err(InboundError::TooLarge(self.max_bytes));
        }
        if self.size_hint().lower() > most as u64 {
            return Ok(None);
        }
        let patience = self.from.listener.body_timeout;
        let reading = tokio::time::timeout(
            patience,
            self.read_whole(most, BodyBuffer::new(buffers, client)),
        );
        reading.await.unwrap_or(Err(InboundError::Late(patience)))
    }

    async fn read_whole(
        &mut self,
        most: usize,
        mut whole: BodyBuffer,
    ) -> Result<Option<Bytes>, InboundError> {
        let (mut behind, mut is_whole) = (None, true);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut *self).poll_frame(cx)).await {
            match frame?.into_data() {
                Ok(data) if data.len() <= most - whole.len() => {
                    if !whole.append(&data) {
                        return Err(InboundError::NoRoom);
                    }
                }
                Ok(data) => {
                    (behind, is_whole) = (Some(Frame::data(data)), false);
                    break;
                }
                // trailers are the last frame
                Err(trailers) => behind = Some(trailers),
            }
        }
        let whole = whole.freeze();
        self.ahead = Some(whole.clone()).filter(|ahead| !ahead.is_empty());
        self.behind = behind.map(Box::new);
        Ok(is_whole.then_some(whole))
    }

    /// Passes on this beginning in place of the first `replaced` bytes of a body that was read
    /// whole. `false`, and no change, if it was not.
    pub fn replace_beginning(&mut self, beginning: Bytes, replaced: usize) -> bool {
        let Some(whole) = self.ahead.take_if(|whole| whole.len() > replaced) else {
            return false;
        };
        if self.behind.is_some() {
            self.ahead = Some(whole);
            return false;
        }
        self.behind = Some(Box::new(Frame::data(whole.slice(replaced..))));
        self.ahead = Some(beginning);
        true
    }

    /// Also stores its bytes received so far here, as they arrive.
    pub fn count_into(&mut self, count: Rc<Cell<u64>>) {
        count.set(self.seen_bytes);
        self.count = Some(count);
    }

    fn without_managed(&self, mut frame: Frame<Bytes>) -> Frame<Bytes> {
        if let (Some(managed), Some(trailers)) = (&self.managed, frame.trailers_mut()) {
            let is_forbidden = |name: &&HeaderName| managed.forbids_trailer(name.as_str());
            let named: Vec<HeaderName> = trailers.keys().filter(is_forbidden).cloned().collect();
            for name in named {
                trailers.remove(name);
            }
        }
        frame
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<InboundError> {
        let since = *self.silent_since.get_or_insert_with(|| {
            self.from.needs_client(true);
            Instant::now()
        });
        if self.may_pause {
            return Poll::Pending;
        }
        let max_silence = self.from.listener.body_timeout;
        let allowance = self.allowance();
        let deadline = since + max_silence.min(allowance);
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        loop {
            std::task::ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(match allowance < max_silence {
                    true => InboundError::TooSlow(self.from.listener.min_body_rate),
                    false => InboundError::Silent(max_silence),
                });
            }
            timer.as_mut().reset(deadline);
        }
    }

    /// Remaining wait before the body counts as too slow.
    fn allowance(&self) -> Duration {
        let min_rate = self.from.listener.min_body_rate;
        if self.may_trickle || min_rate == 0 {
            return Duration::MAX;
        }
        let earned = Duration::from_secs(self.seen_bytes / min_rate);
        let allowed = self.from.listener.body_timeout.saturating_add(earned);
        allowed.saturating_sub(self.waited)
    }

    /// Maps a read error to the reason that the body ended early.
    fn failure(&self, error: ReadError) -> InboundError {
        let ReadError::Http2(error) = error else {
            return InboundError::Broken(error);
        };
        match self.from.why_cut(&error) {
            Some(cut) => InboundError::Cut(cut),
            None if error.is_remote() || error.is_io() => InboundError::Left(error),
            None => InboundError::Broken(error.into()),
        }
    }

    fn arrived(&mut self) {
        if let Some(since) = self.silent_since.take() {
            self.waited = self.waited.saturating_add(since.elapsed());
            self.from.needs_client(false);
        }
    }
}

impl Body for InboundBody {
    type Data = Bytes;
    type Error = InboundError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, InboundError>>> {
        let this = &mut *self;
        let ahead = this.ahead.take().map(Frame::data);
        if let Some(frame) = ahead.or_else(|| this.behind.take().map(|frame| *frame)) {
            return Poll::Ready(Some(Ok(this.without_managed(frame))));
        }
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            return this.poll_silence(cx).map(|error| Some(Err(error)));
        };
        this.arrived();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            this.seen_bytes = this.seen_bytes.saturating_add(data.len() as u64);
            if let Some(count) = &this.count {
                count.set(this.seen_bytes);
            }
            let length = match &mut this.messages {
                Some(messages) => messages.largest_in(data),
                None => this.seen_bytes,
            };
            if length > this.max_bytes {
                return Poll::Ready(Some(Err(InboundError::TooLarge(this.max_bytes))));
            }
        }
        let frame = frame.map(|frame| frame.map_err(|error| this.failure(error)));
        Poll::Ready(frame.map(|frame| Ok(this.without_managed(frame?))))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_none() && self.behind.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let behind = self.behind.as_deref().and_then(Frame::data_ref);
        let ahead: usize = self.ahead.iter().chain(behind).map(Bytes::len).sum();
        let mut hint = self.body.size_hint();
        if ahead > 0 {
            match hint.exact() {
                Some(rest) => hint.set_exact(rest + ahead as u64),
                None => hint.set_lower(hint.lower() + ahead as u64),
            }
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_measured_however_their_bytes_are_cut() {
        let mut bytes = Vec::new();
        for length in [0_u32, 8, 300, 1] {
            bytes.push(0);
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.resize(bytes.len() + length as usize, 0xff);
        }
        for size in [1, 2, 4, 5, 6, 13, 100, 1000] {
            let mut messages = Messages::default();
            let largest = bytes.chunks(size).map(|part| messages.largest_in(part));
            assert_eq!(largest.max(), Some(305), "in parts of {size} bytes");
            assert_eq!((messages.left, messages.prefix_bytes), (0, 0));
        }
        let announced = [0, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(Messages::default().largest_in(&announced), (1 << 32) + 4);
    }
}
