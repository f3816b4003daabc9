//! The parts of WebSocket that a gateway sees: the handshake, and an origin that accepts it.

use std::io;

use super::{
    http::Request,
    origin::{Exchange, Origin},
};

/// The example key of RFC 6455 §1.3.
pub const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
/// The response head that accepts the key.
pub const AGREED: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// The request of a client that opens a WebSocket.
pub fn handshake() -> Request {
    Request::get("/chat")
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-key", KEY)
        .header("sec-websocket-version", "13")
        .header("sec-websocket-protocol", "chat")
}

/// An origin that accepts, then echoes every byte until the client closes.
pub fn echo() -> Origin {
    Origin::new(|exchange| {
        if exchange.request.header("upgrade").is_none() {
            return exchange.respond(200, &[], b"ok");
        }
        exchange.write(AGREED.as_bytes())?;
        send_back(exchange)
    })
}

/// Echoes every byte until the client closes.
pub fn send_back(exchange: &mut Exchange<'_>) -> io::Result<()> {
    while let Ok(bytes) = exchange.read_some() {
        exchange.write(&bytes)?;
    }
    exchange.close()
}
