//! What answers the requests of a listener.

use std::{future::Future, rc::Rc};

use http::{Request, Response};

use super::{inbound::RequestBody, peer::Peer};
use crate::body::AnswerBody;

/// Turns a request into a response; one per worker.
pub trait Handler: 'static {
    /// Body of the responses.
    type Body: AnswerBody + 'static;

    /// Answers one request and returns `finish` of the response. Dropped when the client is gone.
    ///
    /// `finish` is a parameter because the future is large: a wrapper future would move it once
    /// more.
    fn handle<R, F: FnOnce(Response<Self::Body>) -> R>(
        self: Rc<Self>,
        request: Request<RequestBody>,
        from: Rc<Peer>,
        finish: F,
    ) -> impl Future<Output = R>;

    /// Response, byte for byte, to an HTTP/1.1 client whose request head did not arrive in time.
    fn head_timeout_answer(&self) -> &'static [u8];
}
