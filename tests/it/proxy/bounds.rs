//! Each bound of a listener, reached exactly and exceeded by one.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use crate::support::{
    Client, Gateway, Origin, Request, eventually, http2, raw, wait::eventually_eq,
};

/// Enough for an immediate response, even on a busy machine.
const SOON: Duration = Duration::from_secs(5);

fn listener(lines: &str) -> String {
    format!("[[listen]]\naddress = \"127.0.0.1:0\"\n{lines}\n")
}

#[test]
fn a_body_over_the_bound_is_413_before_it_is_sent() {
    let origin = Origin::echo();
    let gateway = Gateway::with(&listener("max_body_size = \"1KiB\""))
        .upstream(&origin)
        .start();
    assert_eq!(
        gateway.send(&Request::post("/", vec![b'a'; 1024])).status,
        200,
        "exactly the bound"
    );
    let head = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1025\r\n\r\n";
    let reply = raw::send(gateway.address(), head, SOON);
    assert_eq!(reply.statuses(), ["413"], "by its length alone");
    assert!(
        reply.closed,
        "the body that is still to come would be taken for a request"
    );
    assert_eq!(origin.requests().len(), 1);
}

#[test]
fn a_chunked_body_over_the_bound_is_413_and_never_completes() {
    let origin = Origin::echo();
    let gateway = Gateway::with(&listener("max_body_size = \"1KiB\""))
        .upstream(&origin)
        .start();
    let chunk = format!("200\r\n{}\r\n", "a".repeat(0x200));
    let head = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    let whole = raw::send(
        gateway.address(),
        format!("{head}{chunk}{chunk}0\r\n\r\n").as_bytes(),
        Duration::from_millis(600),
    );
    assert_eq!(whole.statuses(), ["200"], "exactly the bound");
    let over = raw::send(
        gateway.address(),
        format!("{head}{chunk}{chunk}1\r\na\r\n0\r\n\r\n").as_bytes(),
        SOON,
    );
    assert_eq!(
        (over.statuses(), over.closed),
        (vec!["413".to_owned()], true)
    );
    assert!(
        origin
            .requests()
            .iter()
            .filter(|seen| seen.complete)
            .count()
            <= 1,
        "the origin got no whole request"
    );

    let too_big = Request::post("/", vec![b'a'; 1025]);
    let over_http2 = http2::send_all(gateway.address(), &[too_big]).remove(0);
    assert!(
        over_http2
            .as_ref()
            .map_or(true, |response| response.status == 413),
        "{over_http2:?}"
    );
}

#[test]
fn a_route_may_have_a_bound_of_its_own() {
    let gateway = Gateway::with(
        r#"
        [[route]]
        name = "login"
        path = "/login"
        upstream = "origin"
        max_body_size = "10B"
        [[route]]
        name = "all"
        path = "/{*rest}"
        upstream = "origin"
        "#,
    )
    .start();
    let status = |path: &str, length: usize| {
        gateway
            .send(&Request::post(path, vec![b'a'; length]))
            .status
    };
    assert_eq!(
        [
            status("/login", 10),
            status("/login", 11),
            status("/other", 11)
        ],
        [200, 413, 200]
    );
}

#[test]
fn a_rejected_upload_is_answered_without_its_body() {
    let origin = Origin::echo();
    let gateway = Gateway::with(
        "[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"2GiB\"\n\
         [gateway]\nlimits = [\"one\"]\n[limit.one]\nkey = []\nrate = \"1/h\"\nburst = 1\n",
    )
    .upstream(&origin)
    .start();
    assert_eq!(gateway.get("/").status, 200);
    let head = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1073741824\r\nExpect: 100-continue\r\n\r\n";
    let reply = raw::send(gateway.address(), head, SOON);
    assert_eq!(
        (reply.statuses(), reply.closed),
        (vec!["429".to_owned()], true),
        "at once, and without a 100"
    );
    assert_eq!(origin.requests().len(), 1);
}

#[test]
fn expect_continue_is_answered_when_the_body_is_wanted() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        .expect("the head leaves");
    origin.wait_for_requests(1);
    // curl and others wait a second for the 100; this client waits without a timeout
    let mut interim = [0; 25];
    std::io::Read::read_exact(&mut client.stream(), &mut interim).expect("an interim answer");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write(b"hello").expect("the body leaves");
    let response = client.read_response("POST").expect("an answer");
    assert_eq!((response.status, response.text().as_str()), (200, "hello"));
}

