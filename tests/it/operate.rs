//! Operations on a running gateway: limits, keys, decisions, and the kill switch.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{
    Client, Gateway, Origin, Redis, Request, eventually, tidegate,
    wait::{eventually_eq, time_passes},
};

const LIMITED: &str = r#"
    [gateway]
    limits = ["per_ip", "total"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 3
    [limit.total]
    key = []
    rate = "1000/h"
    burst = 1000
"#;

const KEY: &str = "/api/v1/limits/per_ip/keys/ip=127.0.0.1/32";

#[test]
fn every_limit_is_shown_with_its_decisions_and_who_is_rejected_most() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 5),
        [200, 200, 200, 429, 429]
    );
    let shown = gateway.look("/api/v1/limits");
    let limit = &shown["limits"][0];
    assert_eq!(
        (&limit["name"], &limit["mode"]),
        (&json!("per_ip"), &json!("enforce"))
    );
    assert_eq!(limit["key"], json!(["ip"]));
    assert_eq!(
        limit["quotas"],
        json!([{ "rate": "1/h", "burst": 3, "tiers": [] }])
    );
    assert_eq!(limit["keys"], 1);
    assert_eq!(limit["decisions"]["admitted"], 3);
    assert_eq!(limit["decisions"]["rejected"], 2);
    assert_eq!(
        limit["top"],
        json!([{ "key": "ip=127.0.0.1/32", "rejected_last_minute": 2 }])
    );
    assert_eq!(shown["limits"][1]["top"], json!([]));
    assert_eq!(shown["kill"], Value::Null);
    assert_eq!(gateway.look("/api/v1/limits/total")["name"], "total");
    assert_eq!(
        gateway
            .ask("GET", "/api/v1/limits/nobody", &Value::Null)
            .status,
        404
    );
}

#[test]
fn keys_of_a_limit_that_redis_keeps_are_counted_too() {
    let redis = Redis::start();
    let shared = format!("[redis]\nurl = \"{}\"\ntimeout = \"1s\"", redis.url());
    let limits = LIMITED.replace("burst = 3", "burst = 3\nscope = \"global\"");
    let gateway = Gateway::with(&format!("{limits}{shared}")).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [200, 200, 200, 429]
    );
    eventually_eq("the key that is limited now", json!(1), || {
        gateway.look("/api/v1/limits")["limits"][0]["keys"].clone()
    });
}

#[test]
fn one_key_is_shown_and_reset() {
    let gateway = Gateway::with(LIMITED).start();
    let fresh = gateway.look(KEY);
    assert_eq!(
        (&fresh["spent"], &fresh["remaining"]),
        (&json!(0), &json!(3))
    );
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [200, 200, 200, 429]
    );
    for name in ["ip=127.0.0.1%2F32", "127.0.0.1", "ip=127.0.0.1"] {
        let spent = gateway.look(&format!("/api/v1/limits/per_ip/keys/{name}"));
        assert_eq!(
            (&spent["spent"], &spent["remaining"]),
            (&json!(3), &json!(0))
        );
        assert_eq!(
            (&spent["key"], &spent["source"]),
            (&json!("ip=127.0.0.1/32"), &json!("local"))
        );
        let reset = spent["reset_seconds"].as_f64().expect("a number");
        assert!(
            (10_000.0..10_801.0).contains(&reset),
            "three hours: {reset}"
        );
    }
    let total = gateway.look("/api/v1/limits/total/keys/all");
    assert_eq!(total["spent"], 3, "a rejection costs nothing");

    let reset = gateway.change("DELETE", KEY, &Value::Null);
    assert_eq!(reset["remaining"], 3);
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [200, 200, 200, 429]
    );
    let strange = gateway.ask("GET", "/api/v1/limits/per_ip/keys/user=alice", &Value::Null);
    assert_eq!(strange.status, 400);
    assert!(
        strange.text().contains("ip=203.0.113.9/32"),
        "{}",
        strange.text()
    );
}

