//! Reloads of a running gateway: all or nothing, without disturbing clients.

use std::{
    fs,
    net::TcpStream,
    os::unix::fs::symlink,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use crate::support::{
    Client, Gate, Gateway, Origin, Request, eventually, tokens::sha256_hex, wait::eventually_eq,
};

const LIMITED: &str = r#"
    [gateway]
    limits = ["per_ip"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 3
"#;

const ROUTE: &str = "\n[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"origin\"\n";

fn names(report: &serde_json::Value, kind: &str, what: &str) -> Vec<String> {
    let names = report["changes"][kind][what].as_array();
    let names = names.unwrap_or_else(|| panic!("no {what} {kind} in {report}"));
    names
        .iter()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect()
}

#[test]
fn a_reload_says_what_changed_and_the_next_request_meets_it() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.get("/").limits(), ["per_ip"]);
    let report = gateway.reconfigure(&format!(
        "[limit.per_path]\nkey = [\"path\"]\nrate = \"9/s\"\n[server]\nworkers = 1\n{ROUTE}limits = [\"per_path\"]\n"
    ));
    assert_eq!(report["ok"], true);
    assert_eq!(names(&report, "limits", "added"), ["per_path"]);
    assert_eq!(names(&report, "limits", "removed"), ["per_ip"]);
    assert_eq!(names(&report, "routes", "changed"), ["all"]);
    assert_eq!(report["changes"]["after_restart"][0], "server.workers");
    assert_eq!(gateway.get("/").limits(), ["per_path"]);
    let metrics = gateway.metrics();
    let hash = report["hash"].as_str().expect("a hash");
    let info = format!("tidegate_config_info{{hash=\"{hash}\"}}");
    assert_eq!(metrics.sum(&info), 1.0);
    assert_eq!(metrics.select("tidegate_config_info").len(), 1);
    assert_eq!(metrics.sum("tidegate_config_reload_success"), 1.0);
}

#[test]
fn a_broken_file_changes_nothing_and_is_loud_about_it() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.get("/").status, 200);
    let before = gateway.metrics();
    gateway.rewrite(&LIMITED.replace("1/h", "1/fortnight"));
    let refused = gateway.reload();
    assert_eq!(refused.status, 422, "{}", refused.text());
    let json = refused.json();
    assert_eq!((&json["ok"], &json["errors"]), (&false.into(), &1.into()));
    let diagnostic = &json["diagnostics"][0];
    assert_eq!(diagnostic["code"], "TG0203");
    assert!(diagnostic["line"].as_u64().is_some_and(|line| line > 1));
    assert_eq!(
        gateway.statuses(&Request::get("/"), 3),
        [200, 200, 429],
        "the old limit, and its counters"
    );
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("tidegate_config_reload_success"), 0.0);
    let loaded_at = "tidegate_config_reload_timestamp_seconds";
    assert_eq!(
        metrics.sum(loaded_at),
        before.sum(loaded_at),
        "of the one that runs"
    );
    let log = eventually("the log to say so", || {
        let log = gateway.stderr();
        if log.contains("NOT reloaded") {
            Ok(log)
        } else {
            Err(log)
        }
    });
    assert!(log.contains("TG0203") && log.contains("fortnight"), "{log}");

    gateway.reconfigure(LIMITED);
    assert_eq!(
        gateway.metric("tidegate_config_reload_success"),
        1.0,
        "mended"
    );
}

#[test]
fn a_hangup_reloads() {
    let mut gateway = Gateway::with("").start();
    gateway.rewrite(LIMITED);
    gateway.signal("HUP");
    eventually_eq("the new limit", vec!["per_ip".to_owned()], || {
        gateway.get("/").limits()
    });
    eventually_eq("the report in the log", true, || {
        gateway.stderr().contains("limits +per_ip")
    });
    gateway.rewrite("nonsense = 1");
    gateway.signal("HUP");
    eventually_eq("the complaint", true, || {
        gateway.stderr().contains("NOT reloaded")
    });
    assert!(gateway.is_running());
    assert_eq!(gateway.get("/").limits(), ["per_ip"]);
}

