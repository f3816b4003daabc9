//! Connecting to servers: TLS and certificates, names, Unix sockets.

use tokio_rustls::rustls::version::{TLS12, TLS13};

use crate::support::{
    Gateway, Origin, Request, Response,
    secured::{Authority, Secured},
    wait::eventually,
};

fn over_tls(secured: &Secured, name: &str, keys: &str) -> String {
    let port = secured.port();
    format!(
        "[server]\nworkers = 1\n[upstream.origin]\nservers = [\"https://{name}:{port}\"]\n{keys}\n"
    )
}

const BOTH: &[&tokio_rustls::rustls::SupportedProtocolVersion] = &[&TLS12, &TLS13];

#[test]
fn a_server_behind_tls_is_reached_by_each_version_with_bodies_of_any_size() {
    for version in [&TLS12, &TLS13] {
        let (origin, authority) = (Origin::echo(), Authority::new());
        let secured = Secured::before(&origin, &authority, "localhost", &[version]);
        let gateway = Gateway::with(&over_tls(&secured, "localhost", "tls_ca = \"ca.pem\""))
            .file("ca.pem", &authority.pem())
            .start();
        let mut client = gateway.connect();
        for size in [0, 1, 10_000, 60_000] {
            let body: String = "0123456789".chars().cycle().take(size).collect();
            let response = client.send(&Request::post("/", body.clone()));
            assert_eq!(
                (response.status, response.text() == body),
                (200, true),
                "{size}"
            );
        }
        let chunked = "Host: a.example\r\nTransfer-Encoding: chunked";
        client
            .write(format!("POST / HTTP/1.1\r\n{chunked}\r\n\r\n5\r\nhello\r\n").as_bytes())
            .expect("the start leaves");
        client
            .write(b"1\r\n!\r\n0\r\n\r\n")
            .expect("the end leaves");
        let response = client.read_response("POST").expect("an answer");
        assert_eq!(response.text(), "hello!");
        assert_eq!(secured.handshakes(), 1, "one connection served them all");
    }
}

#[test]
fn a_new_connection_resumes_the_session() {
    let authority = Authority::new();
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[("connection", "close")], b"ok")
    });
    let secured = Secured::before(&origin, &authority, "localhost", BOTH);
    let gateway = Gateway::with(&over_tls(&secured, "localhost", "tls_ca = \"ca.pem\""))
        .file("ca.pem", &authority.pem())
        .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 4), [200; 4]);
    assert_eq!((secured.handshakes(), secured.resumed()), (4, 3));
}

#[test]
fn a_certificate_that_does_not_verify_is_502_and_says_why() {
    let (origin, authority) = (Origin::ok(), Authority::new());
    let secured = Secured::before(&origin, &authority, "origin.internal", BOTH);
    let ca = "tls_ca = \"ca.pem\"";
    let cases = [
        (
            over_tls(&secured, "localhost", ca),
            authority.pem(),
            "not valid for name",
        ),
        (
            over_tls(&secured, "localhost", ca),
            Authority::new().pem(),
            "invalid peer certificate",
        ),
        // CAs that the system trusts
        (
            over_tls(&secured, "localhost", ""),
            String::new(),
            "UnknownIssuer",
        ),
    ];
    for (toml, pem, why) in cases {
        let started = Gateway::with(&toml).file("ca.pem", &pem).start();
        let refused: Response = started.get("/");
        assert_eq!(refused.status, 502);
        started.wait_for_metric(r#"tidegate_upstream_errors_total{kind="tls"}"#, 1.0);
        eventually("the reason in the log", || {
            let log = started.stderr();
            if log.contains(why) { Ok(()) } else { Err(log) }
        });
    }
    assert_eq!(origin.requests().len(), 0);
    assert_eq!(secured.handshakes(), 0);
}

#[test]
fn the_name_in_the_certificate_may_be_another_than_the_servers() {
    let (origin, authority) = (Origin::ok(), Authority::new());
    let secured = Secured::before(&origin, &authority, "origin.internal", BOTH);
    let keys = "tls_ca = \"ca.pem\"\ntls_server_name = \"origin.internal\"\nhost = \"server\"";
    let gateway = Gateway::with(&over_tls(&secured, "127.0.0.1", keys))
        .file("ca.pem", &authority.pem())
        .start();
    assert_eq!(gateway.get("/").status, 200);
    let port = secured.port();
    assert_eq!(
        origin.request().header("host"),
        Some(&*format!("127.0.0.1:{port}"))
    );
}

#[test]
fn a_plain_server_behind_https_is_502() {
    let origin = Origin::ok();
    let port = origin.address().port();
    let toml = format!(
        "[upstream.origin]\nservers = [\"https://127.0.0.1:{port}\"]\ntls_ca = \"ca.pem\"\nconnect_timeout = \"300ms\"\n"
    );
    let gateway = Gateway::with(&toml)
        .file("ca.pem", &Authority::new().pem())
        .start();
    assert_eq!(gateway.get("/").status, 502);
}

#[test]
fn a_name_is_resolved_and_every_address_of_it_tried() {
    // the origin listens on 127.0.0.1 only; the name may resolve to ::1 first
    let origin = Origin::ok();
    let port = origin.address().port();
    let toml = format!(
        "[upstream.origin]\nservers = [\"http://localhost:{port}\"]\nidle_timeout = \"1ms\"\n"
    );
    let gateway = Gateway::with(&toml).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 6), [200; 6]);
    assert_eq!(origin.requests()[0].header("host"), Some("a.example"));
}

#[test]
fn a_name_that_does_not_resolve_is_502_and_logged_once() {
    let gateway = Gateway::with("")
        .upstream_at("http://nowhere.invalid:80")
        .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 5), [502; 5]);
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="connect"}"#, 5.0);
    super::logged(&gateway, "cannot resolve a server's name", 1);
}
