//! The body of a request on its way to a server, read from the client only as the server's window
//! allows.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::SendStream;
use http::HeaderMap;
use http_body::Body;

use super::super::field_rules;

/// A body being sent. Dropping it before its end resets the stream.
#[derive(Debug)]
pub(in crate::upstream) struct Upload<B> {
    stream: SendStream<Bytes>,
    body: B,
    /// Bytes that the client has delivered and the window does not allow yet.
    chunk: Bytes,
    /// Whether any of the body was taken.
    begun: bool,
    waits_for_client: bool,
    /// The stream accepts no more.
    stopped: bool,
    progress: u64,
}

impl<B> Upload<B> {
    pub(super) fn new(stream: SendStream<Bytes>, body: B) -> Self {
        Self {
            stream,
            body,
            chunk: Bytes::new(),
            begun: false,
            waits_for_client: false,
            stopped: false,
            progress: 0,
        }
    }

    /// The body, if none of it was taken.
    pub(super) fn untouched(self) -> Option<B> {
        (!self.begun).then_some(self.body)
    }

    /// Whether all delivered bytes were sent, and more are expected.
    pub(super) fn waits_for_client(&self) -> bool {
        self.waits_for_client
    }

    /// Bytes sent so far, to distinguish a slow server from a stalled one.
    pub(super) fn progress(&self) -> u64 {
        self.progress
    }

    pub(in crate::upstream) fn body_mut(&mut self) -> &mut B {
        &mut self.body
    }
}

impl<B: Body<Data = Bytes> + Unpin> Upload<B> {
    /// Ready when everything is sent. Pending forever if the stream accepts no more: its response
    /// gives the reason.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), B::Error>> {
        self.waits_for_client = false;
        while !self.stopped {
            if !self.chunk.is_empty() {
                if ready!(self.poll_send_some(cx)).is_err() {
                    self.stopped = true;
                } else if self.chunk.is_empty() && self.body.is_end_stream() {
                    return self.poll_end(None);
                }
                continue;
            }
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
                self.waits_for_client = true;
                return Poll::Pending;
            };
            self.begun = true;
            let Some(frame) = frame.transpose()? else {
                return self.poll_end(None);
            };
            match frame.into_data() {
                Ok(data) => self.chunk = data,
                Err(frame) => return self.poll_end(frame.into_trailers().ok()),
            }
        }
        Poll::Pending
    }

    /// Sends as much of the chunk as the window allows.
    fn poll_send_some(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        self.stream.reserve_capacity(self.chunk.len());
        while self.stream.capacity() == 0 {
            match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Err(h2::Reason::CANCEL.into())),
            }
        }
        let room = self.stream.capacity().min(self.chunk.len());
        let data = self.chunk.split_to(room);
        self.progress += data.len() as u64;
        Poll::Ready(self.stream.send_data(data, false))
    }

    fn poll_end(&mut self, trailers: Option<HeaderMap>) -> Poll<Result<(), B::Error>> {
        let mut trailers = trailers.unwrap_or_default();
        field_rules::retain_trailers(&mut trailers);
        let ended = if trailers.is_empty() {
            self.stream.send_data(Bytes::new(), true)
        } else {
            self.stream.send_trailers(trailers)
        };
        self.stopped = ended.is_err();
        match self.stopped {
            true => Poll::Pending,
            false => Poll::Ready(Ok(())),
        }
    }
}
