//! A small, strict HTTP/1.1 client. It keeps every field as received and distinguishes a clean end
//! from a broken one.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
};

use super::wait::PATIENCE;

/// A request as a test writes it.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn new(method: &str, target: &str) -> Request {
        Request {
            method: method.into(),
            target: target.into(),
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    pub fn get(target: &str) -> Request {
        Request::new("GET", target)
    }

    pub fn post(target: &str, body: impl Into<Vec<u8>>) -> Request {
        Request {
            body: body.into(),
            ..Request::new("POST", target)
        }
    }

    /// Adds a field; `host` replaces the default one.
    pub fn header(mut self, name: &str, value: &str) -> Request {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// The bytes on an HTTP/1.1 connection. Adds `Host` and `Content-Length` if the test sets none.
    pub fn to_bytes(&self) -> Vec<u8> {
        let has = |name: &str| {
            self.headers
                .iter()
                .any(|(n, _)| n.eq_ignore_ascii_case(name))
        };
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        if !has("host") {
            head += "Host: a.example\r\n";
        }
        if !has("content-length") && !has("transfer-encoding") && !self.body.is_empty() {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// A complete response.
#[derive(Clone, Debug, Default)]
pub struct Response {
    pub status: u16,
    /// Every preceding 1xx status.
    pub interim: Vec<u16>,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    /// The only value of a field; `None` if absent. Fails if the field was sent more than once.
    pub fn header(&self, name: &str) -> Option<&str> {
        let all = self.header_all(name);
        assert!(
            all.len() <= 1,
            "{name} was sent {} times: {all:?}",
            all.len()
        );
        all.first().copied()
    }

    pub fn header_all(&self, name: &str) -> Vec<&str> {
        values(&self.headers, name)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in body {:?}", self.text()))
    }

    /// `Retry-After` in seconds.
    pub fn retry_after(&self) -> Option<u64> {
        let value = self.header("retry-after")?;
        Some(
            value
                .parse()
                .unwrap_or_else(|_| panic!("Retry-After is not whole seconds: {value:?}")),
        )
    }

    /// A parameter of a limit in `RateLimit` or `RateLimit-Policy`: `parameter("ratelimit",
    /// "per_ip", "r")`.
    pub fn parameter(&self, field: &str, limit: &str, parameter: &str) -> Option<i64> {
        let lines = self.header_all(field).join(", ");
        let member = lines
            .split(", ")
            .find(|member| member.split(';').next() == Some(&format!("{limit:?}")))?;
        let value = member
            .split(';')
            .skip(1)
            .find_map(|p| p.strip_prefix(&format!("{parameter}=")))?;
        Some(
            value.parse().unwrap_or_else(|_| {
                panic!("{parameter} of {limit} is not an integer in {lines:?}")
            }),
        )
    }

    /// The remaining units of a limit in `RateLimit`. Fails if the field does not name the limit.
    pub fn remaining(&self, limit: &str) -> i64 {
        self.parameter("ratelimit", limit, "r").unwrap_or_else(|| {
            panic!(
                "no {limit:?} in RateLimit: {:?}",
                self.header_all("ratelimit")
            )
        })
    }

    /// The names of the limits in `RateLimit`, in order.
    pub fn limits(&self) -> Vec<String> {
        self.header_all("ratelimit")
            .iter()
            .flat_map(|line| line.split(", "))
            .map(|member| {
                member
                    .split(';')
                    .next()
                    .unwrap_or_default()
                    .trim_matches('"')
                    .to_owned()
            })
            .collect()
    }
}

/// All values of a field, in order.
pub fn values<'a>(headers: &'a [(String, String)], name: &str) -> Vec<&'a str> {
    headers
        .iter()
        .filter(|(n, _)| n.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
        .collect()
}

/// Why there is no complete response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The connection ended before the first byte.
    Closed,
    /// The connection ended within the head or the body.
    Cut,
    /// The connection was reset.
    Reset,
    /// Nothing arrived within the test's patience.
    Silent,
    /// Bytes that are not HTTP/1.1.
    Malformed(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Broken::Cut,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionAborted => Broken::Reset,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Broken::Silent,
            _ => Broken::Malformed(error.to_string()),
        }
    }
}

/// A persistent connection.
pub struct Client<S = TcpStream> {
    stream: BufReader<S>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address)
            .unwrap_or_else(|error| panic!("connect to {address}: {error}"));
        Client::over(stream)
    }

    pub fn over(stream: TcpStream) -> Client {
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout above zero");
        stream
            .set_write_timeout(Some(PATIENCE))
            .expect("a timeout above zero");
        stream.set_nodelay(true).expect("a TCP stream");
        Client::on(stream)
    }

    /// True if the peer closes the connection within `time`, false if it stays open and silent.
    pub fn closes_within(&mut self, time: std::time::Duration) -> bool {
        self.stream
            .get_ref()
            .set_read_timeout(Some(time))
            .expect("a timeout above zero");
        let closed = match self.stream.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) => Broken::from(error) != Broken::Silent,
        };
        self.stream
            .get_ref()
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout above zero");
        closed
    }
}

impl<S: Read + Write> Client<S> {
    /// Uses a stream whose reads and writes have timeouts.
    pub fn on(stream: S) -> Client<S> {
        Client {
            stream: BufReader::new(stream),
        }
    }

    /// Sends a request and reads its response. Fails the test if there is none.
    pub fn send(&mut self, request: &Request) -> Response {
        self.try_send(request)
            .unwrap_or_else(|broken| panic!("{} {}: {broken:?}", request.method, request.target))
    }