#[test]
fn a_gateway_without_a_file_says_that_there_is_nothing_to_read_again() {
    let gateway = Gateway::run(&[
        "--to",
        "builtin:echo",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ]);
    let refused = gateway.reload();
    assert_eq!(refused.status, 422);
    assert!(
        refused.text().contains("without a file"),
        "{}",
        refused.text()
    );
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn a_reload_is_no_page_and_no_web_page_can_ask_for_it() {
    let gateway = Gateway::with("").start();
    let ask = |request: Request| {
        Client::connect(gateway.admin_address())
            .send(&request)
            .status
    };
    let post = || gateway.admin_request("POST", "/api/v1/reload");
    assert_eq!(ask(gateway.admin_request("GET", "/api/v1/reload")), 405);
    assert_eq!(ask(post()), 200, "curl -X POST, without a body");
    assert_eq!(ask(post().header("origin", "https://evil.example")), 403);
    let simple = post()
        .header("sec-fetch-site", "cross-site")
        .header("content-type", "text/plain");
    assert_eq!(ask(simple), 403);
    let rebound = Request::new("POST", "/api/v1/reload").header("host", "evil.example");
    assert_eq!(ask(rebound.header("connection", "close")), 421);
}

#[test]
fn counters_live_on() {
    let gateway = Gateway::with(LIMITED).start();
    assert_eq!(gateway.get("/").remaining("per_ip"), 2);
    gateway.reconfigure(&format!("{LIMITED}\n[response]\non = \"always\"\n"));
    assert_eq!(gateway.get("/").remaining("per_ip"), 1);
    gateway.reconfigure(&LIMITED.replace("burst = 3", "burst = 9"));
    assert_eq!(
        gateway.get("/").remaining("per_ip"),
        6,
        "three of nine are spent"
    );
}

#[test]
fn a_changed_rate_refills_nobody_and_locks_nobody_out() {
    let rate = |rate: &str| LIMITED.replace("1/h", rate).replace("burst = 3", "");
    let gateway = Gateway::with(&rate("10/h")).start();
    assert_eq!(
        gateway.statuses(&Request::get("/"), 8).last(),
        Some(&200),
        "eight of ten"
    );
    gateway.reconfigure(&rate("7/min"));
    let refused = gateway.get("/");
    assert_eq!(refused.status, 429, "eight of seven");
    let wait: u64 = refused
        .header("retry-after")
        .and_then(|wait| wait.parse().ok())
        .expect("a wait");
    assert!(wait <= 9, "{wait}: a seventh of a minute, not of an hour");
    gateway.reconfigure(&(rate("100/d") + "burst = 100\n"));
    assert_eq!(
        gateway.get("/").remaining("per_ip"),
        92,
        "seven, and this one"
    );
    let window = "algorithm = \"sliding_window\"\n";
    gateway.reconfigure(&(rate("100/d") + window));
    assert_eq!(gateway.get("/").remaining("per_ip"), 91);
}

/// Kubernetes mounts a ConfigMap this way: the file is a link through a linked folder, and a reload
/// swaps the folder's link.
#[test]
fn a_file_that_changes_is_taken_up_however_it_is_written() {
    let limited = |name: &str| LIMITED.replace("per_ip", name);
    let gateway = Gateway::with("").start();
    let applies = |name: &str| {
        eventually_eq(name, vec![name.to_owned()], || gateway.get("/").limits());
    };
    gateway.rewrite(&limited("renamed"));
    applies("renamed");

    let folder = gateway.folder();
    let file = folder.join("gateway.toml");
    let text = |name: &str| {
        let text = fs::read_to_string(&file).expect("it is there");
        text.replace(gateway.get("/").limits()[0].as_str(), name)
    };
    fs::write(&file, text("in_place")).expect("it is writable");
    applies("in_place");

    let version = |name: &str| {
        let version = folder.join(name);
        fs::create_dir(&version).expect("a new folder");
        fs::write(version.join("gateway.toml"), text(name)).expect("it is writable");
        symlink(&version, folder.join("..data_tmp")).expect("a new link");
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("it is swapped");
    };
    version("mounted");
    symlink("..data/gateway.toml", folder.join("tmp")).expect("a new link");
    fs::rename(folder.join("tmp"), &file).expect("it is swapped");
    applies("mounted");
    version("swapped");
    applies("swapped");
}

#[test]
fn a_key_file_that_changes_is_taken_up_and_a_broken_one_is_not() {
    const KEY: &str = "a-key-of-sixteen-or-more";
    let keys = |name: &str| format!("[keys.{name}]\nsha256 = \"{}\"\n", sha256_hex(KEY));
    let toml = "[[user]]\nfrom = \"api_key\"\nkeys_file = \"keys.toml\"\n";
    let origin = Origin::ok();
    let gateway = Gateway::with(toml)
        .upstream(&origin)
        .file("keys.toml", &keys("alice"))
        .start();
    let write = |text: &str| {
        fs::write(gateway.folder().join("keys.toml"), text).expect("it is writable");
    };
    let user = || {
        gateway.send(&Request::get("/").header("x-api-key", KEY));
        let seen = origin.requests();
        let user = seen.last().and_then(|request| request.header("x-user-id"));
        user.unwrap_or_default().to_owned()
    };
    assert_eq!(user(), "alice");
    write(&keys("bob"));
    eventually_eq("the new name", "bob".to_owned(), user);
    write("[keys.carol]\n");
    eventually_eq("the complaint", true, || {
        gateway.stderr().contains("NOT reloaded")
    });
    assert_eq!(user(), "bob");
    assert_eq!(gateway.metric("tidegate_config_reload_success"), 0.0);
    write(&keys("bob"));
    gateway.wait_for_metric("tidegate_config_reload_success", 1.0);
}

#[test]
fn a_file_is_left_alone_where_it_is_not_to_be_watched() {
    let unwatched = "[server]\nwatch_config = false\nworkers = 1\n";
    let gateway = Gateway::with(unwatched).start();
    gateway.rewrite(&format!("{unwatched}{LIMITED}"));
    // while two watched gateways reload in turn, this one would have reloaded, too
    for _ in 0..2 {
        let watched = Gateway::with("").start();
        watched.rewrite(LIMITED);
        eventually_eq("the new limit", vec!["per_ip".to_owned()], || {
            watched.get("/").limits()
        });
    }
    assert!(gateway.get("/").limits().is_empty());
}

#[test]
fn a_request_in_flight_ends_as_it_began() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with(LIMITED).upstream(&origin).start();
    let mut client = gateway.connect();
    let in_flight = thread::spawn(move || client.send(&Request::get("/slow")));
    origin.wait_for_requests(1);
    gateway.reconfigure(&format!("{ROUTE}limits = []\n"));
    gate.open();
    let response = in_flight.join().expect("the client's thread");
    assert_eq!(
        (response.status, response.limits()),
        (200, vec!["per_ip".to_owned()])
    );
    assert!(gateway.get("/").limits().is_empty());
}