#[test]
fn a_key_of_several_parts_is_found_by_its_name() {
    let gateway = Gateway::with(
        "[gateway]\nlimits = [\"a\"]\n[limit.a]\nkey = [\"ip\", \"method\", \"path\", \"header:x-device\"]\nrate = \"1/h\"\nburst = 2\nmissing = \"shared\"\n\
         [[route]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"origin\"\n",
    )
    .start();
    let request = Request::get("/a,%20b/c").header("x-device", "s3cret");
    assert_eq!(gateway.statuses(&request, 3), [200, 200, 429]);
    let top = gateway.look("/api/v1/limits/a")["top"][0]["key"].clone();
    let name = top.as_str().expect("a key").to_owned();
    assert!(
        name.contains("header:x-device=#") && !name.contains("s3cret"),
        "{name}"
    );
    let escaped = name
        .replace('%', "%25")
        .replace(' ', "%20")
        .replace('#', "%23");
    let shown = gateway.look(&format!("/api/v1/limits/a/keys/{escaped}"));
    assert_eq!((&shown["key"], &shown["spent"]), (&top, &json!(2)));
}

#[test]
fn a_ban_holds_over_reloads_and_ends_when_it_is_lifted() {
    let gateway = Gateway::with(LIMITED).start();
    let banned = gateway.change("POST", &format!("{KEY}/ban"), &json!({ "for": "1h" }));
    assert_eq!(banned["banned"], true);
    let refused = gateway.get("/");
    assert_eq!(refused.status, 429);
    let wait = refused.retry_after().expect("a wait");
    assert!(
        (3_500..=3_600).contains(&wait),
        "until the ban is over: {wait}"
    );
    gateway.reconfigure(&LIMITED.replace("burst = 3", "burst = 4"));
    assert_eq!(gateway.get("/").status, 429);
    gateway.change("DELETE", KEY, &Value::Null);
    assert_eq!(gateway.get("/").status, 200);
    eventually_eq("both in the log", true, || {
        let log = gateway.stderr();
        log.contains("an operator has banned a key") && log.contains("an operator has reset a key")
    });
    gateway.change("POST", &format!("{KEY}/ban"), &json!({ "for": "1s" }));
    eventually_eq("the ban to end", 200, || gateway.get("/").status);
}

#[test]
fn a_boost_admits_so_much_besides_and_nothing_of_it_for_requests_that_others_reject() {
    let toml = LIMITED
        .replace("burst = 1000", "burst = 9")
        .replace("1000/h", "1/h");
    let gateway = Gateway::with(&toml).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [200, 200, 200, 429]
    );
    let boosted = gateway.change(
        "POST",
        &format!("{KEY}/boost"),
        &json!({ "amount": 8, "for": "1h" }),
    );
    assert_eq!(boosted["boost"]["left"], 8);
    // six units of `total` are left
    let after: Vec<u16> = gateway.statuses(&Request::get("/"), 8);
    assert_eq!(after, [200, 200, 200, 200, 200, 200, 429, 429]);
    assert_eq!(gateway.look(KEY)["boost"]["left"], 2);
    assert_eq!(gateway.look(KEY)["spent"], 3, "as before");
}

