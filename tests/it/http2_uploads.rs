//! Bodies over HTTP/2 in either direction: traffic within flow control is never an attack, however
//! small its frames are.

use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    time::Duration,
};

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::SendRequest};
use http::{Request, Response};
use tokio::net::TcpStream;

use crate::support::{
    Gateway, Origin,
    curl::curl,
    frames::{ACK, Connection, DATA, END_STREAM, PING, RST_STREAM, WINDOW_UPDATE},
    h2c::{H2cOrigin, send_all},
    http2::block_on,
    tls::Authority,
    wait::{Gate, time_passes_in_task},
};

const UNBOUNDED: &str = "[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"4GiB\"\n";
const GIBIBYTE: u64 = 1 << 30;

fn assert_no_cuts(gateway: &Gateway) {
    for kind in ["frames", "resets", "stalled", "protocol"] {
        let cuts = gateway.metric(&format!("tidegate_connections_cut_total{{kind={kind:?}}}"));
        assert!(cuts < 1.0, "{cuts} connections were cut: {kind}");
    }
}

/// An origin that reads every body to its end.
fn taker() -> Origin {
    Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[], b"taken")
    })
}

async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let socket = TcpStream::connect(address).await.expect("it listens");
    let (sender, connection) = h2::client::handshake(socket).await.expect("HTTP/2");
    tokio::spawn(connection);
    sender.ready().await.expect("the connection is open")
}

fn post() -> Request<()> {
    let request = Request::post("http://a.example/upload").body(());
    request.expect("a valid request")
}

/// Sends `count` DATA frames of `size` bytes, and pauses after every `pace` frames.
async fn send_frames(
    stream: &mut SendStream<Bytes>,
    count: usize,
    size: usize,
    pace: usize,
) -> Result<(), String> {
    let payload = Bytes::from(vec![b'a'; size]);
    for sent in 1..=count {
        stream.reserve_capacity(size);
        while stream.capacity() < size {
            match poll_fn(|cx| stream.poll_capacity(cx)).await {
                Some(Ok(_)) => {}
                ended => return Err(format!("after {sent} frames: {ended:?}")),
            }
        }
        let last = sent == count;
        let sending = stream.send_data(payload.clone(), last);
        sending.map_err(|error| format!("after {sent} frames: {error}"))?;
        if sent % pace == 0 {
            time_passes_in_task(Duration::from_millis(1), "the client paces itself").await;
        }
    }
    Ok(())
}

/// Uploads over its own connection; returns the status.
async fn upload(address: SocketAddr, count: usize, size: usize, pace: usize) -> u16 {
    let mut sender = connect(address).await;
    let (response, mut stream) = sender.send_request(post(), false).expect("it is sent");
    let sending = send_frames(&mut stream, count, size, pace).await;
    sending.expect("every frame is taken");
    finished(response).await
}

async fn finished(response: impl Future<Output = Result<Response<RecvStream>, h2::Error>>) -> u16 {
    let response = response.await.expect("an answer");
    response.status().as_u16()
}

#[test]
fn one_upload_may_be_a_gibibyte() {
    let origin = taker();
    let gateway = Gateway::with(UNBOUNDED).upstream(&origin).start();
    let size = 16 * 1024;
    let count = usize::try_from(GIBIBYTE).expect("64 bits") / size;
    assert_eq!(
        block_on(upload(gateway.address(), count, size, usize::MAX)),
        200
    );
    assert_eq!(origin.request().body_length, GIBIBYTE);
    assert_no_cuts(&gateway);
}

#[test]
fn one_upload_over_tls_may_be_a_gibibyte() {
    let origin = taker();
    let issued = Authority::new("of the test").server(&["a.example"]);
    let tls = "[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"4GiB\"\n\
               tls = { certificates = [{ cert = \"server.pem\", key = \"server.key\" }] }\n";
    let gateway = Gateway::with(tls)
        .file("server.pem", &issued.cert)
        .file("server.key", &issued.key)
        .upstream(&origin)
        .start();
    let zeros = gateway.folder().join("zeros");
    let file = std::fs::File::create(&zeros).expect("a file in the test's folder");
    file.set_len(GIBIBYTE).expect("a sparse file");
    let said = curl(&[
        "--max-time",
        "300",
        "--http2",
        "--insecure",
        "--upload-file",
        zeros.to_str().expect("a path in UTF-8"),
        "--write-out",
        " %{http_version} %{http_code}",
        &format!("https://{}/upload", gateway.address()),
    ]);
    assert_eq!(said, "taken 2 200");
    assert_eq!(origin.request().body_length, GIBIBYTE);
    assert_no_cuts(&gateway);
}

