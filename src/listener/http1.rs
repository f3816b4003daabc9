//! An HTTP/1 connection: hyper serves it while it is active, and it is parked while idle.
//!
//! hyper keeps two buffers of 8 KiB per connection, used or not. Most connections are idle most of
//! the time. So after a quarter of a second without a request hyper returns the connection, which
//! is parked ([`super::idle_connections`]). The first bytes of the next request start hyper again.

use std::{convert::Infallible, future::poll_fn, pin::Pin, rc::Rc};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderValue, Request, Response,
    header::{CONNECTION, UPGRADE},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWrite as _;

use super::{
    drain::ConnectionGuard, handler::Handler, handover::ClientEnd, inbound::RequestBody,
    peer::Peer, run_connection::run, settings::ListenerSettings, streams::Tracked,
    timed_io::TimedIo,
};

/// Serves one connection until it ends (`None`) or must be parked.
pub(super) async fn serve<H: Handler>(
    mut io: Box<TimedIo>,
    peer: &Rc<Peer>,
    handler: &Rc<H>,
    ticket: &ConnectionGuard,
) -> hyper::Result<Option<Box<TimedIo>>> {
    peer.clock
        .answer_timeout_with(handler.head_timeout_answer());
    if !io.has_unread() {
        let mut seen = BytesMut::new();
        match poll_fn(|cx| io.poll_read_some(ticket, true, &mut seen, cx)).await {
            Ok(0) | Err(_) => {
                close(&mut io).await;
                return Ok(None);
            }
            Ok(_) => io.unread(seen.freeze()),
        }
    }
    loop {
        match Box::pin(busy(io, peer, handler, ticket)).await? {
            // the next head has already begun to arrive
            Some(idle) if idle.has_unread() => io = idle,
            Some(idle) => return Ok(Some(idle)),
            None => return Ok(None),
        }
    }
}

/// Serves requests until the connection ends (`None`) or has been idle long enough to park.
async fn busy<H: Handler>(
    io: Box<TimedIo>,
    peer: &Rc<Peer>,
    handler: &Rc<H>,
    ticket: &ConnectionGuard,
) -> hyper::Result<Option<Box<TimedIo>>> {
    let service = service_fn(|request: Request<Incoming>| {
        let in_flight = peer.clock.request();
        let finish = |mut response: Response<H::Body>| {
            if ticket.is_closing() && !response.status().is_informational() {
                let headers = response.headers_mut();
                let connection = match headers.contains_key(UPGRADE) {
                    true => "close, upgrade",
                    false => "close",
                };
                headers.insert(CONNECTION, HeaderValue::from_static(connection));
            }
            Ok::<_, Infallible>(response.map(|body| Tracked::new(body, in_flight, None)))
        };
        // the future lives inside hyper's connection, so a parked connection keeps no memory for it
        Rc::clone(handler).handle(request.map(RequestBody::Http1), Rc::clone(peer), finish)
    });
    let mut connection = builder(&peer.listener).serve_connection(TokioIo::new(io), service);
    let end = http1::Connection::graceful_shutdown;
    let is_time = ConnectionGuard::should_end;
    let ended = run(Pin::new(&mut connection), ticket, &peer.clock, is_time, end).await;
    let left = connection.into_parts();
    let mut io = left.io.into_inner();
    match ended {
        Some(Err(error)) => {
            if error.is_user() {
                // the response broke off
                poll_fn(|cx| io.poll_break_off(cx)).await;
            }
            return Err(error);
        }
        Some(Ok(())) => {
            after_http(io, left.read_buf, peer).await;
            return Ok(None);
        }
        None => {}
    }
    if !left.read_buf.is_empty() {
        peer.clock.bytes_arrived();
        io.unread(left.read_buf);
    }
    Ok(Some(io))
}

/// After an upgrade request hyper leaves the connection open. It goes to the takeover handler or is
/// closed here. During a drain it may continue until `drain_timeout`.
async fn after_http(mut io: Box<TimedIo>, unread: Bytes, peer: &Peer) {
    match peer.take_over() {
        Some(takeover) => {
            let _in_flight = peer.clock.request();
            peer.clock.needs_client(true);
            io.unread(unread);
            takeover(ClientEnd::new(io)).await;
        }
        // the client's response was written before
        None => close(&mut io).await,
    }
}

async fn close(io: &mut TimedIo) {
    // an error means that the client is gone, which also closes the connection
    let _ = poll_fn(|cx| Pin::new(&mut *io).poll_shutdown(cx)).await;
}

fn builder(settings: &ListenerSettings) -> http1::Builder {
    /// Slack above our bounds on heads, so that slightly oversized ones get our response instead of
    /// a closed connection.
    const HEADROOM: usize = 32 * 1024;
    let mut builder = http1::Builder::new();
    // `Clock` enforces the head timeout
    builder
        .half_close(false)
        .header_read_timeout(None)
        .max_buf_size(settings.max_header_bytes + settings.max_uri_bytes + HEADROOM);
    if settings.max_header_count > HYPER_MAX_HEADERS {
        builder.max_headers(settings.max_header_count);
    }
    builder
}

/// The most fields that hyper parses without a heap allocation per request. Our own check enforces
/// lower bounds.
const HYPER_MAX_HEADERS: usize = 100;
