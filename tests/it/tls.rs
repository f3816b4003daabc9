//! TLS on a listener: certificates, versions, ALPN, client certificates, reloads, and bounds on
//! handshakes.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use rustls::{HandshakeKind, version};

use crate::support::{
    Gateway, Origin, Request,
    curl::{curl, try_curl},
    eventually, gateway,
    tls::{Authority, Hello, Issued},
    wait::eventually_eq,
};

const NAME: &str = "api.example.com";

/// A listener with TLS, and these lines in its table.
fn listener(lines: &str) -> String {
    format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\nheader_timeout = \"5s\"\n[listen.tls]\n\
         certificates = [{{ cert = \"server.pem\", key = \"server.key\" }}]\n{lines}\n"
    )
}

fn with_server(toml: &str, server: &Issued) -> gateway::Builder {
    Gateway::with(toml)
        .file("server.pem", &server.cert)
        .file("server.key", &server.key)
}

/// A gateway with one certificate for [`NAME`].
fn simple(lines: &str) -> (Authority, Gateway) {
    let authority = Authority::new("test");
    let gateway = with_server(&listener(lines), &authority.server(&[NAME])).start();
    (authority, gateway)
}

#[test]
fn curl_speaks_both_protocols_over_both_versions_and_the_origin_hears_https() {
    let authority = Authority::new("test");
    let origin = Origin::echo();
    let gateway = with_server(&listener(""), &authority.server(&[NAME]))
        .file("ca.pem", &authority.pem)
        .upstream(&origin)
        .start();
    let port = gateway.address().port();
    let (url, resolve) = (
        format!("https://{NAME}:{port}/"),
        format!("{NAME}:{port}:127.0.0.1"),
    );
    let ca = gateway.folder().join("ca.pem");
    let ca = ca.to_str().expect("UTF-8");
    for (protocol, shown) in [("--http1.1", "1.1"), ("--http2", "2")] {
        for version in ["1.2", "1.3"] {
            let at_least = format!("--tlsv{version}");
            let found = curl(&[
                protocol,
                &at_least,
                "--tls-max",
                version,
                "--cacert",
                ca,
                "--resolve",
                &resolve,
                "--output",
                "/dev/null",
                "--write-out",
                "%{http_version} %{response_code}",
                &url,
            ]);
            assert_eq!(found, format!("{shown} 200"), "TLS {version}");
        }
    }
    for seen in origin.requests() {
        assert_eq!(seen.header("x-forwarded-proto"), Some("https"), "{seen:?}");
    }
    assert_eq!(origin.requests().len(), 4);
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"full\"}", 4.0);
    assert!(
        gateway.banner().contains("https://127.0.0.1:"),
        "{}",
        gateway.banner()
    );
}

#[test]
fn http2_is_offered_only_where_it_is_wanted() {
    let (authority, both) = simple("");
    let agreed = |gateway: &Gateway, hello: &Hello| {
        let client = hello.connect(gateway.address()).expect("a handshake");
        client.stream().conn.alpn_protocol().map(<[u8]>::to_vec)
    };
    let hello = Hello::new(&authority, NAME).offering(&["h2", "http/1.1"]);
    assert_eq!(agreed(&both, &hello), Some(b"h2".to_vec()));

    let without = listener("").replace("[listen.tls]", "http2 = false\n[listen.tls]");
    let only_1 = with_server(&without, &authority.server(&[NAME])).start();
    assert_eq!(agreed(&only_1, &hello), Some(b"http/1.1".to_vec()));

    // a client without ALPN speaks HTTP/1.1
    let mut silent = Hello::new(&authority, NAME)
        .connect(both.address())
        .expect("a handshake");
    assert_eq!(silent.send(&Request::get("/")).status, 200);
}

