//! Requirements that depend on an origin's behavior: the client's input, the origin's, and the
//! outcome. They need a script on both sides, so they are tests rather than vectors in a file. This
//! list fails if a test that it names is missing.

/// Client sends / upstream sends / expected; and the tests that show it, as `file::test`.
const CASES: &[(&str, &[&str])] = &[
    (
        "Connection names X-Forwarded-For, from a trusted peer / - / the upstream still gets ours",
        &["proxy/headers::connection_cannot_remove_what_the_origin_relies_on"],
    ),
    (
        "Connection: X-Foo / - / no X-Foo upstream",
        &["proxy/headers::hop_by_hop_fields_of_a_request_end_here"],
    ),
    (
        "TE: trailers over HTTP/2 / - / te: trailers upstream",
        &[
            "proxy/headers::http2_becomes_http1_at_the_origin",
            "proxy/http2_servers::a_request_is_told_in_http2_whatever_the_client_spoke",
        ],
    ),
    (
        "two cookie fields over HTTP/2 / - / one Cookie over HTTP/1.1",
        &["proxy/headers::http2_becomes_http1_at_the_origin"],
    ),
    (
        "X_Forwarded_For, X.Forwarded.For / - / neither reaches the upstream",
        &["proxy/headers::names_that_look_like_ours_to_the_origin_do_not_pass"],
    ),
    (
        "HTTP/1.0 GET / 103 then 200 / only 200",
        &["proxy/interim::clients_that_cannot_have_hints_get_the_answer_alone"],
    ),
    (
        "HTTP/1.1 GET / 103 then 200 / 103, 200",
        &[
            "proxy/interim::hints_arrive_before_the_answer_is_there",
            "proxy/interim::each_of_pipelined_requests_has_its_own_hints",
        ],
    ),
    (
        "HEAD / 200 with a length and a body / no body, the connection not reused",
        &["proxy/responses::head_204_and_304_have_no_body_whatever_their_length_says"],
    ),
    (
        "GET / 204 with a length and a body / 204 with neither, not reused",
        &["proxy/responses::head_204_and_304_have_no_body_whatever_their_length_says"],
    ),
    (
        "GET / 304 with a length / 304 without a body",
        &["proxy/responses::head_204_and_304_have_no_body_whatever_their_length_says"],
    ),
    (
        "GET / length and chunks / 502, or the chunks alone; not reused",
        &["proxy/responses::an_answer_with_two_framings_is_502_or_only_chunked"],
    ),
    (
        "GET / two lengths that differ / 502",
        &["proxy/responses::an_answer_that_is_framed_in_doubt_is_502"],
    ),
    (
        "GET / the same length twice / it once",
        &["proxy/responses::equal_lengths_become_one"],
    ),
    (
        "GET / fewer bytes than the length, then the end / a broken response",
        &["proxy/failures::a_body_cut_short_never_ends_cleanly"],
    ),
    (
        "GET / chunks, cut / no last chunk to the client, a reset over HTTP/2",
        &[
            "proxy/failures::a_body_cut_short_never_ends_cleanly",
            "proxy/http2_servers::a_body_that_breaks_off_never_ends_cleanly",
        ],
    ),
    (
        "GET / an answer and more bytes / the bytes never delivered",
        &["proxy/responses::bytes_after_an_answer_are_never_an_answer"],
    ),
    (
        "GET / 101 unasked / 502",
        &[
            "proxy/responses::an_upgrade_that_nobody_asked_for_is_502",
            "proxy/websockets::a_101_that_answers_nothing_is_502",
        ],
    ),
    (
        "GET / status 099, 600, HTTP/0.9 / 502",
        &["proxy/responses::what_is_not_an_http_answer_is_502"],
    ),
    (
        "GET / gzip, chunked / 502",
        &["proxy/responses::an_answer_that_is_framed_in_doubt_is_502"],
    ),
    (
        "GET / nothing for longer than the timeout / 504 without Retry-After, the connection closed",
        &["proxy/failures::a_slow_origin_is_504_after_the_response_timeout"],
    ),
    (
        "GET / refuses the connection / 502, or 503 where no server is healthy",
        &[
            "proxy/failures::an_origin_that_is_not_there_is_502",
            "upstreams/failing::an_upstream_that_keeps_failing_is_refused_at_once_and_tried_again",
        ],
    ),
    (
        "a large POST over the limit / - / 429 at once, no 100, closed, the upstream untouched",
        &["proxy/bounds::a_rejected_upload_is_answered_without_its_body"],
    ),
    (
        "a chunked POST over the bound / - / 413 after the bound, no complete request upstream",
        &["proxy/bounds::a_chunked_body_over_the_bound_is_413_and_never_completes"],
    ),
    (
        "the handshake of a WebSocket / 101 / a tunnel both ways that holds its slot",
        &[
            "proxy/websockets::a_websocket_passes_in_both_directions",
            "proxy/websockets::a_websocket_holds_its_slot_until_it_ends",
        ],
    ),
    (
        "a stream that is reset / a slow answer / the upstream cancelled, then the slot freed",
        &[
            "proxy/failures::a_stream_that_is_reset_takes_its_request_with_it",
            "http2_abuse::a_rapid_reset_is_charged_and_ends_the_connection",
        ],
    ),
    (
        "two pipelined requests at a limit of one / - / 200 then 429, in order",
        &["proxy/connections::of_two_pipelined_requests_the_one_over_the_limit_is_rejected"],
    ),
];

#[test]
fn every_case_that_takes_an_origin_has_its_tests() {
    assert_eq!(CASES.len(), 26, "the number of duties");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it");
    for (case, tests) in CASES {
        assert!(!tests.is_empty(), "{case}");
        for test in *tests {
            let (file, name) = test.split_once("::").expect("a file and a test");
            let path = format!("{folder}/{file}.rs");
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
            let test = format!("#[test]\nfn {name}() {{");
            assert!(text.contains(&test), "{case}: there is no {name} in {path}");
        }
    }
}
