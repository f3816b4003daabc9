//! Response bodies, ours or an upstream's, and what the gateway records when they end.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Full;

use super::{body_error::BodyError, record::Record, refusals::bad_body};
use crate::{
    listener::inbound::InboundBody,
    response::Grpc,
    upstream::{ResponseBody, Tunnel, echo::EchoBody, forward::ForwardedBody, http2::StreamBody},
};

/// A response body, with the record of a forwarded request. Kept small because responses are moved
/// often.
#[derive(Debug)]
pub struct Body(Content);

#[derive(Debug)]
enum Content {
    /// Our answer to a request that was not forwarded; recorded when the answer was made.
    Authored(Full<Bytes>),
    Recorded(Box<Recorded>),
}

#[derive(Debug)]
struct Recorded {
    source: ResponseSource,
    /// Written when the body is dropped: sent in full, or cut short because the client left.
    record: Record,
    /// Set if the response answers a gRPC call.
    grpc: Option<Grpc>,
    /// We ended the body before its source did.
    has_ended: bool,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.record.custody().is_some() {
            self.source.abandon(&self.record);
        }
    }
}

/// The origin of the response to a forwarded request.
#[derive(Debug)]
pub(super) enum ResponseSource {
    /// We answer in place of the server.
    Authored(Full<Bytes>),
    /// An HTTP/1.1 server.
    Remote(ResponseBody<Box<InboundBody>>),
    /// An HTTP/2 server.
    Stream(Box<StreamBody<Box<InboundBody>>>),
    /// The built-in echo server.
    Echo(EchoBody<Box<InboundBody>>),
}

impl Recorded {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let frame = Pin::new(&mut self.source).poll_frame(cx);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.record.sent(frame.data_ref().map_or(0, Bytes::len));
            }
            Poll::Ready(Some(Err(error))) => {
                let Some(inbound) = error.of_request() else {
                    self.record.broke(error);
                    self.source.abandon(&self.record);
                    return frame;
                };
                let refusal = bad_body(inbound);
                self.record.request_broke(&refusal, error);
                self.source.abandon(&self.record);
                if let Some(trailers) = self.grpc.and_then(|grpc| grpc.trailers(&refusal)) {
                    // End the gRPC call with a proper status.
                    self.has_ended = true;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
            }
            Poll::Ready(None) | Poll::Pending => {}
        }
        frame
    }
}

impl Body {
    pub(super) fn authored(bytes: Bytes) -> Self {
        Self(Content::Authored(Full::new(bytes)))
    }

    pub(super) fn recorded(source: ResponseSource, record: Record, grpc: Option<Grpc>) -> Self {
        Self(Content::Recorded(Box::new(Recorded {
            source,
            record,
            grpc,
            has_ended: false,
        })))
    }
}

impl ResponseSource {
    pub(super) fn authored(bytes: Bytes) -> Self {
        Self::Authored(Full::new(bytes))
    }

    /// Takes the server's end of a connection after 101 Switching Protocols. Leaves an empty body.
    pub(super) fn take_tunnel(&mut self) -> Option<Tunnel> {
        match std::mem::replace(self, Self::authored(Bytes::new())) {
            Self::Remote(body) => body.into_tunnel(),
            Self::Authored(_) | Self::Stream(_) | Self::Echo(_) => None,
        }
    }

    /// Ends an exchange that may still be running. Keeps it while the request holds slots, else
    /// closes it. Leaves an empty body.
    fn abandon(&mut self, record: &Record) {
        let abandoned = match std::mem::replace(self, Self::authored(Bytes::new())) {
            Self::Remote(body) => body.abandon(),
            Self::Stream(body) => body.abandon(),
            Self::Authored(_) | Self::Echo(_) => None,
        };
        if let (Some(custody), Some(abandoned)) = (record.custody(), abandoned) {
            custody.keep(abandoned);
        }
    }

    /// Whether the whole request was sent to the server.
    pub(super) fn request_was_sent(&self) -> bool {
        match self {
            Self::Remote(body) => body.request_was_sent(),
            Self::Stream(body) => body.request_was_sent(),
            Self::Authored(_) | Self::Echo(_) => true,
        }
    }

    /// The request body, while it is still being sent.
    pub(super) fn unsent_mut(&mut self) -> Option<&mut InboundBody> {
        match self {
            Self::Remote(body) => body.unsent_mut().map(Box::as_mut),
            Self::Stream(body) => body.unsent_mut().map(Box::as_mut),
            Self::Authored(_) | Self::Echo(_) => None,
        }
    }
}

impl From<ForwardedBody<Box<InboundBody>>> for ResponseSource {
    fn from(answer: ForwardedBody<Box<InboundBody>>) -> Self {
        match answer {
            ForwardedBody::Remote(body) => Self::Remote(body),
            ForwardedBody::Stream(body) => Self::Stream(body),
            ForwardedBody::Echo(body) => Self::Echo(body),
        }
    }
}

impl HttpBody for ResponseSource {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut *self {
            Self::Authored(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Remote(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Stream(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Echo(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Authored(body) => body.is_end_stream(),
            Self::Remote(body) => body.is_end_stream(),
            Self::Stream(body) => body.is_end_stream(),
            Self::Echo(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Authored(body) => body.size_hint(),
            Self::Remote(body) => body.size_hint(),
            Self::Stream(body) => body.size_hint(),
            Self::Echo(body) => body.size_hint(),
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
        match &mut self.0 {
            Content::Authored(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Content::Recorded(recorded) => recorded.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Content::Authored(body) => body.is_end_stream(),
            Content::Recorded(recorded) => recorded.has_ended || recorded.source.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Content::Authored(body) => body.size_hint(),
            Content::Recorded(recorded) => recorded.source.size_hint(),
        }
    }
}
