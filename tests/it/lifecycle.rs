//! From the first line of the banner to the last request of the drain, as an operator sees it.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use crate::support::{
    Broken, Client, Gate, Gateway, Origin, Request, eventually, wait::eventually_eq,
};

const LIMITED: &str = r#"
    [gateway]
    limits = ["per_ip"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 2
"#;

#[test]
fn the_banner_says_where_it_listens_what_it_limits_and_where_the_admin_page_is() {
    let origin = Origin::ok();
    let gateway = Gateway::with(LIMITED).upstream(&origin).start();
    let banner = gateway.banner();
    let expected = [
        env!("CARGO_PKG_VERSION").to_owned(),
        format!("http://{}", gateway.address()),
        origin.url(),
        "per_ip".to_owned(),
        "1/h".to_owned(),
        format!("http://{}", gateway.admin_address()),
    ];
    for part in expected {
        assert!(
            banner.contains(&part),
            "the banner does not say {part:?}:\n{banner}"
        );
    }
}

#[test]
fn the_banner_shows_the_mode_of_each_limit_that_does_not_enforce() {
    let limit = |name: &str, keys: &str| {
        format!("[limit.{name}]\nkey = [\"ip\"]\nrate = \"1/h\"\nburst = 2\n{keys}\n")
    };
    let limits = [
        limit("strict", ""),
        limit("watched", "mode = \"shadow\""),
        limit("tagged", "mode = \"tag\""),
        limit("idle", "mode = \"off\""),
        limit("partial", "enforce_percent = 10"),
    ];
    let all = "limits = [\"strict\", \"watched\", \"tagged\", \"idle\", \"partial\"]";
    let gateway = Gateway::with(&format!("[gateway]\n{all}\n{}", limits.concat())).start();
    let banner = gateway.banner();
    for (name, end) in [
        ("strict", "local counters"),
        ("watched", "local counters, mode = \"shadow\""),
        ("tagged", "local counters, mode = \"tag\""),
        ("idle", "local counters, mode = \"off\""),
        ("partial", "local counters, enforce_percent = 10"),
    ] {
        let start = format!("  limit      {name} ");
        let line = banner.lines().find(|line| line.starts_with(&start));
        assert!(line.is_some_and(|line| line.ends_with(end)), "{banner}");
    }
}

#[test]
fn the_built_in_echo_answers_without_any_origin() {
    let gateway = Gateway::with("").start();
    let response =
        gateway.send(&Request::post("/some/path?a=1", "hello").header("x-marker", "seen"));
    assert_eq!(response.status, 200);
    let text = response.text().to_ascii_lowercase();
    for part in ["/some/path?a=1", "x-marker", "x-forwarded-for", "hello"] {
        assert!(
            text.contains(part),
            "the echo does not show {part:?}:\n{text}"
        );
    }
}

#[test]
fn health_and_readiness_are_ok_while_it_serves() {
    let gateway = Gateway::with("").start();
    assert_eq!(gateway.admin("/healthz").status, 200);
    assert_eq!(gateway.admin("/readyz").status, 200);
    assert_eq!(gateway.admin("/nothing-here").status, 404);
    let posted =
        Client::connect(gateway.admin_address()).send(&gateway.admin_request("POST", "/healthz"));
    assert_eq!(posted.status, 405);
    let rebound = Client::connect(gateway.admin_address()).send(&Request::get("/metrics"));
    assert_eq!(
        rebound.status, 421,
        "a page in a browser cannot reach it through a name of its own"
    );
}

#[test]
fn the_admin_pages_are_not_on_the_public_listener() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/metrics").text(), "ok");
    assert_eq!(origin.request().target, "/metrics");
}

#[test]
fn every_metric_is_there_at_zero_from_the_start() {
    let origin = Origin::ok();
    let gateway = Gateway::with(LIMITED).upstream(&origin).start();
    let metrics = gateway.metrics();
    for outcome in ["admitted", "rejected"] {
        let selector = format!(
            r#"tidegate_decisions_total{{route="all",limit="per_ip",outcome="{outcome}"}}"#
        );
        assert_eq!(metrics.sum(&selector), 0.0, "{selector}");
    }
    let zero = [
        r#"tidegate_requests_total{route="all"}"#,
        r#"tidegate_keys{limit="per_ip"}"#,
        r#"tidegate_key_evictions_total{limit="per_ip"}"#,
        r#"tidegate_upstream_errors_total{upstream="origin"}"#,
        r#"tidegate_in_flight{route="all"}"#,
        "tidegate_panics_total",
        "tidegate_decision_seconds_count",
        r#"tidegate_request_seconds_count{route="all"}"#,
        r#"tidegate_upstream_seconds_count{upstream="origin"}"#,
        r#"tidegate_retry_after_seconds_count{limit="per_ip"}"#,
    ];
    for selector in zero {
        assert_eq!(metrics.sum(selector), 0.0, "{selector}");
    }
    let connections = format!(
        r#"tidegate_connections{{listener="{}"}}"#,
        gateway.address()
    );
    assert_eq!(metrics.sum(&connections), 0.0, "{connections}");
    assert_eq!(metrics.sum("tidegate_build_info"), 1.0);
    assert_eq!(metrics.sum("tidegate_config_info"), 1.0);
    for (family, kind) in &metrics.types {
        if family.starts_with("tidegate_") {
            assert!(
                metrics.helped.contains(family),
                "{family} ({kind}) has no help text"
            );
        }
    }
}

