//! A Redis with access control: mutual TLS, users, passwords and permissions.

use tempfile::TempDir;

use super::{shared_at, shared_by};
use crate::support::{
    Gateway, Redis, Request, eventually,
    redis::free_address,
    tls::{Authority, Issued},
};

const TWO: &str = "rate = \"2/h\"\nburst = 2\non_redis_down = \"closed\"";

/// A Redis with TLS on a second port that requires a client certificate.
struct Secure {
    redis: Redis,
    port: u16,
    files: TempDir,
    authority: Authority,
}

impl Secure {
    fn start() -> Secure {
        let authority = Authority::new("redis CA");
        let files = tempfile::tempdir().expect("a temporary folder");
        let write = |name: &str, text: &str| {
            let path = files.path().join(name);
            std::fs::write(&path, text).expect("a temporary folder is writable");
            path.display().to_string()
        };
        let Issued { cert, key } = authority.server(&["localhost"]);
        let port = free_address().port();
        let redis = Redis::with(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &write("server.pem", &cert),
            "--tls-key-file",
            &write("server.key", &key),
            "--tls-ca-cert-file",
            &write("ca.pem", &authority.pem),
            "--tls-auth-clients",
            "yes",
        ]);
        let client = authority.client("gateway", &[]);
        write("client.pem", &client.cert);
        write("client.key", &client.key);
        Secure {
            redis,
            port,
            files,
            authority,
        }
    }

    fn file(&self, name: &str) -> String {
        self.files.path().join(name).display().to_string()
    }

    /// A gateway that reaches it as `host`, with these files.
    fn gateway(&self, host: &str, files: &[(&str, &str)]) -> Gateway {
        let keys: String = files
            .iter()
            .map(|(key, name)| format!("\n{key} = \"{}\"", self.file(name)))
            .collect();
        shared_by(
            &format!("url = \"rediss://{host}:{}\"{keys}", self.port),
            TWO,
        )
    }
}

const ALL: [(&str, &str); 3] = [
    ("tls_ca", "ca.pem"),
    ("tls_cert", "client.pem"),
    ("tls_key", "client.key"),
];

#[test]
fn a_redis_behind_tls_is_used_when_both_sides_prove_who_they_are() {
    let secure = Secure::start();
    let gateway = secure.gateway("localhost", &ALL);
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200, 200, 429]);
    let keys = secure.redis.keys();
    assert!(keys.iter().any(|key| key.contains("{shared:")), "{keys:?}");
}

#[test]
fn a_redis_whose_certificate_does_not_hold_is_not_used_and_the_log_says_why() {
    let secure = Secure::start();
    let other = Authority::new("somebody else");
    std::fs::write(secure.files.path().join("other.pem"), &other.pem).expect("writable");
    let another = [("tls_ca", "other.pem"), ALL[1], ALL[2]];
    for (host, files, why) in [
        ("localhost", &another[..], "UnknownIssuer"),
        ("127.0.0.1", &ALL[..], "not valid for name"),
        ("localhost", &ALL[1..], "UnknownIssuer"),
        // the server closes the connection of a client without a certificate
        ("localhost", &ALL[..1], "Redis does not answer"),
    ] {
        let gateway = secure.gateway(host, files);
        assert_eq!(gateway.get("/").status, 503, "{host} {files:?}");
        // log lines are written asynchronously
        eventually("the log to say why", || {
            let log = gateway.stderr();
            if log.contains(why) {
                Ok(())
            } else {
                Err(format!("{host} {files:?}: {log}"))
            }
        });
    }
    assert!(secure.redis.keys().is_empty());
    drop(secure.authority);
}

#[test]
fn whom_the_system_trusts_is_trusted_where_no_file_is_named() {
    let secure = Secure::start();
    let gateway = Gateway::with(&format!(
        "[redis]\nurl = \"rediss://localhost:{}\"\ntimeout = \"200ms\"\nconnect_timeout = \"2s\"\n\
         tls_cert = \"{}\"\ntls_key = \"{}\"\n\
         [gateway]\nlimits = [\"shared\"]\n[limit.shared]\nkey = []\nscope = \"global\"\n{TWO}\n",
        secure.port,
        secure.file("client.pem"),
        secure.file("client.key"),
    ))
    .env("SSL_CERT_FILE", &secure.file("ca.pem"))
    .start();
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200, 200, 429]);
}

/// Documents the permissions that a Redis user needs.
const DOCUMENT: &str = include_str!("../../../docs/config.md");

#[test]
fn a_user_with_the_documented_rights_and_no_others_is_enough() {
    let redis = Redis::start();
    let documented = DOCUMENT
        .split("ACL SETUSER tidegate ")
        .nth(1)
        .and_then(|rest| rest.lines().next())
        .expect("docs/config.md names the rights");
    let rights: Vec<&str> = documented.split(' ').collect();
    assert!(rights.contains(&"-@all"), "{rights:?}");
    let mut command = vec!["ACL", "SETUSER", "tidegate"];
    command.extend(rights);
    let _: redis::Value = redis.run(&command);
    let url = format!("redis://tidegate:s3cret@127.0.0.1:{}", redis.port());
    for limit in [
        "rate = \"2/h\"\nburst = 2",
        "rate = \"2/h\"\nalgorithm = \"fixed_window\"",
        "rate = \"2/h\"\nalgorithm = \"sliding_window\"\nsync = \"strict\"",
        "rate = \"2/h\"\nalgorithm = \"sliding_log\"\nsync = \"strict\"",
    ] {
        let _: redis::Value = redis.run(&["FLUSHALL"]);
        let limit = format!("{limit}\non_redis_down = \"closed\"");
        let gateway = shared_at(&url, &limit);
        assert_eq!(
            gateway.statuses(&Request::get("/"), 3),
            [200, 200, 429],
            "{limit}"
        );
        assert_eq!(
            gateway.metric("tidegate_redis_errors_total"),
            0.0,
            "{limit}"
        );
    }
    let slots = "algorithm = \"concurrency\"\nlimit = 2\non_redis_down = \"closed\"";
    let gateway = shared_at(&url, slots);
    assert_eq!(gateway.statuses(&Request::get("/"), 3), [200; 3]);
    assert_eq!(gateway.metric("tidegate_redis_errors_total"), 0.0);
}

#[test]
fn a_user_who_is_not_known_or_may_not_run_scripts_is_told_in_the_log_and_by_the_metric() {
    let redis = Redis::start();
    let set = |rights: &[&str]| {
        let command = [&["ACL", "SETUSER", "tidegate"], rights].concat();
        let _: redis::Value = redis.run(&command);
    };
    set(&["on", ">s3cret", "~tidegate:*", "-@all", "+get", "+set"]);
    for password in ["wrong", "s3cret"] {
        let url = format!("redis://tidegate:{password}@127.0.0.1:{}", redis.port());
        let gateway = shared_at(&url, TWO);
        assert_eq!(gateway.get("/").status, 503);
        let refused = gateway.metric("tidegate_redis_errors_total{kind=\"auth\"}");
        assert!(refused >= 1.0, "{password}: {refused}");
        eventually("the log to say so", || {
            let log = gateway.stderr();
            assert!(!log.contains("s3cret"), "{log}");
            if log.contains("\"kind\":\"auth\"") {
                Ok(())
            } else {
                Err(log)
            }
        });
    }
}
