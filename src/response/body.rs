//! Bodies of tidegate's own responses: problem+json (RFC 9457), plain JSON, or a line of text.
//!
//! Three problems have their own types, with `violated-policies`
//! (draft-ietf-httpapi-ratelimit-headers-11 §6): a quota is exceeded, an operator has blocked this
//! client ("abnormal usage"), or capacity is temporarily reduced (503).
//!
//! Extension members beside those of RFC 9457: `error` (a stable name) and `request_id`. A
//! rejection by a limit also has `limit` (the first limit that rejected the request) and
//! `retry_after` (seconds; absent if waiting does not help).

use bytes::{BufMut, Bytes, BytesMut};
use http::StatusCode;

use super::{
    json_text::{VALUE_MAX_BYTES, put},
    policy::{LimitReport, Policy, RejectedRequest, put_number},
    refusal::Refusal,
    request_facts::RequestFacts,
    settings::BodyStyle,
};
use crate::telemetry::json;

/// The start of each problem of the draft, up to the value of `detail`.
const QUOTA_EXCEEDED: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,"detail":"#;
const ABNORMAL_USAGE: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#abnormal-usage-detected","title":"Abnormal Usage Detected","status":429,"detail":"#;
const REDUCED_CAPACITY: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":503,"detail":"#;

/// The body of a refusal. Allocates once.
pub(super) fn of_refusal(style: BodyStyle, refusal: &Refusal, asked: &RequestFacts<'_>) -> Bytes {
    let mut out = BytesMut::with_capacity(384);
    let status = refusal.status();
    match style {
        BodyStyle::ProblemJson => {
            match refusal.is_temporary() {
                true => out.put_slice(REDUCED_CAPACITY.as_bytes()),
                false => put_blank(&mut out, status),
            }
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

/// Appends the body of a rejection by a limit.
pub(super) fn put_denial(
    out: &mut BytesMut,
    style: BodyStyle,
    denial: &RejectedRequest<'_>,
    asked: &RequestFacts<'_>,
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
            let begins = if closed {
                ABNORMAL_USAGE
            } else {
                QUOTA_EXCEEDED
            };
            out.put_slice(begins.as_bytes());
            out.put_u8(b'"');
            put_sentence(out, denial, true);
            out.put_slice(b"\",\"violated-policies\":[");
            for (at, met) in denial.violated().enumerate() {
                if at > 0 {
                    out.put_u8(b',');
                }
                put_name(out, met.policy);
            }
            out.put_slice(b"],\"error\":");
            put_plain(out, error);
        }
        BodyStyle::Json => {
            out.put_slice(b"{\"error\":");
            put_plain(out, error);
            out.put_slice(b",\"status\":429,\"message\":\"");
            put_sentence(out, denial, true);
            out.put_u8(b'"');
        }
        BodyStyle::Text => {
            put_sentence(out, denial, false);
            return out.put_u8(b'\n');
        }
    }
    if let Some(met) = denial.named() {
        out.put_slice(b",\"limit\":");
        put_name(out, met.policy);
    }
    if let Some(seconds) = retry_after {
        out.put_slice(b",\"retry_after\":");
        put_number(out, u64::from(seconds));
    }
    put_request_id_and_end(out, asked);
}

/// `The limit per_ip (100/s, at most 200 at once) is exceeded. Try again in 3 s.` If the limit is
/// not disclosed, the text has only the wait.
pub(super) fn put_sentence(out: &mut BytesMut, denial: &RejectedRequest<'_>, in_json: bool) {
    let retry_after = denial.retry_after();
    let (before, after) = match denial.named() {
        None => ("Too many requests.", ""),
        Some(met) if met.closed => ("The limit ", " blocks this client."),
        Some(_) if retry_after.is_some() => ("The limit ", " is exceeded."),
        Some(_) => {
            let costs = "This request costs more than the limit ";
            (costs, " allows. It can never be admitted.")
        }
    };
    out.put_slice(before.as_bytes());
    if let Some(met) = denial.named() {
        out.put_slice(match in_json {
            true => met.policy.described_in_json(),
            false => met.policy.described().as_bytes(),
        });
    }
    out.put_slice(after.as_bytes());
    if let Some(seconds) = retry_after {
        out.put_slice(b" Try again in ");
        put_number(out, u64::from(seconds));
        out.put_slice(b" s.");
    }
}

/// Starts a problem without its own type. Its title is that of the status code (RFC 9457 §4.2.1).
fn put_blank(out: &mut BytesMut, status: StatusCode) {
    out.put_slice(b"{\"type\":\"about:blank\",\"title\":");
    put_plain(out, status.canonical_reason().unwrap_or_default());
    out.put_slice(b",\"status\":");
    put_number(out, u64::from(status.as_u16()));
    out.put_slice(b",\"detail\":");
}

fn put_request_id_and_end(out: &mut BytesMut, asked: &RequestFacts<'_>) {
    put_request_id(out, asked);
    out.put_slice(b"}\n");
}

/// The member `request_id`, if there is an ID.
pub(super) fn put_request_id(out: &mut BytesMut, asked: &RequestFacts<'_>) {
    if let Some(id) = asked.request_id {
        out.put_slice(b",\"request_id\":");
        json::put_string(out, id.as_bytes(), VALUE_MAX_BYTES);
    }
}

/// A fixed word that needs no escaping.
pub(super) fn put_plain(out: &mut BytesMut, word: &'static str) {
    out.put_u8(b'"');
    out.put_slice(word.as_bytes());
    out.put_u8(b'"');
}

fn put_name(out: &mut BytesMut, policy: &Policy) {
    out.put_u8(b'"');
    out.put_slice(policy.name_in_json());
    out.put_u8(b'"');
}

/// One limit on the page that shows a caller's quotas.
#[derive(Clone, Copy, Debug)]
pub struct OwnQuota<'a> {
    /// The limit, for the client's tier.
    pub policy: &'a Policy,
    /// The limit's current state; `None` if it depends on the request target.
    pub stands: Option<LimitReport<'a>>,
}

/// The body of the page that shows a caller's quotas. Allocates once, or a few times if there are
/// many limits.
pub(super) fn of_quotas(quotas: &[OwnQuota<'_>], asked: &RequestFacts<'_>) -> Bytes {
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
    put_name(out, policy);
    out.put_slice(b",\"description\":\"");
    out.put_slice(policy.described_in_json());
    out.put_slice(b"\",\"quota\":");
    put_number(out, policy.quota());
    if let Some(terms) = policy.cost_terms() {
        out.put_slice(b",\"unit\":");
        put(out, &terms.unit);
    }
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
