//! Requests whose clients leave: a concurrency limit bounds the origin's work, not the clients'
//! patience.
//!
//! Each test counts at the origin how many requests it works on at the same time.

use std::{
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use http::Response;
use socket2::SockRef;

use crate::support::{
    Client, Gate, Gateway, Origin, Redis, Request, eventually,
    frames::{Connection, HEADERS, RST_STREAM},
    h2c::H2cOrigin,
    origin::Exchange,
    raw,
    secured::{self, Secured},
    tls::{Authority, Hello},
    wait::{eventually_eq, time_passes, time_passes_in_task},
    websocket::{AGREED, handshake},
};

/// Two concurrent requests in total.
const TWO: &str = "[limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = 2\n[gateway]\nlimits = [\"slots\"]\n";
/// Requests reset in each test.
const RESETS: usize = 10_000;
const CLIENTS: usize = 8;
/// How long the origin works on each request.
const WORK: Duration = Duration::from_millis(4);
const CANCEL: [u8; 4] = 8u32.to_be_bytes();

/// Counts the origin's work.
#[derive(Clone, Default)]
struct Workplace(Arc<(AtomicUsize, AtomicUsize, AtomicUsize)>);

impl Workplace {
    fn begin(&self) {
        let (now, most, all) = &*self.0;
        all.fetch_add(1, SeqCst);
        most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
    }

    fn end(&self) {
        self.0.0.fetch_sub(1, SeqCst);
    }

    fn begun(&self) -> usize {
        self.0.2.load(SeqCst)
    }

    fn work(&self) {
        self.begin();
        time_passes(WORK, "the origin works");
        self.end();
    }

    /// At most two at a time, over enough requests to prove it: a loaded machine admits few of a
    /// flood.
    fn check(&self) {
        let (_, most, all) = &*self.0;
        let (most, all) = (most.load(SeqCst), all.load(SeqCst));
        println!("{all} requests in all, at most {most} at the same time");
        assert!(most <= 2, "{most} requests at work at the same time");
        assert!(all >= 1, "no request came to the origin");
    }
}

/// An origin that counts its work, with the parts of its response sent before and after it.
fn working(at: &Workplace, before: &'static str, after: &'static str) -> Origin {
    let at = at.clone();
    Origin::new(move |exchange| {
        exchange.write(before.as_bytes())?;
        at.work();
        exchange.write(after.as_bytes())
    })
}

const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Closes a connection with a reset.
fn reset(stream: &TcpStream) {
    // a zero linger turns the close into a RST
    let set = SockRef::from(stream).set_linger(Some(Duration::ZERO));
    set.expect("a socket");
}

/// A pause that varies with `number`, up to two milliseconds. A few are long enough for a loaded
/// machine to begin.
fn moment(number: usize) -> Duration {
    let brief = Duration::from_micros(((number * 7919) % 2000) as u64);
    match number % 199 {
        0 => Duration::from_millis(60),
        _ => brief,
    }
}

/// Floods until a request has come to the origin: a loaded machine may read a whole flood too late.
fn flood_until_begun(at: &Workplace, flood: impl Fn()) {
    for _ in 0..10 {
        flood();
        if at.begun() > 0 {
            break;
        }
    }
}

/// Sends `count` requests from several clients at once.
fn flood(count: usize, request: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let request = &request;
            scope.spawn(move || (client..count).step_by(CLIENTS).for_each(request));
        }
    });
}

/// Sends a request and resets it after a moment.
fn send_and_reset(address: SocketAddr, bytes: &[u8], number: usize) {
    use std::io::Write as _;
    let mut stream = raw::open(address);
    stream.write_all(bytes).expect("the gateway reads");
    time_passes(moment(number), "a client's patience ends");
    reset(&stream);
}

