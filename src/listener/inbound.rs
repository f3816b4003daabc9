//! A request body as it arrives: bounded in size and in silence, never collected.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

/// Why a request body ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum InboundError {
    /// It is longer than the bound; 413.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(u64),
    /// Nothing arrived for too long; 408.
    #[error("the request body paused for more than {0:?}")]
    Silent(Duration),
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
    max_silence: Duration,
    /// Since when nothing has arrived, and the timer for it; made only for a body that has to be waited for.
    silence: Option<(Instant, Pin<Box<Sleep>>)>,
    silent: bool,
    /// What was read before it was asked for, to be handed on first.
    ahead: VecDeque<Frame<Bytes>>,
}

impl InboundBody {
    /// At most `max_bytes` long, and never silent for longer than `max_silence`.
    pub fn new(body: Incoming, max_bytes: u64, max_silence: Duration) -> Self {
        Self {
            body,
            max_bytes,
            seen_bytes: 0,
            max_silence,
            silence: None,
            silent: false,
            ahead: VecDeque::new(),
        }
    }

    /// Another bound on its length.
    pub fn set_max_bytes(&mut self, max_bytes: u64) {
        self.max_bytes = max_bytes;
    }

    /// Whether its announced length is above the bound.
    pub fn is_too_large(&self) -> bool {
        self.size_hint().lower() > self.max_bytes
    }

    /// Reads the whole body into memory, to look at it before it is handed on, unchanged. `None` where it is longer than
    /// `most` bytes: what was read by then is still handed on.
    pub async fn read_ahead(&mut self, most: usize) -> Result<Option<Bytes>, InboundError> {
        if self.is_too_large() {
            return Err(InboundError::TooLarge(self.max_bytes));
        }
        if self.size_hint().lower() > most as u64 {
            return Ok(None);
        }
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
        let now = Instant::now();
        let (since, timer) = self
            .silence
            .get_or_insert_with(|| (now, Box::pin(tokio::time::sleep(self.max_silence))));
        if !self.silent {
            *since = now;
            self.silent = true;
        }
        let deadline = *since + self.max_silence;
        loop {
            std::task::ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(InboundError::Silent(self.max_silence));
            }
            timer.as_mut().reset(deadline);
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
        this.silent = false;
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
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
