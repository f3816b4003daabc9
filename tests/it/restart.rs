//! Restarts: clients notice nothing, and the service manager is informed.

use std::{
    io::Read,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tempfile::TempDir;

use crate::support::{
    Broken, Client, Gateway, Origin, Request,
    cli::tidegate_command,
    eventually,
    http2::block_on,
    signal::signal,
    wait::eventually_eq,
    wait::time_passes,
    websocket::{AGREED, echo, handshake, send_back},
};

/// A gateway started by a service manager, with an inherited listening socket.
struct Activated {
    child: Child,
    folder: TempDir,
}

impl Activated {
    /// `toml` must name the socket `systemd:web`.
    fn start(socket: &TcpListener, toml: &str) -> Activated {
        let (folder, config) = Gateway::with(toml).write();
        let gateway = tidegate_command(folder.path());
        let mut shell = Command::new("sh");
        // the socket arrives as standard input, and moves to the descriptor that a service manager
        // uses
        let script = "exec 3<&0 0</dev/null; export LISTEN_PID=$$; exec \"$0\" \"$@\"";
        shell
            .args(["-c", script])
            .arg(gateway.get_program())
            .args(["run", "--config"])
            .arg(&config)
            .arg("--ready-file")
            .arg(folder.path().join("ready.json"))
            .envs([("LISTEN_FDS", "1"), ("LISTEN_FDNAMES", "web")])
            .stdin(Stdio::from(OwnedFd::from(
                socket.try_clone().expect("a descriptor"),
            )))
            .stderr(std::fs::File::create(folder.path().join("log")).expect("it is writable"));
        let child = shell.spawn().expect("sh starts");
        Activated { child, folder }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn ready(&self) -> serde_json::Value {
        let file = self.folder.path().join("ready.json");
        let text = eventually("the gateway to be ready", || {
            std::fs::read_to_string(&file).map_err(|error| format!("{error}\n{}", self.log()))
        });
        serde_json::from_str(&text).expect("it is JSON")
    }

    fn wait(&mut self) -> Option<i32> {
        eventually("the gateway to end", || {
            match self.child.try_wait().expect("a child can be asked") {
                Some(status) => Ok(status.code()),
                None => Err(self.log()),
            }
        })
    }
}

impl Drop for Activated {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const ACTIVATED: &str = "[[listen]]\naddress = \"systemd:web\"\n";

#[test]
fn a_socket_of_the_service_manager_outlives_the_gateway() {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = socket.local_addr().expect("a bound listener");
    let mut first = Activated::start(&socket, ACTIVATED);
    let ready = first.ready();
    assert_eq!(ready["listeners"][0], address.to_string());

    // clients connect without a pause while one gateway ends and another begins
    let over = Arc::new(AtomicBool::new(false));
    let (served, stop) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&over));
    let count = Arc::clone(&served);
    let clients = thread::spawn(move || {
        while !stop.load(SeqCst) {
            let request = Request::get("/").header("connection", "close");
            let answer = Client::connect(address).try_send(&request);
            assert_eq!(answer.map(|response| response.status), Ok(200));
            count.fetch_add(1, SeqCst);
        }
    });
    let more = |than: usize| {
        eventually("more clients to be served", || match served.load(SeqCst) {
            now if now > than + 20 => Ok(now),
            now => Err(now.to_string()),
        })
    };
    let before = more(0);
    signal(first.child.id(), "TERM");
    assert_eq!(first.wait(), Some(0), "{}", first.log());
    let mut second = Activated::start(&socket, ACTIVATED);
    second.ready();
    more(served.load(SeqCst).max(before));
    over.store(true, SeqCst);
    clients.join().expect("no client was refused");
    signal(second.child.id(), "TERM");
    assert_eq!(second.wait(), Some(0), "{}", second.log());
}

#[test]
fn a_socket_that_nobody_handed_over_is_an_error_that_says_so() {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let mut other = Activated::start(&socket, "[[listen]]\naddress = \"systemd:admin\"\n");
    assert_eq!(other.wait(), Some(1));
    let log = other.log();
    assert!(
        log.contains("cannot listen on systemd:admin") && log.contains("only web"),
        "{log}"
    );

    let refused = Gateway::with(ACTIVATED).refuse();
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stderr.contains("no socket was inherited"),
        "{refused}"
    );
}