#[test]
fn the_certificate_is_chosen_by_name_and_the_first_is_for_everybody_else() {
    let (first, exact, wild) = (
        Authority::new("first"),
        Authority::new("exact"),
        Authority::new("wild"),
    );
    let toml = r#"
        [[listen]]
        address = "127.0.0.1:0"
        [listen.tls]
        certificates = [
          { cert = "server.pem", key = "server.key" },
          { cert = "wild.pem", key = "wild.key" },
          { cert = "exact.pem", key = "exact.key" },
        ]
        "#;
    let (a, b, c) = (
        first.server(&["first.example", "other.example", "a.b.wild.example"]),
        wild.server(&["*.wild.example"]),
        exact.server(&["api.wild.example"]),
    );
    let gateway = with_server(toml, &a)
        .file("wild.pem", &b.cert)
        .file("wild.key", &b.key)
        .file("exact.pem", &c.cert)
        .file("exact.key", &c.key)
        .start();
    let presents = |authority: &Authority, name: &str| {
        // the client verifies both the authority and the name
        Hello::new(authority, name)
            .connect(gateway.address())
            .is_ok()
    };
    assert!(presents(&first, "first.example"));
    assert!(presents(&wild, "any.wild.example"));
    assert!(
        presents(&exact, "api.wild.example"),
        "exact before wildcard"
    );
    assert!(presents(&exact, "API.wild.example"), "in any case");
    assert!(
        presents(&first, "a.b.wild.example"),
        "a wildcard is one label"
    );
    assert!(presents(&first, "other.example"));
    assert!(!presents(&wild, "unknown.example"));
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"refused\"}", 1.0);
}

#[test]
fn an_old_version_is_refused_where_a_newer_one_is_required() {
    let (authority, gateway) = simple("min_version = \"1.3\"");
    let old = Hello::with_versions(&authority, NAME, &[&version::TLS12]);
    assert!(old.connect(gateway.address()).is_err());
    let new = Hello::with_versions(&authority, NAME, &[&version::TLS13]);
    assert!(new.connect(gateway.address()).is_ok());
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"failed\"}", 1.0);
}

#[test]
fn a_client_comes_back_without_a_full_handshake() {
    let (authority, gateway) = simple("");
    for version in [&version::TLS12, &version::TLS13] {
        let hello = Hello::with_versions(&authority, NAME, &[version]);
        let mut first = hello.connect(gateway.address()).expect("a handshake");
        // TLS 1.3 sends its tickets with the first response
        assert_eq!(first.send(&Request::get("/")).status, 200);
        let mut again = hello.connect(gateway.address()).expect("a handshake");
        assert_eq!(
            again.stream().conn.handshake_kind(),
            Some(HandshakeKind::Resumed),
            "{version:?}"
        );
        assert_eq!(again.send(&Request::get("/")).status, 200);
    }
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"resumed\"}", 2.0);
}

