//! The admin pages as a client sees them: over a socket if the connection matters, otherwise by the
//! response alone.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use http::{
    StatusCode,
    header::{ALLOW, CONTENT_TYPE},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    pages::{TIMEOUTS, Timeouts},
    *,
};
use crate::{
    config::{self, Snapshot},
    gateway::{ActiveConfig, ActiveConfigHandle, Process},
    identity, limit,
    response::{FieldFamilies, FieldsOn, ResponseSettings},
    route,
    telemetry::{LogSettings, Metrics},
    upstream,
};

const PATIENCE: Duration = Duration::from_secs(10);

const NEVER: upstream::BreakerConfig = upstream::BreakerConfig {
    failures: 0,
    pause: Duration::ZERO,
};

fn snapshot(address: &str, token: Option<&str>) -> Snapshot {
    Snapshot {
        server: config::ProcessSettings {
            max_body_buffer: 1 << 20,
            workers: None,
            drain_delay: Duration::ZERO,
            drain_timeout: Duration::ZERO,
            max_connections: 1,
            max_connections_per_ip: 1,
            max_keys: 1,
            watch_config: false,
        },
        listeners: Vec::new(),
        identity: identity::IdentitySettings::default(),
        upstreams: vec![upstream::UpstreamSettings {
            name: "up<script>".to_owned(),
            servers: Vec::new(),
            connect_timeout: Duration::ZERO,
            body_timeout: Duration::from_secs(300),
            abandoned_timeout: Duration::from_secs(30),
            response_timeout: Duration::ZERO,
            idle_timeout: Duration::ZERO,
            max_connections: 1,
            balance: upstream::Balance::RoundRobin,
            retries: 0,
            tls: upstream::UpstreamTls::default(),
            health: None,
            outlier: NEVER,
            breaker: NEVER,
            host: upstream::HostHeader::Preserve,
        }],
        limits: vec![config::LimitSettings {
            tiers: vec![("default".to_owned(), 0), ("pro".to_owned(), 1)],
            ..config::LimitSettings::new(
                "per_key",
                vec![identity::KeyPart::Ip, identity::KeyPart::Header(HOST)],
                limit::Algorithm::TokenBucket,
                [100, 600].map(per_minute).to_vec(),
            )
        }],
        redis: None,
        gateway_limits: Vec::new(),
        routes: vec![config::RouteSettings {
            name: "search".to_owned(),
            pattern: route::Pattern {
                hosts: Vec::new(),
                path: "/search".to_owned(),
                methods: Vec::new(),
            },
            upstream: 0,
            limits: vec![0],
            cost: 1,
            max_body_bytes: None,
            priority: Default::default(),
        }],
        status_path: None,
        overload: None,
        response: ResponseSettings {
            fields: FieldFamilies::default(),
            on: FieldsOn::Always,
            body: BodyStyle::ProblemJson,
            sdk: true,
        },
        admin: config::AdminSettings {
            address: address.parse().expect("tests use real addresses"),
            token: token.map(str::to_owned),
            check_identity_from: identity::TrustedProxies::default(),
        },
        log: LogSettings::default(),
        trace: crate::telemetry::trace::TraceSettings::default(),
        hash: "abc".to_owned(),
        written: config::WrittenConfig::default(),
    }
}

fn per_minute(amount: u64) -> limit::Quota {
    let amount = NonZeroU64::new(amount).expect("tests use quotas that exist");
    limit::Quota {
        amount,
        period: Duration::from_secs(60),
        burst: amount,
    }
}

fn current(address: &str, token: Option<&str>) -> Arc<ActiveConfigHandle> {
    let snapshot = Arc::new(snapshot(address, token));
    let process = Process::start(&snapshot, Metrics::install()).expect("the system has threads");
    let active = ActiveConfig::prepare(&process, snapshot, None).expect("it can be put to work");
    ActiveConfigHandle::new(Arc::new(active))
}

fn admin(address: &str, token: Option<&str>) -> AdminPages {
    admin_with(address, token, TIMEOUTS)
}

/// Most connections that may wait.
const WAITING: usize = 40;

fn admin_with(address: &str, token: Option<&str>, timeouts: Timeouts) -> AdminPages {
    let readiness = Readiness::default();
    readiness.set(ReadinessState::Ready);
    let at: std::net::SocketAddr = address.parse().expect("an address");
    let (reloads, _) = mpsc::channel(1);
    AdminPages::with_timeouts(
        current(address, token),
        at.ip(),
        readiness,
        reloads,
        WAITING,
        timeouts,
    )
}

fn local() -> AdminPages {
    admin("127.0.0.1:9901", None)
}

fn request(method: &str, uri: &str, fields: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).expect("tests ask for what can be asked")
}