#[test]
fn the_kill_switch_stops_one_limit_or_all_for_a_while_and_says_so() {
    let gateway = Gateway::with(LIMITED).start();
    let mode = "/api/v1/limits/per_ip/mode";
    assert_eq!(
        gateway.statuses(&Request::get("/"), 4),
        [200, 200, 200, 429]
    );
    gateway.change("PUT", mode, &json!({ "mode": "off", "for": "15m" }));
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(gateway.get("/").limits(), ["total"]);
    assert_eq!(
        gateway.metric("tidegate_kill_switch{limit=\"per_ip\"}"),
        1.0
    );
    assert_eq!(gateway.metric("tidegate_kill_switch{limit=\"total\"}"), 0.0);
    gateway.change("PUT", mode, &json!({ "mode": "shadow" }));
    assert_eq!(gateway.get("/").status, 200);
    let shadowed = "tidegate_decisions_total{limit=\"per_ip\",outcome=\"shadow_rejected\"}";
    gateway.wait_for_metric(shadowed, 1.0);
    gateway.change("PUT", mode, &json!({ "mode": "configured" }));
    assert_eq!(gateway.get("/").status, 429);

    gateway.change("PUT", "/api/v1/kill", &json!({ "for": "15m" }));
    gateway.reconfigure(&format!(
        "{LIMITED}\n[limit.more]\nkey = [\"path\"]\nrate = \"1/h\"\n"
    ));
    assert!(gateway.get("/").limits().is_empty(), "over a reload");
    assert_eq!(
        gateway.metric("tidegate_kill_switch"),
        3.0,
        "and of the new one"
    );
    assert_eq!(gateway.look("/api/v1/limits")["kill"]["mode"], "off");
    gateway.change("DELETE", "/api/v1/kill", &Value::Null);
    assert_eq!(gateway.get("/").status, 429);
    gateway.change("PUT", mode, &json!({ "mode": "off", "for": "1s" }));
    eventually_eq("the limit to act again", 429, || gateway.get("/").status);
    eventually_eq("the metric to say so", 0.0, || {
        gateway.metric("tidegate_kill_switch")
    });
}

#[test]
fn the_id_of_a_429_leads_to_the_whole_reason() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let refused =
        gateway.send(&Request::get("/cart?token=s3cret").header("x-forwarded-for", "6.6.6.6"));
    assert_eq!(refused.status, 429);
    let id = refused.header("x-request-id").expect("an id");
    let why = gateway.look(&format!("/api/v1/decisions/{id}"));
    assert_eq!(
        (&why["outcome"], &why["request_id"]),
        (&json!("rejected"), &json!(id))
    );
    let limits = why["limits"].as_array().expect("limits");
    let outcomes: Vec<&Value> = limits.iter().map(|limit| &limit["outcome"]).collect();
    assert_eq!(outcomes, ["rejected", "admitted"]);
    assert_eq!(limits[0]["key"], "ip=127.0.0.1/32");
    assert_eq!(why["request"]["path"], "/cart");
    let text = why["text"].as_str().expect("a text");
    assert!(
        text.contains("REJECTS") && text.contains("as they stood when it was decided"),
        "{text}"
    );
    assert!(!why.to_string().contains("s3cret"), "{why}");

    let listed = |query: &str| {
        let found = gateway.look(&format!("/api/v1/decisions?{query}"));
        let found = found["decisions"].as_array().expect("a list").clone();
        found
            .into_iter()
            .filter(|one| one["outcome"] == "rejected")
            .count()
    };
    let found = [
        "limit=per_ip",
        "key=127.0.0.1",
        "key=ip%3D127.0.0.1%2F32",
        "route=all",
        "outcome=rejected",
    ]
    .map(listed);
    assert_eq!(found, [1; 5]);
    assert_eq!(
        [
            "limit=nobody",
            "key=6.6.6.6",
            "route=none",
            "outcome=admitted"
        ]
        .map(listed),
        [0; 4]
    );
    assert_eq!(
        gateway
            .ask("GET", "/api/v1/decisions/unknown", &Value::Null)
            .status,
        404
    );
    let admitted = gateway.look("/api/v1/decisions?outcome=admitted");
    assert!(
        !admitted["decisions"].as_array().expect("a list").is_empty(),
        "a sample of them"
    );
}

#[test]
fn a_described_request_is_explained_as_things_stand_and_charges_nothing() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    let explain = |peer: &str| {
        let asked =
            json!({ "url": "http://api.example/a", "peer": peer, "headers": { "accept": "*/*" } });
        gateway.change("POST", "/api/v1/explain", &asked)
    };
    for _ in 0..3 {
        let same = explain("127.0.0.1");
        assert_eq!(same["answer"]["status"], 429);
        let other = explain("203.0.113.9");
        assert_eq!(other["answer"]["forwarded"], true);
        assert_eq!(other["limits"][0]["remaining"], 3);
        assert!(
            other["text"]
                .as_str()
                .is_some_and(|text| text.contains("as they stand now"))
        );
    }
    assert_eq!(gateway.look("/api/v1/limits/total/keys/all")["spent"], 3);
    assert_eq!(
        gateway.metric("tidegate_decisions_total{outcome=\"rejected\"}"),
        0.0
    );
    assert_eq!(gateway.look("/api/v1/limits")["limits"][0]["keys"], 1);
    gateway.change(
        "PUT",
        "/api/v1/limits/per_ip/mode",
        &json!({ "mode": "off" }),
    );
    let killed = explain("127.0.0.1");
    assert_eq!(
        killed["limits"][0]["why"],
        "an operator has switched it off"
    );
}

