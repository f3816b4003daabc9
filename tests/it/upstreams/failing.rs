//! Failing servers: retries on another server, ejection, the circuit breaker.

use super::{logged, shares, upstream};
use crate::support::{
    Gateway, Origin, Request,
    origin::nobody,
    wait::{eventually, eventually_eq},
};

const HEALTHY: &str = r#"tidegate_upstream_healthy{upstream="origin"}"#;

fn closing() -> Origin {
    Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.close()
    })
}

#[test]
fn a_request_that_one_server_does_not_take_goes_to_another() {
    let (dead, alive) = (Origin::ok(), Origin::echo());
    dead.kill();
    let gateway = Gateway::with(&upstream(&[&dead, &alive], "")).start();
    // nothing was sent, so even a request with a body may be retried
    let mut client = gateway.connect();
    for n in 0..6 {
        let body = format!("body {n}");
        let response = client.send(&Request::post("/", body.clone()));
        assert_eq!((response.status, response.text()), (200, body));
    }
    gateway.wait_for_metric(r#"tidegate_upstream_retries_total{outcome="sent"}"#, 3.0);
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="connect"}"#, 3.0);
}

#[test]
fn a_request_that_a_server_dropped_is_repeated_elsewhere_only_if_it_is_idempotent() {
    let (bad, good) = (closing(), Origin::ok());
    let keys = "balance = \"round_robin\"\n[upstream.origin.outlier]\nfailures = 0";
    let gateway = Gateway::with(&upstream(&[&bad, &good], keys)).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 2), [200; 2]);
    assert_eq!(shares(&[&bad, &good]), [1, 2]);
    let posted = gateway.statuses(&Request::post("/", "once"), 2);
    assert!(posted.contains(&502) && posted.contains(&200), "{posted:?}");
    assert_eq!(shares(&[&bad, &good]), [2, 3], "no POST was sent twice");
}

#[test]
fn a_response_that_has_begun_is_never_asked_for_again() {
    let garbage = Origin::sending_then_closing("HTTP/1.1 2");
    let good = Origin::ok();
    let keys = "balance = \"round_robin\"";
    let gateway = Gateway::with(&upstream(&[&garbage, &good], keys)).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 2), [502, 200]);
    assert_eq!(shares(&[&garbage, &good]), [1, 1]);
}

#[test]
fn without_retries_each_failure_is_seen() {
    let (dead, alive) = (Origin::ok(), Origin::ok());
    dead.kill();
    let keys = "retries = 0\nbalance = \"round_robin\"";
    let gateway = Gateway::with(&upstream(&[&dead, &alive], keys)).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [502, 200, 502, 200]
    );
}

#[test]
fn retries_are_held_to_a_fifth_of_the_requests() {
    let (bad, good) = (closing(), Origin::ok());
    let keys = "balance = \"round_robin\"\n[upstream.origin.outlier]\nfailures = 0";
    let gateway = Gateway::with(&upstream(&[&bad, &good], keys)).start();
    let statuses = gateway.statuses(&Request::get("/"), 200);
    let failed = statuses.iter().filter(|status| **status == 502).count();
    // of about 100 requests at the bad server, 40 are retried, plus 3 per second of the test
    assert!(failed >= 1, "an outage is not hidden by doubling the load");
    let denied = gateway.metric(r#"tidegate_upstream_retries_total{outcome="over_budget"}"#);
    assert!(
        (denied - failed as f64).abs() < 0.5,
        "{denied} denied, {failed} failed"
    );
}

#[test]
fn a_server_that_keeps_failing_is_ejected_and_comes_back() {
    let (shaky, steady) = (Origin::ok(), Origin::ok());
    let keys = "[upstream.origin.outlier]\nfailures = 3\neject_for = \"300ms\"";
    let gateway = Gateway::with(&upstream(&[&shaky, &steady], keys)).start();
    shaky.kill();
    assert_eq!(gateway.statuses(&Request::get("/"), 20), [200; 20]);
    gateway.wait_for_metric(HEALTHY, 1.0);
    logged(&gateway, "ejecting a server", 1);

    shaky.revive();
    eventually("the server to be back", || {
        assert_eq!(gateway.get("/").status, 200);
        match shaky.requests().len() {
            0 => Err("nothing was sent to it".into()),
            _ => Ok(()),
        }
    });
    gateway.wait_for_metric(HEALTHY, 2.0);
    logged(&gateway, "no longer ejected", 1);
    logged(&gateway, "ejecting a server", 1);
}

#[test]
fn the_last_server_is_never_ejected() {
    let toml = upstream(
        &[],
        "[upstream.origin.outlier]\nfailures = 1\neject_for = \"1h\"",
    )
    .replace(
        "[]",
        &format!("[\"http://{}\", \"http://{}\"]", nobody(), nobody()),
    );
    let gateway = Gateway::with(&toml).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 20), [502; 20]);
    gateway.wait_for_metric(HEALTHY, 1.0);
    let one = Origin::ok();
    let toml = upstream(
        &[&one],
        "[upstream.origin.outlier]\nfailures = 1\neject_for = \"1h\"",
    );
    let gateway = Gateway::with(&toml).start();
    one.kill();
    assert_eq!(gateway.statuses(&Request::get("/"), 5), [502; 5]);
    one.revive();
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn an_upstream_that_keeps_failing_is_refused_at_once_and_tried_again() {
    let origin = Origin::ok();
    let keys = "[upstream.origin.breaker]\nfailures = 3\nopen_for = \"1s\"\n[log]\naccess = \"all\"\nformat = \"json\"";
    let gateway = Gateway::with(&upstream(&[&origin], keys)).start();
    origin.kill();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [502; 3]);
    let refused = gateway.get("/refused");
    assert_eq!((refused.status, refused.retry_after()), (503, Some(1)));
    gateway.wait_for_metric(r#"tidegate_upstream_errors_total{kind="breaker"}"#, 1.0);
    eventually_eq("the access line says why", true, || {
        gateway
            .output()
            .contains(r#""status":503,"upstream":"origin","upstream_error":"breaker""#)
    });
    origin.revive();
    eventually("the circuit to be closed", || {
        match gateway.get("/").status {
            200 => Ok(()),
            status => Err(status.to_string()),
        }
    });
    assert_eq!(gateway.statuses(&Request::get("/"), 5), [200; 5]);
    logged(&gateway, "its circuit breaker opens", 1);
    logged(&gateway, "its circuit breaker closes", 1);
}

#[test]
fn a_status_of_the_origins_ejects_nobody() {
    let (bad, good) = (
        Origin::new(|exchange| exchange.respond(503, &[], b"no")),
        Origin::ok(),
    );
    let keys = "balance = \"round_robin\"\n[upstream.origin.outlier]\nfailures = 1";
    let gateway = Gateway::with(&upstream(&[&bad, &good], keys)).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [503, 200, 503, 200]
    );
    gateway.wait_for_metric(HEALTHY, 2.0);
}
