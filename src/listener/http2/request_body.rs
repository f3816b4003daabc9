//! The body of a request on an HTTP/2 stream.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, header::CONTENT_LENGTH};
use http_body::{Body, Frame, SizeHint};

use crate::receive_buffer::{ReceiveBuffer, ReceiveBuffers};

/// The DATA and trailers of a stream.
#[derive(Debug)]
pub struct StreamRequestBody {
    /// `None` if no data is left.
    buffer: Option<ReceiveBuffer>,
    /// Bytes still to arrive, if the head announced a length. The h2 crate enforces it.
    left: Option<u64>,
    /// The data has ended; trailers may follow.
    is_at_trailers: bool,
}

impl StreamRequestBody {
    pub(super) fn new(stream: RecvStream, headers: &HeaderMap, buffers: &ReceiveBuffers) -> Self {
        let is_empty = stream.is_end_stream();
        let announced = headers.get(CONTENT_LENGTH);
        let length = announced.and_then(|length| length.to_str().ok()?.parse().ok());
        Self {
            buffer: (!is_empty).then(|| buffers.open(stream)),
            left: if is_empty { Some(0) } else { length },
            is_at_trailers: false,
        }
    }
}

impl Body for StreamRequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let this = &mut *self;
        let Some(buffer) = &this.buffer else {
            return Poll::Ready(None);
        };
        if !this.is_at_trailers {
            match ready!(buffer.poll_data(cx)) {
                Some(Ok(data)) => {
                    let left = &mut this.left;
                    *left = left.map(|left| left.saturating_sub(data.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => {
                    this.buffer = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => this.is_at_trailers = true,
            }
        }
        let trailers = ready!(buffer.poll_trailers(cx));
        this.buffer = None;
        Poll::Ready(
            trailers
                .map(|trailers| trailers.map(Frame::trailers))
                .transpose(),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.buffer
            .as_ref()
            .is_none_or(ReceiveBuffer::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match self.left {
            Some(left) => SizeHint::with_exact(left),
            None => SizeHint::default(),
        }
    }
}
