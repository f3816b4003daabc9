//! What passes between client and origin: the message in both directions, and what becomes of it when either fails.

mod bodies;
mod bounds;
mod broken_off;
mod connections;
mod failures;
mod headers;
mod http2_servers;
mod interim;
mod parking;
mod responses;
mod streaming;
mod targets;
mod websockets;
