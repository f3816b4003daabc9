//! A connection that speaks HTTP/2, each of its streams one request.

use std::{convert::Infallible, pin::pin, rc::Rc};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::TokioIo;

use super::{
    Settings,
    drain::Ticket,
    serve::{Handler, Peer, run},
    streams::{Current, Streams, Tracked},
    timed_io::TimedIo,
};

/// Serves one connection to its end.
pub(super) async fn serve<H: Handler>(
    io: Box<TimedIo>,
    peer: Rc<Peer>,
    handler: Rc<H>,
    ticket: &Ticket,
) -> hyper::Result<()> {
    let clock = Rc::clone(&peer.clock);
    clock.bytes_are_frames();
    let current = Rc::new(Current::default());
    let streams = Streams::new(Rc::clone(&clock), Rc::clone(&current));
    let builder = builder(&peer.listener, streams);
    let service = service_fn(move |request: Request<Incoming>| {
        let in_flight = peer.clock.request();
        let current = Rc::clone(&current);
        let finish = move |response: Response<H::Body>| {
            let waiting = current.stream();
            Ok::<_, Infallible>(response.map(|body| Tracked::new(body, in_flight, waiting)))
        };
        // hyper keeps room for this future in each stream: a pointer, not the whole path of a request
        Box::pin(Rc::clone(&handler).handle(request, Rc::clone(&peer), finish))
    });
    let connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    // GOAWAY leaves no request unanswered that is under way (RFC 9113 §6.8), so it is sent at once
    let end = http2::Connection::graceful_shutdown;
    let is_time = Ticket::is_closing;
    let ended = run(connection, ticket, &clock, is_time, end).await;
    ended.unwrap_or(Ok(()))
}

fn builder(settings: &Settings, streams: Streams) -> http2::Builder<Streams> {
    /// Bytes of an answer that wait for a client's window, for each stream.
    const MAX_WAITING_BYTES: usize = 64 * 1024;
    let mut builder = http2::Builder::new(streams);
    builder
        .max_concurrent_streams(settings.max_streams)
        .max_header_list_size(u32::try_from(settings.max_header_bytes).unwrap_or(u32::MAX))
        .max_send_buf_size(MAX_WAITING_BYTES);
    builder
}