#[test]
fn metrics_count_what_happened() {
    let origin = Origin::ok();
    let trusting = "[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n";
    let gateway = Gateway::with(&format!("{trusting}{LIMITED}"))
        .upstream(&origin)
        .start();
    let request = Request::get("/secret-path").header("x-forwarded-for", "198.51.100.77");
    assert_eq!(gateway.statuses(&request, 5), [200, 200, 429, 429, 429]);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="200"}"#, 2.0);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="429"}"#, 3.0);
    let metrics = gateway.metrics();
    let decisions = |outcome: &str| {
        metrics.sum(&format!(
            r#"tidegate_decisions_total{{route="all",limit="per_ip",outcome="{outcome}"}}"#
        ))
    };
    assert_eq!((decisions("admitted"), decisions("rejected")), (2.0, 3.0));
    assert_eq!(metrics.sum(r#"tidegate_keys{limit="per_ip"}"#), 1.0);
    assert!(
        metrics.sum("tidegate_decision_seconds_count") >= 1.0,
        "decisions are sampled"
    );
    assert_eq!(
        metrics.sum(r#"tidegate_upstream_seconds_count{upstream="origin"}"#),
        2.0
    );
    assert_eq!(
        metrics.sum(r#"tidegate_retry_after_seconds_count{limit="per_ip"}"#),
        3.0
    );
    let page = gateway.admin("/metrics").text();
    assert!(!page.contains("secret-path"), "a label holds a path");
    assert!(!page.contains("198.51.100.77"), "a label holds a client");
}

#[test]
fn sigterm_finishes_what_is_in_flight_and_exits_0() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let mut gateway = Gateway::with(LIMITED).upstream(&origin).start();
    let mut client = gateway.connect();
    let in_flight = thread::spawn(move || client.try_send(&Request::get("/slow")));
    origin.wait_for_requests(1);

    gateway.signal("TERM");
    // readiness fails first, while the process stays healthy
    eventually_eq("/readyz while draining", Ok(503), || {
        gateway.try_admin("/readyz").map(|response| response.status)
    });
    assert_eq!(gateway.admin("/healthz").status, 200);
    let address = gateway.address();
    eventually("the listener to close", || {
        match TcpStream::connect(address) {
            Ok(_) => Err("a new connection was taken".into()),
            Err(_) => Ok(()),
        }
    });
    assert!(gateway.is_running(), "it waits for the request in flight");

    gate.open();
    let response = in_flight
        .join()
        .expect("the client's thread")
        .expect("the request in flight is answered");
    assert_eq!((response.status, response.text().as_str()), (200, "late"));
    assert_eq!(gateway.wait().code(), Some(0));
}

#[test]
fn idle_connections_do_not_hold_up_the_exit() {
    let mut gateway = Gateway::with("").start();
    let mut kept = gateway.connect();
    assert_eq!(kept.send(&Request::get("/")).status, 200);
    let _silent = gateway.connect();
    let asked = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.wait().code(), Some(0));
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "the drain took {:?}",
        asked.elapsed()
    );
    assert_ne!(
        kept.try_send(&Request::get("/")).err(),
        Some(Broken::Silent)
    );
}

#[test]
fn ctrl_c_drains_like_sigterm() {
    let mut gateway = Gateway::with("").start();
    gateway.signal("INT");
    assert_eq!(gateway.wait().code(), Some(0));
}

#[test]
fn the_drain_gives_up_at_its_deadline() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let mut gateway = Gateway::with("[server]\nworkers = 1\ndrain_timeout = \"300ms\"\n")
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    let in_flight = thread::spawn(move || client.try_send(&Request::get("/stuck")));
    origin.wait_for_requests(1);
    let asked = Instant::now();
    gateway.signal("TERM");
    gateway.wait();
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "the drain took {:?}",
        asked.elapsed()
    );
    assert!(
        in_flight.join().expect("the client's thread").is_err(),
        "the stuck request was cut"
    );
    gate.open();
}