#[test]
fn connections_to_an_upstream_that_did_not_change_are_kept() {
    let origin = Origin::ok();
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .start();
    assert_eq!(gateway.get("/").status, 200);
    gateway.reconfigure(&format!("[server]\nworkers = 1\n{LIMITED}"));
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(origin.connections(), 1);
}

#[test]
fn listeners_come_and_go_without_touching_the_others() {
    let listen = |address: &str| format!("[[listen]]\naddress = \"{address}\"\n");
    let gateway = Gateway::with(&listen("127.0.0.1:0")).start();
    let mut kept = gateway.connect();
    assert_eq!(kept.send(&Request::get("/")).status, 200);
    let free = crate::support::origin::nobody();
    let both = listen("127.0.0.1:0") + &listen(&free.to_string());
    let report = gateway.reconfigure(&both);
    assert_eq!(names(&report, "listeners", "added"), [free.to_string()]);
    let mut extra = Client::connect(free);
    assert_eq!(extra.send(&Request::get("/")).status, 200);
    assert_eq!(
        kept.send(&Request::get("/")).status,
        200,
        "an old connection on the other"
    );

    let report = gateway.reconfigure(&listen("127.0.0.1:0"));
    assert_eq!(names(&report, "listeners", "removed"), [free.to_string()]);
    let last = extra.send(&Request::get("/"));
    assert_eq!(
        (last.status, last.header("connection")),
        (200, Some("close"))
    );
    eventually("the address to be free", || {
        match TcpStream::connect(free) {
            Ok(_) => Err("a connection was taken".into()),
            Err(_) => Ok(()),
        }
    });
    assert_eq!(kept.send(&Request::get("/")).status, 200);
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn an_address_that_is_taken_refuses_the_whole_configuration() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let gateway = Gateway::with("").start();
    gateway.rewrite(&format!(
        "{LIMITED}[[listen]]\naddress = \"127.0.0.1:0\"\n[[listen]]\naddress = \"{address}\"\n"
    ));
    let refused = gateway.reload();
    assert_eq!(refused.status, 422);
    assert!(refused.text().contains(&address), "{}", refused.text());
    assert!(gateway.get("/").limits().is_empty(), "nothing of it holds");
}

