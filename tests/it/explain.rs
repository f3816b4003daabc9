//! `tidegate explain`: its output, and that a running gateway does the same.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{
    Gateway, Origin, Request,
    cli::Finished,
    gateway::Builder,
    tidegate,
    tls::{Authority, Hello},
};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/explain")
}

/// Explains with the configuration beside the golden files.
fn explain(arguments: &[&str]) -> Finished {
    tidegate(&golden(), &[&["explain"], arguments].concat())
}

/// Masks hashes, whose key is random per process.
fn masked(text: &str) -> String {
    let mut parts = text.split("=#");
    let mut masked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        masked.push_str("=#xxxxxxxx");
        masked.push_str(part.get(8..).unwrap_or_default());
    }
    masked
}

/// Compares with `NAME.txt`, or writes it if UPDATE_GOLDEN=1.
fn prints(name: &str, arguments: &[&str]) {
    is_golden(name, &explain(arguments));
}

fn is_golden(name: &str, explained: &Finished) {
    assert_eq!(explained.code, Some(0), "{explained}");
    assert_eq!(explained.stderr, "", "{explained}");
    let found = masked(&explained.stdout);
    let file = golden().join(name).with_extension("txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        fs::write(&file, &found).expect("the golden file is writable");
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(found, expected, "{name} (UPDATE_GOLDEN=1 accepts it)");
}

#[test]
fn a_chain_of_proxies_is_shown_element_by_element() {
    prints(
        "chain",
        &[
            "http://api.example.com//v1/%65xport/./7;x?token=s3cret",
            "--peer",
            "10.0.0.1",
            "-H",
            "X-Forwarded-For: 6.6.6.6, 198.51.100.7:80,, 10.0.0.2",
            "-H",
            "x-api-key: alpha",
            "-H",
            "x-device: s3cret",
            "-H",
            "x_user_id: evil",
            "-H",
            "cookie: session=s3cret",
        ],
    );
}

#[test]
fn a_stranger_who_claims_to_be_another_is_shown_as_himself() {
    prints(
        "blocked",
        &[
            "POST",
            "http://api.example.com/login",
            "--peer",
            "203.0.113.66",
            "-H",
            "x-forwarded-for: 192.0.2.1",
            "-H",
            "x-user-id: alice",
            "-d",
            "username=alice",
        ],
    );
}

#[test]
fn exceptions_and_answers_that_are_counted_later_are_shown() {
    prints(
        "login",
        &[
            "http://api.example.com/login",
            "--peer",
            "192.0.2.1",
            "-d",
            "username=alice",
        ],
    );
}

#[test]
fn an_element_that_cannot_be_read_ends_the_walk_in_doubt() {
    let garbage = "x-forwarded-for: 198.51.100.7, \u{e9}unknown";
    prints("doubt", &["/", "--peer", "10.0.0.1", "-H", garbage]);
}

#[test]
fn a_credential_that_does_not_verify_and_a_method_that_no_route_takes_are_shown() {
    prints("unauthorized", &["/v1/export/7", "-H", "x-api-key: guess"]);
    prints("method", &["DELETE", "http://api.example.com/login"]);
    prints("invalid", &["http://api.example.com/a/../.."]);
}

#[test]
fn programs_get_json() {
    let explained = explain(&[
        "http://a/v1/export/7",
        "-H",
        "x-api-key: beta",
        "--format",
        "json",
    ]);
    let json: serde_json::Value = serde_json::from_str(&explained.stdout).expect("JSON");
    assert_eq!(json["client"]["user"], "bob");
    assert_eq!(json["request"]["route"]["name"], "export");
    assert_eq!(json["request"]["params"]["id"], "7");
    assert_eq!(json["limits"][1]["name"], "per_user");
    assert_eq!(json["limits"][1]["quota"], "600/min, burst 20");
    assert_eq!(json["limits"][1]["outcome"], "admitted");
    assert_eq!(json["limits"][1]["remaining"], 10);
    assert_eq!(json["limits"][3]["outcome"], "not_applied");
    assert_eq!(json["answer"]["forwarded"], true);
}

#[test]
fn no_secret_of_a_request_is_printed_in_any_form() {
    for format in ["text", "json"] {
        let explained = explain(&[
            "POST",
            "http://a/v1/export/7?token=s3cret",
            "--format",
            format,
            "-H",
            "authorization: Bearer s3cret",
            "-H",
            "x-api-key: s3cret",
            "-H",
            "x-device: s3cret",
            "-H",
            "cookie: a=s3cret",
            "-H",
            "connection: x-s3cr3t",
            "-d",
            "username=s3cret&password=s3cret",
        ]);
        assert_eq!(explained.code, Some(0), "{explained}");
        assert!(!explained.stdout.contains("s3cret"), "{explained}");
    }
    let broken = explain(&["/", "-H", "x-api-key: s3cret\n"]);
    assert_eq!(broken.code, Some(1), "{broken}");
    assert!(!broken.stderr.contains("s3cret"), "{broken}");
}

#[test]
fn what_cannot_be_explained_says_what_to_write() {
    for (arguments, part) in [
        (vec!["a b"], "http://HOST/PATH"),
        (vec!["example.com/x"], "http://HOST/PATH"),
        (vec!["example.com"], "has no scheme"),
        (vec!["GET POST", "/"], "not a method"),
        (vec!["/", "-H", "x-api-key"], "has no colon"),
        (vec!["/", "-H", "x api key: 1"], "not a header name"),
        (vec!["/", "-c", "nowhere.toml"], "nowhere.toml"),
        (vec!["/", "--admin", "x"], "http://HOST:PORT"),
    ] {
        let explained = explain(&arguments);
        assert_eq!(explained.code, Some(1), "{arguments:?}: {explained}");
        assert!(
            explained.stderr.contains(part),
            "{arguments:?}: {explained}"
        );
    }
    for arguments in [
        vec![],
        vec!["/", "--peer", "nobody"],
        vec!["--request-id", "1", "/"],
    ] {
        assert_eq!(explain(&arguments).code, Some(2), "{arguments:?}");
    }
}

/// The same requests, explained and sent: the address, user, path and response agree.
#[test]
fn a_gateway_does_what_was_explained() {
    const TOML: &str = r#"
        [client_ip]
        trusted_proxies = ["127.0.0.1", "10.0.0.0/8"]
        [[user]]
        from = "header"
        [limit.per_user]
        key = ["user_or_ip"]
        rate = "60/min"
        burst = 20
        [gateway]
        limits = ["per_user"]
        [[route]]
        name = "all"
        path = "/{*rest}"
        methods = ["GET"]
        upstream = "origin"
        "#;
    let origin = Origin::ok();
    let gateway = Gateway::with(TOML).upstream(&origin).start();
    for (target, fields) in [
        (
            "/a/../b;x/%7e",
            vec![("x-forwarded-for", "6.6.6.6, 198.51.100.7, 10.0.0.2")],
        ),
        (
            "/",
            vec![("x-forwarded-for", "unknown"), ("x-user-id", "alice")],
        ),
        (
            "//x//",
            vec![
                ("x_forwarded_for", "6.6.6.6"),
                ("connection", "x-user-id"),
                ("x-user-id", "bob"),
            ],
        ),
        ("/%2F", vec![]),
        ("/", vec![("x-user-id", "alice"), ("x-user-id", "bob")]),
    ] {
        let lines: Vec<String> = fields
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        let mut arguments = vec![
            "explain",
            "--format",
            "json",
            "--config",
            "gateway.toml",
            target,
        ];
        lines.iter().for_each(|line| arguments.extend(["-H", line]));
        let explained = tidegate(gateway.folder(), &arguments);
        let json: serde_json::Value = serde_json::from_str(&explained.stdout)
            .unwrap_or_else(|error| panic!("{error}: {explained}"));
        let request = fields
            .iter()
            .fold(Request::get(target), |request, (name, value)| {
                request.header(name, value)
            });
        let seen_before = origin.requests().len();
        let response = gateway.send(&request);
        if json["answer"]["forwarded"] == false {
            assert_eq!(json["answer"]["status"], response.status, "{target}");
            assert_eq!(origin.requests().len(), seen_before, "{target}");
            continue;
        }
        assert_eq!(response.status, 200, "{target}");
        let seen = origin.requests().pop().expect("a request");
        assert_eq!(json["request"]["sent_path"], seen.target, "{target}");
        assert_eq!(
            json["client"]["user"].as_str(),
            seen.header("x-user-id"),
            "{target}"
        );
        let sets = json["answer"]["sets"].as_array().expect("a list");
        for set in sets.iter().filter(|set| set["name"] == "x-forwarded-for") {
            assert_eq!(
                set["value"].as_str(),
                seen.header("x-forwarded-for"),
                "{target}"
            );
        }
        for name in json["answer"]["removes"].as_array().expect("a list") {
            let name = name.as_str().expect("a text");
            assert_eq!(seen.header(name), None, "{target}: {name}");
        }
    }
}

/// A gateway that requests client certificates, and counts users by their names.
fn mutual(server: &Authority, clients: &Authority) -> Builder {
    let issued = server.server(&["api.example.com"]);
    let toml = r#"
        [[listen]]
        address = "127.0.0.1:0"
        [[listen]]
        address = "127.0.0.1:0"
        [listen.tls]
        certificates = [{ cert = "server.pem", key = "server.key" }]
        client_ca = "clients.pem"
        [[user]]
        from = "client_cert"
        field = "san_uri"
        [[user]]
        from = "client_cert"
        [limit.per_user]
        key = ["user"]
        rate = "60/min"
        burst = 20
        [gateway]
        limits = ["per_user"]
        [upstream.origin]
        servers = ["{origin}"]
        "#;
    Gateway::with(toml)
        .file("server.pem", &issued.cert)
        .file("server.key", &issued.key)
        .file("clients.pem", &clients.pem)
}

#[test]
fn a_client_certificate_names_the_user_as_in_a_handshake() {
    let (server, clients) = (Authority::new("server"), Authority::new("clients"));
    let alice = clients.client("alice", &[]);
    let (folder, _) = mutual(&server, &clients)
        .upstream_at("http://127.0.0.1:9000")
        .write();
    // many people keep both in one file
    let both = format!("{}{}", alice.key, alice.cert);
    fs::write(folder.path().join("alice.pem"), &both).expect("a writable folder");
    let described = ["https://api.example.com/", "--client-cert", "alice.pem"];
    let explain = |folder: &Path, more: &[&str]| {
        tidegate(folder, &[&["explain"], &described[..], more].concat())
    };
    is_golden("certificate", &explain(folder.path(), &[]));

    let origin = Origin::ok();
    let gateway = mutual(&server, &clients).upstream(&origin).start();
    fs::write(gateway.folder().join("alice.pem"), &both).expect("a writable folder");
    let admin = format!("http://{}", gateway.admin_address());
    let explained = explain(gateway.folder(), &["--admin", &admin, "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&explained.stdout)
        .unwrap_or_else(|error| panic!("{error}: {explained}"));
    assert_eq!(json["limits"][0]["key"], "user=alice", "{explained}");
    let hello = Hello::with_certificate(&server, "api.example.com", &alice);
    let mut client = hello.connect(gateway.listeners()[1]).expect("a handshake");
    assert_eq!(client.send(&Request::get("/")).status, 200);
    let seen = origin.requests().pop().expect("a request");
    assert_eq!(seen.header("x-user-id"), Some("alice"));
    assert_eq!(seen.header("x-forwarded-proto"), Some("https"));
}

#[test]
fn a_client_certificate_that_cannot_be_explained_says_why() {
    let (server, clients) = (Authority::new("server"), Authority::new("clients"));
    let gateway = mutual(&server, &clients).start();
    let folder = gateway.folder();
    let write = |name: &str, text: &str| {
        fs::write(folder.join(name), text).expect("a writable folder");
    };
    write("stranger.pem", &server.client("alice", &[]).cert);
    write("alice.key", &clients.client("alice", &[]).key);
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    write("damaged.pem", damaged);
    write("cut.pem", &damaged[..40]);
    write("large.pem", &"\n".repeat((4 << 20) + 1));
    let nobody = "[upstream.a]\nservers = [\"builtin:echo\"]\n[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"a\"\n";
    write("plain.toml", nobody);
    let admin = format!("http://{}", gateway.admin_address());
    for (certificate, config, part) in [
        ("nowhere.pem", "gateway.toml", "nowhere.pem cannot be read"),
        ("/dev/zero", "gateway.toml", "it is not a regular file"),
        ("large.pem", "gateway.toml", "larger than 4194304 bytes"),
        (
            "alice.key",
            "gateway.toml",
            "alice.key contains no certificate",
        ),
        ("damaged.pem", "gateway.toml", "it is damaged"),
        ("cut.pem", "gateway.toml", "is not valid PEM"),
        ("stranger.pem", "gateway.toml", "has signed it"),
        ("stranger.pem", "plain.toml", "no [[listen]] asks"),
        ("stranger.pem", &admin, "has signed it"),
    ] {
        let by = match config.starts_with("http") {
            true => ["--admin", config],
            false => ["--config", config],
        };
        let arguments = [&["explain", "/", "--client-cert", certificate], &by[..]];
        let explained = tidegate(folder, &arguments.concat());
        assert_eq!(explained.code, Some(1), "{certificate}: {explained}");
        assert!(
            explained.stderr.contains(part),
            "{certificate}: {explained}"
        );
    }
}
