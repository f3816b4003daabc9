//! One exchange over one connection: the request goes out, the response head comes back.
//!
//! It runs inline in the request's task. The head and the first bytes of the body leave in one write; after that the
//! body is sent as the client delivers it and the server takes it, while the response is awaited: a server may answer
//! before it has read the request.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Method, Response, StatusCode, header::SEC_WEBSOCKET_KEY};
use http_body::Body;
use tokio::time::Instant;

use super::{
    ResponseBody, Settings, UpstreamError,
    forward::Failed,
    framing::{self, Framing, ResponseHead},
    headers::Outbound,
    pool::Connection,
    sending::{SendError, Sending},
    websocket,
};

/// Sends, and waits for the head of the final response. Interim responses are passed on as they come.
pub(super) async fn exchange<B>(
    connection: Box<Connection>,
    sending: Sending<B>,
    settings: &Settings,
    request: &Outbound<'_>,
    now: Instant,
) -> Result<Response<ResponseBody<B>>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let timeout = settings.response_timeout;
    let (mut connection, mut sending) = (connection, Some(sending));
    let mut deadline = now + timeout;
    let (mut waited, mut refused_body, mut interim) = (false, false, 0);
    let head = poll_fn(|cx| {
        if let Some(rest) = &mut sending {
            let before = rest.progress;
            match rest.poll(&mut connection, cx) {
                Poll::Ready(Ok(())) => {
                    if waited {
                        deadline = Instant::now() + timeout;
                    }
                    sending = None;
                }
                Poll::Ready(Err(SendError::Body(error))) => {
                    return Poll::Ready(Err(Failed::RequestBody(error)));
                }
                Poll::Ready(Err(SendError::Write(error))) => {
                    // the server may have answered before it stopped reading: look for that answer first
                    tracing::debug!(%error, "the server stopped reading the request");
                    sending = None;
                    refused_body = true;
                }
                Poll::Pending => {
                    waited = true;
                    if rest.progress != before {
                        deadline = Instant::now() + timeout;
                    }
                }
            }
        }
        match poll_head(&mut connection, request, &mut interim, cx) {
            Poll::Ready(head) => Poll::Ready(head.map_err(Failed::Upstream)),
            // a client that is slow with its body is not the server's fault: the listener watches that
            Poll::Pending if sending.as_ref().is_some_and(|rest| rest.waits_for_client) => {
                Poll::Pending
            }
            Poll::Pending => connection
                .poll_deadline(cx, deadline)
                .map(|()| Err(UpstreamError::Timeout(timeout).into())),
        }
    })
    .await?;
    connection.reused = true;
    let began = Instant::now();
    let mut response = Response::new(ResponseBody::new(
        head.framing,
        connection,
        sending,
        refused_body,
        head.keep_alive,
        settings.body_timeout,
        began,
    ));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    Ok(response)
}

/// Interim responses (100, 103, …) that may precede the final one.
pub(super) const MAX_INTERIM: u8 = 32;

fn poll_head(
    connection: &mut Connection,
    request: &Outbound<'_>,
    interim: &mut u8,
    cx: &mut Context<'_>,
) -> Poll<Result<ResponseHead, UpstreamError>> {
    let to_head = *request.method == Method::HEAD;
    loop {
        if !connection.inbox.is_empty()
            && let Some(head) = framing::take_head(&mut connection.inbox, to_head, request.spare)?
        {
            if head.status == StatusCode::SWITCHING_PROTOCOLS {
                return Poll::Ready(switched(head, request));
            }
            if !head.status.is_informational() {
                return Poll::Ready(Ok(head));
            }
            *interim += 1;
            if *interim > MAX_INTERIM {
                return Poll::Ready(Err(UpstreamError::Protocol("too many interim responses")));
            }
            if request.pass_on(head.status, &head.headers) {
                // it leaves when this task has nothing else to do, which may be while the final one is here already
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            continue;
        }
        let lost = match ready!(connection.poll_fill(cx)) {
            Ok(0) => io::ErrorKind::UnexpectedEof.into(),
            Ok(_) => continue,
            Err(error) => error,
        };
        return Poll::Ready(Err(if connection.inbox.is_empty() {
            UpstreamError::Closed(lost)
        } else {
            UpstreamError::Protocol("the head is cut short")
        }));
    }
}

/// A 101 counts only where it was asked for, and where the server proves that it has read what was asked.
fn switched(head: ResponseHead, request: &Outbound<'_>) -> Result<ResponseHead, UpstreamError> {
    let key = request
        .headers
        .get(SEC_WEBSOCKET_KEY)
        .filter(|_| request.websocket);
    let Some(key) = key else {
        return Err(UpstreamError::Protocol("it switches protocols unasked"));
    };
    if !head.to_websocket || !websocket::accepts(&head.headers, key.as_bytes()) {
        return Err(UpstreamError::Protocol(
            "it switches protocols, but not to the WebSocket that was asked for",
        ));
    }
    Ok(ResponseHead {
        framing: Framing::Switched,
        ..head
    })
}
