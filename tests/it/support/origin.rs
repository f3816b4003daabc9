//! A scriptable HTTP/1.1 origin on its own threads. It records exactly what arrives, and answers as
//! scripted.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    http::{Broken, End, read_body, read_head, values},
    wait::{Gate, PATIENCE, eventually, lock},
};

/// A request as the origin received it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub method: String,
    pub target: String,
    pub version: String,
    /// In order, with the received spelling.
    pub headers: Vec<(String, String)>,
    /// The first 64 KiB of the body, if the script read it.
    pub body: Vec<u8>,
    pub body_length: u64,
    /// Whether the body arrived completely.
    pub complete: bool,
}

/// Fields that matter to an origin. Many servers read `_` in a name as `-`.
const IMITATED: &[&str] = &[
    "content-length",
    "transfer-encoding",
    "host",
    "forwarded",
    "via",
    "x-request-id",
    "x-user-id",
    "x-rate-limit-tier",
];

impl Seen {
    /// The only value of a field; `None` if absent. Fails if the field occurs more than once.
    pub fn header(&self, name: &str) -> Option<&str> {
        let all = values(&self.headers, name);
        assert!(
            all.len() <= 1,
            "the origin saw {name} {} times: {all:?}",
            all.len()
        );
        all.first().copied()
    }

    pub fn header_all(&self, name: &str) -> Vec<&str> {
        values(&self.headers, name)
    }

    /// Everything that is wrong with a forwarded request; empty if it is correct.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let count = |name: &str| values(&self.headers, name).len();
        let mut fault = |wrong: bool, what: &str| {
            if wrong {
                faults.push(format!(
                    "{} {}: {what}; {:?}",
                    self.method, self.target, self.headers
                ));
            }
        };
        fault(self.version != "HTTP/1.1", "not HTTP/1.1");
        fault(count("host") != 1, "not exactly one Host");
        fault(count("via") != 1, "not exactly one Via");
        fault(count("x-request-id") != 1, "not exactly one X-Request-Id");
        fault(
            count("content-length") + count("transfer-encoding") > 1,
            "framed twice",
        );
        fault(
            values(&self.headers, "transfer-encoding")
                .iter()
                .any(|coding| *coding != "chunked"),
            "a transfer coding other than chunked",
        );
        fault(
            self.target.contains(['#', '\\', ' ']),
            "a target that should not be forwarded",
        );
        fault(
            matches!(self.method.as_str(), "PRI" | "CONNECT"),
            "a method that is never forwarded",
        );
        for name in [
            "keep-alive",
            "proxy-connection",
            "upgrade",
            "http2-settings",
            "proxy-authorization",
        ] {
            fault(count(name) > 0, "a hop-by-hop field");
        }
        for (name, _) in &self.headers {
            let meant = name.to_ascii_lowercase().replace(['_', '.'], "-");
            let alias = name.contains(['_', '.'])
                && (IMITATED.contains(&meant.as_str()) || meant.starts_with("x-forwarded-"));
            fault(alias, "a field that a server may take for another");
        }
        faults
    }
}

/// What a script does with one request.
type Script = dyn Fn(&mut Exchange) -> io::Result<()> + Send + Sync;

struct Shared {
    script: Box<Script>,
    seen: Mutex<Vec<Seen>>,
    open: Mutex<Vec<TcpStream>>,
    connections: AtomicUsize,
    aborted: AtomicUsize,
    dead: AtomicBool,
}

/// A running origin; refuses connections after drop.
pub struct Origin {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Origin {
    /// Runs `script` for every request. The connection stays open as long as the script returns
    /// `Ok`.
    pub fn new(script: impl Fn(&mut Exchange) -> io::Result<()> + Send + Sync + 'static) -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
        let shared = Arc::new(Shared {
            script: Box::new(script),
            seen: Mutex::default(),
            open: Mutex::default(),
            connections: AtomicUsize::new(0),
            aborted: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
        });
        let address = listener.local_addr().expect("a bound listener");
        serve(listener, Arc::clone(&shared));
        Origin { address, shared }
    }