#[test]
fn what_is_misspelt_or_has_the_wrong_type_changes_nothing() {
    let gateway = Gateway::with(LIMITED).start();
    for (method, path, body, status) in [
        (
            "PUT",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "of" }),
            400,
        ),
        (
            "PUT",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "off", "fro": "15m" }),
            400,
        ),
        (
            "PUT",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "off", "for": "15 parsecs" }),
            400,
        ),
        (
            "PUT",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "off", "for": "900d" }),
            400,
        ),
        (
            "PUT",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "off", "until": "2020-01-01" }),
            400,
        ),
        ("PUT", "/api/v1/limits/per_ip/mode", json!(["off"]), 400),
        (
            "PUT",
            "/api/v1/limits/nobody/mode",
            json!({ "mode": "off" }),
            404,
        ),
        (
            "POST",
            "/api/v1/limits/per_ip/mode",
            json!({ "mode": "off" }),
            405,
        ),
        (
            "POST",
            "/api/v1/limits/per_ip/keys/ip=1.2.3.4/boost",
            json!({ "amount": -1 }),
            400,
        ),
        (
            "POST",
            "/api/v1/limits/per_ip/keys/ip=1.2.3.4/boost",
            json!({}),
            400,
        ),
        (
            "POST",
            "/api/v1/limits/per_ip/keys/ip=1.2.3/ban",
            json!({}),
            400,
        ),
        ("POST", "/api/v1/explain", json!({ "url": "no url" }), 400),
        (
            "POST",
            "/api/v1/explain",
            json!({ "url": "/", "headers": "a: b" }),
            400,
        ),
        ("GET", "/api/v1/explain", Value::Null, 405),
        ("DELETE", "/api/v1/decisions", Value::Null, 405),
        ("GET", "/api/v1/nothing", Value::Null, 404),
        ("GET", "/api/v1/limits/per_ip/keys/%zz", Value::Null, 400),
    ] {
        let response = gateway.ask(method, path, &body);
        assert_eq!(
            response.status,
            status,
            "{method} {path} {body}: {}",
            response.text()
        );
        assert!(response.json()["error"].is_string(), "{}", response.text());
    }
    let shown = gateway.look("/api/v1/limits");
    assert_eq!(shown["limits"][0]["mode"], "enforce");
    assert_eq!(shown["limits"][0]["key_runtime_overrides"], json!([]));
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn what_can_be_asked_needs_the_token_and_no_web_page_changes_anything() {
    let toml = format!("{LIMITED}[admin]\naddress = \"127.0.0.1:0\"\ntoken_file = \"token\"\n");
    let gateway = Gateway::with(&toml)
        .file("token", "a-token-of-sixteen\n")
        .start();
    for (method, path) in [
        ("GET", "/api/v1/limits"),
        ("GET", "/api/v1/status"),
        ("GET", "/api/v1/decisions"),
        ("GET", "/api/v1/config"),
        ("PUT", "/api/v1/kill"),
        ("DELETE", KEY),
    ] {
        let asked = gateway.ask(method, path, &Value::Null);
        assert_eq!(asked.status, 401, "{method} {path}");
    }
    let with_token = |request: Request| {
        let request = request.header("authorization", "Bearer a-token-of-sixteen");
        Client::connect(gateway.admin_address())
            .send(&request)
            .status
    };
    let kill = || gateway.admin_request("PUT", "/api/v1/kill");
    assert_eq!(
        with_token(kill().header("origin", "https://evil.example")),
        403
    );
    assert_eq!(
        with_token(kill().header("sec-fetch-site", "cross-site")),
        403
    );
    assert_eq!(
        with_token(gateway.admin_request("GET", "/api/v1/limits")),
        200
    );
    assert_eq!(with_token(kill()), 200);
}