#[test]
fn a_long_target_is_414_and_a_head_of_many_bytes_or_fields_431() {
    let gateway = Gateway::with(&listener(
        "max_uri_size = \"1KiB\"\nmax_header_size = \"4KiB\"\nmax_header_count = 20",
    ))
    .start();
    let target = |length: usize| Request::get(&format!("/{}", "a".repeat(length - 1)));
    assert_eq!(gateway.send(&target(1024)).status, 200);
    assert_eq!(gateway.send(&target(1025)).status, 414);

    let bytes = |length: usize| Request::get("/").header("x-long", &"a".repeat(length));
    assert_eq!(gateway.send(&bytes(3 * 1024)).status, 200);
    assert_eq!(gateway.send(&bytes(5 * 1024)).status, 431);

    // in addition to Host
    let fields =
        |count: usize| (1..count).fold(Request::get("/"), |r, n| r.header(&format!("x-{n}"), "y"));
    assert_eq!(gateway.send(&fields(20)).status, 200);
    assert_eq!(gateway.send(&fields(21)).status, 431);
}

#[test]
fn a_slow_head_is_408_and_closed() {
    let gateway = Gateway::with(&listener("header_timeout = \"300ms\"")).start();
    let begun = Instant::now();
    let reply = raw::send(gateway.address(), b"GET / HTTP/1.1\r\nHost: a.ex", SOON);
    assert_eq!(
        (reply.statuses(), reply.closed),
        (vec!["408".to_owned()], true)
    );
    assert!(
        begun.elapsed() >= Duration::from_millis(250),
        "after {:?}",
        begun.elapsed()
    );

    // single bytes do not extend it
    let mut slow = raw::open(gateway.address());
    let begun = Instant::now();
    let mut ended = false;
    for byte in b"GET /0123456789/0123456789/0123456789 HTTP/1.1\r\n"
        .iter()
        .cycle()
        .take(200)
    {
        let wrote = slow.write_all(&[*byte]);
        let reply = raw::read(&mut slow, Duration::from_millis(20));
        if wrote.is_err() || reply.closed || !reply.bytes.is_empty() {
            ended = true;
            break;
        }
    }
    assert!(ended, "still open after {:?}", begun.elapsed());
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "after {:?}",
        begun.elapsed()
    );
}

#[test]
fn a_silent_body_is_408_and_the_origin_is_let_go() {
    let origin = Origin::echo();
    let gateway = Gateway::with(&listener("body_timeout = \"300ms\""))
        .upstream(&origin)
        .start();
    let reply = raw::send(
        gateway.address(),
        b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 10\r\n\r\nhello",
        SOON,
    );
    assert_eq!(
        (reply.statuses(), reply.closed),
        (vec!["408".to_owned()], true)
    );
    eventually_eq("exchanges given up", 1, || origin.aborted());
}

#[test]
fn an_idle_connection_is_closed_without_a_word() {
    let gateway = Gateway::with(&listener("idle_timeout = \"300ms\"")).start();
    let mut client = gateway.connect();
    assert_eq!(client.send(&Request::get("/")).status, 200);
    let rest = raw::read(
        &mut client.stream().try_clone().expect("a connected stream"),
        SOON,
    );
    assert!(rest.closed, "still open");
    assert_eq!(
        rest.text(),
        "",
        "a client that is about to ask would take it for its answer"
    );
}

#[test]
fn beyond_max_connections_accept_pauses_and_resumes() {
    let gateway = Gateway::with("[server]\nworkers = 2\nmax_connections = 2\n").start();
    let held: Vec<Client> = (0..2)
        .map(|_| {
            let mut client = gateway.connect();
            assert_eq!(client.send(&Request::get("/")).status, 200);
            client
        })
        .collect();
    let mut third = gateway.connect();
    third
        .write(&Request::get("/third").to_bytes())
        .expect("the kernel takes it");
    assert!(
        !third.closes_within(Duration::from_millis(300)),
        "it waits, it is not refused"
    );
    drop(held);
    assert_eq!(third.read_response("GET").expect("its turn").status, 200);
}

