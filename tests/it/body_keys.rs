//! Limits keyed by a body field: the bucket that counts a request, the cost of a failed body, and
//! the memory for buffered bodies.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::{Value, json};

use crate::support::{
    Client, Gateway, Request, eventually,
    raw::{self, Reply},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Number of vectors in `tests/vectors/body_key_vectors.json`.
const CASES: usize = 220;

/// One route per field in the vectors; no bucket runs out.
const FIELDS: [&str; 3] = ["username", "user_name", "user.name"];

fn by_field() -> String {
    let limited = |field: &str| {
        format!(
            "[limit.\"{field}\"]\nkey = [\"body:{field}\"]\nrate = \"1000/h\"\nburst = 1000\nmissing = \"shared\"\n\
             [[route]]\nname = \"{field}\"\npath = \"/{field}\"\nupstream = \"origin\"\nlimits = [\"{field}\"]\n"
        )
    };
    let limits: String = FIELDS.map(limited).concat();
    format!("[log]\naccess = \"all\"\n[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n{limits}")
}

/// Text to bytes, one byte per character.
fn bytes(text: &str) -> Vec<u8> {
    let byte = |character| u8::try_from(u32::from(character)).expect("a byte");
    text.chars().map(byte).collect()
}

struct Case {
    id: String,
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    bucket: String,
}

fn cases() -> Vec<Case> {
    let cases = include_str!("../vectors/body_key_vectors.json");
    let cases: Vec<Value> = serde_json::from_str(cases).expect("the cases are JSON");
    assert_eq!(cases.len(), CASES, "the number of cases");
    let case = |case: &Value| {
        let text = |name: &str, default: &str| case[name].as_str().unwrap_or(default).to_owned();
        let query = case["query"].as_str().map(|query| format!("?{query}"));
        let headers = case["headers"].as_array().expect("a list of headers");
        let pair = |pair: &Value| {
            let [name, value] = [0, 1].map(|at| pair[at].as_str().expect("a text").to_owned());
            (name, value)
        };
        Case {
            id: text("id", ""),
            method: text("method", "POST"),
            target: format!(
                "/{}{}",
                text("field", "username"),
                query.unwrap_or_default()
            ),
            headers: headers.iter().map(pair).collect(),
            body: bytes(&text("body", "").replace("{PAD}", &"y".repeat(300_000))),
            bucket: text("bucket", ""),
        }
    };
    cases.iter().map(case).collect()
}

impl Case {
    /// The bytes as a client sends them, or as a proxy queries `/check`.
    fn wire(&self, line: &str, more: &str) -> Vec<u8> {
        let headers = self.headers.iter();
        let headers: String = headers
            .map(|(name, value)| format!("{name}: {value}\r\n"))
            .collect();
        let length = match self.body.is_empty() {
            true => String::new(),
            false => format!("Content-Length: {}\r\n", self.body.len()),
        };
        let head = format!(
            "{line} HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n{more}{headers}{length}\r\n"
        );
        [head.as_bytes(), &self.body].concat()
    }

    fn sent_to(&self, gateway: &Gateway) -> String {
        let line = format!("{} {}", self.method, self.target);
        let reply = raw::send(gateway.address(), &self.wire(&line, ""), PATIENCE);
        key_of(gateway, &reply, &self.id)
    }

    fn checked_by(&self, gateway: &Gateway) -> String {
        let more = format!(
            "X-Forwarded-Method: {}\r\nX-Forwarded-Uri: {}\r\nX-Forwarded-For: 192.0.2.1\r\n",
            self.method, self.target
        );
        let asked = self.wire("POST /check", &more);
        let reply = raw::send(gateway.admin_address(), &asked, PATIENCE);
        key_of(gateway, &reply, &self.id)
    }

    /// `None` if the body is not text, or too long to describe.
    fn explained_by(&self, gateway: &Gateway) -> Option<String> {
        let body = String::from_utf8(self.body.clone()).ok()?;
        if body.len() > 10_000 {
            return None;
        }
        let described = json!({
            "method": self.method, "url": self.target, "headers": self.headers,
            "body": Some(body).filter(|body| !body.is_empty()),
        });
        let explained = gateway.change("POST", "/api/v1/explain", &described);
        let key = explained["limits"][0]["key"].as_str();
        Some(
            key.unwrap_or_else(|| panic!("{}: {explained}", self.id))
                .to_owned(),
        )
    }
}

/// The key in the access line of a request, without the name of its part.
fn key_of(gateway: &Gateway, reply: &Reply, id: &str) -> String {
    let text = reply.text();
    assert!(text.starts_with("HTTP/1.1 200"), "{id}: {text}");
    let request_id = text
        .lines()
        .find_map(|line| line.strip_prefix("x-request-id: "))
        .unwrap_or_else(|| panic!("{id}: {text}"))
        .to_owned();
    eventually("the access line", || {
        let output = gateway.output();
        let line = output.lines().find(|line| line.contains(&request_id));
        let line: Value = serde_json::from_str(line.ok_or("not yet")?).map_err(|_| "half of it")?;
        let key = line["key"].as_str().ok_or(format!("{line}"))?;
        Ok::<_, String>(key.to_owned())
    })
}

fn value(key: &str) -> &str {
    key.split_once('=').map_or(key, |(_, value)| value)
}

#[test]
fn every_body_vector_is_counted_in_the_bucket_that_it_lists_by_all_three_paths() {
    let gateway = Gateway::with(&by_field())
        .upstream_at("builtin:echo")
        .start();
    let mut wrong = Vec::new();
    let named = |field: &str, name: &str| {
        let case = Case {
            id: format!("{field}={name}"),
            method: "POST".to_owned(),
            target: format!("/{field}"),
            headers: vec![(
                "Content-Type".into(),
                "application/x-www-form-urlencoded".into(),
            )],
            body: format!("{field}={name}").into_bytes(),
            bucket: String::new(),
        };
        case.sent_to(&gateway)
    };
    let mut known = BTreeMap::new();
    for case in cases() {
        let path = case.target.split('?').next().unwrap_or_default();
        let field = path.trim_start_matches('/').to_owned();
        // any other listed bucket is that of a name
        let name = match &*case.bucket {
            "unclear" | "none" | "other" => "alice".to_owned(),
            name => name.to_owned(),
        };
        let key = known
            .entry((field, name.clone()))
            .or_insert_with_key(|(field, name)| named(field, name));
        let live = case.sent_to(&gateway);
        let bucket = match value(&live) {
            "?" => "unclear",
            "-" => "none",
            _ if live == *key => &name,
            _ => "other",
        };
        let checked = case.checked_by(&gateway);
        let explained = case.explained_by(&gateway).unwrap_or_else(|| live.clone());
        if bucket != case.bucket || checked != live || explained != live {
            let (id, listed) = (&case.id, &case.bucket);
            wrong.push(format!("{id}: {bucket}, listed {listed}; live {live}, /check {checked}, explain {explained}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Two buckets, by address and by name; bodies are bounded to 1,000 bytes.
const LOGIN: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [limit.address]
    key = ["ip"]
    rate = "1/h"
    burst = 3
    [limit.name]
    key = ["body:username"]
    rate = "1/h"
    burst = 3
    [[route]]
    name = "login"
    path = "/login"
    upstream = "origin"
    limits = ["address", "name"]
    max_body_size = "1000B"
    [[listen]]
    address = "127.0.0.1:0"
    body_timeout = "1s"
"#;

const ADMITTED: &str = r#"tidegate_decisions_total{limit="name",outcome="admitted"}"#;

/// The status of raw bytes sent from an address.
fn status(gateway: &Gateway, from: &str, rest: &str) -> String {
    let head = format!(
        "POST /login HTTP/1.1\r\nHost: a.example\r\nX-Forwarded-For: {from}\r\nContent-Type: application/json\r\n{rest}"
    );
    let reply = raw::send(gateway.address(), head.as_bytes(), PATIENCE);
    reply.statuses().first().cloned().unwrap_or_default()
}

#[test]
fn a_body_that_fails_is_charged_and_then_refused() {
    let long = "x".repeat(2_000);
    let too_large = format!("Content-Length: 2000\r\n\r\n{long}");
    let too_large_chunked = format!("Transfer-Encoding: chunked\r\n\r\n7d0\r\n{long}\r\n0\r\n\r\n");
    let broken = "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n\r\n";
    let late = "Content-Length: 10\r\n\r\n{";
    for (what, rest, refused) in [
        ("too large", too_large.as_str(), "413"),
        ("too large in chunks", &too_large_chunked, "413"),
        ("broken", broken, "400"),
        ("late", late, "408"),
    ] {
        let gateway = Gateway::with(LOGIN).upstream_at("builtin:echo").start();
        for count in 1..=3 {
            assert_eq!(status(&gateway, "192.0.2.1", rest), refused, "{what}");
            gateway.wait_for_metric(ADMITTED, f64::from(count));
        }
        assert_eq!(
            status(&gateway, "192.0.2.1", rest),
            "429",
            "{what}: the address"
        );
        assert_eq!(
            status(&gateway, "192.0.2.2", rest),
            "429",
            "{what}: what is unclear"
        );
        let clear = "Content-Length: 20\r\nConnection: close\r\n\r\n{\"username\":\"alice\"}";
        assert_eq!(
            status(&gateway, "192.0.2.2", clear),
            "200",
            "{what}: others go on"
        );
    }
}

/// One limit for each place of a value, each 3 requests.
fn by_place() -> String {
    let places = ["body:name", "query:name", "cookie:name", "param:name"];
    let limited = |place: &str| {
        let name = place.replace(':', "_");
        format!(
            "[limit.{name}]\nkey = [\"{place}\"]\nrate = \"3/h\"\nburst = 3\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}/{{name}}\"\nupstream = \"origin\"\nlimits = [\"{name}\"]\n"
        )
    };
    places.map(limited).concat()
}

/// How many of these requests are admitted.
fn admitted(gateway: &Gateway, requests: impl Iterator<Item = Request>) -> usize {
    let sent = |request: Request| Client::connect(gateway.address()).send(&request);
    let statuses = requests.map(|request| sent(request).status);
    statuses.filter(|status| *status == 200).count()
}

/// One name, in the spellings that MySQL's default collation equates.
fn spellings_of_alice() -> Vec<String> {
    let marks = ('\u{730}'..='\u{73f}').chain('\u{7eb}'..='\u{7f2}');
    let marked = marks.map(|mark| format!("alice{mark}\u{74a}"));
    let others = [
        "al\u{640}ice",
        "alice\u{70f}",
        "\u{600}alice",
        "ali\u{fff9}ce",
        "\u{363}lic\u{364}",
        "ALI\u{368}E",
    ];
    marked.chain(others.map(str::to_owned)).collect()
}

#[test]
fn spellings_that_a_collation_equates_share_one_bucket_in_every_place() {
    let gateway = Gateway::with(&by_place())
        .upstream_at("builtin:echo")
        .start();
    let names = spellings_of_alice();
    assert_eq!(names.len(), 30);
    let escaped = |name: &str| -> String {
        let bytes = name.bytes();
        bytes.map(|byte| format!("%{byte:02X}")).collect()
    };
    let json = |name: &Value| {
        Request::post("/body_name/x", json!({ "name": name }).to_string())
            .header("content-type", "application/json")
    };
    let body = names.iter().map(|name| json(&json!(name)));
    assert_eq!(admitted(&gateway, body), 3, "body");
    let query = names.iter().map(|name| {
        let target = format!("/query_name/x?name={}", escaped(name));
        Request::get(&target)
    });
    assert_eq!(admitted(&gateway, query), 3, "query");
    let cookie = names.iter().map(|name| {
        Request::get("/cookie_name/x").header("cookie", &format!("name={}", escaped(name)))
    });
    assert_eq!(admitted(&gateway, cookie), 3, "cookie");
    let param = names.iter().map(|name| {
        let target = format!("/param_name/{}", escaped(name));
        Request::get(&target)
    });
    assert_eq!(admitted(&gateway, param), 3, "param");
    let zeros = [
        '\u{660}', '\u{6f0}', '\u{7c0}', '\u{966}', '\u{e50}', '\u{1040}',
    ];
    let digits = zeros.iter().map(|zero| {
        let digit = |more| char::from_u32(u32::from(*zero) + more).expect("a digit");
        json(&json!(format!("user{}{}", digit(1), digit(2))))
    });
    assert_eq!(admitted(&gateway, digits), 3, "user12");
}

#[test]
fn integers_that_javascript_reads_as_one_share_two_buckets() {
    let gateway = Gateway::with(&by_place())
        .upstream_at("builtin:echo")
        .start();
    let near = 9_223_372_036_854_775_508_u64..=9_223_372_036_854_776_108;
    let bodies = near.map(|id| {
        Request::post("/body_name/x", format!("{{\"name\":{id}}}"))
            .header("content-type", "application/json")
    });
    // 2^63 itself, once, and three of the others
    assert_eq!(admitted(&gateway, bodies), 4);
}

#[test]
fn live_check_and_explain_agree_on_a_body_that_is_too_large() {
    let long = "x".repeat(2_000);
    for kind in [
        "application/json",
        "text/plain",
        "application/x-www-form-urlencoded",
    ] {
        let gateway = Gateway::with(LOGIN).upstream_at("builtin:echo").start();
        let described = json!({
            "method": "POST", "url": "/login", "headers": { "content-type": kind, "x-forwarded-for": "192.0.2.1" },
            "body": long,
        });
        let request = Request::post("/login", long.clone()).header("content-type", kind);
        let check = Request::post("/check", long.clone())
            .header("content-type", kind)
            .header("x-forwarded-uri", "/login")
            .header("x-forwarded-for", "192.0.2.1");
        for (live, left) in [(true, 3), (false, 2), (true, 1), (false, 0)] {
            let explained = gateway.change("POST", "/api/v1/explain", &described);
            let (status, keys) = match left {
                0 => (429, [1, 1]),
                _ => (413, [1, 1]),
            };
            assert_eq!(
                explained["answer"]["status"], status,
                "{kind} {left}: {explained}"
            );
            let limits = explained["limits"].as_array().expect("a list");
            assert_eq!(limits.len(), keys.len(), "{kind}: {explained}");
            assert_eq!(limits[1]["key"], "body:username=?", "{kind}: {explained}");
            let answered = match live {
                true => gateway.send(&request.clone().header("x-forwarded-for", "192.0.2.1")),
                false => Client::connect(gateway.admin_address()).send(&check),
            };
            assert_eq!(answered.status, status, "{kind} {left}");
        }
    }
}

#[test]
fn a_request_that_another_limit_refuses_is_refused_before_its_body_is_read() {
    let gateway = Gateway::with(LOGIN).upstream_at("builtin:echo").start();
    let clear = "Content-Length: 20\r\nConnection: close\r\n\r\n{\"username\":\"alice\"}";
    for name in 1..=3 {
        let other = clear.replace("alice", &format!("user{name}"));
        assert_eq!(status(&gateway, "192.0.2.1", &other), "200");
    }
    // no body byte arrives, and the gateway does not send 100 Continue
    let waits = "Content-Length: 20\r\nExpect: 100-continue\r\n\r\n";
    assert_eq!(status(&gateway, "192.0.2.1", waits), "429");
    // no limit was charged
    for _ in 0..3 {
        assert_eq!(status(&gateway, "192.0.2.2", clear), "200");
    }
    let described = json!({
        "method": "POST", "url": "/login", "body": "{\"username\":\"alice\"}",
        "headers": { "content-type": "application/json", "x-forwarded-for": "192.0.2.1" },
    });
    let explained = gateway.change("POST", "/api/v1/explain", &described);
    let text = explained["text"].as_str().expect("a text");
    assert!(text.contains("before its body is read"), "{text}");
    assert_eq!(explained["answer"]["status"], 429, "{text}");
}

/// A client in 192.0.2.0/24 that sends `count` equal chunks, but not the last chunk.
fn unfinished(address: SocketAddr, number: usize, chunk: &str, count: usize) -> TcpStream {
    let mut client = raw::open(address);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: a.example\r\nX-Forwarded-For: 192.0.2.{number}\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\n\r\n"
    );
    client.write_all(head.as_bytes()).expect("the head leaves");
    let chunk = format!("{:x}\r\n{chunk}\r\n", chunk.len());
    // the connection of a rejected client is already closed
    let _ = client.write_all(chunk.repeat(count).as_bytes());
    client
}

const READS: &str = r#"
    [server]
    workers = 2
    max_body_buffer = "4MiB"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [gateway]
    limits = ["name"]
    [limit.name]
    key = ["body:name"]
    rate = "10000/h"
    burst = 10000
"#;

const IN_USE: &str = "tidegate_body_buffer_bytes";
const REFUSED: &str = "tidegate_body_buffer_refused_total";

#[test]
fn bodies_that_are_read_ahead_share_one_bound_and_give_it_back() {
    let gateway = Gateway::with(READS).upstream_at("builtin:echo").start();
    // each buffer grows to 256 KiB: 4 MiB has room for about 15
    let mut clients: Vec<_> = (0..24)
        .map(|number| unfinished(gateway.address(), number, &" ".repeat(1000), 250))
        .collect();
    eventually("as many as fit are read", || {
        let (used, refused) = (gateway.metric(IN_USE), gateway.metric(REFUSED));
        assert!(used <= 4.0 * 1_048_576.0, "{used}");
        match refused >= 8.0 && used >= 2.0 * 1_048_576.0 {
            true => Ok(()),
            false => Err(format!("{used} bytes in use, {refused} refused")),
        }
    });
    let mut answers = BTreeMap::new();
    for client in &mut clients {
        // the connection of a rejected client is already closed
        let _ = client.write_all(b"2\r\n{}\r\n0\r\n\r\n");
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut answer = [0; 12];
        let read = client.read_exact(&mut answer);
        let answer = read.map(|()| String::from_utf8_lossy(&answer[9..]).into_owned());
        *answers.entry(answer.unwrap_or_default()).or_insert(0) += 1;
    }
    assert!(
        answers.get("200").is_some_and(|served| *served >= 8),
        "{answers:?}"
    );
    assert!(
        answers.get("503").is_some_and(|refused| *refused >= 1),
        "{answers:?}"
    );
    drop(clients);
    gateway.wait_for_metric(IN_USE, 0.0);
    let small = Request::post("/", "{}").header("content-type", "application/json");
    assert_eq!(gateway.send(&small).status, 200);
}

#[test]
fn one_address_leaves_room_for_the_bodies_of_others() {
    let toml = READS.replace("4MiB", "16MiB");
    let gateway = Gateway::with(&toml).upstream_at("builtin:echo").start();
    let hoarding: Vec<_> = (0..40)
        .map(|_| unfinished(gateway.address(), 1, &" ".repeat(1000), 250))
        .collect();
    eventually("its part is used", || {
        let (used, refused) = (gateway.metric(IN_USE), gateway.metric(REFUSED));
        assert!(used <= 2.0 * 1_048_576.0, "{used}: an eighth is its part");
        match refused >= 20.0 && used >= 1.0 * 1_048_576.0 {
            true => Ok(()),
            false => Err(format!("{used} bytes in use, {refused} refused")),
        }
    });
    let other = Request::post("/", "{}")
        .header("content-type", "application/json")
        .header("x-forwarded-for", "192.0.2.2");
    assert_eq!(gateway.send(&other).status, 200);
    drop(hoarding);
    gateway.wait_for_metric(IN_USE, 0.0);
}

#[test]
fn twenty_addresses_leave_room_for_the_bodies_of_others() {
    let toml = READS.replace("4MiB", "16MiB");
    let gateway = Gateway::with(&toml).upstream_at("builtin:echo").start();
    let mut hoarding = Vec::new();
    for number in 1..=20 {
        for _ in 0..8 {
            hoarding.push(unfinished(
                gateway.address(),
                number,
                &" ".repeat(1000),
                250,
            ));
        }
    }
    eventually("their parts are used", || {
        match (gateway.metric(IN_USE), gateway.metric(REFUSED)) {
            (used, refused) if used >= 8.0 * 1_048_576.0 && refused >= 60.0 => Ok(()),
            (used, refused) => Err(format!("{used} bytes in use, {refused} refused")),
        }
    });
    let other = Request::post("/", "{}")
        .header("content-type", "application/json")
        .header("x-forwarded-for", "198.51.100.1");
    assert_eq!(gateway.send(&other).status, 200);
    drop(hoarding);
    gateway.wait_for_metric(IN_USE, 0.0);
}

#[test]
fn a_body_in_pieces_of_one_byte_takes_no_more_memory_than_its_bytes() {
    let toml = READS.replace("4MiB", "16MiB");
    let gateway = Gateway::with(&toml).upstream_at("builtin:echo").start();
    let small = Request::post("/", "{}").header("content-type", "application/json");
    assert_eq!(gateway.send(&small).status, 200);
    let before = gateway.peak_memory_bytes();
    // this framing takes 1.5 MB on the wire for a body of 256,000 bytes, and once took 26 to 35 MiB
    // of memory
    let clients: Vec<_> = (0..6)
        .map(|number| unfinished(gateway.address(), number, " ", 200_000))
        .collect();
    gateway.wait_for_metric(IN_USE, 6.0 * 262_144.0);
    let more = gateway.peak_memory_bytes() - before;
    assert!(more < 32 << 20, "{more} bytes more");
    assert!(gateway.metric(REFUSED) < 0.5);
    drop(clients);
    gateway.wait_for_metric(IN_USE, 0.0);
}
