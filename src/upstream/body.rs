//! The response body: read from the server at the client's pace, never buffered whole.
//!
//! The rest of the request body is sent meanwhile, as a server may answer early. If the server cuts
//! a body short, the body ends in an error, so the client's side breaks too. A truncated response
//! never looks complete. When it ends cleanly and the request was sent in full, the connection
//! returns to the pool at once.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Empty;
use tokio::time::Instant;

use super::{
    Tunnel,
    framing::{DecoderOutput, Framing},
    pool::{ServerConnection, ServerPool},
    request_writer::{RequestWriteError, RequestWriter},
};

/// Why a response body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyInterruption {
    /// The server closed, reset, or violated the framing.
    #[error("the server's response was cut short: {0}")]
    Server(String),
    /// The client's request body failed during the response.
    #[error("the request body failed during the response: {0}")]
    RequestBody(Box<dyn Error + Send + Sync>),
}

/// The body of a response from a server.
#[derive(Debug)]
pub struct ResponseBody<B> {
    pub(super) framing: Framing,
    /// `None` once the connection has returned to the pool or is lost.
    pub(super) connection: Option<Box<ServerConnection>>,
    /// The unsent rest of the request. Boxed, as it is rare.
    pub(super) sending: Option<Box<RequestWriter<B>>>,
    /// Whether the server stopped reading before the end of the request.
    pub(super) refused_body: bool,
    /// Whether the connection may carry another exchange.
    pub(super) reusable: bool,
    max_silence: Duration,
    /// When the head arrived.
    began: Instant,
    /// Whether any read had to wait since.
    waited: bool,
    /// When the current silence of the server began.
    silent_since: Option<Instant>,
    /// Whether it ended in an error on our side, while the server may continue.
    pub(super) gave_up: bool,
}

impl<B> ResponseBody<B> {
    pub(super) fn new(
        framing: Framing,
        connection: Box<ServerConnection>,
        sending: Option<RequestWriter<B>>,
        refused_body: bool,
        keep_alive: bool,
        max_silence: Duration,
        began: Instant,
    ) -> Self {
        let reusable = keep_alive
            && !refused_body
            && !matches!(framing, Framing::UntilClose | Framing::Switched);
        let mut body = Self {
            framing,
            connection: Some(connection),
            sending: sending.map(Box::new),
            refused_body,
            reusable,
            max_silence,
            began,
            waited: false,
            silent_since: None,
            gave_up: false,
        };
        if matches!(body.framing, Framing::Empty) {
            body.finish();
        }
        body
    }

    /// The server's connection, if the response has switched it to another protocol.
    pub fn into_tunnel(self) -> Option<Tunnel> {
        match self.framing {
            Framing::Switched if self.sending.is_none() => {
                Some(Tunnel::new(self.connection?, self.max_silence))
            }
            _ => None,
        }
    }

    /// Whether the request was sent to its end.
    pub fn request_was_sent(&self) -> bool {
        self.sending.is_none() && !self.refused_body
    }

    /// The request body, while it is still being sent.
    pub fn unsent_mut(&mut self) -> Option<&mut B> {
        self.sending.as_mut()?.body_mut()
    }

    /// Ends the exchange, and returns a clean connection to the pool.
    fn finish(&mut self) {
        self.framing = Framing::Empty;
        if let Some(connection) = self.connection.take()
            && self.reusable
            && self.sending.is_none()
            && connection.inbox.is_empty()
        {
            let now = if self.waited {
                Instant::now()
            } else {
                self.began
            };
            ServerPool::put_back(connection, now);
        }
        self.sending = None;
    }

    /// The server ended the connection.
    fn lost(&mut self, why: impl ToString) -> BodyInterruption {
        self.connection = None;
        self.cut(why)
    }

    /// The response is unreadable, but the server may continue.
    fn cut(&mut self, why: impl ToString) -> BodyInterruption {
        self.give_up();
        BodyInterruption::Server(why.to_string())
    }

    fn give_up(&mut self) {
        self.gave_up = true;
        self.reusable = false;
        self.framing = Framing::Empty;
        self.sending = None;
    }
}

