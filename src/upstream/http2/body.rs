//! The response body of an HTTP/2 server, read at the client's pace. Window is released only for
//! bytes that the client has taken, so the server waits.

use std::{
    error::Error,
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::{
    super::{abandoned::AbandonedExchange, body::BodyInterruption, field_rules},
    pool::StreamPermit,
    upload::Upload,
};
use crate::receive_buffer::ReceiveBuffer;

/// The body of a response on its own stream. Dropping it before its end resets the stream.
#[derive(Debug)]
pub struct StreamBody<B> {
    stage: BodyStage,
    stream: ReceiveBuffer,
    /// Bytes still to arrive, if the head stated a length.
    length: Option<u64>,
    upload: Option<Upload<B>>,
    /// `None` once the exchange is over.
    place: Option<StreamPermit>,
    max_silence: Duration,
    /// When the silence of both sides began.
    silent_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyStage {
    Data,
    Trailers,
    Ended,
}

impl<B> StreamBody<B> {
    pub(super) fn new(
        stream: RecvStream,
        length: Option<u64>,
        upload: Option<Upload<B>>,
        place: StreamPermit,
        max_silence: Duration,
    ) -> Self {
        let mut body = Self {
            stage: BodyStage::Data,
            stream: place.receive(stream),
            length,
            upload,
            place: Some(place),
            max_silence,
            silent_since: None,
            timer: None,
        };
        if body.stream.is_end_stream() {
            body.end();
        }
        body
    }

    /// Whether the request was sent to its end.
    pub fn request_was_sent(&self) -> bool {
        self.upload.is_none()
    }

    /// The request body, while it is still being sent.
    pub fn unsent_mut(&mut self) -> Option<&mut B> {
        self.upload.as_mut().map(Upload::body_mut)
    }

    fn end(&mut self) {
        self.stage = BodyStage::Ended;
        self.upload = None;
        self.place = None;
    }

    /// The server ended the stream or the connection.
    fn lost(&mut self, why: impl ToString) -> BodyInterruption {
        self.end();
        BodyInterruption::Server(why.to_string())
    }

    /// The rest of an unfinished exchange; `None` if it has visibly ended.
    pub fn abandon(mut self) -> Option<AbandonedExchange> {
        let place = self.place.take()?;
        Some(match self.upload {
            None => AbandonedExchange::stream(self.stream, place, self.length.is_some()),
            Some(_) => AbandonedExchange::reset(&place),
        })
    }

    /// Whether a reset is a regular end of the body. A server that has answered in full may stop an
    /// upload with it (RFC 9113 §8.1). The h2 crate then forgets that the response was complete.
    fn ends_with(&self, error: &h2::Error) -> bool {
        self.upload.is_some()
            && error.is_remote()
            && error.is_reset()
            && error.reason() == Some(Reason::NO_ERROR)
            && self.length.is_none_or(|left| left == 0)
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<BodyInterruption> {
        let since = *self.silent_since.get_or_insert_with(Instant::now);
        let deadline = since + self.max_silence;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                break;
            }
            timer.as_mut().reset(deadline);
        }
        // keep the permit: the server may continue
        self.stage = BodyStage::Ended;
        Poll::Ready(BodyInterruption::Server(format!(
            "silent for {:?}",
            self.max_silence
        )))
    }
}

impl<B> StreamBody<B>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    /// Sends the rest of the request. A server that stops accepting it is not an error.
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Result<(), BodyInterruption> {
        let Some(upload) = &mut self.upload else {
            return Ok(());
        };
        let before = upload.progress();
        let polled = upload.poll(cx);
        if upload.progress() != before {
            self.silent_since = None;
        }
        match polled {
            Poll::Pending => Ok(()),
            Poll::Ready(Ok(())) => {
                self.upload = None;
                Ok(())
            }
            Poll::Ready(Err(error)) => {
                // keep the permit: the server may continue
                self.stage = BodyStage::Ended;
                Err(BodyInterruption::RequestBody(error.into()))
            }
        }
    }
}

impl<B> Body for StreamBody<B>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    type Data = Bytes;
    type Error = BodyInterruption;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyInterruption>>> {
        let this = &mut *self;
        this.poll_upload(cx)?;
        while this.stage == BodyStage::Data {
            let Poll::Ready(data) = this.stream.poll_data(cx) else {
                return this.poll_silence(cx).map(|silent| Some(Err(silent)));
            };
            this.silent_since = None;
            match data {
                Some(Ok(data)) => {
                    if let Some(left) = &mut this.length {
                        *left = left.saturating_sub(data.len() as u64);
                    }
                    if !data.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Some(Err(error)) if this.ends_with(&error) => this.end(),
                Some(Err(error)) => return Poll::Ready(Some(Err(this.lost(error)))),
                None => this.stage = BodyStage::Trailers,
            }
        }
        if this.stage == BodyStage::Trailers {
            let Poll::Ready(trailers) = this.stream.poll_trailers(cx) else {
                return this.poll_silence(cx).map(|silent| Some(Err(silent)));
            };
            match trailers {
                Ok(trailers) => {
                    this.end();
                    let mut trailers = trailers.unwrap_or_default();
                    field_rules::retain_trailers(&mut trailers);
                    if !trailers.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                    }
                }
                Err(error) if this.ends_with(&error) => this.end(),
                Err(error) => return Poll::Ready(Some(Err(this.lost(error)))),
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.stage == BodyStage::Ended
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Some(left) => SizeHint::with_exact(left),
            None => SizeHint::default(),
        }
    }
}