fn get(admin: &AdminPages, path: &str) -> Response<String> {
    answer(admin, &request("GET", path, &[("host", "127.0.0.1:9901")]))
}

fn answer(admin: &AdminPages, request: &Request<()>) -> Response<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("a runtime").block_on(async {
        let peer = IpAddr::from([127, 0, 0, 1]);
        let connection = admin.inner.connections.enter(peer, || ()).await;
        admin.answer(request, &connection).await
    })
}

fn media_type(response: &Response<String>) -> &str {
    response.headers()[CONTENT_TYPE].to_str().expect("ASCII")
}

#[test]
fn every_endpoint_answers() {
    let admin = local();
    for (_, path) in AdminEndpoint::ALL {
        assert_eq!(get(&admin, path).status(), StatusCode::OK, "{path}");
    }
    let metrics = get(&admin, "/metrics");
    assert_eq!(
        media_type(&metrics),
        "text/plain; version=0.0.4; charset=utf-8"
    );
    assert!(metrics.body().contains("tidegate_build_info"));
}

#[test]
fn the_page_is_whole_brings_all_that_it_needs_and_holds_nothing_of_the_gateway() {
    let admin = local();
    let page = get(&admin, "/");
    assert_eq!(media_type(&page), "text/html; charset=utf-8");
    let policy = page.headers()["content-security-policy"].to_str();
    assert!(
        policy.is_ok_and(
            |policy| policy.starts_with("default-src 'none'") && !policy.contains("unsafe")
        )
    );
    let links = page
        .body()
        .split(['"'])
        .filter(|text| text.starts_with('/') && !text.contains('<'));
    let mut seen = 0;
    for link in links {
        seen += 1;
        assert_eq!(get(&admin, link).status(), StatusCode::OK, "{link}");
    }
    assert!(seen >= 5, "{seen}");
    for (path, kind) in [
        ("/dashboard.css", "text/css"),
        ("/dashboard.js", "text/javascript"),
    ] {
        let part = get(&admin, path);
        assert!(media_type(&part).starts_with(kind), "{path}");
        assert!(
            !part.body().contains("://") || path.ends_with("js"),
            "{path}"
        );
        assert!(
            !part.body().contains("innerHTML"),
            "texts of clients are no markup"
        );
    }
    assert!(
        !page.body().contains("per_key"),
        "a limit of the configuration"
    );
}

#[test]
fn readiness_follows_the_life_of_the_process() {
    let admin = local();
    for (state, status) in [
        (ReadinessState::Starting, 503),
        (ReadinessState::Ready, 200),
        (ReadinessState::Draining, 503),
    ] {
        admin.inner.readiness.set(state);
        let ready = get(&admin, "/readyz");
        assert_eq!(ready.status(), status);
        let body: Value = serde_json::from_str(ready.body()).expect("it is JSON");
        assert_eq!(body["status"], state.as_str());
        assert_eq!(get(&admin, "/healthz").status(), 200, "{state:?}");
    }
    assert_eq!(Readiness::default().state(), ReadinessState::Starting);
}

#[test]
fn what_is_not_there_is_said_as_json() {
    let response = get(&local(), "/api/v1/nothing");
    assert_eq!(response.status(), 404);
    let body: Value = serde_json::from_str(response.body()).expect("it is JSON");
    assert_eq!(body["error"], "not_found");
}

#[test]
fn other_methods_are_refused_and_the_right_ones_named() {
    let admin = local();
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let response = answer(
            &admin,
            &request(method, "/metrics", &[("host", "localhost")]),
        );
        assert_eq!(response.status(), 405, "{method}");
        assert_eq!(response.headers()[ALLOW], "GET, HEAD");
    }
    assert_eq!(
        answer(
            &admin,
            &request("HEAD", "/metrics", &[("host", "localhost")])
        )
        .status(),
        200
    );
}

#[test]
fn token_is_asked_for_everywhere_but_on_probes() {
    let admin = admin("0.0.0.0:9901", Some("s3cret"));
    let status = |path: &str, authorization: Option<&str>| {
        let fields: Vec<_> = authorization
            .into_iter()
            .map(|value| ("authorization", value))
            .collect();
        answer(&admin, &request("GET", path, &fields))
            .status()
            .as_u16()
    };
    assert_eq!(status("/metrics", Some("Bearer s3cret")), 200);
    assert_eq!(status("/metrics", Some("bearer s3cret")), 200);
    for wrong in [
        None,
        Some(""),
        Some("Bearer"),
        Some("Bearer "),
        Some("Bearer s3cre"),
        Some("Bearer s3crets"),
        Some("Basic s3cret"),
    ] {
        assert_eq!(status("/metrics", wrong), 401, "{wrong:?}");
        assert_eq!(status("/", wrong), 200, "the page itself says nothing");
        assert_eq!(
            status("/nothing", wrong),
            401,
            "whether a path exists is told to nobody without the token"
        );
        assert_eq!(status("/healthz", wrong), 200);
        assert_eq!(status("/readyz", wrong), 200);
    }
    let response = answer(&admin, &request("GET", "/metrics", &[]));
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
}

