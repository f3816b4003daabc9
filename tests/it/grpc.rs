//! gRPC through the gateway: HTTP/2 on both sides, with real clients and servers.

use std::time::Duration;

use tonic::{Code, Request, Status};

use crate::support::{
    Gateway, eventually,
    grpc::{Caller, Echo},
    http2::block_on,
    origin::nobody,
    wait::{eventually_eq, time_passes, until},
};

fn through(echo: &Echo) -> Gateway {
    Gateway::with("").upstream_at(&echo.url()).start()
}

#[test]
fn a_unary_call_passes_with_its_metadata() {
    let echo = Echo::start();
    let gateway = through(&echo);
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let mut request = Request::new(b"hello".to_vec());
        let metadata = request.metadata_mut();
        metadata.insert("x-mine", "1".parse().expect("ASCII"));
        metadata.insert_bin(
            "x-mine-bin",
            tonic::metadata::BinaryMetadataValue::from_bytes(&[0, 255]),
        );
        let response = caller
            .unary("/test.Echo/Unary", request)
            .await
            .expect("an answer");
        assert_eq!(response.get_ref(), b"hello");
        assert_eq!(
            response.metadata().get("x-served-by").expect("kept"),
            "echo"
        );
        // tonic merges trailers into the fields of the head
        assert_eq!(
            response.metadata().get("grpc-status").expect("in trailers"),
            "0"
        );
    });
    let call = &echo.calls()[0];
    assert_eq!(call.get("te").expect("gRPC insists on it"), "trailers");
    assert_eq!(call.get("content-type").expect("kept"), "application/grpc");
    assert_eq!(call.get("x-mine").expect("kept"), "1");
    assert_eq!(
        call.get_bin("x-mine-bin")
            .expect("kept")
            .to_bytes()
            .expect("Base64"),
        &[0_u8, 255][..]
    );
    assert!(
        call.get("via")
            .expect("ours")
            .to_str()
            .expect("ASCII")
            .starts_with("2.0 ")
    );
    assert!(call.get("x-forwarded-for").is_some());
    assert!(call.get("host").is_none() && call.get("connection").is_none());
}

#[test]
fn a_status_passes_with_its_message_and_details() {
    let echo = Echo::start();
    let gateway = through(&echo);
    let status = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let call = caller.unary("/test.Echo/Unary", Request::new(b"fail".to_vec()));
        call.await.expect_err("it fails")
    });
    assert_eq!(status.code(), Code::NotFound);
    assert_eq!(status.message(), "nothing at 50% für dich");
    assert_eq!(status.details(), b"\x01\x02");
    assert_eq!(status.metadata().get("x-why").expect("kept"), "because");
}

#[test]
fn a_stream_passes_both_ways_message_by_message() {
    let echo = Echo::start();
    let gateway = through(&echo);
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        send.send(b"first".to_vec()).await.expect("it is taken");
        let mut replies = call.await.expect("a head").into_inner();
        let mut reply = replies
            .message()
            .await
            .expect("a reply")
            .expect("not the end");
        assert_eq!(reply, b"first");
        // each is sent only after the previous one has returned
        for count in 0_u32..200 {
            let message = count.to_be_bytes().repeat(count as usize + 1);
            send.send(message.clone()).await.expect("it is taken");
            reply = replies
                .message()
                .await
                .expect("a reply")
                .expect("not the end");
            assert_eq!(reply, message);
        }
        drop(send);
        assert_eq!(replies.message().await.expect("an orderly end"), None);
        let trailers = replies.trailers().await.expect("trailers");
        assert!(trailers.is_some());
    });
}

#[test]
fn a_stream_that_fails_half_way_says_so() {
    let echo = Echo::start();
    let gateway = through(&echo);
    let status = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        send.send(b"fine".to_vec()).await.expect("it is taken");
        let mut replies = call.await.expect("a head").into_inner();
        assert_eq!(
            replies.message().await.expect("a reply"),
            Some(b"fine".to_vec())
        );
        send.send(b"break".to_vec()).await.expect("it is taken");
        replies.message().await.expect_err("it fails")
    });
    assert_eq!(
        (status.code(), status.message()),
        (Code::Aborted, "you said so")
    );
}

