//! Header fields that reach the origin, and those that reach the client.

use crate::support::{Gateway, Origin, Request, http2, raw};

/// Trusts loopback as a proxy.
const TRUSTING: &str = "[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n";

/// Trusts no proxy that the tests use.
const DISTRUSTING: &str = "[client_ip]\ntrusted_proxies = [\"192.0.2.0/24\"]\n";

#[test]
fn method_target_fields_and_body_arrive_as_they_were_sent() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = Request::new("PURGE", "/a/b%20c?x=1&y=%2F")
        .header("X-Plain", "as it is")
        .header("x-twice", "1");
    let mut request = request
        .header("x-twice", "2")
        .header("content-type", "text/plain");
    request.body = b"the body".to_vec();
    let response = gateway.send(&request);
    assert_eq!(
        (response.status, response.text().as_str()),
        (200, "the body")
    );
    let seen = origin.request();
    assert_eq!(
        (seen.method.as_str(), seen.target.as_str()),
        ("PURGE", "/a/b%20c?x=1&y=%2F")
    );
    assert_eq!(seen.header("x-plain"), Some("as it is"));
    assert_eq!(seen.header_all("x-twice"), ["1", "2"], "in their order");
    assert_eq!(seen.header("content-type"), Some("text/plain"));
    assert_eq!(seen.header("content-length"), Some("8"));
    assert_eq!(seen.body, b"the body");
    assert_eq!(seen.faults(), Vec::<String>::new());
}

#[test]
fn hop_by_hop_fields_of_a_request_end_here() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = Request::get("/")
        .header("connection", "X-Named, keep-alive, x-also-named")
        .header("x-named", "1")
        .header("X-Also-Named", "2")
        .header("keep-alive", "timeout=5")
        .header("proxy-connection", "keep-alive")
        .header("te", "gzip")
        .header("upgrade", "h2c")
        .header("proxy-authorization", "Basic x")
        .header("x-stays", "3");
    assert_eq!(gateway.send(&request).status, 200);
    let seen = origin.request();
    for gone in [
        "x-named",
        "x-also-named",
        "keep-alive",
        "proxy-connection",
        "te",
        "upgrade",
        "proxy-authorization",
    ] {
        assert_eq!(seen.header(gone), None, "{gone}");
    }
    assert!(
        !seen
            .header("connection")
            .unwrap_or_default()
            .to_ascii_lowercase()
            .contains("named")
    );
    assert_eq!(seen.header("x-stays"), Some("3"));
}

#[test]
fn connection_cannot_remove_what_the_origin_relies_on() {
    let origin = Origin::echo();
    let gateway = Gateway::with(TRUSTING).upstream(&origin).start();
    let mut request = Request::post("/", "12345")
        .header(
            "connection",
            "close, X-Forwarded-For, Authorization, Cookie, X-Request-Id, Via",
        )
        .header("x-forwarded-for", "198.51.100.9")
        .header("authorization", "Bearer t")
        .header("cookie", "c=1");
    let response = gateway.send(&request);
    if response.status == 200 {
        let seen = origin.request();
        assert_eq!(
            seen.header("x-forwarded-for"),
            Some("198.51.100.9, 127.0.0.1")
        );
        assert_eq!(seen.header("authorization"), Some("Bearer t"));
        assert_eq!(seen.header("cookie"), Some("c=1"));
        assert_eq!(seen.faults(), Vec::<String>::new());
    } else {
        assert_eq!(
            response.status, 400,
            "or it is refused as the attack that it is"
        );
        assert_eq!(origin.requests().len(), 0);
    }
    request.headers.remove(0);
    assert_eq!(gateway.send(&request).status, 200);
}