#[test]
fn a_flood_of_keys_fills_no_memory_that_is_not_set_aside() {
    let gateway = Gateway::with(
        "[server]\nworkers = 2\n[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n[gateway]\nlimits = [\"none\"]\n\
         [limit.none]\nkey = [\"ip\", \"path\"]\nrate = \"1/h\"\nburst = 1\n[[override]]\nlimit = \"none\"\nip = \"0.0.0.0/0\"\nblock = true\n\
         [log]\naccess = \"off\"\n",
    )
    .start();
    let path = "/".to_owned() + &"long".repeat(500);
    let mut client = gateway.connect();
    for n in 0..5_000_u32 {
        let ip = std::net::Ipv4Addr::from(n + 0x0B00_0000).to_string();
        let request = Request::get(&format!("{path}{n}")).header("x-forwarded-for", &ip);
        assert_eq!(client.send(&request).status, 429);
    }
    let listed = gateway.look("/api/v1/decisions");
    assert!(listed.to_string().len() < 100_000);
    let one = listed["decisions"][0]["request_id"]
        .as_str()
        .expect("an id");
    let whole = gateway
        .look(&format!("/api/v1/decisions/{one}"))
        .to_string();
    assert!(whole.len() < 16 * 1024, "{} bytes", whole.len());
    let top = gateway.look("/api/v1/limits")["limits"][0]["top"].clone();
    assert!(top.as_array().expect("a list").len() <= 32);
}

#[test]
fn everything_at_a_glance() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.statuses(&Request::get("/"), 5).len(), 5);
    eventually("the counts", || {
        let status = gateway.look("/api/v1/status");
        let counts = (
            &status["requests"]["200"],
            &status["requests"]["429"],
            &status["rejected_total"],
        );
        match counts == (&json!(3), &json!(2), &json!(2)) {
            true => Ok(()),
            false => Err(status.to_string()),
        }
    });
    let status = gateway.look("/api/v1/status");
    assert_eq!(status["state"], "ready");
    assert_eq!(status["redis"], Value::Null);
    assert_eq!(status["config"]["last_reload_ok"], true);
    assert_eq!(status["limits"].as_array().map(Vec::len), Some(2));
    assert_eq!(status["latest"].as_array().map(Vec::len), Some(2));
    assert_eq!(status["latest"][0]["limit"], "per_ip");
    assert_eq!(status["upstreams"][0]["servers"][0]["healthy"], true);
}

#[test]
fn the_command_line_explains_a_request_by_its_id_and_one_that_is_described() {
    let gateway = Gateway::with(LIMITED).start();
    gateway.statuses(&Request::get("/"), 3);
    let refused = gateway.get("/cart");
    let id = refused.header("x-request-id").expect("an id");
    let admin = format!("http://{}", gateway.admin_address());
    let explain = |arguments: &[&str]| {
        let all = [&["explain", "--admin", &admin], arguments].concat();
        tidegate(gateway.folder(), &all)
    };
    let by_id = explain(&["--request-id", id]);
    assert_eq!(by_id.code, Some(0), "{by_id}");
    let said = &by_id.stdout;
    assert!(
        said.starts_with(&format!("request {id} was rejected at 20")),
        "{by_id}"
    );
    assert!(
        said.contains("per_ip     REJECTS, for ") && said.contains("429, Retry-After: "),
        "{by_id}"
    );
    let described = explain(&["http://a.example/cart", "--peer", "203.0.113.9"]);
    assert!(
        described.stdout.contains("admits, 3 of 3 left"),
        "{described}"
    );
    assert!(
        described.stdout.contains("as they stand now"),
        "{described}"
    );
    let json = explain(&["/cart", "--format", "json"]);
    let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(json["answer"]["status"], 429);
    let unknown = explain(&["--request-id", "nobody"]);
    assert_eq!(unknown.code, Some(1), "{unknown}");
    assert!(
        unknown.stderr.contains("no decision with this request id"),
        "{unknown}"
    );
    let nowhere = tidegate(gateway.folder(), &["top", "--admin", "http://127.0.0.1:1"]);
    assert_eq!(nowhere.code, Some(1), "{nowhere}");
    assert!(
        nowhere.stderr.contains("no gateway answers at"),
        "{nowhere}"
    );
}