#[test]
fn megabytes_pass_in_either_direction() {
    let echo = Echo::start();
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"64MiB\"\n")
            .upstream_at(&echo.url())
            .start();
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Collect").await.expect("ready");
        let sending = tokio::spawn(async move {
            for _ in 0..16 {
                send.send(vec![7; 1 << 20]).await.expect("it is taken");
            }
        });
        let mut replies = call.await.expect("a head").into_inner();
        assert_eq!(
            replies.message().await.expect("a reply"),
            Some((16 << 20).to_string().into_bytes())
        );
        sending.await.expect("all was sent");
        let whole = caller.unary("/test.Echo/Unary", Request::new(vec![9; 8 << 20]));
        assert_eq!(whole.await.expect("an answer").get_ref().len(), 8 << 20);
    });
}

#[test]
fn a_stream_may_be_silent_for_longer_than_a_body_may_pause() {
    let echo = Echo::start();
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nbody_timeout = \"200ms\"\n")
            .upstream_at(&echo.url())
            .start();
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        send.send(b"first".to_vec()).await.expect("it is taken");
        let mut replies = call.await.expect("a head").into_inner();
        assert!(replies.message().await.expect("a reply").is_some());
        time_passes(Duration::from_millis(600), "a body would have timed out");
        send.send(b"later".to_vec()).await.expect("it is taken");
        assert_eq!(
            replies.message().await.expect("a reply"),
            Some(b"later".to_vec())
        );
    });
}

#[test]
fn a_stream_in_which_nobody_says_anything_ends() {
    let echo = Echo::start();
    let gateway = Gateway::with(&format!(
        "[upstream.origin]\nservers = [{:?}]\nbody_timeout = \"300ms\"\n",
        echo.url()
    ))
    .start();
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        send.send(b"first".to_vec()).await.expect("it is taken");
        let mut replies = call.await.expect("a head").into_inner();
        assert!(replies.message().await.expect("a reply").is_some());
        replies
            .message()
            .await
            .expect_err("cut, and never passed off as whole");
        drop(send);
    });
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
}

const ONE_CALL: &str = r#"
    [limit.calls]
    key = []
    rate = "1/min"
    burst = 1
    [gateway]
    limits = ["calls"]
"#;

#[test]
fn a_call_over_the_limit_is_resource_exhausted_and_told_when_to_come_back() {
    let echo = Echo::start();
    let gateway = Gateway::with(ONE_CALL).upstream_at(&echo.url()).start();
    let status = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let first = caller.unary("/test.Echo/Unary", Request::new(b"1".to_vec()));
        first.await.expect("admitted");
        let second = caller.unary("/test.Echo/Unary", Request::new(b"2".to_vec()));
        second.await.expect_err("denied")
    });
    assert_eq!(
        (status.code(), status.message()),
        (Code::ResourceExhausted, "rate limit exceeded")
    );
    let pushback = status.metadata().get("grpc-retry-pushback-ms");
    let pushback: u32 = pushback
        .and_then(|ms| ms.to_str().ok()?.parse().ok())
        .expect("a number");
    assert!((30_000..=60_000).contains(&pushback), "{pushback} ms");
    let details = status.details();
    let type_url = b"type.googleapis.com/google.rpc.RetryInfo";
    assert!(
        details.windows(type_url.len()).any(|part| part == type_url),
        "{details:?}"
    );
    assert!(status.metadata().get("x-request-id").is_some());
    assert!(status.metadata().get("ratelimit").is_none());
    assert_eq!(echo.calls().len(), 1);
    gateway.wait_for_metric(r#"tidegate_requests_total{route="all",code="429"}"#, 1.0);
}

