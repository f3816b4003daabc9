//! The body of an answer, as the gateway passes it from an upstream to a listener: pieces of data,
//! perhaps trailers, then the end. Listeners and upstreams translate it to their HTTP libraries.

use std::{
    error::Error,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;

/// One piece of a body.
#[derive(Debug)]
pub enum BodyPiece {
    /// Data, of any length.
    Data(Bytes),
    /// Trailers; nothing follows them.
    Trailers(HeaderMap),
}

impl BodyPiece {
    /// Its bytes of data; none in trailers.
    pub fn data_bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Trailers(_) => 0,
        }
    }
}

/// A body that a listener sends to its client.
pub trait AnswerBody {
    /// Why the body can break off.
    type Error: Into<Box<dyn Error + Send + Sync>>;

    /// The next piece; `None` at the end. Nothing is asked of the body after its end or an error.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPiece, Self::Error>>>;

    /// Whether it is known that no piece follows.
    fn has_ended(&self) -> bool;

    /// The bytes of data still to come, if known.
    fn exact_bytes(&self) -> Option<u64>;
}
