//! Tests of the test harness: an origin and a client without the gateway, so that failures
//! elsewhere are the gateway's.

use crate::support::{
    Broken, Client, Gate, Origin, Request, metrics::Metrics, wait::eventually_eq,
};

/// The client's result for these bytes, followed by a close.
fn read(bytes: &str) -> Result<String, Broken> {
    let origin = Origin::sending_then_closing(bytes);
    let response = Client::connect(origin.address()).try_send(&Request::get("/"))?;
    Ok(response.text())
}

#[test]
fn the_client_tells_a_clean_end_from_a_broken_one() {
    let head = "HTTP/1.1 200 OK\r\n";
    assert_eq!(
        read(&format!("{head}Content-Length: 2\r\n\r\nok")).as_deref(),
        Ok("ok")
    );
    assert_eq!(read(&format!("{head}\r\nok")).as_deref(), Ok("ok"));
    assert_eq!(
        read(&format!(
            "{head}Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
        ))
        .as_deref(),
        Ok("ok")
    );
    for cut in [
        "Content-Length: 3\r\n\r\nok",
        "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        "Content-Le",
    ] {
        assert_eq!(read(&format!("{head}{cut}")), Err(Broken::Cut), "{cut:?}");
    }
    assert_eq!(read(""), Err(Broken::Closed));
    assert!(matches!(
        read("SSH-2.0-x\r\n\r\n"),
        Err(Broken::Malformed(_))
    ));
    let twice = format!(
        "{head}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    );
    assert!(matches!(read(&twice), Err(Broken::Malformed(_))));
}

#[test]
fn the_client_sees_a_reset_as_one() {
    let origin = Origin::new(|exchange| exchange.reset());
    let ended = Client::connect(origin.address()).try_send(&Request::get("/"));
    assert_eq!(ended.err(), Some(Broken::Reset));
}

#[test]
fn the_origin_records_what_arrives_and_keeps_the_connection() {
    let origin = Origin::echo();
    let mut client = Client::connect(origin.address());
    assert_eq!(
        client
            .send(&Request::post("/a", "hello").header("X-One", "1"))
            .text(),
        "hello"
    );
    assert_eq!(client.send(&Request::get("/b")).text(), "");
    assert_eq!(origin.connections(), 1);
    let seen = origin.requests();
    assert_eq!(
        (
            seen[0].target.as_str(),
            seen[0].header("x-one"),
            seen[0].complete
        ),
        ("/a", Some("1"), true)
    );
    assert_eq!(
        (seen[0].body.as_slice(), seen[0].body_length),
        (&b"hello"[..], 5)
    );
    assert!(
        seen[0].faults().iter().any(|fault| fault.contains("Via")),
        "a client is no gateway"
    );
}

#[test]
fn the_origin_notices_a_peer_that_leaves() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        held.open();
        exchange.wait_for_abort()
    });
    let mut client = Client::connect(origin.address());
    client
        .write(&Request::get("/").to_bytes())
        .expect("the request leaves");
    gate.wait();
    assert_eq!(origin.aborted(), 0);
    drop(client);
    eventually_eq("exchanges given up", 1, || origin.aborted());
}

#[test]
fn a_killed_origin_refuses_and_a_revived_one_answers() {
    let origin = Origin::ok();
    let mut kept = Client::connect(origin.address());
    assert_eq!(kept.send(&Request::get("/")).status, 200);
    origin.kill();
    assert!(kept.try_send(&Request::get("/")).is_err());
    origin.revive();
    assert_eq!(
        Client::connect(origin.address())
            .send(&Request::get("/"))
            .status,
        200
    );
}

#[test]
fn metrics_are_selected_by_name_and_labels_in_any_order() {
    let page = "# HELP a_total Help.\n# TYPE a_total counter\na_total{x=\"1\",y=\"2\"} 3\na_total{x=\"2\",y=\"2\"} 4\nb 5.5\n";
    let metrics = Metrics::parse(page);
    assert_eq!(metrics.sum("a_total"), 7.0);
    assert_eq!(metrics.sum(r#"a_total{y="2",x="1"}"#), 3.0);
    assert_eq!(metrics.sum("b"), 5.5);
    assert_eq!(metrics.select(r#"a_total{x="3"}"#), Vec::<f64>::new());
    assert_eq!(metrics.types["a_total"], "counter");
}