#[test]
fn a_connection_ends_with_a_notice_so_that_nothing_looks_cut_off() {
    let (authority, gateway) = simple("");
    let mut client = Hello::new(&authority, NAME)
        .connect(gateway.address())
        .expect("a handshake");
    client
        .write(b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n")
        .expect("it is sent");
    let mut answer = Vec::new();
    client
        .stream_mut()
        .read_to_end(&mut answer)
        .expect("rustls reports an end without close_notify as an error");
    assert!(answer.starts_with(b"HTTP/1.1 200 "));
}

/// A gateway that identifies users by certificate, with the CAs of its server and its clients.
fn mutual(auth: &str, field: &str) -> (Authority, Authority, Origin, Gateway) {
    let (authority, clients) = (Authority::new("server"), Authority::new("clients"));
    let toml = listener(&format!(
        "client_ca = \"clients.pem\"\nclient_auth = {auth:?}"
    )) + &format!("[[user]]\nfrom = \"client_cert\"\nfield = {field:?}\n");
    let origin = Origin::echo();
    let gateway = with_server(&toml, &authority.server(&[NAME]))
        .file("clients.pem", &clients.pem)
        .upstream(&origin)
        .start();
    (authority, clients, origin, gateway)
}

#[test]
fn a_client_certificate_names_the_user() {
    let uri = "spiffe://example/alice";
    for (field, expected) in [("common_name", "alice"), ("san_uri", uri)] {
        let (authority, clients, origin, gateway) = mutual("optional", field);
        let alice = clients.client("alice", &[uri]);
        let mut client = Hello::with_certificate(&authority, NAME, &alice)
            .connect(gateway.address())
            .expect("a handshake");
        let forged = Request::get("/").header("x-user-id", "root");
        assert_eq!(client.send(&forged).status, 200);
        let seen = origin.request();
        assert_eq!(seen.header("x-user-id"), Some(expected));

        let mut nobody = Hello::new(&authority, NAME)
            .connect(gateway.address())
            .expect("a certificate is optional");
        assert_eq!(nobody.send(&forged).status, 200);
        assert_eq!(origin.requests()[1].header("x-user-id"), None);
    }
}

#[test]
fn limits_count_users_by_their_certificate_and_a_resumed_session_keeps_it() {
    let (authority, clients) = (Authority::new("server"), Authority::new("clients"));
    let toml = listener("client_ca = \"clients.pem\"\nclient_auth = \"required\"")
        + r#"
        [[user]]
        from = "client_cert"
        [limit.per_user]
        key = ["user"]
        rate = "2/h"
        burst = 2
        [gateway]
        limits = ["per_user"]
        "#;
    let gateway = with_server(&toml, &authority.server(&[NAME]))
        .file("clients.pem", &clients.pem)
        .start();
    let hello = |name| Hello::with_certificate(&authority, NAME, &clients.client(name, &[]));
    let (alice, bob) = (hello("alice"), hello("bob"));
    let status = |hello: &Hello| {
        let mut client = hello.connect(gateway.address()).expect("a handshake");
        client.send(&Request::get("/")).status
    };
    let alices = [status(&alice), status(&alice), status(&alice)];
    assert_eq!(alices, [200, 200, 429], "over three connections");
    assert_eq!(status(&bob), 200, "bob has a bucket of his own");
    assert!(gateway.metric("tidegate_tls_handshakes_total{outcome=\"resumed\"}") >= 2.0);
}

#[test]
fn a_certificate_that_nobody_vouches_for_ends_the_handshake() {
    for auth in ["optional", "required"] {
        let (authority, _, origin, gateway) = mutual(auth, "common_name");
        let stranger = Authority::new("strangers").client("alice", &[]);
        let mut refused = 1.0;
        let reaches = |hello: &Hello| {
            // in TLS 1.3 the client learns of the rejection after its own side of the handshake
            let client = hello.connect(gateway.address()).map_err(|e| e.to_string());
            client.is_ok_and(|mut client| client.try_send(&Request::get("/")).is_ok())
        };
        assert!(!reaches(&Hello::with_certificate(
            &authority, NAME, &stranger
        )));
        let nobody = Hello::new(&authority, NAME);
        if auth == "required" {
            assert!(!reaches(&nobody), "a certificate is required");
            refused = 2.0;
        } else {
            assert!(reaches(&nobody));
        }
        gateway.wait_for_metric(
            "tidegate_tls_handshakes_total{outcome=\"certificate\"}",
            refused,
        );
        assert_eq!(origin.requests().len(), usize::from(auth == "optional"));
    }
}

#[test]
fn a_replaced_certificate_is_taken_up_and_open_connections_stay() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let gateway = with_server(&listener(""), &old.server(&[NAME])).start();
    let selector = "tidegate_certificate_expiry_timestamp_seconds{name=\"server.pem\"}";
    assert!(
        gateway.metric(selector) > 1e9,
        "the day on which it expires"
    );
    let mut open = Hello::new(&old, NAME)
        .connect(gateway.address())
        .expect("a handshake");
    assert_eq!(open.send(&Request::get("/")).status, 200);

    let renewed = new.server(&[NAME]);
    // a certificate without its key: the reload is refused, and the old pair stays in use
    std::fs::write(gateway.folder().join("server.pem"), &renewed.cert).expect("writable");
    eventually("the half-made change to be refused", || {
        let said = gateway.output();
        match said.contains("is not the key of the certificate") {
            true => Ok(()),
            false => Err(said),
        }
    });
    assert!(Hello::new(&old, NAME).connect(gateway.address()).is_ok());

    renewed.write(gateway.folder(), "server");
    eventually("the new certificate", || {
        Hello::new(&new, NAME)
            .connect(gateway.address())
            .map_err(|error| error.to_string())
    });
    assert_eq!(open.send(&Request::get("/")).status, 200, "the open one");
    let complaints = gateway
        .output()
        .matches("cannot be used; keeping the old")
        .count();
    assert_eq!(complaints, 1, "said once: {}", gateway.output());
}