#[test]
fn the_service_manager_is_told_when_the_gateway_is_ready_reloads_and_stops() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    let patience = Some(Duration::from_secs(60));
    manager.set_read_timeout(patience).expect("a timeout");
    let told = || {
        let mut state = [0; 256];
        let length = manager
            .recv(&mut state)
            .expect("the gateway says something");
        let state = String::from_utf8_lossy(&state[..length]).into_owned();
        state.lines().next().unwrap_or_default().to_owned()
    };
    let mut gateway = Gateway::with("")
        .env("NOTIFY_SOCKET", path.to_str().expect("a plain path"))
        .start();
    assert_eq!(told(), "READY=1");
    gateway.signal("HUP");
    assert_eq!([told(), told()], ["RELOADING=1", "READY=1"]);
    gateway.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    assert!(gateway.wait().success());
}

#[test]
fn readiness_fails_before_the_listener_closes() {
    let mut gateway = Gateway::with("[server]\ndrain_delay = \"2s\"\n").start();
    gateway.signal("TERM");
    eventually_eq("/readyz while draining", Ok(503), || {
        gateway.try_admin("/readyz").map(|response| response.status)
    });
    assert_eq!(
        gateway.get("/").status,
        200,
        "a new connection is still taken"
    );
    let address = gateway.address();
    eventually("the listener to close", || {
        match TcpStream::connect(address) {
            Ok(_) => Err("a new connection was taken".into()),
            Err(_) => Ok(()),
        }
    });
    assert!(gateway.wait().success());
}

#[test]
fn another_gateway_takes_over_at_the_same_addresses() {
    let mut old = Gateway::with("").start();
    let (address, admin) = (old.address(), old.admin_address());
    let listen = format!("[[listen]]\naddress = \"{address}\"\n[admin]\naddress = \"{admin}\"\n");
    let (folder, config) = Gateway::with(&listen).write();
    let config = config.to_str().expect("a plain path");

    let mut kept = old.connect();
    assert_eq!(kept.send(&Request::get("/")).status, 200);
    let new = Gateway::run(&["--config", config, "--beside"]);
    assert_eq!((new.address(), new.admin_address()), (address, admin));
    old.signal("USR1");
    // on an open connection, the request after the signal is still answered, with `Connection:
    // close`
    let last = eventually("an answer that ends the connection", || {
        let answer = kept.try_send(&Request::get("/"));
        let answer = answer.unwrap_or_else(|broken| panic!("a kept connection: {broken:?}"));
        assert_eq!(answer.status, 200);
        match answer.header("connection") {
            Some("close") => Ok(answer),
            _ => Err("it stays open".to_owned()),
        }
    });
    assert_eq!(last.status, 200);
    assert!(old.wait().success());
    for _ in 0..20 {
        assert_eq!(new.get("/").status, 200);
        assert_eq!(new.admin("/readyz").status, 200);
    }
    drop(folder);
}

#[test]
fn a_gateway_that_is_not_to_be_replaced_is_not_joined_by_another() {
    let old = Gateway::with("").start();
    let listen = format!("[[listen]]\naddress = \"{}\"\n", old.address());
    let refused = Gateway::with(&listen).refuse();
    assert!(refused.stderr.contains("cannot listen on"), "{refused}");
    let admin = format!("[admin]\naddress = \"{}\"\n", old.admin_address());
    let refused = Gateway::with(&admin).refuse();
    assert!(refused.stderr.contains("(admin)"), "{refused}");
}

/// One kind of client under load; returns the number of answered requests.
type Load = JoinHandle<usize>;

/// Sends requests in sequence on one connection until a response closes it.
fn http1(address: SocketAddr) -> Load {
    thread::spawn(move || {
        let mut client = Client::connect(address);
        for answered in 1.. {
            let body = vec![b'x'; 3_000];
            let answer = match client.try_send(&Request::post("/", body)) {
                Ok(answer) => answer,
                Err(broken) => panic!("request {answered} on a kept connection: {broken:?}"),
            };
            assert_eq!((answer.status, answer.body.len()), (200, 3_000));
            if answer.header("connection") == Some("close") {
                return answered;
            }
        }
        unreachable!("the range has no end")
    })
}

