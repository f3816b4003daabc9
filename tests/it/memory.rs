//! Memory under the connections that cost most: its peak while they are open, and how much of it
//! stays once they have ended. Each test has 200 or 1,000 connections of one kind.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use crate::support::{
    Gateway, Request,
    frames::{Connection, DATA},
    raw,
    wait::within,
};

const MIB: f64 = 1_048_576.0;
const CONNECTIONS: usize = 200;
/// The resident memory may stay this far above that of the start.
const MAX_LEFT: f64 = 20.0 * MIB;
/// Memory goes back within seconds; the rest is for slow test machines.
const PATIENCE: Duration = Duration::from_secs(60);

const IN_USE: &str = "tidegate_body_buffer_bytes";
const REFUSED: &str = "tidegate_body_buffer_refused_total";

/// Every client has an address of its own, so none is refused for its share of the body buffers.
const READS_BODIES: &str = r#"
    [server]
    workers = 2
    max_body_buffer = "16MiB"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [gateway]
    limits = ["name"]
    [limit.name]
    key = ["body:name"]
    rate = "10000/h"
    burst = 10000
"#;

struct Setting {
    gateway: Gateway,
    start: f64,
}

impl Setting {
    fn start() -> Setting {
        let gateway = Gateway::with(READS_BODIES)
            .upstream_at("builtin:echo")
            .start();
        let small = Request::post("/", "{}").header("content-type", "application/json");
        assert_eq!(gateway.send(&small).status, 200);
        let start = gateway.metric("process_resident_memory_bytes");
        Setting { gateway, start }
    }

    fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    /// Resident memory beyond that of the start.
    fn more(&self) -> f64 {
        self.gateway.metric("process_resident_memory_bytes") - self.start
    }

    fn wait_for(&self, metric: &str, expected: f64) {
        within(PATIENCE, metric, || match self.gateway.metric(metric) {
            value if value >= expected => Ok(()),
            value => Err(format!("{value}, not {expected}")),
        });
    }

    /// Ends the connections, and checks the peak and the memory that stays.
    fn end<C>(&self, connections: Vec<C>, max_peak: f64) {
        let peak = self.gateway.peak_memory_bytes() as f64 - self.start;
        drop(connections);
        within(PATIENCE, "the memory", || {
            let (left, in_use) = (self.more(), self.gateway.metric(IN_USE));
            match left < MAX_LEFT && in_use == 0.0 {
                true => Ok(()),
                false => Err(format!(
                    "{left} bytes more than at the start, {in_use} in buffers"
                )),
            }
        });
        assert!(peak < max_peak, "{peak} bytes");
    }
}

/// A request on HTTP/1.1 without the end of its body, in chunks of one byte.
fn chunked(address: SocketAddr, number: usize, chunks: usize) -> TcpStream {
    let mut client = raw::open(address);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: a.example\r\nX-Forwarded-For: {}\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\n\r\n",
        from(number)
    );
    client.write_all(head.as_bytes()).expect("the head leaves");
    // the connection of a refused client is already closed
    let _ = client.write_all("1\r\n \r\n".repeat(chunks).as_bytes());
    client
}

fn from(number: usize) -> String {
    format!("10.0.{}.{}", number / 256, number % 256)
}

/// A connection with unfinished requests, each with so many equal DATA frames.
fn streams(
    address: SocketAddr,
    number: usize,
    streams: u32,
    frames: usize,
    frame: (u8, &[u8]),
) -> Connection {
    let mut client = Connection::open(address, &[]);
    let from = from(number);
    let fields = [
        ("content-type", "application/json"),
        ("x-forwarded-for", &*from),
    ];
    for index in 0..streams {
        assert!(client.post_with(2 * index + 1, "/", &fields));
    }
    for index in 0..streams {
        let (flags, payload) = frame;
        assert!(client.send_many(frames, DATA, flags, 2 * index + 1, payload));
    }
    client
}

#[test]
fn chunks_of_one_byte_on_200_connections() {
    let setting = Setting::start();
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|number| chunked(setting.address(), number, 5_000))
        .collect();
    setting.wait_for(IN_USE, CONNECTIONS as f64 * 8192.0);
    // a read buffer of 100 KiB each
    setting.end(clients, 40.0 * MIB);
}

#[test]
fn slow_bodies_on_200_connections() {
    let setting = Setting::start();
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|number| chunked(setting.address(), number, 20))
        .collect();
    setting.wait_for(IN_USE, CONNECTIONS as f64 * 4096.0);
    setting.end(clients, 20.0 * MIB);
}

#[test]
fn data_frames_of_one_byte_on_200_connections() {
    let setting = Setting::start();
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|number| streams(setting.address(), number, 1, 4_500, (0, b" ")))
        .collect();
    setting.wait_for(IN_USE, CONNECTIONS as f64 * 8192.0);
    // the h2 crate keeps an event of 256 bytes for each frame that is read at a time
    setting.end(clients, 60.0 * MIB);
}

#[test]
fn padded_data_frames_of_one_byte_on_200_connections() {
    const PADDED: u8 = 8;
    let mut frame = [b' '; 257];
    frame[0] = 255;
    let setting = Setting::start();
    for _ in 0..3 {
        // on each connection two streams with 100 padded frames: 10 MB on the wire for 40,000 bytes
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|number| streams(setting.address(), number, 2, 100, (PADDED, &frame)))
            .collect();
        setting.wait_for(IN_USE, 2.0 * CONNECTIONS as f64 * 4096.0);
        setting.end(clients, 60.0 * MIB);
    }
    assert!(setting.gateway.metric(REFUSED) < 0.5);
}

#[test]
fn a_thousand_refused_bodies() {
    let setting = Setting::start();
    // all from one address, whose share of the buffers is 2 MiB
    let clients: Vec<_> = (0..1_000)
        .map(|_| chunked(setting.address(), 1, 600))
        .collect();
    setting.wait_for(REFUSED, 400.0);
    setting.end(clients, 80.0 * MIB);
}

#[test]
fn a_thousand_connections_with_one_request_each() {
    let setting = Setting::start();
    let clients: Vec<_> = (0..1_000)
        .map(|number| streams(setting.address(), number, 1, 1, (0, b" ")))
        .collect();
    setting.wait_for(IN_USE, 1_000.0 * 4096.0);
    setting.end(clients, 60.0 * MIB);
}