/// Opens streams and resets each after a moment; reconnects when the gateway closes the connection.
fn reset_streams<S: std::io::Read + std::io::Write>(
    open: impl Fn() -> Connection<S> + Sync,
    count: usize,
) {
    flood(CLIENTS, |client| {
        let mut numbers = client * count / CLIENTS..(client + 1) * count / CLIENTS;
        while !numbers.is_empty() {
            let mut connection = open();
            for (stream, number) in (1..40).step_by(2).zip(numbers.by_ref()) {
                if !connection.get(stream, "/") {
                    break;
                }
                time_passes(moment(number), "a client's patience ends");
                connection.send(RST_STREAM, 0, stream, &CANCEL);
            }
        }
    });
}

/// All slots are free at the end. Requests of clients that left may still wait to be read.
fn settled(gateway: &Gateway) {
    gateway.wait_for_metric("tidegate_in_flight", 0.0);
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    eventually_eq("status and free slots", (200, 1), || {
        let answer = gateway.get("/");
        (answer.status, answer.remaining("slots"))
    });
}

#[test]
fn connections_that_are_reset_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let gateway = Gateway::with(TWO).upstream(&origin).start();
    let request = Request::get("/").to_bytes();
    flood_until_begun(&at, || {
        flood(RESETS, |number| {
            send_and_reset(gateway.address(), &request, number)
        })
    });
    at.check();
    settled(&gateway);
}

#[test]
fn connections_that_are_closed_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let gateway = Gateway::with(TWO).upstream(&origin).start();
    flood_until_begun(&at, || {
        flood(1_000, |number| {
            let mut client = gateway.connect();
            client
                .write(&Request::get("/").to_bytes())
                .expect("the gateway reads");
            time_passes(moment(number), "a client's patience ends");
        });
    });
    at.check();
    settled(&gateway);
}

#[test]
fn streams_that_are_reset_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let gateway = Gateway::with(TWO).upstream(&origin).start();
    flood_until_begun(&at, || {
        reset_streams(|| Connection::open(gateway.address(), &[]), RESETS);
    });
    at.check();
    settled(&gateway);
}

#[test]
fn over_tls_resets_do_not_make_the_origin_work_on_more() {
    const NAME: &str = "api.example.com";
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let authority = Authority::new("test");
    let issued = authority.server(&[NAME]);
    let toml = format!(
        "{TWO}\n[[listen]]\naddress = \"127.0.0.1:0\"\n[listen.tls]\n\
         certificates = [{{ cert = \"server.pem\", key = \"server.key\" }}]\n"
    );
    let gateway = Gateway::with(&toml)
        .file("server.pem", &issued.cert)
        .file("server.key", &issued.key)
        .upstream(&origin)
        .start();
    let hello = Hello::new(&authority, NAME).offering(&["h2"]);
    let connect = |hello: &Hello| hello.connect(gateway.address()).expect("a handshake");
    reset_streams(
        || Connection::begin(connect(&hello).into_stream(), &[]),
        RESETS,
    );
    let hello = Hello::new(&authority, NAME).offering(&["http/1.1"]);
    flood(500, |number| {
        let mut client = connect(&hello);
        client
            .write(&Request::get("/").to_bytes())
            .expect("the gateway reads");
        time_passes(moment(number), "a client's patience ends");
        reset(&client.stream().sock);
    });
    gateway.wait_for_metric("tidegate_in_flight", 0.0);
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    let answer = connect(&hello).send(&Request::get("/"));
    assert_eq!((answer.status, answer.remaining("slots")), (200, 1));
    at.check();
}

#[test]
fn responses_that_are_left_half_way_do_not_make_the_origin_work_on_more() {
    let length = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl";
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nsl\r\n";
    for (before, after) in [(length, "ow"), (chunked, "2\r\now\r\n0\r\n\r\n")] {
        let at = Workplace::default();
        let origin = working(&at, before, after);
        let gateway = Gateway::with(TWO).upstream(&origin).start();
        flood_until_begun(&at, || {
            flood(2_000, |_| {
                let mut client = gateway.connect();
                client.begin(&Request::get("/"));
                reset(client.stream());
            });
        });
        at.check();
        settled(&gateway);
    }
}

