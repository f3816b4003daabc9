//! Load shedding: under overload the gateway rejects requests by priority.

use crate::support::{Client, Gate, Gateway, Origin, Request, tidegate, wait::eventually_eq};

const ROUTES: &str = r#"
    [gateway]
    limits = ["per_ip"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 100
    [[route]]
    name = "pay"
    path = "/pay"
    upstream = "origin"
    priority = "critical"
    [[route]]
    name = "report"
    path = "/report"
    upstream = "origin"
    priority = "low"
    [[route]]
    name = "all"
    path = "/{*rest}"
    upstream = "origin"
"#;

/// An origin that sends the head at once, and the rest when the gate opens.
fn slow(gate: &Gate) -> Origin {
    let gate = gate.clone();
    Origin::new(move |exchange| {
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl")?;
        gate.wait();
        exchange.write(b"ow")
    })
}

/// Clients whose responses have begun and not ended.
fn under_way(gateway: &Gateway, target: &str, count: usize) -> Vec<Client> {
    let begin = |_| {
        let mut client = gateway.connect();
        assert_eq!(client.begin(&Request::get(target)).status, 200, "{target}");
        client
    };
    (0..count).map(begin).collect()
}

#[test]
fn beyond_the_bound_the_least_important_are_shed_first_and_charged_for_nothing() {
    let gate = Gate::default();
    let origin = slow(&gate);
    let toml = format!(
        "[overload]\nmax_in_flight = 5\nreserve = {{ critical = 0.2, normal = 0.4 }}\n{ROUTES}"
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let two = under_way(&gateway, "/report", 2);
    let shed = gateway.get("/report");
    assert_eq!((shed.status, shed.retry_after()), (503, Some(1)));
    assert!(shed.text().contains("overloaded"), "{}", shed.text());
    let four = under_way(&gateway, "/", 2);
    assert_eq!(gateway.get("/").status, 503);
    assert_eq!(gateway.get("/nowhere-else").status, 503);
    let five = under_way(&gateway, "/pay", 1);
    assert_eq!(gateway.get("/pay").status, 503);
    assert_eq!(
        gateway.metric(r#"tidegate_shed_total{priority="low"}"#),
        1.0
    );
    assert_eq!(
        gateway.metric(r#"tidegate_shed_total{priority="normal"}"#),
        2.0
    );
    assert_eq!(
        gateway.metric(r#"tidegate_shed_total{priority="critical"}"#),
        1.0
    );
    let charged = gateway.metric(r#"tidegate_decisions_total{limit="per_ip"}"#);
    assert_eq!(charged, 5.0, "no limit applies to a shed request");
    drop(five);
    gate.open();
    eventually_eq("places come back", 200, || gateway.get("/report").status);
    drop((two, four));
}

#[test]
fn the_access_line_of_what_is_shed_says_so() {
    let log = "[log]\naccess = \"all\"\nformat = \"json\"\n[overload]\nmax_in_flight = 1\n";
    let gateway = Gateway::with(&format!("{log}{ROUTES}")).start();
    // the last permit is reserved for critical requests
    assert_eq!(gateway.get("/shed").status, 503);
    assert_eq!(gateway.get("/a/../../b").status, 400);
    assert_eq!(gateway.get("/pay").status, 200);
    let said = |path: &str| {
        let output = gateway.output();
        let lines = output
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let mut lines = lines.filter(|line: &serde_json::Value| line["path"] == path);
        let line = lines.next()?;
        Some(line["error"].as_str().unwrap_or("none").to_owned())
    };
    for (path, error) in [
        ("/shed", "overloaded"),
        ("/a/../../b", "bad_request"),
        ("/pay", "none"),
    ] {
        eventually_eq(path, Some(error.to_owned()), || said(path));
    }
}

#[test]
fn who_has_left_holds_no_place() {
    let gate = Gate::default();
    let origin = slow(&gate);
    let toml = format!(
        "[overload]\nmax_in_flight = 1\nreserve = {{ critical = 0, normal = 0 }}\n{ROUTES}"
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let only = under_way(&gateway, "/", 1);
    assert_eq!(gateway.get("/pay").status, 503);
    drop(only);
    gate.open();
    eventually_eq("the place is free", 200, || gateway.get("/pay").status);
}

#[test]
fn a_reload_turns_it_off_and_without_the_table_nothing_is_shed() {
    let gate = Gate::default();
    let origin = slow(&gate);
    let with = |bound: &str| format!("[overload]\nmax_in_flight = {bound}\n{ROUTES}");
    let gateway = Gateway::with(&with("2")).upstream(&origin).start();
    let first = under_way(&gateway, "/", 1);
    assert_eq!(gateway.get("/").status, 503, "a fifth of two is one place");
    gateway.reconfigure(&with("\"off\""));
    let more = under_way(&gateway, "/", 3);
    gateway.reconfigure(&with("\"adaptive\""));
    let most = under_way(&gateway, "/report", 3);
    gateway.reconfigure(ROUTES);
    drop((first, more, most, under_way(&gateway, "/report", 3)));
    gate.open();
    assert_eq!(gateway.metric("tidegate_shed_total"), 1.0);
}

#[test]
fn what_cannot_be_a_bound_is_refused() {
    for (table, complaint) in [
        ("max_in_flight = 0", "out of range"),
        ("max_in_flight = \"some\"", "unknown value"),
        ("max_in_flight = 5\nfloor = 3", "adaptive bound"),
        (
            "reserve = { critical = 0.7, normal = 0.4 }",
            "add up to more than 1",
        ),
        ("reserve = { low = 0.1 }", "unknown key"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let text = format!(
            "[overload]\n{table}\n[upstream.a]\nservers = [\"builtin:echo\"]\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"a\"\n"
        );
        std::fs::write(folder.path().join("gateway.toml"), text).expect("it is written");
        let checked = tidegate(folder.path(), &["check", "--config", "gateway.toml"]);
        assert_eq!(checked.code, Some(1), "{table}: {checked}");
        assert!(checked.stderr.contains(complaint), "{table}: {checked}");
    }
}