    /// Reads each complete request and answers 200 with the body `ok`.
    pub fn ok() -> Origin {
        Origin::new(|exchange| {
            exchange.read_body()?;
            exchange.respond(200, &[], b"ok")
        })
    }

    /// Answers 200 with the request's body.
    pub fn echo() -> Origin {
        Origin::new(|exchange| {
            let body = exchange.read_body()?;
            exchange.respond(200, &[], &body)
        })
    }

    /// Reads each complete request and answers 200 with the body `late` once the gate is open.
    pub fn gated(gate: &Gate) -> Origin {
        let gate = gate.clone();
        Origin::new(move |exchange| {
            exchange.read_body()?;
            gate.wait();
            exchange.respond(200, &[], b"late")
        })
    }

    /// Reads each complete request, answers with exactly these bytes, and keeps the connection
    /// open.
    pub fn sending(bytes: impl Into<Vec<u8>>) -> Origin {
        let bytes = bytes.into();
        Origin::new(move |exchange| {
            exchange.read_body()?;
            exchange.write(&bytes)
        })
    }

    /// Reads each complete request, answers with exactly these bytes, and closes the connection.
    pub fn sending_then_closing(bytes: impl Into<Vec<u8>>) -> Origin {
        let bytes = bytes.into();
        Origin::new(move |exchange| {
            exchange.read_body()?;
            exchange.write(&bytes)?;
            exchange.close()
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The value of `servers` in a configuration.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every request so far, in the order in which their heads arrived.
    pub fn requests(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// The only request. Fails if there is not exactly one.
    pub fn request(&self) -> Seen {
        let mut all = self.requests();
        assert_eq!(
            all.len(),
            1,
            "the origin saw {} requests: {all:#?}",
            all.len()
        );
        all.remove(0)
    }

    /// Waits until `count` requests have arrived.
    pub fn wait_for_requests(&self, count: usize) -> Vec<Seen> {
        eventually("requests at the origin", || {
            let seen = self.requests();
            if seen.len() >= count {
                Ok(seen)
            } else {
                Err(format!("{} of {count}", seen.len()))
            }
        })
    }

    /// Number of accepted connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Number of exchanges that the gateway aborted.
    pub fn aborted(&self) -> usize {
        self.shared.aborted.load(Ordering::SeqCst)
    }

    /// Behaves like a killed process: every connection ends, and new ones are refused.
    pub fn kill(&self) {
        self.hang_up();
        eventually(
            "the origin's port to be shut",
            || match TcpStream::connect(self.address) {
                Ok(_) => Err("still open".into()),
                Err(_) => Ok(()),
            },
        );
    }

    /// Listens again on the same port after [`Origin::kill`].
    pub fn revive(&self) {
        let listener = eventually("the origin's port again", || {
            TcpListener::bind(self.address).map_err(|error| error.to_string())
        });
        self.shared.dead.store(false, Ordering::SeqCst);
        serve(listener, Arc::clone(&self.shared));
    }

    fn hang_up(&self) {
        self.shared.dead.store(true, Ordering::SeqCst);
        for stream in lock(&self.shared.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // wakes the accept loop, which then drops the listener
        let _ = TcpStream::connect(self.address);
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// A port on loopback without a listener.
pub fn nobody() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
    listener.local_addr().expect("a bound listener")
}

fn serve(listener: TcpListener, shared: Arc<Shared>) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            if shared.dead.load(Ordering::SeqCst) {
                return;
            }
            let Ok(stream) = stream else { continue };
            shared.connections.fetch_add(1, Ordering::SeqCst);
            if let Ok(copy) = stream.try_clone() {
                lock(&shared.open).push(copy);
            }
            let shared = Arc::clone(&shared);
            thread::spawn(move || serve_connection(stream, &shared));
        }
    });
}

fn serve_connection(stream: TcpStream, shared: &Shared) {
    // an idle connection in the gateway's pool stays silent for the whole test
    let _ = stream.set_read_timeout(Some(PATIENCE * 6));
    let _ = stream.set_nodelay(true);
    let mut stream = BufReader::with_capacity(64 * 1024, stream);
    while let Ok((line, headers)) = read_head(&mut stream) {
        let mut parts = line.splitn(3, ' ').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        let seen = Seen {
            method: part(),
            target: part(),
            version: part(),
            headers,
            ..Seen::default()
        };
        let index = {
            let mut all = lock(&shared.seen);
            all.push(seen.clone());
            all.len() - 1
        };
        let mut exchange = Exchange {
            request: seen,
            stream: &mut stream,
            shared,
            index,
            closed: false,
        };
        let outcome = (shared.script)(&mut exchange);
        if outcome.is_err() {
            if !exchange.closed {
                shared.aborted.fetch_add(1, Ordering::SeqCst);
            }
            break;
        }
    }
    // drop the copy first: the reset is sent when the last handle closes
    let peer = stream.get_ref().peer_addr().ok();
    lock(&shared.open).retain(|copy| copy.peer_addr().ok() != peer);
}

/// One request, and the connection for its response.
pub struct Exchange<'a> {
    pub request: Seen,
    stream: &'a mut BufReader<TcpStream>,
    shared: &'a Shared,
    index: usize,
    closed: bool,
}

impl Exchange<'_> {
    /// Reads the request's body to its end; returns and records the first 64 KiB.
    pub fn read_body(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Kept::default();
        let read = read_body(self.stream, &self.request.headers, End::Nothing, &mut body);
        let seen = &mut lock(&self.shared.seen)[self.index];
        seen.body.clone_from(&body.start);
        seen.body_length = body.length;
        seen.complete = read.is_ok();
        match read {
            Ok(()) => Ok(body.start),
            Err(Broken::Malformed(what)) => panic!("the gateway sent a malformed body: {what}"),
            Err(broken) => Err(io::Error::other(format!("{broken:?}"))),
        }
    }

