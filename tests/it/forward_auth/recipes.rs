//! The recipes of docs/forward-auth.md, each with the real proxy. The blocks are read from the page
//! and run unchanged, except for addresses.

use std::{
    fs,
    io::Write as _,
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
};

use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::{
    Client, Gateway, Origin, Request, Response, redis::free_address, wait::eventually,
};

const PAGE: &str = include_str!("../../../docs/forward-auth.md");

/// Alice's key is `hunter2`.
const KEYS: &str = "[keys.alice]\n\
    sha256 = \"f52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7\"\ntier = \"pro\"\n";

const LIMITED: &str = r#"
    [client_ip]
    trusted_proxies = ["127.0.0.1"]
    [[user]]
    from = "api_key"
    header = "x-api-key"
    keys_file = "keys.toml"
    [[user]]
    from = "header"
    header = "x-user-id"
    tier_header = "x-user-tier"
    [gateway]
    limits = ["per_client", "watched"]
    [limit.per_client]
    key = ["user_or_ip"]
    rate = "1/h"
    burst = 3
    [limit.watched]
    key = ["user"]
    rate = "1/h"
    burst = 1
    mode = "tag"
    [log]
    access = "all"
"#;

/// The value in a client's forged fields.
const FORGED: &str = "forged";
const FORGERIES: [&str; 16] = [
    "X-User-Id",
    "x-user-id",
    "X-User-Tier",
    "X-Rate-Limit-Tier",
    "X-RateLimit-Over",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-User",
    "X-Forwarded-Email",
    "Forwarded",
    "X-Real-IP",
    "X_User_Id",
    "X_User_Tier",
    "X_Rate_Limit_Tier",
    "X_RateLimit_Over",
    "X_Forwarded_For",
];
/// More spellings, which only proxies that match names by pattern can remove.
const STRANGE: [&str; 3] = ["X_User-Id", "X.User.Id", "X-User_Tier"];

/// A proxy that runs one recipe; stopped on drop.
struct Proxy {
    child: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Proxy {
    /// Starts a program with the files that `set_up` writes. `None`, with a message, if it is not
    /// installed.
    fn start(
        program: &str,
        set_up: impl FnOnce(&Path, SocketAddr) -> Vec<String>,
    ) -> Option<Proxy> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let address = free_address();
        let arguments = set_up(folder.path(), address);
        let log = fs::File::create(folder.path().join("log")).expect("a temporary folder");
        let started = Command::new(program)
            .args(arguments)
            .current_dir(folder.path())
            .env("HOME", folder.path())
            .env("XDG_DATA_HOME", folder.path())
            .env("XDG_CONFIG_HOME", folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn();
        let mut proxy = match started {
            Ok(child) => Proxy {
                child,
                address,
                _folder: folder,
            },
            Err(error) => {
                assert_ne!(program, "nginx", "{error}; scripts/test installs nginx");
                // bypasses the output capture of the test runner
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: the recipe for {program}, which is not installed ({error})"
                );
                return None;
            }
        };
        eventually("the proxy to listen", || {
            let said = || fs::read_to_string(proxy._folder.path().join("log")).unwrap_or_default();
            if let Ok(Some(status)) = proxy.child.try_wait() {
                panic!("{program} ended with {status}: {}", said());
            }
            TcpStream::connect(address)
                .map(drop)
                .map_err(|error| format!("{error}: {}", said()))
        });
        Some(proxy)
    }

    /// A request of a client at 127.0.0.2; the proxies are at 127.0.0.1.
    fn send(&self, request: &Request) -> Response {
        self.send_from([127, 0, 0, 2], request)
    }

    fn send_from(&self, source: [u8; 4], request: &Request) -> Response {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let source = SocketAddr::from((source, 0));
        socket
            .bind(&source.into())
            .expect("127.0.0.0/8 is this machine's");
        socket
            .connect(&self.address.into())
            .expect("the proxy listens");
        Client::over(socket.into()).send(request)
    }
}

/// The block of a section, with these texts replaced; all must be present.
fn recipe(section: &str, replaced: &[(&str, &str)]) -> String {
    let title = format!("\n## {section}\n");
    let (_, rest) = PAGE.split_once(&title).expect("the page has the section");
    let (_, rest) = rest.split_once("```").expect("it has a block");
    let (_, rest) = rest.split_once('\n').expect("the block has lines");
    let (block, _) = rest.split_once("```").expect("the block ends");
    let mut block = block.to_owned();
    for (text, by) in replaced {
        assert!(block.contains(text), "the recipe for {section} has {text}");
        block = block.replace(text, by);
    }
    block
}

