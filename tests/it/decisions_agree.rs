//! All ways to decide a request agree: serving it, `/check`, and `explain`. Random requests take
//! all three, and must get the same verdict and the same charge from each limit.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Client, Gateway, Request, Response, random::Random, raw};

/// Requests per run. Buckets hardly refill meanwhile, so amounts compare exactly.
const REQUESTS: usize = 600;

const CONFIG: &str = r#"
    [admin]
    address = "127.0.0.1:0"
    check_identity_from = ["127.0.0.0/8"]
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [[user]]
    from = "header"
    header = "x-user-id"
    tier_header = "x-user-tier"
    [overload]
    max_in_flight = 1000
    reserve = { critical = 0, normal = 1 }

    [gateway]
    limits = ["all", "per_ip"]
    [limit.all]
    key = []
    rate = "400/d"
    burst = 400
    [limit.per_ip]
    key = ["ip"]
    rate = "90/d"
    burst = 90
    [limit.per_user]
    key = ["user"]
    rate = { default = "20/d", pro = "60/d" }
    exempt = { tiers = ["staff"] }
    [limit.windowed]
    key = ["user_or_ip", "route"]
    algorithm = "fixed_window"
    rate = "30/d"
    [limit.login]
    key = ["body:name"]
    rate = "12/d"
    burst = 12
    missing = "shared"
    [limit.strict_login]
    key = ["body:name"]
    rate = "40/d"
    burst = 40
    missing = "reject"
    [limit.tokens]
    key = ["header:x-token"]
    rate = "10/d"
    burst = 10
    missing = "reject"
    charge_rejected = true
    [limit.in_shadow]
    key = ["ip"]
    mode = "shadow"
    rate = "5/d"
    burst = 5
    [limit.failed]
    key = ["ip"]
    rate = "8/d"
    burst = 8
    count_status = [400, 413]
    [limit.slots]
    key = ["ip"]
    algorithm = "concurrency"
    limit = 2

    [[route]]
    name = "login"
    path = "/login"
    methods = ["POST"]
    upstream = "origin"
    limits = ["login", "failed"]
    max_body_size = "1KiB"
    [[route]]
    name = "strict"
    path = "/strict/{id}"
    upstream = "origin"
    limits = ["per_user", "strict_login", "slots"]
    cost = 2
    [[route]]
    name = "tokens"
    path = "/tokens"
    upstream = "origin"
    limits = ["tokens", "in_shadow"]
    [[route]]
    name = "shed"
    path = "/shed"
    upstream = "origin"
    priority = "low"
    [[route]]
    name = "other"
    path = "/other/{*rest}"
    upstream = "origin"
    limits = ["per_user", "windowed"]
    max_body_size = "2KiB"

    [[override]]
    limit = "per_user"
    user = "vip"
    rate = "100/d"
    [[override]]
    limit = "per_user"
    user = "closed"
    block = true
    [[override]]
    limit = "per_ip"
    ip = "203.0.113.7/32"
    exempt = true
"#;

/// All limits that a response may name, without those in shadow mode.
const LIMITS: [&str; 9] = [
    "all",
    "per_ip",
    "per_user",
    "windowed",
    "login",
    "strict_login",
    "tokens",
    "failed",
    "slots",
];