    pub fn try_send(&mut self, request: &Request) -> Result<Response, Broken> {
        self.write(&request.to_bytes())?;
        self.read_response(&request.method)
    }

    /// Sends a request and reads only the head of its response. Fails the test if there is none.
    pub fn begin(&mut self, request: &Request) -> Response {
        let sent = self.write(&request.to_bytes());
        sent.and_then(|()| self.read_head())
            .unwrap_or_else(|broken| panic!("{} {}: {broken:?}", request.method, request.target))
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        Ok(self.stream.get_mut().write_all(bytes)?)
    }

    /// The connection itself, for misbehaving clients.
    pub fn stream(&self) -> &S {
        self.stream.get_ref()
    }

    /// The connection itself, for another protocol. Nothing may have been read from it.
    pub fn into_stream(self) -> S {
        self.stream.into_inner()
    }

    /// The data that has not been read yet.
    pub fn stream_mut(&mut self) -> &mut impl Read {
        &mut self.stream
    }

    /// Reads the response to a request of this method.
    pub fn read_response(&mut self, method: &str) -> Result<Response, Broken> {
        let mut response = self.read_head()?;
        let empty = method == "HEAD" || matches!(response.status, 204 | 304);
        if !empty {
            read_body(
                &mut self.stream,
                &response.headers,
                End::Close,
                &mut response.body,
            )?;
        }
        Ok(response)
    }

    /// Reads a response head, and leaves the body unread.
    pub fn read_head(&mut self) -> Result<Response, Broken> {
        let mut interim = Vec::new();
        loop {
            let (line, headers) = read_head(&mut self.stream)?;
            let status = line
                .strip_prefix("HTTP/1.1 ")
                .or_else(|| line.strip_prefix("HTTP/1.0 "))
                .and_then(|rest| rest.get(..3)?.parse().ok())
                .ok_or_else(|| Broken::Malformed(format!("status line {line:?}")))?;
            if status >= 200 || status == 101 {
                return Ok(Response {
                    status,
                    interim,
                    headers,
                    body: Vec::new(),
                });
            }
            interim.push(status);
        }
    }

    /// Reads exactly `length` bytes of a body.
    pub fn discard(&mut self, length: u64) -> Result<u64, Broken> {
        Ok(io::copy(
            &mut (&mut self.stream).take(length),
            &mut io::sink(),
        )?)
    }
}

/// Reads a start line and its fields. `Closed` if the stream ends before the first byte.
pub fn read_head(stream: &mut impl BufRead) -> Result<(String, Vec<(String, String)>), Broken> {
    let first = read_line(stream)?.ok_or(Broken::Closed)?;
    let mut headers = Vec::new();
    loop {
        let line = read_line(stream)?.ok_or(Broken::Cut)?;
        if line.is_empty() {
            return Ok((first, headers));
        }
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| Broken::Malformed(format!("field {line:?}")))?;
        headers.push((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()));
    }
}

/// One line without its CR LF, each byte as one character. `None` at the end of the stream.
fn read_line(stream: &mut impl BufRead) -> Result<Option<String>, Broken> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(Some(line.iter().map(|&byte| char::from(byte)).collect())),
        None if line.ends_with(b"\n") => {
            Err(Broken::Malformed("a line that ends in LF alone".into()))
        }
        None => Err(Broken::Cut),
    }
}

/// How the body of a message without a stated length ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Request: there is no body.
    Nothing,
    /// Response: the body ends with the connection.
    Close,
}

/// Reads a body into `body`, with the framing of the head.
pub fn read_body(
    stream: &mut impl BufRead,
    headers: &[(String, String)],
    unframed: End,
    body: &mut impl Write,
) -> Result<(), Broken> {
    let lengths = values(headers, "content-length");
    let codings = values(headers, "transfer-encoding");
    match (lengths.as_slice(), codings.as_slice()) {
        ([], []) if unframed == End::Nothing => Ok(()),
        ([], []) => io::copy(stream, body).map(drop).map_err(Broken::from),
        ([length], []) => {
            let length: u64 = length
                .parse()
                .map_err(|_| Broken::Malformed(format!("length {length:?}")))?;
            copy_exactly(stream, length, body)
        }
        ([], ["chunked"]) => read_chunks(stream, body),
        _ => Err(Broken::Malformed(format!(
            "framing by {lengths:?} and {codings:?}"
        ))),
    }
}

fn read_chunks(stream: &mut impl BufRead, body: &mut impl Write) -> Result<(), Broken> {
    loop {
        let line = read_line(stream)?.ok_or(Broken::Cut)?;
        let size = u64::from_str_radix(&line, 16)
            .map_err(|_| Broken::Malformed(format!("chunk {line:?}")))?;
        copy_exactly(stream, size, body)?;
        if size == 0 {
            while !read_line(stream)?.ok_or(Broken::Cut)?.is_empty() {}
            return Ok(());
        }
        if !read_line(stream)?.ok_or(Broken::Cut)?.is_empty() {
            return Err(Broken::Malformed("bytes after a chunk".into()));
        }
    }
}

fn copy_exactly(
    stream: &mut impl BufRead,
    length: u64,
    body: &mut impl Write,
) -> Result<(), Broken> {
    let copied = io::copy(&mut stream.take(length), body)?;
    if copied == length {
        Ok(())
    } else {
        Err(Broken::Cut)
    }
}
