//! The response on an HTTP/2 stream.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use h2::{Reason, SendStream, server::SendResponse};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response,
    header::{CONNECTION, CONTENT_LENGTH, DATE, TE, TRANSFER_ENCODING, UPGRADE},
};
use http_body::{Body, Frame};

use super::super::{
    date,
    streams::{Portion, Tracked},
};
use crate::body::AnswerBody;

type ResetCause = Box<dyn std::error::Error + Send + Sync>;

/// Waits for the response and sends it, unless the client cancels the request.
pub(super) async fn respond<F, B>(mut handling: Pin<Box<F>>, mut stream: SendResponse<Portion>)
where
    F: Future<Output = Response<Tracked<B>>>,
    B: AnswerBody,
{
    let answered = poll_fn(|cx| match handling.as_mut().poll(cx) {
        Poll::Ready(response) => Poll::Ready(Some(response)),
        Poll::Pending => stream.poll_reset(cx).map(|_| None),
    });
    let Some(response) = answered.await else {
        return;
    };
    drop(handling);
    let (mut head, body) = response.into_parts();
    remove_connection_fields(&mut head.headers);
    let date = head.headers.entry(DATE);
    date.or_insert_with(date::now);
    let is_empty = body.is_end_stream();
    if !is_empty
        && let Some(length) = body.size_hint().exact()
        && !head.headers.contains_key(CONTENT_LENGTH)
    {
        head.headers
            .insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    let head = Response::from_parts(head, ());
    let sent = match stream.send_response(head, is_empty) {
        Ok(stream) => {
            body.head_sent();
            match is_empty {
                true => return,
                false => send_body(body, stream).await,
            }
        }
        Err(error) => {
            stream.send_reset(Reason::INTERNAL_ERROR);
            Err(error.into())
        }
    };
    if let Err(error) = sent {
        tracing::debug!(error, "the response was cut short");
    }
}

/// Removes connection-specific fields, which HTTP/2 forbids (RFC 9113 §8.2.2). A response written
/// for either protocol may carry them for HTTP/1.1.
fn remove_connection_fields(headers: &mut HeaderMap) {
    const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
    const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
    for name in [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        TE,
        TRANSFER_ENCODING,
        UPGRADE,
    ] {
        headers.remove(name);
    }
}

/// Sends a body at the client's pace: polls for a chunk once the previous one has been sent.
async fn send_body<B>(body: B, mut stream: SendStream<Portion>) -> Result<(), ResetCause>
where
    B: Body<Data = Portion, Error: Into<ResetCause>>,
{
    let mut body = pin!(body);
    let mut chunk = None;
    let sent = poll_fn(|cx| poll_send(body.as_mut(), &mut chunk, &mut stream, cx)).await;
    if let Err(BrokenResponse::Body(error)) = sent {
        // `Tracked` reports the failure after all earlier bytes have been sent: a reset discards
        // the queue
        stream.send_reset(Reason::INTERNAL_ERROR);
        return Err(error);
    }
    sent.map_err(ResetCause::from)
}

/// Why a response is not sent to its end.
#[derive(Debug, thiserror::Error)]
enum BrokenResponse {
    /// The body broke off.
    #[error("{0}")]
    Body(ResetCause),
    /// The client, or the connection, accepts no more of it.
    #[error(transparent)]
    Stream(#[from] h2::Error),
}

fn poll_send<B>(
    mut body: Pin<&mut B>,
    chunk: &mut Option<(Portion, bool)>,
    stream: &mut SendStream<Portion>,
    cx: &mut Context<'_>,
) -> Poll<Result<(), BrokenResponse>>
where
    B: Body<Data = Portion, Error: Into<ResetCause>>,
{
    loop {
        // poll on every turn, so that a reset wakes this task during any wait
        if let Poll::Ready(reason) = stream.poll_reset(cx)? {
            return Poll::Ready(Err(h2::Error::from(reason).into()));
        }
        if chunk.is_some() {
            while stream.capacity() == 0 {
                match ready!(stream.poll_capacity(cx)).transpose()? {
                    Some(_) => {}
                    None => return Poll::Ready(Err(h2::Error::from(Reason::CANCEL).into())),
                }
            }
        }
        if let Some((data, is_last)) = chunk.take() {
            // data beyond the window is buffered in the h2 crate: at most this chunk
            stream.send_data(data, is_last)?;
            if is_last {
                return Poll::Ready(Ok(()));
            }
        }
        let Some(frame) = ready!(body.as_mut().poll_frame(cx)) else {
            stream.send_data(Portion::Bytes(Bytes::new()), true)?;
            return Poll::Ready(Ok(()));
        };
        match frame
            .map_err(|error| BrokenResponse::Body(error.into()))?
            .into_data()
        {
            Ok(marker @ Portion::Marker(_)) => stream.send_data(marker, false)?,
            Ok(data) if !data.has_remaining() && !body.is_end_stream() => {}
            Ok(data) if !data.has_remaining() => {
                stream.send_data(data, true)?;
                return Poll::Ready(Ok(()));
            }
            Ok(data) => {
                // reserve one byte only; sending reserves the rest, so that waiting streams do not
                // take the connection's window from each other
                stream.reserve_capacity(1);
                *chunk = Some((data, body.is_end_stream()));
            }
            Err(frame) => {
                stream.reserve_capacity(0);
                let trailers = Frame::into_trailers(frame).unwrap_or_default();
                stream.send_trailers(trailers)?;
                return Poll::Ready(Ok(()));
            }
        }
    }
}
