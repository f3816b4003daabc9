//! Users from JSON Web Tokens: accepted tokens, their claims, and the cache of published keys.

use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
    thread,
};

use jsonwebtoken::Algorithm;
use serde_json::json;

use crate::support::{
    Gateway, Origin, Request, Response, eventually,
    gateway::Builder,
    tokens::{Signer, encode, in_seconds, jwks},
    wait::lock,
};

/// Two requests per minute and user, more for some; ten per address.
const LIMITS: &str = r#"
[limit.per_ip]
key = ["ip"]
rate = "10/h"
[limit.per_user]
key = ["user"]
rate = { default = "2/h", pro = "4/h" }
[limit.per_tenant]
key = ["tenant"]
rate = "5/h"
[limit.per_device]
key = ["claim:device.id"]
rate = "1/h"
[gateway]
limits = []
"#;

fn bearer(token: &str) -> Request {
    Request::get("/").header("authorization", &format!("Bearer {token}"))
}

/// Statuses of `count` requests with a token.
fn statuses(gateway: &Gateway, token: &str, count: usize) -> Vec<u16> {
    gateway.statuses(&bearer(token), count)
}

/// A gateway that verifies tokens with a key file.
fn gateway(keys: &str, limits: &[&str], file: (&str, &str)) -> Builder {
    let route = format!(
        "[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"origin\"\nlimits = {limits:?}\n"
    );
    let user = format!(
        "[[user]]\nfrom = \"jwt\"\nissuer = \"https://issuer.example\"\naudience = \"api\"\n{keys}\n"
    );
    let limits = limits_of(limits);
    Gateway::with(&format!("{user}{limits}{route}")).file(file.0, file.1)
}

/// Only these limits, since the gateway warns of unused ones.
fn limits_of(wanted: &[&str]) -> String {
    let tables = LIMITS.split("[limit.").skip(1).map(|table| {
        let end = table.find("[gateway]").unwrap_or(table.len());
        format!("[limit.{}", &table[..end])
    });
    tables
        .filter(|table| {
            wanted
                .iter()
                .any(|name| table.starts_with(&format!("[limit.{name}]")))
        })
        .collect()
}

fn claims(user: &str) -> serde_json::Value {
    json!({ "iss": "https://issuer.example", "aud": "api", "sub": user })
}