    /// Reads at least one byte, as soon as it arrives.
    pub fn read_some(&mut self) -> io::Result<Vec<u8>> {
        let bytes = self.stream.fill_buf()?.to_vec();
        self.stream.consume(bytes.len());
        if bytes.is_empty() {
            Err(io::ErrorKind::UnexpectedEof.into())
        } else {
            Ok(bytes)
        }
    }

    /// Sends a response with `Content-Length` and these fields.
    pub fn respond(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        let mut head = format!(
            "HTTP/1.1 {status} Fine\r\nContent-Length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let mut bytes = head.into_bytes();
        if self.request.method != "HEAD" {
            bytes.extend_from_slice(body);
        }
        self.write(&bytes)
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Closes the sending direction only.
    pub fn end_writing(&mut self) -> io::Result<()> {
        self.stream.get_mut().shutdown(Shutdown::Write)
    }

    /// Closes the connection normally.
    pub fn close(&mut self) -> io::Result<()> {
        self.closed = true;
        Err(io::ErrorKind::NotConnected.into())
    }

    /// Closes the connection with a reset.
    pub fn reset(&mut self) -> io::Result<()> {
        // with zero linger, closing sends RST
        socket2::SockRef::from(self.stream.get_ref()).set_linger(Some(Duration::ZERO))?;
        self.close()
    }

    /// Waits until the gate is open; `Err` if the gateway closes the connection first.
    pub fn wait_for(&mut self, gate: &Gate) -> io::Result<()> {
        let moment = Duration::from_millis(20);
        self.stream.get_ref().set_read_timeout(Some(moment))?;
        while !gate.is_open() {
            match self.stream.read(&mut [0]) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) => {}
                _ => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        self.stream.get_ref().set_read_timeout(Some(PATIENCE * 6))
    }

    /// Waits until the gateway closes the connection. Returns `Err`, because the exchange is over
    /// then.
    pub fn wait_for_abort(&mut self) -> io::Result<()> {
        self.stream
            .get_ref()
            .set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut nothing = [0; 1];
        match self.stream.read(&mut nothing) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                Ok(())
            }
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

/// The start of a body, and its length.
#[derive(Default)]
struct Kept {
    start: Vec<u8>,
    length: u64,
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = (64 * 1024_usize)
            .saturating_sub(self.start.len())
            .min(bytes.len());
        self.start.extend_from_slice(&bytes[..room]);
        self.length += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
