//! HTTP/2 to a server (`h2c://`): many concurrent exchanges per connection, and more connections
//! when the server's stream limit is reached.
//!
//! ```text
//! connection and its task ──┬─ exchange, on its own stream, inline in the request's task
//!                           ├─ exchange
//!                           └─ …   SETTINGS_MAX_CONCURRENT_STREAMS reached? another connection,
//!                                  up to `max_connections`
//! ```
//!
//! Read in this order: `connections`, `pool` (opens them, grants stream permits), `exchange` (sends
//! the request, receives the response head), `upload` (the request body), [`body`] (the response
//! body).
//!
//! Flow control bounds each stream to `STREAM_WINDOW` in either direction. The connection's window
//! has the largest size that the protocol allows. With a smaller one, a few slow clients would
//! stall the streams of all others.

pub mod body;
mod connections;
mod exchange;
mod pool;
mod upload;

pub use body::StreamBody;
pub(super) use connections::H2Pool;
pub(super) use exchange::{ask, exchange, head};
pub(super) use pool::StreamPermit;

/// Bytes that a server may send on one stream ahead of the client.
const STREAM_WINDOW: u32 = 128 * 1024;
/// The protocol's maximum (RFC 9113 §6.9.1).
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes per stream that may wait to be written to the server.
const MAX_SEND_BUFFER_BYTES: usize = 64 * 1024;