#[test]
fn empty_token_opens_nothing() {
    let admin = admin("0.0.0.0:9901", Some(""));
    assert_eq!(
        answer(
            &admin,
            &request("GET", "/metrics", &[("authorization", "Bearer ")])
        )
        .status(),
        401
    );
}

#[test]
fn names_that_point_elsewhere_are_refused_on_loopback() {
    let admin = local();
    let status = |fields: &[(&str, &str)]| {
        answer(&admin, &request("GET", "/metrics", fields))
            .status()
            .as_u16()
    };
    for host in [
        "localhost",
        "LOCALHOST:9901",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.9.9.9",
        "[::1]",
        "[::1]:9901",
    ] {
        assert_eq!(status(&[("host", host)]), 200, "{host}");
    }
    for host in [
        "evil.example",
        "evil.example:9901",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "a b",
    ] {
        assert_eq!(status(&[("host", host)]), 421, "{host}");
    }
    assert_eq!(status(&[]), 421);
    assert_eq!(
        status(&[("host", "localhost"), ("host", "evil.example")]),
        421
    );
    let absolute = request(
        "GET",
        "http://evil.example/metrics",
        &[("host", "localhost")],
    );
    assert_eq!(answer(&admin, &absolute).status(), 421);
}

#[test]
fn every_answer_is_kept_out_of_caches() {
    for path in ["/", "/metrics", "/readyz", "/nothing"] {
        let response = get(&local(), path);
        assert_eq!(response.headers()[CACHE_CONTROL], "no-store", "{path}");
        assert_eq!(
            response.headers()["x-content-type-options"],
            "nosniff",
            "{path}"
        );
    }
}

struct Serving {
    address: std::net::SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Serving {
    async fn start() -> Serving {
        Serving::of(local()).await
    }

    async fn of(admin: AdminPages) -> Serving {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("loopback has ports");
        let address = listener.local_addr().expect("it is bound");
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(admin.serve(listener, shutdown));
        Serving {
            address,
            stop,
            task,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("it listens")
    }

    async fn ask(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it reads");
        read_all(&mut stream).await
    }

    async fn stop(self) {
        self.stop.send(()).expect("it waits for the signal");
        time::timeout(PATIENCE, self.task)
            .await
            .expect("it ends")
            .expect("it does not panic");
    }
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    // a reset after the response is fine: the client's body was not read
    let _ = read.expect("the answer ends");
    String::from_utf8(answer).expect("answers are text")
}

#[tokio::test]
async fn answers_over_a_socket_and_ends_when_told() {
    let serving = Serving::start().await;
    let answer = serving
        .ask("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("{\"status\":\"ok\"}\n"), "{answer}");
    let head = serving
        .ask("HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
    serving.stop().await;
}

#[tokio::test]
async fn bodies_are_not_waited_for() {
    let serving = Serving::start().await;
    let answer = serving
        .ask("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx")
        .await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    serving.stop().await;
}

#[tokio::test]
async fn heads_without_end_are_refused() {
    let serving = Serving::start().await;
    let long = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nA: {}\r\n\r\n",
        "a".repeat(HEAD_MAX_BYTES)
    );
    let answer = serving.ask(&long).await;
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
        "{answer}"
    );
    let many = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        "a: b\r\n".repeat(HEAD_MAX_FIELDS + 1)
    );
    let answer = serving.ask(&many).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    serving.stop().await;
}

#[tokio::test]
async fn silent_clients_are_closed_at_their_deadline() {
    let instant = Duration::from_millis(1);
    for timeouts in [
        Timeouts {
            head: instant,
            ..TIMEOUTS
        },
        Timeouts {
            connection: instant,
            ..TIMEOUTS
        },
    ] {
        let serving = Serving::of(admin_with("127.0.0.1:9901", None, timeouts)).await;
        let mut silent = Vec::new();
        for _ in 0..WAITING + 1 {
            silent.push(serving.connect().await);
        }
        for stream in &mut silent {
            assert_eq!(read_all(stream).await, "", "{timeouts:?}");
        }
        serving.stop().await;
    }
}

#[tokio::test]
async fn client_that_hangs_does_not_hold_up_the_end() {
    let serving = Serving::start().await;
    let mut hanging = serving.connect().await;
    hanging
        .write_all(b"GET / HTTP/1.1\r\nHo")
        .await
        .expect("it reads");
    let answer = serving
        .ask("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    serving.stop().await;
    assert_eq!(read_all(&mut hanging).await, "");
}