#[test]
fn top_shows_what_happens_and_to_whom() {
    let toml = format!("{LIMITED}[admin]\naddress = \"127.0.0.1:0\"\ntoken_file = \"token\"\n");
    let gateway = Gateway::with(&toml)
        .file("token", "a-token-of-sixteen\n")
        .start();
    gateway.statuses(&Request::get("/"), 5);
    let admin = format!("http://{}", gateway.admin_address());
    let top = |arguments: &[&str]| {
        let all = [&["top", "--once", "--admin", &admin], arguments].concat();
        tidegate(gateway.folder(), &all)
    };
    let shown = top(&["--token-file", "token"]);
    assert_eq!(shown.code, Some(0), "{shown}");
    for part in [
        "requests/s",
        "per_ip               enforce",
        "REJECTED MOST",
        "ip=127.0.0.1/32",
    ] {
        assert!(shown.stdout.contains(part), "{part}: {shown}");
    }
    // the number of keys stands below its heading
    let mut lines = shown.stdout.lines();
    let heading = lines.find(|line| line.starts_with("LIMIT")).unwrap_or("");
    let row = lines.next().unwrap_or("");
    let (before, _) = heading.split_once("  QUOTA").unwrap_or(("", ""));
    assert!(row[before.len()..].starts_with("  "), "{shown}");

    let refused = top(&[]);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("--token-file"),
        "{refused}"
    );
}

#[test]
fn a_hostile_admin_address_cannot_command_the_terminal() {
    // terminal commands in C0 and C1, a reversed line, invisible characters
    const HOSTILE: &str = "a\u{9b}31m\u{202e}\u{2066}\u{ad}\u{7f}";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let escaped = format!("{HOSTILE}\\u001b[2J");
    let failure = format!("{{\"error\": \"{escaped}\"}}");
    let success = format!(
        "{{\"request_id\": \"{escaped}\", \"at\": \"{escaped}\", \"outcome\": \"{escaped}\", \"text\": \"{escaped}\", \"version\": \"{escaped}\", \"in_flight\": \"{escaped}\", \"limits\": [{{\"name\": \"{escaped}\", \"keys\": \"{escaped}\"}}]}}"
    );
    for (status, body) in [(500, failure), (500, escaped), (200, success)] {
        let origin = Origin::new(move |exchange| {
            exchange.read_body()?;
            exchange.respond(status, &[], body.as_bytes())?;
            exchange.close()
        });
        for arguments in [
            &["top", "--once"][..],
            &["explain", "/"],
            &["explain", "--request-id", "1"],
            &["explain", "/", "--format", "json"],
        ] {
            let shown = tidegate(
                folder.path(),
                &[arguments, &["--admin", &origin.url()]].concat(),
            );
            let expected = if status == 200 { 0 } else { 1 };
            assert_eq!(shown.code, Some(expected), "{shown}");
            let text = format!("{}{}", shown.stdout, shown.stderr);
            assert!(text.contains("31m"), "{arguments:?}: {text:?}");
            for character in [
                '\u{1b}', '\u{9b}', '\u{202e}', '\u{2066}', '\u{ad}', '\u{7f}',
            ] {
                assert!(!text.contains(character), "{arguments:?}: {text:?}");
            }
        }
    }
}

#[test]
fn an_admin_address_that_answers_byte_by_byte_does_not_hold_a_command() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let origin = Origin::new(|exchange| {
        exchange.write(b"HTTP")?;
        loop {
            exchange.write(b" ")?;
            time_passes(Duration::from_millis(500), "the next byte is due");
        }
    });
    let url = origin.url();
    std::thread::scope(|scope| {
        for (command, part) in [
            (&["healthcheck"][..], "not complete after 2s"),
            (&["top", "--once"], "not complete after 10s"),
            (&["explain", "/"], "not complete after 10s"),
        ] {
            let (folder, url) = (folder.path(), &url);
            scope.spawn(move || {
                let shown = tidegate(folder, &[command, &["--admin", url]].concat());
                assert_eq!(shown.code, Some(1), "{shown}");
                assert!(shown.stderr.contains(part), "{shown}");
            });
        }
    });
}

