//! One exchange over one HTTP/1.1 connection: sends the request, receives the response head.
//!
//! Runs inline in the request's task. The head and the first body bytes leave in one write. The
//! rest of the body is then sent as the client delivers it and the server accepts it. The response
//! is awaited meanwhile, as a server may answer before it has read the request.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Response, StatusCode, header::SEC_WEBSOCKET_KEY};
use http_body::Body;
use tokio::time::Instant;

use super::{
    Failed, ResponseBody, UpstreamError, UpstreamSettings,
    abandoned::AbandonedExchange,
    framing::{self, Framing, MAX_INTERIM, ResponseHead},
    headers::Outbound,
    pool::ServerConnection,
    request_writer::{RequestWriteError, RequestWriter},
    websocket,
};

/// Sends a request and waits for the final response head. Interim responses are forwarded as they
/// arrive.
pub(super) async fn exchange<B>(
    connection: Box<ServerConnection>,
    sending: RequestWriter<B>,
    settings: &UpstreamSettings,
    request: &Outbound<'_>,
    now: Instant,
) -> Result<Response<ResponseBody<B>>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let timeout = settings.response_timeout;
    let mut unanswered = UnansweredExchange {
        connection: Some(connection),
        sending: Some(sending),
        is_spoilt: false,
        request,
        timeout,
        deadline: now + timeout,
        waited: false,
        interim: 0,
    };
    let head = poll_fn(|cx| unanswered.poll(cx)).await?;
    let Some(mut connection) = unanswered.connection.take() else {
        return Err(unanswered.ended().into());
    };
    connection.reused = true;
    let began = Instant::now();
    let mut response = Response::new(ResponseBody::new(
        head.framing,
        connection,
        unanswered.sending.take(),
        unanswered.is_spoilt,
        head.keep_alive,
        settings.body_timeout,
        began,
    ));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    Ok(response)
}

/// An exchange without a response. Dropping it abandons the exchange, as the server may be working
/// on it.
struct UnansweredExchange<'a, B> {
    /// `None` once there is a response, or the server has closed the connection.
    connection: Option<Box<ServerConnection>>,
    /// `None` once sending has finished or stopped.
    sending: Option<RequestWriter<B>>,
    /// Whether the exchange can no longer complete: the server stopped reading, the client stopped
    /// sending, or the response is invalid.
    is_spoilt: bool,
    request: &'a Outbound<'a>,
    timeout: Duration,
    deadline: Instant,
    waited: bool,
    interim: u8,
}

impl<B: Body<Data = Bytes> + Unpin> UnansweredExchange<'_, B> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<ResponseHead, Failed<B::Error>>> {
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            self.is_spoilt = true;
            return Poll::Ready(Err(Failed::RequestBody(error)));
        }
        let Some(connection) = &mut self.connection else {
            return Poll::Ready(Err(self.ended().into()));
        };
        let error = match poll_head(connection, self.request, &mut self.interim, cx) {
            Poll::Ready(Ok(head)) => match check_body(&head, &connection.inbox) {
                Ok(()) => return Poll::Ready(Ok(head)),
                Err(error) => error,
            },
            Poll::Ready(Err(error)) => error,
            // a slow client body is not the server's fault: the listener bounds it
            Poll::Pending
                if self
                    .sending
                    .as_ref()
                    .is_some_and(|rest| rest.waits_for_client) =>
            {
                return Poll::Pending;
            }
            Poll::Pending => {
                ready!(connection.poll_deadline(cx, self.deadline));
                UpstreamError::Timeout(self.timeout)
            }
        };
        match error {
            UpstreamError::Closed(_) => self.connection = None,
            UpstreamError::Protocol(_) => self.is_spoilt = true,
            _ => {}
        }
        Poll::Ready(Err(error.into()))
    }

    /// Sends as much as the server accepts. Ready with an error of the client's side.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), B::Error>> {
        let (Some(connection), Some(rest)) = (&mut self.connection, &mut self.sending) else {
            return Poll::Pending;
        };
        let before = rest.progress;
        match rest.poll(connection, cx) {
            Poll::Ready(Ok(())) => {
                if self.waited {
                    self.deadline = Instant::now() + self.timeout;
                }
                self.sending = None;
            }
            Poll::Ready(Err(RequestWriteError::Body(error))) => return Poll::Ready(Err(error)),
            Poll::Ready(Err(RequestWriteError::Write(error))) => {
                // the server may have answered before it stopped reading: look for that response
                // first
                tracing::debug!(%error, "the server stopped reading the request");
                self.sending = None;
                self.is_spoilt = true;
            }
            Poll::Pending => {
                self.waited = true;
                if rest.progress != before {
                    self.deadline = Instant::now() + self.timeout;
                }
            }
        }
        Poll::Pending
    }
}

impl<B> UnansweredExchange<'_, B> {
    /// Only an ended exchange has no connection.
    fn ended(&self) -> UpstreamError {
        UpstreamError::Closed(io::ErrorKind::NotConnected.into())
    }
}

impl<B> Drop for UnansweredExchange<'_, B> {
    fn drop(&mut self) {
        let (Some(custody), Some(connection)) = (self.request.custody, self.connection.take())
        else {
            return;
        };
        let is_whole = !self.is_spoilt && self.sending.is_none();
        if is_whole {
            let to_head = *self.request.method == Method::HEAD;
            custody.keep(AbandonedExchange::unanswered(connection, to_head));
        } else if self.sending.as_ref().is_none_or(RequestWriter::has_begun) {
            custody.keep(AbandonedExchange::closing(connection));
        }
    }
}

/// Checks the body bytes that came with the head, while the response can still be refused.
fn check_body(head: &ResponseHead, inbox: &[u8]) -> Result<(), UpstreamError> {
    match &head.framing {
        Framing::Chunked(chunks) => chunks.check(inbox).map_err(UpstreamError::Protocol),
        _ => Ok(()),
    }
}

fn poll_head(
    connection: &mut ServerConnection,
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
            if request.forward_interim(head.status, &head.headers) {
                // the client writes it once this task yields, and the final response may already be
                // here
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
            UpstreamError::Protocol("the head is incomplete")
        }));
    }
}

/// Accepts a 101 only if the request asked for it and the server proves that it read the handshake.
fn switched(head: ResponseHead, request: &Outbound<'_>) -> Result<ResponseHead, UpstreamError> {
    let key = request
        .headers
        .get(SEC_WEBSOCKET_KEY)
        .filter(|_| request.websocket);
    let Some(key) = key else {
        return Err(UpstreamError::Protocol(
            "it switches protocols without a request for it",
        ));
    };
    if !head.to_websocket || !websocket::accepts(&head.headers, key.as_bytes()) {
        return Err(UpstreamError::Protocol(
            "it switches protocols, but not to the requested WebSocket",
        ));
    }
    Ok(ResponseHead {
        framing: Framing::Switched,
        ..head
    })
}
