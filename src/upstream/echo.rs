//! `builtin:echo`: an upstream without an origin. It answers with the request head exactly as a
//! server would receive it, followed by the request body. You can try a new configuration on a
//! machine without servers. The body is streamed, not buffered.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body, Frame, SizeHint};

use super::headers::{self, Outbound};

/// Answers `request` with its own head and body.
pub(super) fn respond<B>(request: &Outbound<'_>, body: Option<B>) -> Response<EchoBody<B>> {
    let mut head = BytesMut::with_capacity(512);
    headers::write_head(&mut head, request, request.host.as_bytes());
    let mut response = Response::new(EchoBody {
        head: head.freeze(),
        body,
    });
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// The head, then the request body.
#[derive(Debug)]
pub struct EchoBody<B> {
    head: Bytes,
    body: Option<B>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for EchoBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.head.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.head)))));
        }
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let frame = std::task::ready!(Pin::new(body).poll_frame(cx));
        if frame
            .as_ref()
            .is_none_or(|frame| frame.as_ref().is_ok_and(Frame::is_trailers))
        {
            self.body = None;
            return Poll::Ready(None);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.head.is_empty() && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match self
            .body
            .as_ref()
            .map_or(Some(0), |body| body.size_hint().exact())
        {
            Some(length) => SizeHint::with_exact(self.head.len() as u64 + length),
            None => SizeHint::default(),
        }
    }
}