#[test]
fn a_stream_over_the_limit_is_refused_before_its_messages_are_read() {
    let echo = Echo::start();
    let gateway = Gateway::with(ONE_CALL).upstream_at(&echo.url()).start();
    let status = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let first = caller.unary("/test.Echo/Unary", Request::new(b"1".to_vec()));
        first.await.expect("admitted");
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        let status = call.await.expect_err("denied");
        drop(send);
        status
    });
    assert_eq!(status.code(), Code::ResourceExhausted);
}

fn code_of(gateway: &Gateway, method: &'static str) -> (Code, String) {
    let called: Result<_, Status> = block_on(async {
        let mut caller = Caller::new(gateway.address());
        caller.unary(method, Request::new(b"1".to_vec())).await
    });
    let status = called.expect_err("refused");
    (status.code(), status.message().to_owned())
}

#[test]
fn what_the_gateway_refuses_has_a_status_of_grpc() {
    let gone = Gateway::with("")
        .upstream_at(&format!("h2c://{}", nobody()))
        .start();
    let (code, message) = code_of(&gone, "/test.Echo/Unary");
    assert_eq!(
        (code, message.as_str()),
        (Code::Unavailable, "The upstream could not be reached.")
    );
    gone.wait_for_metric(r#"tidegate_requests_total{route="all",code="502"}"#, 1.0);

    let echo = Echo::start();
    let slow = Gateway::with(&format!(
        "[upstream.origin]\nservers = [{:?}]\nresponse_timeout = \"300ms\"\n",
        echo.url()
    ))
    .start();
    assert_eq!(code_of(&slow, "/test.Echo/Hang").0, Code::Unavailable);
    eventually_eq("the call is given up", 0, || echo.hanging());
    slow.wait_for_metric(r#"tidegate_requests_total{route="all",code="504"}"#, 1.0);

    let routed =
        Gateway::with("[[route]]\nname = \"one\"\npath = \"/one\"\nupstream = \"origin\"\n")
            .upstream_at(&echo.url())
            .start();
    assert_eq!(code_of(&routed, "/test.Echo/Unary").0, Code::Unimplemented);

    let small = Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"4B\"\n")
        .upstream_at(&echo.url())
        .start();
    assert_eq!(
        code_of(&small, "/test.Echo/Unary").0,
        Code::ResourceExhausted
    );
}

#[test]
fn a_call_that_is_cancelled_is_cancelled_upstream_and_gives_back_its_slot() {
    let echo = Echo::start();
    let slots = "[limit.slots]\nkey = []\nalgorithm = \"concurrency\"\nlimit = 1\n[gateway]\nlimits = [\"slots\"]\n\
        [upstream.origin]\nservers = [\"{origin}\"]\nabandoned_timeout = \"500ms\"\n";
    let gateway = Gateway::with(slots).upstream_at(&echo.url()).start();
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        let call = caller.unary("/test.Echo/Hang", Request::new(b"1".to_vec()));
        tokio::select! {
            _ = call => panic!("it hangs"),
            () = until("the call to arrive", || echo.hanging() == 1) => {}
        }
        until("the call to be cancelled", || echo.hanging() == 0).await;
    });
    eventually("the slot to come back", || {
        block_on(async {
            let mut caller = Caller::new(gateway.address());
            let call = caller.unary("/test.Echo/Unary", Request::new(b"1".to_vec()));
            call.await.map(drop).map_err(|status| status.to_string())
        })
    });
}

#[test]
fn calls_share_connections_within_what_the_server_allows() {
    let echo = Echo::with_max_streams(2);
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream_at(&echo.url())
        .start();
    block_on(async {
        let calls: Vec<_> = (0..50_u8)
            .map(|number| {
                let address = gateway.address();
                tokio::spawn(async move {
                    let mut caller = Caller::new(address);
                    let call = caller.unary("/test.Echo/Unary", Request::new(vec![number]));
                    call.await.map(|reply| reply.into_inner())
                })
            })
            .collect();
        for (number, call) in (0..50_u8).zip(calls) {
            let reply = call.await.expect("a task").expect("an answer");
            assert_eq!(reply, [number]);
        }
    });
}