#[test]
fn a_ticket_is_worth_nothing_once_the_authorities_of_clients_have_changed() {
    let (authority, clients, _origin, gateway) = mutual("required", "common_name");
    let hello = Hello::with_certificate(&authority, NAME, &clients.client("alice", &[]));
    let mut client = hello.connect(gateway.address()).expect("a handshake");
    assert_eq!(client.send(&Request::get("/")).status, 200);
    let others = Authority::new("others");
    std::fs::write(gateway.folder().join("clients.pem"), &others.pem).expect("writable");
    let served = || {
        let client = hello.connect(gateway.address());
        client.is_ok_and(|mut client| client.try_send(&Request::get("/")).is_ok())
    };
    eventually_eq("alice's certificate to be refused", false, served);
    let bob = Hello::with_certificate(&authority, NAME, &others.client("bob", &[]));
    let mut bob = bob.connect(gateway.address()).expect("a handshake");
    assert_eq!(bob.send(&Request::get("/")).status, 200);
}

#[test]
fn a_handshake_that_does_not_go_on_delays_nobody_and_ends() {
    let (authority, gateway) = {
        let authority = Authority::new("test");
        let toml = listener("").replace("5s", "300ms") + "[server]\nworkers = 1\n";
        let gateway = with_server(&toml, &authority.server(&[NAME])).start();
        (authority, gateway)
    };
    let mut silent: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(gateway.address()).expect("it accepts"))
        .collect();
    let mut client = Hello::new(&authority, NAME)
        .connect(gateway.address())
        .expect("a handshake, while others hang");
    assert_eq!(client.send(&Request::get("/")).status, 200);
    for stream in &mut silent {
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("above zero");
        assert_eq!(stream.read(&mut [0; 16]).expect("it is closed"), 0);
    }
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"timeout\"}", 20.0);
}

#[test]
fn under_a_flood_of_handshakes_the_oldest_makes_room() {
    let authority = Authority::new("test");
    let toml = listener("max_handshakes = 3").replace("5s", "1h") + "[server]\nworkers = 1\n";
    let gateway = with_server(&toml, &authority.server(&[NAME])).start();
    let mut flood: Vec<TcpStream> = Vec::new();
    for _ in 0..10 {
        let mut stream = TcpStream::connect(gateway.address()).expect("it accepts");
        stream.write_all(&[22, 3, 1]).expect("it is sent");
        flood.push(stream);
    }
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"shed\"}", 7.0);
    let mut client = Hello::new(&authority, NAME)
        .connect(gateway.address())
        .expect("room is made for whoever comes last");
    assert_eq!(client.send(&Request::get("/")).status, 200);
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"shed\"}", 8.0);
}

#[test]
fn what_is_not_tls_is_counted_and_harms_nobody() {
    let (authority, gateway) = simple("");
    let plain = try_curl(&[&format!("http://{}/", gateway.address())]);
    assert_ne!(plain.code, Some(0), "{plain}");
    drop(TcpStream::connect(gateway.address()).expect("it accepts"));
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"failed\"}", 1.0);
    gateway.wait_for_metric("tidegate_tls_handshakes_total{outcome=\"closed\"}", 1.0);
    assert!(
        Hello::new(&authority, NAME)
            .connect(gateway.address())
            .is_ok()
    );
}
