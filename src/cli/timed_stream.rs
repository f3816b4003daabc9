//! A blocking connection with one deadline for everything: a server that sends a byte now and then
//! cannot hold a command.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs as _},
    time::{Duration, Instant},
};

/// A connection on which every wait ends at the same deadline.
pub(super) struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
    patience: Duration,
}

impl TimedStream {
    /// Connects to `HOST:PORT`. The exchange must end within `patience`.
    pub(super) fn connect(authority: &str, patience: Duration) -> io::Result<Self> {
        let address = authority.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other("the host name has no address"))?;
        let deadline = Instant::now() + patience;
        Ok(Self {
            stream: TcpStream::connect_timeout(&address, patience)?,
            deadline,
            patience,
        })
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(self.too_late()),
            false => Ok(left),
        }
    }

    fn too_late(&self) -> io::Error {
        let message = format!("the response is not complete after {:?}", self.patience);
        io::Error::new(io::ErrorKind::TimedOut, message)
    }

    /// An expired socket timeout is reported as `WouldBlock` or `TimedOut`.
    fn in_time<T>(&self, outcome: io::Result<T>) -> io::Result<T> {
        outcome.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.too_late(),
            _ => error,
        })
    }
}

impl Read for TimedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        let read = self.stream.read(buffer);
        self.in_time(read)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        let written = self.stream.write(bytes);
        self.in_time(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