#[test]
fn a_key_is_shown_under_the_quota_that_applies_to_it() {
    let toml = r#"
        [client_ip]
        trusted_proxies = ["127.0.0.0/8"]
        [[user]]
        from = "header"
        header = "x-auth-user"
        tier_header = "x-auth-tier"
        [limit.per_user]
        key = ["user"]
        rate = { default = "10/h", small = "2/h" }
        [[override]]
        limit = "per_user"
        user = "vip"
        rate = "50/h"
        burst = 50
        [[override]]
        limit = "per_user"
        user = "gone"
        block = true
        [gateway]
        limits = ["per_user"]
    "#;
    let gateway = Gateway::with(toml).start();
    let key = |name: &str| gateway.look(&format!("/api/v1/limits/per_user/keys/user={name}"));
    let new = key("nobody");
    assert_eq!(new["quota_from"], "unknown");
    let tiers = [&new["tiers"][0], &new["tiers"][1]].map(|tier| (&tier["tier"], &tier["capacity"]));
    assert_eq!(
        tiers,
        [(&Value::Null, &json!(10)), (&json!("small"), &json!(2))]
    );

    let as_user = |user: &str| {
        Request::get("/")
            .header("x-forwarded-for", "203.0.113.9")
            .header("x-auth-user", user)
            .header("x-auth-tier", "small")
    };
    assert_eq!(gateway.statuses(&as_user("alice"), 3), [200, 200, 429]);
    let alice = key("alice");
    let shown = ["quota_from", "tier", "capacity", "remaining"].map(|field| alice[field].clone());
    assert_eq!(
        shown,
        [json!("last_seen"), json!("small"), json!(2), json!(0)]
    );
    let vip = key("vip");
    assert_eq!(
        (&vip["quota_from"], &vip["capacity"]),
        (&json!("override"), &json!(50))
    );
    assert_eq!(vip["override"]["for"], "user vip");
    assert_eq!(key("gone")["override"]["effect"], "block");
    let asked = gateway.look("/api/v1/limits/per_user/keys/user=alice?tier=small");
    assert_eq!(asked["quota_from"], "asked");
}

#[test]
fn a_switch_says_whom_it_reaches_and_may_be_for_one_gateway() {
    let gateway = Gateway::with(LIMITED).start();
    let here = json!({ "for": "15m", "scope": "gateway" });
    assert_eq!(
        gateway.change("PUT", "/api/v1/kill", &here)["reach"],
        "this gateway"
    );
    assert_eq!(gateway.look("/api/v1/kill")["kill"]["scope"], "gateway");
    assert_eq!(gateway.statuses(&Request::get("/"), 5), [200; 5]);
    gateway.change("DELETE", "/api/v1/kill", &json!({ "scope": "gateway" }));
    assert_eq!(gateway.look("/api/v1/kill")["kill"], Value::Null);
    gateway.change("PUT", "/api/v1/kill", &json!({ "for": "15m" }));
    assert_eq!(gateway.look("/api/v1/kill")["kill"]["scope"], "all");
    gateway.change(
        "PUT",
        "/api/v1/limits/per_ip/mode",
        &json!({ "mode": "shadow", "scope": "gateway" }),
    );
    gateway.change("DELETE", "/api/v1/kill", &Value::Null);
    let limit = gateway.look("/api/v1/limits/per_ip");
    assert_eq!(
        (&limit["runtime_override"]["scope"], &limit["mode"]),
        (&json!("gateway"), &json!("shadow"))
    );
    let unknown = json!({ "mode": "off", "scope": "everywhere" });
    assert_eq!(gateway.ask("PUT", "/api/v1/kill", &unknown).status, 400);
}
