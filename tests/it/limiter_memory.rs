//! How much limiter memory one limit can use, and what remains for the clients of others.

use std::time::Duration;

use serde_json::Value;

use crate::support::{Gateway, Origin, raw};

const MAX_KEYS: usize = 16_000;

/// Clients choose the key of `signup`. Three more limits count by address, each with another
/// algorithm.
fn toml() -> String {
    format!(
        r#"
[server]
max_keys = {MAX_KEYS}
workers = 1
[client_ip]
trusted_proxies = ["127.0.0.0/8"]
[limit.signup]
key = ["query:email"]
rate = "3/d"
[limit.bucket]
key = ["ip"]
rate = "2/d"
burst = 2
[limit.window]
key = ["ip"]
rate = "3/d"
algorithm = "sliding_window"
[limit.log]
key = ["ip"]
rate = "3/d"
algorithm = "sliding_log"
[[route]]
name = "signup"
path = "/signup"
upstream = "origin"
limits = ["signup"]
[[route]]
name = "rest"
path = "/{{*rest}}"
upstream = "origin"
limits = ["bucket", "window", "log"]
"#
    )
}

/// Sends requests in sequence on one connection; counts the responses with 200 and 429.
fn pipelined(gateway: &Gateway, requests: impl Iterator<Item = String>) -> (usize, usize) {
    let mut requests: Vec<String> = requests.collect();
    let last = requests.pop().expect("there are some");
    requests.push(last.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n"));
    let all = requests.concat();
    let reply = raw::send(gateway.address(), all.as_bytes(), Duration::from_secs(30));
    let statuses = reply.statuses();
    assert_eq!(statuses.len(), requests.len());
    let count = |wanted: &str| statuses.iter().filter(|status| *status == wanted).count();
    (count("200"), count("429"))
}

fn signup(email: usize) -> String {
    format!("GET /signup?email=u{email} HTTP/1.1\r\nhost: a\r\n\r\n")
}

fn from(client: usize) -> String {
    let (high, low) = (client / 250, client % 250);
    format!("GET /x HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 10.1.{high}.{low}\r\n\r\n")
}

#[test]
fn a_limit_that_is_filled_with_invented_keys_takes_nothing_from_the_clients_of_others() {
    let origin = Origin::ok();
    let gateway = Gateway::with(&toml()).upstream(&origin).start();
    // a client of the other limits has spent one unit, an account its whole quota
    assert_eq!(pipelined(&gateway, [from(5_000)].into_iter()), (1, 0));
    assert_eq!(pipelined(&gateway, (0..4).map(|_| signup(0))), (3, 1));

    for batch in 0..40 {
        let emails = (1..=600).map(|n| signup(batch * 600 + n));
        pipelined(&gateway, emails);
    }
    let limit = gateway.look("/api/v1/limits/signup");
    let keys = limit["keys"].as_u64().expect("a number");
    assert!(limit["overflows"].as_u64() > Some(0), "{limit}");
    assert!((12_000..18_000).contains(&keys), "{keys}");
    assert!(gateway.metric("tidegate_keys{limit=\"signup\"}") > 12_000.0);

    // 1,000 new clients, each under all three limits at once
    for batch in 0..5 {
        let thrice = |client| (0..3).map(move |_| from(client));
        let asked = (batch * 200..(batch + 1) * 200).flat_map(thrice);
        assert_eq!(pipelined(&gateway, asked), (400, 200));
    }
    for name in ["bucket", "window", "log"] {
        let limit = gateway.look(&format!("/api/v1/limits/{name}"));
        assert_eq!(limit["overflows"], 0, "{name}");
        if name != "log" {
            assert!(limit["guaranteed_keys"].as_u64() >= Some(1_000), "{limit}");
        } else {
            assert_eq!(limit["guaranteed_keys"], Value::Null, "no other has logs");
        }
    }
    // and no client's usage is lost
    assert_eq!(pipelined(&gateway, (0..2).map(|_| from(5_000))), (1, 1));
    assert_eq!(pipelined(&gateway, (0..2).map(|_| signup(0))), (0, 2));
}