impl ResponseBody<Empty<Bytes>> {
    /// The rest of a response, to be discarded. Its request was sent in full.
    pub(super) fn rest(
        framing: Framing,
        connection: Box<ServerConnection>,
        keep_alive: bool,
    ) -> Self {
        let max_silence = connection.settings().abandoned_timeout;
        let began = Instant::now();
        let mut rest = Self::new(
            framing,
            connection,
            None,
            false,
            keep_alive,
            max_silence,
            began,
        );
        // its end may take long
        rest.waited = true;
        rest
    }

    /// The connection, if the response has not ended.
    pub(super) fn into_connection(self) -> Option<Box<ServerConnection>> {
        self.connection
    }
}

impl<B> ResponseBody<B>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    /// Sends the rest of the request. A server that stops reading it is not an error.
    fn poll_send_rest(&mut self, cx: &mut Context<'_>) -> Result<(), BodyInterruption> {
        let (Some(connection), Some(sending)) = (&mut self.connection, &mut self.sending) else {
            return Ok(());
        };
        let before = sending.progress;
        let polled = sending.poll(connection, cx);
        if sending.progress != before {
            self.silent_since = None;
        }
        match polled {
            Poll::Pending => Ok(()),
            Poll::Ready(Ok(())) => {
                self.sending = None;
                Ok(())
            }
            Poll::Ready(Err(RequestWriteError::Write(_))) => {
                self.sending = None;
                self.reusable = false;
                Ok(())
            }
            Poll::Ready(Err(RequestWriteError::Body(error))) => {
                self.give_up();
                Err(BodyInterruption::RequestBody(error.into()))
            }
        }
    }
}

impl<B> Body for ResponseBody<B>
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
        this.poll_send_rest(cx)?;
        loop {
            let Some(connection) = &mut this.connection else {
                return Poll::Ready(None);
            };
            let inbox = &mut connection.inbox;
            match &mut this.framing {
                Framing::Empty | Framing::Switched => {
                    this.finish();
                    return Poll::Ready(None);
                }
                Framing::Length(left) if !inbox.is_empty() => {
                    let here = usize::try_from(*left)
                        .unwrap_or(usize::MAX)
                        .min(inbox.len());
                    let data = inbox.split_to(here).freeze();
                    *left -= here as u64;
                    if *left == 0 {
                        this.finish();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Framing::UntilClose if !inbox.is_empty() => {
                    return Poll::Ready(Some(Ok(Frame::data(inbox.split().freeze()))));
                }
                Framing::Length(_) | Framing::UntilClose => {}
                Framing::Chunked(chunks) => match chunks.take(inbox) {
                    Ok(Some(DecoderOutput::Data(data))) => {
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    Ok(Some(DecoderOutput::Trailers(trailers))) => {
                        this.finish();
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                    }
                    Ok(Some(DecoderOutput::End)) => {
                        this.finish();
                        return Poll::Ready(None);
                    }
                    Ok(None) => {}
                    Err(problem) => return Poll::Ready(Some(Err(this.cut(problem)))),
                },
            }
            let Poll::Ready(filled) = connection.poll_fill(cx) else {
                this.waited = true;
                let since = *this.silent_since.get_or_insert_with(Instant::now);
                ready!(connection.poll_deadline(cx, since + this.max_silence));
                let why = format!("silent for {:?}", this.max_silence);
                return Poll::Ready(Some(Err(this.cut(why))));
            };
            this.silent_since = None;
            match filled {
                Ok(0) if matches!(this.framing, Framing::UntilClose) => {
                    this.finish();
                    return Poll::Ready(None);
                }
                Ok(0) => return Poll::Ready(Some(Err(this.lost("closed before its end")))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(this.lost(error)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.connection.is_none() || matches!(self.framing, Framing::Empty | Framing::Switched)
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            Framing::Empty | Framing::Switched => SizeHint::with_exact(0),
            Framing::Chunked(_) | Framing::UntilClose => SizeHint::default(),
        }
    }
}