#[test]
fn a_million_small_frames_are_taken_as_fast_as_they_come() {
    let origin = taker();
    let gateway = Gateway::with(UNBOUNDED).upstream(&origin).start();
    let status = block_on(upload(gateway.address(), 1_000_000, 100, usize::MAX));
    assert_eq!(status, 200);
    assert_eq!(origin.request().body_length, 100_000_000);
    assert_no_cuts(&gateway);
}

#[test]
fn a_million_small_frames_are_taken_at_a_steady_pace() {
    let origin = taker();
    let gateway = Gateway::with(UNBOUNDED).upstream(&origin).start();
    let status = block_on(upload(gateway.address(), 1_000_000, 100, 500));
    assert_eq!(status, 200);
    assert_eq!(origin.request().body_length, 100_000_000);
    assert_no_cuts(&gateway);
}

#[test]
fn the_default_configuration_takes_eight_megabytes_in_small_frames() {
    let origin = taker();
    let gateway = Gateway::with("").upstream(&origin).start();
    let status = block_on(upload(gateway.address(), 40_000, 200, usize::MAX));
    assert_eq!(status, 200);
    assert_eq!(origin.request().body_length, 8_000_000);
    assert_no_cuts(&gateway);
}

#[test]
fn a_window_full_of_tiny_frames_may_wait_for_the_origin_and_takes_little_memory() {
    const COUNT: usize = 1_000_000;
    let gate = Gate::default();
    let opened = gate.clone();
    let origin = Origin::new(move |exchange| {
        if exchange.request.target == "/first" {
            opened.wait();
        }
        exchange.read_body()?;
        exchange.respond(200, &[], b"taken")
    });
    let gateway = Gateway::with(&format!(
        "[server]\nworkers = 1\n[upstream.origin]\nservers = [{:?}]\nmax_connections = 1\nconnect_timeout = \"30s\"\n",
        origin.url()
    ))
    .start();
    let mut client = Connection::open(gateway.address(), &[]);
    client.patience(Duration::from_secs(10));
    client.get(1, "/first");
    origin.wait_for_requests(1);
    let before = gateway.peak_memory_bytes();
    // the gateway's windows apply once its SETTINGS are acknowledged
    client.send(PING, 0, 0, &[1; 8]);
    assert_eq!(client.next().map(|frame| frame.kind), Some(PING));
    // this request waits for a connection, so its body is not read
    client.post(3, "/second");
    assert!(client.send_many(COUNT, DATA, 0, 3, b"x"));
    client.send(DATA, END_STREAM, 3, &[]);
    client.send(PING, 0, 0, &[7; 8]);
    let pong = client.next().expect("all frames before it are taken");
    assert_eq!((pong.kind, pong.flags), (PING, ACK), "{pong:?}");
    gate.open();
    let (mut ends, mut received) = (0, Vec::new());
    while ends < 2 {
        let frame = client.next().expect("both are answered");
        ends += usize::from(frame.flags & END_STREAM != 0);
        received.extend(frame.payload);
    }
    assert!(received.ends_with(b"taken"));
    assert_eq!(origin.requests()[1].body_length, COUNT as u64);
    let grown = gateway.peak_memory_bytes() - before;
    assert!(grown < 16 << 20, "{grown} bytes for a window of 1 MiB");
    assert_no_cuts(&gateway);
}

#[test]
fn many_small_uploads_share_one_connection() {
    let origin = taker();
    let gateway = Gateway::with("").upstream(&origin).start();
    block_on(async {
        let mut sender = connect(gateway.address()).await;
        for _ in 0..100 {
            let mut uploads = Vec::new();
            for _ in 0..50 {
                sender = sender.ready().await.expect("the connection is open");
                let (response, mut stream) = sender.send_request(post(), false).expect("sent");
                uploads.push(tokio::spawn(async move {
                    let sent = send_frames(&mut stream, 20, 10, usize::MAX).await;
                    sent.expect("every frame is taken");
                    finished(response).await
                }));
            }
            for upload in uploads {
                assert_eq!(upload.await.expect("a task"), 200);
            }
        }
    });
    assert_no_cuts(&gateway);
}

