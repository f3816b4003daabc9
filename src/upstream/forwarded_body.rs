//! The body of a forwarded request's response, whichever way it comes.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};

use super::{
    ResponseBody, Tunnel, abandoned::AbandonedExchange, body::BodyInterruption, echo::EchoBody,
    http2::StreamBody,
};
use crate::body::BodyPiece;

/// The body of a response.
#[derive(Debug)]
pub enum ForwardedBody<B> {
    /// Over its own connection.
    Remote(ResponseBody<B>),
    /// Over an HTTP/2 stream.
    Stream(Box<StreamBody<B>>),
    /// From the built-in server.
    Echo(EchoBody<B>),
}

impl<B> ForwardedBody<B>
where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    /// The next piece; `None` at the end.
    pub fn poll_piece<E>(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPiece, E>>>
    where
        E: From<BodyInterruption> + From<B::Error>,
    {
        match self {
            Self::Remote(body) => Pin::new(body).poll_frame(cx).map(piece),
            Self::Stream(body) => Pin::new(body).poll_frame(cx).map(piece),
            Self::Echo(body) => Pin::new(body).poll_frame(cx).map(piece),
        }
    }

    /// Whether it is known that no piece follows.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::Remote(body) => body.is_end_stream(),
            Self::Stream(body) => body.is_end_stream(),
            Self::Echo(body) => body.is_end_stream(),
        }
    }

    /// The bytes of data still to come, if known.
    pub fn exact_bytes(&self) -> Option<u64> {
        match self {
            Self::Remote(body) => body.size_hint().exact(),
            Self::Stream(body) => body.size_hint().exact(),
            Self::Echo(body) => body.size_hint().exact(),
        }
    }
}

impl<B> ForwardedBody<B> {
    /// The server's end of the connection, after 101 Switching Protocols.
    pub fn into_tunnel(self) -> Option<Tunnel> {
        match self {
            Self::Remote(body) => body.into_tunnel(),
            Self::Stream(_) | Self::Echo(_) => None,
        }
    }

    /// The rest of an unfinished exchange; `None` if it has visibly ended.
    pub fn abandon(self) -> Option<AbandonedExchange> {
        match self {
            Self::Remote(body) => body.abandon(),
            Self::Stream(body) => body.abandon(),
            Self::Echo(_) => None,
        }
    }

    /// Whether the whole request was sent to the server.
    pub fn request_was_sent(&self) -> bool {
        match self {
            Self::Remote(body) => body.request_was_sent(),
            Self::Stream(body) => body.request_was_sent(),
            Self::Echo(_) => true,
        }
    }

    /// The request body, while it is still being sent.
    pub fn unsent_mut(&mut self) -> Option<&mut B> {
        match self {
            Self::Remote(body) => body.unsent_mut(),
            Self::Stream(body) => body.unsent_mut(),
            Self::Echo(_) => None,
        }
    }
}

fn piece<E, F: From<E>>(frame: Option<Result<Frame<Bytes>, E>>) -> Option<Result<BodyPiece, F>> {
    frame.map(|frame| match frame?.into_data() {
        Ok(data) => Ok(BodyPiece::Data(data)),
        Err(frame) => Ok(BodyPiece::Trailers(
            frame.into_trailers().unwrap_or_default(),
        )),
    })
}
