//! The admin listener under slow clients: probes, scrapes, operations and `/check` are still
//! answered.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support::{
    Client, Gateway, Request, raw,
    wait::{PATIENCE, eventually},
};

/// Timeout of a container's health check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const SOCKETS: usize = 1_000;

const TRUSTING: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [gateway]
    limits = ["per_ip"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1000/s"
"#;

/// What each slow client sends before it stops: a name, and the bytes.
const SLOW: [(&str, &str); 6] = [
    ("nothing", ""),
    ("a part of a head", "GET /metrics HTTP/1.1\r\nHost: loc"),
    (
        "a head and no body",
        "POST /api/v1/reload HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n",
    ),
    (
        "a question and a part of its body",
        "POST /check HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Uri: /\r\nContent-Length: 200000\r\n\r\nuser=a",
    ),
    (
        "a request whose answer it does not take",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ),
    (
        "a request on a connection that it keeps",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
    ),
];

/// The test needs many sockets, so it raises its descriptor limit.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("a process may raise its soft limit");
}

fn crowd(address: SocketAddr, bytes: &str) -> Vec<TcpStream> {
    let slow = |_| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        // the connection may have been closed to make room
        let _ = stream.write_all(bytes.as_bytes());
        stream
    };
    (0..SOCKETS).map(slow).collect()
}

/// The status of a response that arrives within [`PROBE_TIMEOUT`].
fn in_time(gateway: &Gateway, request: &Request) -> u16 {
    let start = Instant::now();
    let status = Client::connect(gateway.admin_address())
        .send(request)
        .status;
    let took = start.elapsed();
    assert!(took < PROBE_TIMEOUT, "{took:?} for {request:?}");
    status
}

fn answers(gateway: &Gateway) {
    for path in ["/healthz", "/readyz", "/metrics", "/", "/api/v1/status"] {
        let request = gateway.admin_request("GET", path);
        assert_eq!(in_time(gateway, &request), 200, "{path}");
    }
    let question = Request::get("/check").header("x-forwarded-uri", "/a");
    assert_eq!(in_time(gateway, &question), 200);
}

#[test]
fn a_thousand_slow_sockets_of_each_kind_keep_nobody_out() {
    raise_descriptors();
    let gateway = Gateway::with(TRUSTING).start();
    for (kind, bytes) in SLOW {
        println!("{SOCKETS} clients that have sent {kind}");
        let slow = crowd(gateway.admin_address(), bytes);
        answers(&gateway);
        drop(slow);
    }
}

#[test]
fn slow_sockets_that_come_back_again_and_again_keep_nobody_out() {
    raise_descriptors();
    let gateway = Gateway::with(TRUSTING).start();
    let address = gateway.admin_address();
    let attack = std::thread::spawn(move || {
        let crowds: Vec<_> = (0..4).map(|_| crowd(address, SLOW[1].1)).collect();
        crowds.len()
    });
    while !attack.is_finished() {
        answers(&gateway);
    }
    attack.join().expect("the clients connect");
    answers(&gateway);
}

#[test]
fn slow_sockets_are_bounded_and_counted_when_they_make_room() {
    raise_descriptors();
    let gateway = Gateway::with(TRUSTING).start();
    let _slow = crowd(gateway.admin_address(), SLOW[1].1);
    eventually("room to be made", || {
        let metrics = gateway.metrics();
        let open = metrics.sum("tidegate_connections{listener=\"admin\"}");
        let cut =
            metrics.sum("tidegate_connections_cut_total{listener=\"admin\",kind=\"crowded\"}");
        // one address may have three quarters of 512 connections, plus this probe
        match open <= 385.0 && cut >= 500.0 {
            true => Ok(()),
            false => Err(format!("{open} open, {cut} closed")),
        }
    });
}

#[test]
fn more_questions_than_can_be_decided_at_once_starve_no_operator() {
    raise_descriptors();
    // decisions wait for a Redis that accepts connections and never answers
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    let redis = silent.local_addr().expect("it is bound");
    let toml = format!(
        "{}[redis]\nurl = \"redis://{redis}\"\n",
        TRUSTING.replace("rate = \"1000/s\"", "rate = \"1000/s\"\nscope = \"global\"")
    );
    let gateway = Gateway::with(&toml).start();
    let question = "GET /check HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Uri: /a\r\n\r\n";
    let _asking = crowd(gateway.admin_address(), question);
    for path in ["/healthz", "/readyz", "/metrics", "/api/v1/status"] {
        let status = in_time(&gateway, &gateway.admin_request("GET", path));
        assert!(status == 200 || path == "/readyz", "{path}: {status}");
    }
}

#[test]
fn a_probe_does_not_wait_for_operations_that_were_asked_for_before() {
    const CLIENTS: usize = 300;
    raise_descriptors();
    // with many series a response takes a while
    let routes: String = (0..300)
        .map(|index| {
            format!("[[route]]\nname = \"r{index}\"\npath = \"/{index}\"\nupstream = \"origin\"\n")
        })
        .collect();
    for path in ["/api/v1/status", "/metrics"] {
        let gateway = Gateway::with(&routes).start();
        let asked = gateway.admin_request("GET", path).to_bytes().repeat(10);
        let mut clients: Vec<_> = (0..CLIENTS)
            .map(|_| Client::connect(gateway.admin_address()))
            .collect();
        for client in &mut clients {
            client.write(&asked).expect("it is read");
        }
        let probe = gateway.admin_request("GET", "/healthz");
        assert_eq!(in_time(&gateway, &probe), 200);
        let answered = clients.iter().filter(|client| has_answer(client.stream()));
        let answered = answered.count();
        assert!(
            answered < CLIENTS / 2,
            "the probe waited for {answered} × {path}"
        );
        drop(clients);
        assert_eq!(in_time(&gateway, &gateway.admin_request("GET", path)), 200);
    }
}

#[test]
fn a_client_that_closes_its_side_gets_its_answer() {
    let gateway = Gateway::with(TRUSTING).start();
    for path in ["/healthz", "/metrics", "/api/v1/status"] {
        let asked = gateway.admin_request("GET", path).to_bytes();
        let reply = raw::send_and_finish(gateway.admin_address(), &asked, PATIENCE);
        assert_eq!(reply.statuses(), ["200"], "{path}");
    }
}

fn has_answer(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    stream.peek(&mut [0]).is_ok_and(|length| length > 0)
}