#[test]
fn a_broken_configuration_refuses_to_start_and_says_everything_at_once() {
    let refused = Gateway::with(
        r#"
        [limit.first]
        key = ["ip"]
        rate = "5/fortnight"
        [limit.second]
        kee = ["ip"]
        rate = "5/s"
        "#,
    )
    .refuse();
    assert_eq!(refused.code, Some(1), "{refused}");
    for part in ["gateway.toml:", "fortnight", "kee"] {
        assert!(
            refused.stderr.contains(part),
            "stderr does not say {part:?}: {refused}"
        );
    }
}

#[test]
fn a_port_in_use_refuses_to_start_and_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address: SocketAddr = taken.local_addr().expect("a bound listener");
    let refused = Gateway::with(&format!("[[listen]]\naddress = \"{address}\"\n")).refuse();
    assert_eq!(refused.code, Some(1), "{refused}");
    assert!(refused.stderr.contains(&address.to_string()), "{refused}");
}

#[test]
fn a_port_is_free_again_as_soon_as_the_gateway_has_ended() {
    let mut first = Gateway::with("").start();
    let address = first.address();
    assert_eq!(first.get("/").status, 200);
    first.signal("TERM");
    first.wait();
    let second = Gateway::with(&format!("[[listen]]\naddress = \"{address}\"\n")).start();
    assert_eq!(second.get("/").status, 200);
}

#[test]
fn several_listeners_serve_the_same_routes_and_limits() {
    let gateway = Gateway::with(&format!(
        "{LIMITED}\n[[listen]]\naddress = \"127.0.0.1:0\"\n[[listen]]\naddress = \"127.0.0.1:0\"\nhttp2 = false\n"
    ))
    .start();
    let [first, second] = gateway.listeners() else {
        panic!("two listeners: {:?}", gateway.listeners())
    };
    let get = |address: &SocketAddr| Client::connect(*address).send(&Request::get("/")).status;
    assert_eq!(
        [get(first), get(second), get(first), get(second)],
        [200, 200, 429, 429]
    );
}

#[test]
fn rejections_leave_a_line_in_the_log_and_secrets_do_not() {
    let gateway = Gateway::with(&format!(
        "{LIMITED}\n[log]\nformat = \"json\"\naccess = \"rejected\"\n"
    ))
    .start();
    let request = Request::get("/counted")
        .header("authorization", "Bearer s3cret")
        .header("cookie", "s3cret=1");
    assert_eq!(gateway.statuses(&request, 3), [200, 200, 429]);
    let line = eventually("a line about the rejection", || {
        let log = gateway.output();
        let line = log
            .lines()
            .find(|line| line.contains("429"))
            .map(str::to_owned);
        line.ok_or(log)
    });
    let json: serde_json::Value =
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line}"));
    let text = json.to_string();
    for part in ["per_ip", "/counted", "127.0.0.1"] {
        assert!(
            text.contains(part),
            "the line does not say {part:?}: {line}"
        );
    }
    assert!(!gateway.output().contains("s3cret"));
}

#[test]
fn a_log_that_nobody_reads_delays_nobody() {
    let unread = std::process::Stdio::piped();
    let (folder, config) = Gateway::with("[server]\nworkers = 1\n[log]\nlevel = \"trace\"\n")
        .upstream_at(&format!("http://{}", crate::support::origin::nobody()))
        .write();
    let ready = folder.path().join("ready.json");
    let mut command = crate::support::cli::tidegate_command(folder.path());
    command
        .args(["run", "--config"])
        .arg(&config)
        .arg("--ready-file")
        .arg(&ready);
    let mut child = command.stderr(unread).spawn().expect("it starts");
    let text = crate::support::wait::eventually("the gateway to be ready", || {
        std::fs::read_to_string(&ready).map_err(|error| error.to_string())
    });
    let ready: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let address = ready["listeners"][0].as_str().expect("there is one");
    let mut client = Client::connect(address.parse().expect("it is an address"));
    // far more lines than a pipe's buffer
    for _ in 0..3000 {
        assert_eq!(client.send(&Request::get("/")).status, 502);
    }
    crate::support::signal::signal(child.id(), "TERM");
    eventually_eq("the gateway has ended", true, || {
        child.try_wait().expect("a child can be asked").is_some()
    });
}

#[test]
fn a_file_where_the_socket_should_be_is_left_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let precious = folder.path().join("precious.db");
    std::fs::write(&precious, "data").expect("it is writable");
    let listen = format!("[[listen]]\naddress = \"unix:{}\"\n", precious.display());
    let refused = Gateway::with(&listen).refuse();
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stderr.contains("is not a socket"),
        "{}",
        refused.stderr
    );
    assert_eq!(
        std::fs::read_to_string(&precious).expect("still there"),
        "data"
    );
}
