//! The body of a response, whoever wrote it, and what is noted when it ends.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::record::Record;
use crate::{
    listener::inbound::{InboundBody, InboundError},
    upstream::{
        ResponseBody, Tunnel, body::Interrupted, echo::EchoBody, forward::Answer, http2::StreamBody,
    },
};

/// The body of a response.
#[derive(Debug)]
pub struct Body {
    source: Source,
    /// Noted when the body is dropped: sent in full, or given up because the client is gone.
    record: Option<Record>,
}

#[derive(Debug)]
enum Source {
    /// Ours.
    Authored(Bytes),
    /// A server's.
    Remote(ResponseBody<Box<InboundBody>>),
    /// A server's that speaks HTTP/2.
    Stream(Box<StreamBody<Box<InboundBody>>>),
    /// The built-in server's.
    Echo(EchoBody<Box<InboundBody>>),
}

/// Why a response body ended before its end; the client's connection ends with it.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The server's side of it.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The request's side, while the built-in server was sending it back.
    #[error(transparent)]
    Inbound(#[from] InboundError),
}

impl Body {
    pub(super) fn authored(bytes: Bytes) -> Self {
        Self {
            source: Source::Authored(bytes),
            record: None,
        }
    }

    /// The server's end of a connection that its response has switched to another protocol. What is left is empty.
    pub(super) fn take_tunnel(&mut self) -> Option<Tunnel> {
        match std::mem::replace(&mut self.source, Source::Authored(Bytes::new())) {
            Source::Remote(body) => body.into_tunnel(),
            Source::Authored(_) | Source::Stream(_) | Source::Echo(_) => None,
        }
    }

    /// Whether the request was sent on to its end.
    pub(super) fn request_was_sent(&self) -> bool {
        match &self.source {
            Source::Remote(body) => body.request_was_sent(),
            Source::Stream(body) => body.request_was_sent(),
            Source::Authored(_) | Source::Echo(_) => true,
        }
    }

    /// The request's body, while it is still being sent.
    pub(super) fn unsent_mut(&mut self) -> Option<&mut InboundBody> {
        match &mut self.source {
            Source::Remote(body) => body.unsent_mut().map(Box::as_mut),
            Source::Stream(body) => body.unsent_mut().map(Box::as_mut),
            Source::Authored(_) | Source::Echo(_) => None,
        }
    }

    pub(super) fn record(mut self, record: Record) -> Self {
        self.record = Some(record);
        self
    }
}

impl From<Answer<Box<InboundBody>>> for Body {
    fn from(answer: Answer<Box<InboundBody>>) -> Self {
        Self {
            source: match answer {
                Answer::Remote(body) => Source::Remote(body),
                Answer::Stream(body) => Source::Stream(body),
                Answer::Echo(body) => Source::Echo(body),
            },
            record: None,
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let frame = match &mut this.source {
            Source::Authored(bytes) if bytes.is_empty() => Poll::Ready(None),
            Source::Authored(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Source::Remote(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Source::Stream(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Source::Echo(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
        };
        if let (Poll::Ready(Some(frame)), Some(record)) = (&frame, &mut this.record) {
            match frame {
                Ok(frame) => record.sent(frame.data_ref().map_or(0, Bytes::len)),
                Err(error) => record.broke(error),
            }
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Authored(bytes) => bytes.is_empty(),
            Source::Remote(body) => body.is_end_stream(),
            Source::Stream(body) => body.is_end_stream(),
            Source::Echo(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Authored(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Source::Remote(body) => body.size_hint(),
            Source::Stream(body) => body.size_hint(),
            Source::Echo(body) => body.size_hint(),
        }
    }
}
