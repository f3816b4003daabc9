//! One exchange on its own stream: sends the request, receives the response head.
//!
//! The head is the one that [`headers`] writes for HTTP/1.1, parsed back into fields. So one place
//! decides which fields a server receives.

use std::{
    future::{Future as _, poll_fn},
    io,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, client::ResponseFuture};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE},
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body::Body;
use tokio::time::Instant;

use super::{
    super::{
        Failed, UpstreamError, UpstreamSettings,
        abandoned::{AbandonedExchange, AbandonedExchanges},
        field_rules,
        framing::{self, MAX_FIELDS, MAX_INTERIM},
        headers::{self, Outbound},
        stream::ServerStream,
    },
    body::StreamBody,
    pool::StreamPermit,
    upload::Upload,
};

/// Sends a request and waits for the final response head. Interim responses are forwarded as they
/// arrive.
///
/// If the server refuses the request unprocessed and no body byte was taken, the body is back in
/// `unsent`.
pub(in crate::upstream) async fn exchange<B>(
    place: StreamPermit,
    request: Request<()>,
    unsent: &mut Option<B>,
    settings: &UpstreamSettings,
    asked: &Outbound<'_>,
) -> Result<Response<StreamBody<B>>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let to_head = *request.method() == Method::HEAD;
    let has_body = unsent.is_some();
    let (response, stream) = match place.sender().send_request(request, !has_body) {
        Ok(sent) => sent,
        Err(error) => {
            place.mark_suspect();
            return Err(UpstreamError::Refused(error.to_string()).into());
        }
    };
    let mut unanswered = UnansweredStream {
        open: Some((response, place)),
        upload: unsent.take().map(|body| Upload::new(stream, body)),
        custody: asked.custody,
    };
    let response = match unanswered.answer(settings, asked).await {
        Ok(response) => response,
        Err(Failed::Upstream(error)) => {
            if matches!(error, UpstreamError::Timeout(_) | UpstreamError::Closed(_))
                && let Some((_, place)) = &unanswered.open
            {
                place.mark_suspect();
            }
            if !matches!(error, UpstreamError::Timeout(_)) {
                // the server ended the stream
                unanswered.open = None;
            }
            let untouched = match error {
                UpstreamError::Refused(_) => unanswered.upload.take().and_then(Upload::untouched),
                _ => None,
            };
            let is_whole = !has_body || untouched.is_some();
            *unsent = untouched;
            return Err(match error {
                UpstreamError::Refused(why) if !is_whole => {
                    UpstreamError::Closed(io::Error::other(why)).into()
                }
                error => error.into(),
            });
        }
        Err(failed) => return Err(failed),
    };
    let Some((_, place)) = unanswered.open.take() else {
        return Err(UpstreamError::Closed(io::ErrorKind::NotConnected.into()).into());
    };
    let (mut head, stream) = response.into_parts();
    let length = body_length(&mut head.headers, head.status, to_head, &stream)?;
    field_rules::remove_hop_by_hop(&mut head.headers);
    head.version = Version::HTTP_11;
    let upload = unanswered.upload.take();
    let body = StreamBody::new(stream, length, upload, place, settings.body_timeout);
    Ok(Response::from_parts(head, body))
}

/// An exchange without a response. Dropping it abandons the exchange, as the server may be working
/// on it.
struct UnansweredStream<'a, B> {
    /// `None` once there is a response, or the server has ended the stream.
    open: Option<(ResponseFuture, StreamPermit)>,
    upload: Option<Upload<B>>,
    custody: Option<&'a AbandonedExchanges>,
}

impl<B: Body<Data = Bytes> + Unpin> UnansweredStream<'_, B> {
    async fn answer(
        &mut self,
        settings: &UpstreamSettings,
        asked: &Outbound<'_>,
    ) -> Result<Response<RecvStream>, Failed<B::Error>> {
        match &mut self.open {
            Some((response, place)) => {
                answer(response, &mut self.upload, place, settings, asked).await
            }
            None => Err(UpstreamError::Closed(io::ErrorKind::NotConnected.into()).into()),
        }
    }
}

impl<B> Drop for UnansweredStream<'_, B> {
    fn drop(&mut self) {
        let (Some(custody), Some((response, place))) = (self.custody, self.open.take()) else {
            return;
        };
        custody.keep(match self.upload {
            None => AbandonedExchange::pending(response, place),
            Some(_) => AbandonedExchange::reset(&place),
        });
    }
}

/// Waits for the final response head, and sends the body meanwhile.
async fn answer<B>(
    response: &mut ResponseFuture,
    upload: &mut Option<Upload<B>>,
    place: &StreamPermit,
    settings: &UpstreamSettings,
    asked: &Outbound<'_>,
) -> Result<Response<RecvStream>, Failed<B::Error>>
where
    B: Body<Data = Bytes> + Unpin,
{
    let timeout = settings.response_timeout;
    let mut deadline = Instant::now() + timeout;
    let mut timer = pin!(tokio::time::sleep_until(deadline));
    let mut interim = 0;
    poll_fn(|cx| {
        if let Some(rest) = upload {
            let before = rest.progress();
            match rest.poll(cx) {
                Poll::Ready(Ok(())) => {
                    deadline = Instant::now() + timeout;
                    *upload = None;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(Failed::RequestBody(error))),
                Poll::Pending if rest.progress() != before => deadline = Instant::now() + timeout,
                Poll::Pending => {}
            }
        }
        if let Poll::Ready(head) = poll_head(response, place, asked, &mut interim, cx) {
            return Poll::Ready(head.map_err(Failed::Upstream));
        }
        // a slow client body is not the server's fault: the listener bounds it
        if upload.as_ref().is_some_and(Upload::waits_for_client) {
            return Poll::Pending;
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(Err(UpstreamError::Timeout(timeout).into()));
            }
            timer.as_mut().reset(deadline);
        }
    })
    .await
}

