//! From bytes to requests: bind, accept, enforce bounds, serve connections.
//!
//! ```text
//! bind ─▶ accept ─▶ serve ─▶ http1 or http2 ─▶ request ─▶ Handler (the gateway)
//!           │         │        timed_io, clock: every wait is bounded
//!           │         └─▶ PROXY header, TLS handshake, which HTTP
//!           └─▶ idle_connections parks a connection between requests
//! ```
//!
//! Every worker has its own listening socket for each address (SO_REUSEPORT), so a connection is
//! accepted, served and closed on one thread.

mod abuse;
mod accept;
mod bind;
pub mod body_buffers;
pub mod clock;
pub mod connections_per_address;
mod date;
pub mod drain;
mod handler;
pub mod handover;
mod http1;
mod http2;
mod idle_connections;
pub mod inbound;
mod inherited;
mod interim;
mod observer;
mod peer;
mod protocol;
pub mod proxy_protocol;
pub mod request;
mod run_connection;
mod serve;
mod settings;
mod stream;
mod streams;
mod timed_io;
pub mod tls;

pub use abuse::AbuseReason;
pub use accept::{Listener, UNIX_PEER};
pub use bind::{BindAddress, BindMode, BoundListener, ListeningSocket, bind, bind_one};
pub use drain::{Drain, released_connections};
pub use handler::Handler;
pub use handover::ClientEnd;
pub use http2::StreamRequestBody;
pub use observer::Observer;
pub use peer::Peer;
pub use proxy_protocol::ProxyProtocol;
pub use settings::ListenerSettings;
pub use tls::{Handshakes, ListenerTls};
