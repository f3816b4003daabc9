//! Access lines: which requests get one, and their bound. Also, metrics do not grow with client
//! input.

use serde_json::Value;

use crate::support::{Client, Gateway, Redis, Request, eventually, http2};

const TWO_AN_HOUR: &str =
    "[gateway]\nlimits = [\"l\"]\n[limit.l]\nkey = []\nrate = \"1/h\"\nburst = 2\n";

/// The access lines so far, once there are this many.
fn lines(gateway: &Gateway, count: usize) -> Vec<Value> {
    eventually("access lines", || {
        let output = gateway.output();
        let lines = output.lines().filter(|line| line.starts_with('{'));
        let lines: Vec<Value> = lines
            .map(|line| serde_json::from_str(line).expect("a line of JSON"))
            .filter(|line: &Value| line.get("request_id").is_some())
            .collect();
        match lines.len() >= count {
            true => Ok(lines),
            false => Err(format!("{} of {count}", lines.len())),
        }
    })
}

#[test]
fn rejections_get_no_more_lines_in_a_second_than_they_may() {
    let gateway = Gateway::with(&format!("[log]\nmax_rejected = 5\n{TWO_AN_HOUR}")).start();
    let mut client = gateway.connect();
    let request = Request::get("/");
    for _ in 0..60 {
        client.send(&request);
    }
    let left_out = "tidegate_log_lines_left_out_total";
    assert!(
        gateway.metric(left_out) >= 20.0,
        "{}",
        gateway.metric(left_out)
    );
    // a later second has room again, and its line reports the dropped ones
    let lines = eventually("a line that says how many were left out", || {
        client.send(&request);
        let lines = lines(&gateway, 1);
        match lines.iter().any(|line| line.get("lines_dropped").is_some()) {
            true => Ok(lines),
            false => Err(format!("{} lines", lines.len())),
        }
    });
    let told: f64 = lines
        .iter()
        .filter_map(|line| line["lines_dropped"].as_f64())
        .sum();
    let counted = gateway.metric(left_out);
    assert!(
        told >= 1.0 && told <= counted,
        "{told} told, {counted} counted"
    );
    let rejected = gateway.metric(r#"tidegate_requests_total{code="429"}"#);
    let written = lines.len() as f64;
    assert!(
        written + counted <= rejected && written < rejected / 2.0,
        "{written} of {rejected}"
    );
}

#[test]
fn a_share_of_what_is_admitted_gets_a_line_too() {
    let requests = 2_000;
    let all = "[log]\nsample = 0.1\n";
    let gateway = Gateway::with(all).start();
    let mut client = gateway.connect();
    for _ in 0..requests {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    let lines = lines(&gateway, requests / 20);
    assert!(lines.len() < requests / 5, "{} of {requests}", lines.len());
    assert_eq!(lines[0]["status"], 200);
}

#[test]
fn a_line_says_who_decided() {
    let redis = Redis::start();
    let source = |toml: &str| {
        let gateway = Gateway::with(&format!("[log]\naccess = \"all\"\n{toml}")).start();
        gateway.get("/");
        let line = lines(&gateway, 1).remove(0);
        let scope = if toml.contains("global") {
            "global"
        } else {
            "local"
        };
        assert_eq!(
            (&line["scope"], &line["mode"]),
            (&scope.into(), &"enforce".into())
        );
        line["source"].clone()
    };
    let shared = |keys: &str, url: &str| {
        source(&format!(
            "[redis]\nurl = \"{url}\"\ntimeout = \"1s\"\n{TWO_AN_HOUR}scope = \"global\"\n{keys}\n"
        ))
    };
    assert_eq!(source(TWO_AN_HOUR), "local");
    assert_eq!(shared("sync = \"strict\"", &redis.url()), "redis");
    let nobody = format!("redis://{}", crate::support::origin::nobody());
    assert_eq!(shared("on_redis_down = \"local\"", &nobody), "fallback");
}

#[test]
fn metrics_do_not_grow_with_clients_paths_and_agents() {
    const EACH: usize = 10_000;
    let gateway = Gateway::with(
        r#"
        [client_ip]
        trusted_proxies = ["127.0.0.1"]
        [gateway]
        limits = ["per_ip", "per_agent", "per_path"]
        [limit.per_ip]
        key = ["ip"]
        rate = "1/min"
        burst = 1
        [limit.per_agent]
        key = ["user_agent"]
        rate = "1/min"
        [limit.per_path]
        key = ["path"]
        rate = "1/min"
        mode = "shadow"
    "#,
    )
    .start();
    let request = |i: usize| {
        Request::new(["GET", "POST", "PURGE"][i % 3], &format!("/p/{i}?q={i}"))
            .header("x-forwarded-for", &format!("10.{}.{}.7", i / 250, i % 250))
            .header("user-agent", &format!("agent/{i}"))
            .header("host", &format!("h{i}.example"))
    };
    let mut client = gateway.connect();
    // one of each outcome: 200, 429, 404 for an unsupported method, also over HTTP/2
    for i in [0, 0, 1, 2] {
        client.send(&request(i));
    }
    http2::send(gateway.address(), &Request::get("/"));
    let before = gateway.metrics().names();
    let address = gateway.address();
    std::thread::scope(|scope| {
        for half in 0..2 {
            scope.spawn(move || {
                let mut client = Client::connect(address);
                for i in (half..EACH).step_by(2) {
                    client.send(&request(i));
                }
            });
        }
    });
    assert_eq!(
        gateway.metrics().names(),
        before,
        "{EACH} clients, paths and user agents"
    );
    assert!(gateway.metric(r#"tidegate_keys{limit="per_ip"}"#) >= 9_000.0);
}
