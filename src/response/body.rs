//! What our answers say in their bodies: problem+json (RFC 9457), plain JSON, or a line of text.
//!
//! Three problems have types of their own (draft-ietf-httpapi-ratelimit-headers-11 §6), with `violated-policies`: a quota is
//! exceeded, an operator has closed a limit to this client ("abnormal usage"), or capacity is reduced for a while (503).
//!
//! Extension members beside those of RFC 9457: `error` (a name that does not change), `request_id`, and on a rejection
//! `limit` (the first one that stopped the request) and `retry_after` (seconds; absent where no wait helps).

use bytes::{BufMut, Bytes, BytesMut};

use super::{Asked, BodyStyle, Denial, OwnQuota, Refusal, fields::put_number};
use crate::telemetry::json;

/// Nothing that goes into a body is longer: names come from the configuration, ids from us or a trusted proxy.
const VALUE_MAX_BYTES: usize = 1024;

/// The problem types of the draft, with their titles.
const QUOTA_EXCEEDED: (&str, &str) = (
    "https://iana.org/assignments/http-problem-types#quota-exceeded",
    "Quota Exceeded",
);
const ABNORMAL_USAGE: (&str, &str) = (
    "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
    "Abnormal Usage Detected",
);
const REDUCED_CAPACITY: (&str, &str) = (
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
    "Temporary Reduced Capacity",
);

/// The body of a refusal. One allocation.
pub(super) fn of_refusal(style: BodyStyle, refusal: &Refusal, asked: &Asked<'_>) -> Bytes {
    let mut out = BytesMut::with_capacity(384);
    let status = refusal.status();
    match style {
        BodyStyle::ProblemJson => {
            let (kind, title) = match refusal.is_temporary() {
                true => REDUCED_CAPACITY,
                // with `about:blank` the title is that of the status code (RFC 9457 §4.2.1)
                false => ("about:blank", status.canonical_reason().unwrap_or_default()),
            };
            put_type(&mut out, (kind, title), status.as_u16());
            put(&mut out, refusal.sentence());
            if let Refusal::LimitUnavailable { limit: Some(name) } = refusal {
                out.put_slice(b",\"violated-policies\":[");
                put(&mut out, name);
                out.put_u8(b']');
            }
            out.put_slice(b",\"error\":");
            put(&mut out, refusal.slug());
            put_request_id_and_end(&mut out, asked);
        }
        BodyStyle::Json => {
            out.put_slice(b"{\"error\":");
            put(&mut out, refusal.slug());
            out.put_slice(b",\"status\":");
            put_number(&mut out, u64::from(status.as_u16()));
            out.put_slice(b",\"message\":");
            put(&mut out, refusal.sentence());
            put_request_id_and_end(&mut out, asked);
        }
        BodyStyle::Text => {
            out.put_slice(refusal.sentence().as_bytes());
            out.put_u8(b'\n');
        }
    }
    out.freeze()
}

/// Appends the body of a rejection.
pub(super) fn put_denial(
    out: &mut BytesMut,
    style: BodyStyle,
    denial: &Denial<'_>,
    asked: &Asked<'_>,
) {
    let retry_after = denial.retry_after();
    let error = match denial.named() {
        Some(met) if met.closed => "limit_closed",
        Some(_) if retry_after.is_none() => "cost_exceeds_limit",
        _ => "rate_limited",
    };
    match style {
        BodyStyle::ProblemJson => {
            let closed = denial.named().is_some_and(|met| met.closed);
            put_type(
                out,
                if closed {
                    ABNORMAL_USAGE
                } else {
                    QUOTA_EXCEEDED
                },
                429,
            );
            out.put_u8(b'"');
            put_sentence(out, denial, retry_after, true);
            out.put_slice(b"\",\"violated-policies\":[");
            for (at, met) in denial.violated().enumerate() {
                if at > 0 {
                    out.put_u8(b',');
                }
                put(out, met.policy.name());
            }
            out.put_slice(b"],\"error\":");
            put_plain(out, error);
        }
        BodyStyle::Json => {
            out.put_slice(b"{\"error\":");
            put_plain(out, error);
            out.put_slice(b",\"status\":429,\"message\":\"");
            put_sentence(out, denial, retry_after, true);
            out.put_u8(b'"');
        }
        BodyStyle::Text => {
            put_sentence(out, denial, retry_after, false);
            return out.put_u8(b'\n');
        }
    }
    if let Some(met) = denial.named() {
        out.put_slice(b",\"limit\":");
        put(out, met.policy.name());
    }
    if let Some(seconds) = retry_after {
        out.put_slice(b",\"retry_after\":");
        put_number(out, u64::from(seconds));
    }
    put_request_id_and_end(out, asked);
}

