//! Refusals, each with its head and body, and the buffer that answers share.

use std::num::NonZeroU64;

use serde_json::{Value, json};

use super::*;
use crate::limit::Quota;

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

fn asked(version: Version, id: &HeaderValue) -> Asked<'_> {
    Asked {
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
    let head = Asked {
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

/// The addresses of everything that a rejection took from the writer's buffer.
fn addresses(response: &Response<Bytes>) -> Vec<usize> {
    let values = ["ratelimit", "x-ratelimit-reset", "retry-after"]
        .map(|name| response.headers()[name].as_bytes());
    values
        .into_iter()
        .chain([&response.body()[..]])
        .map(|bytes| bytes.as_ptr().addr())
        .collect()
}

#[test]
fn answers_that_have_left_give_their_memory_to_the_next() {
    let one = NonZeroU64::MIN;
    let quota = Quota {
        amount: one,
        period: std::time::Duration::from_secs(1),
        burst: one,
    };
    let policy = Policy::compile("p", &quota).expect("the name is printable");
    let met = [Met {
        policy: &policy,
        remaining: 0,
        next_unit_ns: 7,
        reset_ns: 7,
        denied: true,
        never: false,
        closed: false,
    }];
    let denial = Denial::new(&met, Some(7));
    let fields = FieldFamilies {
        ratelimit: true,
        x_ratelimit: true,
        ..FieldFamilies::default()
    };
    let settings = Settings {
        fields,
        on: FieldsOn::Always,
        body: BodyStyle::ProblemJson,
    };
    let id = HeaderValue::from_static("1");
    let mut writer = FieldWriter::new();
    let mut answer = || {
        too_many_requests(
            &denial,
            &asked(Version::HTTP_11, &id),
            &settings,
            &mut writer,
            SystemTime::UNIX_EPOCH,
        )
    };

    let seen: std::collections::BTreeSet<usize> =
        (0..1000).flat_map(|_| addresses(&answer())).collect();
    let (first, last) = (
        seen.first().expect("answers were made"),
        seen.last().expect("answers were made"),
    );
    assert!(
        last - first < 8 * 1024,
        "a thousand answers fit one buffer of 8 KiB, one after another"
    );

    let held: Vec<_> = (0..100).map(|_| answer()).collect();
    let bodies: std::collections::BTreeSet<&[u8]> =
        held.iter().map(|response| &response.body()[..]).collect();
    assert_eq!(
        bodies.len(),
        1,
        "answers that are still on their way are not written over"
    );
}

fn met(policy: &Policy, denied: bool) -> Met<'_> {
    Met {
        policy,
        remaining: u64::from(!denied),
        next_unit_ns: 7,
        reset_ns: 7,
        denied,
        never: false,
        closed: false,
    }
}

/// The lines of a rejection's head.
fn rejection(
    writer: &mut FieldWriter,
    met: &[Met<'_>],
    wait_s: Option<u64>,
    body: BodyStyle,
    id: u64,
) -> Vec<String> {
    let settings = Settings {
        fields: FieldFamilies {
            ratelimit: true,
            ratelimit_triple: true,
            x_ratelimit: true,
        },
        on: FieldsOn::Always,
        body,
    };
    let denial = Denial::new(met, wait_s.map(|wait| wait * 1_000_000_000));
    let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(id);
    let id = HeaderValue::from(id);
    let asked = asked(Version::HTTP_11, &id);
    let answer = too_many_requests(&denial, &asked, &settings, writer, now);
    let lines = answer.headers().iter();
    lines
        .map(|(name, value)| format!("{name}: {value:?}"))
        .collect()
}

#[test]
fn a_form_that_is_filled_in_again_says_what_has_changed_and_nothing_else() {
    let quota = Quota {
        amount: NonZeroU64::MIN,
        period: std::time::Duration::from_secs(1),
        burst: NonZeroU64::MIN,
    };
    let [one, other] = ["one", "other"].map(|name| Policy::compile(name, &quota).expect("ASCII"));
    let orders: [&[Met<'_>]; 4] = [
        &[met(&one, true), met(&other, false)],
        &[met(&other, true), met(&one, false)],
        &[met(&one, true)],
        &[],
    ];
    let mut experienced = FieldWriter::new();
    for id in 1..=3 {
        for met in orders {
            for wait_s in [Some(id), None] {
                for style in [BodyStyle::ProblemJson, BodyStyle::Text] {
                    let head = rejection(&mut experienced, met, wait_s, style, id);
                    let new = rejection(&mut FieldWriter::new(), met, wait_s, style, id);
                    assert_eq!(head, new);
                    assert_eq!(head[2], format!("x-request-id: \"{id}\""));
                    let families = 8 * usize::from(!met.is_empty());
                    assert_eq!(head.len(), 3 + usize::from(wait_s.is_some()) + families);
                }
            }
        }
    }
}