#[test]
fn the_running_configuration_is_shown_without_its_passwords() {
    let gateway = Gateway::with(&format!(
        "{LIMITED}\n[upstream.origin]\nservers = [\"builtin:echo\"]\n"
    ))
    .start();
    let shown = gateway.admin("/api/v1/config").json();
    assert_eq!(shown["config"]["limit"]["per_ip"]["rate"], "1/h");
    let hash = shown["hash"].as_str().expect("a hash");
    assert_eq!(
        gateway.metric(&format!("tidegate_config_info{{hash=\"{hash}\"}}")),
        1.0
    );
}

/// 100 reloads that change limits, routes, fields and listeners under the full load of 64 clients.
/// Stops the load when the test ends, even by a panic, since the clients are joined.
struct EndOfLoad<'a>(&'a AtomicBool);

impl Drop for EndOfLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_hundred_reloads_under_load_fail_no_request_and_give_nothing_away() {
    const CLIENTS: usize = 64;
    const RELOADS: usize = 100;
    const BURST: usize = 2_000;
    let text = |turn: usize| {
        let on = if turn.is_multiple_of(2) {
            "always"
        } else {
            "rejected"
        };
        let other = 100_000 + turn;
        let free = if turn.is_multiple_of(3) {
            "[[listen]]\naddress = \"127.0.0.1:0\"\n"
        } else {
            ""
        };
        format!(
            "[server]\nwatch_config = false\n[gateway]\nlimits = [\"total\", \"turning\"]\n[limit.total]\nkey = []\nrate = \"1/h\"\nburst = {BURST}\n\
             [limit.turning]\nkey = [\"ip\"]\nrate = \"{other}/s\"\n[response]\non = \"{on}\"\n\
             [[listen]]\naddress = \"127.0.0.1:0\"\n{free}{ROUTE}[[route]]\nname = \"r{turn}\"\npath = \"/turn\"\nupstream = \"origin\"\n"
        )
    };
    let gateway = Gateway::with(&text(0)).start();
    let done = AtomicBool::new(false);
    let (admitted, asked) = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = gateway.connect();
                    let (mut admitted, mut asked) = (0, 0);
                    while !done.load(Relaxed) {
                        let status = client.send(&Request::get("/")).status;
                        assert!(matches!(status, 200 | 429), "{status}");
                        admitted += usize::from(status == 200);
                        asked += 1;
                    }
                    (admitted, asked)
                })
            })
            .collect();
        let end = EndOfLoad(&done);
        for turn in 1..=RELOADS {
            let report = gateway.reconfigure(&text(turn));
            assert_eq!(names(&report, "routes", "added"), [format!("r{turn}")]);
        }
        eventually_eq("all of the limit to be spent", true, || {
            gateway.metric(r#"tidegate_requests_total{code="200"}"#) >= BURST as f64
        });
        drop(end);
        let counts = clients
            .into_iter()
            .map(|client| client.join().expect("no request failed"));
        counts.fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1))
    });
    assert_eq!(admitted, BURST, "of {asked}");
    gateway.wait_for_metric("tidegate_requests_total", asked as f64);
    assert_eq!(gateway.metric("tidegate_panics_total"), 0.0);
}

#[test]
fn too_few_descriptors_are_said_once_and_again_when_that_changes() {
    let toml = |most: u32| format!("[server]\nmax_connections = {most}\n");
    let gateway = Gateway::with(&toml(100_000)).descriptors(512, 512).start();
    let said = || {
        gateway
            .stderr()
            .matches("too few for max_connections")
            .count()
    };
    for n in 0..3 {
        gateway.reconfigure(&format!(
            "{}[limit.a{n}]\nkey = []\nrate = \"1/s\"\n",
            toml(100_000)
        ));
    }
    gateway.reconfigure(&toml(90_000));
    eventually_eq("the change to be said", true, || {
        gateway.stderr().contains("max_connections = 90000")
    });
    assert_eq!(said(), 2, "{}", gateway.stderr());
}