#[test]
fn uploads_that_are_broken_off_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let place = at.clone();
    let origin = Origin::new(move |exchange: &mut Exchange<'_>| {
        place.begin();
        let read = exchange.read_body();
        // the origin notices, and continues to work
        time_passes(WORK, "the origin works");
        place.end();
        read?;
        exchange.respond(200, &[], b"ok")
    });
    let gateway = Gateway::with(TWO).upstream(&origin).start();
    let upload = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 100\r\n\r\nsome of it";
    flood_until_begun(&at, || {
        flood(2_000, |number| {
            send_and_reset(gateway.address(), upload, number)
        });
    });
    at.check();
    settled(&gateway);
}

#[test]
fn websockets_that_are_reset_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let place = at.clone();
    let origin = Origin::new(move |exchange| {
        if exchange.request.header("upgrade").is_none() {
            return exchange.respond(200, &[], b"ok");
        }
        place.begin();
        let agreed = exchange.write(AGREED.as_bytes());
        while agreed.is_ok() && exchange.read_some().is_ok() {}
        // the origin notices, and continues to work
        time_passes(WORK, "the origin works");
        place.end();
        exchange.close()
    });
    let gateway = Gateway::with(TWO).upstream(&origin).start();
    flood_until_begun(&at, || {
        flood(2_000, |number| {
            let mut client = gateway.connect();
            client.begin(&handshake());
            time_passes(moment(number) / 4, "a client's patience ends");
            reset(client.stream());
        });
    });
    at.check();
    settled(&gateway);
}

