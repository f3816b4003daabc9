//! The request fields sent to a server: the client's end-to-end fields, then the gateway's (RFC
//! 9110 §7.6).
//!
//! The order is a security property. First, all hop-by-hop fields are removed, including those that
//! `Connection` names. Next, every field that only a trusted proxy may set is removed. Only then
//! are the gateway's fields written. So a client can neither forge nor remove a field that the
//! gateway vouches for (CVE-2022-31813 and similar).

use std::{fmt::Write as _, net::IpAddr};

use bytes::{BufMut, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{
        ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, TE, TRAILER,
        VIA,
    },
};

use super::{
    BodyFraming, SpareHeaderMap,
    abandoned::AbandonedExchanges,
    field_rules::{is_hop_by_hop, lists_token, may_be_named},
};
use crate::identity::{AddressSource, Client, ManagedFields};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
static TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
const X_REQUEST_PRIORITY: &str = "x-request-priority";

/// A request after the decision, with the information that the gateway adds.
#[derive(Debug)]
pub struct Outbound<'a> {
    /// As received.
    pub method: &'a Method,
    /// The normalized path with the query: exactly what was matched.
    pub target: &'a str,
    /// Framing of the body towards the server.
    pub framing: BodyFraming,
    /// As received, unchanged.
    pub headers: &'a HeaderMap,
    /// The authority in the client's request.
    pub host: &'a str,
    /// `http` or `https`, as the client used.
    pub scheme: &'static str,
    /// The client's HTTP version, for `Via`: `1.1`, `2.0`.
    pub via_version: &'static str,
    /// The client identity that limits use.
    pub client: &'a Client<'a>,
    /// Fields that only a trusted proxy may set.
    pub managed: &'a ManagedFields,
    /// The gateway's request ID, or the trusted proxy's.
    pub request_id: &'a HeaderValue,
    /// The gateway's name in `Via`.
    pub pseudonym: &'a str,
    /// Priority of its route, if not the default.
    pub priority: Option<&'static str>,
    /// Limits that the request exceeds, though it was admitted.
    pub over: &'a [&'a str],
    /// Whether the server may not compress its answer, because limits read it.
    pub uncompressed: bool,
    /// Whether it is a valid WebSocket handshake, to be forwarded as one.
    pub websocket: bool,
    /// The gateway's span, parent of the server's. `None` forwards the client's trace context
    /// unchanged.
    pub traced: Option<ContinuedTrace<'a>>,
    /// Receives the server's interim responses, if the client supports them.
    pub hears: Option<&'a dyn InterimSink>,
    /// Capacity for the response's fields.
    pub spare: &'a SpareHeaderMap,
    /// Keeps the exchange if it is abandoned before the response; `None` closes it.
    pub custody: Option<&'a AbandonedExchanges>,
}

/// A trace that continues beyond the gateway (W3C Trace Context §3).
#[derive(Clone, Copy, Debug)]
pub struct ContinuedTrace<'a> {
    /// The gateway's span.
    pub traceparent: &'a HeaderValue,
    /// The trace starts here: the client's trace context is not forwarded.
    pub is_root: bool,
}

/// Receives the interim responses of a server (RFC 9110 §15.2).
pub trait InterimSink: std::fmt::Debug {
    /// Queues one for the client, before the final response. `false` if there is no room.
    fn send_interim(&self, status: StatusCode, headers: &HeaderMap) -> bool;
}

impl Outbound<'_> {
    /// Forwards an interim response; `true` if the caller must yield for that. A 100 is dropped,
    /// since the server never receives `Expect`.
    pub(super) fn forward_interim(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        let hears = self.hears.filter(|_| status != StatusCode::CONTINUE);
        hears.is_some_and(|hears| hears.send_interim(status, headers))
    }
}

