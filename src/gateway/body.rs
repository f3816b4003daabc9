//! Response bodies, ours or an upstream's, and what the gateway records when they end.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::{body_error::BodyError, metered_answer::StreamCut, record::Record, refusals::bad_body};
use crate::{
    body::{AnswerBody, BodyPiece},
    listener::inbound::InboundBody,
    response::Grpc,
    upstream::{Tunnel, forwarded_body::ForwardedBody},
};

/// A response body, with the record of a forwarded request. Kept small because responses are moved
/// often.
#[derive(Debug)]
pub struct Body(Content);

#[derive(Debug)]
enum Content {
    /// Our answer to a request that was not forwarded; recorded when the answer was made. `None`
    /// once it is sent.
    Authored(Option<Bytes>),
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
        if self.record.abandoned_exchanges().is_some() {
            self.source.abandon(&self.record);
        }
    }
}

/// The origin of the response to a forwarded request.
#[derive(Debug)]
pub(super) enum ResponseSource {
    /// We answer in place of the server. `None` once it is sent.
    Authored(Option<Bytes>),
    /// A server.
    Forwarded(ForwardedBody<Box<InboundBody>>),
}

impl Recorded {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPiece, BodyError>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let mut piece = self.source.poll_piece(cx);
        match &mut piece {
            Poll::Ready(Some(Ok(piece))) => {
                if let Some(cut) = self.meter(piece) {
                    return self.end_early(piece, cut);
                }
                self.record.sent(piece.data_bytes());
            }
            Poll::Ready(Some(Err(error))) => {
                let Some(inbound) = error.of_request() else {
                    self.record.record_body_error(error);
                    self.source.abandon(&self.record);
                    return piece;
                };
                let refusal = bad_body(inbound);
                self.record.request_broke(&refusal, error);
                self.source.abandon(&self.record);
                if let Some(trailers) = self.grpc.and_then(|grpc| grpc.trailers(&refusal)) {
                    // End the gRPC call with a proper status.
                    self.has_ended = true;
                    return Poll::Ready(Some(Ok(BodyPiece::Trailers(trailers))));
                }
            }
            Poll::Ready(None) => {
                if let Some(costs) = self.record.costs_mut() {
                    costs.ended();
                }
            }
            Poll::Pending => {}
        }
        piece
    }

    /// Shows a piece to the limits on costs. Says if the stream ends here.
    fn meter(&mut self, piece: &mut BodyPiece) -> Option<StreamCut> {
        let costs = self.record.costs_mut()?;
        let cut = match piece {
            BodyPiece::Data(data) => costs.feed(data),
            BodyPiece::Trailers(trailers) => {
                costs.trailers(trailers);
                None
            }
        };
        if cut.is_none() && (self.source.has_ended() || matches!(piece, BodyPiece::Trailers(_))) {
            costs.ended();
        }
        cut
    }

    /// Ends a stream whose key has nothing left: behind its last event if its framing allows more,
    /// else at once.
    fn end_early(
        &mut self,
        piece: &BodyPiece,
        cut: StreamCut,
    ) -> Poll<Option<Result<BodyPiece, BodyError>>> {
        let is_framed = self.source.exact_bytes().is_some();
        self.source.abandon(&self.record);
        self.has_ended = true;
        match (cut, piece) {
            (StreamCut::After(end, event), BodyPiece::Data(data)) if !is_framed => {
                let kept = data.get(..end).unwrap_or(data);
                let last = Bytes::from([kept, &event[..]].concat());
                self.record.sent(last.len());
                Poll::Ready(Some(Ok(BodyPiece::Data(last))))
            }
            _ => Poll::Ready(Some(Err(BodyError::Spent))),
        }
    }
}

impl Body {
    pub(super) fn authored(bytes: Bytes) -> Self {
        Self(Content::Authored(whole(bytes)))
    }

    pub(super) fn recorded(source: ResponseSource, record: Record, grpc: Option<Grpc>) -> Self {
        Self(Content::Recorded(Box::new(Recorded {
            source,
            record,
            grpc,
            has_ended: false,
        })))
    }