/// A client's request.
#[derive(Clone, Debug)]
struct Sent {
    method: &'static str,
    target: String,
    client: String,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Sent {
    fn random(random: &mut Random) -> Sent {
        let method = *random.pick(&["GET", "POST", "POST", "PUT"]);
        let target = *random.pick(&[
            "/login",
            "/login",
            "/login?name=alice",
            "/strict/1",
            "/strict/%32",
            "/tokens",
            "/tokens",
            "/shed",
            "/other/a/b?c=d",
            "/other/%2F",
            "/nowhere",
            "/other/../login",
        ]);
        let client = format!("203.0.113.{}", random.within(1, 8));
        let mut headers = Vec::new();
        if random.is(0.6) {
            let users = ["alice", "bob", "vip", "closed", "banned"];
            headers.push(("x-user-id", (*random.pick(&users)).to_owned()));
            if random.is(0.5) {
                let tiers = ["pro", "staff", "unheard-of"];
                headers.push(("x-user-tier", (*random.pick(&tiers)).to_owned()));
            }
        }
        if random.is(0.7) {
            headers.push(("x-token", (*random.pick(&["a", "b", "c"])).to_owned()));
        }
        let mut body = Vec::new();
        if method != "GET" && random.is(0.8) {
            let kinds = ["application/json", "application/x-www-form-urlencoded"];
            headers.push(("content-type", (*random.pick(&kinds)).to_owned()));
            if random.is(0.1) {
                headers.push(("content-encoding", "gzip".to_owned()));
            }
            let long = "y".repeat(1500);
            let longest = "y".repeat(300_000);
            let large = match target.starts_with("/strict") {
                // more than the gateway buffers before a decision, but within the route's bound
                true => format!(r#"{{"pad":"{longest}"}}"#),
                false => format!(r#"{{"pad":"{long}"}}"#),
            };
            body = random
                .pick(&[
                    r#"{"name":"alice"}"#.to_owned(),
                    r#"{"name":"bob"}"#.to_owned(),
                    r#"{"name":null}"#.to_owned(),
                    r#"{"name":"alice","name":"bob"}"#.to_owned(),
                    r#"{"name":"#.to_owned(),
                    "name=alice".to_owned(),
                    "name=alice&name=bob".to_owned(),
                    "other=1".to_owned(),
                    large,
                ])
                .clone()
                .into_bytes();
        }
        Sent {
            method,
            target: target.to_owned(),
            client,
            headers,
            body,
        }
    }

    fn with_headers(&self, mut request: Request) -> Request {
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body = self.body.clone();
        request
            .header("x-forwarded-for", &self.client)
            .header("connection", "close")
    }

    fn served_by(&self, gateway: &Gateway) -> Response {
        gateway.send(&self.with_headers(Request::new(self.method, &self.target)))
    }

    fn checked_by(&self, gateway: &Gateway) -> Response {
        let asked = Request::post("/check", "")
            .header("host", "a.example")
            .header("x-forwarded-method", self.method)
            .header("x-forwarded-uri", &self.target);
        Client::connect(gateway.admin_address()).send(&self.with_headers(asked))
    }

    fn explained_by(&self, gateway: &Gateway) -> Option<Value> {
        // the admin listener accepts smaller bodies than a client may send
        if self.body.len() > 10_000 {
            return None;
        }
        let forwarded = ("x-forwarded-for", self.client.clone());
        let mut headers = self.headers.clone();
        headers.push(forwarded);
        headers.push(("host", "a.example".to_owned()));
        let body = String::from_utf8(self.body.clone()).expect("a text");
        let described = json!({
            "method": self.method, "url": self.target, "headers": headers,
            "body": Some(body).filter(|body| !body.is_empty()),
        });
        Some(gateway.change("POST", "/api/v1/explain", &described))
    }
}

/// Remaining units of each limit in the response.
fn remaining(response: &Response) -> Vec<(&'static str, i64)> {
    let left = |limit| Some((limit, response.parameter("ratelimit", limit, "r")?));
    LIMITS.into_iter().filter_map(left).collect()
}

fn gateway() -> Gateway {
    let gateway = Gateway::with(CONFIG).start();
    let ban = "/api/v1/limits/per_user/keys/user=banned/ban";
    gateway.change("POST", ban, &json!({ "for": "1h" }));
    let boost = "/api/v1/limits/per_ip/keys/ip=203.0.113.3%2F32/boost";
    gateway.change("POST", boost, &json!({ "amount": 7, "for": "1h" }));
    gateway
}

#[test]
fn a_request_is_decided_alike_served_checked_and_explained() {
    let (serving, checking) = (gateway(), gateway());
    let mut random = Random::new(16);
    let mut seen = std::collections::BTreeMap::<u16, usize>::new();
    for index in 0..REQUESTS {
        let sent = Sent::random(&mut random);
        let explained = sent.explained_by(&serving);
        let served = sent.served_by(&serving);
        let checked = sent.checked_by(&checking);
        let label = format!("request {index}: {sent:.200?}");
        *seen.entry(served.status).or_default() += 1;
        assert_eq!(served.status, checked.status, "{label}");
        assert_eq!(remaining(&served), remaining(&checked), "{label}");
        if let Some(explained) = explained {
            agrees(&explained, &served, &label);
        }
    }
    for status in [200, 400, 404, 405, 413, 429, 503] {
        let count = seen.get(&status).copied().unwrap_or(0);
        assert!(count >= 3, "only {count} answers of {status}: {seen:?}");
    }
    for key in ["ip=203.0.113.1%2F32", "ip=203.0.113.3%2F32"] {
        for limit in ["per_ip", "in_shadow", "failed"] {
            let path = format!("/api/v1/limits/{limit}/keys/{key}");
            let left = |gateway: &Gateway| gateway.look(&path)["remaining"].clone();
            assert_eq!(left(&serving), left(&checking), "{limit} of {key}");
        }
    }
}

/// Compares an explanation with the response served right after it.
fn agrees(explained: &Value, served: &Response, label: &str) {
    let answer = &explained["answer"];
    let status = match answer["forwarded"] == json!(true) {
        true => 200,
        false => answer["status"].as_u64().expect("a status"),
    };
    assert_eq!(status, u64::from(served.status), "{label}\n{answer}");
    if served.status != 200 {
        return;
    }
    let cost = explained["request"]["cost"].as_i64().expect("a cost");
    for limit in explained["limits"].as_array().expect("a list") {
        let name = limit["name"].as_str().expect("a name");
        if limit["outcome"] == "admitted" && !["failed", "in_shadow"].contains(&name) {
            let before = limit["remaining"].as_i64().expect("a number");
            assert_eq!(before - cost, served.remaining(name), "{name}, {label}");
        }
    }
}

#[test]
fn a_body_that_breaks_off_is_charged_alike_served_and_checked() {
    let (serving, checking) = (gateway(), gateway());
    let broken = |line: &str, more: &str| {
        format!(
            "{line} HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\nX-Forwarded-For: 203.0.113.2\r\n{more}\
             Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{{\"nam\r\nzz\r\n"
        )
    };
    let idle = Duration::from_secs(10);
    let served = broken("POST /login", "");
    let served = raw::send(serving.address(), served.as_bytes(), idle);
    assert_eq!(served.statuses(), ["400"], "{}", served.text());
    let more = "X-Forwarded-Method: POST\r\nX-Forwarded-Uri: /login\r\n";
    let checked = broken("POST /check", more);
    raw::send(checking.admin_address(), checked.as_bytes(), idle);
    let left = |gateway: &Gateway| {
        ["per_ip", "failed"].map(|limit| {
            let path = format!("/api/v1/limits/{limit}/keys/ip=203.0.113.2%2F32");
            gateway.look(&path)["remaining"].clone()
        })
    };
    assert_eq!(left(&serving), [json!(89), json!(7)]);
    assert_eq!(left(&checking), left(&serving));
}
