//! Parked connections: they keep their client's identity, and still count.

use std::{io::Read as _, net::Shutdown, os::unix::net::UnixStream, time::Duration};

use crate::support::{
    Client, Gateway, Origin, Request,
    tls::{Authority, Hello},
    wait::time_passes,
};

/// Longer than the idle time before parking.
const PARKED: Duration = Duration::from_millis(1500);

/// Long enough for any machine.
const SOON: Duration = Duration::from_secs(30);

#[test]
fn over_tls_a_client_is_who_it_was_and_hears_of_the_end() {
    let (authority, clients) = (Authority::new("server"), Authority::new("clients"));
    let server = authority.server(&["api.example.com"]);
    let origin = Origin::echo();
    let gateway = Gateway::with(
        r#"
        [[listen]]
        address = "127.0.0.1:0"
        idle_timeout = "5s"
        [listen.tls]
        certificates = [{ cert = "server.pem", key = "server.key" }]
        client_ca = "clients.pem"
        client_auth = "required"
        [[user]]
        from = "client_cert"
        "#,
    )
    .file("server.pem", &server.cert)
    .file("server.key", &server.key)
    .file("clients.pem", &clients.pem)
    .upstream(&origin)
    .start();
    let alice = clients.client("alice", &[]);
    let hello = Hello::with_certificate(&authority, "api.example.com", &alice);
    let mut client = hello.connect(gateway.address()).expect("a handshake");
    for turn in 0..3 {
        let body = "x".repeat(turn * 10_000);
        let answer = client.send(&Request::post("/", body.clone()));
        assert_eq!((answer.status, answer.text()), (200, body), "turn {turn}");
        let seen = &origin.requests()[turn];
        assert_eq!(seen.header("x-user-id"), Some("alice"), "turn {turn}");
        time_passes(PARKED, "the gateway parks the connection");
    }
    let mut rest = Vec::new();
    client
        .stream_mut()
        .read_to_end(&mut rest)
        .expect("rustls reports an end without close_notify as an error");
    assert_eq!(rest, b"");
}

#[test]
fn the_address_that_a_proxy_header_named_stays() {
    let origin = Origin::echo();
    let gateway = Gateway::with(
        r#"
        [[listen]]
        address = "127.0.0.1:0"
        proxy_protocol = "required"
        [client_ip]
        trusted_proxies = ["127.0.0.0/8"]
        "#,
    )
    .upstream(&origin)
    .start();
    let mut client = gateway.connect();
    client
        .write(b"PROXY TCP4 192.0.2.7 198.51.100.7 56324 80\r\n")
        .expect("it is sent");
    for turn in 0..2 {
        assert_eq!(client.send(&Request::get("/")).status, 200);
        let seen = &origin.requests()[turn];
        assert_eq!(seen.header("x-forwarded-for"), Some("192.0.2.7"));
        time_passes(PARKED, "the gateway parks the connection");
    }
}

#[test]
fn a_client_that_closes_its_side_behind_its_request_gets_its_answer() {
    let gateway = Gateway::with("").start();
    let mut client = gateway.connect();
    assert_eq!(client.send(&Request::get("/")).status, 200);
    time_passes(PARKED, "the gateway parks the connection");
    // both are readable when it is resumed
    client
        .write(&Request::get("/").to_bytes())
        .expect("the connection is open");
    client
        .stream()
        .shutdown(Shutdown::Write)
        .expect("the connection is open");
    assert_eq!(client.read_response("GET").expect("an answer").status, 200);
    assert!(client.closes_within(SOON));
}

#[test]
fn a_head_that_begins_has_to_end() {
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nheader_timeout = \"1s\"\n").start();
    let mut client = gateway.connect();
    assert_eq!(client.send(&Request::get("/")).status, 200);
    time_passes(PARKED, "the gateway parks the connection");
    client.write(b"GET ").expect("the connection is open");
    assert_eq!(client.read_response("GET").expect("an answer").status, 408);
}

#[test]
fn a_unix_socket_serves_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("gateway.sock");
    let listen = format!("[[listen]]\naddress = \"unix:{}\"\n", path.display());
    let _gateway = Gateway::with(&listen).start();
    let stream = UnixStream::connect(&path).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("above zero");
    let mut client = Client::on(stream);
    for _ in 0..2 {
        assert_eq!(client.send(&Request::get("/")).status, 200);
        time_passes(PARKED, "the gateway parks the connection");
    }
}

fn open(gateway: &Gateway) -> String {
    format!("tidegate_connections{{listener=\"{}\"}}", gateway.address())
}

#[test]
fn it_counts_until_its_client_leaves() {
    let gateway = Gateway::with("[server]\nworkers = 1\nmax_connections = 1\n").start();
    let mut silent = gateway.connect();
    assert_eq!(silent.send(&Request::get("/")).status, 200);
    time_passes(PARKED, "the gateway parks the connection");
    let open = open(&gateway);
    assert_eq!(gateway.metric(&open), 1.0);
    let mut next = gateway.connect();
    next.write(&Request::get("/").to_bytes())
        .expect("the kernel takes it");
    assert!(
        !next.closes_within(Duration::from_millis(300)),
        "there is no room for it"
    );
    drop(silent);
    assert_eq!(next.read_response("GET").expect("its turn").status, 200);
    drop(next);
    gateway.wait_for_metric(&open, 0.0);
}

#[test]
fn many_are_woken_at_once_and_each_is_answered() {
    let gateway = Gateway::with("[server]\nworkers = 2\n").start();
    let mut clients: Vec<Client> = (0..600).map(|_| gateway.connect()).collect();
    for _ in 0..3 {
        for client in &mut clients {
            let request = Request::get("/").to_bytes();
            client.write(&request).expect("the connection is open");
        }
        for client in &mut clients {
            assert_eq!(client.read_response("GET").expect("an answer").status, 200);
        }
        time_passes(PARKED, "the gateway parks the connection");
    }
    clients.truncate(100);
    gateway.wait_for_metric(&open(&gateway), 100.0);
    for client in &mut clients {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
}

#[test]
fn a_listener_that_goes_takes_it_along() {
    let listen = |address: &str| format!("[[listen]]\naddress = \"{address}\"\n");
    let first = listen("127.0.0.1:0");
    let gateway = Gateway::with(&first).start();
    let free = crate::support::origin::nobody();
    gateway.reconfigure(&(first.clone() + &listen(&free.to_string())));
    let (mut kept, mut leaving) = (gateway.connect(), Client::connect(free));
    for client in [&mut kept, &mut leaving] {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    time_passes(PARKED, "the gateway parks the connection");
    gateway.reconfigure(&first);
    assert!(leaving.closes_within(SOON));
    assert_eq!(kept.send(&Request::get("/")).status, 200);
}