fn request(target: &str) -> Request {
    Request::get(target).header("host", "shop.example")
}

fn forging(names: &[&str]) -> Request {
    names.iter().fold(request("/a?b=c"), |request, name| {
        request.header(name, FORGED)
    })
}

struct Setting {
    gateway: Gateway,
    origin: Origin,
}

impl Setting {
    fn start() -> Setting {
        let gateway = Gateway::with(LIMITED).file("keys.toml", KEYS).start();
        Setting {
            gateway,
            origin: Origin::ok(),
        }
    }

    fn admin(&self) -> String {
        self.gateway.admin_address().to_string()
    }

    fn origin(&self) -> String {
        self.origin.address().to_string()
    }

    /// Checks that apply to every proxy. `strange`: additional spellings that this one removes.
    fn check(&self, proxy: &Proxy, strange: &[&str], keeps_body: bool) {
        // an anonymous client that claims several names
        let names: Vec<&str> = FORGERIES.iter().chain(strange).copied().collect();
        let response = proxy.send(&forging(&names));
        assert_eq!(response.status, 200, "{response:?}");
        let seen = self.origin.requests().pop().expect("it was served");
        assert_eq!(seen.target, "/a?b=c");
        for (name, value) in &seen.headers {
            assert!(!value.contains(FORGED), "the origin saw {name}: {value}");
        }
        assert_eq!(seen.header("x-user-id").unwrap_or_default(), "");
        let line = || {
            let output = self.gateway.output();
            let found = output.lines().find(|line| line.contains("/a"));
            found.map(str::to_owned).ok_or(output.clone())
        };
        let line = eventually("the access line", line);
        assert!(
            line.contains("127.0.0.2") && !line.contains(FORGED),
            "the client is who it is: {line}"
        );

        // changed addresses and names give no second allowance
        for attempt in 0..2 {
            let attempt = format!("203.0.113.{attempt}");
            let request = request("/").header("x-forwarded-for", &attempt);
            let request = request.header("x-user-id", &attempt);
            assert_eq!(proxy.send(&request).status, 200);
        }
        let denied = proxy.send(&request("/").header("x-forwarded-for", "203.0.113.99"));
        assert_eq!(denied.status, 429, "{denied:?}");
        assert!(denied.retry_after().is_some_and(|wait| wait > 3_000));
        assert_eq!(denied.remaining("per_client"), 0);
        let kind = denied.header("content-type").unwrap_or_default();
        assert_eq!(kind.starts_with("application/problem+json"), keeps_body);
        assert_eq!(denied.text().contains("per_client"), keeps_body);

        // an authenticated client that claims another name
        let alice = forging(&FORGERIES[..5]).header("x-api-key", "hunter2");
        assert_eq!(proxy.send(&alice).status, 200);
        assert_eq!(proxy.send(&alice).status, 200);
        let seen = self.origin.requests();
        let [.., first, second] = seen.as_slice() else {
            panic!("{} requests", seen.len());
        };
        for seen in [first, second] {
            assert_eq!(seen.header("x-user-id"), Some("alice"));
            assert_eq!(seen.header("x-rate-limit-tier"), Some("pro"));
        }
        assert_eq!(first.header("x-ratelimit-over").unwrap_or_default(), "");
        assert_eq!(second.header("x-ratelimit-over"), Some("watched"));
        let guess = request("/").header("x-api-key", "guess");
        let guess = proxy.send_from([127, 0, 0, 4], &guess);
        assert_eq!(guess.status, 401);
    }
}

#[test]
fn nginx_passes_on_the_verified_identity_and_no_other() {
    let setting = Setting::start();
    let (admin, origin) = (setting.admin(), setting.origin());
    let recipe = recipe(
        "nginx",
        &[
            ("127.0.0.1:9901", &admin),
            ("http://backend", "http://origin"),
        ],
    );
    let proxy = Proxy::start("nginx", |folder, address| {
        let text = format!(
            "daemon off; master_process off; pid nginx.pid; error_log stderr;\nevents {{}}\n\
             http {{ access_log off; client_body_temp_path b; proxy_temp_path p; fastcgi_temp_path f;\n\
             uwsgi_temp_path u; scgi_temp_path s;\n\
             upstream origin {{ server {origin}; }}\nserver {{ listen {address};\n{recipe}\n}} }}\n"
        );
        let file = folder.join("nginx.conf");
        fs::write(&file, text).expect("a temporary folder is writable");
        let file = file.display().to_string();
        let prefix = folder.display().to_string();
        vec![
            "-p".to_owned(),
            prefix,
            "-c".to_owned(),
            file,
            "-e".to_owned(),
            "stderr".to_owned(),
        ]
    });
    let proxy = proxy.expect("nginx is installed");
    setting.check(&proxy, &STRANGE, false);

    // without tidegate requests are still served, and the client is still anonymous
    let Setting { gateway, origin } = setting;
    drop(gateway);
    let response = proxy.send(&forging(&FORGERIES));
    assert_eq!(response.status, 200, "{response:?}");
    let seen = origin.requests().pop().expect("it was served");
    for (name, value) in &seen.headers {
        assert!(!value.contains(FORGED), "the origin saw {name}: {value}");
    }
}

