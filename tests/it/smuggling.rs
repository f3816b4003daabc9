//! Request smuggling: each case of `tests/vectors/smuggling.json`, with an origin that records
//! every byte.
//!
//! For each case, the test asserts three things. The origin received exactly the listed request
//! lines. Each carries the ID of a request that the gateway decided on and logged once. Lax
//! parsers, modeled on real servers, read the same requests from the recorded bytes.

use std::{
    collections::HashMap,
    io::{self, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{
    http1_vectors::{accepted, all_at_once, expected, latin1, outcome, text},
    support::{
        Gateway, eventually,
        frames::{self, Block},
        http::{End, read_body, read_head, values},
        raw::{self, Reply},
        wait::lock,
    },
};

const CASES: usize = 297;

/// Silence after which the outcome is final, and the number of attempts.
const IDLE: Duration = Duration::from_millis(600);
const ROUNDS: usize = 5;

fn cases() -> Vec<Value> {
    let cases = include_str!("../vectors/smuggling.json");
    let cases: Vec<Value> = serde_json::from_str(cases).expect("the cases are JSON");
    assert_eq!(cases.len(), CASES, "the number of cases");
    cases
}

/// The case's own target.
fn path(case: &Value) -> String {
    format!("/c/{}", text(case, "id"))
}

fn filled(template: &str, case: &Value) -> String {
    let path = path(case);
    let body = case["body"].as_str().unwrap_or_default();
    let body = body.replace("{path}", &path);
    template
        .replace("{length}", &body.len().to_string())
        .replace("{chunk}", &format!("{:x}\r\n{body}", body.len()))
        .replace("{body}", &body)
        .replace("{path}", &path)
}

fn block(case: &Value) -> Block {
    let pairs = |member: &str| -> Vec<(String, String)> {
        let list = case["h2"][member].as_array().cloned().unwrap_or_default();
        let string = |value: &Value| filled(value.as_str().expect("a field is text"), case);
        list.iter()
            .map(|pair| (string(&pair[0]), string(&pair[1])))
            .collect()
    };
    Block {
        fields: pairs("headers"),
        body: case["h2"]["body"]
            .as_str()
            .map(|body| filled(body, case).into_bytes()),
        trailers: pairs("trailers"),
    }
}

/// The outcome for the client: as in the HTTP/1.1 vectors, or a status, `RST n` or `GOAWAY n` for
/// HTTP/2.
fn fire(address: SocketAddr, case: &Value) -> String {
    if case["h2"].is_object() {
        let outcome = frames::send(address, &block(case), Duration::from_secs(10));
        let goaway = outcome.goaway.filter(|code| *code != 0);
        return match (outcome.status, outcome.reset, goaway) {
            (Some(status), _, _) => status.to_string(),
            (None, Some(code), _) => format!("RST {code}"),
            (None, None, Some(code)) => format!("GOAWAY {code}"),
            (None, None, None) => "timeout".to_owned(),
        };
    }
    let mut stream = raw::open(address);
    // the gateway may reject the request before it has read everything
    let _ = stream.write_all(&latin1(&filled(text(case, "raw"), case)));
    let mut reply = Reply::default();
    for _ in 0..ROUNDS {
        let more = raw::read(&mut stream, IDLE);
        reply.bytes.extend(more.bytes);
        reply.closed = more.closed;
        if more.closed || accepted(&outcome(&reply), &expected(case)) {
            break;
        }
    }
    outcome(&reply)
}

/// A request, parsed by the origin's strict parser.
#[derive(Clone, Debug)]
struct Seen {
    line: String,
    headers: Vec<(String, String)>,
}

impl Seen {
    /// `GET /target`.
    fn asked(&self) -> String {
        self.line
            .rsplit_once(' ')
            .map_or(self.line.clone(), |(asked, _)| asked.to_owned())
    }
}

/// Bytes received on one connection.
#[derive(Clone, Debug, Default)]
struct Recorded {
    bytes: Vec<u8>,
    seen: Vec<Seen>,
}

type Records = Arc<Mutex<Vec<Arc<Mutex<Recorded>>>>>;

/// An origin that records every byte, and answers each request that a strict parser finds:
/// `…/early` before its body is read, `…/101` with a protocol switch.
fn record() -> (SocketAddr, Records) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
    let address = listener.local_addr().expect("a bound listener");
    let records = Records::default();
    let all = Arc::clone(&records);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let recorded = Arc::new(Mutex::new(Recorded::default()));
            lock(&all).push(Arc::clone(&recorded));
            thread::spawn(move || drop(serve(stream, &recorded)));
        }
    });
    (address, records)
}

struct Tee<'a>(TcpStream, &'a Mutex<Recorded>);

impl Read for Tee<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let length = self.0.read(buf)?;
        lock(self.1).bytes.extend_from_slice(&buf[..length]);
        Ok(length)
    }
}

