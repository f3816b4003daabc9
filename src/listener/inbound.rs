//! A request body as it arrives: bounded in size, in silence and in slowness, never collected.
//!
//! A client that sends one byte whenever it is about to be too silent keeps a connection to the origin for as long as it
//! likes. So the time for which a body was waited for, all silences together, is bounded by `body_timeout` and what its bytes
//! would have taken at `min_body_rate`. Time in which the origin did not read is not waited for.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use super::Peer;

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
    /// Its bytes are not framed as announced, or the client is gone; 400 if anybody still listens.
    #[error("the request body cannot be read: {0}")]
    Broken(hyper::Error),
}

/// The body of a request, with the bounds that it is held to.
#[derive(Debug)]
pub struct InboundBody {
    body: Incoming,
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
    ahead: VecDeque<Frame<Bytes>>,
}

impl InboundBody {
    /// Held to the bounds of the listener that it came through.
    pub fn new(body: Incoming, from: &Rc<Peer>) -> Self {
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
            ahead: VecDeque::new(),
        }
    }

    /// It may be as slow as it likes, though not silent: a stream of messages whose pace is the client's business.
    pub fn may_trickle(&mut self) {
        self.min_rate = 0;
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
        self.size_hint().lower() > self.max_bytes
    }

    /// Reads the whole body into memory, to look at it before it is handed on, unchanged. `None` where it is longer than
    /// `most` bytes: what was read by then is still handed on. It has `body_timeout` for that, since nobody else bounds how
    /// long the memory is held.
    pub async fn read_ahead(&mut self, most: usize) -> Result<Option<Bytes>, InboundError> {
        if self.is_too_large() {
            return Err(InboundError::TooLarge(self.max_bytes));
        }
        if self.size_hint().lower() > most as u64 {
            return Ok(None);
        }
        let patience = self.from.listener.body_timeout;
        let reading = tokio::time::timeout(patience, self.read_whole(most));
        reading.await.unwrap_or(Err(InboundError::Late(patience)))
    }

    async fn read_whole(&mut self, most: usize) -> Result<Option<Bytes>, InboundError> {
        let mut whole = BytesMut::new();
        let mut ahead = VecDeque::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut *self).poll_frame(cx)).await {
            let frame = frame?;
            if let Some(data) = frame.data_ref() {
                whole.extend_from_slice(data);
            }
            ahead.push_back(frame);
            if whole.len() > most {
                break;
            }
        }
        self.ahead = ahead;
        Ok((whole.len() <= most).then(|| whole.freeze()))
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
        if let Some(frame) = this.ahead.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            return this.poll_silence(cx).map(|error| Some(Err(error)));
        };
        this.arrived();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            this.from.body_arrived(data.len());
            this.seen_bytes = this.seen_bytes.saturating_add(data.len() as u64);
            if this.seen_bytes > this.max_bytes {
                return Poll::Ready(Some(Err(InboundError::TooLarge(this.max_bytes))));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(InboundError::Broken)))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let ahead: usize = self
            .ahead
            .iter()
            .filter_map(Frame::data_ref)
            .map(Bytes::len)
            .sum();
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