#[test]
fn a_service_that_restarts_costs_no_call() {
    let mut echo = Echo::start();
    let gateway = Gateway::with("[server]\nworkers = 1\n")
        .upstream_at(&echo.url())
        .start();
    block_on(async {
        let mut caller = Caller::new(gateway.address());
        for _ in 0..3 {
            let call = caller.unary("/test.Echo/Unary", Request::new(b"1".to_vec()));
            call.await.expect("an answer");
            echo.stop();
            echo = Echo::at(echo.address(), None);
        }
        let call = caller.unary("/test.Echo/Unary", Request::new(b"1".to_vec()));
        call.await.expect("an answer");
    });
}

#[test]
fn a_client_stream_of_many_small_messages_has_no_total() {
    let echo = Echo::start();
    let gateway = through(&echo);
    let total = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Collect").await.expect("ready");
        let sending = tokio::spawn(async move {
            for _ in 0..200_000 {
                send.send(vec![7; 100]).await.expect("it is taken");
            }
        });
        let mut replies = call.await.expect("a head").into_inner();
        let total = replies.message().await.expect("a reply");
        sending.await.expect("all was sent");
        total
    });
    // twice the default of `max_body_size`, which bounds each message of a call
    assert_eq!(total, Some(20_000_000.to_string().into_bytes()));
}

#[test]
fn a_message_that_is_too_large_ends_its_stream_with_resource_exhausted() {
    let echo = Echo::start();
    let gateway =
        Gateway::with("[[listen]]\naddress = \"127.0.0.1:0\"\nmax_body_size = \"10KiB\"\n[log]\naccess = \"all\"\n")
            .upstream_at(&echo.url())
            .start();
    let status = block_on(async {
        let mut caller = Caller::new(gateway.address());
        let (send, call) = caller.streaming("/test.Echo/Chat").await.expect("ready");
        send.send(b"small".to_vec()).await.expect("it is taken");
        let mut replies = call.await.expect("a head").into_inner();
        let reply = replies.message().await.expect("a reply");
        assert_eq!(reply, Some(b"small".to_vec()));
        send.send(vec![7; 20 << 10]).await.expect("it is sent");
        replies.message().await.expect_err("it is too large")
    });
    assert_eq!(
        (status.code(), status.message()),
        (Code::ResourceExhausted, "The request body is too large.")
    );
    gateway.wait_for_metric(r#"tidegate_in_flight{route="all"}"#, 0.0);
    let blamed = gateway.metric(r#"tidegate_upstream_errors_total{kind="body"}"#);
    assert!(blamed < 1.0, "nothing is wrong with the server");
    eventually("its access line", || {
        let lines = gateway.output();
        match lines.contains("\"body_too_large\"") {
            true => Ok(()),
            false => Err(lines),
        }
    });
}

#[test]
fn metadata_over_the_bound_is_resource_exhausted_and_gets_a_line() {
    let echo = Echo::start();
    let gateway = Gateway::with("[log]\naccess = \"all\"\n")
        .upstream_at(&echo.url())
        .start();
    for kilobytes in [33, 60, 100] {
        let status = block_on(async {
            let mut caller = Caller::new(gateway.address());
            let mut request = Request::new(b"1".to_vec());
            let value = "m"
                .repeat(kilobytes << 10)
                .parse()
                .expect("visible characters");
            request.metadata_mut().insert("x-large", value);
            let call = caller.unary("/test.Echo/Unary", request);
            call.await.expect_err("refused")
        });
        assert_eq!(
            status.code(),
            Code::ResourceExhausted,
            "{kilobytes} KiB: {status:?}"
        );
    }
    gateway.wait_for_metric(r#"tidegate_requests_total{code="431"}"#, 3.0);
    eventually("its access lines", || {
        let lines = gateway.output();
        match lines.matches("\"headers_too_large\"").count() {
            3 => Ok(()),
            _ => Err(lines),
        }
    });
}