#[test]
fn requests_that_time_out_do_not_make_the_origin_work_on_more() {
    let at = Workplace::default();
    let place = at.clone();
    let origin = Origin::new(move |exchange| {
        if exchange.request.target == "/slow" {
            place.work();
        }
        exchange.respond(200, &[], b"ok")
    });
    let toml = format!(
        "{TWO}[upstream.origin]\nservers = [\"{{origin}}\"]\nresponse_timeout = \"1ms\"\nabandoned_timeout = \"10s\"\nretries = 2\n"
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    flood(2_000, |number| match number % 2 {
        0 => send_and_reset(gateway.address(), &Request::get("/slow").to_bytes(), number),
        _ => assert!([200, 429, 504].contains(&gateway.get("/slow").status)),
    });
    gateway.wait_for_metric("tidegate_in_flight", 0.0);
    at.check();
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    assert_eq!(gateway.get("/").remaining("slots"), 1);
}

#[test]
fn requests_that_are_tried_again_do_not_make_the_origins_work_on_more() {
    let at = Workplace::default();
    let place = at.clone();
    // works, then closes without a response
    let failing = Origin::new(move |exchange| {
        place.work();
        exchange.close()
    });
    let answering = working(&at, "", WHOLE);
    let toml = format!(
        "{TWO}[upstream.origin]\nservers = [{:?}, {:?}]\nretries = 1\n[upstream.origin.outlier]\nfailures = 0\n",
        failing.url(),
        answering.url()
    );
    let gateway = Gateway::with(&toml).start();
    let request = Request::get("/").to_bytes();
    flood_until_begun(&at, || {
        flood(RESETS, |number| {
            send_and_reset(gateway.address(), &request, number)
        })
    });
    gateway.wait_for_metric("tidegate_in_flight", 0.0);
    at.check();
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
}

#[test]
fn an_origin_behind_tls_does_not_work_on_more() {
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let authority = secured::Authority::new();
    let versions = &[&tokio_rustls::rustls::version::TLS13];
    let secured = Secured::before(&origin, &authority, "localhost", versions);
    let toml = format!(
        "{TWO}[upstream.origin]\nservers = [\"https://localhost:{}\"]\ntls_ca = \"ca.pem\"\n",
        secured.port()
    );
    let gateway = Gateway::with(&toml)
        .file("ca.pem", &authority.pem())
        .start();
    // with open connections to the origin, as requests that are reset do not wait for a handshake
    flood(200, |_| drop(gateway.get("/")));
    let request = Request::get("/").to_bytes();
    flood(2_000, |number| {
        send_and_reset(gateway.address(), &request, number)
    });
    at.check();
    settled(&gateway);
}

/// An HTTP/2 origin that counts; `/begun` sends its response head before it works.
fn working_h2c(at: &Workplace) -> H2cOrigin {
    let at = at.clone();
    H2cOrigin::new(move |mut call| {
        let at = at.clone();
        async move {
            at.begin();
            let begun = (call.target() == "/begun").then(|| call.answer(Response::new(()), false));
            time_passes_in_task(WORK, "the origin works").await;
            at.end();
            match begun {
                Some(mut send) => drop(send.send_data("ok".into(), true)),
                None => drop(call.respond.send_response(Response::new(()), true)),
            }
        }
    })
}

#[test]
fn an_http2_origin_does_not_work_on_more() {
    let at = Workplace::default();
    let origin = working_h2c(&at);
    let gateway = Gateway::with(TWO).upstream_at(&origin.url()).start();
    let request = Request::get("/").to_bytes();
    flood_until_begun(&at, || {
        flood(RESETS, |number| {
            send_and_reset(gateway.address(), &request, number)
        })
    });
    reset_streams(|| Connection::open(gateway.address(), &[]), RESETS);
    flood(1_000, |_| {
        let mut client = gateway.connect();
        client.begin(&Request::get("/begun"));
        reset(client.stream());
    });
    at.check();
    settled(&gateway);
}

#[test]
fn answers_without_a_body_hold_their_slot_until_the_stream_ends() {
    let at = Workplace::default();
    let workplace = at.clone();
    // sends its head, works, and ends the stream; the status or a HEAD request means that there is
    // no body
    let origin = H2cOrigin::new(move |mut call| {
        let at = workplace.clone();
        async move {
            at.begin();
            let status = call.target()[1..].parse::<u16>().unwrap_or(200);
            let answer = Response::builder().status(status).body(());
            let mut send = call.answer(answer.expect("a valid status"), false);
            time_passes_in_task(WORK, "the origin works").await;
            at.end();
            drop(send.send_data("".into(), true));
        }
    });
    let gateway = Gateway::with(TWO).upstream_at(&origin.url()).start();
    // a fast gateway rejects most of a flood while two are at work
    eventually("enough requests to be admitted", || {
        flood(400, |number| {
            let request = match number % 4 {
                0 => Request::new("HEAD", "/"),
                1 => Request::get("/204"),
                2 => Request::get("/304"),
                _ => Request::new("HEAD", "/").header("connection", "close"),
            };
            gateway.send(&request);
        });
        match at.begun() {
            20.. => Ok(()),
            few => Err(format!("{few} requests in all")),
        }
    });
    flood(CLIENTS, |_| {
        let mut client = Connection::open(gateway.address(), &[]);
        for stream in (1..40).step_by(2) {
            assert!(client.get(stream, "/204"));
            while client.next().is_some_and(|frame| frame.kind != HEADERS) {}
            client.send(RST_STREAM, 0, stream, &CANCEL);
        }
    });
    at.check();
    settled(&gateway);
}

#[test]
fn a_bound_on_all_requests_in_flight_holds_through_resets() {
    let at = Workplace::default();
    let origin = working(&at, "", WHOLE);
    let toml = "[overload]\nmax_in_flight = 2\nreserve = { critical = 0.0, normal = 0.0 }\n";
    let gateway = Gateway::with(toml).upstream(&origin).start();
    let request = Request::get("/").to_bytes();
    flood_until_begun(&at, || {
        flood(RESETS, |number| {
            send_and_reset(gateway.address(), &request, number)
        })
    });
    at.check();
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    // requests of clients that left may still wait to be read
    eventually_eq("both places are free", vec![200; 3], || {
        gateway.statuses(&Request::get("/"), 3)
    });
}

#[test]
fn gateways_that_share_a_limit_do_not_make_the_origin_work_on_more() {
    let (redis, at) = (Redis::start(), Workplace::default());
    let origin = working(&at, "", WHOLE);
    let toml = format!(
        "[redis]\nurl = \"{}\"\ntimeout = \"1s\"\nconnect_timeout = \"2s\"\n\
         [gateway]\nlimits = [\"slots\"]\n[limit.slots]\nkey = []\n\
         algorithm = \"concurrency\"\nscope = \"global\"\nlimit = 2\n",
        redis.url()
    );
    let gateways: Vec<Gateway> = (0..2)
        .map(|_| Gateway::with(&toml).upstream(&origin).start())
        .collect();
    let request = Request::get("/").to_bytes();
    flood(2_000, |number| {
        send_and_reset(gateways[number % 2].address(), &request, number);
    });
    for gateway in &gateways {
        gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
        eventually("a slot at every gateway", || {
            match gateway.get("/").status {
                200 => Ok(()),
                status => Err(status.to_string()),
            }
        });
    }
    at.check();
}

/// A gateway with one slot, and an origin that answers `/stuck` only once the gate is open.
fn stuck(timeout: &str) -> (Gate, Origin, Gateway) {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::new(move |exchange| {
        match exchange.request.target.as_str() {
            "/stuck" => held.wait(),
            "/silent" => return exchange.wait_for_abort(),
            _ => {}
        }
        exchange.respond(200, &[], b"ok")
    });
    let toml = format!(
        "{}[upstream.origin]\nservers = [\"{{origin}}\"]\n{timeout}\n",
        TWO.replace("limit = 2", "limit = 1")
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    (gate, origin, gateway)
}

/// Sends a request to this target and disconnects.
fn leave(gateway: &Gateway, origin: &Origin, target: &str) {
    let mut client: Client = gateway.connect();
    client
        .write(&Request::get(target).to_bytes())
        .expect("the gateway reads");
    origin.wait_for_requests(1);
    reset(client.stream());
    drop(client);
    gateway.wait_for_metric(r#"tidegate_abandoned_requests{route="all"}"#, 1.0);
}

#[test]
fn a_slot_comes_back_when_the_origin_has_answered_and_its_connection_is_used_again() {
    let (gate, origin, gateway) = stuck("");
    leave(&gateway, &origin, "/stuck");
    assert_eq!(gateway.get("/").status, 429);
    gate.open();
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(origin.requests().len(), 2);
}

#[test]
fn a_slot_comes_back_after_the_abandoned_timeout_at_the_latest() {
    let (_, origin, gateway) = stuck("abandoned_timeout = \"500ms\"");
    leave(&gateway, &origin, "/silent");
    assert_eq!(gateway.get("/").status, 429);
    gateway.wait_for_metric("tidegate_abandoned_requests", 0.0);
    assert_eq!(gateway.get("/").status, 200);
    eventually("the connection to be closed", || match origin.aborted() {
        1 => Ok(()),
        aborted => Err(aborted.to_string()),
    });
}

#[test]
fn a_stream_without_end_is_told_that_its_client_has_left() {
    let (_, origin, _) = stuck("");
    drop(origin);
    let origin = Origin::new(|exchange| {
        if exchange.request.target == "/" {
            return exchange.respond(200, &[], b"ok");
        }
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        exchange.wait_for_abort()
    });
    let toml = format!(
        "{}[upstream.origin]\nservers = [\"{{origin}}\"]\nabandoned_timeout = \"1h\"\n",
        TWO.replace("limit = 2", "limit = 1")
    );
    let gateway = Gateway::with(&toml).upstream(&origin).start();
    let mut client = gateway.connect();
    assert_eq!(client.begin(&Request::get("/events")).status, 200);
    assert_eq!(gateway.get("/").status, 429);
    drop(client);
    eventually("the slot to come back", || match gateway.get("/").status {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
}

#[test]
fn a_gateway_ends_in_order_while_an_abandoned_request_holds_a_slot() {
    let (_, origin, mut gateway) = stuck("abandoned_timeout = \"1h\"");
    leave(&gateway, &origin, "/silent");
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    assert!(
        !gateway.stderr().contains("panicked"),
        "{}",
        gateway.stderr()
    );
}
