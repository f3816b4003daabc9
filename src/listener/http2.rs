//! An HTTP/2 connection; each stream is one request.
//!
//! Drives the h2 crate directly. hyper's server gives no control over how request bodies are
//! received: see [`crate::receive_buffer`].

mod frame_io;
mod request_body;
mod respond;

use std::{
    future::Future,
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use h2::{
    Reason, RecvStream,
    server::{self, Handshake, SendResponse},
};
use http::Request;
use tokio::time::Sleep;

pub use request_body::StreamRequestBody;

use super::{
    abuse,
    drain::ConnectionGuard,
    handler::Handler,
    inbound::RequestBody,
    peer::Peer,
    run_connection::run,
    settings::ListenerSettings,
    streams::{self, Portion, StreamState, Tracked},
    timed_io::TimedIo,
};
use crate::receive_buffer::{
    DATA_FRAME_BUDGET, MAX_REMEMBERED_RESETS, RESET_MEMORY, ReceiveBuffers,
};
use frame_io::FrameIo;

/// Flow-control window of a stream and of the connection, in bytes.
const WINDOW: u32 = 1 << 20;
/// Bytes of a response buffered per stream while the client's window is full.
const MAX_WAITING_BYTES: usize = 64 * 1024;
/// Slack above our bounds on heads, so that the gateway answers oversized ones and records them.
/// The h2 crate would answer 431 silently. It counts 32 extra bytes per field.
const HEAD_HEADROOM: usize = 96 * 1024;
/// How long a client that is cut off may take to receive GOAWAY.
const GOODBYE: Duration = Duration::from_secs(1);
/// Streams that the h2 crate may reset for protocol errors over the life of a connection.
const MAX_FAULTY_STREAMS: usize = 1024;

/// Serves one connection to its end.
pub(super) async fn serve<H: Handler>(
    io: Box<TimedIo>,
    peer: Rc<Peer>,
    handler: Rc<H>,
    ticket: &ConnectionGuard,
) -> Result<(), h2::Error> {
    let clock = Rc::clone(&peer.clock);
    clock.bytes_are_frames();
    let connection = pin!(Http2Connection::begin(io, peer, handler));
    // RFC 9113 §6.8: GOAWAY lets requests in flight finish, so send it at once
    let is_time = ConnectionGuard::is_closing;
    let ended = run(connection, ticket, &clock, is_time, |mut connection| {
        connection.end();
    });
    ended.await.unwrap_or(Ok(()))
}

/// One connection, and the context that its streams need.
struct Http2Connection<H> {
    state: ConnectionPhase,
    is_ending: bool,
    /// Runs once GOAWAY is queued for a client that is cut off, until the connection is dropped.
    cut_off: Option<Pin<Box<Sleep>>>,
    buffers: Rc<ReceiveBuffers>,
    peer: Rc<Peer>,
    handler: Rc<H>,
}

enum ConnectionPhase {
    Greeting(Handshake<FrameIo, Portion>),
    Open(server::Connection<FrameIo, Portion>),
}

impl<H: Handler> Http2Connection<H> {
    fn begin(io: Box<TimedIo>, peer: Rc<Peer>, handler: Rc<H>) -> Self {
        let buffers = Rc::new(ReceiveBuffers::default());
        let io = FrameIo::new(io, Rc::clone(&buffers), Rc::clone(&peer.clock));
        Self {
            state: ConnectionPhase::Greeting(builder(&peer.listener).handshake(io)),
            is_ending: false,
            cut_off: None,
            buffers,
            peer,
            handler,
        }
    }

    /// Accepts no new requests, and ends once those in flight are answered.
    fn end(&mut self) {
        self.is_ending = true;
        if let ConnectionPhase::Open(connection) = &mut self.state {
            connection.graceful_shutdown();
        }
    }

    fn poll_requests(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            let connection = match &mut self.state {
                ConnectionPhase::Greeting(handshake) => {
                    let mut connection = ready!(Pin::new(handshake).poll(cx))?;
                    if self.is_ending {
                        connection.graceful_shutdown();
                    }
                    self.state = ConnectionPhase::Open(connection);
                    continue;
                }
                ConnectionPhase::Open(connection) => connection,
            };
            let Some(accepted) = ready!(connection.poll_accept(cx)) else {
                return Poll::Ready(Ok(()));
            };
            let (request, respond) = accepted?;
            self.serve_stream(request, respond);
        }
    }

    fn serve_stream(&self, request: Request<RecvStream>, respond: SendResponse<Portion>) {
        let clock = &self.peer.clock;
        let in_flight = clock.request();
        let waiting = Rc::new(StreamState::default());
        let (head, stream) = request.into_parts();
        let body = StreamRequestBody::new(stream, &head.headers, &self.buffers);
        let request = Request::from_parts(head, RequestBody::Http2(body));
        let from = Rc::clone(&self.peer);
        let watched = Rc::clone(&waiting);
        // boxed, so that its memory can be freed before the response is sent
        let handling = Box::pin(Rc::clone(&self.handler).handle(request, from, |response| {
            response.map(|body| Tracked::new(body, in_flight, Some(watched)))
        }));
        streams::spawn(respond::respond(handling, respond), clock, waiting);
    }

    /// Tells a client why its connection is cut off (RFC 9113 §6.8), then closes it. Ready at the
    /// end of that, at most [`GOODBYE`] later: a client that floods may not read.
    fn poll_cut_off(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        let ConnectionPhase::Open(connection) = &mut self.state else {
            return Poll::Ready(Err(Reason::ENHANCE_YOUR_CALM.into()));
        };
        let timer = self.cut_off.get_or_insert_with(|| {
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
            // closing a socket with unread bytes resets it, which may overtake GOAWAY
            self.peer.clock.leave_body_unread();
            Box::pin(tokio::time::sleep(GOODBYE))
        });
        match connection.poll_closed(cx) {
            Poll::Pending => timer.as_mut().poll(cx).map(Ok),
            closed => closed,
        }
    }
}

impl<H: Handler> Future for Http2Connection<H> {
    type Output = Result<(), h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut outcome = match self.cut_off {
            None => self.poll_requests(cx),
            Some(_) => Poll::Pending,
        };
        if outcome.is_pending() && self.buffers.end_turn(cx) {
            let buffers = &self.buffers;
            let bounded = abuse::check_discarded(
                buffers.discarded_bytes(),
                buffers.unfinished_streams(),
                u64::from(WINDOW),
            );
            self.peer.clock.settle(bounded);
        }
        if outcome.is_pending() && self.peer.clock.cut().is_some() {
            outcome = self.poll_cut_off(cx);
        }
        if let Poll::Ready(Err(error)) = &outcome {
            self.peer.clock.lost(error);
        }
        outcome
    }
}

fn builder(settings: &ListenerSettings) -> server::Builder {
    let head_bytes = settings.max_header_bytes + settings.max_uri_bytes + HEAD_HEADROOM;
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .max_concurrent_streams(settings.max_streams)
        .max_header_list_size(u32::try_from(head_bytes).unwrap_or(u32::MAX))
        .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(Some(MAX_FAULTY_STREAMS))
        // the account counts these requests once they are accepted
        .max_pending_accept_reset_streams(abuse::MAX_ABANDONED as usize)
        .max_send_buffer_size(MAX_WAITING_BYTES);
    builder
}