fn assert_invalid_token(response: &Response) {
    assert_eq!(response.status, 401, "{}", response.text());
    let challenge = response.header("www-authenticate").unwrap_or_default();
    assert!(
        challenge.starts_with(r#"Bearer error="invalid_token""#),
        "{challenge}"
    );
}

#[test]
fn every_algorithm_names_a_user_by_key_set_and_by_a_file_of_its_own() {
    let origin = Origin::ok();
    for algorithm in [
        Algorithm::HS256,
        Algorithm::HS384,
        Algorithm::HS512,
        Algorithm::RS256,
        Algorithm::PS384,
        Algorithm::ES256,
        Algorithm::ES384,
        Algorithm::EdDSA,
    ] {
        let signer = Signer::new(algorithm, "k1");
        let name = format!("{algorithm:?}");
        let own = if name.starts_with("HS") {
            "secret_file"
        } else {
            "public_key_file"
        };
        for (kind, text) in [("jwks_file", jwks(&[&signer])), (own, signer.file.clone())] {
            let keys = format!("{kind} = \"keys\"\nalgorithms = [\"{name}\"]");
            let gateway = gateway(&keys, &[], ("keys", &text))
                .upstream(&origin)
                .start();
            let response = gateway.send(&bearer(&signer.token(&claims("alice"))));
            assert_eq!(
                response.status,
                200,
                "{name} by {kind}: {}",
                response.text()
            );
            let seen = origin.requests();
            let seen = seen.last().expect("it was sent on");
            assert_eq!(seen.header("x-user-id"), Some("alice"), "{name} by {kind}");
        }
    }
}

#[test]
fn a_token_that_is_not_genuine_is_answered_401_as_rfc_6750_says() {
    let signer = Signer::new(Algorithm::RS256, "r1");
    let other = Signer::new(Algorithm::RS256, "r1");
    let secret = Signer::new(Algorithm::HS256, "r1");
    let gateway = gateway("jwks_file = \"keys\"", &[], ("keys", &jwks(&[&signer]))).start();
    let good = signer.token(&claims("alice"));
    assert_eq!(statuses(&gateway, &good, 1), [200]);

    let (signed, signature) = good.rsplit_once('.').expect("three parts");
    let (header, _) = signed.split_once('.').expect("three parts");
    let admin = encode(json!({ "iss": "https://issuer.example", "aud": "api", "sub": "admin", "exp": in_seconds(60) }).to_string());
    let with = |extra: serde_json::Value| {
        let mut claims = claims("alice");
        claims
            .as_object_mut()
            .expect("an object")
            .extend(extra.as_object().expect("an object").clone());
        signer.token(&claims)
    };
    let twice = format!(
        r#"{{"iss":"https://issuer.example","aud":"api","sub":"alice","exp":{},"sub":"admin"}}"#,
        in_seconds(60)
    );
    let header_text = r#"{"alg":"RS256","kid":"r1"}"#;
    for (what, token) in [
        ("another payload", format!("{header}.{admin}.{signature}")),
        ("no signature", format!("{signed}.")),
        (
            "no algorithm",
            format!("{}.{admin}.", encode(r#"{"alg":"none"}"#)),
        ),
        (
            "another key of the same name",
            other.token(&claims("alice")),
        ),
        (
            "a secret in place of the key",
            secret.token(&claims("alice")),
        ),
        (
            "an unknown key",
            Signer::new(Algorithm::RS256, "r2").token(&claims("alice")),
        ),
        ("expired", with(json!({ "exp": in_seconds(-31) }))),
        ("not yet valid", with(json!({ "nbf": in_seconds(60) }))),
        ("for others", with(json!({ "aud": "billing" }))),
        (
            "from others",
            with(json!({ "iss": "https://evil.example" })),
        ),
        ("nobody", with(json!({ "sub": null }))),
        ("a claim twice", signer.sign(header_text, &twice)),
        (
            "an unknown extension",
            signer.sign(
                r#"{"alg":"RS256","kid":"r1","crit":["x"]}"#,
                &claims("alice").to_string(),
            ),
        ),
        ("five parts", format!("{good}.a.b")),
        ("padding", format!("{good}=")),
        ("no token at all", "abc".to_owned()),
        ("an empty one", String::new()),
        ("too long", format!("{good}{}", "A".repeat(8 * 1024))),
    ] {
        let response = gateway.send(&bearer(&token));
        assert_eq!(response.status, 401, "{what}: {}", response.text());
        assert_invalid_token(&response);
        assert!(
            !response.text().contains(&*token) || token.len() < 4,
            "{what}"
        );
    }
    let twice = bearer(&good).header("authorization", &format!("Bearer {good}"));
    assert_invalid_token(&gateway.send(&twice));
    // no token: the request is anonymous
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(
        gateway
            .send(&Request::get("/").header("authorization", "Basic YTpi"))
            .status,
        200
    );
    assert_eq!(statuses(&gateway, &good, 1), [200]);
    let count = |kind: &str| {
        gateway.metric(&format!(
            "tidegate_identity_rejected_total{{source=\"jwt\",kind=\"{kind}\"}}"
        ))
    };
    assert!(count("expired") > 0.5 && count("signature") > 0.5 && count("unknown_key") > 0.5);
}

#[test]
fn tier_and_tenant_and_other_claims_choose_the_limits() {
    let signer = Signer::new(Algorithm::ES256, "e1");
    let keys = "jwks_file = \"keys\"\ntier_claim = \"plan\"\ntenant_claim = \"org\"";
    let start = |limit: &str| gateway(keys, &[limit], ("keys", &jwks(&[&signer]))).start();
    let token = |user: &str, extra: serde_json::Value| {
        let mut claims = claims(user);
        claims
            .as_object_mut()
            .expect("an object")
            .extend(extra.as_object().expect("an object").clone());
        signer.token(&claims)
    };

    let by_user = start("per_user");
    assert_eq!(
        statuses(&by_user, &token("alice", json!({})), 3),
        [200, 200, 429]
    );
    // another token of the same user gives no second allowance
    assert_eq!(
        statuses(&by_user, &token("alice", json!({ "jti": "2" })), 1),
        [429]
    );
    assert_eq!(
        statuses(&by_user, &token("bob", json!({ "plan": "pro" })), 5),
        [200, 200, 200, 200, 429]
    );

    let by_tenant = start("per_tenant");
    assert_eq!(
        statuses(&by_tenant, &token("alice", json!({ "org": "acme" })), 3),
        [200; 3]
    );
    assert_eq!(
        statuses(&by_tenant, &token("bob", json!({ "org": "acme" })), 3),
        [200, 200, 429]
    );
    assert_eq!(
        statuses(&by_tenant, &token("bob", json!({ "org": "other" })), 1),
        [200]
    );

    let by_device = start("per_device");
    assert_eq!(
        statuses(
            &by_device,
            &token("alice", json!({ "device": { "id": 7 } })),
            2
        ),
        [200, 429]
    );
    assert_eq!(
        statuses(
            &by_device,
            &token("bob", json!({ "device": { "id": 7 } })),
            1
        ),
        [429]
    );
    assert_eq!(
        statuses(
            &by_device,
            &token("bob", json!({ "device": { "id": 8 } })),
            1
        ),
        [200]
    );
    // without the claim, the limit is skipped
    assert_eq!(
        statuses(&by_device, &token("bob", json!({})), 2),
        [200, 200]
    );
}

#[test]
fn guessed_tokens_are_counted_by_address() {
    let signer = Signer::new(Algorithm::HS256, "h1");
    let keys = "jwks_file = \"keys\"\nalgorithms = [\"HS256\"]";
    let gateway = gateway(keys, &["per_ip", "per_user"], ("keys", &jwks(&[&signer]))).start();
    let forged = Signer::new(Algorithm::HS256, "h1").token(&claims("alice"));
    let mut expected = vec![401; 10];
    expected.push(429);
    assert_eq!(statuses(&gateway, &forged, 11), expected);
}

#[test]
fn an_invalid_token_may_be_as_good_as_none() {
    let signer = Signer::new(Algorithm::EdDSA, "d1");
    let origin = Origin::ok();
    let keys = "public_key_file = \"key.pem\"\ninvalid = \"anonymous\"\nheader = \"x-token\"";
    let gateway = gateway(keys, &[], ("key.pem", &signer.file))
        .upstream(&origin)
        .start();
    let send = |token: &str| {
        gateway
            .send(&Request::get("/").header("x-token", token))
            .status
    };
    assert_eq!(send("nonsense"), 200);
    assert_eq!(origin.request().header("x-user-id"), None);
    assert_eq!(send(&signer.token(&claims("alice"))), 200);
    assert_eq!(origin.requests()[1].header("x-user-id"), Some("alice"));
}

#[test]
fn a_remembered_token_ends_when_it_expires() {
    let signer = Signer::new(Algorithm::ES256, "e1");
    let keys = "jwks_file = \"keys\"\nleeway = \"0s\"";
    let gateway = gateway(keys, &[], ("keys", &jwks(&[&signer]))).start();
    let mut claims = claims("alice");
    claims["exp"] = json!(in_seconds(3));
    let token = signer.token(&claims);
    assert_eq!(statuses(&gateway, &token, 3), [200; 3]);
    eventually("the token's end", || {
        match gateway.send(&bearer(&token)).status {
            401 => Ok(()),
            status => Err(status.to_string()),
        }
    });
    assert!(in_seconds(0) >= claims["exp"].as_i64().expect("a number"));
}

/// Publishes a key set that can change.
struct Publisher {
    origin: Origin,
    set: Arc<Mutex<String>>,
}

impl Publisher {
    fn of(signers: &[&Signer]) -> Publisher {
        let set = Arc::new(Mutex::new(jwks(signers)));
        let published = Arc::clone(&set);
        let origin = Origin::new(move |exchange| {
            let set = lock(&published).clone();
            exchange.respond(200, &[("content-type", "application/json")], set.as_bytes())
        });
        Publisher { origin, set }
    }

    fn publish(&self, signers: &[&Signer]) {
        *lock(&self.set) = jwks(signers);
    }

    fn fetches(&self) -> usize {
        self.origin.requests().len()
    }

    /// A gateway that fetches the key set.
    fn gateway(&self, more: &str) -> Gateway {
        let url = format!(
            "jwks_url = \"{}/keys?secret=x1y2z3\"\n{more}",
            self.origin.url()
        );
        gateway(&url, &[], ("unused", "")).start()
    }
}

fn wait_until_accepted(gateway: &Gateway, token: &str) {
    eventually("the token to be accepted", || {
        match statuses(gateway, token, 1)[0] {
            200 => Ok(()),
            status => Err(status.to_string()),
        }
    });
}

/// Waits for text in the log, which is written by a separate thread.
fn wait_until_said(gateway: &Gateway, what: &str) {
    eventually(what, || match gateway.stderr() {
        said if said.contains(what) => Ok(()),
        said => Err(said),
    });
}

#[test]
fn published_keys_are_there_before_the_first_request() {
    let signer = Signer::new(Algorithm::RS256, "r1");
    let publisher = Publisher::of(&[&signer]);
    let gateway = publisher.gateway("");
    assert_eq!(
        statuses(&gateway, &signer.token(&claims("alice")), 2),
        [200, 200]
    );
    assert_eq!(publisher.fetches(), 1);
    let seen = publisher.origin.request();
    assert_eq!(
        (seen.method.as_str(), seen.target.as_str()),
        ("GET", "/keys?secret=x1y2z3")
    );
    let url = format!("{}/keys", publisher.origin.url());
    assert_eq!(
        gateway.metric(&format!("tidegate_jwks_keys{{url=\"{url}\"}}")) as u64,
        1
    );
    // the query may contain a secret
    assert!(!gateway.output().contains("x1y2z3"), "{}", gateway.output());
}

#[test]
fn a_new_key_is_fetched_when_a_token_names_it_but_not_for_every_such_token() {
    let (old, new, newer) = (
        Signer::new(Algorithm::ES256, "2026-01"),
        Signer::new(Algorithm::ES256, "2026-02"),
        Signer::new(Algorithm::ES256, "2026-03"),
    );
    let publisher = Publisher::of(&[&old]);
    let gateway = publisher.gateway("");
    let token = old.token(&claims("alice"));
    assert_eq!(statuses(&gateway, &token, 2), [200, 200]);

    publisher.publish(&[&new]);
    wait_until_accepted(&gateway, &new.token(&claims("alice")));
    assert_eq!(publisher.fetches(), 2);
    // withdrawn: a cached token is rejected too
    assert_eq!(statuses(&gateway, &token, 1), [401]);

    publisher.publish(&[&newer]);
    for number in 0..40 {
        let forged = newer.sign(&format!(r#"{{"alg":"ES256","kid":"{number}"}}"#), "{}");
        assert_eq!(statuses(&gateway, &forged, 1), [401]);
        crate::support::wait::time_passes(
            std::time::Duration::from_millis(20),
            "checks of the key set fall due",
        );
    }
    // two checks passed, so a stale set would have been fetched again
    assert_eq!(publisher.fetches(), 2);
    assert_eq!(statuses(&gateway, &new.token(&claims("alice")), 1), [200]);
}

#[test]
fn the_last_good_set_stays_in_use_when_the_url_fails() {
    let signer = Signer::new(Algorithm::EdDSA, "d1");
    let publisher = Publisher::of(&[&signer]);
    let gateway = publisher.gateway("");
    let token = signer.token(&claims("alice"));
    assert_eq!(statuses(&gateway, &token, 1), [200]);
    publisher.origin.kill();
    let stranger = Signer::new(Algorithm::EdDSA, "d2").token(&claims("bob"));
    assert_eq!(statuses(&gateway, &stranger, 1), [401]);
    let url = format!("{}/keys", publisher.origin.url());
    let failed = format!("tidegate_jwks_fetches_total{{url=\"{url}\",outcome=\"connect\"}}");
    eventually("a failed fetch", || match gateway.metric(&failed) {
        count if count > 0.5 => Ok(()),
        count => Err(count.to_string()),
    });
    assert_eq!(statuses(&gateway, &token, 1), [200]);
    wait_until_said(&gateway, "keeping the last good one");
    publisher.origin.revive();
    wait_until_said(&gateway, "can be fetched again");
    let lines = gateway.stderr();
    assert_eq!(lines.matches("cannot be fetched").count(), 1, "{lines}");
}

#[test]
fn a_gateway_starts_while_the_url_is_dead_and_rejects_until_it_lives() {
    let signer = Signer::new(Algorithm::RS256, "r1");
    let publisher = Publisher::of(&[&signer]);
    publisher.origin.kill();
    let gateway = publisher.gateway("");
    let token = signer.token(&claims("alice"));
    assert_invalid_token(&gateway.send(&bearer(&token)));
    assert_eq!(gateway.get("/").status, 200, "others are served");
    wait_until_said(&gateway, "rejecting its tokens");
    gateway.wait_for_metric(
        "tidegate_identity_rejected_total{source=\"jwt\",kind=\"no_keys\"}",
        1.0,
    );
    publisher.origin.revive();
    wait_until_accepted(&gateway, &token);
}

#[test]
fn what_is_no_key_set_changes_nothing() {
    let signer = Signer::new(Algorithm::ES256, "e1");
    for (body, reason) in [
        ("<html>".to_owned(), "not a JSON Web Key Set"),
        ("{\"keys\":[]}".to_owned(), "none of its keys can be used"),
        (" ".repeat(300 * 1024), "larger than"),
        (jwks(&[&Signer::new(Algorithm::HS256, "h1")]), "HS256"),
    ] {
        let publisher = Publisher::of(&[&signer]);
        *lock(&publisher.set) = body;
        let gateway = publisher.gateway("");
        assert_invalid_token(&gateway.send(&bearer(&signer.token(&claims("alice")))));
        wait_until_said(&gateway, reason);
        publisher.publish(&[&signer]);
        wait_until_accepted(&gateway, &signer.token(&claims("alice")));
    }
}

/// Publishes over TLS with a self-signed certificate, on its own thread; returns the URL and the
/// certificate.
fn publish_over_tls(set: String) -> (String, String) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let settings = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions that the provider has")
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key.into())
        .expect("a certificate and its key");
    let settings = Arc::new(settings);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
    let port = listener.local_addr().expect("a bound listener").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(Arc::clone(&settings));
            let mut tls = rustls::StreamOwned::new(connection.expect("it is complete"), stream);
            // a client that does not trust the certificate disconnects here
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                match tls.read(&mut byte) {
                    Ok(1) => head.push(byte[0]),
                    _ => break,
                }
            }
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{set}",
                set.len()
            );
            let _ = tls.write_all(answer.as_bytes());
        }
    });
    (format!("https://localhost:{port}/keys"), cert.pem())
}