/// Writes the whole outbound head: line, fields, empty line. Allocates only when the buffer grows.
pub fn write_head(out: &mut BytesMut, request: &Outbound<'_>, host: &[u8]) {
    out.put_slice(request.method.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(request.target.as_bytes());
    out.put_slice(b" HTTP/1.1\r\nhost: ");
    out.put_slice(host);
    out.put_slice(b"\r\n");
    let seen = write_end_to_end(out, request);
    write_ours(out, request, &seen);
    match request.framing {
        BodyFraming::None => {}
        BodyFraming::Length(length) => put_field(
            out,
            "content-length",
            itoa::Buffer::new().format(length).as_bytes(),
        ),
        BodyFraming::Chunked => out.put_slice(b"transfer-encoding: chunked\r\n"),
    }
    if request.websocket {
        out.put_slice(b"connection: upgrade\r\nupgrade: websocket\r\n");
    } else if seen.te && lists_token(request.headers, &TE, "trailers") {
        out.put_slice(b"te: trailers\r\nconnection: te\r\n");
    }
    out.put_slice(b"\r\n");
}

/// Client fields that need further processing.
#[derive(Debug, Default)]
struct ClientFields {
    cookie: bool,
    te: bool,
    via: bool,
}

fn write_end_to_end(out: &mut BytesMut, request: &Outbound<'_>) -> ClientFields {
    let mut seen = ClientFields::default();
    let headers = request.headers;
    let lists_fields = headers.contains_key(CONNECTION);
    let trusted = request.client.peer_trusted;
    let identified = request.client.user.is_some();
    for (name, value) in headers {
        seen.cookie |= *name == COOKIE;
        seen.te |= *name == TE;
        seen.via |= *name == VIA;
        let skipped = is_hop_by_hop(name)
            || *name == HOST
            || *name == CONTENT_LENGTH
            || *name == EXPECT
            || *name == COOKIE
            || *name == VIA
            || is_rewritten(name)
            || *name == FORWARDED
            || is_framing_alias(name)
            || request.traced.is_some_and(|traced| {
                *name == TRACEPARENT || (traced.is_root && *name == TRACESTATE)
            })
            || (identified && is_identity(name))
            || (request.priority.is_some() && name == X_REQUEST_PRIORITY)
            || (request.uncompressed && *name == ACCEPT_ENCODING)
            || if trusted {
                request.managed.alias(name.as_str())
            } else {
                request.managed.contains(name.as_str())
            }
            || (lists_fields
                && may_be_named(name)
                && lists_token(headers, &CONNECTION, name.as_str()));
        if !skipped {
            put_field(out, name.as_str(), value.as_bytes());
        }
    }
    if seen.cookie {
        // HTTP/2 may split a cookie into crumbs; HTTP/1.1 needs one line (RFC 9113 §8.2.3)
        let crumbs = headers.get_all(COOKIE).iter();
        put_joined(out, "cookie", crumbs.map(HeaderValue::as_bytes), b"; ");
    }
    seen
}

/// `transfer_encoding` and similar: a server that maps `_` or `.` to `-` would use it for framing.
fn is_framing_alias(name: &HeaderName) -> bool {
    name.as_str()
        .bytes()
        .any(|byte| matches!(byte, b'_' | b'.'))
        && HeaderName::try_from(name.as_str().replace(['_', '.'], "-")).is_ok_and(|name| {
            is_hop_by_hop(&name) || [HOST, CONTENT_LENGTH, EXPECT, TRAILER].contains(&name)
        })
}

/// Fields that the gateway always rewrites.
fn is_rewritten(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "x-forwarded-for"
            | "x-forwarded-proto"
            | "x-forwarded-host"
            | "x-request-id"
            | "x-ratelimit-over"
    )
}

/// Fields that identify the user. If the user is known, the gateway's replace a trusted proxy's.
fn is_identity(name: &HeaderName) -> bool {
    matches!(name.as_str(), "x-user-id" | "x-rate-limit-tier")
}

