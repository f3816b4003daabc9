//! Detection of unconfigured proxies: logged once, counted every time.

use crate::support::{Gateway, Request, eventually};

const UNNAMED: &str =
    r#"tidegate_identity_rejected_total{source="client_ip",kind="unnamed_proxy"}"#;
const SAYS_UNNAMED: &str = "an untrusted private address sends x-forwarded-for";
const SAYS_DOMINANT: &str = "one key makes more than 80 % of the requests";

const PER_IP: &str =
    "[gateway]\nlimits = [\"many\"]\n[limit.many]\nkey = [\"ip\"]\nrate = \"100000/s\"\n";

fn said(gateway: &Gateway, what: &str) -> usize {
    gateway.stderr().matches(what).count()
}

#[test]
fn a_forwarding_header_from_a_private_address_that_is_not_trusted_is_warned_of_once() {
    let gateway = Gateway::with(PER_IP).start();
    let forwarded = Request::get("/").header("x-forwarded-for", "198.51.100.7");
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(gateway.metric(UNNAMED) as u64, 0, "without the header");
    assert_eq!(gateway.statuses(&forwarded, 20), [200; 20]);
    for _ in 0..5 {
        // on its own connection, perhaps of another worker
        assert_eq!(gateway.send(&forwarded).status, 200);
    }
    assert_eq!(gateway.metric(UNNAMED) as u64, 25);
    let log = eventually("the warning", || match said(&gateway, SAYS_UNNAMED) {
        0 => Err(gateway.stderr()),
        _ => Ok(gateway.stderr()),
    });
    assert_eq!(said(&gateway, SAYS_UNNAMED), 1, "{log}");
    assert!(
        log.contains("client_ip.trusted_proxies") && log.contains("127.0.0.1"),
        "{log}"
    );
}

#[test]
fn who_is_trusted_or_cannot_be_confused_is_not_suspected() {
    for toml in [
        "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n".to_owned() + PER_IP,
        "[client_ip]\nheader = \"none\"\n".to_owned() + PER_IP,
        PER_IP.replace("[\"ip\"]", "[]"),
    ] {
        let gateway = Gateway::with(&toml).start();
        let forwarded = Request::get("/").header("x-forwarded-for", "198.51.100.7");
        assert_eq!(gateway.statuses(&forwarded, 5), [200; 5]);
        assert_eq!(gateway.metric(UNNAMED) as u64, 0, "{toml}");
    }
}

#[test]
fn a_key_with_nearly_all_of_the_traffic_is_warned_of_once() {
    let dominant = r#"tidegate_dominant_keys_total{limit="many"}"#;
    let gateway = Gateway::with(&format!("[server]\nworkers = 1\n{PER_IP}")).start();
    let mut client = gateway.connect();
    // a count needs about 320 samples, one of seven requests each
    for _ in 0..5_000 {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    assert!(gateway.metric(dominant) >= 2.0);
    eventually("the warning", || match said(&gateway, SAYS_DOMINANT) {
        0 => Err(gateway.stderr()),
        _ => Ok(()),
    });
    assert_eq!(said(&gateway, SAYS_DOMINANT), 1);
    assert!(
        gateway.stderr().contains("ip=127.0.0.1/32"),
        "{}",
        gateway.stderr()
    );
}

#[test]
fn keys_that_share_the_traffic_are_not_warned_of() {
    let toml = PER_IP.replace("[\"ip\"]", "[\"header:x-device\"]");
    let gateway = Gateway::with(&format!("[server]\nworkers = 1\n{toml}")).start();
    let mut client = gateway.connect();
    for n in 0..2_600 {
        let device = if n % 4 == 0 { "a" } else { "b" };
        let request = Request::get("/").header("x-device", device);
        assert_eq!(client.send(&request).status, 200);
    }
    assert_eq!(gateway.metric("tidegate_dominant_keys_total") as u64, 0);
    assert_eq!(said(&gateway, SAYS_DOMINANT), 0);
}
