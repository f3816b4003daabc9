//! Raw bytes in and out, for requests that no client library would send.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

/// The received data.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub bytes: Vec<u8>,
    /// Whether the peer closed the connection; otherwise it fell silent.
    pub closed: bool,
}

impl Reply {
    /// The status of every response head, in order.
    pub fn statuses(&self) -> Vec<String> {
        let starts = |at: usize| {
            let rest = &self.bytes[at..];
            let head = rest.starts_with(b"HTTP/1.1 ") || rest.starts_with(b"HTTP/1.0 ");
            let status = rest
                .get(9..13)
                .filter(|s| s[..3].iter().all(u8::is_ascii_digit) && s[3] == b' ')?;
            head.then(|| String::from_utf8_lossy(&status[..3]).into_owned())
        };
        (0..self.bytes.len()).filter_map(starts).collect()
    }

    /// The bytes as text, for messages and simple checks.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Sends the bytes on a new connection, and reads until the peer closes it or is silent for `idle`.
pub fn send(address: SocketAddr, bytes: &[u8], idle: Duration) -> Reply {
    let mut stream = open(address);
    // the peer may reject before it has read everything
    let _ = stream.write_all(bytes);
    read(&mut stream, idle)
}

/// Like [`send`], but closes the client's side after the bytes.
pub fn send_and_finish(address: SocketAddr, bytes: &[u8], idle: Duration) -> Reply {
    let mut stream = open(address);
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    read(&mut stream, idle)
}

pub fn open(address: SocketAddr) -> TcpStream {
    let stream =
        TcpStream::connect(address).unwrap_or_else(|error| panic!("connect to {address}: {error}"));
    stream.set_nodelay(true).expect("a TCP stream");
    stream
        .set_write_timeout(Some(super::wait::PATIENCE))
        .expect("a timeout above zero");
    stream
}

/// Reads until the peer closes or is silent for `idle`.
pub fn read(stream: &mut TcpStream, idle: Duration) -> Reply {
    stream
        .set_read_timeout(Some(idle))
        .expect("a timeout above zero");
    let mut reply = Reply::default();
    let mut buffer = [0; 16 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => reply.closed = true,
            Ok(length) => {
                reply.bytes.extend_from_slice(&buffer[..length]);
                continue;
            }
            Err(error) => {
                reply.closed = !matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                );
            }
        }
        return reply;
    }
}