#[test]
fn an_address_has_so_many_connections_and_no_more_and_proxies_have_more() {
    let counted = Gateway::with("[server]\nworkers = 2\nmax_connections_per_ip = 2\n").start();
    let mut held: Vec<Client> = (0..2).map(|_| counted.connect()).collect();
    for client in &mut held {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    assert!(counted.connect().closes_within(SOON), "the third");
    let cut = format!(
        "tidegate_connections_cut_total{{listener=\"{}\",kind=\"crowded\"}}",
        counted.address()
    );
    counted.wait_for_metric(&cut, 1.0);
    assert_eq!(held[0].send(&Request::get("/")).status, 200, "it stays");
    held.pop();
    eventually("the place that came free", || {
        let answer = counted.connect().try_send(&Request::get("/"));
        answer.map(drop).map_err(|error| format!("{error:?}"))
    });

    let trusting = Gateway::with(
        "[server]\nmax_connections_per_ip = 1\n[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n",
    )
    .start();
    let mut proxy: Vec<Client> = (0..3).map(|_| trusting.connect()).collect();
    for connection in &mut proxy {
        assert_eq!(connection.send(&Request::get("/")).status, 200);
    }
}

#[test]
fn as_many_descriptors_are_taken_as_there_may_be_and_some_are_never_given_to_clients() {
    let origin = Origin::ok();
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream(&origin)
        .descriptors(60, 160)
        .start();
    assert_eq!(gateway.metric("process_max_fds"), 160.0);
    eventually("a line that says so", || {
        let said = gateway.output();
        match said.contains("above 120 connections") {
            true => Ok(()),
            false => Err(said),
        }
    });
    // more than the initial descriptor limit, and more than the gateway admits
    let mut clients: Vec<Client> = (0..150).map(|_| gateway.connect()).collect();
    for client in clients.iter_mut().take(100) {
        assert_eq!(client.send(&Request::get("/")).status, 200);
    }
    gateway.wait_for_metric("tidegate_upstream_errors_total", 0.0);
    gateway.wait_for_metric("tidegate_accept_errors_total", 0.0);
    clients.truncate(20);
    let mut late = gateway.connect();
    assert_eq!(
        late.send(&Request::get("/")).status,
        200,
        "there is room again"
    );
}

#[test]
fn max_streams_bounds_what_one_connection_may_ask_at_once() {
    let gateway = Gateway::with(&listener("max_streams = 4")).start();
    let requests = vec![Request::get("/"); 20];
    for response in http2::send_all(gateway.address(), &requests) {
        assert_eq!(
            response.expect("all are answered in their turn").status,
            200
        );
    }
}

#[test]
fn a_body_that_drips_is_cut_off_though_it_is_never_silent() {
    let origin = Origin::echo();
    let gateway = Gateway::with(&listener("body_timeout = \"500ms\""))
        .upstream(&origin)
        .start();
    let mut client = gateway.connect();
    client
        .write(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 100000\r\n\r\n")
        .expect("it is sent");
    let deadline = Instant::now() + SOON;
    while Instant::now() < deadline && client.write(b"x").is_ok() {
        if client.closes_within(Duration::from_millis(50)) {
            break;
        }
    }
    gateway.wait_for_metric("tidegate_requests_total{code=\"408\"}", 1.0);
    assert_eq!(
        origin
            .requests()
            .iter()
            .filter(|seen| seen.complete)
            .count(),
        0
    );
}

#[test]
fn a_body_may_drip_where_it_is_allowed_to_and_in_grpc() {
    for (lines, kind) in [
        (
            "body_timeout = \"500ms\"\nmin_body_rate = \"0B\"",
            "text/plain",
        ),
        ("body_timeout = \"500ms\"", "application/grpc+proto"),
    ] {
        let gateway = Gateway::with(&listener(lines)).start();
        let mut client = gateway.connect();
        let head = format!(
            "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Type: {kind}\r\nContent-Length: 20\r\n\r\n"
        );
        client.write(head.as_bytes()).expect("it is sent");
        for _ in 0..20 {
            client.write(b"x").expect("it is open");
            crate::support::wait::time_passes(Duration::from_millis(50), "a client sends slowly");
        }
        let answer = client.read_response("POST");
        assert_eq!(
            answer.map(|answer| answer.status),
            Ok(200),
            "{lines} {kind}"
        );
    }
}

#[test]
fn a_client_that_closes_its_side_after_its_request_is_answered() {
    let origin = Origin::new(|exchange| {
        crate::support::wait::time_passes(
            Duration::from_millis(300),
            "the gateway sees that the client closed its side",
        );
        exchange.respond(200, &[], b"hello")
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let reply = raw::send_and_finish(gateway.address(), request, SOON);
    assert_eq!(reply.statuses(), ["200"]);
    assert!(reply.closed && reply.text().ends_with("hello"));
}

#[test]
fn a_client_that_closes_within_its_body_is_not_waited_for() {
    let origin = Origin::echo();
    let gateway = Gateway::with("").upstream(&origin).start();
    let request = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 10\r\n\r\nhalf";
    let reply = raw::send_and_finish(gateway.address(), request, SOON);
    assert!(reply.closed);
    assert!(reply.statuses().iter().all(|status| status == "400"));
    eventually_eq("the origin to be told", 1, || origin.aborted());
}