    /// The bytes of an answer to a request that was not forwarded; none of any other.
    pub(super) fn into_authored(self) -> Bytes {
        match self.0 {
            Content::Authored(bytes) => bytes.unwrap_or_default(),
            Content::Recorded(_) => Bytes::new(),
        }
    }
}

/// A body in one piece; an empty one has none.
fn whole(bytes: Bytes) -> Option<Bytes> {
    (!bytes.is_empty()).then_some(bytes)
}

impl ResponseSource {
    pub(super) fn authored(bytes: Bytes) -> Self {
        Self::Authored(whole(bytes))
    }

    /// Takes the server's end of a connection after 101 Switching Protocols. Leaves an empty body.
    pub(super) fn take_tunnel(&mut self) -> Option<Tunnel> {
        self.take()?.into_tunnel()
    }

    /// Ends an exchange that may still be running. Keeps it while the request holds slots, else
    /// closes it. Leaves an empty body.
    fn abandon(&mut self, record: &Record) {
        let abandoned = self.take().and_then(ForwardedBody::abandon);
        if let (Some(custody), Some(abandoned)) = (record.abandoned_exchanges(), abandoned) {
            custody.keep(abandoned);
        }
    }

    fn take(&mut self) -> Option<ForwardedBody<Box<InboundBody>>> {
        match std::mem::replace(self, Self::Authored(None)) {
            Self::Forwarded(body) => Some(body),
            Self::Authored(_) => None,
        }
    }

    /// Whether the whole request was sent to the server.
    pub(super) fn request_was_sent(&self) -> bool {
        match self {
            Self::Forwarded(body) => body.request_was_sent(),
            Self::Authored(_) => true,
        }
    }

    /// The request body, while it is still being sent.
    pub(super) fn unsent_mut(&mut self) -> Option<&mut InboundBody> {
        match self {
            Self::Forwarded(body) => body.unsent_mut().map(Box::as_mut),
            Self::Authored(_) => None,
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPiece, BodyError>>> {
        match self {
            Self::Authored(bytes) => next(bytes),
            Self::Forwarded(body) => body.poll_piece(cx),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        match self {
            Self::Authored(bytes) => bytes.is_none(),
            Self::Forwarded(body) => body.has_ended(),
        }
    }

    fn exact_bytes(&self) -> Option<u64> {
        match self {
            Self::Authored(bytes) => Some(bytes_in(bytes)),
            Self::Forwarded(body) => body.exact_bytes(),
        }
    }
}

/// The one piece of a body of ours.
fn next(bytes: &mut Option<Bytes>) -> Poll<Option<Result<BodyPiece, BodyError>>> {
    Poll::Ready(bytes.take().map(|bytes| Ok(BodyPiece::Data(bytes))))
}

fn bytes_in(bytes: &Option<Bytes>) -> u64 {
    bytes.as_ref().map_or(0, Bytes::len) as u64
}

impl From<ForwardedBody<Box<InboundBody>>> for ResponseSource {
    fn from(body: ForwardedBody<Box<InboundBody>>) -> Self {
        Self::Forwarded(body)
    }
}

impl AnswerBody for Body {
    type Error = BodyError;

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPiece, BodyError>>> {
        match &mut self.0 {
            Content::Authored(bytes) => next(bytes),
            Content::Recorded(recorded) => recorded.poll_piece(cx),
        }
    }

    fn has_ended(&self) -> bool {
        match &self.0 {
            Content::Authored(bytes) => bytes.is_none(),
            Content::Recorded(recorded) => recorded.has_ended || recorded.source.has_ended(),
        }
    }

    fn exact_bytes(&self) -> Option<u64> {
        match &self.0 {
            Content::Authored(bytes) => Some(bytes_in(bytes)),
            Content::Recorded(recorded) => recorded.source.exact_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_no_larger_than_that_of_its_server() {
        assert!(size_of::<Body>() <= 40);
        let server = size_of::<ForwardedBody<Box<InboundBody>>>();
        assert_eq!(size_of::<ResponseSource>(), server);
    }
}