#[test]
fn caddy_passes_on_the_verified_identity_and_no_other() {
    let setting = Setting::start();
    let (admin, origin) = (setting.admin(), setting.origin());
    let proxy = Proxy::start("caddy", |folder, address| {
        let site = format!("http://:{}", address.port());
        let recipe = recipe(
            "Caddy",
            &[
                ("127.0.0.1:9901", &admin),
                ("example.com", &site),
                ("backend:8080", &origin),
            ],
        );
        let file = folder.join("Caddyfile");
        let text = format!("{{\n admin off\n auto_https off\n}}\n{recipe}");
        fs::write(&file, text).expect("a temporary folder is writable");
        let file = file.display().to_string();
        ["run", "--adapter", "caddyfile", "--config", &file]
            .map(str::to_owned)
            .into()
    });
    if let Some(proxy) = proxy {
        setting.check(&proxy, &STRANGE, true);
    }
}

#[test]
fn envoy_passes_on_the_verified_identity_and_no_other() {
    let setting = Setting::start();
    let (admin, origin) = (setting.gateway.admin_address(), setting.origin.address());
    let proxy = Proxy::start("envoy", |folder, address| {
        let recipe = recipe("Envoy", &[("127.0.0.1:9901", &admin.to_string())]);
        let recipe = recipe.replace('\n', "\n          ");
        let cluster = |name: &str, at: SocketAddr| {
            format!(
                "  - name: {name}\n    load_assignment:\n      cluster_name: {name}\n      endpoints:\n      - lb_endpoints:\n        \
                 - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }} }}\n",
                at.port()
            )
        };
        let text = format!(
            "static_resources:\n  listeners:\n  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }}\n    \
             filter_chains:\n    - filters:\n      - name: envoy.filters.network.http_connection_manager\n        typed_config:\n          \
             \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager\n          \
             stat_prefix: test\n          route_config:\n            virtual_hosts:\n            - name: all\n              \
             domains: [\"*\"]\n              routes:\n              - {{ match: {{ prefix: / }}, route: {{ cluster: origin }} }}\n          \
             {recipe}\n  clusters:\n{}{}",
            address.port(),
            cluster("origin", origin),
            cluster("tidegate", admin),
        );
        let file = folder.join("envoy.yaml");
        fs::write(&file, text).expect("a temporary folder is writable");
        let file = file.display().to_string();
        [
            "-c",
            &file,
            "--use-dynamic-base-id",
            "--concurrency",
            "1",
            "-l",
            "warn",
        ]
        .map(str::to_owned)
        .into()
    });
    if let Some(proxy) = proxy {
        setting.check(&proxy, &STRANGE, true);
    }
}

#[test]
fn traefik_passes_on_the_verified_identity_and_no_other() {
    let setting = Setting::start();
    let (admin, origin) = (setting.admin(), setting.origin());
    let proxy = Proxy::start("traefik", |folder, address| {
        let recipe = recipe(
            "Traefik",
            &[("127.0.0.1:9901", &admin), ("backend:8080", &origin)],
        );
        let file = folder.join("dynamic.yml");
        fs::write(&file, recipe).expect("a temporary folder is writable");
        vec![
            format!("--entrypoints.web.address={address}"),
            format!("--providers.file.filename={}", file.display()),
            "--log.level=WARN".to_owned(),
        ]
    });
    if let Some(proxy) = proxy {
        // its routes come up shortly after its listener; probe them as another client
        let ready = || match proxy.send_from([127, 0, 0, 3], &request("/ready")).status {
            404 => Err("no route yet".to_owned()),
            _ => Ok(()),
        };
        eventually("the routes", ready);
        setting.check(&proxy, &[], true);
    }
}