#[test]
fn the_origin_is_told_who_asks_for_what() {
    let origin = Origin::ok();
    let gateway = Gateway::with(DISTRUSTING).upstream(&origin).start();
    let request = Request::get("/").header("host", "shop.example:8080");
    assert_eq!(gateway.send(&request).status, 200);
    let seen = origin.request();
    assert_eq!(seen.header("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen.header("x-forwarded-proto"), Some("http"));
    assert_eq!(seen.header("x-forwarded-host"), Some("shop.example:8080"));
    assert!(
        seen.header("via")
            .is_some_and(|via| via.starts_with("1.1 ")),
        "{:?}",
        seen.header("via")
    );
    assert!(seen.header("x-request-id").is_some_and(|id| id.len() >= 16));
}

#[test]
fn the_origin_is_told_how_important_a_request_is_where_that_is_not_usual() {
    let origin = Origin::ok();
    let priorities = r#"
        [[route]]
        name = "pay"
        path = "/pay"
        upstream = "origin"
        priority = "critical"
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
    "#;
    let gateway = Gateway::with(&format!("{DISTRUSTING}{priorities}"))
        .upstream(&origin)
        .start();
    for (path, told) in [("/pay", Some("critical")), ("/else", None)] {
        let claims = Request::get(path).header("x-request-priority", "low");
        assert_eq!(gateway.send(&claims).status, 200);
        let seen = origin.requests().pop().expect("one for each");
        assert_eq!(seen.header("x-request-priority"), told, "{path}");
    }
}

#[test]
fn what_untrusted_peers_claim_is_replaced() {
    let origin = Origin::ok();
    let gateway = Gateway::with(DISTRUSTING).upstream(&origin).start();
    let request = Request::get("/")
        .header("x-forwarded-for", "10.0.0.1")
        .header("x-forwarded-proto", "https")
        .header("x-forwarded-host", "evil.example")
        .header("forwarded", "for=10.0.0.1")
        .header("x-request-id", "chosen-by-the-client")
        .header("x-user-id", "root")
        .header("x-rate-limit-tier", "enterprise")
        .header("x-request-priority", "critical");
    assert_eq!(gateway.send(&request).status, 200);
    let seen = origin.request();
    assert_eq!(seen.header("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen.header("x-forwarded-proto"), Some("http"));
    assert_eq!(seen.header("x-forwarded-host"), Some("a.example"));
    assert!(
        !seen
            .header("forwarded")
            .unwrap_or_default()
            .contains("10.0.0.1")
    );
    assert_ne!(seen.header("x-request-id"), Some("chosen-by-the-client"));
    for claimed in ["x-user-id", "x-rate-limit-tier", "x-request-priority"] {
        assert_ne!(
            seen.header(claimed),
            request
                .headers
                .iter()
                .find(|(n, _)| n == claimed)
                .map(|(_, v)| v.as_str())
        );
    }
}

#[test]
fn what_trusted_peers_say_is_kept_and_continued() {
    let origin = Origin::ok();
    let gateway = Gateway::with(TRUSTING).upstream(&origin).start();
    let request = Request::get("/")
        .header("x-forwarded-for", "198.51.100.7")
        .header("x-forwarded-proto", "https")
        .header("x-forwarded-host", "shop.example")
        .header("x-request-id", "from-the-proxy-1");
    let response = gateway.send(&request);
    let seen = origin.request();
    assert_eq!(
        seen.header("x-forwarded-for"),
        Some("198.51.100.7, 127.0.0.1")
    );
    assert_eq!(seen.header("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.header("x-forwarded-host"), Some("shop.example"));
    assert_eq!(seen.header("x-request-id"), Some("from-the-proxy-1"));
    assert_eq!(response.status, 200);
}

#[test]
fn request_ids_differ_and_reach_the_client_of_a_rejection() {
    let gateway = Gateway::with(&format!(
        "{TRUSTING}[gateway]\nlimits = [\"none\"]\n[limit.none]\nkey = []\nrate = \"1/h\"\nburst = 1\n"
    ))
    .start();
    assert_eq!(gateway.get("/").status, 200);
    let ids: Vec<String> = (0..3)
        .map(|_| {
            gateway
                .get("/")
                .header("x-request-id")
                .expect("an id")
                .to_owned()
        })
        .collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
    let named = gateway.send(&Request::get("/").header("x-request-id", "from-the-proxy-2"));
    assert_eq!(named.header("x-request-id"), Some("from-the-proxy-2"));
}

#[test]
fn a_request_id_that_could_forge_a_log_line_is_replaced() {
    let origin = Origin::ok();
    let gateway = Gateway::with(TRUSTING).upstream(&origin).start();
    let long = "x".repeat(5000);
    for id in [long.as_str(), "", "a b\t\"c\""] {
        assert_eq!(
            gateway
                .send(&Request::get("/").header("x-request-id", id))
                .status,
            200
        );
    }
    for seen in origin.requests() {
        let id = seen.header("x-request-id").expect("an id");
        assert!(
            (1..=200).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()),
            "{id:?}"
        );
    }
}

#[test]
fn names_that_look_like_ours_to_the_origin_do_not_pass() {
    let origin = Origin::ok();
    let gateway = Gateway::with(TRUSTING).upstream(&origin).start();
    let request = Request::get("/")
        .header("X_Forwarded_For", "1.2.3.4")
        .header("X.Forwarded.For", "1.2.3.4")
        .header("x_user_id", "root");
    let response = gateway.send(&request);
    assert!(matches!(response.status, 200 | 400), "{}", response.status);
    for seen in origin.requests() {
        assert!(
            !seen
                .headers
                .iter()
                .any(|(_, value)| value == "1.2.3.4" || value == "root"),
            "{:?}",
            seen.headers
        );
    }
}

#[test]
fn host_is_preserved_or_the_servers_or_a_literal() {
    let with_host = |line: &str| {
        let origin = Origin::ok();
        let toml = format!("[upstream.origin]\nservers = [\"{{origin}}\"]\n{line}\n");
        let gateway = Gateway::with(&toml).upstream(&origin).start();
        assert_eq!(
            gateway
                .send(&Request::get("/").header("host", "Shop.example:8080"))
                .status,
            200
        );
        let host = origin.request().header("host").expect("a host").to_owned();
        (host, origin.address().to_string())
    };
    let (preserved, _) = with_host("");
    assert!(
        preserved.eq_ignore_ascii_case("shop.example:8080"),
        "the default: {preserved}"
    );
    let (preserved, _) = with_host("host = \"preserve\"");
    assert!(
        preserved.eq_ignore_ascii_case("shop.example:8080"),
        "{preserved}"
    );
    let (server, address) = with_host("host = \"server\"");
    assert_eq!(server, address);
    assert_eq!(
        with_host("host = \"internal.example\"").0,
        "internal.example"
    );
}

#[test]
fn the_target_wins_over_host() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(
        gateway
            .send(&Request::get("http://b.example/x?y").header("host", "c.example"))
            .status,
        200
    );
    let seen = origin.request();
    assert_eq!(
        (seen.target.as_str(), seen.header("host")),
        ("/x?y", Some("b.example"))
    );
}

#[test]
fn hop_by_hop_fields_of_a_response_end_here() {
    let origin = Origin::sending(
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Named, keep-alive\r\nX-Named: 1\r\n\
         Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nX-Stays: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\nok",
    );
    let gateway = Gateway::with("").upstream(&origin).start();
    let response = gateway.get("/");
    assert_eq!((response.status, response.text().as_str()), (200, "ok"));
    for gone in ["x-named", "keep-alive", "proxy-connection"] {
        assert_eq!(response.header(gone), None, "{gone}");
    }
    assert_eq!(response.header("x-stays"), Some("2"));
    assert_eq!(response.header_all("set-cookie"), ["a=1", "b=2"]);
}

#[test]
fn a_response_without_a_date_gets_one() {
    let origin = Origin::sending("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let gateway = Gateway::with("").upstream(&origin).start();
    assert!(gateway.get("/").header("date").is_some());
    let dated = Origin::sending(
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\n\r\n",
    );
    let gateway = Gateway::with("").upstream(&dated).start();
    assert_eq!(
        gateway.get("/").header("date"),
        Some("Tue, 15 Nov 1994 08:12:31 GMT")
    );
}

#[test]
fn http2_becomes_http1_at_the_origin() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = Request::post("/over/h2?x", "hello")
        .header("host", "h2.example")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .header("te", "trailers");
    let response = http2::send(gateway.address(), &request);
    assert_eq!((response.status, response.text().as_str()), (200, "hello"));
    let seen = origin.request();
    assert_eq!(seen.header("host"), Some("h2.example"));
    assert_eq!(
        seen.header("cookie"),
        Some("a=1; b=2"),
        "one line, as HTTP/1.1 asks"
    );
    assert_eq!(
        seen.header("te"),
        Some("trailers"),
        "gRPC servers insist on it"
    );
    assert!(
        seen.header("via")
            .is_some_and(|via| via.starts_with("2.0 ")),
        "{:?}",
        seen.header("via")
    );
    assert_eq!(seen.faults(), Vec::<String>::new());
}

#[test]
fn a_request_that_has_been_here_before_is_a_loop() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    assert_eq!(gateway.get("/").status, 200);
    let via = origin.request().header("via").expect("a Via").to_owned();
    let looped = gateway.send(&Request::get("/").header("via", &via));
    assert!(
        matches!(looped.status, 400 | 508),
        "a request with our own Via was answered {}",
        looped.status
    );
    assert_eq!(
        gateway
            .send(&Request::get("/").header("via", "1.1 somebody-else"))
            .status,
        200
    );
    assert_eq!(
        origin.requests()[1]
            .header_all("via")
            .join(", ")
            .matches("1.1")
            .count(),
        2,
        "ours is added to theirs"
    );
}

#[test]
fn obs_text_passes_unchanged() {
    let origin = Origin::ok();
    let gateway = Gateway::with("").upstream(&origin).start();
    let bytes =
        b"GET / HTTP/1.1\r\nHost: a.example\r\nX-Name: caf\xe9\r\nConnection: close\r\n\r\n";
    let reply = raw::send(gateway.address(), bytes, std::time::Duration::from_secs(5));
    assert_eq!(reply.statuses(), ["200"]);
    assert_eq!(origin.request().header("x-name"), Some("caf\u{e9}"));
}

/// `X-Forwarded-For` and `Forwarded` at the origin, if addresses are read from `header`.
fn addresses_told(header: &str, fields: &[(&str, &str)]) -> (Option<String>, Option<String>) {
    let origin = Origin::ok();
    let toml = format!("{TRUSTING}header = \"{header}\"\n");
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let request = fields
        .iter()
        .fold(Request::get("/"), |request, (name, value)| {
            request.header(name, value)
        });
    assert_eq!(gateway.send(&request).status, 200);
    let seen = origin.request();
    let owned = |name: &str| seen.header(name).map(str::to_owned);
    (owned("x-forwarded-for"), owned("forwarded"))
}

#[test]
fn of_two_lists_only_the_one_that_trusted_proxies_keep_is_handed_on() {
    let both = [
        ("x-forwarded-for", "198.51.100.7"),
        ("forwarded", "for=198.51.100.8;host=\"a,b\""),
    ];
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(
        addresses_told("x-forwarded-for", &both),
        (some("198.51.100.7, 127.0.0.1"), None)
    );
    assert_eq!(
        addresses_told("forwarded", &both),
        (
            some("198.51.100.8, 127.0.0.1"),
            some("for=198.51.100.8;host=\"a,b\", for=127.0.0.1;proto=http")
        )
    );
    let one = [both[0], both[1], ("cf-connecting-ip", "198.51.100.9")];
    assert_eq!(
        addresses_told("cf-connecting-ip", &one),
        (some("198.51.100.9, 127.0.0.1"), None)
    );
    assert_eq!(addresses_told("none", &both), (some("127.0.0.1"), None));
}

#[test]
fn a_forwarded_field_that_cannot_be_read_does_not_spoil_ours() {
    let broken = [("forwarded", "for=\"198.51.100.8")];
    let ours = (
        Some("127.0.0.1".to_owned()),
        Some("for=127.0.0.1;proto=http".to_owned()),
    );
    assert_eq!(addresses_told("forwarded", &broken), ours);
    assert_eq!(addresses_told("forwarded", &[]), ours);
}
