//! Messages between client and origin in both directions, and failures of either side.

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