#[test]
fn an_upload_that_its_client_takes_back_is_no_bad_request() {
    let origin = taker();
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = Connection::open(gateway.address(), &[]);
    client.post(1, "/");
    client.send(DATA, 0, 1, b"some of it");
    origin.wait_for_requests(1);
    client.send(RST_STREAM, 0, 1, &[0, 0, 0, 8]);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="499"}"#, 1.0);
    assert!(gateway.metric(r#"tidegate_requests_total{code="400"}"#) < 1.0);
    assert_no_cuts(&gateway);
}

#[test]
fn empty_frames_without_end_are_cut_and_counted() {
    let gate = Gate::default();
    let origin = Origin::gated(&gate);
    let gateway = Gateway::with("[log]\naccess = \"all\"\n")
        .upstream(&origin)
        .start();
    for (index, payload) in [&[][..], &[3, 0, 0, 0]].into_iter().enumerate() {
        let mut attacker = Connection::open(gateway.address(), &[]);
        attacker.discard_answers();
        assert!(attacker.post(1, "/"));
        assert!(attacker.send(DATA, 0, 1, b"some of it"));
        origin.wait_for_requests(index + 1);
        // the second frame is padded: four bytes without content
        let flags = if payload.is_empty() { 0 } else { 8 };
        let ended = (0..100_000).any(|_| !attacker.send(DATA, flags, 1, payload));
        assert!(ended, "{payload:?}");
        let cuts = "tidegate_connections_cut_total{kind=\"frames\"}";
        gateway.wait_for_metric(cuts, (index + 1) as f64);
    }
    gate.open();
    // the requests ended with their connections, and count as abandoned, not as malformed
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="499"}"#, 2.0);
    assert!(gateway.metric(r#"tidegate_requests_total{code="400"}"#) < 1.0);
}

#[test]
fn a_client_that_grants_little_at_a_time_gets_its_download() {
    const LENGTH: usize = 4 << 20;
    let origin = Origin::new(|exchange| {
        exchange.read_body()?;
        exchange.respond(200, &[], &vec![b'a'; LENGTH])
    });
    let gateway = Gateway::with("").upstream(&origin).start();
    let mut client = Connection::open(gateway.address(), &[(4, 100)]);
    client.patience(Duration::from_secs(10));
    client.get(1, "/");
    let mut received = 0;
    while received < LENGTH {
        let frame = client.next().expect("more of the download");
        if frame.kind != DATA {
            continue;
        }
        received += frame.payload.len();
        let granted = u32::try_from(frame.payload.len()).expect("a small frame");
        // like naive clients: immediately, for the stream and for the connection
        client.send(WINDOW_UPDATE, 0, 1, &granted.to_be_bytes());
        client.send(WINDOW_UPDATE, 0, 0, &granted.to_be_bytes());
    }
    assert_no_cuts(&gateway);
}

#[test]
fn a_server_may_send_small_frames_to_a_client_that_reads_late() {
    const COUNT: usize = 300_000;
    let origin = H2cOrigin::new(|mut call| async move {
        let mut stream = call.answer(Response::new(()), false);
        for _ in 0..COUNT {
            let sent = send_all(&mut stream, Bytes::from_static(b"thirteen byte")).await;
            sent.expect("the gateway takes it");
        }
        let _ = stream.send_data(Bytes::new(), true);
    });
    let gateway = Gateway::with("").upstream_at(&origin.url()).start();
    let received = block_on(async {
        let mut sender = connect(gateway.address()).await;
        let get = Request::get("http://a.example/").body(());
        let (response, _) = sender
            .send_request(get.expect("a valid request"), true)
            .expect("sent");
        let mut body = response.await.expect("an answer").into_body();
        time_passes_in_task(Duration::from_millis(500), "windows and sockets fill").await;
        let mut received = 0;
        while let Some(data) = body.data().await {
            let data = data.expect("it is not cut");
            received += data.len();
            body.flow_control()
                .release_capacity(data.len())
                .expect("it was received");
        }
        received
    });
    assert_eq!(received, COUNT * 13);
    assert_no_cuts(&gateway);
}
