//! What our answers say in their bodies: problem+json (RFC 9457), plain JSON, or a line of text.
//!
//! Extension members beside those of RFC 9457: `error` (a name that does not change), `request_id`, and on a rejection
//! `limit` (the first one that stopped the request) and `retry_after` (seconds; absent where no wait helps).

use bytes::{BufMut, Bytes, BytesMut};

use super::{Asked, BodyStyle, Denial, Refusal, fields::put_number};
use crate::telemetry::json;

/// Nothing that goes into a body is longer: names come from the configuration, ids from us or a trusted proxy.
const VALUE_MAX_BYTES: usize = 1024;

/// The body of a refusal. One allocation.
pub(super) fn of_refusal(style: BodyStyle, refusal: &Refusal, asked: &Asked<'_>) -> Bytes {
    let mut out = BytesMut::with_capacity(256);
    let status = refusal.status();
    match style {
        BodyStyle::ProblemJson => {
            // with `about:blank` the title is that of the status code (RFC 9457 §4.2.1)
            out.put_slice(b"{\"type\":\"about:blank\",\"title\":");
            put(&mut out, status.canonical_reason().unwrap_or_default());
            out.put_slice(b",\"status\":");
            put_number(&mut out, u64::from(status.as_u16()));
            out.put_slice(b",\"detail\":");
            put(&mut out, refusal.sentence());
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
            out.put_slice(
                b"{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\
                  \"title\":\"Quota Exceeded\",\"status\":429,\"detail\":\"",
            );
            put_sentence(out, denial, retry_after, true);
            out.put_slice(b"\",\"violated-policies\":[");
            for (at, met) in denial.violated().enumerate() {
                if at > 0 {
                    out.put_u8(b',');
                }
                put(out, met.policy.name());
            }
            out.put_slice(b"],\"error\":");
            put(out, error);
        }
        BodyStyle::Json => {
            out.put_slice(b"{\"error\":");
            put(out, error);
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

fn put_request_id_and_end(out: &mut BytesMut, asked: &Asked<'_>) {
    if let Some(id) = asked.request_id {
        out.put_slice(b",\"request_id\":");
        json::put_string(out, id.as_bytes(), VALUE_MAX_BYTES);
    }
    out.put_slice(b"}\n");
}

fn put(out: &mut BytesMut, text: &str) {
    json::put_string(out, text.as_bytes(), VALUE_MAX_BYTES);
}