/// Keeps four streams of one connection busy until GOAWAY.
fn http2(address: SocketAddr) -> Load {
    thread::spawn(move || {
        block_on(async move {
            let stream = tokio::net::TcpStream::connect(address)
                .await
                .expect("it listens");
            let (mut client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
            let driven = tokio::spawn(connection);
            let mut answered = 0;
            loop {
                let mut under_way = Vec::new();
                let mut is_over = false;
                for _ in 0..4 {
                    client = match client.ready().await {
                        Ok(client) => client,
                        Err(error) => {
                            assert!(error.is_go_away() || error.is_io(), "{error}");
                            driven.abort();
                            return answered;
                        }
                    };
                    let request = http::Request::get("http://gateway/")
                        .body(())
                        .expect("a request");
                    match client.send_request(request, true) {
                        Ok((response, _)) => under_way.push(response),
                        Err(_) => is_over = true,
                    }
                }
                for response in under_way {
                    match response.await {
                        Ok(response) => {
                            assert_eq!(response.status(), 200);
                            answered += 1;
                        }
                        // above the last stream of the GOAWAY: the gateway has not processed it
                        Err(error) => {
                            let refused = error.reason() == Some(h2::Reason::REFUSED_STREAM);
                            assert!(error.is_go_away() || refused, "{error:?}");
                            is_over = true;
                        }
                    }
                }
                if is_over {
                    driven.abort();
                    return answered;
                }
            }
        })
    })
}

/// Sends on a WebSocket until `over`, then until the close reaches it.
fn websocket(address: SocketAddr, over: Arc<AtomicBool>) -> Load {
    thread::spawn(move || {
        let mut client = Client::connect(address);
        assert_eq!(client.begin(&handshake()).status, 101);
        let mut exchanged = 0;
        while !over.load(SeqCst) {
            client.write(b"ping").expect("an open WebSocket");
            let mut answer = [0; 4];
            client
                .stream_mut()
                .read_exact(&mut answer)
                .expect("an open WebSocket");
            exchanged += usize::from(&answer == b"ping");
            time_passes(Duration::from_millis(5), "a client paces itself");
        }
        exchanged
    })
}

#[test]
fn sigterm_under_load_fails_no_request_that_was_accepted() {
    let origin = Origin::new(|exchange| {
        if exchange.request.header("upgrade").is_none() {
            let body = exchange.read_body()?;
            time_passes(Duration::from_millis(2), "the origin works");
            return exchange.respond(200, &[], &body);
        }
        exchange.write(AGREED.as_bytes())?;
        send_back(exchange)
    });
    let mut gateway = Gateway::with("[server]\ndrain_timeout = \"60s\"\n")
        .upstream(&origin)
        .start();
    let address = gateway.address();
    let over = Arc::new(AtomicBool::new(false));
    let requests: Vec<Load> = (0..8).map(|_| http1(address)).collect();
    let streams: Vec<Load> = (0..4).map(|_| http2(address)).collect();
    let talks: Vec<Load> = (0..4)
        .map(|_| websocket(address, Arc::clone(&over)))
        .collect();
    eventually("load", || {
        match gateway.metric("tidegate_requests_total{code=\"200\"}") {
            served if served > 300.0 => Ok(()),
            served => Err(served.to_string()),
        }
    });
    gateway.signal("TERM");
    let count = |load: Vec<Load>| -> usize {
        let done = load
            .into_iter()
            .map(|client| client.join().expect("no request failed"));
        done.sum()
    };
    let (requests, streams) = (count(requests), count(streams));
    assert!(
        requests > 0 && streams > 0,
        "{requests} requests, {streams} streams"
    );
    // the other clients have left; active ones may finish
    assert!(gateway.is_running());
    time_passes(
        Duration::from_millis(1_500),
        "a gateway that waits for nobody would have ended",
    );
    assert!(
        gateway.is_running(),
        "open WebSockets have until drain_timeout"
    );
    over.store(true, SeqCst);
    assert!(count(talks) > 100);
    assert_eq!(gateway.wait().code(), Some(0));
    let refused = TcpStream::connect(address).map(|_| Broken::Closed);
    assert!(refused.is_err(), "nobody listens any more");
}

#[test]
fn a_websocket_that_goes_on_is_cut_at_the_deadline() {
    let origin = echo();
    let mut gateway = Gateway::with("[server]\ndrain_timeout = \"1500ms\"\n")
        .upstream(&origin)
        .start();
    let mut client = Client::connect(gateway.address());
    assert_eq!(client.begin(&handshake()).status, 101);
    gateway.signal("TERM");
    assert_eq!(gateway.wait().code(), Some(0));
    assert!(client.closes_within(Duration::from_secs(10)));
}