fn write_ours(out: &mut BytesMut, request: &Outbound<'_>, seen: &ClientFields) {
    let client = request.client;
    let from_trusted = |name: &str| {
        client
            .peer_trusted
            .then(|| request.headers.get(name))
            .flatten()
    };
    put_addresses(out, request);
    put_field(
        out,
        "x-forwarded-proto",
        from_trusted("x-forwarded-proto").map_or(request.scheme.as_bytes(), HeaderValue::as_bytes),
    );
    let host =
        from_trusted("x-forwarded-host").map_or(request.host.as_bytes(), HeaderValue::as_bytes);
    if !host.is_empty() {
        put_field(out, "x-forwarded-host", host);
    }
    put_field(out, "x-request-id", request.request_id.as_bytes());
    if let Some(traced) = request.traced {
        put_field(out, "traceparent", traced.traceparent.as_bytes());
    }
    if let Some(user) = client.user {
        put_field(out, "x-user-id", user.as_bytes());
    }
    if let Some(tier) = client.tier {
        put_field(out, "x-rate-limit-tier", tier.as_bytes());
    }
    if request.uncompressed {
        put_field(out, ACCEPT_ENCODING.as_str(), b"identity");
    }
    if let Some(priority) = request.priority {
        put_field(out, X_REQUEST_PRIORITY, priority.as_bytes());
    }
    put_joined(
        out,
        "x-ratelimit-over",
        request.over.iter().map(|name| name.as_bytes()),
        b", ",
    );
    out.put_slice(b"via: ");
    if seen.via {
        for line in request.headers.get_all(VIA) {
            out.put_slice(line.as_bytes());
            out.put_slice(b", ");
        }
    }
    out.put_slice(request.via_version.as_bytes());
    out.put_u8(b' ');
    out.put_slice(request.pseudonym.as_bytes());
    out.put_slice(b"\r\n");
}

/// Extends the list that the trusted proxies maintain by the peer. The other list is dropped: a
/// client may have written it and the proxies passed it on. So the upstream never receives
/// contradictory lists (RFC 7239 §7.4).
fn put_addresses(out: &mut BytesMut, request: &Outbound<'_>) {
    let (client, source) = (request.client, request.managed.source());
    let kept = |name: &HeaderName, is_source: bool| {
        let believed = client.peer_trusted && is_source;
        let lines = believed.then(|| request.headers.get_all(name).into_iter());
        lines.into_iter().flatten()
    };
    let is_source = *source == AddressSource::XForwardedFor;
    out.put_slice(b"x-forwarded-for: ");
    for line in kept(&X_FORWARDED_FOR, is_source) {
        out.put_slice(line.as_bytes());
        out.put_slice(b", ");
    }
    if !is_source && client.address != client.peer {
        put_address(out, client.address);
        out.put_slice(b", ");
    }
    put_address(out, client.peer);
    out.put_slice(b"\r\n");
    if *source != AddressSource::Forwarded {
        return;
    }
    out.put_slice(b"forwarded: ");
    // a malformed line would invalidate the gateway's as well
    for line in kept(&FORWARDED, client.doubt.is_none()) {
        out.put_slice(line.as_bytes());
        out.put_slice(b", ");
    }
    let (before, after): (&[u8], &[u8]) = match client.peer {
        IpAddr::V4(_) => (b"for=", b""),
        IpAddr::V6(_) => (b"for=\"[", b"]\""),
    };
    out.put_slice(before);
    put_address(out, client.peer);
    out.put_slice(after);
    out.put_slice(b";proto=");
    out.put_slice(request.scheme.as_bytes());
    out.put_slice(b"\r\n");
}

fn put_field(out: &mut BytesMut, name: &str, value: &[u8]) {
    out.put_slice(name.as_bytes());
    out.put_slice(b": ");
    // HTTP/2 values may have white space at either end; HTTP/1.1 cannot carry it
    out.put_slice(value.trim_ascii());
    out.put_slice(b"\r\n");
}

fn put_joined<'a>(
    out: &mut BytesMut,
    name: &str,
    values: impl Iterator<Item = &'a [u8]>,
    separator: &[u8],
) {
    let mut empty = true;
    for value in values {
        if empty {
            out.put_slice(name.as_bytes());
            out.put_slice(b": ");
        } else {
            out.put_slice(separator);
        }
        empty = false;
        out.put_slice(value.trim_ascii());
    }
    if !empty {
        out.put_slice(b"\r\n");
    }
}

/// Same output as `Display`. IPv4 avoids its formatting machinery, which costs more than all other
/// fields.
fn put_address(out: &mut BytesMut, address: IpAddr) {
    let IpAddr::V4(address) = address else {
        return write!(out, "{address}").expect("BytesMut grows as needed");
    };
    for (place, octet) in address.octets().into_iter().enumerate() {
        if place > 0 {
            out.put_u8(b'.');
        }
        out.put_slice(itoa::Buffer::new().format(octet).as_bytes());
    }
}
