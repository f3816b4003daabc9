//! HTTP/2 to a server (`h2c://`): many exchanges at once over one connection, and over more where the server allows no more
//! on one.
//!
//! ```text
//! line: one connection ──┬─ exchange, on a stream of its own, run inline in the request's task
//!       and its task     ├─ exchange
//!                        └─ …          no room (SETTINGS_MAX_CONCURRENT_STREAMS)? another line, up to `max_connections`
//! ```
//!
//! Read in this order: `lines` (connections), `exchange` (the request leaves, the response's head comes back), `upload`
//! (the request's body), [`body`] (the response's).
//!
//! Flow control holds each stream to `STREAM_WINDOW` in either direction. The connection's own window is as wide as the
//! protocol allows: with a narrower one, a few clients that read slowly would stop the streams of all others.

pub mod body;
mod exchange;
mod lines;
mod upload;

pub use body::StreamBody;
pub(super) use exchange::{ask, exchange, head};
pub(super) use lines::{Lines, Place};

/// Bytes that a server may send on one stream before the client has taken any.
const STREAM_WINDOW: u32 = 128 * 1024;
/// The widest that there is (RFC 9113 §6.9.1).
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes of one stream that may wait to be written to the server.
const MAX_SEND_BUFFER_BYTES: usize = 64 * 1024;
