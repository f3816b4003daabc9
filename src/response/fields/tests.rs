//! The shared buffer of responses, and the cached forms of rejections.

use std::num::NonZeroU64;

use http::{Response, Version};

use super::*;
use crate::{
    limit::Quota,
    response::{FieldsOn, tests::asked, too_many_requests},
};

/// The addresses of every value that a rejection took from the writer's buffer.
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
    let met = [LimitReport {
        policy: &policy,
        remaining: 0,
        available_ns: 7,
        reset_ns: 7,
        denied: true,
        never: false,
        closed: false,
    }];
    let denial = RejectedRequest::new(&met, Some(7));
    let fields = FieldFamilies {
        ratelimit: true,
        x_ratelimit: true,
        ..FieldFamilies::default()
    };
    let settings = ResponseSettings {
        fields,
        on: FieldsOn::Always,
        body: BodyStyle::ProblemJson,
        sdk: true,
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
        "a thousand responses in sequence reuse one buffer of 8 KiB"
    );

    let held: Vec<_> = (0..100).map(|_| answer()).collect();
    let bodies: std::collections::BTreeSet<&[u8]> =
        held.iter().map(|response| &response.body()[..]).collect();
    assert_eq!(
        bodies.len(),
        1,
        "responses that are still held are not overwritten"
    );
}

fn met(policy: &Policy, denied: bool) -> LimitReport<'_> {
    LimitReport {
        policy,
        remaining: u64::from(!denied),
        available_ns: 7,
        reset_ns: 7,
        denied,
        never: false,
        closed: false,
    }
}

/// The header lines of a rejection.
fn rejection(
    writer: &mut FieldWriter,
    met: &[LimitReport<'_>],
    wait_s: Option<u64>,
    body: BodyStyle,
    id: u64,
) -> Vec<String> {
    let settings = ResponseSettings {
        fields: FieldFamilies {
            ratelimit: true,
            ratelimit_triple: true,
            x_ratelimit: true,
            openai: false,
            anthropic: false,
        },
        on: FieldsOn::Always,
        body,
        sdk: true,
    };
    let denial = RejectedRequest::new(met, wait_s.map(|wait| wait * 1_000_000_000));
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
    let orders: [&[LimitReport<'_>]; 4] = [
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
