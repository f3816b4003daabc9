//! Secrets of clients and of the gateway never appear in its output: log lines, metrics, responses,
//! admin pages.

use jsonwebtoken::Algorithm;
use serde_json::json;

use crate::support::{
    Gateway, Origin, Request, Response,
    tokens::{Signer, encode, jwks, sha256_hex},
};

/// All pages of the admin listener.
const ADMIN_PAGES: [&str; 9] = [
    "/",
    "/metrics",
    "/healthz",
    "/readyz",
    "/nothing",
    "/api/v1/config",
    "/api/v1/limits",
    "/api/v1/status",
    "/api/v1/decisions",
];

/// Text that must not appear: each secret, and any long part of it.
struct Secrets(Vec<(&'static str, String)>);

impl Secrets {
    fn assert_absent(&self, place: &str, text: &str) {
        for (what, secret) in &self.0 {
            let bytes = secret.as_bytes();
            let parts = bytes.chunks(PART).filter(|part| part.len() == PART);
            for part in parts {
                let part = str::from_utf8(part).expect("secrets of tests are ASCII");
                assert!(
                    !text.contains(part),
                    "{place} has a part of {what}: {part}\n{text}"
                );
            }
        }
    }
}

/// Long enough that no other text matches by accident.
const PART: usize = 12;

fn said(response: &Response) -> String {
    let fields: String = response
        .headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\n"))
        .collect();
    fields + &response.text()
}

#[test]
fn no_secret_is_in_a_log_line_a_metric_an_answer_or_an_admin_page() {
    let hmac = Signer::new(Algorithm::HS256, "h1");
    let issuer = Signer::new(Algorithm::ES256, "e1");
    let stranger = Signer::new(Algorithm::ES256, "e2");
    let publisher = {
        let set = jwks(&[&issuer]);
        Origin::new(move |exchange| exchange.respond(200, &[], set.as_bytes()))
    };
    let api_key = "tgk_4c1f8a90d2e7b35566aa01ff";
    let password = "correct-horse-battery-staple";
    let keys = format!(
        "[keys.alice]\nsha256 = \"{}\"\ntier = \"pro\"\n",
        sha256_hex(api_key)
    );
    let config = format!(
        r#"
[log]
level = "debug"
access = "all"
[[user]]
from = "api_key"
keys_file = "keys.toml"
[[user]]
from = "jwt"
header = "x-token"
secret_file = "hmac.secret"
[[user]]
from = "jwt"
jwks_url = "{}/keys?access=published-set-password"
[limit.per_ip]
key = ["ip"]
rate = "1000/s"
[limit.login]
key = ["header:x-session", "query:session", "cookie:sid", "body:password"]
rate = "1/h"
missing = "shared"
[gateway]
limits = ["per_ip"]
[[route]]
name = "all"
path = "/{{*rest}}"
upstream = "origin"
limits = ["login"]
"#,
        publisher.url()
    );
    let origin = Origin::ok();
    let gateway = Gateway::with(&config)
        .file("keys.toml", &keys)
        .file("hmac.secret", &hmac.file)
        .upstream(&origin)
        .start();

    let claims = |user: &str| json!({ "sub": user });
    let good = issuer.token(&claims("alice"));
    let tampered = format!("{}AAAA", &good[..good.len() - 4]);
    let credentials = [
        ("x-api-key", api_key.to_owned()),
        ("x-api-key", "tgk_guessed_guessed_guessed".to_owned()),
        ("x-token", hmac.token(&claims("bob"))),
        (
            "x-token",
            Signer::new(Algorithm::HS256, "h1").token(&claims("bob")),
        ),
        ("authorization", format!("Bearer {good}")),
        ("authorization", format!("Bearer {tampered}")),
        (
            "authorization",
            format!("Bearer {}", stranger.token(&claims("eve"))),
        ),
        (
            "authorization",
            format!(
                "Bearer {}",
                issuer.token(&json!({ "sub": "alice", "exp": 1 }))
            ),
        ),
        (
            "authorization",
            "Bearer not.a.token-but-a-secret-of-somebody".to_owned(),
        ),
        (
            "authorization",
            format!("Basic {}", encode(format!("alice:{password}"))),
        ),
        (
            "proxy-authorization",
            format!("Basic {}", encode(format!("alice:{password}"))),
        ),
        (
            "cookie",
            "sid=session-cookie-of-alice-0123456789".to_owned(),
        ),
        ("x-session", "session-header-of-alice-0123456789".to_owned()),
    ];
    let mut secrets = vec![
        ("the secret of tokens", hmac.file.clone()),
        ("the URL's query", "published-set-password".to_owned()),
        ("a password", password.to_owned()),
        ("a query", "session-query-of-alice-0123456789".to_owned()),
    ];
    secrets.extend(credentials.iter().map(|(_, value)| {
        let value = value
            .trim_start_matches("Bearer ")
            .trim_start_matches("Basic ");
        ("a credential", value.trim_start_matches("sid=").to_owned())
    }));
    let secrets = Secrets(secrets);

    let mut statuses = Vec::new();
    for (name, value) in &credentials {
        for target in ["/", "/?session=session-query-of-alice-0123456789", "/%zz"] {
            let form = format!("user=alice&password={password}");
            let request = Request::post(target, form)
                .header("content-type", "application/x-www-form-urlencoded")
                .header(name, value);
            // twice, so that limits reject the second
            for request in [&request, &request] {
                let response = gateway.send(request);
                statuses.push(response.status);
                secrets.assert_absent("an answer", &said(&response));
            }
        }
    }
    for status in [200, 400, 401, 429] {
        assert!(
            statuses.contains(&status),
            "no answer was {status}: {statuses:?}"
        );
    }
    for page in ADMIN_PAGES {
        let request = gateway
            .admin_request("GET", page)
            .header("authorization", &format!("Bearer {good}"));
        let stream = std::net::TcpStream::connect(gateway.admin_address()).expect("it listens");
        let answer = crate::support::Client::over(stream).send(&request);
        secrets.assert_absent(page, &said(&answer));
    }
    gateway.wait_for_metric(
        "tidegate_identity_rejected_total{source=\"jwt\",kind=\"expired\"}",
        4.0,
    );
    gateway.signal("TERM");
    let mut gateway = gateway;
    gateway.wait();
    let output = gateway.output();
    assert!(
        output.contains("a key set is in use") && output.contains("stopped"),
        "{output}"
    );
    assert!(output.matches("\"status\":401").count() > 3, "{output}");
    secrets.assert_absent("the log", &output);
}