#[test]
fn published_keys_come_over_tls_from_whom_the_system_trusts_only() {
    let signer = Signer::new(Algorithm::ES256, "e1");
    let (url, certificate) = publish_over_tls(jwks(&[&signer]));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let roots = folder.path().join("roots.pem");
    std::fs::write(&roots, certificate).expect("a temporary folder is writable");
    let start = |roots: &str| {
        let keys = format!("jwks_url = \"{url}\"");
        gateway(&keys, &[], ("unused", ""))
            .env("SSL_CERT_FILE", roots)
            .start()
    };
    let token = signer.token(&claims("alice"));
    let trusting = start(&roots.to_string_lossy());
    assert_eq!(statuses(&trusting, &token, 1), [200]);

    let stranger = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
    std::fs::write(&roots, stranger.expect("a certificate").cert.pem()).expect("it is writable");
    let distrusting = start(&roots.to_string_lossy());
    assert_invalid_token(&distrusting.send(&bearer(&token)));
    wait_until_said(&distrusting, "TLS failed");
}

#[test]
fn a_claim_with_white_space_around_it_is_counted_as_the_server_is_told_it() {
    let signer = Signer::new(Algorithm::RS256, "r1");
    let origin = Origin::ok();
    let gateway = gateway(
        "jwks_file = \"keys\"",
        &["per_user"],
        ("keys", &jwks(&[&signer])),
    )
    .upstream(&origin)
    .start();
    let spellings = ["alice", " alice ", "\u{a0}alice", "alice\t"];
    let answered: Vec<u16> = spellings
        .iter()
        .map(|name| statuses(&gateway, &signer.token(&claims(name)), 1)[0])
        .collect();
    assert_eq!(answered, [200, 200, 429, 429], "one bucket of two");
    for seen in origin.requests() {
        assert_eq!(seen.header("x-user-id"), Some("alice"));
    }
    let broken = signer.token(&claims("ali\u{7}ce"));
    assert_eq!(statuses(&gateway, &broken, 1), [401]);
}

#[test]
fn explain_knows_the_keys_that_the_gateway_has_fetched() {
    let signer = Signer::new(Algorithm::RS256, "r1");
    let publisher = Publisher::of(&[&signer]);
    let gateway = publisher.gateway("");
    let token = signer.token(&claims("alice"));
    wait_until_accepted(&gateway, &token);
    let explained = gateway.change(
        "POST",
        "/api/v1/explain",
        &json!({ "url": "http://a/", "headers": { "authorization": format!("Bearer {token}") } }),
    );
    assert_eq!(explained["client"]["user"], "alice", "{explained}");
    assert_eq!(explained["answer"]["forwarded"], true, "{explained}");
    assert_eq!(publisher.fetches(), 1, "explaining fetches nothing");
}