/// `The limit per_ip (100/s, at most 200 at once) is spent. Try again in 3 s.` Of a limit that is not disclosed only
/// the wait is told.
fn put_sentence(out: &mut BytesMut, denial: &Denial<'_>, retry_after: Option<u32>, escaped: bool) {
    let (before, described, after) = match denial.named() {
        None => ("Too many requests.", "", ""),
        Some(met) if met.closed => (
            "The limit ",
            met.policy.described(),
            " is closed to this client.",
        ),
        Some(met) if retry_after.is_some() => ("The limit ", met.policy.described(), " is spent."),
        Some(met) => {
            let costs = "This request costs more than the limit ";
            (
                costs,
                met.policy.described(),
                " ever holds. It can never pass.",
            )
        }
    };
    out.put_slice(before.as_bytes());
    if escaped {
        json::put_escaped(out, described.as_bytes(), VALUE_MAX_BYTES);
    } else {
        out.put_slice(described.as_bytes());
    }
    out.put_slice(after.as_bytes());
    if let Some(seconds) = retry_after {
        out.put_slice(b" Try again in ");
        put_number(out, u64::from(seconds));
        out.put_slice(b" s.");
    }
}

/// The members that a problem begins with, up to the value of `detail`.
fn put_type(out: &mut BytesMut, (kind, title): (&'static str, &'static str), status: u16) {
    out.put_slice(b"{\"type\":");
    put_plain(out, kind);
    out.put_slice(b",\"title\":");
    put_plain(out, title);
    out.put_slice(b",\"status\":");
    put_number(out, u64::from(status));
    out.put_slice(b",\"detail\":");
}

fn put_request_id_and_end(out: &mut BytesMut, asked: &Asked<'_>) {
    if let Some(id) = asked.request_id {
        out.put_slice(b",\"request_id\":");
        json::put_string(out, id.as_bytes(), VALUE_MAX_BYTES);
    }
    out.put_slice(b"}\n");
}

/// Words of ours, in which nothing is to be escaped.
fn put_plain(out: &mut BytesMut, word: &'static str) {
    out.put_u8(b'"');
    out.put_slice(word.as_bytes());
    out.put_u8(b'"');
}

fn put(out: &mut BytesMut, text: &str) {
    json::put_string(out, text.as_bytes(), VALUE_MAX_BYTES);
}

/// The page with a caller's own quotas. One allocation, or a few where limits are many.
pub(super) fn of_quotas(quotas: &[OwnQuota<'_>], asked: &Asked<'_>) -> Bytes {
    let mut out = BytesMut::with_capacity(256 + 192 * quotas.len());
    out.put_slice(b"{\"limits\":[");
    for (at, quota) in quotas.iter().enumerate() {
        if at > 0 {
            out.put_u8(b',');
        }
        put_quota(&mut out, quota);
    }
    out.put_u8(b']');
    put_request_id_and_end(&mut out, asked);
    out.freeze()
}

fn put_quota(out: &mut BytesMut, own: &OwnQuota<'_>) {
    let policy = own.policy;
    out.put_slice(b"{\"name\":");
    put(out, policy.name());
    out.put_slice(b",\"description\":");
    put(out, policy.described());
    out.put_slice(b",\"quota\":");
    put_number(out, policy.quota());
    match policy.window() {
        Some(window) => {
            out.put_slice(b",\"window\":");
            put_number(out, window);
        }
        None => out.put_slice(b",\"unit\":\"concurrent-requests\""),
    }
    if let Some(met) = &own.stands {
        out.put_slice(b",\"remaining\":");
        put_number(out, met.remaining);
        if policy.window().is_some() {
            out.put_slice(b",\"reset\":");
            put_number(out, met.reset_ns.div_ceil(1_000_000_000));
        }
        if met.closed {
            out.put_slice(b",\"closed\":true");
        }
    }
    out.put_u8(b'}');
}
