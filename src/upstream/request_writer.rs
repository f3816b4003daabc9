//! Writes a request to a server: the head, then the body as the client delivers it and the server
//! accepts it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use tokio::io::AsyncWrite;

use super::{BodyFraming, field_rules, pool::ServerConnection};

/// Why the request could not be sent in full.
#[derive(Debug)]
pub(super) enum RequestWriteError<E> {
    /// The server no longer accepts it.
    Write(io::Error),
    /// The client no longer delivers it.
    Body(E),
}

/// A request being sent: the connection's outbox, then the body.
#[derive(Debug)]
pub(super) struct RequestWriter<B> {
    body: Option<B>,
    chunked: bool,
    /// Bytes of the outbox already written; the outbox itself is kept for a retry.
    written: usize,
    /// Body bytes that follow the outbox without being copied into it.
    chunk: Bytes,
    /// Whether the CR LF that ends a chunk's data must follow `chunk`.
    owes_line_end: bool,
    /// Whether all delivered bytes were written, and more are expected.
    pub(super) waits_for_client: bool,
    /// Bytes written so far, to distinguish a slow server from a stalled one.
    pub(super) progress: u64,
}

/// Body pieces up to this size are copied after the head or chunk size, so that one plain write
/// sends both.
const COPIED: usize = 2 * 1024;

impl<B> RequestWriter<B> {
    pub(super) fn new(body: Option<B>, framing: BodyFraming) -> Self {
        Self {
            body,
            chunked: framing == BodyFraming::Chunked,
            written: 0,
            chunk: Bytes::new(),
            owes_line_end: false,
            waits_for_client: false,
            progress: 0,
        }
    }
}

impl<B> RequestWriter<B> {
    /// Whether anything has been written.
    pub(super) fn has_begun(&self) -> bool {
        self.progress > 0
    }

    pub(super) fn body_mut(&mut self) -> Option<&mut B> {
        self.body.as_mut()
    }
}

impl<B: Body<Data = Bytes> + Unpin> RequestWriter<B> {
    /// Ready when everything is sent.
    pub(super) fn poll(
        &mut self,
        connection: &mut ServerConnection,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), RequestWriteError<B::Error>>> {
        loop {
            self.waits_for_client = false;
            // gather available bytes before the first write, so that one write sends head and body
            let gathered = if self.chunk.is_empty() {
                self.gather(&mut connection.outbox, cx)?
            } else {
                Poll::Ready(())
            };
            let unsent = connection.outbox.len() - self.written;
            if unsent == 0 && self.chunk.is_empty() {
                // TLS may buffer written bytes; a no-op for other transports
                let flushed = Pin::new(&mut connection.stream).poll_flush(cx);
                ready!(flushed).map_err(RequestWriteError::Write)?;
                if self.body.is_none() {
                    return Poll::Ready(Ok(()));
                }
                self.waits_for_client = gathered.is_pending();
                ready!(gathered);
                continue;
            }
            let stream = Pin::new(&mut connection.stream);
            let head = &connection.outbox[self.written..];
            let wrote = if self.chunk.is_empty() {
                stream.poll_write(cx, head)
            } else {
                stream.poll_write_vectored(cx, &[IoSlice::new(head), IoSlice::new(&self.chunk)])
            };
            let wrote = match ready!(wrote) {
                Ok(0) => {
                    return Poll::Ready(Err(RequestWriteError::Write(
                        io::ErrorKind::WriteZero.into(),
                    )));
                }
                Ok(wrote) => wrote,
                Err(error) => return Poll::Ready(Err(RequestWriteError::Write(error))),
            };
            self.progress += wrote as u64;
            let of_head = wrote.min(unsent);
            self.written += of_head;
            self.chunk.advance(wrote - of_head);
        }
    }

    /// Takes body frames until one is large enough to be written on its own, the body ends, or none
    /// is available.
    fn gather(
        &mut self,
        outbox: &mut BytesMut,
        cx: &mut Context<'_>,
    ) -> Result<Poll<()>, RequestWriteError<B::Error>> {
        while let Some(body) = &mut self.body {
            if self.written == outbox.len() {
                outbox.clear();
                self.written = 0;
            }
            if std::mem::take(&mut self.owes_line_end) {
                outbox.put_slice(b"\r\n");
            }
            match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(Some(Err(error))) => return Err(RequestWriteError::Body(error)),
                Poll::Ready(None) => self.end(outbox, None),
                Poll::Ready(Some(Ok(frame))) => self.take_frame(outbox, frame),
            }
            if !self.chunk.is_empty() || outbox.len() >= 4 * COPIED {
                break;
            }
        }
        Ok(Poll::Ready(()))
    }

    fn take_frame(&mut self, outbox: &mut BytesMut, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.chunked {
                    use std::fmt::Write as _;
                    write!(outbox, "{:x}\r\n", data.len()).expect("BytesMut grows as needed");
                }
                if data.len() <= COPIED {
                    outbox.put_slice(&data);
                    if self.chunked {
                        outbox.put_slice(b"\r\n");
                    }
                } else {
                    self.chunk = data;
                    self.owes_line_end = self.chunked;
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    self.end(outbox, Some(trailers));
                }
            }
        }
    }

    fn end(&mut self, outbox: &mut BytesMut, trailers: Option<http::HeaderMap>) {
        self.body = None;
        if !self.chunked {
            return;
        }
        outbox.put_slice(b"0\r\n");
        for (name, value) in trailers.iter().flatten() {
            if field_rules::may_be_trailer(name) {
                outbox.put_slice(name.as_str().as_bytes());
                outbox.put_slice(b": ");
                outbox.put_slice(value.as_bytes());
                outbox.put_slice(b"\r\n");
            }
        }
        outbox.put_slice(b"\r\n");
    }
}
