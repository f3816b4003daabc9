//! Active health checks of servers.

use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering::SeqCst},
};

use super::{logged, upstream};
use crate::support::{
    Gateway, Origin, Request,
    secured::{Authority, Secured},
    wait::eventually,
};

const HEALTHY: &str = r#"tidegate_upstream_healthy{upstream="origin"}"#;

/// An origin whose health check has this status; 0 for no response. It answers `ok` to other
/// requests.
fn feeling() -> (Origin, Arc<AtomicU16>) {
    let health = Arc::new(AtomicU16::new(200));
    let answer = Arc::clone(&health);
    let origin = Origin::new(move |exchange| {
        exchange.read_body()?;
        match (exchange.request.target.as_str(), answer.load(SeqCst)) {
            ("/healthz?deep", 0) => exchange.wait_for_abort(),
            ("/healthz?deep", status) => exchange.respond(status, &[], b""),
            _ => exchange.respond(200, &[], b"ok"),
        }
    });
    (origin, health)
}

const CHECKED: &str = "[upstream.origin.health]\npath = \"/healthz?deep\"\ninterval = \"100ms\"\ntimeout = \"500ms\"\nunhealthy_after = 2\nhealthy_after = 2\n";

/// Requests other than health checks.
fn served(origin: &Origin) -> usize {
    let requests = origin.requests();
    requests.iter().filter(|seen| seen.target == "/").count()
}

#[test]
fn a_server_whose_checks_fail_gets_nothing_until_they_pass() {
    for sickness in [503, 404, 0] {
        let ((a, feels), (b, _)) = (feeling(), feeling());
        let gateway = Gateway::with(&upstream(&[&a, &b], CHECKED)).start();
        gateway.wait_for_metric(HEALTHY, 2.0);
        feels.store(sickness, SeqCst);
        gateway.wait_for_metric(HEALTHY, 1.0);
        let before = served(&a);
        assert_eq!(gateway.statuses(&Request::get("/"), 10), [200; 10]);
        assert_eq!(served(&a), before, "{sickness}");
        feels.store(302, SeqCst);
        gateway.wait_for_metric(HEALTHY, 2.0);
        assert_eq!(gateway.statuses(&Request::get("/"), 10), [200; 10]);
        assert_eq!(served(&a), before + 5);
        logged(&gateway, "a server is unhealthy", 1);
        logged(&gateway, "a server is healthy again", 1);
    }
}

#[test]
fn a_server_that_is_gone_is_found_before_a_request_finds_it() {
    let ((a, _), (b, _)) = (feeling(), feeling());
    let gateway = Gateway::with(&upstream(&[&a, &b], CHECKED)).start();
    a.kill();
    gateway.wait_for_metric(HEALTHY, 1.0);
    assert_eq!(gateway.statuses(&Request::post("/", "x"), 6), [200; 6]);
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{upstream="origin"}"#, 0.0);
}

#[test]
fn when_no_server_is_healthy_all_are_tried() {
    let ((a, a_feels), (b, b_feels)) = (feeling(), feeling());
    let gateway = Gateway::with(&upstream(&[&a, &b], CHECKED)).start();
    a_feels.store(500, SeqCst);
    b_feels.store(500, SeqCst);
    gateway.wait_for_metric(HEALTHY, 0.0);
    assert_eq!(gateway.statuses(&Request::get("/"), 10), [200; 10]);
    assert!(served(&a) > 0 && served(&b) > 0);
}

#[test]
fn a_check_says_who_asks_and_is_made_over_tls_where_requests_are() {
    let (authority, (origin, _)) = (Authority::new(), feeling());
    let secured = Secured::before(
        &origin,
        &authority,
        "localhost",
        &[&tokio_rustls::rustls::version::TLS13],
    );
    let port = secured.port();
    let toml = format!(
        "[upstream.origin]\nservers = [\"https://localhost:{port}\"]\ntls_ca = \"ca.pem\"\n{CHECKED}"
    );
    let gateway = Gateway::with(&toml)
        .file("ca.pem", &authority.pem())
        .start();
    let check = eventually("a check", || {
        origin.requests().first().cloned().ok_or_else(String::new)
    });
    assert_eq!(
        (check.method.as_str(), check.target.as_str()),
        ("GET", "/healthz?deep")
    );
    assert_eq!(check.header("host"), Some(&*format!("localhost:{port}")));
    assert!(
        check
            .header("user-agent")
            .is_some_and(|agent| agent.starts_with("tidegate/"))
    );
    origin.wait_for_requests(3);
    gateway.wait_for_metric(HEALTHY, 1.0);
}
