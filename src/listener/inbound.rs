//! A request body as it arrives: bounded in size, in silence and in slowness, and collected only where a limit is keyed by one of
//! its fields.
//!
//! A client that sends one byte whenever it is about to be too silent keeps a connection to the origin for as long as it
//! likes. So the time for which a body was waited for, all silences together, is bounded by `body_timeout` and what its bytes
//! would have taken at `min_body_rate`. Time in which the origin did not read is not waited for.

use std::{
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
    body_buffers::{BodyBuffer, BodyBuffers},
    http2::StreamRequestBody,
    ledger::Cut,
};
use crate::identity::ManagedFields;

/// Why a request body ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum InboundError {
    /// It is longer than the bound; 413.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(u64),
    /// Nothing arrived for too long; 408.
    #[error("the request body paused for more than {0:?}")]
    Silent(Duration),
    /// It arrives too slowly; 408.
    #[error("the request body arrives at less than {0} bytes a second")]
    TooSlow(u64),
    /// It is read ahead, and was not here in time; 408.
    #[error("the request body was not whole within {0:?}")]
    Late(Duration),
    /// It is read ahead, and other bodies use all the memory that there is for that; 503.
    #[error("the bodies that are read ahead use all of max_body_buffer")]
    NoRoom,
    /// Its bytes are not framed as announced, or an HTTP/1 client is gone; 400 if anybody still listens.
    #[error("the request body cannot be read: {0}")]
    Broken(ReadError),
    /// The client has taken its request back, or has left. HTTP/2 only.
    #[error("the client has left: {0}")]
    Left(h2::Error),
    /// The whole connection was cut short, for what the client does.
    #[error("{0}")]
    Cut(Cut),
}

/// Why a request body cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// As HTTP/1.
    #[error(transparent)]
    Http1(#[from] hyper::Error),
    /// As HTTP/2.
    #[error(transparent)]
    Http2(#[from] h2::Error),
}

/// A request body without any bounds of ours.
#[derive(Debug)]
pub enum RequestBody {
    /// Of HTTP/1.
    Http1(Incoming),
    /// Of an HTTP/2 stream.
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

/// The body of a request, with the bounds that it is held to.
#[derive(Debug)]
pub struct InboundBody {
    body: RequestBody,
    max_bytes: u64,
    seen_bytes: u64,
    from: Rc<Peer>,
    min_rate: u64,
    /// How long it was waited for, all silences together.
    waited: Duration,
    /// Since when nothing has arrived.
    silent_since: Option<Instant>,
    /// Made only for a body that has to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
    /// Somebody else ends it when it is silent.
    may_pause: bool,
    /// What was read before it was asked for, to be handed on first.
    ahead: Option<Bytes>,
    /// What comes behind that and has been read, too: trailers, or the piece that made it too long to be read ahead.
    behind: Option<Box<Frame<Bytes>>>,
    /// Of gRPC, where each message is bounded instead of the whole.
    messages: Option<Messages>,
    /// What may not stand in its trailers.
    managed: Option<Arc<ManagedFields>>,
}

/// The messages of a gRPC call, found by their prefixes: one byte of flags, four of length.
#[derive(Debug, Default)]
struct Messages {
    prefix: [u8; 5],
    prefix_bytes: usize,
    /// Bytes of the message under way that are still to come.
    left: u64,
}

impl Messages {
    /// The size of the largest message that begins in these bytes, with its prefix; 0 where none does.
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
    /// Held to the bounds of the listener that it came through.
    pub fn new(body: RequestBody, from: &Rc<Peer>) -> Self {
        Self {
            body,
            max_bytes: from.listener.max_body_bytes,
            seen_bytes: 0,
            min_rate: from.listener.min_body_rate,
            from: Rc::clone(from),
            waited: Duration::ZERO,
            silent_since: None,
            timer: None,
            may_pause: false,
            messages: None,
            managed: None,
            ahead: None,
            behind: None,
        }
    }

    /// It may be as slow as it likes, though not silent: a stream of messages whose pace is the client's business.
    pub fn may_trickle(&mut self) {
        self.min_rate = 0;
    }

    /// It is a gRPC call to a server of gRPC: the bound on its length holds for each message, not for all of them.
    pub fn bound_messages(&mut self) {
        self.messages = Some(Messages::default());
    }

    /// Its trailers lose every field that a server could read as one that only the gateway may set.
    pub fn remove_from_trailers(&mut self, managed: &Arc<ManagedFields>) {
        if !self.is_end_stream() {
            self.managed = Some(Arc::clone(managed));
        }
    }

    /// Another bound on its length.
    pub fn set_max_bytes(&mut self, max_bytes: u64) {
        self.max_bytes = max_bytes;
    }

    /// It may be silent for as long as it likes from here on: the response has begun, and whoever passes that on ends both
    /// when neither side sends anything.
    pub fn may_pause(&mut self) {
        self.may_pause = true;
    }

    /// Whether its announced length is above the bound.
    pub fn is_too_large(&self) -> bool {
        self.messages.is_none() && self.size_hint().lower() > self.max_bytes
    }

    /// Reads the whole body into memory, to look at it before it is handed on, unchanged. `None` where it is longer than
    /// `most` bytes: what was read by then is still handed on. It has `body_timeout` for that, since nobody else bounds how
    /// long the memory is held, and shares `buffers` with all others, of which one client address may use a part.
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
                // nothing comes behind trailers
                Err(trailers) => behind = Some(trailers),
            }
        }
        let whole = whole.freeze();
        self.ahead = Some(whole.clone()).filter(|ahead| !ahead.is_empty());
        self.behind = behind.map(Box::new);
        Ok(is_whole.then_some(whole))
    }

    fn without_managed(&self, mut frame: Frame<Bytes>) -> Frame<Bytes> {
        if let (Some(managed), Some(trailers)) = (&self.managed, frame.trailers_mut()) {
            let is_managed = |name: &&HeaderName| managed.contains(name.as_str());
            let named: Vec<HeaderName> = trailers.keys().filter(is_managed).cloned().collect();
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
                    true => InboundError::TooSlow(self.min_rate),
                    false => InboundError::Silent(max_silence),
                });
            }
            timer.as_mut().reset(deadline);
        }
    }

    /// How long may still be waited for it before it is too slow.
    fn allowance(&self) -> Duration {
        if self.min_rate == 0 {
            return Duration::MAX;
        }
        let earned = Duration::from_secs(self.seen_bytes / self.min_rate);
        let allowed = self.from.listener.body_timeout.saturating_add(earned);
        allowed.saturating_sub(self.waited)
    }

    /// What it means that the body ends before its end.
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