fn poll_head(
    response: &mut ResponseFuture,
    place: &StreamPermit,
    asked: &Outbound<'_>,
    interim: &mut u8,
    cx: &mut Context<'_>,
) -> Poll<Result<Response<RecvStream>, UpstreamError>> {
    while let Poll::Ready(Some(head)) = response.poll_informational(cx) {
        let mut head = head.map_err(|error| failure(&error, place))?;
        *interim += 1;
        if *interim > MAX_INTERIM {
            return Poll::Ready(Err(UpstreamError::Protocol("too many interim responses")));
        }
        field_rules::remove_hop_by_hop(head.headers_mut());
        head.headers_mut().remove(CONTENT_LENGTH);
        if asked.forward_interim(head.status(), head.headers()) {
            // the client writes it once this task yields, and the final response may already be
            // here
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
    }
    let head = ready!(Pin::new(response).poll(cx)).map_err(|error| failure(&error, place))?;
    if !(200..=599).contains(&head.status().as_u16()) {
        return Poll::Ready(Err(UpstreamError::Protocol(
            "the status is not between 200 and 599",
        )));
    }
    if head.headers().len() > MAX_FIELDS {
        return Poll::Ready(Err(UpstreamError::Protocol("the head is too large")));
    }
    Poll::Ready(Ok(head))
}

/// The error of an exchange without response. A stream that the server refuses, or one above the
/// last stream in its GOAWAY, was not processed (RFC 9113 §8.7).
fn failure(error: &h2::Error, place: &StreamPermit) -> UpstreamError {
    if error.is_remote() && error.is_go_away() {
        place.mark_suspect();
        UpstreamError::Refused(error.to_string())
    } else if error.is_remote() && error.reason() == Some(Reason::REFUSED_STREAM) {
        UpstreamError::Refused(error.to_string())
    } else if error.is_remote() && error.is_reset() {
        UpstreamError::Protocol("it reset the stream")
    } else if error.is_library() {
        UpstreamError::Protocol("it is not HTTP/2")
    } else {
        UpstreamError::Closed(io::Error::other(error.to_string()))
    }
}

/// Sends one request without a body on its own connection, for a health check.
pub(in crate::upstream) async fn ask(
    stream: ServerStream,
    request: Request<()>,
) -> Result<StatusCode, UpstreamError> {
    let lost = |error: h2::Error| UpstreamError::Closed(io::Error::other(error.to_string()));
    let (sender, connection) = h2::client::handshake(stream).await.map_err(lost)?;
    let answered = async {
        let (response, _) = sender.ready().await?.send_request(request, true)?;
        response.await
    };
    let ended = async { connection.await.and(Err(Reason::NO_ERROR.into())) };
    tokio::select! {
        answer = answered => answer.map(|answer| answer.status()).map_err(lost),
        ended = ended => ended.map_err(lost),
    }
}

/// Length of the body, if known.
fn body_length(
    headers: &mut HeaderMap,
    status: StatusCode,
    to_head: bool,
    stream: &RecvStream,
) -> Result<Option<u64>, UpstreamError> {
    let length = framing::content_length(headers)?;
    if status == StatusCode::NO_CONTENT {
        headers.remove(CONTENT_LENGTH);
    }
    let is_empty = to_head
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        || stream.is_end_stream();
    Ok(if is_empty { Some(0) } else { length })
}

/// The request head for HTTP/2.
pub(in crate::upstream) fn head(
    request: &Outbound<'_>,
    host: &[u8],
) -> Result<Request<()>, UpstreamError> {
    const UNFIT: UpstreamError =
        UpstreamError::Protocol("the request cannot be expressed in HTTP/2");
    let mut uri = http::uri::Parts::default();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = Some(Authority::try_from(host).map_err(|_| UNFIT)?);
    uri.path_and_query = Some(PathAndQuery::try_from(request.target).map_err(|_| UNFIT)?);
    let mut head = Request::new(());
    *head.method_mut() = request.method.clone();
    *head.uri_mut() = Uri::from_parts(uri).map_err(|_| UNFIT)?;
    *head.version_mut() = Version::HTTP_2;
    *head.headers_mut() = fields(request, host).ok_or(UNFIT)?;
    Ok(head)
}

/// The fields of [`headers::write_head`], except those that HTTP/2 expresses otherwise.
fn fields(request: &Outbound<'_>, host: &[u8]) -> Option<HeaderMap> {
    let mut written = BytesMut::with_capacity(1024);
    headers::write_head(&mut written, request, host);
    let line = written.windows(2).position(|two| two == b"\r\n")? + 2;
    let written = written.freeze().slice(line..);
    // the client's fields, and the gateway's
    let mut room = vec![httparse::EMPTY_HEADER; request.headers.len() + 16];
    let httparse::Status::Complete((_, parsed)) =
        httparse::parse_headers(&written, &mut room).ok()?
    else {
        return None;
    };
    let mut fields = HeaderMap::with_capacity(parsed.len());
    for field in parsed {
        let name = HeaderName::from_bytes(field.name.as_bytes()).ok()?;
        if ![HOST, CONNECTION, UPGRADE, TRANSFER_ENCODING].contains(&name) {
            let value = HeaderValue::from_maybe_shared(written.slice_ref(field.value)).ok()?;
            fields.append(name, value);
        }
    }
    Some(fields)
}