fn serve(stream: TcpStream, recorded: &Mutex<Recorded>) -> io::Result<()> {
    const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    const SWITCH: &[u8] =
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
    let mut answer = stream.try_clone()?;
    let mut stream = BufReader::new(Tee(stream, recorded));
    while let Ok((line, headers)) = read_head(&mut stream) {
        let seen = Seen { line, headers };
        lock(recorded).seen.push(seen.clone());
        let asked = seen.asked();
        if asked.ends_with("/early") {
            answer.write_all(OK)?;
        }
        let body = read_body(&mut stream, &seen.headers, End::Nothing, &mut io::sink());
        body.map_err(|broken| io::Error::other(format!("{broken:?}")))?;
        if asked.ends_with("/101") {
            answer.write_all(SWITCH)?;
        } else if !asked.ends_with("/early") {
            let length = if asked.starts_with("HEAD ") {
                OK.len() - 2
            } else {
                OK.len()
            };
            answer.write_all(&OK[..length])?;
        }
    }
    Ok(())
}

/// A way in which a server parses laxly.
#[derive(Clone, Copy, Debug)]
struct Dialect {
    /// `Content-Length` wins over `Transfer-Encoding`.
    length_first: bool,
    /// Any coding that contains `chunked` counts as chunked.
    any_chunked: bool,
    /// `_` and `.` in a name count as `-`.
    aliases: bool,
    /// A line may end in LF alone.
    bare_lf: bool,
    /// A lone CR also ends a line.
    bare_cr: bool,
}

const DIALECTS: [Dialect; 6] = {
    let strict = Dialect {
        length_first: false,
        any_chunked: false,
        aliases: false,
        bare_lf: false,
        bare_cr: false,
    };
    [
        Dialect {
            length_first: true,
            ..strict
        },
        Dialect {
            any_chunked: true,
            ..strict
        },
        Dialect {
            aliases: true,
            any_chunked: true,
            ..strict
        },
        Dialect {
            aliases: true,
            length_first: true,
            ..strict
        },
        Dialect {
            bare_lf: true,
            ..strict
        },
        Dialect {
            bare_lf: true,
            bare_cr: true,
            aliases: true,
            any_chunked: true,
            ..strict
        },
    ]
};

impl Dialect {
    /// The request lines that a server with this dialect reads.
    fn read(self, mut bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(line) = self.line(&mut bytes) {
            let mut headers = Vec::new();
            loop {
                match self.line(&mut bytes) {
                    None => return lines,
                    Some(field) if field.is_empty() => break,
                    Some(field) => {
                        let (name, value) = field.split_once(':').unwrap_or((&field, ""));
                        let mut name = name.trim().to_ascii_lowercase();
                        if self.aliases {
                            name = name.replace(['_', '.'], "-");
                        }
                        headers.push((name, value.trim().to_ascii_lowercase()));
                    }
                }
            }
            lines.push(line);
            if !self.skip_body(&headers, &mut bytes) {
                return lines;
            }
        }
        lines
    }

    /// Whether the body was complete.
    fn skip_body(self, headers: &[(String, String)], bytes: &mut &[u8]) -> bool {
        let length = values(headers, "content-length").first().copied();
        let chunked = values(headers, "transfer-encoding")
            .iter()
            .any(|coding| *coding == "chunked" || (self.any_chunked && coding.contains("chunked")));
        if chunked && !(self.length_first && length.is_some()) {
            loop {
                let Some(size) = self.line(bytes) else {
                    return false;
                };
                let digits = size.split(';').next().unwrap_or_default().trim();
                let Ok(size) = usize::from_str_radix(digits, 16) else {
                    return false;
                };
                if size == 0 {
                    while let Some(trailer) = self.line(bytes) {
                        if trailer.is_empty() {
                            return true;
                        }
                    }
                    return false;
                }
                if bytes.len() < size {
                    return false;
                }
                *bytes = &bytes[size..];
                if self.line(bytes).is_none() {
                    return false;
                }
            }
        }
        let length = length.and_then(|length| length.parse().ok()).unwrap_or(0);
        let whole = bytes.len() >= length;
        *bytes = &bytes[length.min(bytes.len())..];
        whole
    }

    fn line(self, bytes: &mut &[u8]) -> Option<String> {
        let ends = |at: usize| match bytes[at] {
            b'\n' => self.bare_lf || (at > 0 && bytes[at - 1] == b'\r'),
            b'\r' => self.bare_cr && bytes.get(at + 1) != Some(&b'\n'),
            _ => false,
        };
        let end = (0..bytes.len()).find(|&at| ends(at))?;
        let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
        let line = line.iter().map(|&byte| char::from(byte)).collect();
        *bytes = &bytes[end + 1..];
        Some(line)
    }
}

