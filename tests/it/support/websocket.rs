//! WebSocket as far as a gateway takes part in it: the handshake, and an origin that agrees.

use std::io;

use super::{
    http::Request,
    origin::{Exchange, Origin},
};

/// RFC 6455 §1.3.
pub const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
/// The head of an answer that agrees to it.
pub const AGREED: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// What a client asks for that wants to talk.
pub fn handshake() -> Request {
    Request::get("/chat")
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-key", KEY)
        .header("sec-websocket-version", "13")
        .header("sec-websocket-protocol", "chat")
}

/// An origin that agrees, and sends every byte back until the client has ended.
pub fn echo() -> Origin {
    Origin::new(|exchange| {
        if exchange.request.header("upgrade").is_none() {
            return exchange.respond(200, &[], b"ok");
        }
        exchange.write(AGREED.as_bytes())?;
        send_back(exchange)
    })
}

/// Sends every byte back until the client has ended.
pub fn send_back(exchange: &mut Exchange<'_>) -> io::Result<()> {
    while let Ok(bytes) = exchange.read_some() {
        exchange.write(&bytes)?;
    }
    exchange.close()
}
