//! What the SDKs of language models read: their header fields, and the error body of a 429.
//!
//! | family | fields | reset |
//! |---|---|---|
//! | `openai` | `x-ratelimit-limit-tokens`, `-remaining-`, `-reset-`, and the same with `requests` | `6m0s` from now |
//! | `anthropic` | `anthropic-ratelimit-tokens-limit`, `-remaining`, `-reset`, and with `requests` | RFC 3339 |
//!
//! Each family has the tightest limit on tokens and the tightest on requests. The upstream's fields
//! of the family are replaced, because they tell the state of the operator's own account.
//!
//! Both SDKs wait as long as `retry-after-ms` says before they try again; some versions ignore long
//! waits and try again at once. So a wait above [`LONGEST_RETRY_NS`] carries
//! `x-should-retry: false`, which all versions obey: the caller gets the error at once.

use std::time::{Duration, SystemTime};

use bytes::{BufMut, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{
    body::{put_plain, put_request_id, put_sentence},
    cost_terms::{CostTerms, CountedTokens, Sdk},
    json_text::put as put_text,
    policy::{INTEGER_MAX, LimitReport, NS_PER_SECOND, RejectedRequest, put_number},
    request_facts::RequestFacts,
    settings::ResponseSettings,
};
use crate::{cost::calendar::go_duration, telemetry};

/// The longest wait after which an SDK may try again by itself.
const LONGEST_RETRY_NS: u64 = 60 * NS_PER_SECOND;

const NS_PER_MS: u64 = 1_000_000;

static RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
static SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Limit, remaining and reset of one quantity.
type Triple = [HeaderName; 3];

static OPENAI_TOKENS: Triple = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
static OPENAI_REQUESTS: Triple = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
static ANTHROPIC_REQUESTS: Triple = [
    HeaderName::from_static("anthropic-ratelimit-requests-limit"),
    HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
    HeaderName::from_static("anthropic-ratelimit-requests-reset"),
];
static ANTHROPIC_TOKENS: [Triple; 3] = [
    [
        HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
        HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
        HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
    ],
    [
        HeaderName::from_static("anthropic-ratelimit-input-tokens-limit"),
        HeaderName::from_static("anthropic-ratelimit-input-tokens-remaining"),
        HeaderName::from_static("anthropic-ratelimit-input-tokens-reset"),
    ],
    [
        HeaderName::from_static("anthropic-ratelimit-output-tokens-limit"),
        HeaderName::from_static("anthropic-ratelimit-output-tokens-remaining"),
        HeaderName::from_static("anthropic-ratelimit-output-tokens-reset"),
    ],
];

/// The SDK of the limits that apply; `None` if `[response] sdk` is off.
fn sdk_of(settings: &ResponseSettings, report: &LimitReport<'_>) -> Option<Sdk> {
    let terms = report.policy.cost_terms().filter(|_| settings.sdk)?;
    terms.sdk
}

/// Adds the families to the fields of a response.
pub(super) fn put_families(
    headers: &mut HeaderMap,
    met: &[LimitReport<'_>],
    settings: &ResponseSettings,
    now: SystemTime,
) {
    let has = |sdk| met.iter().any(|met| sdk_of(settings, met) == Some(sdk));
    if settings.fields.openai || has(Sdk::OpenAi) {
        for names in [&OPENAI_TOKENS, &OPENAI_REQUESTS] {
            remove(headers, names);
        }
        put_openai(headers, met);
    }
    if settings.fields.anthropic || has(Sdk::Anthropic) {
        for names in ANTHROPIC_TOKENS.iter().chain([&ANTHROPIC_REQUESTS]) {
            remove(headers, names);
        }
        put_anthropic(headers, met, now);
    }
}

fn remove(headers: &mut HeaderMap, names: &'static Triple) {
    for name in names {
        headers.remove(name);
    }
}

fn put_openai(headers: &mut HeaderMap, met: &[LimitReport<'_>]) {
    let reset = |met: &LimitReport<'_>| text(&go_duration(met.reset_ns.div_ceil(NS_PER_MS)));
    if let Some(tightest) = tightest(met, is_tokens) {
        put(headers, &OPENAI_TOKENS, tightest, reset(tightest));
    }
    if let Some(tightest) = tightest(met, is_requests) {
        put(headers, &OPENAI_REQUESTS, tightest, reset(tightest));
    }
}

fn put_anthropic(headers: &mut HeaderMap, met: &[LimitReport<'_>], now: SystemTime) {
    let reset = |met: &LimitReport<'_>| {
        let since = now + Duration::from_nanos(met.reset_ns);
        // Whole seconds, rounded up.
        let moment = telemetry::moment(since + Duration::from_millis(999));
        let seconds = moment.get(..19).unwrap_or_default();
        text(&format!("{seconds}Z"))
    };
    let counted = [
        CountedTokens::All,
        CountedTokens::Input,
        CountedTokens::Output,
    ];
    for (names, counted) in ANTHROPIC_TOKENS.iter().zip(counted) {
        let counts = |met: &LimitReport<'_>| {
            let terms = met.policy.cost_terms();
            terms.is_some_and(|terms| terms.is_tokens() && terms.counted == counted)
        };
        if let Some(tightest) = tightest(met, counts) {
            put(headers, names, tightest, reset(tightest));
        }
    }
    if let Some(tightest) = tightest(met, is_requests) {
        put(headers, &ANTHROPIC_REQUESTS, tightest, reset(tightest));
    }
}

fn put(
    headers: &mut HeaderMap,
    names: &'static Triple,
    met: &LimitReport<'_>,
    reset: Option<HeaderValue>,
) {
    let [limit, remaining, at_reset] = names;
    headers.insert(limit, met.policy.limit().clone());
    let left = met.remaining.min(INTEGER_MAX);
    headers.insert(remaining, HeaderValue::from(left));
    if let Some(reset) = reset {
        headers.insert(at_reset, reset);
    }
}

fn text(value: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(value).ok()
}

fn is_tokens(met: &LimitReport<'_>) -> bool {
    met.policy.cost_terms().is_some_and(CostTerms::is_tokens)
}

/// Whether the limit counts requests per time.
fn is_requests(met: &LimitReport<'_>) -> bool {
    met.policy.cost_terms().is_none() && met.policy.window().is_some()
}

/// The limit with the least left among those of one kind.
fn tightest<'a, 'b>(
    met: &'a [LimitReport<'b>],
    is_kind: impl Fn(&LimitReport<'_>) -> bool,
) -> Option<&'a LimitReport<'b>> {
    let kind = met.iter().filter(|met| is_kind(met));
    kind.min_by_key(|met| met.remaining)
}

/// The SDK that reads the body of a denial: that of the limit that the body names.
pub(super) fn reader(denial: &RejectedRequest<'_>, settings: &ResponseSettings) -> Option<Sdk> {
    sdk_of(settings, denial.named()?)
}

/// Adds the fields by which SDKs decide whether and when to retry a 429.
pub(super) fn put_retry(
    headers: &mut HeaderMap,
    denial: &RejectedRequest<'_>,
    settings: &ResponseSettings,
) {
    if !denial.met.iter().any(|met| sdk_of(settings, met).is_some()) {
        return;
    }
    if let Some(wait_ns) = denial.retry_after_ns {
        headers.insert(
            &RETRY_AFTER_MS,
            HeaderValue::from(wait_ns.div_ceil(NS_PER_MS)),
        );
    }
    if denial
        .retry_after_ns
        .is_none_or(|wait_ns| wait_ns > LONGEST_RETRY_NS)
    {
        let never = const { HeaderValue::from_static("false") };
        headers.insert(&SHOULD_RETRY, never);
    }
}

/// Appends the error body of a 429 in the provider's form.
pub(super) fn put_denial(
    out: &mut BytesMut,
    sdk: Sdk,
    denial: &RejectedRequest<'_>,
    asked: &RequestFacts<'_>,
) {
    match sdk {
        Sdk::OpenAi => put_openai_error(out, denial, asked),
        Sdk::Anthropic => {
            out.put_slice(b"{\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\"");
            put_message(out, denial);
            put_limit(out, denial);
            out.put_u8(b'}');
            put_request_id(out, asked);
            out.put_slice(b"}\n");
        }
        Sdk::Gemini => {
            out.put_slice(b"{\"error\":{\"code\":429,\"status\":\"RESOURCE_EXHAUSTED\"");
            put_message(out, denial);
            out.put_slice(b",\"details\":[");
            if let Some(wait_ns) = denial.retry_after_ns {
                let ms = wait_ns.div_ceil(NS_PER_MS);
                let wait = format!("{}.{:03}s", ms / 1_000, ms % 1_000);
                out.put_slice(b"{\"@type\":\"type.googleapis.com/google.rpc.RetryInfo\"");
                out.put_slice(b",\"retryDelay\":");
                put_text(out, &wait);
                out.put_u8(b'}');
            }
            out.put_slice(b"]}}\n");
        }
    }
}

fn put_openai_error(out: &mut BytesMut, denial: &RejectedRequest<'_>, asked: &RequestFacts<'_>) {
    let terms = denial.named().and_then(|met| met.policy.cost_terms());
    let is_budget = terms.is_some_and(|terms| terms.is_budget);
    out.put_slice(b"{\"error\":{\"type\":");
    match terms.filter(|_| !is_budget) {
        Some(terms) => put_text(out, &terms.unit),
        None => put_plain(out, "insufficient_quota"),
    }
    put_message(out, denial);
    out.put_slice(b",\"param\":null,\"code\":");
    put_plain(
        out,
        match is_budget {
            true => "insufficient_quota",
            false => "rate_limit_exceeded",
        },
    );
    put_limit(out, denial);
    put_request_id(out, asked);
    out.put_slice(b"}}\n");
}

fn put_message(out: &mut BytesMut, denial: &RejectedRequest<'_>) {
    out.put_slice(b",\"message\":\"");
    put_sentence(out, denial, true);
    out.put_u8(b'"');
}

fn put_limit(out: &mut BytesMut, denial: &RejectedRequest<'_>) {
    if let Some(met) = denial.named() {
        out.put_slice(b",\"limit\":\"");
        out.put_slice(met.policy.name_in_json());
        out.put_u8(b'"');
    }
    if let Some(seconds) = denial.retry_after() {
        out.put_slice(b",\"retry_after\":");
        put_number(out, u64::from(seconds));
    }
}

#[cfg(test)]
mod tests;