/// Method and path of every forwarded request by its ID, from the access lines.
fn decided(gateway: &Gateway) -> HashMap<String, Vec<String>> {
    let mut decided: HashMap<String, Vec<String>> = HashMap::new();
    let output = gateway.output();
    let lines = output.lines().filter(|line| line.starts_with('{'));
    for line in lines.filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if line["method"].is_string() && line["upstream"].is_string() {
            let asked = format!("{} {}", text(&line, "method"), text(&line, "path"));
            decided
                .entry(text(&line, "request_id").to_owned())
                .or_default()
                .push(asked);
        }
    }
    decided
}

fn start(origin: SocketAddr) -> Gateway {
    let gateway = Gateway::with(
        r#"
        [server]
        workers = 2
        [log]
        access = "all"
        format = "json"
        [[listen]]
        address = "127.0.0.1:0"
        max_body_size = "8KiB"
        [limit.none]
        key = []
        rate = "1/h"
        burst = 1
        [[route]]
        name = "limited"
        path = "/c/{id}/limited"
        upstream = "origin"
        limits = ["none"]
        [[route]]
        name = "cases"
        path = "/c/{*rest}"
        upstream = "origin"
        "#,
    )
    .upstream_at(&format!("http://{origin}"))
    .start();
    assert_eq!(gateway.get("/c/first/limited").status, 200, "the only one");
    gateway
}

#[test]
fn no_origin_sees_a_request_that_was_not_decided_on() {
    let cases = cases();
    let (origin, records) = record();
    let gateway = start(origin);
    let address = gateway.address();
    let outcomes = all_at_once(&cases, |_, case| fire(address, case));

    let records: Vec<Recorded> = lock(&records).iter().map(|one| lock(one).clone()).collect();
    let seen: Vec<&Seen> = records.iter().flat_map(|record| &record.seen).collect();
    let mut wrong = Vec::new();
    for (case, outcome) in cases.iter().zip(&outcomes) {
        let path = path(case);
        let mine = |asked: &String| {
            let target = asked.split_once(' ').map_or("", |(_, target)| target);
            target
                .strip_prefix(path.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '%']))
        };
        let mut asked: Vec<String> = seen.iter().map(|seen| seen.asked()).filter(mine).collect();
        asked.sort();
        let listed = case["origin"].as_array().cloned().unwrap_or_default();
        let listed: Vec<String> = listed
            .iter()
            .map(|asked| filled(asked.as_str().expect("a request line is text"), case))
            .collect();
        let answered = accepted(outcome, &expected(case));
        // an error in the body may be detected before the head is forwarded
        let cut_before = asked.is_empty() && !outcome.starts_with(['1', '2']);
        if (asked != listed && !cut_before) || !answered {
            let id = text(case, "id");
            wrong.push(format!(
                "{}",
                serde_json::json!({"id": id, "origin": asked, "expect": outcome})
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {CASES} cases differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );

    assert!(
        seen.len() > 60,
        "only {} requests reached the origin",
        seen.len()
    );
    for seen in &seen {
        let asked = seen.asked();
        let id = values(&seen.headers, "x-request-id");
        let [id] = id.as_slice() else {
            panic!("{asked} has {} ids", id.len())
        };
        let lines = eventually("an access line", || {
            let lines = decided(&gateway).remove(*id);
            lines.ok_or_else(|| format!("none for {asked}"))
        });
        let (method, target) = asked.split_once(' ').expect("a method and a target");
        let target = target.split('?').next().unwrap_or_default();
        assert_eq!(
            lines,
            [format!("{method} {target}")],
            "decided once, and on this"
        );
    }
    for record in &records {
        let strict: Vec<String> = record.seen.iter().map(|seen| seen.line.clone()).collect();
        for dialect in DIALECTS {
            assert_eq!(dialect.read(&record.bytes), strict, "{dialect:?}");
        }
    }
    assert_eq!(gateway.metric("tidegate_panics_total"), 0.0);
}

#[test]
fn the_lax_parsers_are_lax() {
    let [length_first, any_chunked, aliases, ..] = DIALECTS;
    let smuggled = b"POST /1 HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /2 HTTP/1.1\r\n\r\n";
    assert_eq!(length_first.read(smuggled).len(), 2);
    let one = b"POST /1 HTTP/1.1\r\nTransfer-Encoding: xchunked\r\nContent-Length: 26\r\n\r\n0\r\n\r\nGET /2 HTTP/1.1\r\n\r\nxx";
    assert_eq!(length_first.read(one).len(), 1);
    assert_eq!(any_chunked.read(one).len(), 2);
    let alias = b"POST /1 HTTP/1.1\r\nTransfer_Encoding: chunked\r\nContent-Length: 26\r\n\r\n0\r\n\r\nGET /2 HTTP/1.1\r\n\r\nxx";
    assert_eq!(
        (any_chunked.read(alias).len(), aliases.read(alias).len()),
        (1, 2)
    );
    let bare = b"GET /1 HTTP/1.1\r\nX: a\n\nGET /2 HTTP/1.1\r\n\r\n";
    assert_eq!(
        (any_chunked.read(bare).len(), DIALECTS[4].read(bare).len()),
        (1, 2)
    );
}
