//! Refusals with their heads and bodies.

use serde_json::{Value, json};

use super::*;

const EVERY: [Refusal; 17] = [
    Refusal::BadRequest("The Host field is missing."),
    Refusal::Unauthorized {
        challenge: "ApiKey",
    },
    Refusal::NotFound,
    Refusal::MethodNotAllowed {
        allow: HeaderValue::from_static("GET, POST"),
    },
    Refusal::RequestTimeout,
    Refusal::BodyTooLarge,
    Refusal::UriTooLong,
    Refusal::Misdirected,
    Refusal::HeadersTooLarge,
    Refusal::NotImplemented("CONNECT is not offered."),
    Refusal::UpstreamUnreachable,
    Refusal::UpstreamProtocol,
    Refusal::UpstreamBusy,
    Refusal::Overloaded,
    Refusal::UpstreamTimeout,
    Refusal::LoopDetected,
    Refusal::Internal,
];

pub(super) fn asked(version: Version, id: &HeaderValue) -> RequestFacts<'_> {
    RequestFacts {
        is_head: false,
        version,
        request_id: Some(id),
        grpc: None,
    }
}

#[test]
fn every_refusal_is_traceable_never_cached_and_says_its_status_twice() {
    let id = HeaderValue::from_static("r\"1");
    for refusal in &EVERY {
        let response = refuse(
            refusal,
            &asked(Version::HTTP_11, &id),
            BodyStyle::ProblemJson,
        );
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert_eq!(
            response.headers()["content-type"],
            "application/problem+json"
        );
        assert_eq!(response.headers()["x-request-id"], "r\"1");
        let body: Value = serde_json::from_slice(response.body()).expect("it is JSON");
        let status = response.status();
        let (kind, title) = match status.as_u16() {
            503 => (
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "Temporary Reduced Capacity",
            ),
            _ => (
                "about:blank",
                status.canonical_reason().expect("it has one"),
            ),
        };
        let expected = json!({
            "type": kind, "title": title, "status": status.as_u16(),
            "detail": refusal.sentence(), "error": refusal.slug(), "request_id": "r\"1",
        });
        assert_eq!(body, expected);
        assert!(
            status.is_client_error() || status.is_server_error(),
            "{status}"
        );
        assert!(refusal.sentence().ends_with('.'));
    }
}

#[test]
fn slugs_are_distinct_names() {
    let slugs: std::collections::BTreeSet<_> = EVERY.iter().map(Refusal::slug).collect();
    assert_eq!(slugs.len(), EVERY.len());
    assert!(slugs.iter().all(|slug| {
        slug.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    }));
}

#[test]
fn connection_closes_where_framing_is_in_doubt_and_only_in_http_1() {
    let id = HeaderValue::from_static("1");
    for refusal in &EVERY {
        let close = |version| {
            refuse(refusal, &asked(version, &id), BodyStyle::Json)
                .headers()
                .contains_key(CONNECTION)
        };
        assert_eq!(close(Version::HTTP_11), refusal.closes());
        assert_eq!(close(Version::HTTP_10), refusal.closes());
        assert!(!close(Version::HTTP_2));
    }
    assert!(Refusal::BadRequest("x").closes() && Refusal::RequestTimeout.closes());
    assert!(!Refusal::NotFound.closes() && !Refusal::UpstreamTimeout.closes());
}

#[test]
fn refusals_that_can_be_mended_say_how() {
    let id = HeaderValue::from_static("1");
    let [_, unauthorized, _, not_allowed, ..] = &EVERY;
    let head = |refusal| {
        refuse(refusal, &asked(Version::HTTP_11, &id), BodyStyle::Text)
            .into_parts()
            .0
            .headers
    };
    assert_eq!(head(unauthorized)["www-authenticate"], "ApiKey");
    assert_eq!(head(not_allowed)["allow"], "GET, POST");
    assert_eq!(head(&Refusal::UpstreamBusy)["retry-after"], "1");
    assert_eq!(head(&Refusal::Overloaded)["retry-after"], "1");
}

#[test]
fn head_gets_no_body_and_plain_styles_are_short() {
    let id = HeaderValue::from_static("1");
    let head = RequestFacts {
        is_head: true,
        ..asked(Version::HTTP_11, &id)
    };
    assert!(
        refuse(&Refusal::NotFound, &head, BodyStyle::ProblemJson)
            .body()
            .is_empty()
    );
    let text = refuse(
        &Refusal::NotFound,
        &asked(Version::HTTP_11, &id),
        BodyStyle::Text,
    );
    assert_eq!(text.body(), "No route matches this request.\n");
    let json = refuse(
        &Refusal::NotFound,
        &asked(Version::HTTP_11, &id),
        BodyStyle::Json,
    );
    let body: Value = serde_json::from_slice(json.body()).expect("it is JSON");
    assert_eq!(
        body,
        json!({"error": "not_found", "status": 404, "message": "No route matches this request.", "request_id": "1"})
    );
}

#[test]
fn request_id_that_is_not_text_leaves_the_body_valid() {
    let id = HeaderValue::from_bytes(b"\xff\xfe").expect("obs-text is allowed");
    let response = refuse(
        &Refusal::Internal,
        &asked(Version::HTTP_11, &id),
        BodyStyle::ProblemJson,
    );
    let body: Value = serde_json::from_slice(response.body()).expect("it is JSON");
    assert_eq!(body["request_id"], "\u{fffd}\u{fffd}");
}
